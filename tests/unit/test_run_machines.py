"""docs/machines.md says what the records say, in ratios that can be checked by hand; the pages beside it hold, too."""

import inspect
import json
import re
import sys
from types import SimpleNamespace

import pytest
import yaml

from ondevice import assets, evidence
from ondevice.evidence import Recorder
from ondevice.run import plan
from ondevice_studies import machines, record


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Records of a test's own."""
    real = assets.data
    monkeypatch.setattr(assets, "data", lambda *parts: tmp_path if parts == ("records",) else real(*parts))
    monkeypatch.setenv(assets.CACHE_VARIABLE, str(tmp_path / "cache"))


def recorded(paper, name, machine, keys, rows):
    run = Recorder(paper, name, keys, {}, machine=machine)
    run.add(rows)
    run.finish()


def test_the_page_is_that_of_the_records():
    text = (assets.ROOT / "docs" / "machines.md").read_text(encoding="utf-8")
    assert machines.written(text) == text, "run python -m ondevice_studies.machines"


def test_every_record_of_a_machine_is_whole():
    """Those that others contribute, too: checksums, sidecars and names."""
    names = [name for name in json.loads((machines.folder() / "manifest.json").read_text()) if name.endswith(".csv")]
    assert sorted(names) == sorted(
        str(path.relative_to(machines.folder())) for path in machines.folder().glob("*/*.csv")
    )
    for name in names:
        paper, _, file = name.partition("/")
        table = evidence.load(paper, file.removesuffix(".csv"))
        assert len(table) and file.split(".")[1] == table.attrs["sidecar"]["machine"]


def test_a_cost_curve_is_over_one_row_with_the_ends_of_both_medians(home):
    about = {"model": "smollm2-135m-instruct", "threads": 2, "weights": "4bit", "arithmetic": "float32",
             "rows_alone": "alone", "run": 1, "cached": 256}  # fmt: skip
    rows = [about | {"rows": rows, "seconds": seconds, "low": seconds - 0.5, "high": seconds + 1.0, "n": n}
            for rows, seconds, n in ((1, 2.0, 9), (8, 3.0, 9), (33, 8.0, 3))]  # fmt: skip
    rows += [one | {"cached": 64, "seconds": 99.0} for one in rows]
    rows += [one | {"run": 2, "seconds": 99.0} for one in rows] + [one | {"arithmetic": "int8"} for one in rows]
    recorded("diaa", "formats", "zen9-2c", ["arithmetic", "run", "cached", "rows"], rows)
    assert dict(machines.curves("zen9-2c")) == {
        "smollm2-135m-instruct, 4 bits, two threads: 8 rows": "1.50 [0.83, 2.67]",
        "smollm2-135m-instruct, 4 bits, two threads: 32 or 33 rows": "4.00",
    }  # fmt: skip
    assert dict(machines.curves("another")) == {}


def test_speeds_are_above_one_where_faster_and_memory_where_larger(home):
    recorded("disco", "router", "m0", ["way", "block"],
             [{"way": way, "block": block, "request": 0, "seconds": seconds * (1 + block % 2)}
              for way, seconds in (("direct", 1.0), ("router", 4.0)) for block in range(6)])  # fmt: skip
    runs = [{"documents": 20, "tokens": 128, "round": turn, "method": method, "rule": rule, "k": 10, "seconds": seconds}
            for turn in range(5) for method, rule, seconds in (("HF", "", 6.0), ("GRATING", "", 2.0))]  # fmt: skip
    recorded("grating", "latency", "m0", ["round", "method", "rule"], runs)
    recorded("grating", "memory", "m0", ["method"],
             [{"documents": 20, "tokens": 128, "run": 0, "method": method, "rss_mb": megabytes}
              for method, megabytes in (("HF", 900.0), ("GRATING", 90.0))])  # fmt: skip
    found = {section: dict(machines.compared("m0", section)) for section in (machines.SPEED, machines.MEMORY)}
    assert found == {
        machines.SPEED: {"GRATING, a ranking over transformers: GRATING": "3.00 [3.00, 3.00]"},
        machines.MEMORY: {"Peak over GRATING's, 20 x 128 tokens: HF": "10.00"},
    }
    assert dict(machines.compared("m0", machines.ROUTER)) == {
        "First token over a direct one: router": "4.00 [4.00, 4.00]"
    }


def test_the_page_on_gpus_names_the_models_of_the_paper_parameters():
    text = (assets.ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    files = sorted((assets.ROOT / "notebooks" / "params").glob("*.paper.yaml"))
    values = {path.name.split(".")[0]: yaml.safe_load(path.read_text()) for path in files}
    named = {paper: parameters["model"] for paper, parameters in values.items()}
    assert dict(re.findall(r"^\| `(\w+)` \| `(\S+)` \|", text, re.M)) == named


def test_the_script_for_slurm_calls_what_there_is(monkeypatch):
    """Without a cluster: its imports, the parameters of its runs and the arguments of its calls."""
    text = (assets.ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    [script] = re.findall(r"```python\n(.*?)```", text, re.S)
    monkeypatch.setitem(sys.modules, "dask_jobqueue", SimpleNamespace(SLURMCluster=None))
    names = {"__name__": "imported"}
    exec(compile(script, "slurm.py", "exec"), names)
    assert names["shared"] is record.shared and names["JOBS"]
    inspect.signature(record.shared).bind("dragon", ["--only", "windows"], None, names["JOBS"])
    [papers, settings] = re.search(r"run\.plan\((\[.*?\]), settings=(\[.*?\])\)", script).groups()
    assert len(plan(yaml.safe_load(papers), settings=yaml.safe_load(settings))) == 8

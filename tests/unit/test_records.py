"""What long runs recorded: loaded right or not at all, resumed, compared with a sample that ran again."""

import json
import re
import signal
import subprocess
import sys
import time

import pandas as pd
import psutil
import pytest

from ondevice import assets
from ondevice.corpus import reading
from ondevice.evidence import Recorder, RecordError, agreement, kind_of, load, machines, records, sidecars, stale, times
from ondevice.evidence.exhibits import name_of
from ondevice_studies import record

KEYS = ["task", "request"]
ROWS = [{"task": "rag", "request": number, "tokens": 5 + number, "margin": 0.1} for number in range(4)]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A data folder with one model, and a cache of its own; nobody waits to see what is busy."""
    monkeypatch.setattr(sidecars, "busy", lambda: {"processes": 0, "names": []})
    monkeypatch.setattr(assets, "data", lambda *parts: (tmp_path / "data").joinpath(*parts))
    monkeypatch.setenv(assets.CACHE_VARIABLE, str(tmp_path / "cache"))
    (tmp_path / "data" / "models").mkdir(parents=True)
    (tmp_path / "data" / "models" / "manifest.json").write_text(json.dumps({"small/model.safetensors": "1"}))
    return tmp_path


def recorder(name="answers", **options):
    return Recorder("tiny", name, KEYS, {"seed": 0}, models=["small"], **options)


def recorded(name="answers", rows=ROWS, **options):
    run = recorder(name, **options)
    run.add(rows)
    return run.finish()


def test_a_record_comes_back_with_its_kind_and_how_it_was_made():
    path = recorded(rows=ROWS[::-1])
    table = load("tiny", "answers", columns=["tokens"])
    assert path.name == "answers.parquet" and table["request"].tolist() == [0, 1, 2, 3]
    assert kind_of(table) == kind_of(table[table["request"] > 1]) == "recorded"
    made = table.attrs["sidecar"]
    assert made["parameters"] == {"seed": 0} and made["keys"] == KEYS and set(made["models"]) == {"small"}
    assert made["machine"] and made["corpus"] and (made["rows"], made["units"]) == (4, 4)
    assert set(made) == set(sidecars.FIELDS) and re.fullmatch(r"[0-9a-f]{64}", made["code"])
    assert made["commit"] == sidecars.checkout()[0] and made["program"] == "test_records" and not made["versions"]
    assert [set(part) for part in made["parts"]] == [{"start", "minutes", "beside"}]
    assert set(made["beside"]) == {"processes", "names"}
    assert not list((assets.cache_folder("records") / "tiny").iterdir())


def damaged(path):
    path.write_bytes(path.read_bytes()[:-1])


def altered(path):
    path.with_suffix(".json").write_text("{}")


def mended(path):
    """The manifest's line follows what was done to the files."""
    rows = len(pd.read_parquet(path))
    records.enter(path, sidecar=sidecars.sha256(path.with_suffix(".json")), rows=rows)


def edited(path, **fields):
    beside = path.with_suffix(".json")
    beside.write_text(json.dumps({**json.loads(beside.read_text()), **fields}))
    mended(path)


def thinned(path, fields=()):
    """A tenth of the rows is dropped and the checksum mended. fields: of the sidecar that are computed anew."""
    table = pd.read_parquet(path)
    table[: int(0.9 * len(table))].to_parquet(path)
    made = json.loads(path.with_suffix(".json").read_text())
    new = {"rows": int(0.9 * len(table)), "seal": ""}
    sidecars.write(path, {**made, **{field: new[field] for field in fields}})
    if not fields:
        path.with_suffix(".json").write_text(json.dumps(made))
    mended(path)


def incomplete(path):
    beside = path.with_suffix(".json")
    beside.write_text(
        json.dumps({key: value for key, value in json.loads(beside.read_text()).items() if key != "code"})
    )
    mended(path)


def unlisted(path):
    (path.parents[1] / "manifest.json").write_text("{}")


@pytest.mark.parametrize(
    ("harm", "columns", "message"),
    [
        (lambda path: path.unlink(), [], r"tiny/answers\.parquet .*make record PAPER=tiny"),
        (lambda path: path.with_suffix(".json").unlink(), [], r"tiny/answers\.parquet .*make record PAPER=tiny"),
        (unlisted, [], r"tiny/answers\.parquet .*manifest.*make record PAPER=tiny"),
        (damaged, [], r"tiny/answers\.parquet .*checksum.*git checkout"),
        (altered, [], r"tiny/answers\.parquet .*sidecar.*checksum"),
        (incomplete, [], r"tiny/answers\.json lacks code: make record PAPER=tiny .*ondevice_studies.provenance"),
        (lambda path: edited(path, machine="zen9-64c"), [], r"tiny/answers\.parquet .*edited.*seal.*git checkout"),
        (lambda path: edited(path, commit="0" * 40), [], r"tiny/answers\.parquet .*edited.*seal"),
        (lambda path: edited(path, minutes=999.0), [], r"tiny/answers\.parquet .*edited.*seal"),
        (thinned, [], r"tiny/answers\.parquet .*edited.*seal"),
        (lambda path: thinned(path, ["seal"]), [], r"tiny/answers\.parquet .*edited"),
        (lambda path: thinned(path, ["seal", "rows"]), [], r"tiny/answers\.parquet has not the rows and units"),
        (lambda path: None, ["tokens", "depth"], "lacks depth: make record PAPER=tiny"),
    ],
)
def test_a_record_that_is_not_right_is_refused_in_one_sentence(harm, columns, message):
    harm(recorded())
    with pytest.raises(RecordError, match=message) as error:
        load("tiny", "answers", columns=columns)
    assert "\n" not in str(error.value)


def test_what_speaks_against_records_is_printed(home, monkeypatch):
    monkeypatch.setattr(sidecars, "checkout", lambda: ("0" * 40, False))
    path = recorded()
    assert stale("tiny") == ["All 1 records of tiny: a known commit, today's code, models and corpus."]
    (home / "data" / "models" / "manifest.json").write_text(json.dumps({"small/model.safetensors": "2"}))
    assert stale("tiny") == ["1 of 1 records made with other models: answers"]
    monkeypatch.setattr(reading, "versions", lambda: ["another"])
    monkeypatch.setattr(sidecars, "code", lambda program: "0")
    found = ["made with other models", "of other corpus packages", "made by other code than today's"]
    assert stale("tiny") == [f"1 of 1 records {words}: answers" for words in found]
    made = json.loads(path.with_suffix(".json").read_text())
    found[2] = "made by unknown code"
    found += ["of no commit in the history", "made with uncommitted changes", "edited by hand"]
    sidecars.write(
        path, {**made, "code": "unknown", "commit": "unknown", "dirty": True, "edited": "a column was added"}
    )
    mended(path)
    assert stale("tiny") == [f"1 of 1 records {words}: answers" for words in found]


def test_lines_about_records_fit_the_page(monkeypatch):
    monkeypatch.setattr(sidecars, "checkout", lambda: ("unknown", False))
    for number in range(12):
        recorded(f"answers_of_one_kind_{number}", ROWS[:1])
    lines = stale("tiny")
    assert len(lines) == 1 and 80 < len(lines[0]) <= records.WIDTH and lines[0].endswith(", ...")


def test_other_files_of_a_model_do_not_make_a_record_stale(home, monkeypatch):
    monkeypatch.setattr(sidecars, "checkout", lambda: ("0" * 40, False))
    recorded()
    files = {"small/model.safetensors": "1", "small/tokenizer.json": "3"}
    (home / "data" / "models" / "manifest.json").write_text(json.dumps(files))
    assert stale("tiny")[0].startswith("All 1 records")


def test_a_checkout_with_uncommitted_changes_records_nothing_in_its_own_data(home, monkeypatch):
    monkeypatch.setattr(sidecars, "checkout", lambda: ("0" * 40, True))
    assert recorded().is_file()  # a folder elsewhere
    monkeypatch.setattr(assets, "ROOT", home)
    with pytest.raises(RecordError, match=r"data/records/tiny .*uncommitted changes: make record PAPER=tiny"):
        recorder()


def test_a_file_without_rows_has_a_checksum(home):
    path = home / "data" / "records" / "tiny" / "calibration.json"
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    with pytest.raises(RecordError, match=r"tiny/calibration\.json is missing or has not the checksum"):
        records.listed("tiny", "calibration.json")
    records.enter(path)
    assert records.listed("tiny", "calibration.json") == path and stale("tiny")[0].startswith("All 0 records")
    path.write_text("{ }")
    with pytest.raises(RecordError, match="git checkout restores it, make record PAPER=tiny"):
        records.listed("tiny", "calibration.json")


def test_minutes_count_from_where_the_work_began(monkeypatch):
    recorded("curves", machine="zen4-2c", began=time.monotonic() - 600)
    made = load("tiny", "curves.zen4-2c").attrs["sidecar"]
    assert 10 <= made["minutes"] < 11 and [part["minutes"] for part in made["parts"]] == [made["minutes"]]


def test_times_are_kept_by_machine():
    recorded("curves", machine="zen4-2c")
    recorded("curves", ROWS[:1], machine="xeon-amx-2c")
    assert machines("tiny", "curves") == ["xeon-amx-2c", "zen4-2c"]
    table = times("tiny", "curves")
    assert table["machine"].value_counts().to_dict() == {"zen4-2c": 4, "xeon-amx-2c": 1}
    assert kind_of(table) == "recorded" and set(table.attrs["sidecar"]) == {"zen4-2c", "xeon-amx-2c"}
    with pytest.raises(RecordError, match=r"curves\.zen5-8c\.csv.*xeon-amx-2c, zen4-2c"):
        load("tiny", "curves.zen5-8c")
    with pytest.raises(RecordError, match=r"whole\.<machine>\.csv.*make record PAPER="):
        times("tiny", "whole")


def test_a_run_goes_on_where_it_stopped_and_records_no_unit_twice():
    first = recorder()
    first.add(ROWS[:2])
    first.checkpoint()
    first.add(ROWS[2:3])  # lost with the process
    second = recorder()
    assert second.done == {("rag", 0), ("rag", 1)}
    second.add([{**ROWS[1], "tokens": 99}, ROWS[2], ROWS[3]])
    second.finish()
    assert load("tiny", "answers")["tokens"].tolist() == [5, 6, 7, 8]


def test_other_parameters_and_other_code_begin_anew(monkeypatch):
    run = recorder()
    run.add(ROWS)
    run.checkpoint()
    assert not Recorder("tiny", "answers", KEYS, {"seed": 1}, models=["small"]).done
    assert recorder().done
    made_by = sidecars.made_by
    monkeypatch.setattr(sidecars, "made_by", lambda *given: made_by(*given) | {"code": "edited since"})
    assert not recorder().done
    with pytest.raises(RecordError, match="tiny/other"):
        recorder("other").finish()


KILLED = """
import os, signal
from ondevice.evidence import Recorder, sidecars
sidecars.checkout = lambda: (sidecars.UNKNOWN, False)
run = Recorder("tiny", "killed", ["unit"], {{}}, every=0)
for unit in range(9):
    if unit not in {{key[0] for key in run.done}}:
        if unit == 5 and {first}:
            os.kill(os.getpid(), signal.SIGKILL)
        run.add([dict(unit=unit, process={first})])
"""


def test_what_was_checkpointed_outlives_a_kill():
    codes = []
    for first in (1, 0):
        run = subprocess.run([sys.executable, "-c", KILLED.format(first=first)], capture_output=True, text=True)
        codes.append(run.returncode)
    assert codes == [-signal.SIGKILL, 0], run.stderr
    files = assets.cache_folder("records").glob("tiny/killed-*/*.parquet")
    parts = pd.concat(map(pd.read_parquet, files)).sort_values("unit")
    assert parts["process"].tolist() == [1] * 5 + [0] * 4


def test_busy_processes_are_counted_but_not_a_recorder_s_own(monkeypatch):
    monkeypatch.undo()
    with subprocess.Popen([sys.executable, "-c", "print(1, flush=True)\nwhile True: pass"], stdout=-1) as spinning:
        spinning.stdout.readline()
        own = sidecars.busy(0.5)
        monkeypatch.setattr(psutil.Process, "children", lambda process, recursive: [])
        others = sidecars.busy(0.5)
        spinning.kill()
    assert others["processes"] == len(others["names"]) >= 1 and any("python" in name for name in others["names"])
    assert own["processes"] == len(own["names"])


RECORD = pd.DataFrame({"task": ["a", "a", "b", "b"], "request": 0, "step": [0, 1] * 2, "emitted": [3, 2, 4, 1]})


def test_a_sample_that_agrees_says_what_that_bounds():
    again = agreement(RECORD, RECORD, KEYS, ["step", "emitted"])
    assert (again.n, again.agree, again.differing) == (2, 2, [])
    record = pd.DataFrame({"unit": range(54), "tokens": 1})
    line = agreement(record, record, ["unit"], ["tokens"]).line()
    assert line == "54 of 54 samples ran again exactly (0 wrong of 54: at most 5.4 % at 95 %)"


@pytest.mark.parametrize(
    "again",
    [
        RECORD.assign(emitted=[3, 2, 4, 2]),
        RECORD.drop(index=3),
        RECORD.assign(task=["a", "a", "c", "c"]),
    ],
    ids=["another value", "a row less", "not in the record"],
)
def test_a_sample_that_differs_is_named(again):
    compared = agreement(RECORD, again, KEYS, ["step", "emitted"])
    assert compared.agree == 1 and [unit[0] for unit in compared.differing] == [again["task"].iloc[-1]]
    assert f"1 of 2 samples ran again exactly; 1 differ, as {again['task'].iloc[-1]}/0: was the" in compared.line()


def test_only_a_near_tie_may_differ():
    record = RECORD.assign(margin=[1.0, 1e-5, 0.05, 1.0])
    other = record.assign(emitted=0)
    compared = agreement(record, other, KEYS, ["emitted"], margin="margin")
    assert (compared.near_ties, compared.differing) == (1, [("b", 0)])
    other = record.assign(emitted=[0, 0, 4, 1])
    assert agreement(record, other, KEYS, ["emitted"], margin="margin").line() == (
        "1 of 2 samples ran again exactly, 1 at a near-tie (0 wrong of 2: at most 77.6 % at 95 %)"
    )
    with pytest.raises(ValueError, match="compares nothing"):
        agreement(record, record[:0], KEYS, ["emitted"])


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ({"vendor_id": "AuthenticAMD", "cpu family": "25", "flags": "avx2 avx512f"}, "zen4-2c"),
        ({"vendor_id": "AuthenticAMD", "cpu family": "25", "flags": "avx2"}, "zen3-2c"),
        ({"vendor_id": "GenuineIntel", "model name": "Intel(R) Xeon(R)", "flags": "avx512f amx_tile"}, "xeon-amx-2c"),
        ({"vendor_id": "GenuineIntel", "model name": "Core", "flags": "avx2"}, "intel-2c"),
        ({}, "aarch64-2c"),
    ],
)
def test_a_machine_has_a_name_from_stable_facts(facts, name):
    assert name_of(facts, "aarch64", 2) == name


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["evidence"]])
def test_a_paper_that_records_nothing_is_refused(arguments, capsys):
    assert record.main(arguments) == 2
    assert capsys.readouterr().err.startswith("Which paper? There are records of: ")

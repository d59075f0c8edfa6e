"""What long runs recorded: loaded right or not at all, resumed, compared with a sample that ran again."""

import json
import signal
import subprocess
import sys

import pandas as pd
import pytest

from ondevice import assets
from ondevice.corpus import reading
from ondevice.evidence import Recorder, RecordError, agreement, kind_of, load, machines, stale, times
from ondevice.evidence.exhibits import name_of
from ondevice_studies import record

KEYS = ["task", "request"]
ROWS = [{"task": "rag", "request": number, "tokens": 5 + number, "margin": 0.1} for number in range(4)]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A data folder with one model, and a cache of its own."""
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
    assert made["machine"] and made["corpus"] and len(made["commits"]) == 1
    assert not list((assets.cache_folder("records") / "tiny").iterdir())


def damaged(path):
    path.write_bytes(path.read_bytes()[:-1])


def altered(path):
    path.with_suffix(".json").write_text("{}")


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
        (lambda path: None, ["tokens", "depth"], "lacks depth: make record PAPER=tiny"),
    ],
)
def test_a_record_that_is_not_right_is_refused_in_one_sentence(harm, columns, message):
    harm(recorded())
    with pytest.raises(RecordError, match=message) as error:
        load("tiny", "answers", columns=columns)
    assert "\n" not in str(error.value)


def test_what_changed_since_is_said(home, monkeypatch):
    recorded()
    assert stale("tiny", "answers") == []
    (home / "data" / "models" / "manifest.json").write_text(json.dumps({"small/model.safetensors": "2"}))
    assert stale("tiny", "answers") == [
        "small is not the model that data/records/tiny/answers was made with: make record PAPER=tiny."
    ]
    monkeypatch.setattr(reading, "versions", lambda: ["another"])
    changed = stale("tiny", "answers")
    assert len(changed) == 2 and changed[1].startswith("The corpus is of other package versions")


def test_other_files_of_a_model_do_not_make_a_record_stale(home):
    recorded()
    files = {"small/model.safetensors": "1", "small/tokenizer.json": "3"}
    (home / "data" / "models" / "manifest.json").write_text(json.dumps(files))
    assert stale("tiny", "answers") == []


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


def test_other_parameters_begin_anew():
    run = recorder()
    run.add(ROWS)
    run.checkpoint()
    assert not Recorder("tiny", "answers", KEYS, {"seed": 1}, models=["small"]).done
    with pytest.raises(RecordError, match="tiny/other"):
        recorder("other").finish()


KILLED = """
import os, signal
from ondevice.evidence import Recorder
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
    run = Recorder("tiny", "killed", ["unit"], {})
    parts = pd.concat(pd.read_parquet(path) for path in run.parts.glob("*.parquet")).sort_values("unit")
    assert parts["process"].tolist() == [1] * 5 + [0] * 4


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
    record = RECORD.assign(margin=[1.0, 1e-5, 1.0, 1.0])
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

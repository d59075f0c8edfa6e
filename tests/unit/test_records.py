"""What long runs recorded: loaded right or not at all, resumed, compared with a sample that ran again."""

import json
import subprocess
import sys
import time
from dataclasses import replace

import pandas as pd
import psutil
import pytest

from ondevice import assets
from ondevice.corpus import reading
from ondevice.evidence import Recorder, RecordError, agreement, kind_of, load, machines, records, sidecars, stale, times
from ondevice.evidence.checks import Again, check, noted, some, standing
from ondevice.evidence.code import code_hash
from ondevice.evidence.exhibits import name_of

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
    return Recorder("tiny", name, KEYS, {"seed": 0}, models=["small"], **{"functions": [code_hash], **options})


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
    assert made["commit"] == sidecars.checkout()[0] and made["program"] == "ondevice.evidence.code:code_hash"
    assert made["code"] == sidecars.code(made["program"])
    assert not list((assets.cache_folder("records") / "tiny").iterdir())


def resealed(path, origin):
    """With this sidecar, and checksums that follow; without a new seal where it has one."""
    sidecars.write(path, origin)
    if origin["seal"]:
        path.with_suffix(".json").write_text(json.dumps(origin))
    records.enter(path, sidecar=sidecars.sha256(path.with_suffix(".json")), rows=len(pd.read_parquet(path)))


def shortened(path, origin):
    """A row less, and a new seal."""
    pd.read_parquet(path)[:-1].to_parquet(path)
    resealed(path, {**origin, "seal": "", "rows": len(ROWS) - 1})


@pytest.mark.parametrize(
    ("harm", "columns", "message"),
    [
        (lambda path, _: path.unlink(), [], "missing"),
        (lambda path, _: path.with_suffix(".json").unlink(), [], "sidecar"),
        (lambda path, _: (path.parents[1] / "manifest.json").write_text("{}"), [], "manifest"),
        (lambda path, _: path.write_bytes(path.read_bytes()[:-1]), [], "checksum"),
        (lambda path, _: path.with_suffix(".json").write_text("{}"), [], "checksum"),
        (lambda path, origin: resealed(path, {k: v for k, v in origin.items() if k != "code"}), [], "lacks code"),
        (lambda path, origin: resealed(path, {**origin, "machine": "zen9-64c"}), [], "edited"),
        (shortened, [], "rows and units"),
        (lambda path, _: None, ["tokens", "depth"], "lacks depth"),
    ],
)
def test_a_record_that_is_not_right_is_refused_in_one_sentence(harm, columns, message):
    path = recorded()
    harm(path, json.loads(path.with_suffix(".json").read_text()))
    with pytest.raises(RecordError, match=message) as error:
        load("tiny", "answers", columns=columns)
    assert "\n" not in str(error.value) and "tiny/answers." in str(error.value)


def test_what_speaks_against_records_is_printed(home, monkeypatch):
    monkeypatch.setattr(sidecars, "checkout", lambda: ("0" * 40, False))
    path = recorded()
    manifest = home / "data" / "models" / "manifest.json"
    manifest.write_text(json.dumps({"small/model.safetensors": "1", "small/tokenizer.json": "3"}))  # other files
    assert stale("tiny")[0].startswith("All 1 records")
    manifest.write_text(json.dumps({"small/model.safetensors": "2"}))
    assert stale("tiny") == ["1 of 1 records made with other models: answers"]
    monkeypatch.setattr(reading, "versions", lambda: ["another"])
    monkeypatch.setattr(sidecars, "code", lambda program: "0")
    words = ["other models", "corpus", "other code"]
    assert all(word in line for word, line in zip(words, stale("tiny"), strict=True))
    made = json.loads(path.with_suffix(".json").read_text())
    unknown = {"code": "unknown", "commit": "unknown", "dirty": True, "edited": "a column was added", "seal": ""}
    resealed(path, {**made, **unknown})
    words[2:] = ["unknown code", "no commit", "uncommitted", "edited"]
    assert all(word in line for word, line in zip(words, stale("tiny"), strict=True))


def test_a_record_of_other_code_is_checked_by_a_part_of_it(home, monkeypatch):
    """What agrees is noted and speaks for the record until the code changes; what differs takes the note back."""
    path = recorded()
    made = json.loads(path.with_suffix(".json").read_text())
    resealed(path, {**made, "code": "reached-earlier", "seal": ""})
    assert "other code" in stale("tiny")[0] and standing()["other"] == 1
    again = Again([code_hash], KEYS, some(["request"], 2), lambda drawn: drawn.copy(), ["tokens"], margin="margin")
    assert check("tiny", "answers", again).agree == 2
    assert noted("tiny")["answers"]["program"] == made["program"]
    assert stale("tiny") == ["1 of 1 records checked: today's code made some rows again, the same"]
    assert standing() == {"today": 0, "checked": 1, "times": 0, "other": 0}
    monkeypatch.setattr(sidecars, "code", lambda program: "reached-later")
    assert "other code" in stale("tiny")[0]
    assert standing() == {"today": 0, "checked": 0, "times": 0, "other": 1}  # the note is void


def test_a_record_that_differs_has_no_note(home):
    recorded()
    again = Again([code_hash], KEYS, some(["request"], 2), lambda drawn: drawn.assign(tokens=0), ["tokens"])
    assert len(check("tiny", "answers", again).differing) == 2 and noted("tiny") == {}
    near = Again([code_hash], KEYS, some(["request"], 2), lambda drawn: drawn.assign(margin=0.05), ["margin"],
                 tolerance=0.1)  # fmt: skip
    assert check("tiny", "answers", near).agree == 2 and set(noted("tiny")) == {"answers"}
    by_name = replace(near, make=lambda drawn: drawn.assign(margin=0.05, tokens=drawn["tokens"] + 0.05),
                      columns=["margin", "tokens"], tolerance={"margin": 0.1})  # fmt: skip
    assert len(check("tiny", "answers", by_name).differing) == 2  # of tokens, which it does not name
    assert check("tiny", "answers", near).agree == 2
    check("tiny", "answers", again)
    assert noted("tiny") == {}


def test_a_checkout_with_uncommitted_changes_records_nothing_in_its_own_data(home, monkeypatch):
    monkeypatch.setattr(sidecars, "checkout", lambda: ("0" * 40, True))
    assert recorded().is_file()  # a folder elsewhere
    monkeypatch.setattr(assets, "ROOT", home)
    with pytest.raises(RecordError, match="data/records/tiny"):
        recorder()


def test_a_file_without_rows_has_a_checksum(home):
    path = home / "data" / "records" / "tiny" / "calibration.json"
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    with pytest.raises(RecordError, match=r"tiny/calibration\.json"):
        records.listed("tiny", "calibration.json")
    records.enter(path)
    assert records.listed("tiny", "calibration.json") == path and stale("tiny")[0].startswith("All 0 records")
    path.write_text("{ }")
    with pytest.raises(RecordError, match="checksum"):
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
    with pytest.raises(RecordError, match="whole"):
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
    assert not Recorder("tiny", "answers", KEYS, {"seed": 1}, models=["small"], functions=[code_hash]).done
    assert recorder().done
    made_by = sidecars.made_by
    monkeypatch.setattr(sidecars, "made_by", lambda *given: made_by(*given) | {"code": "edited since"})
    assert not recorder().done
    with pytest.raises(RecordError, match="tiny/other"):
        recorder("other").finish()


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


RECORD = pd.DataFrame({
    "task": ["a", "a", "b", "b"], "request": 0, "step": [0, 1] * 2, "emitted": [3, 2, 4, 1],
    "score": [0.5, float("nan")] * 2,
})  # fmt: skip


@pytest.mark.parametrize(
    ("again", "differing"),
    [
        (RECORD, []),
        (RECORD.assign(emitted=[3, 2, 4, 2]), [("b", 0)]),
        (RECORD.drop(index=3), [("b", 0)]),
        (RECORD.assign(task=["a", "a", "c", "c"]), [("c", 0)]),
    ],
    ids=["the same", "another value", "a row less", "not in the record"],
)
def test_a_sample_that_differs_is_named(again, differing):
    compared = agreement(RECORD, again, KEYS, ["step", "emitted", "score"])
    assert (compared.n, compared.agree, compared.differing) == (2, 2 - len(differing), differing)
    assert all("/".join(map(str, unit)) in compared.line() for unit in differing)


def test_only_a_near_tie_may_differ():
    record = RECORD.assign(margin=[1.0, 1e-5, 0.05, 1.0])
    other = record.assign(emitted=0)
    compared = agreement(record, other, KEYS, ["emitted"], margin="margin")
    assert (compared.near_ties, compared.differing) == (1, [("b", 0)])
    other = record.assign(emitted=[0, 0, 4, 1])
    assert "(0 wrong of 2: at most 77.6 % at 95 %)" in agreement(record, other, KEYS, ["emitted"], "margin").line()
    with pytest.raises(ValueError):
        agreement(record, record[:0], KEYS, ["emitted"])


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ({"vendor_id": "AuthenticAMD", "cpu family": "25", "flags": "avx2 avx512f"}, "zen4-2c"),
        ({"vendor_id": "GenuineIntel", "model name": "Intel(R) Xeon(R)", "flags": "avx512f amx_tile"}, "xeon-amx-2c"),
        ({"vendor_id": "GenuineIntel", "model name": "Core", "flags": "avx2"}, "intel-2c"),
        ({}, "aarch64-2c"),
    ],
)
def test_a_machine_has_a_name_from_stable_facts(facts, name):
    assert name_of(facts, "aarch64", 2) == name

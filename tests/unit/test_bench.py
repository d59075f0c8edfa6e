"""`ondevice-bench`: its arithmetic on numbers made by hand, and whole runs on a tiny random model."""

from __future__ import annotations

import errno
import importlib.util
import json
import math
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import random_model
from transformers import AutoModelForCausalLM, BertConfig, BertModel

from ondevice import models, prompts, shapes
from ondevice.assets import ROOT
from ondevice.speculation.drafters import DRAFTERS, create
from ondevice_programs.bench import formats, inputs, leaderboard, measuring, predictions
from ondevice_programs.bench.__main__ import main
from ondevice_programs.bench.inputs import BenchRequest, in_turns, rounds
from ondevice_programs.bench.measuring import Measurement
from ondevice_programs.bench.peer import LlamaCpp
from ondevice_programs.bench.report import snippet
from ondevice_programs.bench.state import begun, read, save

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = [{"prompt": f"The {word} goes to the {word}.", "task": task} for task in ("a", "b") for word in "pqrstuv"]
FEW = ["--threads", "1", "--minutes", "0.01", "--formats", "4bit", "4bit-int8", "--drafters", "sam", "goose"]
TABLES = ["curves", "answers", "limits", "drafters", "predictions", "measured"]


@pytest.fixture(scope="module", autouse=True)
def short_answers():
    """A random model does not end its answers: here they have 60 tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "LONGEST", 60)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model that every format of the lean engine has, in a folder, and prompts beside it."""
    path = tmp_path_factory.mktemp("bench")
    model = random_model("llama", torch.float32, vocabulary=384, context=320, hidden_size=64, intermediate_size=96)
    model.save_pretrained(path / "model")
    shapes.byte_tokenizer().save_pretrained(path / "model")
    (path / "prompts.jsonl").write_text("\n".join(map(json.dumps, PROMPTS)))
    return path


def run(folder, *words: str) -> int:
    """The exit code of a bench of the tiny model on its prompts."""
    with pytest.raises(SystemExit) as end:
        main([str(folder / "model"), "--prompts", str(folder / "prompts.jsonl"), *FEW, *words])
    return end.value.code or 0


@pytest.fixture(scope="module")
def parts(folder):
    """The JSON of a whole bench."""
    assert run(folder, "--json", str(folder / "whole.json")) == 0
    return read(folder / "whole.json")


# Plan


def request(task: str, number: int) -> BenchRequest:
    return BenchRequest(f"{task}{number}", task, (1, 2), 9)


def test_rounds_hold_equally_many_of_every_task_and_leave_out_what_is_over():
    several = [request("a", n) for n in range(9)] + [request("b", n) for n in range(7)]
    assert [each.id for each in in_turns(several)[:5]] == ["a0", "b0", "a1", "b1", "a2"]
    groups = [[each.id for each in group] for group in rounds(several)]
    assert groups == [["a0", "b0", "a1", "b1", "a2", "b2"], ["a3", "b3", "a4", "b4", "a5", "b5"]]
    assert [len(group) for group in rounds(several[:9])] == [6]
    assert [len(group) for group in rounds([request("a", 0), request("b", 0)])] == [2]
    assert rounds([]) == []


# Arithmetic

CURVE = {"rows": [1, 2, 4], "ms": [10.0, 12.0, 16.0]}


def trial(task: str, emitted: int, rows: dict[str, int], **values) -> dict:
    row = {"drafter": "goose", "budget": 4, "shape": "tree", "drafting": 0.0, "identical": True}
    row |= {"reading": 0.0, "whole": emitted}
    return {**row, "task": task, "emitted": emitted, "rows": rows, **values}


def test_an_arm_is_the_mean_of_its_tasks_and_keeps_its_passes():
    runs = [trial("a", 8, {"1": 2, "3": 2}), trial("a", 2, {"3": 1}, whole=8, reading=0.1)]
    runs.append(trial("b", 4, {"1": 1}, drafting=0.012))
    row = predictions.arm(runs)
    assert row["tokens_per_pass"] == {"a": 2.0, "b": 4.0} and row["mean"] == 3.0 and row["n"] == 3
    assert row["rows"] == {"1": 3, "3": 3} and row["emitted"] == 14 and row["own_ms"] == pytest.approx(2.0)
    assert row["reading_ms"] == pytest.approx(5.0)


def test_a_prediction_adds_every_pass_and_the_drafters_own_time():
    row = {"rows": {"1": 2, "3": 1}, "own_ms": 1.0, "reading_ms": 0.5, "emitted": 6}
    assert predictions.per_token(CURVE, row) == pytest.approx((2 * (10 + 1) + (14 + 1)) / 6 + 0.5)


def test_predictions_hold_each_shape_to_its_formats_and_come_fastest_first():
    alone = {"rows": [1], "ms": [5.0]}
    curves = {"4bit": CURVE, "4bit-int8": {"rows": [1, 4], "ms": [8.0, 11.0]}, "4bit-int8 unpadded": alone}
    common = {"rows": {"4": 1}, "own_ms": 0.0, "reading_ms": 0.0, "n": 1, "budget": 3}
    arms = [
        {"drafter": "x", "shape": "tree", "emitted": 4, **common},
        {"drafter": "x", "shape": "chain", "emitted": 2, **common},
        {"drafter": "y", "shape": "any", "emitted": 1, **common},
    ]
    table = predictions.predicted(curves, {"4bit": "tree", "4bit-int8": "chain"}, arms)
    assert [(row["drafter"], row["format"], row["ms_per_token"]) for row in table] == [
        ("x", "4bit", 4.0), ("x", "4bit-int8", 5.5), ("y", "4bit-int8", 11.0), ("y", "4bit", 16.0),
    ]  # fmt: skip
    assert table[0]["speed"] == pytest.approx(10 / 4) and table[0]["over_fastest"] == pytest.approx(5 / 4)


def test_a_speed_is_the_ratio_of_times_per_token_and_its_interval_is_over_prompts():
    assert predictions.speed([[2, 10], [4, 20]], [[1, 10], [2, 20]]) == [2.0, 2.0, 2.0]
    value, low, high = predictions.speed([[1, 10], [4, 10], [2, 10]], [[1, 10], [1, 10], [1, 10]])
    assert value == pytest.approx(7 / 3) and low == pytest.approx(1.0) and high == pytest.approx(4.0)
    assert predictions.speed([[3, 30]], [[1, 5]])[0] == pytest.approx(0.5)  # other tokens: each over its own


def measured_row(drafted: float, identity: str = "identical", **more: list) -> dict:
    times = {"plain": [2.0, 10], "plain, measured twice": [2.0, 10], "drafted": [drafted, 10]}
    return {"times": times | more, "passes": 5, "identity": identity}


def test_the_advice_is_the_fastest_of_what_was_measured():
    faster = {"fastest plain": [1.5, 10]}
    alone = predictions.summary([measured_row(1.0)])  # without a faster format plain decoding is compared with itself
    assert alone["over_fastest"] == alone["speed"] == [2.0, 2.0, 2.0]
    summary = predictions.summary([measured_row(1.0, **faster), measured_row(1.0, "near-tie", **faster)])
    assert summary["speed"] == [2.0, 2.0, 2.0] and summary["over_fastest"] == pytest.approx([1.5, 1.5, 1.5])
    assert summary["floor"] == [1.0, 1.0, 1.0] and summary["tokens_per_pass"] == 2.0 and summary["n"] == 2
    assert summary["identity"] == {"identical": 1, "near-tie": 1, "different": 0}
    setting = {"format": "4bit", "drafter": "goose", "budget": 8}
    parts = {"curves": {"4bit": CURVE, "float32": {"rows": [1], "ms": [20.0]}}}
    assert predictions.advice(parts) == {"format": "4bit", "drafter": None, "budget": 1, "ms_per_token": 10.0}
    parts["measured"] = {**setting, "fastest": "4bit-int8 unpadded", **summary}
    assert predictions.advice(parts) == {**setting, "ms_per_token": 100.0}
    slower = predictions.summary([measured_row(1.6, **faster)])
    parts["measured"] = {**setting, "fastest": "4bit-int8 unpadded", **slower}
    assert predictions.advice(parts)["drafter"] is None
    assert predictions.advice(parts)["format"] == "4bit-int8 unpadded"


@pytest.mark.parametrize(("margin", "kind"), [(1e-5, "near-tie"), (1e-3, "different")])
def test_a_token_that_differs_is_a_near_tie_where_its_lead_is_small(monkeypatch, margin, kind):
    read_ids = []

    def prefill(ids):
        read_ids.append(ids)
        return torch.tensor([0.0, margin, -1.0])

    bench = Measurement.__new__(Measurement)
    bench.engines = {"4bit": SimpleNamespace(start=lambda: SimpleNamespace(prefill=prefill))}
    assert bench._identity([5, 6, 7], [5, 9, 7], request("a", 0), "4bit") == kind
    assert read_ids == [[1, 2, 5]]
    assert bench._identity([5, 9, 7], [5, 9, 7], request("a", 0), "4bit") == "identical"


# Drafters and code to paste


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_is_made_by_the_code_that_the_report_pastes(name):
    drafter = create(name, 384)
    drafter.begin([1, 2, 3, 1, 2])
    assert len(drafter.propose([1, 2, 3, 1, 2, 3], 4)) <= 4
    assert drafter.vocabulary in (None, 384)


@pytest.mark.parametrize(("form", "name"), [("4bit", "goose"), ("4bit-int8", "sam"), ("4bit-int8 unpadded", None)])
def test_the_snippet_runs_as_it_stands(folder, parts, form, name, capsys):
    setting = {"format": form, "drafter": name, "budget": 4, "fastest": form}
    ms = {"drafted": 1.0 if name else 3.0, "fastest plain": 2.0}
    text = snippet({**parts, "measured": {**setting, "ms_per_token": ms}})
    with pytest.warns(UserWarning, match="no chat template"):
        exec(compile(text, "snippet", "exec"), {})
    tokens, _, passes, _ = capsys.readouterr().out.splitlines()[-1].split()
    assert int(tokens) > 1 and (int(passes) < int(tokens))


# Whole runs


def test_a_whole_bench_has_every_part_and_its_answers_leave_the_file(parts):
    head = ["schema", "model", "machine", "commit", "command", "settings", "prompts", "complete", "seconds", "advice"]
    assert sorted(parts) == sorted(head + TABLES) and parts["complete"] and parts["schema"] == 1
    assert set(parts["curves"]) == {"4bit", "4bit-int8", "4bit-int8 unpadded", "4bit, measured twice"}
    assert parts["curves"]["4bit"]["rows"] == list(formats.ROWS)
    assert parts["curves"]["4bit-int8 unpadded"]["rows"] == [1]
    assert {(row["drafter"], row["shape"]) for row in parts["drafters"]} == {
        ("sam", "any"), ("goose", "tree"),
    }  # fmt: skip
    assert all(row["n"] == row["identical"] for row in parts["drafters"])
    for row in parts["drafters"]:
        assert set(row["tokens_per_pass"]) == {"a", "b"} and row["mean"] >= 1
        assert row["emitted"] >= sum(row["rows"].values())
    measured = parts["measured"]
    assert sum(measured["identity"].values()) == measured["n"] >= 12
    assert measured["identity"]["identical"] + measured["identity"]["near-tie"] == measured["n"]
    assert set(parts["seconds"]) == set(measuring.ENDS)
    assert parts["advice"] == predictions.advice(parts)
    assert parts["command"].startswith("ondevice-bench ") and "--json" not in parts["command"]


def test_a_complete_bench_is_printed_and_not_measured_once_more(folder, parts, capsys, monkeypatch):
    monkeypatch.setattr(formats, "engines", None)
    assert run(folder, "--json", str(folder / "whole.json")) == 0
    output = capsys.readouterr()
    assert "is complete" in output.err and "Advice: " in output.out and "models.load(" in output.out
    assert "goose, tree" in output.out and max(map(len, output.out.splitlines())) <= 120
    assert read(folder / "whole.json") == parts


@pytest.mark.parametrize("calls", [*(pytest.param(calls, marks=pytest.mark.long) for calls in (3, 15)), 20])
def test_an_interrupted_bench_keeps_what_is_done_and_goes_on(folder, tmp_path, capsys, monkeypatch, calls):
    file = tmp_path / "bench.json"
    answered, count = measuring.answered, iter(range(1000))

    def interrupted(*given):
        if next(count) == calls:
            raise KeyboardInterrupt
        return answered(*given)

    with monkeypatch.context() as patch:
        patch.setattr(measuring, "answered", interrupted)
        assert run(folder, "--json", str(file)) == 130
    before = read(file)
    assert not before["complete"] and "measured" not in before and "A pass over n rows" in capsys.readouterr().out
    assert len(before["unfinished"]["answers"]) == min(calls, 12)
    assert len(before["unfinished"].get("runs", ())) == max(0, calls - 12)
    assert run(folder, "--json", str(file)) == 0
    after = read(file)
    assert after["complete"] and after["curves"] == before["curves"] and "unfinished" not in after
    assert all(after["seconds"][name] >= spent for name, spent in before["seconds"].items())


def test_a_full_disk_loses_no_measurement(folder, tmp_path, capsys, monkeypatch):
    def full(path, parts):
        if "curves" in parts:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(measuring, "save", full)
    assert run(folder, "--json", str(tmp_path / "bench.json")) == 2
    output = capsys.readouterr()
    assert "No space left" in output.err and "A pass over n rows" in output.out and "No file was written" in output.out


def test_going_on_needs_the_same_head(tmp_path):
    file = tmp_path / "bench.json"
    head = {"model": {"spec": "a", "sha256": "f", "parameters": 3}, "machine": {}, "settings": {}, "command": "x"}
    parts = begun(file, head)
    assert not file.exists() and not parts["complete"]
    save(file, parts)
    assert begun(file, head) == parts == begun(None, head)
    moved = {**head, "model": {**head["model"], "spec": "b"}, "command": "y"}
    assert begun(file, moved) == {**parts, **moved}
    for change, words in (
        ({"settings": {"minutes": 3}}, "other settings"),
        ({"model": {**head["model"], "sha256": "e"}}, "another model"),
        ({"prompts": "f"}, "earlier version"),
    ):
        with pytest.raises(ValueError, match=words):
            begun(file, {**head, **change})
    bare = '{"schema": 1, "complete": true, "seconds": {}, "machine": {}, "model": '
    for text in ("{", "[]", '{"schema": 0}', '{"schema": 1}', f'{bare}"spec"}}', f"{bare}{{}}}}", f"{bare}null}}"):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"bench\.json"):
            begun(file, head)


def changed_byte(folder):
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    status = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # as a copy with its times has them


def changed_json(name, **values):
    def change(folder):
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def in_shards(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="100KB")
    assert (folder / "model.safetensors.index.json").is_file()


CHANGES = {  # what happens to a model's folder, and whether it is another model then
    "a byte of its weights": (changed_byte, True),
    "its angles": (changed_json("config.json", rope_parameters={"rope_type": "default", "rope_theta": 500.0}), True),
    "its norms": (changed_json("config.json", rms_norm_eps=0.1), True),
    "its end tokens": (changed_json("generation_config.json", eos_token_id=[2, 7]), True),
    "its template": (lambda folder: (folder / "chat_template.jinja").write_text("{{ messages[0].content }}"), True),
    "its tokenizer": (changed_json("tokenizer_config.json", bos_token="b"), True),
    "nothing": (lambda folder: None, False),
    "a card": (lambda folder: (folder / "README.md").write_text("words"), False),
    "its times": (lambda folder: [os.utime(path, (1, 1)) for path in folder.iterdir()], False),
    "its shards": (in_shards, False),
    "how it was written": (changed_json("config.json", transformers_version="5.0", use_cache=False), False),
}


@pytest.mark.parametrize("case", CHANGES)
@pytest.mark.parametrize("place", ["there", "moved", "linked"])
def test_a_model_is_identified_by_what_is_in_it(folder, tmp_path, case, place):
    change, another = CHANGES[case]
    shutil.copytree(folder / "model", tmp_path / "model")
    before = inputs.model_facts(models.load(str(tmp_path / "model")))
    change(tmp_path / "model")
    path = tmp_path / "model"
    if place == "moved":
        path = path.rename(tmp_path / "another name")
    elif place == "linked":
        (tmp_path / "link").symlink_to(path)
        path = tmp_path / "link"
    after = inputs.model_facts(models.load(str(path)))
    assert (before["sha256"] != after["sha256"]) == another and after["spec"] == str(path)


def test_new_weights_under_the_same_name_are_another_model(folder, parts, tmp_path, capsys, monkeypatch):
    """A complete bench of them is not printed, and one that goes on accuses no drafter."""
    file = tmp_path / "bench.json"
    shutil.copytree(folder / "model", tmp_path / "model")
    words = [str(tmp_path / "model"), "--prompts", str(folder / "prompts.jsonl"), *FEW, "--json", str(file)]
    monkeypatch.setattr(formats, "engines", None)
    for complete in (True, False):
        save(file, {**parts, "unfinished": {}, "complete": complete})
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == (0 if complete else 1)  # nothing can be measured here
    changed_byte(tmp_path / "model")
    before = file.read_bytes()
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(words)
    error = capsys.readouterr().err
    assert end.value.code == 2 and "another model" in error and str(file) in error and len(error.splitlines()) == 1
    assert file.read_bytes() == before


def test_prompts_may_move_and_their_tasks_count(folder, parts, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(formats, "engines", None)
    file, other = tmp_path / "bench.json", tmp_path / "renamed.json"
    save(file, parts)
    for rows, code in ((PROMPTS, 0), ([{**row, "task": "c"} for row in PROMPTS], 2)):
        other.write_text(json.dumps(rows, indent=1))
        with pytest.raises(SystemExit) as end:
            main([str(folder / "model"), "--prompts", str(other), *FEW, "--json", str(file)])
        assert (end.value.code or 0) == code
    assert "other prompts" in capsys.readouterr().err


def test_answers_are_cut_where_they_begin_to_loop(monkeypatch):
    tokens = [1, 2, 3] + [7, 8, 9, 10, 11, 12, 13, 14] * 5
    log = {"tokens": tokens, "first": 0.0}
    monkeypatch.setattr(measuring, "answered", lambda *given: log)
    bench = Measurement.__new__(Measurement)
    bench.requests, bench.engines, bench.ends = [request("a", 0)], {"4bit": None}, frozenset()
    bench.parts, bench.rest = {}, {}
    bench.answer("4bit", math.inf)
    assert bench.rest["answers"]["a0"]["tokens"] == tokens[:11]
    assert bench.parts["answers"] == {"format": "4bit", "n": 1, "median": 11, "tokens": 11}


def test_random_weights_have_their_curve_alone(folder, tmp_path, capsys):
    config = json.loads((folder / "model" / "config.json").read_text())
    for path in (folder / "model").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({**config, shapes.MARK: True}))
    with pytest.raises(SystemExit) as end:
        main([str(tmp_path), "--threads", "1", "--minutes", "0.01", "--formats", "4bit"])
    output = capsys.readouterr()
    assert not end.value.code and "random weights: only T(n)" in output.err
    assert "A pass over n rows" in output.out and "Advice" not in output.out


@pytest.mark.parametrize(("context", "rows"), [(13, [1, 2, 4, 8]), (20, [1, 2, 4, 8, 16]), (34, list(formats.ROWS))])
@pytest.mark.parametrize("form", ["4bit", "8bit-int8"])  # trees, and chains, which reach further
def test_a_pass_has_no_more_rows_than_the_context(form, context, rows):
    model = random_model("llama", torch.float32, vocabulary=64, context=context, hidden_size=64, intermediate_size=64)
    built, _ = formats.engines(models.Loaded("tiny", "folder", model, None), [form], 1)
    assert formats.curves(built, 0, {})[form]["rows"] == tuple(rows)


def test_a_picture_is_drawn_or_said_to_need_a_package(folder, parts, capsys, monkeypatch):
    picture = folder / "bench.svg"
    assert run(folder, "--json", str(folder / "whole.json"), "--picture", str(picture)) == 0
    assert picture.read_text().startswith("<?xml") and f"Picture: {picture}" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    picture.unlink()
    assert run(folder, "--json", str(folder / "whole.json"), "--picture", str(picture)) == 0
    output = capsys.readouterr()
    assert "ondevice[notebooks]" in output.err and "Advice" in output.out and not picture.exists()


# Bad input


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--drafters", "eagle"], "'eagle'"),
        (["--minutes", "0"], "--minutes"),
        (["--threads", "0"], "--threads"),
        (["--json", "{text}/bench.json"], "{text}"),
        (["--picture", "bench.txt"], "*.png"),
        (["--json", "{text}"], "not the JSON of a bench"),
        (["--json", "{folder}"], "is a folder"),
        (["--prompts", "{empty}"], "no prompt"),
        (["--prompts", "{long}"], "long-2"),
        (["--compare", "llama.cpp"], "llama-cpp-python"),
    ],
)
def test_bad_words_are_refused_before_anything_slow(folder, tmp_path, capsys, monkeypatch, words, message):
    files = {"text": "words", "empty": "\n", "long": "short\n" + "a" * 503}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    find = importlib.util.find_spec

    def without_llama_cpp(name, *rest):
        return None if name == "llama_cpp" else find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without_llama_cpp)
    monkeypatch.setattr(formats, "engines", None)
    paths = {name: tmp_path / name for name in files} | {"folder": tmp_path}
    assert run(folder, *(word.format(**paths) for word in words)) == 2
    assert message.format(**paths) in capsys.readouterr().err


def test_what_is_no_folder_or_no_causal_model_is_refused_in_one_line(tmp_path, capsys):
    sizes = dict(vocab_size=384, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    BertModel(BertConfig(**sizes)).save_pretrained(tmp_path / "encoder")
    shapes.byte_tokenizer().save_pretrained(tmp_path / "encoder")
    capsys.readouterr()
    for path, message in ((tmp_path / "none", "none"), (tmp_path / "encoder", "BertModel")):
        with pytest.raises(SystemExit) as end:
            main([str(path)])
        error = capsys.readouterr().err
        assert end.value.code == 2 and message in error and len(error.splitlines()) == 1


def test_our_own_prompts_may_be_too_long_for_a_model(folder):
    loaded = models.load(str(folder / "model"))
    notices = []
    source = [prompts.Prompt("x-1", "a", "b" * 400), prompts.Prompt("x-2", "a", "b" * 300)]
    kept = inputs.requests(loaded, source, True, notices.append)
    assert [(request.id, request.limit) for request in kept] == [("1", 320 - len(kept[0].ids))]
    assert len(notices) == 2 and "1 prompts" in notices[1]  # the first is of the template that the model lacks
    with pytest.raises(ValueError, match="320"):
        inputs.requests(loaded, source[:1], True, notices.append)


def test_llama_cpp_is_compared_on_gguf_files_alone(folder, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert run(folder, "--compare", "llama.cpp") == 2
    assert "needs a GGUF file" in capsys.readouterr().err


class FakeLlamaCpp:
    """The part of llama-cpp-python's C interface that is called. decoded: of each pass (rows, first position)."""

    def __init__(self, loads: bool) -> None:
        self.decoded, self.removed, self._loads = [], [], loads

    def llama_batch_init(self, count, embeddings, sequences):
        arrays = {name: [0] * count for name in ("token", "pos", "n_seq_id", "logits")}
        return SimpleNamespace(**arrays, seq_id=[[0] for _ in range(count)])

    def llama_decode(self, context, batch):
        self.decoded.append((batch.n_tokens, batch.pos[0]))
        assert batch.pos == list(range(batch.pos[0], batch.pos[0] + batch.n_tokens)) and all(batch.logits)
        return 0

    def llama_memory_seq_rm(self, memory, sequence, start, end):
        self.removed.append((start, end))

    def llama_model_load_from_file(self, path, parameters):
        return self._loads

    def __getattr__(self, name):
        return lambda *given: SimpleNamespace()


def test_llama_cpp_gets_the_same_passes(monkeypatch):
    fake = FakeLlamaCpp(loads=True)
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)
    loaded = SimpleNamespace(gguf=SimpleNamespace(path=Path("x.gguf")))
    other = LlamaCpp(loaded, 1, formats.PAST, formats.PEER_ROWS)
    before = len(fake.decoded)
    assert len(other.turn()) == 3 and fake.decoded[0] == (256, 0)
    assert fake.decoded[before:] == [(rows, 256) for rows in formats.PEER_ROWS] and set(fake.removed) == {(256, -1)}
    monkeypatch.setitem(sys.modules, "llama_cpp", FakeLlamaCpp(loads=False))
    with pytest.raises(ValueError, match=r"llama\.cpp cannot load x\.gguf"):
        LlamaCpp(loaded, 1, formats.PAST, formats.PEER_ROWS)


# Leaderboard


def test_the_leaderboard_is_made_of_its_files():
    page = (ROOT / "docs" / "leaderboard.md").read_text(encoding="utf-8")
    assert page == leaderboard.page(ROOT / "docs" / "leaderboard")


def test_a_row_of_the_leaderboard(parts, tmp_path):
    save(tmp_path / "tiny.json", {**parts, "commit": "abc", "command": "ondevice-bench a|b"})
    row = leaderboard.page(tmp_path).splitlines()[-1]
    assert row.startswith(f"| {parts['model']['spec']} | ") and row.endswith("| abc | `ondevice-bench a\\|b` |")
    assert f"| {parts['measured']['ms_per_token']['drafted']:.2f} |" in row
    save(tmp_path / "begun.json", {**parts, "complete": False, "unfinished": {}})
    with pytest.raises(ValueError, match=r"begun\.json is no complete bench"):
        leaderboard.page(tmp_path)

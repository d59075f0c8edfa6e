"""Records of drafters on public models: on a tiny model, with requests of our own."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from tiny import random_model

from ondevice import assets, evidence, models, prompts, retrieval
from ondevice.causal_lm import CausalLM
from ondevice.evidence import checks, records, sidecars
from ondevice.speculation import Drafter, Verified, generate
from ondevice_papers.diaa.ambiguities import TwoTokens
from ondevice_papers.diaa.drafter import Diaa
from ondevice_papers.diaa.tables import Tables
from ondevice_studies.diaa import parts, quality, regimes, sized, spec_bench
from ondevice_studies.diaa.spec_bench import METHODS, Method
from ondevice_studies.sdnpu import record as recording
from ondevice_studies.sdnpu import spec_bench as sdnpu
from ondevice_studies.speculation import own_prompts, plain
from ondevice_studies.speculation import spec_bench as shared
from ondevice_studies.speculation.prompts import digest
from ondevice_studies.speculation.request_set import Request

V = 64
pytestmark = pytest.mark.usefixtures("one_thread")


class TinyBench:
    """A tiny model where a `Bench` is wanted."""

    model = "tiny"

    def __init__(self) -> None:
        self.lm = CausalLM(random_model("llama", vocabulary=V, context=128, num_hidden_layers=3, spread=0.4))

    def tables(self, kind: str) -> Tables:
        return Tables.empty(V)


def of(number: int, ids: tuple[int, ...]) -> Request:
    return Request("qa", number, f"spec-bench-{number}", ids, (), 30, frozenset())


@pytest.fixture
def bench(monkeypatch, tmp_path) -> TinyBench:
    monkeypatch.setenv(assets.CACHE_VARIABLE, str(tmp_path))
    return TinyBench()


REQUESTS = [of(1, (1, 2, 3)), of(2, (1, 2, 3)), of(3, (7, 8))]


@pytest.mark.parametrize("name", ["PLD", "TR 8", "Goose 8", "SuffixDecoding 8", "key: two tokens"])
def test_a_drafter_answers_as_plain_decoding_and_every_token_is_of_a_pass(bench, name):
    passes = spec_bench.run(bench, METHODS[name], REQUESTS)
    plainly = {request.name: generate(bench.lm, Drafter(), request.ids, 30).tokens for request in REQUESTS}
    assert passes.groupby("request")["emitted"].sum().to_dict() == dict.fromkeys(plainly, 29)
    each = passes.drop_duplicates("request").set_index("request")
    assert each["answer_sha"].to_dict() == {request: digest(tokens) for request, tokens in plainly.items()}
    assert (each["live"] != METHODS[name].replayed).all() and (passes["drafted"] <= METHODS[name].budget).all()


@pytest.fixture
def kept(monkeypatch, tmp_path) -> dict[str, pd.DataFrame]:
    """By name, the tables that recorders are given."""
    tables: dict[str, list] = {}

    class Kept:
        done = frozenset()

        def __init__(self, paper, name, *given, **more):
            self.name = name

        def add(self, rows):
            tables.setdefault(self.name, []).append(pd.DataFrame(rows))

        checkpoint = finish = lambda self: ""

    monkeypatch.setattr(records, "folder", lambda: tmp_path)
    monkeypatch.setattr(evidence, "Recorder", Kept)
    monkeypatch.setattr(recording, "Recorder", Kept)
    for module in (shared, recording):
        monkeypatch.setattr(module, "recordable", lambda model: pd.DataFrame())
        monkeypatch.setattr(module, "name_of", lambda model, name: f"{model}-{name}")
    return tables


def test_rejections_of_sam_are_recorded_by_request(bench, kept, monkeypatch):
    monkeypatch.setattr(recording, "recorded_requests", lambda bench, answers, most: REQUESTS)
    recording.rejections(bench)
    (table,) = kept["tiny-rejections"]
    assert set(table["request"]) <= {request.name for request in REQUESTS} and len(table) > 0
    for column in ("case", "elsewhere"):
        assert set(table[column]) <= {"missing", "synonym", "redundant"}
    assert (table["rejected"] >= 1).all()
    answers = [shared.plain_answer(bench, request) for request in REQUESTS]
    assert answers[0] == answers[1]  # so the first request's tails stand elsewhere as they do in its own answer
    first = table[table["request"] == REQUESTS[0].name]
    assert len(first) and (first["case"] == first["elsewhere"]).all()


def test_drafters_of_sdnpu_are_recorded_on_our_own_prompts_of_four_tasks(bench, kept, monkeypatch):
    asked = [replace(request, task=task) for task in prompts.TASKS for request in REQUESTS]
    asked = [replace(request, name=f"own-{number}") for number, request in enumerate(asked)]
    by_name = {request.name: request for request in asked}
    bench.loaded = None
    monkeypatch.setattr(prompts, "own", lambda: [prompts.Prompt(each.name, each.task, "") for each in asked])
    monkeypatch.setattr(plain, "rendered", lambda loaded, prompt, limit: by_name[prompt.id])
    monkeypatch.setattr(own_prompts, "engine", lambda loaded, **options: bench.lm)
    sdnpu.own(bench)
    table = pd.concat(kept["tiny-own"])
    assert list(dict.fromkeys(table["method"])) == list(sdnpu.OWN) and table["identical"].all()
    assert set(table["task"]) == set(sdnpu.OWN_TASKS) and len(table) == 12 * len(sdnpu.OWN)


def test_answers_and_contexts_are_compared_by_request(bench, kept, monkeypatch):
    asked = [of(number, (1 + number, 2, 3)) for number in range(8)]
    asked = [replace(request, task="qa" if request.prompt < 4 else "summarization") for request in asked]
    tokenizer = Namespace(decode=lambda ids, **options: " ".join(map(str, ids)), all_special_ids=[])
    bench.loaded = Namespace(tokenizer=tokenizer)
    monkeypatch.setattr(recording, "recorded_requests", lambda bench, answers, most: asked)
    monkeypatch.setattr(retrieval, "embedder", lambda: lambda texts: np.eye(len(texts), 16, dtype=np.float32))
    recording.likeness(bench)
    (cosines,), (contexts,), (copied,) = (kept[f"tiny-{name}"] for name in ("cosines", "contexts", "copied"))
    assert set(cosines["pair"]) == {"task", "group", "across"} and len(cosines) == 28
    assert len(contexts) == 4 and set(copied["task"]) == {"qa", "summarization"}


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.replayed and "SAM" not in name])
def test_a_replay_takes_the_passes_of_the_model(bench, name):
    method = METHODS[name]
    live = Method(method.make, method.budget)
    columns = ["request", "answer_sha", "step", "drafted", "accepted", "emitted", "depth", "cached"]
    replayed, ran = (spec_bench.run(bench, each, REQUESTS)[columns] for each in (method, live))
    assert replayed.equals(ran)


def test_a_sized_mixture_drafts_less_where_rows_are_dearer(bench):
    drafted = []
    for slope in (0.0, 0.2, 2.0):
        seconds = tuple(1 + slope * row for row in range(33))
        passes = spec_bench.run(bench, sized.Sized("", 32, "part", seconds=seconds), REQUESTS)
        assert passes.groupby("request")["emitted"].sum().tolist() == [29, 29, 29]
        drafted.append(passes["drafted"].mean())
    assert drafted[0] > drafted[1] >= drafted[2] == 0


@pytest.mark.parametrize("name", ["vanilla", "TR 8"])
def test_the_parts_of_an_answer_sum_to_its_time(bench, name):
    drafter = Drafter() if name == "vanilla" else METHODS[name].drafter(bench)
    columns = parts.answer(bench, drafter, 8, REQUESTS[0])
    assert sum(columns[f"{part}_s"] for part in parts.PARTS) == pytest.approx(columns["decode_s"])
    assert columns["verify_s"] > 0 and columns["choose_s"] >= 0 == columns["drafting_s"]
    assert (columns["observe_s"] > 1e-5) or name == "vanilla"
    assert columns["tokens"] == parts.TOKENS and columns["passes"] <= parts.TOKENS - 1


def test_every_method_names_its_own_code_and_record():
    names = [spec_bench.name_of(models.SMOLLM2, name) for name in METHODS]
    assert len(set(names)) == len(names) and "smollm2-static-16-cold" in names
    codes = {sidecars.code(method.source) for method in METHODS.values()}
    assert "" not in codes and len(codes) > len({method.source for method in METHODS.values()}) / 2


def test_loops_are_cut_and_margins_are_those_before_them(bench):
    asked = of(4, (5, 6))
    columns = plain.answered(bench.lm, asked)
    assert columns["whole"] == 30 >= columns["limit"] and columns["margin"] > 0
    assert columns["answer_sha"] == digest(columns["answer"][: columns["limit"]])


def test_a_known_answer_is_checked_and_a_wrong_one_decoded(bench):
    asked = of(4, (5, 6))
    decoded = plain.answered(bench.lm, asked)
    checked = plain.answered(bench.lm, asked, decoded["answer"])
    assert checked["checked"] and not decoded["checked"]
    assert checked["margin"] == pytest.approx(decoded["margin"], abs=1e-4)
    assert checked["answer"] == decoded["answer"] and checked["answer_sha"] == decoded["answer_sha"]
    for at in (0, 9):
        wrong = decoded["answer"].copy()
        wrong[at] = (1 + wrong[at]) % V
        assert plain.answered(bench.lm, asked, wrong) == decoded
    assert plain.answered(bench.lm, asked, wrong[:9]) == decoded  # its end was not known


def test_a_known_answer_with_a_close_choice_is_decoded(bench, monkeypatch):
    decoded = plain.answered(bench.lm, of(4, (5, 6)))
    monkeypatch.setattr(plain, "CLOSE", 1 + decoded["margin"])
    assert plain.answered(bench.lm, of(4, (5, 6)), decoded["answer"]) == decoded


def test_any_beginning_holds_all_tasks_alike():
    first = plain.in_turns(prompts.own())[:12]
    assert [prompt.task for prompt in first] == [*prompts.TASKS, *prompts.TASKS]


def test_two_tokens_tell_apart_what_one_cannot():
    """After 1 2 comes 3, after 4 2 comes 5: a table keyed by the last token alone holds one of them."""
    drafter = TwoTokens(V)
    for before, after in ((1, 3), (4, 5)):
        drafter.begin([before, 2])
        draft = drafter.propose([before, 2], 4)
        drafter.observe(Verified(2, draft, torch.eye(V)[after][None], [], [after]))
    for before, after in ((1, 3), (4, 5)):
        assert drafter.propose([before, 2], 1).tokens.tolist() == [after]


def test_a_record_that_is_there_counts_by_its_code(monkeypatch):
    assert not records.exists("diaa", "no-such-record")
    monkeypatch.setattr(records, "exists", lambda paper, name: True)
    program = "ondevice_studies.diaa.spec_bench+ondevice.speculation.goose"
    origin = {"program": program, "code": sidecars.code(program), "parameters": {"nodes": 8}}
    monkeypatch.setattr(records, "sidecar", lambda paper, name: origin)
    monkeypatch.setattr(checks, "noted", lambda paper: {})
    assert shared.is_recorded("diaa", spec_bench.name_of(models.SMOLLM2, "Goose 8"), METHODS["Goose 8"])
    assert not shared.is_recorded("diaa", spec_bench.name_of(models.SMOLLM2, "Goose 32"), METHODS["Goose 32"])
    origin["code"] = "another"
    assert not shared.is_recorded("diaa", spec_bench.name_of(models.SMOLLM2, "Goose 8"), METHODS["Goose 8"])
    note = {"program": program, "code": sidecars.code(program)}
    monkeypatch.setattr(checks, "noted", lambda paper: {"smollm2-goose-8": note})
    assert shared.is_recorded("diaa", spec_bench.name_of(models.SMOLLM2, "Goose 8"), METHODS["Goose 8"])


def test_answers_come_from_passes_and_plain_decoding(monkeypatch):
    first = pd.DataFrame({
        "model": models.SMOLLM2, "task": "qa", "request": ["spec-bench-1", "spec-bench-2"], "prompt_sha": ["a", "b"],
        "prompt_tokens": 5, "limit": [4, 3], "margin": 0.5, "redundancy": 0.1, "answer_sha": ["x", "y"],
    })  # fmt: skip
    passes = pd.DataFrame({
        "model": models.SMOLLM2, "method": "DIAA", "task": "qa", "request": ["spec-bench-1"] * 2 + ["spec-bench-2"],
        "answer_sha": ["x", "x", "z"], "live": True, "step": [0, 1, 0], "emitted": [1, 2, 2],
    })  # fmt: skip
    tables = {"plain-smollm2": first, "smollm2-diaa": passes}
    monkeypatch.setattr(evidence, "load", lambda paper, name: evidence.born(tables[name].copy(), "recorded"))
    monkeypatch.setattr(records, "exists", lambda paper, name: name in tables)
    answers, _ = spec_bench.load(models.SMOLLM2)
    rows = answers.set_index(["method", "request"])
    assert rows.loc[("DIAA", "spec-bench-1"), ["passes", "identical"]].tolist() == [2, True]
    assert rows.loc[("DIAA", "spec-bench-2"), ["passes", "identical"]].tolist() == [1, False]
    assert rows.loc[("vanilla", "spec-bench-1"), ["passes", "decoded", "tokens"]].tolist() == [3, 3, 4]


def test_a_changed_token_is_found_out_and_ties_are_counted_apart(bench):
    answers = own_prompts.plain_answers(bench.lm, REQUESTS)
    answer, margins = answers[REQUESTS[0].name]
    row = own_prompts.compared(Drafter(), 1, bench.lm, REQUESTS[0], (answer, margins))
    assert row["identical"] and not row["near_tie"] and row["passes"] == len(answer) - 1
    wrong = [*answer[:3], (answer[3] + 1) % V, *answer[4:]]
    for margin, tie in ((0.5, False), (1e-5, True)):
        changed = own_prompts.compared(Drafter(), 1, bench.lm, REQUESTS[0], (wrong, [margin] * len(wrong)))
        assert not changed["identical"] and changed["near_tie"] is tie


class Forgetful(Diaa):
    def begin(self, prompt):
        self.tables = Tables.empty(V)
        super().begin(prompt)


def test_answers_run_again_with_the_passes_of_the_record_and_tables_that_forget_do_not(bench, monkeypatch):
    answers = own_prompts.plain_answers(bench.lm, REQUESTS)
    drafter = METHODS["cold"].drafter(bench)
    rows = [own_prompts.compared(drafter, 16, bench.lm, asked, answers[asked.name]) for asked in REQUESTS]
    recorded = evidence.born(pd.DataFrame(rows).assign(method="cold"), "recorded")
    texts = [prompts.Prompt(asked.name, "qa", "") for asked in REQUESTS]
    monkeypatch.setattr(prompts, "own", lambda: texts)
    asked_by = {asked.name: asked for asked in REQUESTS}
    monkeypatch.setattr(plain, "rendered", lambda loaded, prompt, limit: asked_by[prompt.id])
    asked_again = [("cold", REQUESTS[1].name)]  # in fewer passes, where its answer is known
    for kind, differing in ((Diaa, []), (Forgetful, asked_again)):
        again = own_prompts.run_again(
            bench.lm, None, recorded, {"cold": (lambda kind=kind: kind(Tables.empty(V)), 16)}
        )
        same = evidence.agreement(recorded, again, ["method", "request"], ["prompt_sha", "answer_sha", "passes"])
        assert same.differing == differing
        assert evidence.kind_of(again) == "measured"


def test_a_sized_record_is_loaded_with_its_answers(monkeypatch):
    regime = regimes.Regime("float32, 1 thread, here", "recorded", np.array([1.0, 2.0]), np.array([1.0, 1.5]))
    passes = pd.DataFrame({"method": "x", "request": ["a", "a", "b"], "task": "qa", "drafted": 1})
    answered = pd.DataFrame({"method": ["vanilla", "vanilla", "vanilla", "PLD"], "request": ["a", "b", "c", "a"],
                             "task": "qa", "passes": 9, "decoded": 9})  # fmt: skip
    assert sized.load(models.SMOLLM2, answered, regime) is None
    monkeypatch.setattr(records, "exists", lambda paper, name: name == "smollm2-mixture-sized-float32-1-thread-here")
    monkeypatch.setattr(evidence, "load", lambda paper, name: evidence.born(passes, "recorded"))
    answers, loaded = sized.load(models.SMOLLM2, evidence.born(answered, "recorded"), regime)
    assert answers[["method", "request", "passes"]].to_numpy().tolist() == [["sized", "a", 2], ["sized", "b", 1]]
    assert set(loaded["method"]) == {"sized"}


def test_a_windows_loss_is_that_of_one_uncached_run(bench, monkeypatch):
    monkeypatch.setattr(quality, "CHUNK", 7)
    ids = np.random.default_rng(0).integers(0, V, 40)
    with torch.inference_mode():
        logits = bench.lm.model(torch.from_numpy(ids)[None]).logits[0]
    right = torch.nn.functional.cross_entropy(logits[:-1], torch.from_numpy(ids[1:]))
    assert quality.loss(bench.lm, ids) == pytest.approx(float(right), rel=1e-5)

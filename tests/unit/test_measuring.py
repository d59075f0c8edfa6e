"""Requests, interleaved runs, and the tables made of them: each number against a direct computation."""

from __future__ import annotations

import gc

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from ondevice import corpus, shapes
from ondevice.causal_lm import CausalLM
from ondevice.causal_lm.generation import Output, loops
from ondevice.sdnpu import measuring
from ondevice.sdnpu.measuring import PLAIN, Method
from ondevice.speculation import Drafter, generate, request_set
from ondevice.speculation.prompt_lookup import PromptLookup
from ondevice.speculation.request_set import Request, loop_start
from ondevice.speculation.token_recycling import TokenRecycling

V = 259  # the byte tokenizer's


def tiny(dtype: torch.dtype = torch.float64, spread: float = 0.4) -> LlamaForCausalLM:
    """spread: of the weights; the smaller, the sooner answers loop."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = LlamaConfig(vocab_size=V, max_position_embeddings=1024, initializer_range=spread, **shape)
    return LlamaForCausalLM(config).to(dtype).eval()


@pytest.fixture(scope="module")
def lm() -> CausalLM:
    return CausalLM(tiny())


def request(task: str, prompt: int, ids: tuple[int, ...], limit: int = 12, ends: tuple[int, ...] = ()) -> Request:
    return Request(task, prompt, f"{task}{prompt}", ids, (), limit, frozenset(ends))


REQUESTS = [request("a", 0, (1, 2, 3)), request("a", 1, (4, 5)), request("b", 0, (6, 7, 8, 9), 20)]


# Requests


def test_a_loop_begins_where_its_second_copy_does():
    period = list(range(10, 20))
    assert loop_start([1, 2, 3, *period, *period, *period]) == 13
    assert loop_start([1, 2, 3, *period, *period]) is None  # twice is no loop
    assert loop_start([1, 2, 3, *period, 4, *period, 5, *period]) == 14  # copies need not be neighbours
    assert loop_start([7] * 9) is None and loop_start([7] * 10) == 1  # occurrences overlap
    assert loop_start([5, 6] * 6) == 2


@given(st.lists(st.integers(0, 1), max_size=60))
@settings(max_examples=100, deadline=None)
def test_what_is_before_a_loop_holds_none(ids):
    start = loop_start(ids)
    assert (start is None) == (not loops(ids))
    if start is not None:
        assert start >= 1 and not loops(ids[: start + request_set.LOOP - 1])


def documents(count: int) -> list[corpus.Document]:
    """Documents of twelve modules that hold questions on parameters."""
    made = []
    for n in range(count):
        fields = f"x : int\n    The number {n} of all the boxes.\ny : int\n    The height of box {n} in the row."
        text = f"Stack the boxes of kind {n}.\n\nParameters\n----------\n{fields}"
        made.append(corpus.Document(f"p.m{n % 12:02d}.f{n:03d}", "p", "function", "(x, y)", text, ""))
    return sorted(made, key=lambda document: document.name)


def test_requests_are_the_same_each_time_and_of_different_modules():
    model, tokenizer = tiny(torch.float32), shapes.byte_tokenizer()
    found = measuring.requests(["question", "parameters"], 3, model, tokenizer, documents(60), 40)
    assert found == measuring.requests(["question", "parameters"], 3, model, tokenizer, documents(60), 40)
    for family in ("question", "parameters"):
        mine = [one for one in found if one.task == family]
        assert sum(one.timed for one in mine) == 3 or len(mine) == 12
        assert [one.prompt for one in mine] == list(range(len(mine)))
        assert len({one.name.rpartition(".")[0] for one in mine}) == len(mine)
    one = found[0]
    text = next(task for task in corpus.tasks(documents(60), [one.task]) if task.name == one.name).prompt
    assert list(one.ids) == tokenizer(text)["input_ids"]
    assert tokenizer.eos_token_id in one.ends


def test_limits_are_the_tokens_before_the_loop_or_the_end():
    model = tiny(torch.float32, 0.05)
    prompts = [("one", [1, 2, 3]), ("two", [4, 5])]
    free = request_set.answered("t", prompts, 2, model, None, 60)
    assert loop_start(free[0].said) is not None  # else this tests nothing
    for one in free:
        said = list(generate(CausalLM(model), Drafter(), one.ids, 60).tokens)
        assert list(one.said) == said
        start = loop_start(said)
        assert one.limit == (60 if start is None else start) and not one.ends
    end = free[0].said[2]
    first = free[0].said.index(end)
    ended = request_set.answered("t", prompts[:1], 1, model, end, 60)[0]
    assert ended.limit == first + 1 and list(ended.said) == list(free[0].said[:first]) and not ended.timed


def test_short_answers_are_passed_over_for_longer_ones(monkeypatch):
    lengths = {3: 2, 4: 30, 5: 7, 6: 8, 7: 30}
    monkeypatch.setattr(
        request_set, "greedy",
        lambda model, prompts, end, longest: [
            Output(tuple(range(lengths[len(ids)])), False) for ids in prompts],
    )  # fmt: skip
    prompts = [(f"n{length}", [1] * length) for length in lengths]
    found = request_set.answered("t", prompts, 2, None, 0)
    assert [(len(one.ids), one.timed) for one in found] == [(3, False), (4, True), (5, False), (6, True)]
    assert len(request_set.answered("t", [("n", [1] * 3)] * 50, 2, None, 0)) == 8  # the search ends


def test_redundancy_is_the_share_of_known_4_grams():
    period = tuple(range(10, 20))
    assert request_set.redundancy((50, 51, 10, 11, 12, 13), (1, 2, *period)) == pytest.approx(1 / 9)  # 10 11 12 13
    assert request_set.redundancy((1,), (*period, *period)) == pytest.approx(7 / 17)
    assert np.isnan(request_set.redundancy((1, 2), (3, 4, 5)))


def test_random_weights_have_no_requests():
    model = tiny(torch.float32)
    setattr(model.config, shapes.MARK, True)
    with pytest.raises(ValueError, match="random"):
        measuring.requests(["question"], 1, model, shapes.byte_tokenizer(), documents(3))


# Runs

COLUMNS = [
    "model", "method", "task", "prompt", "round", "tokens", "steps", "drafted", "accepted", "prefill_s", "decode_s",
    "draft_s", "observe_s", "identical",
]  # fmt: skip


def runs_of(lm, methods, rounds=1) -> pd.DataFrame:
    return measuring.runs(measuring.measure(lm, methods, REQUESTS, rounds), "tiny")


def test_every_method_says_what_vanilla_says(lm):
    methods = [PLAIN, Method("PLD", PromptLookup.original), Method("TR", lambda: TokenRecycling(V), 80)]
    table = runs_of(lm, methods, rounds=2)
    assert list(table.columns) == COLUMNS
    assert len(table) == 2 * 3 * 3 and table["identical"].all() and (table["model"] == "tiny").all()
    assert set(table["tokens"]) == {12, 20}
    vanilla = table[table["method"] == "vanilla"]
    assert (vanilla["steps"] == vanilla["tokens"] - 1).all() and not vanilla["drafted"].any()
    drafted = table[table["method"] == "TR"]
    assert (drafted["tokens"] - 1 == drafted["accepted"] + drafted["steps"]).all()
    assert (table["draft_s"] + table["observe_s"] < table["decode_s"]).all() and (table["prefill_s"] > 0).all()


class Recorded(Drafter):
    """Notes which drafter served which prompt, and whether garbage is collected meanwhile."""

    def __init__(self, name, log):
        self._name, self._log = name, log

    def begin(self, prompt):
        self._log.append((self._name, id(self), tuple(prompt)))
        assert not gc.isenabled()


def test_drafters_are_new_in_every_round_and_the_order_rotates(lm):
    log, kept = [], []

    def make(name):
        kept.append(Recorded(name, log))  # kept, so that no two have one id
        return kept[-1]

    methods = [Method(name, lambda name=name: make(name)) for name in ("vanilla", "x", "y")]
    table = runs_of(lm, methods, rounds=2)
    assert gc.isenabled()
    per_request = [log[start : start + 3] for start in range(0, len(log), 3)]
    assert all(len({prompt for _, _, prompt in group}) == 1 for group in per_request)  # interleaved
    assert [group[0][2] for group in per_request] == [one.ids for one in REQUESTS] * 2
    firsts = [group[0][0] for group in per_request]
    assert firsts == ["vanilla", "x", "y", "x", "y", "vanilla"]
    rounds = [{drafter for group in part for _, drafter, _ in group} for part in (per_request[:3], per_request[3:])]
    assert [len(part) for part in rounds] == [3, 3] and not rounds[0] & rounds[1]
    assert len(table) == 18


def test_nothing_learnt_in_a_round_is_known_in_the_next(lm):
    table = runs_of(lm, [PLAIN, Method("TR", lambda: TokenRecycling(V), 80)], rounds=3)
    mine = table[table["method"] == "TR"]
    each = mine.groupby(["task", "prompt"])["accepted"]
    assert (each.min() == each.max()).all() and mine["accepted"].any()


def test_garbage_collection_is_on_again_after_an_error(lm):
    class Fails(Drafter):
        def begin(self, prompt):
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        runs_of(lm, [PLAIN, Method("x", Fails)])
    assert gc.isenabled()


def test_steps_are_logged_one_a_row(lm):
    found = measuring.measure(lm, [PLAIN, Method("TR", lambda: TokenRecycling(V), 80)], REQUESTS)
    steps, runs = measuring.steps(found, "m"), measuring.runs(found, "m")
    keys = ["model", "method", "task", "prompt", "round"]
    sums = steps.groupby(keys)[["drafted", "accepted", "emitted"]].sum()
    right = runs.set_index(keys).sort_index()
    assert (sums["drafted"] == right["drafted"]).all() and (sums["emitted"] == right["tokens"] - 1).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda lm: runs_of(lm, [Method("x", Drafter)]), "one is 'vanilla'"),
        (lambda lm: runs_of(lm, [PLAIN, PLAIN]), "different names"),
        (lambda lm: runs_of(lm, [PLAIN], rounds=0), "there is a round"),
        (lambda lm: measuring.requests(["question"], 0, lm.model, shapes.byte_tokenizer(), []), "not 0"),
        (lambda lm: measuring.requests(["dance"], 1, lm.model, shapes.byte_tokenizer(), []), "no task family"),
        (lambda lm: measuring.speedups(made_by_hand().query("method == 'DIAA'")), "needs a run of 'vanilla'"),
    ],
)
def test_bad_input_is_one_clear_error(lm, call, message):
    with pytest.raises(ValueError, match=message):
        call(lm)


# Tables, from numbers made by hand


def made_by_hand() -> pd.DataFrame:
    """(vanilla, DIAA) decode seconds of 11 tokens: task a, two prompts, three rounds; task b, one prompt."""
    seconds = {
        ("a", 0, 0): (1.0, 0.5), ("a", 0, 1): (3.0, 1.0), ("a", 0, 2): (1.0, 0.1),  # ratios 2, 3, 10: median 3
        ("a", 1, 0): (1.2, 0.1), ("a", 1, 1): (1.2, 0.1), ("a", 1, 2): (2.4, 0.2),  # 12
        ("b", 0, 0): (2.0, 1.0), ("b", 0, 1): (2.0, 0.5), ("b", 0, 2): (2.0, 0.8),  # 2, 4, 2.5: median 2.5
    }  # fmt: skip
    rows = []
    for (task, prompt, number), both in seconds.items():
        for method, decode in zip(("vanilla", "DIAA"), both, strict=True):
            steps, drafted, accepted = (10, 0, 0) if method == "vanilla" else (4, 60, 6)
            rows.append({"model": "m", "method": method, "task": task, "prompt": prompt, "round": number, "tokens": 11,
                         "steps": steps, "drafted": drafted, "accepted": accepted, "prefill_s": 1.0,
                         "decode_s": decode})  # fmt: skip
    return pd.DataFrame(rows).sample(frac=1, random_state=0)  # the order of the rows must not matter


def value(table: pd.DataFrame, method: str, task: str, column: str) -> float:
    rows = table[(table["method"] == method) & (table["task"] == task)]
    assert len(rows) == 1
    return float(rows[column].iloc[0])


def test_speedups_recompute():
    table = measuring.speedups(made_by_hand())
    assert value(table, "DIAA", "a", "speedup") == pytest.approx(6.0)  # the geometric mean of 3 and 12
    assert value(table, "DIAA", "b", "speedup") == pytest.approx(2.5)
    assert value(table, "DIAA", "average", "speedup") == pytest.approx((6 + 2.5) / 2)
    assert (value(table, "DIAA", "a", "low"), value(table, "DIAA", "a", "high")) == pytest.approx((3, 12))
    assert value(table, "DIAA", "average", "low") == pytest.approx((3 + 2.5) / 2)
    vanilla = table[table["method"] == "vanilla"]
    assert len(vanilla) == 3 and np.allclose(vanilla[["speedup", "low", "high"]], 1)


def test_by_task_recomputes():
    table = measuring.by_task(made_by_hand())
    for task in ("a", "b", "average"):
        assert value(table, "DIAA", task, "tokens_per_step") == pytest.approx(2.5)
        assert value(table, "DIAA", task, "acceptance_rate") == pytest.approx(0.1)
        assert np.isnan(value(table, "vanilla", task, "acceptance_rate"))

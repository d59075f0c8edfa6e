"""What is recorded of a method, and what is timed of it: against the loop run plainly."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ondevice.causal_lm import CausalLM, Session
from ondevice.speculation import Drafter, generate
from ondevice.speculation.layer_skipping import LayerSkipping
from ondevice.speculation.prompt_lookup import PromptLookup
from ondevice_papers.diaa.drafter import Diaa
from ondevice_papers.diaa.tables import Tables
from ondevice_studies.diaa import methods, record, timing
from ondevice_studies.diaa.methods import BASE, BOTH, MAIN, METHODS, SMALL, Method, Workbench, recorded
from ondevice_studies.speculation.request_set import Request

V = 40


@pytest.fixture(scope="module")
def lm() -> CausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64}
    config = LlamaConfig(vocab_size=V, max_position_embeddings=128, initializer_range=0.4, **shape)
    return CausalLM(LlamaForCausalLM(config).double())


@pytest.fixture
def bench(lm, monkeypatch) -> Workbench:
    """A tiny model with three methods."""
    skipping = lambda of: LayerSkipping(of.lm, 0.3)  # noqa: E731
    rows = {"vanilla": Method("ondevice.speculation.Drafter", 1, BOTH), "SWIFT": Method(skipping, 12, BOTH),
            "DIAA": Method(lambda of: Diaa(Tables.empty(V), grow=of.grow), 12, BOTH)}  # fmt: skip
    monkeypatch.setattr(methods, "METHODS", rows)
    bench = Workbench("tiny")
    bench.lm = bench.other = lm
    return bench


def request(task: str, number: int, prompt: tuple[int, ...], limit: int = 30) -> Request:
    return Request(task, number, f"{task}{number}", prompt, (), limit, frozenset())


REQUESTS = [request("a", 0, (1, 2, 3)), request("a", 1, (1, 2, 3)), request("b", 0, (7, 8))]


def test_all_methods_have_names_and_the_small_model_no_smaller_one():
    every = {*recorded(BASE, "tasks"), *recorded(BASE, "many")}
    assert every == set(METHODS) and set(MAIN) == set(recorded(BASE, "long_prompts")) and not recorded(SMALL, "many")
    assert "SpS" not in recorded(SMALL, "tasks") and set(recorded(SMALL, "tasks")) < set(METHODS)
    assert {method for _, _, method in record.units()} == set(METHODS)
    with pytest.raises(ValueError, match=r"DIIA.*vanilla, DIAA"):
        Workbench().make("DIIA")


def test_a_replay_on_known_answers_has_the_passes_of_the_model(bench):
    said = {one: generate(bench.lm, Drafter(), one.ids, one.limit, eos_token_ids=one.ends).tokens for one in REQUESTS}
    known = [replace(one, answer=tuple(tokens)) for one, tokens in said.items()]
    methods.METHODS["PLD"] = Method(lambda of: PromptLookup.transformers(), 8, BOTH)
    methods.METHODS["mixture"] = Method("ondevice.speculation.mixture.Mixture", 8, BOTH)
    for method in ("PLD", "mixture"):
        live, told = (record.run_method(bench, method, "tasks", known, told) for told in (False, True))
        assert live[1].equals(told[1]) and live[0].drop(columns="live").equals(told[0].drop(columns="live"))


def test_a_method_says_the_same_each_time_and_begins_each_task_anew(bench):
    answers, passes = record.run_method(bench, "DIAA", "tasks", REQUESTS)
    plain = record.run_method(bench, "vanilla", "tasks", REQUESTS)[0]
    assert (answers["answer_sha"] == plain["answer_sha"]).all() and (plain["margin"] > 0).all()
    assert (passes.groupby(["task", "request"])["emitted"].sum() == 29).all()
    steps = passes.groupby(["task", "request"]).size()
    assert steps["a", 1] < steps["a", 0]  # the tables know the answer by then
    first = record.run_method(bench, "DIAA", "tasks", REQUESTS[:1])[1]
    assert first.equals(passes[: len(first)])  # so the first of a task can run again alone
    alone = record.run_method(bench, "DIAA", "tasks", REQUESTS[2:])[1]
    assert alone.equals(passes[passes["task"] == "b"].reset_index(drop=True))


def test_a_prompt_that_changed_is_refused(bench, monkeypatch):
    answers = record.run_method(bench, "vanilla", "tasks", REQUESTS)[0]
    known = {one.name: list(one.ids) for one in REQUESTS}
    monkeypatch.setattr(Workbench, "end", 0)
    monkeypatch.setattr(record, "prompts", lambda which, task, only: [(name, known[name]) for name in only])
    again = record.sample(bench, answers)
    assert [(one.task, one.prompt, one.ids, one.limit) for one in again] == [
        ("a", 0, (1, 2, 3), 30), ("b", 0, (7, 8), 30)]  # fmt: skip
    known["b0"] = [7, 9]
    with pytest.raises(ValueError, match="b0"):
        record.sample(bench, answers)


def test_watched_answers_are_the_same_and_their_parts_add_up(bench):
    before = Session.verify
    runs = timing.whole(bench, REQUESTS, ["vanilla", "DIAA", "SWIFT", "DIAA, again"], float("inf"))
    assert len(runs) == 12 and (runs["tokens"] == 30).all()
    passes = record.run_method(bench, "DIAA", "tasks", REQUESTS)[0].set_index(["task", "request"])["passes"]
    mine = runs[runs["method"] == "DIAA, again"].set_index(["task", "request"])["passes"]
    assert (mine == passes.reindex(mine.index)).all()
    parts = ["verify_s", "keep_s", "drafting_s", "draft_s", "observe_s", "choose_s"]
    assert np.allclose(runs[parts].sum(axis=1), runs["decode_s"]) and (runs[parts] >= 0).all(axis=None)
    assert ((runs["drafting_s"] > 0) == (runs["method"] == "SWIFT")).all()
    assert Session.verify is before


def test_a_driven_shape_accepts_what_the_other_model_does(bench, monkeypatch):
    torch.manual_seed(1)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    big = CausalLM(LlamaForCausalLM(LlamaConfig(vocab_size=99, max_position_embeddings=256, **shape)).double())
    monkeypatch.setattr(timing, "load", lambda spec, dtype: big)
    runs = timing.whole(bench, REQUESTS, ["vanilla", "DIAA"], float("inf"), shape="random:big")
    right = [len(generate(bench.lm, Drafter(), one.ids, 30).steps) for one in REQUESTS]
    assert runs[runs["method"] == "vanilla"]["passes"].tolist() == right and (runs["decode_s"] > 0).all()
    assert (runs[runs["method"] == "DIAA"]["passes"] < 29).all()

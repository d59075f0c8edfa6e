"""The assistant's compositions: sides that draft, what is picked, and the clock that plays sets of systems."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from tiny import random_model

from ondevice import evidence
from ondevice.causal_lm import CausalLM, Session
from ondevice.network.link import Line
from ondevice.retrieval import SparseIndex
from ondevice.speculation import Draft, Drafter, Verified
from ondevice_programs.assistant import picking
from ondevice_programs.assistant.drafting import BUDGET, Ahead, Continued, drafters, likeliest_chain
from ondevice_programs.pair.decoder import Decoder, Interrupted
from ondevice_programs.pair.node import Documents, Source
from ondevice_programs.pair.relevance import COSINE
from ondevice_studies.assistant import study
from ondevice_studies.assistant.study import (
    Recorded,
    SystemCosts,
    admitted,
    play,
    raced,
    single,
)
from ondevice_studies.dragon.pair import added
from ondevice_studies.dragon.simulator import HEADER, World, simulate

pytestmark = pytest.mark.usefixtures("one_thread")

V, CONTEXT = 61, 48
PREFIXES, SUFFIX, SCORES = [[5, 17, 3, 44, 8, 29, 2], [11, 4]], [9, 33, 14], [1.0, 2.5]
BARE = [7]


# Drafting


@cache
def lm(kind: str = "llama") -> CausalLM:
    options = {"sliding_window": 12} if kind == "mistral" else {}
    return CausalLM(random_model(kind, torch.float32, vocabulary=V, context=CONTEXT, **options))


def plain(kind: str = "llama") -> Decoder:
    return Decoder(lm(kind), PREFIXES, SUFFIX, SCORES, bare=BARE)


def ahead(drafter: Drafter, kind: str = "llama") -> Ahead:
    return Ahead(lm(kind), PREFIXES, SUFFIX, SCORES, bare=BARE, drafter=lambda: drafter)


class Told(Drafter):
    """Drafts what it is told, and keeps all that it hears."""

    def __init__(self, guess: Callable[[Sequence[int], int], Sequence[int]], wants_prefill: bool = False) -> None:
        self.guess, self.wants_prefill = guess, wants_prefill
        self.prompt, self.steps, self.rows = [], list[Verified](), dict[int, torch.Tensor]()

    def begin(self, prompt: Sequence[int]) -> None:
        self.prompt = list(prompt)

    def prefilled(self, start: int, logits: torch.Tensor) -> None:
        self.rows |= {start + i: row for i, row in enumerate(logits)}

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        assert list(tokens[: len(self.prompt)]) == self.prompt
        return Draft.chain(list(self.guess(tokens[len(self.prompt) :], budget))[:budget])

    def observe(self, step: Verified) -> None:
        self.steps.append(step)


@pytest.mark.parametrize(("kind", "seed"), [("llama", 0), ("llama", 1), ("llama", 2), ("mistral", 3)])
def test_whatever_is_drafted_the_distributions_are_those_of_a_plain_decoder(kind: str, seed: int):
    random, taken, alike = np.random.default_rng(seed), 0, plain(kind)
    one = ahead(Told(lambda said, most: random.integers(2, size=random.integers(12)), bool(seed % 2)), kind)
    for _ in range(80):
        call = random.integers(5)
        if call < 2 and one.room > 1:
            token = int(random.integers(2))  # of two, as the drafts: half of them come true
            one.commit(token), alike.commit(token)
        elif call == 2 and random.random() < 0.4:
            position = int(random.integers(one.position + 1))
            one.rollback(position), alike.rollback(position)
        elif call == 3 and random.random() < 0.4:
            one.interrupt()
            with contextlib.suppress(Interrupted):
                one.next_distribution()
        else:
            np.testing.assert_allclose(one.next_distribution(), alike.next_distribution(), atol=1e-4)
            np.testing.assert_allclose(one.prior, alike.prior, atol=1e-4)
            taken += one.width == 0
        assert one.tokens == alike.tokens
    assert taken > 5 or kind == "mistral"  # whose documents run one by one, without drafts


def test_a_context_that_ends_leaves_room_for_no_more_drafts():
    one, alike = ahead(Told(lambda said, most: [3] * most)), plain()
    while one.room > 1:
        one.commit(3), alike.commit(3)
        np.testing.assert_allclose(one.next_distribution(), alike.next_distribution(), atol=1e-4)


def greedy(decoder: Decoder, count: int) -> list[int]:
    for _ in range(count):
        decoder.commit(int(decoder.next_distribution().argmax()))
    return decoder.tokens


def test_right_drafts_save_passes_and_wrong_ones_none():
    text = greedy(plain(), 21)
    right, wrong = Told(lambda said, most: text[len(said) :]), Told(lambda said, most: [(text[len(said)] + 1) % V] * 3)
    widths: dict[str, list[int]] = {}
    for name, drafter in (("right", right), ("wrong", wrong)):
        side = ahead(drafter)
        widths[name] = []
        for token in text[:20]:
            side.next_distribution()
            widths[name].append(side.width)
            side.commit(token)
    assert widths["right"] == [len(SUFFIX), 1 + BUDGET, *[0] * BUDGET, 1 + BUDGET, *[0] * BUDGET, 3]
    assert widths["wrong"] == [len(SUFFIX), *[4] * 19]


def test_a_drafter_hears_the_documents_and_the_mixture_of_every_step():
    text = greedy(plain(), 14)
    random = np.random.default_rng(0)
    told = Told(lambda said, most: [t if random.random() < 0.7 else 0 for t in text[len(said) :]], wants_prefill=True)
    side, alike = ahead(told), plain()
    assert told.prompt == [*PREFIXES[0], *PREFIXES[1], *BARE, *SUFFIX]
    expected = [alike.next_distribution()]
    for token in greedy(side, 14):
        alike.commit(token)
        expected.append(alike.next_distribution())
    assert side.tokens == text and sorted(told.rows) == list(range(len(PREFIXES[0]) + len(PREFIXES[1]) + len(BARE)))
    np.testing.assert_allclose(told.rows[8], Session(lm()).prefill(PREFIXES[1]), atol=1e-4)  # after the second document
    position, said = 0, [*told.prompt, *text]
    assert {len(step.path) > 0 for step in told.steps} == {True, False}
    for step in told.steps:  # every token is told once, with the distributions that were mixed before it
        assert step.root == said[len(told.prompt) + position - 1]
        assert list(step.emitted) == text[position : position + len(step.emitted)]
        assert step.draft.tokens[: len(step.path)].tolist() == list(step.emitted[:-1])
        assert len(step.logits) == 1 + len(step.draft)
        for row, mixed in zip(step.logits, expected[position : position + len(step.emitted)], strict=False):
            np.testing.assert_allclose(row, mixed, atol=1e-4)
        position += len(step.emitted)


def test_one_drafters_chain_is_continued_by_the_others():
    first, second = Told(lambda said, most: [1, 2, 3]), Told(lambda said, most: [40 + said[-1]] * 9)
    both = Continued(first, second)
    both.begin([9, 9])
    draft = both.propose([9, 9, 5], 32)
    assert draft.tokens.tolist() == [1, 2, 3, *[43] * (BUDGET - 3)] and draft.depth == BUDGET
    both.prefilled(4, torch.zeros(2, V))
    step = Verified(5, draft, torch.zeros(1 + BUDGET, V), [0], [1, 7])
    both.observe(step)
    assert first.prompt == second.prompt == [9, 9] and first.steps == second.steps == [step]
    assert sorted(first.rows) == [4, 5] and not second.rows


def test_each_session_learns_into_tables_of_its_own():
    made = drafters(V)
    assert list(made) == ["", "L", "S", "LS"]
    taught, other = made["L"](), made["L"]()
    for drafter in (taught, other):
        drafter.begin([5])
    logits = torch.zeros(1, V)
    logits[0, 30] = 9.0
    taught.observe(Verified(5, Draft((), ()), logits, [], [30]))
    chains = [likeliest_chain(drafter.propose([5], 8), 8)[:1] for drafter in (taught, other)]
    assert chains == [[30], []]
    assert not len(made[""]().propose([5], 8)) and made["LS"]().wants_prefill and not made["L"]().wants_prefill


# Picking


TEXTS = ["cats sleep long", "dogs bark loud", "dogs and cats play", "rain falls"]
WORDS = ["cats", "dogs", "rain", "play"]


def embedded(texts: Sequence[str]) -> np.ndarray:
    """Unit vectors [n, 5] of which words are in it; the last entry is of texts without any."""
    counts = np.array([[word in text for word in WORDS] + [not any(w in text for w in WORDS)] for text in texts], "f4")
    return counts / np.linalg.norm(counts, axis=1, keepdims=True)


class FakeScorer:
    """Likes long texts."""

    key = "length"
    asked: tuple[str, list[str]]

    def __call__(self, query: str, texts: list[str]) -> np.ndarray:
        self.asked = query, texts
        return np.array([len(text) / 10 for text in texts])


def toy(scorer: Any, texts: Sequence[str] = TEXTS) -> Documents:
    sources = [Source(f"{i}.md", 1) for i in range(len(texts))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(picking, "embedder", lambda: embedded)
        return picking.picked(Documents(texts, SparseIndex.build(texts), sources), embedded(texts), scorer)


def test_a_reranker_picks_among_what_hybrid_search_finds_and_without_it_the_nearest_embeddings_are_picked():
    texts, scores = toy(None).best("dogs", 2)
    assert texts == ["dogs bark loud", "dogs and cats play"] and scores == pytest.approx([COSINE, COSINE * 3**-0.5])
    scorer = FakeScorer()
    texts, scores = toy(scorer).best("dogs", 2)
    assert scorer.asked[0] == "dogs" and sorted(scorer.asked[1]) == sorted(TEXTS)
    assert scorer.asked[1][0] == "dogs bark loud"  # both lists' first
    assert texts == ["dogs and cats play", "cats sleep long"] and scores == [1.8, 1.5]
    many = [f"dogs number {i}" for i in range(14)] + ["no such word in here, but by far the longest of them all"]
    positions, _ = toy(scorer, many).positions("dogs", 2)
    assert len(scorer.asked[1]) == picking.CANDIDATES and 14 not in positions
    assert toy(None).relevance != toy(scorer).relevance == "length"


# The clock


COSTS = SystemCosts({
    "embedding": {1: 0.5}, "hybrid": {1: 0.25}, "layer of a candidate": {1: 0.125}, "prefill": {1: 0.01},
    "prefill, logits read": {1: 0.02}, "pass": {1: 1.0, 3: 2.0}, "drafting": {1: 0.0}, "drafting S": {1: 0.5},
    "mixture": {1: 0.0625},
})  # fmt: skip
ANSWER = {"device_prompt": 100, "device_work": 8, "cloud_prompt": 50, "cloud_work": 4}


def test_costs_are_medians_with_straight_lines_between_sizes():
    rows = [("a", 1, s) for s in (1.0, 2.0, 9.0)] + [("a", 3, 6.0), ("b", 1, 5.0)]
    costs = SystemCosts.of(pd.DataFrame(rows, columns=["name", "size", "seconds"]))
    assert (costs("a"), costs("a", 2), costs("a", 7), costs("b")) == (2.0, 4.0, 6.0, 5.0)


def test_a_side_is_ready_when_its_passages_are_picked_and_prefilled():
    assert study.ready(COSTS, ANSWER, "cloud", False, "LS") == pytest.approx(0.5 + 50 * 0.02)
    assert study.ready(COSTS, ANSWER, "device", True, "") == pytest.approx(0.25 + 8 * 0.125 + 100 * 0.01)


# Questions by hand: (tokens of the query, right by device, cloud, both), whose drafts survive, the device's widths


NAMES = ["a", "b", "c"]
QUERY, RIGHT = {"a": 10, "b": 20, "c": 30}, {"device": "a", "cloud": "b", "both": "abc"}
LENGTH, KEPT = 4, [(1, 1), (1, 0), (0, 1), (1, 1)]  # accepted: device's, cloud's


def by_hand(slow_cloud: bool = False) -> Recorded:
    """Three questions of four tokens; both sides' rows cost a second, and more where the cloud is slow."""
    answers, steps = [], []
    for name, method, drafter in product(NAMES, ("device", "cloud", "both"), ("", "S")):
        about = {"question": name, "picked": False, "method": method, "drafter": drafter}
        answers.append({**about, "holder": "device", "query": QUERY[name], "right": name in RIGHT[method],
                        "tokens": LENGTH, "device_prompt": 100, "device_work": 0, "cloud_work": 0, "cloud_bytes": 700,
                        "cloud_prompt": 10**5 if slow_cloud else 50})  # fmt: skip
        for side in ("device", "cloud") if method == "both" else (method,):
            for width, (own, other) in zip([3, 3, 0, 0] if drafter else [3, 1, 1, 1], KEPT, strict=True):
                told = (own, other) if side == "device" else (other, own)
                steps.append({**about, "side": side, "width": width, "accepted": told[0], "other_accepted": told[1]})
    answers.append({**answers[0], "question": "undrafted", "drafter": ""})
    return Recorded(evidence.born(pd.DataFrame(answers), "recorded"), pd.DataFrame(steps), COSTS)


def test_one_sides_answer_is_its_own_passes():
    alone = single(by_hand(), "a", "", slower=8.0)
    first = 0.5 + 1.0 + 2.0 + 0.0625
    assert alone["ttft"] == pytest.approx(8 * first) and alone["last"] == pytest.approx(8 * (first + 3 * 1.0625))
    assert (alone["right"], alone["wire"], alone["cloud_tokens"], alone["asked"]) == (True, 0, 0, False)
    cloud = single(by_hand(), "b", "", slower=8.0, side="cloud")
    assert cloud["ttft"] == pytest.approx(0.5 + 0.5 + 2.0625) and cloud["cloud_tokens"] == 50 + LENGTH
    drafted = single(by_hand(), "a", "S", slower=1.0)
    assert drafted["last"] == pytest.approx(0.5 + 2.0 + 2 * 2.5 + 4 * 0.0625)  # two passes of width 3, four mixtures


def test_both_sides_answer_is_the_simulators():
    recorded, delay, seed = by_hand(), 0.1, 3
    found = study.together(recorded, "a", "D", delay, 0.5, seed)
    up, down = added(delay)
    device = [s / 2 for s in (0.5 + 1.0 + 2.0625, 1.0625, 1.0625, 1.0625)]
    cloud = [Line(up, seed, "up").arrival(0.0, HEADER) + 0.5 + 0.5 + 2.0625, 1.0625, 1.0625, 1.0625]
    run = simulate(World(np.array(KEPT, bool), device, cloud, up, down, lookahead=32), seed=seed)
    assert found["ttft"] == pytest.approx(run.seen[0]) and found["last"] == pytest.approx(run.total)
    assert found["wire"] == sum(run.sent) + HEADER and found["cloud_tokens"] == 50 + run.drafted[1]
    assert found["right"] and found["asked"] and run.total > sum(cloud)  # what is rejected costs more


@pytest.mark.parametrize("budget", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_what_is_admitted_keeps_the_budget(budget: float):
    lengths = np.random.default_rng(1).permutation(np.arange(5, 45))
    chosen = [admitted(lengths, budget, seed) for seed in range(300)]
    spent = np.array([np.sum(lengths, where=one) for one in chosen])
    for one in chosen:  # the longest ones
        assert (one == (lengths >= np.min(lengths, where=one, initial=99))).all()
    if budget in (0, 1):
        assert set(spent) == {budget * sum(lengths)}
    assert spent.max() <= budget * sum(lengths) + max(lengths)  # never a question over it
    assert spent.mean() == pytest.approx(budget * sum(lengths), abs=4 * max(1e-9, spent.std()) / 300**0.5)


def test_where_the_cloud_is_late_the_device_wins_all():
    recorded = by_hand(slow_cloud=True)
    for name, row in zip(NAMES, raced(recorded, NAMES, "", 0.1, 8.0), strict=True):
        alone = single(recorded, name, "", 8.0)
        assert (row["ttft"], row["last"], row["right"]) == (alone["ttft"], alone["last"], name == "a")
        assert (row["wire"], row["cloud_tokens"], row["asked"]) == (HEADER, 10**5, True)


def test_where_the_cloud_is_first_its_text_counts_and_moves_only_as_due(monkeypatch: pytest.MonkeyPatch):
    recorded, up, down = by_hand(), *added(0.1)
    rows = raced(recorded, NAMES, "", 0.1, 8.0, seed=5)
    for i, (name, row) in enumerate(zip(NAMES, rows, strict=True)):
        cloud = single(recorded, name, "", 8.0, "cloud")
        way = Line(up, 5 + i, "up").arrival(0.0, HEADER) + Line(down, 5 + i, "down").arrival(0.0, HEADER)
        assert row["ttft"] == pytest.approx(cloud["ttft"] + way) and row["last"] == pytest.approx(cloud["last"] + way)
        assert row["right"] == (name == "b") and row["cloud_tokens"] == 50 + LENGTH  # a pass takes over a second: none
        assert row["wire"] == HEADER * (1 + LENGTH)  # is unread, nothing moves and no passage is sent
    kept = study.stream

    def moving(rule: Any, given: Any) -> Any:
        told = kept(rule, given)
        moved = np.array([True, False, False])
        return type(told)(told.delivered, 2 * moved, told.unread, moved, np.where(moved, 2, LENGTH),
                          np.where(moved, LENGTH - 2, 0))  # fmt: skip

    monkeypatch.setattr(study, "stream", moving)
    moved, *others = raced(recorded, NAMES, "", 0.1, 8.0, seed=5)
    assert others == rows[1:]
    assert moved["wire"] == HEADER * 3 + 700 and moved["cloud_tokens"] == 50 + 2
    way = np.mean([row["ttft"] for row in rows]) - cloud["ttft"]
    took = 2 * way + 700 / down.bandwidth + 8 * 0.01 * (50 + 2)  # the passages come, prompt and prefix are prefilled
    assert moved["last"] == pytest.approx(rows[0]["ttft"] + 1.0625 + took + 8.0 * 1.0625)


def test_a_set_is_played_as_its_systems_say():
    recorded = by_hand()
    assert recorded.names == NAMES
    sets = {s: play(recorded, s, 0.1, 8.0, budget=0.5).set_index("question") for s in ("", "D", "C", "DC", "DS")}
    assert all(table.attrs["kind"] == "recorded+simulated" for table in sets.values())
    alone = {name: single(recorded, name, "", 8.0) for name in NAMES}
    assert not sets[""]["asked"].any() and sets["D"]["asked"].all() and sets["D"]["right"].all()
    asked = sets["C"]["asked"]
    assert asked["c"] == 1 and asked["a"] == 0 and (sets["DC"]["asked"] == asked).all()  # the longest, 30 of 60
    for name in NAMES:
        assert sets[""].loc[name, "last"] == alone[name]["last"]
        if asked[name]:
            assert (sets["DC"].loc[name, ["ttft", "wire"]] == sets["D"].loc[name, ["ttft", "wire"]]).all()
            assert sets["C"].loc[name, "ttft"] < alone[name]["ttft"]  # the cloud is eight times faster
        else:
            assert sets["C"].loc[name, "last"] == sets["DC"].loc[name, "last"] == alone[name]["last"]
            assert sets["DC"].loc[name, "wire"] == 0 == sets["C"].loc[name, "cloud_tokens"]
    assert (sets["DS"]["ttft"] > sets["D"]["ttft"]).all()  # its prefill reads logits
    none = play(recorded, "C", 0.1, 8.0, budget=0.0).set_index("question")
    assert (none["last"] == sets[""]["last"]).all() and not none["asked"].any()


def test_synergy_is_one_where_gains_multiply():
    def timed(*seconds: float) -> pd.DataFrame:
        return evidence.born(pd.DataFrame({"last": seconds}), "simulated")

    played = {"": timed(8.0, 16.0), "D": timed(4.0, 8.0), "S": timed(2.0, 8.0), "DS": timed(1.0, 4.0)}
    assert study.gain(played, "last", "D").value == pytest.approx(2.0)
    assert study.gain(played, "last", "DS", "D").value == pytest.approx(8**0.5)
    assert study.synergy(played, "last", "S", "D").value == pytest.approx(1.0)
    assert study.synergy(played | {"DS": timed(2.0, 8.0)}, "last", "D", "S").value == pytest.approx(0.5)

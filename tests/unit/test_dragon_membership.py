"""The membership attack: each evidence against its equation, the session against one by hand, ranks by counting."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch
from tiny import random_model

from ondevice import shapes
from ondevice.causal_lm import CausalLM, scoring
from ondevice.retrieval import SparseIndex
from ondevice_papers.dragon import codec
from ondevice_papers.dragon.aggregation import target
from ondevice_papers.dragon.messages import Mode
from ondevice_papers.dragon.speculative_aggregation import Stream, aggregate, choose, gumbels, sample, uniforms
from ondevice_programs.pair.decoder import Template
from ondevice_programs.pair.node import WEIGHT_TEMPERATURE, Documents, Node
from ondevice_studies.dragon import membership
from ondevice_studies.dragon.membership import (
    Singles,
    Transcript,
    attack,
    candidate_log_probs,
    candidates,
    from_distributions,
    from_noise,
    from_tokens,
    relevance,
    standing,
    transcript,
)

pytestmark = pytest.mark.usefixtures("one_thread")

V = 1500  # of which 512 bytes do not hold all
TEXTS = [
    "zebras are seen at dusk", "a tablet for the heart, twice a day", "the doctor was told", "zebras sleep standing",
    "the next visit is on Thursday", "rain", "a pharmacy by the river sells tea, coffee and, on most days, newspapers",
]  # fmt: skip
QUERY = "When are zebras seen by the doctor?"


@cache
def lm() -> CausalLM:
    return CausalLM(random_model("llama", torch.float32, vocabulary=V, context=256, spread=0.3))


def node(*texts: str) -> Node:
    documents = Documents(texts, SparseIndex.build(texts))
    return Node(lm(), shapes.byte_tokenizer(), documents, Template("{document}\n{query}\n"))


def sides() -> tuple[Node, Node]:
    return node(*TEXTS[:4]), node(*TEXTS[4:])


def session(p_device: Singles, p_cloud: Singles, tokens: Sequence[int], prior: Singles | None = None, seed: int = 0):
    flat = np.full_like(p_device, 1 / p_device.shape[1])
    accepted = np.zeros((len(tokens), 2), bool)
    return Transcript(np.array(tokens), p_device, p_cloud, flat if prior is None else prior, accepted, (0,), seed)


def distributions(*shape: int, seed: int = 0) -> Singles:
    """[*shape, V] that are far from one another."""
    return np.random.default_rng(seed).dirichlet(np.full(shape[-1], 0.3), shape[:-1]).astype(np.float32) + 1e-9


# Ranks


def test_ties_count_against_the_attacker_but_not_between_members():
    members = np.array([True, True, False, False])
    assert standing(np.array([4.0, 4.0, 2.0, 1.0]), members) == (1, 1, 1.0)
    assert standing(np.array([4.0, 0.0, 4.0, 1.0]), members) == (0, 2, pytest.approx(1.5 / 4))
    assert standing(np.ones(4), members) == (0, 3, 0.5)


@pytest.mark.parametrize("seed", range(5))
def test_auc_counts_pairs(seed: int):
    random = np.random.default_rng(seed)
    scores, members = random.integers(0, 6, 40).astype(float), np.arange(40) % 7 == seed
    pairs = [(a > b) + (a == b) / 2 for a in scores[members] for b in scores[~members]]
    assert standing(scores, members)[2] == pytest.approx(np.mean(pairs))


@pytest.mark.parametrize("members", [[False, False], [True, True]])
def test_ranks_need_members_and_others(members: list[bool]):
    with pytest.raises(ValueError, match="members and"):
        standing(np.array([1.0, 2.0]), np.array(members))


# Evidence


def test_tokens_are_weighed_by_the_even_mixture():
    p_cloud = np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]], np.float32)
    given = np.array([[[0.2, 0.7, 0.1], [0.6, 0.3, 0.1]], [[0.9, 0.05, 0.05], [0.1, 0.2, 0.7]]], np.float32)
    found = from_tokens(np.log(given), session(p_cloud, p_cloud, [1, 2]))
    expected = [np.log((0.25 + 0.7) / 2) + np.log((0.8 + 0.1) / 2), np.log((0.25 + 0.05) / 2) + np.log(0.75)]
    assert found == pytest.approx(expected, abs=1e-6)
    assert found.shape == (2,) and found.dtype == np.float64


def test_noise_counts_the_tokens_that_it_would_give_and_then_weighs_them():
    given, p_cloud, seed, n = distributions(6, 12, 9), distributions(12, 9, seed=1), 5, 12
    mixed = (p_cloud + given[2]) / 2
    tokens = [int(choose(mixed[t], gumbels(seed, t, 9))) for t in range(n)]
    tokens[3] = (tokens[3] + 1) % 9
    seen = session(p_cloud, p_cloud, tokens, seed=seed)
    counts = []
    for one in given:
        sums = [np.log((p_cloud[t] + one[t]) / 2) + gumbels(seed, t, 9) for t in range(n)]
        counts.append(sum(int(row.argmax()) == tokens[t] for t, row in enumerate(sums)))
    assert counts[2] == n - 1 > max(counts[:2] + counts[3:]) and len(set(counts)) < 6
    found = from_noise(np.log(given), seen)
    assert np.floor(found).tolist() == counts
    assert np.argsort(found).tolist() == np.lexsort((from_tokens(np.log(given), seen), counts)).tolist()


@pytest.mark.parametrize("cap", [8, 16, 4096])
def test_distributions_are_compared_as_the_cloud_reads_them(cap: int):
    given, p_device, prior = distributions(3, 2, 60), distributions(2, 60, seed=1), distributions(2, 60, seed=2)
    told = [codec.decode(codec.encode(p_device[t], cap, prior[t]), 60) for t in range(2)]
    blind = [codec.decode(codec.encode(p_device[t], cap), 60) for t in range(2)]
    assert cap != 16 or np.abs(np.array(told) - blind).max() > 0.01  # the prior has a part in it
    expected = [sum(float(told[t] @ np.log(one[t])) for t in range(2)) for one in given]
    found = from_distributions(cap)(np.log(given), session(p_device, p_device, [0, 0], prior))
    assert found == pytest.approx(expected, rel=1e-5)


# Candidates


def test_candidates_are_the_members_and_the_nearest_of_the_pool():
    pool = ["zebras and zebras", "rain", "a zebra", "zebras at dusk", "rain", "dusk falls, they say, on all of us"]
    found = candidates("zebras at dusk", ["rain", "a member"], pool, 5)
    assert found[:2] == ["rain", "a member"] and found[2] == "zebras at dusk" and len(set(found)) == 5
    assert set(found[3:]) == {"zebras and zebras", "dusk falls, they say, on all of us"}
    assert len(candidates("zebras", ["rain"], pool, 5)) == 5


def gathered(side: Node, passages: Sequence[str], query: str, tokens: Sequence[int]) -> tuple[Singles, int]:
    """([N, n, V] in the passages' order, batches)."""
    batches = list(candidate_log_probs(side, passages, query, tokens))
    which = [index for batch, _ in batches for index in batch]
    assert sorted(which) == list(range(len(passages)))
    return np.concatenate([log_probs for _, log_probs in batches])[np.argsort(which)], len(batches)


def test_candidates_log_probabilities_are_those_of_scoring():
    side, tokens = node(*TEXTS), [70, 12, 200, 101, 33]
    found, _ = gathered(side, TEXTS, QUERY, tokens)
    ids = [side.tokenizer(f"{text}\n{QUERY}\n").input_ids for text in TEXTS]
    scored = scoring.score(lm().model, ids, [tokens] * len(TEXTS))
    assert found.shape == (len(TEXTS), 5, V) and found.dtype == np.float32
    for row, one in zip(found, scored, strict=True):
        assert row[np.arange(5), tokens] == pytest.approx(one.log_probs, abs=1e-5)
    assert np.exp(found.astype(float)).sum(-1) == pytest.approx(1, abs=1e-5)
    assert np.abs(found[0] - found[1]).max() > 0.1


@pytest.mark.parametrize("limit", ["_BATCH_TOKENS", "_BATCH_LOGITS"])
def test_batches_change_nothing(monkeypatch: pytest.MonkeyPatch, limit: str):
    found, batches = gathered(node("x"), TEXTS, QUERY, [70, 12, 200])
    monkeypatch.setattr(membership, limit, 1)
    alone, single = gathered(node("x"), TEXTS, QUERY, [70, 12, 200])
    assert (batches, single) == (1, len(TEXTS))
    assert np.abs(found - alone).max() < 1e-5


# The session


def by_hand(mode: str, seed: int, n: int) -> tuple[list[int], list[list[bool]], list[list[np.ndarray]]]:
    """Tokens, accepted drafts and [device, cloud, prior] of a session, by Algorithm 1 or by shared noise."""
    decoders = [side.decoder(QUERY, 2)[0] for side in sides()]
    tokens, accepted, mixtures = [], [], []
    for t in range(n):
        p = [np.exp(decoder.next_distribution()) for decoder in decoders]
        prior = decoders[0].prior
        coded = [codec.encode(one, 512, decoder.prior) for one, decoder in zip(p, decoders, strict=True)]
        q, whole = [codec.decode(one, V) for one in coded], [codec.filled(one, prior) for one in coded]
        mixed = target(*whole, *(decoder.log_weight for decoder in decoders))
        if mode == "shared":
            noise = gumbels(seed, t, V)
            draft, token = [int(choose(one, noise)) for one in q], int(choose(mixed, noise))
        else:
            streams = zip(q, (Stream.DEVICE, Stream.CLOUD), strict=True)
            draft = [int(sample(one, uniforms(seed, stream, t, 1)[0])) for one, stream in streams]
            token = int(aggregate(*draft, *q, mixed, uniforms(seed, Stream.AGGREGATION, t), 0.5).token)
        tokens.append(token), accepted.append([one == token for one in draft]), mixtures.append([*p, prior])
        for decoder in decoders:
            decoder.commit(token)
    return tokens, accepted, mixtures


@pytest.mark.parametrize("mode", ["speculative", "shared"])
@pytest.mark.parametrize("seed", [0, 3])
def test_a_transcript_is_the_session_token_by_token(mode: Mode, seed: int):
    seen = transcript(*sides(), QUERY, 2, 12, mode, seed)
    tokens, accepted, mixtures = by_hand(mode, seed, 12)
    assert seen.tokens.tolist() == tokens and seen.accepted.tolist() == accepted and seen.seed == seed
    assert 0 < np.mean(accepted) < 1
    for values, expected in zip((seen.p_device, seen.p_cloud, seen.prior), zip(*mixtures, strict=True), strict=True):
        assert values.shape == (12, V) and values.dtype == np.float32
        assert np.abs(values - np.array(expected)).max() < 1e-6
    assert [TEXTS[place] for place in seen.places] == [TEXTS[0], TEXTS[2]]


# The attack


def test_each_row_is_its_evidences_standing():
    """Among passages that the query says more of than of the device's own, so that rows differ."""
    passages = TEXTS + [f"{word} are seen by the doctor of {i}" for i in range(12) for word in ("zebras", "tablets")]
    rows = {(row["mode"], row["cap"], row["with_query"]): row for row in attack(*sides(), QUERY, passages, limit=6)}
    chosen, told = np.isin(passages, [TEXTS[0], TEXTS[2]]), relevance(QUERY, passages)
    kinds = {("device aggregates", 0): ("speculative", from_tokens), ("shared randomness", 0): ("shared", from_noise)}
    kinds |= {("cloud aggregates", cap): ("speculative", from_distributions(cap)) for cap in (8, 64, 512, 4096)}
    expected = {("query alone", 0, False): standing(told, chosen)}
    for key, (mode, evidence) in kinds.items():
        seen = transcript(*sides(), QUERY, 2, 6, mode, 0)
        scores = evidence(gathered(sides()[1], passages, QUERY, seen.tokens.tolist())[0], seen)
        expected[*key, False] = standing(scores, chosen)
        expected[*key, True] = standing(scores + told / WEIGHT_TEMPERATURE, chosen)
    assert {key: (row["top1"], row["best_rank"], row["auc"]) for key, row in rows.items()} == expected
    assert len(set(expected.values())) > 5 and expected["query alone", 0, False][1] > 1

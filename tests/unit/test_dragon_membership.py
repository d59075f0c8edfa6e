"""The membership attack: each evidence against its equation, the session against one by hand, ranks by counting."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ondevice import shapes
from ondevice.causal_lm import CausalLM, scoring
from ondevice.dragon import codec, membership
from ondevice.dragon.aggregation import target
from ondevice.dragon.live.decoder import Template
from ondevice.dragon.live.node import WEIGHT_TEMPERATURE, Documents, Node
from ondevice.dragon.membership import (
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
from ondevice.dragon.messages import Mode
from ondevice.dragon.speculative_aggregation import Stream, aggregate, choose, gumbels, sample, uniforms
from ondevice.retrieval import SparseIndex

pytestmark = pytest.mark.usefixtures("one_thread")

V = 1500  # of which 512 bytes do not hold all
TEXTS = [
    "zebras are seen at dusk", "a tablet for the heart, twice a day", "the doctor was told", "zebras sleep standing",
    "the next visit is on Thursday", "rain", "a pharmacy by the river sells tea, coffee and, on most days, newspapers",
]  # fmt: skip
QUERY = "When are zebras seen by the doctor?"


@cache
def lm() -> CausalLM:
    """A random model whose distributions are far from uniform, and far apart after unlike contexts."""
    config = AutoConfig.for_model(
        "llama", vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3)
    return CausalLM(model)


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


def test_ranks_and_auc_of_scores_without_ties():
    scores, members = np.array([3.0, 9.0, 5.0, 7.0, 1.0]), np.array([False, False, True, False, True])
    assert standing(scores, members) == (0, 3, pytest.approx(1 / 6))  # above: 5 > 3 alone, of six pairs
    assert standing(-scores, members) == (1, 1, pytest.approx(5 / 6))


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
    with pytest.raises(ValueError, match="an attack needs both"):
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


def test_without_the_sessions_seed_the_noise_says_little():
    given, n = distributions(1, 40, 9), 40
    tokens = [int(choose(given[0, t], gumbels(5, t, 9))) for t in range(n)]
    right, wrong = (from_noise(np.log(given), session(given[0], given[0], tokens, seed=seed))[0] for seed in (5, 6))
    assert n <= right < n + 1 and wrong < 0.75 * n


@pytest.mark.parametrize("cap", [8, 16, 4096])
def test_distributions_are_compared_as_the_cloud_reads_them(cap: int):
    given, p_device, prior = distributions(3, 2, 60), distributions(2, 60, seed=1), distributions(2, 60, seed=2)
    told = [codec.decode(codec.encode(p_device[t], cap, prior[t]), 60) for t in range(2)]
    blind = [codec.decode(codec.encode(p_device[t], cap), 60) for t in range(2)]
    assert cap != 16 or np.abs(np.array(told) - blind).max() > 0.01  # the prior has a part in it
    expected = [sum(float(told[t] @ np.log(one[t])) for t in range(2)) for one in given]
    found = from_distributions(cap)(np.log(given), session(p_device, p_device, [0, 0], prior))
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("true", range(4))
def test_the_distributions_own_context_is_first(true: int):
    given = distributions(4, 3, 200)
    seen = session(given[true], distributions(3, 200, seed=1), [0, 0, 0])
    assert from_distributions(4096)(np.log(given), seen).argmax() == true


# Candidates


def test_candidates_are_the_members_and_the_nearest_of_the_pool():
    pool = ["zebras and zebras", "rain", "a zebra", "zebras at dusk", "rain", "dusk falls, they say, on all of us"]
    found = candidates("zebras at dusk", ["rain", "a member"], pool, 5)
    assert found[:2] == ["rain", "a member"] and found[2] == "zebras at dusk" and len(set(found)) == 5
    assert set(found[3:]) == {"zebras and zebras", "dusk falls, they say, on all of us"}
    assert len(candidates("zebras", ["rain"], pool, 5)) == 5


@pytest.mark.parametrize("count", [6, 1])
def test_too_few_candidates_are_refused(count: int):
    with pytest.raises(ValueError, match="2 members and their pool give from 2 to"):
        candidates("zebras", ["one", "two"], ["two", "three", "three", "four", "five"], count)


def test_relevance_is_the_documents_own():
    found, side = relevance(QUERY, TEXTS), node(*TEXTS)
    best, scores = side.documents.places(QUERY, len(TEXTS))
    assert found[best] == pytest.approx(scores) and found[5] == 0 < found[3] < found[0] < 1


def test_relevance_of_a_query_without_words_is_0():
    assert relevance("?!", TEXTS).tolist() == [0.0] * len(TEXTS)


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


def test_what_is_beyond_the_longest_passage_is_cut_off():
    side = node("x")
    side.longest = 6
    found, _ = gathered(side, ["zebras", "zebras at dusk", "zebra"], QUERY, [70, 12])
    assert np.abs(found[0] - found[1]).max() < 1e-5 < np.abs(found[0] - found[2]).max()


def test_candidates_need_tokens_and_room():
    fits = 256 - len(f"\n{QUERY}\n") - 1
    assert gathered(node("x"), ["x" * fits], QUERY, [1, 2])[0].shape == (1, 2, V)
    with pytest.raises(ValueError, match="257 tokens does not fit the model's context of 256"):
        next(candidate_log_probs(node("x"), ["x" * (fits + 1)], QUERY, [1, 2]))
    with pytest.raises(ValueError, match="no token"):
        next(candidate_log_probs(node("x"), TEXTS, QUERY, []))


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


def test_a_transcript_is_deterministic_and_its_seed_and_mode_matter():
    one, again = (transcript(*sides(), QUERY, 2, 8, "speculative", 0) for _ in range(2))
    for name in ("tokens", "p_device", "p_cloud", "prior", "accepted"):
        assert np.array_equal(getattr(one, name), getattr(again, name))
    for mode, seed, temperature in (("speculative", 1, 1.0), ("shared", 0, 1.0), ("speculative", 0, 0.0)):
        other = transcript(*sides(), QUERY, 2, 8, mode, seed, temperature)  # type: ignore[arg-type]
        assert other.tokens.tolist() != one.tokens.tolist()


def test_a_transcript_stops_after_the_end_token(monkeypatch: pytest.MonkeyPatch):
    whole = transcript(*sides(), QUERY, 2, 8, "speculative", 0).tokens.tolist()
    end = whole[4]
    monkeypatch.setattr(Node, "end", end)
    cut = transcript(*sides(), QUERY, 2, 8, "speculative", 0)
    assert cut.tokens.tolist() == whole[: whole.index(end) + 1] and len(cut.p_device) == len(cut.tokens) < 8


@pytest.mark.parametrize(("mode", "limit"), [("token-wise", 3), ("speculative", 0)])
def test_other_sessions_are_refused(mode: Mode, limit: int):
    with pytest.raises(ValueError, match="speculative or shared and has a token"):
        transcript(*sides(), QUERY, 2, limit, mode, 0)


# The attack


def test_the_attack_has_a_row_for_all_that_crosses():
    rows = attack(*sides(), QUERY, TEXTS, limit=4, caps=(8, 4096))
    asked = [(row["mode"], row["cap"], row["with_query"], row["tokens"], row["candidates"]) for row in rows]
    expected = [("query alone", 0, False, 0, 7)]
    for mode, cap in [("device aggregates", 0), ("cloud aggregates", 8), ("cloud aggregates", 4096),
                      ("shared randomness", 0)]:  # fmt: skip
        expected += [(mode, cap, False, 4, 7), (mode, cap, True, 4, 7)]
    assert asked == expected


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


def test_the_device_that_has_one_passage_is_found_by_its_distributions():
    """Its distribution is p(.|c), so that none is nearer; the cloud's documents do not matter."""
    for text in TEXTS[:4]:
        rows = attack(node(text), node(*TEXTS[4:]), QUERY, TEXTS, k=1, limit=4, caps=(4096,))
        alone = [row for row in rows if row["mode"] == "cloud aggregates" and not row["with_query"]]
        assert [(row["top1"], row["best_rank"], row["auc"]) for row in alone] == [(1, 1, 1.0)]


def test_the_query_alone_tells_the_same_whatever_the_session():
    one, other = (attack(*sides(), QUERY, TEXTS, limit=limit, seed=seed, caps=caps)
                  for limit, seed, caps in ((3, 0, (8,)), (6, 1, (64,))))  # fmt: skip
    assert one[0] == other[0] and one[0]["mode"] == "query alone"
    assert one[1:3] != other[1:3]


@pytest.mark.parametrize(("name", "mode"), [
    ("from_tokens", "device aggregates"), ("from_noise", "shared randomness"),
])  # fmt: skip
def test_an_experiments_evidence_takes_the_place_of_ours(name: str, mode: str):
    def blind(log_probs: Singles, seen: Transcript) -> np.ndarray:
        return np.zeros(len(log_probs))

    ours, theirs = (attack(*sides(), QUERY, TEXTS, limit=3, caps=(8,), **options) for options in ({}, {name: blind}))
    different = {(row["mode"], row["with_query"]) for row, other in zip(ours, theirs, strict=True) if row != other}
    assert (mode, False) in different and {found for found, _ in different} == {mode}
    assert [row["auc"] for row in theirs if row["mode"] == mode] == [0.5, theirs[0]["auc"]]


@pytest.mark.parametrize("passages", [TEXTS[1:], TEXTS[3:]])
def test_members_that_are_no_candidates_are_refused(passages: list[str]):
    missing = 2 - sum(text in passages for text in (TEXTS[0], TEXTS[2]))
    with pytest.raises(ValueError, match=f"{missing} of the device's 2 passages are not among the candidates"):
        attack(*sides(), QUERY, passages)

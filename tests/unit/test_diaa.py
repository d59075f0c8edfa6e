"""DIAA: the tables, their updates and warm-up, the tree, the overlap, and output equal to plain decoding."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lookup_tables import random_tables, well_formed
from tiny import random_model

from ondevice.causal_lm import CausalLM
from ondevice.speculation import Draft, Verified, generate
from ondevice.speculation.largest import Likeliest
from ondevice.speculation.token_recycling import TokenRecycling
from ondevice_papers.diaa import ambiguities
from ondevice_papers.diaa.drafter import RECYCLING, Diaa
from ondevice_papers.diaa.tables import NONE, Fresh, Tables, likeliest, overwrite
from ondevice_papers.diaa.tree import grow, refill
from ondevice_papers.diaa.warmup import means, top_k_after_each_token, warm_up

V = 48


@pytest.fixture(scope="module")
def lm() -> CausalLM:
    return CausalLM(random_model("llama", vocabulary=V, context=96))


# Tables


# Updates


def fresh_of(logits: torch.Tensor) -> Fresh:
    return likeliest(logits, Likeliest(8))


def test_likeliest_is_the_softmax_over_the_whole_vocabulary():
    logits = torch.randn(5, V, dtype=torch.float64) * 3
    right = logits.float().softmax(-1).sort(descending=True)
    found = fresh_of(logits)
    assert (found.tokens == right.indices[:, :8].numpy()).all()
    np.testing.assert_allclose(found.probabilities, right.values[:, :8], rtol=1e-5)
    assert found.tokens.dtype == np.int64 and found.probabilities.dtype == np.float32


def updated_naively(rule, old: dict[int, float], fresh: dict[int, float], k: int) -> dict[int, float]:
    """Entry by entry, as Fig. 6 draws it. Both in falling order."""
    if rule is overwrite:
        return fresh
    if rule is ambiguities.union:
        return dict(sorted({**old, **fresh}.items(), key=lambda entry: -entry[1])[:k])
    row, token = dict(old), next(iter(fresh))
    if token not in row and len(row) == k:
        del row[min(row, key=row.__getitem__)]
    row[token] = fresh[token]
    return dict(sorted(row.items(), key=lambda entry: -entry[1]))


@pytest.mark.parametrize("rule", [overwrite, ambiguities.replace, ambiguities.union])
def test_updates_are_those_of_the_naive_rule(rule):
    random, k = np.random.default_rng(3), 8
    tables = random_tables(3)
    rows = {key: dict(tables.row(key)) for key in range(V)}
    keys = random.integers(0, 6, 50).tolist()  # many equal ones: the later wins
    fresh = fresh_of(torch.randn(50, V) * 2)
    rule(tables, keys, fresh)
    for key, tokens, probabilities in zip(keys, *(part.tolist() for part in fresh), strict=True):
        rows[key] = updated_naively(rule, rows[key], dict(zip(tokens, probabilities, strict=True)), k)
    assert well_formed(tables)
    for key, row in rows.items():
        assert dict(tables.row(key)) == pytest.approx(row)


# Warm-up


def test_warm_up_is_the_mean_over_occurrences(lm):
    corpus = np.random.default_rng(5).integers(0, 12, 90)  # one window
    sums, counts = defaultdict(lambda: defaultdict(float)), defaultdict(int)
    with torch.inference_mode():
        found = fresh_of(lm.model(torch.tensor(corpus)[None]).logits[0])
    for key, tokens, probabilities in zip(corpus.tolist(), *found, strict=True):
        counts[key] += 1
        for token, probability in zip(tokens.tolist(), probabilities.tolist(), strict=True):
            sums[key][token] += probability
    tables = warm_up(lm, corpus)
    assert well_formed(tables)
    assert (tables.tokens[:, 0] != NONE).sum() == len(counts)
    for key, row in sums.items():
        best = sorted(((p / counts[key], t) for t, p in row.items()), reverse=True)[:8]
        assert tables.tokens[key].tolist() == [t for _, t in best]
        np.testing.assert_allclose(tables.probabilities[key], [p for p, _ in best], rtol=1e-5)


def test_windows_know_nothing_of_each_other(lm, monkeypatch):
    from ondevice_papers.diaa import warmup

    monkeypatch.setattr(warmup, "WINDOW", 8)
    monkeypatch.setattr(warmup, "CHUNK", 5)
    text = np.arange(20) % V
    whole, last = top_k_after_each_token(lm, text), top_k_after_each_token(lm, text[16:])
    assert (whole.tokens[16:] == last.tokens).all() and len(whole.tokens) == 20


def test_means_break_ties_by_the_lower_token():
    fresh = Fresh(np.array([[9, 4], [4, 7]]), np.array([[0.6, 0.2], [0.2, 0.6]], np.float32))
    assert [token for token, _ in means(np.array([1, 1]), fresh, V).row(1)] == [7, 9, 4]


# Tree


def grown_naively(tables: Tables, root: int, limit: int, counts="nodes", tau=5e-3) -> list[tuple]:
    """(token, parent, rank, path product) of every node: Eq. 2 for every path anew, the best by search."""
    nodes: list[tuple] = []
    scores: list[float] = []

    def ranks(node: int) -> list[int]:
        return [*ranks(nodes[node][1]), nodes[node][2]] if node >= 0 else []

    def cost() -> int:
        return len(nodes) + (counts == "root")

    def expand(node: int) -> None:
        token, product = (nodes[node][0], nodes[node][3]) if node >= 0 else (root, 1.0)
        for rank, (child, p) in enumerate(tables.row(token), 1):
            score = product * p * 0.8 ** len(ranks(node)) * 0.7 ** (rank - 1)
            if node >= 0 and score < tau:
                continue
            nodes.append((child, node, rank, product * p))
            if cost() > limit:
                nodes.pop()
                return
            scores.append(score)
            waiting.append(len(nodes) - 1)

    waiting: list[int] = []
    expand(-1)
    while waiting:
        best = max(waiting, key=lambda node: (scores[node], -node))
        waiting.remove(best)
        expand(best)
    return nodes


@pytest.mark.parametrize(("growth", "counts"), [(grow, "nodes"), (ambiguities.grow_counting_root, "root")])
@given(seed=st.integers(0, 50), root=st.integers(0, 11), limit=st.integers(1, 40))
def test_the_tree_is_that_of_the_naive_growth(growth, counts, seed, root, limit):
    tables = random_tables(seed, vocabulary=12)
    found = growth(tables, root, limit)
    right = grown_naively(tables, root, limit, counts)
    assert list(zip(found.tokens, found.parents, found.ranks, strict=True)) == [node[:3] for node in right]
    np.testing.assert_allclose(found.paths, [node[3] for node in right])
    draft = found.draft()  # refuses parents that do not come first
    assert len(draft) <= limit and draft.depths.tolist() == found.depths
    again = refill(tables, root, draft)
    assert (again.tokens == draft.tokens).all() and (again.parents == draft.parents).all()


@pytest.fixture
def figure_7() -> Tables:
    """A table under which a tree grows as Fig. 7 tells it; its own probabilities are in the picture only.

    0 is the root, 1 to 3 are t1 to t3, 4 to 6 are t11 to t13.
    """
    tables = Tables.empty(10, 3)
    for key, row in {0: {1: 0.6, 2: 0.2, 3: 0.1}, 1: {4: 0.5, 5: 0.3, 6: 0.02}, 4: {7: 0.5}, 2: {8: 0.9}}.items():
        tables.tokens[key, : len(row)], tables.probabilities[key, : len(row)] = list(row), list(row.values())
    return tables


def test_the_worked_example_of_figure_7(figure_7):
    """C(T) = 1 + 1 + 2 + 2, as printed, is 6; so are five nodes and the root."""
    found = ambiguities.grow_counting_root(figure_7, 0, 6)
    assert found.tokens == [1, 2, 3, 4, 5]  # all of the first level; t1's children but t13, whose score is below tau
    assert found.parents == [-1, -1, -1, 0, 0]
    assert 0.6 * 0.02 * 0.8 * 0.7**2 < 5e-3


def test_refilled_nodes_without_a_candidate_are_left_out_with_all_below_them(figure_7):
    shape = Draft([1, 2, 3, 4, 7], [-1, -1, -1, 1, 3], [1, 2, 3, 1, 1])
    found = refill(figure_7, 1, shape)  # 4 5 6 below 1; 5 has no row, so the fourth node and the one below it go
    assert (found.tokens.tolist(), found.parents.tolist(), found.ranks.tolist()) == ([4, 5, 6], [-1] * 3, [1, 2, 3])
    assert refill(figure_7, 0, shape).tokens.tolist() == [1, 2, 3, 8]


# Drafting


@pytest.mark.parametrize("limit", [5, 40, 80])
def test_without_a_dynamic_tree_it_is_token_recycling(limit):
    tables, recycling = Tables.empty(V), TokenRecycling(V)
    overwrite(tables, range(V), fresh_of(torch.randn(V, V)))
    recycling.matrix[:] = tables.tokens
    drafter = Diaa(tables, template=RECYCLING)
    draft, seen = drafter.propose([1, 2], limit), recycling.propose([1, 2], limit)
    assert (draft.tokens == seen.tokens).all() and (draft.parents == seen.parents).all()
    verified = step(2, draft, 9)
    drafter.observe(verified)
    recycling.observe(verified)
    assert (tables.tokens == recycling.matrix).all()


def step(root: int, draft: Draft, seed: int, path: tuple[int, ...] = ()) -> Verified:
    torch.manual_seed(seed)
    return Verified(root, draft, torch.randn(1 + len(draft), V), path, [0])


@pytest.mark.parametrize("stale", [False, True])
def test_a_stale_tree_sees_the_tables_of_one_step_before(stale):
    tables = Tables.empty(V)
    drafter = Diaa(tables, stale=stale)
    drafter.begin([1])
    first, second = step(5, Draft([6], [-1]), 0), step(7, Draft((), ()), 1)
    drafter.observe(first)
    assert len(drafter.propose([1, 5], 8)) == (0 if stale else 8)
    drafter.observe(second)
    assert (tables.tokens[[5, 6]] == fresh_of(first.logits).tokens).all()
    assert len(drafter.propose([1, 5], 8)) == 8
    assert (tables.tokens[7, 0] == NONE) == stale
    drafter.end([1, 5, 7])
    assert (tables.tokens[7] == fresh_of(second.logits).tokens[0]).all()


def test_updates_go_breadth_first_and_the_later_node_wins():
    draft = Draft([9, 9, 9], [-1, 0, -1])  # inserted depth first: the second is the deepest, and the last to count
    seen = step(9, draft, 2, (0,))
    drafter = Diaa(Tables.empty(V))
    drafter.observe(seen)
    assert (drafter.tables.tokens[9] == fresh_of(seen.logits).tokens[2]).all()
    drafter = Diaa(Tables.empty(V), learns=ambiguities.accepted_only)
    drafter.observe(seen)
    assert (drafter.tables.tokens[9] == fresh_of(seen.logits).tokens[1]).all()


def test_between_refreshes_the_shape_stays():
    drafter = Diaa(random_tables(8, k=4), refresh=3)
    drafter.begin([1])
    full = [key for key in range(V) if drafter.tables.tokens[key, -1] != NONE]
    shapes = [drafter.propose([1, key], 4) for key in full[:4]]
    assert shapes[0].ranks.tolist() == shapes[1].ranks.tolist() == [1, 2, 3, 4]
    assert (shapes[3].tokens == grow(drafter.tables, full[3], 4).tokens).all()


def test_tables_last_from_request_to_request(lm):
    drafter = Diaa(Tables.empty(V))
    passes = [len(generate(lm, drafter, [5, 6], 30, budget=8).steps) for _ in range(2)]
    assert passes[1] < passes[0]

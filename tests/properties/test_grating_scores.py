"""Whatever the scores, a selection chooses K and runs a layer only for those who are left."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ondevice_papers.grating.margins import MarginRule
from ondevice_papers.grating.pools import Pool, measured, replay
from ondevice_papers.grating.pruning import cluster_rule, ranking, select

MOST = 6  # layers


def margin_rule(seed: int, margin: float) -> MarginRule:
    """Of any weights, so that its predictions may contradict each other from layer to layer."""
    return MarginRule(np.random.default_rng(seed).normal(size=(MOST, MOST)), np.full(MOST, margin))


SHAPES = st.tuples(st.integers(1, MOST), st.integers(1, 12))
LOGITS = st.one_of(st.integers(-3, 3).map(float), st.floats(-40, 40))  # with ties, and without
SCORES = SHAPES.flatmap(lambda shape: arrays(np.float64, shape, elements=LOGITS))
DISTINCT = SHAPES.flatmap(
    lambda shape: st.tuples(*[st.permutations(range(shape[1]))] * shape[0]).map(lambda rows: np.array(rows) * 0.7 - 2)
)
RULES = st.one_of(
    st.sampled_from([-np.inf, 0.1, 0.4, 1.1]).map(cluster_rule),
    st.builds(margin_rule, st.integers(0, 99), st.sampled_from([0, 0.3, 2, np.inf])),
)
K = st.integers(1, 14)


@given(SCORES, K, RULES, st.booleans())
def test_exactly_k_are_chosen_and_layers_run_in_order_for_those_who_are_left(scores, k, rule, exact_order):
    (layers, n), calls = scores.shape, []

    def scores_of(layer, active):
        calls.append((layer, active.tolist()))
        return scores[layer - 1, active]

    found = select(scores_of, n, layers, k, rule, exact_order)
    assert len(found.chosen) == len(set(found.chosen)) == found.kept.sum() == min(k, n)
    assert calls == [(layer, np.flatnonzero(found.layer >= layer).tolist()) for layer in range(1, len(calls) + 1)]
    assert [len(active) for _, active in calls] == found.active.tolist()
    assert k < n or (found.saved == 0 and len(calls) == layers)
    if exact_order or k >= n:
        assert (found.layer[found.kept] == layers).all()
        assert found.chosen.tolist() == [place for place in ranking(scores[-1]) if found.kept[place]]


@given(SCORES, K, RULES, st.booleans())
def test_measures_are_shares(scores, k, rule, exact_order):
    pool = Pool("q", "test", scores, scores[0] > 0)
    found = measured(pool, k, replay(pool, k, rule, exact_order))
    assert all(0 <= value <= 1 for value in vars(found).values())
    assert found.overlap == 1 or found.saved > 0


@given(DISTINCT, K, RULES, st.booleans(), st.integers(0, 99))
def test_the_order_of_candidates_does_not_matter_where_scores_differ(scores, k, rule, exact_order, seed):
    order = np.random.default_rng(seed).permutation(scores.shape[1])
    one, other = (replay(Pool("q", "test", given, np.zeros(len(order), bool)), k, rule, exact_order)
                  for given in (scores, scores[:, order]))  # fmt: skip
    assert np.array_equal(one.kept[order], other.kept) and np.array_equal(one.layer[order], other.layer)
    assert np.array_equal(one.chosen, order[other.chosen])

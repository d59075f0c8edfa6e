"""Deciding on scores: exact clusters, the decision after a layer, the worked example, and replayed pools."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from sklearn.cluster import KMeans

from ondevice.grating.clustering import kmeans, sum_of_squares
from ondevice.grating.pruning import ACCEPT, DEFER, DROP, ClusterRule, Selection, around_boundary, dispersion, ranking
from ondevice.grating.replay import Pools, measure, replay

ALWAYS = ClusterRule(-np.inf)


def logits(*probabilities: float) -> np.ndarray:
    p = np.array(probabilities)
    return np.log(p / (1 - p))


def drawn(seed: int, layers: int = 8, n: int = 20, noise: float = 1.0) -> np.ndarray:
    """[layers, n] scores that near their final values."""
    rng = np.random.default_rng(seed)
    final = rng.normal(0, 2, n)
    return np.stack([final + noise * left / layers * rng.normal(size=n) for left in range(layers)[::-1]])


# Clusters


def brute_force(values: np.ndarray, k: int) -> float:
    ordered = np.sort(values)
    cuts = (np.split(ordered, cut) for cut in combinations(range(1, len(values)), k - 1))
    return min(sum(((part - part.mean()) ** 2).sum() for part in parts) for parts in cuts)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_clusters_are_the_optimum_of_all_partitions(seed, k):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=9) if seed % 2 else rng.integers(0, 6, 9).astype(float)
    k = min(k, len(np.unique(values)))
    labels = kmeans(values, k)
    assert sorted(set(labels)) == list(range(k))
    assert sum_of_squares(values, labels) == pytest.approx(brute_force(values, k), abs=1e-9)


def test_clusters_are_never_worse_than_restarted_k_means():
    for seed in range(5):
        values = np.random.default_rng(seed).beta(0.3, 0.8, 60)
        restarted = KMeans(3, n_init=10, random_state=seed).fit(values[:, None]).inertia_
        assert sum_of_squares(values, kmeans(values, 3)) <= restarted + 1e-9


def test_blocks_of_a_large_pool_change_nothing(monkeypatch):
    values = np.random.default_rng(0).normal(size=300).round(2)
    whole = kmeans(values, 4)
    monkeypatch.setattr("ondevice.grating.clustering._BLOCK", 900)
    np.testing.assert_array_equal(kmeans(values, 4), whole)


def test_labels_fall_with_the_value_and_equal_values_share_one():
    np.testing.assert_array_equal(kmeans([0.1, 0.9, 0.5, 0.9, 0.1, 0.52], 3), [2, 0, 1, 0, 2, 1])
    np.testing.assert_array_equal(kmeans([3.0, 3.0, 3.0], 3), [0, 0, 0])


def test_a_common_offset_does_not_change_clusters():
    values = np.random.default_rng(1).normal(size=40)
    np.testing.assert_array_equal(kmeans(values + 1e6, 3), kmeans(values, 3))


@pytest.mark.parametrize(("values", "k"), [([], 2), ([1.0, np.nan], 2), ([[1.0]], 1), ([1.0], 0)])
def test_clustering_refuses_what_it_cannot_cluster(values, k):
    with pytest.raises(ValueError, match=r"Clustering|cluster"):
        kmeans(values, k)


# The decision after a layer


def test_the_three_groups_of_the_papers_example():
    """Section 4.5: 20 candidates, K = 10; two are accepted, two dropped and sixteen deferred."""
    p = np.array([0.97, 0.95, *np.linspace(0.45, 0.55, 16), 0.04, 0.02])
    verdicts = ALWAYS.verdicts(logits(*p)[None], 10)
    np.testing.assert_array_equal(verdicts, [ACCEPT] * 2 + [DEFER] * 16 + [DROP] * 2)


def test_a_decision_needs_more_than_the_threshold():
    scores = logits(0.9, 0.5, 0.1)[None]
    at = dispersion(scores[0])
    assert not ClusterRule(at).verdicts(scores, 1).any()
    assert ClusterRule(np.nextafter(at, 0)).verdicts(scores, 1).tolist() == [DEFER, DROP, DROP]
    assert not ClusterRule(0, first=2).verdicts(scores, 1).any()


def test_statistics_are_what_they_say():
    z = logits(0.2, 0.4, 0.6)
    assert dispersion(z) == pytest.approx(np.sqrt(0.08 / 3) / 0.4)
    assert dispersion(z, "std") == pytest.approx(np.std(z))
    assert dispersion([0, 1, 2, 3, 4], "iqr") == pytest.approx(2)
    assert dispersion(z + 30) < 1e-9  # the CV of probabilities near 1 vanishes
    assert dispersion(z + 30, "std") == pytest.approx(dispersion(z, "std"))
    assert np.isfinite(dispersion(np.full(3, -800.0)))


def test_equal_scores_rank_by_position():
    assert ranking([1.0, 2.0, 1.0, 2.0]).tolist() == [1, 3, 0, 2]
    assert around_boundary(np.array([1, 0, 1, 0]), np.array([1.0, 2, 1, 2]), 2).tolist() == [DROP, DEFER, DROP, DEFER]


@pytest.mark.parametrize(
    "values",
    [dict(threshold=np.nan), dict(statistic="mad"), dict(clusters=0), dict(first=0), dict(on="rank")],
)
def test_a_rule_refuses_unknown_settings(values):
    with pytest.raises(ValueError, match=r"threshold|statistic|least 1|clustered"):
        ClusterRule(**{"threshold": 1.0} | values)


# A pool, layer by layer


def test_the_working_example_ends_early():
    """Section 4.5: groups of 2, 16, 2; nothing after the next layer; then the deferred fill the places."""
    tau, spread = 0.3, np.linspace(0.45, 0.55, 16)
    layer_1 = logits(0.97, 0.95, *spread, 0.04, 0.02)
    layer_2 = logits(0.97, 0.95, *spread, 0.04, 0.02)
    low = [*np.linspace(0.06, 0.14, 4), *np.linspace(0.01, 0.03, 4)]
    layer_3 = logits(0.9, 0.9, *np.linspace(0.82, 0.9, 8), *low, 0.5, 0.5)
    selection = Selection(20, 12, 10, ClusterRule(tau))
    assert selection.step(layer_1).tolist() == list(range(2, 18))
    assert selection.step(layer_2[2:18]).tolist() == list(range(2, 18))
    assert not len(selection.step(layer_3[2:18]))
    outcome = selection.outcome()
    assert set(outcome.chosen) == set(range(10))
    assert outcome.chosen[:2].tolist() == [0, 1]
    assert outcome.layer.tolist() == [1, 1, *[3] * 16, 1, 1]
    assert (outcome.work, outcome.ended) == (4 + 48, 3)


def test_live_and_replayed_decisions_are_the_same():
    for seed in range(20):
        scores = drawn(seed)
        rule = ClusterRule(0.8)
        selection, seen = Selection(20, 8, 5, rule), 0
        for row in scores:
            seen += len(selection.active)
            if not len(selection.step(row[selection.active])):
                break
        outcome, again = selection.outcome(), replay(scores, 5, rule)
        np.testing.assert_array_equal(outcome.chosen, again.chosen)
        np.testing.assert_array_equal(outcome.layer, again.layer)
        assert outcome.work == seen
        np.testing.assert_array_equal(outcome.score, scores[outcome.layer - 1, np.arange(20)])
        assert outcome.kept.sum() == len(set(outcome.chosen)) == 5


def test_without_pruning_the_models_own_top_k_is_chosen_in_order():
    scores = drawn(3)
    for rule in (None, ClusterRule(np.inf)):
        for exact in (False, True):
            outcome = replay(scores, 5, rule, exact)
            assert outcome.chosen.tolist() == ranking(scores[-1])[:5].tolist()
            assert outcome.work == scores.size


def test_exact_order_ranks_by_final_scores_and_accepts_nobody_early():
    for seed in range(20):
        scores = drawn(seed, noise=3.0)
        outcome = replay(scores, 5, ClusterRule(0.5), exact_order=True)
        assert outcome.layer[outcome.chosen].tolist() == [8] * 5
        assert (np.diff(scores[-1][outcome.chosen]) <= 0).all()
        assert outcome.work < scores.size


def test_a_pool_no_larger_than_k_needs_no_layer_unless_its_order_is_asked_for():
    scores = drawn(0, n=4)
    outcome = replay(scores, 5, ALWAYS)
    assert (sorted(outcome.chosen), outcome.work, outcome.ended) == ([0, 1, 2, 3], 0, 0)
    assert np.isnan(outcome.score).all()
    assert replay(scores, 4, ALWAYS, exact_order=True).chosen.tolist() == ranking(scores[-1]).tolist()


def test_one_candidate_and_equal_scores():
    assert replay(np.zeros((3, 1)), 1, ALWAYS, exact_order=True).chosen.tolist() == [0]
    outcome = replay(np.zeros((3, 6)), 2, ALWAYS)
    assert outcome.chosen.tolist() == [0, 1]
    assert outcome.work == 18  # one cluster: nothing can be decided


@pytest.mark.parametrize("k", [0, -1])
def test_a_k_below_one_is_refused(k):
    with pytest.raises(ValueError, match="K is at least 1"):
        replay(drawn(0), k)


def test_a_score_that_is_no_number_is_refused_with_its_place():
    scores = drawn(0)
    scores[2, 7] = np.nan
    with pytest.raises(ValueError, match="candidate 7 after layer 3"):
        replay(scores, 5)


def test_wrong_counts_and_unfinished_pools_are_refused():
    selection = Selection(4, 2, 1)
    with pytest.raises(ValueError, match="Scores of 4 active"):
        selection.step(np.zeros(3))
    with pytest.raises(ValueError, match="4 candidates are not decided"):
        selection.outcome()


def test_a_rule_that_takes_too_many_is_refused():
    class Greedy:
        def verdicts(self, history, slots):
            return np.full(history.shape[1], ACCEPT, np.int8)

    with pytest.raises(ValueError, match="accepted 4 and dropped 0 of 4 for 2 places"):
        Selection(4, 3, 2, Greedy()).step(np.zeros(4))


# Many pools


def test_measures_of_a_pool_by_hand():
    scores = np.array([[[3.0, 2, 1, 0], [3, 0, 1, 2]]])  # layer 1 has 1 second, the last layer has 3 second
    pools = Pools(scores, np.array([[1, 1, 0, 0]]))

    class First:
        def verdicts(self, history, slots):
            return np.array([ACCEPT, ACCEPT, DROP, DROP], np.int8)

    found = measure(pools, 2, First())
    assert (found.saved[0], found.precision[0], found.full[0], found.overlap[0]) == (0.5, 1.0, 0.5, 0.5)


def test_smaller_pools_are_padded_with_nan():
    scores, relevance = np.stack([drawn(0), drawn(1)]), np.zeros((2, 20))
    scores[1, :, 12:], relevance[1, 12:] = np.nan, np.nan
    pools = Pools(scores, relevance)
    assert pools.pool(1).shape == (8, 12)
    np.testing.assert_array_equal(measure(pools, 5).overlap, [1, 1])
    np.testing.assert_array_equal(pools.take([1]).pool(0), pools.pool(1))


def test_recorded_pools_with_holes_are_refused():
    scores, relevance = drawn(0)[None], np.zeros((1, 20))
    for odd_scores, odd_relevance in ((np.where(scores == scores[0, 3, 3], np.nan, scores), relevance),
                                      (scores, relevance * np.nan)):  # fmt: skip
        with pytest.raises(ValueError, match="without a finite score"):
            Pools(odd_scores, odd_relevance)
    with pytest.raises(ValueError, match=r"not \(8, 20\)"):
        Pools(scores[0], relevance)

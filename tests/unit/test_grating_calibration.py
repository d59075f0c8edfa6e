"""Thresholds from validation pools: the curve is exact, and the chosen threshold is the lowest that is safe."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ondevice.grating.calibration import Curve, calibrate, curve, interval
from ondevice.grating.pruning import ClusterRule
from ondevice.grating.replay import Pools, measure


def drawn(pools: int, seed: int = 0, layers: int = 6, n: int = 12, noise: float = 1.5) -> Pools:
    rng = np.random.default_rng(seed)
    final = rng.normal(0, 2, (pools, 1, n))
    fading = (noise * np.arange(layers)[::-1] / layers)[None, :, None]
    scores = final + fading * rng.normal(size=(pools, layers, n))
    return Pools(scores, final[:, 0] + rng.normal(size=(pools, n)) > 2)


@pytest.mark.parametrize("exact_order", [False, True])
@pytest.mark.parametrize("rule", [ClusterRule(0), ClusterRule(0, "std", on="logit"), ClusterRule(0, "iqr", first=3)])
def test_the_curve_is_what_a_replay_gives_at_any_threshold(rule, exact_order):
    pools = drawn(6)
    found = curve(pools, 3, rule, exact_order)
    assert found.thresholds[0] == np.inf
    assert found.thresholds[-1] == -np.inf
    assert (np.diff(found.thresholds) < 0).all()
    rng = np.random.default_rng(1)
    for tau in [*found.thresholds[::5], *rng.uniform(0, 3, 20)]:
        row = int(np.flatnonzero(found.thresholds <= tau)[0])
        direct = measure(pools, 3, dataclasses.replace(rule, threshold=float(tau)), exact_order)
        assert found.saved[row] == pytest.approx(direct.saved.mean())
        assert found.precision[row] == pytest.approx(direct.precision.mean())
        assert found.overlap[row] == pytest.approx(direct.overlap.mean())
        assert found.full == pytest.approx(direct.full.mean())


def test_no_pruning_begins_the_curve():
    found = curve(drawn(4), 3, ClusterRule(0))
    assert (found.saved[0], found.overlap[0]) == (0, 1)
    assert found.saved[-1] > 0.3


def made(overlap: list[float], precision: list[float] | None = None) -> Curve:
    m = len(overlap)
    return Curve(np.r_[np.inf, np.arange(m - 1, 0, -1.0)], np.linspace(0, 0.5, m), np.array(precision or overlap),
                 np.array(overlap), 0.5)  # fmt: skip


def test_a_threshold_below_a_gap_is_not_taken():
    assert calibrate(made([1, 0.99, 0.97, 0.99, 0.9]), 0.98) == 4  # 2 would meet it again, but 3 does not
    assert calibrate(made([1, 0.99, 0.98, 0.98]), 0.98) == 1
    assert calibrate(made([1, 0.9, 0.9]), 0.98) == np.inf


def test_precision_and_overlap_are_targets_of_their_own():
    found = made([1, 0.9, 0.8, 0.7], [0.4, 0.4, 0.41, 0.3])
    assert calibrate(found, 0.4, of="precision") == 2
    assert calibrate(found, 0.9, of="overlap") == 3


def test_a_target_above_the_full_model_is_refused():
    with pytest.raises(ValueError, match=r"Without pruning the precision is 0\.4000"):
        calibrate(made([1, 1], [0.4, 0.5]), 0.45, of="precision")


def test_a_threshold_found_on_pools_meets_its_target_there():
    pools = drawn(30)
    tau = calibrate(curve(pools, 3, ClusterRule(0)), 0.95)
    found = measure(pools, 3, ClusterRule(tau))
    assert found.overlap.mean() >= 0.95
    assert 0 < found.saved.mean() < 1


def test_the_bootstrap_interval_is_about_two_standard_errors():
    values = np.random.default_rng(0).normal(3, 1, 400)
    found = interval(values, seed=1)
    error = values.std() / 20
    assert found.mean == pytest.approx(values.mean())
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.1)
    assert found.low < found.mean < found.high
    assert interval(values, seed=1) == found


@pytest.mark.parametrize(("values", "level"), [([], 0.95), ([1.0], 0.0), ([1.0], 1.0)])
def test_an_interval_refuses_nothing_and_odd_levels(values, level):
    with pytest.raises(ValueError, match="An interval needs"):
        interval(values, level)

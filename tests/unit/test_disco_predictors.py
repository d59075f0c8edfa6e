"""Predicting the next TTFT: who wins on which kind of series, and that nobody looks ahead."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from ondevice_papers.disco import predictors


def autoregressive(rho: float, size: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    level, values = 0.0, []
    for noise in rng.normal(size=size):
        level = rho * level + np.sqrt(1 - rho**2) * noise
        values.append(np.exp(0.4 * level))
    return np.array(values)


def mae(series: np.ndarray) -> pd.Series:
    return predictors.prediction_errors(series).set_index("predictor")["mae_s"]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_on_a_slowly_changing_series_recent_values_beat_the_median(seed):
    found = mae(autoregressive(0.97, 600, seed))
    assert found["moving_average"] < 0.9 * found["constant_median"]
    assert found["exponential_smoothing"] < 0.9 * found["constant_median"]


def test_the_future_does_not_change_past_predictions():
    series = autoregressive(0.8, 200, 3)
    changed = series.copy()
    changed[170:] *= 50
    before, after = (predictors._predictions(s, 140, 0) for s in (series, changed))
    for name in before:
        np.testing.assert_array_equal(before[name][:31], after[name][:31], err_msg=name)  # 170 itself is guessed too
        if name != "constant_median":
            assert not np.array_equal(before[name][31:], after[name][31:]), name


def test_a_series_too_short_for_its_lags_is_refused():
    with pytest.raises(ValueError, match=r"39.*10 lags"):
        predictors.prediction_errors(np.ones(39))


@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0, -1.0])
def test_a_series_of_impossible_ttfts_is_refused(bad):
    with pytest.raises(ValueError, match="TTFT"):
        predictors.prediction_errors(np.r_[np.ones(60), bad])

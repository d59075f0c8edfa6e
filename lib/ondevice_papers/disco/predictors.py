"""Light predictors of the next TTFT (Table 5): is any of them good enough to choose an endpoint by?"""

from __future__ import annotations

import numpy as np
import pandas as pd

LAGS = 10
SMOOTHING = 0.3
TRAIN_SHARE = 0.7


def prediction_errors(ttft: np.ndarray, seed: int = 0) -> pd.DataFrame:
    """One-step errors on the last 30 % of a series in request order: predictor, mape_percent, mae_s.

    ttft: [N] seconds. The settings (10 lags, smoothing 0.3, split in time) are ours; the paper gives none. The constant
    median of the first 70 % is added: what a predictor must beat to be worth its time.
    """
    if len(ttft) < 4 * LAGS:
        raise ValueError(f"A series of {len(ttft)} is too short to predict from {LAGS} lags.")
    if not np.all(np.isfinite(ttft) & (ttft > 0)):
        raise ValueError("A series of TTFTs to predict holds a number that is not positive and finite.")
    split = int(TRAIN_SHARE * len(ttft))
    truth = ttft[split:]
    rows = []
    for name, predicted in _predictions(ttft, split, seed).items():
        error = np.abs(predicted - truth)
        rows.append(
            {"predictor": name, "mape_percent": 100 * float((error / truth).mean()), "mae_s": float(error.mean())}
        )
    return pd.DataFrame(rows)


def _predictions(ttft: np.ndarray, split: int, seed: int) -> dict[str, np.ndarray]:
    """Each predictor's guesses for ttft[split:]."""
    from sklearn.ensemble import RandomForestRegressor
    from xgboost import XGBRegressor

    history = np.lib.stride_tricks.sliding_window_view(ttft, LAGS)[:-1]  # row i holds the LAGS values before i + LAGS
    target = ttft[LAGS:]
    train = slice(0, split - LAGS)
    test = slice(split - LAGS, None)
    predicted = {"moving_average": history[test].mean(axis=1), "exponential_smoothing": _smoothed(ttft)[split:]}
    models = {
        "random_forest": RandomForestRegressor(n_estimators=100, random_state=seed, n_jobs=1),
        "xgboost": XGBRegressor(n_estimators=100, max_depth=4, random_state=seed, n_jobs=1),
    }
    for name, model in models.items():
        model.fit(history[train], target[train])
        predicted[name] = model.predict(history[test])
    predicted["constant_median"] = np.full(len(ttft) - split, np.median(ttft[:split]))
    return predicted


def _smoothed(ttft: np.ndarray) -> np.ndarray:
    """Exponential smoothing: entry i is the guess for ttft[i] from what came before."""
    level = ttft[0]
    guesses = np.empty_like(ttft)
    for i, value in enumerate(ttft):
        guesses[i] = level
        level += SMOOTHING * (value - level)
    return guesses

"""What linear probes save: rules calibrated on validation pools, judged on test pools, against the model's own head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from ondevice.grating import probe_recordings, recordings
from ondevice.grating.calibration import calibrate, interval
from ondevice.grating.guarantee import fit
from ondevice.grating.probe_recordings import MODELS
from ondevice.grating.pruning import ClusterRule, Rule
from ondevice.grating.recordings import kendall
from ondevice.grating.replay import Pools, measure
from ondevice.grating.trade_offs import curve

HEAD, PROBES = "model's head", "linear probes"
MARGIN, CV = "margin rule", "CV rule"
TARGETS = (0.95, 0.98, 0.985, 0.99)
_LOADED = {HEAD: recordings.load, PROBES: probe_recordings.load}
_CHANCES: tuple[float, ...] = tuple(np.geomspace(1e-3, 0.3, 28).tolist())
_NUDGE = 1 + 1e-9  # of a calibrated threshold, as in `trade_offs`


def agreement(models: Sequence[str] = MODELS) -> pd.DataFrame:
    """model, scores, layer, kendall: tau-b of a layer's order with the last layer's, mean over test pools."""
    rows = []
    for name in models:
        for said, load in _LOADED.items():
            scores = load(name, "test").pools.scores
            found = kendall(scores, scores[:, -1:]).mean(0)
            rows += [(name, said, layer + 1, tau) for layer, tau in enumerate(found.tolist())]
    return pd.DataFrame(rows, columns=["model", "scores", "layer", "kendall"])


def table(
    models: Sequence[str] = MODELS, ks: Sequence[int] = (5,), targets: Sequence[float] = TARGETS
) -> pd.DataFrame:  # fmt: skip
    """What each rule saves on test pools when it is to reach an overlap on validation pools.

    model, scores, rule, k, target; saved: share of the layer-candidates; overlap, low, high: with the full model's
    top K, 95 % over pools; change: of Precision@K, in points.
    """
    rows = []
    for name in models:
        for said, load in _LOADED.items():
            valid, test = (load(name, split).pools for split in ("validation", "test"))
            for k in ks:
                for rule, target, made in _calibrated(valid, k, targets):
                    done = measure(test, k, made)
                    span, change = interval(done.overlap, draws=500), 100 * (done.precision - done.full).mean()
                    reached = (done.saved.mean(), span.mean, span.low, span.high, change)
                    rows.append((name, said, rule, k, target, *reached))
    columns = ["model", "scores", "rule", "k", "target", "saved", "overlap", "low", "high", "change"]
    return pd.DataFrame(rows, columns=columns)


def _calibrated(valid: Pools, k: int, targets: Sequence[float]) -> Iterator[tuple[str, float, Rule | None]]:
    """(kind of rule, target, rule) on these pools; no rule where nothing reaches the target."""
    model, found = fit(valid, k), curve(valid, k, ClusterRule(np.inf))
    for target, chance in zip(targets, chances(valid, k, targets), strict=True):
        yield MARGIN, target, model.rule(chance) if chance else None
        yield CV, target, ClusterRule(calibrate(found, target) * _NUDGE)


def chances(pools: Pools, k: int, targets: Sequence[float], folds: int = 4, seed: int = 0) -> list[float]:
    """`guarantee.choose` for several overlaps at once, from fewer chances: each is 0 where none reaches it."""
    parts = np.array_split(np.random.default_rng(seed).permutation(len(pools)), folds)
    rests = [np.setdiff1d(np.arange(len(pools)), part) for part in parts]
    held = [(fit(pools.take(rest), k), pools.take(part)) for part, rest in zip(parts, rests, strict=True)]
    reached, open_ = dict.fromkeys(targets, 0.0), set(targets)
    for chance in _CHANCES:
        overlap = np.concatenate([measure(part, k, model.rule(chance)).overlap for model, part in held]).mean()
        open_ = {target for target in open_ if overlap >= target - 1e-12}
        if not open_:
            break
        reached |= dict.fromkeys(open_, chance)
    return [reached[target] for target in targets]

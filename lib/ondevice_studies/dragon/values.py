"""The value of each claim, from records, replays and formulas; `claims` says which rule judges it.

What a null gets is computed by the same functions: a trivial method in the place of the one that is judged, another
configuration or formula, by parameters with defaults. Tables have the same names throughout: `perplexity` of
`study.perplexities`, the larger model first; `imposed` of `study.per_token` with the paper's paces; `right` of
`answers.right`; `totals` and `on_device` of `study.schedules`. task: one holder, or the whole mix.
A claim of little time is judged as a pair with what the time is spent on, right answers: a method that leaves the
cloud's documents out takes less of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pandas as pd
from scipy.stats import chisquare, spearmanr

from ondevice.evidence import Estimate, Value, derived, exact, resampled
from ondevice.evidence.resampling import Resampled
from ondevice_papers.dragon import codec, overhead
from ondevice_papers.dragon.aggregation import target
from ondevice_papers.dragon.cost import Costs, latency_difference, latency_per_token, speedup, waiting_time
from ondevice_papers.dragon.speculative_aggregation import Aggregation, aggregate, expected_acceptance, sample
from ondevice_studies.dragon import analysis, language_modelling, lockstep, printed, replays, study
from ondevice_studies.dragon.language_modelling import (
    CLOUD,
    CLOUD_OUTPUT,
    COUNTS,
    DEVICE,
    DRCG,
    NONE,
    PRINTED,
    SEQUENCE,
)
from ondevice_studies.dragon.pair import CRCG, DRAGON
from ondevice_studies.dragon.study import MIX, Draws, part

_LEAST = 0.01  # of perplexity, that a baseline is taken to gain where it gains less, or nothing, in a draw


# Figure 6


def _by_count(perplexity: Resampled, method: str) -> Draws:
    """[counts, draws, models]."""
    return np.stack([perplexity[f"{method} {count}"] for count in COUNTS])


def _best(perplexity: Resampled) -> Draws:
    """[counts, draws, models] of the paper's best baseline with so many documents."""
    return np.min([_by_count(perplexity, method) for method in PRINTED], axis=0)


def _gain(perplexity: Resampled, ours: str, baseline: Draws) -> Draws:
    """[draws, models] how much lower the most documents make our perplexity, over how much lower the baseline's is."""
    none = perplexity[f"{NONE} 0"]
    return (none - _by_count(perplexity, ours)[-1]) / np.maximum(none - baseline, _LEAST)


def gain_at_most_documents(perplexity: Resampled, ours: str = language_modelling.DRAGON) -> Estimate:
    """Over the best baseline with as many documents."""
    return perplexity.estimate(_gain(perplexity, ours, _best(perplexity)[-1])[:, 0])


def gain_at_any_count(perplexity: Resampled, ours: str = language_modelling.DRAGON) -> Estimate:
    """Over the best baseline with any number of documents."""
    return perplexity.estimate(_gain(perplexity, ours, _best(perplexity).min(axis=0))[:, 0])


def share_not_worse(perplexity: Resampled, ours: str = language_modelling.DRAGON) -> Estimate:
    """Share of the counts, models and baselines in which ours is not higher by more than 0.1 percent."""
    over = np.stack([_by_count(perplexity, method) / _by_count(perplexity, ours) for method in PRINTED])
    return perplexity.estimate((over >= 0.999).mean(axis=(0, 1, 3)))


def gap_to_the_best(perplexity: Resampled, ours: str = language_modelling.DRAGON) -> Value:
    """The best baseline's perplexity less ours, mean of the models: (with the fewest documents, with the most)."""
    gaps = _best(perplexity) - _by_count(perplexity, ours)
    return tuple(perplexity.estimate(gaps[index].mean(axis=1)) for index in (0, -1))


def one_side_alone(perplexity: Resampled, ours: str = language_modelling.DRAGON) -> Value:
    """Perplexity, means: (CRCG's over ours, CRCG/Cloud's by one context over the same by output aggregation)."""
    all_documents = _by_count(perplexity, ours)
    cloud = _by_count(perplexity, CLOUD)
    over_ours = np.mean([cloud / all_documents, _by_count(perplexity, DEVICE) / all_documents], axis=(0, 1, 3))
    return (
        perplexity.estimate(over_ours),
        perplexity.estimate((cloud / _by_count(perplexity, CLOUD_OUTPUT)).mean(axis=(0, 2))),
    )


def drcg_saturates(perplexity: Resampled, method: str = DRCG) -> Value:
    """Change of a method's perplexity in percent, mean of the models, by documents: (4 to 16, 0 to 4)."""
    most, four, none = (perplexity[name] for name in (f"{method} {COUNTS[-1]}", f"{method} 4", f"{NONE} 0"))
    changes = most / four - 1, four / none - 1
    return tuple(perplexity.estimate(100 * change.mean(axis=1)) for change in changes)


def drcg_at_fewest_documents(perplexity: Resampled, ours: str = language_modelling.DRAGON) -> Estimate:
    """DRCG's perplexity over ours with the fewest documents."""
    fewest = COUNTS[0]
    return perplexity.estimate((perplexity[f"{DRCG} {fewest}"] / perplexity[f"{ours} {fewest}"])[:, 0])


def variant_over_ours(perplexity: Resampled, variant: str = SEQUENCE) -> Estimate:
    """A variant's perplexity with most documents over DRAGON's, mean of the models."""
    most = COUNTS[-1]
    ratios = perplexity[f"{variant} {most}"] / perplexity[f"{language_modelling.DRAGON} {most}"]
    return perplexity.estimate(ratios.mean(axis=1))


# Figure 7


def right_over_the_device(right: Resampled, ours: str, task: str = MIX) -> Estimate:
    """Points of 100 questions that a method has right more than the device alone. right: of `answers.right`."""
    method = lockstep.ON_DEVICE if ours == CRCG else ours
    return right.estimate(100 * (part(right, method, task) - part(right, lockstep.ON_DEVICE, task)))


def saved(imposed: Resampled, right: Resampled, baseline: str, ours: str = DRAGON, task: str = MIX) -> Value:
    """(Percent of a baseline's time per token at 300 ms, right answers over the device's)."""
    share = part(imposed, f"{ours} 300", task) / part(imposed, f"{baseline} 300", task)
    return imposed.estimate(100 * (1 - share)), right_over_the_device(right, ours, task)


def growth_with_delay(imposed: Resampled, right: Resampled, ours: str = DRAGON, task: str = MIX) -> Value:
    """(Our time per token at 300 ms over that at 0 ms, right answers over the device's)."""
    grown = part(imposed, f"{ours} 300", task) / part(imposed, f"{ours} 0", task)
    return imposed.estimate(grown), right_over_the_device(right, ours, task)


def grown_with_delay(
    imposed: Resampled, methods: Sequence[str], change: Callable[[Draws, Draws], Draws], task: str = MIX
) -> Value:
    """How each method's time per token, ms, changes from 0 to 300 ms. change: of the second and the first one."""
    ends = [(part(imposed, f"{method} 300", task), part(imposed, f"{method} 0", task)) for method in methods]
    return tuple(imposed.estimate(change(last, first)) for last, first in ends)


def above_the_device(imposed: Resampled, right: Resampled, ours: str = DRAGON, task: str = MIX) -> Value:
    """(Percent of the device's time per token that ours takes more, mean over the delays; right answers over its)."""
    names = [name for name in imposed.names if name.startswith(f"{ours} ") and "again" not in name]
    mean = np.mean([part(imposed, name, task) for name in names], axis=0)
    device = np.mean([part(imposed, f"{CRCG} {delay}", task) for delay in (0, 300)], axis=0)
    return imposed.estimate(100 * (mean / device - 1)), right_over_the_device(right, ours, task)


# Figure 8


def first_token_over_the_device(model: str = printed.OPT, *, overlapped: bool = True) -> Estimate:
    """Time to DRAGON's first token over that to the device's, by the paper's times and its largest added delay.

    overlapped: the device's own first distribution is computed while the cloud's is on its way.
    """
    *_, device, cloud = printed.alone(model)
    arrives = cloud + 0.3
    return exact((max(device, arrives) if overlapped else device + arrives) / device, "analytic")


def opt_bytes_over_qwens(heads_that_share: int = 6) -> Estimate:
    """Keys and values of the same documents. heads_that_share: keys and values, of Qwen2.5-1.5B's 12 heads."""
    qwen = printed.kv_megabytes(printed.QWEN) * 6 / heads_that_share
    return exact(printed.kv_megabytes(printed.OPT) / qwen, "analytic")


def kv_megabytes(model: str) -> Estimate:
    """Keys and values of two documents of 64 tokens, float32."""
    return exact(printed.kv_megabytes(model), "analytic")


# Figures 9 and 10

_SETTING = f"drawn, {printed.QWEN}"  # the authors' rates of acceptance and their timings of Qwen
_CHANGING = ("changing, both 100 ms", f"changing, {printed.QWEN}")


def _of_sequences(totals: Resampled, draws: Draws) -> Estimate:
    """An estimate whose n is the sequences of one setting."""
    return replace(totals.estimate(draws), n=replays.SEQUENCES)


def _saved(totals: Resampled, ours: str, others: Sequence[str], delay: int, setting: str) -> Draws:
    """Percent of the fastest other strategy's seconds."""
    fastest = np.min([part(totals, f"{other} {delay}", setting) for other in others], axis=0)
    return 100 * (1 - part(totals, f"{ours} {delay}", setting) / fastest)


def schedule_over_the_best(totals: Resampled, ours: str = "DRAGON") -> Estimate:
    """Seconds over those of the best of Cloud, Device and Random, largest over the delays."""
    over = []
    for delay in replays.DELAYS:
        others = [part(totals, f"{name} {delay:.0f}", _SETTING) for name in ("Cloud", "Device", "Random")]
        over.append(part(totals, f"{ours} {delay:.0f}", _SETTING) / np.min(others, axis=0))
    return _of_sequences(totals, np.max(over, axis=0))


def saved_over_device(totals: Resampled, ours: str = "DRAGON") -> Value:
    """Percent saved over Device, at (100, 400 ms)."""
    return tuple(_of_sequences(totals, _saved(totals, ours, ["Device"], delay, _SETTING)) for delay in (100, 400))


def at_no_delay(totals: Resampled, on_device: Resampled, ours: str = "DRAGON") -> Value:
    """(Our share of aggregations on the device, Cloud's seconds over Device's, Random's over Device's) at 0 ms."""
    device = part(totals, "Device 0", _SETTING)
    over = (part(totals, f"{name} 0", _SETTING) / device for name in ("Cloud", "Random"))
    share = part(on_device, f"{ours} 0", _SETTING)
    return _of_sequences(totals, share), *(_of_sequences(totals, ratio) for ratio in over)


def saved_where_acceptance_changes(totals: Resampled, ours: str = "DRAGON") -> Value:
    """Percent saved over the better static side at 400 ms: (equal paces, the authors'). The decisions are ours."""
    saved = [_saved(totals, ours, ["Device", "Cloud"], 400, setting) for setting in _CHANGING]
    return tuple(replace(_of_sequences(totals, draws), kind="simulated") for draws in saved)


def exchanged_on_the_cloud(exchanged: replays.Snapshot) -> Estimate:
    """Share of positions after the first that the cloud aggregates. exchanged: the sides' recorded decisions are."""
    later = exchanged.decisions.query("position > 0")
    return exact((later["side"] == "cloud").mean(), "replayed")


# Theorems and formulas


def chi_square(
    pairs: int = 50,
    draws: int = 100_000,
    vocabulary: int = 24,
    seed: int = 0,
    wrong: float = 0.0,
    aggregate: Callable[..., Aggregation] = aggregate,
) -> pd.DataFrame:
    """Theorem 1: target tokens against the mixture: pair, gamma_remote, p (of the chi-square test), drafts, apart (TV).

    drafts: the p of the local side's drafts, taken as they are. wrong: by how much the aggregator's log odds of the
    sides' weights are off, as a control. aggregate: the function of `speculative_aggregation`, or an experiment's.
    """
    random = np.random.default_rng(seed)
    rows = []
    for number in range(pairs):
        spread = random.choice([0.1, 0.5, 2.0], 2)
        p, q = (random.dirichlet(np.full(vocabulary, s)) * 0.999 + 0.001 / vocabulary for s in spread)
        weights = random.normal(size=2)
        mixed = target(p, q, *weights)
        decided = target(p, q, weights[0] + wrong, weights[1])
        for gamma in (0.5, 1.0):
            numbers = random.random((7, draws))
            drafts = sample(p, numbers[5]), sample(q, numbers[6])
            tokens = aggregate(*drafts, p, q, decided, numbers[:5], gamma).token
            p_values = [_pooled(np.bincount(t, minlength=vocabulary), draws * mixed) for t in (tokens, drafts[0])]
            rows.append((number, gamma, *p_values, 0.5 * np.abs(p - q).sum()))
    return pd.DataFrame(rows, columns=["pair", "gamma_remote", "p", "drafts", "apart"])


def _pooled(counts: np.ndarray, expected: np.ndarray) -> float:
    """The p-value, with what is expected fewer than 10 times put together."""
    rare = expected < 10
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    return float(chisquare(counts, expected * counts.sum() / expected.sum()).pvalue)


def least_p_value(tested: pd.DataFrame, ours: str = "p") -> Estimate:
    """Times the number of tests (Bonferroni). tested: of `chi_square`; ours: its column."""
    return exact(float(tested[ours].min() * len(tested)), "simulated")


def overlap(
    paths: int = 30,
    unrelated: int = 300,
    vocabulary: int = 64,
    eta: float = 0.4,
    seed: int = 0,
    expected_acceptance: Callable[..., float] = expected_acceptance,
) -> Value:
    """Theorem 2, rank correlations of overlap and acceptance: (the least as a remote distribution moves to the local
    one, that over pairs which have nothing to do with each other).
    """
    random = np.random.default_rng(seed)
    correlations = []
    for _ in range(paths):
        p, q = random.dirichlet(np.full(vocabulary, 0.3), 2)
        steps = [(1 - t) * q + t * p for t in np.linspace(0, 1, 12)]
        shared = [np.minimum(p, step).sum() for step in steps]
        correlations.append(spearmanr(shared, [expected_acceptance(p, step, eta) for step in steps])[0])
    pairs = [random.dirichlet(np.full(vocabulary, 0.3), 2) for _ in range(unrelated)]
    shared = [np.minimum(p, q).sum() for p, q in pairs]
    apart = spearmanr(shared, [expected_acceptance(p, q, eta) for p, q in pairs])[0]
    return exact(min(correlations), "analytic"), exact(apart, "analytic")


# Eqs. 8 and 9 on grids, the remote side's pace and the round trip those of Figure 3

_PACE = 0.5  # seconds
_TRIP = 0.3
_RATES = np.linspace(0, 1, 11)
_SLOWER = np.linspace(_PACE + _TRIP * 1.001, 3, 12)  # local paces by more than the round trip off the remote one
_FASTER = np.linspace(0.01, _PACE - _TRIP * 1.001, 12)
_NEAR = np.linspace(_PACE - 0.95 * _TRIP, _PACE + 0.95 * _TRIP, 9)
_LOCAL = np.linspace(0.05, 3, 30)
_TRIPS = np.linspace(0, 3, 31)


def _costs(local: float, trip: float = _TRIP) -> Costs:
    return Costs(local, _PACE, trip / 2, trip / 2)


def faster_sides_gain(difference: Callable[..., float] = latency_difference) -> Estimate:
    """The most that aggregating on the faster side gains where the other one is slower by more than the round trip.

    difference: Eq. 8's, or an experiment's.
    """
    signs = [(1, pace) for pace in _SLOWER] + [(-1, pace) for pace in _FASTER]
    grid = product(signs, _RATES, _RATES)
    gains = [sign * difference(_costs(pace), first, second) for (sign, pace), first, second in grid]
    return exact(max(gains), "analytic")


def _rises(function: Callable[..., float], pairs: Iterable[Sequence[tuple]]) -> Estimate:
    """Share of pairs of arguments of which the second gives more."""
    return exact(float(np.mean([function(*high) > function(*low) + 1e-12 for low, high in pairs])), "analytic")


def acceptance_moves_away(difference: Callable[..., float] = latency_difference) -> Estimate:
    """Share on which more acceptance of a side's drafts makes its own aggregation (Z^l of Delta Z) worse."""
    grid = product(_NEAR, _RATES, pairwise(_RATES))
    return _rises(difference, [[(_costs(pace), rate, remote) for rate in rates] for pace, remote, rates in grid])


def largest_speedup(speedup: Callable[..., float] = speedup) -> Value:
    """The speed-up at the least local pace over (the curve's largest, that at the remote's pace, at twice that pace).

    speedup: Eq. 9's, or an experiment's.
    """
    curve = [speedup(_costs(local), 0.7) for local in _LOCAL]
    over = max(curve), *(speedup(_costs(pace * _PACE), 0.7) for pace in (1, 2))
    return tuple(exact(curve[0] / other, "analytic") for other in over)


def speedup_of_the_slower(speedup: Callable[..., float] = speedup) -> Estimate:
    """Largest difference of the speed-up from 1 where the local side is slower by more than the round trip."""
    return exact(max(abs(speedup(_costs(pace), rate) - 1) for pace in _SLOWER for rate in _RATES), "analytic")


def speedup_grows_with_the_trip(speedup: Callable[..., float] = speedup) -> Estimate:
    """Share on which it grows with the round trip, some drafts accepted and the paces less than it apart."""
    grid = [point for point in product(_LOCAL, _RATES[1:], pairwise(_TRIPS)) if point[0] - _PACE < point[2][1]]
    return _rises(speedup, [[(_costs(local, trip), rate) for trip in trips] for local, rate, trips in grid])


def speedup_grows_with_acceptance(speedup: Callable[..., float] = speedup) -> Estimate:
    """Share on which it grows with the remote acceptance, the paces less than the round trip apart."""
    grid = [point for point in product(_LOCAL, _TRIPS[1:], pairwise(_RATES)) if point[0] - _PACE < point[1]]
    return _rises(speedup, [[(_costs(local, trip), rate) for rate in rates] for local, trip, rates in grid])


# Figure 4, and section 7.5


def steady(pipelines: pd.DataFrame, case: str) -> Estimate:
    """Seconds of the case's last token, which is in the steady state. pipelines: tokens of `analysis.pipelines`."""
    return exact(round(float(pipelines.groupby("case")["per_token_s"].last()[case]), 9), "simulated")


def worst_over_token_wise(latency: Callable[..., float] = latency_per_token, accepted: float = 0.0) -> Estimate:
    """Seconds per token by Eq. 7 with this share of drafts accepted, less token-wise aggregation's (Table 1).

    latency: Eq. 7's, or an experiment's. Token-wise aggregation waits as after two drafts that are rejected.
    """
    token_wise = waiting_time(analysis.EXAMPLE, accepted_local=False, accepted_remote=False)
    return exact(latency(analysis.EXAMPLE, accepted) - token_wise, "analytic")


def operations(resamples: int = 2) -> Estimate:
    """Of one aggregation in which so many drafts are resampled."""
    return exact(overhead.operations(resamples=resamples), "analytic")


def aggregation_time(seconds: Mapping[str, list[float]], step: str = "aggregate") -> Estimate:
    """Median microseconds of a step, by default one aggregation, on this machine. seconds: of `overhead.times`."""
    micro = 1e6 * np.array(seconds[step])
    return resampled(lambda rows: float(np.median(micro[rows])), len(micro), "measured", drawn="runs")


def decode_macs(shape: tuple[int, int, int, int, int] = overhead.QWEN_SHAPE) -> Estimate:
    """Multiply-accumulates of one token, by default of Qwen2.5-1.5B. shape: as of `overhead.decode_macs`."""
    return exact(overhead.decode_macs(shape), "analytic")


def distribution_sizes(tokens: pd.DataFrame, *, sent: bool = True) -> Value:
    """(Largest KB of a distribution, mean total variation that the cap costs). tokens: the record `lockstep`.

    sent: else the receiver takes its own distribution for the other side's.
    """
    column = "lost" if sent else "tv"
    means = tokens.groupby(["holder", "question"], as_index=False)[column].mean().assign(part="all")
    lost = study.shares(derived(means, tokens), column, "part")
    largest = float(tokens["bytes"].max()) / 1024 if sent else 0.0
    return exact(largest, "recorded"), lost.estimate(part(lost, "all"))


def sending_time(size: int = codec.CAP) -> Estimate:
    """Microseconds of so many bytes on the paper's Wi-Fi."""
    return exact(1e6 * size / overhead.WIFI, "analytic")


def acceptance_by_word(tokens: pd.DataFrame, function_word: Callable[[str], bool] = lockstep.function_word) -> Value:
    """Mean acceptance of (function words, other tokens). tokens: the record `lockstep`."""
    words = study.by_word(tokens, function_word=function_word)
    return tuple(words.estimate(part(words, name)) for name in ("function words", "other"))

"""The value of each claim, from records, replays and formulas; `rules` judges them.

What a null gets is computed by the same functions: the cloud alone or the device alone in DRAGON's place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pandas as pd
from scipy.stats import chisquare, spearmanr

from ondevice.evidence import Estimate, Value, derived, exact, resampled
from ondevice.evidence.resampling import Resampled
from ondevice_papers.dragon import overhead
from ondevice_papers.dragon.aggregation import target
from ondevice_papers.dragon.cost import Costs, latency_difference, speedup
from ondevice_papers.dragon.speculative_aggregation import Aggregation, aggregate, expected_acceptance, sample
from ondevice_studies.dragon import analysis, language_modelling, printed, replays, study
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
from ondevice_studies.dragon.pair import AS_MANY, CRCG, DRAGON, ROWS, SW, TEXT, TW
from ondevice_studies.dragon.study import MIX, Draws, part

Values = dict[str, Value]
_LEAST = 0.01  # of perplexity, that a baseline is taken to gain where it gains less, or nothing, in a draw


# Figure 6


def perplexity(table: Resampled, ours: str = language_modelling.DRAGON) -> Values:
    """c01 to c09. table: of `study.perplexities`, the larger model first. ours: what stands for DRAGON."""
    said, first, last = table.estimate, COUNTS[0], COUNTS[-1]
    none = table[f"{NONE} 0"]
    shown = {*PRINTED, CLOUD_OUTPUT, SEQUENCE, ours}
    at = {method: np.stack([table[f"{method} {n}"] for n in COUNTS]) for method in shown}
    best = np.min([at[method] for method in PRINTED], axis=0)  # [counts, draws, models]
    same = (none - at[ours][-1]) / np.maximum(none - best[-1], _LEAST)
    own = (none - at[ours][-1]) / np.maximum(none - best.min(axis=0), _LEAST)
    over = np.stack([at[method] / at[ours] for method in PRINTED])
    drcg = at[DRCG]
    four = list(COUNTS).index(4)
    falls = drcg[-1] / drcg[four] - 1, drcg[four] / none - 1
    return {
        "dragon-c01": said(same.max(axis=1)), "dragon-c02": said(own[:, 0]), "dragon-c03": said(own[:, -1]),
        "dragon-c04": said((over >= 0.999).mean(axis=(0, 1, 3))),
        "dragon-c05": tuple(said((best - at[ours])[place].mean(axis=1)) for place in (0, -1)),
        "dragon-c06": (said(np.mean([at[CLOUD] / at[ours], at[DEVICE] / at[ours]], axis=(0, 1, 3))),
                       said((at[CLOUD] / at[CLOUD_OUTPUT]).mean(axis=(0, 2)))),
        "dragon-c07": tuple(said(100 * fall.mean(axis=1)) for fall in falls),
        "dragon-c08": tuple(said(one) for one in (table[f"{DRCG} {first}"] / table[f"{ours} {first}"]).T),
        "dragon-c09": (exact(1.0, table.kind), said((table[f"{SEQUENCE} {last}"] / at[ours][-1]).mean(axis=1))),
    }  # fmt: skip


# Figures 7 and 8


def per_token(table: Resampled, task: str = MIX, ours: str = DRAGON) -> Values:
    """c10 to c14 and c16, of one holder or the whole mix. table: of `study.per_token` with the paper's paces."""
    of = {name: part(table, name, task) for name in table.names}
    ends = {method: (of[f"{method} 0"], of[f"{method} 300"]) for method in (ours, TW, SW, CRCG)}
    every = np.mean([of[name] for name in of if name.startswith(f"{ours} ") and "again" not in name], axis=0)
    said = table.estimate
    return {
        "dragon-c10": said(100 * (1 - ends[ours][1] / ends[SW][1])),
        "dragon-c11": said(100 * (1 - ends[ours][1] / ends[TW][1])),
        "dragon-c12": said(ends[ours][1] / ends[ours][0]),
        "dragon-c13": tuple(said(ends[method][1] / ends[method][0]) for method in (TW, SW)),
        "dragon-c14": tuple(said(ends[method][1] - ends[method][0]) for method in (SW, TW)),
        "dragon-c16": said(100 * (every / np.mean(ends[CRCG], axis=0) - 1)),
    }


def first_token(
    unpaced: Resampled, paced: Resampled, between: Resampled, ours: str = DRAGON, task: str = MIX
) -> Values:
    """c15, c17 to c19. unpaced, paced: of `study.first_token`; between: ms between tokens, unpaced."""
    quick, slow, later = ({name: part(of, name, task) for name in of.names} for of in (unpaced, paced, between))
    delays = [int(name.rpartition(" ")[2]) for name in slow if name.startswith(f"{ours} ")]
    ratios = [slow[f"{ours} {delay}"] / slow[f"{CRCG} {delay}"] for delay in delays]
    both = [delay for delay in (0, 100, 300) if f"{ours} {delay}" in quick]  # of the device alone the ends
    text = [quick[f"{TEXT} {delay}"] / quick[f"{ours} {delay}"] for delay in both]
    said = unpaced.estimate
    return {
        "dragon-c15": between.estimate(later[f"{ROWS} 0"] / later[f"{AS_MANY} 0"]),
        "dragon-c17": paced.estimate(np.max(ratios, axis=0)),
        "dragon-c18": said(np.mean(text, axis=0)),
        "dragon-c19": said(quick[f"{ROWS} 300"] / quick[f"{ours} 300"]),
    }


def sizes() -> Values:
    """c21 to c23: keys and values of two documents of 64 tokens, from the configurations, in float32."""
    opt = printed.kv_megabytes(printed.OPT)
    qwen = printed.kv_megabytes(printed.QWEN)
    return {
        name: exact(size, "analytic")
        for name, size in (("dragon-c21", opt / qwen), ("dragon-c22", opt), ("dragon-c23", qwen))
    }


# Figures 9 and 10


def scheduling(total: Resampled, on_device: Resampled, ours: str = "DRAGON") -> Values:
    """c26 to c29. total, on_device: of `study.schedules`; c26 to c28 are of the authors' Qwen timings."""
    setting = f"drawn, {printed.QWEN}"

    def said(draws: Draws) -> Estimate:
        return replace(total.estimate(draws), n=replays.SEQUENCES)  # of one setting

    def of(strategy: str, delay: float, of_setting: str = setting) -> Draws:
        return part(total, f"{strategy} {delay:.0f}", of_setting)

    saved = {delay: 100 * (1 - of(ours, delay) / of("Device", delay)) for delay in replays.DELAYS}
    over = [
        of(ours, delay) / np.min([of(one, delay) for one in ("Cloud", "Device", "Random")], axis=0)
        for delay in replays.DELAYS
    ]
    changing = [
        100 * (1 - of(ours, 400, one) / np.minimum(of("Device", 400, one), of("Cloud", 400, one)))
        for one in ("changing, both 100 ms", f"changing, {printed.QWEN}")
    ]
    return {
        "dragon-c26": said(np.max(over, axis=0)), "dragon-c27": (said(saved[100.0]), said(saved[400.0])),
        "dragon-c28": (said(part(on_device, f"{ours} 0", setting)),
                       *(said(of(one, 0) / of("Device", 0)) for one in ("Cloud", "Random"))),
        "dragon-c29": tuple(replace(said(one), kind="simulated") for one in changing),  # the decisions are ours
    }  # fmt: skip


# Theorems and formulas


def chi_square(
    pairs: int = 50, draws: int = 100_000, vocabulary: int = 24, seed: int = 0, wrong: float = 0.0,
    aggregate: Callable[..., Aggregation] = aggregate,
) -> pd.DataFrame:  # fmt: skip
    """Theorem 1: target tokens against the mixture: pair, gamma_remote, p (of the chi-square test), apart (TV).

    wrong: by how much the aggregator's log odds of the sides' weights are off, as a control. aggregate: the function of
    `speculative_aggregation`, or an experiment's.
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
            counts = np.bincount(tokens, minlength=vocabulary)
            rows.append((number, gamma, float(_pooled(counts, draws * mixed)), 0.5 * np.abs(p - q).sum()))
    return pd.DataFrame(rows, columns=["pair", "gamma_remote", "p", "apart"])


def _pooled(counts: np.ndarray, expected: np.ndarray) -> float:
    """The p-value, with what is expected fewer than 10 times put together."""
    rare = expected < 10
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    return float(chisquare(counts, expected * counts.sum() / expected.sum()).pvalue)


def overlap(
    pairs: int = 30, unrelated: int = 300, vocabulary: int = 64, eta: float = 0.4, seed: int = 0,
    expected_acceptance: Callable[..., float] = expected_acceptance,
) -> Value:  # fmt: skip
    """c34, rank correlations of overlap and acceptance: the least as a remote distribution moves to the local one, and
    that over pairs which have nothing to do with each other.
    """
    random = np.random.default_rng(seed)
    found = []
    for _ in range(pairs):
        p, q = random.dirichlet(np.full(vocabulary, 0.3), 2)
        steps = [(1 - t) * q + t * p for t in np.linspace(0, 1, 12)]
        shared = [np.minimum(p, step).sum() for step in steps]
        found.append(spearmanr(shared, [expected_acceptance(p, step, eta) for step in steps])[0])
    drawn = [random.dirichlet(np.full(vocabulary, 0.3), 2) for _ in range(unrelated)]
    shared = [np.minimum(p, q).sum() for p, q in drawn]
    apart = spearmanr(shared, [expected_acceptance(p, q, eta) for p, q in drawn])[0]
    return exact(min(found), "analytic"), exact(apart, "analytic")


def formulas(
    decode_remote: float = 0.5,
    rtt: float = 0.3,
    difference: Callable[..., float] = latency_difference,
    speedup: Callable[..., float] = speedup,
) -> Values:
    """c31, c32, c35 to c38, on grids of Eqs. 8 and 9. difference, speedup: those of `cost`, or an experiment's."""
    rates = np.linspace(0, 1, 11)
    slow = np.linspace(decode_remote + rtt * 1.001, 3, 12)
    fast = np.linspace(0.01, decode_remote - rtt * 1.001, 12)
    near = np.linspace(decode_remote - 0.95 * rtt, decode_remote + 0.95 * rtt, 9)

    def gap(local: float, alpha_l: float, alpha_r: float) -> float:
        return difference(Costs(local, decode_remote, rtt / 2, rtt / 2), alpha_l, alpha_r)

    # more acceptance of a side's own drafts: its own aggregation (Z_l, in Delta Z = Z_l - Z_r) gets no better by it
    rising = [gap(c, high, r) >= gap(c, low, r) - 1e-12 for c in near for r in rates for low, high in pairwise(rates)]

    def gain(local: float, trip: float, alpha: float) -> float:
        return speedup(Costs(local, decode_remote, trip / 2, trip / 2), alpha)

    locals_ = np.linspace(0.05, 3, 30)
    trips = np.linspace(0, 3, 31)
    curve = [gain(local, rtt, 0.7) for local in locals_]
    by_trip = [
        gain(c, high, a) >= gain(c, low, a) - 1e-12 for c in locals_ for a in rates for low, high in pairwise(trips)
    ]
    by_rate = [
        gain(c, t, high) >= gain(c, t, low) - 1e-12 for c in locals_ for t in trips for low, high in pairwise(rates)
    ]
    values: Mapping[str, float | tuple[float, ...]] = {
        "dragon-c31": max(
            sign * gap(c, a, b) for sign, paces in ((1, slow), (-1, fast)) for c in paces for a in rates for b in rates
        ),
        "dragon-c32": float(np.mean(rising)),
        "dragon-c35": (curve[0] / max(curve), *(curve[0] / gain(pace * decode_remote, rtt, 0.7) for pace in (1, 2))),
        "dragon-c36": max(abs(gain(c, rtt, a) - 1) for c in slow for a in rates),
        "dragon-c37": float(np.mean(by_trip)),
        "dragon-c38": float(np.mean(by_rate)),
    }
    return {
        name: tuple(exact(one, "analytic") for one in value) if isinstance(value, tuple) else exact(value, "analytic")
        for name, value in values.items()
    }


def pipelines(tokens: pd.DataFrame) -> Values:
    """c39 to c41. tokens: of `analysis.pipelines`; the last token of each case is in the steady state."""
    steady = tokens.groupby("case")["per_token_s"].last()
    costs = analysis.EXAMPLE
    none = np.zeros((50, 2), bool)
    apart = analysis.time_per_token(costs, none) - analysis.time_per_token(costs, none, token_wise=True)
    values = {"dragon-c39": steady["all accepted"], "dragon-c40": steady["all rejected"], "dragon-c41": apart}
    return {name: exact(round(float(value), 9), "simulated") for name, value in values.items()}


def overheads(seconds: Mapping[str, list[float]], tokens: pd.DataFrame) -> Values:
    """c42 to c47. seconds: of `overhead.times`. tokens: the record `lockstep`."""
    largest = float(tokens["bytes"].max())
    words = study.by_word(tokens)
    each = derived(tokens.groupby(["holder", "question"], as_index=False)["lost"].mean().assign(part="lost"), tokens)
    lost = study.shares(each, "lost", "part")
    micro = 1e6 * np.array(seconds["aggregate"])
    return {
        "dragon-c42": exact(overhead.operations(), "analytic"),
        "dragon-c43": resampled(lambda rows: float(np.median(micro[rows])), len(micro), "measured"),
        "dragon-c44": exact(overhead.decode_macs(), "analytic"),
        "dragon-c45": (exact(largest / 1024, "recorded"), lost.estimate(part(lost, "lost"))),
        "dragon-c46": exact(1e6 * largest / overhead.WIFI, "recorded"),
        "dragon-c47": tuple(words.estimate(part(words, name)) for name in ("function words", "other")),
    }


def theorem_1(tested: pd.DataFrame) -> Estimate:
    """c33: the least p-value, times the number of tests (Bonferroni). tested: of `chi_square`."""
    return exact(float(tested["p"].min() * len(tested)), "simulated")

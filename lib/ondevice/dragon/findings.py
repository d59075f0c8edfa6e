"""The value of each claim, from the tables of the experiments; `rules` judges them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import chisquare, spearmanr

from ondevice.dragon import analysis, experiments, first_token, language_modelling, overhead, printed, replays
from ondevice.dragon.aggregation import target
from ondevice.dragon.cost import Costs, latency_difference, speedup
from ondevice.dragon.language_modelling import CLOUD, CLOUD_OUTPUT, DEVICE, DRAGON, DRCG, NONE, PRINTED, SEQUENCE
from ondevice.dragon.lockstep import by_word
from ondevice.dragon.simulator import DEVICE as ON_DEVICE
from ondevice.dragon.speculative_aggregation import aggregate, expected_acceptance, sample

Values = dict[str, float | tuple[float, ...]]


# Figure 6


def gains(losses: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """DRAGON's fall of perplexity over the best baseline's, with a 95 % interval: model, ratio, low, high, baseline,
    documents (its own best number). losses: `language_modelling.evaluate` by model.
    """
    rows = []
    for name, frame in losses.items():
        found = language_modelling.gain_ratio(frame, own_best=True)
        rows.append((name, found.value, found.low, found.high, found.baseline, found.documents))
    return pd.DataFrame(rows, columns=["model", "ratio", "low", "high", "baseline", "documents"])


def language_modelling_values(tables: Mapping[str, pd.DataFrame], gains: pd.DataFrame) -> Values:
    """c01 to c09. tables: `language_modelling.perplexities` by model, the larger first. gains: of `gains`, as they."""
    wide = {name: _pivot(table, "documents", "method", "perplexity") for name, table in tables.items()}
    counts = sorted(set(language_modelling.COUNTS).intersection(*(part.index for part in wide.values())))
    first, last = counts[0], counts[-1]
    over, gaps, halves, context, drcg, few, sequence = [], [], [], [], [], [], []
    for part in wide.values():
        none, shown = part.loc[0, NONE], part.loc[counts]
        ratios = shown[list(PRINTED)].div(shown[DRAGON], axis=0)
        over.append(ratios.to_numpy().ravel())
        gap = shown[list(PRINTED)].min(axis=1) - shown[DRAGON]
        gaps.append((gap[first], gap[last]))
        halves.append(ratios[[CLOUD, DEVICE]].to_numpy().mean())
        context.append(float((shown[CLOUD] / shown[CLOUD_OUTPUT]).mean()))
        four = min(counts, key=lambda n: abs(n - 4))
        at_four = shown.loc[four, DRCG]
        drcg.append((100 * (shown.loc[last, DRCG] / at_four - 1), 100 * (at_four / none - 1)))
        few.append(float(ratios.loc[first, DRCG]))
        sequence.append(float(shown.loc[last, SEQUENCE] / shown.loc[last, DRAGON]))
    ratios = [(float(ratio), float(low)) for ratio, low in zip(gains["ratio"], gains["low"], strict=True)]
    return {
        "dragon-c01": max(ratios), "dragon-c02": ratios[0], "dragon-c03": ratios[-1],
        "dragon-c04": float((np.concatenate(over) >= 0.999).mean()), "dragon-c05": _mean(gaps),
        "dragon-c06": (float(np.mean(halves)), float(np.mean(context))), "dragon-c07": _mean(drcg),
        "dragon-c08": tuple(few), "dragon-c09": (1.0, float(np.mean(sequence))),
    }  # fmt: skip


# Figures 7 and 8


def per_token(summary: pd.DataFrame, pace: str) -> Values:
    """c10 to c14 and c16. summary: of `experiments.summary`; pace: that of the rows with the paper's paces."""
    rows = summary[summary["pace"] == pace]
    wide = _pivot(rows, "delay_ms", "method", "per_token_ms")
    first, last = wide.iloc[0], wide.iloc[-1]
    return {
        "dragon-c10": 100 * (1 - last[experiments.DRAGON] / last[experiments.SW]),
        "dragon-c11": 100 * (1 - last[experiments.DRAGON] / last[experiments.TW]),
        "dragon-c12": last[experiments.DRAGON] / first[experiments.DRAGON],
        "dragon-c13": (last[experiments.TW] / first[experiments.TW], last[experiments.SW] / first[experiments.SW]),
        "dragon-c14": (last[experiments.SW] - first[experiments.SW], last[experiments.TW] - first[experiments.TW]),
        "dragon-c16": 100 * (wide[experiments.DRAGON].mean() / wide[experiments.CRCG].mean() - 1),
    }  # fmt: skip


def first_token_values(rows: pd.DataFrame, summary: pd.DataFrame, imposed: pd.DataFrame) -> Values:
    """c15 and c17 to c19. rows, summary: of `first_token`, unpaced; imposed: a summary with the paper's paces."""
    wide, paced = (_pivot(table, "delay_ms", "method", "ttft_ms") for table in (summary, imposed))
    decoding: Any = rows.groupby("method")["per_token_ms"].median()
    ratios = wide.div(wide[experiments.DRAGON], axis=0)
    return {
        "dragon-c15": float(decoding[first_token.ROWS] / decoding[first_token.AS_MANY]),
        "dragon-c17": float((paced[experiments.DRAGON] / paced[experiments.CRCG]).max()),
        "dragon-c18": float(ratios[first_token.TEXT].mean()), "dragon-c19": float(ratios[first_token.ROWS].iloc[-1]),
    }  # fmt: skip


def sizes() -> Values:
    """c21 to c23: keys and values of two documents of 64 tokens, from the configurations, in float32."""
    opt, qwen = printed.kv_megabytes(printed.OPT), printed.kv_megabytes(printed.QWEN)
    return {"dragon-c21": opt / qwen, "dragon-c22": opt, "dragon-c23": qwen}


# Figures 9 and 10


def scheduling(table: pd.DataFrame) -> Values:
    """c26 to c29. table: of `replays.figure_9`; c26 to c28 are of the setting with the authors' Qwen timings."""
    rows = table[table["setting"] == f"drawn, {printed.QWEN}"]
    wide = _pivot(rows, "delay_ms", "strategy", "total_s")
    saved = 100 * (1 - wide["DRAGON"] / wide["Device"])
    changing = table[(table["strategy"] == "DRAGON") & (table["delay_ms"] == wide.index[-1])].set_index("setting")
    gains: Any = 100 * (1 - changing["over_static"])
    on_device = float(np.mean([side == ON_DEVICE for run in replays.greedy_runs(int(rows["n"].max()), 0.0)
                               for side in run.side]))  # fmt: skip
    return {
        "dragon-c26": float((wide["DRAGON"] / wide[["Cloud", "Device", "Random"]].min(axis=1)).max()),
        "dragon-c27": (float(saved[saved.index[saved.index > 0][0]]), float(saved.iloc[-1])),
        "dragon-c29": (float(gains["changing, both 100 ms"]), float(gains[f"changing, {printed.QWEN}"])),
        "dragon-c28": (on_device, *(float(wide.loc[0, name] / wide.loc[0, "Device"])
                                            for name in ("Cloud", "Random"))),
    }  # fmt: skip


# Theorems and formulas


def chi_square(
    pairs: int = 50, draws: int = 100_000, vocabulary: int = 24, seed: int = 0, wrong: float = 0.0
) -> pd.DataFrame:
    """Theorem 1: target tokens against the mixture: pair, gamma_remote, p (of the chi-square test), apart (TV).

    wrong: by how much the aggregator's log odds of the sides' weights are off, as a control.
    """
    random, rows = np.random.default_rng(seed), []
    for pair in range(pairs):
        spread = random.choice([0.1, 0.5, 2.0], 2)
        p, q = (random.dirichlet(np.full(vocabulary, s)) * 0.999 + 0.001 / vocabulary for s in spread)
        weights = random.normal(size=2)
        mixed, decided = target(p, q, *weights), target(p, q, weights[0] + wrong, weights[1])
        for gamma in (0.5, 1.0):
            numbers = random.random((7, draws))
            drafts = sample(p, numbers[5]), sample(q, numbers[6])
            tokens = aggregate(*drafts, p, q, decided, numbers[:5], gamma).token
            counts = np.bincount(tokens, minlength=vocabulary)
            rows.append((pair, gamma, float(_pooled(counts, draws * mixed)), 0.5 * np.abs(p - q).sum()))
    return pd.DataFrame(rows, columns=["pair", "gamma_remote", "p", "apart"])


def _pooled(counts: np.ndarray, expected: np.ndarray) -> float:
    """The p-value, with what is expected fewer than 10 times put together."""
    rare = expected < 10
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    return float(chisquare(counts, expected * counts.sum() / expected.sum()).pvalue)


def overlap(
    pairs: int = 30, unrelated: int = 300, vocabulary: int = 64, eta: float = 0.4, seed: int = 0
) -> tuple[float, float]:
    """c34, rank correlations of overlap and acceptance: the least as a remote distribution moves to the local one, and
    that over pairs which have nothing to do with each other.
    """
    random, found = np.random.default_rng(seed), []
    for _ in range(pairs):
        p, q = random.dirichlet(np.full(vocabulary, 0.3), 2)
        steps = [(1 - t) * q + t * p for t in np.linspace(0, 1, 12)]
        shared = [np.minimum(p, step).sum() for step in steps]
        found.append(spearmanr(shared, [expected_acceptance(p, step, eta) for step in steps])[0])
    drawn = [random.dirichlet(np.full(vocabulary, 0.3), 2) for _ in range(unrelated)]
    shared = [np.minimum(p, q).sum() for p, q in drawn]
    apart = spearmanr(shared, [expected_acceptance(p, q, eta) for p, q in drawn])[0]
    return float(min(found)), float(apart)


def formulas(decode_remote: float = 0.5, rtt: float = 0.3) -> Values:
    """c31, c32, c35 to c38, on grids of Eqs. 8 and 9."""
    rates = np.linspace(0, 1, 11)
    slow = np.linspace(decode_remote + rtt * 1.001, 3, 12)
    fast = np.linspace(0.01, decode_remote - rtt * 1.001, 12)
    near = np.linspace(decode_remote - 0.95 * rtt, decode_remote + 0.95 * rtt, 9)

    def gap(local: float, alpha_l: float, alpha_r: float) -> float:
        return latency_difference(Costs(local, decode_remote, rtt / 2, rtt / 2), alpha_l, alpha_r)

    # more acceptance of a side's own drafts: its own aggregation (Z_l, in Delta Z = Z_l - Z_r) gets no better by it
    rising = [gap(c, high, r) >= gap(c, low, r) - 1e-12
              for c in near for r in rates for low, high in pairwise(rates)]  # fmt: skip

    def gain(local: float, trip: float, alpha: float) -> float:
        return speedup(Costs(local, decode_remote, trip / 2, trip / 2), alpha)

    locals_, trips = np.linspace(0.05, 3, 30), np.linspace(0, 3, 31)
    curve = [gain(local, rtt, 0.7) for local in locals_]
    by_trip = [gain(c, high, a) >= gain(c, low, a) - 1e-12
               for c in locals_ for a in rates for low, high in pairwise(trips)]  # fmt: skip
    by_rate = [gain(c, t, high) >= gain(c, t, low) - 1e-12
               for c in locals_ for t in trips for low, high in pairwise(rates)]  # fmt: skip
    return {
        "dragon-c31": max(sign * gap(c, a, b) for sign, paces in ((1, slow), (-1, fast))
                          for c in paces for a in rates for b in rates),
        "dragon-c32": float(np.mean(rising)),
        "dragon-c35": (curve[0] / max(curve), *(curve[0] / gain(pace * decode_remote, rtt, 0.7) for pace in (1, 2))),
        "dragon-c36": max(abs(gain(c, rtt, a) - 1) for c in slow for a in rates),
        "dragon-c37": float(np.mean(by_trip)), "dragon-c38": float(np.mean(by_rate)),
    }  # fmt: skip


def pipelines(tokens: pd.DataFrame) -> Values:
    """c39 to c41. tokens: of `analysis.pipelines`; the last token of each case is in the steady state."""
    steady: Any = tokens.groupby("case")["per_token_s"].last()
    costs = analysis.EXAMPLE
    none = np.zeros((50, 2), bool)
    apart = analysis.time_per_token(costs, none) - analysis.time_per_token(costs, none, token_wise=True)
    return {"dragon-c39": float(steady["all accepted"]), "dragon-c40": float(steady["all rejected"]),
            "dragon-c41": float(apart)}  # fmt: skip


def added(times: pd.DataFrame, compared: pd.DataFrame) -> Values:
    """c42 to c47. times: of `overhead.times`. compared: of `lockstep.compare`."""
    largest, measured = float(compared["bytes"].max()), dict(zip(times["part"], times["us"], strict=True))
    return {
        "dragon-c42": float(overhead.operations()), "dragon-c43": float(measured["aggregate"]),
        "dragon-c44": float(overhead.decode_macs()), "dragon-c45": (largest / 1024, float(compared["lost"].mean())),
        "dragon-c46": 1e6 * largest / overhead.WIFI, "dragon-c47": by_word(compared),
    }  # fmt: skip


def _pivot(table: pd.DataFrame, index: str, columns: str, values: str) -> Any:
    """A table of numbers; Any, as pandas' cells could be of any type."""
    return table.pivot(index=index, columns=columns, values=values)


def _mean(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    first, second = np.mean(pairs, axis=0)
    return float(first), float(second)

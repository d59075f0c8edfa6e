"""DiSCo's claims: the rule that judges each, fixed before the runs, or the reason why it cannot be tested here.

Values and units are the paper's (data/paper/claims.csv). Where the paper gives a size, `reproduced` allows a factor of
1.5 on it, unless the rule says otherwise; `trend` needs the direction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ondevice.evidence import Rule, Untested

_FACTOR = 1.5
_NEEDS_MODELS = "needs two language models that answer in words; the bundled models are the next step"
_CLOSED = "the service and its trace are not public"
_CITED = "cited from other work, not a result of this paper"


def _near(value: float, size: float, factor: float = _FACTOR) -> bool:
    return size / factor <= value <= size * factor


def _policy_time(paper_ms: float) -> Rule:
    return Rule(
        f"at most the paper's {paper_ms:g} ms from raw lists (another processor); trend: at most three times that",
        wrong=10 * paper_ms,
        reproduced=lambda ms: ms <= paper_ms,
        trend=lambda ms: ms <= 3 * paper_ms,
    )


def _range_of(low: float, high: float, text: str, trend: Callable[[Sequence[float]], bool], wrong: tuple) -> Rule:
    return Rule(text, wrong=wrong, reproduced=lambda v: _near(v[0], low) and _near(v[1], high), trend=trend)


def _tbt_p99(paper: float) -> Rule:
    return Rule(
        f"within 10 ms of {paper:g} s",
        wrong=0.5,
        reproduced=lambda s: abs(s - paper) <= 0.010,
        trend=lambda s: abs(s - paper) <= 0.025,
    )


def _up_to(size: float, floor: float) -> Rule:
    return Rule(
        f"the largest value is within a factor 1.5 of {size:g}; trend: above {floor:g}",
        wrong=floor / 2,
        reproduced=lambda v: _near(v, size),
        trend=lambda v: v > floor,
    )


RULES: dict[str, Rule | Untested] = {
    "disco-c01": _range_of(
        11,
        52,
        "least and greatest cell of Table 2 within a factor 1.5; trend: no cell negative",
        lambda v: v[0] >= 0,
        wrong=(-5.0, 52.0),
    ),
    "disco-c02": Rule(
        "least, greatest and average reduction over services, devices and budgets: least and greatest within a factor "
        "1.5 of 6 and 78; trend: the average is positive",
        wrong=(-30.0, 10.0, -2.0),
        reproduced=lambda v: _near(v[0], 6) and _near(v[1], 78),
        trend=lambda v: v[2] > 0,
    ),
    "disco-c03": Rule(
        "at least 84 / 1.15; trend: at least 20",
        wrong=5.0,
        reproduced=lambda v: 84 / 1.15 <= v <= 100,
        trend=lambda v: v >= 20,
    ),
    "disco-c04": Rule(
        "at least 83.6 / 1.15; trend: at least 20",
        wrong=5.0,
        reproduced=lambda v: 83.6 / 1.15 <= v <= 100,
        trend=lambda v: v >= 20,
    ),
    "disco-c05": Rule(
        "at least 72.7 / 1.15; trend: at least 20",
        wrong=5.0,
        reproduced=lambda v: 72.7 / 1.15 <= v <= 100,
        trend=lambda v: v >= 20,
    ),
    "disco-c06": Rule(
        "greatest mean and P99 reductions both at least 40; trend: both at least 20",
        wrong=(10.0, 50.0),
        reproduced=lambda v: min(v) >= 40,
        trend=lambda v: min(v) >= 20,
    ),
    "disco-c07": Rule(
        "least cell within 5 points of 0, greatest within a factor 1.5 of 52.23; trend: none below -5",
        wrong=(-20.0, 52.0),
        reproduced=lambda v: abs(v[0]) <= 5 and _near(v[1], 52.23),
        trend=lambda v: v[0] >= -5,
    ),
    "disco-c08": _up_to(40, 10),
    "disco-c09": Rule(
        "median over budgets and devices between 15 and 40; trend: above 5",
        wrong=1.0,
        reproduced=lambda v: 15 <= v <= 40,
        trend=lambda v: v > 5,
    ),
    "disco-c10": _up_to(50, 10),
    "disco-c11": Rule(
        "relative to Stoch-D, DiSCo-D's mean is 0 to 20 percent higher at its worst budget below 0.2 and lower at 0.5; "
        "trend: worse below 0.2 than at 0.5",
        wrong=(-0.2, 0.1),
        reproduced=lambda v: 0 < v[0] <= 0.20 and v[1] < 0,
        trend=lambda v: v[0] > v[1],
    ),
    "disco-c12": Rule(
        "standard deviation of TTFT at budget 0.9 over that at 0.1, DiSCo and Stoch: DiSCo at most 1.1, Stoch above; "
        "trend: DiSCo's ratio is the lower one",
        wrong=(1.5, 1.0),
        reproduced=lambda v: v[0] <= 1.1 < v[1],
        trend=lambda v: v[0] < v[1],
    ),
    "disco-c13": Rule(
        "mean TTFT is lower for each of the ten users under both constraints; trend: for most of them",
        wrong=tuple([-5.0] * 20),
        reproduced=lambda v: min(v) > 0,
        trend=lambda v: float(np.median(np.asarray(v))) > 0,
    ),
    "disco-c14": _range_of(
        3.25,
        17.17,
        "least and greatest mean over services and constraints within a factor 1.5; trend: between 1 and 40 tokens",
        lambda v: v[0] >= 1 and v[1] <= 40,
        wrong=(0.0, 100.0),
    ),
    "disco-c15": _range_of(
        6.59,
        17.17,
        "least and greatest P99 over services and constraints within a factor 1.5; trend: between 1 and 40 tokens",
        lambda v: v[0] >= 1 and v[1] <= 40,
        wrong=(0.0, 100.0),
    ),
    "disco-c16": _tbt_p99(0.209),
    "disco-c17": _tbt_p99(0.217),
    "disco-c18": Untested("every request of the public API traces has the same prompt length"),
    "disco-c19": Rule(
        "Pearson r at least 0.8; trend: at least 0.5",
        wrong=0.1,
        reproduced=lambda r: r >= 0.8,
        trend=lambda r: r >= 0.5,
    ),
    "disco-c20": Rule(
        "coefficient of variation of TTFT, device and least variable server: device below half; trend: below",
        wrong=(0.5, 0.2),
        reproduced=lambda v: v[0] < v[1] / 2,
        trend=lambda v: v[0] < v[1],
    ),
    "disco-c21": Untested("no public trace has the gaps between single tokens of a stream"),
    "disco-c22": Rule(
        "slowest server series (median request) and slowest device, tokens/s: both above 5",
        wrong=(3.0, 14.0),
        reproduced=lambda v: min(v) > 5,
    ),
    "disco-c23": Untested(_CLOSED),
    "disco-c24": Untested(_CITED),
    "disco-c25": Untested(_CITED),
    "disco-c26": Untested(_CITED),
    "disco-c27": Untested(_NEEDS_MODELS),
    "disco-c28": Untested(_NEEDS_MODELS),
    "disco-c29": Untested(_NEEDS_MODELS),
    "disco-c30": Untested(_NEEDS_MODELS),
    "disco-c31": Untested(_NEEDS_MODELS),
    "disco-c32": Untested("the paper states it without data"),
    "disco-c33": _policy_time(0.128),
    "disco-c34": _policy_time(0.969),
    "disco-c35": _policy_time(9.082),
    "disco-c36": _policy_time(0.486),
    "disco-c37": _policy_time(1.741),
    "disco-c38": _policy_time(14.856),
    "disco-c39": Rule(
        "load time over size, largest model against smallest: the exponent is 0.7 to 1.3; trend: grows",
        wrong=0.0,
        reproduced=lambda v: 0.7 <= v <= 1.3,
        trend=lambda v: v > 0.2,
    ),
    "disco-c40": Rule(
        "TTFT over load time of every model: at most 0.1; trend: at most 0.5",
        wrong=1.5,
        reproduced=lambda v: v <= 0.1,
        trend=lambda v: v <= 0.5,
    ),
    "disco-c41": Untested("needs the paper's A40"),
    "disco-c42": Untested("needs the paper's A40 and RTX 3060 machines"),
    "disco-c43": Rule(
        "least MAPE of any predictor over the series, and share of series on which none beats the constant median by "
        "10 percent: least MAPE at least 20; trend: at least half of the series",
        wrong=(5.0, 0.1),
        reproduced=lambda v: v[0] >= 20,
        trend=lambda v: v[1] >= 0.5,
    ),
    "disco-c44": Rule(
        "decode operations at L = 128 over those at 32, largest of three models: at most 1.02",
        wrong=1.3,
        reproduced=lambda v: 1 <= v <= 1.02,
    ),
    "disco-c45": Rule(
        "prefill operations at L = 128 over those at 32 by Eq. 8 as printed, BLOOM-1.1B: within 0.05 of "
        "Table 6's 1.25 / 0.85; trend: above 1",
        wrong=0.9,
        reproduced=lambda v: abs(v - 1.25 / 0.85) <= 0.05,
        trend=lambda v: v > 1,
    ),
    "disco-c46": Rule(
        "share of embedding and output, least and greatest model, by Eq. 7: within 1 point of 50 and "
        "63.02; trend: all at least 50",
        wrong=(20.0, 40.0),
        reproduced=lambda v: abs(v[0] - 50) <= 1 and abs(v[1] - 63.02) <= 1,
        trend=lambda v: v[0] >= 50,
    ),
    "disco-c47": Rule(
        "no TTFT exceeds the tail wait plus the device's own TTFT: largest excess, seconds",
        wrong=0.5,
        reproduced=lambda v: v <= 1e-9,
    ),
    "disco-c48": Rule(
        "largest gap between the device-only share of tokens and 1 - b over budgets: none; trend: under 0.02",
        wrong=0.1,
        reproduced=lambda v: v <= 1e-9,
        trend=lambda v: v < 0.02,
    ),
}

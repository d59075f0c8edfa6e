"""DiSCo's claims: the rule that judges each, or the reason why it cannot be tested here.

Values and units are the paper's (data/paper/claims.csv). Where the paper gives a size, `reproduced` allows a factor of
1.5 on it, unless the rule says otherwise; `trend` is the rule's weaker test.
"""

from __future__ import annotations

from ondevice.evidence import Rule, Untested

_FACTOR = 1.5
_CLOSED = "the service and its trace are not public"
_CITED = "cited from other work, not a result of this paper"


def _near(value: float, size: float, factor: float = _FACTOR) -> bool:
    return size / factor <= value <= size * factor


def _policy_time(paper_ms: float) -> Rule:
    return Rule(
        f"at most the paper's {paper_ms:g} ms, from raw lists of log-normal samples at b = 0.5, on another processor; "
        "trend: at most three times that",
        wrong=10 * paper_ms,
        reproduced=lambda ms: ms <= paper_ms,
        trend=lambda ms: ms <= 3 * paper_ms,
    )


def _saving(percent: float) -> Rule:
    return Rule(
        f"(largest saving, share of service and device pairs that save over 5 percent): the saving is {percent:g} "
        "within 15 percent and three quarters of the pairs save; trend: the largest saving is at least 20",
        wrong=(5.0, 1.0),
        reproduced=lambda v: _near(v[0], percent, 1.15) and v[1] >= 0.75,
        trend=lambda v: v[0] >= 20,
    )


def _up_to(size: float, floor: float, of: str) -> Rule:
    return Rule(
        f"{of} is within a factor 1.5 of {size:g}; trend: above {floor:g}",
        wrong=floor / 2,
        reproduced=lambda v: _near(v, size),
        trend=lambda v: v > floor,
    )


def _delayed(low: float, high: float, what: str) -> Rule:
    return Rule(
        f"least and greatest {what} over services and constraints within a factor 1.5, without the two rows that the "
        "stand-ins were made from; trend: between 1 and 40 tokens",
        wrong=(0.0, 100.0),
        reproduced=lambda v: _near(v[0], low) and _near(v[1], high),
        trend=lambda v: v[0] >= 1 and v[1] <= 40,
    )


_PACED = Rule(
    "P99 of TBT over the pacing interval: at most 1.05, that is, hand-overs do not show; trend: at most 1.5. "
    "The interval itself is the paper's number",
    wrong=3.0,
    reproduced=lambda ratio: 1 - 1e-9 <= ratio <= 1.05,
    trend=lambda ratio: ratio <= 1.5,
)

RULES: dict[str, Rule | Untested] = {
    "disco-c01": Rule(
        "least and greatest cell of Table 2 within a factor 1.5 of 11 and 52; trend: no cell negative",
        wrong=(-5.0, 52.0),
        reproduced=lambda v: _near(v[0], 11) and _near(v[1], 52),
        trend=lambda v: v[0] >= 0,
    ),
    "disco-c02": Rule(
        "(least, greatest, average) reduction over services, devices, constraints and budgets: least and greatest "
        "within a factor 1.5 of 6 and 78; trend: the average is positive",
        wrong=(-30.0, 10.0, -2.0),
        reproduced=lambda v: _near(v[0], 6) and _near(v[1], 78),
        trend=lambda v: v[2] > 0,
    ),
    "disco-c03": _saving(84),
    "disco-c04": _saving(83.6),
    "disco-c05": _saving(72.7),
    "disco-c06": Rule(
        "greatest reduction of mean and of P99 both within a factor 1.5 of 50; trend: both at least 20",
        wrong=(10.0, 50.0),
        reproduced=lambda v: _near(v[0], 50) and _near(v[1], 50),
        trend=lambda v: min(v) >= 20,
    ),
    "disco-c07": Rule(
        "least cell within 5 points of 0, greatest within a factor 1.5 of 52.23; trend: none below -5",
        wrong=(-20.0, 52.0),
        reproduced=lambda v: abs(v[0]) <= 5 and _near(v[1], 52.23),
        trend=lambda v: v[0] >= -5,
    ),
    "disco-c08": _up_to(40, 10, "the greatest of GPT's cells of Table 2 (averages over budgets)"),
    "disco-c09": Rule(
        "quartiles over budgets, devices and constraints both between 15 and 40; trend: both positive",
        wrong=(-3.0, 25.0),
        reproduced=lambda v: v[0] >= 15 and v[1] <= 40,
        trend=lambda v: v[0] > 0,
    ),
    "disco-c10": _up_to(50, 10, "the greatest reduction over devices at device budgets up to 0.3"),
    "disco-c11": Rule(
        "relative to Stoch-D, DiSCo-D's mean is higher at its worst budget below 0.2 and lower at 0.5; alpha, which "
        "the paper does not give, was chosen by this claim, so it is a trend at most",
        wrong=(-0.2, 0.1),
        reproduced=lambda v: False,
        trend=lambda v: v[0] > 0 > v[1],
    ),
    "disco-c12": Rule(
        "standard deviation of TTFT at budget 0.9 over that at 0.1: (DiSCo-D, Stoch-D, DiSCo-S, Stoch-S); under both "
        "constraints DiSCo's is at most 1.1 and Stoch's above; trend: under one of them",
        wrong=(1.5, 1.0, 1.5, 1.0),
        reproduced=lambda v: v[0] <= 1.1 < v[1] and v[2] <= 1.1 < v[3],
        trend=lambda v: v[0] <= 1.1 < v[1] or v[2] <= 1.1 < v[3],
    ),
    "disco-c13": Rule(
        "share of the ten users whose mean TTFT is lower than with Stoch, under a device and a server constraint: both "
        "1; trend: both above one half",
        wrong=(1.0, 0.2),
        reproduced=lambda v: min(v) == 1,
        trend=lambda v: min(v) > 0.5,
    ),
    "disco-c14": _delayed(3.25, 17.17, "mean"),
    "disco-c15": _delayed(6.59, 17.17, "P99"),
    "disco-c16": _PACED,
    "disco-c17": _PACED,
    "disco-c18": Untested("every request of the public API traces has the same prompt length"),
    "disco-c19": Rule(
        "Pearson r at least 0.8; trend: at least 0.5",
        wrong=0.1,
        reproduced=lambda r: r >= 0.8,
        trend=lambda r: r >= 0.5,
    ),
    "disco-c20": Rule(
        "spread of TTFT for one prompt, (P90 - P10) / P50, which a hiccup of a shared machine does not move: (device, "
        "least spread server): device below half; trend: below",
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
    "disco-c27": Rule(
        "mean score of answers that change hands over that of the weaker model alone, least over directions and "
        "hand-overs; the judge is MiniLM's similarity to the reference: at least 0.95; trend: at least 0.85",
        wrong=0.5,
        reproduced=lambda v: v >= 0.95,
        trend=lambda v: v >= 0.85,
    ),
    "disco-c28": Untested("no model here translates, and the paper's texts (Flores) are not at hand"),
    "disco-c29": Untested("a score out of ten by judges that are commercial or of 72B; none runs here"),
    "disco-c30": Rule(
        "by how much the mean ROUGE-1 lies outside that of both models, greatest (lower, upper) end over directions "
        "and hand-overs of intervals that hold together at 95 percent: upper at most 0.03, the width of the paper's "
        "own range; trend: lower at most 0, no hand-over is surely outside",
        wrong=(0.05, 0.1),
        reproduced=lambda v: v[1] <= 0.03,
        trend=lambda v: v[0] <= 0,
    ),
    "disco-c31": Rule(
        "gain in mean ROUGE-1 over the device's model alone, (least, least lower end of its interval) over directions "
        "and hand-overs, on tasks of the documentation instead of translation: lower end above 0; trend: least gain "
        "not negative",
        wrong=(-0.05, -0.1),
        reproduced=lambda v: v[1] > 0,
        trend=lambda v: v[0] >= 0,
    ),
    "disco-c32": Untested("the paper states it without data"),
    "disco-c33": _policy_time(0.128),
    "disco-c34": _policy_time(0.969),
    "disco-c35": _policy_time(9.082),
    "disco-c36": _policy_time(0.486),
    "disco-c37": _policy_time(1.741),
    "disco-c38": _policy_time(14.856),
    "disco-c39": Rule(
        "growth of load time with size, largest model of 0.5B to 3B against smallest, (from disk, from the page "
        "cache): both exponents 0.7 to 1.3; trend: from disk, which is a cold start, above 0.2",
        wrong=(0.0, 1.0),
        reproduced=lambda v: min(v) >= 0.7 and max(v) <= 1.3,
        trend=lambda v: v[0] > 0.2,
    ),
    "disco-c40": Rule(
        "TTFT over load time, largest over models of 0.5B to 3B, (from disk, from the page cache): both at most 0.1; "
        "trend: from disk at most 0.5",
        wrong=(1.5, 0.05),
        reproduced=lambda v: max(v) <= 0.1,
        trend=lambda v: v[0] <= 0.5,
    ),
    "disco-c41": Untested("needs the paper's A40"),
    "disco-c42": Untested("needs the paper's A40 and RTX 3060 machines"),
    "disco-c43": Rule(
        "share of series on which the best predictor's MAPE is at least 20 percent: all; trend: at least half",
        wrong=0.1,
        reproduced=lambda share: share == 1,
        trend=lambda share: share >= 0.5,
    ),
    "disco-c44": Rule(
        "decode operations at L = 128 over those at 32, largest of three models: at most 1.02",
        wrong=1.3,
        reproduced=lambda v: 1 <= v <= 1.02,
    ),
    "disco-c45": Rule(
        "prefill operations at L = 128 over those at 32 by Eq. 8 as printed, BLOOM-1.1B: within 0.05 of Table 6's "
        "1.25 / 0.85; trend: above 1",
        wrong=0.9,
        reproduced=lambda v: abs(v - 1.25 / 0.85) <= 0.05,
        trend=lambda v: v > 1,
    ),
    "disco-c46": Rule(
        "share of embedding and output, least and greatest model, by Eq. 7: within 1 point of 50 and 63.02; trend: all "
        "at least 50",
        wrong=(20.0, 40.0),
        reproduced=lambda v: abs(v[0] - 50) <= 1 and abs(v[1] - 63.02) <= 1,
        trend=lambda v: v[0] >= 50,
    ),
    "disco-c47": Rule(
        "longest wait of the policy beyond F^-1(1 - min(alpha, b)), over services and budgets, seconds: none",
        wrong=0.5,
        reproduced=lambda v: v <= 1e-9,
    ),
    "disco-c48": Rule(
        "largest gap between the device-only share of tokens and 1 - b over budgets, Algorithm 3 as printed: at most "
        "0.005; trend: at most 0.05, a length's tokens",
        wrong=0.1,
        reproduced=lambda v: v <= 0.005,
        trend=lambda v: v <= 0.05,
    ),
}

"""DRAGON's claims: the rule that judges each, or the reason why it cannot be tested here.

Values and units are the paper's (data/paper/claims.csv). Where the paper gives a size, `reproduced` allows a factor of
1.5 on it, unless the rule says otherwise; `trend` is the rule's weaker test. All rules were written before the first
run of what they judge. These were changed after it, the values of the first run known, and before the run that is
published; the changed rules were written before that one:

- c29 twice. It first compared the static sides with each other, which says nothing of schedules (150.7 and 152.8
  percent); then it judged our schedule (58.9 and 26.1). A reader objected that the claim is about the paper's.
- At a reader's objection, all of them stricter: c01 to c03 (the interval, too, has to be above 1), c06 (the context
  has to cost nothing, if it is the number of documents), c13 (both DRDG, not the token-wise one alone), c31 and c35
  (the other side, the other end), c34 (pairs that are not on one path).
- c10 and c11 say in words what their code allowed from the beginning: more than the paper's number is enough, too.
- c19 and c26 have the limits of the authors' own files, 15.285 and 1.00246, where they were rounded against them.
- c21 was untested; it is judged by the sizes of c22 and c23. c09, c15, c42, c43, c45 and c47: words alone.

With these rules there were three runs, and nothing changed between; the third, on an idle machine, is published. The
one before shared the machine with other programs: c15 was contradicted in it (1.63), after 0.99 and before 1.05.
"""

from __future__ import annotations

from ondevice.evidence import Rule, Untested

_FACTOR = 1.5


def _near(value: float, size: float, factor: float = _FACTOR) -> bool:
    return size / factor <= value <= size * factor


def _gain(size: float, of: str) -> Rule:
    return Rule(
        f"{of}: fall of perplexity from no documents to DRAGON's with 16, over the largest of a baseline of the paper "
        f"with any number of them, and the low end of its 95 percent interval: the first within a factor 1.5 of "
        f"{size:g} and both above 1; trend: the first above 1",
        wrong=(0.8, 0.5),
        reproduced=lambda v: _near(v[0], size) and min(v) > 1,
        trend=lambda v: v[0] > 1,
    )


def _lower(percent: float, than: str) -> Rule:
    return Rule(
        f"at 300 ms with the paper's paces imposed, the per-token latency is at least {percent - 10:g} percent below "
        f"{than}; trend: at least 10 percent below",
        wrong=-5.0,
        reproduced=lambda v: v >= percent - 10,
        trend=lambda v: v >= 10,
    )


_ZERO = Rule(
    "the largest difference is at most 1e-9; trend: none",
    wrong=0.1,
    reproduced=lambda v: abs(v) <= 1e-9,
)

RULES: dict[str, Rule | Untested] = {
    "dragon-c01": _gain(1.9, "the model with the larger ratio (it repeats the larger of c02 and c03)"),
    "dragon-c02": _gain(1.9, "the larger of our models, in the place of Qwen2.5-1.5B"),
    "dragon-c03": _gain(1.4, "the smaller of our models, in the place of OPT-1.3B"),
    "dragon-c04": Rule(
        "of all counts of documents, models and baselines of the paper, the share in which DRAGON's perplexity is not "
        "higher by more than 0.1 percent: 1; trend: at least 0.75",
        wrong=0.5,
        reproduced=lambda v: v == 1,
        trend=lambda v: v >= 0.75,
    ),
    "dragon-c05": Rule(
        "perplexity of the best baseline of the paper less DRAGON's: (at 2 documents, at 16), mean of the models; the "
        "second is larger by half of the first at least; trend: larger",
        wrong=(0.5, 0.1),
        reproduced=lambda v: v[1] > 1.5 * v[0] and v[1] > 0,
        trend=lambda v: v[1] > v[0],
    ),
    "dragon-c06": Rule(
        "(perplexity of CRCG, mean of its two sides, models and counts, over DRAGON's at the same count; CRCG/Cloud's "
        "by one context over the same documents' by output aggregation, mean of models and counts): at least 1.02 and "
        "below 1.005, as the number of documents is the same in the second; trend: the first above 1",
        wrong=(0.98, 1.0),
        reproduced=lambda v: v[0] >= 1.02 and v[1] < 1.005,
        trend=lambda v: v[0] > 1,
    ),
    "dragon-c07": Rule(
        "(change in percent of DRCG's perplexity from 4 to 16 documents under the 256-token budget, the same from 0 to "
        "4), mean of the models: the first within 1 percent while the second is below -1; trend: the first is smaller "
        "than a third of the second",
        wrong=(-8.0, -5.0),
        reproduced=lambda v: abs(v[0]) <= 1 and v[1] < -1,
        trend=lambda v: abs(v[0]) < abs(v[1]) / 3,
    ),
    "dragon-c08": Rule(
        "DRCG's perplexity over DRAGON's at 2 documents, by model: both above 1.002; trend: the mean above 1",
        wrong=(0.99, 0.99),
        reproduced=lambda v: min(v) > 1.002,
        trend=lambda v: sum(v) / len(v) > 1,
    ),
    "dragon-c09": Rule(
        "perplexity over DRAGON's at 16 documents, mean of the models, of (token-wise: 1 by definition; sequence-wise, "
        "taken as RAG-Sequence of Lewis et al.): both within 0.1 percent of 1; trend: both within 2 percent",
        wrong=(1.0, 1.2),
        reproduced=lambda v: max(abs(x - 1) for x in v) <= 0.001,
        trend=lambda v: max(abs(x - 1) for x in v) <= 0.02,
    ),
    "dragon-c10": _lower(49.5, "sequence-wise DRDG"),
    "dragon-c11": _lower(42.4, "token-wise DRDG"),
    "dragon-c12": Rule(
        "DRAGON's per-token latency at 300 ms over that at 0 ms, paper's paces imposed: at most 1.25 (printed series: "
        "1.11 and 1.08); trend: at most 1.6",
        wrong=2.2,
        reproduced=lambda v: v <= 1.25,
        trend=lambda v: v <= 1.6,
    ),
    "dragon-c13": Rule(
        "(token-wise, sequence-wise) DRDG's per-token latency at 300 ms over that at 0 ms, paper's paces imposed: both "
        "at least 1.5 (printed series of the token-wise: 1.86 and 1.20); trend: both at least 1.15",
        wrong=(1.0, 1.0),
        reproduced=lambda v: min(v) >= 1.5,
        trend=lambda v: min(v) >= 1.15,
    ),
    "dragon-c14": Rule(
        "(sequence-wise, token-wise): ms a token from 0 to 300 ms of delay; the sequence-wise grows more; trend: none",
        wrong=(10.0, 150.0),
        reproduced=lambda v: v[0] > v[1],
    ),
    "dragon-c15": Rule(
        "per-token latency of DRCG/KV over that of the device alone with as many documents of its own (four), both by "
        "output aggregation from stored rows, unpaced: within 5 percent of 1; trend: within 15 percent",
        wrong=1.4,
        reproduced=lambda v: abs(v - 1) <= 0.05,
        trend=lambda v: abs(v - 1) <= 0.15,
    ),
    "dragon-c16": Rule(
        "percent by which DRAGON's per-token latency is above the device's alone, mean over delays, paper's paces "
        "imposed: at most 20.3; trend: at most 40",
        wrong=90.0,
        reproduced=lambda v: v <= 20.3,
        trend=lambda v: v <= 40,
    ),
    "dragon-c17": Rule(
        "DRAGON's TTFT over the device's alone, largest over delays, the paper's prefill and paces imposed: at most "
        "1.05; trend: at most 1.25",
        wrong=2.0,
        reproduced=lambda v: v <= 1.05,
        trend=lambda v: v <= 1.25,
    ),
    "dragon-c18": Rule(
        "TTFT of DRCG/Text over DRAGON's, mean over delays, as measured on this machine: within a factor 1.5 of 8.6; "
        "trend: above 1.2",
        wrong=0.9,
        reproduced=lambda v: _near(v, 8.6),
        trend=lambda v: v > 1.2,
    ),
    "dragon-c19": Rule(
        "TTFT of DRCG/KV over DRAGON's at 300 ms, as measured on this machine: over 15.2, as the authors' "
        "own files give 15.285; trend: above 1.2",
        wrong=0.9,
        reproduced=lambda v: v > 15.2,
        trend=lambda v: v > 1.2,
    ),
    "dragon-c20": Untested("it compares two of the authors' models; ours differ in depth and width otherwise"),
    "dragon-c21": Rule(
        "bytes that DRCG/KV moves for the same documents, OPT-1.3B's over Qwen2.5-1.5B's by their configurations "
        "(sizes of c22 and c23), which decide its TTFT where the link is slow: above 1; trend: none",
        wrong=0.5,
        reproduced=lambda v: v > 1,
    ),
    "dragon-c22": Rule(
        "MB of keys and values of 2 documents of 64 tokens from OPT-1.3B's configuration in float32: within 5 percent "
        "of 114; trend: within a factor 1.5",
        wrong=25.0,
        reproduced=lambda v: _near(v, 114, 1.05),
        trend=lambda v: _near(v, 114),
    ),
    "dragon-c23": Rule(
        "the same of Qwen2.5-1.5B: within 5 percent of 16; trend: within a factor 1.5",
        wrong=3.0,
        reproduced=lambda v: _near(v, 16, 1.05),
        trend=lambda v: _near(v, 16),
    ),
    "dragon-c24": Untested("retrieval from 21 million passages on a MacBook"),
    "dragon-c25": Rule(
        "ms to fetch two documents as text from the other process at 0 and at 300 ms of delay on each link's way back: "
        "the second is larger by 300 to 750; trend: larger by 150",
        wrong=(10.0, 60.0),
        reproduced=lambda v: 300 <= v[1] - v[0] <= 750,
        trend=lambda v: v[1] - v[0] >= 150,
    ),
    "dragon-c26": Rule(
        "the paper's greedy rule in our simulator over the best of Cloud, Device and Random, largest over delays: at "
        "most 1.003, as the authors' own files give 1.00246; trend: at most 1.05",
        wrong=1.2,
        reproduced=lambda v: v <= 1.003,
        trend=lambda v: v <= 1.05,
    ),
    "dragon-c27": Rule(
        "percent saved over Device at (100, 400) ms by the greedy rule: the second is larger by at least 3 points; "
        "trend: larger",
        wrong=(5.0, 4.0),
        reproduced=lambda v: v[1] >= v[0] + 3,
        trend=lambda v: v[1] > v[0],
    ),
    "dragon-c28": Rule(
        "at 0 ms: (the greedy rule's share of aggregations on the device, Cloud over Device, Random over Device): the "
        "share is above 0.99 and neither ratio below 1; trend: the share is above 0.9",
        wrong=(0.5, 1.0, 1.0),
        reproduced=lambda v: v[0] > 0.99 and min(v[1:]) >= 0.999,
        trend=lambda v: v[0] > 0.9,
    ),
    "dragon-c29": Rule(
        "percent that the paper's greedy rule saves over the better static side at the largest delay where acceptance "
        "changes: with equal paces, and with the authors' (10 to 1); the first is larger by half; trend: larger",
        wrong=(10.0, 30.0),
        reproduced=lambda v: v[0] >= 1.5 * v[1],
        trend=lambda v: v[0] > v[1],
    ),
    "dragon-c30": Rule(
        "share of the positions after the first that the cloud aggregates in the replay of Figure 10, with the sides "
        "as the paper prints them: at least 0.9; trend: above one half",
        wrong=0.1,
        reproduced=lambda v: v >= 0.9,
        trend=lambda v: v > 0.5,
    ),
    "dragon-c31": Rule(
        "over a grid of Eq. 8 where one side, the local or the other one, decodes slower by more than the round trip: "
        "the most that aggregating on the faster side gains, in seconds: at most 0; trend: none",
        wrong=0.2,
        reproduced=lambda v: v <= 1e-12,
    ),
    "dragon-c32": Rule(
        "share of the grid of Eq. 8, gap smaller than the round trip, on which raising a side's acceptance never makes "
        "its own aggregation better: 1; trend: at least 0.9",
        wrong=0.5,
        reproduced=lambda v: v == 1,
        trend=lambda v: v >= 0.9,
    ),
    "dragon-c33": Rule(
        "least p-value of chi-square over 50 pairs of distributions and both gammas with 100,000 draws each, times 100 "
        "(Bonferroni): above 0.01; trend: none",
        wrong=1e-6,
        reproduced=lambda v: v > 0.01,
    ),
    "dragon-c34": Rule(
        "Spearman's correlation of overlap and acceptance (least of 30 paths, on which a pair is mixed towards each "
        "other; over 300 pairs that have nothing to do with each other): both at least 0.99; trend: both at least 0.8",
        wrong=(0.2, 0.2),
        reproduced=lambda v: min(v) >= 0.99,
        trend=lambda v: min(v) >= 0.8,
    ),
    "dragon-c35": Rule(
        "speed-up of Eq. 9 at the least local pace, over (the largest of the curve, that where the local pace is the "
        "remote's, that where it is twice the remote's): (1, 1, at least 1.05); trend: the first is 1",
        wrong=(0.7, 0.9, 1.0),
        reproduced=lambda v: v[0] > 0.999 and abs(v[1] - 1) <= 0.001 and v[2] >= 1.05,
        trend=lambda v: v[0] > 0.999,
    ),
    "dragon-c36": Rule(
        "largest difference from 1 of the speed-up where the local side decodes slower by more than the round trip: at "
        "most 1e-9; trend: none",
        wrong=0.3,
        reproduced=lambda v: abs(v) <= 1e-9,
    ),
    "dragon-c37": Rule(
        "share of the grid on which the speed-up does not fall when the round trip grows: 1; trend: at least 0.9",
        wrong=0.5,
        reproduced=lambda v: v == 1,
        trend=lambda v: v >= 0.9,
    ),
    "dragon-c38": Rule(
        "share of the grid on which the speed-up does not fall when the remote acceptance grows: 1; trend: "
        "at least 0.9",
        wrong=0.5,
        reproduced=lambda v: v == 1,
        trend=lambda v: v >= 0.9,
    ),
    "dragon-c39": Rule(
        "simulated steady seconds a token: within 1 percent of 2; trend: within a factor 1.5",
        wrong=4.3,
        reproduced=lambda v: _near(v, 2, 1.01),
        trend=lambda v: _near(v, 2),
    ),
    "dragon-c40": Rule(
        "simulated steady seconds a token: within 1 percent of 4.3; trend: within a factor 1.5",
        wrong=2.0,
        reproduced=lambda v: _near(v, 4.3, 1.01),
        trend=lambda v: _near(v, 4.3),
    ),
    "dragon-c41": _ZERO,
    "dragon-c42": Rule(
        "multiplications, additions and comparisons of one aggregation at a vocabulary of 151,936, two resamples "
        "included: below 3e5; trend: the number is wrong, the conclusion (negligible) holds: below 1e7, one hundredth "
        "of a decode",
        wrong=1e9,
        reproduced=lambda v: v < 3e5,
        trend=lambda v: v < 1e7,
    ),
    "dragon-c43": Rule(
        "microseconds of one aggregation on this machine at that vocabulary: at most 10; trend: the number is wrong, "
        "the conclusion (negligible) holds: at most 1 percent of the paper's device token, 2,170",
        wrong=50_000.0,
        reproduced=lambda v: v <= 10,
        trend=lambda v: v <= 2170,
    ),
    "dragon-c44": Rule(
        "MACs of a token from Qwen2.5-1.5B's configuration: above 1e9; trend: above 5e8",
        wrong=1e8,
        reproduced=lambda v: v > 1e9,
        trend=lambda v: v > 5e8,
    ),
    "dragon-c45": Rule(
        "(largest KB of a distribution on the wire, mean total variation that the cap costs): at most 512 bytes, frame "
        "not counted, and at most 0.01; trend: the first",
        wrong=(608.0, 0.0),
        reproduced=lambda v: v[0] <= 0.5 and v[1] <= 0.01,
        trend=lambda v: v[0] <= 0.5,
    ),
    "dragon-c46": Rule(
        "microseconds that the cap's bytes take at 100 Mbps: at most 40; trend: at most 80",
        wrong=50_000.0,
        reproduced=lambda v: v <= 40,
        trend=lambda v: v <= 80,
    ),
    "dragon-c47": Rule(
        "(acceptance of function words, of other tokens) along greedy answers in lockstep, Algorithm 1's expected "
        "acceptance, both sides: the first is larger by 5 points; trend: larger",
        wrong=(0.7, 0.9),
        reproduced=lambda v: v[0] >= v[1] + 0.05,
        trend=lambda v: v[0] > v[1],
    ),
}

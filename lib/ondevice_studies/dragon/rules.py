"""DRAGON's claims: the rule that judges each, or the reason why it cannot be tested here.

What is judged is the system that runs: 512 bytes a distribution, filled in by the receiver. The larger bundled model
stands for Qwen2.5-1.5B, the small one for OPT-1.3B. Latency is the whole mix's of questions, by who holds the answer, a
fourth each. Where the paper gives a size, `reproduced` allows a factor of 1.5 on it, unless the rule says otherwise. A
null is what a trivial method gets in DRAGON's place: the cloud alone or the device alone.

Bounds are those of the runs before there were records. What changed is that the whole interval has to lie within them;
c01 is at 16 documents for DRAGON and baseline alike, so that it does not repeat c02 or c03; these three lost a second
condition, an interval above 1, that their own bounds contain now.
"""

from __future__ import annotations

from ondevice.evidence import Rule, Test, Untested
from ondevice.evidence.rules import Above, All, AtLeast, AtMost, Below, Between, Both, Each, Equal, Less, Near, Over

_ALONE = "the device alone"
_CLOUD = "the cloud alone, mixing the outputs of its half"
_DEVICE = "always aggregating on the device"
_ZERO = Near(0, within=1e-9)
_PACED = "the paper's paces imposed"


def _near(size: float) -> Test:
    return Near(size, factor=1.5)


def _gain(size: float, what: str) -> Rule:
    return Rule(f"fall of perplexity from no documents to DRAGON's with 16, over {what}", "x", _near(size), Above(1),
                0.8, _CLOUD)  # fmt: skip


def _lower(percent: float, than: str) -> Rule:
    return Rule(f"per-token latency below {than} at 300 ms, {_PACED}", "percent", AtLeast(percent - 10), AtLeast(10),
                -5.0, _ALONE)  # fmt: skip


def _size(model: str, megabytes: float, wrong: float) -> Rule:
    return Rule(
        f"keys and values of 2 documents of 64 tokens from {model}'s configuration in float32",
        "MB",
        Near(megabytes, factor=1.05),
        _near(megabytes),
        wrong,
    )


def _on_grid(what: str) -> Rule:
    return Rule(f"share on which {what}", "of the grid", Equal(1), AtLeast(0.9), 0.5)


def _steady(seconds: float, wrong: float) -> Rule:
    return Rule("simulated steady time a token", "s", Near(seconds, factor=1.01), _near(seconds), wrong)


RULES: dict[str, Rule | Untested] = {
    "dragon-c01": _gain(1.9, "the best baseline's with 16, the model with the larger ratio"),
    "dragon-c02": _gain(1.9, "the best baseline's with any number, our larger model for Qwen2.5-1.5B"),
    "dragon-c03": _gain(1.4, "the best baseline's with any number, our smaller model for OPT-1.3B"),
    "dragon-c04": Rule(
        "share of all counts of documents, models and baselines in which DRAGON's perplexity is not "
        "higher by more than 0.1 percent",
        "of the cells",
        Equal(1),
        AtLeast(0.75),
        0.5,
        _CLOUD,
    ),
    "dragon-c05": Rule(
        "perplexity of the paper's best baseline less DRAGON's, mean of the models, (2 documents, 16)",
        "",
        Both(Less(1, 0, Above(0), times=1.5), Each(None, Above(0))),
        Less(1, 0, Above(0)),
        (0.5, 0.1),
        _CLOUD,
    ),
    # In the second the number of documents is the same.
    "dragon-c06": Rule(
        "perplexity of (CRCG over DRAGON's at the same count, CRCG/Cloud's by one context over the same "
        "documents' by output aggregation), means",
        "x",
        Each(AtLeast(1.02), Below(1.005)),
        Each(Above(1), None),
        (0.98, 1.0),
    ),
    "dragon-c07": Rule(
        "change of DRCG's perplexity in a 256-token budget, mean of the models, documents (4 to 16, 0 to 4)",
        "percent",
        Each(Near(0, within=1), Below(-1)),
        Over(0, 1, Near(0, within=1 / 3)),
        (-8.0, -5.0),
    ),
    "dragon-c08": Rule(
        "DRCG's perplexity at 2 documents, by model",
        "x DRAGON's",
        All(Above(1.002)),
        Less(0, 1, Above(2), times=-1),
        (0.99, 0.99),
        note="Two models: their mean is above 1",
    ),
    "dragon-c09": Rule(
        "perplexity at 16 documents, mean of the models, (token-wise, 1 by definition; sequence-wise, "
        "as RAG-Sequence of Lewis et al.)",
        "x DRAGON's",
        All(Near(1, within=0.001)),
        All(Near(1, within=0.02)),
        (1.0, 1.2),
    ),
    "dragon-c10": _lower(49.5, "sequence-wise DRDG's"),
    "dragon-c11": _lower(42.4, "token-wise DRDG's"),
    # The printed series have 1.11 and 1.08, token-wise DRDG's 1.86 and 1.20.
    "dragon-c12": Rule(
        f"per-token latency at 300 ms over that at 0 ms, {_PACED}", "x", AtMost(1.25), AtMost(1.6), 2.2, _ALONE
    ),
    "dragon-c13": Rule(
        f"(token-wise, sequence-wise) DRDG's per-token latency at 300 ms over that at 0 ms, {_PACED}",
        "x",
        All(AtLeast(1.5)),
        All(AtLeast(1.15)),
        (1.0, 1.0),
    ),
    "dragon-c14": Rule(
        "growth of the time a token from 0 to 300 ms of delay, (sequence-wise, token-wise)",
        "ms",
        Less(0, 1, Above(0)),
        None,
        (10.0, 150.0),
    ),
    "dragon-c15": Rule(
        "per-token latency of DRCG/KV over the device's alone with as many own documents, output "
        "aggregation from stored rows, unpaced",
        "x",
        Near(1, within=0.05),
        Near(1, within=0.15),
        1.4,
    ),
    "dragon-c16": Rule(
        f"DRAGON's per-token latency above the device's alone, mean over delays, {_PACED}",
        "percent",
        AtMost(20.3),
        AtMost(40),
        90.0,
        _ALONE,
    ),
    "dragon-c17": Rule(
        f"DRAGON's TTFT, largest over delays, {_PACED}",
        "x the device's alone",
        AtMost(1.05),
        AtMost(1.25),
        2.0,
        _ALONE,
    ),
    "dragon-c18": Rule(
        "TTFT of DRCG/Text over DRAGON's, mean over delays, on this machine",
        "x",
        _near(8.6),
        Above(1.2),
        0.9,
        _ALONE,
    ),
    "dragon-c19": Rule(
        "TTFT of DRCG/KV over DRAGON's at 300 ms, on this machine", "x", Above(15.2), Above(1.2), 0.9, _ALONE
    ),
    "dragon-c20": Untested("it compares two of the authors' models; ours differ in depth and width otherwise"),
    # Bytes decide its TTFT where the link is slow.
    "dragon-c21": Rule(
        "bytes that DRCG/KV moves for the same documents, OPT-1.3B's, by the configurations",
        "x Qwen2.5-1.5B's",
        Above(1),
        None,
        0.5,
    ),
    "dragon-c22": _size("OPT-1.3B", 114, 25.0),
    "dragon-c23": _size("Qwen2.5-1.5B", 16, 3.0),
    "dragon-c24": Untested("retrieval from 21 million passages on a MacBook"),
    "dragon-c25": Rule(
        "time to fetch two documents as text from the other process at (0, 300 ms of delay on the way back)",
        "ms",
        Less(1, 0, Between(300, 750)),
        Less(1, 0, AtLeast(150)),
        (10.0, 60.0),
    ),
    "dragon-c26": Rule(
        "the paper's greedy rule in our simulator, largest over delays",
        "x the best of Cloud, Device and Random",
        AtMost(1.003),
        AtMost(1.05),
        1.2,
        _DEVICE,
    ),
    "dragon-c27": Rule(
        "saved over Device by the greedy rule at (100, 400 ms)",
        "percent",
        Less(1, 0, AtLeast(3)),
        Less(1, 0, Above(0)),
        (5.0, 4.0),
        "a side drawn at random",
    ),
    "dragon-c28": Rule(
        "at 0 ms (the greedy rule's share of aggregations on the device, Cloud over Device, Random over Device)",
        "",
        Each(Above(0.99), AtLeast(0.999), AtLeast(0.999)),
        Each(Above(0.9), None, None),
        (0.5, 1.0, 1.0),
        _DEVICE,
    ),
    "dragon-c29": Rule(
        "saved by the paper's greedy rule over the better static side at the largest delay where "
        "acceptance changes, (equal paces, the authors' 10 to 1)",
        "percent",
        Less(0, 1, AtLeast(0), times=1.5),
        Less(0, 1, Above(0)),
        (10.0, 30.0),
    ),
    "dragon-c30": Rule(
        "share of positions after the first that the cloud aggregates in Figure 10's replay, sides as printed",
        "of the positions",
        AtLeast(0.9),
        Above(0.5),
        0.1,
        "always on the cloud",
        1.0,
    ),
    "dragon-c31": Rule(
        "the most that aggregating on the faster side gains where the other one, either of them, "
        "decodes slower by more than the round trip, grid of Eq. 8",
        "s",
        AtMost(1e-12),
        None,
        0.2,
    ),
    "dragon-c32": _on_grid(
        "raising a side's acceptance never makes its own aggregation better, by Eq. 8, gap smaller than the round trip"
    ),
    "dragon-c33": Rule(
        "least p-value of chi-square, 50 pairs of distributions, both gammas, 100,000 draws each, times "
        "100 (Bonferroni)",
        "p-value",
        Above(0.01),
        None,
        1e-6,
    ),
    "dragon-c34": Rule(
        "Spearman's correlation of overlap and acceptance (least of 30 paths, on which a pair is mixed "
        "towards each other; 300 unrelated pairs)",
        "",
        All(AtLeast(0.99)),
        All(AtLeast(0.8)),
        (0.2, 0.2),
    ),
    "dragon-c35": Rule(
        "speed-up of Eq. 9 at the least local pace, over (the curve's largest, that at the remote's "
        "pace, that at twice the remote's)",
        "x",
        Each(Above(0.999), Near(1, within=0.001), AtLeast(1.05)),
        Each(Above(0.999), None, None),
        (0.7, 0.9, 1.0),
    ),
    "dragon-c36": Rule(
        "largest difference of the speed-up from 1 where the local side decodes slower by more than the round trip",
        "",
        _ZERO,
        None,
        0.3,
    ),
    "dragon-c37": _on_grid("the speed-up does not fall when the round trip grows"),
    "dragon-c38": _on_grid("the speed-up does not fall when the remote acceptance grows"),
    "dragon-c39": _steady(2, 4.3),
    "dragon-c40": _steady(4.3, 2.0),
    "dragon-c41": Rule("largest difference", "s", _ZERO, None, 0.1),
    "dragon-c42": Rule(
        "multiplications, additions and comparisons of one aggregation at a vocabulary of 151,936, two "
        "resamples included",
        "operations",
        Below(3e5),
        Below(1e7),
        1e9,
        note="Trend: the number is wrong, but negligible, one hundredth of a decode",
    ),
    "dragon-c43": Rule(
        "one aggregation on this machine at a vocabulary of 151,936",
        "us",
        AtMost(10),
        AtMost(2170),
        50_000.0,
        note="Trend: the number is wrong, but negligible, 1 percent of the paper's device token",
    ),
    "dragon-c44": Rule("a token's, from Qwen2.5-1.5B's configuration", "MACs", Above(1e9), Above(5e8), 1e8),
    "dragon-c45": Rule(
        "(largest KB of a distribution on the wire, frame not counted; mean total variation that the cap costs)",
        "",
        Each(AtMost(0.5), AtMost(0.01)),
        Each(AtMost(0.5), None),
        (608.0, 0.0),
    ),
    "dragon-c46": Rule("that the cap's bytes take at 100 Mbps", "us", AtMost(40), AtMost(80), 50_000.0),
    "dragon-c47": Rule(
        "Algorithm 1's expected acceptance along greedy answers in lockstep, both sides, (function "
        "words, other tokens)",
        "",
        Less(0, 1, AtLeast(0.05)),
        Less(0, 1, Above(0)),
        (0.7, 0.9),
    ),
}

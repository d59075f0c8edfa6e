"""DRAGON's claims, a row each: the notebook's section, the rule that judges it or why none can, its value and its null.

What is judged is the system that runs: 512 bytes a distribution, filled in by the receiver. The larger bundled model
stands for Qwen2.5-1.5B, the small one for OPT-1.3B. Latency is the whole mix's of questions, by who holds the answer, a
fourth each. Where the paper gives a size, `reproduced` allows a factor of 1.5 on it, unless the rule says otherwise. A
null is what a trivial method gets in DRAGON's place, by the same function: the cloud alone or the device alone, a side
drawn at random, another configuration, a formula without one of its terms.

Bounds are those of the runs before there were records; data/paper/rules.lock.csv says what changed since, and why.
c01 is at 16 documents for DRAGON and baseline alike, so it does not repeat c02 or c03.
"""

from __future__ import annotations

from ondevice.corpus.prompts import pick
from ondevice.evidence import Claim, Rule, Test, Untested
from ondevice.evidence.rules import Above, All, AtLeast, AtMost, Below, Between, Both, Each, Equal, Less, Near, Over
from ondevice_papers.dragon import overhead
from ondevice_studies.dragon import printed, values
from ondevice_studies.dragon.language_modelling import CLOUD_OUTPUT, UNCUT
from ondevice_studies.dragon.pair import CRCG

_ALGORITHM = "3.1 Algorithm 1"
_ACCEPTANCE = "3.2 Acceptance (Eq. 5, Theorem 2) and shared randomness"
_SIDE = "3.4 One side"
_COST_MODEL = "4. When it pays: the cost model (Table 1, Eqs. 6 to 9)"
_QUALITY = "6.1 Does it model text better (Figure 6)"
_ANSWERS = "6.2 Is the answer right, and whose drafts are accepted"
_PER_TOKEN = "6.3 Time a token (Figure 7)"
_FIRST_TOKEN = "6.4 Time to the first token (Figure 8)"
_SCHEDULES = "6.5 Where to aggregate (Figures 9 and 10)"
_VERDICTS = "7. Ours beside the paper's"

_ALONE = "the device alone"
_CLOUD = "the cloud alone, mixing the outputs of its half"
_DEVICE = "always aggregating on the device"
_RANDOM = "a side drawn at random"
_TOKEN_WISE = "token-wise aggregation"
_ZERO = Near(0, within=1e-9)
_CLOUD_ALONE = {"ours": CLOUD_OUTPUT}
_DEVICE_ALONE = {"ours": CRCG}
_DEVICE_TWICE = {"methods": (CRCG, CRCG)}
_NO_SPEEDUP = {"speedup": lambda costs, acceptance: 1.0}
_HALF_A_BILLION = (24, 896, 4864, 128, overhead.QWEN_VOCABULARY)  # Qwen2.5-0.5B's shape, as `overhead.QWEN_SHAPE`
_PACED = "the paper's paces imposed"


def _near(size: float) -> Test:
    return Near(size, factor=1.5)


def _gain(size: float, what: str) -> Rule:
    quantity = f"fall of perplexity from no documents to DRAGON's with 16, over {what}"
    return Rule(quantity, "x", _near(size), Above(1), 0.8, _CLOUD)


def _lower(percent: float, than: str) -> Rule:
    quantity = f"per-token latency below {than} at 300 ms, {_PACED}"
    return Rule(quantity, "percent", AtLeast(percent - 10), AtLeast(10), -5.0, _ALONE)


def _size(model: str, other: str, megabytes: float, wrong: float) -> Rule:
    return Rule(
        f"keys and values of 2 documents of 64 tokens from {model}'s configuration in float32",
        "MB",
        Near(megabytes, factor=1.05),
        _near(megabytes),
        wrong,
        f"{other}'s configuration",
    )


def _on_grid(what: str, null: str) -> Rule:
    return Rule(f"share on which {what}", "of the grid", Equal(1), AtLeast(0.9), 0.5, null)


def _steady(seconds: float, wrong: float, null: str) -> Rule:
    return Rule("simulated steady time a token", "s", Near(seconds, factor=1.01), _near(seconds), wrong, null)


CLAIMS: dict[str, Claim] = {
    "dragon-c01": Claim(
        _QUALITY,
        _gain(1.9, "the best baseline's with 16, the model with the larger ratio"),
        values.gain_at_most_documents,
        _CLOUD_ALONE,
        headline="DRAGON: gain over no documents, times that of the best central retrieval",
    ),
    "dragon-c02": Claim(
        _QUALITY,
        _gain(1.9, "the best baseline's with any number, our larger model for Qwen2.5-1.5B"),
        values.larger_models_gain,
        _CLOUD_ALONE,
    ),
    "dragon-c03": Claim(
        _QUALITY,
        _gain(1.4, "the best baseline's with any number, our smaller model for OPT-1.3B"),
        values.smaller_models_gain,
        _CLOUD_ALONE,
    ),
    "dragon-c04": Claim(
        _QUALITY,
        Rule(
            "share of all counts of documents, models and baselines in which DRAGON's perplexity is not "
            "higher by more than 0.1 percent",
            "of the cells",
            Equal(1),
            AtLeast(0.75),
            0.5,
            _CLOUD,
        ),
        values.share_not_worse,
        _CLOUD_ALONE,
    ),
    "dragon-c05": Claim(
        _QUALITY,
        Rule(
            "perplexity of the paper's best baseline less DRAGON's, mean of the models, (2 documents, 16)",
            "",
            Both(Less(1, 0, Above(0), times=1.5), Each(None, Above(0))),
            Less(1, 0, Above(0)),
            (0.5, 0.1),
            _CLOUD,
        ),
        values.gap_to_the_best,
        _CLOUD_ALONE,
    ),
    # In the second the number of documents is the same.
    "dragon-c06": Claim(
        _QUALITY,
        Rule(
            "perplexity of (CRCG over DRAGON's at the same count, CRCG/Cloud's by one context over the same "
            "documents' by output aggregation), means",
            "x",
            Each(AtLeast(1.02), Below(1.005)),
            Each(Above(1), None),
            (0.98, 1.0),
            _CLOUD,
        ),
        values.one_side_alone,
        _CLOUD_ALONE,
    ),
    "dragon-c07": Claim(
        _QUALITY,
        Rule(
            "change of DRCG's perplexity in a 256-token budget, mean of the models, documents (4 to 16, 0 to 4)",
            "percent",
            Each(Near(0, within=1), Below(-1)),
            Over(0, 1, Near(0, within=1 / 3)),
            (-8.0, -5.0),
            "the same documents without a budget",
        ),
        values.drcg_saturates,
        {"method": UNCUT},
    ),
    "dragon-c08": Claim(
        _QUALITY,
        Rule(
            "DRCG's perplexity at 2 documents, by model",
            "x DRAGON's",
            All(Above(1.002)),
            Less(0, 1, Above(2), times=-1),
            (0.99, 0.99),
            _CLOUD,
            note="Two models: their mean is above 1",
        ),
        values.drcg_at_fewest_documents,
        _CLOUD_ALONE,
    ),
    "dragon-c09": Claim(
        _QUALITY,
        Rule(
            "perplexity of sequence-wise DRDG, as RAG-Sequence of Lewis et al., at 16 documents, mean of the models",
            "x DRAGON's",
            Near(1, within=0.001),
            Near(1, within=0.02),
            1.2,
            _CLOUD,
            note="Token-wise DRDG's is DRAGON's by definition",
        ),
        values.variant_over_ours,
        {"variant": CLOUD_OUTPUT},
    ),
    "dragon-c10": Claim(
        _PER_TOKEN, _lower(49.5, "sequence-wise DRDG's"), values.saved_over_sequence_wise, _DEVICE_ALONE,
        headline="DRAGON: time per token below waiting once per sequence, 300 ms away, paces imposed",
    ),
    "dragon-c11": Claim(
        _PER_TOKEN,
        _lower(42.4, "token-wise DRDG's"),
        values.saved_over_token_wise,
        _DEVICE_ALONE,
        headline="DRAGON: time per token below waiting at each token, 300 ms away, paces imposed",
    ),
    # The printed series have 1.11 and 1.08, token-wise DRDG's 1.86 and 1.20.
    "dragon-c12": Claim(
        _PER_TOKEN,
        Rule(f"per-token latency at 300 ms over that at 0 ms, {_PACED}", "x", AtMost(1.25), AtMost(1.6), 2.2, _ALONE),
        values.growth_with_delay,
        _DEVICE_ALONE,
    ),
    "dragon-c13": Claim(
        _PER_TOKEN,
        Rule(
            f"(token-wise, sequence-wise) DRDG's per-token latency at 300 ms over that at 0 ms, {_PACED}",
            "x",
            All(AtLeast(1.5)),
            All(AtLeast(1.15)),
            (1.0, 1.0),
            _ALONE,
        ),
        values.drdg_growth_with_delay,
        _DEVICE_TWICE,
    ),
    "dragon-c14": Claim(
        _PER_TOKEN,
        Rule(
            "growth of the time a token from 0 to 300 ms of delay, (sequence-wise, token-wise)",
            "ms",
            Less(0, 1, Above(0)),
            None,
            (10.0, 150.0),
            _ALONE,
        ),
        values.drdg_slowed_by_delay,
        _DEVICE_TWICE,
    ),
    "dragon-c15": Claim(
        _FIRST_TOKEN,
        Rule(
            "per-token latency of DRCG/KV over the device's alone with as many own documents, output "
            "aggregation from stored rows, unpaced",
            "x",
            Near(1, within=0.05),
            Near(1, within=0.15),
            1.4,
            "the device alone, with its own half of the documents",
        ),
        values.rows_per_token,
        {"method": CRCG},
    ),
    "dragon-c16": Claim(
        _PER_TOKEN,
        Rule(
            f"DRAGON's per-token latency above the device's alone, mean over delays, {_PACED}",
            "percent",
            AtMost(20.3),
            AtMost(40),
            90.0,
            _ALONE,
        ),
        values.above_the_device,
        _DEVICE_ALONE,
    ),
    "dragon-c17": Claim(
        _FIRST_TOKEN,
        Rule(
            "DRAGON's TTFT by the paper's times to both sides' first distributions, OPT-1.3B's, 300 ms added",
            "x the device's alone",
            AtMost(1.05),
            AtMost(1.25),
            2.0,
            "the cloud asked after the device's own prefill",
        ),
        values.first_token_over_the_device,
        {"overlapped": False},
    ),
    "dragon-c18": Claim(
        _FIRST_TOKEN,
        Rule(
            "TTFT of DRCG/Text over DRAGON's, mean over delays, on this machine",
            "x",
            _near(8.6),
            Above(1.2),
            0.9,
            _ALONE,
        ),
        values.text_over_ours,
        _DEVICE_ALONE,
    ),
    "dragon-c19": Claim(
        _FIRST_TOKEN,
        Rule("TTFT of DRCG/KV over DRAGON's at 300 ms, on this machine", "x", Above(15.2), Above(1.2), 0.9, _ALONE),
        values.rows_over_ours,
        _DEVICE_ALONE,
    ),
    "dragon-c20": Claim(
        _FIRST_TOKEN,
        Untested(
            "it compares two of the authors' models, and ours differ in depth and width otherwise; needs models of "
            "their two shapes, timed on one machine"
        ),
    ),
    # Bytes decide its TTFT where the link is slow.
    "dragon-c21": Claim(
        _FIRST_TOKEN,
        Rule(
            "bytes that DRCG/KV moves for the same documents, OPT-1.3B's, by the configurations",
            "x Qwen2.5-1.5B's",
            Above(1),
            None,
            0.5,
            "Qwen2.5-1.5B with keys and values of each head's own",
        ),
        values.opt_bytes_over_qwens,
        {"heads_that_share": 1},
    ),
    "dragon-c22": Claim(
        _FIRST_TOKEN, _size(printed.OPT, printed.QWEN, 114, 25.0), values.opt_megabytes, {"model": printed.QWEN}
    ),
    "dragon-c23": Claim(
        _FIRST_TOKEN, _size(printed.QWEN, printed.OPT, 16, 3.0), values.qwen_megabytes, {"model": printed.OPT}
    ),
    "dragon-c24": Claim(
        _VERDICTS, Untested("retrieval from 21 million passages on a MacBook; needs the paper's index and a laptop")
    ),
    "dragon-c25": Claim(
        _FIRST_TOKEN,
        Rule(
            "time to fetch two documents as text from the other process at (0, 300 ms of delay on the way back)",
            "ms",
            Less(1, 0, Between(300, 750)),
            Less(1, 0, AtLeast(150)),
            (10.0, 60.0),
            "the device alone, to its first token",
        ),
        values.text_fetched,
        _DEVICE_ALONE,
    ),
    "dragon-c26": Claim(
        _SCHEDULES,
        Rule(
            "the paper's greedy rule in our simulator, largest over delays",
            "x the best of Cloud, Device and Random",
            AtMost(1.003),
            AtMost(1.05),
            1.2,
            _DEVICE,
        ),
        values.schedule_over_the_best,
        {"ours": "Device"},
    ),
    "dragon-c27": Claim(
        _SCHEDULES,
        Rule(
            "saved over Device by the greedy rule at (100, 400 ms)",
            "percent",
            Less(1, 0, AtLeast(3)),
            Less(1, 0, Above(0)),
            (5.0, 4.0),
            _RANDOM,
        ),
        values.saved_over_device,
        {"ours": "Random"},
    ),
    "dragon-c28": Claim(
        _SCHEDULES,
        Rule(
            "at 0 ms (the greedy rule's share of aggregations on the device, Cloud over Device, Random over Device)",
            "",
            Each(Above(0.99), AtLeast(0.999), AtLeast(0.999)),
            Each(Above(0.9), None, None),
            (0.5, 1.0, 1.0),
            _DEVICE,
        ),
        values.at_no_delay,
        {"ours": "Device"},
    ),
    "dragon-c29": Claim(
        _SCHEDULES,
        Rule(
            "saved by the paper's greedy rule over the better static side at the largest delay where "
            "acceptance changes, (equal paces, the authors' 10 to 1)",
            "percent",
            Both(Less(0, 1, AtLeast(0), times=1.5), Each(Above(0), None)),
            Both(Less(0, 1, Above(0)), Each(Above(0), None)),
            (10.0, 30.0),
            _RANDOM,
        ),
        values.saved_where_acceptance_changes,
        {"ours": "Random"},
    ),
    "dragon-c30": Claim(
        _SCHEDULES,
        Rule(
            "share of positions after the first that the cloud aggregates in Figure 10's replay, sides as printed",
            "of the positions",
            AtLeast(0.9),
            Above(0.5),
            0.1,
            "always on the cloud",
            1.0,
        ),
        values.exchanged_on_the_cloud,
    ),
    "dragon-c31": Claim(
        _COST_MODEL,
        Rule(
            "the most that aggregating on the faster side gains where the other one, either of them, "
            "decodes slower by more than the round trip, grid of Eq. 8",
            "s",
            AtMost(1e-12),
            None,
            0.2,
            "Eq. 8 without the decoding times",
        ),
        values.faster_sides_gain,
        {"difference": lambda costs, local, remote: (local - remote) * costs.round_trip},
    ),
    "dragon-c32": Claim(
        _COST_MODEL,
        _on_grid(
            "raising a side's acceptance makes its own aggregation worse, by Eq. 8, gap smaller than the round trip",
            "Eq. 8 without acceptance",
        ),
        values.acceptance_moves_away,
        {"difference": lambda costs, local, remote: costs.decode_local - costs.decode_remote},
    ),
    "dragon-c33": Claim(
        _ALGORITHM,
        Rule(
            "least p-value of chi-square, 50 pairs of distributions, both gammas, 100,000 draws each, times "
            "100 (Bonferroni)",
            "p-value",
            Above(0.01),
            None,
            1e-6,
            "the local side's drafts as they are",
        ),
        values.least_p_value,
        {"ours": "drafts"},
    ),
    "dragon-c34": Claim(
        _ACCEPTANCE,
        Rule(
            "Spearman's correlation of overlap and acceptance (least of 30 paths, on which a pair is mixed "
            "towards each other; 300 unrelated pairs)",
            "",
            All(AtLeast(0.99)),
            All(AtLeast(0.8)),
            (0.2, 0.2),
            "drafts that count only where both sides drew the same token",
        ),
        values.overlap,
        {"expected_acceptance": lambda p, q, eta: float(p @ q)},
    ),
    "dragon-c35": Claim(
        _COST_MODEL,
        Rule(
            "speed-up of Eq. 9 at the least local pace, over (the curve's largest, that at the remote's "
            "pace, that at twice the remote's)",
            "x",
            Each(Above(0.999), Near(1, within=0.001), AtLeast(1.05)),
            Each(Above(0.999), None, None),
            (0.7, 0.9, 1.0),
            _TOKEN_WISE,
        ),
        values.largest_speedup,
        _NO_SPEEDUP,
    ),
    "dragon-c36": Claim(
        _COST_MODEL,
        Rule(
            "largest difference of the speed-up from 1 where the local side decodes slower by more than the round trip",
            "",
            _ZERO,
            None,
            0.3,
            _TOKEN_WISE,
        ),
        values.speedup_of_the_slower,
        _NO_SPEEDUP,
    ),
    "dragon-c37": Claim(
        _COST_MODEL,
        _on_grid(
            "the speed-up grows with the round trip, some drafts accepted and the paces less than it apart",
            _TOKEN_WISE,
        ),
        values.speedup_grows_with_the_trip,
        _NO_SPEEDUP,
    ),
    "dragon-c38": Claim(
        _COST_MODEL,
        _on_grid(
            "the speed-up grows with the remote acceptance, the paces less than the round trip apart", _TOKEN_WISE
        ),
        values.speedup_grows_with_acceptance,
        _NO_SPEEDUP,
    ),
    "dragon-c39": Claim(
        _SIDE,
        _steady(2, 4.3, "every draft rejected, as token-wise aggregation"),
        values.steady_accepted,
        {"case": "all rejected"},
    ),
    "dragon-c40": Claim(
        _SIDE, _steady(4.3, 2.0, "no draft rejected"), values.steady_rejected, {"case": "all accepted"}
    ),
    "dragon-c41": Claim(
        _COST_MODEL,
        Rule(
            "Eq. 7's time per token with no draft accepted less token-wise aggregation's by Table 1, Figure 4's costs",
            "s",
            _ZERO,
            None,
            0.1,
            "all drafts accepted",
        ),
        values.worst_over_token_wise,
        {"accepted": 1.0},
    ),
    "dragon-c42": Claim(
        _ANSWERS,
        Rule(
            "multiplications, additions and comparisons of one aggregation at a vocabulary of 151,936, two "
            "resamples included",
            "operations",
            Below(3e5),
            Below(1e7),
            1e9,
            "the mixture alone, as token-wise aggregation",
            note="Trend: the number is wrong, but negligible, one hundredth of a decode",
        ),
        values.operations,
        {"resamples": 0},
    ),
    "dragon-c43": Claim(
        _ANSWERS,
        Rule(
            "one aggregation on this machine at a vocabulary of 151,936",
            "us",
            AtMost(10),
            AtMost(2170),
            50_000.0,
            "the mixture alone, as token-wise aggregation",
            note="Trend: the number is wrong, but negligible, 1 percent of the paper's device token",
        ),
        values.aggregation_time,
        {"step": "mixture"},
    ),
    "dragon-c44": Claim(
        _ANSWERS,
        Rule(
            "a token's, from Qwen2.5-1.5B's configuration",
            "MACs",
            Above(1e9),
            Above(5e8),
            1e8,
            "Qwen2.5-0.5B's configuration",
        ),
        values.decode_macs,
        {"shape": _HALF_A_BILLION},
    ),
    "dragon-c45": Claim(
        _ANSWERS,
        Rule(
            "(largest KB of a distribution on the wire, frame not counted; mean total variation that the cap costs)",
            "",
            Each(AtMost(0.5), AtMost(0.01)),
            Each(AtMost(0.5), None),
            (608.0, 0.0),
            "nothing sent, and the receiver's own distribution in its place",
        ),
        values.distribution_sizes,
        {"sent": False},
    ),
    "dragon-c46": Claim(
        _ANSWERS,
        Rule(
            "that the cap's bytes take at 100 Mbps",
            "us",
            AtMost(40),
            AtMost(80),
            50_000.0,
            "the whole distribution in float32, Qwen2.5-1.5B's vocabulary",
        ),
        values.sending_time,
        {"size": 4 * overhead.QWEN_VOCABULARY},
    ),
    "dragon-c47": Claim(
        _ANSWERS,
        Rule(
            "Algorithm 1's expected acceptance along greedy answers in lockstep, both sides, (function "
            "words, other tokens)",
            "",
            Less(0, 1, AtLeast(0.05)),
            Less(0, 1, Above(0)),
            (0.7, 0.9),
            "a random half of the vocabulary for the function words",
        ),
        values.acceptance_by_word,
        {"function_word": lambda word: pick(word, "dragon words", 2) == 0},
    ),
}

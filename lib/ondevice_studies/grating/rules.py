"""GRATING's claims: the rule that judges each, or the reason why it cannot be tested here.

Our three rerankers stand for the paper's five: `pydocs-reranker-deep` for MiniCPM, which was trained with a head on
each layer, too, `pydocs-reranker` for Qwen3-Reranker, `minilm-reranker` for the encoder. Their decisions drive the full
shape of Qwen3-Reranker-0.6B with random weights on a CPU, whose seconds and memory are judged; int8 and GPUs are left
out. A saving of the microbenchmarks, of RAG and of long contexts is judged as a pair with the precision that it costs
(c01, c12 to c14, c24, c25, c33, c37, c46). RAG and long contexts have no validation pools of their own: thresholds are
those of documentation questions, so that what carries over is judged, too.
Memory is peak growth of resident pages over the process after its imports, in 16 bits, 20 candidates of 500 tokens.
Where the paper gives a size, `reproduced` allows a factor of 1.5 on it; for a reduction, on what is saved and on what
is left (`_part`). More than that is `trend`, as less is.
"""

from __future__ import annotations

from ondevice.evidence import Rule, Test, Untested
from ondevice.evidence.rules import Above, All, AtLeast, AtMost, Below, Between, Both, Each, Equal, Less, Near

_FACTOR = 1.5
_FOUND = (
    "no reranker here finds generated tasks: where what is replayed is to be right in 90 of 100 cases, it "
    "replays about one task in a hundred, so that a task's time is the model's calls, which are stated"
)
_NONE = "no pruning"
_OFFLOAD = "HF Offload"
_RATIO = "it is the same ratio as that of grating-c48, which is judged there"
_LARGEST = "the largest of models and query sets that loses at most a point"


def _near(size: float) -> Test:
    return Near(size, factor=_FACTOR)


def _part(percent: float) -> Test:
    """A part in percent within the factor, and the rest, too."""
    rest = 100 - percent
    return Between(max(percent / _FACTOR, 100 - rest * _FACTOR), min(percent * _FACTOR, 100 - rest / _FACTOR))


def _pair(percent: float, of: str) -> Rule:
    """(saved in percent, loss of precision in points); without pruning neither."""
    return Rule(f"(saved, loss of precision in points), {of}", "percent", Each(_part(percent), AtMost(1)),
                Each(AtLeast(min(10.0, percent / 4)), AtMost(2)), (-5.0, 6.0), _NONE, (0.0, 0.0))  # fmt: skip


def _cut(percent: float, of: str) -> Rule:
    return Rule(f"saved, {of}", "percent", _part(percent), AtLeast(min(10.0, percent / 4)), -5.0)


def _lost(of: str) -> Rule:
    return Rule(f"greatest loss of {of}", "points", AtMost(1), AtMost(3), 6.0, _NONE, 0.0)


def _cuts(low: float, high: float, of: str) -> Rule:
    return Rule(
        f"(least, greatest) saved, {of}", "percent", Each(_part(low), _part(high)), Each(Above(2), None), (-5.0, high)
    )


def _no_penalty(of: str, wrong: float) -> Rule:
    """Of a difference that could have either sign."""
    return Rule(
        f"latency that the {of}", "percent of the baseline's", Between(-1, 1), AtMost(5), wrong, "without it", 0.0
    )


RULES: dict[str, Rule | Untested] = {
    # Figures 8 and 10
    "grating-c01": _pair(89, "latency against HF Offload: the largest of models, query sets, K and thresholds that "
                             "lose at most a point"),
    "grating-c02": Untested(f"{_RATIO}; the abstract's 94.9 % are a slip: 11.45 times less is 91.3 %"),
    "grating-c03": _lost("Precision@K against the full model, over models, query sets, K and both thresholds"),
    "grating-c04": _cuts(11.6, 51.0, "latency against HF, end to end, RAG with both decoders and long contexts, higher "
                                     "threshold of documentation questions"),
    "grating-c05": Untested("the printed peaks are of whole applications, with a database, an embedder and a language "
                            "model; of ranking alone grating-c32, c36 and c48 judge"),
    "grating-c06": Untested("milliseconds of a 0.6B model on a Mac Mini's GPU"),
    "grating-c07": Untested("needs the Mac and its 4-bit model; the printed size is that of the model in 16 bits, "
                            "1,192 MB, where its weights in 4 bits are 298"),
    "grating-c08": Rule("of the pipeline's latency in the reranker: BM25, an embedding of the query by the same shape, "
                        "20 candidates of 128 tokens by transformers", "percent", AtLeast(90), AtLeast(50), 30.0),
    "grating-c09": Rule("reranker's part of the sum of the stages' peaks of memory, the same", "percent", _part(67.6),
                        AtLeast(34), 20.0),
    "grating-c10": Rule("Precision@1 of a reranker above that of the embedder that orders the same candidates, mean "
                        "over rerankers, (documentation questions, inverse cloze)", "percent", All(Between(15, 25)),
                        All(Above(5)), (0.0, 20.0), "the embedder", (0.0, 0.0)),
    "grating-c11": Rule("first layer from which on Kendall's tau with the last layer's order, mean over pools, stays "
                        "at 0.8 or more, mean over models", "of the depth", AtMost(0.5), AtMost(0.75), 0.95),
    "grating-c12": _pair(72, f"latency against HF at K = 1: {_LARGEST}"),
    "grating-c13": _pair(89, f"latency against HF Offload at K = 1: {_LARGEST}"),
    "grating-c14": _pair(50, "latency against HF Offload at K = 10: the least of models and query sets, each at its "
                             "faster threshold that loses at most a point"),
    "grating-c15": Rule("share of models, query sets and K in which GRATING at its faster threshold has the lowest "
                        "latency of the methods (that GRATING Quant is next is not tested)", "of the cells", Equal(1),
                        AtLeast(0.75), 0.4, _NONE, None),
    "grating-c16": Rule("share of models, query sets and K with two thresholds in which the higher one (is not less "
                        "precise, saves less work)", "of the cells", All(Equal(1)), All(AtLeast(0.75)), (0.4, 0.9)),
    "grating-c17": Untested("how much of their memory was free is not stated. By weights in 16 bits alone, 7.5 and "
                            "15.3 GiB, the 4B fits into 8 and the 8B into 16 GiB"),
    "grating-c18": Untested("it is of a trained model of 8 billion parameters, and none is here"),
    "grating-c19": Rule("least over models and K of Spearman's correlation between threshold and (computed "
                        "layer-candidates, precision)", "", All(AtLeast(0.8)), Each(AtLeast(0.8), Above(0)),
                        (0.9, -0.5)),
    # Figure 9
    "grating-c20": Untested(f"{_RATIO}: the range is over five models, and one shape was measured"),
    "grating-c21": Rule("peak memory of HF Offload, at its best malloc setting, over GRATING's", "x",
                        Between(1.34, 3.83), Above(1), 0.8, "HF Offload itself",
                        1.0),
    "grating-c22": Untested("GPTQ W4A16 needs kernels for a GPU"),
    "grating-c23": Rule("(GRATING's peak over the least other one's, its latency over HF's, HF "
                        "Offload's latency over HF's), K = 10, higher threshold", "x",
                        Each(Below(1), Below(1), Above(1)), Each(Below(1), AtMost(1.1), None), (0.2, 1.6, 1.2)),
    # Figures 11 to 15
    "grating-c24": _pair(51, "latency of RAG (search and rank, 10 of 20 x 500) against HF, pydocs-reranker-deep, "
                             "higher threshold of documentation questions"),
    "grating-c25": _pair(31, "the same, pydocs-reranker"),
    "grating-c26": Untested(f"of the process that ranks {_RATIO}; the paper's also has a database and an embedder"),
    "grating-c27": _cut(92.3, "mean memory over the time of ranking 20 x 500 against HF"),
    "grating-c28": _lost("Precision@10 in RAG, both decoders, higher threshold of documentation questions"),
    "grating-c29": Untested(_FOUND), "grating-c30": Untested(_FOUND), "grating-c31": Untested(_FOUND),
    "grating-c32": _cut(63.0, "peak memory of an action's ranking, 20 x 128, against HF"),
    "grating-c33": _pair(12, "end-to-end latency of long-context selection against HF, pydocs-reranker, the 4B model's "
                             "reading by its parameters"),
    "grating-c34": _cut(57.3, "end-to-end latency of long-context selection against no reranker, the same"),
    "grating-c35": Rule("right answers with a reranker's selection less those of the best way without one (all that "
                        "fits, first segments, the embedder's), (HF, GRATING), mean of two decoders", "points",
                        All(AtLeast(1)), All(Above(0)), (2.0, -2.0), "no reranker", (0.0, 0.0)),
    "grating-c36": Rule("peak memory of HF less GRATING's, 20 x 500", "GiB", _near(1), AtLeast(0.3), 0.1),
    # Figure 16
    "grating-c37": _pair(49, "latency of 60 x 128 by pruning in one batch, weights in memory, three recorded pools of "
                             "pydocs-reranker-deep, K = 10, lower threshold"),
    "grating-c38": Rule("of the baseline's peak memory that one batch of all 60 candidates adds", "percent",
                        _near(44.8), AtLeast(5), 0.0, _NONE, 0.0),
    "grating-c39": Rule("peak memory that one batch of 60 candidates adds to the baseline's", "MB", _near(473),
                        Near(473, factor=3), 60.0, _NONE, 0.0),
    "grating-c40": Rule("above the baseline's peak memory, (one batch, chunks)", "percent",
                        Both(Each(None, _near(7.2)), Less(0, 1, Above(0))),
                        Both(Each(Above(0), None), Less(0, 1, AtLeast(0), times=2)), (40.0, 35.0)),
    "grating-c41": _cut(57.8, "peak memory of the ablation's baseline, by all up to the sliding window"),
    "grating-c42": _no_penalty("sliding window adds after pruning, 60 x 128 (81 ms are 0.4 to 0.6 percent of what the "
                               "paper's numbers imply)", 15.0),
    "grating-c43": Rule("peak memory with all techniques, 60 candidates of 500 tokens", "MiB", AtMost(271),
                        AtMost(271 * _FACTOR), 1184.0),
    "grating-c44": _no_penalty("embedding cache adds once warm, 60 x 128", 12.0),
    "grating-c45": _cut(78.4, "peak memory of the ablation's baseline, by all techniques"),
    "grating-c46": _pair(48.5, "latency of 60 x 128 by all techniques, as c37"),
    # Statements of the text
    "grating-c47": Rule("latency that the sliding window adds to weights in memory, 20 x 128, (without pruning, after "
                        "pruning)", "percent", All(AtMost(1)), Each(AtMost(5), None), (20.0, 30.0),
                        "weights in memory", (0.0, 0.0)),
    "grating-c48": Rule("peak memory of HF over GRATING's, 20 x 500", "x", _near(11.45), Above(2), 1.1, _OFFLOAD, None),
    "grating-c49": Rule("the embedding table's part of two layers and itself, from the shape in 16 bits", "percent",
                        Both(Above(83), AtMost(84)), Above(50), 30.0),
    "grating-c50": Rule("of the vocabulary that 20 documents of 512 tokens touch at most, from the shape", "percent",
                        Near(6.75, within=0.005), AtMost(10), 34.0),
    "grating-c51": Untested("it is of Qwen3-4B-Instruct, trained, which is not here, and the paper shows no number"),
    "grating-c52": Untested("int8 weights gained nothing here, as a layer had to be multiplied out, and were removed"),
}  # fmt: skip

"""GRATING's claims: the rule that judges each and the value that it judges, or why it cannot be tested here.

Our three rerankers stand for the paper's five: `pydocs-reranker-deep` for MiniCPM, which was trained with a head on
each layer, too, `pydocs-reranker` for Qwen3-Reranker, `minilm-reranker` for the encoder. Their decisions drive the full
shape of Qwen3-Reranker-0.6B with random weights on a CPU, whose seconds and memory are judged; int8 and GPUs are left
out. A saving of the microbenchmarks is judged as a pair with the precision that it costs (c01, c12 to c14, c37, c46).
RAG and long contexts have no validation pools: the paper's rule is calibrated on half of their pools, for Precision@K
within a point, and judged on the other half, in twelve halvings.
Memory is peak growth of resident pages over the process after its imports, in 16 bits, 20 candidates of 500 tokens.
The paper does not say which memory it counts. Resident pages include the weights that transformers maps, which a GPU
would hold, too; anonymous memory, which no system can drop, stands beside, and unless all of its range says the same a
claim is a trend at most. Ends of memory are a range of three runs.
Where the paper gives a size, `reproduced` allows a factor of 1.5 on it; for a reduction, on what is saved and on what
is left (`_part`). More than that is `trend`, as less is.
"""

from __future__ import annotations

from functools import partial

from ondevice.evidence import Claim, Rule, Test, Untested
from ondevice.evidence.rules import Above, All, AtLeast, AtMost, Below, Between, Both, Each, Equal, Less, Near
from ondevice_studies.grating import values
from ondevice_studies.grating.full_size import (
    CACHE,
    CHUNKS,
    HF,
    IN_MEMORY,
    OFFLOAD,
    ONE_BATCH,
    OURS,
    WHOLE_LAYERS,
    WINDOW,
)
from ondevice_studies.grating.study import BASE, DEEP, FIRST, LOW, UNPRUNED

SCORES = "3.1 Do scores settle early? (Figure 2)"
THRESHOLD = "3.2 Which threshold? (Figure 10)"
MEMORY = "3.4 Memory (Figures 9 and 16)"
LATENCY = "3.5 Latency at full size, and precision (Figure 8)"
APPLICATIONS = "3.6 Applications (Figures 1, 11, 14, 15)"
VERDICTS = "4. Ours beside the paper's"

_FACTOR = 1.5
_UNPRUNED = {"ours": UNPRUNED}
_AGENTS = (
    "needs a reranker that finds tasks among past ones: where what is replayed is to be right in 90 of 100 cases, the "
    "encoder replayed about one of a hundred generated tasks, so a task's time was that of the model's calls, a stated "
    "number"
)
_NONE = "no pruning"
_ITSELF = ("the ablation's baseline", (0.0, 0.0))
_RATIO = "it is the same ratio as that of grating-c48, which is judged there"
_LARGEST = "the largest of models and query sets that loses at most a point"


def _near(size: float) -> Test:
    return Near(size, factor=_FACTOR)


def _part(percent: float) -> Test:
    """A part in percent within the factor, and the rest, too."""
    rest = 100 - percent
    return Between(max(percent / _FACTOR, 100 - rest * _FACTOR), min(percent * _FACTOR, 100 - rest / _FACTOR))


def _pair(percent: float, quantity: str, null: str = _NONE, null_value: tuple[float, float] | None = None) -> Rule:
    """(saved in percent, loss of precision in points)."""
    return Rule(f"(saved, loss of precision in points), {quantity}", "percent", Each(_part(percent), AtMost(1)),
                Each(AtLeast(min(10.0, percent / 4)), AtMost(2)), (-5.0, 6.0), null, null_value)  # fmt: skip


def _cut(percent: float, quantity: str) -> Rule:
    """(saved of resident memory, saved of anonymous memory)."""
    return Rule(
        f"saved of (resident, anonymous) memory, {quantity}",
        "percent",
        Each(_part(percent), Above(0)),
        Each(AtLeast(min(10.0, percent / 4)), None),
        (-5.0, -5.0),
        OFFLOAD,
    )


def _lost(quantity: str) -> Rule:
    return Rule(f"greatest loss of {quantity}", "points", AtMost(1), AtMost(3), 6.0, _NONE, 0.0)


def _no_penalty(quantity: str, wrong: float) -> Rule:
    """Of a difference that could have either sign."""
    return Rule(
        f"latency that the {quantity}", "percent of the baseline's", Between(-1, 1), AtMost(5), wrong, "without it", 0.0
    )


CLAIMS: dict[str, Claim] = {
    "grating-c01": Claim(LATENCY,
        _pair(89, "latency against HF Offload: the largest of models, query sets, K and thresholds that lose at most a "
              "point"),
        partial(values.largest, against=OFFLOAD), _UNPRUNED,
        headline="GRATING: latency saved at best, and points of precision lost"),
    "grating-c02": Claim(MEMORY, Untested(f"{_RATIO}; the abstract's 94.9 % are a slip: 11.45 times less is 91.3 %"),
        headline="GRATING: memory saved, at best"),
    "grating-c03": Claim(LATENCY,
        _lost("Precision@K against the full model, over models, query sets, K and both thresholds"),
        values.greatest_loss,
        headline="GRATING: precision lost"),
    "grating-c04": Claim(APPLICATIONS,
        _pair(11.6, "latency of RAG and of long contexts against HF, searches and reading included, each with the "
              "decoder that saves most: the application that saves least"),
        values.least_saved, _UNPRUNED,
        headline="GRATING: latency saved in applications, at least"),
    "grating-c05": Claim(APPLICATIONS,
        Untested("the printed peaks are of whole applications, with a database, an embedder and a language model; of "
                 "ranking alone grating-c32, c36 and c48 judge"),
        headline="GRATING: memory saved in applications"),
    "grating-c06": Claim(APPLICATIONS, Untested("milliseconds of a 0.6B model on a Mac Mini's GPU")),
    "grating-c07": Claim(APPLICATIONS,
        Untested("needs the Mac and its 4-bit model; the printed size is that of the model in 16 bits, 1,192 MB, where "
                 "its weights in 4 bits are 298")),
    "grating-c08": Claim(APPLICATIONS,
        Rule("of the pipeline's latency in the reranker: BM25, an embedding of the query by the same shape, 20 "
             "candidates of 128 tokens by transformers", "percent", AtLeast(90), AtLeast(50), 30.0,
             "the embedding of the query in its place"),
        partial(values.share_of_stage, column="latency_ms"), {"index": 1}),
    "grating-c09": Claim(APPLICATIONS,
        Rule("reranker's part of the sum of the stages' peaks of memory, the same", "percent", _part(67.6), AtLeast(34),
             20.0, "the embedding of the query in its place"),
        partial(values.share_of_stage, column="peak_mb"), {"index": 1}),
    "grating-c10": Claim(APPLICATIONS,
        Rule("Precision@1 of a reranker above that of the embedder that orders the same candidates, mean over "
             "rerankers, (documentation questions, inverse cloze)", "percent", All(Between(15, 25)), All(Above(5)),
             (0.0, 20.0), "the embedder", (0.0, 0.0)),
        values.over_embedder),
    "grating-c11": Claim(SCORES,
        Rule("first layer from which on Kendall's tau with the last layer's order, mean over pools, stays at 0.8 or "
             "more, mean over models", "of the depth", AtMost(0.5), AtMost(0.75), 0.95,
             "a random order until the last layer", 1.0),
        values.settled),
    "grating-c12": Claim(LATENCY, _pair(72, f"latency against HF at K = 1: {_LARGEST}"),
        partial(values.largest, against=HF, k=1), _UNPRUNED),
    "grating-c13": Claim(LATENCY, _pair(89, f"latency against HF Offload at K = 1: {_LARGEST}"),
        partial(values.largest, against=OFFLOAD, k=1), _UNPRUNED),
    "grating-c14": Claim(LATENCY,
        _pair(50, "latency against HF Offload at K = 10: the least of models and query sets, each at its faster "
              "threshold that loses at most a point"),
        partial(values.hardest, k=10), _UNPRUNED),
    "grating-c15": Claim(LATENCY,
        Rule("share of models, query sets and K in which GRATING at its faster threshold has the lowest latency of the "
             "methods (that GRATING Quant is next is not tested)", "of the cells", Equal(1), AtLeast(0.75), 0.4, _NONE),
        values.fastest_share, _UNPRUNED),
    "grating-c16": Claim(LATENCY,
        Rule("share of models, query sets and K with two thresholds in which the higher one (is not less precise, "
             "saves less work)", "of the cells", All(Equal(1)), All(AtLeast(0.75)), (0.4, 0.9), _NONE),
        values.higher_threshold, _UNPRUNED),
    "grating-c17": Claim(LATENCY,
        Untested("how much of their memory was free is not stated. By weights in 16 bits alone, 7.5 and 15.3 GiB, the "
                 "4B fits into 8 and the 8B into 16 GiB")),
    "grating-c18": Claim(LATENCY, Untested("it is of a trained model of 8 billion parameters, and none is here")),
    "grating-c19": Claim(THRESHOLD,
        Rule("least over models and K of Spearman's correlation between threshold and (computed layer-candidates, "
             "precision)", "", All(AtLeast(0.8)), Each(AtLeast(0.8), Above(0)), (0.9, -0.5),
             "all candidates leave after a fixed layer, which stands for the threshold"),
        values.trade_off, {"ours": False}),
    "grating-c20": Claim(MEMORY, Untested(f"{_RATIO}: the range is over five models, and one shape was measured")),
    "grating-c21": Claim(MEMORY,
        Rule("(resident, anonymous) peak memory of HF Offload, at its best malloc setting, over GRATING's", "x",
             Each(Between(1.34, 3.83), Above(1)), Each(Above(1), None), (0.8, 0.8), "HF Offload itself",
             (1.0, 1.0)),
        partial(values.peak_ratio, method=OFFLOAD)),
    "grating-c22": Claim(MEMORY, Untested("GPTQ W4A16 needs kernels for a GPU")),
    "grating-c23": Claim(LATENCY,
        Rule("(GRATING's peak of resident and of anonymous memory over the least other one's, its latency over HF's, "
             "HF Offload's latency over HF's), K = 10, higher threshold", "x",
             Each(Below(1), Below(1), Below(1), Above(1)), Each(Below(1), None, AtMost(1.1), None),
             (0.2, 0.2, 1.6, 1.2), OFFLOAD),
        values.lowest_at_once, {"ours": OFFLOAD}),
    "grating-c24": Claim(APPLICATIONS,
        _pair(51, "latency of RAG against HF, searches included, the decoder with a head on each layer"),
        lambda rag, ours=OURS: values.application(rag, (DEEP,), ours), _UNPRUNED),
    "grating-c25": Claim(APPLICATIONS,
        _pair(31, "latency of RAG against HF, searches included, the decoder with a head on the last layer"),
        lambda rag, ours=OURS: values.application(rag, (BASE,), ours), _UNPRUNED),
    "grating-c26": Claim(APPLICATIONS,
        Untested(f"of the process that ranks {_RATIO}; the paper's also has a database and an embedder")),
    "grating-c27": Claim(MEMORY,
        _cut(92.3, "mean over the time of ranking 20 x 500 against HF, of anonymous memory the peak"),
        partial(values.memory_saved, method=OURS, column="mean_mb"), {"method": OFFLOAD}),
    "grating-c28": Claim(APPLICATIONS,
        _lost("Precision@10 in RAG, both decoders"), values.most_lost),
    "grating-c29": Claim(APPLICATIONS, Untested(_AGENTS)),
    "grating-c30": Claim(APPLICATIONS, Untested(_AGENTS)),
    "grating-c31": Claim(APPLICATIONS, Untested(_AGENTS)),
    "grating-c32": Claim(MEMORY, _cut(63.0, "peak of an action's ranking, 20 x 128, against HF"),
        partial(values.memory_saved, method=OURS, tokens=128), {"method": OFFLOAD}),
    "grating-c33": Claim(APPLICATIONS,
        _pair(12, "end-to-end latency of long contexts against HF's selection, the decoder that saves most, the 4B "
              "model's reading by its parameters"),
        lambda context, ours=OURS: values.application(context, ours=ours), _UNPRUNED),
    "grating-c34": Claim(APPLICATIONS,
        Rule("saved, end-to-end latency of long-context selection against no reranker, pydocs-reranker, the 4B model's "
             "reading by its parameters", "percent", _part(57.3), AtLeast(10), -5.0, FIRST),
        values.read_less, {"ours": FIRST}),
    "grating-c35": Claim(APPLICATIONS,
        Untested("needs a language model that answers from long texts: the small one here answered so few right that "
                 "606 questions would not have decided")),
    "grating-c36": Claim(MEMORY,
        Rule("(resident, anonymous) peak memory of HF less GRATING's, 20 x 500", "GiB", Each(_near(1), Above(0)),
             Each(AtLeast(0.3), None), (0.1, 0.1), OFFLOAD),
        partial(values.peak_less, method=HF, less=OURS, unit=2**30), {"less": OFFLOAD}),
    "grating-c37": Claim(LATENCY,
        _pair(49, "latency of 60 x 128 by pruning in one batch, weights in memory, three recorded pools of "
              "pydocs-reranker-deep, K = 10, lower threshold", *_ITSELF),
        partial(values.ablation_saved, method=ONE_BATCH)),
    "grating-c38": Claim(MEMORY,
        Rule("of the baseline's peak memory that one batch of all 60 candidates adds", "percent", _near(44.8),
             AtLeast(5), 0.0, _NONE, 0.0),
        partial(values.memory_added, method=ONE_BATCH)),
    "grating-c39": Claim(MEMORY,
        Rule("peak memory that one batch of 60 candidates adds to the baseline's", "MB", _near(473),
             Near(473, factor=3), 60.0, _NONE, 0.0),
        lambda memory: values.peak_less(memory, ONE_BATCH, HF)[0]),
    "grating-c40": Claim(MEMORY,
        Rule("above the baseline's peak memory, (one batch, chunks)", "percent",
             Both(Each(None, _near(7.2)), Less(0, 1, Above(0))),
             Both(Each(Above(0), None), Less(0, 1, AtLeast(0), times=2)), (40.0, 35.0), "no chunks"),
        values.overheads, {"chunks": ONE_BATCH}),
    "grating-c41": Claim(MEMORY, _cut(57.8, "peak of the ablation's baseline, by all up to the sliding window"),
        partial(values.memory_saved, method=WINDOW), {"method": OFFLOAD}),
    "grating-c42": Claim(LATENCY,
        _no_penalty("sliding window adds after pruning, 60 x 128 (81 ms are 0.4 to 0.6 percent of what the paper's "
                    "numbers imply)", 15.0),
        lambda latency: values.latency_added(latency, WINDOW, CHUNKS)),
    "grating-c43": Claim(MEMORY,
        Rule("peak memory with all techniques, 60 candidates of 500 tokens", "MiB", AtMost(271), AtMost(271 * _FACTOR),
             1184.0, "all but the cache"),
        partial(values.peak_mib, method=CACHE), {"method": WINDOW}),
    "grating-c44": Claim(LATENCY, _no_penalty("embedding cache adds once warm, 60 x 128", 12.0),
        lambda latency: values.latency_added(latency, CACHE, WINDOW)),
    "grating-c45": Claim(MEMORY, _cut(78.4, "peak of the ablation's baseline, by all techniques"),
        partial(values.memory_saved, method=CACHE), {"method": OFFLOAD}),
    "grating-c46": Claim(LATENCY, _pair(48.5, "latency of 60 x 128 by all techniques, as c37", *_ITSELF),
        partial(values.ablation_saved, method=CACHE)),
    "grating-c47": Claim(LATENCY,
        Rule("latency that the sliding window adds to weights in memory, 20 x 128, (without pruning, after pruning)",
             "percent", All(AtMost(1)), Each(AtMost(5), None), (20.0, 30.0), "weights in memory", (0.0, 0.0)),
        lambda latency: tuple(values.latency_added(latency, WHOLE_LAYERS, IN_MEMORY, rule) for rule in ("", LOW))),
    "grating-c48": Claim(MEMORY,
        Rule("(resident, anonymous) peak memory of HF over GRATING's, 20 x 500", "x", Each(_near(11.45), Above(1)),
             Each(Above(2), None), (1.1, 1.1), OFFLOAD),
        partial(values.peak_ratio, method=HF), {"under": OFFLOAD},
        headline="GRATING: memory of transformers over its own, resident and anonymous"),
    "grating-c49": Claim(MEMORY,
        Rule("the embedding table's part of two layers and itself, from the shape in 16 bits", "percent",
             Both(Above(83), AtMost(84)), Above(50), 30.0, "all 28 layers in memory"),
        values.embedding_share, {"layers": 28}, kind="analytic"),
    "grating-c50": Claim(MEMORY,
        Rule("of the vocabulary that 20 documents of 512 tokens touch at most, from the shape", "percent",
             Near(6.75, within=0.005), AtMost(10), 34.0, "the whole table in memory", 100.0),
        values.vocabulary_share, kind="analytic"),
    "grating-c51": Claim(VERDICTS,
        Untested("it is of Qwen3-4B-Instruct, trained, which is not here, and the paper shows no number")),
    "grating-c52": Claim(VERDICTS,
        Untested("int8 weights gained nothing here, as a layer had to be multiplied out, and were removed")),
}  # fmt: skip

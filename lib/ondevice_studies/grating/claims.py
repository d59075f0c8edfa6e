"""How GRATING's claims get their values. Their rules are rows of data/paper/claims.csv.

Two rerankers stand for the paper's five: `smollm2-reranker`, 30 layers, for the decoders, `minilm-reranker` for the
encoder. No decoder here was trained with a head on each layer, as MiniCPM was. Their decisions drive the full shape of
Qwen3-Reranker-0.6B with random weights on a CPU, whose seconds and memory are judged; int8 and GPUs are left out. A
saving of the microbenchmarks is judged as a pair with the precision that it costs (c01, c12 to c14, c37, c46), on pools
of `notes and pages`: see `scoring`, where that was settled.
RAG and long contexts have no validation pools: the paper's rule is calibrated on half of their pools, for Precision@K
within a point, and judged on the other half, in twelve halvings.
Memory is peak growth of resident pages over the process after its imports, in 16 bits, 20 candidates of 500 tokens.
The paper does not say which memory it counts. Resident pages include the weights that transformers maps, which a GPU
would hold, too; anonymous memory, which no system can drop, stands beside, and unless all of its range says the same a
claim is a trend at most. Ends of memory are a range of three runs.
Where the paper gives a size, `reproduced` allows a factor of 1.5 on it; for a reduction, on what is saved and on what
is left. More than that is `trend`, as less is.
"""

from __future__ import annotations

from functools import partial

from ondevice.evidence import Judged, judged, read_claims
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
from ondevice_studies.grating.study import FIRST, LOW, UNPRUNED

VALUES: dict[str, Judged] = {
    "grating-c01": judged(partial(values.largest, against=OFFLOAD), ours=UNPRUNED),
    "grating-c03": judged(
        lambda cells, fixed, at_once=False: values.loss_and_work(values.of_paper(cells), fixed if at_once else None),
        at_once=True,
    ),
    "grating-c04": judged(values.least_saved, ours=UNPRUNED),
    "grating-c08": judged(partial(values.share_of_stage, column="latency_ms"), index=1),
    "grating-c09": judged(partial(values.share_of_stage, column="peak_mb"), index=1),
    "grating-c10": judged(values.over_embedder),
    "grating-c11": judged(values.settled),
    "grating-c12": judged(partial(values.largest, against=HF, k=1), ours=UNPRUNED),
    "grating-c13": judged(partial(values.largest, against=OFFLOAD, k=1), ours=UNPRUNED),
    "grating-c14": judged(partial(values.hardest, k=10), ours=UNPRUNED),
    "grating-c15": judged(values.fastest_share, ours=UNPRUNED),
    "grating-c16": judged(values.higher_threshold, ours=UNPRUNED),
    "grating-c19": judged(values.trade_off, ours=False),
    "grating-c21": judged(partial(values.peak_ratio, method=OFFLOAD)),
    "grating-c23": judged(values.lowest_at_once, ours=OFFLOAD),
    "grating-c25": judged(lambda rag, ours=OURS: values.application(rag, ours), ours=UNPRUNED),
    "grating-c27": judged(partial(values.memory_saved, method=OURS, column="mean_mb"), method=OFFLOAD),
    "grating-c28": judged(
        lambda rag, fixed_rag, at_once=False: values.loss_and_work(rag, fixed_rag if at_once else None), at_once=True
    ),
    "grating-c32": judged(partial(values.memory_saved, method=OURS, tokens=128), method=OFFLOAD),
    "grating-c33": judged(lambda context, ours=OURS: values.application(context, ours), ours=UNPRUNED),
    "grating-c34": judged(values.read_less, ours=FIRST),
    "grating-c36": judged(partial(values.peak_less, method=HF, less=OURS, unit=2**30), less=OFFLOAD),
    "grating-c37": judged(partial(values.ablation_saved, method=ONE_BATCH)),
    "grating-c38": judged(partial(values.added_to_each, method=ONE_BATCH, percent=True)),
    "grating-c39": judged(partial(values.added_to_each, method=ONE_BATCH, percent=False)),
    "grating-c40": judged(values.overheads, chunks=ONE_BATCH),
    "grating-c41": judged(partial(values.memory_saved, method=WINDOW), method=OFFLOAD),
    "grating-c42": judged(lambda latency: values.latency_added(latency, WINDOW, CHUNKS)),
    "grating-c43": judged(partial(values.peak_mib, method=CACHE), method=WINDOW),
    "grating-c44": judged(lambda latency: values.latency_added(latency, CACHE, WINDOW)),
    "grating-c45": judged(partial(values.memory_saved, method=CACHE), method=OFFLOAD),
    "grating-c46": judged(partial(values.ablation_saved, method=CACHE)),
    "grating-c47": judged(
        lambda latency: tuple(values.latency_added(latency, WHOLE_LAYERS, IN_MEMORY, rule) for rule in ("", LOW))
    ),
    "grating-c48": judged(partial(values.peak_ratio, method=HF), under=OFFLOAD),
    "grating-c49": judged(values.embedding_share, layers=28),
    "grating-c50": judged(values.vocabulary_share),
}

CLAIMS = read_claims("grating", VALUES)

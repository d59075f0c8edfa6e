"""How DIAA's claims get their values. Their rules are rows of data/paper/claims.csv.

SmolLM2-135M-Instruct stands for the paper's models, on Spec-Bench's requests. What a draft is worth depends on what a
pass over n rows costs, so a speed is judged in the paper's regime: the recorded passes are priced with the T(n)/T(1)
that the paper's own numbers imply for its 3B and for its 1B (`regimes.implied`), and the kind is simulated. Speeds in
measured regimes stand beside them in the notebook and have no verdict. Baselines are those of the paper's that are
recorded on all requests: vanilla, SAM-D and TR. An average is the plain mean over the tasks. Where the paper gives a
size, `reproduced` allows 15 percent on it, unless the rule says otherwise. Most nulls are the value with transformers'
prompt lookup in DIAA's place ("prompt lookup").
"""

from __future__ import annotations

from functools import partial

from ondevice.evidence import Judged, judged, read_claims
from ondevice_studies.diaa import study
from ondevice_studies.diaa.study import LOOKUP, OURS, STALE, VANILLA

# Indices of the paper's models in `study.SIZES`
_3B = 0
_1B = 1

VALUES: dict[str, Judged] = {
    "diaa-c02": judged(partial(study.goodput_lead, size=_3B), ours=LOOKUP),
    "diaa-c03": judged(partial(study.goodput_lead, size=_1B), ours=LOOKUP),
    "diaa-c05": judged(partial(study.latency_lead, size=_3B), ours=LOOKUP),
    "diaa-c06": judged(partial(study.latency_lead, size=_1B), ours=LOOKUP),
    "diaa-c07": judged(study.first_or_second, ours=LOOKUP),
    "diaa-c08": judged(study.lead_on_rag, searcher=LOOKUP),
    "diaa-c10": judged(study.relative_spread, ours=VANILLA),
    "diaa-c11": judged(study.skipping_speedups, methods=(VANILLA,)),
    "diaa-c12": judged(partial(study.average_speedup, size=_3B), ours=LOOKUP),
    "diaa-c14": judged(partial(study.average_speedup, size=_1B), ours=LOOKUP),
    "diaa-c15": judged(partial(study.extreme_speedups, methods=("TR", "SAM-D")), methods=(LOOKUP,)),
    "diaa-c16": judged(partial(study.least_and_mean, pairs=[(OURS, "cold")]), pairs=[(OURS, OURS)]),
    "diaa-c17": judged(partial(study.least_and_mean, pairs=[("cold", "static 16")]), pairs=[(OURS, OURS)]),
    "diaa-c18": judged(partial(study.least_and_mean, pairs=[(STALE, OURS)]), pairs=[(OURS, OURS)]),
    "diaa-c19": judged(
        partial(
            study.least_and_mean, pairs=[(OURS, "cold"), (OURS, "static 16"), (OURS, "static 16, cold"), (STALE, OURS)]
        ),
        pairs=[(OURS, OURS)],
    ),
    "diaa-c20": judged(partial(study.table_sizes, vocabulary=128256), id_bytes=4),
    "diaa-c21": judged(partial(study.table_sizes, vocabulary=32000), id_bytes=4),
    "diaa-c22": judged(study.draft_model_gb, column="tables_gb"),
    "diaa-c23": judged(study.sizes_ahead, pairs=study.HALVED),
    "diaa-c24": judged(study.cells_ahead, pairs=study.HALVED),
    "diaa-c25": judged(study.best_size, names=study.STATIC),
    "diaa-c26": judged(study.relative_range, names=(*study.WARMED, "cold")),
    "diaa-c27": judged(partial(study.percent_of_time, parts=["verify_s"]), method=VANILLA),
    "diaa-c28": judged(partial(study.percent_of_time, parts=["draft_s"]), method=LOOKUP),
    "diaa-c29": judged(partial(study.percent_of_time, parts=["observe_s"]), method=LOOKUP),
    "diaa-c30": judged(study.differing, weights="4bit"),
    "diaa-c31": judged(study.greatest_percent, column="draft_percent"),
    "diaa-c32": judged(study.confidence_rank_correlation, by="depth"),
}

CLAIMS = read_claims("diaa", VALUES)

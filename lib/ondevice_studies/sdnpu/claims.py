"""How sd.npu's claims get their values. Their rules are rows of data/paper/claims.csv.

The paper's rules are judged. SmolLM2-135M on Spec-Bench's questions stands for the paper's models and tasks, and static
graphs on this CPU, of the model in 4 bits, for a phone's. No phone is measured, and no latency on one is judged: a
model of time that is fitted to the paper's figures and tables misses its own Table 3 by more than a quarter
(`ondevice_papers.sdnpu.npu`). Where the paper gives a size, `reproduced` allows 15 percent on it, unless the rule says
otherwise. A null is what a trivial method gets in sd.npu's place: SAM or PLD alone,
naive switching, graphs that all take as long.
"""

from __future__ import annotations

from functools import partial

from ondevice.evidence import Judged, judged, read_claims
from ondevice_studies.sdnpu import values
from ondevice_studies.sdnpu.printed import flat, throughput_loss

VALUES: dict[str, Judged] = {
    "sdnpu-c13": judged(partial(values.speedups, other="CPU vanilla", ours="CPU-SAM"), ours="CPU vanilla"),
    "sdnpu-c28": judged(values.memory_added, ours="NPU-SAM"),
    "sdnpu-c29": judged(values.memory_ratio, ours="NPU-SAM"),
    "sdnpu-c30": judged(values.weights_gb, bits=8),
    "sdnpu-c31": judged(partial(values.weights_gb, column="twice_gb"), column="weights_gb"),
    "sdnpu-c32": judged(values.draft_models_gb, bits=8),
    "sdnpu-c35": judged(values.first_token, ours="NPU +G naive"),
    "sdnpu-c36": judged(values.calibration_cost),
    "sdnpu-c37": judged(partial(values.step_ms, arm="sd.npu", columns=("draft_s", "observe_s")), arm="NPU-SAM"),
    "sdnpu-c38": judged(values.switching_gains, greedy="+G naive"),
    "sdnpu-c39": judged(values.switching_saved, greedy="+G naive"),
    "sdnpu-c40": judged(values.over_sam, ours="NPU-SAM +G"),
    "sdnpu-c41": judged(partial(values.accepted_gain, base="PLD"), part=""),
    "sdnpu-c42": judged(partial(values.accepted_gain, base="SAM"), part=""),
    "sdnpu-c43": judged(values.identical, plain=True),
    "sdnpu-c49": judged(values.exposed, way="naive"),
    "sdnpu-c50": judged(values.similarities, shuffled=True),
    "sdnpu-c51": judged(values.similarities, shuffled=True),
    "sdnpu-c52": judged(values.similarities, shuffled=True),
    "sdnpu-c53": judged(values.near_context, column="other"),
    "sdnpu-c54": judged(values.overlap_with_context),
    "sdnpu-c56": judged(partial(values.by_lines, values.decoding), lines=(flat,)),
    "sdnpu-c57": judged(values.size_correlations, flat=True),
    "sdnpu-c58": judged(values.row_alone, flat=True),
    "sdnpu-c59": judged(partial(values.shorter_drafts, method="PLD", limit=8), plain=True),
    "sdnpu-c60": judged(partial(values.by_lines, throughput_loss), lines=(flat,)),
    "sdnpu-c61": judged(partial(values.shorter_drafts, method="SAM", limit=32), plain=True),
    "sdnpu-c62": judged(values.reusable, column="elsewhere"),
    "sdnpu-c63": judged(partial(values.step_ms, arm="NPU-SAM", columns=("draft_s",)), arm="NPU vanilla"),
    "sdnpu-c65": judged(values.agreement, by_schedule=True),
}

CLAIMS = read_claims("sdnpu", VALUES)

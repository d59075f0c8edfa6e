"""How DRAGON's claims get their values. Their rules are rows of data/paper/claims.csv.

What is judged is the system that runs: 512 bytes a distribution, filled in by the receiver. SmolLM2 stands for
Qwen2.5-1.5B and for OPT-1.3B. Latency is the whole mix's of questions, by who holds the answer, a
fourth each. Where the paper gives a size, `reproduced` allows a factor of 1.5 on it, unless the rule says otherwise. A
null is what a trivial method gets in DRAGON's place, by the same function: the side with the larger weight alone (a
router, where answers count), the cloud alone or the device alone, a side drawn at random, another configuration, a
formula without one of its terms.

Bounds are those of the runs before there were records; data/paper/rules.lock.csv says what changed since, and why.
c01 is at 16 documents for DRAGON and baseline alike, so it does not repeat c02 or c03.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from ondevice.corpus.prompts import pick
from ondevice.evidence import Judged, judged, read_claims
from ondevice_papers.dragon import overhead
from ondevice_studies.dragon import printed, values
from ondevice_studies.dragon.analysis import ACCEPTED, REJECTED
from ondevice_studies.dragon.answers import ROUTER
from ondevice_studies.dragon.language_modelling import CLOUD_OUTPUT, UNCUT
from ondevice_studies.dragon.pair import CRCG, SW, TW

_HALF_A_BILLION = (24, 896, 4864, 128, overhead.QWEN_VOCABULARY)  # Qwen2.5-0.5B's shape, as `overhead.QWEN_SHAPE`

VALUES: dict[str, Judged] = {
    "dragon-c01": judged(values.gain_at_most_documents, ours=CLOUD_OUTPUT),
    "dragon-c02": judged(values.gain_at_any_count, ours=CLOUD_OUTPUT),
    "dragon-c04": judged(values.share_not_worse, ours=CLOUD_OUTPUT),
    "dragon-c05": judged(values.gap_to_the_best, ours=CLOUD_OUTPUT),
    "dragon-c06": judged(values.one_side_alone, ours=CLOUD_OUTPUT),
    "dragon-c07": judged(values.drcg_saturates, method=UNCUT),
    "dragon-c08": judged(values.drcg_at_fewest_documents, ours=CLOUD_OUTPUT),
    "dragon-c09": judged(values.variant_over_ours, variant=CLOUD_OUTPUT),
    "dragon-c10": judged(partial(values.saved, baseline=SW), ours=ROUTER),
    "dragon-c11": judged(partial(values.saved, baseline=TW), ours=ROUTER),
    "dragon-c12": judged(values.growth_with_delay, ours=ROUTER),
    "dragon-c13": judged(partial(values.grown_with_delay, methods=(TW, SW), change=np.divide), methods=(CRCG, CRCG)),
    "dragon-c14": judged(partial(values.grown_with_delay, methods=(SW, TW), change=np.subtract), methods=(CRCG, CRCG)),
    "dragon-c16": judged(values.above_the_device, ours=ROUTER),
    "dragon-c17": judged(values.first_token_over_the_device, overlapped=False),
    "dragon-c21": judged(values.opt_bytes_over_qwens, heads_that_share=1),
    "dragon-c22": judged(partial(values.kv_megabytes, model=printed.OPT), model=printed.QWEN),
    "dragon-c23": judged(partial(values.kv_megabytes, model=printed.QWEN), model=printed.OPT),
    "dragon-c26": judged(values.schedule_over_the_best, ours="Device"),
    "dragon-c27": judged(values.saved_over_device, ours="Random"),
    "dragon-c28": judged(values.at_no_delay, ours="Device"),
    "dragon-c29": judged(values.saved_where_acceptance_changes, ours="Random"),
    "dragon-c30": judged(values.exchanged_on_the_cloud),
    "dragon-c31": judged(
        values.faster_sides_gain, difference=lambda costs, local, remote: (local - remote) * costs.round_trip
    ),
    "dragon-c32": judged(
        values.acceptance_moves_away, difference=lambda costs, local, remote: costs.decode_local - costs.decode_remote
    ),
    "dragon-c33": judged(values.least_p_value, ours="drafts"),
    "dragon-c34": judged(values.overlap, expected_acceptance=lambda p, q, eta: float(p @ q)),
    "dragon-c35": judged(values.largest_speedup, speedup=lambda costs, acceptance: 1.0),
    "dragon-c36": judged(values.speedup_of_the_slower, speedup=lambda costs, acceptance: 1.0),
    "dragon-c37": judged(values.speedup_grows_with_the_trip, speedup=lambda costs, acceptance: 1.0),
    "dragon-c38": judged(values.speedup_grows_with_acceptance, speedup=lambda costs, acceptance: 1.0),
    "dragon-c39": judged(partial(values.steady, case=ACCEPTED), case=REJECTED),
    "dragon-c40": judged(partial(values.steady, case=REJECTED), case=ACCEPTED),
    "dragon-c41": judged(values.worst_over_token_wise, accepted=1.0),
    "dragon-c42": judged(values.operations, resamples=0),
    "dragon-c43": judged(values.aggregation_time, step="mixture"),
    "dragon-c44": judged(values.decode_macs, shape=_HALF_A_BILLION),
    "dragon-c45": judged(values.distribution_sizes, sent=False),
    "dragon-c46": judged(values.sending_time, size=4 * overhead.QWEN_VOCABULARY),
    "dragon-c47": judged(values.acceptance_by_word, function_word=lambda word: pick(word, "dragon words", 2) == 0),
}

CLAIMS = read_claims("dragon", VALUES)

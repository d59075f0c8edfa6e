"""Claims of DiSCo and sd.npu on tables that are wrong on purpose: the values follow the tables, and the rules say no.

DiSCo's tables are simulations with another policy, prices or times, sd.npu's are records of which a column is changed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from ondevice import assets, evidence, models
from ondevice.evidence import Rule, derived
from ondevice_papers.disco import costs, dispatch, quality
from ondevice_papers.disco.distributions import DEVICES
from ondevice_papers.disco.migration import Migration
from ondevice_papers.disco.race import play
from ondevice_studies.claims import CLAIMS
from ondevice_studies.disco import record, traces
from ondevice_studies.disco import study as disco
from ondevice_studies.disco.claims import PLANNED, UNEVEN
from ondevice_studies.sdnpu import printed, spec_bench, study

LENGTHS = traces.lengths()
MACHINE = evidence.machines("sdnpu", "curves")[0]


@cache
def sweep(name):
    """The settings with another policy in DiSCo's place."""
    policies = disco.policies(LENGTHS)

    def instead(side, server, device, b):
        made = policies(side, server, device, b)
        wrong = dispatch.stochastic(LENGTHS, side, 0.0) if name == "unconstrained" else made[name]
        return made | {"DiSCo": replace(wrong, constrained=side, budget=b)}

    services, devices, budgets = traces.PAPER_SERVICES, DEVICES.values(), [0.1, 0.3, 0.5, 0.9]
    return disco.sweep(services, devices, budgets, instead, play, LENGTHS, (4, 400), 0)


@cache
def bill(**options):
    policies = disco.policies(LENGTHS, names=["DiSCo"])
    return disco.bill(["Command", "GPT"], LENGTHS, [0.5, 0.9], policies, play, 300, 0, "anyscale-70b", **options)


def swapped(source, target, *rest, **more):
    """Prices the wrong way round."""
    return Migration(target, source, *rest, **more)


def at_once(source, target, remaining, seconds, **more):
    """Hand-overs that are planned to take no time."""
    return Migration(source, target, remaining, lambda tokens: 0.0 * seconds(tokens), **more)


def never_right_after_a_seam():
    handed = evidence.load("disco", "quality")
    ends = handed["handover"].isin([0, quality.LIMIT])
    spoiled = evidence.born(handed.assign(right=handed["right"] * ends), "recorded")
    return {"bound": quality.bound(spoiled, "right", record.DEVICE)}


def slow_dispatch():
    table = disco.medians(evidence.times("disco", "policy_times"))
    return {"policy_times": table.assign(**{column: 400.0 * table[column] for column in ("ms", "low", "high")})}


def loads(**changed):
    table = evidence.times("disco", "cold_start")
    return {"loads": derived(table[table["model"].str.startswith("random")].assign(**changed), table)}


def quadratic(architecture, length, phase):
    """Operations that grow with the length in decode, and do not in prefill."""
    factor = length if phase == "decode" else 1 / length
    return {name: operations * factor for name, operations in costs.components(architecture, length, phase).items()}


def slow_servers():
    return {"between_tokens": {name: 40 * traces.measured(name, "tbt_s").samples for name in traces.series_names()}}


def foretold():
    errors = assets.derived_trace("prediction_errors")
    return {"errors": evidence.born(errors.assign(mape_percent=errors["mape_percent"] / 10), "replayed")}


DISCO = {  # by name the claims' numbers, and the tables of their values
    "the unconstrained side alone": ((1, 2), lambda: {"sweep": sweep("unconstrained")}),
    "random dispatch": ((6, 7, 8, 9, 10), lambda: {"sweep": sweep("Stoch")}),
    "swapped prices": ((3, 4, 5), lambda: {"bill": bill(migration=swapped)}),
    "hand-overs at once": ((14,), lambda: {"bills": {PLANNED: bill(migration=at_once)}}),
    "late targets": ((17,), lambda: {"bills": {PLANNED: bill(slower=6.0)}}),
    "later targets than planned": ((16,), lambda: {"bills": {UNEVEN: bill(slower=3.0)}}),
    "slow servers": ((22,), slow_servers),
    "wrong seams": ((27, 30, 31), never_right_after_a_seam),
    "slow dispatch": (tuple(range(33, 39)), slow_dispatch),
    "equal loads": ((39,), lambda: loads(load_s=lambda table: table["load_s"].mean() + 0 * table["load_s"])),
    "slow first tokens": ((40,), lambda: loads(ttft_s=lambda table: 20 * table["ttft_s"])),
    "foretold times": ((43,), foretold),
    "quadratic costs": ((44, 45), lambda: {"components": quadratic}),
}


@pytest.mark.parametrize("name", DISCO)
def test_what_is_wrong_of_disco_is_contradicted(name):
    numbers, make = DISCO[name]
    tables = make()
    rows = {number: CLAIMS["disco"][f"disco-c{number:02d}"] for number in numbers}
    verdicts = {number: row.rule.verdict(row.value(**tables)) for number, row in rows.items()}
    assert set(verdicts.values()) == {"contradicted"}, verdicts


def of_smollm2(name):
    return evidence.load("sdnpu", f"smollm2-{name}")


@cache
def timed(name):
    return evidence.load("sdnpu", f"{name}.{MACHINE}")


def changed(table, **columns):
    return derived(table.assign(**columns), table)


def whole(scale):
    """Recorded requests of which some arms take another time."""
    table = timed("whole")
    table = table[~table["cold"]]
    factor = table["arm"].map(scale).fillna(1.0)
    return changed(table, **{part: table[part] * factor for part in ("prefill_s", "decode_s")})


def switching_and_drafts_cost_time():
    """Each claim reads other arms: SAM on the CPU, greedy switching alone, sd.npu."""
    table = whole({"CPU-SAM": 0.2, "NPU +G": 9.0, "sd.npu": 9.0})
    summaries = table[table["task"] == "summarization"]
    requests, summarized = study.per_token(table), study.per_token(summaries)
    return {"requests": requests, "summarized": summarized, "prefill": study.by_prompt(summaries, "prefill_s")}


def nothing_is_exposed():
    """Synchronous switching takes what keeping both takes."""
    table = timed("switching")
    table = table[(table["tokens"] == 768) & ~table["cold"] & (table["memory"] == 1.0)]
    both = table[table["way"] == "keep both"].set_index("round")["total_s"]
    total = table["total_s"].mask(table["way"] == "synchronous", table["round"].map(both))
    rest = study.rest_seconds(whole({})[lambda t: t["task"] == "summarization"])
    return {"switching": changed(table, total_s=total), "rest": rest}


def drafting_takes_long():
    costs = timed("costs").assign(seconds=99.0, low=98.0, high=100.0)
    return {"whole": changed(whole({}), draft_s=100.0, observe_s=100.0), "calibration": derived(costs, "recorded")}


def memory_is_wasted():
    table = timed("memory")
    return {"peaks": changed(table, peak_mb=table["peak_mb"].where(table["arm"] != "sd.npu", 9000.0))}


def drafts_are_rejected():
    """Drafts with calibration or reuse give one token per pass; no answer is vanilla's."""
    answers, _ = spec_bench.load(models.SMOLLM2)
    passes = answers["passes"].mask(answers["method"].str.contains("+", regex=False), answers["decoded"])
    return {"rates": study.accepted(changed(answers, passes=passes)), "answers": changed(answers, identical=False)}


def answers_are_unlike():
    cosines, contexts = map(of_smollm2, ("cosines", "contexts"))
    wrong = cosines["pair"].map({"task": 0.1, "group": 0.5, "across": 0.9})
    return {"cosines": changed(cosines, cosine=wrong), "contexts": changed(contexts, cosine=0.1, overlap=0.9)}


def forwards_rise_faster_than_their_rows():
    table = timed("curves")
    table = table[table["part"] == "static"].sort_values("rows")
    return {"static": changed(table, **dict.fromkeys(("seconds", "low", "high"), table["rows"] ** 1.01))}


def drafts_are_long():
    _, passes = spec_bench.load(models.SMOLLM2)
    return {"summaries": changed(passes[passes["task"] == "summarization"], drafted=63)}


SDNPU = [  # each contradicts every claim whose value is made of such tables
    switching_and_drafts_cost_time, nothing_is_exposed, drafting_takes_long, memory_is_wasted, drafts_are_rejected,
    answers_are_unlike, forwards_rise_faster_than_their_rows, drafts_are_long,
    lambda: {"rejections": changed(of_smollm2("rejections"), case="redundant")},
    lambda: {"weights": 0.2 * printed.weights()},
    lambda: {"line": lambda rows: 0 * rows + 5000.0},
    lambda: {"by_schedule": [True, False], "by_partition": [True, True]},
]  # fmt: skip


def test_what_is_wrong_of_sdnpu_is_contradicted_and_every_rule_is_tried():
    rows, tried = CLAIMS["sdnpu"], set()
    for make in SDNPU:
        tables = make()
        verdicts = {claim: row.rule.verdict(row.values(tables)[0]) for claim, row in rows.items() if row.takes(tables)}
        assert set(verdicts.values()) == {"contradicted"}, verdicts
        tried |= set(verdicts)
    assert tried == {claim for claim, row in rows.items() if isinstance(row.rule, Rule)}

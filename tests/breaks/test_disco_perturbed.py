"""Each of DiSCo's claims on a simulation, record or formula that is wrong on purpose: its rule must contradict it.

Two rules contradict the right simulation already (15, 47): they must be met by what the paper says.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd
import pytest

from ondevice import assets, evidence
from ondevice.evidence import Rule
from ondevice_papers.disco import costs, dispatch, quality
from ondevice_papers.disco.distributions import DEVICES, Device
from ondevice_papers.disco.migration import Migration
from ondevice_papers.disco.race import expected, play
from ondevice_studies.disco import device_probe, record, study, traces
from ondevice_studies.disco.claims import CLAIMS, PLANNED, UNEVEN

LENGTHS, PHONE = traces.lengths(), DEVICES["Pixel 7 Pro, Bloom-560M"]
ALONE = ["DiSCo"]


def instead(name):
    """Another policy in DiSCo's place."""
    policies = study.policies(LENGTHS)

    def of_setting(*setting):
        made = policies(*setting)
        return made | {"DiSCo": made[name]}

    return of_setting


def servers_only(side, server, device, b):
    """Dispatch that ignores the device."""
    return study.policies(LENGTHS)(side, server, device, b) | {"DiSCo": dispatch.server_only(LENGTHS)}


@cache
def sweep(policies):
    return study.sweep(
        traces.PAPER_SERVICES, DEVICES.values(), [0.1, 0.3, 0.5, 0.9], policies, play, LENGTHS, (4, 400), 0
    )


stochastic = instead("Stoch")


def users():
    table = study.users(["together-70b"], PHONE, LENGTHS, [0.3], servers_only, play, [300, 15], (3, 300), 0)
    means = table.pivot_table(
        index=["constrained", "user", "service", "budget"], columns=["policy", "run"], values="mean_s"
    )
    return {"DiSCo": -(1 - means["DiSCo"] / means["Stoch"]).abs()}


@cache
def bill(**options):
    return study.bill(
        ["Command", "GPT"],
        LENGTHS,
        [0.5, 0.9],
        study.policies(LENGTHS, names=ALONE),
        play,
        300,
        0,
        "anyscale-70b",
        **options,
    )


def swapped(source, target, *rest, **more):
    """Prices the wrong way round."""
    return Migration(target, source, *rest, **more)


def at_once(source, target, remaining, seconds, **more):
    """Hand-overs that are planned to take no time."""
    return Migration(source, target, remaining, lambda tokens: 0.0 * seconds(tokens), **more)


def tail_bound(phone, play=play):
    return study.beyond_the_tail(["LLaMA"], LENGTHS, [0.3], phone, study.policies(LENGTHS), play, 4000, 0)


def twice_as_late(policy, drawn, phone):
    """A race on a phone that takes twice the time that is known of it."""
    return play(policy, drawn, Device("slow", phone.prefill_rate / 2, phone.decode_rate, 2 * phone.overhead))


def flipped_threshold():
    server = traces.server("LLaMA")
    return max(
        abs(expected(dispatch.server_constrained(LENGTHS, 1 - b), LENGTHS, server, PHONE).use - b) for b in (0.1, 0.9)
    )


def device_times():
    times = evidence.times("disco", "device")
    return evidence.derived(device_probe.requests(times).query("model == @record.DEVICE"), times)


def faster_on_long_prompts():
    rows = device_times().query("part == 'alpaca'")
    return evidence.derived(rows.assign(length=rows["length"].max() - rows["length"]), rows)


def unsteady():
    same = device_times().query("part == 'same'")["ttft_s"]
    same = same * np.random.default_rng(0).lognormal(0, 1, len(same))
    servers = {name: device_probe.spread(traces.measured(name).samples, "replayed")
               for name in traces.series_names()}  # fmt: skip
    return dict(device_spread=device_probe.spread(same, "recorded"), server_spreads=servers)


def never_right_after_a_seam():
    handed = evidence.load("disco", "quality")
    ends = handed["handover"].isin([0, quality.LIMIT])
    spoiled = evidence.born(handed.assign(right=handed["right"] & ends), "recorded")
    return quality.bound(spoiled, "right", record.DEVICE)


def policy_times(times=400.0):
    table = study.medians(evidence.times("disco", "policy_times"))
    return table.assign(**{column: times * table[column] for column in ("ms", "low", "high")})


def loads(**changed):
    table = evidence.times("disco", "cold_start")
    return evidence.derived(table[table["model"].str.startswith("random")].assign(**changed), table)


def quadratic(architecture, length, phase):
    """Operations that grow with the length in decode, and do not in prefill."""
    factor = length if phase == "decode" else 1 / length
    return {name: operations * factor for name, operations in costs.components(architecture, length, phase).items()}


def small_vocabularies():
    rows = []
    for model, shape in costs.PRINTED.items():
        parts = costs.components(replace(shape, vocabulary=shape.vocabulary // 8), 128, "decode")
        rows += [(model, name, 100 * part / sum(parts.values())) for name, part in parts.items()]
    return pd.DataFrame(rows, columns=["model", "component", "printed"])


def slow_servers():
    return {name: 40 * traces.measured(name, "tbt_s").samples for name in traces.series_names()}


def foretold():
    errors = assets.derived_trace("prediction_errors")
    return evidence.born(errors.assign(mape_percent=errors["mape_percent"] / 10), "replayed")


def p99_near_the_papers():
    paper = np.arange(5) + 6.5
    return study.beside(
        evidence.born(pd.DataFrame({run: paper - 0.5 + run / 10 for run in range(4)}), "simulated"), paper, 2
    )


def of_papers_own_cells():
    paper = study.paper_tail_table()["paper_percent"]
    return study.beside(evidence.born(pd.DataFrame({run: paper + 1 + run for run in range(4)}), "simulated"), paper, 10)


WRONG = {  # by the claim's number, the tables of its value
    1: lambda: dict(sweep=sweep(servers_only)),
    2: lambda: dict(sweep=sweep(servers_only)),
    **dict.fromkeys((3, 4, 5), lambda: dict(bill=bill(migration=swapped))),
    **dict.fromkeys((6, 7, 8, 9, 10), lambda: dict(sweep=sweep(stochastic))),
    12: lambda: dict(sweep=sweep(stochastic), device_name=PHONE.name),
    13: lambda: dict(gains=users()),
    14: lambda: dict(bills={PLANNED: bill(migration=at_once)}),
    16: lambda: dict(bills={UNEVEN: bill(slower=3.0)}),
    17: lambda: dict(bills={PLANNED: bill(slower=6.0)}),
    19: lambda: dict(alpaca=faster_on_long_prompts()),
    20: unsteady,
    22: lambda: dict(between_tokens=slow_servers()),
    **dict.fromkeys((27, 30, 31), lambda: dict(bound=never_right_after_a_seam())),
    **dict.fromkeys(range(33, 39), lambda: dict(policy_times=policy_times())),
    39: lambda: dict(loads=loads(load_s=lambda table: table["load_s"].mean() + 0 * table["load_s"])),
    40: lambda: dict(loads=loads(ttft_s=lambda table: 20 * table["ttft_s"])),
    43: lambda: dict(errors=foretold()),
    **dict.fromkeys((44, 45), lambda: dict(components=quadratic)),
    46: lambda: dict(shares=small_vocabularies()),
    47: lambda: dict(tail_bound=tail_bound(PHONE, twice_as_late)),
    48: lambda: dict(gaps={"as printed": flipped_threshold()}),
}  # fmt: skip
RIGHT = {
    1: of_papers_own_cells,
    15: p99_near_the_papers,
    47: lambda: row(47).value(tail_bound(Device("at once", 1e13, 20.0))),
}


def row(number):
    return CLAIMS[f"disco-c{number:02d}"]


def test_every_rule_has_its_perturbation():
    rules = [claim for claim, row in CLAIMS.items() if isinstance(row.rule, Rule)]
    assert rules == [f"disco-c{number:02d}" for number in sorted({*WRONG, *RIGHT})]


@pytest.mark.parametrize("number", WRONG)
def test_a_rule_contradicts_what_is_wrong_on_purpose(number):
    assert row(number).rule.verdict(row(number).value(**WRONG[number]())) == "contradicted"


@pytest.mark.parametrize("number", RIGHT)
def test_a_rule_that_contradicts_the_simulation_is_met_by_the_papers_numbers(number):
    assert row(number).rule.verdict(RIGHT[number]()) == "reproduced"

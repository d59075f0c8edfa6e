"""Each of DiSCo's rules on a simulation, record or formula that is wrong on purpose: it must contradict it.

Two rules contradict the right simulation already (c15, c47): they must be met by what the paper says.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import numpy as np
import pandas as pd
import pytest

from ondevice import assets, evidence
from ondevice.evidence import Rule
from ondevice_papers.disco import costs, dispatch, quality
from ondevice_papers.disco.distributions import DEVICES, Device
from ondevice_papers.disco.migration import Migration
from ondevice_papers.disco.policy import SIDES
from ondevice_papers.disco.race import expected, play
from ondevice_studies.disco import cold_start, device_probe, record, study, traces
from ondevice_studies.disco.rules import RULES

LENGTHS, PHONE = traces.lengths(), DEVICES["Pixel 7 Pro, Bloom-560M"]
ALONE = ["DiSCo"]


def instead(name):
    """Another policy in DiSCo's place."""
    made = study.policies(LENGTHS)
    return lambda *setting: made(*setting) | {"DiSCo": made(*setting)[name]}


def servers_only(side, server, device, b):
    """Dispatch that ignores the device."""
    return study.policies(LENGTHS)(side, server, device, b) | {"DiSCo": dispatch.server_only(LENGTHS)}


@cache
def sweep(policies):
    return study.sweep(
        ["GPT", "LLaMA", "DeepSeek"], DEVICES.values(), [0.1, 0.3, 0.5, 0.9], policies, play, LENGTHS, (4, 400), 0
    )


stochastic, optimum = instead("Stoch"), instead("mean-optimal")


def cells(policies):
    found = study.tail_cells(sweep(policies)).dropna()
    return found, study.paper_tail_table().set_index(study.CELL).loc[found.index, "paper_percent"]


def over(statistic, value="mean_s", policies=stochastic, **keys):
    table = study.reductions(sweep(policies), value)
    for level, wanted in keys.items():
        table = table[table.index.get_level_values(level) == wanted]
    return study.over_runs(statistic, evidence.born(table, "simulated"))


def c11():
    llama = partial(over, policies=optimum, service="LLaMA", constrained="device", device=PHONE.name)
    return (llama(lambda x: -x.min() / 100, budget=0.1), llama(lambda x: -x[0] / 100, budget=0.5))


def steadiness_of(policies):
    table = sweep(policies)
    table = table[(table["service"] == "DeepSeek") & (table["device"] == PHONE.name)]
    table = table.pivot_table(index=["constrained", "policy", "run"], columns="budget", values="std_s")
    ratio = (table[0.9] / table[0.1]).unstack("run")
    return tuple(evidence.mean(ratio.loc[side, name], "simulated") for side in SIDES for name in ("DiSCo", "Stoch"))


def users():
    table = study.users(["together-70b"], PHONE, LENGTHS, [0.3], servers_only, play, [300, 15], (3, 300), 0)
    means = table.pivot_table(
        index=["constrained", "user", "service", "budget"], columns=["policy", "run"], values="mean_s"
    )
    gain = 1 - means["DiSCo"] / means["Stoch"]
    return tuple(
        study.over_runs(lambda x: float((x > 0).mean()), evidence.born(-gain.loc[side].abs(), "simulated"))
        for side in SIDES
    )


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


def table_3(statistic, **options):
    found = study.buffered(bill(**options), statistic)
    paper = assets.paper_table("disco", "table_03_migration_delay").set_index(["service_trace", "constraint"])
    return study.beside(found, paper.loc[found.index, "mean_delayed_tokens"], 2)


def tail_bound(phone):
    found = study.beyond_the_tail(["LLaMA"], LENGTHS, [0.3], phone, study.policies(LENGTHS), play, 4000, 0)
    return evidence.share(round(4000 * found["over"].max()), 4000, found)


def flipped_threshold():
    server = traces.server("LLaMA")
    return max(
        abs(expected(dispatch.server_constrained(LENGTHS, 1 - b), LENGTHS, server, PHONE).use - b) for b in (0.1, 0.9)
    )


def device_times():
    times = evidence.times("disco", "device")
    return evidence.derived(device_probe.requests(times).query("model == @record.DEVICE"), times)


def shuffled_lengths():
    rows = device_times().query("part == 'lengths'")
    return device_probe.line(np.random.default_rng(0).permutation(rows["length"]), rows["ttft_s"], "recorded")[
        "pearson_r"
    ]


def unsteady():
    same = device_times().query("part == 'same'")["ttft_s"]
    same = same * np.random.default_rng(0).lognormal(0, 1, len(same))
    servers = [device_probe.steadiness(traces.measured(n).samples, "replayed")["spread"] for n in traces.series_names()]
    return device_probe.steadiness(same, "recorded")["spread"], min(servers, key=lambda x: x.value)


def never_right_after_a_seam():
    handed = evidence.load("disco", "quality")
    ends = handed["handover"].isin([0, quality.LIMIT])
    spoiled = evidence.born(handed.assign(right=handed["right"] & ends), "recorded")
    return quality.bound(spoiled, "right", record.DEVICE)


def policy_time(name, n, times=400.0):
    table = study.medians(evidence.times("disco", "policy_times"))
    row = table[(table["by"] == f"{name}, raw lists") & (table["n"] == n)].iloc[0]
    return evidence.Estimate(*(times * row[c] for c in ("ms", "low", "high")), int(row["turns"]), "recorded")


def loads(**changed):
    table = evidence.times("disco", "cold_start")
    return evidence.derived(table[table["model"].str.startswith("random")].assign(**changed), table)


def one_load_time():
    found = cold_start.exponents(loads(load_s=lambda t: t["load_s"].mean() + 0 * t["load_s"]))
    return found["cold"], found["warm"]


def slow_first_token():
    table = loads()
    ratio = 20 * table["ttft_s"] / table["load_s"]
    return tuple(evidence.mean(ratio[table["page_cache"] == cache], table) for cache in ("cold", "warm"))


def quadratic(phase, model):
    def of(n):
        return sum(costs.components(costs.PRINTED[model], n, phase).values()) * (n if phase == "decode" else 1 / n)

    return of(128) / of(32)


def small_vocabularies():
    shares = []
    for shape in costs.PRINTED.values():
        parts = costs.components(replace(shape, vocabulary=shape.vocabulary // 8), 128, "decode")
        shares.append(100 * (parts["embedding"] + parts["output"]) / sum(parts.values()))
    return min(shares), max(shares)


def c07():
    found, paper = cells(stochastic)
    return (study.beside(found, paper, 10)[0], *(study.over_runs(f, found) for f in (np.min, np.max)))


def slowest_server(times):
    return min(1 / np.median(times * traces.measured(name, "tbt_s").samples) for name in traces.series_names())


def foretold():
    errors = assets.derived_trace("prediction_errors").groupby("service")["mape_percent"].min() / 10
    return evidence.share(int((errors >= 20).sum()), len(errors), "replayed")


def p99_near_the_papers():
    paper = np.arange(5) + 6.5
    return study.beside(
        evidence.born(pd.DataFrame({run: paper - 0.5 + run / 10 for run in range(4)}), "simulated"), paper, 2
    )


def of_papers_own_cells():
    paper = study.paper_tail_table()["paper_percent"]
    return study.beside(evidence.born(pd.DataFrame({run: paper + 1 + run for run in range(4)}), "simulated"), paper, 10)


WRONG = {
    "disco-c01": lambda: study.beside(*cells(servers_only), 10),
    "disco-c02": lambda: tuple(over(each, policies=servers_only) for each in (np.min, np.max, np.mean)),
    "disco-c03": lambda: study.savings(bill(migration=swapped)),
    "disco-c04": lambda: study.savings(bill(migration=swapped), "server"),
    "disco-c05": lambda: study.savings(bill(migration=swapped), "device"),
    "disco-c06": lambda: (over(np.max), over(np.max, "p99_s")),
    "disco-c07": c07,
    "disco-c08": lambda: over(np.max, "p99_s", service="GPT"),
    "disco-c09": lambda: tuple(over(partial(np.quantile, q=q), service="GPT") for q in (0.25, 0.75)),
    "disco-c10": lambda: over(np.max, "p99_s", service="LLaMA", constrained="device"),
    "disco-c11": c11,
    "disco-c12": lambda: steadiness_of(stochastic),
    "disco-c13": users,
    "disco-c14": lambda: table_3("mean", migration=at_once),
    "disco-c16": lambda: study.stalled(bill(slower=3.0), "server"),
    "disco-c17": lambda: study.stalled(bill(slower=6.0), "device"),
    "disco-c19": shuffled_lengths,
    "disco-c20": unsteady,
    "disco-c22": lambda: (slowest_server(40.0), 13.9),
    "disco-c27": lambda: quality.extreme(never_right_after_a_seam(), "over_weaker", min),
    "disco-c30": lambda: quality.extreme(never_right_after_a_seam(), "outside", max),
    "disco-c31": lambda: quality.extreme(never_right_after_a_seam(), "over_device", min),
    **{f"disco-c{33 + i}": partial(policy_time, name, n) for i, (name, n) in enumerate(
        (p, n) for p in ("DiSCo-S", "DiSCo-D") for n in (1_000, 10_000, 100_000))},
    "disco-c39": one_load_time,
    "disco-c40": slow_first_token,
    "disco-c43": foretold,
    "disco-c44": lambda: max(quadratic("decode", model) for model in costs.PRINTED),
    "disco-c45": lambda: quadratic("prefill", "BLOOM-1.1B"),
    "disco-c46": small_vocabularies,
    "disco-c47": partial(tail_bound, PHONE),
    "disco-c48": flipped_threshold,
}  # fmt: skip
RIGHT = {
    "disco-c47": partial(tail_bound, Device("at once", 1e13, 20.0)),
    "disco-c01": of_papers_own_cells,
    "disco-c15": p99_near_the_papers,
}  # fmt: skip


def test_every_rule_has_its_perturbation():
    assert sorted({*WRONG, *RIGHT}) == sorted(claim for claim, rule in RULES.items() if isinstance(rule, Rule))


@pytest.mark.parametrize("claim", WRONG)
def test_a_rule_contradicts_what_is_wrong_on_purpose(claim):
    assert RULES[claim].verdict(WRONG[claim]()) == "contradicted"


@pytest.mark.parametrize("claim", RIGHT)
def test_a_rule_that_contradicts_the_simulation_is_met_by_the_papers_numbers(claim):
    assert RULES[claim].verdict(RIGHT[claim]()) == "reproduced"

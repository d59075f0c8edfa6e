"""Each of sd.npu's rules on a record or formula that is wrong on purpose: it must contradict it."""

from __future__ import annotations

from functools import cache

import pandas as pd
import pytest

from ondevice import evidence, models
from ondevice.evidence import Rule, derived
from ondevice_studies.sdnpu import printed, spec_bench, study
from ondevice_studies.sdnpu.claims import CLAIMS

MACHINE = evidence.machines("sdnpu", "curves")[0]


@cache
def timed(name: str) -> pd.DataFrame:
    return evidence.load("sdnpu", f"{name}.{MACHINE}")


def of_smollm2(name: str) -> pd.DataFrame:
    return evidence.load("sdnpu", f"smollm2-{name}")


@cache
def recorded() -> tuple[pd.DataFrame, pd.DataFrame]:
    return spec_bench.load(models.SMOLLM2)


def whole(scale: dict[str, float]):
    """Recorded requests of which some arms take another time."""
    table = timed("whole")
    table = table[~table["cold"]]
    factor = table["arm"].map(scale).fillna(1.0)
    return derived(table.assign(**{part: table[part] * factor for part in ("prefill_s", "decode_s")}), table)


def switching_and_drafts_cost_time():
    """Each claim reads other arms: SAM on the CPU, greedy switching alone, sd.npu."""
    table = whole({"CPU-SAM": 0.2, "NPU +G": 9.0, "sd.npu": 9.0})
    summaries = table[table["task"] == "summarization"]
    return {
        "requests": study.per_token(table),
        "summarized": study.per_token(summaries),
        "prefill": study.by_prompt(summaries, "prefill_s"),
    }


def nothing_is_exposed():
    """Synchronous switching takes what keeping both takes."""
    table = timed("switching")
    table = table[(table["tokens"] == 768) & ~table["cold"] & (table["memory"] == 1.0)]
    both = table[table["way"] == "keep both"].set_index("round")["total_s"]
    synchronous = table["way"] == "synchronous"
    table = derived(table.assign(total_s=table["total_s"].mask(synchronous, table["round"].map(both))), table)
    rest = study.rest_seconds(whole({})[lambda t: t["task"] == "summarization"])
    return {"switching": table, "rest": rest}


def drafting_takes_long():
    table = whole({})
    costs = derived(timed("costs").assign(seconds=99.0, low=98.0, high=100.0), "recorded")
    return {"whole": derived(table.assign(draft_s=100.0, observe_s=100.0), table), "calibration": costs}


def memory_is_wasted():
    table = timed("memory")
    return {"peaks": derived(table.assign(peak_mb=table["peak_mb"].where(table["arm"] != "sd.npu", 9000.0)), table)}


def drafts_are_rejected():
    """Drafts with calibration or reuse give one token per pass; no answer is vanilla's."""
    answers, _ = recorded()
    added = answers["method"].str.contains("+", regex=False)
    wrong = derived(answers.assign(passes=answers["passes"].mask(added, answers["decoded"])), answers)
    return {"rates": study.accepted(wrong), "answers": derived(answers.assign(identical=False), answers)}


def answers_are_unlike():
    cosines, contexts = map(of_smollm2, ("cosines", "contexts"))
    wrong = {"task": 0.1, "group": 0.5, "across": 0.9}
    cosines = derived(cosines.assign(cosine=cosines["pair"].map(wrong)), cosines)
    return {"cosines": cosines, "contexts": derived(contexts.assign(cosine=0.1, overlap=0.9), contexts)}


def static(seconds):
    table = timed("curves")
    table = table[table["part"] == "static"].sort_values("rows")
    wrong = seconds(table["rows"])
    return {"static": derived(table.assign(seconds=wrong, low=wrong, high=wrong), table)}


def drafts_are_long():
    _, passes = recorded()
    table = passes[passes["task"] == "summarization"]
    return {"summaries": derived(table.assign(drafted=63), table)}


def never_reused():
    table = of_smollm2("rejections")
    return {"rejections": derived(table.assign(case="redundant"), table)}


# Tables that are wrong on purpose; each must contradict every claim whose value is made of them.
WRONG = {
    "slow switching": switching_and_drafts_cost_time,
    "nothing exposed": nothing_is_exposed,
    "slow drafting": drafting_takes_long,
    "wasted memory": memory_is_wasted,
    "rejected drafts": drafts_are_rejected,
    "unlike answers": answers_are_unlike,
    "forwards that rise faster than their rows": lambda: static(lambda rows: rows**1.01),
    "long drafts": drafts_are_long,
    "never reused": never_reused,
    "smaller models": lambda: {"weights": 0.2 * printed.weights()},
    "forwards that all take long": lambda: {"line": lambda rows: 0 * rows + 5000.0},
    "Partition answered wrongly": lambda: {"by_schedule": [True, False], "by_partition": [True, True]},
}


def made_of(tables):
    return {claim for claim, row in CLAIMS.items() if row.takes(tables)}


def test_every_rule_is_tried():
    judged = {claim for claim, row in CLAIMS.items() if isinstance(row.rule, Rule)}
    assert set().union(*(made_of(tables()) for tables in WRONG.values())) == judged


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_contradicted(name):
    tables = WRONG[name]()
    verdicts = {claim: CLAIMS[claim].rule.verdict(CLAIMS[claim].values(tables)[0]) for claim in made_of(tables)}
    assert set(verdicts.values()) == {"contradicted"}, verdicts

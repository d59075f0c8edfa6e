"""Each of sd.npu's rules on a record or formula that is wrong on purpose: it must contradict it."""

from __future__ import annotations

from functools import cache

import pandas as pd
import pytest

from ondevice import evidence
from ondevice.evidence import Rule, derived
from ondevice_studies.sdnpu import printed, study
from ondevice_studies.sdnpu.claims import CLAIMS
from ondevice_studies.sdnpu.workbench import BASE

MACHINE = evidence.machines("sdnpu", "curves")[0]
KEYS = ["model", "set", "task", "request", "step"]


NAMED = {"answers": "method", "passes": "method", "rejections": "method"}
NAMED |= {"whole": "arm", "memory": "arm", "costs": "rule"}


@cache
def record(name: str) -> pd.DataFrame:
    table = evidence.load("sdnpu", name)
    column = NAMED.get(name.partition(".")[0])
    return study.of_the_paper(table, column) if column else table


def timed(name: str) -> pd.DataFrame:
    return record(f"{name}.{MACHINE}")


@cache
def tasks() -> pd.DataFrame:
    return record("passes")[lambda table: table["set"] == "tasks"]


def whole(scale: dict[str, float]):
    """Recorded requests of which some arms take another time."""
    table = timed("whole")
    table = table[table["precision"] == "fp32"]
    factor = table["arm"].map(scale).fillna(1.0)
    return derived(table.assign(**{part: table[part] * factor for part in ("prefill_s", "decode_s")}), table)


def switching_and_drafts_cost_time():
    """Each claim reads other arms: SAM on the CPU, greedy switching alone, sd.npu."""
    table = whole({"CPU-SAM": 0.2, "NPU +G": 9.0, "sd.npu": 9.0})
    return {"requests": study.whole_requests(table), "prefill": study.prefills(table)}


def nothing_is_exposed():
    """Synchronous switching takes what keeping both takes."""
    table = timed("switching")
    table = table[(table["model"] == BASE) & (table["precision"] == "fp32") & ~table["cold"] & (table["memory"] == 1.0)]
    both = table[table["way"] == "keep both"].set_index("round")["total_s"]
    synchronous = table["way"] == "synchronous"
    table = derived(table.assign(total_s=table["total_s"].mask(synchronous, table["round"].map(both))), table)
    rest = study.rest_seconds(whole({})[lambda t: (t["model"] == BASE) & (t["task"] == "summary")])
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
    table = tasks().assign(emitted=tasks()["emitted"].where(~tasks()["method"].str.contains("+", regex=False), 1.0))
    answers = record("answers").assign(identical=False)
    return {"rates": study.accepted(derived(table, tasks())), "answers": answers}


def answers_are_unlike():
    cosines, contexts = (record(name)[lambda table: table["model"] == BASE] for name in ("cosines", "contexts"))
    wrong = {"task": 0.1, "group": 0.5, "across": 0.9}
    cosines = derived(cosines.assign(cosine=cosines["pair"].map(wrong)), cosines)
    return {"cosines": cosines, "contexts": derived(contexts.assign(cosine=0.1, overlap=0.9), contexts)}


def static(seconds):
    table = timed("curves")
    table = table[(table["model"] == BASE) & (table["part"] == "static")].sort_values("rows")
    wrong = seconds(table["rows"])
    return {"static": derived(table.assign(seconds=wrong, low=wrong, high=wrong), table)}


def drafts_are_long():
    table = tasks()[(tasks()["model"] == BASE) & (tasks()["task"] == "summary")]
    return {"summaries": derived(table.assign(drafted=63), table)}


def never_reused():
    table = record("rejections")
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

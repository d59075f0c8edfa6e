"""Each of sd.npu's rules on a record, simulation or formula that is wrong on purpose: it must contradict it."""

from __future__ import annotations

from functools import cache

import pandas as pd
import pytest

from ondevice import evidence
from ondevice.evidence import Rule, derived
from ondevice_papers.sdnpu import npu
from ondevice_studies.sdnpu import claims, printed, study
from ondevice_studies.sdnpu.rules import RULES
from ondevice_studies.sdnpu.workbench import BASE

MACHINE = evidence.machines("sdnpu", "curves")[0]
KEYS = ["model", "set", "task", "request", "step"]


@cache
def record(name: str) -> pd.DataFrame:
    return evidence.load("sdnpu", name)


def timed(name: str) -> pd.DataFrame:
    return record(f"{name}.{MACHINE}")


@cache
def tasks() -> pd.DataFrame:
    return record("passes")[lambda table: table["set"] == "tasks"]


def latency(passes: pd.DataFrame, column: str = "total", **changes):
    """Requests on the fitted NPU; changes: of the prefill's or the calibration's ms."""
    answers = record("answers")
    answers = answers[answers["set"] == "tasks"]
    cpu = npu.Cpu(printed.cpu_curve(9.0, 2.0))
    arms = npu.figure_10(npu.Npu(printed.npu_curve()), cpu, npu.Eagle(0.2), 500.0, 565.0, 500.0)
    found = npu.simulate(answers, passes, arms)
    for part, factor in changes.items():
        found["total"] += (factor - 1) * found[part]
    return claims.latency(found, column), found


@cache
def drafts_are_worthless() -> pd.DataFrame:
    """sd.npu's passes are as many as its answer's tokens, each of a full draft that spills."""
    plain, mine = tasks()[tasks()["method"] == "vanilla"], tasks()[tasks()["method"] != npu.PRINTED_METHOD]
    wrong = plain.assign(method=npu.PRINTED_METHOD, drafted=63)
    return derived(pd.concat([mine, wrong]), tasks())


def faster(claim: str):
    return lambda: claims.faster(*(latency(drafts_are_worthless(), column)[0] for column in ("total", "decode")))[claim]


def whole(scale: dict[str, float], column: str = "prefill_s"):
    """Recorded requests of which some arms take another time."""
    table = timed("whole")
    table = table[table["precision"] == "fp32"]
    factor = table["arm"].map(scale).fillna(1.0)
    return derived(table.assign(**{part: table[part] * factor for part in ("prefill_s", "decode_s")}), table)


def measured(claim: str, scale: dict[str, float]):
    return lambda: claims.measured(study.whole_requests(whole(scale)))[claim]


def rates(factor: float):
    """Printed drafts that are accepted less."""
    table = tasks().assign(emitted=tasks()["emitted"].where(~tasks()["method"].str.contains("printed"), factor))
    return study.accepted(derived(table, tasks()))


def peaks(factor: float):
    table = timed("memory")
    return derived(table.assign(peak_mb=table["peak_mb"].where(table["arm"] != "printed", factor)), table)


def copied_backwards():
    total, _ = latency(drafts_are_worthless())
    table = record("copied")
    gain = dict(zip(total.tasks, (total["NPU vanilla"] / total[npu.OURS])[0], strict=True))
    return claims.by_similarity(total, derived(table.assign(copied=[-gain[f"{m} {t}"] for m, t in zip(
        table["model"], table["task"], strict=True)]), table))  # fmt: skip


def shares(prefill: float):
    _, found = latency(tasks())
    return claims.decoding_shares(derived(found.assign(total=found["total"] + prefill), found))


def similar(value: str):
    cosines, contexts = (record(name)[lambda table: table["model"] == BASE] for name in ("cosines", "contexts"))
    wrong = {"task": 0.1, "group": 0.5, "across": 0.9}
    cosines = derived(cosines.assign(cosine=cosines["pair"].map(wrong)), cosines)
    return lambda: claims.similarity(cosines, derived(contexts.assign(cosine=0.1, overlap=0.9), contexts))[value]


def curve(seconds):
    table = timed("curves")
    table = table[(table["model"] == BASE) & (table["part"] == "static")].sort_values("rows")
    return lambda claim: claims.graph_sizes(derived(table.assign(seconds=seconds(table["rows"])), table))[claim]


def slow(claim: str):
    table = whole({})
    table = derived(table.assign(draft_s=100.0, observe_s=100.0), table)
    calibrating = derived(timed("costs").assign(seconds=99.0, low=98.0, high=100.0), "recorded")
    return lambda: claims.costs(calibrating, table)[claim]


def drafted(count: int, method: str, limit: int):
    mine = tasks()[(tasks()["model"] == BASE) & (tasks()["task"] == "summary")]
    return lambda: claims.shorter(derived(mine.assign(drafted=count), mine), method, limit)


def late_greedy():
    table = timed("switching")
    table = table[(table["model"] == BASE) & (table["precision"] == "fp32") & ~table["cold"] & (table["memory"] == 1.0)]
    rest = study.rest_seconds(whole({})[lambda t: (t["model"] == BASE) & (t["task"] == "summary")])
    return claims.exposed(table, rest, "keep both")


def never_reused():
    table = record("rejections")
    return claims.reusable(derived(table.assign(case="redundant"), table))


WRONG = {
    **{f"sdnpu-c{n:02}": faster(f"sdnpu-c{n:02}") for n in (1, 3, 4, 7, 8, 9, 10, 11, 12, 34)},
    "sdnpu-c13": measured("sdnpu-c13", {"CPU-SAM": 0.2}),
    "sdnpu-c14": lambda: claims.eagle_on_cpu([1, 32, 64], [50.0, 50.1, 50.2]),
    "sdnpu-c16": copied_backwards,
    "sdnpu-c28": lambda: claims.memory(peaks(9000.0))["sdnpu-c28"],
    "sdnpu-c29": lambda: claims.memory(peaks(9000.0))["sdnpu-c29"],
    **{f"sdnpu-c{n}": (lambda n=n: shares(1e5)[f"sdnpu-c{n}"]) for n in (33, 44, 45, 46)},
    "sdnpu-c35": lambda: claims.first_token(study.prefills(whole({"printed": 9.0}))),
    "sdnpu-c36": slow("sdnpu-c36"), "sdnpu-c37": slow("sdnpu-c37"), "sdnpu-c63": slow("sdnpu-c63"),
    "sdnpu-c38": measured("sdnpu-c38", {"NPU +G": 9.0}), "sdnpu-c39": measured("sdnpu-c39", {"NPU +G": 9.0}),
    "sdnpu-c40": measured("sdnpu-c40", {"printed": 9.0}),
    "sdnpu-c41": lambda: claims.table_4(rates(1.0))["sdnpu-c41"],
    "sdnpu-c42": lambda: claims.table_4(rates(1.0))["sdnpu-c42"],
    "sdnpu-c43": lambda: claims.identical(record("answers").assign(identical=False)),
    "sdnpu-c49": late_greedy,
    **{f"sdnpu-c{n}": similar(f"sdnpu-c{n}") for n in range(50, 55)},
    "sdnpu-c57": lambda: curve(lambda rows: 1 / rows**2)("sdnpu-c57"),
    "sdnpu-c58": lambda: curve(lambda rows: rows**0.99)("sdnpu-c58"),
    "sdnpu-c59": drafted(30, "PLD", 8), "sdnpu-c61": drafted(63, "SAM", 32), "sdnpu-c62": never_reused,
}  # fmt: skip
FORMULAS = {"sdnpu-c30": 0.2, "sdnpu-c31": 0.2, "sdnpu-c55": 5.0, "sdnpu-c60": 0.2}  # of the paper's numbers; scaled
CONTRADICTED = {"sdnpu-c32", "sdnpu-c56"}  # by the paper's own numbers already
BY_DECISION = {"sdnpu-c65"}  # wrong answers of Partition: tests/unit/test_sdnpu_scheduling.py


def test_every_rule_is_tried():
    judged = {claim for claim, rule in RULES.items() if isinstance(rule, Rule)}
    assert {*WRONG, *FORMULAS, *CONTRADICTED, *BY_DECISION} == judged


@pytest.mark.parametrize("claim", WRONG)
def test_what_is_wrong_is_contradicted(claim):
    assert RULES[claim].verdict(WRONG[claim]()) == "contradicted"


@pytest.mark.parametrize(("claim", "scale"), FORMULAS.items())
def test_a_formula_of_another_size_is_contradicted(claim, scale):
    assert RULES[claim].verdict(scale * claims.analytic()[claim].value) == "contradicted"

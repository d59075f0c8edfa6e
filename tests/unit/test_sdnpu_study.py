"""What sd.npu's exhibits and claims are made of: by hand, on small tables."""

import itertools

import numpy as np
import pandas as pd
import pytest

from ondevice import evidence
from ondevice.evidence import born
from ondevice_studies.sdnpu import study, values
from ondevice_studies.sdnpu.claims import CLAIMS

METHODS = [f"{base}{part}" for base in study.BASES for part in ("", "+calibration", "+reuse", "+both")]
TASKS = ("summarization", "rag")


def answers() -> pd.DataFrame:
    """Two tasks, three requests; of a method a pass decodes the same on each, rag's twice as much."""
    rate = {name: 1 + 0.1 * place for place, name in enumerate(METHODS)}
    rows = [
        {"model": "m", "task": task, "request": f"{task}{request}", "method": method, "passes": 2,
         "decoded": 2 * rate[method] * (2 if task == "rag" else 1) * (1 + request)}
        for task, request, method in itertools.product(("summary", "rag"), range(3), METHODS)
    ]  # fmt: skip
    return born(pd.DataFrame(rows), "recorded")


def test_tokens_a_pass_are_sums_over_sums_and_gains_are_paired():
    rates = study.accepted(answers(), METHODS)
    assert rates.tasks == ["summary", "rag"]
    assert rates["PLD"][0].tolist() == pytest.approx([2.0, 4.0])  # requests emit 1, 2 and 3 times the rate
    table = study.gains(rates).table("gain").query("task == 'average'").set_index("name")
    assert table.loc["PLD+both", ["gain", "low", "high"]].tolist() == pytest.approx([1.3] * 3)  # paired: no spread


def test_the_best_shapes_are_those_of_brute_force():
    random = np.random.default_rng(0)
    for _ in range(20):
        rows = random.integers(1, 13, 40)
        seconds = np.cumsum(random.uniform(0, 1, 12)) + 1
        shapes, share = study.best_shapes(rows, seconds, 2)
        best = min(sum(seconds[min(s for s in pair if s >= row) - 1] for row in rows)
                   for pair in itertools.combinations(range(1, 13), 2) if pair[-1] >= rows.max())  # fmt: skip
        assert share == pytest.approx(seconds[rows - 1].sum() / best)
        assert shapes[-1] == rows.max()


def whole() -> pd.DataFrame:
    arms = {"NPU vanilla": (1.0, 2.0), "NPU +G": (0.5, 2.0), "NPU +G naive": (0.4, 2.0), "NPU-SAM": (1.0, 1.0),
            "NPU-SAM +G": (0.5, 1.0), "NPU-SAM +G naive": (0.4, 1.0), "sd.npu": (0.5, 0.5),
            "CPU vanilla": (0.2, 1.0), "CPU-SAM": (0.2, 0.5)}  # fmt: skip
    named = {"tokens": 11, "passes": 10, "prompt_tokens": 50, "draft_s": 0.01, "observe_s": 0.02}
    rows = [{**named, "task": task, "request": f"{task}{request}", "arm": arm, "prefill_s": (1 + request) * first,
             "decode_s": (1 + request) * decode}
            for task, request, (arm, (first, decode)) in itertools.product(TASKS, range(3), arms.items())]  # fmt: skip
    return born(pd.DataFrame(rows), "recorded")


def test_measured_claims_and_their_nulls():
    requests = study.per_token(whole())
    gains, naive = (values.switching_gains(requests, greedy) for greedy in ("+G", "+G naive"))
    assert [estimate.value for estimate in gains] == pytest.approx([3 / 2.5, 2 / 1.5])
    assert [estimate.value for estimate in naive] == pytest.approx([3 / 2.4, 2 / 1.4])
    summaries = whole().query("task == 'summarization'")
    summarized, prefill = study.per_token(summaries), study.by_prompt(summaries, "prefill_s")
    assert values.switching_saved(summarized).value == pytest.approx(0.2)
    assert values.over_sam(summarized).value == pytest.approx(1.5)
    on_cpu = values.speedups(requests, "CPU vanilla", "CPU-SAM")
    assert [estimate.value for estimate in on_cpu] == pytest.approx([1.2 / 0.7] * 2)
    first = [values.first_token(prefill, arm) for arm in ("sd.npu", "NPU +G naive")]
    assert [estimate.value for estimate in first] == pytest.approx([0.5, 0.4])
    assert {estimate.n for estimate in first} == {3}  # prompts of summaries
    assert gains[0].n == 6  # and of both tasks
    steps = values.step_ms(whole(), "sd.npu", ["draft_s", "observe_s"])
    assert (steps.value, steps.n) == (pytest.approx(3.0), 6)


def test_a_prompt_that_is_long_for_all_arms_moves_times_and_no_ratio():
    summaries = whole().query("task == 'summarization'")
    requests = study.per_token(summaries)
    plain = requests.estimate(requests["NPU vanilla"][:, 0])
    assert plain.value == pytest.approx(1e3 * 2 * 3 / 11) and plain.low < plain.value < plain.high
    ratio = values.over_sam(requests)
    assert ratio.low == pytest.approx(ratio.high)
    rest = study.rest_seconds(summaries)
    assert rest.value == pytest.approx(2 * (2.0 + 0.2)) and rest.drawn == "prompts"


def test_a_rejection_counts_with_its_prompt():
    rows = [(f"r{request}", "missing" if request else "redundant", "redundant") for request in (0, 1, 1, 1)]
    table = born(pd.DataFrame(rows, columns=["request", "case", "elsewhere"]), "recorded")
    share = values.reusable(table)
    assert (share.value, share.n, share.drawn) == (75, 2, "prompts")
    assert values.reusable(table, cases=["redundant"]).value == 25
    assert values.reusable(table, "elsewhere").value == 0


def test_answers_that_were_replayed_are_not_counted_as_identical():
    rows = [("vanilla", True, True), ("SAM", False, True), ("both", True, True), ("both", True, False)]
    table = born(pd.DataFrame(rows, columns=["method", "live", "identical"]), "recorded")
    assert [part.value for part in values.identical(table)] == [0.5, 2]
    assert [part.value for part in values.identical(table, plain=True)] == [1, 1]


def test_a_summary_is_near_its_own_context_or_another():
    table = born(pd.DataFrame({"cosine": [0.8, 0.9, 0.5, 0.77], "other": [0.1, 0.2, 0.9, 0.3]}), "recorded")
    assert [values.near_context(table, column).value for column in ("cosine", "other")] == [0.75, 0.25]


def test_forwards_and_their_null():
    curve = pd.DataFrame({"rows": [1, 8, 32], "seconds": [1.0, 1.5, 4.0], "n": 25})
    curve = born(curve.assign(low=curve["seconds"] - 0.1, high=curve["seconds"] + 0.1), "recorded")
    alone = values.row_alone(curve)
    assert (alone.value, alone.low, alone.high) == pytest.approx((8.0, 32 * 0.9 / 4.1, 32 * 1.1 / 3.9))
    assert values.row_alone(curve, flat=True).value == pytest.approx(32)
    assert [part.value for part in values.size_correlations(curve, flat=True)] == pytest.approx([-1, 0])


def test_of_pairs_that_are_dealt_at_random_no_relation_is_nearer():
    random = np.random.default_rng(0)
    pairs = [(pair, f"{pair}{i}", f"{pair}{i + 1}", mean + random.normal(0, 0.1))
             for pair, mean in {"task": 0.7, "group": 0.5, "across": 0.2}.items() for i in range(200)]  # fmt: skip
    table = born(pd.DataFrame(pairs, columns=["pair", "first", "second", "cosine"]), "recorded")
    rule = next(row.rule for row in CLAIMS.values() if row.value is values.similarities)
    assert rule.verdict(values.similarities(table)) == "reproduced"
    assert rule.verdict(values.similarities(table, shuffled=True)) == "undecided"


def test_the_regime_that_the_rules_name_is_the_recorded_one():
    curve = evidence.load("sdnpu", "curves.zen4-2c").query("part == 'static'").set_index("rows")["seconds"]
    (note,) = {CLAIMS[f"sdnpu-c{number}"].rule.note for number in (35, 38, 57, 58)}
    assert f"{curve[32] / curve[1]:.1f} times one of a single row" in note


def test_pairs_are_not_independent():
    """An answer that is unlike all others is in a third of the pairs: draws without it have 1, most with it less."""
    pairs = [("a", "b", 1.0), ("a", "c", 1.0), ("b", "c", 1.0), ("a", "d", 0.0), ("b", "d", 0.0), ("c", "d", 0.0)]
    table = born(pd.DataFrame(pairs, columns=["first", "second", "cosine"]), "recorded")
    estimate = values.mean_of_pairs(table)
    assert (estimate.value, estimate.n, estimate.interval) == (0.5, 4, (0, 1.0))

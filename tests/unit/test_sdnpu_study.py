"""What sd.npu's exhibits and claims are made of: by hand, on small tables."""

import itertools

import numpy as np
import pandas as pd
import pytest

from ondevice.evidence import Estimate, born
from ondevice.sdnpu import claims, study
from ondevice.sdnpu.scheduling import Prefill, naive, synchronous

METHODS = [f"{base}{part}" for base in study.BASES for part in ("", "+calibration", "+reuse", "+both")]
METHODS += [f"{base}+{part}, printed" for base in study.BASES for part in ("calibration", "reuse", "both")]


CELLS = ("a base", "b small"), ("summary", "rag")


def passes() -> pd.DataFrame:
    """Two models, two tasks, three requests; every pass of a method emits the same, rag's twice as much."""
    rate = {name: 1 + 0.1 * place for place, name in enumerate(METHODS)}
    rows = [
        {"model": model, "set": "tasks", "task": task, "request": request, "method": method, "step": step,
         "drafted": 10 * step, "emitted": rate[method] * (2 if task == "rag" else 1) * (1 + request)}
        for model, task, request, method, step in itertools.product(*CELLS, range(3), METHODS, (0, 1))
    ]  # fmt: skip
    return born(pd.DataFrame(rows), "recorded")


def test_tokens_a_pass_are_sums_over_sums_and_gains_are_paired():
    rates = study.accepted(passes())
    assert rates.tasks == ["a base summary", "a base rag", "b small summary", "b small rag"]
    assert rates["PLD"][0].tolist() == pytest.approx([2.0, 4.0, 2.0, 4.0])  # requests emit 1, 2 and 3 times the rate
    table = study.gains(rates).table("gain").query("task == 'average'").set_index("name")
    assert table.loc["PLD+both", ["gain", "low", "high"]].tolist() == pytest.approx([1.3] * 3)  # paired: no spread
    assert set(study.gains(rates, ", printed").names) == {name for name in METHODS if "printed" in name}


def test_what_is_chosen_online_is_over_the_best_in_hindsight():
    rates = study.accepted(passes())
    online = study.chosen_online(rates)
    assert len(online) == 3 * 4 and online["choice"].tolist() == pytest.approx([1.0] * 12)  # both has the most
    worse = passes()
    worse.loc[worse["method"] == "SAM+both", "emitted"] *= 0.5
    found = study.chosen_online(study.accepted(worse)).set_index("base")["choice"]
    assert (found["SAM"] < 0.6).all() and found["PLD"].tolist() == pytest.approx([1.0] * 4)


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


def test_a_larger_graph_that_is_faster_serves_smaller_rows():
    shapes, share = study.best_shapes([1, 2, 3], np.array([5.0, 3.0, 4.0]), 1)
    assert shapes == (3,) and share == pytest.approx((3 + 3 + 4) / 12)


def switching() -> pd.DataFrame:
    seconds = {"keep both": 1.0, "synchronous": 2.0, "naive": 1.5, "ours": 1.1}
    named = {"model": "m", "precision": "fp32", "tokens": 768, "cold": False, "memory": 1.0, "loading_s": 1.0}
    rows = [{**named, "way": way, "round": turn, "total_s": total + 0.01 * turn}
            for way, total in seconds.items() for turn in range(5)]  # fmt: skip
    return born(pd.DataFrame(rows), "recorded")


def test_hidden_is_a_ratio_of_medians_with_rounds_drawn_together():
    found = study.hidden(switching()).set_index("way")
    assert found["hidden"].to_dict() == pytest.approx({"keep both": 100, "synchronous": 0, "naive": 50, "ours": 90})
    assert found.loc["ours", ["low", "high"]].tolist() == pytest.approx([90, 90]) and (found["n"] == 5).all()


def test_an_interval_is_of_95_percent():
    found = study.interval(np.r_[0.5, np.linspace(0, 1, 2001)], 9, "recorded")
    assert (found.low, found.high) == pytest.approx((0.025, 0.975))


def test_what_switching_exposes_of_the_rest():
    rest = claims.Estimate(2.0, 2.0, 2.0, 6, "recorded")
    assert claims.exposed(switching(), rest).value == pytest.approx(50)
    assert claims.exposed(switching(), rest, "naive").value == pytest.approx(25)


def test_added_time_is_over_a_prefill_that_switches_nothing():
    prefill = Prefill([10] * 6, [12] * 6, [20] * 6, 2)
    assert study.added_ms(prefill, synchronous) == 120 and study.added_ms(prefill, naive) == 70


def whole() -> pd.DataFrame:
    arms = {"NPU vanilla": (1.0, 2.0), "NPU +G": (0.5, 2.0), "NPU +G naive": (0.4, 2.0), "NPU-SAM": (1.0, 1.0),
            "NPU-SAM +G": (0.5, 1.0), "NPU-SAM +G naive": (0.4, 1.0), "printed": (0.5, 0.5), "ours": (0.4, 0.5),
            "CPU vanilla": (0.2, 1.0), "CPU-SAM": (0.2, 0.5)}  # fmt: skip
    named = {"precision": "fp32", "tokens": 11, "passes": 10, "prompt_tokens": 50, "draft_s": 0.01, "observe_s": 0.02}
    rows = [{**named, "model": model, "task": task, "request": request, "round": turn, "arm": arm, "prefill_s": first,
             "decode_s": decode} for model, task, request, turn, (arm, (first, decode)) in itertools.product(
                 *CELLS, range(3), range(2), arms.items())]  # fmt: skip
    return born(pd.DataFrame(rows), "recorded")


def test_whole_requests_are_over_all_tokens_and_decoding_over_the_later_ones():
    total, decode = study.whole_requests(whole()), study.whole_requests(whole(), decoding=True)
    assert total["printed"][0].tolist() == pytest.approx([1e3 / 11] * 4)
    assert decode["printed"][0].tolist() == pytest.approx([50.0] * 4)
    assert study.prefills(whole())["ours"][0].tolist() == pytest.approx([0.4] * 4)
    assert study.rest_seconds(whole()).value == pytest.approx(2.2)


def test_measured_claims_and_their_nulls():
    total = study.whole_requests(whole())
    mine, null = claims.measured(total), claims.measured(total, greedy="+G naive")
    assert [one.value for one in mine["sdnpu-c38"]] == pytest.approx([3 / 2.5, 2 / 1.5])
    assert [one.value for one in null["sdnpu-c38"]] == pytest.approx([3 / 2.4, 2 / 1.4])
    assert mine["sdnpu-c39"].value == pytest.approx(0.2) and mine["sdnpu-c40"].value == pytest.approx(1.5)
    assert [one.value for one in mine["sdnpu-c13"]] == pytest.approx([1.2 / 0.7] * 2)
    prefill = study.prefills(whole())
    first = [claims.first_token(prefill, arm).value for arm in ("printed", "NPU +G naive")]
    assert first == pytest.approx([0.5, 0.4])


def test_costs_are_a_pass_and_a_token():
    table = born(pd.DataFrame({"rule": ["printed"] * 2, "vocabulary": [9, 8], "seconds": [2.0, 1.0], "low": [1.9, 0.9],
                               "high": [2.1, 1.1], "n": [5, 5]}), "recorded")  # fmt: skip
    found = claims.costs(table, whole())
    assert [one.value for one in found["sdnpu-c36"]] == [1.0, 2.0]
    assert found["sdnpu-c37"].value == pytest.approx(3.0) and found["sdnpu-c63"].value == pytest.approx(1.0)


def test_memory_is_over_vanillas():
    rows = [("m", 256, "NPU vanilla", 100.0), ("m", 256, "printed", 110.0), ("m", 768, "NPU vanilla", 200.0),
            ("m", 768, "printed", 230.0)]  # fmt: skip
    table = born(pd.DataFrame(rows, columns=["model", "context", "arm", "peak_mb"]), "recorded")
    found = claims.memory(table)
    assert [one.value for one in found["sdnpu-c28"]] == pytest.approx([30, 15])
    assert found["sdnpu-c29"].value == pytest.approx(1.15)


def test_acceptance_identity_drafts_and_rejections():
    rates = study.accepted(passes())
    least, mean = claims.table_4(rates)["sdnpu-c41"]
    place = METHODS.index("PLD+both, printed")
    assert least.value == mean.value == pytest.approx(1 + 0.1 * place)
    answers = born(pd.DataFrame({"method": ["vanilla", "a", "a"], "identical": [True, True, False]}), "recorded")
    assert [one.value for one in claims.identical(answers)] == [0.5, 2]
    assert claims.shorter(passes(), "PLD", 8).value == 0.5  # drafts of 0 and of 10 tokens
    table = born(pd.DataFrame({"model": "m", "set": ["a", "a", "a", "b"], "task": "t", "request": [0, 0, 1, 1],
                               "method": "SAM", "case": ["missing", "redundant", "redundant", "synonym"]}), "recorded")
    found = claims.reusable(table)
    assert found.value == 50 and found.n == 3  # two sets number their requests alike


def test_pairs_are_not_independent():
    """An answer that is unlike all others is in a third of the pairs: draws without it have 1, most with it less."""
    pairs = [("a", "b", 1.0), ("a", "c", 1.0), ("b", "c", 1.0), ("a", "d", 0.0), ("b", "d", 0.0), ("c", "d", 0.0)]
    table = born(pd.DataFrame(pairs, columns=["first", "second", "cosine"]), "recorded")
    found = claims.mean_of_pairs(table)
    assert (found.value, found.n, found.high) == (0.5, 4, 1.0) and found.low == 0


def test_the_ends_of_what_switching_exposes_are_those_of_both_parts():
    one, two = (claims.exposed(switching(), Estimate(10, *ends, 9, "recorded")) for ends in ((10, 10), (5, 20)))
    assert (two.value, two.low, two.high) == pytest.approx((one.value, one.low / 2, one.high * 2))


def test_spans_are_least_and_greatest_over_tasks_and_others():
    total = study.whole_requests(whole())
    low, high = claims.spans(total, ["NPU vanilla", "CPU vanilla"], "printed")
    assert (low.value, high.value) == pytest.approx((1.2, 3.0))
    assert claims.spans(total, ["NPU vanilla"], "ours", "summary")[0].value == pytest.approx(3 / 0.9)


def test_forwards_by_rows():
    curve = born(pd.DataFrame({"rows": [1, 8, 32], "seconds": [2.0, 4.0, 8.0]}), "recorded")
    found = claims.graph_sizes(curve)
    assert [one.value for one in found["sdnpu-c57"]] == [-1, 1] and found["sdnpu-c58"].value == 8
    assert study.forward(curve, [8, 20]).tolist() == [4.0, 6.0]
    assert claims.analytic()["sdnpu-c60"].value == pytest.approx(50, abs=5)

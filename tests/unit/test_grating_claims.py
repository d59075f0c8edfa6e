"""GRATING's claims: the rules judge the paper's numbers as they should, and the values come from the tables."""

import numpy as np
import pandas as pd
import pytest
from scipy.special import expit

from ondevice import assets
from ondevice.evidence import Rule
from ondevice.grating import findings, printed
from ondevice.grating.printed import HF, METHODS, NONE, OFFLOAD, OURS, OURS_QUANT, QUANT, STEPS, number
from ondevice.grating.pruning import ClusterRule, dispersion
from ondevice.grating.replay import replay
from ondevice.grating.rules import RULES


def verdict(claim: str, value) -> str:
    return RULES[f"grating-{claim}"].verdict(value)


def table(columns: str, *rows: tuple) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=columns.split())


# The rules


RATIOS = printed.memory_ratios()


@pytest.mark.parametrize(
    ("claim", "value"),
    [
        ("c01", number("latency reduction at most")),
        ("c02", number("peak memory reduction at most (abstract)")),
        ("c04", tuple(number(f"{end} latency reduction in applications") for end in ("least", "greatest"))),
        ("c05", tuple(number(f"{end} peak memory reduction in applications") for end in ("least", "greatest"))),
        ("c08", number("file search: reranker share of latency")),
        ("c09", number("file search: reranker share of memory")),
        ("c10", tuple(number(f"precision of cross-encoders over bi-encoders at {end}") for end in ("least", "most"))),
        ("c11", number("late stable layer") / 28),
        ("c12", number("best case, latency reduction against HF")),
        ("c13", number("best case, latency reduction against HF Offload")),
        ("c14", number("hardest case, latency reduction")),
        ("c20", RATIOS[HF][0]),
        ("c20", RATIOS[HF][1]),
        ("c21", RATIOS[OFFLOAD][0]),
        ("c21", RATIOS[OFFLOAD][1]),
        ("c24", number("RAG, latency reduction, NVIDIA")),
        ("c25", number("RAG, latency reduction, Apple")),
        ("c26", number("RAG, peak memory reduction at most")),
        ("c27", number("RAG, average memory reduction at most")),
        ("c29", number("agent memory, latency reduction, video")),
        ("c30", number("agent memory, latency reduction, community")),
        ("c32", number("agent memory, peak memory reduction")),
        ("c33", number("long context, latency reduction against HF Reranker")),
        ("c34", number("long context, latency reduction against no reranker")),
        ("c36", number("long context, peak memory reduction") * 2**30 / 1e6 / printed.weights_mb()),
        ("c39", number("intermediate tensors of a monolithic batch")),
        ("c43", number("ablation, peak memory of all techniques")),
        ("c45", number("ablation, peak memory reduction of all techniques")),
        ("c48", number("peak memory factor at most")),
        ("c49", 83.2),
        ("c50", number("share of the vocabulary")),
    ],
)
def test_the_printed_numbers_pass(claim, value):
    assert verdict(claim, value) == "reproduced"


def test_figure_16_passes_as_printed():
    rows = printed.ablation().assign(peak_mb=lambda t: 1255 * t["peak"], seconds=lambda t: 17 * t["latency"])
    rows["seconds"] = [17, 8.67, 8.67, 8.751, 8.755]
    values = findings.ablation(rows)
    assert {verdict(claim[8:], value) for claim, value in values.items()} == {"reproduced"}
    assert values["grating-c41"] == pytest.approx(57.8) and values["grating-c38"] == pytest.approx(44.8)
    assert values["grating-c42"] == pytest.approx(100 * 0.081 / 17)


@pytest.mark.parametrize(
    ("claim", "value", "right"),
    [
        ("c01", 83.0, "trend"),  # 17 left are more than 1.5 times 11
        ("c01", 93.0, "trend"),
        ("c01", 9.0, "contradicted"),
        ("c20", 1.9, "contradicted"),
        ("c20", 18.0, "trend"),
        ("c21", 1.0, "contradicted"),
        ("c40", (40.0, 10.0), "reproduced"),
        ("c40", (40.0, 19.0), "trend"),
        ("c40", (40.0, -19.0), "trend"),  # below the baseline: something else took it there
        ("c40", (5.0, 5.0), "contradicted"),
        ("c40", (-10.0, -30.0), "contradicted"),  # one batch takes no more: there is nothing that chunks could save
        ("c42", -1.1, "trend"),
    ],
)
def test_values_on_either_side_of_a_rules_bounds(claim, value, right):
    assert verdict(claim, value) == right


# The paper's numbers


def test_what_the_printed_numbers_say_of_each_other():
    found = printed.findings().set_index("finding")["agrees"]
    assert found["greatest reduction of peak memory"] is False
    assert found["left after the embedding cache, if -57.8 % is of the baseline"] is True
    assert found["the same, if -57.8 % is of the step before"] is False
    low, high = printed.baseline_seconds()
    assert low < 17 < high and 0.49 * low < 0.085 + 0.485 * low  # 85 ms are between the two savings
    assert printed.baseline_mib() == pytest.approx(271 / 0.216)
    assert printed.monolithic_mib() == pytest.approx(0.448 * 271 / 0.216)
    assert printed.weights_mb() == pytest.approx(1191.55, abs=0.01)
    layer, embeddings = printed.layer_and_table_bytes()
    assert (2 * layer / 2**20, embeddings / 2**20) == pytest.approx((60, 296.2), abs=0.05)
    assert embeddings == 2 * 151_669 * 1024 == 310_618_112
    values = findings.embedding()
    assert (verdict("c49", values["grating-c49"]), verdict("c50", values["grating-c50"])) == ("reproduced",) * 2


def test_the_tables_are_there_and_unknown_numbers_are_refused():
    assert len(printed.models()) == 5 and len(printed.workloads()) == 3
    with pytest.raises(ValueError, match="no number 'speed'"):
        number("speed")


def test_the_worked_example_is_decided_as_the_paper_says():
    scores, steps = printed.worked_example(), assets.paper_table("grating", "worked_example").set_index("after_layer")
    outcome = replay(scores, 10, ClusterRule(0.3))
    assert outcome.ended == 11 and list(steps["stops"]) == ["no", "no", "yes"]
    for kept, column in ((True, "selected"), (False, "dropped")):
        after = [int((outcome.layer[outcome.kept == kept] == layer).sum()) for layer in (9, 10)]
        assert after == list(steps[column].iloc[:2]) == [2, 0]
    assert outcome.kept.sum() == 10 and list(np.flatnonzero(outcome.kept)) == list(range(10))
    active = outcome.layer > 9
    assert active.sum() == steps.loc[10, "active"] == 16
    assert dispersion(scores[9, active]) < 0.3 < min(dispersion(scores[8]), dispersion(scores[10, active]))
    assert max(dispersion(row) for row in scores[:8]) < 0.3 and ((expit(scores) > 0) & (expit(scores) < 1)).all()


# The values


def test_the_shares_of_the_pipeline():
    stages = table("stage latency_ms peak_mb", ("keyword", 5, 10), ("embedding", 15, 30), ("reranker", 80, 40))
    assert findings.pipeline(stages) == {"grating-c08": 80, "grating-c09": 50}
    with pytest.raises(ValueError, match="no stage 'reranker'"):
        findings.pipeline(stages.head(2))


def test_the_gain_over_the_embedder_is_a_mean_over_rerankers_by_query_set():
    rows = table("queries ranker precision", ("q", "embedder", 0.5), ("q", "a", 0.6), ("q", "b", 0.7))
    assert findings.over_embedder(rows)["grating-c10"] == pytest.approx((30, 30))
    other = rows.assign(queries="other", precision=[0.4, 0.4, 0.44])
    assert findings.over_embedder(pd.concat([rows, other]))["grating-c10"] == pytest.approx((5, 30))
    with pytest.raises(ValueError, match="two rows for ranker 'a'"):
        findings.over_embedder(pd.concat([rows, rows.tail(2)]))
    with pytest.raises(ValueError, match="no ranker 'embedder'"):
        findings.over_embedder(pd.concat([rows, other.tail(2)]))


@pytest.mark.parametrize(
    ("kendall", "share"), [([0.9, 0.5, 0.8, 1], 0.75), ([0.8, 0.9, 0.9, 1], 0.25), ([0, 0, 0, 1], 1.0)]
)
def test_an_order_is_settled_from_the_layer_on_which_it_stays(kendall, share):
    rows = pd.DataFrame(dict(model="a", layer=[1, 2, 3, 4], kendall=kendall))
    assert findings.agreement(rows[::-1])["grating-c11"] == share
    other = pd.DataFrame(dict(model="b", layer=[1, 2], kendall=[0.9, 1.0]))
    assert findings.agreement(pd.concat([rows, other]))["grating-c11"] == (share + 0.5) / 2


def _micro(low: float, high: float, loss: float) -> pd.DataFrame:
    rows = []
    for k in (1, 10):
        rows += [("a", "q", k, name, "", s, 0.8) for name, s in ((HF, 2.0), (OFFLOAD, 4.0), (QUANT, 3.0))]
        rows += [("a", "q", k, OURS, "low", low * k, 0.8 - loss), ("a", "q", k, OURS, "high", high * k, 0.8)]
        rows += [("a", "q", k, OURS_QUANT, "low", 1.1, 0.8), ("a", "q", k, "CrossEncoder", "", 0.01, 0.8)]
    return table("model queries k method threshold seconds precision", *rows)


def test_savings_count_without_loss_only():
    values = findings.micro(_micro(0.1, 0.3, 0.02))
    assert values["grating-c12"] == pytest.approx(85) and values["grating-c13"] == pytest.approx(92.5)
    assert values["grating-c14"] == pytest.approx(25) and values["grating-c03"] == pytest.approx(2)
    assert findings.micro(_micro(0.1, 0.3, 0.01))["grating-c14"] == pytest.approx(75)
    assert values["grating-c15"] == (1.0, 1.0)
    assert findings.micro(_micro(0.2, 5.0, 0.0))["grating-c15"] == (0.5, 0.5)  # at K = 10 GRATING Quant is faster
    nothing = _micro(0.1, 0.3, 0.5).assign(precision=lambda t: t["precision"].where(t["method"] != OURS, 0.1))
    assert findings.micro(nothing)["grating-c01"] == 0
    both = findings.micro(pd.concat([_micro(0.1, 0.3, 0), _micro(0.2, 0.3, 0).assign(model="b")]))
    assert [both[f"grating-c{n:02}"] for n in (1, 12, 13)] == pytest.approx([97.5, 95, 97.5])  # the largest
    assert both["grating-c14"] == pytest.approx(50)  # the least
    with pytest.raises(ValueError, match="no method 'HF Quant'"):
        findings.micro(_micro(1, 2, 0).query("method != 'HF Quant'"))


def test_two_thresholds_are_compared_by_value_not_by_name():
    rows = table(
        "model queries k name threshold saved change",
        ("a", "q", 1, "low", 0.2, 0.5, -0.1), ("a", "q", 1, "high", 0.9, 0.1, 0.0),
        ("a", "q", 2, "low", 0.8, 0.2, 0.0), ("a", "q", 2, "high", 0.3, 0.4, 0.01),  # the higher one is less precise
        ("a", "q", 5, "low", 0.5, 0.3, -0.2), ("a", "q", 5, "high", 0.5, 0.3, -0.2),  # one threshold
        ("b", "q", 1, "low", 0.2, 0.1, 0.0), ("b", "q", 1, "high", np.inf, 0.0, 0.0),
        ("c", "q", 1, "low", 0.2, 0.1, 0.0), ("c", "q", 1, "high", 0.3, 0.1, 0.0),  # saves as much
    )  # fmt: skip
    assert findings.thresholds(rows)["grating-c16"] == pytest.approx((0.75, 0.75))
    assert findings.thresholds(rows[rows["model"] == "b"])["grating-c16"] == (1, 1)
    with pytest.raises(ValueError, match="neither is the higher one"):
        findings.thresholds(rows[rows["k"] == 5])
    with pytest.raises(ValueError, match="no threshold 'high'"):
        findings.thresholds(rows[rows["name"] == "low"])


def test_the_rags_precision_is_a_difference_in_either_direction():
    rows = table("setting change", *zip(printed.STANDS_FOR.values(), (0.005, -0.02), strict=True))
    assert findings.rag_precision(rows)["grating-c28"] == pytest.approx(2)
    assert findings.rag_precision(rows.assign(change=-rows["change"]))["grating-c28"] == pytest.approx(2)
    with pytest.raises(ValueError, match="no setting 'pydocs-reranker'"):
        findings.rag_precision(rows.head(1))


def test_a_threshold_that_changes_nothing_is_no_trade_off():
    rows = pd.DataFrame(dict(model="a", k=1, threshold=[1, 2, 3], computed=[0.3, 0.5, 0.9], precision=[0.1, 0.2, 0.3]))
    assert findings.trade_off(rows)["grating-c19"] == pytest.approx((1, 1))
    flat = rows.assign(k=5, precision=0.3)
    assert findings.trade_off(pd.concat([rows, flat]))["grating-c19"] == pytest.approx((1, 0))


def test_memory_is_of_the_longest_and_its_best_of_all():
    peaks = {128: (1000, 300, 500, 80, 50), 500: (1200, 200, 600, 200, 300)}
    times = (10, 14, 12, 9, 8)
    rows = [(length, name, mb, s) for length, all_mb in peaks.items()
            for name, mb, s in zip(METHODS, all_mb, times, strict=True)]  # fmt: skip
    values = findings.memory(table("length method peak_mb seconds", *rows))
    assert values["grating-c48"] == 12.5 and values["grating-c02"] == pytest.approx(92)
    assert values["grating-c20"] == 6 and values["grating-c21"] == 1
    assert values["grating-c23"] == pytest.approx((1, 0.9, 1.4, 1.2))
    assert values["grating-c52"] == pytest.approx((8 / 12, 0.5))


def _applications() -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    deep, last = printed.STANDS_FOR.values()
    cells = [(printed.RAG, deep, 0.5), (printed.RAG, last, 0.7), (printed.AGENT, "video", 0.8),
             (printed.AGENT, "community", 0.6), (printed.CONTEXT, last, 0.9)]  # fmt: skip
    times, quality, footprints = [], [], []
    for application, setting, share in cells:
        for method in (HF, OURS) if application != printed.CONTEXT else (HF, OURS, NONE):
            left = {HF: 1.0, OURS: share, NONE: 3.0}[method]
            times += [(application, setting, method, part, s * left) for part, s in (("reranking", 6), ("rest", 4))]
            quality.append((application, setting, method, {HF: 0.8, OURS: 0.79, NONE: 0.7}[method]))
            footprints += [(application, setting, method, t, mb * left) for t, mb in ((0, 0), (1, 100), (3, 100))]
    return (table("application setting method part seconds", *times),
            table("application setting method precision", *quality),
            table("application setting method seconds mb", *footprints))  # fmt: skip


def test_the_applications_are_compared_end_to_end():
    times, quality, footprints = _applications()
    values = findings.applications(times, quality, footprints, weights_mb=20)
    assert values["grating-c04"] == pytest.approx((10, 50)) and values["grating-c05"] == pytest.approx((10, 50))
    assert [values[f"grating-c{n}"] for n in (24, 25, 29, 30, 33)] == pytest.approx([50, 30, 20, 40, 10])
    assert [values[f"grating-c{n}"] for n in (26, 27, 31, 32)] == pytest.approx([50, 50, 1, 40])
    assert values["grating-c34"] == pytest.approx(70) and values["grating-c35"] == pytest.approx((10, 9))
    assert values["grating-c36"] == pytest.approx(0.5)
    with pytest.raises(ValueError, match="no method 'no reranker'"):
        findings.applications(times.query("method != 'no reranker'"), quality, footprints, 20)
    with pytest.raises(ValueError, match="no setting"):
        findings.applications(times.replace("video", "film"), quality, footprints, 20)
    other = footprints.assign(setting=footprints["setting"].where(footprints["application"] != printed.CONTEXT, "x"))
    with pytest.raises(ValueError, match=r"no setting .'long context', 'pydocs-reranker'"):
        findings.applications(times, quality, other, 20)


def test_mean_memory_is_over_time_not_over_samples():
    times, quality, footprints = _applications()
    early = footprints["method"] == OURS
    more = pd.concat([footprints, footprints[early & (footprints["seconds"] == 0)].assign(seconds=0.001)])
    found = findings.applications(times, quality, more, 20)["grating-c27"]
    assert found == pytest.approx(findings.applications(times, quality, footprints, 20)["grating-c27"], abs=0.05)


def test_the_full_sizes_are_in_mb_and_mib():
    rows = pd.DataFrame(dict(step=STEPS, peak_mb=[1000, 1450, 1100, 400, 2**20 * 250 / 1e6], seconds=1.0))
    found = findings.ablation(rows)
    assert (found["grating-c39"], found["grating-c43"]) == pytest.approx((450, 250))
    with pytest.raises(ValueError, match="no step 'sliding window'"):
        findings.ablation(rows[rows["step"] != "sliding window"])


def test_the_windows_penalty_is_with_and_without_pruning():
    rows = table("pruned weights seconds", (False, "memory", 10), (False, "window", 10.1), (True, "memory", 5),
                 (True, "window", 6))  # fmt: skip
    assert findings.window_penalty(rows)["grating-c47"] == pytest.approx((1, 20))
    with pytest.raises(ValueError, match="no setting of pruning True"):
        findings.window_penalty(rows.head(2))


def test_the_values_are_of_all_claims_that_have_a_rule():
    times, quality, footprints = _applications()
    steps = pd.DataFrame(dict(step=STEPS, peak_mb=1.0, seconds=1.0))
    rows = [(500, name, 1.0, 1.0) for name in METHODS]
    trade = pd.DataFrame(dict(model="a", k=1, threshold=[1, 2], computed=[1, 2], precision=[1, 2]))
    both = table("model queries k name threshold saved change", *(("a", "q", 1, n, t, t, t) for n, t in
                                                                  (("low", 0.1), ("high", 0.2))))  # fmt: skip
    changes = pd.DataFrame(dict(setting=printed.STANDS_FOR.values(), change=0.0))
    plain = table("pruned weights seconds", *((p, w, 1.0) for p in (False, True) for w in ("memory", "window")))
    found = (
        findings.pipeline(table("stage latency_ms peak_mb", ("reranker", 1, 1)))
        | findings.over_embedder(table("queries ranker precision", ("q", "embedder", 0.5), ("q", "a", 0.6)))
        | findings.thresholds(both) | findings.rag_precision(changes)
        | findings.agreement(table("model layer kendall", ("a", 1, 1.0)))
        | findings.micro(_micro(1, 2, 0)) | findings.trade_off(trade)
        | findings.memory(table("length method peak_mb seconds", *rows))
        | findings.applications(times, quality, footprints, 1) | findings.ablation(steps)
        | findings.window_penalty(plain) | findings.embedding()
    )  # fmt: skip
    assert set(found) == {claim for claim, rule in RULES.items() if isinstance(rule, Rule)}
    for claim, value in found.items():
        assert np.shape(value) == np.shape(RULES[claim].wrong), claim

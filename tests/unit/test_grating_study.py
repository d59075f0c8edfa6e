"""Calibrated rules, what they do to recorded pools, and what that takes: on synthetic scores and by hand."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ondevice.evidence import born, kind_of, load
from ondevice_papers.grating import margins
from ondevice_papers.grating.margins import CHANCES
from ondevice_papers.grating.pools import measure
from ondevice_studies.grating import live, scoring, study, values
from ondevice_studies.grating.claims import CLAIMS
from ondevice_studies.grating.full_size import HF, OFFLOAD, OURS
from ondevice_studies.grating.scoring import DEEP, ENCODER, MODELS
from ondevice_studies.grating.sets import NOTES, PARAGRAPHS, RAG
from ondevice_studies.grating.study import HIGH, LOW, MARGIN, PROBED, UNPRUNED

LAYERS, N = 4, 6
EVERY = (np.inf, 1.0, 0.1, 0.001)
Rows = list[dict[str, Any]]


def scored(model: str, set_: str, split: str, pools: int, settled: bool, seed: int = 0) -> Rows:
    """Pools with one relevant candidate, which the last layer and probes find. settled: so does every layer."""
    rng, rows = np.random.default_rng(seed), []
    for number in range(pools):
        final = rng.permutation(N) * 2.0 - 5
        history = np.tile(final, (LAYERS, 1))
        probed = history[:-1].flatten() if model in scoring.PROBED else np.empty(0)
        if not settled:
            history[:-1] = rng.permuted(history[:-1], axis=1)
        rows.append({"model": model, "set": set_, "split": split, "pool": number, "name": f"{split} {number}",
                     "layers": LAYERS, "n": N, "relevant": final == final.max(), "scores": history.ravel(),
                     "probed": probed})  # fmt: skip
    return rows


def record(settled: bool, model: str = DEEP, pools: int = 110) -> pd.DataFrame:
    rows = [row for set_ in (NOTES, PARAGRAPHS, RAG) for split, count in (("validation", pools), ("test", 5))
            for row in scored(model, set_, split, count, settled)]  # fmt: skip
    return born(pd.DataFrame(rows), "recorded")


def table(settings: dict[str, float], model: str = DEEP, k: int = 1) -> pd.DataFrame:
    """As the record `calibrated` has them."""
    rows = [{"model": model, "set": NOTES, "k": k, "rule": rule, "setting": one} for rule, one in settings.items()]
    return pd.DataFrame(rows)


# Pools


def test_what_is_judged_are_test_pools():
    scores = record(settled=False)
    assert [pool.name for pool in study.pools_of(scores, DEEP, PARAGRAPHS)] == [f"test {number}" for number in range(5)]
    assert {pool.split for pool in study.pools_of(scores, DEEP, PARAGRAPHS)} == {"test"}
    found = study.outcomes(scores, table({LOW: 0.1}), [DEEP], [NOTES], [1], [LOW])
    assert found["name"].tolist() == [f"test {number}" for number in range(5)]
    few = study.outcomes(scores, table({LOW: 0.1}), [DEEP], [NOTES], [1], [LOW], some=[3, 1])
    assert few["name"].tolist() == ["test 3", "test 1"] and few["pool"].tolist() == [3, 1]


@pytest.mark.parametrize("set_", [NOTES, PARAGRAPHS])
def test_the_recorded_pools_of_both_splits_are_apart_and_curves_are_of_test_pools(set_: str):
    scores, curves = study.recorded(), load("grating", "curves")
    for model in MODELS:
        valid, test = (study.pools_of(scores, model, set_, split) for split in ("validation", "test"))
        assert not {pool.name for pool in valid} & {pool.name for pool in test}
        assert {pool.split for pool in valid} == {"validation"} and {pool.split for pool in test} == {"test"}
        judged = scores.query("model == @model and set == @set_ and split == 'test'")
        assert [pool.name for pool in test] == judged["name"].tolist()
        drawn = curves.query("model == @model and k == 5 and threshold == inf") if set_ == NOTES else ()
        assert not len(drawn) or drawn["full"].tolist() == measure(test, 5, None)["full"].tolist()


# Rules


@pytest.mark.parametrize("settled", [True, False])
def test_rules_are_as_aggressive_as_validation_pools_allow(settled: bool):
    scores = record(settled)
    rows = {row["rule"]: row for row in study.calibrated(scores, DEEP, NOTES, 1, every=EVERY)}
    assert list(rows) == [LOW, HIGH, MARGIN, PROBED] and rows[MARGIN]["n"] == 165 and rows[LOW]["n"] == 110
    assert rows[LOW]["setting"] == rows[HIGH]["setting"] and (rows[LOW]["setting"] == EVERY[-1]) == settled
    assert rows[PROBED]["setting"] == CHANCES[-1] and (rows[MARGIN]["setting"] == CHANCES[-1]) == settled
    assert all(rows[name]["p_value"] <= 0.05 for name in (MARGIN, PROBED))
    found = study.outcomes(scores, pd.DataFrame(rows.values()), [DEEP], [NOTES], [1])
    assert (found["overlap"] == 1).all() and (found["precision"] == found["full"]).all()
    saved = found.groupby("rule")["saved"].mean()
    assert saved[PROBED] > 0.5 and (saved[[LOW, HIGH, MARGIN]] > 0.5).all() == settled
    assert len(found) == 4 * 5 and kind_of(found) == "recorded"


def test_where_no_model_is_precise_no_threshold_is_calibrated_for_precision():
    rows = study.calibrated(record(settled=True), DEEP, PARAGRAPHS, 1, every=EVERY)
    assert [row["rule"] for row in rows] == [HIGH, MARGIN, PROBED]
    found = study.outcomes(record(settled=True), pd.DataFrame(rows), [DEEP], [PARAGRAPHS], [1])
    assert set(found["rule"]) == {HIGH, MARGIN, PROBED}


def test_a_chance_of_0_prunes_nothing_and_a_rule_that_is_missing_is_refused():
    scores = record(settled=True, pools=10)
    found = study.outcomes(scores, table({MARGIN: 0.0, LOW: 0.001}), [DEEP], [NOTES], [1], [MARGIN, LOW])
    assert found.groupby("rule")["saved"].min()[LOW] > 0.5 and found.groupby("rule")["saved"].max()[MARGIN] == 0
    with pytest.raises(ValueError, match=f"{HIGH} .*{DEEP} .*{NOTES} .* 1"):
        study.rule_of(scores, table({LOW: 0.001}), DEEP, NOTES, 1, HIGH)


def test_an_encoder_has_no_probes_and_nothing_is_pruned_where_all_are_kept():
    scores = record(settled=True, model=ENCODER, pools=10)
    settings = table({LOW: 0.001, HIGH: 0.1, MARGIN: 0}, ENCODER, N)
    found = study.outcomes(scores, settings, [ENCODER], [NOTES], [N], some=[0, 1])
    assert set(found["rule"]) == {LOW, HIGH, MARGIN}
    assert set(found["saved"]) == {0} and set(found["kept"].map(sum)) == {N}


def test_margins_are_fitted_for_each_k():
    fitted = []

    def fit(pools, k):
        fitted.append(k)
        return margins.fit(pools, k)

    settings = pd.concat([table({MARGIN: 0.01}, k=k) for k in (1, 2)])
    study.outcomes(record(settled=False), settings, [DEEP], [NOTES], [1, 2], [MARGIN], study.Mechanism(fit=fit))
    assert fitted == [1, 2]


def test_what_rerankers_gain_is_over_the_embedder_s_first_candidate():
    scores = pd.concat([record(settled=True, model=name, pools=1) for name in MODELS]).assign(nearest=0.8)
    for gain in values.over_embedder(born(scores, "recorded")):
        assert (gain.value, gain.n) == (pytest.approx(25), 5)


# Seconds

COST = study.LayerCosts("m", 128, np.array([1.0, 2, 4]), np.array([1.0, 2, 3]), 0.5, {"HF": 7.0, "HF Offload": 9.0})


def test_seconds_by_hand():
    assert COST.seconds(np.array([3, 1])) == pytest.approx(2 * 0.5 + 2 + 1 + 1)
    assert COST.seconds(np.array([2, 2, 2, 2])) == pytest.approx(2 + 3 + 3)


def test_seconds_of_every_round_stand_beside_each_other():
    slow = replace(COST, layer=2 * COST.layer, whole={"HF": 8.0, "HF Offload": 9.0})
    rows = {"layer": [np.array([4, 2])], "layers": LAYERS, "k": 1, "set": RAG, "name": "a", "pool": 0}
    table = study.timed(born(pd.DataFrame(rows), "replayed"), [COST, slow])
    full = study.FULL_LAYERS
    expected = [COST.seconds(np.array([full, full // 2])), slow.seconds(np.array([full, full // 2]))]
    assert table["GRATING"].iloc[0].tolist() == pytest.approx(expected)
    assert table["HF"].iloc[0].tolist() == [14, 16] and kind_of(table) == "recorded+predicted+replayed"
    middle = study.median_cost([COST, slow])
    assert middle.layer.tolist() == [1.5, 3, 4.5] and middle.whole["HF"] == 7.5
    read = study.end_to_end(table, 1.0, lambda count: 10.0 * count)
    assert read["HF"].iloc[0].tolist() == [25, 27] and read[study.NO_RERANKER].iloc[0].tolist() == [21, 21]


# A reranker of one's own


@pytest.mark.long
def test_it_is_scored_live_as_the_record_has_it():
    name = "minilm-reranker"
    (pool,) = live.scored(name, NOTES, [1])
    recorded = study.pools_of(study.recorded(), name, NOTES)[1]
    assert pool.name == recorded.name and (pool.relevant == recorded.relevant).all()
    assert np.abs(pool.scores - recorded.scores).max() < 1e-3


@pytest.mark.long
def test_the_benchmark_of_peers_ranks_by_the_margin_rule():
    bench = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "bench_grating_peers.py"))
    texts = [f"{name}\n{getattr(str, name).__doc__}" for name in dir(str)[-20:]]
    found = bench["ours"](bench["PRUNED"], ENCODER)("Is it upper case?", texts)
    assert sorted(found[np.isfinite(found)].tolist()) == list(range(-9, 1))


# Applications


def test_an_edit_s_difference_is_paired_and_its_value_less_the_shipped_one(capsys: pytest.CaptureFixture[str]):
    both = {"shipped": {("low",): [0.1, 0.5, 0.3]}, "your edit": {("low",): [0.0, 0.4, 0.2]}}
    shown = live.beside(both, ["rule"], "recorded")
    assert dict(zip(shown["version"], shown["value"].round(6), strict=True)) == {"shipped": 0.3, "your edit": 0.2}
    assert "your edit less shipped, at most: -0.1 [-0.1, -0.1]" in capsys.readouterr().out


def test_the_half_that_a_threshold_was_found_on_is_not_pruned_by_it(monkeypatch):
    pools = study.pools_of(record(settled=True, pools=4), DEEP, RAG)
    order = iter(range(len(pools)))

    def decided(pool, k, how, thresholds):  # the mean precision of a half tells which pools are in it
        same = {"name": pool.name, "precision": 2.0 ** next(order), "full": 0.0, "overlap": 1.0, "layer": np.ones(1),
                "kept": np.ones(1, bool), "layers": 1}  # fmt: skip
        return [same | {"saved": threshold} for threshold in thresholds]

    halves = len(pools) - len(pools) // 2
    searched = []

    def lowest(every, values, target):
        searched.append({place for place in range(len(pools)) if round(values[0] * halves) >> place & 1})
        return every[len(searched) % len(every)]

    monkeypatch.setattr(study, "_decided", decided)
    rows = study.halved(record(settled=True, pools=4), [DEEP], RAG, 2, study.Mechanism(lowest=lowest), every=EVERY)
    assert len(searched) == study.HALVINGS
    for turn, of_half in enumerate(searched):
        rest = rows.iloc[turn * (len(pools) // 2) :][: len(pools) // 2]
        assert len(of_half) == halves and set(rest["pool"]) == set(range(len(pools))) - of_half
        assert (rest["saved"] == EVERY[(turn + 1) % len(EVERY)]).all()


# Values


def timed_cells(names: list[str], rule: str = LOW) -> list[values.Cell]:
    """Of pools about these documents: pruning takes 5 to 8 of 10 seconds, and loses every other pool."""
    seconds = 5.0 + np.arange(len(names)) % 4
    rows = {"model": DEEP, "set": NOTES, "k": 1, "rule": rule, "name": names, "pool": range(len(names)), "full": 1.0,
            "overlap": 0.75, "saved": 0.4, "precision": np.arange(len(names)) % 2}
    rows |= {OURS: [np.array([x]) for x in seconds]}
    others = {UNPRUNED: 10.5, HF: 10.0, OFFLOAD: 14.0}
    rows |= {method: [np.array([taken])] * len(names) for method, taken in others.items()}
    return values.cells(born(pd.DataFrame(rows), "recorded"))


def test_questions_on_one_document_are_drawn_together():
    (apart,), (shared,) = timed_cells(list("abcdefgh")), timed_cells(list("aabbccdd"))
    assert (apart.lost.n, apart.lost.drawn, shared.lost.n, shared.lost.drawn) == (8, "pools", 4, "documents")
    assert apart.lost.value == shared.lost.value == 50 and apart.missed.value == 25
    assert apart.lost.low < 50 == shared.lost.low  # each document has a pool that is lost and one that is not


def test_the_clock_s_rounds_are_in_the_interval():
    names = list("abcdefgh")
    rows = {"model": DEEP, "set": PARAGRAPHS, "k": 1, "rule": LOW, "name": names, "pool": range(8), "full": 1.0,
            "precision": 1.0, "overlap": 1.0, "saved": 0.5}  # fmt: skip
    widths = []
    for slow in (5.0, 8.0):
        taken = {OURS: [np.array([5.0, slow])] * 8, HF: [np.array([10.0, 10.0])] * 8}
        (cell,) = values.cells(born(pd.DataFrame(rows | taken), "recorded"))
        saved, _ = cell.pair(HF)
        widths.append(saved.high - saved.low)
        assert saved.value == pytest.approx(100 - 5 * (5 + slow))
    assert widths == pytest.approx([0, 30])


def test_a_loss_of_a_point_is_at_most_a_point():
    rows = {"model": DEEP, "set": NOTES, "k": 1, "rule": LOW, "name": list("ab"), "pool": range(2), "overlap": 1.0,
            "saved": 0.5, "full": 0.95, "precision": 0.94, HF: [np.array([2.0])] * 2}
    one_point, none = (values.cells(born(pd.DataFrame(rows | {OURS: [np.array([taken])] * 2} | more), "recorded"))[0]
                       for taken, more in ((1.0, {}), (1.5, {"precision": 0.95})))  # fmt: skip
    assert values.best([one_point, none], HF) is one_point


def test_the_null_of_a_saving_is_ranking_without_pruning():
    cells = timed_cells(list("abcdefgh"))
    ours, null = (values.largest(cells, against=HF, k=1, ours=method) for method in (OURS, UNPRUNED))
    assert [part.value for part in ours] == pytest.approx([35, 50])
    assert [part.value for part in null] == pytest.approx([-5, 0]) and null[0].interval == (-5, -5)
    assert [part.value for part in CLAIMS["grating-c15"].values({"cells": cells})] == [1, 0]


def test_a_loss_counts_with_the_work_that_it_saves():
    cells = timed_cells(list("abcdefgh"))
    layers = [(layer, 1 - layer / 4, layer / 4) for layer in range(1, 5)]  # of four: saved, and the precision then
    rows = [(DEEP, 1, layer, pool, saved, right) for layer, saved, right in layers for pool in range(8)]
    fixed = pd.DataFrame(rows, columns=["model", "k", "threshold", "pool", "saved", "precision"])
    (lost, work), (lost_by_all, work_of_all) = CLAIMS["grating-c03"].values({"cells": cells, "fixed": fixed})
    assert (lost.value, work.value) == (50, pytest.approx(40)) and kind_of([lost, work]) == "replayed"
    assert (lost_by_all.value, work_of_all.value) == (50, 50)  # after two layers: at 40 % no later exit saves as much
    rule = CLAIMS["grating-c03"].rule
    assert [rule.verdict(pair) for pair in ((0, 40), (0, 0), (5, 40))] == ["reproduced", "contradicted", "contradicted"]


def test_memory_is_a_range_of_runs_of_both_kinds():
    each = {HF: ([900.0, 1000, 1100], [90.0, 100, 110]), OURS: ([90.0, 100, 110], [160.0, 200, 240])}
    runs = [pd.DataFrame({"method": name, "rss_mb": rss, "anon_mb": anon}) for name, (rss, anon) in each.items()]
    memory = born(pd.concat(runs).assign(documents=20, tokens=500), "recorded")
    resident, anonymous = values.peak_ratio(memory, HF)
    assert (resident.n, resident.drawn, resident.ends) == (3, "runs", "range")
    assert (resident.value, *resident.interval) == pytest.approx((10, 900 / 110, 1100 / 90))
    assert (anonymous.value, *anonymous.interval) == pytest.approx((0.5, 90 / 240, 110 / 160))
    (rule,) = (row.rule for row in CLAIMS.values() if "resident and anonymous" in row.headline)
    assert (rule.verdict((resident, anonymous)), rule.verdict((10, 1.2))) == ("trend", "reproduced")
    sometimes = replace(anonymous, value=1.16, low=0.8, high=1.2)
    assert rule.verdict((10, sometimes)) == "trend"

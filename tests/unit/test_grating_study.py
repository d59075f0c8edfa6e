"""Calibrated rules, what they do to recorded pools, and what that takes: on synthetic scores and by hand."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ondevice.evidence import born, kind_of, load
from ondevice.run import Layout
from ondevice_papers.grating.margins import CHANCES
from ondevice_papers.grating.pools import measure
from ondevice_studies.grating import study, values
from ondevice_studies.grating.claims import CLAIMS
from ondevice_studies.grating.full_size import HF, OFFLOAD, OURS
from ondevice_studies.grating.questions import CLOZE, QUESTIONS, RAG, VIDEO
from ondevice_studies.grating.study import BASE, ENCODER, HIGH, LOW, MARGIN, PROBED, UNPRUNED

LAYERS, N = 4, 6
EVERY = (np.inf, 1.0, 0.1, 0.001)
Rows = list[dict[str, Any]]


def scored(model: str, set_: str, split: str, pools: int, settled: bool, seed: int = 0) -> Rows:
    """Pools with one relevant candidate, which the last layer and probes find. settled: so does every layer."""
    rng, rows = np.random.default_rng(seed), []
    for number in range(pools):
        final = rng.permutation(N) * 2.0 - 5
        history = np.tile(final, (LAYERS, 1))
        probed = history[:-1].flatten() if model in study.DECODERS else np.empty(0)
        if not settled:
            history[:-1] = rng.permuted(history[:-1], axis=1)
        rows.append({"model": model, "set": set_, "split": split, "pool": number, "name": f"{split} {number}",
                     "layers": LAYERS, "n": N, "relevant": final == final.max(), "scores": history.ravel(),
                     "probed": probed})  # fmt: skip
    return rows


def record(settled: bool, model: str = BASE, pools: int = 110) -> pd.DataFrame:
    rows = [row for set_ in (QUESTIONS, CLOZE, RAG) for split, count in (("validation", pools), ("test", 5))
            for row in scored(model, set_, split, count, settled)]  # fmt: skip
    return born(pd.DataFrame(rows), "recorded")


def table(settings: dict[str, float], model: str = BASE, k: int = 1) -> pd.DataFrame:
    """As the record `calibrated` has them."""
    rows = [{"model": model, "set": QUESTIONS, "k": k, "rule": rule, "setting": one} for rule, one in settings.items()]
    return pd.DataFrame(rows)


# Pools


def test_what_is_judged_are_test_pools():
    scores = record(settled=False)
    assert [pool.name for pool in study.pools_of(scores, BASE, CLOZE)] == [f"test {number}" for number in range(5)]
    assert {pool.split for pool in study.pools_of(scores, BASE, CLOZE)} == {"test"}
    found = study.outcomes(scores, table({LOW: 0.1}), [BASE], [QUESTIONS], [1], [LOW])
    assert found["name"].tolist() == [f"test {number}" for number in range(5)]
    few = study.outcomes(scores, table({LOW: 0.1}), [BASE], [QUESTIONS], [1], [LOW], some=[3, 1])
    assert few["name"].tolist() == ["test 3", "test 1"] and few["pool"].tolist() == [3, 1]


@pytest.mark.parametrize("set_", [QUESTIONS, CLOZE])
def test_the_recorded_pools_of_both_splits_are_apart_and_curves_are_of_test_pools(set_: str):
    scores, curves = load("grating", "scores"), load("grating", "curves")
    for model in study.MODELS:
        valid, test = (study.pools_of(scores, model, set_, split) for split in ("validation", "test"))
        assert not {pool.name for pool in valid} & {pool.name for pool in test}
        assert {pool.split for pool in valid} == {"validation"} and {pool.split for pool in test} == {"test"}
        judged = scores.query("model == @model and set == @set_ and split == 'test'")
        assert [pool.name for pool in test] == judged["name"].tolist()
        drawn = curves.query("model == @model and k == 5 and threshold == inf") if set_ == QUESTIONS else ()
        assert not len(drawn) or drawn["full"].tolist() == measure(test, 5, None)["full"].tolist()


def test_the_notebook_reads_validation_pools_where_it_calibrates_alone():
    cells = json.loads(Layout().notebook("grating").read_text(encoding="utf-8"))["cells"]
    reading = {
        cell["id"]
        for cell in cells
        if cell["cell_type"] == "code" and re.search("[\"']validation[\"']", "".join(cell["source"]))
    }
    assert reading == {"calibrated-again", "agents", "own"}


def test_pools_come_back_as_they_were_recorded():
    scores = record(settled=False, pools=3)
    (first, *_), (probed, *_) = (study.pools_of(scores, BASE, CLOZE, "validation", one) for one in (False, True))
    row = scores[scores["set"] == CLOZE].iloc[0]
    assert (first.scores == row["scores"].reshape(LAYERS, N)).all() and (first.relevant == row["relevant"]).all()
    assert (probed.scores == first.scores[-1]).all() and (first.scores[0] != first.scores[-1]).any()
    assert (first.split, first.name) == ("validation", "validation 0") and study.pools_of(scores, ENCODER, CLOZE) == []


# Rules


@pytest.mark.parametrize("settled", [True, False])
def test_rules_are_as_aggressive_as_validation_pools_allow(settled: bool):
    scores = record(settled)
    rows = {row["rule"]: row for row in study.calibrated(scores, BASE, QUESTIONS, 1, every=EVERY)}
    assert list(rows) == [LOW, HIGH, MARGIN, PROBED] and rows[MARGIN]["n"] == 165 and rows[LOW]["n"] == 110
    assert rows[LOW]["setting"] == rows[HIGH]["setting"] and (rows[LOW]["setting"] == EVERY[-1]) == settled
    assert rows[PROBED]["setting"] == CHANCES[-1] and (rows[MARGIN]["setting"] == CHANCES[-1]) == settled
    assert all(rows[name]["p_value"] <= 0.05 for name in (MARGIN, PROBED))
    found = study.outcomes(scores, pd.DataFrame(rows.values()), [BASE], [QUESTIONS, RAG], [1])
    assert (found["overlap"] == 1).all() and (found["precision"] == found["full"]).all()
    saved = found.groupby("rule")["saved"].mean()
    assert saved[PROBED] > 0.5 and (saved[[LOW, HIGH, MARGIN]] > 0.5).all() == settled
    assert len(found) == 4 * 2 * 5 and kind_of(found) == "recorded"


def test_a_chance_of_0_prunes_nothing_and_a_rule_that_is_missing_is_refused():
    scores = record(settled=True, pools=10)
    found = study.outcomes(scores, table({MARGIN: 0.0, LOW: 0.001}), [BASE], [QUESTIONS], [1], [MARGIN, LOW])
    assert found.groupby("rule")["saved"].min()[LOW] > 0.5 and found.groupby("rule")["saved"].max()[MARGIN] == 0
    with pytest.raises(ValueError, match=f"{HIGH} .*{BASE} .*{QUESTIONS} .* 1"):
        study.rule_of(scores, table({LOW: 0.001}), BASE, QUESTIONS, 1, HIGH)


def test_an_encoder_has_no_probes_and_nothing_is_pruned_where_all_are_kept():
    scores = record(settled=True, model=ENCODER, pools=10)
    settings = table({LOW: 0.1, HIGH: 0.1, MARGIN: 0}, ENCODER)
    assert set(study.outcomes(scores, settings, [ENCODER], [RAG], [1])["rule"]) == {LOW, HIGH, MARGIN}
    few = study.outcomes(scores, table({LOW: 0.001}, ENCODER, N), [ENCODER], [RAG], [N], [LOW], some=[0, 1])
    assert few["saved"].tolist() == [0, 0] and few["kept"].map(sum).tolist() == [N, N]


# Seconds

COST = study.Costs("m", 128, np.array([1.0, 2, 4]), np.array([1.0, 2, 3]), 0.5, {"HF": 7.0, "HF Offload": 9.0})


@pytest.mark.parametrize(
    ("runs", "seconds"), [([3, 1], 2 * 0.5 + 2 + 1 + 1), ([1, 1, 1], 1.5 + 2.5), ([2, 2, 2, 2], 2 + 3 + 3)]
)
def test_seconds_by_hand(runs: list[int], seconds: float):
    assert COST.seconds(np.array(runs)) == pytest.approx(seconds)


def outcome(*layers: list[int], **columns: Any) -> pd.DataFrame:
    rows = {"layer": [np.array(one) for one in layers], "layers": LAYERS, "k": 1}
    return born(pd.DataFrame(rows | columns), "replayed")


# Values


def timed_cells(names: list[str], rule: str = LOW) -> list[values.Cell]:
    """Of pools about these documents: pruning takes 5 to 8 of 10 seconds, and loses every other pool."""
    seconds = 5.0 + np.arange(len(names)) % 4
    rows = {"model": BASE, "set": CLOZE, "k": 1, "rule": rule, "name": names, "pool": range(len(names)), "full": 1.0,
            "precision": np.arange(len(names)) % 2, OURS: seconds, UNPRUNED: 10.5, HF: 10.0, OFFLOAD: 14.0}  # fmt: skip
    return values.cells(born(pd.DataFrame(rows), "recorded"))


def test_questions_on_one_document_are_drawn_together():
    (apart,), (shared,) = timed_cells(list("abcdefgh")), timed_cells(list("aabbccdd"))
    assert (apart.lost.n, apart.lost.drawn, shared.lost.n, shared.lost.drawn) == (8, "pools", 4, "documents")
    assert apart.lost.value == shared.lost.value == 50
    assert apart.lost.low < 50 == shared.lost.low  # each document has a pool that is lost and one that is not


def test_the_null_of_a_saving_is_ranking_without_pruning():
    cells = timed_cells(list("abcdefgh"))
    ours, null = (values.largest(cells, against=HF, k=1, ours=method) for method in (OURS, UNPRUNED))
    assert [part.value for part in ours] == pytest.approx([35, 50])
    assert [part.value for part in null] == pytest.approx([-5, 0]) and null[0].interval == (-5, -5)
    assert [part.value for part in CLAIMS["grating-c15"].values({"cells": cells})] == [1, 0]


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


def test_a_fixed_exit_is_a_curve_of_its_own():
    fixed = values.exits(record(settled=True, pools=1), [BASE], [1])
    assert fixed["precision"].eq(1).all() and fixed["saved"].unique().tolist() == [0.75, 0.5, 0.25, 0]
    assert sorted(fixed["pool"].unique()) == [0, 1, 2, 3, 4]


# Agents


def pool(number: int, split: str, final: list[float], right: int, name: str = "open; tap; type") -> dict[str, Any]:
    return {"model": ENCODER, "set": VIDEO, "split": split, "pool": number, "name": name, "layers": 1, "n": 2,
            "relevant": np.arange(2) == right, "scores": np.array(final), "probed": np.empty(0)}  # fmt: skip


def tasks(kept: int) -> pd.DataFrame:
    """Validation sets the cut-off to 2. In the first task 0 is right, in the second no score reaches the cut-off."""
    rows = [pool(0, "validation", [1, 0], 1), pool(1, "validation", [2, 0], 0), pool(0, "test", [5, 3], 0),
            pool(1, "test", [1, 0], 1)]  # fmt: skip
    found = outcome([1, 1], [1, 1], model=ENCODER, pool=[0, 1], kept=[np.arange(2) == kept, np.arange(2) == 0])
    found = found.assign(HF=10.0, GRATING=4.0)
    return study.agents(born(pd.DataFrame(rows), "recorded"), found, VIDEO, call=100, before=1)


@pytest.mark.parametrize(("kept", "done"), [(0, 1), (1, 0)])
def test_a_wrong_replay_costs_the_success_and_a_refused_one_calls(kept: int, done: float):
    made = tasks(kept).set_index(["request", "method"])
    assert made["seconds"].tolist() == [11, 5, 300, 311, 305, 300]
    assert made["done"].tolist() == [1, done, 1, 1, 1, 1]
    assert made["replayed"].tolist() == [True, True, False, False, False, False]
    assert "simulated" in kind_of(made)

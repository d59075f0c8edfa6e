"""Calibrated rules, what they do to recorded pools, and what that takes: on synthetic scores and by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from ondevice.evidence import born, kind_of
from ondevice_papers.grating.margins import CHANCES
from ondevice_studies.grating import study
from ondevice_studies.grating.questions import CLOZE, QUESTIONS, RAG, VIDEO
from ondevice_studies.grating.study import BASE, ENCODER, HIGH, LOW, MARGIN, PROBED

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
        rows.append({"model": model, "set": set_, "split": split, "pool": number, "name": f"{number}",
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


def test_pools_come_back_as_they_were_recorded():
    scores = record(settled=False, pools=3)
    (first, *_), (probed, *_) = (study.pools_of(scores, BASE, CLOZE, "validation", one) for one in (False, True))
    row = scores[scores["set"] == CLOZE].iloc[0]
    assert (first.scores == row["scores"].reshape(LAYERS, N)).all() and (first.relevant == row["relevant"]).all()
    assert (probed.scores == first.scores[-1]).all() and (first.scores[0] != first.scores[-1]).any()
    assert (first.split, first.name) == ("validation", "0") and study.pools_of(scores, ENCODER, CLOZE) == []


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
    few = study.outcomes(scores, table({LOW: 0.001}, ENCODER, N), [ENCODER], [RAG], [N], [LOW], some=slice(2))
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

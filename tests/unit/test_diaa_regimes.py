"""Speeds by regime, on counts that can be worked out by hand."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from ondevice import evidence
from ondevice_studies.diaa import regimes
from ondevice_studies.diaa.regimes import Regime


def answers() -> pd.DataFrame:
    rows = [("vanilla", 12), ("DIAA", 12), ("layer skipping", 12)]
    table = pd.DataFrame(rows, columns=["method", "decoded"]).assign(model="m", task="qa", request="r")
    return evidence.born(table, "recorded")


def passes() -> pd.DataFrame:
    rows = [("DIAA", 4, 0)] * 6 + [("layer skipping", 2, 3)] * 4
    table = pd.DataFrame(rows, columns=["method", "drafted", "drafting_passes"])
    table = table.assign(model="m", task="qa", request="r")
    return evidence.born(table, "recorded")


def test_the_papers_regime_gives_token_recycling_the_papers_speed():
    for size, speed in (("3B", 2.08), ("1B", 1.83), ("7B", 1.31)):
        regime = regimes.implied(size)
        assert 2.73 / regime.cost(81) == pytest.approx(speed)
        assert regime.cost(1) == 1 and regime.kind == "simulated"
        assert regime.cost(41) == pytest.approx((1 + regime.cost(81)) / 2)


def test_speeds_are_tokens_over_the_cost_of_all_passes():
    regime = Regime("x", "simulated", np.array([1.0, 5.0, 9.0]), np.array([1.0, 2.0, 4.0]))
    table = regimes.timed(answers(), passes(), regime).set_index("method")
    assert table.loc["vanilla", "speed"] == 1
    assert table.loc["DIAA", "spent"] == 6 * 2 and table.loc["DIAA", "speed"] == 1
    assert table.loc["layer skipping", "spent"] == 4 * (1.5 + 3 * 0.5)
    assert evidence.kind_of(table) == "simulated"
    assert regime.cost([13]) == [6.0]


def curves() -> pd.DataFrame:
    columns = {"machine": "here", "model": "m", "weights": "4bit", "arithmetic": "int8", "threads": 2, "run": 1}
    padded = pd.DataFrame({"rows": [1, 2, 4], "mean": [2.0, 2.0, 3.0], "rows_alone": "padded", "cached": 256})
    alone = pd.DataFrame({"rows": [1], "mean": [1.0], "rows_alone": "alone", "cached": 256})
    shorter = padded.assign(cached=64, mean=9.0)
    return pd.concat([padded, alone, shorter], ignore_index=True).assign(**columns)


def test_a_measured_regime_is_the_padded_curve_behind_256_tokens():
    regime = regimes.measured(curves(), "here", "m", "4bit", "int8", 2)
    assert regime.cost([1, 2, 3, 4, 6]).tolist() == [1.0, 1.0, 1.25, 1.5, 2.0]
    assert regime.name == "4 bits in integers, 2 threads, here" and regime.kind == "recorded"
    table = regimes.timed(answers(), passes(), regime)
    assert evidence.kind_of(table) == "recorded+predicted"


def test_a_curve_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="no curve of m in float32"):
        regimes.measured(curves(), "here", "m", "float32", "float32", 2)


def test_all_regimes_of_a_model_are_by_machine_format_and_threads(monkeypatch):
    table = pd.concat([curves(), curves().assign(arithmetic="float32"), curves().assign(model="other")])
    monkeypatch.setattr(evidence, "times", lambda paper, name: evidence.born(table, "recorded"))
    names = ["4 bits in integers, 2 threads, here", "4 bits, 2 threads, here"]
    assert list(regimes.all_measured("m")) == names

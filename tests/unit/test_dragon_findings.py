"""Values of claims: each moves where what it measures moves."""

import numpy as np
import pandas as pd
import pytest

from ondevice.dragon import experiments, findings, language_modelling
from ondevice.dragon.rules import RULES


def losses(dragon: float, drcg: float, spread: float = 0.0) -> pd.DataFrame:
    """Nats of 12 windows of 10 tokens; no retrieval costs 3 a token. spread: of DRAGON's, from window to window."""
    each = {("no retrieval", 0): 3.0, ("CRCG/Cloud, output", 2): drcg, ("CRCG/Cloud, output", 4): drcg,
            ("RAG-Sequence", 2): dragon, ("RAG-Sequence", 4): dragon}  # fmt: skip
    for documents in (2, 4):
        each |= {("DRAGON", documents): dragon, ("CRCG/Cloud", documents): drcg, ("CRCG/Device", documents): drcg,
                 ("DRCG", documents): drcg}  # fmt: skip
    return pd.DataFrame([
        dict(method=method, documents=n, window=w, tokens=10, read=1,
             nats=10 * (nats + (spread * (-1) ** w if method == "DRAGON" else 0)))
        for (method, n), nats in each.items() for w in range(12)
    ])  # fmt: skip


def values(*frames: pd.DataFrame) -> findings.Values:
    by_model = {f"model {i}": frame for i, frame in enumerate(frames)}
    tables = {name: language_modelling.perplexities(frame) for name, frame in by_model.items()}
    return findings.language_modelling_values(tables, findings.gains(by_model))


def test_gains_have_an_interval_and_c01_repeats_the_larger():
    found = values(losses(2.0, 2.5), losses(2.2, 2.5))
    none, best, other, drcg = np.exp([3.0, 2.0, 2.2, 2.5])
    assert found["dragon-c02"] == pytest.approx([(none - best) / (none - drcg)] * 2)
    assert found["dragon-c03"] == pytest.approx([(none - other) / (none - drcg)] * 2)
    assert found["dragon-c01"] == found["dragon-c02"]
    ratio, low = values(losses(2.0, 2.5, spread=2.0))["dragon-c02"]
    assert low < 1 < ratio
    assert RULES["dragon-c02"].verdict((ratio, low)) == "trend"


def test_the_way_of_aggregating_is_told_from_the_number_of_documents():
    frame = losses(2.0, 2.5)
    same, better = values(frame)["dragon-c06"], frame.copy()
    better.loc[better["method"] == "CRCG/Cloud, output", "nats"] -= 1.0
    apart = values(better)["dragon-c06"]
    assert same[1] == pytest.approx(1.0) and apart[1] == pytest.approx(np.exp(0.1))
    assert [RULES["dragon-c06"].verdict(value) for value in (same, apart)] == ["reproduced", "trend"]


def test_both_distributed_baselines_are_judged():
    times = {experiments.DRAGON: (9, 10), experiments.TW: (10, 20), experiments.SW: (10, 10), experiments.CRCG: (8, 8)}
    rows = [dict(pace="imposed", method=method, delay_ms=delay, per_token_ms=ms) for method, series in times.items()
            for delay, ms in zip((0.0, 300.0), series, strict=True)]  # fmt: skip
    value = findings.per_token(pd.DataFrame(rows), "imposed")["dragon-c13"]
    assert value == (2.0, 1.0) and RULES["dragon-c13"].verdict(value) == "contradicted"


def test_formulas_and_theorem_2():
    found = findings.formulas()
    assert found["dragon-c31"] == pytest.approx(0) and found["dragon-c35"] == pytest.approx((1, 1, 1.356), abs=1e-3)
    paths, unrelated = findings.overlap()
    assert paths == pytest.approx(1) and 0.9 < unrelated < 1
    assert findings.sizes()["dragon-c21"] == pytest.approx(48 / 7)

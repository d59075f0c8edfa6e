"""Values of claims: each moves where what it measures moves, and its rule contradicts data that is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ondevice.evidence import Estimate, born, estimates
from ondevice.grating import claims, full_size
from ondevice.grating.questions import CONTEXT, QUESTIONS, RAG
from ondevice.grating.rules import RULES
from ondevice.grating.study import BASE, DEEP, HIGH, LOW, MARGIN, MODELS, NO_RERANKER

HF, OFFLOAD, OURS = full_size.HF, full_size.OFFLOAD, full_size.OURS
WHOLE_LAYERS, IN_MEMORY = full_size.WHOLE_LAYERS, full_size.IN_MEMORY
BASELINE, ONE_BATCH, CHUNKS, WINDOW, CACHE = full_size.STEPS
Cells = dict[tuple[str, int, str], tuple[float, float]]  # (GRATING's seconds, precision) by model, K and rule


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(estimates, "DRAWS", 100)


def values(found: claims.Values, claim: str) -> Any:
    """As plain numbers."""
    one = found[f"grating-{claim}"]
    return one.value if isinstance(one, Estimate) else tuple(part.value for part in one)  # type: ignore[union-attr]


def verdict(found: claims.Values, claim: str) -> str:
    return RULES[f"grating-{claim}"].verdict(found[f"grating-{claim}"])  # type: ignore[union-attr]


def verdicts(found: claims.Values) -> dict[str, str]:
    return {claim.removeprefix("grating-"): verdict(found, claim.removeprefix("grating-")) for claim in found}


# Figure 8

PAPER: Cells = {  # against 100 s of HF and 250 s of HF Offload
    ("a", 1, LOW): (28, 0.995), ("a", 1, HIGH): (60, 1), ("a", 10, LOW): (95, 0.992), ("a", 10, HIGH): (98, 1),
    ("a", 1, MARGIN): (1, 0.5), ("a", 10, MARGIN): (200, 1),
}  # fmt: skip


SETTINGS = pd.DataFrame([("a", "s", k, rule, tau) for k in (1, 10) for rule, tau in ((LOW, 0.5), (HIGH, 1.0))],
                        columns=["model", "set", "k", "rule", "setting"])  # fmt: skip


def cells(some: Cells, set_: str = "s", **seconds: float) -> list[claims.Cell]:
    """400 pools each, in which the full model is always right. seconds: of further methods."""
    others = {HF: 100.0, OFFLOAD: 250.0} | seconds
    rows = [{"model": model, "set": set_, "k": k, "rule": rule, "pool": pool, "full": 1.0, "precision": precision,
             OURS: ours, **others}
            for (model, k, rule), (ours, precision) in some.items() for pool in range(400)]  # fmt: skip
    return claims.cells(born(pd.DataFrame(rows), "recorded"), tuple(others))


def micro(**changed: tuple[float, float]) -> claims.Values:
    """changed: a cell of PAPER, such as low_10."""
    new = {("a", int(name.split("_")[1]), name.split("_")[0]): cell for name, cell in changed.items()}
    return claims.micro(cells(PAPER | new), SETTINGS)


def test_a_cell_says_what_is_saved_and_lost_of_the_means():
    rows = pd.DataFrame({"model": "a", "set": "s", "k": 1, "rule": LOW, "pool": [0, 1], "full": [1, 0.5],
                         "precision": [0.5, 0.5], OURS: [1, 5], HF: [2, 10], OFFLOAD: [20, 10]})  # fmt: skip
    (cell,) = claims.cells(born(rows, "recorded"))
    saved, loss = cell.pair(OFFLOAD)
    assert (cell.key, saved.value, loss.value) == (("a", "s", 1, LOW), pytest.approx(80), pytest.approx(25))
    assert (saved.low, saved.high) == pytest.approx((50, 95)) and (loss.low, loss.high, loss.n) == (0, 50, 2)
    assert cell.pair(HF)[0].low == pytest.approx(50) == cell.pair(HF)[0].high  # drawn together


def test_no_loss_in_so_many_pools_is_not_none_in_all():
    (cell,) = cells({("a", 1, LOW): (50, 1.0)})
    assert (cell.lost.value, cell.lost.low) == (0, 0) and cell.lost.high == pytest.approx(0.746, abs=1e-3)
    (lossy,) = cells({("a", 1, LOW): (50, 0.9)})
    assert lossy.lost.high == pytest.approx(10)


def test_the_papers_micro_benchmarks_are_reproduced():
    found = micro()
    assert values(found, "c12") == pytest.approx((72, 0.5)) and values(found, "c13") == pytest.approx((88.8, 0.5))
    assert values(found, "c01") == values(found, "c13") and values(found, "c14") == pytest.approx((62, 0.8))
    assert values(found, "c03") == pytest.approx(0.8)
    assert values(found, "c15") == 1 and values(found, "c16") == (1, 1)
    assert {verdicts(found)[claim] for claim in ("c01", "c03", "c12", "c13", "c14")} == {"reproduced"}


def test_a_lossy_cell_never_wins_over_a_lossless_one():
    """And what is reported with a saving is the loss of the same cell."""
    lossy = micro(low_1=(1, 0.989))
    assert values(lossy, "c12") == pytest.approx((40, 0)) and values(lossy, "c03") == pytest.approx(1.1)
    neither = micro(low_1=(1, 0.98), high_1=(60, 0.97))
    assert values(neither, "c12") == pytest.approx((99, 2)) and verdict(neither, "c12") != "reproduced"
    some = cells(PAPER | {("a", 1, LOW): (1, 0.989)})
    assert claims.best(some[:2], HF) is some[1] and claims.best(some[:1], HF) is some[0]


def test_c14_is_the_least_of_the_best_of_each_group():
    both = cells(PAPER | {("b", 10, LOW): (150, 1.0), ("b", 10, HIGH): (240, 1.0)})
    groups = list(claims.grouped(cell for cell in both if cell.key[2] == 10))
    assert [[cell.key[0] for cell in group] for group in groups] == [["a"] * 3, ["b"] * 2]
    settings = pd.concat([SETTINGS, SETTINGS.assign(model="b")])
    assert values(claims.micro(both, settings), "c14") == pytest.approx((40, 0))


def test_shares_are_of_models_sets_and_ks():
    assert values(micro(low_10=(101, 1.0), high_10=(102, 1.0)), "c15") == 0.5  # slower than HF, both
    assert values(micro(low_10=(101, 1.0)), "c15") == 1  # the faster one counts
    assert values(micro(high_1=(60, 0.99)), "c16") == (0.5, 1)
    assert values(micro(high_1=(20, 1.0)), "c16") == (1, 0.5)
    assert values(micro(low_1=(60, 1.0), high_10=(90, 0.9)), "c16") == (0.5, 0)


# Figures 10 and 2, and the embedder


def trade_off(saved: Sequence[float], precision: Sequence[float]) -> claims.Values:
    rows = [{"model": model, "k": 1, "threshold": n, "pool": pool, "saved": s, "precision": p}
            for model, (ss, ps) in {"a": (saved, precision), "b": ([0.6, 0.3, 0.1], [0.1, 0.2, 0.3])}.items()
            for n, (s, p) in enumerate(zip(ss, ps, strict=True)) for pool in (0, 1)]  # fmt: skip
    return claims.trade_off(born(pd.DataFrame(rows), "replayed"))


def test_a_trade_off_is_the_least_correlation_with_the_threshold():
    found = trade_off([0.9, 0.5, 0.2], [0.1, 0.3, 0.5])
    assert values(found, "c19") == pytest.approx((1, 1)) and verdict(found, "c19") == "reproduced"
    assert values(trade_off([0.9, 0.5, 0.2], [0.5, 0.3, 0.3]), "c19")[1] == pytest.approx(-np.sqrt(3) / 2)
    assert values(trade_off([0.5, 0.5, 0.5], [0.1, 0.3, 0.5]), "c19") == pytest.approx((1, 1))  # one says nothing
    assert verdict(trade_off([0.9, 0.5, 0.2], [0.5, 0.3, 0.1]), "c19") == "contradicted"
    assert verdict(trade_off([0.2, 0.5, 0.9], [0.1, 0.3, 0.5]), "c19") == "contradicted"


def recorded(scores: np.ndarray, relevant: np.ndarray, set_: str = QUESTIONS) -> pd.DataFrame:
    """The same pools [pools, L, N] of every model."""
    rows = [{"model": model, "set": set_, "split": "test", "pool": number, "name": "", "layers": len(one),
             "n": one.shape[1], "scores": one.ravel(), "relevant": relevant[number], "probed": one[:0].ravel()}
            for model in MODELS for number, one in enumerate(scores)]  # fmt: skip
    return born(pd.DataFrame(rows), "recorded")


def test_agreement_is_kendalls_tau_with_the_last_order_after_each_layer():
    final = np.arange(4.0)
    one, other = np.stack([-final, final, final]), np.stack([final, final, final])
    table = claims.agreement(recorded(np.stack([one, other]), np.ones((2, 4))), MODELS, [QUESTIONS])
    assert table["kendall"].tolist() == [0, 1, 1] * 3 and table["layer"].tolist() == [1, 2, 3] * 3
    assert table["low"].iloc[0] < 0 < table["high"].iloc[0] and set(table["layers"]) == {3}


def settled(*taus: Sequence[float], spread: float = 0.0) -> claims.Values:
    rows = [{"model": n, "layer": layer, "kendall": one, "low": one - spread, "high": one + spread, "layers": len(tau)}
            for n, tau in enumerate(taus) for layer, one in enumerate(tau, 1)]  # fmt: skip
    return claims.settled(born(pd.DataFrame(rows), "recorded"))


def test_an_order_is_settled_from_the_layer_on_which_it_stays():
    assert values(settled([0.9, 0.5, 0.8, 1]), "c11") == 0.75 and values(settled([0.8, 0.9, 0.9, 1]), "c11") == 0.25
    assert values(settled([0, 0.9, 0.9, 1], [0.9, 1]), "c11") == 0.5  # mean over models, of their own depths
    unsure = settled([0.2, 0.75, 0.85, 1], spread=0.1)["grating-c11"]
    assert (unsure.value, unsure.low, unsure.high) == (0.75, 0.5, 1)  # type: ignore[union-attr]
    assert verdict(settled([0.1, 0.9, 0.9, 1]), "c11") == "reproduced"
    assert verdict(settled([0, 0, 0, 1]), "c11") == "contradicted"


def over_embedder(right: Sequence[int], first: Sequence[int]) -> claims.Values:
    """right, first: whether the rerankers' and the embedder's first candidates are relevant; a set of such pools."""
    scores = np.tile([[[1.0, 0]]], (len(right), 2, 1))
    table = recorded(scores, np.array([[one, 1 - one] for one in right]))
    firsts = pd.DataFrame({"set": QUESTIONS, "pool": range(len(first)), "relevant": first})
    return claims.over_embedder(table, firsts.iloc[::-1], [QUESTIONS])


def test_the_gain_over_the_embedder_is_of_the_first_candidate():
    some = [1, 0, 1, 1, 1, 0] * 5
    assert values(over_embedder([1, 1, 1, 1, 1, 0] * 5, some), "c10") == (pytest.approx(25),)
    assert values(over_embedder(some, some), "c10") == (0,)
    assert verdict(over_embedder(some, some), "c10") == "contradicted"
    assert verdict(over_embedder(some, [1] * 30), "c10") == "contradicted"


# Applications

SECONDS = {(RAG, DEEP): 49.0, (RAG, BASE): 69.0, (CONTEXT, BASE): 88.0, (CONTEXT, DEEP): 50.0}


def applications(
    seconds: Mapping[tuple[str, str], float] | None = None, precision: Mapping[str, float] | None = None,
    none: float = 206.0,
) -> claims.Values:  # fmt: skip
    """seconds: GRATING's, of HF's 100. precision: in RAG, of 1. none: seconds without a reranker."""
    ours, good = SECONDS | dict(seconds or {}), {DEEP: 0.995, BASE: 1.0} | dict(precision or {})
    return claims.applications({
        set_: cells({(model, 10, HIGH): (ours[set_, model], good[model]) for model in (DEEP, BASE)}, set_,
                    **{NO_RERANKER: none}) for set_ in (RAG, CONTEXT)
    })  # fmt: skip


def test_applications_by_hand():
    found = applications()
    assert values(found, "c24") == pytest.approx((51, 0.5)) and values(found, "c25") == pytest.approx((31, 0))
    assert values(found, "c33") == pytest.approx((12, 0)) and values(found, "c34") == pytest.approx(57.3, abs=0.05)
    assert values(found, "c28") == pytest.approx(0.5) and values(found, "c04") == pytest.approx((12, 51))
    assert set(verdicts(found).values()) == {"reproduced"}


def answers(share: Mapping[tuple[str, str], float], pools: int = 100) -> claims.Values:
    """share: of the pools answered rightly, by model and way; the first of them."""
    base = {("", "all"): 0.5, ("", "first"): 0.4, (DEEP, "full"): 0.6, (BASE, "full"): 0.6, (DEEP, HIGH): 0.6,
            (BASE, HIGH): 0.6, (DEEP, LOW): 0.0, (BASE, LOW): 0.0}  # fmt: skip
    rows = [{"set": CONTEXT, "pool": pool, "model": model, "way": way, "right": pool < round(part * pools)}
            for (model, way), part in (base | dict(share)).items() for pool in range(pools)]  # fmt: skip
    return claims.answers(born(pd.DataFrame(rows), "recorded"))


def test_answers_are_over_the_best_way_without_a_reranker():
    assert values(answers({}), "c35") == pytest.approx((10, 10)) and verdict(answers({}), "c35") == "reproduced"
    assert values(answers({("", "first"): 0.55, (BASE, "full"): 0.7}), "c35") == pytest.approx((10, 5))
    assert verdict(answers({("", "all"): 0.6}), "c35") == "contradicted"
    assert verdict(answers({(DEEP, HIGH): 0.3, (BASE, HIGH): 0.3}), "c35") == "contradicted"


# Seconds and memory at full size

MB = {(HF, 20, 500): 1145, (OURS, 20, 500): 100, (OFFLOAD, 20, 500): 200, (HF, 20, 128): 1000, (OURS, 20, 128): 370,
      (ONE_BATCH, 60, 500): 1658, (CHUNKS, 60, 500): 1227, (WINDOW, 60, 500): 483, (CACHE, 60, 500): 247}  # fmt: skip


def memory(changed: Mapping[tuple[str, int, int], float] | None = None, mean: float = 0.8) -> pd.DataFrame:
    """mean: of GRATING's peak, where HF's is 95 %."""
    rows = [{"method": method, "documents": documents, "tokens": tokens, "run": run, "rss_mb": mb,
             "mean_mb": mb * (mean if method == OURS else 0.95)}
            for (method, documents, tokens), mb in (MB | dict(changed or {})).items() for run in (0, 1)]  # fmt: skip
    return born(pd.DataFrame(rows), "measured")


def test_memory_by_hand():
    found = claims.memory(memory())
    assert values(found, "c21") == 2
    assert values(found, "c27") == pytest.approx(100 * (1 - 80 / (0.95 * 1145))) and values(found, "c48") == 11.45
    assert values(found, "c32") == pytest.approx(63) and values(found, "c36") == pytest.approx(1045e6 / 2**30)
    assert values(found, "c38") == pytest.approx(44.8, abs=0.05) and values(found, "c39") == 513
    assert values(found, "c40") == pytest.approx((44.8, 7.2), abs=0.05)
    assert (values(found, "c41"), values(found, "c45")) == pytest.approx((57.8, 78.4), abs=0.05)
    assert values(found, "c43") == pytest.approx(247e6 / 2**20)
    assert {*verdicts(found).values()} == {"reproduced"}


def test_intervals_of_memory_are_the_runs_ends():
    table = memory()
    table.loc[(table["method"] == OURS) & (table["run"] == 1), "rss_mb"] *= 1.5
    found = claims.memory(table)["grating-c48"]
    assert (found.low, found.value, found.high) == pytest.approx((1145 / 150, 1145 / 125, 11.45))  # type: ignore[union-attr]


SHORT = {(HF, ""): 10.0, (OFFLOAD, ""): 14, (WHOLE_LAYERS, ""): 10.05, (IN_MEMORY, ""): 10,
         (WHOLE_LAYERS, LOW): 5.02, (IN_MEMORY, LOW): 5}  # fmt: skip
SIXTY = {(BASELINE, ""): 30.0, (ONE_BATCH, LOW): 15.3, (CHUNKS, LOW): 15.3, (WINDOW, LOW): 15.4, (CACHE, LOW): 15.45}
Seconds = dict[tuple[str, str], float]


def latency(
    short: Seconds | None = None, sixty: Seconds | None = None, loss: float = 0.5, ours_mb: float = 100,
    high: float = 60,
) -> claims.Values:  # fmt: skip
    """Rounds get slower, all methods alike. high: seconds of the cell, of HF's 100."""
    rows = [{"documents": documents, "tokens": 128, "method": method, "rule": rule, "round": n,
             "seconds": seconds * (1 + n)}
            for documents, table in ((20, SHORT | (short or {})), (60, SIXTY | (sixty or {})))
            for (method, rule), seconds in table.items() for n in (2, 0, 1)]  # fmt: skip
    peaks = memory({(OURS, 20, 500): ours_mb})
    some = cells({("a", 10, LOW): (50, 1 - loss / 100), ("a", 10, HIGH): (high, 1)})
    return claims.latency(born(pd.DataFrame(rows), "measured"), peaks, {cell.key[3]: cell for cell in some})


def test_latencies_by_hand():
    found = latency()
    assert values(found, "c23") == pytest.approx((0.5, 0.6, 1.4)) and values(found, "c37") == pytest.approx((49, 0.5))
    assert values(found, "c42") == pytest.approx(100 * 0.1 / 30)  # of the baseline, not of the step before
    assert values(found, "c44") == pytest.approx(100 * 0.05 / 30)
    assert values(found, "c46") == pytest.approx((48.5, 0.5)) and values(found, "c47") == pytest.approx((0.5, 0.4))
    assert set(verdicts(found).values()) == {"reproduced"}
    ends = found["grating-c42"]
    assert ends.low == pytest.approx(ends.value) == pytest.approx(ends.high)  # type: ignore[union-attr]  # paired


# All of them

"""Values of claims: each moves where what it measures moves, and its rule contradicts data that is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ondevice.evidence import Estimate, Rule, Value, born, kind_of
from ondevice.evidence.resampling import Resampled, resample
from ondevice_papers.dragon.cost import latency_difference, latency_per_token, speedup
from ondevice_papers.dragon.speculative_aggregation import aggregate
from ondevice_studies.dragon import analysis, study, values
from ondevice_studies.dragon.answers import ROUTER
from ondevice_studies.dragon.claims import CLAIMS
from ondevice_studies.dragon.language_modelling import CLOUD, CLOUD_OUTPUT, COUNTS, DEVICE, DRCG, NONE, SEQUENCE
from ondevice_studies.dragon.lockstep import ON_DEVICE
from ondevice_studies.dragon.pair import CRCG, DRAGON, SW, TW
from ondevice_studies.dragon.questions import HOLDERS

Perplexities = dict[str, Any]  # of a model, by method: one, or [counts]


Tables = dict[str, Any]  # by the names of the value functions' parameters


def judged(tables: Tables, claim: str) -> Value:
    return CLAIMS[f"dragon-{claim}"].values(tables)[0]


def plain(tables: Tables, claim: str) -> Any:
    """As plain numbers."""
    value = judged(tables, claim)
    return value.value if isinstance(value, Estimate) else tuple(part.value for part in value)  # type: ignore[union-attr]


def verdict(tables: Tables, claim: str) -> str:
    return CLAIMS[f"dragon-{claim}"].rule.verdict(judged(tables, claim))  # type: ignore[union-attr]


def sampled(ms: Mapping[str, float]) -> Resampled:
    """The same value of a name for four requests of each task."""
    rows = [{"task": task, "request": n, "method": name, "value": value}
            for task in HOLDERS for n in range(4) for name, value in ms.items()]  # fmt: skip
    return resample(born(pd.DataFrame(rows), "recorded"), "value")


# Figure 6


def like_the_paper(gain: float) -> Perplexities:
    """10.8 without documents; the best baseline has 10.4, and DRAGON gains with each document, up to `gain` of that."""
    return {
        NONE: 10.8, CLOUD: 10.6, DEVICE: 10.6, DRCG: 10.4, CLOUD_OUTPUT: 10.6, SEQUENCE: 10.8 - 0.4 * gain,
        DRAGON: np.linspace(10.35, 10.8 - 0.4 * gain, len(COUNTS)),
    }  # fmt: skip


def perplexity(by_method: Perplexities, spread: float = 0.0) -> Tables:
    """12 windows of 10 tokens; spread: of DRAGON's nats per token, from window to window."""
    rows = []
    for method, value in by_method.items():
        counts, apart = (0,) if method == NONE else COUNTS, spread * (method == DRAGON)
        for n, ratio in zip(counts, np.broadcast_to(value, len(counts)), strict=True):
            rows += [{"model": "m", "window": w, "method": method, "documents": n, "tokens": 10, "read": 1,
                      "cap": 512 * (method == DRAGON), "nats": 10 * (np.log(ratio) + apart * (-1) ** w)}
                     for w in range(12)]  # fmt: skip
    return {"perplexity": study.perplexities(born(pd.DataFrame(rows), "recorded"))}


def test_gains_by_hand_and_their_intervals():
    """c01: at the greatest count; c02: over the best baseline with any number of documents."""
    paper = like_the_paper(1.9)
    tables = perplexity({**paper, DRCG: np.array([10.3, *[10.4] * 7])})
    assert plain(tables, "c01") == pytest.approx(1.9)
    assert plain(tables, "c02") == pytest.approx(1.9 * 0.4 / 0.5)
    wide = judged(perplexity(paper, spread=0.5), "c02")
    assert isinstance(wide, Estimate) and wide.low < 1 < wide.value < wide.high
    assert verdict(perplexity(paper, spread=0.5), "c02") == "undecided" and (wide.n, wide.drawn) == (12, "articles")


# Figures 7 and 8


def paces(ours: float, at_300: float, right: float) -> Tables:
    """Milliseconds a token: DRAGON's at 0 and 300 ms, the device's 100, token-wise's 300, sequence-wise's 200.

    A router has 90 and 105. right: DRAGON's share of right answers, where the device has 0.4 and a router 0.5.
    """
    imposed = {f"{DRAGON} 0": ours, f"{DRAGON} 300": at_300, f"{TW} 300": 300, f"{SW} 300": 200}
    imposed |= {f"{CRCG} {delay}": 100 for delay in (0, 300)} | {f"{ROUTER} 0": 90, f"{ROUTER} 300": 105}
    return {"imposed": sampled(imposed), "right": sampled({DRAGON: right, ON_DEVICE: 0.4, ROUTER: 0.5})}


@pytest.mark.parametrize("claim", ["c10", "c11", "c12", "c16"])
def test_little_time_is_worth_nothing_without_more_right_answers(claim: str):
    assert verdict(paces(110, 120, 0.6), claim) == "reproduced"
    assert verdict(paces(110, 120, 0.4), claim) == "contradicted"
    assert verdict(paces(400, 900, 0.6), claim) == "contradicted"
    alone = {**paces(110, 120, 0.6), "ours": CRCG}
    assert verdict(alone, claim) == "contradicted"


def test_the_first_token_by_the_papers_times_waits_for_no_network_behind_the_devices_own():
    assert verdict({}, "c17") == "reproduced"
    assert plain({"overlapped": False}, "c17") == pytest.approx((1.2042 + 0.06 + 0.3) / 1.2042)
    assert verdict({"overlapped": False}, "c17") == "contradicted"


# Theorems and formulas


def biased(*arguments: Any) -> Any:
    """Algorithm 1 that takes the drafts' numbers for the coin, too."""
    *others, numbers, gamma = arguments
    return aggregate(*others, np.concatenate([numbers[:4], numbers[:1]]), gamma)


@pytest.mark.parametrize(
    ("options", "said"), [({}, "reproduced"), ({"wrong": 0.3}, "contradicted"), ({"aggregate": biased}, "contradicted")]
)
def test_theorem_1_rejects_wrong_weights_and_a_wrong_algorithm(options: dict[str, Any], said: str):
    tested = values.chi_square(8, 20_000, **options)
    assert tested.groupby("gamma_remote").size().tolist() == [8, 8] and tested["p"].between(0, 1).all()
    assert verdict({"tested": tested}, "c33") == said


def test_theorem_2_holds_on_paths_and_nearly_in_general():
    paths, unrelated = (one.value for one in values.overlap(10, 100))  # type: ignore[union-attr]
    assert paths == pytest.approx(1) and 0.9 < unrelated < 1
    wrong = {"paths": 10, "expected_acceptance": lambda p, q, eta: -float(np.minimum(p, q).sum())}
    assert verdict(wrong, "c34") == "contradicted"


@pytest.mark.parametrize(
    ("contradicted", "functions"),
    [
        (("c31", "c32"), {"difference": lambda costs, a, b: -latency_difference(costs, a, b)}),
        (("c35", "c36", "c37", "c38"), {"speedup": lambda costs, a: 2.5 - speedup(costs, a)}),
        (("c37",), {"speedup": lambda costs, a: speedup(costs, a) / (1 + costs.round_trip)}),
        (("c38",), {"speedup": lambda costs, a: speedup(costs, 1 - a)}),
        (("c41",), {"latency": lambda costs, a: latency_per_token(costs, a) + 0.1}),
    ],
)  # fmt: skip
def test_other_formulas_are_contradicted(contradicted: tuple[str, ...], functions: dict[str, Callable[..., float]]):
    assert {verdict(functions, claim) for claim in contradicted} == {"contradicted"}


def test_pipelines_are_of_the_last_token():
    tables = {"pipelines": analysis.pipelines().tokens}
    assert [plain(tables, claim) for claim in ("c39", "c40")] == [2, 4.3]
    assert {kind_of(judged(tables, claim)) for claim in ("c39", "c40")} == {"simulated"}
    assert {verdict(tables, claim) for claim in ("c39", "c40")} == {"reproduced"}
    other = tables["pipelines"].assign(per_token_s=lambda tokens: 7 * tokens["per_token_s"])
    assert {verdict({"pipelines": other}, claim) for claim in ("c39", "c40")} == {"contradicted"}


# Nulls


def test_every_judged_claim_has_a_null():
    rules = {claim: row.rule for claim, row in CLAIMS.items() if isinstance(row.rule, Rule)}
    assert rules and all(rule.null for rule in rules.values())
    by_definition = {claim for claim, rule in rules.items() if rule.null_value is not None}
    assert by_definition == {"dragon-c30"}
    assert {claim for claim in rules if not CLAIMS[claim].null} == by_definition


@pytest.mark.parametrize(
    ("claim", "null"),
    [("c31", "contradicted"), ("c32", "contradicted"), ("c35", "trend"), ("c36", "reproduced"), ("c37", "contradicted"),
     ("c38", "contradicted"), ("c41", "contradicted")],
)  # fmt: skip
def test_a_formula_is_beside_one_without_a_term(claim: str, null: str):
    """That there is no speed-up (c36) is so of token-wise aggregation, too."""
    row = CLAIMS[f"dragon-{claim}"]
    assert isinstance(row.rule, Rule)
    value, without = row.values({})
    assert without is not None
    assert [row.rule.verdict(each) for each in (value, without)] == ["reproduced", null]
    assert kind_of(value) == kind_of(without) == "analytic"


def test_a_null_takes_the_place_of_the_judged_method():
    """The side of the larger weight alone."""
    cost, benefit = CLAIMS["dragon-c11"].values(paces(110, 120, 0.6))[1]  # type: ignore[union-attr,misc]
    assert cost.value == pytest.approx(100 * (1 - 105 / 300)) and benefit.value == pytest.approx(10)

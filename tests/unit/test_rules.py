"""Kinds, estimates and rules: what a value with an interval shows of a claim."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from ondevice import evidence
from ondevice.evidence import (
    Above,
    All,
    AtLeast,
    AtMost,
    Below,
    Between,
    Both,
    Claim,
    Each,
    Either,
    Equal,
    Estimate,
    Less,
    Near,
    Never,
    Over,
    Rule,
    born,
    derived,
    exact,
    kind_of,
    mean,
    ratio,
    resampled,
    share,
    spread,
)
from ondevice.evidence.resampling import interval
from ondevice.evidence.rules import Possibly

TABLE = pd.DataFrame({"x": [1, 2, 3]})
SIX = Estimate(3, 3, 3, 6, "measured", "prompts")


def within(low, value, high, n=50):
    return Estimate(value, low, high, n, "measured")


def holds(test, *parts):
    return test.holds(tuple(x if isinstance(x, Estimate) else exact(x, "quoted") for x in parts))


# Kinds


def test_a_kind_travels_through_selections_and_joins_its_parents():
    table = born(TABLE.copy(), "recorded")
    assert kind_of(table[table["x"] > 1].assign(y=0)) == "recorded"
    joined = derived(table[["x"]].copy(), table, exact(1, "simulated"), "measured")
    assert kind_of(joined) == "measured+recorded+simulated"
    assert kind_of((exact(1, "quoted"), exact(2, "analytic"))) == "analytic+quoted"


@pytest.mark.parametrize("thing", [TABLE, 3.0, (), (exact(1, "quoted"), 2.0)])
def test_what_does_not_say_where_it_comes_from_is_refused(thing):
    with pytest.raises(ValueError, match="where it comes from"):
        kind_of(thing)


# Estimates


@pytest.mark.long  # statistics
def test_a_mean_weighs_groups_the_same_and_its_interval_covers_95_percent():
    assert mean([1, 1, 1, 1, 5, 5], "measured", groups=list("aaaabb"), drawn="prompts") == SIX
    generator = np.random.default_rng(0)
    samples = [
        mean(generator.normal(size=40), "measured", groups=[0, 1] * 20, seed=k, drawn="prompts") for k in range(100)
    ]
    assert 0.9 <= np.mean([x.low <= 0 <= x.high for x in samples]) <= 0.98
    assert np.mean([x.high - x.low for x in samples]) == pytest.approx(2 * 1.96 / math.sqrt(40), rel=0.1)


def test_an_interval_of_few_samples_is_wider_than_the_percentiles_of_its_draws():
    data = np.arange(5.0)
    narrow, wide = (stats.norm.sf(x) for x in (1.96, math.sqrt(5 / 4) * stats.t.isf(0.025, 4)))
    generator = np.random.default_rng(0)
    draws = [data[generator.integers(5, size=5)].mean() for _ in range(2000)]
    low, high = np.quantile(draws, [wide, 1 - wide])
    estimate = mean(data, "measured", drawn="prompts")
    assert estimate.interval == (low, high)
    assert low < np.quantile(draws, narrow) and high > np.quantile(draws, 1 - narrow)


def test_repeated_measurements_of_a_prompt_are_no_further_prompts():
    values = np.random.default_rng(0).normal(size=12)
    turns, prompts = np.repeat(values, 5), np.repeat(np.arange(12), 5)
    nested = mean(turns, "measured", drawn="prompts", clusters=prompts.tolist())
    alone = mean(values, "measured", drawn="prompts")
    assert (nested.n, nested.drawn) == (12, "prompts")
    assert nested.interval == pytest.approx(alone.interval)
    assert mean(turns, "measured", drawn="turns").high < nested.high
    tasks = np.repeat(["a", "b"], 30)
    assert mean(turns, "measured", tasks.tolist(), drawn="prompts", clusters=prompts.tolist()).n == 12


def test_the_ends_of_a_few_runs_are_a_range():
    runs = spread([9.4, 9.8, 9.95], "recorded", drawn="runs")
    assert (runs.value, runs.interval, runs.n, runs.ends) == (9.8, (9.4, 9.95), 3, "range")
    assert f"{runs}" == "9.8 (range 9.4 to 9.95)"
    assert runs.scaled(0.5).ends == "range"


def test_a_ratio_is_paired_by_prompt():
    slow = np.array([1.0, 10.0, 100.0, 1000.0])
    paired = ratio(2 * slow, slow, "recorded", drawn="prompts")
    assert (paired.value, paired.low, paired.high) == pytest.approx((2, 2, 2))
    assert ratio([1, 4], [1, 1], "recorded", drawn="prompts").value == pytest.approx(2)
    with pytest.raises(ValueError):
        ratio([0, 1], [1, 1], "recorded", drawn="prompts")


def test_a_share_has_wilsons_interval():
    none = share(0, 59, "recorded", drawn="prompts")
    assert (none.value, none.low, none.n) == (0, pytest.approx(0, abs=1e-12), 59) and 0.05 < none.high < 0.07


def test_one_sample_has_no_interval():
    lonely = mean([2.0, 3.0, 4.0], "measured", groups=list("aab"), drawn="prompts")
    assert (lonely.low, lonely.high) == (-math.inf, math.inf)
    rule = Rule("x", "", AtLeast(0), None, -1)
    assert rule.verdict(lonely) == "undecided" and rule.verdict(-0.1) == "contradicted"
    with pytest.raises(ValueError, match="samples"):
        mean([], "measured", drawn="prompts")


def test_a_statistic_of_ones_own_is_drawn_anew_by_its_seed():
    data = np.arange(20.0)
    runs = [
        resampled(lambda rows: float(data[rows].std()), 20, "measured", seed=seed, drawn="runs") for seed in (0, 0, 1)
    ]
    assert runs[0] == runs[1] != runs[2] and runs[0].low < runs[0].value < runs[0].high


# Tests


@pytest.mark.parametrize(
    ("test", "inside", "outside"),
    [
        (Near(2, factor=1.5), [2 / 1.5, 3.0], [1.33, 3.01]),
        (Near(-1, within=0.5), [-1.5, -0.5], [-1.6, -0.4]),
        (AtLeast(1), [1, 2], [0.99]),
        (AtMost(1), [1, 0], [1.01]),
        (Between(1, 2), [1, 2], [0.9, 2.1]),
        (Above(1), [1.01], [1, 0]),
        (Below(1), [0.99], [1, 2]),
        (Equal(1), [1], [0.999, 1.001]),
        (Never("no reason"), [], [0, 1]),
        (Possibly(AtLeast(1)), [1, within(0.5, 0.8, 1.2)], [0.9, within(0.5, 0.8, 0.9)]),
    ],
)
def test_the_ends_of_a_region(test, inside, outside):
    assert all(holds(test, x) for x in inside) and not any(holds(test, x) for x in outside)


@pytest.mark.parametrize(
    ("test", "told"),
    [(AtLeast(1), True), (AtLeast(2), None), (AtLeast(4), False), (Above(3), False), (AtMost(3), True)],
)
def test_only_a_whole_interval_is_told(test, told):
    assert holds(test, within(1, 2, 3)) is told


@pytest.mark.parametrize(
    ("test", "parts", "told"),
    [
        (Each(AtLeast(1), None), (1, -9), True),
        (Each(AtLeast(1), AtMost(0)), (1, 1), False),
        (Each(AtLeast(1), AtMost(0)), (within(0, 1, 2), 1), False),
        (Each(AtLeast(1), AtMost(0)), (within(0, 1, 2), 0), None),
        (All(Above(0)), (1, 2, 3), True),
        (All(Above(0)), (1, 0), False),
        (evidence.Any(Above(0)), (0, within(-1, 0, 1)), None),
        (evidence.Any(Above(0)), (0, -1), False),
        (Both(All(Above(0)), Over(0, 1, Below(0.5))), (1, 3), True),
        (Both(All(Above(0)), Over(0, 1, Below(0.5))), (2, 3), False),
        (Either(Above(1), Below(-1)), (-2,), True),
        (Either(Above(1), Below(-1)), (0,), False),
        (Over(0, 1, AtMost(2)), (within(1, 2, 3), within(2, 3, 4)), True),
        (Over(0, 1, AtMost(1)), (1, within(-1, 1, 2)), None),
        (Less(1, 0, AtLeast(2)), (within(1, 2, 3), within(4, 5, 6)), None),
    ],
)
def test_of_several_quantities(test, parts, told):
    assert holds(test, *parts) is told
    with pytest.raises(ValueError):  # as many values as tests
        holds(Each(Above(0), Above(0)), 1, 2, 3)


# Rules

FASTER = Rule("speed-up", "x", Near(2.22, factor=1.15), Above(1.3), wrong=1.0, null="prompt lookup", note="Paired")


@pytest.mark.parametrize(
    ("value", "verdict"),
    [
        (1.5, "trend"),
        (1.3, "contradicted"),
        (within(1.95, 2.2, 2.5), "reproduced"),
        (within(1.8, 2.2, 2.5), "trend"),
        (within(1.2, 2.0, 2.8), "undecided"),
        (within(1.1, 1.2, 1.3), "contradicted"),
    ],
)
def test_a_verdict_needs_the_whole_interval(value, verdict):
    assert FASTER.verdict(value) == verdict


@pytest.mark.parametrize("value", [math.nan, math.inf, (1.0, math.nan), ()])
def test_a_value_that_is_not_finite_judges_nothing(value):
    with pytest.raises(ValueError):
        FASTER.verdict(value)


def test_an_undecided_value_says_how_many_samples_would_decide():
    # 0.1 from the bound with a half width of 0.2: four times the samples
    needed = FASTER.needs(within(1.2, 1.4, 1.6, n=50))
    assert needed == pytest.approx(200, abs=2)
    assert FASTER.needs(Estimate(1.4, 1.2, 1.6, None, "measured")) is None
    assert FASTER.needs(within(-math.inf, 1.4, math.inf)) is None
    assert FASTER.needs(within(1.2, 1.3 + 1e-9, 1.4)) is None
    pair = Rule("two", "", All(Above(0)), None, (-1, -1))
    assert pair.needs((within(-1, 1, 3, n=10), within(-3, 1, 5, n=20))) == pytest.approx(160, abs=2)


def speed_up(times, method, scale=1):
    return scale * float(times["vanilla"] / times[method])


def test_a_claims_values_are_made_of_tables_by_name():
    tables = {"times": {"vanilla": 6.0, "ours": 2.0, "null": 6.0}, "method": "ours", "unused": None}
    claim = Claim("Speed", FASTER, speed_up)
    assert claim.values(tables) == (3.0, None) and claim.values(tables | {"scale": 2})[0] == 6.0
    # the value's own function, with other parameters
    assert Claim("Speed", FASTER, speed_up, {"method": "null"}).values(tables) == (3.0, 1.0)


def test_a_null_of_another_function_or_of_other_parameters_is_refused():
    with pytest.raises(TypeError):
        Claim("Speed", FASTER, speed_up, lambda: 0.5)
    with pytest.raises(ValueError, match="way"):
        Claim("Speed", FASTER, speed_up, {"way": "null"})


@pytest.mark.parametrize(
    ("estimate", "spec", "text"),
    [
        (Estimate(1.23456, 1.1, 1.4, 9, "measured"), "", "1.23 [1.1, 1.4]"),
        (Estimate(1.23456, 1.1, 1.4, 3, "measured", "runs", "range"), ".1f", "1.2 (range 1.1 to 1.4)"),
        (exact(1234.5, "analytic"), ",.1f", "1,234.5"),
    ],
)
def test_an_estimate_writes_itself_with_its_interval(estimate, spec, text):
    assert format(estimate, spec) == text
    assert str(estimate) == format(estimate, "") == f"{estimate}"


def test_the_interval_of_draws_holds_95_percent_of_them_and_the_value():
    draws = np.concatenate([[50.0], np.arange(101.0), [np.nan]])
    estimate = interval(draws, 7, "recorded", "rounds")
    assert (estimate.value, estimate.low, estimate.high) == (50, 2.5, 97.5)
    assert (estimate.n, estimate.kind, estimate.drawn) == (7, "recorded", "rounds")
    assert interval(np.concatenate([[200.0], np.arange(101.0)]), 7, "recorded", "rounds").interval == (2.5, 200)

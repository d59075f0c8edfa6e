"""DiSCo's claims: where the notebook shows each, the rule that judges it, and the value that is judged.

Tables are judged cell by cell. A simulated value's interval is over runs of a thousand requests, or over requests where
costs are summed; the stand-ins for the paper's services, on which all of Figures 6 and 7 rests, are one draw. A null is
the same value with something trivial in DiSCo's place: `race` spends the same budget on requests drawn at random.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from ondevice import assets, evidence
from ondevice.evidence import (
    Above,
    All,
    AtLeast,
    AtMost,
    Below,
    Between,
    Claim,
    Each,
    Either,
    Equal,
    Estimate,
    Near,
    Over,
    Rule,
    Test,
    Untested,
)
from ondevice_papers.disco import costs, quality
from ondevice_papers.disco.distributions import DEVICES
from ondevice_papers.disco.policy import SIDES, Side
from ondevice_studies.disco import cold_start, study

PLANNED, UNEVEN, AT_ONCE = "as planned", "by an uneven device", "at once"  # hand-overs that are billed

# Values. ours: the policy that is judged


def cells_beside_the_papers(sweep: pd.DataFrame, ours: str = "DiSCo") -> tuple[Estimate, ...]:
    """Table 2 beside the paper's, as `study.beside`."""
    return study.beside(study.tail_cells(sweep, policy=ours), study.paper_tail_table()["paper_percent"].tolist(), 10)


def distance_and_range(sweep: pd.DataFrame, ours: str = "DiSCo") -> tuple[Estimate, ...]:
    """(mean distance of Table 2's cells to the paper's, least cell, greatest cell), percent."""
    cells = study.tail_cells(sweep, policy=ours)
    return cells_beside_the_papers(sweep, ours)[0], study.over_runs(np.min, cells), study.over_runs(np.max, cells)


def greatest_tail_of_gpt(sweep: pd.DataFrame, ours: str = "DiSCo") -> Estimate:
    """The greatest of GPT's cells of Table 2, percent."""
    return study.over_runs(np.max, study.tail_cells(sweep, policy=ours).query("service == 'GPT'"))


def reduction_range(sweep: pd.DataFrame, ours: str = "DiSCo") -> tuple[Estimate, ...]:
    """(least, greatest, average) reduction of the mean TTFT over settings and budgets, percent."""
    reductions = study.reductions(sweep, "mean_s", policy=ours)
    return tuple(study.over_runs(statistic, reductions) for statistic in (np.min, np.max, np.mean))


def greatest_reductions(sweep: pd.DataFrame, ours: str = "DiSCo") -> tuple[Estimate, ...]:
    """The greatest reduction of (the mean TTFT, the P99) over settings and budgets, percent."""
    return tuple(
        study.over_runs(np.max, study.reductions(sweep, column, policy=ours)) for column in ("mean_s", "p99_s")
    )


def quartiles_of_gpt(sweep: pd.DataFrame, ours: str = "DiSCo") -> tuple[Estimate, ...]:
    """(lower, upper) quartile of GPT's reductions of the mean TTFT, percent."""
    reductions = study.reductions(sweep, "mean_s", policy=ours).query("service == 'GPT'")
    return tuple(study.over_runs(partial(np.quantile, q=q), reductions) for q in (0.25, 0.75))


def greatest_tail_of_llama(sweep: pd.DataFrame, ours: str = "DiSCo") -> Estimate:
    """The greatest reduction of LLaMA's P99 at device budgets up to 0.3, percent."""
    reductions = study.reductions(sweep, "p99_s", policy=ours)
    return study.over_runs(np.max, reductions.query(f"{_LLAMA} and budget <= 0.3"))


def growth_of_deviation(sweep: pd.DataFrame, device_name: str, ours: str = "DiSCo") -> tuple[Estimate, ...]:
    """DeepSeek's standard deviation at budget 0.9 over that at 0.1: (DiSCo-D, Stoch-D, DiSCo-S, Stoch-S)."""
    rows = sweep.query("service == 'DeepSeek' and device == @device_name")
    deviation = rows.pivot_table(index=["constrained", "policy", "run"], columns="budget", values="std_s")
    growth = (deviation[0.9] / deviation[0.1]).unstack(["constrained", "policy"])
    return tuple(
        evidence.mean(growth[side, policy].tolist(), sweep, drawn="runs")
        for side in SIDES
        for policy in (ours, "Stoch")
    )


def share_of_cells_that_gain(gains: Mapping[str, pd.DataFrame], ours: str = "DiSCo") -> tuple[Estimate, ...]:
    """Share of users, services and budgets with a lower mean TTFT than Stoch's, (device, server) constraint.

    gains: percent by policy, [cells, runs], indexed by constrained first.
    """
    parts = [evidence.born(pd.DataFrame(gains[ours].loc[side]), "simulated") for side in SIDES]
    return tuple(study.over_runs(lambda cells: float((cells > 0).mean()), part) for part in parts)


def delayed_beside_the_papers(
    bills: Mapping[str, study.Bill], statistic: Any, column: str, ours: str = PLANNED
) -> tuple[Estimate, ...]:
    """Table 3 beside the paper's, as `study.beside`, without the two cells that return an input of their stand-ins."""
    delayed = study.buffered(bills[ours], statistic)
    free = delayed[~delayed.index.isin([("GPT", "device"), ("Command", "device")])]
    printed = assets.paper_table("disco", "table_03_migration_delay").set_index(["service_trace", "constraint"])
    return study.beside(evidence.derived(free, delayed), printed.loc[free.index, column], 2)


def stalled(bills: Mapping[str, study.Bill], side: Side, ours: str) -> Estimate:
    """`study.stalled` of one of several bills, by name."""
    return study.stalled(bills[ours], side)


def correlation(alpaca: pd.DataFrame, shuffled: bool = False) -> Estimate:
    """Pearson's r of prompt length and TTFT, its interval over prompts. shuffled: with the lengths of other prompts.

    alpaca: rows of `device_probe.requests`; a prompt is asked once a turn.
    """
    lengths = alpaca.groupby("request")["length"].first()
    if shuffled:
        lengths[:] = np.random.default_rng(0).permutation(lengths)
    x = lengths.loc[alpaca["request"]].to_numpy(float)
    y = alpaca["ttft_s"].to_numpy()

    def pearson(rows: np.ndarray) -> float:
        return float(np.corrcoef(x[rows], y[rows])[0, 1])

    return evidence.resampled(pearson, len(x), alpaca, drawn="prompts", clusters=alpaca["request"].tolist())


def spreads(
    device_spread: Estimate, server_spreads: Mapping[str, Estimate], of_server: bool = False
) -> tuple[Estimate, Estimate]:
    """(P90 - P10) / P50 of the time to the first token of one prompt: (device, the steadiest server).

    of_server: with the second steadiest server in the device's place.
    """
    steadiest, second, *_ = sorted(server_spreads.values(), key=lambda spread: spread.value)
    return second if of_server else device_spread, steadiest


def slowest_rates(between_tokens: Mapping[str, np.ndarray]) -> tuple[Estimate, Estimate]:
    """(slowest server's median request, slowest device), tokens/s. between_tokens: seconds by series."""
    slowest = max(between_tokens.values(), key=np.median)
    server = evidence.resampled(
        lambda rows: float(1 / np.median(slowest[rows])), len(slowest), "replayed", drawn="requests"
    )
    return server, evidence.exact(min(device.decode_rate for device in DEVICES.values()), "quoted")


def share_badly_foretold(errors: pd.DataFrame, constant: bool = False) -> Estimate:
    """Share of the series whose best predictor, or the constant median, is off by at least 20 percent in the mean."""
    wide = errors.pivot(index="service", columns="predictor", values="mape_percent")
    best = wide["constant_median"] if constant else wide.drop(columns="constant_median").min(axis=1)
    return evidence.share(int((best >= 20).sum()), len(best), errors, drawn="services")


def growth(
    components: Callable[..., Mapping[str, float]], phase: str, models: Sequence[str] = tuple(costs.PRINTED)
) -> float:
    """Operations of a phase at L = 128 over those at 32, the largest of some models. components: as in `costs`."""

    def operations(model: str, length: int) -> float:
        return sum(components(costs.PRINTED[model], length, phase).values())

    return max(operations(model, 128) / operations(model, 32) for model in models)


def embedding_shares(shares: pd.DataFrame, column: str = "printed") -> tuple[float, float]:
    """(least, greatest) share of embedding and output, percent. shares: Table 7, a column for each form of Eq. 7."""
    models = shares[shares["component"].isin(["embedding", "output"])].groupby("model")[column].sum()
    return models.min(), models.max()


def savings_of_server(bill: study.Bill, seed: int = 0) -> tuple[Estimate, ...]:
    """`study.savings` under a server constraint, and the share of the services that the paper names among the best."""
    return *study.savings(bill, "server", seed), study.among_the_two_best(bill, "server", ["DeepSeek", "Command"], seed)


def savings_of_device(bill: study.Bill, seed: int = 0) -> tuple[Estimate, ...]:
    """`study.savings` under a device constraint, and the budget at which the mean saving is largest."""
    return *study.savings(bill, "device", seed), study.best_budget(bill, "device", seed)


def shares_beyond_the_wait(tail_bound: pd.DataFrame, of: str = "") -> tuple[Estimate, ...]:
    """The greatest share of TTFTs beyond (w_tail, w_tail + D(l)).

    tail_bound: of `study.beyond_the_tail`. of: _race, for racing at random.
    """
    requests = int(tail_bound["requests"].iloc[0])
    greatest = [tail_bound[f"{column}{of}"].max() for column in ("over", "beyond")]
    return tuple(evidence.share(round(requests * x), requests, tail_bound, drawn="requests") for x in greatest)


def gap_without_a_coin(gaps: Mapping[str, float]) -> float:
    """The largest gap between use and budget of Algorithm 3 as printed. gaps: with a coin, as printed."""
    return float(gaps["as printed"])


def policy_time(policy_times: pd.DataFrame, policy: str, samples: int) -> Estimate:
    """Milliseconds from raw lists of so many samples. policy_times: of `study.medians`."""
    rows = policy_times[(policy_times["by"] == f"{policy}, raw lists") & (policy_times["n"] == samples)]
    row = rows.iloc[0]
    return Estimate(row["ms"], row["low"], row["high"], int(row["turns"]), "recorded", "turns")


def growth_of_load_time(loads: pd.DataFrame, shuffled: bool = False) -> tuple[Estimate, Estimate]:
    """Exponent of load time in size: (from disk, from the page cache). loads: of `cold_start.loads`, shapes only.

    shuffled: with the sizes of a turn in random order.
    """
    if shuffled:
        sizes = loads.groupby(["turn", "page_cache"])["parameters"].transform(np.random.default_rng(0).permutation)
        loads = evidence.derived(loads.assign(parameters=sizes), loads)
    exponents = cold_start.exponents(loads)
    return exponents["cold"], exponents["warm"]


def first_token_over_load(loads: pd.DataFrame) -> tuple[Estimate, ...]:
    """TTFT over load time, of the model with the largest median: (from disk, from the page cache)."""
    ratios = loads.assign(ratio=loads["ttft_s"] / loads["load_s"]).groupby(["page_cache", "model"])["ratio"].apply(list)
    return tuple(evidence.mean(max(ratios[cache], key=np.median), loads, drawn="turns") for cache in ("cold", "warm"))


def worst_of_moved(bound: pd.DataFrame, column: str, worst: Callable[[pd.Series], float] = min) -> Estimate:
    """The worst of a column of `quality.bound` over cells in which over half of the answers change hands."""
    return quality.extreme(evidence.derived(bound[bound["changed"] > 0.5], bound), column, worst)


# Rules

_RACE = "race, the budget spent at random"
_AT_RANDOM = {"ours": "race"}
_LLAMA = "service == 'LLaMA' and constrained == 'device'"
_ALONE = "one model alone"
_MOVED = "over directions and hand-overs at which over half of the answers change hands"
_CLOSED = "the service and its trace are not public"
_CITED = "cited from other work, not a result of this paper"
_WITHOUT_BUFFER = "a hand-over as soon as it pays, without a buffer"
_P99 = partial(np.quantile, q=0.99)
_STEADY = AtMost(1.1)
_RISES = Above(1.1)


def _near(size: float) -> Test:
    return Near(size, factor=1.5)


def _cells(table: str, unit: str, near: float, trend: Test, null: str) -> Rule:
    """Cell by cell."""
    quantity = (
        f"cells of {table}: (mean distance to the paper's, rank correlation with them, share within {near:g}"
        f" {unit}, share above 0)"
    )
    best = Each(AtMost(near), AtLeast(0.8), AtLeast(0.75), AtLeast(0.95))
    return Rule(quantity, "", best, trend, (10 * near, -0.3, 0.1, 0.5), null, note=f"in {unit}")


def _delayed(statistic: str) -> Rule:
    return _cells(f"Table 3, {statistic}", "tokens", 2, Each(AtMost(4), AtLeast(0.5), None, None), _WITHOUT_BUFFER)


def _saving(percent: float, qualifier: str = "", qualified: Test | None = None, wrong: float = 0.0) -> Rule:
    """qualifier: what the claim says besides, which `reproduced` takes."""
    more = ((), ()) if qualified is None else ((qualified,), (wrong,))
    return Rule(
        f"(largest saving in percent, share of service and device pairs that save over 5 percent{qualifier})",
        "",
        Each(Near(percent, factor=1.15), AtLeast(0.75), *more[0]),
        Each(AtLeast(20), None, *[None for _ in more[0]]),
        (5.0, 1.0, *more[1]),
        "no migration",
        (0.0, 0.0, *[0.0 for _ in more[0]]),
    )


def _paced(side: Side, ours: str) -> Claim:
    rule = Rule(
        f"share of streams handed over {ours} with a gap that exceeds the pace by over 0.5 s",
        "",
        AtMost(0.01),
        AtMost(0.05),
        0.7,
        _WITHOUT_BUFFER,
        note="the paper prints a P99 of all gaps, which stays at the pace while nearly every stream freezes once",
    )
    return Claim(_READER, rule, partial(stalled, side=side, ours=ours), {"ours": AT_ONCE})


def _policy_time(policy: str, samples: int, paper_ms: float) -> Claim:
    rule = Rule(
        "time from raw lists of log-normal samples at b = 0.5, on this processor",
        "ms",
        AtMost(paper_ms),
        AtMost(3 * paper_ms),
        10 * paper_ms,
        "a coin, for which nothing is computed",
        0.0,
    )
    return Claim("9.5 The scheduler's own time (Figure 9)", rule, partial(policy_time, policy=policy, samples=samples))


def _answers(rule: Rule, column: str, worst: Callable[[pd.Series], float] = min) -> Claim:
    return Claim(_QUALITY, rule, partial(worst_of_moved, column=column, worst=worst))


# Sections of the notebook

_COSTS = "9.2 What a token costs (Eqs. 7 to 9, Tables 6 to 8)"
_PREMISES = "3. Premises: does server TTFT vary? (Figures 2 and 3, Table 1)"
_BUDGETS = "4.1 TTFT against the budget (Figure 6)"
_TAIL = "4.2 The tail (Table 2), and what $w_{tail}$ bounds"
_READER = "6.1 What the reader sees (Table 3)"
_SAVED = "6.2 What it saves (Figure 7)"
_LOADED = "9.4 Cold start (Table 4)"
_QUALITY = "7. Answers that change hands (Figures 8 and 10, Eq. 6)"
_ALL = "10. Ours beside the paper's"

CLAIMS: dict[str, Claim] = {
    "disco-c01": Claim(_TAIL, _cells("Table 2", "points", 10, Each(AtMost(15), AtLeast(0.5), None, AtLeast(0.95)),
                                     _RACE),
                       cells_beside_the_papers, _AT_RANDOM,
        headline="DiSCo: reduction of tail TTFT; ours is how far its cells are from the paper's, in points"),
    "disco-c02": Claim(_BUDGETS, Rule("(least, greatest, average) reduction over services, devices, constraints and "
                                      "budgets", "percent", Each(_near(6), _near(78), None),
                                      Each(None, None, Above(0)), (-30.0, 10.0, -2.0), _RACE),
                       reduction_range, _AT_RANDOM,
        headline="DiSCo: reduction of mean TTFT, the least over settings"),
    "disco-c03": Claim(_SAVED, _saving(84), study.savings,
        headline="DiSCo: cost saved by migration, at best; share of pairs that save over 5 percent"),
    "disco-c04": Claim(_SAVED, _saving(83.6, ", share of DeepSeek and Command among the two that save most", Equal(1)),
                       savings_of_server),
    "disco-c05": Claim(_SAVED, _saving(72.7, ", budget at which the mean saving is largest", AtLeast(0.8), 0.2),
                       savings_of_device),
    "disco-c06": Claim(_BUDGETS, Rule("greatest reduction of (mean, P99)", "percent", All(_near(50)),
                                      All(AtLeast(20)), (10.0, 50.0), _RACE),
                       greatest_reductions, _AT_RANDOM),
    "disco-c07": Claim(_TAIL, Rule("(mean distance of Table 2's cells to the paper's; least, greatest cell)", "percent",
                                   Each(AtMost(10), Near(0, within=5), _near(52.23)),
                                   Each(None, AtLeast(-5), AtLeast(35)), (40.0, -20.0, 52.0), _RACE),
                       distance_and_range, _AT_RANDOM),
    "disco-c08": Claim(_TAIL, Rule("greatest of GPT's cells of Table 2, averages over budgets", "percent",
                                   _near(40), Above(10), 5.0, _RACE),
                       greatest_tail_of_gpt, _AT_RANDOM),
    "disco-c09": Claim(_BUDGETS, Rule("(lower, upper) quartile over budgets, devices and constraints", "percent",
                                      Each(AtLeast(15), AtMost(40)), Each(Above(0), None), (-3.0, 25.0), _RACE),
                       quartiles_of_gpt, _AT_RANDOM),
    "disco-c10": Claim(_BUDGETS, Rule("greatest reduction over devices at device budgets up to 0.3", "percent",
                                      _near(50), Above(10), 5.0, _RACE),
                       greatest_tail_of_llama, _AT_RANDOM),
    "disco-c11": Claim(_BUDGETS, Untested("alpha was chosen so that it holds; needs the paper's alpha, which is not "
                                          "printed")),
    "disco-c12": Claim(_BUDGETS, Rule("standard deviation of TTFT at budget 0.9 over that at 0.1, (DiSCo-D, Stoch-D, "
                                      "DiSCo-S, Stoch-S)", "x", Each(_STEADY, _RISES, _STEADY, _RISES),
                                      Either(Each(_STEADY, _RISES, None, None), Each(None, None, _STEADY, _RISES)),
                                      (1.5, 1.0, 1.5, 1.0), _RACE),
                       growth_of_deviation, _AT_RANDOM),
    # Without a queue on the device, as in the paper; with one, section 5 has another finding.
    "disco-c13": Claim("5. Users of different activity (Figure 5)",
                       Rule("share of cells (user, service, budget) in which DiSCo's mean TTFT is lower than Stoch's, "
                            "(device, server) constraint", "", All(AtLeast(0.95)), All(Above(0.5)), (1.0, 0.2), _RACE,
                            note="without a queue, as in the paper, no TTFT depends on activity: judged: services, "
                                 "budgets"),
                       share_of_cells_that_gain, _AT_RANDOM),
    "disco-c14": Claim(_READER, _delayed("mean tokens"),
                       partial(delayed_beside_the_papers, statistic="mean", column="mean_delayed_tokens"),
                       {"ours": AT_ONCE}),
    "disco-c15": Claim(_READER, _delayed("P99 of tokens"),
                       partial(delayed_beside_the_papers, statistic=_P99, column="p99_delayed_tokens"),
                       {"ours": AT_ONCE}),
    # A device that takes as long as planned cannot stall a stream, so it takes as uneven times as a recorded one.
    "disco-c16": _paced("server", UNEVEN),
    "disco-c17": _paced("device", PLANNED),
    "disco-c18": Claim(_PREMISES, Untested("every request of the public API traces has the same prompt length")),
    "disco-c19": Claim(_PREMISES, Rule("Pearson r, device", "", AtLeast(0.8), AtLeast(0.5), 0.1,
                                       "the TTFTs of other prompts",
                                       note="prompts of Alpaca's lengths, as the paper's"),
                       correlation, {"shuffled": True}),
    # A hiccup of a shared machine does not move these percentiles.
    "disco-c20": Claim(_PREMISES, Rule("spread of TTFT for one prompt, (P90 - P10) / P50, (device, least spread "
                                       "server)", "", Over(0, 1, Below(0.5)), Over(0, 1, Below(1)), (0.5, 0.2),
                                       "the second steadiest server in the device's place"),
                       spreads, {"of_server": True}),
    "disco-c21": Claim(_PREMISES, Untested("no public trace has the gaps between single tokens of a stream")),
    "disco-c22": Claim(_PREMISES, Rule("(slowest server series, its median request, slowest device)", "tokens/s",
                                       All(Above(5)), None, (3.0, 14.0),
                                       no_null="rates of services and devices beside a reader's: no method makes them"),
                       slowest_rates),
    "disco-c23": Claim(_ALL, Untested(_CLOSED)),
    "disco-c24": Claim(_ALL, Untested(_CITED)),
    "disco-c25": Claim(_ALL, Untested(_CITED)),
    "disco-c26": Claim(_ALL, Untested(_CITED)),
    "disco-c27": _answers(Rule(f"share of right answers less the weaker model's, least {_MOVED}", "", AtLeast(-0.02),
                               AtLeast(-0.05), -0.3, _ALONE, 0.0, "tasks with an answer stand for the paper's judges"),
                          "over_weaker"),
    "disco-c28": Claim(_QUALITY, Untested("no model here translates, and the paper's texts (Flores) are not at hand")),
    "disco-c29": Claim(_QUALITY, Untested("a score out of ten by judges that are commercial or of 72B; none runs "
                                          "here")),
    "disco-c30": _answers(Rule(f"how far the share of right answers lies outside both models', greatest {_MOVED}", "",
                               AtMost(0.0), AtMost(0.02), 0.1, _ALONE, 0.0, "intervals that hold together"),
                          "outside", max),
    "disco-c31": _answers(Rule(f"share of right answers over the device's model alone, least {_MOVED}", "", Above(0),
                               AtLeast(-0.01), -0.1, "the device's model alone", 0.0,
                               "tasks of the documentation instead of translation"),
                          "over_device"),
    "disco-c32": Claim(_ALL, Untested("the paper states it without data")),
    "disco-c33": _policy_time("DiSCo-S", 1_000, 0.128),
    "disco-c34": _policy_time("DiSCo-S", 10_000, 0.969),
    "disco-c35": _policy_time("DiSCo-S", 100_000, 9.082),
    "disco-c36": _policy_time("DiSCo-D", 1_000, 0.486),
    "disco-c37": _policy_time("DiSCo-D", 10_000, 1.741),
    "disco-c38": _policy_time("DiSCo-D", 100_000, 14.856),
    # In the paper's own table the exponent is 0.68 on one machine, 0.83 on the other.
    "disco-c39": Claim(_LOADED, Rule("growth of load time with size, 0.5B to 3B, (from disk, from the page cache)",
                                     "exponent", All(Between(0.6, 1.3)), Each(Between(0.6, 1.3), None), (0.2, 0.2),
                                     "load times of other sizes of the same turn"),
                       growth_of_load_time, {"shuffled": True}),
    "disco-c40": Claim(_LOADED, Rule("TTFT, largest of models of 0.5B to 3B, (from disk, from the page cache)",
                                     "x load time", All(AtMost(0.1)), Each(AtMost(0.5), None), (1.5, 0.05),
                                     no_null="two times of one machine: no method makes them"),
                       first_token_over_load),
    "disco-c41": Claim(_LOADED, Untested("needs the paper's A40")),
    "disco-c42": Claim(_LOADED, Untested("needs the paper's A40 and RTX 3060 machines")),
    "disco-c43": Claim("9.3 Can a server's TTFT be foretold? (Table 5)",
                       Rule("share on which the best predictor's MAPE is at least 20 percent", "of the public series",
                            AtLeast(0.95), AtLeast(0.5), 0.1, "the training half's median",
                            note="what other services do says little of the paper's four"),
                       share_badly_foretold, {"constant": True}),
    "disco-c44": Claim(_COSTS, Rule("decode operations at L = 128, largest of three models", "x L = 32",
                                    Between(1, 1.02), None, 1.3, "prefill in decode's place"),
                       partial(growth, phase="decode"), {"phase": "prefill"}, kind="analytic"),
    "disco-c45": Claim(_COSTS, Rule("prefill operations at L = 128 by Eq. 8 as printed, BLOOM-1.1B, where Table 6 has "
                                    "1.25 / 0.85", "x L = 32", Near(1.25 / 0.85, within=0.05), Above(1), 0.9,
                                    "decode in prefill's place", note="Table 6 follows a larger square"),
                       partial(growth, phase="prefill", models=["BLOOM-1.1B"]), {"phase": "decode"}, kind="analytic"),
    "disco-c46": Claim(_COSTS, Rule("(least, greatest) model's share of embedding and output by Eq. 7", "percent",
                                    Each(Near(50, within=1), Near(63.02, within=1)), Each(AtLeast(50), None),
                                    (20.0, 40.0), "an embedding that is looked up, which costs nothing",
                                    note="BLOOM-560M's printed column adds up to 80 %; by Eq. 7 its share is the "
                                         "largest"),
                       embedding_shares, {"column": "physical"}, kind="analytic"),
    # The wait, and what the sentence says of the TTFT: a device that starts at w_tail still takes its own time.
    "disco-c47": Claim(_TAIL, Rule("greatest share over services and budgets of DiSCo-D's TTFTs beyond (w_tail, w_tail "
                                   "plus the device's own D(l))", "", All(AtMost(0.001)), Each(None, AtMost(0.001)),
                                   (0.0, 0.1), _RACE, note="the bound holds with the device's own time added to it"),
                       shares_beyond_the_wait, {"of": "_race"}),
    "disco-c48": Claim("I.3 A threshold: the server is scarce (Algorithm 3)",
                       Rule("largest gap between the device-only share and 1 - b over budgets, Algorithm 3 as printed",
                            "of all tokens", AtMost(0.005), AtMost(0.05), 0.1, "a coin for each prompt", 0.0,
                            "0.05 is about one length's tokens; exact only with a coin for l_th"),
                       gap_without_a_coin, kind="analytic"),
}  # fmt: skip

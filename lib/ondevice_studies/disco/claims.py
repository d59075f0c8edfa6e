"""How DiSCo's claims get their values. Their rules are rows of data/paper/claims.csv.

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
from ondevice.evidence import Estimate, Judged, judged, read_claims
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


def worst_of_migrated(
    bound: pd.DataFrame, column: str, worst: Callable[[pd.Series], float] = min
) -> tuple[Estimate, Estimate]:
    """(worst of a column of `quality.bound`, share of answers that change hands), over directions and hand-overs.

    Who hands nothing over keeps the quality, so it counts with what was handed over. Every cell has the same questions.
    """
    return quality.extreme(bound, column, worst), evidence.exact(bound["changed"].mean(), bound)


_LLAMA = "service == 'LLaMA' and constrained == 'device'"
_P99 = partial(np.quantile, q=0.99)

VALUES: dict[str, Judged] = {
    "disco-c01": judged(cells_beside_the_papers, ours="race"),
    "disco-c02": judged(reduction_range, ours="race"),
    "disco-c03": judged(study.savings),
    "disco-c04": judged(savings_of_server),
    "disco-c05": judged(savings_of_device),
    "disco-c06": judged(greatest_reductions, ours="race"),
    "disco-c07": judged(distance_and_range, ours="race"),
    "disco-c08": judged(greatest_tail_of_gpt, ours="race"),
    "disco-c09": judged(quartiles_of_gpt, ours="race"),
    "disco-c10": judged(greatest_tail_of_llama, ours="race"),
    "disco-c12": judged(growth_of_deviation, ours="race"),
    "disco-c13": judged(share_of_cells_that_gain, ours="race"),
    "disco-c14": judged(
        partial(delayed_beside_the_papers, statistic="mean", column="mean_delayed_tokens"), ours=AT_ONCE
    ),
    "disco-c15": judged(partial(delayed_beside_the_papers, statistic=_P99, column="p99_delayed_tokens"), ours=AT_ONCE),
    "disco-c16": judged(partial(stalled, side="server", ours=UNEVEN), ours=AT_ONCE),
    "disco-c17": judged(partial(stalled, side="device", ours=PLANNED), ours=AT_ONCE),
    "disco-c19": judged(correlation, shuffled=True),
    "disco-c20": judged(spreads, of_server=True),
    "disco-c22": judged(slowest_rates),
    "disco-c27": judged(partial(worst_of_migrated, column="over_weaker")),
    "disco-c30": judged(partial(worst_of_migrated, column="outside", worst=max)),
    "disco-c31": judged(partial(worst_of_migrated, column="over_device")),
    "disco-c33": judged(partial(policy_time, policy="DiSCo-S", samples=1000)),
    "disco-c34": judged(partial(policy_time, policy="DiSCo-S", samples=10000)),
    "disco-c35": judged(partial(policy_time, policy="DiSCo-S", samples=100000)),
    "disco-c36": judged(partial(policy_time, policy="DiSCo-D", samples=1000)),
    "disco-c37": judged(partial(policy_time, policy="DiSCo-D", samples=10000)),
    "disco-c38": judged(partial(policy_time, policy="DiSCo-D", samples=100000)),
    "disco-c39": judged(growth_of_load_time, shuffled=True),
    "disco-c40": judged(first_token_over_load),
    "disco-c43": judged(share_badly_foretold, constant=True),
    "disco-c44": judged(partial(growth, phase="decode"), phase="prefill"),
    "disco-c45": judged(partial(growth, phase="prefill", models=["BLOOM-1.1B"]), phase="decode"),
    "disco-c46": judged(embedding_shares, column="physical"),
    "disco-c47": judged(shares_beyond_the_wait, of="_race"),
    "disco-c48": judged(gap_without_a_coin),
}

CLAIMS = read_claims("disco", VALUES)

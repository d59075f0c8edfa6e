"""What the notebook's experiments share: each function returns one tidy table, simulated by the functions it is given.

Budgets are shares b of all input tokens. The same draws serve every policy, so that differences are theirs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from ondevice import assets, evidence
from ondevice.evidence import Estimate, born
from ondevice_papers.disco import costs, dispatch, optimal
from ondevice_papers.disco.budgeted import Dispatcher, Order
from ondevice_papers.disco.distributions import DEVICES, DeviceSpeed, Latency, Lengths
from ondevice_papers.disco.migration import Answers, Migration, Streams, expected_remaining, stream
from ondevice_papers.disco.policy import SIDES, DispatchPolicy, Side
from ondevice_papers.disco.race import Raced, Requests, in_time
from ondevice_studies.disco import traces

Policies = Callable[[Side, Latency, DeviceSpeed, float], Mapping[str, DispatchPolicy]]
Play = Callable[[DispatchPolicy, Requests, DeviceSpeed], Raced]
Pairs = Callable[[int, np.random.Generator], pd.DataFrame]
MODEL_OF_DEVICE = dict(zip(DEVICES, costs.PRINTED, strict=True))
CELL = ["service", "constrained", "device"]
ALPHA = 0.15  # the tail's share of the budget; the paper gives no value. It was chosen so that claim c11 holds
STALL = 0.5  # seconds by which a gap exceeds the pace


def of_machine(times: pd.DataFrame, machine: str) -> pd.DataFrame:
    """The rows of one machine in recorded times."""
    return evidence.derived(times[times["machine"] == machine], times)


# Dispatch


def policies(
    lengths: Lengths,
    alpha: float = ALPHA,
    names: Sequence[str] = ("DiSCo", "Stoch", "race", "mean-optimal"),
    *,
    device_constrained: Any = dispatch.device_constrained,
    server_constrained: Any = dispatch.server_constrained,
    mean_optimal: Any = optimal.mean_optimal,
) -> Policies:
    """DiSCo, the paper's baseline, racing at random and the optimum, or some of them, for a setting and budget."""
    disco: dict[Side, Any] = {
        "device": lambda server, b: device_constrained(lengths, server, b, alpha),
        "server": lambda server, b: server_constrained(lengths, b),
    }
    makers: dict[str, Callable[[Side, Latency, DeviceSpeed, float], DispatchPolicy]] = {
        "DiSCo": lambda side, server, device, b: disco[side](server, b),
        "Stoch": lambda side, server, device, b: dispatch.stochastic(lengths, side, b),
        "race": lambda side, server, device, b: dispatch.random_race(lengths, side, b),
        "mean-optimal": lambda side, server, device, b: mean_optimal(lengths, server, device, b, side),
    }
    return lambda *setting: {name: makers[name](*setting) for name in names}


def sweep(
    services: Iterable[str],
    devices: Iterable[DeviceSpeed],
    budgets: Iterable[float],
    policies: Policies,
    play: Play,
    lengths: Lengths,
    shape: tuple[int, int],
    seed: int,
) -> pd.DataFrame:
    """Every policy over services, devices, constraints and budgets; shape: (runs, requests a run).

    Columns: service, device, constrained, budget, policy, run, mean_s, p99_s, std_s. Raises ValueError on a policy that
    limits the other side, has another budget or spends more than its own: it would be compared with policies that may
    spend less.
    """
    rows = []
    for service in services:
        server = traces.server(service)
        drawn = Requests.draw(shape, lengths, server, np.random.default_rng([seed, len(service)]))
        for device in devices:
            played = _played(drawn, server, device, budgets, policies, play)
            rows.append(played.assign(service=service, device=device.name))
    return born(pd.concat(rows, ignore_index=True), "simulated")


def _played(
    drawn: Requests,
    server: Latency,
    device: DeviceSpeed,
    budgets: Iterable[float],
    policies: Policies,
    play: Play,
    independent: Requests | None = None,
) -> pd.DataFrame:
    """The same requests under every policy, constraint and budget, a row a run.

    independent: the same requests at independent times of the server, if `drawn`'s are not. Their share of the tokens
    shows whether a policy overspends; in one slow spell a policy that holds to its budget may start all of few.
    """
    rows = []
    for side in SIDES:
        for b in budgets:
            for name, policy in policies(side, server, device, b).items():
                if (policy.constrained, policy.budget) != (side, b):
                    raise ValueError(
                        f"The policy {name!r} holds the {policy.constrained} to {policy.budget:g} of the tokens, where "
                        f"the {side} is to be held to {b:g}."
                    )
                raced = play(policy, drawn, device)
                ran = (raced if independent is None else play(policy, independent, device)).ran(side)
                if _overspends(drawn.prompt, ran, b):
                    share = (drawn.prompt * ran).sum() / drawn.prompt.sum()
                    raise ValueError(
                        f"The policy {name!r} has the {side} read {share:.2f} of the tokens at a budget of {b:g}."
                    )
                rows.append(_by_run(raced).assign(constrained=side, budget=b, policy=name))
    return pd.concat(rows, ignore_index=True)


def _overspends(prompt: NDArray[np.int64], ran: NDArray[np.bool_], b: float) -> bool:
    """Whether the requests that a side ran hold more than a share b of the tokens, by over five standard errors.

    Policies that toss a coin hold to b in expectation only.
    """
    over = prompt * (ran - b)
    return bool(over.mean() > 5 * over.std() / np.sqrt(over.size) + 1e-9)


def _by_run(raced: Raced) -> pd.DataFrame:
    p99 = np.quantile(raced.ttft, 0.99, axis=1, method="inverted_cdf")
    return pd.DataFrame(
        {
            "run": np.arange(len(p99)),
            "mean_s": raced.ttft.mean(axis=1),
            "p99_s": p99,
            "std_s": raced.ttft.std(axis=1),
        }
    )


def averaged(table: pd.DataFrame, value: str, by: Sequence[str]) -> pd.DataFrame:
    """Mean of a column over the runs with its 95 % interval (Student's): value, low, high."""
    summary = table.groupby(list(by), sort=False)[value].agg(["mean", "sem", "size"]).reset_index()
    half = stats.t.isf(0.025, summary["size"] - 1) * summary.pop("sem")
    summary = summary.rename(columns={"mean": value}).drop(columns="size")
    return evidence.derived(summary.assign(low=summary[value] - half, high=summary[value] + half), table)


def reductions(table: pd.DataFrame, value: str, baseline: str = "Stoch", policy: str = "DiSCo") -> pd.DataFrame:
    """[cells, runs] percent by which `policy` lowers the baseline's mean_s or p99_s, a row a setting and budget.

    Budgets of 0 and 1 are left out: there every policy is the same, or the baseline is not one.
    """
    inside = table[table["budget"].between(0, 1, inclusive="neither")]
    wide = inside[inside["policy"].isin([baseline, policy])].pivot(
        index=["policy", *CELL, "budget"], columns="run", values=value
    )
    ratio = pd.DataFrame(wide.loc[policy] / wide.loc[baseline])
    return evidence.derived(100 * (1 - ratio), table)


def tail_cells(table: pd.DataFrame, baseline: str = "Stoch", policy: str = "DiSCo") -> pd.DataFrame:
    """Table 2: [cells, runs] P99 reductions in percent, averaged over the budgets, in the order of the paper's."""
    cells = reductions(table, "p99_s", baseline, policy).groupby(CELL, sort=False).mean()
    return evidence.derived(cells.reindex(pd.MultiIndex.from_frame(paper_tail_table()[CELL])), table)


def paper_tail_table() -> pd.DataFrame:
    """Table 2 as printed, with our column names: service, constrained, device, paper_percent."""
    table = assets.paper_table("disco", "table_02_tail_ttft_reduction")
    model = table["device_model"].replace("Qwen-1.5-0.5B", "Qwen1.5-0.5B")
    return born(
        pd.DataFrame(
            {
                "service": table["service_trace"],
                "constrained": table["constraint"],
                "device": table["device"] + ", " + model,
                "paper_percent": table["tail_ttft_reduction_percent"],
            }
        ),
        "quoted",
    )


def over_runs(statistic: Callable[[NDArray[Any]], float], table: pd.DataFrame, seed: int = 0) -> Estimate:
    """A statistic of the cells' means over the runs, with its interval over the runs. table: [cells, runs]."""
    values = table.to_numpy()

    def of_runs(runs: NDArray[np.intp]) -> float:
        return statistic(values[:, runs].mean(axis=1))

    return evidence.resampled(of_runs, values.shape[1], table, seed=seed, drawn="runs")


def beside(table: pd.DataFrame, printed: Sequence[float], near: float, seed: int = 0) -> tuple[Estimate, ...]:
    """How a table agrees with the paper's, cell by cell, each with its interval over the runs.

    table: [cells, runs]. near: a distance. Mean distance; rank correlation; share of cells that are near; share above
    0.
    """
    paper = np.asarray(printed, float)
    return tuple(
        over_runs(statistic, table, seed)
        for statistic in (
            lambda ours: float(np.abs(ours - paper).mean()),
            lambda ours: _rank_correlation(ours, paper),
            lambda ours: float((np.abs(ours - paper) <= near).mean()),
            lambda ours: float((ours > 0).mean()),
        )
    )


def _rank_correlation(ours: NDArray[np.float64], paper: NDArray[np.float64]) -> float:
    """Spearman's; 0 where all values are one."""
    return float(stats.spearmanr(ours, paper).statistic) if np.ptp(ours) and np.ptp(paper) else 0.0


def beyond_the_tail(
    services: Iterable[str],
    lengths: Lengths,
    budgets: Iterable[float],
    device: DeviceSpeed,
    policies: Policies,
    play: Play,
    requests: int,
    seed: int,
) -> pd.DataFrame:
    """DiSCo-D's TTFTs beside w_tail, its longest wait: service, budget, w_tail_s, over (share of TTFTs beyond w_tail),
    beyond (beyond w_tail + D(l)), over_race and beyond_race (the same of racing at random), requests."""
    rows = []
    for service in services:
        server = traces.server(service)
        drawn = Requests.draw(requests, lengths, server, np.random.default_rng([seed, len(service)]))
        for b in budgets:
            by_name = policies("device", server, device, b)
            ttft, racing = (play(by_name[name], drawn, device).ttft for name in ("DiSCo", "race"))
            w_tail = float(by_name["DiSCo"].wait_device.max())
            latest = w_tail + device.ttft(drawn.prompt) + 1e-9
            shares = [(each > limit).mean() for each in (ttft, racing) for limit in (w_tail + 1e-9, latest)]
            rows.append((service, b, w_tail, *shares, requests))
    columns = ["service", "budget", "w_tail_s", "over", "beyond", "over_race", "beyond_race", "requests"]
    return born(pd.DataFrame(rows, columns=columns), "simulated")


# Users and time


class Fixed:
    """A policy that was computed beforehand, in a dispatcher's place: it learns nothing and is never refused."""

    def __init__(self, policy: DispatchPolicy, seed: int) -> None:
        self.constrained: Side = policy.constrained
        self._policy, self._coins = policy, np.random.default_rng(seed)

    def arrive(self, tokens: int, device_free_in: float = 0.0) -> Order:
        waits = self._policy.waits(tokens, self._coins.random())
        return Order(0, tokens, dict(zip(SIDES, waits, strict=True)), 0.0)

    def start(self, order: Order, side: Side, tokens: int) -> bool:
        return True

    def first_token(self, order: Order, side: Side, seconds: float) -> None: ...

    cut_off = first_token

    def close(self, order: Order, answer: int | None = None) -> None: ...


def users(
    series: Sequence[str],
    device: DeviceSpeed,
    lengths: Lengths,
    budgets: Sequence[float],
    policies: Policies,
    play: Play,
    gaps: Sequence[float],
    shape: tuple[int, int],
    seed: int,
) -> pd.DataFrame:
    """Figure 5: users who ask in bursts meet a server whose slow spells last, a TTFT each 30 s like the series'.

    gaps: mean seconds between requests of each user, least active first; their burstiness is measured. shape: (runs,
    requests). Columns: user, gap_s, service, constrained, budget, policy, run, mean_s, p99_s, std_s. Raises ValueError
    as `sweep`.
    """
    rows = []
    for service in series:
        server = traces.measured(service)
        for user, gap in enumerate(gaps):
            rng = np.random.default_rng([seed, user, len(service)])
            independent = Requests.draw(shape, lengths, server, rng)
            drawn = replace(independent, server_ttft=independent.server_ttft.copy())
            for run in range(shape[0]):
                at = (np.cumsum(traces.arrival_gaps(user, gap, shape[1], rng)) / 30).astype(int)
                drawn.server_ttft[run] = traces.ttft_like(service, int(min(at[-1], 20_000)) + 1, rng)[at % 20_001]
            played = _played(drawn, server, device, budgets, policies, play, independent)
            rows.append(played.assign(user=user, gap_s=gap, service=service))
    return born(pd.concat(rows, ignore_index=True), "simulated")


# Migration


def savings(bill: Bill, side: Side | None = None, seed: int = 0) -> tuple[Estimate, Estimate]:
    """(largest saving in percent, share of service and device pairs that save over 5), intervals over requests."""
    kept = bill.settings["constrained"].isin(SIDES if side is None else [side])
    greatest = _greatest(bill.settings[kept], CELL)
    return (
        _of_savings(bill, kept, seed, lambda saved: greatest(saved).max()),
        _of_savings(bill, kept, seed, lambda saved: (greatest(saved) > 5).mean()),
    )


def among_the_two_best(bill: Bill, side: Side, services: Sequence[str], seed: int = 0) -> Estimate:
    """Share of two services that are those with the largest savings. side: the constrained one."""
    kept = bill.settings["constrained"] == side
    greatest = _greatest(bill.settings[kept], ["service"])
    meant = np.isin(bill.settings[kept]["service"].drop_duplicates().tolist(), services)
    return _of_savings(bill, kept, seed, lambda saved: meant[np.argsort(-greatest(saved))[:2]].sum() / len(services))


def best_budget(bill: Bill, side: Side, seed: int = 0) -> Estimate:
    """The budget at which the mean saving over services and devices is largest. side: the constrained one."""
    kept = bill.settings["constrained"] == side
    budgets, codes = np.unique(bill.settings[kept]["budget"].to_numpy(float), return_inverse=True)
    return _of_savings(bill, kept, seed, lambda saved: budgets[np.bincount(codes, saved).argmax()])


def _greatest(settings: pd.DataFrame, by: Sequence[str]) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
    """A function of a saving per setting: the largest of each group, whose settings follow each other."""
    group = settings.groupby(list(by), sort=False).ngroup().to_numpy()
    starts = np.flatnonzero(np.r_[True, np.diff(group) != 0])
    return lambda saved: np.maximum.reduceat(saved, starts)


def _of_savings(bill: Bill, kept: pd.Series, seed: int, statistic: Callable[[NDArray[np.float64]], Any]) -> Estimate:
    """A statistic of the settings' savings in percent; draws are of requests. kept: which settings count."""
    rows_kept, n = kept.to_numpy(), bill.cost.shape[1]

    def of_rows(rows: NDArray[np.intp]) -> float:
        return float(statistic(bill.saved(np.bincount(rows, minlength=n).astype(float))[rows_kept]))

    return evidence.resampled(of_rows, n, "simulated", seed=seed, drawn="requests")


def saved(bill: Bill, seed: int = 0, draws: int = 400) -> pd.DataFrame:
    """Figure 7: the bill's settings with saved_percent, low and high; intervals over requests."""
    rng = np.random.default_rng(seed)
    n = bill.cost.shape[1]
    drawn = [bill.saved(np.bincount(rng.integers(0, n, n), minlength=n).astype(float)) for _ in range(draws)]
    low, high = np.quantile(drawn, [0.025, 0.975], axis=0)
    table = bill.settings.assign(saved_percent=bill.saved(), low=low, high=high)
    return evidence.derived(table, bill.settings)


def buffered(bill: Bill, statistic: Any) -> pd.DataFrame:
    """[cells, runs] of Table 3: a statistic of the unread tokens as the target is asked, by service and constraint."""
    by = bill.streams.groupby(["service", "constrained", "run"])["buffered"].agg(statistic).unstack("run")
    return evidence.derived(by.dropna(), bill.streams)


def stalled(bill: Bill, side: Side) -> Estimate:
    """Share of the streams whose target was asked that have a gap beyond the pace by more than STALL.

    A request has a stream for each device and budget, so requests are drawn. Where none stalls, the interval ends where
    95 of 100 draws of so many requests would show one.
    """
    streams = bill.streams[bill.streams["constrained"] == side]
    counts = streams.groupby(["service", "request"])["stalled"].agg(["sum", "size"]).to_numpy(float)

    def share(rows: NDArray[np.intp]) -> float:
        stalls, total = counts[rows].sum(axis=0)
        return float(stalls / total)

    estimate = evidence.resampled(share, len(counts), bill.streams, drawn="requests")
    return estimate if estimate.value else replace(estimate, high=1 - 0.05 ** (1 / len(counts)))


@dataclass(frozen=True)
class Bill:
    """What R requests cost at S settings, $: cost, without (no migration), [S, R]; settings: a row each.

    streams: a row a stream for which the target was asked: service, constrained, request, run (a tenth of the
    requests), asked and buffered (tokens), stalled.
    """

    settings: pd.DataFrame
    cost: NDArray[np.float64]
    without: NDArray[np.float64]
    streams: pd.DataFrame

    def saved(self, weights: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
        """[S] percent saved. weights: [R] how often each request counts."""
        counts = np.ones(self.cost.shape[1]) if weights is None else weights
        return 100 * (1 - self.cost @ counts / (self.without @ counts))


def joint(size: int, rng: np.random.Generator) -> pd.DataFrame:
    """Prompts with their own answers: prompt, answer, tokens."""
    table = traces.pairs()
    return table.iloc[rng.choice(len(table), size, p=table["count"] / table["count"].sum())]


def apart(size: int, rng: np.random.Generator) -> pd.DataFrame:
    """Prompts with answers of any others: what a draw of the two by themselves assumes."""
    drawn = joint(size, rng)
    return drawn.assign(answer=rng.permutation(drawn["answer"].to_numpy()))


@dataclass(frozen=True)
class Workload:
    """R requests to one service: requests, answer (tokens), gap (s between its tokens), again (s, its TTFT when it
    takes an answer over)."""

    requests: Requests
    answer: NDArray[np.int64]
    gap: NDArray[np.float64]
    again: NDArray[np.float64]


def workload(
    server: Latency, gaps: Latency, lengths: Lengths, count: int, cap: int, pairs: Pairs, rng: np.random.Generator
) -> Workload:
    drawn = Requests.draw(count, lengths, server, rng)
    table = pairs(count, rng)
    requests = Requests(table["prompt"].to_numpy(), drawn.server_ttft, drawn.coin)
    answer = np.minimum(cap, table["answer"].to_numpy())
    return Workload(requests, answer, rng.choice(gaps.samples, count), rng.choice(server.samples, count))


def bill(
    services: Iterable[str], lengths: Lengths, budgets: Sequence[float], policies: Policies, play: Play, count: int,
    seed: int, server_tbt: str, *, migration: Any = Migration, stream: Any = stream, overlap: bool = False,
    pairs: Pairs = joint, slower: float | NDArray[np.float64] = 1.0, generous: bool = False, cap: int = 128,
) -> Bill:  # fmt: skip
    """Requests answered with and without migration, over services, devices, constraints, budgets (Figure 7, Table 3).

    server_tbt: the series whose times between tokens stand for the server's. cap: most tokens of an answer. slower: how
    many times as long as planned a target really takes, for all requests or for each, [count].
    generous: every answer has `cap` tokens, and the second prefill is free.
    """
    length_pairs = traces.pairs()
    remaining = expected_remaining(np.repeat(length_pairs["answer"], length_pairs["count"]), cap)
    late = np.broadcast_to(slower, count)
    settings, costed, seen = [], [], []
    for number, service in enumerate(services):
        server = traces.server(service)
        gaps = traces.measured(server_tbt, "tbt_s")
        all_of = workload(server, gaps, lengths, count, cap, pairs, np.random.default_rng([seed, number]))
        if generous:
            all_of = replace(all_of, answer=np.full(count, cap))
        for device, side in product(DEVICES.values(), SIDES):
            model = MODEL_OF_DEVICE[device.name]
            prices = costs.device_prices(model, side, round(lengths.mean)), costs.server_prices(service)
            source, target = prices if side == "device" else prices[::-1]
            slowest = server.quantile(0.99)
            planned = (lambda tokens, slowest=slowest: slowest) if side == "device" else device.ttft
            rate = device.decode_rate if side == "device" else float(1 / np.median(all_of.gap))
            rule = migration(source, target, remaining, planned, source_rate=rate * overlap)
            for b in budgets:
                raced = play(policies(side, server, device, b)["DiSCo"], all_of.requests, device)
                rows = np.flatnonzero(raced.device_won == (side == "device"))
                prompt = all_of.requests.prompt
                answer = all_of.answer
                without = prompt * (raced.device_ran * prices[0].prefill + raced.server_ran * prices[1].prefill)
                cost: Any = without + answer * target.decode
                without = cost.copy()
                without[rows] += answer[rows] * (source.decode - target.decode)
                if len(rows):
                    streams = stream(rule, _taken_over(all_of, raced, device, side, rows, late[rows]), overlap=overlap)
                    twice = np.where(streams.handover_at > 0, prompt[rows] + streams.handover_at, 0) * (
                        0 if generous else target.prefill
                    )
                    decoded = streams.source_tokens * source.decode + streams.target_tokens * target.decode
                    cost[rows] += decoded + twice - answer[rows] * target.decode
                    request = rows[streams.handover_at > 0]
                    own = {"constrained": side, "request": request, "run": request * 10 // count}
                    seen.append(_seen(streams, rule).assign(service=service, **own))
                settings.append((service, device.name, side, b))
                costed.append((cost, without))
    table = pd.DataFrame(settings, columns=["service", "device", "constrained", "budget"])
    sums = np.array(costed)
    return Bill(born(table, "simulated"), sums[:, 0], sums[:, 1], born(pd.concat(seen, ignore_index=True), "simulated"))


def _taken_over(
    all_of: Workload, raced: Raced, device: DeviceSpeed, side: Side, rows: NDArray[np.intp], slower: NDArray[np.float64]
) -> Answers:
    """The answers that the constrained side won, and what the other one would do with them."""
    on_device = np.full(len(rows), 1 / device.decode_rate)
    gap = all_of.gap[rows]
    source_gap, target_gap = (on_device, gap) if side == "device" else (gap, on_device)
    delay = all_of.again[rows] if side == "device" else np.full(len(rows), device.overhead)
    prefill = 0.0 if side == "device" else 1 / device.prefill_rate
    prompt = all_of.requests.prompt[rows]
    answer = all_of.answer[rows]
    return Answers(prompt, answer, raced.ttft[rows], source_gap, target_gap, slower * delay, slower * prefill)


def _seen(streams: Streams, rule: Migration) -> pd.DataFrame:
    """What the readers of streams see for which the target was asked."""
    rows = streams.handover_at > 0
    longest = np.nan_to_num(np.diff(streams.delivered[rows], axis=1)).max(axis=1, initial=0)
    return pd.DataFrame(
        {
            "asked": streams.handover_at[rows],
            "buffered": streams.unread[rows],
            "stalled": longest > 1 / rule.pace + STALL,
        }
    )


# The scheduler's time


def policy_times(sizes: Sequence[int], repeats: int, seed: int) -> pd.DataFrame:
    """Figure 9: milliseconds to compute a policy from raw lists, and from a histogram and a sorted window kept anyway.

    Lengths and TTFTs are log-normal as fitted to the Alpaca prompts and the GPT stand-in; the makers take turns,
    `repeats` times. Columns: n, policy, what, turn, ms.
    """
    rows = []
    for n in sizes:
        rng = np.random.default_rng(seed)
        tokens = np.maximum(1, np.round(rng.lognormal(2.74, 0.55, n))).astype(np.int64)
        seconds = rng.lognormal(-0.86, 0.28, n)
        lengths = Lengths.from_tokens(tokens)
        server = Latency.from_seconds(seconds)
        device = DEVICES["Pixel 7 Pro, Bloom-560M"]
        makers: dict[tuple[str, str], Callable[[], object]] = {
            ("DiSCo-S", "raw lists"): partial(_from_lists, dispatch.server_constrained, tokens),
            ("DiSCo-S", "kept histogram"): partial(dispatch.server_constrained, lengths, 0.5),
            ("DiSCo-D", "raw lists"): partial(_from_lists, dispatch.device_constrained, tokens, seconds),
            ("DiSCo-D", "kept histogram"): partial(dispatch.device_constrained, lengths, server, 0.5, ALPHA),
        }
        if n <= 1000:  # it looks at every sample
            makers["mean-optimal", "kept histogram"] = partial(optimal.mean_optimal, lengths, server, device, 0.5)
        for turn in range(-1, repeats):
            for (policy, what), make in makers.items():
                start = time.perf_counter()
                make()
                rows.append((n, policy, what, turn, 1e3 * (time.perf_counter() - start)))
    table = pd.DataFrame(rows, columns=["n", "policy", "what", "turn", "ms"])
    return born(table[table["turn"] >= 0], "measured")  # the first turn warms up


def medians(times: pd.DataFrame) -> pd.DataFrame:
    """Median of policy_times with its interval: by ("policy, what"), n, ms, low, high, turns."""
    rows = []
    for (policy, what, n), part in times.groupby(["policy", "what", "n"], sort=False):
        ms = part["ms"].to_numpy()
        median = evidence.resampled(lambda turns, ms=ms: float(np.median(ms[turns])), len(ms), times, drawn="turns")  # type: ignore[misc]
        rows.append((f"{policy}, {what}", n, median.value, median.low, median.high, len(ms)))
    return evidence.derived(pd.DataFrame(rows, columns=["by", "n", "ms", "low", "high", "turns"]), times)


def _from_lists(make: Callable[..., DispatchPolicy], tokens: Any, seconds: Any = None) -> DispatchPolicy:
    if seconds is None:
        return make(Lengths.from_tokens(tokens), 0.5)
    return make(Lengths.from_tokens(tokens), Latency.from_seconds(seconds), 0.5, ALPHA)


# Beyond the paper


def learned(
    services: Iterable[str], device: DeviceSpeed, lengths: Lengths, budgets: Sequence[float], informed: Policies,
    play: Play, requests: int, runs: int, seed: int, make: Callable[[Side, float], Dispatcher] = Dispatcher,
    in_time: Callable[..., tuple[Raced, NDArray[np.float64]]] = in_time,
) -> pd.DataFrame:  # fmt: skip
    """A dispatcher that starts knowing nothing beside policies that know the workload, on the same requests in a row.

    Columns: service, constrained, budget, policy, run, mean_s, p99_s, use, most (its greatest use of any prefix of the
    requests from the 100th on).
    """
    rows = []
    for service in services:
        server = traces.server(service)
        for run in range(runs):
            rng = np.random.default_rng([seed, run, len(service)])
            drawn = Requests.draw(requests, lengths, server, rng)
            arrivals = np.cumsum(rng.exponential(30, requests))
            ttft = {"device": device.ttft(drawn.prompt), "server": drawn.server_ttft}
            for side in SIDES:
                for b in budgets:
                    played = {
                        name: play(policy, drawn, device) for name, policy in informed(side, server, device, b).items()
                    }
                    played["learned"] = in_time(make(side, b), arrivals, drawn.prompt, ttft)[0]
                    for name, raced in played.items():
                        used = np.cumsum(np.where(raced.ran(side), drawn.prompt, 0)) / np.cumsum(drawn.prompt)
                        rows.append((service, side, b, name, run, raced.ttft.mean(), np.quantile(raced.ttft, 0.99),
                                     used[-1], used[99:].max()))  # fmt: skip
    columns = ["service", "constrained", "budget", "policy", "run", "mean_s", "p99_s", "use", "most"]
    return born(pd.DataFrame(rows, columns=columns), "simulated")

"""The experiments behind the exhibits: each function returns one tidy table."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from ondevice import assets
from ondevice.disco import dispatch, optimal, simulation, traces
from ondevice.disco.distributions import DEVICES, Device, Latency, Lengths
from ondevice.disco.expectation import evaluate
from ondevice.disco.online import OnlineDispatcher
from ondevice.disco.policy import Constrained, DispatchPolicy

CONSTRAINTS: tuple[Constrained, Constrained] = ("device", "server")


def policies(
    constrained: Constrained, lengths: Lengths, server: Latency, device: Device, budget: float, alpha: float
) -> list[DispatchPolicy]:
    """DiSCo, the paper's baseline, the fairer race baseline and the mean-optimal policy, at one budget."""
    disco = (
        dispatch.disco_d(lengths, server, budget, alpha)
        if constrained == "device"
        else dispatch.disco_s(lengths, budget)
    )
    return [
        disco,
        dispatch.stochastic(lengths, constrained, budget),
        dispatch.race(lengths, constrained, budget),
        optimal.mean_optimal(lengths, server, device, budget, constrained),
    ]


def budget_sweep(
    services: Sequence[str], devices: Iterable[Device], lengths: Lengths, budgets: Sequence[float], alpha: float
) -> pd.DataFrame:
    """Exact mean and P99 TTFT of every policy over services, devices, constraints and budgets (Figure 6, Table 2).

    Columns: service, device, constrained, budget, policy, mean_s, p99_s, use (of the constrained endpoint).
    """
    rows = []
    for service in services:
        server = traces.server(service)
        for device in devices:
            for constrained in CONSTRAINTS:
                for budget in budgets:
                    for policy in policies(constrained, lengths, server, device, budget, alpha):
                        name = "DiSCo" if policy.name.startswith("DiSCo") else policy.name.split("-")[0]
                        name = "mean-optimal" if name == "mean" else name
                        found = evaluate(policy, lengths, server, device)
                        rows.append(
                            (
                                service,
                                device.name,
                                constrained,
                                budget,
                                name,
                                found.mean,
                                found.p99,
                                found.use(constrained),
                            )
                        )
    return pd.DataFrame(
        rows, columns=["service", "device", "constrained", "budget", "policy", "mean_s", "p99_s", "use"]
    )


def reductions(sweep: pd.DataFrame, baseline: str = "Stoch", policy: str = "DiSCo") -> pd.DataFrame:
    """Percent by which `policy` lowers the baseline's mean and P99 TTFT, per budget: mean_percent, p99_percent.

    Budgets of 0 and 1 are left out: there every policy is the same, or the baseline is not one.
    """
    keys = ["service", "device", "constrained", "budget"]
    wide = sweep[sweep["budget"].between(0, 1, inclusive="neither")].pivot_table(
        index=keys, columns="policy", values=["mean_s", "p99_s"]
    )
    return pd.DataFrame(
        {
            f"{metric}_percent": 100 * (1 - wide[f"{metric}_s"][policy] / wide[f"{metric}_s"][baseline])
            for metric in ("mean", "p99")
        }
    ).reset_index()


def tail_table(sweep: pd.DataFrame) -> pd.DataFrame:
    """Table 2: P99 reduction averaged over budgets, against the paper's baseline and against racing at random."""
    keys = ["service", "constrained", "device"]
    table = reductions(sweep).groupby(keys, sort=False)["p99_percent"].mean().rename("against_stoch_percent").to_frame()
    table["against_race_percent"] = reductions(sweep, "race").groupby(keys)["p99_percent"].mean()
    return table.reset_index()


def repeated_runs(
    policy: DispatchPolicy, lengths: Lengths, server: Latency, device: Device, requests: int, runs: int, seed: int
) -> pd.DataFrame:
    """The paper's protocol: `runs` runs of `requests` sampled requests. Columns: run, mean_s, p99_s, use, std_s."""
    rows = []
    for run in range(runs):
        rng = np.random.default_rng([seed, run])
        played = simulation.play(
            policy, lengths.sample(requests, rng), rng.choice(server.samples, requests), device, rng
        )
        rows.append((run, played.ttft.mean(), played.p99(), played.use(policy.constrained), played.ttft.std()))
    return pd.DataFrame(rows, columns=["run", "mean_s", "p99_s", "use", "std_s"])


def user_reductions(
    series: str,
    device: Device,
    lengths: Lengths,
    budget: float,
    alpha: float,
    gaps: Sequence[float],
    requests: int,
    runs: int,
    seed: int,
) -> pd.DataFrame:
    """Figure 5: per user, the mean TTFT of DiSCo, Stoch and race with a queue on the device, averaged over runs.

    gaps: mean seconds between requests of each user, least active first; their burstiness is measured. TTFTs are like
    the series', in order. Columns: user, mean_gap_s, constrained, policy, mean_s.
    """
    server, answers = traces.measured(series), traces.lengths(field="tokens_reference_output")
    rows = []
    for user, gap in enumerate(gaps):
        for run in range(runs):
            rng = np.random.default_rng([seed, user, run])
            arrivals = np.cumsum(traces.arrival_gaps(user, gap, requests, rng))
            prompt, answer = lengths.sample(requests, rng), np.minimum(128, answers.sample(requests, rng))
            ttft = traces.ttft_like(series, requests, rng)
            for constrained in CONSTRAINTS:
                for policy in policies(constrained, lengths, server, device, budget, alpha)[:3]:
                    coins = np.random.default_rng([seed, run])  # the same for every policy
                    played = simulation.play_user(policy, arrivals, prompt, answer, ttft, device, coins)
                    rows.append((user, gap, constrained, policy.name, played.ttft.mean()))
    table = pd.DataFrame(rows, columns=["user", "mean_gap_s", "constrained", "policy", "mean_s"])
    keys = ["user", "mean_gap_s", "constrained", "policy"]
    return table.groupby(keys, sort=False)["mean_s"].mean().reset_index()


def gain_over_stoch(users: pd.DataFrame) -> pd.DataFrame:
    """Percent by which DiSCo and race lower each user's mean TTFT: user, gap, constrained, policy, gain_percent."""
    keys = ["user", "mean_gap_s", "constrained"]
    short = users.assign(policy=users["policy"].str.split("-").str[0])
    wide = short.pivot(index=keys, columns="policy", values="mean_s")
    gain = 100 * (1 - wide[["DiSCo", "race"]].div(wide["Stoch"], axis=0))
    return gain.reset_index().melt(id_vars=keys, var_name="policy", value_name="gain_percent")


def policy_times(sizes: Sequence[int], repeats: int, seed: int) -> pd.DataFrame:
    """Figure 9: milliseconds to compute a policy from raw lists, and from a histogram and a sorted window kept anyway.

    Lengths and TTFTs are log-normal as fitted to the Alpaca prompts and the GPT stand-in. Columns: n, policy, what, ms.
    """
    rows = []
    for n in sizes:
        rng = np.random.default_rng(seed)
        tokens = np.maximum(1, np.round(rng.lognormal(2.74, 0.55, n))).astype(np.int64)
        seconds = rng.lognormal(-0.86, 0.28, n)
        lengths, server = Lengths.of(tokens), Latency.of(seconds)
        device = DEVICES["Pixel 7 Pro, Bloom-560M"]
        timed = {
            ("DiSCo-S", "from raw lists"): partial(_disco_s_from_raw, tokens),
            ("DiSCo-S", "from kept histogram"): partial(dispatch.disco_s, lengths, 0.5),
            ("DiSCo-D", "from raw lists"): partial(_disco_d_from_raw, tokens, seconds),
            ("DiSCo-D", "from kept histogram"): partial(dispatch.disco_d, lengths, server, 0.5),
            ("mean-optimal", "from kept histogram"): partial(optimal.mean_optimal, lengths, server, device, 0.5),
        }
        for (policy, what), run in timed.items():
            rows.append((n, policy, what, 1e3 * _median_seconds(run, repeats)))
    return pd.DataFrame(rows, columns=["n", "policy", "what", "ms"])


def _disco_s_from_raw(tokens: np.ndarray) -> DispatchPolicy:
    return dispatch.disco_s(Lengths.of(tokens), 0.5)


def _disco_d_from_raw(tokens: np.ndarray, seconds: np.ndarray) -> DispatchPolicy:
    return dispatch.disco_d(Lengths.of(tokens), Latency.of(seconds), 0.5)


def _median_seconds(run: Callable[[], object], repeats: int) -> float:
    run()
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return float(np.median(found))


def mean_tail_plane(
    service: str, device: Device, lengths: Lengths, budget: float, alphas: Sequence[float], requests: int, seed: int
) -> pd.DataFrame:
    """Beyond the paper: every device-constrained policy at one budget in the mean-P99 plane.

    Columns: policy, label, mean_s, p99_s (NaN for the clairvoyant bound, which is one on the mean), use.
    """
    server = traces.server(service)
    rows = []

    def add(kind: str, label: str, policy: DispatchPolicy) -> None:
        found = evaluate(policy, lengths, server, device)
        rows.append((kind, label, found.mean, found.p99, found.use_device))

    add("server only", "", dispatch.server_only(lengths))
    add("Stoch-D", "", dispatch.stochastic(lengths, "device", budget))
    add("race-D", "", dispatch.race(lengths, "device", budget))
    for alpha in alphas:
        add("DiSCo-D", f"{alpha:.2g}", dispatch.disco_d(lengths, server, budget, alpha))
    add("P99-optimal", "", optimal.deadline_optimal(lengths, server, device, budget)[0])
    for policy in optimal.frontier(lengths, server, device, budget, np.array([1.02, 1.05, 1.1, 1.2, 1.35, 1.5, 2])):
        add("combined frontier", "", policy)
    add("mean-optimal", "", optimal.mean_optimal(lengths, server, device, budget))
    rng = np.random.default_rng(seed)
    played = simulation.play_online(
        OnlineDispatcher(device, budget), lengths.sample(requests, rng), rng.choice(server.samples, requests), device
    )
    rows.append(("online", "", played.ttft.mean(), played.p99(), played.use("device")))
    rows.append(("clairvoyant", "", optimal.clairvoyant_mean(lengths, server, device, budget), np.nan, budget))
    return pd.DataFrame(rows, columns=["policy", "label", "mean_s", "p99_s", "use"])


def drift(
    before: str, after: str, device: Device, lengths: Lengths, budget: float, alpha: float, requests: int, seed: int
) -> pd.DataFrame:
    """Beyond the paper: the service changes half-way. Policies computed before keep their waits; the online one learns.

    Columns: policy, request, ttft_s, used (cumulative share of input tokens on the device).
    """
    rng = np.random.default_rng(seed)
    old, new = traces.server(before), traces.server(after)
    prompt = lengths.sample(requests, rng)
    half = requests // 2
    ttft = np.concatenate([rng.choice(old.samples, half), rng.choice(new.samples, requests - half)])
    knowing = [
        simulation.play(optimal.mean_optimal(lengths, known, device, budget), prompt[part], ttft[part], device, rng)
        for known, part in ((old, slice(half)), (new, slice(half, None)))
    ]
    before_only = {
        "DiSCo-D, computed before": dispatch.disco_d(lengths, old, budget, alpha),
        "mean-optimal, computed before": optimal.mean_optimal(lengths, old, device, budget),
    }
    played = {name: simulation.play(policy, prompt, ttft, device, rng) for name, policy in before_only.items()}
    played["online, hard budget"] = simulation.play_online(OnlineDispatcher(device, budget), prompt, ttft, device)
    played["mean-optimal, told of the change"] = simulation.joined(knowing)
    return pd.concat(
        [
            pd.DataFrame(
                {
                    "policy": name,
                    "request": np.arange(1, requests + 1),
                    "ttft_s": p.ttft,
                    "used": np.cumsum(p.lengths * p.device_ran) / np.cumsum(p.lengths),
                }
            )
            for name, p in played.items()
        ]
    )


def held_out(
    services: Sequence[str], device: Device, lengths: Lengths, budget: float, alpha: float, splits: int, seed: int
) -> pd.DataFrame:
    """Policies computed on one half of a trace and judged on the other, both ways round, over random halves.

    Columns: service, policy, in_sample_s and held_out_s (mean TTFT, averaged over the halves), and the mean, least and
    greatest held-out use of the budget.
    """
    rows = []
    for service in services:
        samples = traces.server(service).samples
        for split in range(splits):
            order = np.random.default_rng([seed, split]).permutation(len(samples))
            halves = [Latency.of(samples[part]) for part in np.array_split(order, 2)]
            for seen, unseen in (halves, halves[::-1]):
                for policy in (
                    dispatch.disco_d(lengths, seen, budget, alpha),
                    optimal.mean_optimal(lengths, seen, device, budget),
                ):
                    inside, outside = (evaluate(policy, lengths, s, device) for s in (seen, unseen))
                    rows.append((service, policy.name, inside.mean, outside.mean, outside.use_device))
    table = pd.DataFrame(rows, columns=["service", "policy", "in_sample_s", "held_out_s", "use"])
    return (
        table.groupby(["service", "policy"], sort=False)
        .agg(
            in_sample_s=("in_sample_s", "mean"),
            held_out_s=("held_out_s", "mean"),
            use_mean=("use", "mean"),
            use_least=("use", "min"),
            use_greatest=("use", "max"),
        )
        .reset_index()
    )


def paper_tail_table() -> pd.DataFrame:
    """Table 2 as printed, with our column names: service, constrained, device, paper_percent."""
    table = assets.paper_table("disco", "table_02_tail_ttft_reduction")
    model = table["device_model"].replace("Qwen-1.5-0.5B", "Qwen1.5-0.5B")
    return pd.DataFrame(
        {
            "service": table["service_trace"],
            "constrained": table["constraint"],
            "device": table["device"] + ", " + model,
            "paper_percent": table["tail_ttft_reduction_percent"],
        }
    )


def paper_policy_times(claims: Mapping[str, Any]) -> pd.DataFrame:
    """Figure 9 as quoted: claim, policy, n, ms. claims: the paper's claims by name."""
    cells = [(policy, n) for policy in ("DiSCo-S", "DiSCo-D") for n in (1_000, 10_000, 100_000)]
    table = pd.DataFrame(
        [(f"disco-c{33 + i}", *cell) for i, cell in enumerate(cells)], columns=["claim", "policy", "n"]
    )
    return table.assign(ms=[claims[name].value_low for name in table["claim"]])

"""The dispatcher that learns, on 2,000 requests of each workload: is its budget kept, and what does that cost?

Workloads: short chats (Alpaca's lengths), prompts of 300 to 1,500 words, drift from one to the other and back, bursts
of 50, a server and a device that become three times slower half-way. Servers: log-normal with a heavy tail (P99 ten
times the median) and two modes (one request in five takes ten times as long); `--real` adds two measured series, one
slow and one that is bimodal by a factor of fifty. The optimum knows the workload, of drifts each phase, and plays the
same requests; it keeps its budget on average only.

Columns: mean TTFT over the optimum's (ratio), of the first 300 requests with what an earlier run learned (from_disk),
share of the budget used, the optimum's, what 15 % less budget would cost it, greatest overdraft of any prefix in time
or in the order of the requests (tokens), microseconds a request.

Run: python tests/benchmarks/bench_disco_budget.py [--real] [--seeds 3]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from ondevice.disco import optimal, traces
from ondevice.disco.budgeted import Dispatcher
from ondevice.disco.distributions import DEVICES, Device, Latency, Lengths
from ondevice.disco.policy import SIDES
from ondevice.disco.race import Requests, in_time, play

COUNT, PHONE = 2000, DEVICES["Pixel 7 Pro, Bloom-560M"]
LEVELS = (np.arange(400) + 0.5) / 400
SERVERS = {
    "heavy-tailed": Latency.of(0.5 * np.exp(stats.norm.ppf(LEVELS))),
    "bimodal": Latency.of(np.concatenate([c * np.exp(0.25 * stats.norm.ppf((np.arange(n) + 0.5) / n))
                                          for c, n in ((0.4, 320), (4.0, 80))])),
}  # fmt: skip
REAL = {"replicate-7b": traces.measured("replicate-7b"), "replicate-70b": traces.measured("replicate-70b")}
WORKLOADS = ("short", "long", "drift", "bursts", "slower server", "slower device", "one in 100 of 8,000 tokens")


def requests(workload: str, server: Latency, rng: np.random.Generator) -> tuple[Any, ...]:
    """(arrivals, prompts, server TTFTs, device slowness, phases as (slice, server, device)) of a workload."""
    short, long = traces.lengths().sample(COUNT, rng), np.round(rng.uniform(300, 1500, COUNT) * 4 / 3).astype(int)
    gaps, number, third, half = rng.exponential(30, COUNT), np.arange(COUNT), COUNT // 3, COUNT // 2
    prompts, ttft, slow, whole = short, rng.choice(server.samples, COUNT), np.ones(COUNT), slice(None)
    phases = [(whole, server, PHONE)]
    late, slower = number >= half, Device("", PHONE.prefill_rate / 3, PHONE.decode_rate)
    if workload == "long":
        prompts = long
    elif workload == "drift":
        prompts = np.where((number // third) % 2 == 1, long, short)
        phases = [(slice(i * third, (i + 1) * third if i < 2 else None), server, PHONE) for i in range(3)]
    elif workload == "bursts":
        gaps = np.where(number % 50 == 0, 1500.0, 0.0)
    elif workload == "slower server":
        ttft = ttft * np.where(late, 3, 1)
        phases = [(slice(half), server, PHONE), (slice(half, None), Latency.of(3 * server.samples), PHONE)]
    elif workload == "slower device":
        slow = np.where(late, 3.0, 1.0)
        phases = [(slice(half), server, PHONE), (slice(half, None), server, slower)]
    elif workload.startswith("one in 100"):
        prompts = np.where(rng.random(COUNT) < 0.01, 8000, short)
    return np.cumsum(gaps), prompts, ttft, slow, phases


def row(workload: str, server: Latency, budget: float, side: Any, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng([seed, WORKLOADS.index(workload)])
    arrivals, prompts, ttft, slow, phases = requests(workload, server, rng)
    both = {"device": PHONE.ttft(prompts) * slow, "server": ttft}
    best, less, used = np.empty(COUNT), np.empty(COUNT), 0.0
    for part, known, device in phases:
        drawn = Requests(prompts[part], ttft[part], rng.random(len(prompts[part])))
        for share, into in ((1.0, best), (0.85, less)):
            policy = optimal.mean_optimal(Lengths.of(prompts[part]), known, device, share * budget, side)
            raced = play(policy, drawn, device)
            into[part] = raced.ttft
            used += (share == 1) * prompts[part][raced.ran(side)].sum()
    dispatcher = Dispatcher(side, budget)
    start = time.perf_counter()
    raced, ledger = in_time(dispatcher, arrivals, prompts, both)
    micros = 1e6 * (time.perf_counter() - start) / COUNT
    taken = np.where(raced.ran(side), prompts, 0)
    over = max((ledger[:, 1] - budget * ledger[:, 0]).max(), (np.cumsum(taken) - budget * np.cumsum(prompts)).max())
    first = slice(300)
    known = dispatcher.state() | {"account": {"arrived": 0, "spent": 0}}
    again, _ = in_time(Dispatcher(side, budget, known), arrivals[first], prompts[first],
                       {name: values[first] for name, values in both.items()})  # fmt: skip
    return {"ratio": raced.ttft.mean() / best.mean(), "from_disk": again.ttft.mean() / best[first].mean(),
            "used": taken.sum() / prompts.sum() / budget, "optimum_used": used / prompts.sum() / budget,
            "less_costs": less.mean() / best.mean(), "over": over, "us": micros}  # fmt: skip


def one_by_one(server: Latency, budget: float, side: Any, gap: float) -> float:
    """Mean TTFT, as a multiple, where a phone serves one request at a time: told of its queue over not told."""
    rng = np.random.default_rng(0)
    prompts, arrivals = traces.lengths().sample(COUNT, rng), np.cumsum(rng.exponential(gap, COUNT))
    decoding = np.minimum(128, traces.lengths("answer").sample(COUNT, rng)) / PHONE.decode_rate
    both = {"device": PHONE.ttft(prompts), "server": rng.choice(server.samples, COUNT)}
    told, blind = Dispatcher(side, budget), Dispatcher(side, budget)
    blind.arrive = lambda tokens, device_free_in=0.0: Dispatcher.arrive(blind, tokens)  # type: ignore[method-assign]
    means = [in_time(each, arrivals, prompts, both, decoding)[0].ttft.mean() for each in (told, blind)]
    return means[0] / means[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    rows = []
    for name, server in (SERVERS | (REAL if options.real else {})).items():
        for workload in WORKLOADS:
            for budget in (0.1, 0.3, 0.6):
                rows += [{"server": name, "workload": workload, "side": side, "budget": budget, "seed": seed,
                          **row(workload, server, budget, side, seed)}
                         for side in SIDES for seed in range(options.seeds)]  # fmt: skip
    table = pd.DataFrame(rows)
    means = table.groupby(["server", "workload", "side", "budget"], sort=False).mean().drop(columns="seed")
    print(means.round(3).to_string())
    bars = table[~table["workload"].str.startswith("one in")]
    unspent = (bars["used"] < 0.8 * bars["optimum_used"].clip(upper=1)) & (bars["less_costs"] >= 1.02)
    print(
        f"{len(bars)} runs: overdrawn {(bars['over'] > 1e-6).sum()}; mean TTFT over 1.1 of the optimum "
        f"{(bars['ratio'] > 1.1).sum()}, greatest {bars['ratio'].max():.3f}; over 1.25 in the first 300 from disk "
        f"{(bars['from_disk'] > 1.25).sum()}; less than 80 % of the use where it matters {unspent.sum()}; "
        f"{bars['us'].median():.0f} us a request, in the median"
    )
    for name, server in SERVERS.items():
        told = {(side, gap): round(one_by_one(server, 0.3, side, gap), 2) for side in SIDES for gap in (30, 10)}
        print(
            f"one request at a time, {name}, b = 0.3, TTFT told of the queue over not, by side and gap in s: {told}"
        )


if __name__ == "__main__":
    main()

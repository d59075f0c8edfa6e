"""Figures 9 and 10: the authors' paces, delays and acceptance through our simulator (section 7.4).

What differs from their simulation, as its files and settings show it: events instead of ticks of 10 ms; messages keep
their order, as TCP does; a scheduler knows what the profiler measured, not the true next latencies; moving the
aggregator takes the links' delay in both; one draft queue is sent, to the side that aggregates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from ondevice.dragon import printed
from ondevice.dragon.analysis import timeline
from ondevice.dragon.cost import Costs, latency_difference
from ondevice.dragon.scheduler import Greedy, Lagging, Randomly, Scheduler
from ondevice.dragon.simulator import (
    CLOUD,
    DEVICE,
    SIDES,
    Bools,
    Pace,
    Run,
    World,
    independent,
    oracle,
    regimes,
    replayed,
    simulate,
)
from ondevice.network.link import Link, Sinusoid

TOKENS, SEQUENCES, LOOKAHEAD = 99, 50, 10
DELAYS = (0.0, 100.0, 200.0, 300.0, 400.0)  # ms, one way, in both directions
BASE, SPREAD = 0.002, 0.006  # seconds: of every message, and uniformly on top (the paper's base latency and jitter)
PERIOD, CASE_PERIOD = 20 * math.pi, 10 * math.pi  # seconds, of the sinusoid; Figure 10's is half as long
CASE_DELAY, CASE_TOKENS, CASE_LOOKAHEAD = 500.0, 15, 5
SWAPPING = ((0.97, 0.4), (0.4, 0.97))  # acceptance (device, cloud) that changes places
ORACLE = "Oracle"  # a lower bound, no strategy
STRATEGIES: dict[str, tuple[int, Callable[[float, int], tuple[Scheduler, Scheduler]] | None]] = {
    "Device": (DEVICE, None),
    "Cloud": (CLOUD, None),
    "Random": (DEVICE, lambda rtt, seed: (Randomly(2 * seed), Randomly(2 * seed + 1))),
    "DRAGON": (DEVICE, lambda rtt, seed: (Greedy(rtt), Greedy(rtt))),
    "Lagging": (DEVICE, lambda rtt, seed: (Lagging(rtt), Lagging(rtt))),
}  # where the aggregator begins, and the schedulers of both sides for a round trip and a seed; DRAGON: the paper's rule


def link(delay_ms: float, period: float = PERIOD) -> Link:
    """One direction, with the authors' jitter: 2 ms + U(0, 6 ms) + D + D/5 sin(2 π t / period).

    Raises ValueError on a delay that is negative or not finite.
    """
    if not 0 <= delay_ms < math.inf:
        raise ValueError(f"An added delay is finite and not negative, not {delay_ms} ms.")
    added = 1e-3 * delay_ms
    return Link(Sinusoid(BASE + added, added / 5, period), SPREAD)


def round_trip(delay_ms: float) -> float:
    """Mean seconds there and back, which a handshake would measure."""
    return 2 * (BASE + SPREAD / 2 + 1e-3 * delay_ms)


# Acceptance: lists of [tokens, 2] decisions, device and cloud


def drawn(count: int = SEQUENCES, tokens: int = TOKENS, seed: int = 0) -> list[Bools]:
    """As in Figure 9: a sequence has one of the two rates on either side, and each draft is accepted independently.

    The first 50 have the rates of the paper's sequences, in their order (`printed.drawn_rates`); then these again.
    """
    rates = np.resize(printed.drawn_rates(), (count, 2)).tolist()
    return [independent(tokens, device, cloud, seed + i) for i, (device, cloud) in enumerate(rates)]


def recorded(count: int = SEQUENCES, tokens: int = TOKENS) -> list[Bools]:
    """The authors' recordings in turn, each begun ever further on and wrapped around.

    There are three distinct ones, so the sequences are not independent: intervals over them are too short.
    """
    traces = list(printed.acceptance_traces().values())
    starts = [i // len(traces) * len(traces) / count for i in range(count)]
    chosen = [traces[i % len(traces)] for i in range(count)]
    turned = [np.roll(flags, -int(start * len(flags)), axis=0) for start, flags in zip(starts, chosen, strict=True)]
    return [replayed(flags[:, 0], flags[:, 1], tokens) for flags in turned]


def changing(
    count: int = SEQUENCES, tokens: int = TOKENS, seed: int = 0, rates: Sequence[tuple[float, float]] = SWAPPING,
    length: float = 40,
) -> list[Bools]:  # fmt: skip
    """Regimes of acceptance, `length` tokens in the mean; half of the sequences begin with each pair of rates."""
    turned = [list(rates)[i % len(rates) :] + list(rates)[: i % len(rates)] for i in range(count)]
    return [regimes(tokens, turned[i], length, seed + 2 * i) for i in range(count)]


# Figure 9


def replay(
    decisions: Sequence[Bools], device: Pace, cloud: Pace, delays_ms: Iterable[float] = DELAYS,
    strategies: Sequence[str] = (*STRATEGIES, ORACLE), lookahead: int = LOOKAHEAD,
) -> pd.DataFrame:  # fmt: skip
    """Every strategy on every sequence: strategy, delay_ms, sequence, total_s, moves.

    decisions: [tokens, 2] each. device, cloud: seconds a token, as of `World`. All strategies meet the same decisions
    and the same seed of the jitter. Raises ValueError on an unknown strategy, and on no sequence.
    """
    unknown = sorted(set(strategies) - {*STRATEGIES, ORACLE})
    if unknown:
        raise ValueError(f"There is no strategy {', '.join(unknown)}; there are {', '.join([*STRATEGIES, ORACLE])}.")
    if not len(decisions):
        raise ValueError("A replay needs at least one sequence of decisions.")
    rows = []
    for delay in delays_ms:
        way = link(delay)
        for number, flags in enumerate(decisions):
            world = World(flags, device, cloud, way, way, lookahead)
            rows += [(name, delay, number, *_total(name, world, round_trip(delay), number)) for name in strategies]
    return pd.DataFrame(rows, columns=["strategy", "delay_ms", "sequence", "total_s", "moves"])


def greedy_runs(count: int, delay_ms: float) -> list[Run]:
    """The paper's rule on the first setting's sequences: whole runs, with the side of each decision."""
    paces, way, rtt = printed.paces(printed.RECORDINGS[printed.QWEN]), link(delay_ms), round_trip(delay_ms)
    worlds = [World(flags, paces.device, paces.cloud, way, way, LOOKAHEAD) for flags in drawn(count)]
    return [simulate(world, DEVICE, (Greedy(rtt), Greedy(rtt)), seed) for seed, world in enumerate(worlds)]


def _total(name: str, world: World, rtt: float, seed: int) -> tuple[float, int]:
    if name == ORACLE:
        best = min((oracle(world, side) for side in (DEVICE, CLOUD)), key=lambda found: found.total)
        return best.total, len(best.moves)
    side, schedulers = STRATEGIES[name]
    run = simulate(world, side, schedulers(rtt, seed) if schedulers else None, seed)
    return run.total, run.moves


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Of `replay`, by strategy and delay_ms: n, total_s (mean), stderr_s, low, high (95 %, Student's t), moves, ratios.

    over_static: of the means, to the better of Device and Cloud. over_static_each: mean over sequences of the ratio to
    that sequence's better one. over_oracle: of the means. Raises ValueError unless Device, Cloud and the oracle are in.
    """
    missing = sorted({"Device", "Cloud", ORACLE} - set(table["strategy"]))
    if missing:
        raise ValueError(f"Ratios need the totals of {', '.join(missing)} too.")
    wide = table.pivot(index=["delay_ms", "sequence"], columns="strategy", values="total_s")
    rows = []
    for name in dict.fromkeys(table["strategy"]):
        for delay in dict.fromkeys(table["delay_ms"]):
            part = table[(table["strategy"] == name) & (table["delay_ms"] == delay)]
            of_delay = wide[wide.index.get_level_values("delay_ms") == delay]
            static, best = of_delay[["Device", "Cloud"]], of_delay[ORACLE].mean()
            mean, stderr, half = _interval(part["total_s"].to_numpy())
            each = (of_delay[name] / static.min(axis=1)).mean()
            rows.append((
                name, delay, len(part), mean, stderr, mean - half, mean + half, part["moves"].mean(),
                mean / static.mean().min(), each, mean / best,
            ))  # fmt: skip
    columns = "strategy delay_ms n total_s stderr_s low high moves over_static over_static_each over_oracle"
    return pd.DataFrame(rows, columns=columns.split())


def _interval(values: np.ndarray) -> tuple[float, float, float]:
    """Mean, standard error, half of the 95 % interval; of one value no interval."""
    if len(values) < 2:
        return float(values.mean()), 0.0, 0.0
    stderr = float(stats.sem(values))
    return float(values.mean()), stderr, float(stats.t.ppf(0.975, len(values) - 1)) * stderr


def figure_9(count: int = SEQUENCES, delays_ms: Iterable[float] = DELAYS, seed: int = 0) -> pd.DataFrame:
    """`summary` with `setting` in front: the paper's two, recorded acceptance, and two where it changes."""
    delays = tuple(delays_ms)
    qwen, opt = (printed.paces(printed.RECORDINGS[model]) for model in (printed.QWEN, printed.OPT))
    settings = {
        f"drawn, {printed.QWEN}": (drawn(count, seed=seed), qwen),
        f"drawn, {printed.OPT}": (drawn(count, seed=seed), opt),
        f"recorded, {printed.QWEN}": (recorded(count), qwen),
        f"changing, {printed.QWEN}": (changing(count, seed=seed), qwen),
        "changing, both 100 ms": (changing(count, seed=seed), printed.Recording(np.full(TOKENS, 0.1), 0.1)),
    }
    parts = [
        summary(replay(decisions, *paces, delays)).assign(setting=setting)
        for setting, (decisions, paces) in settings.items()
    ]
    table = pd.concat(parts, ignore_index=True)
    return table[["setting", *table.columns.drop("setting")]]


# Figure 10


class Snapshot(NamedTuple):
    """events: of `timeline`. decisions: position, time_s, side (that aggregated), delta_z_s, moved, device, cloud.

    device, cloud: running acceptance. delays: time_s, one_way_s of a message sent then, without the uniform part.
    In a case study each has a column `case` in front.
    """

    events: pd.DataFrame
    decisions: pd.DataFrame
    delays: pd.DataFrame


class _Watched(Greedy):
    """The paper's rule, which writes down what it saw: (side, position, ΔZ, moved, local and remote acceptance)."""

    def __init__(self, rtt: float, side: int, seen: list[tuple]) -> None:
        super().__init__(rtt)
        self.side, self.seen = side, seen

    def moves(self, position: int, local: bool, remote: bool, own: int, peer: int) -> bool:
        """As the rule."""
        moved = super().moves(position, local, remote, own, peer)
        (c_l, c_r), rates = (pace or 0.0 for pace in self.pace), self.acceptance
        difference = latency_difference(Costs(c_l, c_r, self.rtt / 2, self.rtt / 2), *rates)
        self.seen.append((SIDES[self.side], position, difference, moved, *(rates[:: 1 if self.side == DEVICE else -1])))
        return moved


def snapshot(decisions: Bools, seed: int = 0) -> Snapshot:
    """Figure 10's setting with other decisions: 500 ms, five drafts ahead, and the paper's rule."""
    paces, way = printed.paces(printed.CASE_PACES), link(CASE_DELAY, CASE_PERIOD)
    n, rtt = len(decisions), round_trip(CASE_DELAY)
    seen: list[tuple] = []
    world = World(decisions, paces.device[:n], paces.cloud, way, way, CASE_LOOKAHEAD)
    run, events = timeline(world, DEVICE, (_Watched(rtt, DEVICE, seen), _Watched(rtt, CLOUD, seen)), seed)
    table = pd.DataFrame(seen, columns=["side", "position", "delta_z_s", "moved", "device", "cloud"])
    table["time_s"] = run.decided[table["position"]]
    times = np.linspace(0, run.total, 200)
    delays = pd.DataFrame({"time_s": times, "one_way_s": [way.arrival(t) - t for t in times]})
    return Snapshot(events, table[["position", "time_s", *table.columns.drop(["position", "time_s"])]], delays)


def case_study(tokens: int = CASE_TOKENS, seed: int = 0) -> Snapshot:
    """Figure 10 in two cases: `recorded` decisions, and these `exchanged` between the sides, as the paper has them."""
    flags = printed.acceptance_traces()[printed.CASE_ACCEPTANCE][:tokens]
    cases = {"recorded": snapshot(flags, seed), "exchanged": snapshot(flags[:, ::-1], seed)}
    each = [tuple(table.assign(case=case) for table in found) for case, found in cases.items()]
    tables = [pd.concat(pair, ignore_index=True) for pair in zip(*each, strict=True)]
    return Snapshot(*(table[["case", *table.columns.drop("case")]] for table in tables))

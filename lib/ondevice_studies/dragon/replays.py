"""Figures 9 and 10: the authors' paces, delays and acceptance through our simulator (section 7.4).

What differs from their simulation, as its files and settings show it: events instead of ticks of 10 ms; messages keep
their order, as TCP does; a scheduler knows what the profiler measured, not the true next latencies; moving the
aggregator takes the links' delay in both; one draft queue is sent, to the side that aggregates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ondevice.network.link import Link, Sinusoid
from ondevice_papers.dragon.cost import Costs, latency_difference, should_move
from ondevice_papers.dragon.scheduler import Greedy, Lagging, Moves, Randomly, Scheduler, plan
from ondevice_papers.dragon.side import Rules
from ondevice_studies.dragon import printed
from ondevice_studies.dragon.analysis import timeline
from ondevice_studies.dragon.questions import placed
from ondevice_studies.dragon.simulator import (
    CLOUD,
    DEVICE,
    SIDES,
    Bools,
    Oracle,
    World,
    independent,
    oracle,
    regimes,
    replayed,
    simulate,
)

TOKENS, SEQUENCES, LOOKAHEAD = 99, 50, 10
DELAYS = (0.0, 100.0, 200.0, 300.0, 400.0)  # ms, one way, in both directions
BASE = 0.002  # seconds of every message: the paper's base latency
SPREAD = 0.006  # seconds on top, uniformly: its jitter
PERIOD, CASE_PERIOD = 20 * math.pi, 10 * math.pi  # seconds, of the sinusoid; Figure 10's is half as long
CASE_DELAY, CASE_TOKENS, CASE_LOOKAHEAD = 500.0, 15, 5
SWAPPING = ((0.97, 0.4), (0.4, 0.97))  # acceptance (device, cloud) that changes places
ORACLE = "Oracle"  # a lower bound, no strategy
Setting = tuple[Sequence[Bools], printed.Recording]
Row = dict[str, Any]
STRATEGIES = ("Device", "Cloud", "Random", "DRAGON", "Lagging")


def strategies(
    rtt: float,
    seed: int,
    should_move: Callable[..., bool] = should_move,
    plan: Callable[..., Moves] = plan,
) -> dict[str, tuple[int, tuple[Scheduler, Scheduler] | None]]:
    """By STRATEGIES, where the aggregator begins, and both sides' schedulers; DRAGON: the paper's rule.

    rtt: seconds of a round trip. should_move, plan: the functions of `cost` and `scheduler`, or an experiment's.
    """
    return {
        "Device": (DEVICE, None),
        "Cloud": (CLOUD, None),
        "Random": (DEVICE, (Randomly(2 * seed), Randomly(2 * seed + 1))),
        "DRAGON": (DEVICE, (Greedy(rtt, should_move=should_move), Greedy(rtt, should_move=should_move))),
        "Lagging": (DEVICE, (Lagging(rtt, plan=plan), Lagging(rtt, plan=plan))),
    }


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
    count: int = SEQUENCES,
    tokens: int = TOKENS,
    seed: int = 0,
    rates: Sequence[tuple[float, float]] = SWAPPING,
    length: float = 40,
) -> list[Bools]:
    """Regimes of acceptance, `length` tokens in the mean; half of the sequences begin with each pair of rates."""
    turned = [list(rates)[i % len(rates) :] + list(rates)[: i % len(rates)] for i in range(count)]
    return [regimes(tokens, turned[i], length, seed + 2 * i) for i in range(count)]


# Figure 9


def settings(ours: Mapping[str, Sequence[Bools]], count: int = SEQUENCES, seed: int = 0) -> dict[str, Setting]:
    """By name, decisions and paces: the paper's two, the authors' recorded decisions, our answers' by who holds them
    with the authors' paces, and two where acceptance changes. ours: of `answered`.
    """
    qwen, opt = (printed.paces(printed.RECORDINGS[model]) for model in (printed.QWEN, printed.OPT))
    even = printed.Recording(np.full(TOKENS, 0.1), 0.1)
    return {
        f"drawn, {printed.QWEN}": (drawn(count, seed=seed), qwen),
        f"drawn, {printed.OPT}": (drawn(count, seed=seed), opt),
        f"recorded, {printed.QWEN}": (recorded(count), qwen),
        f"changing, {printed.QWEN}": (changing(count, seed=seed), qwen),
        "changing, both 100 ms": (changing(count, seed=seed), even),
        **{f"ours, {holder}": (decisions, qwen) for holder, decisions in ours.items()},
    }


def answered(tokens: pd.DataFrame, count: int = 20, least: int = 8) -> dict[str, list[Bools]]:
    """By holder, decisions of our greedy answers, each from its start again up to TOKENS. tokens: record `lockstep`.

    The first `count` answers of at least so many tokens, in the order of `questions.questions`.
    """
    by_holder: dict[str, list[Bools]] = {}
    for holder, rows in tokens.groupby("holder", sort=False):
        wide = rows.pivot(index=["question", "position"], columns="side", values="greedy")
        parts = dict(list(wide.groupby("question")))
        flags = [parts[name][["device", "cloud"]].to_numpy() for name in sorted(map(str, parts), key=placed)]
        long = [decisions for decisions in flags if len(decisions) >= least][:count]
        by_holder[str(holder)] = [replayed(decisions[:, 0], decisions[:, 1], TOKENS) for decisions in long]
    return by_holder


def totals(
    flags: Bools,
    paces: printed.Recording,
    number: int,
    delays_ms: Iterable[float] = DELAYS,
    rules: Rules | None = None,
    oracle: Callable[..., Oracle] = oracle,
    **schedulers: Callable[..., Any],
) -> list[Row]:
    """Every strategy on one sequence at each delay: strategy, delay_ms, total_s, moves, on_device.

    flags: [tokens, 2]. number: the seed of the jitter; all strategies meet the same. on_device: share of the decisions.
    rules, oracle: the functions of `side` and `simulator`, or an experiment's; schedulers: those of `strategies`.
    """
    rows = list[Row]()
    for delay in delays_ms:
        world = World(flags, paces.device, paces.cloud, link(delay), link(delay), LOOKAHEAD)
        for name, (side, both) in strategies(round_trip(delay), number, **schedulers).items():
            run = simulate(world, side, both, number, rules)
            on_device = float((run.side == DEVICE).mean())
            rows.append(dict(strategy=name, delay_ms=delay, total_s=run.total, moves=run.moves, on_device=on_device))
        best = min((oracle(world, side) for side in (DEVICE, CLOUD)), key=lambda plan: plan.total)
        rows.append(dict(strategy=ORACLE, delay_ms=delay, total_s=best.total, moves=len(best.moves), on_device=np.nan))
    return rows


# Figure 10


class Snapshot(NamedTuple):
    """events: of `timeline`. decisions: position, time_s, side (that aggregated), delta_z_s, moved, device, cloud.

    device, cloud: running acceptance. delays: time_s, one_way_s of a message sent then, without the uniform part.
    """

    events: pd.DataFrame
    decisions: pd.DataFrame
    delays: pd.DataFrame


class _Watched(Greedy):
    """The paper's rule, which writes down what it saw: (side, position, ΔZ, moved, local and remote acceptance)."""

    def __init__(self, rtt: float, side: int, seen: list[tuple]) -> None:
        super().__init__(rtt)
        self.side = side
        self.seen = seen

    def moves(self, position: int, local: bool, remote: bool, own: int, peer: int) -> bool:
        """As the rule."""
        moved = super().moves(position, local, remote, own, peer)
        (c_l, c_r) = (pace or 0.0 for pace in self.pace)
        rates = self.acceptance
        difference = latency_difference(Costs(c_l, c_r, self.rtt / 2, self.rtt / 2), *rates)
        self.seen.append((SIDES[self.side], position, difference, moved, *(rates[:: 1 if self.side == DEVICE else -1])))
        return moved


def snapshot(decisions: Bools, seed: int = 0) -> Snapshot:
    """Figure 10's setting with other decisions: 500 ms, five drafts ahead, and the paper's rule."""
    paces = printed.paces(printed.CASE_PACES)
    way = link(CASE_DELAY, CASE_PERIOD)
    n = len(decisions)
    rtt = round_trip(CASE_DELAY)
    seen: list[tuple] = []
    world = World(decisions, paces.device[:n], paces.cloud, way, way, CASE_LOOKAHEAD)
    run, events = timeline(world, DEVICE, (_Watched(rtt, DEVICE, seen), _Watched(rtt, CLOUD, seen)), seed)
    table = pd.DataFrame(seen, columns=["side", "position", "delta_z_s", "moved", "device", "cloud"])
    table["time_s"] = run.decided[table["position"]]
    times = np.linspace(0, run.total, 200)
    delays = pd.DataFrame({"time_s": times, "one_way_s": [way.arrival(t) - t for t in times]})
    return Snapshot(events, table[["position", "time_s", *table.columns.drop(["position", "time_s"])]], delays)

"""Figures 3, 4 and 5 and Table 1: the cost model of sections 5 and 6 beside the simulator.

Formulas are of `cost`; what is simulated runs `side`'s state machine. The device aggregates, so it is the local side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from ondevice.network.link import Link
from ondevice.plotting import COLOURS
from ondevice_papers.dragon.cost import Costs, aggregation_times, latency_difference, latency_per_token, speedup
from ondevice_papers.dragon.scheduler import Scheduler
from ondevice_papers.dragon.side import Action, Decode, Done, Message, Rules
from ondevice_studies.dragon import printed
from ondevice_studies.dragon.simulator import (
    CLOUD,
    DEVICE,
    SIDES,
    Bools,
    Run,
    World,
    _Simulation,
    independent,
    simulate,
)

EXAMPLE = Costs(**printed.example())
ACCEPTED, REJECTED = "all accepted", "all rejected"  # the cases of Figure 4
PAIRS = ((0.2, 0.2), (0.8, 0.2), (0.2, 0.8), (0.8, 0.8))  # (α^l, α^r) of Figure 3; the paper does not state its own


_OUTCOMES = {"accepted": "sky", "rejected": "red", "void": "yellow", "stopped": "grey", "": "black"}
_MESSAGES = {"draft": ("purple", "-", 0.7), "target": ("black", "-", 0.9), "switch": ("green", "--", 2.2)}
_LANES = {"cloud": 1.0, "device": 0.0}
_BAR = 0.26  # height of a lane
_LONG = 0.018  # of the time axis, from which a bar has room for its position


# A run's bars


class _Recorder(_Simulation):
    """The simulation, which also notes what each side and link did when."""

    def __init__(
        self, world: World, aggregator: int, schedulers: tuple[Scheduler, Scheduler], seed: int, rules: Rules | None
    ) -> None:
        super().__init__(world, aggregator, schedulers, seed, rules)
        self.now = 0.0
        self.bars: list[dict] = []
        self.running: list[dict | None] = [None, None]

    def _act(self, now: float, side: int, actions: list[Action]) -> None:
        self.now = now
        if any(isinstance(action, Done) for action in actions):
            self._stop(side, now)
        super()._act(now, side, actions)

    def _schedule(self, time: float, side: int, what: Decode | Message) -> None:
        super()._schedule(time, side, what)
        decode = isinstance(what, Decode)
        begin = time - self.paces[side][what.position] if decode else self.now
        ends = (SIDES[side], "") if decode else (SIDES[1 - side], SIDES[side])
        bar = dict(
            what="decode" if isinstance(what, Decode) else what.kind.lower(),
            side=ends[0],
            to=ends[1],
            position=what.position,
            epoch=what.epoch,
            begin_s=begin,
            end_s=time,
            outcome="",
        )
        if decode:
            self._stop(side, begin)
            self.running[side] = bar
        self.bars.append(bar)

    def _stop(self, side: int, now: float) -> None:
        """The decode that runs is void."""
        bar = self.running[side]
        if bar is not None and bar["end_s"] > now + 1e-12:
            bar.update(end_s=now, outcome="stopped")
        self.running[side] = None


def timeline(
    world: World,
    aggregator: int = DEVICE,
    schedulers: tuple[Scheduler, Scheduler] | None = None,
    seed: int = 0,
    rules: Rules | None = None,
) -> tuple[Run, pd.DataFrame]:
    """A simulated run and its bars: what (decode, draft, target, switch), side, to, position, begin_s, end_s, outcome.

    to: the receiver of a message, empty for a decode. outcome, of decodes: accepted, rejected, void (of a rejected
    prefix) or stopped. Only the side that does not aggregate sends drafts. Arguments as of `simulate`.
    """
    recorder = _Recorder(world, aggregator, schedulers or (Scheduler(), Scheduler()), seed, rules)
    run = recorder.run()
    accepted = np.asarray(world.accepted, bool)
    epochs = np.cumsum(np.vstack([np.zeros((1, 2), int), ~accepted]), axis=0)  # of valid drafts, by position
    for bar in recorder.bars:
        if bar["what"] == "decode" and not bar["outcome"]:
            side = SIDES.index(bar["side"])
            position = bar["position"]
            valid = bar["epoch"] == epochs[position, side]
            bar["outcome"] = ("accepted" if accepted[position, side] else "rejected") if valid else "void"
    return run, pd.DataFrame(recorder.bars).drop(columns="epoch")


def draw(axis: Axes, bars: pd.DataFrame) -> None:
    """Bars of `timeline`: decodes in two lanes, messages as lines between them from sending to arrival."""
    room = bars["end_s"] - bars["begin_s"] > _LONG * bars["end_s"].max()
    for bar, wide in zip(bars.to_dict("records"), room, strict=True):
        lanes = _LANES[bar["side"]], _LANES.get(bar["to"], 0.0)
        if bar["what"] == "decode":
            look: dict[str, Any] = dict(color=COLOURS[_OUTCOMES[bar["outcome"]]], alpha=0.9 if bar["outcome"] else 0.25)
            look |= dict(edgecolor="white", lw=0.5) if wide else dict(lw=0)
            axis.barh(lanes[0], bar["end_s"] - bar["begin_s"], _BAR, left=bar["begin_s"], **look)
            if wide:
                middle = (bar["begin_s"] + bar["end_s"]) / 2
                axis.text(middle, lanes[0], str(bar["position"]), ha="center", va="center", fontsize=7)
        else:
            colour, line, width = _MESSAGES[bar["what"]]
            inward = (lanes[1] - lanes[0]) * _BAR / 2
            axis.plot(
                [bar["begin_s"], bar["end_s"]],
                [lanes[0] + inward, lanes[1] - inward],
                color=COLOURS[colour],
                ls=line,
                lw=width,
                alpha=0.8,
            )
    axis.set_yticks([*_LANES.values()], [*_LANES])
    axis.set_ylim(-0.3, 1.3)
    axis.grid(axis="y", visible=False)


def handles(bars: pd.DataFrame) -> list[Any]:
    """What a legend of `draw` says."""
    outcomes = set(bars.loc[bars["what"] == "decode", "outcome"])
    sent = set(bars["what"])
    patches = [
        Patch(color=COLOURS[colour], alpha=0.9 if outcome else 0.25, label=f"decode, {outcome or 'not given'}")
        for outcome, colour in _OUTCOMES.items()
        if outcome in outcomes
    ]
    lines = [
        Line2D([], [], color=COLOURS[colour], ls=line, lw=width, label=f"{what} sent")
        for what, (colour, line, width) in _MESSAGES.items()
        if what in sent
    ]
    return [*patches, *lines]


def world_of(costs: Costs, accepted: Bools, *, token_wise: bool = False) -> World:
    """The simulator's world of these costs, device local, without a bound on how far a side drafts ahead."""
    return World(
        accepted,
        costs.decode_local,
        costs.decode_remote,
        Link(costs.send_local),
        Link(costs.send_remote),
        1 if token_wise else len(accepted),
    )


def at_rates(tokens: int, device: float, cloud: float, seed: int = 0) -> Bools:
    """[tokens, 2] decisions in random order, of which exactly these shares are accepted, but for rounding."""
    if not (0 <= device <= 1 and 0 <= cloud <= 1):
        raise ValueError(f"Rates of acceptance are from 0 to 1, not {device} and {cloud}.")
    ranks = np.argsort(np.random.default_rng(seed).random((tokens, 2)), axis=0)
    return ranks < np.rint(np.array([device, cloud]) * tokens)


def time_per_token(costs: Costs, accepted: Bools, aggregator: int = DEVICE, *, token_wise: bool = False) -> float:
    """Simulated mean time between two aggregations, seconds. Raises ValueError on fewer than two tokens."""
    if len(accepted) < 2:
        raise ValueError(f"Time passes between at least two tokens, not {len(accepted)}.")
    decided = simulate(world_of(costs, accepted, token_wise=token_wise), aggregator).decided
    return float(decided[-1] - decided[0]) / (len(decided) - 1)


# Figure 3


def difference_curves(
    decode_local: Sequence[float],
    pairs: Iterable[tuple[float, float]] = PAIRS,
    decode_remote: float = 0.5,
    rtt: float = 0.3,
    *,
    every: int = 1,
    tokens: int = 400,
    seed: int = 0,
    difference: Callable[..., float] = latency_difference,
) -> pd.DataFrame:
    """Figure 3: decode_local, alpha_l, alpha_r, delta_z (all seconds or rates), kind (analytic, simulated).

    analytic: Eq. 8. simulated: time per token with the local side aggregating less that with the remote side, at every
    `every`-th latency. Between c^r - rtt and c^r + rtt they differ: Eq. 7 is an upper bound there, for either side.
    """
    rows = []
    for (alpha_l, alpha_r), (number, local) in product(pairs, enumerate(decode_local)):
        costs = Costs(local, decode_remote, rtt / 2, rtt / 2)
        rows.append((local, alpha_l, alpha_r, difference(costs, alpha_l, alpha_r), "analytic"))
        if number % every == 0:
            flags = at_rates(tokens, alpha_l, alpha_r, seed)
            delta_z = time_per_token(costs, flags, DEVICE) - time_per_token(costs, flags, CLOUD)
            rows.append((local, alpha_l, alpha_r, delta_z, "simulated"))
    return pd.DataFrame(rows, columns=["decode_local", "alpha_l", "alpha_r", "delta_z", "kind"])


# Figure 4


class Pipelines(NamedTuple):
    """bars: of `timeline`, with `case`. tokens: case, position, decided_s, per_token_s (since the last), formula_s."""

    bars: pd.DataFrame
    tokens: pd.DataFrame


def pipelines(tokens: int = 6, costs: Costs = EXAMPLE, rules: Rules | None = None) -> Pipelines:
    """Figure 4: all drafts accepted, and all rejected. formula_s: Eq. 7's steady state. Unlike the paper's drawing, the
    device, which aggregates, sends no drafts: nobody would read them. rules: as of `Side`."""
    bars = []
    rows = []
    for case, accepted in ((ACCEPTED, True), (REJECTED, False)):
        run, events = timeline(world_of(costs, np.full((tokens, 2), accepted)), rules=rules)
        bars.append(events.assign(case=case))
        since = np.diff(run.decided, prepend=0.0)
        steady = latency_per_token(costs, float(accepted))
        rows += [(case, i, run.decided[i], since[i], steady) for i in range(tokens)]
    columns = ["case", "position", "decided_s", "per_token_s", "formula_s"]
    return Pipelines(pd.concat(bars, ignore_index=True), pd.DataFrame(rows, columns=columns))


# Figure 5


def speedups(
    decode_local: Sequence[float],
    rtts: Sequence[float],
    acceptance: Sequence[float],
    *,
    simulated: bool = False,
    acceptance_local: float = 0.5,
    tokens: int = 400,
    seed: int = 0,
    speedup: Callable[..., float] = speedup,
) -> pd.DataFrame:
    """Figure 5: decode_local, rtt (both over c_dec^r), alpha_r, speedup, kind, over token-wise aggregation.

    analytic: Eq. 9. simulated: both simulated, with the local drafts' acceptance, which Eq. 9 leaves out.
    """
    rows = []
    for local, rtt, alpha in product(decode_local, rtts, acceptance):
        costs = Costs(local, 1.0, rtt / 2, rtt / 2)
        if simulated:
            flags = at_rates(tokens, acceptance_local, alpha, seed)
            ratio = time_per_token(costs, flags, token_wise=True) / time_per_token(costs, flags)
        else:
            ratio = speedup(costs, alpha)
        rows.append((local, rtt, alpha, ratio))
    table = pd.DataFrame(rows, columns=["decode_local", "rtt", "alpha_r", "speedup"])
    return table.assign(kind="simulated" if simulated else "analytic")


# Table 1


def waiting_times(
    costs: Costs = EXAMPLE,
    rates: tuple[float, float] = (0.7, 0.7),
    tokens: int = 2000,
    seed: int = 0,
    times: Callable[..., list[float]] = aggregation_times,
    latency: Callable[..., float] = latency_per_token,
    rules: Rules | None = None,
) -> pd.DataFrame:
    """Table 1, a row a case: local, remote (accepted, rejected), formula, steady_form, cases, and seconds:

    steady_s, simulated_steady_s: the case again and again, by Eq. 7's form and simulated. formula_s, simulated_s: mean
    after such an aggregation, `cases` of which are among random ones of these rates (device, cloud), by the formula
    with φ and simulated. largest_gap_s: between these two, of one waiting time. times, latency, rules: the functions of
    `cost` and `side`, or an experiment's. Raises ValueError where a case does not occur.
    """
    flags = independent(tokens, *rates, seed)
    formula = np.diff(times(costs, flags[:, 0].tolist(), flags[:, 1].tolist()))[:-1]
    simulated = np.diff(simulate(world_of(costs, flags), rules=rules).decided)
    rows = []
    for local, remote, with_phi, steady in printed.waiting_formulas().itertuples(index=False):
        case = local == "accepted", remote == "accepted"
        here = (flags[:-1] == case).all(1)
        if not here.any():
            raise ValueError(f"With acceptance {rates} no draft pair of {tokens} is {local}, {remote}.")
        repeated = simulate(world_of(costs, np.tile(case, (20, 1))), rules=rules).decided
        rows.append((
            local, remote, with_phi, steady, int(here.sum()), latency(costs, float(case[1])),
            repeated[-1] - repeated[-2], formula[here].mean(), simulated[here].mean(),
            np.abs(formula - simulated)[here].max(),
        ))  # fmt: skip
    columns = "local remote formula steady_form cases steady_s simulated_steady_s formula_s simulated_s largest_gap_s"
    return pd.DataFrame(rows, columns=columns.split())

"""What each set of systems does to an answer: recorded passes and decisions, on a clock of measured costs.

A set is a string of letters of SYSTEMS, in their order; "" is the plain pipeline: an embedder, the device alone, plain
decoding. Sets are compared question by question.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ondevice import evidence
from ondevice.network.link import Line
from ondevice_papers.disco import dispatch
from ondevice_papers.disco.distributions import Lengths
from ondevice_papers.disco.migration import Answers, Migration, Prices, expected_remaining, stream
from ondevice_papers.disco.policy import NEVER
from ondevice_papers.disco.race import race
from ondevice_papers.dragon.aggregation import Floats
from ondevice_programs.assistant.systems import SYSTEMS, drafter_of
from ondevice_studies.dragon.pair import added
from ondevice_studies.dragon.simulator import HEADER, World, simulate

SETS = ["".join(letters) for size in range(6) for letters in combinations(SYSTEMS, size)]
KEYS = ["question", "picked", "method", "drafter"]


def named(systems: str) -> str:
    """A set in words."""
    return " + ".join(SYSTEMS[letter] for letter in systems) or "plain"


@dataclass(frozen=True)
class SystemCosts:
    """Seconds on one core of a machine, by name and size (record `costs`)."""

    table: Mapping[str, Mapping[int, float]]

    @classmethod
    def of(cls, table: pd.DataFrame) -> SystemCosts:
        """Medians of a machine's rows."""
        medians: dict[str, dict[int, float]] = {}
        middle: Any = table.groupby(["name", "size"])["seconds"].median()
        for (name, size), seconds in middle.items():
            medians.setdefault(name, {})[size] = seconds
        return cls(medians)

    def __call__(self, name: str, size: Any = 1) -> Any:
        """Between measured sizes by a straight line."""
        sizes = sorted(self.table[name])
        return np.interp(size, sizes, [self.table[name][measured] for measured in sizes])


def ready(costs: SystemCosts, answer: Mapping[str, Any], side: str, picked: bool, drafter: str) -> float:
    """Seconds until a side has its passages' rows: picking, the reranker's layers, prefill."""
    prefill = costs("prefill, logits read" if "S" in drafter else "prefill") * answer[f"{side}_prompt"]
    search = costs("hybrid") + costs("layer of a candidate") * answer[f"{side}_work"] if picked else costs("embedding")
    return float(search + prefill)


def paces(costs: SystemCosts, widths: NDArray[np.int64], drafter: str) -> Floats:
    """[n] seconds of each position: a pass of so many tokens with its drafting, or a mixture where it is known."""
    passes = costs("pass", widths) + costs(f"drafting {drafter}".strip())
    return np.where(widths > 0, passes, 0.0) + costs("mixture")


class Recorded:
    """The records, by question: of those that all drafters ran on.

    answers: a row an answer. steps: [n, 3] of a side's positions, in order: width, and whether its and the other side's
    draft were accepted. ready, paces: the functions above, or an experiment's.
    """

    def __init__(
        self,
        answers: pd.DataFrame,
        steps: pd.DataFrame,
        costs: SystemCosts,
        ready: Callable[..., float] = ready,
        paces: Callable[..., Floats] = paces,
    ) -> None:
        self._ready = ready
        self._paces = paces
        self.costs = costs
        self.kind = evidence.kind_of([answers, "simulated"])
        self.names = sorted(set(answers.loc[answers["drafter"] != "", "question"]))
        rows: Any = answers.to_dict("records")
        self.answers = {tuple(row[key] for key in KEYS): row for row in rows}
        groups: Any = steps.groupby([*KEYS, "side"], sort=False)[["width", "accepted", "other_accepted"]]
        self.steps = {key: part.to_numpy(int) for key, part in groups}

    def answer(self, name: str, method: str, systems: str) -> dict[str, Any]:
        """The row of `answers`. method: device, cloud or both."""
        return self.answers[name, "G" in systems, method, drafter_of(systems)]

    def times(self, name: str, method: str, systems: str, side: str, slower: float) -> Floats:
        """[n] seconds after its question at which a side has each of its own tokens, or drafts of them."""
        picked = "G" in systems
        drafter = drafter_of(systems)
        seconds = self._paces(self.costs, self.steps[name, picked, method, drafter, side][:, 0], drafter)
        seconds[0] += self._ready(self.costs, self.answer(name, method, systems), side, picked, drafter)
        return slower * np.cumsum(seconds) if side == "device" else np.cumsum(seconds)


def together(
    recorded: Recorded,
    name: str,
    systems: str,
    delay: float,
    slower: float,
    seed: int = 0,
    simulate: Callable[..., Any] = simulate,
) -> dict[str, float]:
    """DRAGON's answer: both sides' passes, decisions and links in its simulator."""
    up, down = added(delay)
    steps = recorded.steps[name, "G" in systems, "both", drafter_of(systems), "device"]
    device, cloud = (
        np.diff(recorded.times(name, "both", systems, side, slower), prepend=0.0) for side in ("device", "cloud")
    )
    cloud[0] += Line(up, seed, "up").arrival(0.0, HEADER)
    world = World(steps[:, 1:].astype(bool), device, cloud, up, down, lookahead=32)
    run = simulate(world, seed=seed)
    answer = recorded.answer(name, "both", systems)
    return {
        "ttft": run.seen[0],
        "last": run.total,
        "right": answer["right"],
        "wire": sum(run.sent) + HEADER,
        "cloud_tokens": answer["cloud_prompt"] + run.drafted[1],
        "asked": True,
    }


def single(recorded: Recorded, name: str, systems: str, slower: float, side: str = "device") -> dict[str, float]:
    """One side's answer, on that side."""
    times = recorded.times(name, side, systems, side, slower)
    answer = recorded.answer(name, side, systems)
    return {
        "ttft": times[0],
        "last": times[-1],
        "right": answer["right"],
        "wire": 0,
        "asked": False,
        "cloud_tokens": (answer["cloud_prompt"] + len(times)) * (side == "cloud"),
    }


def admitted(lengths: Sequence[int], budget: float, seed: int = 0) -> NDArray[np.bool_]:
    """DiSCo-S: which questions of so many tokens the cloud may start on."""
    policy = dispatch.server_constrained(Lengths.from_tokens(np.asarray(lengths)), budget)
    coins = np.random.default_rng(seed).random(len(lengths)) < policy.chance[lengths]
    return policy.wait_server[coins.astype(int), lengths] < NEVER


def raced(
    recorded: Recorded, names: Sequence[str], systems: str, delay: float, slower: float, seed: int = 0
) -> list[dict[str, float]]:
    """DiSCo's answers without DRAGON: the first token wins; where that is the cloud's, the device takes its passages
    over as soon as the reader would not notice, and goes on with the same text."""
    up, down = added(delay)
    device, cloud = ([single(recorded, name, systems, slower, side) for name in names] for side in ("device", "cloud"))
    way = np.array(
        [
            Line(up, seed + i, "up").arrival(0.0, HEADER) + Line(down, seed + i, "down").arrival(0.0, HEADER)
            for i in range(len(names))
        ]
    )
    first, server = (np.array([answer["ttft"] for answer in side]) for side in (device, cloud))
    lost = race(0.0 * way, 0.0 * way, first, server + way).device_won
    answers = [recorded.answer(name, "cloud", systems) for name in names]
    prompt, length, size = (
        np.array([answer[column] for answer in answers]) for column in ("cloud_prompt", "tokens", "cloud_bytes")
    )
    gap = np.array([answer["last"] - answer["ttft"] for answer in cloud]) / np.maximum(1, length - 1)
    prefill = slower * float(recorded.costs("prefill"))
    fetch = 2 * way.mean() + size.mean() / down.bandwidth
    rule = Migration(
        Prices(1.0, 1.0),
        Prices(0.0, 0.0),
        expected_remaining(length, int(length.max())),
        lambda tokens: fetch + prefill * tokens,
    )
    given = Answers(prompt, length, server + way, gap, slower * gap, np.full(len(names), fetch), prefill)
    streamed = stream(rule, given)
    handover = fetch + prefill * (prompt + streamed.handover_at)
    last = given.ttft + (np.where(streamed.migrated, streamed.handover_at, length) - 1) * gap
    last += np.where(streamed.migrated, handover + (length - streamed.handover_at - 1) * given.target_gap, 0.0)
    rows = []
    for i, (on_device, on_cloud) in enumerate(zip(device, cloud, strict=True)):
        won = {"ttft": given.ttft[i], "last": last[i], "right": on_cloud["right"]}
        sent = HEADER * (1 + streamed.source_tokens[i]) + size[i] * streamed.migrated[i]
        rows.append(
            {**on_device, "wire": HEADER, "asked": True, "cloud_tokens": prompt[i]}
            if lost[i]
            else {**won, "wire": sent, "asked": True, "cloud_tokens": prompt[i] + streamed.source_tokens[i]}
        )
    return rows


def play(
    recorded: Recorded,
    systems: str,
    delay: float,
    slower: float = 8.0,
    budget: float = 0.5,
    seed: int = 0,
    *,
    admitted: Callable[..., NDArray[np.bool_]] = admitted,
    together: Callable[..., dict[str, float]] = together,
) -> pd.DataFrame:
    """A row a question: ttft and last token (s), right, bytes on the wire, cloud tokens, whether the cloud was asked.

    delay: added to the link, s. slower: the device's seconds over the cloud's. budget: of the questions' tokens.
    """
    lengths = [int(recorded.answer(name, "device", systems)["query"]) for name in recorded.names]
    asks = admitted(lengths, budget, seed) if "C" in systems else np.full(len(lengths), "D" in systems)
    rows = {}
    for i, name in enumerate(recorded.names):
        rows[name] = (
            together(recorded, name, systems, delay, slower, seed + i)
            if asks[i] and "D" in systems
            else single(recorded, name, systems, slower)
        )
    if "D" not in systems and asks.any():
        chosen = [name for name, asks_cloud in zip(recorded.names, asks, strict=True) if asks_cloud]
        rows |= dict(zip(chosen, raced(recorded, chosen, systems, delay, slower, seed), strict=True))
    table = pd.DataFrame([rows[name] for name in recorded.names], dtype=float).assign(question=recorded.names)
    table["holder"] = [recorded.answer(name, "device", "")["holder"] for name in recorded.names]
    return evidence.derived(table.assign(systems=systems, delay=delay, slower=slower), recorded.kind)


def gain(played: Mapping[str, pd.DataFrame], quantity: str, systems: str, before: str = "") -> evidence.Estimate:
    """How many times less a set takes than another one, in the geometric mean over questions. played: by set."""
    longer, shorter = (played[part][quantity].tolist() for part in (before, systems))
    return evidence.ratio(longer, shorter, played[systems], drawn="questions")


def synergy(played: Mapping[str, pd.DataFrame], quantity: str, system: str, other: str) -> evidence.Estimate:
    """A pair's gain over the product of its parts' gains alone: 1 where they multiply, below 1 where they cancel."""
    pair = "".join(letter for letter in SYSTEMS if letter in system + other)
    plain, first, second, both = (played[systems][quantity] for systems in ("", system, other, pair))
    return evidence.ratio((first * second).tolist(), (plain * both).tolist(), played[pair], drawn="questions")

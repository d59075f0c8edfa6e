"""Theorem 1 end to end: two processes and a relay answer as brute-force token-wise aggregation does.

The model's text begins anew every third token, so that each answer holds many independent texts of three tokens, and
speculation, rollback and moves of the aggregator go across their borders.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from broken_relay import Cut, Relay
from dragon_tables import CloudProcess, TableNode, answers, exact
from scipy.stats import chisquare
from waiting import PATIENCE

from ondevice.network.link import Link
from ondevice_papers.dragon import decisions, side
from ondevice_programs.pair.answer import Answer, Asked
from ondevice_programs.pair.device import Device

N, TEXTS = 3, 30  # tokens of a text, texts of an answer
AT_ONCE = 6
CLOUD = dict(seed=1, log_weight=1.5, period=N)
ALIKE, OTHER = 1e-4, 1e-6  # p-values: above, the distribution is the expected one; below, it is another
ASKED = Asked(limit=N * TEXTS, lookahead=6)
WAYS = {
    "the device aggregates": ASKED,
    "the cloud aggregates": replace(ASKED, aggregator="cloud"),
    "the aggregator moves": replace(ASKED, scheduler="lagging"),
    "the paper's rule moves it, remote resamples": replace(ASKED, scheduler="greedy", gamma_remote=1.0),
    "remote resamples": replace(ASKED, gamma_remote=1.0),
    "shared randomness": replace(ASKED, mode="shared", scheduler="lagging"),
    "token-wise": replace(ASKED, mode="token-wise"),
}


def device_node() -> TableNode:
    return TableNode(2, period=N)


@pytest.fixture(scope="module")
def cloud() -> Iterator[CloudProcess]:
    with CloudProcess(CLOUD, dict(keep=2.0)) as process:
        yield process


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    """[27] probabilities of the texts."""
    found = answers(device_node(), TableNode(**CLOUD), N)
    assert found.sum() == pytest.approx(1.0) and found.min() > 1e-4
    return found


def ask_all(
    cloud: CloudProcess, asked: Asked, count: int, seed: int = 0, cuts: int = 0, delay: float = 0.0
) -> list[Answer]:
    """So many answers over links of random delay, each with a seed of its own.

    cuts: so many connections of each answer are cut, at a byte that every answer comes to. delay: seconds more to the
    cloud, so that it drafts on after a rejection that it has not heard of, on a busy machine, too.
    """
    coins = random.Random(seed)

    async def run(relays: list[Relay]) -> list[Answer]:
        numbers = iter(range(count))

        async def some(relay: Relay) -> list[Answer]:
            """One answer after the other, so that a relay's next connections are the next answer's."""
            return [await one(relay, number) for number in numbers]

        async def one(relay: Relay, number: int) -> Answer:
            relay.set(faults=[cut(coins, connection) for connection in range(cuts)])
            with Device(device_node(), port=relay.port, patience=PATIENCE) as device:
                return await device.ask("q", replace(asked, seed=1000 * seed + number))

        return [answer for found in await asyncio.gather(*map(some, relays)) for answer in found]

    links = Link(delay, jitter=0.006), Link(0.0, jitter=0.003)
    with contextlib.ExitStack() as stack:
        relays = [stack.enter_context(Relay("127.0.0.1", cloud.port, *links, seed=seed + n)) for n in range(AT_ONCE)]
        found = asyncio.run(run(relays))
    assert len(found) == count
    assert all(answer.alone_from is None and len(answer.tokens) == asked.limit for answer in found)
    assert all(answer.connections == 1 + cuts for answer in found)
    return found


def cut(coins: random.Random, connection: int) -> Cut:
    """Within the first third of what an answer of 90 tokens carries in its quieter direction."""
    way, reset = coins.choice(["up", "down"]), coins.random() < 0.5
    return Cut(connection=connection, direction=way, at=coins.randrange(700, 1700), reset=reset)


def texts(found: list[Answer]) -> np.ndarray:
    """[27] how often each text came."""
    tokens = np.array([answer.tokens for answer in found]).reshape(-1, N)
    return np.bincount(tokens @ 3 ** np.arange(N)[::-1], minlength=3**N)


def probability(counts: np.ndarray, expected: np.ndarray) -> float:
    """The p-value of Pearson's test; texts that are too rare for it count as one."""
    rare = expected * counts.sum() < 5
    both = [np.append(values[~rare], values[rare].sum()) for values in (counts, expected * counts.sum())]
    keep = both[1] > 0
    return float(chisquare(both[0][keep], both[1][keep]).pvalue)


def check_ways(cloud: CloudProcess, expected: np.ndarray, count: int) -> None:
    total = np.zeros(3**N, int)
    for number, (name, asked) in enumerate(WAYS.items()):
        found = ask_all(cloud, asked, count, seed=number)
        counts = texts(found)
        total += counts
        moved = sum(0 < answer.device[0] < asked.limit for answer in found)
        print(f"{name}: {counts.sum()} texts, p = {probability(counts, expected):.3f}, {moved} answers on both sides")
        assert probability(counts, expected) > ALIKE
        assert moved > 0 or asked.scheduler != "lagging"  # what the name promises did happen
        assert moved == 0 or asked.scheduler != "stay"
    print(f"all: {total.sum()} texts, p = {probability(total, expected):.3f}")
    assert probability(total, expected) > ALIKE


def test_answers_are_distributed_as_token_wise_aggregation_s(cloud, expected):
    check_ways(cloud, expected, count=12)


def test_connections_that_are_cut_and_resumed_do_not_change_the_distribution(cloud, expected):
    counts = texts(ask_all(cloud, replace(ASKED, scheduler="lagging"), 24, seed=50, cuts=2))
    print(f"p = {probability(counts, expected):.3f}")
    assert probability(counts, expected) > ALIKE


@pytest.mark.parametrize("cuts", [0, 2])
@pytest.mark.parametrize("way", [dict(mode="shared"), dict(temperature=0.0)], ids=["shared", "greedy"])
@pytest.mark.parametrize("where", [dict(), dict(aggregator="cloud"), dict(scheduler="lagging")], ids=str)
def test_shared_randomness_and_greedy_answers_are_equal_token_by_token(cloud, way, where, cuts):
    asked = replace(ASKED, **way, **where)
    right = [exact(device_node(), TableNode(**CLOUD), replace(asked, seed=7000 + n)).tokens for n in range(2)]
    assert sorted(answer.tokens for answer in ask_all(cloud, asked, 2, seed=7, cuts=cuts)) == sorted(right)


# What the test above would find


def without_epochs(monkeypatch) -> None:
    """The aggregator decides from stale drafts where one has come, as the authors' program does.

    It tells the cloud that its draft is rejected, so that both sides still agree on all that is decided.
    """
    stale: dict[tuple[str, int], side.Draft] = {}
    decision = decisions.decision

    def queued(self: side.Side, now: float, draft: side.Draft) -> None:
        if draft.epoch < self.peer_epoch:
            stale[draft.session, draft.position] = draft
        side.queue(self, now, draft)

    def decided(begin, priors):
        decide = decision(begin, priors)

        def careless(local: side.Draft, remote: side.Draft, position: int) -> tuple[int, bool, bool]:
            old = stale.get((remote.session, position))
            token, kept, kept_remote = decide(local, old or remote, position)
            return token, kept, kept_remote and old is None

        return careless

    monkeypatch.setattr(side, "RULES", side.Rules(queue=queued))
    monkeypatch.setattr(decisions, "decision", decided)


def without_weights(monkeypatch) -> None:
    """The decision takes both sides for equally relevant."""
    right = decisions.target
    monkeypatch.setattr(decisions, "target", lambda p, q, w, v: right(p, q, 0.0, 0.0))


def without_resampling(monkeypatch) -> None:
    """A rejected draft is kept all the same."""
    take = decisions.aggregate

    def kept(local, remote, *rest):
        found = take(local, remote, *rest)
        return found._replace(token=local, accepted_local=True, accepted_remote=local == remote)

    monkeypatch.setattr(decisions, "aggregate", kept)


@pytest.mark.parametrize("mistake, count", [(without_epochs, 120), (without_weights, 15), (without_resampling, 10)])
def test_a_mistake_is_rejected(cloud, expected, monkeypatch, mistake: Callable, count: int):
    mistake(monkeypatch)
    counts = texts(ask_all(cloud, ASKED, count, seed=90, delay=0.02))
    print(f"{mistake.__name__}: {counts.sum()} texts, p = {probability(counts, expected):.1e}")
    assert probability(counts, expected) < OTHER

"""Theorem 1 end to end: two processes and a relay answer as brute-force token-wise aggregation does.

The model's text begins anew every third token, so that each answer holds many independent texts of three tokens, and
speculation, rollback and moves of the aggregator go across their borders.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import replace

import numpy as np
import pytest
from broken_relay import Cut, Relay
from dragon_tables import CloudProcess, TableNode, answers
from scipy.stats import chisquare
from waiting import PATIENCE

from ondevice.network.link import Link
from ondevice_programs.pair.answer import Answer, AnswerSettings
from ondevice_programs.pair.device import Device

N, TEXTS = 3, 30  # tokens of a text, texts of an answer
AT_ONCE = 6
CLOUD = dict(seed=1, log_weight=1.5, period=N)
ALIKE = 1e-4  # a p-value above which the distribution is the expected one
ASKED = AnswerSettings(limit=N * TEXTS, temperature=1.0, lookahead=6)
WAYS = {
    "the device aggregates": ASKED,
    "the cloud aggregates": replace(ASKED, aggregator="cloud"),
    "the aggregator moves": replace(ASKED, scheduler="lagging"),
    "the paper's rule moves it, remote resamples": replace(ASKED, scheduler="greedy", gamma_remote=1.0),
    "remote resamples": replace(ASKED, gamma_remote=1.0),
    "connections are cut": replace(ASKED, scheduler="lagging"),
}


def device_node() -> TableNode:
    return TableNode(2, period=N)


def ask_all(cloud: CloudProcess, asked: AnswerSettings, count: int, seed: int, cuts: int) -> list[Answer]:
    """So many answers over links of random delay, each with a seed of its own.

    cuts: so many connections of each answer are cut, at a byte that every answer comes to.
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

    links = Link(jitter=0.006), Link(0.0, jitter=0.003)
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


def test_answers_are_distributed_as_token_wise_aggregation_s():
    """Stale drafts, which would change that, are the properties' negative control."""
    expected = answers(device_node(), TableNode(**CLOUD), N)
    assert expected.sum() == pytest.approx(1.0) and expected.min() > 1e-4
    total = np.zeros(3**N, int)
    with CloudProcess(CLOUD, dict(keep=2.0)) as cloud:
        for number, (name, asked) in enumerate(WAYS.items()):
            given = ask_all(cloud, asked, 12, number, cuts=2 if "cut" in name else 0)
            counts = texts(given)
            total += counts
            moved = sum(0 < answer.device[0] < asked.limit for answer in given)
            p = probability(counts, expected)
            print(f"{name}: {counts.sum()} texts, p = {p:.3f}, {moved} answers on both sides")
            assert p > ALIKE
            assert moved > 0 or asked.scheduler != "lagging"  # what the name promises did happen
            assert moved == 0 or asked.scheduler != "stay"
    assert probability(total, expected) > ALIKE

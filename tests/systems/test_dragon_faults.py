"""Hundreds of sessions of two processes while connections break and hang, and clouds and devices are killed.

Every one ends with the exact answer, or with an exact beginning that the device continues alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import zlib
from collections import Counter
from collections.abc import Callable

import psutil
import pytest
from broken_relay import Cut, Fault, Relay, Stall
from dragon_tables import CloudProcess, TableNode, begin_of, by_itself, coded, exact, left_over
from waiting import PATIENCE, until

from ondevice.network.link import Link
from ondevice_papers.dragon import decisions
from ondevice_papers.dragon.side import DraftMessage
from ondevice_papers.dragon.speculative_aggregation import Stream
from ondevice_programs.pair.answer import Answer, AnswerSettings
from ondevice_programs.pair.device import Device

LIMIT = 24  # tokens
PATIENT = dict(patience=1.5, beat=0.1, silence=1.0)  # a session takes some seconds at most
CLOUD = dict(seed=1, log_weight=0.3, delay=0.001)
OPTIONS = dict(keep=2.5, beat=0.1, silence=1.0)
NOTHING_LEFT = dict(threads=0, sessions=0, tasks=0, connections=0)


def device_node() -> TableNode:
    return TableNode(2, delay=0.001)


def asked(coins: random.Random) -> AnswerSettings:
    """Each way to answer, where the answer is determined."""
    mode, temperature = (
        coins.choice(["shared", "shared", "speculative", "token-wise", "sequence-wise", "cloud-only"]),
        1.0,
    )
    scheduler = coins.choice(["stay", "greedy", "lagging"]) if mode == "shared" else "stay"
    if mode == "speculative" and coins.random() < 0.5:
        scheduler, temperature = "lagging", 0.0
    aggregator, lookahead, gamma = coins.choice(["device", "cloud"]), coins.choice([2, 8]), coins.choice([0.5, 1.0])
    return AnswerSettings(
        limit=LIMIT, mode=mode, aggregator=aggregator, scheduler=scheduler, temperature=temperature,
        gamma_remote=gamma, lookahead=lookahead, seed=coins.getrandbits(60),
    )  # fmt: skip


def sequence_wise(device: TableNode, cloud: TableNode, asked: AnswerSettings) -> list[int]:
    """Both answers, mixed position by position."""
    each = [(n, by_itself(n, asked, s, [])) for n, s in ((device, Stream.DEVICE), (cloud, Stream.CLOUD))]
    decide = decisions.decision(begin_of(asked), dict.fromkeys(range(LIMIT), device.lm.prior))
    return [
        decide(*(DraftMessage("s", 0, i, t[i], coded(n.lm, t[:i])[0], n.log_weight) for n, t in each), i)[0]
        for i in range(LIMIT)
    ]


def right(asked: AnswerSettings) -> list[int]:
    """The answer where nothing goes wrong."""
    device, cloud = TableNode(2), TableNode(1, 0.3)
    if asked.mode == "sequence-wise":
        return sequence_wise(device, cloud, asked)
    if asked.mode == "cloud-only":
        return by_itself(cloud, asked, Stream.CLOUD, [])
    return exact(device, cloud, asked).tokens


def outcome(asked: AnswerSettings, answer: Answer) -> str:
    """What kind of end that is; raises AssertionError on one that is neither."""
    alone, expected = answer.alone_from, right(asked)
    assert len(answer.tokens) == len(answer.times) == LIMIT
    if alone is None:
        assert answer.tokens == expected
        return "whole" if answer.connections == 1 else "whole, resumed"
    assert answer.reason
    assert answer.tokens[:alone] == expected[:alone]
    assert answer.tokens[alone:] == by_itself(TableNode(2), asked, Stream.DEVICE, answer.tokens[:alone])
    return "alone from the start" if alone == 0 else "alone from the middle"


async def ask(
    port: int, asked: AnswerSettings, on_token: Callable[[int], None] | None = None, restarts: bool = False
) -> Answer:
    """One session, in its time. restarts: the device is closed amid the answer, and another one asks again."""
    loop = asyncio.get_running_loop()
    heard = None if on_token is None else lambda token: loop.call_soon_threadsafe(on_token, token)
    async with asyncio.timeout(PATIENCE):
        if restarts:
            first = Device(device_node(), port=port, **PATIENT)
            asking = asyncio.create_task(first.ask("q", asked, heard))
            await asyncio.sleep(0.05)
            await asyncio.to_thread(first.close)
            await asyncio.gather(asking, return_exceptions=True)
        device = Device(device_node(), port=port, **PATIENT)
        try:
            return await device.ask("q", asked, heard)
        finally:
            await asyncio.to_thread(device.close)


def broken(coins: random.Random, count: int) -> list[Fault]:
    """A fault on most of so many connections, anywhere in what they carry."""
    faults: list[Fault] = []
    for connection in range(count):
        where = dict(connection=connection, direction=coins.choice(["up", "down"]), at=coins.randrange(2500))
        kind = coins.random()
        if kind < 0.2:
            faults.append(Stall(**where))
        elif kind < 0.6:
            timed = dict(at=0, after=coins.uniform(0.0, 0.3)) if coins.random() < 0.5 else {}
            faults.append(Cut(**{**where, **timed}, reset=coins.random() < 0.5))
    return faults


class Trouble:
    """A cloud that is killed and frozen by turns, amid answers, and started again at the same port."""

    def __init__(self, coins: random.Random) -> None:
        self.coins, self.process, self.killed, self.frozen = coins, CloudProcess(CLOUD, OPTIONS), 0, 0
        self.process.__enter__()
        self.tokens, self.due, self.listening = 0, asyncio.Event(), asyncio.Event()
        self.listening.set()

    def heard(self, token: int) -> None:
        """A token of any answer; some bring trouble, none so late that the last answers do not need the cloud."""
        self.tokens += 1
        if self.tokens % 1200 == 300 and self.tokens < 9000:
            self.due.set()

    async def make(self) -> None:
        while True:
            await self.due.wait()
            self.due.clear()
            if self.frozen < self.killed:
                pid = self.process.process.pid
                os.kill(pid, signal.SIGSTOP)
                await asyncio.sleep(self.coins.uniform(0.2, 1.5))
                os.kill(pid, signal.SIGCONT)
                self.frozen += 1
            else:
                self.listening.clear()
                self.process.kill()
                await asyncio.sleep(self.coins.uniform(0.0, 0.3))
                again = CloudProcess(CLOUD, OPTIONS, self.process.port)
                self.process = await asyncio.to_thread(again.__enter__)
                self.killed += 1
                self.listening.set()


async def storm(sessions: int, seed: int) -> tuple[Counter[str], Trouble]:
    coins, gate = random.Random(seed), asyncio.Semaphore(6)
    trouble = Trouble(coins)
    faults = broken(coins, 4 * sessions)
    questions = [asked(coins) for _ in range(sessions)]
    links = Link(0.0, 0.004), Link(0.001, 0.004)
    with Relay("127.0.0.1", trouble.process.port, *links, faults=faults, seed=seed) as relay:

        async def one(question: AnswerSettings) -> str:
            async with gate:
                await trouble.listening.wait()  # a process takes long to start: longer than a device's patience
                restarts = zlib.crc32(str(question.seed).encode()) % 10 == 0
                return outcome(question, await ask(relay.port, question, trouble.heard, restarts))

        troubling = asyncio.create_task(trouble.make())
        try:
            ends = Counter(await asyncio.gather(*map(one, questions)))
        finally:
            troubling.cancel()
            await asyncio.gather(troubling, return_exceptions=True)
    with contextlib.ExitStack() as stack:
        cloud = trouble.process
        stack.push(cloud)  # entered when it was started
        assert await until(lambda: cloud.report() == NOTHING_LEFT), cloud.report()
    assert await until(lambda: not list(left_over()))
    return ends, trouble


def test_sessions_in_bad_weather():
    sessions, before, memory = 500, open_sockets(), psutil.Process().memory_info().rss
    earlier = set(psutil.Process().children())  # of tests before
    ends, trouble = asyncio.run(storm(sessions, seed=3))
    print(f"{sessions} sessions, {trouble.killed} clouds killed, {trouble.frozen} frozen: {dict(ends)}")
    assert sum(ends.values()) == sessions and trouble.killed and trouble.frozen
    assert ends["whole"] and ends["whole, resumed"] and ends["alone from the middle"]
    assert ends["alone from the start"] < sessions / 3
    assert psutil.Process().memory_info().rss - memory < 100e6
    assert open_sockets() <= before
    helpers = ("forkserver", "resource_tracker")  # of multiprocessing, one for the whole test run
    children = [" ".join(child.cmdline()) for child in set(psutil.Process().children()) - earlier]
    assert [child for child in children if not any(name in child for name in helpers)] == []


def open_sockets() -> int:
    return len(psutil.Process().net_connections("tcp"))


def test_the_checks_themselves_can_fail():
    question = AnswerSettings(limit=LIMIT, mode="shared", temperature=1.0, seed=3)
    tokens, times = right(question), [0.0] * LIMIT
    assert outcome(question, Answer(tokens=tokens, times=times, connections=1)) == "whole"
    with pytest.raises(AssertionError):
        outcome(question, Answer(tokens=[*tokens[:-1], (tokens[-1] + 1) % 3], times=times))
    with pytest.raises(AssertionError):
        outcome(question, Answer(tokens=tokens, times=times, alone_from=9, reason="gone"))

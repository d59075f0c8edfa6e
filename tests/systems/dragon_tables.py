"""Two sides with a vocabulary small enough to enumerate all their answers: the model is a table.

Also a cloud in a process of its own, and what the answers must be, by the definition of token-wise aggregation.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from typing import Any, Self

import numpy as np
from waiting import PATIENCE

from ondevice_papers.dragon import codec, decisions
from ondevice_papers.dragon.aggregation import target
from ondevice_papers.dragon.messages import VERSION, Begin, Cited, Hello
from ondevice_papers.dragon.side import DraftMessage
from ondevice_papers.dragon.speculative_aggregation import Stream
from ondevice_programs.pair.answer import AnswerSettings
from ondevice_programs.pair.cloud import Cloud
from ondevice_programs.pair.decoder import Interrupted, Piece
from ondevice_programs.pair.engine import ModelThread


@dataclass
class Table:
    """The model: p(token | side, the tokens so far), the same on every machine.

    delay: seconds a token takes. period: the text begins anew after so many tokens, so that one answer holds many
    independent ones; 0: never.
    """

    seed: int
    vocabulary: int = 3
    delay: float = 0.0
    failing_at: int = -1
    period: int = 0
    known: dict[tuple[int, ...], np.ndarray] = field(default_factory=dict, repr=False)

    @property
    def prior(self) -> np.ndarray:
        """[V] without documents."""
        return np.full(self.vocabulary, 1 / self.vocabulary)

    def log_probs(self, tokens: list[int]) -> np.ndarray:
        """[V], of moderate odds."""
        begin = len(tokens) - len(tokens) % self.period if self.period else 0
        context = tuple(tokens[begin:])
        if context not in self.known:
            key = np.random.SeedSequence([self.seed, len(context), *context])
            weights = np.random.default_rng(key).dirichlet(np.full(self.vocabulary, 1.0)) + 0.05
            self.known[context] = np.log(weights / weights.sum())
        return self.known[context]


@dataclass
class TableDecoder:
    """What `Drafting` asks of a decoder, on a table."""

    in_line, rows = False, 1

    lm: Table
    log_weight: float
    tokens: list[int] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)
    ended: bool = False
    room: int = 10**6

    @property
    def position(self) -> int:
        return len(self.tokens)

    @property
    def prior(self) -> np.ndarray:
        return self.lm.prior

    def next_distribution(self) -> np.ndarray:
        if len(self.tokens) == self.lm.failing_at:
            raise RuntimeError("The table has a hole.")
        try:
            if self.stopped.wait(self.lm.delay) if self.lm.delay else self.stopped.is_set():
                raise Interrupted
            return self.lm.log_probs(self.tokens)
        finally:
            self.stopped.clear()

    def commit(self, token: int) -> None:
        self.tokens.append(int(token))

    def rollback(self, position: int) -> None:
        assert 0 <= position <= self.position
        del self.tokens[position:]

    def interrupt(self) -> None:
        self.stopped.set()

    def pieces(self) -> Iterator[Piece]:
        return iter(())

    def require_open(self) -> None:
        pass

    def close(self) -> None:
        pass


class Words:
    """A tokenizer of numbers."""

    eos_token_id = None

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, tokens))


NOTHING = "nothing about that"  # a query for which a side finds no document


class TableNode:
    """What `Cloud` and `Device` ask of a node."""

    def __init__(
        self, seed: int, log_weight: float = 0.0, *, vocabulary: int = 3, delay: float = 0.0, model: str = "table",
        failing_at: int = -1, period: int = 0,
    ) -> None:  # fmt: skip
        self.lm = Table(seed, vocabulary, delay, failing_at, period)
        self.log_weight, self.tokenizer, self.ends = log_weight, Words(), frozenset[int]()
        self.hello = Hello(VERSION, "tables", model, "numbers", vocabulary)
        self.engine = ModelThread()
        self.decoders: list[TableDecoder] = []

    def decoder(self, query: str, k: int, temperature: float = 1.0) -> tuple[TableDecoder, list[Cited]]:
        if query == NOTHING:
            raise ValueError("A side decodes with at least one document, not 0.")
        self.decoders.append(TableDecoder(self.lm, self.log_weight))
        return self.decoders[-1], [Cited(f"{self.hello.name}.txt", 1, 1.0)]

    def cost(self, k: int, query: str, limit: int) -> int:
        return k * limit


# What the answers must be


def coded(lm: Table, tokens: list[int]) -> tuple[bytes, np.ndarray]:
    """A side's next distribution as it is sent, and what its drafts are drawn from [V]."""
    payload = codec.encode(np.exp(lm.log_probs(tokens)), prior=lm.prior)
    return payload, codec.decode(payload, lm.vocabulary)


def mixed(device: TableNode, cloud: TableNode, tokens: list[int]) -> np.ndarray:
    """The target distribution [V] after these tokens."""
    p_device, p_cloud = (codec.filled(coded(node.lm, tokens)[0], node.lm.prior) for node in (device, cloud))
    return target(p_device, p_cloud, device.log_weight, cloud.log_weight)


def answers(device: TableNode, cloud: TableNode, n: int) -> np.ndarray:
    """[V^n] the probability of every answer of n tokens under token-wise aggregation; the last token runs fastest."""
    found = []
    for tokens in itertools.product(range(device.lm.vocabulary), repeat=n):
        each = [mixed(device, cloud, list(tokens[:i]))[token] for i, token in enumerate(tokens)]
        found.append(float(np.prod(each)))
    return np.array(found)


def begin_of(asked: AnswerSettings) -> Begin:
    """As the device makes it."""
    assert asked.seed is not None
    return Begin(
        "s", asked.seed, asked.mode, asked.k, "q", asked.limit, asked.aggregator, asked.temperature,
        asked.gamma_remote, asked.lookahead, asked.cap, asked.scheduler,
    )  # fmt: skip


@dataclass(frozen=True)
class Exact:
    """Token-wise aggregation of one answer: tokens, and [n, 2] whether the device's and the cloud's were accepted."""

    tokens: list[int]
    accepted: np.ndarray


def exact(device: TableNode, cloud: TableNode, asked: AnswerSettings) -> Exact:
    """The answer by definition: both sides draft from the decided tokens, one position after the other.

    With Algorithm 1 this holds as long as the aggregator stays; with shared randomness and greedily, always.
    """
    begin, tokens, flags = begin_of(asked), list[int](), []
    draws = {s: decisions.drafts(begin, s) for s in (Stream.DEVICE, Stream.CLOUD)}
    decide = decisions.decision(begin, dict.fromkeys(range(asked.limit), device.lm.prior))
    for position in range(asked.limit):
        drafts = []
        for node, stream in ((device, Stream.DEVICE), (cloud, Stream.CLOUD)):
            payload, p = coded(node.lm, tokens)
            drafts.append(DraftMessage("s", 0, position, draws[stream](position, np.log(p)), payload, node.log_weight))
        turned = asked.aggregator == "cloud"
        token, *kept = decide(*drafts[::-1] if turned else drafts, position)
        flags.append(kept[::-1] if turned else kept)
        tokens.append(token)
    return Exact(tokens, np.array(flags))


def by_itself(node: TableNode, asked: AnswerSettings, stream: Stream, before: list[int]) -> list[int]:
    """What one side generates alone after these tokens, up to the limit; without them."""
    draw, tokens = decisions.drafts(begin_of(asked), stream), list(before)
    while len(tokens) < asked.limit:
        tokens.append(draw(len(tokens), np.log(coded(node.lm, tokens)[1])))
    return tokens[len(before) :]


# A cloud in a process of its own


class CloudProcess:
    """A cloud of a `TableNode` in another process: a context manager; `port` is where it listens.

    node, options: of `TableNode` and `Cloud`. port: 0 for a free one.
    """

    def __init__(self, node: dict[str, Any], options: dict[str, Any] | None = None, port: int = 0) -> None:
        self.node, self.options, self.port = node, options or {}, port

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("forkserver")  # one import of the libraries for all processes
        context.set_forkserver_preload(["ondevice_programs.pair.cloud", "ondevice_programs.pair.device", "psutil"])
        self.pipe, theirs = context.Pipe()
        arguments = (theirs, self.node, self.options, self.port)
        self.process = context.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        assert self.pipe.poll(PATIENCE), "The cloud's process does not start."
        self.port = self.pipe.recv()
        return self

    def report(self) -> dict[str, Any]:
        """How many threads it has, open sessions, tasks and connections."""
        self.pipe.send("report")
        assert self.pipe.poll(PATIENCE), "The cloud's event loop is blocked."
        return self.pipe.recv()

    def kill(self) -> None:
        """At once, without a word."""
        self.process.kill()
        self.process.join()
        self.pipe.close()

    def __exit__(self, *_: object) -> None:
        if self.process.exitcode is None:
            with suppress(OSError):
                self.pipe.close()  # it ends by itself
            self.process.join(PATIENCE)
            ended = self.process.exitcode
            if ended is None:
                self.process.kill()
            assert ended == 0, f"The cloud's process has ended with {ended}."


def _serve(pipe: Pipe, node: dict[str, Any], options: dict[str, Any], port: int) -> None:
    async def run() -> None:
        cloud = Cloud(TableNode(**node), **options)  # type: ignore[arg-type]
        ended, loop = asyncio.Event(), asyncio.get_running_loop()

        def asked() -> None:
            try:
                pipe.recv()
                pipe.send(_report(cloud))
            except EOFError:
                loop.remove_reader(pipe.fileno())
                ended.set()

        async with cloud.listening(port=port) as opened:
            pipe.send(opened)
            loop.add_reader(pipe.fileno(), asked)
            await ended.wait()

    asyncio.run(run())


def _report(cloud: Cloud) -> dict[str, Any]:
    import psutil

    threads = [thread.name for thread in threading.enumerate() if thread.name == "engine"]
    connected = [found for found in psutil.Process().net_connections("tcp") if found.status == "ESTABLISHED"]
    return {
        "threads": len(threads), "sessions": len(cloud._sessions), "tasks": len(asyncio.all_tasks()) - 1,
        "connections": len(connected),
    }  # fmt: skip


def left_over() -> Iterator[str]:
    """What a session may leave in this process and must not: drafting threads and tasks besides the caller's."""
    yield from (thread.name for thread in threading.enumerate() if thread.name in ("engine", "device"))
    yield from (str(task) for task in asyncio.all_tasks() if task is not asyncio.current_task())

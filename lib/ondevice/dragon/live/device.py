"""The device: asks, aggregates with the cloud, survives lost connections, and answers alone where the cloud is gone."""

from __future__ import annotations

import asyncio
import secrets
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_type_hints

import msgspec

from ondevice.dragon import codec, decisions
from ondevice.dragon.aggregation import Floats
from ondevice.dragon.live import alone
from ondevice.dragon.live.connection import Connection, Lost, connect
from ondevice.dragon.live.decoder import Decoder
from ondevice.dragon.live.drafting import Drafted, Drafting
from ondevice.dragon.live.node import Node
from ondevice.dragon.live.player import Player
from ondevice.dragon.messages import Begin, Draft, End, Failure, Message, Mode, Moves, Resume, Welcome, check_peer
from ondevice.dragon.messages import Side as SideName
from ondevice.dragon.scheduler import Profiler
from ondevice.dragon.side import Decide, Side
from ondevice.dragon.side import Draft as Own
from ondevice.dragon.speculative_aggregation import Stream

Result = TypeVar("Result")

_PAUSE = 0.05  # seconds between attempts to connect
_MOST = 20  # connections of one session


@dataclass(frozen=True)
class Asked:
    """How an answer is made; the names are those of `messages.Begin`. seed None: a new one for each answer."""

    k: int = 2
    limit: int = 64
    mode: Mode = "speculative"
    aggregator: SideName = "device"
    scheduler: Moves = "stay"
    temperature: float = 1.0
    gamma_remote: float = 0.5
    lookahead: int = 16
    cap: int = codec.CAP
    seed: int | None = None


@dataclass(eq=False)
class Answer:
    """What came, and how. Times in seconds from the question.

    times: [n] when each token was known here. device, cloud: [decided, accepted] of each side's drafts, as far as this
    side knows: the cloud's where the device aggregated. decisions: those of the device: position, whether its and the
    cloud's draft were accepted, and the seconds that each draft took. alone_from: the first position that the device
    generated alone, None where there is none; reason: why. prefilled: when the device's first distribution was there.
    moves: of the aggregator, from and to this side.
    sent, received: bytes, frames and heartbeats included. connections: how many there were. rtt: seconds.
    """

    tokens: list[int] = field(default_factory=list)
    decisions: list[tuple[int, bool, bool, float, float]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    device: list[int] = field(default_factory=lambda: [0, 0])
    cloud: list[int] = field(default_factory=lambda: [0, 0])
    alone_from: int | None = None
    reason: str = ""
    prefilled: float | None = None
    moves: int = 0
    sent: int = 0
    received: int = 0
    connections: int = 0
    rtt: float | None = None
    text: str = ""

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.times[0]

    @property
    def per_token(self) -> float:
        """Mean seconds between tokens after the first; NaN of fewer than two."""
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1) if len(self.times) > 1 else float("nan")


def waited(work: Coroutine[Any, Any, Result]) -> Result:
    """What a coroutine gives, outside of an event loop and within one that runs, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


def request(query: str, asked: Asked) -> Begin:
    """The request of a new session. Raises ValueError on one that cannot be."""
    seed = secrets.randbits(63) if asked.seed is None else asked.seed
    if not query.strip():
        raise ValueError("The query is empty.")
    begin = Begin(
        secrets.token_hex(8), seed, asked.mode, asked.k, query, asked.limit, asked.aggregator, asked.temperature,
        asked.gamma_remote, asked.lookahead, asked.cap, asked.scheduler,
    )  # fmt: skip
    kinds = get_type_hints(Begin, include_extras=True)
    for name in Begin.__struct_fields__:
        value = getattr(begin, name)
        try:
            msgspec.convert(value, kinds[name])
        except msgspec.ValidationError as error:
            shown = value if not isinstance(value, str) or len(value) < 80 else f"{value[:80]}..."
            raise ValueError(f"A request's {name} cannot be {shown!r}: {error}.") from None
    return begin


class Device:
    """The asking side; one answer at a time, each over a connection of its own.

    host, port: of the cloud; with port 0 there is none, and the device answers alone (CRCG on the device).
    tls: of `connection.client_tls`. pace, prefill: seconds that a token and the first one take at least, to imitate
    other hardware.
    patience: seconds for which a lost cloud is tried again before the device goes on alone.
    """

    def __init__(
        self, node: Node, host: str = "127.0.0.1", port: int = 0, *, tls: ssl.SSLContext | None = None,
        pace: float = 0.0, prefill: float = 0.0, patience: float = 5.0, beat: float = 1.0, silence: float = 8.0,
    ) -> None:  # fmt: skip
        self.node, self.host, self.port, self.tls, self.pace, self.prefill = node, host, port, tls, pace, prefill
        self.rtt = 0.0  # seconds, of the last greeting
        self.patience, self.beat, self.silence = patience, beat, silence

    def answer(self, query: str, asked: Asked | None = None, on_token: Callable[[int], None] | None = None) -> Answer:
        """The answer; waits for it, in a notebook too. on_token: called with each token as it is decided.

        Raises ValueError on a request that cannot be, and on a cloud that cannot work with this device; where the
        cloud is gone, the answer says from where on the device went alone.
        """
        return waited(self.ask(query, asked, on_token))

    async def ask(
        self, query: str, asked: Asked | None = None, on_token: Callable[[int], None] | None = None
    ) -> Answer:
        """The same as a coroutine."""
        begin = request(query, asked or Asked())
        session = _Asking(self, begin, on_token)
        try:
            await session.run()
        finally:
            await session.close()
        session.answer.text = str(self.node.tokenizer.decode(session.answer.tokens, skip_special_tokens=True))
        return session.answer

    async def open(self, first: Message | None = None) -> Connection:
        """A connection to a cloud that this device can work with; its rtt is that of the greeting.

        first: sent with the greeting, which saves a round trip; so the cloud has it before it has shown its digests.
        Who it is, TLS has shown by then.
        Raises Lost where there is none, and ValueError on a cloud that cannot work with this device.
        """
        connection = await connect(self.host, self.port, tls=self.tls, beat=self.beat, silence=self.silence)
        try:
            start = time.perf_counter()
            connection.send(self.node.hello)
            if first is not None:
                connection.send(first)
            try:
                message = await connection.receive()
            except Lost:
                if connection.stranger:
                    raise Lost("what listens there is no DRAGON cloud") from None
                raise
            connection.rtt = time.perf_counter() - start
            if isinstance(message, Failure):
                raise ValueError(f"The cloud refuses: {message.reason}")
            if not isinstance(message, Welcome):
                raise Lost(f"a {type(message).__name__} came in the place of Welcome")
            check_peer(self.node.hello, message)
        except BaseException:
            await connection.close()
            raise
        self.rtt = connection.rtt or 0.0
        return connection


class _Asking:
    """One answer on its way."""

    def __init__(self, device: Device, begin: Begin, on_token: Callable[[int], None] | None) -> None:
        self.device, self.node, self.begin = device, device.node, begin
        self.answer, self.on_token = Answer(), on_token
        self.player: Player | None = None
        self.connection: Connection | None = None
        self.stop = threading.Event()
        self.began = time.perf_counter()
        self._heard = False  # whether the cloud has said anything of this session, so that it knows it

    async def run(self) -> None:
        if not self.device.port:
            await self._go_alone(await self._decoder(), "there is no cloud")
        elif self.begin.mode == "cloud-only":
            await self._listen()
        elif self.begin.mode == "sequence-wise":
            await self._sequence_wise()
        else:
            await self._aggregate()

    async def close(self) -> None:
        """Leave no thread and no connection, whatever happened."""
        self.stop.set()
        if self.player is not None:
            await asyncio.to_thread(self.player.stop)
            self.answer.prefilled = self.answer.prefilled or self.player.drafting.prefilled
            self.answer.moves = self.player.moves
        await self._dropped()

    # Aggregation, token by token

    async def _aggregate(self) -> None:
        begin, priors = self.begin, dict[int, Floats]()
        machine = Side(
            begin.session, self._counted(decisions.decision(begin, priors)),
            aggregates=begin.aggregator == "device", limit=begin.limit, end=self.node.end,
            lookahead=decisions.lookahead(begin), scheduler=decisions.mover(begin, 0.0),
        )  # fmt: skip
        player = self.player = Player(machine, priors, self._emitted)
        player.start(self._drafting)
        reason = await self._session(player)
        if machine.done:
            return
        await asyncio.to_thread(player.stop)
        decoder = player.drafting.decoder
        if decoder is None or isinstance(player.failure, RuntimeError):
            raise player.failure or RuntimeError("The device has no decoder.")  # its own fault: no room, no document
        await self._go_alone(decoder, reason or str(player.failure))

    def _drafting(self, drafted: Callable[[Drafted], None], failed: Callable[[Exception], None]) -> Drafting:
        begin, node = self.begin, self.node
        return Drafting(
            lambda: node.decoder(begin.query, begin.k, begin.temperature), decisions.drafts(begin, Stream.DEVICE),
            drafted, failed, lock=node.lock, cap=begin.cap, pace=self.device.pace,
            prefill=self.device.prefill,
        )  # fmt: skip

    async def _session(self, player: Player) -> str:
        """Until the output has ended, or the cloud is given up: then why."""
        reason = ""
        while self.answer.connections < _MOST and not player.ended.is_set():
            try:
                await self._reconnected(player)
                await self._follow(player)
                return ""
            except Lost as lost:
                player.detach()
                await self._dropped()
                reason = str(lost)
                if not isinstance(lost, _Nobody):
                    continue
            except _GivenUp as given_up:
                reason = str(given_up)
            return reason
        return reason and f"the connection was lost {self.answer.connections} times, at last because {reason}"

    async def _reconnected(self, player: Player) -> None:
        """Connect, again and again as long as the patience lasts, and begin the session or go on with it."""
        deadline = time.perf_counter() + self.device.patience
        while True:
            try:
                first = player.resumption if self._heard else msgspec.structs.replace(self.begin, rtt=self.device.rtt)
                connection = await self._greeted(first)
                break
            except Lost as lost:
                await self._dropped()
                if time.perf_counter() > deadline or player.ended.is_set():
                    raise _Nobody(str(lost)) from None
                await asyncio.sleep(_PAUSE)
        if not self._heard:
            peer = Resume(self.begin.session, 0, 0, self.begin.aggregator == "cloud")
            if isinstance(player.machine.scheduler, Profiler):
                player.machine.scheduler.rtt = self.device.rtt
        else:
            message = await connection.receive()
            if isinstance(message, Failure):
                raise _GivenUp(message.reason)
            if not isinstance(message, Resume):
                raise Lost(f"a {type(message).__name__} came where the session goes on")
            peer = message
        try:
            player.resume(connection, peer)
        except ValueError as error:
            raise _GivenUp(str(error)) from None

    async def _greeted(self, first: Message) -> Connection:
        self.connection = await self.device.open(first)
        self.answer.connections += 1
        return self.connection

    async def _follow(self, player: Player) -> None:
        """Pass the cloud's messages on until the output has ended."""
        pumping = asyncio.create_task(self._pump(player))
        ending = asyncio.create_task(player.ended.wait())
        try:
            await asyncio.wait({pumping, ending}, return_when=asyncio.FIRST_COMPLETED)
            if player.ended.is_set():
                self._say_end(len(player.machine.tokens))
            else:
                pumping.result()
        finally:
            pumping.cancel()
            ending.cancel()
            await asyncio.gather(pumping, ending, return_exceptions=True)

    async def _pump(self, player: Player) -> None:
        connection = self.connection
        while connection is not None:
            message = await connection.receive()
            if isinstance(message, Failure):
                raise _GivenUp(message.reason)
            try:
                player.received(message)
            except ValueError as error:  # something between the two is missing; beginning from Resume mends it
                raise Lost(str(error)) from None
            self._heard = True

    def _counted(self, decide: Decide) -> Decide:
        def counted(local: Own, remote: Own, position: int) -> tuple[int, bool, bool]:
            token, kept_local, kept_remote = decide(local, remote, position)
            for counts, kept in ((self.answer.device, kept_local), (self.answer.cloud, kept_remote)):
                counts[0] += 1
                counts[1] += kept
            self.answer.decisions.append((position, kept_local, kept_remote, local.pace, remote.pace))
            return token, kept_local, kept_remote

        return counted

    # The device by itself

    async def _go_alone(self, decoder: Decoder, reason: str) -> None:
        """Generate the rest from the device's own documents, if there is a rest."""
        tokens = self.answer.tokens
        if len(tokens) == self.begin.limit or (tokens and tokens[-1] == self.node.end):
            return
        self.answer.alone_from, self.answer.reason = len(self.answer.tokens), reason
        loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._alone, decoder, list(self.answer.tokens), loop)
        await asyncio.sleep(0)  # the last token is emitted

    def _alone(self, decoder: Decoder, tokens: list[int], loop: asyncio.AbstractEventLoop) -> list[alone.Token]:
        """In a thread: follow the tokens, then generate up to the limit; each token is emitted in the loop."""
        begin, node = self.begin, self.node
        alone.follow(decoder, tokens)
        found = []
        for token in alone.generate(
            decoder, decisions.drafts(begin, Stream.DEVICE), begin.limit, lock=node.lock, stop=self.stop,
            cap=begin.cap, pace=self.device.pace,
            prefill=self.device.prefill,
        ):  # fmt: skip
            found.append(token)
            self.answer.prefilled = self.answer.prefilled or time.perf_counter() - self.began
            if self.answer.alone_from is not None:
                loop.call_soon_threadsafe(self._emitted, token.position, token.token)
        return found

    async def _decoder(self) -> Decoder:
        begin, node = self.begin, self.node

        def build() -> Decoder:
            with node.lock:
                return node.decoder(begin.query, begin.k, begin.temperature)

        return await asyncio.to_thread(build)

    # Baselines in which the cloud generates alone

    async def _listen(self) -> None:
        """CRCG on the cloud: take its tokens as they come."""
        try:
            await self._begun_remotely()
            async for draft in self._drafts():
                self._emitted(draft.position, draft.token)
            self._say_end(len(self.answer.tokens))
        except (Lost, _GivenUp) as error:
            await self._go_alone(await self._decoder(), str(error))

    async def _sequence_wise(self) -> None:
        """DRDG/SW: both sides generate alone, then the distributions of each position are mixed."""
        begin = self.begin
        priors: dict[int, Floats] = {}
        decide = self._counted(decisions.decision(begin, priors))
        decoder = await self._decoder()
        loop = asyncio.get_running_loop()
        working = asyncio.create_task(asyncio.to_thread(self._alone, decoder, [], loop))
        try:
            await self._begun_remotely()
            theirs = [draft async for draft in self._drafts()]
            self._say_end(len(theirs))
        except (Lost, _GivenUp) as error:
            await working
            await self._go_alone(decoder, str(error))
            return
        except BaseException:
            self.stop.set()
            await asyncio.gather(working, return_exceptions=True)
            raise
        for mine, draft in zip(await working, theirs, strict=False):
            assert mine.prior is not None
            priors[mine.position] = mine.prior
            own = Own(begin.session, 0, mine.position, mine.token, mine.distribution, decoder.log_weight)
            other = Own(begin.session, 0, draft.position, draft.token, draft.distribution, draft.log_weight)
            token, _, _ = decide(own, other, mine.position)
            self._emitted(mine.position, token)
            if token == self.node.end:
                return

    async def _begun_remotely(self) -> None:
        await self._greeted(self.begin)

    async def _drafts(self) -> AsyncIterator[Draft]:
        assert self.connection is not None
        expected = 0
        while True:
            message = await self.connection.receive()
            if isinstance(message, End):
                return
            if isinstance(message, Failure):
                raise _GivenUp(message.reason)
            if not isinstance(message, Draft) or message.position != expected or expected >= self.begin.limit:
                raise Lost(f"a {type(message).__name__} came in the place of draft {expected}")
            expected += 1
            yield message

    # What all of them do

    def _emitted(self, position: int, token: int) -> None:
        self.answer.tokens.append(token)
        self.answer.times.append(time.perf_counter() - self.began)
        if self.on_token is not None:
            self.on_token(token)

    def _say_end(self, position: int) -> None:
        if self.connection is not None:
            self.connection.send(End(self.begin.session, position))

    async def _dropped(self) -> None:
        """Close the connection, and keep its account."""
        connection, self.connection = self.connection, None
        if connection is not None:
            await connection.close()
            self.answer.sent += connection.sent
            self.answer.received += connection.received
            if connection.rtt is not None:
                self.answer.rtt = min(connection.rtt, self.answer.rtt or connection.rtt)


class _GivenUp(Exception):
    """The cloud cannot go on with this session."""


class _Nobody(Lost):
    """The patience is at its end."""

"""The cloud: listens, takes its part in devices' sessions, and keeps those whose connection was lost for a while."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from ondevice_papers.dragon import decisions
from ondevice_papers.dragon.aggregation import Floats
from ondevice_papers.dragon.messages import Begin, Cited, DraftMessage, End, Failure, Message, Resume, Sources
from ondevice_papers.dragon.side import Side
from ondevice_papers.dragon.speculative_aggregation import Stream
from ondevice_programs.pair import wire
from ondevice_programs.pair.node import Node
from ondevice_programs.pair.player import Player
from ondevice_programs.pair.wire import Connection, Lost

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """What devices may ask for; more is refused with a sentence.

    sessions: at a time. k: documents of a session. tokens: of an answer. memory: bytes of keys and values of all
    sessions, at most; with the model, the documents and their index that bounds the process.
    """

    sessions: int = 64
    k: int = 16
    tokens: int = 1024
    memory: int = 2**31


@dataclass(eq=False)
class _Session:
    """One device's, while it lasts. connection: the one it is on now; forgotten: when it is given up without one."""

    begin: Begin
    player: Player
    cost: int
    connection: Connection | None
    forgotten: asyncio.TimerHandle | None = field(default=None, repr=False)


class Cloud:
    """The listening side. `async with Cloud(node).listening() as port` serves until the context ends.

    pace, prefill: seconds that a token and the first one take at least, to imitate other hardware. keep: seconds for
    which a session without a connection is kept. beat, silence: as of `wire.Connection`.
    """

    def __init__(
        self,
        node: Node,
        *,
        pace: float = 0.0,
        prefill: float = 0.0,
        keep: float = 60.0,
        beat: float = 1.0,
        silence: float = 8.0,
        limits: Limits | None = None,
    ) -> None:
        self.node, self.pace, self.prefill, self.keep = node, pace, prefill, keep
        self.beat, self.silence, self.limits = beat, silence, limits or Limits()
        self._sessions: dict[str, _Session] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def listening(
        self, host: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None
    ) -> AsyncIterator[int]:
        """Serve at this address; yields the port. Raises ValueError as `wire.listening` does."""
        try:
            async with wire.listening(
                self._handle, self.node.hello, host, port, tls=tls, beat=self.beat, silence=self.silence
            ) as opened:
                yield opened
        finally:
            for session in list(self._sessions.values()):
                self._forget(session)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.to_thread(self.node.engine.wait)

    async def _handle(self, connection: Connection) -> None:
        try:
            while True:
                message, _ = await connection.receive()
                self._take(connection, message)
        except Lost as lost:
            _LOG.info("A connection was lost: %s.", lost)
        finally:
            for session in list(self._sessions.values()):
                if session.connection is connection:
                    self._left(session)

    def _take(self, connection: Connection, message: Message) -> None:
        """A message of one of the connection's sessions; those of sessions that are over are dropped."""
        session = self._sessions.get(message.session)
        try:
            if isinstance(message, Begin):
                if session is not None:  # the device has not heard of it, and begins again
                    self._forget(session)
                self._begun(connection, message)
            elif isinstance(message, Resume):
                self._resumed(connection, session, message)
            elif isinstance(message, End | Failure):
                if session is not None:
                    self._forget(session)
            elif session is not None and session.connection is connection:
                try:
                    session.player.received(message)
                except ValueError as error:  # something between the two is missing; the device resumes
                    connection.drop(str(error))
        except ValueError as error:
            connection.send(Failure(message.session, str(error)[:1000]))
            _LOG.warning("A session was refused: %s", error)

    def _required(self, begin: Begin) -> int:
        """The session's cost. Raises ValueError, in a sentence for the device's user, on what is over the limits."""
        limits = self.limits
        cost = self.node.cost(begin.k, begin.query, begin.limit)
        if len(self._sessions) >= limits.sessions:
            raise ValueError(f"The cloud has {limits.sessions} sessions already.")
        if begin.limit > limits.tokens:
            raise ValueError(f"An answer has at most {limits.tokens} tokens here, not {begin.limit}.")
        if begin.k > limits.k:
            raise ValueError(f"A session has at most {limits.k} documents here, not {begin.k}.")
        taken = sum(session.cost for session in self._sessions.values())
        if taken + cost > limits.memory:
            raise ValueError(f"The cloud's memory for sessions, {limits.memory / 1e6:.0f} MB, is taken.")
        return cost

    def _begun(self, connection: Connection, begin: Begin) -> None:
        cost = self._required(begin)
        priors: dict[int, Floats] = {}
        machine = Side(
            begin.session,
            decisions.decision(begin, priors),
            aggregates=begin.aggregator == "cloud",
            max_new_tokens=begin.limit,
            eos_token_ids=self.node.ends,
            lookahead=decisions.lookahead(begin),
            alone=begin.mode in ("cloud-only", "sequence-wise"),
            scheduler=decisions.mover(begin, begin.rtt),
        )
        held: list[DraftMessage] = []

        def emitted(position: int, token: int) -> None:
            if begin.mode == "cloud-only":  # each token as it is drawn
                connection.send(DraftMessage(begin.session, 0, position, token))

        def retrieved(cited: list[Cited]) -> None:
            assert player.decoder is not None
            connection.send(Sources(begin.session, tuple(cited), player.decoder.log_weight))

        player = Player(
            machine,
            priors,
            pace=self.pace,
            prefill=self.prefill,
            drew=held.append,
            emitted=emitted,
            retrieved=retrieved,
        )
        session = self._sessions[begin.session] = _Session(begin, player, cost, connection)
        if not machine.alone:
            player.send = connection.send
        player.start(self.node, begin, Stream.CLOUD, connection)
        task = asyncio.create_task(self._watch(session, held))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, session: _Session, held: list[DraftMessage]) -> None:
        """Until it has ended, or cannot go on. What was generated alone is sent here, where it was held back."""
        player = session.player
        begin = session.begin
        await player.ended.wait()
        if self._sessions.get(begin.session) is not session or session.connection is None:
            return
        if player.failure is not None:
            reason = str(player.failure) or type(player.failure).__name__
            session.connection.send(Failure(begin.session, reason[:1000]))
            self._forget(session)
        elif player.machine.alone:
            for draft in held if begin.mode == "sequence-wise" else ():
                session.connection.send(draft)
            session.connection.send(End(begin.session, len(player.machine.tokens)))

    def _resumed(self, connection: Connection, session: _Session | None, message: Resume) -> None:
        if session is None or session.player.machine.alone:
            raise ValueError(f"There is no session {message.session!r}; it may have been given up.")
        if session.forgotten is not None:
            session.forgotten.cancel()
            session.forgotten = None
        before = session.connection
        session.connection = connection
        if before is not None and before is not connection:  # it was half open: the device has given it up
            before.drop("the session goes on over another connection")
        connection.send(session.player.resumption)
        session.player.resume(connection.send, message)

    def _left(self, session: _Session) -> None:
        """The session's connection has gone; give it up later, unless it has another one by then."""
        session.connection = session.player.send = None
        if session.player.machine.alone:
            self._forget(session)
        else:
            loop = asyncio.get_running_loop()
            session.forgotten = loop.call_later(self.keep, self._forget, session)

    def _forget(self, session: _Session) -> None:
        if self._sessions.get(session.begin.session) is session:
            del self._sessions[session.begin.session]
        if session.forgotten is not None:
            session.forgotten.cancel()
        session.player.stop()

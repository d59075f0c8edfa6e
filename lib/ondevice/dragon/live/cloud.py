"""The cloud: listens, answers each device's sessions, and keeps those whose connection was lost for a while."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from ondevice.dragon import decisions
from ondevice.dragon.aggregation import Floats
from ondevice.dragon.live.connection import Connection, Lost, listen
from ondevice.dragon.live.drafting import Drafted, Drafting
from ondevice.dragon.live.node import Node
from ondevice.dragon.live.player import Player
from ondevice.dragon.live.remote import Remote
from ondevice.dragon.live.shelf import Shelf
from ondevice.dragon.messages import (
    Begin,
    End,
    Failure,
    Fetch,
    Hello,
    Message,
    Propose,
    Resume,
    Welcome,
    check_peer,
)
from ondevice.dragon.side import Side
from ondevice.dragon.speculative_aggregation import Stream

_LOG = logging.getLogger(__name__)
MOST = 64  # sessions at a time


@dataclass(eq=False)
class _Session:
    """One device's, while it lasts. connection: the one it is on now; forgotten: when it is given up without one."""

    name: str
    player: Player
    connection: Connection | None = None
    forgotten: asyncio.TimerHandle | None = field(default=None, repr=False)


class Cloud:
    """The listening side. `async with Cloud(node).listening() as port` serves until the context ends.

    pace, prefill: seconds that a token and the first one take at least, to imitate other hardware. keep: seconds for
    which a session without a connection is kept. beat, silence: as of `Connection`. longest: most tokens of an answer;
    more is refused.
    gives_documents: whether devices may have documents, as the centralised baselines need it.
    """

    def __init__(
        self, node: Node, *, pace: float = 0.0, prefill: float = 0.0, keep: float = 60.0, beat: float = 1.0,
        silence: float = 8.0, longest: int = 4096, gives_documents: bool = False,
    ) -> None:  # fmt: skip
        self.node, self.pace, self.prefill = node, pace, prefill
        self.keep, self.beat, self.silence = keep, beat, silence
        self.longest, self.gives_documents = longest, gives_documents
        self._sessions: dict[str, _Session] = {}
        self._remotes = 0  # devices for which this side generates alone
        self._handlers: set[asyncio.Task[None]] = set()
        self._stopping: set[asyncio.Future[None]] = set()

    @contextlib.asynccontextmanager
    async def listening(
        self, host: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None
    ) -> AsyncIterator[int]:
        """Serve at this address; yields the port. Raises ValueError as `connection.listen` does."""
        _ = self.node.hello  # digests take a moment: not while the first device waits
        server = await listen(self._handle, host, port, tls=tls, beat=self.beat, silence=self.silence)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            for task in list(self._handlers):
                task.cancel()
            await asyncio.gather(*self._handlers, return_exceptions=True)
            for session in list(self._sessions.values()):
                await self._forget(session)
            await asyncio.gather(*self._stopping)

    async def _handle(self, connection: Connection) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        task.add_done_callback(self._handlers.discard)
        session: _Session | None = None
        try:
            async with asyncio.timeout(self.silence):  # who beats its heart but asks for nothing gets no more
                await self._greet(connection)
                first = await connection.receive()
            if isinstance(first, Begin) and first.mode in ("cloud-only", "sequence-wise"):
                await self._generate(connection, first)
                return
            if isinstance(first, Fetch | Propose):
                await self._shelve(connection, first)
                return
            session = await self._joined(connection, first)
            await self._follow(session, connection)
        except (Lost, TimeoutError) as lost:
            _LOG.info("A connection was lost: %s.", lost)
        except asyncio.CancelledError:  # the cloud closes
            _LOG.info("A connection ended with the cloud.")
        except (ValueError, RuntimeError) as error:
            reason = str(error) or type(error).__name__
            connection.send(Failure(session.name if session else None, reason[:1000]))
            _LOG.warning("A connection was refused: %s", reason)
        finally:
            if session is not None:
                self._left(session, connection)
            with contextlib.suppress(asyncio.CancelledError):
                await connection.close()

    async def _greet(self, connection: Connection) -> None:
        hello = await connection.receive()
        if not isinstance(hello, Hello):
            raise ValueError(f"A connection begins with Hello, not with {type(hello).__name__}.")
        ours = self.node.hello
        welcome = Welcome(ours.version, ours.model, ours.tokenizer, ours.vocabulary)
        connection.send(welcome)
        check_peer(welcome, hello)

    async def _generate(self, connection: Connection, begin: Begin) -> None:
        self._check(begin)
        self._remotes += 1
        try:
            await Remote(self.node, begin, connection, self.pace, self.prefill).run()
        finally:
            self._remotes -= 1

    async def _shelve(self, connection: Connection, first: Fetch | Propose) -> None:
        self._check(first.begin if isinstance(first, Propose) else None)
        self._remotes += 1
        try:
            await Shelf(self.node, first, connection, self.gives_documents, self.pace, self.prefill).run()
        finally:
            self._remotes -= 1

    async def _joined(self, connection: Connection, first: Message) -> _Session:
        """A new session, or one that goes on."""
        if isinstance(first, Begin):
            known = self._sessions.get(first.session)
            if known is not None:  # the device has not heard of it, and begins again
                await self._forget(known)
            return self._begun(connection, first)
        if not isinstance(first, Resume):
            raise ValueError(f"A session begins with Begin or Resume, not with {type(first).__name__}.")
        session = self._sessions.get(first.session)
        if session is None:
            raise ValueError(f"There is no session {first.session!r}; it may have been given up.")
        if session.forgotten is not None:
            session.forgotten.cancel()
            session.forgotten = None
        before, session.connection = session.connection, connection
        if before is not None:  # it was half open: the device has given it up
            session.player.detach()
            await before.close()
        connection.send(session.player.resumption)
        session.player.resume(connection, first)
        return session

    def _check(self, begin: Begin | None) -> None:
        if len(self._sessions) + self._remotes >= MOST:
            raise ValueError(f"The cloud has {MOST} sessions already.")
        if begin is not None and begin.limit > self.longest:
            raise ValueError(f"An answer has at most {self.longest} tokens here, not {begin.limit}.")

    def _begun(self, connection: Connection, begin: Begin) -> _Session:
        self._check(begin)
        priors: dict[int, Floats] = {}
        machine = Side(
            begin.session, decisions.decision(begin, priors), aggregates=begin.aggregator == "cloud",
            limit=begin.limit, end=self.node.end, lookahead=decisions.lookahead(begin),
            scheduler=decisions.mover(begin, begin.rtt),
        )  # fmt: skip
        player = Player(machine, priors)
        player.attach(connection)
        session = self._sessions[begin.session] = _Session(begin.session, player, connection)
        player.start(lambda drafted, failed: self._drafting(begin, drafted, failed))
        return session

    def _drafting(
        self, begin: Begin, drafted: Callable[[Drafted], None], failed: Callable[[Exception], None]
    ) -> Drafting:
        node = self.node
        return Drafting(
            lambda: node.decoder(begin.query, begin.k, begin.temperature), decisions.drafts(begin, Stream.CLOUD),
            drafted, failed, lock=node.lock, cap=begin.cap, pace=self.pace,
            prefill=self.prefill,
        )  # fmt: skip

    async def _follow(self, session: _Session, connection: Connection) -> None:
        """Pass the device's messages on until it ends the session, or the session cannot go on."""
        pumping = asyncio.create_task(_pump(session, connection))
        failing = asyncio.create_task(_failure(session.player))
        try:
            await asyncio.wait({pumping, failing}, return_when=asyncio.FIRST_COMPLETED)
            if failing.done():
                await self._forget(session)
                raise ValueError(str(session.player.failure) or type(session.player.failure).__name__)
            pumping.result()
            await self._forget(session)
        finally:
            pumping.cancel()
            failing.cancel()
            await asyncio.gather(pumping, failing, return_exceptions=True)

    def _left(self, session: _Session, connection: Connection) -> None:
        """The session's connection has gone; give it up later, unless it has another one by now."""
        if self._sessions.get(session.name) is not session or session.connection is not connection:
            return
        session.connection = None
        session.player.detach()
        loop = asyncio.get_running_loop()
        session.forgotten = loop.call_later(self.keep, lambda: asyncio.ensure_future(self._forget(session)))

    async def _forget(self, session: _Session) -> None:
        if self._sessions.get(session.name) is session:
            del self._sessions[session.name]
        if session.forgotten is not None:
            session.forgotten.cancel()
        session.player.ended.set()
        stopping = asyncio.ensure_future(asyncio.to_thread(session.player.drafting.stop))
        self._stopping.add(stopping)
        stopping.add_done_callback(self._stopping.discard)
        await asyncio.shield(stopping)  # whoever waits may be cancelled, but the thread ends


async def _pump(session: _Session, connection: Connection) -> None:
    """Until the device says that it is over. Raises Lost."""
    while not isinstance(message := await connection.receive(), End | Failure):
        if session.connection is not connection:
            raise Lost("the session goes on over another connection")
        try:
            session.player.received(message)
        except ValueError as error:  # something between the two is missing; the device resumes
            raise Lost(str(error)) from None


async def _failure(player: Player) -> None:
    """Wait until the session cannot go on."""
    await player.ended.wait()
    if player.failure is None:
        await asyncio.Event().wait()  # it has ended well: the device says so

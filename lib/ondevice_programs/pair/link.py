"""The device's one connection to its cloud: kept between answers, made again, and left in peace while it is dead."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from ondevice_papers.dragon.messages import Message
from ondevice_programs.pair.wire import Connection, Lost, Refused

_PAUSE = 0.05  # seconds between attempts while somebody waits
_LEAST = 1.0
_MOST = 60.0  # seconds between attempts while nobody does


class CloudLink:
    """open: makes a connection; raises Lost, and Refused where no second try helps. patience: seconds to wait for one.

    A cloud that could not be reached, or was too slow, is left alone: answers begin without it at once, and it is tried
    again in the background after a pause that doubles from 1 to 60 s, until it is there. went_well ends that.
    """

    def __init__(self, open: Callable[[float], Awaitable[Connection]], patience: float) -> None:
        self._open = open
        self.patience = patience
        self.connection: Connection | None = None
        self.resting = ""  # why the cloud is left alone; empty: it is not
        self._pause = _LEAST
        self._hears: dict[str, asyncio.Queue[tuple[Message | Lost, int]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._opening = asyncio.Lock()

    def join(self, session: str) -> asyncio.Queue[tuple[Message | Lost, int]]:
        """Where a session hears its messages, with their bytes, and of the connection's loss."""
        return self._hears.setdefault(session, asyncio.Queue())

    def leave(self, session: str) -> None:
        """It is over; what still comes for it is dropped."""
        self._hears.pop(session, None)

    async def connected(self, by: float | None = None) -> Connection:
        """The connection, made where there is none until the loop's time `by`; None: as long as the patience lasts.

        Raises Lost and Refused.
        """
        loop = asyncio.get_running_loop()
        reason = Lost("nobody answers in time")
        by = loop.time() + self.patience if by is None else by
        async with self._opening:
            while self.connection is None:
                if self.resting:
                    raise Lost(self.resting)
                left = by - loop.time()
                if left <= 0:
                    self.rest(str(reason))
                    raise reason
                try:
                    self._take(await self._open(left))
                except Lost as lost:
                    reason = lost
                    await asyncio.sleep(min(_PAUSE, max(0.0, by - loop.time())))
            return self.connection

    def rest(self, reason: str) -> None:
        """Leave the cloud alone for a while."""
        if not self.resting:
            self.resting = reason
            self._start(self._revive())
        if self.connection is not None:
            self.connection.drop(reason)

    def went_well(self) -> None:
        """An answer was made with the cloud: the next pause is short again."""
        self._pause = _LEAST

    async def close(self) -> None:
        """End the connection and every task."""
        tasks = list(self._tasks)
        connection = self.connection
        self.connection = None
        if connection is not None:
            await connection.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _revive(self) -> None:
        """Until there is a connection again."""
        while True:
            await asyncio.sleep(self._pause)
            self._pause = min(_MOST, 2 * self._pause)
            with contextlib.suppress(Lost, Refused):
                if self.connection is None:
                    self._take(await self._open(self.patience))
                self.resting = ""
                return

    def _take(self, connection: Connection) -> None:
        self.connection = connection
        self._start(self._pump(connection))

    def _start(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pump(self, connection: Connection) -> None:
        """Each message to its session."""
        try:
            while True:
                message, size = await connection.receive()
                if message.session in self._hears:
                    self._hears[message.session].put_nowait((message, size))
        except Lost as lost:
            if self.connection is connection:
                self.connection = None
            for queue in self._hears.values():
                queue.put_nowait((lost, 0))
            await connection.close()

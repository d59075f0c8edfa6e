"""The device: asks, aggregates with the cloud, and goes on alone where the cloud is gone or too slow."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, Self, TypeVar

from ondevice_papers.dragon import decisions
from ondevice_papers.dragon.aggregation import Floats
from ondevice_papers.dragon.messages import Begin
from ondevice_papers.dragon.side import Decide, Rules
from ondevice_programs.pair import wire
from ondevice_programs.pair.answer import Answer, AnswerSettings, request
from ondevice_programs.pair.asking import LiveAnswer, OnDrafts, OnToken
from ondevice_programs.pair.guard import Guard
from ondevice_programs.pair.link import CloudLink
from ondevice_programs.pair.node import Node
from ondevice_programs.pair.wire import Connection

Result = TypeVar("Result")


class Device:
    """The asking side, with one connection to its cloud that is kept between answers; a context manager.

    It has an event loop in a thread of its own, so `answer` works in a notebook, too.
    host, port: of the cloud; with port 0 there is none, and the device answers alone (CRCG on the device).
    tls: of `wire.client_tls`. pace, prefill: seconds that a token and the first one take at least, to imitate other
    hardware. patience: seconds for which the device waits for the cloud, where it can do nothing itself, before it
    goes on alone; a cloud for which it waited in vain is left alone for a while. guard: stops quotations.
    decision, rules: how this side decides, of `decisions.decision` and `side.Rules`, or an experiment's.
    """

    def __init__(
        self, node: Node, host: str = "127.0.0.1", port: int = 0, *, tls: ssl.SSLContext | None = None,
        pace: float = 0.0, prefill: float = 0.0, patience: float = 2.0, beat: float = 1.0, silence: float = 8.0,
        guard: Guard | None = None, decision: Callable[[Begin, Mapping[int, Floats]], Decide] | None = None,
        rules: Rules | None = None,
    ) -> None:  # fmt: skip
        self.node, self.host, self.port, self.tls, self.pace, self.prefill = node, host, port, tls, pace, prefill
        self.patience, self.beat, self.silence, self.guard = patience, beat, silence, guard
        self.decision = decision or decisions.decision
        self.rules = rules
        self.link = CloudLink(self._open, patience) if port else None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def answer(
        self,
        query: str,
        settings: AnswerSettings | None = None,
        on_token: OnToken | None = None,
        on_drafts: OnDrafts | None = None,
    ) -> Answer:
        """The answer; waits for it.

        on_token: called with each token as it is decided. on_drafts: with this side's undecided ones as they change.
        Both are called in the device's thread. Raises ValueError on a request that cannot be, and Refused on a cloud
        that cannot work with this device; where the cloud is gone, the answer says from where on the device went alone.
        """
        return self.run(self._ask(query, settings, on_token, on_drafts))

    async def ask(
        self,
        query: str,
        settings: AnswerSettings | None = None,
        on_token: OnToken | None = None,
        on_drafts: OnDrafts | None = None,
    ) -> Answer:
        """The same as a coroutine."""
        return await asyncio.wrap_future(self._started(self._ask(query, settings, on_token, on_drafts)))

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """What a coroutine gives that runs in the device's loop."""
        future = self._started(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def connect(self) -> None:
        """Connect now, where there is a cloud. Raises Lost after the patience, and Refused."""
        if self.link is not None:
            self.run(self.link.connected())

    def close(self) -> None:
        """End the connection and the thread. May be called twice."""
        if self._loop is None or self._thread is None:
            return
        loop = self._loop
        self._loop = None
        asyncio.run_coroutine_threadsafe(self._closed(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join()
        loop.close()
        self.node.engine.wait()

    async def _closed(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        if self.link is not None:
            await self.link.close()
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _started(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="device", daemon=True)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _open(self, within: float) -> Connection:
        within = min(self.silence, max(0.05, within))
        return await wire.connect(
            self.host, self.port, self.node.hello, tls=self.tls, within=within, beat=self.beat, silence=self.silence
        )

    async def _ask(
        self, query: str, settings: AnswerSettings | None, on_token: OnToken | None, on_drafts: OnDrafts | None
    ) -> Answer:
        session = LiveAnswer(self, request(query, settings or AnswerSettings()), on_token, on_drafts)
        try:
            await session.run()
        finally:
            session.close()
        return session.answer

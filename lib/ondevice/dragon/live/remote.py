"""The cloud's part where it does not aggregate with the device token by token: CRCG on the cloud, and DRDG/SW."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

from ondevice.dragon import decisions, messages
from ondevice.dragon.live import alone
from ondevice.dragon.live.connection import Connection
from ondevice.dragon.live.node import Node
from ondevice.dragon.messages import Begin, Draft, End
from ondevice.dragon.speculative_aggregation import Stream


class Remote:
    """Generates alone for one device.

    cloud-only: each token is sent as it is drawn, without its distribution. sequence-wise: all are sent when the last
    one is drawn, with their distributions, as the baseline transfers them.
    """

    def __init__(
        self, node: Node, begin: Begin, connection: Connection, pace: float = 0.0, prefill: float = 0.0
    ) -> None:
        self.node, self.begin, self.connection, self.pace, self.prefill = node, begin, connection, pace, prefill
        self._stop, self._loop = threading.Event(), asyncio.get_running_loop()

    async def run(self) -> None:
        """Answer, and wait until the device has it all. Raises Lost, and ValueError where it cannot answer."""
        with ThreadPoolExecutor(1, "answering") as pool:
            watching = asyncio.create_task(self.connection.receive())
            working = self._loop.run_in_executor(pool, self._generate)
            both: set[asyncio.Future] = {watching, working}
            try:
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                if working.done():
                    working.result()
                message = await watching
                if not isinstance(message, End | messages.Failure):
                    raise ValueError(f"A {type(message).__name__} has no place in a session that only listens.")
            finally:
                self._stop.set()
                watching.cancel()
                await asyncio.gather(*both, return_exceptions=True)

    def _generate(self) -> None:
        begin, node = self.begin, self.node
        with node.lock:
            decoder = node.decoder(begin.query, begin.k, begin.temperature)
        held: list[Draft] = []
        streams = begin.mode == "cloud-only"
        tokens = alone.generate(
            decoder, decisions.drafts(begin, Stream.CLOUD), begin.limit, lock=node.lock, stop=self._stop,
            cap=begin.cap, pace=self.pace, prefill=self.prefill,
        )  # fmt: skip
        for found in tokens:
            payload = b"" if streams else found.distribution
            draft = Draft(begin.session, 0, found.position, found.token, payload, decoder.log_weight, found.seconds)
            if streams:
                self._send(draft)
            else:
                held.append(draft)
        for draft in held:
            self._send(draft)
        self._send(End(begin.session, decoder.position))

    def _send(self, message: messages.Message) -> None:
        if not self._stop.is_set():  # while it is not, the loop waits for this thread
            self._loop.call_soon_threadsafe(self.connection.send, message)

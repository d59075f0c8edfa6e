"""A TCP relay that keeps to a `Link` in each direction: bytes go on at the time that the model gives them.

It listens on one port and opens a connection to the target for each one that comes. Its own delay is the machine's,
about 0.1 ms a message. What it leaves out: opening a connection takes no round trip.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Self

from ondevice.network.link import PERFECT, SEGMENT, Direction, Line, Link, Sinusoid, Wire

LARGEST = 2**18  # bytes that are read at once
WINDOW = 2**25  # bytes under way on a connection; then its sender waits, as with a full TCP window
BACKLOG = 0.1  # seconds that a connection takes the wire ahead of time; its further bytes wait in its sender's socket
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER for 0 s: closing resets


class Relay:
    """The relay in a process of its own, so that it slows neither end; a context manager.

    up, down: the links from and to those who connect; their time 0 is the relay's start. seed: of jitter and losses.
    port: where it listens, on loopback. Raises ValueError on a delay that is neither a number nor a `Sinusoid`, which
    alone can be told to another process. A target that cannot be reached is logged once, and connections are closed
    meanwhile.
    The process ends with the block, and with its parent, whatever ends that.
    """

    program = "from ondevice.network.relay import serve_parent; serve_parent()"

    def __init__(
        self, target_host: str, target_port: int, up: Link = PERFECT, down: Link = PERFECT, *, seed: int = 0
    ) -> None:
        self.port, target, listen = 0, (target_host, target_port), ("127.0.0.1", 0)
        self._start = _encode(target=target, listen=listen, up=up, down=down, seed=seed)
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", self.program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            self.port = self._ask(self._start)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        process = self._process
        self._process = None
        if process is None:
            return
        assert process.stdin and process.stdout
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

    def set(self, *, up: Link | None = None, down: Link | None = None) -> None:
        """Change the links at once, for bytes that are sent from now on. Raises ValueError as the constructor."""
        self._ask(_encode(**{name: link for name, link in (("up", up), ("down", down)) if link}))

    def _ask(self, request: str) -> int:
        """The port, as all answers have it."""
        process = self._process
        if process is None:
            raise ValueError("The relay is not running: use it in a with statement.")
        assert process.stdin and process.stdout
        answer = ""
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(request + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        if not answer:
            raise RuntimeError(f"The relay's process has ended with status {process.wait()}.")
        reply = json.loads(answer)
        if "error" in reply:
            raise ValueError(reply["error"])
        return int(reply["port"])


# The words between Relay and its process: one JSON object a line

_KINDS = {kind.__name__: kind for kind in (Link, Sinusoid)}


def _encode(**request: Any) -> str:
    return json.dumps(request, default=_described)


def _described(value: Any) -> dict[str, Any]:
    if type(value) not in _KINDS.values():
        raise ValueError(f"A relay takes delays that are numbers or a Sinusoid, not {value!r}.")
    return {"kind": type(value).__name__, **vars(value)}


def _built(fields: dict[str, Any]) -> Any:
    return _KINDS[fields.pop("kind")](**fields) if "kind" in fields else fields


# The relay's process


class Server:
    """The relay itself, in the running event loop. Arguments as of `Relay`; target and listen are (host, port)."""

    def __init__(self, target: tuple[str, int], listen: tuple[str, int], up: Link, down: Link, seed: int = 0) -> None:
        self.target, self.listen, self.seed = target, listen, seed
        self.links: dict[Direction, Link] = {"up": up, "down": down}
        self.wires: dict[Direction, Wire] = {"up": Wire(), "down": Wire()}
        self.loop = asyncio.get_running_loop()
        self.zero = self.loop.time()
        self.buffer = memoryview(bytearray(LARGEST))  # one for all: it is read into and emptied in one step
        self.connections: set[Connection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.count = 0
        self.reached = True  # the target, the last time

    async def start(self) -> int:
        """Listen; the port. Raises ValueError where that is not possible."""
        host, port = self.listen
        try:
            server = await self.loop.create_server(self._accept, host, port, backlog=512)
        except OSError as error:
            why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
            raise ValueError(f"The relay cannot listen on {host}:{port}: {why}.") from None
        return int(server.sockets[0].getsockname()[1])

    def set(self, up: Link | None = None, down: Link | None = None) -> None:
        """Change the links at once, as `Relay.set` does."""
        self.links = {"up": up or self.links["up"], "down": down or self.links["down"]}
        for connection in self.connections:
            for direction, flow in connection.flows.items():
                flow.line.link = self.links[direction]

    def connection(self, number: int) -> Connection:
        return Connection(self, number)

    def _accept(self) -> asyncio.BufferedProtocol:
        connection = self.connection(self.count)
        self.count += 1
        self.connections.add(connection)
        task = self.loop.create_task(connection.open())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return connection.flows["up"]


class Connection:
    """A client's connection and the one to the target."""

    def __init__(self, server: Server, number: int) -> None:
        self.server, self.loop, self.closed = server, server.loop, False
        self.flows: dict[Direction, Flow] = {}
        for direction, link in server.links.items():
            self.flows[direction] = self.flow(Line(link, server.seed, direction, number, server.wires[direction]))
        self.flows["up"].back, self.flows["down"].back = self.flows["down"], self.flows["up"]

    def flow(self, line: Line) -> Flow:
        return Flow(self, line)

    async def open(self) -> None:
        """Connect to the target; that it is not reached is logged once, until it is."""
        server = self.server
        reached = True
        try:
            await self.loop.create_connection(lambda: self.flows["down"], *server.target)
        except OSError as error:
            reached = False
            if server.reached:
                logging.getLogger(__name__).warning("The relay does not reach %s:%d: %s", *server.target, error)
            self.close()
        server.reached = reached

    def close(self, reset: bool = False) -> None:
        """Close both ends at once. reset: with an RST instead of the end of the stream."""
        self.closed = True
        self.server.connections.discard(self)
        for flow in self.flows.values():
            for timer in flow.timers.values():
                timer.cancel()
            if flow.source is not None and reset:
                with contextlib.suppress(OSError):
                    flow.source.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                flow.source.abort()
            elif flow.source is not None:
                flow.source.close()

    def close_if_over(self) -> None:
        """Close where both ends have sent their last bytes, and these have arrived."""
        if not self.closed and all(flow.ended and not flow.queue for flow in self.flows.values()):
            self.close()


class Flow(asyncio.BufferedProtocol):
    """One direction of a connection: its source's socket, and what is under way, in the order of its arrival."""

    back: Flow  # the other direction, whose source is this one's sink

    def __init__(self, connection: Connection, line: Line) -> None:
        self.connection = connection
        self.line = line
        self.loop = connection.loop
        self.zero = connection.server.zero
        self.source: asyncio.Transport | None = None
        self.queue: deque[tuple[float, bytes, Callable[[], None] | None]] = deque()
        self.held = 0  # bytes in it
        self.sent = 0.0  # when the last of its bytes leaves the wire
        self.timers: dict[Callable[[], None], asyncio.TimerHandle] = {}
        self.choked = self.ended = self.abandoned = False

    @property
    def sink(self) -> asyncio.Transport | None:
        """The socket that this direction's bytes go to."""
        return self.back.source

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.source = transport
        if self.connection.closed:
            transport.abort()
        else:
            self.back.deliver()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.connection.server.buffer[: self.piece]

    def buffer_updated(self, nbytes: int) -> None:
        self.send(bytes(self.connection.server.buffer[:nbytes]))

    def eof_received(self) -> bool:
        self.end(self.pass_end)
        return True  # the other direction stays open

    def connection_lost(self, exc: Exception | None) -> None:
        self.source = None
        if not self.connection.closed:  # it was reset, or is gone
            self.back.abandon()
            self.end(partial(self.connection.close, reset=True))

    def pause_writing(self) -> None:
        self.back.choked = True
        self.back.regulate()

    def resume_writing(self) -> None:
        self.back.choked = False
        self.back.deliver()

    @property
    def piece(self) -> int:
        """Bytes to read at once: 2 ms of a link with a bandwidth, so that its arrivals are as fine."""
        bandwidth = self.line.link.bandwidth
        return LARGEST if bandwidth == float("inf") else min(LARGEST, max(SEGMENT, int(bandwidth / 500)))

    def send(self, data: bytes) -> None:
        """Take bytes from the source."""
        self.put(data)
        self.deliver()

    def end(self, action: Callable[[], None]) -> None:
        """No more bytes come from the source; at the sink, that is the action."""
        self.put(b"", action)
        self.ended = True
        self.deliver()

    def pass_end(self) -> None:
        """Half-close the sink."""
        if self.sink is not None:
            with contextlib.suppress(OSError):
                self.sink.write_eof()

    def abandon(self) -> None:
        """The sink is gone: what is under way arrives nowhere."""
        self.abandoned = True
        self.held = 0
        self.queue.clear()

    def put(self, data: bytes, action: Callable[[], None] | None = None) -> None:
        """Put bytes on the link. action: what to do once they have arrived."""
        now = self.loop.time()
        arrival = self.zero + self.line.arrival(now - self.zero, len(data))
        self.sent = self.zero + self.line.wire.busy
        if not self.abandoned:
            self.held += len(data)
            self.queue.append((arrival, data, action))

    def deliver(self) -> None:
        """Pass on what has arrived, and come back for the next."""
        queue = self.queue
        ready = []
        action = None
        now = self.loop.time()
        while queue and queue[0][0] <= now and action is None and self.sink is not None and not self.choked:
            _, data, action = queue.popleft()
            if data:
                ready.append(data)
        if self.sink is not None and ready:
            self.held -= sum(map(len, ready))
            if not self.sink.is_closing():
                self.sink.writelines(ready)
        if action is not None:
            action()
        self.connection.close_if_over()
        if queue and self.sink is not None and not self.choked:
            self._later(queue[0][0], self.deliver)
        self.regulate()

    def regulate(self) -> None:
        """The source waits while the sink does not take more, too much is under way or the wire is busy."""
        if self.source is None or self.ended or self.connection.closed:
            return
        ahead = self.sent - self.loop.time()
        if self.choked or self.held > WINDOW or ahead > BACKLOG:
            self.source.pause_reading()
            if ahead > BACKLOG:
                self._later(self.loop.time() + ahead - BACKLOG / 2, self.regulate)
        else:
            self.source.resume_reading()

    def _later(self, time: float, what: Callable[[], None]) -> None:
        if what in self.timers:
            self.timers[what].cancel()
        if not self.connection.closed:
            self.timers[what] = self.loop.call_at(time, what)


if sys.platform == "linux":

    class _Selector(selectors.EpollSelector):
        """Waits to the microsecond; epoll itself rounds up to milliseconds."""

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            if timeout is None:
                return super().select()
            if timeout > 0:
                select.select([self.fileno()], [], [], timeout)
            return super().select(0)
else:
    _Selector = selectors.DefaultSelector


def event_loop() -> asyncio.AbstractEventLoop:
    """An event loop whose timers are precise to the microsecond where the system is Linux."""
    return asyncio.SelectorEventLoop(_Selector())


def serve_parent(kind: type[Server] = Server) -> None:
    """The process of a `Relay`: it reads requests until its input is closed, as it is when the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C goes to the parent too, which decides
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)  # where it may: among busy processes it wakes up in time
    with asyncio.Runner(loop_factory=event_loop) as runner:
        runner.run(_obey(kind))


async def _obey(kind: type[Server]) -> None:
    reader = asyncio.StreamReader(limit=2**26)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    server: Server | None = None
    port = 0
    while line := await reader.readline():
        try:
            request = json.loads(line, object_hook=_built)
            if server is None:
                server = kind(**request)
                port = await server.start()
            else:
                server.set(**request)
            answer: dict[str, Any] = {"port": port}
        except ValueError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)

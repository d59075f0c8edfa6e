"""A TCP relay that keeps to a `Link` in each direction: bytes go on at the time that the model gives them.

It listens on one port and opens a connection to the target for each one that comes. Its own delay is the machine's.
What it leaves out: opening a connection takes no round trip.
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
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Self

from ondevice.network.link import PERFECT, Direction, Line, Link, Sinusoid, Wire

LARGEST = 2**18  # bytes that are read at once
SEGMENT = 1448  # bytes that one TCP segment carries over Ethernet, with timestamps
WINDOW = 2**23  # bytes under way on a connection; then its sender waits, as with a full TCP window
BACKLOG = 0.1  # seconds that a connection takes the wire ahead of time; its further bytes wait in its sender's socket
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER for 0 s: closing resets


class Relay:
    """The relay in a process of its own, so that it slows neither end; a context manager.

    up, down: the links from and to those who connect; their time 0 is the relay's start. seed: of jitter.
    port: where it listens, on loopback. Raises ValueError on a delay that is neither a number nor a `Sinusoid`, which
    alone can be told to another process. A target that cannot be reached is logged once, and connections are closed
    meanwhile.
    The process ends with the block, and with its parent, whatever ends that.
    """

    program = "from ondevice.network.relay import serve_parent; serve_parent()"

    def __init__(
        self, target_host: str, target_port: int, up: Link = PERFECT, down: Link = PERFECT, *, seed: int = 0
    ) -> None:
        self.port = 0
        self._start = _encode(target=(target_host, target_port), up=up, down=down, seed=seed)
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
    """The relay itself, in the running event loop. Arguments as of `Relay`; target is (host, port)."""

    def __init__(self, target: tuple[str, int], up: Link, down: Link, seed: int = 0) -> None:
        self.target, self.seed = target, seed
        self.links: dict[Direction, Link] = {"up": up, "down": down}
        self.wires: dict[Direction, Wire] = {"up": Wire(), "down": Wire()}
        self.loop = asyncio.get_running_loop()
        self.zero = self.loop.time()
        self.connections: set[RelayedConnection] = set()
        self.count = 0
        self.reached = True  # the target, the last time

    async def start(self) -> int:
        """Listen on loopback; the port."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=LARGEST, backlog=512)
        return int(server.sockets[0].getsockname()[1])

    def set(self, up: Link | None = None, down: Link | None = None) -> None:
        """Change the links at once, as `Relay.set` does."""
        self.links = {"up": up or self.links["up"], "down": down or self.links["down"]}
        for connection in self.connections:
            for direction, flow in connection.flows.items():
                flow.line.link = self.links[direction]

    def connection(self, number: int) -> RelayedConnection:
        return RelayedConnection(self, number)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = self.connection(self.count)
        self.count += 1
        self.connections.add(connection)
        with contextlib.suppress(asyncio.CancelledError):  # the relay ends
            await connection.serve(reader, writer)


class RelayedConnection:
    """A client's connection and the one to the target."""

    def __init__(self, server: Server, number: int) -> None:
        self.server, self.loop, self.closed = server, server.loop, False
        self.flows: dict[Direction, Flow] = {}
        for direction, link in server.links.items():
            self.flows[direction] = self.flow(Line(link, server.seed, direction, number, server.wires[direction]))
        self.writers: list[asyncio.StreamWriter] = []
        self.tasks: list[asyncio.Task[None]] = []

    def flow(self, line: Line) -> Flow:
        return Flow(self, line)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass bytes on, both ways, until both ends have sent their last ones and these have arrived.

        That the target is not reached is logged once, until it is.
        """
        server = self.server
        up, down = self.flows["up"], self.flows["down"]
        self.writers.append(writer)
        self._run(up.take(reader))  # also while the target's connection is opened
        try:
            their_reader, their_writer = await asyncio.open_connection(*server.target, limit=LARGEST)
        except OSError as error:
            if server.reached:
                logging.getLogger(__name__).warning("The relay does not reach %s:%d: %s", *server.target, error)
            server.reached = False
            self.close()
            return
        server.reached = True
        self.writers.append(their_writer)
        if self.closed:  # meanwhile
            self.close()
            return
        self._run(down.take(their_reader))
        await asyncio.wait([self._run(up.deliver(their_writer)), self._run(down.deliver(writer))])
        self.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.loop.create_task(work)
        self.tasks.append(task)
        return task

    def close(self, reset: bool = False) -> None:
        """Close both ends at once. reset: with an RST instead of the end of the stream."""
        self.closed = True
        self.server.connections.discard(self)
        for task in self.tasks:
            task.cancel()
        for writer in self.writers:
            if reset:
                with contextlib.suppress(OSError):
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                writer.transport.abort()
            else:
                writer.close()


class Flow:
    """One direction of a connection: what is under way, in the order of its arrival."""

    sink: asyncio.StreamWriter  # where that arrives

    def __init__(self, connection: RelayedConnection, line: Line) -> None:
        self.connection, self.line, self.loop = connection, line, connection.loop
        self.zero = connection.server.zero
        self.queue: asyncio.Queue[tuple[float, bytes, Callable[[], None] | None]] = asyncio.Queue()
        self.held = 0  # bytes in it
        self.passed = asyncio.Event()  # some of them were, since it was looked at
        self.ended = False

    async def take(self, reader: asyncio.StreamReader) -> None:
        """Put the source's bytes on the link; it waits while too much is under way or the wire is busy."""
        try:
            while data := await reader.read(self.piece):
                self.send(data)
                ahead = self.zero + self.line.wire.busy - self.loop.time()
                if ahead > BACKLOG:
                    await asyncio.sleep(ahead - BACKLOG / 2)
                while self.held > WINDOW:
                    self.passed.clear()
                    await self.passed.wait()
            self.end(self.finish)
        except OSError:  # it was reset, or is gone
            self.end(partial(self.connection.close, reset=True))

    @property
    def piece(self) -> int:
        """Bytes to read at once: 2 ms of a link with a bandwidth, so that its arrivals are as fine."""
        bandwidth = self.line.link.bandwidth
        return LARGEST if bandwidth == float("inf") else min(LARGEST, max(SEGMENT, int(bandwidth / 500)))

    def send(self, data: bytes) -> None:
        """Take bytes from the source."""
        self.put(data)

    def end(self, action: Callable[[], None]) -> None:
        """No more bytes come from the source; at the sink, that is the action."""
        self.put(b"", action)

    def finish(self) -> None:
        """The last byte is passed on: half-close the sink."""
        self.ended = True
        with contextlib.suppress(OSError):
            self.sink.write_eof()

    def put(self, data: bytes, action: Callable[[], None] | None = None) -> None:
        """Put bytes on the link. action: what to do once they have arrived."""
        now = self.loop.time()
        self.held += len(data)
        self.queue.put_nowait((self.zero + self.line.arrival(now - self.zero, len(data)), data, action))

    async def deliver(self, sink: asyncio.StreamWriter) -> None:
        """Pass on what has arrived, until the source's end has."""
        self.sink = sink
        while not self.ended:
            arrival, data, action = await self.queue.get()
            await asyncio.sleep(arrival - self.loop.time())
            if data and not sink.is_closing():
                sink.write(data)
                with contextlib.suppress(OSError):  # the sink is gone, as its own flow tells
                    await sink.drain()
            self.held -= len(data)
            self.passed.set()
            if action is not None:
                action()


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

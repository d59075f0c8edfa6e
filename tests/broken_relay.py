"""A relay that breaks connections as it is told: at a byte of a stream or at a time, always the same.

A fault strikes one direction of one connection as its bytes enter the link. Offsets count the bytes that were sent,
whatever other faults make of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ondevice.network import relay
from ondevice.network.link import Direction, Line, Link


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Where and when. The kinds are below.

    connection: its number, from 0, in the order of their coming. direction: "up" from the client to the target.
    at: after so many bytes of that direction. after: seconds from the connection's start; bytes before do not count.
    """

    connection: int = 0
    direction: Direction = "up"
    at: int = 0
    after: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Cut(Fault):
    """Both ends' connections are closed, or reset; bytes before the cut arrive first.

    With at = 0 it comes at its time, whether bytes flow or not, and what is on the link is lost.
    """

    reset: bool = False


@dataclass(frozen=True, kw_only=True)
class Stall(Fault):
    """A half-open connection: from here on all is taken and nothing arrives, not even the end or a reset."""


@dataclass(frozen=True, kw_only=True)
class Burst(Fault):
    """`length` bytes come `seconds` later, and what is behind them waits."""

    length: int = 1
    seconds: float = 1.0


class Piece(NamedTuple):
    """What goes on the link: bytes, how many seconds late, and the cut that follows them."""

    data: bytes
    late: float = 0.0
    cut: Cut | None = None


class Stream:
    """One direction of one connection, with its faults."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._waiting = sorted(faults, key=lambda fault: fault.after)
        self._begun: list[tuple[int, Fault]] = []  # with the offset of each
        self._offset = 0
        self._cut = False

    def feed(self, now: float, data: bytes) -> list[Piece]:
        """What becomes of bytes that are sent now, in seconds from the connection's start."""
        self._begin(now)
        if not self._begun and not self._cut:
            self._offset += len(data)
            return [Piece(data)]
        return [piece for part in self._parts(data) for piece in self._apply(part)]

    def silent(self, now: float) -> bool:
        """Whether an end or a reset that comes now is swallowed."""
        self._begin(now)
        return self._cut or any(isinstance(fault, Stall) and self._offset >= at for at, fault in self._begun)

    def _begin(self, now: float) -> None:
        while self._waiting and self._waiting[0].after <= now:
            fault = self._waiting.pop(0)
            self._begun.append((self._offset + fault.at, fault))

    def _parts(self, data: bytes) -> Iterator[bytes]:
        """The bytes, parted where a fault begins or ends."""
        edges = {at for at, _ in self._begun} | {at + f.length for at, f in self._begun if isinstance(f, Burst)}
        inner = sorted(edge - self._offset for edge in edges if 0 < edge - self._offset < len(data))
        for start, end in zip([0, *inner], [*inner, len(data)], strict=True):
            yield data[start:end]

    def _apply(self, data: bytes) -> list[Piece]:
        if self.silent(0.0):
            return []
        before = self._due_cut()
        if before:
            return [Piece(b"", cut=before)]
        at = self._offset
        self._offset += len(data)
        bursts = [fault for start, fault in self._begun if isinstance(fault, Burst) and 0 <= at - start < fault.length]
        return [Piece(data, max((fault.seconds for fault in bursts), default=0.0), self._due_cut())]

    def _due_cut(self) -> Cut | None:
        """The cut that comes here; nothing comes after it."""
        cut = next((fault for at, fault in self._begun if isinstance(fault, Cut) and self._offset >= at), None)
        self._cut = cut is not None
        return cut


class Relay(relay.Relay):
    """ondevice.network's, with faults by connection."""

    program = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r});"
        "from ondevice.network.relay import serve_parent; from broken_relay import Server; serve_parent(Server)"
    )

    def __init__(self, *target: Any, faults: Sequence[Fault] = (), **options: Any) -> None:
        super().__init__(*target, **options)
        self._start = json.dumps(json.loads(self._start) | {"faults": list(map(_told, faults))})

    def set(self, *, faults: Sequence[Fault] | None = None, **links: Link) -> None:
        """faults: of connections that come from now on, whose numbers begin at 0 again, and their jitter with them."""
        super().set(**links)
        if faults is not None:
            self._ask(json.dumps({"faults": list(map(_told, faults))}))


KINDS = {kind.__name__: kind for kind in (Burst, Cut, Stall)}


def _told(fault: Fault) -> dict[str, Any]:
    return {"fault": {kind: name for name, kind in KINDS.items()}[type(fault)], **asdict(fault)}


def _built(faults: list[dict[str, Any]]) -> list[Fault]:
    return [KINDS[told.pop("fault")](**told) for told in faults]


class Server(relay.Server):
    def __init__(self, *, faults: list[dict[str, Any]], **options: Any) -> None:
        super().__init__(**options)
        self.faults = _built(faults)

    def set(self, faults: list[dict[str, Any]] | None = None, **links: Link) -> None:
        super().set(**links)
        if faults is not None:
            self.faults, self.count = _built(faults), 0

    def connection(self, number: int) -> relay.Connection:
        return Connection(self, number)


class Connection(relay.Connection):
    def __init__(self, server: Server, number: int) -> None:
        super().__init__(server, number)
        faults = [fault for fault in server.faults if fault.connection == number]
        for direction, flow in self.flows.items():
            flow.stream = Stream([fault for fault in faults if fault.direction == direction])
        cuts = [fault for fault in faults if isinstance(fault, Cut) and fault.at == 0]
        began = self.loop.time()
        self.timers = [self.loop.call_at(began + cut.after, self.close, cut.reset) for cut in cuts]

    def flow(self, line: Line) -> relay.Flow:
        return Flow(self, line)

    def close(self, reset: bool = False) -> None:
        super().close(reset)
        for timer in self.timers:
            timer.cancel()


class Flow(relay.Flow):
    stream: Stream

    def __init__(self, connection: Connection, line: Line) -> None:
        super().__init__(connection, line)
        self.began = self.loop.time()

    def send(self, data: bytes) -> None:
        for piece in self.stream.feed(self.loop.time() - self.began, data):
            link = self.line.link
            self.line.link = replace(link, delay=partial(_delay, link, piece.late))
            self.put(piece.data, None if piece.cut is None else partial(self.connection.close, piece.cut.reset))
            self.line.link = link

    def end(self, action: Callable[[], None]) -> None:
        super().end(self.hide if self.stream.silent(self.loop.time() - self.began) else action)

    def hide(self) -> None:
        """The end is here, and the sink does not hear of it."""
        self.ended = True


def _delay(link: Link, late: float, sent: float) -> float:
    return link.arrival(sent) - sent + late

"""A relay that breaks connections as it is told: at a byte of a stream or at a time, always the same.

A fault strikes one direction of one connection as its bytes enter the link. Offsets count the bytes that were sent,
whatever other faults make of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

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


class Stream:
    """One direction of one connection, with its faults."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._faults, self._begun = list(faults), dict[Fault, int]()  # with the offset of each
        self._offset, self._over = 0, False

    def feed(self, now: float, data: bytes) -> tuple[bytes, Cut | None]:
        """What becomes of bytes that are sent now, in seconds from the connection's start, and the cut behind them."""
        if self.silent(now):
            return b"", None
        fault = min(self._begun, key=self._begun.__getitem__, default=None)
        if fault is None or self._begun[fault] > self._offset + len(data):
            self._offset += len(data)
            return data, None
        self._over = True
        return data[: max(0, self._begun[fault] - self._offset)], fault if isinstance(fault, Cut) else None

    def silent(self, now: float) -> bool:
        """Whether what comes now is swallowed, an end or a reset, too."""
        for fault in self._faults:
            if fault.after <= now and fault not in self._begun:
                self._begun[fault] = self._offset + fault.at
        stalled = any(isinstance(fault, Stall) and at <= self._offset for fault, at in self._begun.items())
        return self._over or stalled


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


KINDS = {kind.__name__: kind for kind in (Cut, Stall)}


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

    def connection(self, number: int) -> relay.RelayedConnection:
        return Connection(self, number)


class Connection(relay.RelayedConnection):
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
        kept, cut = self.stream.feed(self.loop.time() - self.began, data)
        if kept or cut:
            self.put(kept, None if cut is None else partial(self.connection.close, cut.reset))

    def end(self, action: Callable[[], None]) -> None:
        super().end(self.hide if self.stream.silent(self.loop.time() - self.began) else action)

    def hide(self) -> None:
        """The end is here, and the sink does not hear of it."""
        self.ended = True

"""The buffer between generation and the reader: pieces go out in order, at once or at the pace of reading."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass

from ondevice_papers.disco.policy import Side
from ondevice_programs.router.request import Json, count_tokens

LONGEST_TOKEN = 16  # bytes; a longer packet is several tokens


def tokens_of(packet: str) -> int:
    """Tokens in one packet of a stream: one, unless it is too long for that."""
    return 1 if len(packet.encode("utf-8", "surrogatepass")) <= LONGEST_TOKEN else count_tokens(packet)


@dataclass(frozen=True)
class Part:
    """One packet of the answer as an endpoint sent it. time: seconds from request to arrival. seam: why `side` changed.

    end: tokens of the answer up to here.
    """

    text: str
    side: Side
    time: float
    end: int
    raw: Json | None = None
    seam: str | None = None


class Delivery:
    """Packets generated (len) and shown, in order; `tokens` and `shown_tokens` count what is in them (n0, k).

    pace: r_c in tokens/s, or None to forward at once. Paced, a packet is shown at max(g, d + its tokens / r_c), where
    g is its arrival and d when the one before was shown; the surplus is the buffer that masks a migration (section
    4.3). The buffer is not bounded: a slow reader frees the endpoint early instead of holding it back.
    """

    def __init__(self, pace: float | None) -> None:
        self._gap = 1.0 / pace if pace else 0.0
        self._clock = asyncio.get_running_loop().time
        self._start = self._clock()
        self._parts: list[Part] = []
        self._changed = asyncio.Event()
        self._closed = False
        self._error: BaseException | None = None
        self.shown = 0

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def elapsed(self) -> float:
        return self._clock() - self._start

    @property
    def tokens(self) -> int:
        return self.tokens_at(len(self._parts))

    @property
    def ends_in_space(self) -> bool:
        return bool(self._parts) and self._parts[-1].text[-1:].isspace()

    def tokens_at(self, length: int) -> int:
        return self._parts[length - 1].end if length else 0

    @property
    def shown_tokens(self) -> int:
        return self.tokens_at(self.shown)

    def text(self) -> str:
        """The answer so far: what an endpoint is given as a prefix."""
        return "".join(part.text for part in self._parts)

    def push(self, text: str, side: Side, raw: Json | None = None, seam: str | None = None) -> Part:
        part = Part(text, side, self.elapsed, self.tokens + tokens_of(text), raw, seam)
        self._parts.append(part)
        self._changed.set()
        return part

    def truncate(self, length: int) -> None:
        """Drop generated packets from `length` on; none of them may have been shown."""
        if length < self.shown:
            raise ValueError(f"Packet {length} has been shown already.")
        del self._parts[length:]

    def close(self, error: BaseException | None = None) -> None:
        """No more will come; the reader gets what is buffered, then the error if there is one."""
        self._closed = True
        self._error = error
        self._changed.set()

    async def read(self) -> AsyncIterator[Part]:
        """Packets as they fall due. One reader only."""
        due_next = -math.inf
        while True:
            if self.shown < len(self._parts):
                part = self._parts[self.shown]
                due = max(part.time, due_next)
                early = due - self.elapsed
                if early > 1e-6:  # less is rounding
                    await asyncio.sleep(early)
                    continue  # the packet may have been replaced meanwhile
                due_next = due + self._gap * (part.end - self.shown_tokens)
                self.shown += 1
                yield part
            elif self._closed:
                if self._error is not None:
                    raise self._error
                return
            else:
                self._changed.clear()
                await self._changed.wait()

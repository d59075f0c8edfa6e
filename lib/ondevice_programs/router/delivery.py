"""The buffer between generation and the reader: pieces go out in order, at once or at the pace of reading."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field, replace

from ondevice_papers.disco.policy import Side
from ondevice_programs.router.request import Json, count_tokens

LONGEST_TOKEN = 16  # bytes; a longer packet is several tokens


def tokens_of(packet: str) -> int:
    """Tokens in one packet of a stream: one, unless it is too long for that."""
    return 1 if len(packet.encode("utf-8", "surrogatepass")) <= LONGEST_TOKEN else count_tokens(packet)


def joined(texts: Iterable[str]) -> str:
    """One text; a character whose halves came in two chunks is whole again."""
    return "".join(texts).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def beginning(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a stop string; 0 where none does."""
    return max((size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])), default=0)


def spanning(text: str, seam: int, stops: Sequence[str]) -> int | None:
    """Where the stop string begins that spans `seam`, an index of `text`, and is complete first; None without one."""
    spans = [
        (start + len(stop), start)
        for stop in stops
        for start in range(max(0, seam - len(stop) + 1), seam)
        if text.startswith(stop, start)
    ]
    return min(spans)[1] if spans else None


@dataclass(frozen=True)
class Part:
    """One packet of the answer as an endpoint sent it. time: of its arrival, s. seam: why `side` changed.

    end: tokens of the answer up to here. raw, others: as of an `AnswerChunk`.
    """

    text: str
    side: Side
    time: float
    end: int
    raw: Json | None = None
    seam: str | None = None
    others: Json = field(default_factory=dict)


class Delivery:
    """Packets generated (len) and shown, in order; `tokens` and `shown_tokens` count what is in them (n0, k).

    pace: r_c in tokens/s, or None to forward at once. Paced, a packet is shown at max(g, d + its tokens / r_c), where
    g is its arrival and d when the one before was shown; the surplus is the buffer that masks a migration (section
    4.3). The buffer is not bounded: a slow reader frees the endpoint early instead of holding it back.

    stops: texts that end the answer where they span a seam, which each endpoint by itself cannot see. So packets at the
    end that one may begin in are held back until more comes or the answer ends. stopped: whether one has ended it.
    """

    def __init__(self, pace: float | None, stops: Sequence[str] = ()) -> None:
        self._gap = 1.0 / pace if pace else 0.0
        self._clock = asyncio.get_running_loop().time
        self._parts: list[Part] = []
        self._changed = asyncio.Event()
        self._closed = False
        self._error: BaseException | None = None
        self._stops = stops
        self._tail = ""  # the last characters of the answer, twice as many as the longest stop string has
        self._since_seam = math.inf  # characters
        self._ready = 0  # packets that are not held back
        self.stopped = False
        self.shown = 0

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def tokens(self) -> int:
        return self.tokens_at(len(self._parts))

    @property
    def shown_tokens(self) -> int:
        return self.tokens_at(self.shown)

    def tokens_at(self, length: int) -> int:
        """Tokens of the first `length` packets."""
        return self._parts[length - 1].end if length else 0

    @property
    def size(self) -> int:
        """Bytes of all that came: no tokenizer makes more tokens of it."""
        return sum(len(f"{part.text}{part.raw or ''}".encode("utf-8", "surrogatepass")) for part in self._parts)

    @property
    def ends_in_space(self) -> bool:
        return bool(self._parts) and self._parts[-1].text[-1:].isspace()

    def text(self) -> str:
        """The answer so far: what an endpoint is given as a prefix."""
        return joined(part.text for part in self._parts)

    def push(
        self, text: str, side: Side, raw: Json | None = None, seam: str | None = None, others: Json | None = None
    ) -> None:
        """Add a packet that came now."""
        self._parts.append(Part(text, side, self._clock(), self.tokens + tokens_of(text), raw, seam, others or {}))
        self._since_seam = len(text) + (0 if seam else self._since_seam)
        self._look_for_stops(self._tail + text)
        self._changed.set()

    def _look_for_stops(self, tail: str) -> None:
        """Cut the answer before a stop string that spans a seam, or hold back where one may begin."""
        seam = len(tail) - self._since_seam
        start = spanning(tail, int(seam), self._stops) if seam > 0 else None
        if start is not None:
            self.stopped, unsure = True, self._parts[self._ready :]
            kept = "".join(part.text for part in unsure)[: start - len(tail)]
            self._parts[self._ready :] = [replace(unsure[0], text=kept)] if kept else []
            return
        self._tail = tail[max(0, len(tail) - 2 * max(map(len, self._stops), default=0)) :]
        self._ready, held = len(self._parts), beginning(self._tail, self._stops)
        while held > 0:
            self._ready -= 1
            held -= len(self._parts[self._ready].text)

    def close(self, error: BaseException | None = None) -> None:
        """No more will come; the reader gets what is buffered, then the error if there is one."""
        self._closed = True
        self._ready = len(self._parts)
        self._error = error
        self._changed.set()

    async def read(self) -> AsyncIterator[Part]:
        """Packets as they fall due. One reader only."""
        due = -math.inf
        while True:
            if self.shown < self._ready:
                part = self._parts[self.shown]
                due = max(part.time, due)
                early = due - self._clock()
                if early > 1e-6:  # less is rounding
                    await asyncio.sleep(early)
                due += self._gap * (part.end - self.shown_tokens)
                self.shown += 1
                yield part
            elif self._closed:
                if self._error is not None:
                    raise self._error
                return
            else:
                self._changed.clear()
                await self._changed.wait()

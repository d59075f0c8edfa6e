"""The buffer between generation and the reader: tokens go out in order, at once or at the pace of reading."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass

from ondevice.disco.endpoints import Json, Side


@dataclass(frozen=True)
class Token:
    """One piece of the answer as an endpoint sent it (usually one token). time: seconds from request to arrival."""

    index: int
    text: str
    source: Side
    time: float
    raw: Json | None = None


class Delivery:
    """Tokens generated (n0 = len) and shown (k = shown), in order.

    pace: r_c in tokens/s, or None to forward at once. Paced, token i is shown at d_i = max(g_i, d_{i-1} + 1 / r_c)
    where g_i is its arrival; the surplus is the buffer that masks a migration (Sun et al. 2025, section 4.3).
    The buffer is not bounded: a slow reader frees the endpoint early instead of holding it back.
    """

    def __init__(self, pace: float | None) -> None:
        self._gap = 1.0 / pace if pace else 0.0
        self._clock = asyncio.get_running_loop().time
        self._start = self._clock()
        self._tokens: list[Token] = []
        self._changed = asyncio.Event()
        self._closed = False
        self._error: BaseException | None = None
        self.shown = 0

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def elapsed(self) -> float:
        return self._clock() - self._start

    def text(self) -> str:
        """The answer so far: what an endpoint is given as a prefix."""
        return "".join(token.text for token in self._tokens)

    def push(self, text: str, source: Side, raw: Json | None = None) -> Token:
        token = Token(len(self._tokens), text, source, self.elapsed, raw)
        self._tokens.append(token)
        self._changed.set()
        return token

    def truncate(self, length: int) -> None:
        """Drop generated tokens from `length` on; none of them may have been shown."""
        if length < self.shown:
            raise ValueError(f"Token {length} has been shown already.")
        del self._tokens[length:]

    def close(self, error: BaseException | None = None) -> None:
        """No more tokens will come; the reader gets what is buffered, then the error if there is one."""
        self._closed, self._error = True, error
        self._changed.set()

    async def read(self) -> AsyncIterator[Token]:
        """Tokens as they fall due. One reader only."""
        last = -math.inf
        while True:
            if self.shown < len(self._tokens):
                token = self._tokens[self.shown]
                due = max(token.time, last + self._gap)
                early = due - self.elapsed
                if early > 0:
                    await asyncio.sleep(early)
                    continue  # the token may have been replaced meanwhile
                last = due
                self.shown += 1
                yield token
            elif self._closed:
                if self._error is not None:
                    raise self._error
                return
            else:
                self._changed.clear()
                await self._changed.wait()

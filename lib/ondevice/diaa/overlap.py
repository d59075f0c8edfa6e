"""Computation overlap: the tables' update is worked out while the model's next forward runs (paper, same section)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from ondevice.diaa.updates import Fresh, refreshed
from ondevice.speculation.largest import Likeliest

if TYPE_CHECKING:
    from torch import Tensor

Write = Callable[[Fresh], None]


class Background:
    """Works out the k likeliest tokens in a thread, on CUDA in a stream of its own, and writes them one step later.

    A loop goes observe(t), propose(t + 1), forward(t + 1), observe(t + 1). The work of step t is handed over in
    observe(t), runs beside propose(t + 1) and forward(t + 1), and is written in observe(t + 1). So a tree never waits
    for an update and always sees the tables as of one step before: not by chance of the threads, but always.
    """

    def __init__(self, k: int) -> None:
        self._likeliest = Likeliest(k)
        self._threads: ThreadPoolExecutor | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._pending: tuple[Future[Fresh], Write] | None = None

    def submit(self, logits: Tensor, write: Write) -> None:
        """Write what was submitted before; begin on logits [n, V]."""
        self.finish()
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, "diaa-update")
        ready = torch.cuda.current_stream(logits.device).record_event() if logits.is_cuda else None
        self._pending = self._threads.submit(self._work, logits, ready), write

    def finish(self) -> None:
        """Write what is outstanding."""
        if self._pending is not None:
            (work, write), self._pending = self._pending, None
            write(work.result())

    @torch.inference_mode()
    def _work(self, logits: Tensor, ready: torch.cuda.Event | None) -> Fresh:
        if ready is None:
            return refreshed(logits, self._likeliest)
        if logits.device not in self._streams:
            self._streams[logits.device] = torch.cuda.Stream(logits.device)
        stream = self._streams[logits.device]
        logits.record_stream(stream)  # its memory is not given away before this stream has read it
        with torch.cuda.stream(stream):
            stream.wait_event(ready)
            return refreshed(logits, self._likeliest)


class Foreground:
    """The same work done at once: the next tree sees it."""

    def __init__(self, k: int) -> None:
        self._likeliest = Likeliest(k)

    def submit(self, logits: Tensor, write: Write) -> None:
        """Write the k likeliest tokens by logits [n, V]."""
        write(refreshed(logits, self._likeliest))

    def finish(self) -> None:
        """Nothing is ever outstanding."""

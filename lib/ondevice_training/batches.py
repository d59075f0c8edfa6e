"""What each step reads: a function of the step alone, so that a resumed run sees what an unbroken one would."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

_TASK_EVERY = 4  # one row in four is task text, and while the rate decays one in two: what is read last stays best
_LONG_EVERY = 4  # one step in four uses the whole context, the others halves of it, which cost less
_SHIFT = 389  # tokens by which each epoch moves the borders between rows


class Batches:
    """Batches from a stream of documents and a stream of tasks, both [n] token arrays.

    Rows hold `context` consecutive tokens, so neighbouring documents share a context; rows are shuffled each epoch.
    decay_start: the step from which on twice as many rows are task text.
    """

    def __init__(
        self,
        documents: np.ndarray,
        tasks: np.ndarray | None,
        rows: int,
        context: int,
        seed: int = 0,
        decay_start: int | None = None,
    ) -> None:
        self.streams: Sequence[np.ndarray] = (documents,) if tasks is None else (documents, tasks)
        self.rows, self.context, self.seed = rows, context, seed
        self._switch = None if decay_start is None else decay_start * rows
        for stream in self.streams:
            if len(stream) < 3 * context:
                raise ValueError(f"Training needs at least {3 * context} tokens of each kind; there are {len(stream)}.")

    def __call__(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets of a step, each [rows, context] or [2 rows, context / 2] int64."""
        rows = np.stack([self._row(step * self.rows + i) for i in range(self.rows)]).astype(np.int64)
        width = self.context if step % _LONG_EVERY == 0 else self.context // 2
        return rows[:, :-1].reshape(-1, width), rows[:, 1:].reshape(-1, width)

    def _row(self, number: int) -> np.ndarray:
        if len(self.streams) == 1:
            return self._chunk(0, number)
        if self._switch is None or number < self._switch:
            every = _TASK_EVERY
            (tasks, position) = divmod(number, _TASK_EVERY)
        else:
            every = _TASK_EVERY // 2
            (later_tasks, position) = divmod(number - self._switch, _TASK_EVERY // 2)
            tasks = self._switch // _TASK_EVERY + later_tasks
        return self._chunk(1, tasks) if position == every - 1 else self._chunk(0, number - tasks)

    def _chunk(self, stream: int, number: int) -> np.ndarray:
        tokens = self.streams[stream]
        epoch, position = divmod(number, (len(tokens) - 1) // self.context - 1)
        start = self._order(stream, epoch)[position] * self.context + epoch * _SHIFT % self.context
        return tokens[start : start + self.context + 1]

    def _order(self, stream: int, epoch: int) -> np.ndarray:
        return _permutation((len(self.streams[stream]) - 1) // self.context - 1, self.seed, stream, epoch)


@functools.lru_cache(maxsize=4)
def _permutation(count: int, *seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(count)


def windows(tokens: np.ndarray, count: int, context: int) -> np.ndarray:
    """[count or fewer, context] int64: windows evenly spaced over a stream, the same at every call."""
    last = len(tokens) // context
    if last < 1:
        raise ValueError(f"A held-out text needs at least {context} tokens; there are {len(tokens)}.")
    chosen = np.unique(np.linspace(0, last - 1, min(count, last)).astype(int))
    return np.stack([tokens[i * context : (i + 1) * context] for i in chosen]).astype(np.int64)

"""Where the time of an answer goes: calls of a model or a drafter, timed from outside."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch

from ondevice.speculation import greedy


class PartTimer:
    """Seconds of an answer by part. Of timed calls that nest, the inner ones are a drafter's forwards: `drafting`.

    began: when the first call of each part began; first: when the first token was chosen, both by `perf_counter`.
    """

    def __init__(self) -> None:
        self.first = 0.0
        self.began: dict[str, float] = {}
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inner: list[float] = []  # of each call that is under way, the seconds of calls inside it

    def choice(self, logits: torch.Tensor) -> int:
        """Greedy, noting when the first token was chosen."""
        token = greedy(logits)
        self.first = self.first or perf_counter()
        return token

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, whose seconds count for the part."""

        def run(*arguments: Any) -> Any:
            began = perf_counter()
            self.began.setdefault(part, began)
            self._inner.append(0.0)
            answer = call(*arguments)
            spent = perf_counter() - began
            own = spent - self._inner.pop()
            self.seconds["drafting" if self._inner else part] += own
            if self._inner:
                self._inner[-1] += spent
            return answer

        return run

    def on(self, timed: Any, **parts: str) -> Any:
        """A context in which methods of an object or a class are timed, each for a part."""
        calls: dict[str, Any] = {name: self.timed(part, getattr(timed, name)) for name, part in parts.items()}
        return patch.multiple(timed, **calls)

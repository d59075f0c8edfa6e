"""The outputs of earlier requests of a task group, which later ones resemble (sections 2.2 and 3.3), kept on disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ondevice import assets

LIMIT = 250_000  # tokens
_KEPT = 0.75  # of the limit, when old responses are dropped, so that it does not happen with every response
_FORMAT = "sd.npu history 3"


class History:
    """The finished responses of one task group, oldest first; in a file where a path is given, else in memory.

    vocabulary: V; ids are below it. tokenizer: digest of the tokenizer whose ids these are. limit: most tokens; the
    oldest responses are dropped to stay below, `dropped` so far. Of a longer response the last tokens are kept.

    The file is JSON and replaced whole with every response, so a crash or a full disk leaves the one before. One
    process at a time may write. Raises ValueError on a file of another tokenizer or vocabulary, on one that is no
    history, and on a limit below 4.
    """

    def __init__(self, vocabulary: int, tokenizer: str = "", path: Path | None = None, limit: int = LIMIT) -> None:
        if vocabulary < 1 or limit < 4:
            raise ValueError(f"A history has at least one token id and room for 4, not {vocabulary} and {limit}.")
        self.vocabulary, self.limit = vocabulary, limit
        self.path = None if path is None else Path(path)
        self.dropped = 0
        self._facts = {"format": _FORMAT, "tokenizer": tokenizer, "vocabulary": vocabulary}
        if self.path is not None and self.path.is_dir():
            raise ValueError(f"{self.path} is a folder; a history is a file.")
        there = self.path is not None and self.path.is_file()
        self.responses = self._within_limit(self._read()) if there else []

    def __len__(self) -> int:
        return len(self.responses)

    def append(self, response: Sequence[int]) -> None:
        """Add a finished response; an empty one is not kept. Raises ValueError on ids outside the vocabulary."""
        if not len(response):
            return
        if odd := [token for token in response if not 0 <= token < self.vocabulary]:
            raise ValueError(f"A response has token ids from 0 to {self.vocabulary - 1}, not {odd[0]}.")
        last = tuple(map(int, response[-int(_KEPT * self.limit) :]))
        kept = self._within_limit([*self.responses, last])
        if self.path is not None:
            assets.write_text(self.path, json.dumps({**self._facts, "responses": kept}))
        self.responses = kept

    def _within_limit(self, responses: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Responses without the oldest, once they are beyond the limit."""
        size = sum(map(len, responses))
        first = 0
        while size > self.limit or (first and size > _KEPT * self.limit):
            size -= len(responses[first])
            first += 1
        self.dropped += first
        return responses[first:]

    def _read(self) -> list[tuple[int, ...]]:
        assert self.path is not None
        try:
            facts = json.loads(self.path.read_text(encoding="utf-8"))
            responses = [tuple(map(int, response)) for response in facts.pop("responses")]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{self.path.name} is no history of responses.") from None
        if facts != self._facts:
            raise ValueError(f"{self.path.name} was made for {facts}, not for {self._facts}.")
        return responses

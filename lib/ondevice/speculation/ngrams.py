"""Where the n-grams of a growing text went on: what every drafter that copies from the request asks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

LONGEST = 12  # tokens of a context


class NGrams:
    """A text, and of every n-gram in it the positions of the tokens that followed, in their order.

    longest: tokens of the longest n-gram; every appended token costs as many entries.
    """

    def __init__(self, tokens: Iterable[int] = (), longest: int = LONGEST) -> None:
        self.text: list[int] = []
        self.longest = longest
        self._positions: dict[tuple[int, ...], list[int]] = {}
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.text)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        text = self.text
        positions = self._positions
        for token in map(int, tokens):
            end = len(text)
            for start in range(max(0, end - self.longest), end):
                positions.setdefault(tuple(text[start:end]), []).append(end)
            text.append(token)

    def after(self, context: Sequence[int], most: int = LONGEST) -> tuple[int, list[int]]:
        """(length, positions): of the longest suffix of a context, up to `most`, that stood in the text and went on."""
        for length in range(min(self.longest, most, len(context)), 0, -1):
            positions = self._positions.get(tuple(context[len(context) - length :]))
            if positions:
                return length, positions
        return 0, []

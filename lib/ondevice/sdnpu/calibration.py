"""In-context distribution calibration (section 3.3): what the model would say after the context's tokens."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from ondevice.speculation import Verified
from ondevice.speculation.largest import Likeliest

if TYPE_CHECKING:
    from torch import Tensor

K = 4  # candidates a place; more were not better on the validation tasks
CAPACITY = 2**15  # places, of some 500 bytes each
_LEARNS = ("prompt", "accepted", "verified")


class Row(NamedTuple):
    """What the model said after a key. keys: the key's length in tokens; 0 where the context does not have it.

    tokens: the candidates, likeliest first. probabilities: theirs.
    """

    keys: int
    tokens: Sequence[int]
    probabilities: Sequence[float]


NOTHING = Row(0, (), ())


@dataclass(frozen=True)
class Search:
    """Bounds of the depth-first search, none of which the paper states.

    depth: tokens of a path. nodes: of a tree. floor: least product of probabilities. occurrences: the key's first
    places, from which is searched. Raises ValueError where no node could come out.
    """

    depth: int = 4
    nodes: int = 8
    floor: float = 0.02
    occurrences: int = 8

    def __post_init__(self) -> None:
        if min(self.depth, self.nodes, self.occurrences) < 1 or not 0 <= self.floor < 1:
            raise ValueError(
                f"A search has at least one level, node and occurrence, and a floor in [0, 1), not {self}."
            )


class Trie(NamedTuple):
    """A calibrated token tree. tokens: of its nodes. parents: an earlier node, -1 the key. chances: of the path."""

    tokens: list[int]
    parents: list[int]
    chances: list[float]

    def branches(self) -> list[list[int]]:
        """Tokens of the paths from the key to each leaf, in the order of the leaves."""
        inner, found = set(self.parents), []
        for leaf in range(len(self.tokens)):
            path, node = [], leaf
            while node >= 0 and leaf not in inner:
                path.append(self.tokens[node])
                node = self.parents[node]
            found += [path[::-1]] if path else []
        return found


class Calibration:
    """The likeliest next tokens at every place of the context, looked up by the last token or the last two.

    vocabulary: V. k: candidates a place, 1 to V.
    keys: 2 looks up the last two tokens, and the last one where the context does not have the two; 1 only the last one.
    learns: `prompt`: from the prefill's logits alone. `accepted`: also from the verified logits after each token of the
        output, which then is context, too. `verified`: also from those after rejected tokens.
    keeps: whether what was learnt stays for the next request, as the history of outputs does.
    merge: how equal candidates of several places are merged: their mean over the places, or the largest.
    occurrences: places of a key that are merged, the latest ones. capacity: places; once full, the older half goes.

    The paper's own rule is `printed`: single tokens, the prompt alone, three candidates (Figure 9), the largest
    probability, and the depth-first search of `tree`. `row` is what our drafts are grown from instead.
    Only the candidates of a chunk of prefill are kept, never its logits. Raises ValueError on settings that cannot be.
    """

    def __init__(
        self, vocabulary: int, k: int = K, *, keys: Literal[1, 2] = 2,
        learns: Literal["prompt", "accepted", "verified"] = "accepted", keeps: bool = True,
        merge: Literal["mean", "max"] = "mean", occurrences: int = 4, capacity: int = CAPACITY,
    ) -> None:  # fmt: skip
        if not 1 <= k <= vocabulary:
            raise ValueError(f"A place has 1 to {vocabulary} candidates, the vocabulary, not {k}.")
        if keys not in (1, 2) or learns not in _LEARNS or merge not in ("mean", "max"):
            raise ValueError(
                f"There is no calibration by {keys} tokens that learns {learns!r} and merges by {merge!r}."
            )
        if occurrences < 1 or capacity < 2:
            raise ValueError(f"At least 1 occurrence and 2 places are kept, not {occurrences} and {capacity}.")
        self.vocabulary, self.k, self.keys, self.learns, self.keeps = vocabulary, k, keys, learns, keeps
        self.merge, self._occurrences, self._capacity = merge, occurrences, capacity
        self._likeliest = Likeliest(k)
        self._prompt: list[int] = []
        self._before = -1
        self.forget()

    @classmethod
    def printed(cls, vocabulary: int) -> Calibration:
        """As the paper has it."""
        return cls(vocabulary, 3, keys=1, learns="prompt", keeps=False, merge="max", occurrences=8)

    def __len__(self) -> int:
        """Places with candidates."""
        return len(self._samples)

    def forget(self) -> None:
        """Drop all places."""
        self._keys: list[tuple[int, int]] = []  # the token before each place's, and its own
        self._samples: list[tuple[list[int], list[float]]] = []  # candidates and probabilities; lists are read fastest
        self._single: defaultdict[int, list[int]] = defaultdict(list)  # places of each token, rising
        self._double: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        self._rows: dict[int | tuple[int, int], Row] = {}

    def begin(self, prompt: Sequence[int]) -> None:
        """A request comes. Raises ValueError on an empty prompt."""
        if not len(prompt):
            raise ValueError("A prompt to calibrate on has at least one token, not 0.")
        if not 0 <= min(prompt) <= max(prompt) < self.vocabulary:
            raise ValueError(f"A prompt's ids are from 0 to {self.vocabulary - 1}, not {min(prompt)} to {max(prompt)}.")
        if not self.keeps:
            self.forget()
        self._prompt, self._before = list(prompt), int(prompt[-1])

    def prefilled(self, start: int, logits: Tensor) -> None:
        """Logits [c, V] after the prompt's tokens from `start` on."""
        if not 0 <= start <= start + len(logits) <= len(self._prompt):
            end = start + len(logits)
            raise ValueError(f"Logits {start} to {end} are not of the prompt of {len(self._prompt)} tokens.")
        tokens = self._prompt[start : start + len(logits)]
        befores = [self._prompt[start - 1] if start else -1, *tokens[:-1]]
        self._add(befores, tokens, logits)

    def observe(self, step: Verified) -> None:
        """A step was verified."""
        tokens = [step.root, *step.draft.tokens.tolist()]
        rows = [0, *(node + 1 for node in step.path)]
        if self.learns != "prompt":
            parents = [-1, *(step.draft.parents + 1).tolist()]
            learnt = rows if self.learns == "accepted" else list(range(len(tokens)))
            befores = [tokens[parents[row]] if row else self._before for row in learnt]
            self._add(befores, [tokens[row] for row in learnt], step.logits[learnt])
        self._before = tokens[rows[-1]]

    def row(self, before: int, token: int) -> Row:
        """Merged candidates after the tokens `before` and `token`."""
        key: int | tuple[int, int] = (before, token)
        if key not in self._double:
            key = token
        found = self._rows.get(key)
        if found is None:
            places = self._single.get(token) if key == token else self._double[before, token]
            if places is None:
                return NOTHING
            found = Row(1 if key == token else 2, *self._merged(places[-self._occurrences :]))
            self._rows[key] = found
        return found

    def tree(self, token: int, search: Search | None = None) -> Trie:
        """The paper's tree of a token, by depth-first search.

        Every candidate of a place is searched for in the context, and its own candidates are taken where it stands:
        at the nearest place after, else the last one before; one that does not stand there is a leaf.
        """
        bounds, found = search or Search(), Trie([], [], [])
        nodes: dict[tuple[int, int], int] = {}
        for place in self._single.get(token, ())[: bounds.occurrences]:
            self._visit(place, -1, 1.0, 1, bounds, found, nodes)
        return found

    def _visit(
        self, place: int, parent: int, reach: float, depth: int, bounds: Search, found: Trie,
        nodes: dict[tuple[int, int], int],
    ) -> None:  # fmt: skip
        for token, p in zip(*self._samples[place], strict=True):
            chance = reach * p
            if chance < bounds.floor:
                return  # the others are less likely still
            node = nodes.get((parent, token))
            if node is None:
                if len(found.tokens) == bounds.nodes:
                    return
                node = nodes[parent, token] = len(found.tokens)
                found.tokens.append(token)
                found.parents.append(parent)
                found.chances.append(chance)
            found.chances[node] = max(found.chances[node], chance)
            if depth < bounds.depth and (after := self._nearest(token, place)) is not None:
                self._visit(after, node, chance, depth + 1, bounds, found, nodes)

    def _nearest(self, token: int, place: int) -> int | None:
        """The next place of a token after `place`, else the last one before it."""
        places = self._single.get(token, ())
        after = bisect_right(places, place)
        if after < len(places):
            return places[after]
        before = bisect_left(places, place)
        return places[before - 1] if before else None

    def _merged(self, places: Sequence[int]) -> tuple[list[int], list[float]]:
        """At most k candidates of several places, and their probabilities."""
        if len(places) == 1:
            return self._samples[places[0]]
        share = 1 / len(places)
        merged: dict[int, float] = {}
        for place in places:
            for token, p in zip(*self._samples[place], strict=True):
                known = merged.get(token, 0.0)
                merged[token] = known + share * p if self.merge == "mean" else max(known, p)
        best = sorted(merged, key=merged.__getitem__, reverse=True)[: self.k]
        return best, [merged[token] for token in best]

    def _add(self, befores: Sequence[int], tokens: Sequence[int], logits: Tensor) -> None:
        """Places in the order of the text. befores, tokens: the last two tokens at each; logits: [n, V] after them."""
        if logits.shape[-1] != self.vocabulary:
            raise ValueError(f"The calibration is for {self.vocabulary} token ids, not {logits.shape[-1]}.")
        found = (part.tolist() for part in self._likeliest(logits))
        self._write(list(zip(befores, tokens, strict=True)), list(zip(*found, strict=True)))

    def _write(self, keys: list[tuple[int, int]], samples: list[tuple[list[int], list[float]]]) -> None:
        if len(self._keys) + len(keys) > self._capacity:  # the older half goes, so that this is seldom
            kept = slice(-(self._capacity // 2), None)
            keys, samples = (self._keys + keys)[kept], (self._samples + samples)[kept]
            self.forget()
        start = len(self._keys)
        self._keys += keys
        self._samples += samples
        for place, key in enumerate(keys, start):
            self._single[key[1]].append(place)
            self._rows.pop(key[1], None)
            if self.keys == 2:
                self._double[key].append(place)
                self._rows.pop(key, None)

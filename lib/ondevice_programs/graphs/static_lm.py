"""One language model on static graphs: progressive prefill, then draft trees on the small graph (sections 3.2 to 3.4).

`ondevice.speculation.generate(StaticLM(...), drafter, prompt, max_new_tokens)` is the whole system, whose ids are plain
decoding's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from ondevice.causal_lm import TokenTree
from ondevice_papers.sdnpu.scheduling import Load, Prefill, Timeline
from ondevice_programs.graphs import static_graphs, switching
from ondevice_programs.graphs.static_graphs import Graph, Graphs, Rows
from ondevice_programs.graphs.switching import GraphSwitch, Profile

Rule = Callable[[Prefill], list[Load]]


class StaticLM:
    """In place of a `CausalLM`. rule: how graphs are switched; `keep_both` holds both.

    memory: of the switching, over the bytes of all G1. profile: of the graphs, by default measured here.
    forward: `static_graphs.forward`, or an experiment's. timeline: of the last prefill.
    Raises ValueError where the graphs do not fit the memory.
    """

    def __init__(
        self,
        built: Graphs,
        rule: Rule,
        memory: float = 1.0,
        profile: Profile | None = None,
        forward: Callable[..., Rows] = static_graphs.forward,
    ) -> None:
        self.built, self.rule, self.memory, self.forward = built, rule, memory, forward
        self.context = int(built.facts["context"])
        self.vocabulary = int(built.facts["vocabulary"])
        self.most_rows = int(built.facts["capacity"])
        self.profile = profile or switching.profile(built, 3)
        self.kept = [built.load(path) for path in built.small_files] if not self.plan([built.large])[1] else []
        self.large: list[Graph] = []
        self.timeline: Timeline | None = None

    def require_trees(self) -> None:
        """Nothing to refuse: row masks make draft trees verifiable."""

    def plan(self, rows: Sequence[int]) -> tuple[Prefill, list[Load]]:
        """The schedule of a prompt whose chunks have so many rows."""
        prefill = self.profile.instance(rows, self.built.small, self.memory)
        return prefill, self.rule(prefill)

    def start(self, capacity: int = 0) -> StaticSession:
        """A session of one request, with G1 in memory."""
        self.small: list[Graph] = []
        if not self.large:
            self.large = [self.built.load(path) for path in self.built.large_files]
        return StaticSession(self)


class StaticSession:
    """One request. A step is `verify`, then `keep`. Rows of a tree lie in the cache behind the committed ones."""

    def __init__(self, lm: StaticLM) -> None:
        self.lm = lm
        self.built = lm.built
        self.tokens: list[int] = []
        self.caches = lm.built.caches()
        self._tree: TokenTree | None = None

    @property
    def length(self) -> int:
        """How many tokens are committed to the cache."""
        return len(self.tokens)

    def prefill(
        self, ids: Sequence[int], chunk: int | None = None, on_logits: Callable[[int, torch.Tensor], None] | None = None
    ) -> torch.Tensor:
        """Logits [V] after the prompt; on_logits gets those [c, V] of each `small` tokens with their first position.

        A chunk's rows go through the head in such slices, because the logits of a whole one are many megabytes.
        """
        self._check(ids)
        lm = self.lm
        large = self.built.large
        parts = [list(ids[at : at + large]) for at in range(0, len(ids), large)]
        prefill, plan = lm.plan([len(part) for part in parts])
        first = lm.large
        lm.large = lm.large if not plan else []
        switch = GraphSwitch(self.built, first, prefill, plan, lm.forward)
        del first
        with switch:
            for number, part in enumerate(parts):
                rows = self.built.embed(part)
                causal = np.tri(len(part), dtype=bool)
                for block, cache in enumerate(self.caches):
                    rows = switch.compute(number, block, rows, cache, number * large, causal)
                if on_logits is not None:
                    for at in range(0, len(part), self.built.small):
                        logits = self.built.logits(rows[at : at + self.built.small])
                        on_logits(number * large + at, logits)
                elif number == len(parts) - 1:
                    logits = self.built.logits(rows[-1:])
        lm.timeline, lm.small = switch.timeline, [graph for graph in switch.small if graph is not None] or lm.kept
        self.tokens = list(map(int, ids))
        return logits[-1]

    def verify(self, tree: TokenTree) -> torch.Tensor:
        """Logits [n, V] after every node of a tree, on the small graph."""
        positions = self.length + tree.depths - 1
        rows = self.built.embed(tree.tokens.tolist())
        for graph, cache in zip(self.lm.small, self.caches, strict=True):
            rows = self.lm.forward(graph, rows, cache, self.length, tree.topology.sees, positions)
        self._tree = tree
        return self.built.logits(rows)

    def keep(self, path: Sequence[int]) -> None:
        """Commit a path of the tree just verified."""
        assert self._tree is not None
        start = self.length
        rows_kept = self.length + np.asarray(path)
        for cache in self.caches:
            for rows in (cache.keys, cache.values):
                rows[:, :, start : start + len(path)] = rows[:, :, rows_kept]
        self.tokens += self._tree.tokens[list(path)].tolist()

    def _check(self, ids: Sequence[int]) -> None:
        if not 1 <= len(ids) <= self.lm.context:
            raise ValueError(f"A prompt has 1 to {self.lm.context} tokens, the graphs' context, not {len(ids)}.")
        if not 0 <= min(ids) <= max(ids) < self.lm.vocabulary:
            raise ValueError(f"A prompt's ids are from 0 to {self.lm.vocabulary - 1}, not {min(ids)} to {max(ids)}.")

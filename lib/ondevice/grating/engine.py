"""Monolithic forwarding: all candidates go through a layer, chunk by chunk, before any goes on to the next one.

So a layer's weights are read once for all candidates (section 3.2), what one chunk needs in between is all there is of
it (section 4.3), and after each layer the scores of all candidates are there to decide who goes on (section 4.1).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ondevice.batching import by_length
from ondevice.grating.architectures import Architecture, Batch, Row
from ondevice.grating.hidden_states import HiddenStates, Resident
from ondevice.grating.probes import Probes
from ondevice.grating.weights import Weights

Prune = Callable[[NDArray[np.float64]], NDArray[np.int64]]


@dataclass(frozen=True)
class Scores:
    """What a pass over N candidates gave. L: layers of the model; R: layers that were run, fewer after an early end.

    by_layer: [L, N] logits z by the model's own head after each layer; NaN where a candidate was not run. The
        probability that pruning is about is sigmoid(z).
    ran: [N] layers that each candidate went through; L for those that reached the end.
    active: [R] candidates that a layer was run for. seconds: [R] of each layer, waiting included.
    stalls: [R] seconds that each layer's weights were waited for. embedding: seconds before the first layer.
    """

    by_layer: NDArray[np.float64]
    ran: NDArray[np.int64]
    active: NDArray[np.int64]
    seconds: NDArray[np.float64]
    stalls: NDArray[np.float64]
    embedding: float

    @property
    def last(self) -> NDArray[np.float64]:
        """[N] the logit after the last layer that each candidate was run for: of different layers, so no ranking."""
        return self.by_layer[self.ran - 1, np.arange(len(self.ran))]

    @property
    def work(self) -> int:
        """Layer-candidates computed; without pruning L N."""
        return int(self.ran.sum())


class Engine:
    """A reranker that is run layer by layer over all candidates of a query.

    weights: of the architecture, in memory or streamed; they stay the caller's to close, and serve one pass at a time.
    chunk: most tokens, padding included, that go through a layer together; a longer row makes a chunk of its own. The
        paper gives no number; 512 is the fewest that keep a core's products efficient.
    hidden: makes the place where hidden states are between layers: in memory by default, else offloaded. Each pass
        makes one and closes it.
    probes: what scores are made by after every layer but the last; None is the model's own head after each of them.
    Of chunks that are not being computed there are hidden states and nothing else, and none after the last layer.
    Raises ValueError where weights and architecture do not belong together, and on a chunk below one token.
    """

    def __init__(
        self, architecture: Architecture, weights: Weights, *, chunk: int = 512,
        hidden: Callable[[], HiddenStates] = Resident, probes: Probes | None = None,
    ) -> None:  # fmt: skip
        if chunk < 1:
            raise ValueError(f"A chunk holds at least one token, not {chunk}.")
        if weights.layers != architecture.layers:
            raise ValueError(f"{architecture.name} has {architecture.layers} layers, its weights {weights.layers}.")
        if probes is not None:
            probes.require(architecture.layers, architecture.width)
        self.architecture, self.weights, self.chunk, self.hidden = architecture, weights, chunk, hidden
        self.probes = probes
        self._rest = weights.rest()
        answers = architecture.answers
        rows = None if answers is None else weights.head_rows(torch.tensor(answers))
        self._head = architecture.head(self._rest, rows)

    @torch.inference_mode()
    def score(self, rows: Sequence[Row], prune: Prune | None = None) -> Scores:
        """Scores of candidates [N] after each layer, by the model's own norm and head in float32, or by probes.

        prune: given the logits z [n] of the active candidates, in rising order, after every layer; returns those that
            go on, none for an early end (`pruning.Selection.step`). Without it, all go through all layers.
        Raises ValueError on no rows, on one that is empty or longer than the model takes, on scores that are no finite
        numbers, and on a `prune` that lets others go on than were there.
        """
        self._check(rows)
        with contextlib.closing(self.hidden()) as states:
            return _Pass(self, rows, states).run(prune)

    def _check(self, rows: Sequence[Row]) -> None:
        if not rows:
            raise ValueError("There are no candidates to score.")
        longest = self.architecture.longest
        for index, row in enumerate(rows):
            if not 1 <= len(row.ids) <= longest:
                raise ValueError(f"Candidate {index} has {len(row.ids)} tokens; the model takes 1 to {longest}.")


class _Pass:
    """One pass over a pool. groups: the active candidates of each chunk, by the chunk's number in `states`."""

    def __init__(self, engine: Engine, rows: Sequence[Row], states: HiddenStates) -> None:
        self.architecture, self.weights, self.head = engine.architecture, engine.weights, engine._head
        self.probes = engine.probes
        self.rest, self.most = engine._rest, engine.chunk
        self.rows, self.states = rows, states
        self.active = np.arange(len(rows))
        self.groups = self._grouped()
        self.stored = self.groups  # as the states are, which are regrouped while the next layer reads them

    def run(self, prune: Prune | None) -> Scores:
        began = time.perf_counter()
        self._embed()
        times = [time.perf_counter()]
        by_layer = np.full((self.architecture.layers, len(self.rows)), np.nan)
        ran, active, stalls = np.zeros(len(self.rows), np.int64), [], []
        for layer in range(self.architecture.layers):
            active.append(len(self.active))
            stalls.append(self._forward(layer, by_layer[layer]))
            ran[self.active] = layer + 1
            if prune is not None:
                self._keep(prune(by_layer[layer, self.active]))
            times.append(time.perf_counter())
            if not len(self.active):
                break
        seconds = np.diff(np.array(times))
        return Scores(by_layer, ran, np.array(active), seconds, np.array(stalls), times[0] - began)

    def _embed(self) -> None:
        self.weights.begin()
        for chunk, group in self.groups.items():
            batch = self._batch(group)
            rows = self.weights.rows(batch.ids)
            self.dtype = rows.dtype
            self.states.put(chunk, self.architecture.embed(self.rest, batch, rows))

    def _forward(self, layer: int, scores: NDArray[np.float64]) -> float:
        """Run a layer for the active candidates, write their scores [N]; returns the seconds waited for weights."""
        began = time.perf_counter()
        parameters = self.weights.layer(layer)
        waited = time.perf_counter() - began
        self.architecture.check_layer(layer, parameters, self.dtype)
        for chunk, hidden in self._regrouped():
            group = self.groups[chunk]
            batch = self._batch(group)
            made = self.architecture.forward(parameters, batch, hidden)
            scores[group] = self._scores(layer, self.architecture.pooled(batch, made)).double().numpy()
            if layer + 1 < self.architecture.layers:
                self.states.put(chunk, made)
        self.stored = self.groups
        odd = self.active[~np.isfinite(scores[self.active])]
        if len(odd):
            raise ValueError(f"The score of candidate {odd[0]} after layer {layer + 1} is not a finite number.")
        return waited

    def _scores(self, layer: int, pooled: Tensor) -> Tensor:
        if self.probes is not None and layer + 1 < self.architecture.layers:
            return self.probes.scores(layer + 1, pooled)
        return self.architecture.scores(self.head, pooled)

    def _keep(self, going: NDArray[np.int64]) -> None:
        """Let only these candidates go on, in chunks made anew: few candidates in many chunks waste a core's time."""
        left = np.unique(np.asarray(going, np.int64))
        if not np.isin(left, self.active).all():
            odd = left[~np.isin(left, self.active)][0]
            raise ValueError(f"Candidate {odd} cannot go on: it was not active.")
        if len(left) < len(self.active):
            self.active = left
            self.groups = self._grouped(max(self.stored) + 1)

    def _grouped(self, first: int = 0) -> dict[int, list[int]]:
        """The active candidates in chunks of like lengths. first: number of the first chunk."""
        active = self.active.tolist()
        chunks = by_length([len(self.rows[candidate].ids) for candidate in active], self.most)
        return {first + k: [active[place] for place in chunk] for k, chunk in enumerate(chunks)}

    def _batch(self, group: Sequence[int]) -> Batch:
        return Batch([self.rows[candidate] for candidate in group])

    def _regrouped(self) -> Iterator[tuple[int, Tensor]]:
        """Each chunk's number and states [n, width, d], taken out of the chunks that they are stored in.

        Both groupings are in one order, that of lengths, so at most one chunk's states wait beside the one made.
        """
        if self.groups is self.stored:
            yield from self.states.each(list(self.groups))
            return
        waiting: dict[int, Tensor] = {}  # candidate: its states [tokens, d]
        active = set(self.active.tolist())
        empty = torch.empty(0, 0, self.architecture.width, dtype=self.dtype)
        for old, group in self.stored.items():
            if not active & set(group):
                self.states.put(old, empty)  # its room is free
        stored = self.states.each([chunk for chunk, group in self.stored.items() if active & set(group)])
        for chunk, group in self.groups.items():
            while not waiting.keys() >= set(group):
                old, hidden = next(stored)
                for place, candidate in enumerate(self.stored[old]):
                    if candidate in active:
                        waiting[candidate] = hidden[place, : len(self.rows[candidate].ids)].clone()
                self.states.put(old, empty)
            yield chunk, pad_sequence([waiting.pop(candidate) for candidate in group], batch_first=True)
        next(stored, None)  # none is left, but it may have things to finish

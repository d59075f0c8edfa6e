"""Monolithic forwarding: all candidates go through a layer, chunk by chunk, before any goes on to the next one.

So a layer's weights are read once for all candidates (section 3.2), what one chunk needs in between is all there is of
it (section 4.3), and after each layer the scores of all candidates are there to decide who goes on (section 4.1).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ondevice.batching import by_length
from ondevice.corpus.pairs import Row
from ondevice_papers.grating.architectures import Architecture, PaddedRows
from ondevice_papers.grating.clustering import Floats
from ondevice_papers.grating.hidden_states import HiddenStates, Resident
from ondevice_papers.grating.probes import Probes
from ondevice_papers.grating.pruning import PoolOutcome, Rule, select
from ondevice_papers.grating.weights import Weights

CHUNK = 512  # tokens: the fewest at which a core's products are efficient (the paper gives no number)
States = Callable[[Sequence[int], int, torch.dtype], HiddenStates]


def chunks(rows: Sequence[Row], active: NDArray[np.int64], most: int) -> list[list[int]]:
    """The active candidates in chunks of like lengths, at most so many tokens each, padding included."""
    grouped = by_length([len(rows[candidate].ids) for candidate in active], most)
    return [[int(active[index]) for index in chunk] for chunk in grouped]


def run_layer(
    architecture: Architecture,
    weights: Weights,
    states: HiddenStates,
    rows: Sequence[Row],
    active: NDArray[np.int64],
    layer: int,
    most: int = CHUNK,
) -> Tensor:
    """Take the active candidates through a layer, chunk by chunk; [n, d] the states that their scores are made of.

    Each unit of the weights is waited for once, and computes for all chunks while the next unit is read.
    layer: from 0.
    """
    groups = chunks(rows, active, most)
    pooled = torch.empty(0)
    row_of = {int(candidate): number for number, candidate in enumerate(active)}
    for layer_parts, parameters in weights.layer(layer):
        with architecture.holding(layer, parameters):
            for group, hidden in zip(groups, states.each(groups), strict=True):
                # kept from layer to layer, its tensors would be holes in the heap
                batch = PaddedRows([rows[candidate] for candidate in group])
                for part in layer_parts:
                    hidden = architecture.forward(layer, part, batch, hidden)
                states.put(group, hidden)
                group_states = architecture.pooled(batch, hidden)
                if not len(pooled):  # one tensor: small ones among temporaries would keep the heap from shrinking
                    pooled = group_states.new_empty(len(active), group_states.shape[1])
                pooled[[row_of[candidate] for candidate in group]] = group_states
    return pooled


RunLayer = Callable[..., Tensor]
Select = Callable[..., PoolOutcome]


@dataclass(frozen=True)
class Pass:
    """Selection and seconds of one pass of N candidates through the layers.

    outcome: of the selection, with the logits after each layer. seconds: [R] of each layer that was run, waiting
    included. embedding: seconds before the first layer.
    """

    outcome: PoolOutcome
    seconds: Floats
    embedding: float


class Engine:
    """A reranker's architecture on weights, wherever they are.

    chunk: most tokens of a chunk. states: makes what keeps hidden states. probes: what scores are made by after every
    layer but the last, else the model's own head. run_layer, select: the mechanisms.
    """

    def __init__(
        self,
        architecture: Architecture,
        weights: Weights,
        *,
        chunk: int = CHUNK,
        states: States = Resident,
        probes: Probes | None = None,
        run_layer: RunLayer = run_layer,
        select: Select = select,
    ) -> None:
        self.architecture, self.weights, self.probes = architecture, weights, probes
        self.chunk = chunk
        self.states = states
        self.run_layer = run_layer
        self.select = select
        answers = architecture.answers
        rows = None if answers is None else weights.head_rows(torch.tensor(answers))
        architecture.hold(weights.rest(), rows)

    @torch.inference_mode()
    def score(
        self, rows: Sequence[Row], k: int | None = None, rule: Rule | None = None, exact_order: bool = False
    ) -> Pass:
        """Select the top K (None: all) of candidates [N]; see `pruning.select`.

        Raises ValueError on a row that is longer than the model takes, and on scores that are no finite numbers.
        """
        began = time.perf_counter()
        with contextlib.closing(self._embedded(rows)) as states:
            times = [time.perf_counter()]

            def scores_of(layer: int, active: NDArray[np.int64]) -> Floats:
                pooled = self.run_layer(self.architecture, self.weights, states, rows, active, layer - 1, self.chunk)
                scores = self._scores(layer, pooled).double().numpy()
                if not np.isfinite(scores).all():
                    odd = active[~np.isfinite(scores)][0]
                    raise ValueError(f"The score of candidate {odd} after layer {layer} is not a finite number.")
                times.append(time.perf_counter())
                return scores

            k = len(rows) if k is None else k
            outcome = self.select(scores_of, len(rows), self.architecture.layers, k, rule, exact_order)
        return Pass(outcome, np.diff(np.array(times)), times[0] - began)

    def _embedded(self, rows: Sequence[Row]) -> HiddenStates:
        """The hidden states that the first layer reads."""
        longest = self.architecture.longest
        for index, row in enumerate(rows):
            if not 1 <= len(row.ids) <= longest:
                raise ValueError(f"Candidate {index} has {len(row.ids)} tokens; the model takes 1 to {longest}.")
        self.weights.begin()
        states = None
        try:
            for group in chunks(rows, np.arange(len(rows)), self.chunk):
                batch = PaddedRows([rows[candidate] for candidate in group])
                embedded = self.architecture.embed(batch, self.weights.rows(batch.ids))
                if states is None:
                    states = self.states([len(row.ids) for row in rows], embedded.shape[-1], embedded.dtype)
                states.put(group, embedded)
        except BaseException:
            if states is not None:
                states.close()
            raise
        if states is None:
            raise ValueError("There are no candidates to score.")
        return states

    def _scores(self, layer: int, pooled: Tensor) -> Tensor:
        if self.probes is not None and layer < self.architecture.layers:
            return self.probes.scores(layer, pooled)
        return self.architecture.scores(pooled)

"""What a call of the reranker did, in plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ondevice_papers.grating.engine import Pass
from ondevice_papers.grating.weights import Streamed
from ondevice_programs.reranker.memory_plan import MB, Plan
from ondevice_programs.reranker.reading import Encoded


@dataclass(frozen=True)
class Receipt:
    """What a call did, in plain numbers.

    candidates: N; layers: L of the model. active: of each layer that was run, for how many candidates. saved: share of
    the N L layer-candidates that was not computed. exact: nobody was pruned, so the order is the model's.
    margin: between the last chosen and the first left out, in logits, where both were decided after the last layer.
    layer_seconds: of each layer, waiting included. embedding_seconds: before the first layer. stalled_seconds: of all,
    waited for the disk. read_bytes: of weights. rows_cached, rows_read: embedding rows. tokens: of all pairs, as they
    were read. truncated: documents that lost a part. peak_mb: most memory that the process had grown by since the
    constructor began, seen in it and between layers. plan_mb: what was planned, by what it is for.
    """

    candidates: int
    layers: int
    active: list[int]
    saved: float
    exact: bool
    margin: float | None
    layer_seconds: list[float]
    embedding_seconds: float
    stalled_seconds: float
    read_bytes: int
    rows_cached: int
    rows_read: int
    tokens: int
    truncated: int
    peak_mb: float
    plan_mb: dict[str, float]


def summed(receipts: Sequence[Receipt]) -> Receipt | None:
    """One receipt of several segments, all candidates of which went through all layers."""
    if not receipts:
        return None
    numbers = {name: [getattr(receipt, name) for receipt in receipts] for name in vars(receipts[0])}
    added = ["candidates", "tokens", "truncated", "embedding_seconds", "stalled_seconds"]
    added += ["read_bytes", "rows_cached", "rows_read"]
    return replace(
        max(receipts, key=lambda receipt: sum(receipt.plan_mb.values())),
        **{name: sum(numbers[name]) for name in added},
        **{name: np.sum(numbers[name], axis=0).tolist() for name in ("active", "layer_seconds")},
        peak_mb=max(numbers["peak_mb"]),
        margin=None,
    )


def receipt_of(done: Pass, counted: Sequence[Any], read: Encoded, chosen: Plan, peak: float) -> Receipt:
    """The receipt of a pass. counted: as of `counters`, of this call. peak: MB."""
    outcome = done.outcome
    margin = None
    (layers, count) = outcome.history.shape
    (stalled, read_bytes, hits, misses) = counted
    at_last = outcome.layer == layers
    last = np.sort(outcome.history[-1][at_last])[::-1]
    kept = int(outcome.kept[at_last].sum())
    if 0 < kept < len(last):
        margin = float(last[kept - 1] - last[kept])
    return Receipt(
        count, layers, outcome.active.tolist(), outcome.saved, bool(at_last.all()), margin, done.seconds.tolist(),
        done.embedding, stalled, read_bytes, hits, misses, sum(len(row.ids) for row in read.rows), read.truncated, peak,
        {name: size / MB for name, size in chosen.parts.items()},
    )  # fmt: skip


def counters(weights: Streamed) -> tuple[float, int, int, int]:
    """Seconds waited for the disk, bytes of weights read, rows found in the cache and rows read, so far."""
    window = weights.window
    rows = weights.embeddings
    return window.stalled, window.read_bytes, rows.hits, rows.misses

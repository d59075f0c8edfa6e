"""Scores of the bundled rerankers after every layer, recorded once for all evaluation pools, and checked live.

Pruning is a function of these scores, so that calibration, curves and promises need no forward pass. The file
data/traces/grating_scores.npz has them as whole steps between each pool's and layer's lowest and highest logit
(12 bits: an error of 0.002, where bfloat16 has 0.004), with what each pool is made of as places in the corpus.

Record them anew, in about half an hour: python -m ondevice.grating.recordings
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike, NDArray

from ondevice import assets, commands, corpus
from ondevice.grating.baselines import Model
from ondevice.grating.engine import Engine
from ondevice.grating.pruning import Rule, ranking
from ondevice.grating.quantised import Dequantised
from ondevice.grating.replay import Pools, replay
from ondevice.grating.streamable import prepare
from ondevice.grating.weights import Streamed, Weights
from ondevice.precision import bfloat16_pays

if TYPE_CHECKING:
    from ondevice.retrieval.pools import Pool

MODELS = ("pydocs-reranker", "pydocs-reranker-deep", "minilm-reranker")
QUESTIONS, CLOZE = "documentation questions", "inverse cloze"
SETS = {"parameter": QUESTIONS, "summary": CLOZE}  # kinds of queries: a summary is cut out of the text that answers it
INT8 = "test, int8"
_STEPS = 2**12 - 1


@dataclass(frozen=True)
class Recording:
    """One model's scores on the pools of a split.

    queries: [pools] the query set of each. documents: [pools] what each query is about, by the hash of its name.
    candidates: [pools, N] passages, by the hash of their text. Other versions of the installed packages have most of
    them, too.
    """

    model: str
    split: str
    pools: Pools
    queries: NDArray[np.str_]
    documents: NDArray[np.uint64]
    candidates: NDArray[np.uint64]

    def of(self, queries: str) -> Pools:
        """The pools of one query set. Raises ValueError where there are none."""
        return self.pools.take(self.places(queries))

    def places(self, queries: str) -> NDArray[np.int64]:
        """[m] which pools are of one query set. Raises ValueError where there are none."""
        found = np.flatnonzero(self.queries == queries)
        if not len(found):
            raise ValueError(f"There are no {queries} recorded; there are {', '.join(np.unique(self.queries))}.")
        return found


@dataclass(frozen=True)
class Asked:
    """A pool as a reranker is asked it. place: in the recording."""

    place: int
    query: str
    documents: tuple[str, ...]


def load(model: str, split: str = "test", int8: bool = False) -> Recording:
    """A recording. int8: of the model with int8 weights; the test split only.

    Raises ValueError on a model or split that was not recorded, and FileNotFoundError without the file.
    """
    return _unpacked(_file(), model, split, int8)


def pack(scores: ArrayLike) -> dict[str, NDArray[Any]]:
    """Scores [pools, layers, N] as `codes` (uint16), with `low` and `step` (float32) of each pool and layer."""
    given = np.asarray(scores, np.float64)
    low = given.min(2)
    step = ((given.max(2) - low) / _STEPS).astype(np.float32)
    codes = np.rint((given - low[..., None]) / np.where(step > 0, step, 1)[..., None])
    return {"codes": codes.clip(0, _STEPS).astype(np.uint16), "low": low.astype(np.float32), "step": step}


def unpack(packed: Mapping[str, NDArray[Any]]) -> NDArray[np.float64]:
    """Scores [pools, layers, N] of what `pack` made."""
    low, step = (packed[name].astype(np.float64)[..., None] for name in ("low", "step"))
    return np.asarray(low + step * packed["codes"], np.float64)


def asked(recording: Recording, places: Iterable[int]) -> list[Asked]:
    """The queries and texts of some pools: of those whose texts the installed packages have as they were recorded.

    Raises ValueError where they have none of them.
    """
    documents, texts = _corpus(recording.split)
    found, given = [], list(places)
    for place in given:
        document, passages = documents.get(int(recording.documents[place])), recording.candidates[place].tolist()
        if document is None or not all(passage in texts for passage in passages):
            continue
        for query in corpus.queries([document]):
            found.append(Asked(int(place), query.text, tuple(texts[passage] for passage in passages)))
    if given and not found:
        raise ValueError(
            "The scores were recorded on another version of the documentation corpus: record them anew with python -m "
            "ondevice.grating.recordings."
        )
    return found


def spread(recording: Recording, count: int, queries: str | None = None) -> NDArray[np.int64]:
    """[count] places evenly spread over the recording, or over one query set in it; fewer where there are fewer."""
    found = np.arange(len(recording.pools)) if queries is None else recording.places(queries)
    return found[np.unique(np.linspace(0, len(found) - 1, max(1, count)).round().astype(int))]


def live(model: Model, engine: Engine, pools: Sequence[Asked]) -> NDArray[np.float64]:
    """[pools, layers, N] scores by the engine, nothing pruned."""
    return np.stack([engine.score(model.rows(pool.query, pool.documents)).by_layer for pool in pools])


def compare(recording: Recording, pools: Sequence[Asked], scores: ArrayLike, k: int = 5,
            rule: Rule | None = None) -> dict[str, Any]:  # fmt: skip
    """A row that says how far live scores [pools, layers, N] are from the recorded ones.

    model, pools; median, largest: of the absolute difference of logits; kendall: mean over pools, of both final
    orders; overlap: of both top K; decided: share of candidates that `rule` decides alike, NaN without one.
    """
    now = np.asarray(scores, np.float64)
    before = recording.pools.scores[[pool.place for pool in pools]]
    apart = np.abs(now - before)
    alike = [np.isin(ranking(a)[:k], ranking(b)[:k]).mean() for a, b in zip(now[:, -1], before[:, -1], strict=True)]
    same = [float((replay(a, k, rule).kept == replay(b, k, rule).kept).mean()) for a, b in zip(now, before, strict=True)
            if rule is not None]  # fmt: skip
    return {
        "model": recording.model, "pools": len(pools), "median": float(np.median(apart)), "largest": float(apart.max()),
        "kendall": float(kendall(now[:, -1], before[:, -1]).mean()), "overlap": float(np.mean(alike)),
        "decided": float(np.mean(same)) if same else float("nan"),
    }  # fmt: skip


def check(models: Sequence[str] = MODELS, pools: int = 20, k: int = 5, rules: Mapping[str, Rule] | None = None
          ) -> pd.DataFrame:  # fmt: skip
    """A row of `compare` a model: some test pools scored by the engine, weights streamed in bfloat16 where it pays.

    rules: of models, to compare decisions with.
    """
    rows = []
    for name in models:
        recording = load(name)
        chosen = asked(recording, spread(recording, pools))
        with opened(name) as (model, engine):
            rows.append(compare(recording, chosen, live(model, engine, chosen), k, (rules or {}).get(name)))
    return pd.DataFrame(rows)


def kendall(one: ArrayLike, other: ArrayLike) -> NDArray[np.float64]:
    """[...] Kendall's tau-b of scores [..., N], both of the same candidates; 0 where one of them is constant."""
    first, second = np.asarray(one, np.float64), np.asarray(other, np.float64)
    i, j = np.triu_indices(first.shape[-1], 1)
    a, b = np.sign(first[..., i] - first[..., j]), np.sign(second[..., i] - second[..., j])
    untied = np.sqrt((a != 0).sum(-1) * (b != 0).sum(-1))
    return np.asarray((a * b).sum(-1) / np.maximum(untied, 1), np.float64)


# Running models


def dtype() -> torch.dtype:
    """What models are run in here: bfloat16 where this CPU has products for it."""
    return torch.bfloat16 if bfloat16_pays("cpu") else torch.float32


def model_of(spec: str, int8: bool = False) -> Model:
    """A reranker's folder, as `streamable` prepares it."""
    return Model.open(prepare(spec, dtype(), int8))


@contextlib.contextmanager
def opened(spec: str, int8: bool = False, throttle: float | None = None) -> Iterator[tuple[Model, Engine]]:
    """A reranker with its weights streamed, as by default: two layers, a tenth of the embedding rows, chunks of 512."""
    model = model_of(spec, int8)
    streamed = Streamed(model.folder, throttle=throttle)
    with contextlib.closing(streamed):
        weights: Weights = Dequantised(streamed) if int8 else streamed
        yield model, Engine(model.architecture, weights)


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """No progress bars of transformers, which says how far it is even with a few tensors."""
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if bars:
            logging.enable_progress_bar()


# Making them


def record(split: str, models: Sequence[str] = MODELS) -> dict[str, NDArray[Any]]:
    """The arrays of a split. As in training's evaluation: float32 weights, products in bfloat16 where it pays.

    Of the test split also the scores with int8 weights, by the engine.
    """
    from ondevice import models as registry
    from ondevice.precision import mixed_precision
    from ondevice.retrieval.layer_scores import pool_scores
    from ondevice.retrieval.pools import for_evaluation

    pools = for_evaluation(split).pools
    found = places(split, pools)
    for name in models:
        loaded = registry.load(name)
        with mixed_precision("cpu"):
            scores = np.stack(pool_scores(loaded.model, loaded.tokenizer, pools))
        found |= _keyed(name, split, pack(scores))
        if split == "test":
            texts = [Asked(place, pool.query.text, pool.passages) for place, pool in enumerate(pools)]
            with opened(name, int8=True) as (model, engine):
                found |= _keyed(name, INT8, pack(live(model, engine, texts)))
    return found


def places(split: str, pools: Sequence[Pool]) -> dict[str, NDArray[Any]]:
    """What a split's pools are made of, as arrays: relevance, kind, documents, candidates."""
    return _keyed("pools", split, {
        "relevance": np.array([pool.relevant for pool in pools], bool),
        "kind": np.array([pool.query.kind for pool in pools]),
        "documents": np.array([_hash(pool.query.name) for pool in pools], np.uint64),
        "candidates": np.array([[_hash(text) for text in pool.passages] for pool in pools], np.uint64),
    })  # fmt: skip


def save(found: Mapping[str, NDArray[Any]], path: Path) -> None:
    """Write arrays in one step."""
    with assets.writing(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **dict(found))  # type: ignore[arg-type]


def _unpacked(found: Mapping[str, NDArray[Any]], model: str, split: str, int8: bool) -> Recording:
    scores = _only(found, model, INT8 if int8 else split)
    made = _only(found, "pools", split)
    if (int8 and split != "test") or not scores or not made:
        kind = " with int8 weights" if int8 else ""
        raise ValueError(f"{model}{kind} was not recorded on the {split} split; models are {', '.join(MODELS)}.")
    return Recording(
        model, split, Pools(unpack(scores), made["relevance"].astype(np.float64)),
        np.array([SETS[kind] for kind in made["kind"].tolist()]), made["documents"],
        made["candidates"],
    )  # fmt: skip


def _keyed(model: str, split: str, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    return {f"{model}/{split}/{name}": array for name, array in arrays.items()}


def _only(found: Mapping[str, NDArray[Any]], model: str, split: str) -> dict[str, NDArray[Any]]:
    start = f"{model}/{split}/"
    return {name.removeprefix(start): found[name] for name in found if name.startswith(start)}


def _path() -> Path:
    return assets.data("traces", "grating_scores.npz")


@cache
def _file() -> Mapping[str, NDArray[Any]]:
    if not _path().is_file():
        raise FileNotFoundError(f"data/traces/{_path().name} is missing: is this a complete clone of the repository?")
    with np.load(_path()) as kept:
        return {name: kept[name] for name in kept.files}


@cache
def _corpus(split: str) -> tuple[Mapping[int, corpus.Document], Mapping[int, str]]:
    """A split's documents, and the texts of its passages as rerankers read them, by their hashes."""
    from ondevice.retrieval.collection import Collection

    documents = corpus.documents(split)
    texts = Collection.of(documents, corpus.tokenizer()).texts
    return {_hash(document.name): document for document in documents}, {_hash(text): text for text in texts}


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


if __name__ == "__main__":
    commands.no_arguments("python -m ondevice.grating.recordings", __doc__)
    save(record("validation") | record("test"), _path())

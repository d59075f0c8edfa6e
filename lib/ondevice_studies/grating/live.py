"""Recorded pools ranked again by the engine, on weights streamed from disk: what a recording is checked with."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Any

import pandas as pd

from ondevice.evidence import born
from ondevice.models import quiet
from ondevice_papers.grating.architectures import Architecture
from ondevice_papers.grating.embedding_cache import EmbeddingCache
from ondevice_papers.grating.engine import Engine, RunLayer, Select, States, run_layer
from ondevice_papers.grating.hidden_states import Resident
from ondevice_papers.grating.pruning import Rule, select
from ondevice_papers.grating.reading import encode
from ondevice_papers.grating.weights import Streamed
from ondevice_papers.grating.window import Window
from ondevice_programs.reranker import Reranker, loading
from ondevice_programs.reranker.folder import prepare
from ondevice_studies.grating.full_size import BATCH, HF, OURS
from ondevice_studies.grating.questions import QUESTIONS, pools


@contextlib.contextmanager
def opened(
    name: str,
    window: Callable[..., Window] = Window,
    cache: Callable[..., EmbeddingCache] = EmbeddingCache,
    states: States = Resident,
    run_layer: RunLayer = run_layer,
    select: Select = select,
) -> Any:
    """(engine, tokenizer) of a reranker with an own head."""
    folder = prepare(name)
    of = Architecture(loading.configuration(name, folder))
    with contextlib.closing(Streamed(folder, of.part_of, window=window, cache=cache)) as weights:
        made = Engine(of, weights, states=states, run_layer=run_layer, select=select)
        yield made, loading.tokenizer(name, folder)


def outcomes(
    name: str, rules: dict[tuple[int, str], Rule | None], numbers: Iterable[int], **mechanisms: Any
) -> pd.DataFrame:
    """Documentation questions of the test split by a live engine: model, set, k, rule, pool, layer, kept, scores (of
    all layers), hits and misses of the row cache. rules: by K and name. mechanisms: as of `opened`."""
    rows = []
    asked = pools(QUESTIONS, "test")
    with opened(name, **mechanisms) as (engine, tokenizer):
        for number in numbers:
            texts = asked[number].documents
            given = encode(engine.architecture, tokenizer, [asked[number].query] * len(texts), texts).rows
            for (k, rule), made in rules.items():
                outcome = engine.score(given, k, made).outcome
                kept = engine.weights.embeddings
                rows.append({"model": name, "set": QUESTIONS, "k": k, "rule": rule, "pool": number,
                             "layer": outcome.layer, "kept": outcome.kept, "history": outcome.history,
                             "hits": kept.hits, "misses": kept.misses})  # fmt: skip
    return born(pd.DataFrame(rows), "measured")


def small(name: str, rule: Rule | None, k: int, numbers: Iterable[int]) -> pd.DataFrame:
    """What a small model's overhead costs: seconds of transformers (CrossEncoder), of ours, and of ours with pruning,
    in turn: pool, method, seconds."""
    from sentence_transformers import CrossEncoder

    rows, asked, folder = [], pools(QUESTIONS, "test"), prepare(name)
    with quiet():
        plain = CrossEncoder(str(folder), device="cpu")
    with opened(name) as (engine, tokenizer), Reranker(name, calibration=False) as reranker:
        for number in [0, *numbers]:
            query = asked[number].query
            texts = list(asked[number].documents)

            def pruned(query: str = query, texts: list[str] = texts) -> object:
                given = encode(engine.architecture, tokenizer, [query] * len(texts), texts).rows
                return engine.score(given, k, rule)

            ways: dict[str, Callable[[], object]] = {
                HF: lambda query=query, texts=texts: plain.rank(query, texts, batch_size=BATCH),  # type: ignore[misc]
                OURS: lambda query=query, texts=texts: reranker.rank(query, texts),  # type: ignore[misc]
                f"{OURS}, pruned": pruned,
            }
            for method, rank in ways.items():
                began = time.perf_counter()
                rank()
                rows.append({"pool": number, "method": method, "seconds": time.perf_counter() - began})
    return born(pd.DataFrame(rows[len(ways) :]), "measured")  # the first warms up

"""Recorded pools ranked again by the engine, on weights streamed from disk: what a recording is checked with."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ondevice.evidence import born
from ondevice.models import quiet
from ondevice.retrieval.texts import digest
from ondevice_papers.grating.architectures import Architecture
from ondevice_papers.grating.embedding_cache import EmbeddingCache
from ondevice_papers.grating.engine import Engine, RunLayer, Select, States, run_layer
from ondevice_papers.grating.hidden_states import Resident
from ondevice_papers.grating.pruning import Rule, select
from ondevice_papers.grating.reading import TextPair, encode
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
    with contextlib.closing(Streamed(folder, of.part_of, units=of.units, window=window, cache=cache)) as weights:
        made = Engine(of, weights, states=states, run_layer=run_layer, select=select)
        yield made, loading.tokenizer(name, folder)


def form(engine: Engine, tokenizer: Any) -> TextPair:
    """How the bundled rerankers read pairs."""
    return TextPair(tokenizer, min(int(tokenizer.model_max_length), engine.architecture.longest))


def units(scores: pd.DataFrame, found: pd.DataFrame) -> pd.DataFrame:
    """The rows of `study.outcomes` that a sample may have, with a name, `unit`, and the `characters` of a pool.

    scores: the record. With other versions of the corpus's packages a pool's candidates may differ from the recorded
    ones, and no sample has it.
    """
    test = scores[scores["split"] == "test"]
    recorded = set(zip(test["set"], test["pool"], test["candidates_sha"], strict=True))
    rows = [
        (set_, number, sum(map(len, asked.documents)))
        for set_ in found["set"].unique()
        for number, asked in enumerate(pools(set_, "test"))
        if (set_, number, digest(asked.documents)[:12]) in recorded
    ]
    table = found.merge(pd.DataFrame(rows, columns=["set", "pool", "characters"]), on=["set", "pool"])
    return table.assign(unit=table["set"] + ", K = " + table["k"].astype(str) + ", pool " + table["pool"].astype(str))


def outcomes(name: str, runs: pd.DataFrame, rules: Sequence[Rule | None], **mechanisms: Any) -> pd.DataFrame:
    """Test pools ranked one after the other by one live engine: model, set, k, rule, pool, layer, kept, history.

    runs: set, k, rule and pool of each. rules: their rules. mechanisms: as of `opened`. history: scores after all
    layers. hits, misses: of the cache of embedding rows, which lasts from pool to pool, up to this one. due: hits that
    it has at least, if it forgets no row (`due`).
    """
    rows = []
    requests = list[set[int]]()
    with opened(name, **mechanisms) as (engine, tokenizer):
        embeddings = engine.weights.embeddings
        fetch = embeddings.fetch

        def noted(wanted: NDArray[np.int64]) -> None:
            requests.append(set(wanted.tolist()))
            fetch(wanted)

        embeddings.fetch = noted
        run: Any
        for run, rule in zip(runs.itertuples(), rules, strict=True):
            asked = pools(run.set, "test")[run.pool]
            given = encode(form(engine, tokenizer), [asked.query] * len(asked.documents), asked.documents).rows
            outcome = engine.score(given, run.k, rule).outcome
            rows.append({"model": name, "set": run.set, "k": run.k, "rule": run.rule, "pool": run.pool,
                         "layer": outcome.layer, "kept": outcome.kept, "history": outcome.history,
                         "hits": embeddings.hits, "misses": embeddings.misses,
                         "due": due(requests, embeddings.capacity)})  # fmt: skip
    return born(pd.DataFrame(rows), "measured")


def due(requests: Sequence[set[int]], capacity: int) -> int:
    """Rows that a cache has to find: those for which, since their last request, no more were asked than it holds."""
    total = 0
    for number, wanted in enumerate(requests):
        left = set(wanted)
        since = set[int]()
        for earlier in reversed(requests[:number]):
            since |= earlier
            if len(since) > capacity:
                break
            total += len(left & earlier)
            left -= earlier
    return total


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
                given = encode(form(engine, tokenizer), [query] * len(texts), texts).rows
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

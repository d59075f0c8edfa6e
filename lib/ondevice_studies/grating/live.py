"""Pools ranked live by the engine, on weights streamed from disk, and the tables behind the figures of Part I."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from ondevice.corpus.pairs import Row
from ondevice.evidence import born, derived, mean
from ondevice.retrieval.texts import digest
from ondevice.run.edits import compared
from ondevice_papers.grating.architectures import Architecture
from ondevice_papers.grating.embedding_cache import EmbeddingCache
from ondevice_papers.grating.engine import Engine, RunLayer, Select, States, run_layer
from ondevice_papers.grating.hidden_states import Resident
from ondevice_papers.grating.pools import Pool
from ondevice_papers.grating.pruning import Rule, select
from ondevice_papers.grating.weights import Streamed
from ondevice_papers.grating.window import WeightWindow
from ondevice_programs.reranker import loading
from ondevice_programs.reranker.folder import folders
from ondevice_programs.reranker.reading import Form, encode
from ondevice_studies.grating.sets import QueryPool, pools


@contextlib.contextmanager
def opened(
    spec: str,
    window: Callable[..., WeightWindow] = WeightWindow,
    cache: Callable[..., EmbeddingCache] = EmbeddingCache,
    states: States = Resident,
    run_layer: RunLayer = run_layer,
    select: Select = select,
    **streaming: Any,
) -> Iterator[tuple[Any, Form]]:
    """The engine of any reranker that `Reranker` takes, and its form of pairs. streaming: of `Streamed`."""
    there = folders(spec)
    config, tokenizer = loading.configuration(spec, there.weights), loading.tokenizer(spec, there.tokenizer)
    scoring = loading.scoring(spec, there.settings, config, tokenizer)
    architecture = Architecture(config, scoring.answers)
    most = min(architecture.longest, scoring.limit or int(tokenizer.model_max_length))
    form = scoring.form(tokenizer, most, scoring.prompts.get(scoring.default or ""))
    streamed = Streamed(
        there.weights, architecture.part_of, units=architecture.units, window=window, cache=cache, **streaming
    )
    with contextlib.closing(streamed) as weights:
        yield Engine(architecture, weights, states=states, run_layer=run_layer, select=select), form


def pairs(form: Form, question: QueryPool) -> list[Row]:
    """A question's pairs with its candidates."""
    return encode(form, [question.query] * len(question.documents), question.documents).rows


def means(
    samples: Mapping[tuple[Any, ...], Sequence[float] | NDArray[np.float64]], names: Sequence[str], kind: Any
) -> pd.DataFrame:
    """The mean of each sample of queries with its interval: their labels in columns `names`, then value, low, high."""
    rows = []
    for labels, values in samples.items():
        estimate = mean([float(value) for value in values], kind, drawn="pools")
        rows.append((*labels, estimate.value, estimate.low, estimate.high))
    return derived(pd.DataFrame(rows, columns=[*names, "value", "low", "high"]), kind)


def beside(both: Mapping[str, Mapping[tuple[Any, ...], Any]], names: Sequence[str], kind: Any) -> pd.DataFrame:
    """`means` of a display, and of an edit of it (`Edits.both`) with the paired difference."""
    return compared(
        both,
        lambda samples: means(samples, names, kind),
        lambda shipped, yours: mean((np.asarray(yours, float) - shipped).tolist(), kind, drawn="pools"),
    )


def scored(spec: str, set_: str, numbers: Iterable[int]) -> list[Pool]:
    """Test pools of a set with a reranker's scores after every layer, which the engine computes now.

    spec: of any reranker that `Reranker` takes.
    """
    questions = [pools(set_, "test")[number] for number in numbers]
    with opened(spec) as (engine, form):
        histories = [engine.score(pairs(form, question)).outcome.history for question in questions]
    return [
        Pool(question.name, "test", history, question.relevant)
        for question, history in zip(questions, histories, strict=True)
    ]


def hits(cache: Callable[..., EmbeddingCache], name: str, set_: str, count: int, capacity: int) -> list[float]:
    """Of each of the first test pools the share of its distinct embedding rows that the cache has, one after another.

    capacity: rows that memory holds.
    """
    shares = []
    with opened(name, cache=cache, embedding_rows=capacity) as (engine, form):
        embeddings = engine.weights.embeddings
        for question in pools(set_, "test")[:count]:
            before = embeddings.hits, embeddings.misses
            tokens = [token for row in pairs(form, question) for token in row.ids]
            engine.weights.rows(torch.tensor(tokens))
            new_hits, new_misses = embeddings.hits - before[0], embeddings.misses - before[1]
            shares.append(new_hits / (new_hits + new_misses))
    return shares


def units(scores: pd.DataFrame, outcomes: pd.DataFrame) -> pd.DataFrame:
    """The rows of `study.outcomes` that a sample may have, with a name, `unit`, and the `characters` of a pool.

    scores: the record. With other versions of the corpus's packages a pool's candidates may differ from the recorded
    ones, and no sample has it.
    """
    test = scores[scores["split"] == "test"]
    recorded = set(zip(test["set"], test["pool"], test["candidates_sha"], strict=True))
    rows = [
        (set_, number, sum(map(len, question.documents)))
        for set_ in outcomes["set"].unique()
        for number, question in enumerate(pools(set_, "test"))
        if (set_, number, digest(question.documents)[:12]) in recorded
    ]
    table = outcomes.merge(pd.DataFrame(rows, columns=["set", "pool", "characters"]), on=["set", "pool"])
    return table.assign(unit=table["set"] + ", K = " + table["k"].astype(str) + ", pool " + table["pool"].astype(str))


def outcomes(name: str, runs: pd.DataFrame, rules: Sequence[Rule | None], **mechanisms: Any) -> pd.DataFrame:
    """Test pools ranked one after the other by one live engine: model, set, k, rule, pool, layer, kept, history.

    runs: set, k, rule and pool of each. rules: their rules. mechanisms: as of `opened`. history: scores after all
    layers. hits, misses: of the cache of embedding rows, which lasts from pool to pool, up to this one. due: hits that
    it has at least, if it forgets no row (`due`).
    """
    ranked = []
    requests = list[set[int]]()
    with opened(name, **mechanisms) as (engine, form):
        embeddings = engine.weights.embeddings
        fetch = embeddings.fetch

        def noted(wanted: NDArray[np.int64]) -> None:
            requests.append(set(wanted.tolist()))
            fetch(wanted)

        embeddings.fetch = noted
        run: Any
        for run, rule in zip(runs.itertuples(), rules, strict=True):
            outcome = engine.score(pairs(form, pools(run.set, "test")[run.pool]), run.k, rule).outcome
            ranked.append({"model": name, "set": run.set, "k": run.k, "rule": run.rule, "pool": run.pool,
                           "layer": outcome.layer, "kept": outcome.kept, "history": outcome.history,
                           "hits": embeddings.hits, "misses": embeddings.misses,
                           "due": due(requests, embeddings.capacity)})  # fmt: skip
    return born(pd.DataFrame(ranked), "measured")


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

"""Retrieval-augmented answering (section 6.3, Figure 11) on the documentation corpus, and Figure 1's pipeline.

A question on a parameter or a return value; keyword and embedding search over all passages of the test split, ten
candidates of each; a reranker keeps K; a language model answers from them. Questions are about modules that the bundled
rerankers were not trained on. In the paper K is 10 and the model has 32B parameters; ours was trained on prompts of two
or three passages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from ondevice import corpus
from ondevice.corpus import answers
from ondevice.corpus.modules import held_out, modules
from ondevice.corpus.prompts import pick
from ondevice.grating import applications
from ondevice.grating.applications import ANSWER, EMBEDDING, KEYWORDS, RERANKER, Found, Methods, Search, Tables, Write
from ondevice.grating.calibration import interval
from ondevice.grating.printed import HF, NONE, RAG
from ondevice.grating.pruning import ClusterRule
from ondevice.grating.recordings import QUESTIONS, Recording
from ondevice.grating.trade_offs import at
from ondevice.retrieval.collection import LENGTH

KEPT = 2  # passages that the language model reads; of more of one document, pydocs-lm-base confuses parameters


@dataclass(frozen=True)
class Library:
    """Passages with their indexes. texts: title, line break, text. by_title: places of a document's passages."""

    passages: Sequence[corpus.Passage]
    search: Search
    by_title: Mapping[str, Sequence[int]]

    @classmethod
    def of(cls, documents: Sequence[corpus.Document]) -> Library:
        """Cut documents into passages and index them. Raises ValueError when there are none."""
        passages = corpus.passages(documents, corpus.tokenizer(), LENGTH)
        titles: dict[str, list[int]] = {}
        for place, passage in enumerate(passages):
            titles.setdefault(passage.title, []).append(place)
        return cls(passages, Search([f"{passage.title}\n{passage.text}" for passage in passages]), titles)

    def relevant(self, task: corpus.Task) -> set[int]:
        """Places of the passages of a question's document that hold its answer."""
        places = self.by_title.get(task.name, [])
        right = applications.right([self.passages[place].text for place in places], task.answer)
        return {place for place, holds in zip(places, right, strict=True) if holds}


def questions(library: Library, documents: Sequence[corpus.Document], count: int) -> list[corpus.Task]:
    """Questions that one passage answers whole, about modules that no reranker was trained on, in an order set by hash.

    documents: of the library. Their own passages are dropped: what is read must be found. Raises ValueError where
    there are fewer.
    """
    applications.check(count, 1)
    everything = (document for split in corpus.SPLITS for document in corpus.documents(split))
    module_of = modules([*everything, *documents])
    tasks = sorted(corpus.tasks(documents, ["rag"]), key=lambda task: pick(task.name, "grating rag", 2**62))
    fit = (task for task in tasks if held_out(module_of[task.name]) and library.relevant(task))
    found = [dataclasses.replace(task, passages=()) for task, _ in zip(fit, range(count), strict=False)]
    if len(found) < count:
        raise ValueError(f"The documents have {len(found)} questions that a passage answers, not {count}.")
    return found


def answering(
    library: Library, tasks: Sequence[corpus.Task], rerankers: Mapping[str, Methods], write: Write, k: int = KEPT,
    each: int = 10,
) -> Tables:  # fmt: skip
    """Answer every question with every method of every reranker, and with the search's own first K.

    tasks: of `questions`. rerankers: `applications.methods` by name. each: candidates of either search.
    times: parts keyword search, embedding search, reranker, answer. precision: passages with the answer among the K,
    out of min(K, all that there are): what search missed counts as missed. cases: also answered (the reference's words,
    or nearly), f1 (over words), first (whether the best passage holds the answer; of `no reranker` that of the merged
    lists), candidates, chosen (places). The chosen go to the model in the search's order: the same ones make the same
    prompt.
    """
    applications.check(len(tasks), k)
    cases: list[dict[str, Any]] = []
    for number, task in enumerate([tasks[0], *tasks]):
        found = library.search(task.turns[-1][0], each)
        for setting, methods in rerankers.items():
            for method, chosen, spent in _chosen(library, task, found, methods, number, k):
                case = _case(library, task, found, chosen, k, write)
                case["seconds"] = found.seconds | spent | {ANSWER: case["seconds"]}
                cases += [{"setting": setting, "method": method, **case}] if number else []  # 0 warms up
    return applications.tables(RAG, cases)


def _chosen(
    library: Library, task: corpus.Task, found: Found, methods: Methods, number: int, k: int
) -> Iterator[tuple[str, list[int], dict[str, float]]]:
    """(method, places of the K best, best first, seconds of the reranker)."""
    texts = [library.search.texts[place] for place in found.places]
    for method, rank in applications.turns(methods, number):
        best, seconds = applications.timed(rank, task.turns[-1][0], texts, min(k, len(texts)))
        yield method, [found.places[place] for place, _ in best], {RERANKER: seconds}
    yield NONE, found.places[:k], {}


def _case(library: Library, task: corpus.Task, found: Found, chosen: list[int], k: int, write: Write) -> dict[str, Any]:
    relevant = library.relevant(task)
    read = sorted(chosen, key=found.places.index)
    shown = tuple((library.passages[place].title, library.passages[place].text) for place in read)
    text, seconds = write(dataclasses.replace(task, passages=shown).prompt)
    return {
        "question": task.name, "precision": len(relevant & set(chosen)) / min(k, len(relevant)),
        "answered": answers.hit(text, task.answer), "f1": answers.f1(text, task.answer),
        "first": chosen[0] in relevant, "candidates": len(found.places), "chosen": read, "seconds": seconds,
    }  # fmt: skip


def replayed(recordings: Iterable[Recording], rules: Mapping[str, ClusterRule], k: int = KEPT) -> pd.DataFrame:
    """What pruning does to the K passages that are read, on all recorded pools of documentation questions.

    rules: of the rerankers, by name. Rows [setting, full, pruned, change, low, high, same, pools]: Precision@K of the
    full model and of GRATING, the change with its 95 % interval over pools, and the share of pools in which both keep
    the same passages, so that the same answer is written. Each pool has a relevant candidate: no loss hides behind what
    search missed. Raises ValueError on a reranker without a recording.
    """
    kept, rows = {one.model: one.of(QUESTIONS) for one in recordings}, []
    for name, rule in rules.items():
        if name not in kept:
            raise ValueError(f"There is no recording of {name}.")
        found = at(kept[name], k, rule)
        change = found.precision - found.full
        span, same = interval(change), found.overlap == 1
        rows.append((name, found.full.mean(), found.precision.mean(), span.mean, span.low, span.high, same.mean(),
                     len(change)))  # fmt: skip
    return pd.DataFrame(rows, columns=["setting", "full", "pruned", "change", "low", "high", "same", "pools"])


def pipeline(times: pd.DataFrame, setting: str, peaks: Mapping[str, float]) -> pd.DataFrame:
    """Figure 1: rows [stage, latency_ms, peak_mb] of the two searches and the reranker with transformers in memory.

    times: of `answering`. peaks: MB of each stage by name, of `applications.stage_peaks`.
    Raises ValueError on a setting or stage that is not there.
    """
    rows = times[(times["setting"] == setting) & (times["method"] == HF)].set_index("part")["seconds"]
    stages = [KEYWORDS, EMBEDDING, RERANKER]
    missing = [stage for stage in stages if stage not in rows.index or stage not in peaks]
    if missing:
        raise ValueError(f"There is no time or no peak of {missing[0]!r} with {setting}.")
    return pd.DataFrame([(stage, 1e3 * rows[stage], peaks[stage]) for stage in stages],
                        columns=["stage", "latency_ms", "peak_mb"])  # fmt: skip

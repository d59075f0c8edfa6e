"""Figure 3: how alike the answers of a task, of a task group and of all groups are, and an answer and its context."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ondevice import retrieval

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ondevice_studies.speculation.request_set import Request

GRAM = 4  # tokens


def of_answers(requests: Sequence[Request], model: str, tokenizer: PreTrainedTokenizerBase) -> pd.DataFrame:
    """Figure 3a: cosines of pairs of answers, a row a pair: model, pair, first, second, cosine.

    The paper takes four groups of UI tasks: answers within one task, within a group, and across groups. Our group is a
    family of requests, which share a template, and have a history in common when they are drafted. None of the families
    asks twice about a document, so that the same task is never set twice; what comes nearest to it stands for it:
    task: each answer and the one whose context is nearest to its own in the family, a pair counted once;
    group: all other pairs of a family;
    across: pairs of different families, but for two questions about the same document, which are in neither relation.
    Nearest is by the cosine of the contexts; the answers have no part in it. With more requests a family it is nearer.

    first, second: the requests, as family and place in it. Texts are embedded by all-MiniLM-L6-v2, as in the paper; it
    reads the first 256 of its tokens, of a context too.
    """
    families = [request.task for request in requests]
    contexts, answers = _vectors(requests, tokenizer)
    nearest = _nearest(contexts @ contexts.T, families)
    cosines = answers @ answers.T
    rows = []
    for i, j in combinations(range(len(requests)), 2):
        pair = "across" if families[i] != families[j] else "task" if nearest[i] == j or nearest[j] == i else "group"
        if pair != "across" or requests[i].name != requests[j].name:
            rows.append((model, pair, _named(requests[i]), _named(requests[j]), float(np.clip(cosines[i, j], -1, 1))))
    return pd.DataFrame(rows, columns=["model", "pair", "first", "second", "cosine"])


def of_contexts(requests: Sequence[Request], model: str, tokenizer: PreTrainedTokenizerBase, task: str) -> pd.DataFrame:
    """Figure 3b: how alike a family's answers and contexts are: model, task, prompt, cosine, other, overlap, distance.

    cosine: of their embeddings, as in `of_answers`. A context is the whole prompt, the few words that ask included.
    other: the same with the context of the family's next request.
    distance: Levenshtein's on tokens of the model, over the longer text's length, so at least 1 less the ratio of their
    lengths, however much is copied. overlap: 1 less the distance; the paper's "low lexical overlap (> 0.11)" reads as
    this, while its section 2.3 calls the same number a distance.
    """
    family = [request for request in requests if request.task == task]
    contexts, answers = _vectors(family, tokenizer)
    cosines, others = (np.clip((rows * answers).sum(1), -1, 1) for rows in (contexts, np.roll(contexts, -1, 0)))
    special = set(tokenizer.all_special_ids)
    rows = []
    for request, cosine, other in zip(family, cosines, others, strict=True):
        far = distance(*([token for token in ids if token not in special] for ids in (request.ids, request.answer)))
        rows.append((model, task, request.prompt, float(cosine), float(other), 1 - far, far))
    return pd.DataFrame(rows, columns=["model", "task", "prompt", "cosine", "other", "overlap", "distance"])


def copied(requests: Sequence[Request], model: str) -> pd.DataFrame:
    """Share of the answers' 4-grams of tokens that stand in their own contexts: model, task, copied, grams.

    Over all 4-grams of a family, as they come in the answers; NaN where there is none.
    """
    hits: dict[str, list[bool]] = {}
    for request in requests:
        context = set(_grams(request.ids))
        hits.setdefault(request.task, []).extend(gram in context for gram in _grams(request.answer))
    rows = [(model, task, float(np.mean(copies)) if copies else np.nan, len(copies)) for task, copies in hits.items()]
    return pd.DataFrame(rows, columns=["model", "task", "copied", "grams"])


def distance(first: Sequence[int], second: Sequence[int]) -> float:
    """Levenshtein's distance over the longer length: 0 for equal texts, two empty ones too; 1 where nothing is kept."""
    if not first or not second:
        return float(len(first) != len(second))
    tokens = np.asarray(second)
    columns = np.arange(1 + len(second))
    row = columns  # edits from the first i tokens of one text to the first j of the other
    for i, token in enumerate(first, 1):
        kept = np.minimum(row[:-1] + (tokens != token), row[1:] + 1)
        # The edits also grow by 1 to the right: of all on the left, the least counted from there.
        row = np.minimum.accumulate(np.concatenate([[i], kept]) - columns) + columns
    return float(row[-1]) / max(len(first), len(second))


def _vectors(
    requests: Sequence[Request], tokenizer: PreTrainedTokenizerBase
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Unit vectors [n, d] of the contexts, and of the answers."""
    rows = [ids for request in requests for ids in (request.ids, request.answer)]
    texts = [str(tokenizer.decode(list(ids), skip_special_tokens=True)) for ids in rows]
    vectors = retrieval.embedder()(texts)
    return vectors[::2], vectors[1::2]


def _nearest(cosines: NDArray[np.float32], families: Sequence[str]) -> list[int]:
    """For every request, the other one of its family with the highest cosine, the first of equals."""
    group = np.array(families)
    allowed = (group[:, None] == group) & ~np.eye(len(group), dtype=bool)
    return [int(index) for index in np.where(allowed, cosines, -np.inf).argmax(1)]


def _named(request: Request) -> str:
    return f"{request.task} {request.prompt}"


def _grams(ids: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(ids[end - GRAM : end]) for end in range(GRAM, len(ids) + 1)]

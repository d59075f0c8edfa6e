"""Figure 6: how well a text is predicted with retrieved documents, by each way of putting documents and model together.

The distribution of every document alone is computed once for a window. All that mixes distributions (DRAGON, one side
alone, RAG-Sequence) follows from it for any number of documents; what puts documents side by side in one context (CRCG,
DRCG) needs forwards of its own.

One document stands before the text as in the training of the bundled models: end token, passage marker, title, text,
document marker, text to continue. Several documents are so many passages before one document marker. Without documents
the text follows the end token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.special import logsumexp

from ondevice import corpus
from ondevice.causal_lm.scoring import score
from ondevice.corpus.prompts import DOCUMENT, END, PASSAGE, pick
from ondevice.retrieval import SparseIndex
from ondevice_papers.dragon import codec
from ondevice_papers.dragon.aggregation import Floats, document_weights, log_weight, target

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

COUNTS = (2, 4, 6, 8, 10, 12, 14, 16)  # documents of both sides together
CAPS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)  # bytes a distribution
BUDGET = 256  # tokens of documents in one context (section 6.2)
TEMPERATURES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)  # for BM25, whose scores are sums over words, tens in size

NONE, DRAGON, WHOLE, SEQUENCE = "no retrieval", "DRAGON", "DRAGON, uncut", "RAG-Sequence"
CLOUD, DEVICE, DRCG = "CRCG/Cloud", "CRCG/Device", "DRCG"
CLOUD_OUTPUT = "CRCG/Cloud, output"
UNCUT, EQUAL = "DRCG, uncut", "DRCG, equal compute"
PRINTED = (CLOUD, DEVICE, DRCG)  # the paper's baselines


# What is scored: windows that roll over held-out texts, each with the passages found for it


@dataclass(frozen=True)
class Window:
    """A stretch of a text. text: of the query, which passages are looked up with. query, scored: ids, one after the
    other. start: of the scored ones in the text's ids."""

    name: str
    start: int
    text: str
    query: tuple[int, ...]
    scored: tuple[int, ...]


@dataclass(frozen=True)
class Retrieved:
    """A window with its K passages, best first: all of them, and the relevance of each, scores [K]."""

    window: Window
    passages: tuple[corpus.Passage, ...]
    scores: Floats


def windows(
    documents: Iterable[corpus.Document],
    tokenizer: PreTrainedTokenizerBase,
    count: int | None = None,
    *,
    query: int = 32,
    scored: int = 64,
) -> list[Window]:
    """The first `count` windows, or all, in an order set by a hash of the document's name and the place.

    In each the first `query` ids are given and the next `scored` are predicted (section 6.1: the first 1/8 of 512 or
    1,024 tokens is the query). A document's windows begin every `scored` tokens, so that none is scored twice; its
    first `query` ids and what is left at its end are not scored.
    Raises ValueError on lengths below 1, and where there are fewer windows than `count`.
    """
    if query < 1 or scored < 1:
        raise ValueError(f"A window has at least one token of query and one that is scored, not {query} and {scored}.")
    if count is not None and count < 1:
        raise ValueError(f"At least one window is scored, not {count}.")
    rolled = [window for document in documents for window in _rolled(document, tokenizer, query, scored)]
    if not rolled or (count or 0) > len(rolled):
        raise ValueError(f"The texts have {len(rolled)} windows of {query} + {scored} tokens, not {count or 1}.")
    rolled.sort(
        key=lambda window: (pick(f"{window.name} {window.start}", "dragon window", 2**62), window.name, window.start)
    )
    return rolled[:count]


def retrieve(
    windows: Sequence[Window], passages: Sequence[corpus.Passage], index: SparseIndex, count: int = 16
) -> list[Retrieved]:
    """The `count` passages of the index nearest to each window's query.

    Raises ValueError where the index is not over these passages, or has fewer.
    """
    if index.size != len(passages):
        raise ValueError(f"The index has {index.size} texts, but there are {len(passages)} passages.")
    scores, indices = index.search([window.text for window in windows], count)
    return [
        Retrieved(window, tuple(passages[position] for position in row), np.asarray(relevance, float))
        for window, row, relevance in zip(windows, indices, scores, strict=True)
    ]


def _rolled(document: corpus.Document, tokenizer: PreTrainedTokenizerBase, query: int, scored: int) -> list[Window]:
    ids = list(tokenizer(document.text, add_special_tokens=False, verbose=False).input_ids)
    rolled = []
    for start in range(query, len(ids) - scored + 1, scored):
        given = ids[start - query : start]
        text = str(tokenizer.decode(given))
        rolled.append(Window(document.name, start, text, tuple(given), tuple(ids[start : start + scored])))
    return rolled


# The distributions


@dataclass(frozen=True)
class Read:
    """What the model says of a window's n tokens, first without documents, then after each of its K documents alone.

    log_probs: [1 + K, n] of the tokens. whole: [1 + K, n, V] float32 probabilities. tokens: [n]. scores: [K], best
    first. size: [1 + K] tokens that the model read.
    """

    log_probs: Floats
    whole: np.ndarray
    tokens: np.ndarray
    scores: Floats
    size: np.ndarray


# Methods: nats of a window


def token_wise(read: Read, documents: slice, temperature: float) -> float:
    """Eq. 2: the distributions of these documents are mixed at each token."""
    weights = document_weights(read.scores[documents], temperature)
    return -float(logsumexp(weights[:, None] + read.log_probs[1:][documents], axis=0).sum())


def sequence_wise(read: Read, documents: slice, temperature: float) -> float:
    """RAG-Sequence: the likelihoods of the whole window are mixed."""
    weights = document_weights(read.scores[documents], temperature)
    return -float(logsumexp(weights + read.log_probs[1:][documents].sum(axis=1)))


def mixture_after_codec(read: Read, documents: slice, temperature: float, cap: int) -> Floats:
    """[n, V] what the other side takes for this side's mixture: `cap` bytes, and its own prior for what they lack."""
    weights = np.exp(document_weights(read.scores[documents], temperature))
    mixed = np.tensordot(weights, read.whole[1:][documents].astype(float), axes=1)
    both = zip(mixed / mixed.sum(-1, keepdims=True), normalised(read.whole[0]), strict=True)
    return np.stack([codec.filled(codec.encode(p, cap, prior), prior) for p, prior in both])


def live(read: Read, count: int, temperature: float, cap: int = codec.CAP) -> float:
    """DRAGON as it runs (Eq. 4): the cloud has the first half of the documents, the device the second."""
    halves = slice(count // 2), slice(count // 2, count)
    p_cloud, p_device = (mixture_after_codec(read, half, temperature, cap) for half in halves)
    heights = [log_weight(read.scores[half], temperature) for half in halves]
    pairs = zip(p_cloud, p_device, read.tokens, strict=True)
    return -float(sum(np.log(target(cloud, device, *heights)[token]) for cloud, device, token in pairs))


def methods(
    model: PreTrainedModel,
    fronts: Fronts,
    retrieval: Retrieved,
    temperature: float,
    counts: Sequence[int] = COUNTS,
    caps: Sequence[int] = (codec.CAP,),
    live: Callable[..., float] = live,
    token_wise: Callable[..., float] = token_wise,
    sequence_wise: Callable[..., float] = sequence_wise,
) -> Iterator[tuple[str, int, int, float, int]]:
    """Every method on a window: (method, documents, bytes of the cap or 0, nats, tokens that the model read).

    caps: of `DRAGON` at the greatest count; at the others it has the system's. live, token_wise, sequence_wise: the
    functions above, or an experiment's. With n documents:

    - `DRAGON`: the system that runs. `DRAGON, uncut`: all n distributions mixed, as they are.
    - `CRCG/Cloud, output`: those of the cloud's half. `RAG-Sequence`: the window's n likelihoods mixed.
    - `CRCG/Cloud`, `CRCG/Device`, `DRCG`: the first half, the second, or all, in one context cut after BUDGET tokens.
    - `DRCG, uncut`: all n in one context, cut only where the model's context ends, best last.
    - `DRCG, equal compute`: as many tokens read as DRAGON reads, from all documents of the window, best last.
    """
    read = read_window(model, fronts, retrieval)
    yield NONE, 0, 0, -float(read.log_probs[0].sum()), int(read.size[0])
    for n in counts:
        every, cloud = slice(n), slice(n // 2)
        all_read, cloud_read = (int(read.size[1:][part].sum()) for part in (every, cloud))
        for cap in caps if n == max(counts) else (codec.CAP,):
            yield DRAGON, n, cap, live(read, n, temperature, cap), int(read.size[0]) + all_read
        yield WHOLE, n, 0, token_wise(read, every, temperature), all_read
        yield CLOUD_OUTPUT, n, 0, token_wise(read, cloud, temperature), cloud_read
        yield SEQUENCE, n, 0, sequence_wise(read, every, temperature), all_read
        contexts = fronts.contexts(retrieval, n, all_read)
        prefixes = [[*front, *retrieval.window.query] for front in contexts.values()]
        scores = score(model, prefixes, [retrieval.window.scored] * len(prefixes))
        for method, prefix, scored in zip(contexts, prefixes, scores, strict=True):
            yield method, n, 0, scored.loss, len(prefix) + len(retrieval.window.scored)


# Contexts and forwards


class Fronts:
    """Ids of what stands before a window, in the format of the bundled models.

    Raises ValueError on a tokenizer that has not the markers of the documentation corpus.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        vocabulary = tokenizer.get_vocab()
        missing = [marker for marker in (END, PASSAGE, DOCUMENT) if marker not in vocabulary]
        if missing:
            raise ValueError(f"Documents are shown as to the bundled models; this tokenizer has no {missing[0]}.")
        self.tokenizer = tokenizer
        self.context = int(model.config.max_position_embeddings)
        self._end = vocabulary[END]
        self._document = vocabulary[DOCUMENT]

    def front(
        self, passages: Sequence[corpus.Passage], budget: int | None = None, *, best_last: bool = False
    ) -> list[int]:
        """Ids before a window; of the passages' at most `budget`, those of the best ones."""
        if not passages:
            return [self._end]
        parts = list[list[int]]()
        left = self.context if budget is None else budget
        for passage in passages:
            text = f"{PASSAGE}{passage.title}\n{passage.text}"
            parts.append(list(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)[:left])
            left -= len(parts[-1])
        shown = reversed(parts) if best_last else parts
        return [self._end, *(token for part in shown for token in part), self._document]

    def contexts(self, retrieval: Retrieved, n: int, read: int) -> dict[str, list[int]]:
        """The ids before the window of each method with one context. read: tokens that DRAGON reads of n documents."""
        given = len(retrieval.window.query) + len(retrieval.window.scored) + len((self._end, self._document))
        room = self.context - given
        every = retrieval.passages[:n]
        least = min(BUDGET, room)
        return {
            CLOUD: self.front(retrieval.passages[: n // 2], least),
            DEVICE: self.front(retrieval.passages[n // 2 : n], least),
            DRCG: self.front(every, least),
            UNCUT: self.front(every, room, best_last=True),
            EQUAL: self.front(retrieval.passages, min(room, read - given), best_last=True),
        }


@torch.inference_mode()
def read_window(model: PreTrainedModel, fronts: Fronts, retrieval: Retrieved) -> Read:
    """A window without documents and after each of its documents, in one forward.

    Raises ValueError where a document and the window do not fit into the model's context.
    """
    rows = [
        [*fronts.front(shown), *retrieval.window.query]
        for shown in ([], *([passage] for passage in retrieval.passages))
    ]
    scored = retrieval.window.scored
    lengths = [len(row) for row in rows]
    n = len(scored)
    if max(lengths) + n > fronts.context:
        taken = max(lengths) + n
        raise ValueError(f"A document and a window take {taken} tokens, more than the context of {fronts.context}.")
    ids = torch.zeros(len(rows), max(lengths) + n, dtype=torch.long)
    for index, row in enumerate(rows):  # padded on the right, where a causal model does not look
        ids[index, : len(row) + n] = torch.tensor([*row, *scored])
    first = min(lengths) - 1  # logits before it are of no use
    logits = model(input_ids=ids.to(model.device), use_cache=False, logits_to_keep=ids.shape[1] - first).logits
    chosen = [logits[index, size - 1 - first : size - 1 - first + n] for index, size in enumerate(lengths)]
    all_log_probs = torch.stack(chosen).float().log_softmax(-1).cpu()
    log_probs = all_log_probs[:, torch.arange(n), torch.tensor(scored)].double().numpy()
    return Read(log_probs, all_log_probs.exp().numpy(), np.array(scored), retrieval.scores, np.array(lengths) + n)


def normalised(p: np.ndarray) -> Floats:
    """[.., V] float32 probabilities whose sums are 1 in float64."""
    return p.astype(float) / p.astype(float).sum(-1, keepdims=True)

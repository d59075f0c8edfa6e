"""Figure 6: how well a text is predicted with retrieved documents, by each way of putting documents and model together.

Texts are WikiText-2's. Of each article every second paragraph is searched, and one of the others is predicted, so no
text is found in itself. The distribution of every document alone is computed once for a window. All that mixes
distributions (DRAGON, one side alone, RAG-Sequence) follows from it for any number of documents; what puts documents
side by side in one context (CRCG, DRCG) needs forwards of its own.

A document is a title, a line break, a passage and an empty line; the text to continue follows the documents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.special import logsumexp

from ondevice.causal_lm.scoring import score
from ondevice.corpus import Passage, wikitext
from ondevice.corpus.prompts import pick
from ondevice.retrieval import SparseIndex
from ondevice_papers.dragon import codec
from ondevice_papers.dragon.aggregation import Floats, document_weights, log_weight, target

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

COUNTS = (2, 4, 6, 8, 10, 12, 14, 16)  # documents of both sides together
UNCUT_COUNTS = (4, 16)  # at which claim c07 compares
CAPS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)  # bytes a distribution
BUDGET = 256  # tokens of documents in one context (section 6.2)
TEMPERATURES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)  # for BM25, whose scores are sums over words, tens in size
QUERY, SCORED = 32, 64  # tokens of a window (section 6.1: the first 1/8 of 512 or 1,024 tokens is the query)
WORDS = 48  # of a passage, which are about 64 tokens

NONE, DRAGON, WHOLE, SEQUENCE = "no retrieval", "DRAGON", "DRAGON, uncut", "RAG-Sequence"
CLOUD, DEVICE, DRCG = "CRCG/Cloud", "CRCG/Device", "DRCG"
CLOUD_OUTPUT = "CRCG/Cloud, output"
UNCUT, GROUPED = "DRCG, uncut", "DRAGON, a context a side"
PRINTED = (CLOUD, DEVICE, DRCG)  # the paper's baselines


# What is scored: windows of held-out texts, each with the passages found for it


@dataclass(frozen=True)
class Window:
    """A stretch of a text. name: of the article. text: of the query, which passages are looked up with.

    query, scored: ids, one after the other.
    """

    name: str
    text: str
    query: tuple[int, ...]
    scored: tuple[int, ...]


@dataclass(frozen=True)
class Retrieved:
    """A window with its K passages, best first: all of them, and the relevance of each, scores [K]."""

    window: Window
    passages: tuple[Passage, ...]
    scores: Floats


def articles(split: str) -> dict[str, list[str]]:
    """By title, the paragraphs of a split's articles. Raises as `wikitext.paragraphs`."""
    parts = (paragraph.text.partition("\n") for paragraph in wikitext.paragraphs(split))
    return {title: [text for *_, text in group] for title, group in groupby(parts, key=lambda part: part[0])}


def passages(texts: dict[str, list[str]], words: int = WORDS) -> list[Passage]:
    """Every second paragraph of each article from the first on, in stretches of so many words."""
    found = list[Passage]()
    for title, paragraphs in texts.items():
        stretches = [
            text[start : start + words]
            for text in map(str.split, paragraphs[::2])
            for start in range(0, len(text), words)
        ]
        found += [Passage(title, " ".join(stretch), number) for number, stretch in enumerate(stretches)]
    return found


def windows(
    texts: dict[str, list[str]],
    tokenizer: PreTrainedTokenizerBase,
    count: int | None = None,
    *,
    query: int = QUERY,
    scored: int = SCORED,
) -> list[Window]:
    """One of each article, in an order set by a hash of its title: the first `count`, or all.

    It is of the article's first paragraph that is not searched and long enough. The first `query` ids are given and the
    next `scored` are predicted. Raises ValueError on lengths below 1, and where there are fewer windows than `count`.
    """
    if query < 1 or scored < 1:
        raise ValueError(f"A window has at least one token of query and one that is scored, not {query} and {scored}.")
    chosen = list[Window]()
    for title in sorted(texts, key=lambda title: (pick(title, "dragon window", 2**62), title)):
        for text in texts[title][1::2]:
            ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
            if len(ids) >= query + scored:
                given = ids[:query]
                text = str(tokenizer.decode(given))
                chosen.append(Window(title, text, tuple(given), tuple(ids[query : query + scored])))
                break
    if not chosen or (count or 0) > len(chosen):
        raise ValueError(f"The texts have {len(chosen)} windows of {query} + {scored} tokens, not {count or 1}.")
    return chosen[:count]


def retrieve(
    windows: Sequence[Window], passages: Sequence[Passage], index: SparseIndex, count: int = max(COUNTS)
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


def retrieved(split: str, tokenizer: PreTrainedTokenizerBase, count: int | None = None) -> list[Retrieved]:
    """Windows of a split with their passages, of both splits."""
    every = [passage for each in ("validation", "test") for passage in passages(articles(each))]
    index = SparseIndex.build([f"{passage.title}\n{passage.text}" for passage in every])
    return retrieve(windows(articles(split), tokenizer, count), every, index)


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
    - `DRCG, uncut`: all n in one context, cut only where the model's context ends, best last; of UNCUT_COUNTS.
    - `DRAGON, a context a side`: the outputs of CRCG's two contexts mixed, uncut, as the authors' program can
      (`s_aggregate`). A context counts by the mean of its documents' scores.
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
    given, scored = retrieval.window.query, retrieval.window.scored
    contexts = {(method, n): (*ids, *given) for n in counts for method, ids in fronts.contexts(retrieval, n).items()}
    distinct = list(dict.fromkeys(contexts.values()))  # a cut context is the same from some count on
    losses = dict(zip(distinct, score(model, distinct, [scored] * len(distinct)), strict=True))
    for (method, n), prefix in contexts.items():
        yield method, n, 0, losses[prefix].loss, len(prefix) + len(scored)
    for n in counts:
        sides = [contexts[method, n] for method in (CLOUD, DEVICE)]
        means = retrieval.scores[:n].reshape(2, -1).mean(axis=1)
        weighed = document_weights(means, temperature)[:, None] + np.stack([losses[ids].log_probs for ids in sides])
        yield GROUPED, n, 0, -float(logsumexp(weighed, axis=0).sum()), sum(map(len, sides)) + 2 * len(scored)


# Contexts and forwards


class Fronts:
    """Ids of what stands before a window."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.context = int(model.config.max_position_embeddings)
        begin = tokenizer.bos_token_id
        self._begin = [begin] if begin is not None and tokenizer("a").input_ids[0] == begin else []

    def front(self, passages: Sequence[Passage], budget: int | None = None, *, best_last: bool = False) -> list[int]:
        """Ids before a window; of the passages' at most `budget`, those of the best ones."""
        parts = list[list[int]]()
        left = self.context if budget is None else budget
        for passage in passages:
            text = f"{passage.title}\n{passage.text}\n\n"
            parts.append(list(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)[:left])
            left -= len(parts[-1])
        shown = reversed(parts) if best_last else parts
        return [*self._begin, *(token for part in shown for token in part)]

    def contexts(self, retrieval: Retrieved, n: int) -> dict[str, list[int]]:
        """The ids before the window of each method with one context."""
        room = self.context - len(retrieval.window.query) - len(retrieval.window.scored) - len(self._begin)
        every = retrieval.passages[:n]
        least = min(BUDGET, room)
        contexts = {
            CLOUD: self.front(retrieval.passages[: n // 2], least),
            DEVICE: self.front(retrieval.passages[n // 2 : n], least),
            DRCG: self.front(every, least),
        }
        if n in UNCUT_COUNTS:
            contexts[UNCUT] = self.front(every, room, best_last=True)
        return contexts


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

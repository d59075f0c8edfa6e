"""Figure 6: how well a text is predicted with retrieved documents, by each way of putting documents and model together.

The distribution of every document alone is computed once for a window. All that mixes distributions (DRAGON, one side
alone, RAG-Sequence) follows from it for any number of documents; what puts documents side by side in one context (CRCG,
DRCG) needs forwards of its own.

One document stands before the text as in the training of the bundled models: end token, passage marker, title, text,
document marker, text to continue. Several documents are so many passages before one document marker. Without documents
the text follows the end token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.special import logsumexp

from ondevice.causal_lm.scoring import score
from ondevice.corpus.prompts import DOCUMENT, END, PASSAGE
from ondevice_papers.dragon import codec
from ondevice_papers.dragon.aggregation import Floats, document_weights, log_weight, target

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ondevice.corpus.excerpts import Passage
    from ondevice_studies.dragon.windows import Retrieved

COUNTS = (2, 4, 6, 8, 10, 12, 14, 16)  # documents of both sides together
CAPS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)  # bytes a distribution
BUDGET = 256  # tokens of documents in one context (section 6.2)
TEMPERATURES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)  # for BM25, whose scores are sums over words, tens in size

NONE, DRAGON, WHOLE, SEQUENCE = "no retrieval", "DRAGON", "DRAGON, uncut", "RAG-Sequence"
CLOUD, DEVICE, DRCG = "CRCG/Cloud", "CRCG/Device", "DRCG"
CLOUD_OUTPUT = "CRCG/Cloud, output"
DEVICE_OUTPUT = "CRCG/Device, output"
BEST_LAST, UNCUT, EQUAL = "DRCG, best last", "DRCG, uncut", "DRCG, equal compute"
PRINTED = (CLOUD, DEVICE, DRCG)  # the paper's baselines


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
    one: Retrieved,
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
    - `CRCG/..., output`: those of one side's half. `RAG-Sequence`: the window's n likelihoods mixed.
    - `CRCG/Cloud`, `CRCG/Device`, `DRCG`: the first half, the second, or all, in one context cut after BUDGET tokens.
    - `DRCG, best last`: the same tokens of documents as `DRCG`, the best document next to the text.
    - `DRCG, uncut`: all n in one context, cut only where the model's context ends, best last.
    - `DRCG, equal compute`: as many tokens read as DRAGON reads, from all documents of the window, best last.
    """
    read = read_window(model, fronts, one)
    yield NONE, 0, 0, -float(read.log_probs[0].sum()), int(read.size[0])
    for n in counts:
        every, cloud, device = slice(n), slice(n // 2), slice(n // 2, n)
        all_read, cloud_read, device_read = (int(read.size[1:][part].sum()) for part in (every, cloud, device))
        for cap in caps if n == max(counts) else (codec.CAP,):
            yield DRAGON, n, cap, live(read, n, temperature, cap), int(read.size[0]) + all_read
        yield WHOLE, n, 0, token_wise(read, every, temperature), all_read
        yield CLOUD_OUTPUT, n, 0, token_wise(read, cloud, temperature), cloud_read
        yield DEVICE_OUTPUT, n, 0, token_wise(read, device, temperature), device_read
        yield SEQUENCE, n, 0, sequence_wise(read, every, temperature), all_read
        contexts = fronts.contexts(one, n, all_read)
        prefixes = [[*front, *one.window.query] for front in contexts.values()]
        found = score(model, prefixes, [one.window.scored] * len(prefixes))
        for method, prefix, scored in zip(contexts, prefixes, found, strict=True):
            yield method, n, 0, scored.loss, len(prefix) + len(one.window.scored)


# Contexts and forwards


class Fronts:
    """Ids of what stands before a window, in the format of the bundled models.

    Raises ValueError on a tokenizer that has not the markers of the documentation corpus.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        known = tokenizer.get_vocab()
        missing = [marker for marker in (END, PASSAGE, DOCUMENT) if marker not in known]
        if missing:
            raise ValueError(f"Documents are shown as to the bundled models; this tokenizer has no {missing[0]}.")
        self.tokenizer = tokenizer
        self.context = int(model.config.max_position_embeddings)
        self._end = known[END]
        self._document = known[DOCUMENT]

    def front(self, passages: Sequence[Passage], budget: int | None = None, *, best_last: bool = False) -> list[int]:
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

    def contexts(self, one: Retrieved, n: int, read: int) -> dict[str, list[int]]:
        """The ids before the window of each method with one context. read: tokens that DRAGON reads of n documents."""
        given = len(one.window.query) + len(one.window.scored) + len((self._end, self._document))
        room = self.context - given
        every = one.passages[:n]
        least = min(BUDGET, room)
        return {
            CLOUD: self.front(one.passages[: n // 2], least),
            DEVICE: self.front(one.passages[n // 2 : n], least),
            DRCG: self.front(every, least),
            BEST_LAST: self.front(every, least, best_last=True),
            UNCUT: self.front(every, room, best_last=True),
            EQUAL: self.front(one.passages, min(room, read - given), best_last=True),
        }


@torch.inference_mode()
def read_window(model: PreTrainedModel, fronts: Fronts, one: Retrieved) -> Read:
    """A window without documents and after each of its documents, in one forward.

    Raises ValueError where a document and the window do not fit into the model's context.
    """
    rows = [[*fronts.front(shown), *one.window.query] for shown in ([], *([passage] for passage in one.passages))]
    scored = one.window.scored
    lengths = [len(row) for row in rows]
    n = len(scored)
    if max(lengths) + n > fronts.context:
        taken = max(lengths) + n
        raise ValueError(f"A document and a window take {taken} tokens, more than the context of {fronts.context}.")
    ids = torch.zeros(len(rows), max(lengths) + n, dtype=torch.long)
    for place, row in enumerate(rows):  # padded on the right, where a causal model does not look
        ids[place, : len(row) + n] = torch.tensor([*row, *scored])
    first = min(lengths) - 1  # logits before it are of no use
    logits = model(input_ids=ids.to(model.device), use_cache=False, logits_to_keep=ids.shape[1] - first).logits
    chosen = [logits[place, size - 1 - first : size - 1 - first + n] for place, size in enumerate(lengths)]
    found = torch.stack(chosen).float().log_softmax(-1).cpu()
    log_probs = found[:, torch.arange(n), torch.tensor(scored)].double().numpy()
    return Read(log_probs, found.exp().numpy(), np.array(scored), one.scores, np.array(lengths) + n)


def normalised(p: np.ndarray) -> Floats:
    """[.., V] float32 probabilities whose sums are 1 in float64."""
    return p.astype(float) / p.astype(float).sum(-1, keepdims=True)

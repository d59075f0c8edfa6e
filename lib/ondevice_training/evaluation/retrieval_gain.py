"""Whether retrieved passages make a held-out text likelier, mixed as in DRAGON's Eq. 2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import log_softmax, logsumexp

from ondevice import corpus
from ondevice.causal_lm.scoring import score
from ondevice.corpus.prompts import DOCUMENT, END, PASSAGE, pick
from ondevice_training.evaluation import estimates
from ondevice_training.evaluation.estimates import Estimate

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ondevice.retrieval import SparseIndex

STEPS = (1, 2, 4, 8)  # passages
TEMPERATURES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # BM25 scores are sums over words, tens in size
_GIVEN, _LEAST, _SCORED = 32, 64, 96  # tokens of the docstring: given, fewest scored, most scored


@dataclass(frozen=True)
class Text:
    """A held-out text: the ids of its heading and first tokens, what is retrieved with them, and the ids to score."""

    query: str
    given: tuple[int, ...]
    continuation: tuple[int, ...]


@dataclass(frozen=True)
class Pool:
    """The passages of train documents and their BM25 index."""

    passages: Sequence[corpus.Passage]
    index: SparseIndex


@dataclass(frozen=True)
class Conditionals:
    """Log-probabilities of a text's n tokens: without a passage [n], after each of k [k, n]; BM25 scores [k]."""

    alone: np.ndarray
    after: np.ndarray
    scores: np.ndarray

    def mixed(self, count: int, temperature: float) -> np.ndarray:
        """[n] under the mixture over the first `count` passages."""
        if not count:
            return self.alone
        return mixture(self.after[:count], self.scores[:count], temperature)


def mixture(log_probs: np.ndarray, scores: np.ndarray, temperature: float) -> np.ndarray:
    """[n] log of sum over d of w(d) p(x | d), w = softmax(scores / temperature). log_probs: [k, n], scores: [k].

    The weights stay as they are at the query; in the paper too they depend on what is read so far only by symbol.
    """
    return logsumexp(log_softmax(np.asarray(scores, float) / temperature)[:, None] + log_probs, axis=0)


def pool(documents: Sequence[corpus.Document], tokenizer: PreTrainedTokenizerBase) -> Pool:
    """Passages of 64 tokens and their BM25 index, from the cache or built."""
    from ondevice import retrieval

    passages = corpus.passages(documents, tokenizer)
    return Pool(passages, retrieval.sparse_index(passages))


def texts(documents: Sequence[corpus.Document], tokenizer: PreTrainedTokenizerBase, count: int) -> list[Text]:
    """The first `count` documents, in an order set by hash, that are long enough to be continued."""
    chosen: list[Text] = []
    for document in sorted(documents, key=lambda document: pick(document.name, "evaluation retrieval", 2**62)):
        start = f"{document.heading}\n\n"
        heading = tokenizer(start, verbose=False)["input_ids"]
        body = tokenizer(document.docstring, verbose=False)["input_ids"]
        if len(body) >= _GIVEN + _LEAST:
            given = body[:_GIVEN]
            chosen.append(
                Text(start + str(tokenizer.decode(given)), (*heading, *given), tuple(body[_GIVEN : _GIVEN + _SCORED]))
            )
        if len(chosen) == count:
            break
    return chosen


def conditionals(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[Text],
    retrieved: Sequence[Sequence[corpus.Passage]],
    scores: np.ndarray,
) -> list[Conditionals]:
    """Score every text alone and after each of its k passages. scores: [texts, k].

    Alone it stands as a document does in training, after the end of another; a passage stands between the two as in
    the training's continuations: passage marker, title, text, document marker.
    """
    fronts = [[END, *(f"{END}{PASSAGE}{p.title}\n{p.text}{DOCUMENT}" for p in passages)] for passages in retrieved]
    ids = [tokenizer(front, verbose=False)["input_ids"] for front in fronts]
    prefixes = [[*front, *text.given] for text, rows in zip(texts, ids, strict=True) for front in rows]
    continuations = [text.continuation for text, rows in zip(texts, ids, strict=True) for _ in rows]
    scored = iter(score(model, prefixes, continuations))
    likelihoods = []
    for rows, relevance in zip(ids, scores, strict=True):
        log_probs = np.stack([next(scored).log_probs for _ in rows])
        likelihoods.append(Conditionals(log_probs[0], log_probs[1:], relevance))
    return likelihoods


def best_temperature(held_out: Sequence[Conditionals], count: int = STEPS[-1]) -> float:
    """The temperature of least loss with `count` passages, on texts that are not reported."""
    losses = {t: -sum(conditional.mixed(count, t).sum() for conditional in held_out) for t in TEMPERATURES}
    return min(losses, key=losses.__getitem__)


def gains(measured: Sequence[Conditionals], temperature: float) -> dict[str, Any]:
    """Perplexity at 0 to 8 passages, the fall against none and against the step before, resampled over texts."""
    tokens = [len(conditional.alone) for conditional in measured]
    losses = {
        count: [-conditional.mixed(count, temperature).sum() for conditional in measured] for count in (0, *STEPS)
    }
    before = dict(zip(STEPS, (0, *STEPS), strict=False))
    return {
        "perplexity": {str(n): estimates.perplexity(losses[n], tokens).as_json() for n in losses},
        "reduction": {str(n): _reduction(losses[0], losses[n], tokens).as_json() for n in STEPS},
        "reduction_from_step_before": {
            str(n): _reduction(losses[before[n]], losses[n], tokens).as_json() for n in STEPS
        },
    }


def _reduction(before: Sequence[float], after: Sequence[float], tokens: Sequence[int]) -> Estimate:
    """1 - perplexity after / perplexity before, of the same texts."""
    table = np.column_stack([np.subtract(after, before), tokens])
    return estimates.bootstrap(table, lambda means: 1 - np.exp(means[..., 0] / means[..., 1]))


def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: Pool,
    held_out: Sequence[Text],
    reported: Sequence[Text],
) -> dict[str, Any]:
    """The temperature from `held_out`, the numbers on `reported`, and the control with another text's passages."""

    def search(texts: Sequence[Text]) -> tuple[list[list[corpus.Passage]], np.ndarray]:
        scores, positions = source.index.search([text.query for text in texts], STEPS[-1])
        return [[source.passages[position] for position in row] for row in positions], scores

    temperature = best_temperature(conditionals(model, tokenizer, held_out, *search(held_out)))
    retrieved, scores = search(reported)
    measured = conditionals(model, tokenizer, reported, retrieved, scores)
    strangers = [*retrieved[1:], retrieved[0]]
    control = conditionals(model, tokenizer, reported, strangers, scores)
    return {
        "retriever": "BM25 over passages of 64 tokens of train documents",
        "passages": len(source.passages),
        "temperature": temperature,
        "texts_for_temperature": len(held_out),
        **gains(measured, temperature),
        "reduction_with_another_texts_passages": gains(control, temperature)["reduction"],
    }

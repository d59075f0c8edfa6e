"""Figure 6: how well a text is predicted with retrieved documents, by each way of putting documents and model together.

The distribution of every document alone is computed once. All that mixes distributions (DRAGON, one side alone,
RAG-Sequence) follows from it for any number of documents; what puts documents side by side in one context (CRCG, DRCG)
needs forwards of its own.

One document stands before the text as in the training of the bundled models: end token, passage marker, title, text,
document marker, text to continue. Several documents are so many passages before one document marker, as in training's
questions with several passages. Without documents the text follows the end token.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from scipy.special import logsumexp
from tqdm import tqdm

from ondevice.causal_lm.scoring import score
from ondevice.corpus.prompts import DOCUMENT, END, PASSAGE
from ondevice.dragon import codec
from ondevice.dragon.aggregation import Floats, document_weights, log_weight, target

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ondevice.corpus import Passage
    from ondevice.dragon.windows import Retrieved

COUNTS = (2, 4, 6, 8, 10, 12, 14, 16)  # documents of both sides together
BUDGET = 256  # tokens of documents in one context (section 6.2)
TEMPERATURES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)  # for BM25, whose scores are sums over words, tens in size

NONE, DRAGON, SEQUENCE = "no retrieval", "DRAGON", "RAG-Sequence"
WHOLE = "DRAGON, uncut"
CLOUD, DEVICE, DRCG = "CRCG/Cloud", "CRCG/Device", "DRCG"
CLOUD_OUTPUT, DEVICE_OUTPUT = "CRCG/Cloud, output", "CRCG/Device, output"
BEST_LAST, UNCUT, EQUAL = "DRCG, best last", "DRCG, uncut", "DRCG, equal compute"
PRINTED = (CLOUD, DEVICE, DRCG)  # the paper's baselines

Row = dict[str, Any]


@dataclass(frozen=True)
class Conditionals:
    """Log-probabilities of the scored tokens of W windows.

    alone: [W, n] without documents. log_probs: [W, K, n] after each document alone. scores: [W, K], best first.
    read: [W, 1 + K] tokens that the model read for each of these, the first without documents.
    """

    alone: Floats
    log_probs: Floats
    scores: Floats
    read: np.ndarray

    def tokenwise(self, documents: slice, temperature: float) -> Floats:
        """[W] nats of Eq. 2: the distributions of these documents are mixed at each token."""
        weighted = self._log_weights(documents, temperature)[:, :, None] + self.log_probs[:, documents]
        return -logsumexp(weighted, axis=1).sum(-1)

    def whole(self, documents: slice, temperature: float) -> Floats:
        """[W] nats of RAG-Sequence: the likelihoods of the whole window are mixed."""
        totals = self._log_weights(documents, temperature) + self.log_probs[:, documents].sum(-1)
        return -logsumexp(totals, axis=1)

    def _log_weights(self, documents: slice, temperature: float) -> Floats:
        return np.stack([document_weights(row[documents], temperature) for row in self.scores])


def conditionals(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, retrieved: Sequence[Retrieved]
) -> Conditionals:
    """Each window without documents and after each of its documents. Errors as of `evaluate`."""
    _require_alike(retrieved)
    fronts = _Fronts(model, tokenizer)
    return _gathered([_Single(model, fronts, one) for one in _shown(retrieved, "documents")])


def best_temperature(
    held_out: Conditionals, documents: int = COUNTS[-1], temperatures: Sequence[float] = TEMPERATURES
) -> float:
    """The temperature of DRAGON's least loss with so many documents, on windows that are not reported."""
    losses = {t: float(held_out.tokenwise(slice(documents), t).sum()) for t in temperatures}
    return min(losses, key=losses.__getitem__)


def evaluate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, retrieved: Sequence[Retrieved], temperature: float,
    counts: Sequence[int] = COUNTS, cap: int = codec.CAP, budget: int = BUDGET,
) -> pd.DataFrame:  # fmt: skip
    """Every method on every window: method, documents, window, tokens (scored), nats (their loss), read.

    The cloud has the first half of a window's documents, the device the second. read: tokens that the model reads for
    it, over all sequences. Under autocast in its precision. Methods, with n documents:

    - `DRAGON`: the system that runs. Each side mixes its half (Eqs. 1, 2), both distributions go through the codec,
      `cap` bytes each, what is left out is filled in from the model's own without documents, and the two are mixed
      (Eq. 4).
    - `DRAGON, uncut`: all n distributions mixed, as they are; `CRCG/..., output`: those of one side's half.
    - `RAG-Sequence`: the window's n likelihoods mixed.
    - `CRCG/Cloud`, `CRCG/Device`, `DRCG`: the first half, the second, or all, in one context cut after `budget` tokens.
    - `DRCG, best last`: the same tokens of documents as `DRCG`, the best document next to the text.
    - `DRCG, uncut`: all n in one context, cut only where the model's context ends, best last.
    - `DRCG, equal compute`: as many tokens read as DRAGON reads, from all documents of the window, best last.

    Raises ValueError on counts that are not even or more than the documents, a model whose tokenizer has not the
    markers of the documentation corpus, windows of different lengths and one that does not fit into the context.
    """
    _require_alike(retrieved)
    _require_counts(len(retrieved[0].passages), counts)
    if not 0 < temperature < np.inf:
        raise ValueError(f"A temperature is positive and finite, not {temperature}.")
    if budget < 1:
        raise ValueError(f"A context has a budget of at least one token, not {budget}.")
    fronts = _Fronts(model, tokenizer)
    singles, rows = list[_Single](), list[Row]()
    for window, one in enumerate(_shown(retrieved, "documents")):
        single = _Single(model, fronts, one, whole=True)
        rows += [_live(single, count, temperature, cap, window) for count in counts]
        single.whole = None
        singles.append(single)
    found = _gathered(singles)
    rows += _mixed(found, counts, temperature)
    rows += _joined(model, fronts, retrieved, found, counts, budget)
    table = pd.DataFrame(rows, columns=["method", "documents", "window", "tokens", "nats", "read"])
    return table.sort_values(["method", "documents", "window"], ignore_index=True)


def perplexities(frame: pd.DataFrame, seed: int = 0, resamples: int = 2000, against: str = DRAGON) -> pd.DataFrame:
    """Of each method and number of documents: perplexity, low, high, difference, difference_low, difference_high.

    low, high: 95 % percentile intervals over `resamples` bootstrap draws of whole windows, the same draws for all
    rows. difference: to `against` with as many documents, or to `no retrieval` where `against` is that; above 0,
    `against` is better. It is NaN where there is nothing to compare with, or other tokens are scored.
    Raises ValueError on fewer than two windows, windows that a method lacks, and an unknown `against`.
    """
    nats, tokens = _wide(frame)
    logs = _resampled(nats, tokens, seed, resamples)  # the first draw is the sample itself
    low, high = np.quantile(logs[1:], [0.025, 0.975], axis=0)
    keys = _keys(nats)
    table = pd.DataFrame(keys, columns=["method", "documents"])
    table["perplexity"], table["low"], table["high"] = logs[0], low, high
    other = [_partner(keys, key, against) for key in keys]
    same = [j is not None and bool((tokens.iloc[:, i] == tokens.iloc[:, j]).all()) for i, j in enumerate(other)]
    differences = np.full(logs.shape, np.nan)
    for i, j in enumerate(other):
        if same[i]:
            differences[:, i] = logs[:, i] - logs[:, j]
    table["difference"] = differences[0]
    table["difference_low"], table["difference_high"] = np.quantile(differences[1:], [0.025, 0.975], axis=0)
    return table


def paired(table: pd.DataFrame) -> pd.DataFrame:
    """`perplexities` with low and high from the differences: the same windows, so what all windows share cancels.

    A row's interval is DRAGON's perplexity, with as many documents, plus that of the difference; it is nothing but the
    perplexity where there is none to compare with.
    """
    reference, own = table["perplexity"] - table["difference"], table["perplexity"]
    ends = {side: (reference + table[f"difference_{side}"]).fillna(own) for side in ("low", "high")}
    return table.assign(**ends)


@dataclass(frozen=True)
class GainRatio:
    """DRAGON's fall of perplexity over that of a baseline, with a 95 % interval; documents: of the baseline."""

    value: float
    low: float
    high: float
    baseline: str
    documents: int


def gain_ratio(
    frame: pd.DataFrame, baselines: Collection[str] = PRINTED, own_best: bool = False, seed: int = 0,
    resamples: int = 2000,
) -> GainRatio:  # fmt: skip
    """(perplexity without documents - DRAGON's with the most) over the same of the best baseline (section 6.2).

    The baseline has as many documents as DRAGON, as at the right end of Figure 6; own_best: its own best number.
    Which baseline and number are best is taken from the whole sample. A draw where it gains nothing counts as infinite.
    Raises ValueError where the baseline gains nothing in the whole sample, and as `perplexities`.
    """
    nats, tokens = _wide(frame)
    keys = _keys(nats)
    draws = _resampled(nats, tokens, seed, resamples)
    most = max((key for key in keys if key[0] == DRAGON), default=None)
    tried = [key for key in keys if key[0] in baselines and (own_best or key[1] == (most or key)[1])]
    if most is None or (NONE, 0) not in keys or not tried:
        raise ValueError(
            f"A ratio of gains needs {NONE}, {DRAGON} and one of {', '.join(baselines)} with as many documents."
        )
    best = min(tried, key=lambda key: draws[0, keys.index(key)])
    without, ours, theirs = (draws[:, keys.index(key)] for key in ((NONE, 0), most, best))
    if without[0] <= theirs[0]:
        raise ValueError(f"{best[0]} with {best[1]} documents gains nothing, so there is no ratio to it.")
    gained = np.maximum(without - theirs, 0)
    ratios = np.divide(without - ours, gained, out=np.full(len(gained), np.inf), where=gained > 0)
    low, high = np.quantile(ratios[1:], [0.025, 0.975], method="nearest")
    return GainRatio(float(ratios[0]), float(low), float(high), *best)


# Contexts


class _Fronts:
    """Ids of what stands before a window, in the format of the bundled models."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        known = tokenizer.get_vocab()
        missing = [marker for marker in (END, PASSAGE, DOCUMENT) if marker not in known]
        if missing:
            raise ValueError(f"Documents are shown as to the bundled models; this tokenizer has no {missing[0]}.")
        self.tokenizer, self.context = tokenizer, int(model.config.max_position_embeddings)
        self._end, self._document = known[END], known[DOCUMENT]
        self._ids: dict[Passage, list[int]] = {}

    def front(self, passages: Sequence[Passage], budget: int | None = None, *, best_last: bool = False) -> list[int]:
        """Ids before a window; of the passages' at most `budget`, those of the best ones."""
        if not passages:
            return [self._end]
        parts, left = list[list[int]](), self.context if budget is None else budget
        for passage in passages:
            parts.append(self._of(passage)[:left])
            left -= len(parts[-1])
        shown = reversed(parts) if best_last else parts
        return [self._end, *(token for part in shown for token in part), self._document]

    def room(self, one: Retrieved) -> int:
        """Tokens of passages that fit into the model's context before this window."""
        return self.context - len(one.window.query) - len(one.window.scored) - len((self._end, self._document))

    def _of(self, passage: Passage) -> list[int]:
        if passage not in self._ids:
            text = f"{PASSAGE}{passage.title}\n{passage.text}"
            self._ids[passage] = list(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
        return self._ids[passage]


class _Single:
    """A window without documents and after each of its documents.

    log_probs: [1 + K, n] of the scored tokens. read: [1 + K]. scores: [K]. whole: [1 + K, n, V] float32 probabilities,
    where they are asked for. targets: [n].
    """

    def __init__(self, model: PreTrainedModel, fronts: _Fronts, one: Retrieved, whole: bool = False) -> None:
        before = [fronts.front([]), *(fronts.front([passage]) for passage in one.passages)]
        rows = [[*front, *one.window.query] for front in before]
        found = _distributions(model, rows, one.window.scored, fronts.context)
        self.targets = np.array(one.window.scored)
        picked = found[:, torch.arange(len(self.targets)), torch.from_numpy(self.targets)]
        self.log_probs: Floats = picked.double().numpy()
        self.read = np.array([len(row) + len(self.targets) for row in rows])
        self.scores = one.scores
        self.whole: Floats | None = found.exp().numpy() if whole else None


@torch.inference_mode()
def _distributions(
    model: PreTrainedModel, prefixes: Sequence[Sequence[int]], scored: Sequence[int], context: int
) -> torch.Tensor:
    """[rows, n, V] float32 log-probabilities of the scored tokens and all others in their places."""
    lengths, n = [len(prefix) for prefix in prefixes], len(scored)
    if max(lengths) + n > context:
        raise ValueError(f"A document and a window take {max(lengths) + n} tokens, more than the context of {context}.")
    ids = torch.zeros(len(prefixes), max(lengths) + n, dtype=torch.long)
    for row, prefix in enumerate(prefixes):  # padded on the right, where a causal model does not look
        ids[row, : len(prefix) + n] = torch.tensor([*prefix, *scored])
    first = min(lengths) - 1  # logits before it are of no use
    logits = model(input_ids=ids.to(model.device), use_cache=False, logits_to_keep=ids.shape[1] - first).logits
    chosen = torch.stack([logits[row, size - 1 - first : size - 1 - first + n] for row, size in enumerate(lengths)])
    return chosen.float().log_softmax(-1).cpu()


def _gathered(singles: Sequence[_Single]) -> Conditionals:
    log_probs = np.stack([single.log_probs for single in singles])
    read = np.stack([single.read for single in singles])
    return Conditionals(log_probs[:, 0], log_probs[:, 1:], np.stack([single.scores for single in singles]), read)


# Methods


def _mixed(found: Conditionals, counts: Sequence[int], temperature: float) -> list[Row]:
    """What follows from the distributions of single documents."""
    rows = _rows(NONE, 0, found, -found.alone.sum(-1), found.read[:, 0])
    for n in counts:
        every, cloud, device = slice(n), slice(n // 2), slice(n // 2, n)
        for method, used in ((WHOLE, every), (CLOUD_OUTPUT, cloud), (DEVICE_OUTPUT, device)):
            rows += _rows(method, n, found, found.tokenwise(used, temperature), _read(found, used))
        rows += _rows(SEQUENCE, n, found, found.whole(every, temperature), _read(found, every))
    return rows


def _live(single: _Single, count: int, temperature: float, cap: int, window: int) -> Row:
    """DRAGON with each side's distribution as the codec gives it to the other side."""
    assert single.whole is not None
    halves = slice(count // 2), slice(count // 2, count)
    sides = [_side(single.whole[1:][half], single.scores[half], temperature) for half in halves]
    heights = [log_weight(single.scores[half], temperature) for half in halves]
    prior = single.whole[0] / single.whole[0].sum(-1, keepdims=True)
    pairs = zip(*(_filled(side, prior, cap) for side in sides), single.targets, strict=True)
    loss = -np.log([target(p_cloud, p_device, *heights)[token] for p_cloud, p_device, token in pairs])
    read = int(single.read[: 1 + count].sum())
    return _row(DRAGON, count, window, len(loss), float(loss.sum()), read)


def _side(distributions: Floats, scores: Floats, temperature: float) -> Floats:
    """[n, V] float64: one side's mixture of [D, n, V] probabilities (Eqs. 1 and 2)."""
    weights = np.exp(document_weights(scores, temperature))
    mixed = np.tensordot(weights, distributions.astype(float), axes=1)
    return mixed / mixed.sum(-1, keepdims=True)


def _filled(side: Floats, prior: Floats, cap: int) -> Floats:
    """[n, V] as the other side reads it. prior: [n, V] without documents."""
    both = zip(side, prior, strict=True)
    return np.stack([codec.filled(codec.encode(p, cap, before), before) for p, before in both])


def _joined(
    model: PreTrainedModel, fronts: _Fronts, retrieved: Sequence[Retrieved], found: Conditionals,
    counts: Sequence[int], budget: int,
) -> list[Row]:  # fmt: skip
    """What puts documents side by side. A context that several methods share is read once."""
    contexts = list[tuple[str, int, int, tuple[int, ...]]]()
    for window, one in enumerate(retrieved):
        for n in counts:
            contexts += [(method, n, window, tuple(front)) for method, front in
                         _contexts(fronts, one, n, budget, int(_read(found, slice(n))[window])).items()]  # fmt: skip
    needed = list(dict.fromkeys((window, front) for _, _, window, front in contexts))
    losses = dict(zip(needed, _losses(model, retrieved, needed), strict=True))
    rows = []
    for method, n, window, front in contexts:
        size = len(front) + len(retrieved[window].window.query) + found.alone.shape[1]
        rows.append(_row(method, n, window, found.alone.shape[1], losses[window, front], size))
    return rows


def _contexts(fronts: _Fronts, one: Retrieved, n: int, budget: int, read: int) -> dict[str, list[int]]:
    """Each method's ids before the window. read: tokens that DRAGON reads with n documents."""
    room, every = fronts.room(one), one.passages[:n]
    least = min(budget, room)
    return {
        CLOUD: fronts.front(one.passages[: n // 2], least),
        DEVICE: fronts.front(one.passages[n // 2 : n], least),
        DRCG: fronts.front(every, least),
        BEST_LAST: fronts.front(every, least, best_last=True),
        UNCUT: fronts.front(every, room, best_last=True),
        EQUAL: fronts.front(one.passages, min(room, read - (fronts.context - room)), best_last=True),
    }


def _losses(
    model: PreTrainedModel, retrieved: Sequence[Retrieved], needed: Sequence[tuple[int, tuple[int, ...]]]
) -> list[float]:
    """Nats of each (window, ids before it)."""
    found = []
    for start in tqdm(range(0, len(needed), 64), desc="contexts", leave=False):
        part = [(front, retrieved[window].window) for window, front in needed[start : start + 64]]
        scored = score(model, [[*front, *one.query] for front, one in part], [one.scored for _, one in part])
        found += [one.loss for one in scored]
    return found


def _read(found: Conditionals, documents: slice) -> np.ndarray:
    return found.read[:, 1:][:, documents].sum(-1)


def _rows(method: str, documents: int, found: Conditionals, nats: Floats, read: np.ndarray) -> list[Row]:
    size = found.alone.shape[1]
    return [_row(method, documents, w, size, float(nats[w]), int(read[w])) for w in range(len(nats))]


def _row(method: str, documents: int, window: int, tokens: int, nats: float, read: int) -> Row:
    return dict(method=method, documents=documents, window=window, tokens=tokens, nats=nats, read=read)


def _shown(retrieved: Sequence[Retrieved], what: str) -> tqdm[Retrieved]:
    return tqdm(retrieved, desc=what, unit="window", leave=False)


def _require_alike(retrieved: Sequence[Retrieved]) -> None:
    sizes = {(len(one.passages), len(one.window.scored)) for one in retrieved}
    if len(sizes) != 1:
        raise ValueError(
            f"Windows have the same number of documents and of scored tokens, and there is at least one; "
            f"these have {sorted(sizes)}."
        )


def _require_counts(most: int, counts: Collection[int]) -> None:
    for count in counts:
        if count < 2 or count % 2:
            raise ValueError(f"Both sides have the same number of documents, at least one: {count} cannot be halved.")
        if count > most:
            raise ValueError(f"{count} documents are asked for, but a window has {most}.")


# Statistics


def _wide(frame: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """nats and tokens, each [W, methods and documents]."""
    tables = [frame.pivot(index="window", columns=["method", "documents"], values=v) for v in ("nats", "tokens")]
    nats, tokens = (table.sort_index(axis=1) for table in tables)
    if len(nats) < 2:
        raise ValueError(f"An interval needs two windows or more; there are {len(nats)}.")
    lacking = nats.isna().any()
    if lacking.any():
        raise ValueError(f"Not every window has a row of {lacking.idxmax()}.")
    return nats, tokens


def _resampled(nats: pd.DataFrame, tokens: pd.DataFrame, seed: int, resamples: int) -> Floats:
    """[1 + resamples, columns] perplexities: of the sample, then of draws of whole windows."""
    count = len(nats)
    drawn = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), resamples)
    times = np.vstack([np.ones(count), drawn])
    return np.exp((times @ nats.to_numpy()) / (times @ tokens.to_numpy(float)))


def _keys(table: pd.DataFrame) -> list[tuple[str, int]]:
    """(method, documents) of each column."""
    columns: list[Any] = list(table.columns)
    return [(str(method), int(documents)) for method, documents in columns]


def _partner(keys: Sequence[tuple[str, int]], key: tuple[str, int], against: str) -> int | None:
    """The column that one is compared with."""
    places = {documents: place for place, (method, documents) in enumerate(keys) if method == against}
    if not places:
        raise ValueError(f"There are no rows of {against!r} to compare with.")
    return places.get(0 if list(places) == [0] else key[1])

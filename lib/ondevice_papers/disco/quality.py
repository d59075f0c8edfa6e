"""Answer quality when generation changes hands (Figures 8 and 10, Eq. 6): one model begins, another goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pandas as pd

from ondevice import corpus
from ondevice.causal_lm import CausalLM
from ondevice.corpus.prompts import Task, normal, pick
from ondevice.evidence import Estimate, derived, kind_of
from ondevice.evidence.estimates import DRAWS, LEVEL
from ondevice.retrieval.embedding import embedder

METRICS = {
    "right": "answers that are right",
    "rouge_1": "ROUGE-1 F1 to the reference",
    "similarity": "MiniLM similarity to the reference",
}
LIMIT = 64  # tokens of an answer, its end among them
HANDOVERS = (0, 4, 8, 16, 32, LIMIT)  # tokens of the first model; the ends are the models alone
_LONGEST_PROMPT = 400  # tokens
_RIGHT = 0.8  # ROUGE-1 above which an answer counts as right
_DIFFERENCES = ("over_device", "over_server", "over_weaker", "outside")


def items(count: int, tokenizer: Any) -> list[Task]:
    """Tasks of the corpus's test split, at most `count` of each family, in an order set by hash.

    Left out are those whose reference is longer than an answer may be: none could be right.
    """
    chosen: list[Task] = []
    for family in corpus.FAMILIES:
        tasks = list(corpus.tasks(corpus.documents("test"), [family]))
        tasks.sort(key=lambda task: pick(task.name, "answer quality", 2**62))
        fitting = (
            task
            for task in tasks
            if len(tokenizer(task.prompt)["input_ids"]) <= _LONGEST_PROMPT
            and len(tokenizer(task.answer)["input_ids"]) < LIMIT
        )
        chosen += islice(fitting, count)
    return chosen


# An answer that changes hands

Decoded = list[tuple[int, float]]  # tokens, and by how much the logit of each led


def continued(lm: CausalLM, ids: Sequence[int], limit: int) -> Decoded:
    """A model's greedy continuation of ids: at most `limit` tokens, or up to its end token, which is among them."""
    session = lm.start(len(ids) + limit)
    decoded = Decoded()
    logits = session.prefill(ids)
    while len(decoded) < limit:
        (first, second), (token, _) = (part.tolist() for part in logits.topk(2))
        decoded.append((token, first - second))
        if token == lm.model.config.eos_token_id:
            break
        logits = session.extend([token])[-1]
    return decoded


def migrated(
    first: CausalLM, second: CausalLM, prompt: Sequence[int], handovers: Sequence[int], limit: int
) -> dict[int, Decoded]:
    """Answers of at most `limit` tokens, of which the first model gives at most the hand-over's (appendix D.2).

    The second goes on from the same ids where the first has not ended. 0 is the second alone, `limit` the first alone.
    """
    begun = continued(first, prompt, max(handovers))
    answers = {}
    for handover in handovers:
        decoded = begun[:handover]
        tokens = [token for token, _ in decoded]
        if len(decoded) < limit and tokens[-1:] != [first.model.config.eos_token_id]:
            decoded = decoded + continued(second, [*prompt, *tokens], limit - len(decoded))
        answers[handover] = decoded
    return answers


def rouge_1(answer: str, reference: str) -> float:
    """ROUGE-1 F1: overlap of lower-cased words, in [0, 1]."""
    own, wanted = (Counter(text.lower().split()) for text in (answer, reference))
    shared = sum((own & wanted).values())
    total = sum(own.values()) + sum(wanted.values())
    return 2 * shared / total if total else 0.0


def scores(answers: Sequence[str], references: Sequence[str]) -> pd.DataFrame:
    """METRICS, a row an answer. One is right when it is the reference, or its ROUGE-1 exceeds 0.8."""
    texts = list(dict.fromkeys([*answers, *references]))
    vectors = dict(zip(texts, embedder()(texts), strict=True))
    alike = [float(vectors[a] @ vectors[r]) for a, r in zip(answers, references, strict=True)]
    overlap = [rouge_1(a, r) for a, r in zip(answers, references, strict=True)]
    right = [normal(a) == normal(r) or o > _RIGHT for a, r, o in zip(answers, references, overlap, strict=True)]
    return pd.DataFrame({"right": right, "rouge_1": overlap, "similarity": np.round(alike, 4)})


# What it costs


def changed(table: pd.DataFrame) -> pd.Series:
    """Whether an answer changed hands: the first model alone says more tokens than the hand-over's."""
    alone = table["tokens"].where(table["handover"] == table["handover"].max())
    return (
        alone.groupby([table[key] for key in ("family", "document", "direction")]).transform("max") > table["handover"]
    )


def means(table: pd.DataFrame, metrics: Sequence[str] = tuple(METRICS), seed: int = 0) -> pd.DataFrame:
    """Mean of each metric by direction and hand-over with its bootstrapped 95 % interval over documents.

    table: a row a family, document, direction and hand-over. Families weigh the same.
    Columns: metric, direction, handover, mean, low, high, n (documents).
    """
    rows = []
    for metric in metrics:
        for direction, part in table.groupby("direction", sort=False):
            handovers, mean, drawn = _resampled(part, metric, seed)
            low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
            n = part["document"].nunique()
            rows += [(metric, direction, *row, n) for row in zip(handovers, mean, low, high, strict=True)]
    columns = ["metric", "direction", "handover", "mean", "low", "high", "n"]
    return derived(pd.DataFrame(rows, columns=columns), table)


def bound(
    table: pd.DataFrame, metric: str, device: str, by: Sequence[str] = ("direction",), seed: int = 0
) -> pd.DataFrame:
    """Eq. 6 for the mean of a metric: how far a migrated answer's lies outside both models' own.

    device: the label of the model that stands for the device; the other is the server's. by: what makes a cell beside
    the hand-over; with the family, each is judged alone.
    Columns: by, handover, first, second (alone), migrated, n (documents), changed (share of answers that changed
    hands), and with their intervals (_low, _high) over_device, over_server, over_weaker (the mean less theirs) and
    outside (negative inside the bound). All intervals of a table hold together, at 95 %: they are as wide as the
    bootstrap's greatest studentised difference from any model alone.
    """
    cells, values, draws = [], [], []
    for keys, part in table.groupby(list(by), sort=False):
        handovers, mean, drawn = _resampled(part, metric, seed)
        alone = [-1, 0] if str(part["direction"].iloc[0]).startswith(f"{device} to ") else [0, -1]
        n = part["document"].nunique()
        share = changed(part).groupby(part["handover"]).mean()
        for index, handover in list(enumerate(handovers))[1:-1]:
            cells.append((*keys, handover, mean[-1], mean[0], mean[index], n, share[handover]))
            values.append(mean[index] - mean[alone])
            draws.append(drawn[:, [index]] - drawn[:, alone])
    value = np.array(values)  # [cells, 2]
    drawn = np.array(draws)  # [cells, draws, 2]
    error = drawn.std(axis=1)
    apart = np.divide(
        np.abs(drawn - value[:, None]), error[:, None], out=np.zeros_like(drawn), where=error[:, None] > 0
    )
    reach = np.quantile(apart.max(axis=(0, 2)), LEVEL) * error
    bounds = pd.DataFrame(cells, columns=[*by, "handover", "first", "second", "migrated", "n", "changed"])
    low = value - reach
    high = value + reach
    for suffix, end, other_end in (("", value, value), ("_low", low, high), ("_high", high, low)):
        outside = np.maximum(end.min(axis=1), -other_end.max(axis=1))
        for name, column in zip(_DIFFERENCES, (*end.T, end.max(axis=1), outside), strict=True):
            bounds[f"{name}{suffix}"] = column
    return derived(bounds, table)


def extreme(bounds: pd.DataFrame, column: str, worst: Callable[[pd.Series], float] = min) -> Estimate:
    """A difference in its worst cell of `bound`, with its interval. worst: min, or max for the greatest."""
    value, low, high = (float(worst(bounds[f"{column}{suffix}"])) for suffix in ("", "_low", "_high"))
    return Estimate(value, low, high, int(bounds["n"].min()), kind_of(bounds), "documents")


def _resampled(part: pd.DataFrame, metric: str, seed: int) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Hand-overs [h], a metric's means [h], and means [draws, h] over documents drawn anew, the same in each.

    Families ask about the same documents, so a draw takes all prompts on a document.
    """
    wide = part.pivot(index=["family", "document"], columns="handover", values=metric).astype(float)
    family, document = (pd.factorize(wide.index.get_level_values(level))[0] for level in ("family", "document"))
    n = int(document.max()) + 1
    times = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), DRAWS)
    counts = np.vstack([np.ones(n), times])[:, document]  # [1 + draws, prompts]
    sizes = counts @ np.eye(int(family.max()) + 1)[family]  # of each family
    drawn_families = (sizes > 0).sum(axis=1, keepdims=True)  # of few prompts a draw may miss a family
    weights = counts / np.maximum(1, sizes)[:, family] / drawn_families
    drawn = weights @ wide.to_numpy()
    return [int(handover) for handover in wide.columns], drawn[0], drawn[1:]

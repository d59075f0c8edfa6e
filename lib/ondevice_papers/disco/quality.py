"""Answer quality when generation changes hands (Figures 8 and 10, Eq. 6): one model begins, another goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ondevice import chat
from ondevice.causal_lm import CausalLM
from ondevice.corpus.answers import words
from ondevice.evidence import Estimate, derived, kind_of
from ondevice.evidence.estimates import DRAWS, LEVEL
from ondevice.retrieval.embedding import embedder

METRICS = {
    "right": "answers that are right",
    "rouge_1": "ROUGE-1 F1 to the reference",
    "similarity": "MiniLM similarity to the reference",
}
LIMIT = 64  # tokens of an answer, its end among them
HANDOVERS = (0, 4, 16, 32, LIMIT)  # tokens of the first model; the ends are the models alone
_DIFFERENCES = ("over_device", "over_server", "over_weaker", "outside")


@dataclass(frozen=True)
class GradedQuestion:
    """A prompt with what a right answer has: of each part, texts of which one must stand in it.

    reference: a text that the answer is compared with instead, where no answer is right or wrong.
    """

    id: str
    task: str
    text: str
    parts: tuple[tuple[str, ...], ...] = ()
    reference: str = ""


# An answer that changes hands


@dataclass(frozen=True)
class Speaker:
    """A model that answers: its engine, its tokenizer, and the ids that end an answer."""

    lm: CausalLM
    tokenizer: Any
    ends: Collection[int]

    def text(self, tokens: Sequence[int]) -> str:
        """Of tokens; a character of which only some bytes are there is left out."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True)).rstrip("\N{REPLACEMENT CHARACTER}")


@dataclass(frozen=True)
class MigratedAnswer:
    """begun: tokens of the first model. ended: of the second. margin: by how much the logit of each led, at least."""

    begun: tuple[int, ...]
    ended: tuple[int, ...]
    text: str
    margin: float


Decoded = list[tuple[int, float]]  # tokens, and by how much the logit of each led


def continued(speaker: Speaker, prompt: str, begun: str, limit: int) -> Decoded:
    """A model's greedy answer to a prompt, of which a text is there: at most `limit` tokens, or up to its end token.

    The prompt stands in the model's own chat template, and the text is split into the model's own tokens.
    """
    ids = chat.prompt_ids(speaker.tokenizer, prompt)
    ids += speaker.tokenizer(begun, add_special_tokens=False).input_ids if begun else []
    session = speaker.lm.start(len(ids) + limit)
    decoded = Decoded()
    logits = session.prefill(ids)
    while len(decoded) < limit:
        (first, second), (token, _) = (part.tolist() for part in logits.topk(2))
        decoded.append((token, first - second))
        if token in speaker.ends:
            break
        logits = session.extend([token])[-1]
    return decoded


def migrated(
    first: Speaker, second: Speaker, prompt: str, handovers: Sequence[int], limit: int
) -> dict[int, MigratedAnswer]:
    """Answers of at most `limit` tokens, of which the first model gives at most the hand-over's (appendix D.2).

    Where the first has not ended, the second goes on from its text, as the router does: the models' vocabularies
    differ. 0 is the second alone, `limit` the first alone.
    """
    whole = continued(first, prompt, "", max(handovers))
    answers = {}
    for handover in handovers:
        begun = whole[:handover]
        tokens = [token for token, _ in begun]
        text = first.text(tokens)
        ended: Decoded = []
        if len(begun) < limit and not {*tokens[-1:]} & {*first.ends}:
            ended = continued(second, prompt, text, limit - len(begun))
        rest = [token for token, _ in ended]
        margin = min(lead for _, lead in begun + ended)
        answers[handover] = MigratedAnswer(tuple(tokens), tuple(rest), text + second.text(rest), margin)
    return answers


# How good it is


def rouge_1(answer: str, reference: str) -> float:
    """ROUGE-1 F1: overlap of lower-cased words, in [0, 1]."""
    own, wanted = (Counter(text.lower().split()) for text in (answer, reference))
    shared = sum((own & wanted).values())
    total = sum(own.values()) + sum(wanted.values())
    return 2 * shared / total if total else 0.0


def right(answer: str, parts: Sequence[Sequence[str]]) -> bool:
    """Whether a text of each part stands in the answer, by its words."""
    said = f" {' '.join(words(answer))} "
    return all(any(f" {' '.join(words(text))} " in said for text in part) for part in parts)


def scores(asked: Sequence[GradedQuestion], answers: Sequence[str]) -> pd.DataFrame:
    """METRICS, a row an answer; NaN where a question has not what the metric needs."""
    texts = list(dict.fromkeys([*answers, *(question.reference for question in asked)]))
    vectors = dict(zip(texts, embedder()(texts), strict=True))
    rows = []
    for question, answer in zip(asked, answers, strict=True):
        if question.parts:
            rows.append((float(right(answer, question.parts)), np.nan, np.nan))
        else:
            alike = float(vectors[answer] @ vectors[question.reference])
            rows.append((np.nan, rouge_1(answer, question.reference), round(alike, 4)))
    return pd.DataFrame(rows, columns=list(METRICS))


# What it costs


def changed(table: pd.DataFrame) -> pd.Series:
    """Whether an answer changed hands: the first model alone says more tokens than the hand-over's."""
    alone = table["tokens"].where(table["handover"] == table["handover"].max())
    return alone.groupby([table[key] for key in ("task", "request", "direction")]).transform("max") > table["handover"]


def means(table: pd.DataFrame, metrics: Sequence[str] = tuple(METRICS), seed: int = 0) -> pd.DataFrame:
    """Mean of each metric by direction and hand-over with its bootstrapped 95 % interval over requests.

    table: a row a task, request, direction and hand-over. The tasks that have the metric weigh the same.
    Columns: metric, direction, handover, mean, low, high, n (requests).
    """
    rows = []
    for metric in metrics:
        for direction, part in table.dropna(subset=metric).groupby("direction", sort=False):
            handovers, mean, drawn = _resampled(part, metric, seed)
            low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
            n = part["request"].nunique()
            rows += [(metric, direction, *row, n) for row in zip(handovers, mean, low, high, strict=True)]
    columns = ["metric", "direction", "handover", "mean", "low", "high", "n"]
    return derived(pd.DataFrame(rows, columns=columns), table)


def bound(
    table: pd.DataFrame, metric: str, device: str, by: Sequence[str] = ("direction",), seed: int = 0
) -> pd.DataFrame:
    """Eq. 6 for the mean of a metric: how far a migrated answer's lies outside both models' own.

    device: the label of the model that stands for the device; the other is the server's. by: what makes a cell beside
    the hand-over; with the task, each is judged alone.
    Columns: by, handover, first, second (alone), migrated, n (requests), changed (share of answers that changed
    hands), and with their intervals (_low, _high) over_device, over_server, over_weaker (the mean less theirs) and
    outside (negative inside the bound). All intervals of a table hold together, at 95 %: they are as wide as the
    bootstrap's greatest studentised difference from any model alone.
    """
    cells, values, draws = [], [], []
    for keys, part in table.dropna(subset=metric).groupby(list(by), sort=False):
        handovers, mean, drawn = _resampled(part, metric, seed)
        alone = [-1, 0] if str(part["direction"].iloc[0]).startswith(f"{device} to ") else [0, -1]
        n = part["request"].nunique()
        share = changed(part).groupby(part["handover"]).mean()
        for index, handover in list(enumerate(handovers))[1:-1]:
            cells.append((*keys, handover, mean[-1], mean[0], mean[index], n, share[handover]))
            values.append(mean[index] - mean[alone])
            draws.append(drawn[:, [index]] - drawn[:, alone])
    value = np.array(values)  # [cells, 2]
    drawn = np.array(draws)  # [cells, draws, 2]
    error = drawn.std(axis=1).round(12)  # of equal draws 0, whatever a processor's order of adding makes of them
    apart = np.divide(
        np.abs(drawn - value[:, None]), error[:, None], out=np.zeros_like(drawn), where=error[:, None] > 0
    )
    reach = np.quantile(apart.max(axis=(0, 2)), LEVEL) * error
    bounds = pd.DataFrame(cells, columns=[*by, "handover", "first", "second", "migrated", "n", "changed"])
    low = value - reach
    high = value + reach
    for suffix, end, other_end in (("", value, value), ("_low", low, high), ("_high", high, low)):
        outside = np.maximum(end.min(axis=1), -other_end.max(axis=1)) + 0.0  # no -0
        for name, column in zip(_DIFFERENCES, (*end.T, end.max(axis=1), outside), strict=True):
            bounds[f"{name}{suffix}"] = column
    return derived(bounds, table)


def extreme(bounds: pd.DataFrame, column: str, worst: Callable[[pd.Series], float] = min) -> Estimate:
    """A difference in its worst cell of `bound`, with its interval. worst: min, or max for the greatest."""
    value, low, high = (float(worst(bounds[f"{column}{suffix}"])) for suffix in ("", "_low", "_high"))
    return Estimate(value, low, high, int(bounds["n"].min()), kind_of(bounds), "requests")


def _resampled(part: pd.DataFrame, metric: str, seed: int) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Hand-overs [h], a metric's means [h], and means [draws, h] over requests drawn anew, the same ones in each."""
    wide = part.pivot(index=["task", "request"], columns="handover", values=metric).astype(float)
    tasks = pd.factorize(wide.index.get_level_values("task"))[0]
    times = np.random.default_rng(seed).multinomial(len(wide), np.full(len(wide), 1 / len(wide)), DRAWS)
    counts = np.vstack([np.ones(len(wide)), times])
    sizes = counts @ np.eye(int(tasks.max()) + 1)[tasks]  # of each task
    drawn_tasks = (sizes > 0).sum(axis=1, keepdims=True)  # of few requests a draw may miss a task
    weights = counts / np.maximum(1, sizes)[:, tasks] / drawn_tasks
    drawn = weights @ wide.to_numpy()
    return [int(handover) for handover in wide.columns], drawn[0], drawn[1:]

"""Answer quality when generation changes hands (Figures 8 and 10, Eq. 6): one model begins, another goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from ondevice import corpus, models
from ondevice.corpus.prompts import Task, normal, pick
from ondevice.disco import judge
from ondevice.disco.device_probe import one_thread
from ondevice.retrieval.embedding import embedder

FAMILIES = ("summary", "parameters", "rag", "turns")
METRICS = {
    "rouge_1": "ROUGE-1 F1 to the reference",
    "accurate": "answers that are right",
    "similarity": "MiniLM similarity to the reference",
    "likelihood": "4-gram judge (nats a token)",
}
_LONGEST_PROMPT = 400  # tokens
_BATCH = 50
_RIGHT = 0.8  # ROUGE-1 above which an answer counts as right


def items(count: int, tokenizer: Any) -> list[Task]:
    """Tasks of the corpus's test split, as many of each of FAMILIES, in an order set by hash."""
    chosen = []
    for family in FAMILIES:
        tasks = list(corpus.tasks(corpus.documents("test"), [family]))
        tasks.sort(key=lambda task: pick(task.name, "answer quality", 2**62))
        fitting = (task for task in tasks if len(tokenizer(task.prompt)["input_ids"]) <= _LONGEST_PROMPT)
        chosen += [task for _, task in zip(range(count // len(FAMILIES)), fitting, strict=False)]
    return chosen


def generate(model: Any, prefixes: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
    """Greedy continuations of at most `new_tokens` tokens, in the order of the prefixes, in batches of like lengths.

    A continuation ends with the model's end token where it gives one.
    """
    import torch

    end: int = model.config.eos_token_id
    found: list[list[int]] = [[] for _ in prefixes]
    order = sorted(range(len(prefixes)), key=lambda index: len(prefixes[index]))
    for start in range(0, len(order) if new_tokens else 0, _BATCH):
        batch = order[start : start + _BATCH]
        longest = max(len(prefixes[index]) for index in batch)
        ids = torch.full((len(batch), longest), end)
        mask = torch.zeros_like(ids)
        for row, index in enumerate(batch):
            ids[row, longest - len(prefixes[index]) :] = torch.tensor(prefixes[index])
            mask[row, longest - len(prefixes[index]) :] = 1
        with torch.inference_mode():
            out = model.generate(
                ids.to(model.device), attention_mask=mask.to(model.device), max_new_tokens=new_tokens, do_sample=False,
                pad_token_id=end,
            )  # fmt: skip
        for index, row in zip(batch, out[:, longest:].tolist(), strict=True):
            found[index] = row[: row.index(end) + 1] if end in row else row
    return found


def handed_over(
    first: Any, second: Any, prompts: Sequence[list[int]], handovers: Sequence[int], limit: int
) -> dict[int, list[list[int]]]:
    """Greedy answers of at most `limit` tokens, of which the first model gives at most the hand-over's (appendix D.2).

    The second model goes on only where the first has not ended its answer. A hand-over of 0 is the second alone, one of
    `limit` the first alone. Returns the answers [len(prompts)] of each hand-over.
    """
    if not all(0 <= handover <= limit for handover in handovers):
        raise ValueError(f"Hand-overs come between 0 and {limit} tokens, not at {list(handovers)}.")
    begun = generate(first, prompts, max(handovers))
    answers = {}
    for handover in handovers:
        said = [answer[:handover] for answer in begun]
        open_ends = [i for i, answer in enumerate(said) if not answer or answer[-1] != first.config.eos_token_id]
        rest = generate(second, [[*prompts[i], *said[i]] for i in open_ends], limit - handover)
        for i, tokens in zip(open_ends, rest, strict=True):
            said[i] = said[i] + tokens
        answers[handover] = said
    return answers


def rouge_1(answer: str, reference: str) -> float:
    """ROUGE-1 F1: overlap of lower-cased words, in [0, 1]."""
    said, wanted = (Counter(text.lower().split()) for text in (answer, reference))
    shared = sum((said & wanted).values())
    total = sum(said.values()) + sum(wanted.values())
    return 2 * shared / total if total else 0.0


def scores(tasks: Sequence[Task], answers: Sequence[str]) -> pd.DataFrame:
    """One row a task: item, family, METRICS. An answer is right when it is the reference or its ROUGE-1 exceeds 0.8."""
    references = [task.answer for task in tasks]
    said, wanted = embedder()(list(answers)), embedder()(references)
    overlap = np.array([rouge_1(a, r) for a, r in zip(answers, references, strict=True)])
    exact = np.array([normal(a) == normal(r) for a, r in zip(answers, references, strict=True)])
    return pd.DataFrame({
        "item": range(len(tasks)), "family": [task.family for task in tasks], "rouge_1": overlap,
        "accurate": (exact | (overlap > _RIGHT)).astype(float), "similarity": (said * wanted).sum(axis=1),
        "likelihood": [judge.likelihood(answer) for answer in answers],
    })  # fmt: skip


def why_not(pair: Mapping[str, models.Loaded]) -> str:
    """What keeps two models from a study of answers that change hands; empty when nothing does."""
    if len(pair) != 2:
        return "it takes two models of different names"
    if any(loaded.random for loaded in pair.values()):
        return "a model's weights are random"
    one, two = (loaded.tokenizer.get_vocab() for loaded in pair.values())
    return "" if one == two else "the two models have different vocabularies"


def quality_by_handover(
    pair: Mapping[str, models.Loaded], tasks: Sequence[Task], handovers: Sequence[int], limit: int
) -> pd.DataFrame:
    """`scores` of every task at every hand-over, in both directions of a pair of models.

    pair: label -> model, two with one vocabulary. Columns: direction ("a to b"), handover, those of `scores`, answer.
    """
    if obstacle := why_not(pair):
        raise ValueError(f"No answer can be handed over: {obstacle}.")
    (a, one), (b, two) = pair.items()
    prompts = [one.tokenizer(task.prompt)["input_ids"] for task in tasks]
    parts = []
    with one_thread():
        for name, first, second in ((f"{a} to {b}", one, two), (f"{b} to {a}", two, one)):
            for handover, ids in handed_over(first.model, second.model, prompts, handovers, limit).items():
                answers = [str(first.tokenizer.decode(tokens, skip_special_tokens=True)) for tokens in ids]
                parts.append(scores(tasks, answers).assign(direction=name, handover=handover, answer=answers))
    return pd.concat(parts, ignore_index=True)


def means(table: pd.DataFrame, metrics: Sequence[str], seed: int, draws: int = 2000) -> pd.DataFrame:
    """Mean of each metric by direction and hand-over with its bootstrapped 95 % interval over the items.

    Columns: metric, direction, handover, mean, low, high.
    """
    rows = []
    for metric in metrics:
        for direction, part in table.groupby("direction", sort=False):
            wide = part.pivot(index="item", columns="handover", values=metric)
            low, high = np.quantile(_resampled_means(wide.to_numpy(), seed, draws), [0.025, 0.975], axis=0)
            for column, handover in enumerate(wide.columns):
                rows.append((metric, direction, handover, wide[handover].mean(), low[column], high[column]))
    return pd.DataFrame(rows, columns=["metric", "direction", "handover", "mean", "low", "high"])


def bound(table: pd.DataFrame, metric: str, device: str, seed: int, draws: int = 5000) -> pd.DataFrame:
    """Eq. 6 for the mean of a metric: by how much a migrated answer's lies outside both models' own, paired by item.

    table: quality_by_handover, whose least and greatest hand-overs are the models alone. device: the label of the
    model that stands for the device.
    Columns: direction, handover, first, second (alone), migrated, outside (negative inside the bound) with its interval
    low to high, gain (over the device alone) with gain_low, and within (share of items whose own score keeps the
    bound). Intervals are bootstrapped, 95 % for all rows of the table together (Bonferroni).
    """
    wide = {str(name): part.pivot(index="item", columns="handover", values=metric)
            for name, part in table.groupby("direction", sort=False)}  # fmt: skip
    tail = 0.025 / sum(scored.shape[1] - 2 for scored in wide.values())
    rows = []
    for direction, scored in wide.items():
        values = scored.to_numpy()
        mean, drawn = values.mean(axis=0), _resampled_means(values, seed, draws)
        low, high = np.quantile(outside(drawn), [tail, 1 - tail], axis=0)
        alone = -1 if direction.startswith(f"{device} to ") else 0
        gain, gain_low = mean - mean[alone], np.quantile(drawn - drawn[:, [alone]], tail, axis=0)
        within = (outside(values) <= 1e-12).mean(axis=0)
        for column in range(1, len(mean) - 1):
            rows.append((direction, scored.columns[column], mean[-1], mean[0], mean[column], outside(mean)[column],
                         low[column], high[column], gain[column], gain_low[column], within[column]))  # fmt: skip
    return pd.DataFrame(rows, columns=["direction", "handover", "first", "second", "migrated", "outside", "low", "high",
                                       "gain", "gain_low", "within"])  # fmt: skip


def outside(scored: np.ndarray) -> np.ndarray:
    """By how much scores [.., hand-overs] lie outside those of the two models alone, the first and the last column."""
    alone = scored[..., [0, -1]]
    return np.maximum(alone.min(axis=-1, keepdims=True) - scored, scored - alone.max(axis=-1, keepdims=True))


def _resampled_means(values: np.ndarray, seed: int, draws: int) -> np.ndarray:
    """[draws, columns]: means over items drawn with replacement, the same items in every column."""
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(len(values), np.full(len(values), 1 / len(values)), size=draws)
    return counts @ values / len(values)

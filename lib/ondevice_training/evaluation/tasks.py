"""Greedy answers to the corpus's task prompts: do they end, do they loop, are they right."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice import corpus
from ondevice.causal_lm.generation import LONGEST, Output, greedy, loops, repeated
from ondevice.causal_lm.scoring import Scored, score
from ondevice.corpus import answers
from ondevice.corpus.prompts import END, pick
from ondevice_training.evaluation import estimates

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CLOSED = "rag, passages removed"


@dataclass(frozen=True)
class Judged:
    """One task's output. unseen: whether the reference answer stands nowhere in train."""

    family: str
    output: Output
    reference_ids: tuple[int, ...]
    exact: bool
    hit: bool
    f1: float
    unseen: bool
    scored: Scored  # the reference answer with its end token, teacher-forced

    @property
    def ends_well(self) -> bool:
        """Ended by itself, without a loop."""
        return self.output.ended and not loops(self.output.ids)


def choose(
    documents: Sequence[corpus.Document], tokenizer: PreTrainedTokenizerBase, counts: Mapping[str, int], room: int
) -> tuple[dict[str, list[corpus.Task]], int]:
    """The first tasks of each family, in an order set by hash, and how many were passed over as too long.

    room: the most tokens of a prompt.
    """
    chosen: dict[str, list[corpus.Task]] = {family: [] for family in counts}
    too_long = 0
    candidates = corpus.tasks(documents, list(counts))
    for task in sorted(candidates, key=lambda task: pick(task.name, f"evaluation {task.family}", 2**62)):
        if len(chosen[task.family]) < counts[task.family]:
            fits = len(tokenizer(task.prompt, verbose=False)["input_ids"]) <= room
            too_long += not fits
            chosen[task.family] += [task] if fits else []
    return chosen, too_long


def closed_book(tasks: Sequence[corpus.Task]) -> list[corpus.Task]:
    """The same questions without their passages."""
    return [dataclasses.replace(task, family=CLOSED, passages=()) for task in tasks]


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[corpus.Task],
    train: Callable[[], Iterable[str]],
) -> list[Judged]:
    """Greedy answers, judged. train: the training texts, for the references that stand in them."""
    prompts = [tokenizer(task.prompt, verbose=False)["input_ids"] for task in tasks]
    references = [tokenizer(task.answer + END, verbose=False)["input_ids"] for task in tasks]
    outputs = greedy(model, prompts, tokenizer.eos_token_id)
    decoded = [str(tokenizer.decode(list(output.ids))) for output in outputs]
    seen = standing_in([task.answer for task in tasks], train())
    scored = score(model, prompts, references)
    return [
        Judged(
            task.family, output, tuple(ids[:-1]), answers.exact(text, task.answer), answers.hit(text, task.answer),
            answers.f1(text, task.answer), not in_train, forced,
        )
        for task, output, text, ids, in_train, forced in zip(
            tasks, outputs, decoded, references, seen, scored, strict=True)
    ]  # fmt: skip


def summary(judged: Sequence[Judged]) -> dict[str, Any]:
    """What the bars are about. Families weigh the same in the share that ends well."""
    groups = [
        [sample.ends_well for sample in members] for family, members in _grouped(judged).items() if family != CLOSED
    ]
    open_book = [sample for sample in judged if sample.family == "rag"]
    closed = [sample for sample in judged if sample.family == CLOSED]
    table = np.array([(a.hit, b.hit) for a, b in zip(open_book, closed, strict=True)], float)
    difference = estimates.bootstrap(table, lambda means: means[..., 0] - means[..., 1])
    return {
        "ends_well": estimates.mean_of_groups(groups).as_json(),
        "rag_minus_passages_removed": difference.as_json(),
        "families": {family: _family(members) for family, members in _grouped(judged).items()},
    }


def free_running(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, documents: Sequence[corpus.Document], count: int
) -> dict[str, Any]:
    """Repetition in 256 greedy tokens after a heading, whether or not a document ends in them, and in the documents."""
    ordered = sorted(documents, key=lambda document: pick(document.name, "evaluation free", 2**62))
    ids = [tokenizer(document.text, verbose=False)["input_ids"][:LONGEST] for document in ordered]
    real = [row for row in ids if len(row) == LONGEST][:count]
    headings = [tokenizer(f"{document.heading}\n\n", verbose=False)["input_ids"] for document in ordered[:count]]
    generated = [output.ids for output in greedy(model, headings, None)]
    looped = [loops(row) for row in generated]
    return {
        "repeated_4grams": _repetition(generated),
        "repeated_4grams_of_documents": _repetition(real),
        "loops": estimates.rate(looped).as_json(),
    }


def _grouped(judged: Sequence[Judged]) -> dict[str, list[Judged]]:
    families: dict[str, list[Judged]] = {}
    for sample in judged:
        families.setdefault(sample.family, []).append(sample)
    return families


def _family(members: Sequence[Judged]) -> dict[str, Any]:
    unseen = [sample.hit for sample in members if sample.unseen]
    return {
        "ended": _rate([sample.output.ended for sample in members]),
        "loops": _rate([loops(sample.output.ids) for sample in members]),
        "ends_well": _rate([sample.ends_well for sample in members]),
        "exact": _rate([sample.exact for sample in members]),
        "hit": _rate([sample.hit for sample in members]),
        "hit_of_answers_not_in_train": _rate(unseen),
        "rouge1": _rate([sample.f1 for sample in members]),
        "teacher_forced_accuracy": estimates.ratio(
            [sample.scored.hits.sum() for sample in members], [len(sample.scored.hits) for sample in members]
        ).as_json(),
        "perplexity_of_answer": estimates.perplexity(
            [sample.scored.loss for sample in members], [len(sample.scored.hits) for sample in members]
        ).as_json(),
        "tokens": _rate([len(sample.output.ids) for sample in members]),
        "tokens_of_reference": _rate([len(sample.reference_ids) for sample in members]),
        "repeated_4grams": _repetition([sample.output.ids for sample in members]),
        "repeated_4grams_of_reference": _repetition([sample.reference_ids for sample in members]),
        "loops_of_reference": _rate([loops(sample.reference_ids) for sample in members]),
    }


def _rate(values: Sequence[float]) -> dict[str, Any] | None:
    return estimates.rate(values).as_json() if len(values) > 1 else None


def _repetition(rows: Sequence[Sequence[int]]) -> dict[str, Any] | None:
    counts = [repeated(row) for row in rows]
    if len(counts) < 2 or not sum(total for _, total in counts):
        return None
    # A resample may hold no 4-gram at all where most answers are short; it then has no repeated one either.
    table = np.array(counts, float)
    return estimates.bootstrap(table, lambda means: means[..., 0] / np.maximum(means[..., 1], 1e-9)).as_json()


def standing_in(references: Sequence[str], texts: Iterable[str]) -> list[bool]:
    """Whether each reference's words stand, in their order, in any of the texts."""
    everything = "\n".join(f" {' '.join(answers.words(text))} " for text in texts)
    return [f" {' '.join(answers.words(reference))} " in everything for reference in references]

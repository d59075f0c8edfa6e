"""What the methods are asked: the corpus's task prompts, or Spec-Bench's questions under the same task names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ondevice import corpus, models
from ondevice.diaa.experiments import TASKS
from ondevice.speculation.request_set import Request, answered, requests

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SOURCES = ("corpus", "spec_bench")
_SPEC_BENCH = {
    "summary": "summarization", "doctest": "math_reasoning", "turns": "multi_turn", "question": "qa", "rag": "rag",
    "parameters": "translation",
}  # fmt: skip


def asked(
    source: str, split: str, count: int, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, longest: int
) -> list[Request]:
    """For every task `count` requests that are long enough to be timed, and the shorter ones before them.

    source: corpus, or spec_bench for models that follow instructions (its first turns, in the model's chat template).
    split: test, or validation to prime drafters; Spec-Bench's questions are the first ones of a task, or its last.
    model: in float32. longest: most tokens of an answer.
    Raises ValueError on another source or split.
    """
    if source not in SOURCES or split not in ("test", "validation"):
        raise ValueError(f"Requests come from {' or '.join(SOURCES)}, test or validation; not {source!r}, {split!r}.")
    if source == "corpus":
        return requests(list(TASKS), count, model, tokenizer, corpus.documents(split), longest)
    models.require_trained(model, "the answers to requests")
    found: list[Request] = []
    for task, printed in _SPEC_BENCH.items():
        prompts = _prompts(printed, split == "validation", tokenizer)
        found += answered(task, prompts, count, model, tokenizer.eos_token_id, longest)
    return found


def _prompts(task: str, last: bool, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, list[int]]]:
    questions = [question for question in corpus.spec_bench() if question.task == task]
    for question in reversed(questions) if last else questions:
        chat = [{"role": "user", "content": question.turns[0]}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        yield str(question.identifier), tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

"""Requests to a language model: the repository's own, Spec-Bench's first turns, or a user's file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from ondevice import assets, fetched

TASKS = ("mt", "translation", "summarization", "qa", "math", "rag")
DIAA_NAMES = {  # of the tasks, in DIAA's tables
    "mt": "mt",
    "translation": "trans",
    "summarization": "sum",
    "qa": "qa",
    "math": "math",
    "rag": "rag",
}
USER = "user"  # task of a prompt from a file that names none

_MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
_SPEC_BENCH_TASKS = dict.fromkeys(_MT_BENCH, "mt") | {
    "translation": "translation",
    "summarization": "summarization",
    "qa": "qa",
    "math_reasoning": "math",
    "rag": "rag",
}
_OWN_FILES = {"test": "prompts.jsonl", "validation": "validation.jsonl"}


@dataclass(frozen=True)
class Prompt:
    """A request of one turn. task: of TASKS, or what a user's file calls it. text: without any chat template."""

    id: str
    task: str
    text: str


def own(split: Literal["test", "validation"] = "test") -> list[Prompt]:
    """The repository's own prompts (data/prompts), task by task: ten per task, or six per task for fitting weights.

    Raises ValueError on another split.
    """
    if split not in _OWN_FILES:
        raise ValueError(f"The repository's own prompts have the splits {' and '.join(_OWN_FILES)}, not {split!r}.")
    path = assets.data("prompts", _OWN_FILES[split])
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [Prompt(row["id"], row["task"], row["prompt"]) for row in rows]


def spec_bench() -> list[Prompt]:
    """The first turns of Spec-Bench's 480 questions, 80 per task, in the order of its file.

    Source: hemingkx/Spec-Bench, data/spec_bench/question.jsonl, from the local data folder or the user's cache.
    Raises FileNotFoundError where it was not fetched, ValueError where its checksum differs.
    """
    path = fetched.path(fetched.SPEC_BENCH)
    if path is None:
        command = fetched.command(fetched.SPEC_BENCH)
        raise FileNotFoundError(f"Spec-Bench's questions are not on this machine; `{command}` fetches them.")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    return [
        Prompt(f"spec-bench-{row['question_id']}", _SPEC_BENCH_TASKS[row["category"]], row["turns"][0]) for row in rows
    ]


def from_file(path: Path) -> list[Prompt]:
    """The prompts of a user's file: JSON lines where it is named .jsonl or begins with `{`, else one prompt per line.

    A JSON line has the prompt as `prompt` or `text`, and may have its `task` (else USER). Empty lines are skipped. The
    id of a prompt is the file's stem with the line's number. Raises ValueError, with one sentence, on a folder, a file
    that is not UTF-8 or without any prompt, or a line that cannot be read.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder; prompts come from a file.")
    try:
        content = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}).") from None
    as_json = path.suffix == ".jsonl" or content.lstrip().startswith("{")
    prompts = []
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        task, text = _from_json(line, f"Line {number} of {path}") if as_json else (USER, line.strip())
        prompts.append(Prompt(f"{path.stem}-{number}", task, text))
    if not prompts:
        raise ValueError(f"{path} has no prompt in it.")
    return prompts


def digest(text: str) -> str:
    """The first 12 hex digits of a text's sha256, by which records name a prompt without quoting it."""
    return sha256(text.encode()).hexdigest()[:12]


def _from_json(line: str, where: str) -> tuple[str, str]:
    """Task and text of a JSON line. where: the line's number and file, for an error."""
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON ({error}).") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where} is not a JSON object with a `prompt`.")
    text = row.get("prompt", row.get("text"))
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{where} has no text as its `prompt` or `text`.")
    task = row.get("task", USER)
    if not isinstance(task, str) or not task.strip():
        raise ValueError(f"{where} has a `task` that is no name.")
    try:
        f"{task}{text}".encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where} has half of a surrogate pair, which is no character.") from None
    return task, text

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
_JSON = (".json", ".jsonl", ".ndjson")
_OTHER_FORMS = (".csv", ".tsv", ".yaml", ".yml", ".toml", ".xml", ".html", ".ipynb")  # text, but not a prompt per line
_OWN_FILES = {"test": "prompts.jsonl", "validation": "validation.jsonl"}


@dataclass(frozen=True)
class Prompt:
    """A request of one turn. task: of TASKS, or what a user's file calls it. text: without any chat template.

    references: answers that are right, of those of Spec-Bench's tasks that have any.
    """

    id: str
    task: str
    text: str
    references: tuple[str, ...] = ()


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
        Prompt(f"spec-bench-{row['question_id']}", _SPEC_BENCH_TASKS[row["category"]], row["turns"][0], _first(row))
        for row in rows
    ]


def from_file(path: Path) -> list[Prompt]:
    """The prompts of a user's file: a JSON array, JSON lines, or one prompt per line.

    It is JSON where its name ends in .json, .jsonl or .ndjson, or where it begins as an object or as an array of
    strings or objects. An object has the prompt as `prompt` or `text`, and may have its `task` (else USER). Empty lines
    are skipped. The id of a prompt is the file's stem with the number of its line, or of its entry in the array. Raises
    ValueError, with one sentence, on a folder, a file that is not UTF-8 text, of another form or without any prompt,
    and an entry that cannot be read.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder; prompts come from a file.")
    suffix = path.suffix.lower()
    if suffix in _OTHER_FORMS:
        raise ValueError(f"{path} is {suffix[1:]}; prompts come as lines of text, JSON lines or a JSON array.")
    try:
        content = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}).") from None
    if "\0" in content:
        raise ValueError(f"{path} is not UTF-8 text: it has a null character.")
    beginning = "".join(content.split(maxsplit=2)[:2])[:2]
    entries: list[tuple[int, str, str]] = []  # number, task, text
    if beginning in ('["', "[{", "[]") or (suffix in _JSON and beginning[:1] == "["):
        for number, row in enumerate(_parsed(content, str(path)), start=1):
            where = f"Entry {number} of {path}"
            entries.append((number, *_entry({"prompt": row} if isinstance(row, str) else row, where)))
    else:
        as_json = suffix in _JSON or beginning[:1] == "{"
        for number, line in enumerate(content.split("\n"), start=1):
            if line.strip():
                where = f"Line {number} of {path}"
                entries.append((number, *(_entry(_parsed(line, where), where) if as_json else (USER, line.strip()))))
    if not entries:
        raise ValueError(f"{path} has no prompt in it.")
    return [Prompt(f"{path.stem}-{number}", task, text) for number, task, text in entries]


def digest(text: str) -> str:
    """The first 12 hex digits of a text's sha256, by which records name a prompt without quoting it."""
    return sha256(text.encode()).hexdigest()[:12]


def _first(row: dict[str, Any]) -> tuple[str, ...]:
    """The reference answers to the first turn of a question of Spec-Bench: one or several texts, or none."""
    references = row.get("reference") or [()]
    several = references[0]
    return (several,) if isinstance(several, str) else tuple(several)


def _parsed(text: str, where: str) -> Any:
    """The value of a JSON text. where: its line and file, for an error."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON ({error}).") from None


def _entry(row: Any, where: str) -> tuple[str, str]:
    """Task and text of an object. where: its number and file, for an error."""
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

"""Public benchmark texts: WikiText-2 and Spec-Bench, from the local data folder or the hub."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass

from ondevice import assets

_WIKITEXT_FILES = {"validation": "valid", "test": "test"}
_WIKITEXT_HUB = ("Salesforce/wikitext", "wikitext-2-v1")
_SPEC_BENCH = "spec_bench/question.jsonl"
_GROUPS = ("translation", "summarization", "qa", "math_reasoning", "rag")  # the other categories are MT-Bench's


@dataclass(frozen=True)
class Question:
    """A Spec-Bench question. task: one of its six, multi-turn standing for MT-Bench's eight categories."""

    identifier: int
    task: str
    turns: tuple[str, ...]


def wikitext(split: str = "test") -> str:
    """WikiText-2 (word level, with <unk>) as one text: wikitext-2/ of the local data, else the hub."""
    if split not in _WIKITEXT_FILES:
        raise ValueError(f"WikiText-2 is read for {', '.join(_WIKITEXT_FILES)}, not {split!r}.")
    path = assets.local_file(f"wikitext-2/{_WIKITEXT_FILES[split]}.txt.gz")
    if path is not None:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return file.read()
    import datasets

    try:
        return "".join(datasets.load_dataset(*_WIKITEXT_HUB, split=split)["text"])
    except (OSError, ValueError) as error:
        where = "neither in the local data folder nor to be had from the hub"
        raise FileNotFoundError(f"WikiText-2 is {where}: {error}") from None


def spec_bench() -> list[Question]:
    """The 480 questions of Spec-Bench, from spec_bench/question.jsonl of the local data folder."""
    path = assets.local_file(_SPEC_BENCH)
    if path is None:
        raise FileNotFoundError(
            f"Spec-Bench is not here: put question.jsonl of github.com/hemingkx/Spec-Bench at {_SPEC_BENCH} "
            f"below the folder that ${assets.LOCAL_DATA_VARIABLE} names."
        )
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [Question(row["question_id"], _task(row["category"]), tuple(row["turns"])) for row in rows]


def _task(category: str) -> str:
    return category if category in _GROUPS else "multi_turn"

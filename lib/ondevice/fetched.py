"""Files that a user fetches once with `python -m ondevice.data`: names, checksums, and where whole ones lie."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path

from ondevice import assets

SPEC_BENCH = "spec-bench"
QWEN = "qwen2.5-coder-0.5b-instruct"
WIKITEXT = "wikitext-2"
SMOLLM2 = "smollm2-135m-instruct"  # comes as an installed package (`models`)
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@dataclass(frozen=True)
class File:
    """A published file. folder: below the user's cache, and below the local data folder. size: bytes."""

    folder: str
    name: str
    size: int
    sha256: str


FILES = {
    SPEC_BENCH: File(
        folder="spec_bench",
        name="question.jsonl",
        size=698_768,
        sha256="4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04",
    ),
    QWEN: File(
        folder="gguf",
        name="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        size=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
}
MODEL_SHA256 = {SMOLLM2: SMOLLM2_SHA256, QWEN: FILES[QWEN].sha256}  # of the GGUF
WIKITEXT_ROWS = {"test": 4358, "validation": 3760}  # lines of the splits, by the data set's card


def command(name: str) -> str:
    """The command that fetches this file."""
    return f"python -m ondevice.data {name}"


def path(name: str) -> Path | None:
    """Where a whole copy of a file of FILES lies: the local data folder, else the user's cache; None without any.

    A file is read for its checksum once, and again when it has changed (`assets.stamp`).
    Raises ValueError where the only copies have another checksum.
    """
    file = FILES[name]
    damaged = None
    for folder in _folders(file):
        copy = folder / file.name
        if not copy.is_file():
            continue
        if _whole(name, copy):
            return copy
        damaged = copy
    if damaged:
        raise ValueError(f"{damaged} is damaged or another file (its checksum differs); {command(name)} fetches it.")
    return None


def wikitext(split: str) -> Path | None:
    """The raw text of a split of WikiText-2 in the user's cache, a row of the data set per line; None without it.

    split: `test` or `validation`. Raises ValueError on another.
    """
    if split not in WIKITEXT_ROWS:
        raise ValueError(f"WikiText-2 is fetched in the splits {' and '.join(WIKITEXT_ROWS)}, not {split!r}.")
    text = wikitext_path(split)
    return text if text.is_file() else None


def wikitext_path(split: str) -> Path:
    """Where a split of WikiText-2 is put."""
    return assets.cache_folder(WIKITEXT) / f"{split}.txt"


def _folders(file: File) -> Iterator[Path]:
    """Where a file may lie. The cache's folder is made only where the local one has no whole copy."""
    local = assets.local_data()
    if local:
        yield local / file.folder
    yield assets.cache_folder(file.folder)


def _whole(name: str, copy: Path) -> bool:
    """Whether a copy has its official checksum."""
    file = FILES[name]
    if copy.stat().st_size != file.size:
        return False
    stamp = json.dumps([*assets.stamp(copy), file.sha256])
    with contextlib.suppress(OSError, ValueError):  # no stamp yet, or a damaged one
        if _stamp_path(name).read_text(encoding="utf-8") == stamp:
            return True
    with copy.open("rb") as opened:
        if file_digest(opened, "sha256").hexdigest() != file.sha256:
            return False
    with contextlib.suppress(OSError):  # a cache that is full or read-only costs time, not the file
        assets.write_text(_stamp_path(name), stamp)
    return True


def _stamp_path(name: str) -> Path:
    """Where the size and time of the copy whose checksum was right are kept."""
    return assets.cache_folder("checksums") / f"{name}.json"

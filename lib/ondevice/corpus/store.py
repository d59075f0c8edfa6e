"""The corpus on disk: built once for a set of package versions, then read back as a `datasets.Dataset`."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, fields
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock
from tqdm import tqdm

from ondevice import assets, extras
from ondevice.corpus.reading import Document, installed_documents, unique, versions
from ondevice.corpus.splits import SPLITS, Selection, select

if TYPE_CHECKING:
    from datasets import Dataset

_FORMAT = 1  # raise it when the reading, splitting or cleaning changes


def folder() -> Path:
    """The corpus's folder in the cache, built when it is not there (about two minutes).

    One process builds, and others wait for it. What is read of each package is kept, so an interrupted build goes on.
    """
    packages = versions()
    key = sha256(json.dumps([_FORMAT, packages]).encode()).hexdigest()[:16]
    path = assets.cache_folder("corpus") / key
    manifest = path / "manifest.json"
    if not manifest.is_file():
        with FileLock(path.with_suffix(".lock")):
            if not manifest.is_file():
                started = time.perf_counter()
                documents = unique(_read(packages))
                write(path, select(documents), packages, len(documents), started)
    return path


def _read(packages: dict[str, str]) -> Iterator[Document]:
    """The documents of each package."""
    for package, version in tqdm(packages.items(), desc="reading docstrings", unit="package", leave=False):
        for row in json.loads(kept(package, version).read_text(encoding="utf-8")):
            yield Document(*row)


def kept(package: str, version: str) -> Path:
    """The file in the cache that has an installed package's documents, read where it is not there."""
    path = assets.cache_folder("corpus") / "packages" / f"{package}-{version}-{_FORMAT}.json"
    if not path.is_file():
        rows = [list(asdict(document).values()) for document in installed_documents([package])]
        assets.write_text(path, json.dumps(rows))
    return path


def write(path: Path, selection: Selection, packages: dict[str, str], read: int, started: float) -> None:
    """Write a selection's splits, then its manifest, which marks the folder as whole."""
    import datasets

    datasets.disable_progress_bars()  # a notebook would keep them
    counts: dict[str, Any] = {}
    for split in SPLITS:
        documents = selection.documents[split]
        rows = [asdict(document) for document in documents]
        columns = {name: [row[name] for row in rows] for name in Document.__dataclass_fields__}
        datasets.Dataset.from_dict(columns).save_to_disk(path / split)
        counts[split] = {"documents": len(documents), "bytes": sum(len(d.text.encode()) for d in documents)}
    manifest = {
        "docstrings_read": read,
        "exact_duplicates_removed": selection.exact_duplicates,
        "near_duplicates_removed": selection.near_duplicates,
        "splits": counts,
        "seconds": round(time.perf_counter() - started, 1),
        "packages": packages,
    }
    assets.write_text(path / "manifest.json", json.dumps(manifest, indent=1) + "\n")


def manifest() -> dict[str, Any]:
    """Package versions, counts, bytes, and what was removed."""
    return json.loads((folder() / "manifest.json").read_text(encoding="utf-8"))


def dataset(split: str) -> Dataset:
    """One split as a `datasets.Dataset` with the columns of `Document`, in order of the qualified names."""
    with extras.needing("notebooks", "The corpus"):
        import datasets

    if split not in SPLITS:
        raise ValueError(f"There is no split {split!r}; there are {', '.join(SPLITS)}.")
    return datasets.load_from_disk(str(folder() / split))


@functools.lru_cache(maxsize=len(SPLITS))
def documents(split: str) -> tuple[Document, ...]:
    """One split as documents, in order of their qualified names."""
    columns = dataset(split).to_dict()  # whole columns: row by row takes six times as long
    return tuple(Document(*values) for values in zip(*(columns[field.name] for field in fields(Document)), strict=True))

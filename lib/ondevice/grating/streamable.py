"""A model as a folder whose weights can be streamed.

Folders, hub models and bundled models that are stored whole are used as they are. What is put together from parts (the
bundled rerankers are differences from other models), has random weights, or is wanted in another dtype or as int8, is
saved once below data/cache/grating. Saving takes the memory of the whole model, once, and is not part of any budget:
call `prepare` beforehand where that matters.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import file_digest, sha256
from pathlib import Path

import torch

from ondevice import assets, difference, models
from ondevice.grating import quantised
from ondevice.grating.checkpoint import INDEX, SINGLE, Checkpoint

_RANDOM = "random:"
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
                 "sentencepiece.bpe.model")  # fmt: skip
_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.txt", "*.model", "*.jinja"]  # of a hub model


@dataclass(frozen=True)
class Streamable:
    """A model's folder and that of its tokenizer, which several models may share."""

    folder: Path
    vocabulary: Path


def prepare(spec: str, dtype: torch.dtype | None = None, int8: bool = False) -> Streamable:
    """The folder that `spec`, as `models.load` has it, is streamed from.

    dtype: None is the stored one; float32 of models put together, bfloat16 of random weights. int8: layers' matrices
    quantised (`quantised`). Raises as `models.load` does, and ValueError or FileNotFoundError on a folder whose weights
    cannot be streamed.
    """
    found = _found(spec, dtype)
    checkpoint = Checkpoint.open(found.folder)
    if dtype is not None and checkpoint.groups.table.dtype != dtype:
        found = _converted(spec, found, dtype)
    return _small(found) if int8 and not quantised.is_quantised(Checkpoint.open(found.folder)) else found


def _small(found: Streamable) -> Streamable:
    """The quantised copy of a folder, with its tokenizer."""

    def save(folder: Path) -> None:
        quantised.save(found.folder, folder)
        for path in found.vocabulary.iterdir():
            if path.suffix in (".json", ".txt", ".model", ".jinja") and path.name not in ("config.json", INDEX):
                shutil.copy(path, folder / path.name)

    name = found.folder.name if found.folder.parent == _cache() else f"{found.folder.name}-{_stamp(found.folder)}"
    folder = _written(f"{name}-int8", save)
    return Streamable(folder, folder)


def _found(spec: str, dtype: torch.dtype | None) -> Streamable:
    if spec.startswith(_RANDOM):
        return _loaded(spec, spec.replace(":", "-"), dtype or torch.bfloat16)
    if spec in models.bundled():
        folder = assets.ROOT / "data" / "models" / spec
    elif spec == models.MINILM:
        folder = models.minilm_folder()
    else:
        folder = Path(spec).expanduser()
    if folder.is_dir():
        return _local(spec, folder, dtype)
    if spec.startswith((".", "/", "~")):
        raise FileNotFoundError(f"There is no folder {spec!r} to load a model from.")
    if spec.partition("@")[0].count("/") != 1:
        raise ValueError(f"There is no model {spec!r}; {models.available()}.")
    folder = _downloaded(spec)
    return Streamable(folder, folder)


def _local(spec: str, folder: Path, dtype: torch.dtype | None) -> Streamable:
    """A folder; a bundled one has the tokenizer that all of them share where it has none of its own."""
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{spec} has no config.json, so it is no folder of a model.")
    if (folder / difference.FILE).is_file():
        parts = [folder / "config.json", folder / difference.FILE]  # the latter has its parent's sha256
        wanted = dtype or torch.float32
        return _loaded(spec, f"{folder.name}-{_digest(_contents(path) for path in parts)}", wanted)
    if any((folder / name).is_file() for name in _VOCABULARIES):
        return Streamable(folder, folder)
    if spec not in models.bundled():  # transformers would make a tokenizer without entries
        raise FileNotFoundError(f"{spec} has no tokenizer (none of {', '.join(_VOCABULARIES)}).")
    return Streamable(folder, assets.ROOT / "data" / "models" / "tokenizer")


def _converted(spec: str, found: Streamable, dtype: torch.dtype) -> Streamable:
    if quantised.is_quantised(Checkpoint.open(found.folder)):
        raise ValueError(f"{spec} is quantised from another dtype than {dtype}: it cannot be converted.")
    return _loaded(spec, f"{found.folder.name}-{_stamp(found.folder)}", dtype)


def _loaded(spec: str, name: str, dtype: torch.dtype) -> Streamable:
    """What `models.load` makes of a spec, saved unless it is there."""

    def save(folder: Path) -> None:
        from transformers.utils import logging

        loaded, bars = models.load(spec, dtype), logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        loaded.model.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)
        if bars:
            logging.enable_progress_bar()

    folder = _written(f"{name}-{str(dtype).removeprefix('torch.')}", save)
    return Streamable(folder, folder)


def _written(name: str, write: Callable[[Path], None]) -> Path:
    """The folder of that name in the cache, written by `write` unless it is there: whole, or not at all."""
    target = _cache() / name
    if target.is_dir():
        return target
    with tempfile.TemporaryDirectory(dir=_cache(), prefix=".") as made:
        whole = Path(made) / name
        whole.mkdir()
        write(whole)
        try:
            whole.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was faster
                raise
    return target


def _downloaded(spec: str) -> Path:
    """The files of a hub model in the hub's cache, fetched where they are not there."""
    from huggingface_hub import errors, snapshot_download

    name, _, revision = spec.partition("@")
    try:
        return Path(snapshot_download(name, revision=revision or "main", allow_patterns=_FILES))
    except errors.GatedRepoError:
        raise PermissionError(f"{name} asks you to accept its licence on the hub and to log in.") from None
    except errors.RepositoryNotFoundError:
        raise ValueError(f"The hub has no model {name!r}; {models.available()}.") from None
    except errors.RevisionNotFoundError:
        raise ValueError(f"{name} has no revision {revision!r} on the hub.") from None
    except (errors.LocalEntryNotFoundError, OSError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        message = f"{spec} is not (whole) in the hub's local cache, and there is no network to fetch it"
        raise ConnectionError(f"{message}; bundled models, {_RANDOM} shapes and folders need none.") from None


def _cache() -> Path:
    return assets.cache_folder("grating")


def _digest(parts: Iterable[bytes]) -> str:
    return sha256(b"".join(sha256(part).digest() for part in parts)).hexdigest()[:16]


def _contents(path: Path) -> bytes:
    """The sha256 of a file, read piece by piece: a large file's memory would stay with the process for a while."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").digest()


def _stamp(folder: Path) -> str:
    """Names the weights of a folder of any size: by their files' names, sizes and times, and the config's content."""
    files = sorted({*folder.glob("*.safetensors"), folder / SINGLE, folder / INDEX})
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files if path.exists()]
    return _digest([_contents(folder / "config.json"), os.fsencode(folder.resolve()), repr(stats).encode()])

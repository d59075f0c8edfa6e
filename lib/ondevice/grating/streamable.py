"""A model as a folder whose weights can be streamed.

Folders and hub models are used as they are. What has random weights, or is wanted as int8 or in another dtype than it
is stored in (bundled rerankers: stored in float16, computed with in float32), is saved once in the cache. Saving
takes the memory of the whole model, once, and is not part of any budget: call `prepare` beforehand where that matters.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from hashlib import file_digest, sha256
from pathlib import Path

import torch

from ondevice import assets, models
from ondevice.grating import quantised
from ondevice.grating.checkpoint import INDEX, SINGLE, Checkpoint

_RANDOM = "random:"
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
                 "sentencepiece.bpe.model")  # fmt: skip
_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.txt", "*.model", "*.jinja"]  # of a hub model


def prepare(spec: str, dtype: torch.dtype | None = None, int8: bool = False) -> Path:
    """The folder, with the model's tokenizer, that `spec`, as `models.load` has it, is streamed from.

    dtype: None is the one that the model's config names; bfloat16 of random weights. int8: layers' matrices quantised
    (`quantised`). Raises as `models.load` does, and ValueError or FileNotFoundError on a folder whose weights
    cannot be streamed.
    """
    found = _found(spec, dtype)
    wanted = dtype or _named(found)
    if wanted is not None and Checkpoint.open(found).groups.table.dtype != wanted:
        found = _converted(spec, found, wanted)
    return _small(found) if int8 and not quantised.is_quantised(Checkpoint.open(found)) else found


def _small(whole: Path) -> Path:
    """The quantised copy of a folder, with its tokenizer."""

    def save(folder: Path) -> None:
        quantised.save(whole, folder)
        for path in whole.iterdir():
            if path.suffix in (".json", ".txt", ".model", ".jinja") and path.name not in ("config.json", INDEX):
                shutil.copy(path, folder / path.name)

    name = whole.name if whole.parent == _cache() else f"{whole.name}-{_stamp(whole)}"
    return _written(f"{name}-int8", save)


def _found(spec: str, dtype: torch.dtype | None) -> Path:
    if spec.startswith(_RANDOM):
        return _loaded(spec, spec.replace(":", "-"), dtype or torch.bfloat16)
    if spec in models.bundled():
        folder = assets.data("models", spec)
    elif spec == models.MINILM:
        folder = models.minilm_folder()
    else:
        folder = Path(spec).expanduser()
    if folder.is_dir():
        return _local(spec, folder)
    if spec.startswith((".", "/", "~")):
        raise FileNotFoundError(f"There is no folder {spec!r} to load a model from.")
    if spec.partition("@")[0].count("/") != 1:
        raise ValueError(f"There is no model {spec!r}; {models.available()}.")
    return _downloaded(spec)


def _local(spec: str, folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{spec} has no config.json, so it is no folder of a model.")
    if not any((folder / name).is_file() for name in _VOCABULARIES):  # transformers would make one without entries
        raise FileNotFoundError(f"{spec} has no tokenizer (none of {', '.join(_VOCABULARIES)}).")
    return folder


def _named(folder: Path) -> torch.dtype | None:
    """The dtype in a folder's config."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    name = config.get("dtype") or config.get("torch_dtype")
    return getattr(torch, name) if name else None


def _converted(spec: str, found: Path, dtype: torch.dtype) -> Path:
    if quantised.is_quantised(Checkpoint.open(found)):
        raise ValueError(f"{spec} is quantised from another dtype than {dtype}: it cannot be converted.")
    return _loaded(spec, f"{found.name}-{_stamp(found)}", dtype)


def _loaded(spec: str, name: str, dtype: torch.dtype) -> Path:
    """What `models.load` makes of a spec, saved unless it is there."""

    def save(folder: Path) -> None:
        from transformers.utils import logging

        loaded, bars = models.load(spec, dtype), logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        loaded.model.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)
        if bars:
            logging.enable_progress_bar()

    return _written(f"{name}-{str(dtype).removeprefix('torch.')}", save)


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

"""A model as a folder whose weights can be streamed.

Folders and hub models are used as they are. What has random weights, is a GGUF, has a low-rank adapter, or is stored in
another dtype than its config names (bundled rerankers: stored in float16, computed with in float32), is saved once in
the cache, by a process of its own, as that takes the memory of the whole model. Its tokenizer and settings are read
where they were, if they are there.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from hashlib import file_digest, sha256
from pathlib import Path
from typing import NamedTuple

import torch

from ondevice import adapters, assets, commands, models
from ondevice_papers.grating import checksums
from ondevice_papers.grating.checkpoint import Checkpoint
from ondevice_programs.reranker import settings

_RANDOM = "random:"
_LEFT = ("pydocs-reranker", "pydocs-reranker-deep")  # rerankers that old commands may still name
_OF_GGUF = "a GGUF file scores by a recipe if it is a causal language model's; else name the folder with safetensors"
_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.txt", "*.model", "*.jinja"]  # of a hub model


class Folders(NamedTuple):
    """weights: the folder that is streamed from, with its config.json. settings: that which was named."""

    weights: Path
    settings: Path

    @property
    def tokenizer(self) -> Path:
        """The folder with the tokenizer: an adapter's may have none of its own."""
        own = any((self.settings / name).is_file() for name in models.VOCABULARIES)
        return self.settings if own else self.weights


def prepare(spec: str, dtype: torch.dtype | None = None) -> Path:
    """The folder that `spec`, as `models.load` has it, is streamed from. dtype: as of `folders`."""
    return folders(spec, dtype).weights


def folders(
    spec: str,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
    cache_folder: str | None = None,
) -> Folders:
    """The folders of what `spec`, as `models.load` has it, names.

    dtype: None is the one that the model's config names; bfloat16 of random weights. revision, token, local_files_only,
    cache_folder: of a hub model. Raises as `models.load` does, and ValueError or FileNotFoundError on a folder whose
    weights cannot be streamed, or that sets what is not applied here.
    """
    if spec in _LEFT:
        raise ValueError(f"The reranker {spec!r} has left this repository; smollm2-reranker takes its place.")
    if spec.startswith(_RANDOM):
        return _alone(_loaded(spec, spec.replace(":", "-"), dtype or torch.bfloat16))
    name, _, at = spec.partition("@")
    if (gguf := _gguf(spec)) is not None:
        with gguf.open("rb") as file:
            checksum = file_digest(file, "sha256").hexdigest()[:12]
        try:
            return _alone(_loaded(spec, f"{gguf.stem}-{checksum}", dtype or torch.float32, announced=True))
        except ValueError as error:
            raise ValueError(f"{str(error).rstrip('.')}; {_OF_GGUF}.") from None
    folder = _local(spec) or _downloaded(name, revision or at or "main", token, local_files_only, cache_folder)
    _require_model(spec, folder)
    settings.require_applied(spec, folder)
    if adapters.is_adapter(folder) or adapters.is_beside(folder):
        name = f"{folder.name}-{_checksum(folder)}"
        model = spec if spec in models.bundled() else str(folder)
        return Folders(_loaded(model, name, dtype or torch.float32, announced=True), folder)
    wanted = dtype or _named(folder)
    checkpoint = Checkpoint.open(folder)
    if wanted in (None, checkpoint.groups.table.dtype):
        return _alone(folder)
    stamp = checksums.stamp(checkpoint, (folder / "config.json").read_bytes())
    return Folders(_loaded(str(folder), f"{folder.name}-{stamp}", wanted), folder)


def _alone(folder: Path) -> Folders:
    return Folders(folder, folder)


def _gguf(spec: str) -> Path | None:
    """The GGUF file that a spec names, None where it names something else."""
    if spec == models.SMOLLM2:
        return models.smollm2_file()
    if spec == models.QWEN:
        return models.qwen_file()
    path = Path(spec).expanduser()
    if path.suffix.lower() != ".gguf" and not _begins_as_gguf(path):
        return None
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {spec!r} to load a model from.")
    return path


def _begins_as_gguf(path: Path) -> bool:
    """Whether it is a file that begins as a GGUF does, whatever its name, as the hub's cache has it."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def _local(spec: str) -> Path | None:
    """The folder that a spec names, None for a hub's."""
    if spec in models.bundled():
        folder = assets.data("models", spec)
    elif spec == models.MINILM:
        folder = models.minilm_folder()
    else:
        folder = Path(spec).expanduser()
    if folder.is_file():
        raise ValueError(f"{spec} is a file: a reranker is a folder with safetensors, or a GGUF file.")
    if not folder.is_dir():
        if spec.startswith((".", "/", "~")):
            raise FileNotFoundError(f"There is no folder {spec!r} to load a model from.")
        if spec.partition("@")[0].count("/") != 1:
            raise ValueError(f"There is no model {spec!r}; {models.available()}.")
        return None
    return folder


def _require_model(spec: str, folder: Path) -> None:
    """Raise ValueError or FileNotFoundError unless a folder has a configuration and a tokenizer, or an adapter."""
    files = sorted(folder.glob("*.gguf"))
    if files and not list(folder.glob("*.safetensors")):
        raise ValueError(f"{spec} has {files[0].name} and no safetensors: name that file; {_OF_GGUF}.")
    if adapters.is_adapter(folder):
        return
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{spec} has no config.json, so it is no folder of a model.")
    if not any((folder / name).is_file() for name in models.VOCABULARIES):  # transformers would make an empty one
        raise FileNotFoundError(f"{spec} has no tokenizer (none of {', '.join(models.VOCABULARIES)}).")


def _checksum(folder: Path) -> str:
    """12 hex digits of an adapter's files and of its base: of weights sizes and times, of the rest the content."""
    named = adapters.opened(folder).base
    base = assets.data("models", named) if named in models.bundled() else Path(named).expanduser()
    parts = list[bytes]()
    for part in (folder, base) if base.is_dir() else (folder,):
        for path in sorted(path for path in part.iterdir() if path.is_file() and path.suffix != ".md"):
            facts = path.stat()
            weights = path.suffix == ".safetensors"
            content = repr((facts.st_size, facts.st_mtime_ns)).encode() if weights else path.read_bytes()
            parts += [path.name.encode(), content]
    return sha256(b"\0".join(parts)).hexdigest()[:12]


def _named(folder: Path) -> torch.dtype | None:
    """The dtype in a folder's config."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        name = config.get("dtype") or config.get("torch_dtype")
    except (ValueError, AttributeError):
        raise ValueError(f"config.json of {folder.name} is damaged: it is no JSON of a model.") from None
    return getattr(torch, str(name), None) if name else None


def _loaded(spec: str, name: str, dtype: torch.dtype, announced: bool = False) -> Path:
    """What `models.load` makes of a spec, saved whole in the cache unless it is there.

    announced: on standard error, as it takes a while.
    """
    kind = str(dtype).removeprefix("torch.")
    cache = assets.cache_folder("grating")
    target = cache / f"{name}-{kind}"
    _sweep(cache)
    if target.is_dir():
        return target
    if not os.access(cache, os.W_OK):
        raise OSError(errno.EACCES, f"the cache folder cannot be written: set {assets.CACHE_VARIABLE}", cache.name)
    if announced:
        print(f"Writing {spec} as {kind} to {target}", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=cache, prefix=f".{os.getpid()}-") as temporary:
        saved = Path(temporary) / name
        words = [sys.executable, "-m", "ondevice_programs.reranker.folder", "save", spec, kind, str(saved)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise ValueError(f"{spec} could not be saved as {kind}: {last.partition(': ')[2] or last}")
        try:
            saved.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was faster
                raise
    if announced:
        megabytes = sum(path.stat().st_size for path in target.iterdir()) / 1e6
        print(f"Written: {megabytes:.0f} MB, which stay there for the next time", file=sys.stderr)
    return target


def _sweep(cache: Path) -> None:
    """Remove what processes left that were killed while they saved."""
    for left in cache.glob(".[0-9]*-*"):
        number = left.name[1:].partition("-")[0]
        if number.isdecimal() and Path("/proc/self").exists() and not Path(f"/proc/{number}").exists():
            shutil.rmtree(left, ignore_errors=True)


def _downloaded(name: str, revision: str, token: str | bool | None, local: bool, cache_folder: str | None) -> Path:
    """The files of a hub model in the hub's cache, fetched where they are not there."""
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=_FILES,
                token=token,
                local_files_only=local,
                cache_dir=cache_folder,
            )
        )
    except errors.GatedRepoError:
        raise PermissionError(f"{name} asks you to accept its licence on the hub and to log in.") from None
    except errors.RepositoryNotFoundError:
        raise ValueError(f"The hub has no model {name!r}; {models.available()}.") from None
    except errors.RevisionNotFoundError:
        raise ValueError(f"{name} has no revision {revision!r} on the hub.") from None
    except (errors.LocalEntryNotFoundError, OSError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        message = f"{name} is not (whole) in the hub's local cache, and there is no network to fetch it"
        raise ConnectionError(f"{message}; bundled models, {_RANDOM} shapes and folders need none.") from None


def _save(spec: str, kind: str, folder: str) -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    dtype = getattr(torch, kind)
    loaded = models.load(spec) if _gguf(spec) else models.load(spec, dtype)
    loaded.model.to(dtype).save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        _save(*commands.child("save")[1:])

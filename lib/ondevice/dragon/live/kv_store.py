"""Keys and values of each document's prompt prefix, kept on disk: a document is prefilled once, not once a query.

A prompt starts with its document, so that the prefix is the same in every query and its rows can be used again without
any approximation. Rows depend on the weights and the token ids before them, on nothing else. A file holds the rows and
the ids in the clear: the folder is as private as the documents.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import time
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import safetensors
import safetensors.torch
import torch

from ondevice import assets
from ondevice.causal_lm import CausalLM
from ondevice.dragon.live.batch import Batch, Member

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_FORMAT = "ondevice.dragon prefix 2"  # raise it when the tensors or their meaning change
_NAME = re.compile(r"[0-9a-f]{64}\.safetensors")
_PARTIAL = re.compile(r"\.[0-9a-f]{64}-.*\.safetensors")  # of `assets.writing`
_ABANDONED = 3600.0  # seconds after which a partial file has no writer any more
_LONGEST = 1 << 16  # bytes of a header
_VECTORS = 512  # buffers of one read: the system's limit is 1024
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64}
_UNUSED = ("_name_or_path", "transformers_version", "use_cache")  # of a configuration: they do not change any row


class KVStore:
    """The prefix rows of one model, tokenizer and template in a folder that other processes and models may share.

    template: the text that documents and queries are put in.
    cap: bytes of all the files of the folder together; those used longest ago go first.
    A file that cannot be used (damaged, foreign) is a miss, with a warning, and is written anew; where nothing can be
    written, there is a warning and no other harm. hits, misses: of `session` so far.
    model, tokenizer: hexadecimal sha256 digests.
    Raises ValueError on a cap below 1, and where `folder` is a file.
    """

    def __init__(
        self, folder: Path, lm: CausalLM, tokenizer: PreTrainedTokenizerBase, template: str, cap: int = 1 << 30
    ) -> None:
        if cap < 1:
            raise ValueError(f"The store's cap is at least one byte, not {cap}.")
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"The store's folder {folder.name!r} is a file.")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder, self.lm, self.cap = folder, lm, cap
        self.model, self.tokenizer = weights_digest(lm.model), tokenizer_digest(tokenizer)
        self.hits = self.misses = 0
        self._template = hashlib.sha256(template.encode()).hexdigest()

    def session(self, prefix: Sequence[int], capacity: int = 0) -> Member:
        """A session that has committed `prefix`, its rows read from the folder, or computed and put there.

        prefix: ids of the template up to the document's end. capacity: rows to allocate, the prefix's included.
        Raises ValueError on a prefix that the model cannot take.
        """
        if not len(prefix):
            raise ValueError("The prefix is empty.")
        (session,) = Batch(self.lm, [len(prefix)], max(capacity, len(prefix))).members
        self.fill(session, prefix)
        return session

    def fill(self, session: Member, prefix: Sequence[int]) -> None:
        """The same into an empty session, whose rows are read from the file to where they are needed.

        Raises ValueError where the session has tokens already.
        """
        if session.length:
            raise ValueError(f"A document is put into an empty session, not after {session.length} tokens.")
        label = self._label(prefix)
        path = self._place(label)
        if _read(path, label, prefix, session):
            self.hits += 1
            return
        self.misses += 1
        session.prefill(prefix)
        self._write(path, label, session)

    def path(self, prefix: Sequence[int]) -> Path:
        """Where the prefix's rows are, or would be."""
        return self._place(self._label(prefix))

    def _place(self, name: dict[str, str]) -> Path:
        label = json.dumps(name, sort_keys=True)
        return self.folder / f"{hashlib.sha256(label.encode()).hexdigest()}.safetensors"

    def _label(self, prefix: Sequence[int]) -> dict[str, str]:
        document = hashlib.sha256(np.asarray(prefix, "<i8").tobytes()).hexdigest()
        return {"format": _FORMAT, "model": self.model, "tokenizer": self.tokenizer, "template": self._template,
                "document": document}  # fmt: skip

    def _write(self, path: Path, label: dict[str, str], session: Member) -> None:
        keys, values = (rows.cpu() for rows in session.exported())
        if keys.nbytes + values.nbytes > self.cap:
            warnings.warn(f"A document's rows alone exceed the store's cap of {self.cap} bytes.", stacklevel=3)
            return
        tensors = {"keys": keys, "tokens": torch.tensor(session.tokens), "values": values}
        try:
            with assets.writing(path) as temporary:
                safetensors.torch.save_file(tensors, temporary, {**label, "checksum": _checksum(keys, values)})
            _shrink(self.folder, self.cap)
        except (OSError, safetensors.SafetensorError) as error:  # a full disk, a folder without permission
            warnings.warn(f"A document's rows could not be stored ({error}).", stacklevel=3)


def weights_digest(model: PreTrainedModel) -> str:
    """Hexadecimal sha256 of a model's configuration and of every weight with its name, dtype and shape."""
    config = {key: value for key, value in model.config.to_dict().items() if key not in _UNUSED}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"\0{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(_bytes(tensor.cpu()).data)
    return digest.hexdigest()


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hexadecimal sha256 of what a tokenizer makes ids of: its whole pipeline, or its vocabulary where it is slow."""
    state: Any
    pipeline: Any = getattr(tokenizer, "backend_tokenizer", None)
    if pipeline is None:
        state = [type(tokenizer).__name__, tokenizer.get_vocab()]
    else:  # padding and truncation are left over from the last call
        state = {k: v for k, v in json.loads(pipeline.to_str()).items() if k not in ("padding", "truncation")}
    found = json.dumps([state, tokenizer.special_tokens_map], sort_keys=True, default=str)
    return hashlib.sha256(found.encode()).hexdigest()


class _Tensor(msgspec.Struct):
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]

    def require(self, dtype: torch.dtype, shape: Sequence[int | None], size: int) -> None:
        """Raise ValueError unless it has this dtype and shape (None: any) and lies within `size` bytes."""
        begin, end = self.data_offsets
        fits = len(self.shape) == len(shape) and all(b in (None, a) for a, b in zip(self.shape, shape, strict=True))
        if _DTYPES.get(self.dtype) != dtype or not fits or min(self.shape) < 1:
            raise ValueError(f"a tensor is {self.dtype} of shape {self.shape}")
        if not 0 <= begin <= end <= size or end - begin != math.prod(self.shape) * dtype.itemsize:
            raise ValueError("a tensor is cut short")


class _Header(msgspec.Struct, rename={"metadata": "__metadata__"}):
    """The header of a file that `KVStore` writes."""

    metadata: dict[str, str]
    keys: _Tensor
    values: _Tensor
    tokens: _Tensor


def _header(file: int) -> tuple[_Header, int]:
    """The header, and where the data begin."""
    size = int.from_bytes(os.pread(file, 8, 0), "little")
    if not 0 < size <= _LONGEST:
        raise ValueError(f"its header has {size} bytes")
    return msgspec.json.decode(os.pread(file, size, 8), type=_Header), 8 + size


def _read(path: Path, label: dict[str, str], prefix: Sequence[int], session: Member) -> bool:
    """Commit the prefix by the rows of a file that is whole and is the prefix's; False where there is none such."""
    try:
        with path.open("rb", buffering=0) as file:
            _commit(file.fileno(), label, prefix, session)
        with contextlib.suppress(OSError):  # another process has dropped it, or may write where this one may not
            os.utime(path)  # the time of last use
    except FileNotFoundError:
        return False
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        session.release()
        warnings.warn(f"A stored document is ignored and made anew ({path.name[:12]}: {error}).", stacklevel=4)
        return False
    return True


def _commit(file: int, label: dict[str, str], prefix: Sequence[int], session: Member) -> None:
    """Read keys and values to their places in the session. Raises ValueError on any other file than `_write` makes."""
    header, start = _header(file)
    checksum = header.metadata.pop("checksum", "")
    if header.metadata != label:
        raise ValueError("it was made for something else")
    layers, n, size = session.lm.layers, len(prefix), os.fstat(file).st_size - start
    stored = header.keys, header.values
    for tensor in stored:
        tensor.require(session.lm.model.dtype, (layers, None, n, None), size)
    header.tokens.require(torch.int64, (n,), size)
    tokens = np.empty(n, "<i8")
    _fill(file, start + header.tokens.data_offsets[0], [tokens.view(np.uint8)])
    if tokens.tolist() != list(prefix):
        raise ValueError("its contents have changed")
    windows = session.window(n, *((tensor.shape[1], tensor.shape[3]) for tensor in stored))
    rows = [window.cpu() for window in windows]  # where the model is on the CPU, the windows themselves
    for tensor, into in zip(stored, rows, strict=True):
        _fill(file, start + tensor.data_offsets[0], _blocks(into))
    if checksum != _checksum(*rows):
        raise ValueError("its contents have changed")
    for window, row in zip(windows, rows, strict=True):
        if row is not window:
            window.copy_(row)
    session.filled(prefix)


def _shrink(folder: Path, cap: int) -> None:
    """Delete the files used longest ago until those left are within the cap, and what killed writers left."""
    files, total, now = [], 0, time.time()
    for path in folder.iterdir():
        try:
            status = path.stat()
        except FileNotFoundError:  # another process was faster
            continue
        if _NAME.fullmatch(path.name):
            files.append((status.st_mtime_ns, status.st_size, path))
            total += status.st_size
        elif _PARTIAL.fullmatch(path.name) and now - status.st_mtime > _ABANDONED:
            path.unlink(missing_ok=True)
    for _, size, path in sorted(files):
        if total <= cap:
            return
        path.unlink(missing_ok=True)
        total -= size


def _fill(file: int, offset: int, blocks: list[np.ndarray]) -> None:
    """Read what begins at the offset into the blocks, one after the other. Raises ValueError where the file ends."""
    for first in range(0, len(blocks), _VECTORS):
        part: Any = blocks[first : first + _VECTORS]
        wanted = sum(map(len, part))
        if os.preadv(file, part, offset) != wanted:
            raise ValueError("it is cut short")
        offset += wanted


def _checksum(*tensors: torch.Tensor) -> str:
    """CRC-32 over shapes, dtypes and each head's sum of words: many times as fast as over the bytes themselves."""
    found = 0
    for tensor in tensors:
        found = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), found)
        for block in _blocks(tensor):
            words = block[: len(block) // 8 * 8].view(np.uint64)
            found = zlib.crc32(block[8 * len(words) :].data, zlib.crc32(words.sum(dtype=np.uint64).tobytes(), found))
    return f"{found:08x}"


def _blocks(rows: torch.Tensor) -> list[np.ndarray]:
    """Views of the bytes of rows [layers, heads, n, width], one block for each layer and head."""
    found = rows.view(torch.uint8).numpy()
    return [head.reshape(-1) for layer in found for head in layer]


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy()

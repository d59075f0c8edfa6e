"""Keys and values of each document's prompt prefix, kept on disk: a document is prefilled once, not once a query.

A prompt starts with its document, so that the prefix is the same in every query and its rows can be used again without
any approximation. Rows depend on the weights and the token ids before them, on nothing else. A file holds the rows and
the ids in the clear: the folder is as private as the documents.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import safetensors
import safetensors.torch
import torch

from ondevice import assets
from ondevice.causal_lm import CausalLM
from ondevice.digests import tokenizer_digest, weights_digest
from ondevice_papers.dragon.batch import Batch, Member

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FORMAT = "ondevice.dragon prefix 3"  # raise it when the tensors or their meaning change
_NAME = re.compile(r"[0-9a-f]{64}\.safetensors")
_PARTIAL = re.compile(r"\.[0-9a-f]{64}-.*\.safetensors")  # of `assets.writing`
_ABANDONED = 3600.0  # seconds after which a partial file has no writer any more


class KVStore:
    """The prefix rows of one model, tokenizer and template in a folder that other processes and models may share.

    template: the text that documents and queries are put in.
    cap: bytes of all the files of the folder together; those used longest ago go first.
    A file that cannot be used (damaged, foreign) is a miss, with a warning, and is written anew; where nothing can be
    written, there is a warning and no other harm. hits, misses: of `fill` so far.
    Raises ValueError where `folder` is a file.
    """

    def __init__(
        self, folder: Path, lm: CausalLM, tokenizer: PreTrainedTokenizerBase, template: str, cap: int = 1 << 30
    ) -> None:
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"The store's folder {folder.name!r} is a file.")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder, self.lm, self.cap = folder, lm, cap
        self.hits = self.misses = 0
        self._owner = {
            "format": _FORMAT,
            "model": weights_digest(lm.model),
            "tokenizer": tokenizer_digest(tokenizer),
            "template": hashlib.sha256(template.encode()).hexdigest(),
        }

    def session(self, prefix: Sequence[int]) -> Member:
        """A session that has committed `prefix`, ids of the template up to the document's end."""
        (session,) = Batch(self.lm, [len(prefix)], len(prefix)).members
        self.fill(session, prefix)
        return session

    def fill(self, session: Member, prefix: Sequence[int]) -> None:
        """Commit `prefix` to an empty session, its rows read from the folder, or computed and put there.

        Raises ValueError on a prefix that the model cannot take.
        """
        label = self._label(prefix)
        path = self.path(prefix)
        if _read(path, label, prefix, session):
            self.hits += 1
            return
        self.misses += 1
        session.prefill(prefix)
        self._write(path, label, session)

    def path(self, prefix: Sequence[int]) -> Path:
        """Where the prefix's rows are, or would be."""
        label = json.dumps(self._label(prefix), sort_keys=True)
        return self.folder / f"{hashlib.sha256(label.encode()).hexdigest()}.safetensors"

    def _label(self, prefix: Sequence[int]) -> dict[str, str]:
        return {**self._owner, "document": hashlib.sha256(np.asarray(prefix, "<i8").tobytes()).hexdigest()}

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


def _read(path: Path, label: dict[str, str], prefix: Sequence[int], session: Member) -> bool:
    """Commit the prefix by the rows of a file that is whole and is the prefix's; False where there is none such."""
    try:
        # by its descriptor: another process may drop the file while it is read
        with path.open("rb") as opened, safetensors.safe_open(f"/dev/fd/{opened.fileno()}", framework="pt") as file:
            metadata = file.metadata() or {}
            checksum = metadata.pop("checksum", "")
            if metadata != label:
                raise ValueError("it was made for something else")
            keys, values, tokens = (file.get_tensor(name) for name in ("keys", "values", "tokens"))
        if checksum != _checksum(keys, values) or tokens.tolist() != list(prefix):
            raise ValueError("its contents have changed")
        session.put(prefix, keys, values)
    except FileNotFoundError:
        return False
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        warnings.warn(f"A stored document is ignored and made anew ({path.name[:12]}: {error}).", stacklevel=4)
        return False
    with contextlib.suppress(OSError):  # another process has dropped it, or may write where this one may not
        os.utime(path)  # the time of last use
    return True


def _checksum(*tensors: torch.Tensor) -> str:
    """CRC-32 over shapes, dtypes and each head's sum of words: many times as fast as over the bytes themselves."""
    checksum = 0
    for rows in tensors:
        header = f"{rows.dtype} {tuple(rows.shape)}".encode()
        whole_words = rows.shape[-1] * rows.itemsize % 8 == 0
        sums = rows.view(torch.int64 if whole_words else torch.uint8).sum((2, 3))
        checksum = zlib.crc32(sums.numpy().tobytes(), zlib.crc32(header, checksum))
    return f"{checksum:08x}"


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

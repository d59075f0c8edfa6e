"""A side's documents from a file, a folder or the documentation corpus, with their index.

What was read is kept, so that the next start reads only what changed: a cloud's in the user's cache; a device's, which
are private, in memory alone, unless a folder is named for them.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from ondevice import assets, corpus
from ondevice.corpus.excerpts import passages
from ondevice.retrieval import SparseIndex
from ondevice.retrieval.store import kept_sparse_index
from ondevice_programs.pair.node import Documents, Source
from ondevice_programs.pair.passages import FORMATS, NO_PYPDF, UNKNOWN, UNREADABLE, Placed, Skipped, Splitter, blocks

CORPUS = "corpus"  # the name that stands for the documentation corpus
HIDDEN = "hidden"
LINK = "links to folders or out of the folder"
Progress = Callable[[int, int], object]  # files done, of how many

_NAMED = 5  # unreadable files in a line
_LOG = logging.getLogger(__name__)
_FORMAT = 2  # raise it when what is read of a file changes
_SUM = 16  # bytes
_SETTLED = 2 * 10**9  # ns after its last change, a file's times say whether it changed again; coarse clocks tick slower
_Stamp = tuple[int, int, int]  # bytes, and the times of the last change of content and of the file's entry, ns
_NONE: _Stamp = (-1, 0, 0)  # which no file has


@dataclass
class Inventory:
    """What was read. files: those that gave passages. passages: documents of the side. skipped: files by reason."""

    files: int = 0
    passages: int = 0
    skipped: dict[str, list[str]] = field(default_factory=dict)

    def __str__(self) -> str:
        """What was skipped, in one line; empty where nothing was. Of each reason the first file is named, of those that
        could not be read as many as a line takes."""
        parts = []
        for reason, names in sorted(self.skipped.items()):
            shown = names[: _NAMED if reason == UNREADABLE else 1]
            unnamed = len(names) - len(shown) if reason == UNREADABLE else 0
            rest = f", and {unnamed} more, which `ondevice-pair documents --json` names" if unnamed else ""
            parts.append(f"{len(names)} {reason} ({', '.join(shown)}{rest})")
        return f"skipped {'; '.join(parts)}" if self.skipped else ""

    def skip(self, reason: str, name: str) -> None:
        """Count a file."""
        self.skipped.setdefault(reason, []).append(name)


def documents(source: str, *arguments: Any, **options: Any) -> Documents:
    """Those of `read`."""
    return read(source, *arguments, **options)[0]


def read(
    source: str,
    part: str = "1/1",
    most: int | None = None,
    length: int = 64,
    *,
    splitter: Splitter | None = None,
    index: Path | None = None,
    private: bool = False,
    progress: Progress | None = None,
    empty: bool = False,
) -> tuple[Documents, Inventory]:
    """Documents with their sources and a BM25 index, and an account of what was read and skipped.

    source: a file of FORMATS or a folder of such, whose paragraphs, pages or lines are the documents; or `corpus`, the
        passages of the documentation corpus's train split. Of a text that is there twice the first source is named.
    part: `i/n` takes the documents whose text's hash is i - 1 modulo n: n sides share a corpus and none is on two.
    most: at most so many, those of the lowest hashes. length: tokens of a corpus passage.
    splitter: cuts what a prompt does not take whole; without one, documents stay as they are.
    index: a folder where passages and index are kept. private: nothing is kept anywhere else, and there for this user's
        eyes alone (0700, 0600); otherwise the user's cache is taken where no folder is named. The corpus is public.
    progress: called after each file. empty: whether a folder without documents is no error.
    Raises ValueError on a source that is none of these or leaves nothing, and on a wrong part.
    """
    require(source, part)
    shard, shards = _part(part)
    account = Inventory()
    private = private and source != CORPUS
    mode = 0o600 if private else 0o666
    folder = _kept_folder(source, index, private)
    if source == CORPUS:
        entries = _corpus(length, splitter)
    else:
        entries = _files(source, splitter, folder, mode, account, progress)
    texts = dict[str, Source]()
    names = set[str]()
    for name, number, text in entries:
        texts.setdefault(text, Source(name, number))
        names.add(name)
    chosen = [text for number, text in sorted((_hash(text), text) for text in texts) if number % shards == shard][:most]
    if not chosen and not (empty and source != CORPUS and Path(source).expanduser().is_dir()):
        raise ValueError(f"Part {part} of {source!r} has no document{f': {account}' if account.skipped else ''}.")
    account.files = len(names)
    account.passages = len(chosen)
    settings = _digest(f"{part} {most} {length} {splitter.key if splitter else ''}".encode())
    if not chosen:
        sparse_index = SparseIndex.build(["nothing"])  # an index has a word; nobody asks this one
    elif folder is None:
        sparse_index = SparseIndex.build(chosen)
    else:
        sparse_index = kept_sparse_index(chosen, folder / f"bm25-{settings}.npz", mode)
    return Documents(chosen, sparse_index, [texts[text] for text in chosen]), account


def require(source: str, part: str) -> None:
    """Raise ValueError, before anything slow, where there is no such source, and on a wrong part."""
    _part(part)
    if source != CORPUS and not Path(source).expanduser().exists():
        raise ValueError(f"There are no documents at {source!r}: neither a file, nor a folder, nor `{CORPUS}`.")


def write(path: Path, texts: Sequence[str]) -> None:
    """A JSON-lines file that `documents` reads."""
    assets.write_text(path, "".join(json.dumps({"text": text}) + "\n" for text in texts))


def require_apart(private: Path, public: Path) -> None:
    """Raises ValueError where the private documents are the public ones, or one holds the other, or is not there."""
    ends = []
    for path in (private, public):
        ends.append(Path(os.path.realpath(Path(path).expanduser())))
        if not ends[-1].exists():
            raise ValueError(f"There is neither a file nor a folder {str(path)!r}.")
    for inner, outer in (ends, ends[::-1]):
        if any(above.samefile(outer) for above in (inner, *inner.parents)):  # of two names, too, on a disk without case
            raise ValueError(
                f"Private documents stand apart from public ones, but {str(inner)!r} is in {str(outer)!r}."
            )


# Files


def _files(
    source: str,
    splitter: Splitter | None,
    folder: Path | None,
    mode: int,
    account: Inventory,
    progress: Progress | None,
) -> Iterator[tuple[str, int, str]]:
    """(name, place, text) of each passage; the names are relative to the folder."""
    root = Path(source).expanduser()
    base, files = (root, list(_walk(root, account))) if root.is_dir() else (root.parent, [root])
    settings = _digest(f"{_FORMAT} {splitter.key if splitter else ''}".encode())
    kept = folder / f"passages-{settings}.msgpack" if folder else None
    old = _previous_files(kept)
    new = dict[str, _File]()
    for number, path in enumerate(files, 1):
        name = _name(path, base)
        file = new[name] = _read(path, old.get(name), splitter)
        if file.reason:
            account.skip(file.reason, f"{name}: {file.detail}" if file.detail else name)
        for passage in file.passages:
            yield name, *passage
        if progress is not None:
            progress(number, len(files))
    if kept is not None and new != old:
        _keep(kept, new, mode)


def _walk(root: Path, account: Inventory) -> Iterator[Path]:
    """Files of known formats in order; no hidden ones, as those of .git are, and none through links out of the root."""

    def refused(error: OSError) -> None:
        account.skip(UNREADABLE, f"{_name(Path(error.filename), root)}: {error.strerror}")

    real = Path(os.path.realpath(root))
    for folder, folders, files in os.walk(root, onerror=refused):
        folders.sort()
        there = set(folders)
        for path in (Path(folder, name) for name in sorted([*folders, *files])):
            name, is_folder = _name(path, root), path.name in there
            if path.name.startswith("."):
                account.skip(HIDDEN, name)
            elif path.is_symlink() and (is_folder or not Path(os.path.realpath(path)).is_relative_to(real)):
                account.skip(LINK, name)
            elif not is_folder and path.suffix.lower() in FORMATS:
                yield path
            elif not is_folder:
                account.skip(UNKNOWN, name)
        folders[:] = [name for name in folders if not name.startswith(".")]


def _name(path: Path, base: Path) -> str:
    """A name may hold bytes that are no text."""
    return os.fsencode(path.relative_to(base).as_posix()).decode(errors="replace")


# What is kept of files


class _File(msgspec.Struct):
    """Of a file that had this size and these times: its passages, or why there are none."""

    stamp: _Stamp
    passages: list[Placed] = []
    reason: str = ""
    detail: str = ""


def _read(path: Path, previous: _File | None, splitter: Splitter | None) -> _File:
    """A file, or its previous one where its size and times are the same."""
    stamp = _NONE
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would never end
            raise Skipped(UNREADABLE, "no regular file")
        there = (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        if previous is not None and previous.stamp == there:
            return previous
        if time.time_ns() - status.st_mtime_ns > _SETTLED:
            stamp = there
        return _File(stamp, _split(blocks(path.suffix.lower(), path.read_bytes()), splitter))
    except Skipped as why:  # pypdf may be installed until the next start
        return _File(_NONE if why.reason == NO_PYPDF else stamp, [], why.reason, why.detail)
    except OSError as error:
        return _File(_NONE, [], UNREADABLE, error.strerror or "")


def _previous_files(kept: Path | None) -> dict[str, _File]:
    """What the last start has found, by name."""
    try:
        data = kept.read_bytes() if kept else None
        if data is not None:
            if blake2b(data[_SUM:], digest_size=_SUM).digest() != data[:_SUM]:
                raise ValueError("it is not whole")
            return msgspec.msgpack.decode(data[_SUM:], type=dict[str, _File])
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        _LOG.warning("What was kept of the documents is ignored and made anew (%s).", error)
    return {}


def _keep(kept: Path, files: dict[str, _File], mode: int) -> None:
    data = msgspec.msgpack.encode(files)
    try:
        with assets.writing(kept, mode) as temporary:
            temporary.write_bytes(blake2b(data, digest_size=_SUM).digest() + data)
    except OSError as error:
        _LOG.warning("The documents could not be kept (%s).", error.strerror)


def _kept_folder(source: str, index: Path | None, private: bool) -> Path | None:
    """The folder of what is kept of this source, or None."""
    if index is None and private:
        return None
    parent = assets.cache_folder("dragon") if index is None else index.expanduser()
    folder = parent / _digest(os.fsencode(source if source == CORPUS else os.path.realpath(Path(source).expanduser())))
    folder.mkdir(parents=True, exist_ok=True)
    if private:
        folder.chmod(0o700)
    return folder


# Texts


def _corpus(length: int, splitter: Splitter | None) -> Iterator[tuple[str, int, str]]:
    for passage in passages(corpus.documents("train"), corpus.tokenizer(), length):
        for placed in _split([(passage.index + 1, passage.text)], splitter):
            yield passage.title, *placed


def _split(placed: Iterable[Placed], splitter: Splitter | None) -> list[Placed]:
    return [(number, piece) for number, text in placed for piece in (splitter(text) if splitter else [text])]


def _part(part: str) -> tuple[int, int]:
    shard, _, shards = part.partition("/")
    if not (shard.isdecimal() and shards.isdecimal() and 1 <= int(shard) <= int(shards)):
        raise ValueError(f"A part is `i/n` with i from 1 to n, not {part!r}.")
    return int(shard) - 1, int(shards)


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def _digest(*parts: bytes) -> str:
    hasher = blake2b(digest_size=16)
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little") + part)
    return hasher.hexdigest()

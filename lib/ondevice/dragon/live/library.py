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

import msgspec

from ondevice import assets, corpus
from ondevice.corpus.excerpts import passages
from ondevice.dragon.live.node import Documents, Source
from ondevice.dragon.live.passages import FORMATS, NO_PYPDF, UNKNOWN, UNREADABLE, Placed, Skipped, Splitter, blocks
from ondevice.retrieval import SparseIndex
from ondevice.retrieval.store import kept_sparse_index

CORPUS = "corpus"  # the name that stands for the documentation corpus
HIDDEN, LINK = "hidden", "links to folders or out of the folder"
Progress = Callable[[int, int], object]  # files done, of how many

_LOG = logging.getLogger(__name__)
_FORMAT = 1  # raise it when what is read of a file changes
_SUM = 16  # bytes
_SETTLED = 2 * 10**9  # ns after its last change, a file's times say whether it changed again; coarse clocks tick slower
_Stamp = tuple[int, int, int]  # bytes, and the times of the last change of content and of the file's entry, ns


@dataclass
class Account:
    """What was read. files: those that gave passages. passages: documents of the side. skipped: files by reason."""

    files: int = 0
    passages: int = 0
    skipped: dict[str, list[str]] = field(default_factory=dict)

    def __str__(self) -> str:
        """What was skipped, in one line, with an example of each reason; empty where nothing was."""
        parts = (f"{len(names)} {reason} ({names[0]})" for reason, names in sorted(self.skipped.items()))
        return f"skipped {'; '.join(parts)}" if self.skipped else ""

    def skip(self, reason: str, name: str) -> None:
        """Count a file."""
        self.skipped.setdefault(reason, []).append(name)


def documents(
    source: str, part: str = "1/1", most: int | None = None, length: int = 64, *, splitter: Splitter | None = None,
    index: Path | None = None, private: bool = False, progress: Progress | None = None,
) -> Documents:  # fmt: skip
    """Documents with a BM25 index: those of `read`."""
    return read(source, part, most, length, splitter=splitter, index=index, private=private, progress=progress)[0]


def read(
    source: str, part: str = "1/1", most: int | None = None, length: int = 64, *, splitter: Splitter | None = None,
    index: Path | None = None, private: bool = False, progress: Progress | None = None,
) -> tuple[Documents, Account]:  # fmt: skip
    """Documents with their sources and a BM25 index, and an account of what was read and skipped.

    source: a file of FORMATS or a folder of such, whose paragraphs, pages or lines are the documents; or `corpus`, the
        passages of the documentation corpus's train split. Of a text that is there twice the first source is named.
    part: `i/n` takes the documents whose text's hash is i - 1 modulo n: n sides share a corpus and none is on two.
    most: at most so many, those of the lowest hashes. length: tokens of a corpus passage.
    splitter: cuts what a prompt does not take whole; without one, documents stay as they are.
    index: a folder where passages and index are kept. private: nothing is kept anywhere else, and there for this user's
        eyes alone (0700, 0600); otherwise the user's cache is taken where no folder is named. The corpus is public.
    progress: called after each file.
    Raises ValueError on a source that is none of these or leaves nothing, and on a wrong part.
    """
    which, of = _part(part)
    account, private = Account(), private and source != CORPUS
    if source != CORPUS and not Path(source).expanduser().exists():
        raise ValueError(f"There are no documents at {source!r}: neither a file, nor a folder, nor `{CORPUS}`.")
    place = _place(source, index, private)
    texts = dict[str, Source]()
    if source == CORPUS:
        found = _corpus(length, splitter)
    else:
        found = _files(source, _Shelf(place, splitter, private), account, progress)
    for file, passages_ in found:
        account.files += 1
        for number, text in passages_:
            texts.setdefault(text, Source(file, number))
    chosen = [text for number, text in sorted((_hash(text), text) for text in texts) if number % of == which][:most]
    if not chosen:
        raise ValueError(f"Part {part} of {source!r} has no document{f': {account}' if account.skipped else ''}.")
    account.passages = len(chosen)
    settings = _digest(f"{part} {most} {length} {splitter.key if splitter else ''}".encode())
    made = (
        SparseIndex.build(chosen) if place is None
        else kept_sparse_index(chosen, place / f"bm25-{settings}.npz", _mode(private))
    )  # fmt: skip
    return Documents(chosen, made, [texts[text] for text in chosen]), account


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
    for one, other in (ends, ends[::-1]):
        if any(above.samefile(other) for above in (one, *one.parents)):  # of two names, too, on a disk without case
            raise ValueError(f"Private documents stand apart from public ones, but {str(one)!r} is in {str(other)!r}.")


# Files


def _files(
    source: str, shelf: _Shelf, account: Account, progress: Progress | None
) -> Iterator[tuple[str, list[Placed]]]:
    """(name, passages) of each file that has some; the names are relative to the folder."""
    root = Path(source).expanduser()
    base, files = (root, list(_walk(root, account))) if root.is_dir() else (root.parent, [root])
    for number, file in enumerate(files, 1):
        name = _name(file, base)
        try:
            yield name, shelf.passages(file, name)
        except Skipped as why:
            account.skip(why.reason, f"{name}: {why.detail}" if why.detail else name)
        if progress is not None:
            progress(number, len(files))
    shelf.keep()


def _walk(root: Path, account: Account) -> Iterator[Path]:
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


class _Content(msgspec.Struct):
    """Of a file: its passages, or why there are none."""

    passages: list[Placed]
    reason: str = ""
    detail: str = ""


class _Kept(msgspec.Struct):
    """files: by name, their stamp and content. contents: by digest."""

    files: dict[str, tuple[_Stamp, str]] = {}
    contents: dict[str, _Content] = {}


class _Shelf:
    """Passages of files, from the last start's where a file has not changed.

    A file is the same when its size and times are; else it is read, and its content may still be known.
    """

    def __init__(self, place: Path | None, splitter: Splitter | None, private: bool) -> None:
        self._splitter, self._mode = splitter, _mode(private)
        settings = _digest(f"{_FORMAT} {splitter.key if splitter else ''}".encode())
        self._path = place / f"passages-{settings}.msgpack" if place else None
        self._old, self._new = self._read(), _Kept()

    def passages(self, file: Path, name: str) -> list[Placed]:
        """Of one file. Raises Skipped."""
        try:
            stamp, digest, content = self._content(file, *self._old.files.get(name, (None, "")))
        except OSError as error:
            raise Skipped(UNREADABLE, error.strerror or "") from None
        if content.reason != NO_PYPDF:  # it may be installed until the next start
            self._new.files[name], self._new.contents[digest] = (stamp, digest), content
        if content.reason:
            raise Skipped(content.reason, content.detail)
        return content.passages

    def keep(self) -> None:
        """Write what this start has found, where it differs from what was kept."""
        if self._path is None or self._new == self._old:
            return
        data = msgspec.msgpack.encode(self._new)
        try:
            with assets.writing(self._path, self._mode) as temporary:
                temporary.write_bytes(blake2b(data, digest_size=_SUM).digest() + data)
        except OSError as error:
            _LOG.warning("The documents could not be kept (%s).", error.strerror)

    def _content(self, file: Path, known: _Stamp | None, digest: str) -> tuple[_Stamp, str, _Content]:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would never end
            raise Skipped(UNREADABLE, "no regular file")
        stamp = (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        if stamp == known and digest in self._old.contents:
            return stamp, digest, self._old.contents[digest]
        if time.time_ns() - status.st_mtime_ns < _SETTLED:
            stamp = (-1, 0, 0)  # which no file has
        data, suffix = file.read_bytes(), file.suffix.lower()
        digest = _digest(suffix.encode(), data)
        content = self._new.contents.get(digest) or self._old.contents.get(digest)
        return stamp, digest, content or self._extracted(suffix, data)

    def _extracted(self, suffix: str, data: bytes) -> _Content:
        try:
            return _Content(_split(blocks(suffix, data), self._splitter))
        except Skipped as why:
            return _Content([], why.reason, why.detail)

    def _read(self) -> _Kept:
        try:
            data = self._path.read_bytes() if self._path else None
            if data is not None:
                if blake2b(data[_SUM:], digest_size=_SUM).digest() != data[:_SUM]:
                    raise ValueError("it is not whole")
                return msgspec.msgpack.decode(data[_SUM:], type=_Kept)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            _LOG.warning("What was kept of the documents is ignored and made anew (%s).", error)
        return _Kept()


def _place(source: str, index: Path | None, private: bool) -> Path | None:
    """The folder of what is kept of this source, or None."""
    if index is None and private:
        return None
    folder = assets.cache_folder("dragon") if index is None else index.expanduser()
    mode = 0o700 if private else 0o777
    ours = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    named = source if source == CORPUS else os.path.realpath(Path(source).expanduser())
    place = folder / _digest(os.fsencode(named))
    folder.mkdir(mode, parents=True, exist_ok=True)
    place.mkdir(mode, exist_ok=True)
    if private:
        for made in [folder, place] if ours else [place]:  # a folder with other things in it stays as it is
            made.chmod(0o700)
    return place


def _mode(private: bool) -> int:
    return 0o600 if private else 0o666


# Texts


def _corpus(length: int, splitter: Splitter | None) -> Iterator[tuple[str, list[Placed]]]:
    found = dict[str, list[Placed]]()
    for passage in passages(corpus.documents("train"), corpus.tokenizer(), length):
        found.setdefault(passage.title, []).extend(_split([(passage.place + 1, passage.text)], splitter))
    yield from found.items()


def _split(found: Iterable[Placed], splitter: Splitter | None) -> list[Placed]:
    return [(place, one) for place, text in found for one in (splitter(text) if splitter else [text])]


def _part(part: str) -> tuple[int, int]:
    which, _, of = part.partition("/")
    if not (which.isdecimal() and of.isdecimal() and 1 <= int(which) <= int(of)):
        raise ValueError(f"A part is `i/n` with i from 1 to n, not {part!r}.")
    return int(which) - 1, int(of)


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def _digest(*parts: bytes) -> str:
    made = blake2b(digest_size=16)
    for part in parts:
        made.update(len(part).to_bytes(8, "little") + part)
    return made.hexdigest()

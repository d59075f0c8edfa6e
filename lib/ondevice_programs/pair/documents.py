"""A side's documents on the command line: what they are, what is kept, and `documents`, which says what is there.

Standard output has the answers; progress and what was skipped go to standard error.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from ondevice import models
from ondevice.commands import Parser, count, writable
from ondevice_programs.pair import library
from ondevice_programs.pair.decoder import Template
from ondevice_programs.pair.library import Inventory, Progress
from ondevice_programs.pair.node import Documents, template_of
from ondevice_programs.pair.passages import Splitter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SILENT = 2.0  # seconds, where standard error is no terminal


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments that all programs share."""
    parser.add_argument("--model", default=models.SMOLLM2, metavar="NAME", help="the same on both sides")
    parser.add_argument(
        "--documents",
        default=library.CORPUS,
        metavar="FOLDER",
        help="texts, HTML, notebooks, Python, PDF, JSON lines; or a file",
    )
    parser.add_argument("--part", default="1/1", metavar="i/n", help="the i-th of n parts of the documents")
    parser.add_argument("--most", type=count, metavar="N", help="documents at most")
    parser.add_argument("--longest", type=count, default=512, metavar="N", help="tokens of a document in a prompt")
    parser.add_argument("--whole", action="store_true", help="cut a longer document off, instead of splitting it")
    parser.add_argument(
        "--index",
        type=writable,
        metavar="FOLDER",
        help="keep the index here (else: a cloud's in the cache, a device's nowhere)",
    )
    parser.set_defaults(private=False)


def add_private(parser: argparse.ArgumentParser) -> None:
    """The device's arguments."""
    parser.set_defaults(private=True)
    parser.add_argument("--public", type=Path, metavar="FOLDER", help="refuse where it overlaps with the private one")
    parser.add_argument("--force", action="store_true", help="go on although they overlap")


def add_program(programs: argparse._SubParsersAction[Parser]) -> None:
    """`documents`."""
    parser = programs.add_parser(
        "documents", help="say what a side has", example="ondevice-pair documents --documents FOLDER"
    )
    add(parser)
    parser.set_defaults(run=run, private=True)
    parser.add_argument(
        "--shared", dest="private", action="store_false", help="they are a cloud's, and are kept in the user's cache"
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def run(options: argparse.Namespace) -> None:
    """Print what a source has: files, passages, seconds, and, as JSON, the names of files skipped by reason."""
    tokenizer = models.load(options.model).tokenizer
    began = time.perf_counter()
    _, account = read(options, tokenizer, template_of(tokenizer))
    seconds = time.perf_counter() - began
    if options.json:
        counts = {"files": account.files, "passages": account.passages, "skipped": account.skipped}
        print(json.dumps({**counts, "seconds": round(seconds, 3)}))
    else:
        print(f"{account.files} files, {account.passages} passages, {seconds:.1f} s")


def check(options: argparse.Namespace) -> None:
    """Raises ValueError where there are no documents, and where a device's and the named public ones are not apart."""
    library.require(options.documents, options.part)
    public = getattr(options, "public", None)
    if public is not None and not options.force and options.documents != library.CORPUS:
        library.require_apart(Path(options.documents), public)


def read(
    options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, template: Template
) -> tuple[Documents, Inventory]:
    """The side's documents, as `library.read` reads them; what was skipped is said in a line."""
    if options.documents == library.CORPUS:
        print("Reading the documentation corpus, which takes a minute or two ...", file=sys.stderr, flush=True)
    splitter = None if options.whole else Splitter(tokenizer, options.longest, template)
    with tqdm(desc="Reading documents", unit=" files", leave=False, disable=None) as bar:
        collection, account = library.read(
            options.documents,
            options.part,
            options.most,
            splitter=splitter,
            index=options.index,
            private=options.private,
            progress=_line() if bar.disable else _bar(bar),
            empty=options.command == "device",
        )
    if account.skipped:
        print(f"{options.documents}: {account}", file=sys.stderr, flush=True)
    if not collection.texts:
        line = f"{options.documents} has no document: answers come from the cloud's documents alone."
        print(line, file=sys.stderr, flush=True)
    return collection, account


def _bar(bar: tqdm) -> Progress:
    def show(done: int, files: int) -> None:
        bar.total = files
        bar.update(done - bar.n)

    return show


def _line() -> Progress:
    """One line, where it takes long."""
    began = time.monotonic()
    printed = False

    def show(done: int, files: int) -> None:
        nonlocal printed
        if not printed and time.monotonic() - began > _SILENT:
            print(f"Reading {files} files ...", file=sys.stderr, flush=True)
            printed = True

    return show

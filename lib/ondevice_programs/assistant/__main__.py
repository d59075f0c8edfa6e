"""An assistant for two folders: public pages in a cloud process, a private folder on this device, one answer.

Hybrid search and GRATING's reranker pick passages on both sides, DRAGON mixes the sides' next tokens, and DIAA's and
sd.npu's drafters guess ahead. The question and the answer's tokens leave the device; before four tokens in a row of a
private page would, the device goes on alone.
--budget limits the share of the questions' tokens that the cloud reads (DiSCo); --without DRAGON uses no cloud.
On two machines the cloud has --public FOLDER --serve HOST:PORT, and the device --private FOLDER --connect
HOST:PORT. Beyond loopback both want TLS (--certificate, --key, --authority).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from ondevice import commands

with commands.loading("ondevice-assistant", "notebooks"):
    from ondevice_papers.disco.budgeted import Account
    from ondevice_programs.assistant.sides import MODEL, Sides
    from ondevice_programs.assistant.systems import SYSTEMS
    from ondevice_programs.pair import library, terminal
    from ondevice_programs.pair.answer import AnswerSettings
    from ondevice_programs.pair.cloud import Cloud
    from ondevice_programs.pair.device import Device
    from ondevice_programs.pair.passages import Splitter
    from ondevice_programs.pair.relevance import MEMORY
    from ondevice_programs.pair.wire import Lost, Refused, client_tls, server_tls

_PROGRAM = "ondevice-assistant"
_LONG = 256  # tokens of a question that takes seconds to read, which a line announces


def main(arguments: list[str] | None = None) -> None:
    """Parse, run, and end with one line where something cannot be: code 2, or 3 where the two cannot work together."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.serve is None and options.private is None:
        parser.error("--private FOLDER names the documents of this device, or --serve HOST:PORT makes it a cloud")
    if (options.public is None) == (options.connect is None):
        parser.error("either --public FOLDER names the cloud's documents, or --connect HOST:PORT a cloud elsewhere")
    if options.serve and (options.private or options.connect):
        parser.error("a cloud (--serve) takes --public alone: neither private documents nor another cloud")
    if options.connect and not options.connect[1]:
        parser.error("argument --connect: a cloud listens on a port from 1 to 65535")
    with commands.refusing(_PROGRAM):
        torch.set_num_threads(options.threads)
        try:
            asyncio.run(_serve(options)) if options.serve else _ask(options)
        except (Lost, Refused) as error:
            print(f"{_PROGRAM}: {commands.sentence(error)}", file=sys.stderr)
            sys.exit(3)


def _sides(options: argparse.Namespace) -> Sides:
    letters = "".join(letter for letter, name in SYSTEMS.items() if name not in options.without)
    return Sides(letters, options.memory, options.model)


async def _serve(options: argparse.Namespace) -> None:
    sides = _sides(options)
    documents = library.documents(str(options.public), splitter=Splitter(sides.tokenizer, 512))
    host, port = options.serve
    tls = server_tls(options.certificate, options.key, options.authority) if options.certificate else None
    async with Cloud(sides.node(documents)).listening(host, port, tls) as opened:
        print(f"Listening on {host}:{opened}", flush=True)
        await (asyncio.to_thread(sys.stdin.read) if options.until_input_ends else asyncio.Event().wait())


def _ask(options: argparse.Namespace) -> None:
    if options.public is not None:
        library.require_apart(options.private, options.public)
    sides = _sides(options)
    splitter = Splitter(sides.tokenizer, 512)
    node = sides.node(library.documents(str(options.private), splitter=splitter, private=True), private=True)
    with contextlib.ExitStack() as stack:
        host, port = options.connect or ("127.0.0.1", 0)
        if "DRAGON" in options.without:
            port = 0
        elif options.connect is None:
            print("Starting the cloud; its first start embeds its documents ...", file=sys.stderr, flush=True)
            words = [word for system in options.without for word in ("--without", system)]
            port = stack.enter_context(
                cloud(options.public, "--memory", f"{options.memory}", "--model", options.model, *words)
            )
        tls = client_tls(options.authority, options.certificate, options.key) if options.authority else None
        device = stack.enter_context(Device(node, host, port, tls=tls, patience=options.patience, guard=node.guard()))
        settings = AnswerSettings(temperature=0.0, lookahead=32, limit=options.limit)
        budget = options.budget
        account = Account(1.0 if "DiSCo" in options.without else budget)
        for question in options.question or map(str.strip, sys.stdin):
            if question:
                _answer(device, account, question, settings)


def _answer(device: Device, account: Account, question: str, settings: AnswerSettings) -> None:
    """One answer, streamed, with its sources; the cloud takes part where DiSCo's account holds the question."""
    device.node.require_room(question, settings.limit)
    tokenizer = device.node.tokenizer
    tokens = len(tokenizer(question, verbose=False).input_ids)  # no warning of a long one
    if tokens > _LONG:
        print(f"Reading a question of {tokens} tokens ...", file=sys.stderr, flush=True)
    number = account.arrive(tokens)
    held = account.start(number, tokens)
    account.forget(number + 1)
    stream = terminal.AnswerWriter(tokenizer, sys.stdout)
    if held:
        answer = device.answer(question, settings, stream.token, stream.drafts)
    else:
        with Device(device.node) as single:
            answer = single.answer(question, settings, stream.token)
        answer.reason = "the budget of the cloud does not hold this question"
    stream.end()
    for note in terminal.notes(answer, tokenizer, terminal.texts_used(answer, device.node.documents)):
        print(note, file=sys.stderr, flush=True)


@contextlib.contextmanager
def cloud(public: Path, *words: str) -> Iterator[int]:
    """The cloud as another process of this machine; yields its port. Raises ValueError where it does not start."""
    process = subprocess.Popen(
        [sys.executable, "-m", "ondevice_programs.assistant", "--public", str(public), "--serve", "127.0.0.1:0",
         "--until-input-ends", *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith("Listening"):
            raise ValueError("The cloud does not start; its line above says why.")
        yield int(line.rsplit(":", 1)[1])
    finally:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            process.communicate(timeout=30)
        process.kill()


def _parser() -> commands.Parser:
    parser = commands.Parser(
        _PROGRAM,
        description=__doc__,
        usage="%(prog)s [options] [question ...]",
        example='ondevice-assistant --private NOTES --public DOCS "How do I open a file?"',
    )
    parser.add_argument("question", nargs="*", help="default: each line of standard input")
    parser.add_argument("--private", type=_folder, metavar="FOLDER", help="documents that stay on this device")
    parser.add_argument("--public", type=_folder, metavar="FOLDER", help="documents of the cloud")
    parser.add_argument("--connect", type=commands.address, metavar="HOST:PORT", help="a cloud that runs elsewhere")
    parser.add_argument("--serve", type=commands.address, metavar="HOST:PORT", help="be the cloud; port 0: any")
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        choices=list(SYSTEMS.values()),
        metavar="SYSTEM",
        help=f"leave a system out, the same on both sides: {', '.join(SYSTEMS.values())}",
    )
    parser.add_argument(
        "--budget",
        type=commands.share,
        default=1.0,
        metavar="SHARE",
        help="DiSCo: share of the questions' tokens that the cloud may read",
    )
    parser.add_argument(
        "--memory", type=commands.positive, default=MEMORY, metavar="MB", help="that GRATING's reranker may take"
    )
    parser.add_argument(
        "--model", default=MODEL, help="a chat model, the same on both sides: bundled, a folder or a hub id"
    )
    parser.add_argument("--limit", type=commands.count, default=64, metavar="N", help="most tokens of an answer")
    parser.add_argument("--patience", type=commands.seconds, default=20.0, metavar="S", help="to wait for the cloud")
    parser.add_argument("--threads", type=commands.count, default=1, metavar="N", help="of PyTorch")
    for name, words in {"certificate": "this side's", "key": "its key", "authority": "who is trusted"}.items():
        parser.add_argument(f"--{name}", type=commands.existing, metavar="FILE", help=f"TLS: {words}")
    parser.add_argument("--until-input-ends", action="store_true", help="a cloud that ends with its standard input")
    return parser


def _folder(text: str) -> Path:
    path = Path(text).expanduser()
    if not path.exists():
        raise argparse.ArgumentTypeError(f"there is no file or folder {text!r}")
    return path


if __name__ == "__main__":
    main()

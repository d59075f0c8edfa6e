"""`ondevice-pair cloud` and `device`: the two processes; `documents` says what a side has."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, get_args

import torch

from ondevice import commands, models
from ondevice.causal_lm import CausalLM
from ondevice.causal_lm.kv_store import KVStore
from ondevice.commands import address, count, existing, positive, seconds, share, writable
from ondevice_papers.dragon import codec
from ondevice_papers.dragon.messages import Mode, Moves, Side
from ondevice_programs.pair import documents, terminal
from ondevice_programs.pair.answer import Asked, request
from ondevice_programs.pair.cloud import Cloud, Limits
from ondevice_programs.pair.device import Device
from ondevice_programs.pair.guard import Guard
from ondevice_programs.pair.node import TEMPLATE, Node
from ondevice_programs.pair.wire import Lost, Refused, Unheard, client_tls, server_tls

_MODES = (
    "speculative (Algorithm 1), shared (one random number for both sides: more drafts are accepted), token-wise (no "
    "drafts ahead), sequence-wise, cloud-only; the question always leaves, and but for the last two the answer's tokens"
)
NETWORK = 3  # exit code where the two sides cannot work together


def main(arguments: list[str] | None = None) -> None:
    """Parse, run, and end with one line where something cannot be: code 2, or 3 where it is the network."""
    options = _parser().parse_args(arguments)
    _log()
    program = f"ondevice-pair {options.command}"
    with commands.refusing(program):
        try:
            options.run(options)
        except (Lost, Refused) as error:
            print(f"{program}: {commands.sentence(error)}", file=sys.stderr)
            sys.exit(NETWORK)


def _log() -> None:
    """This package's warnings alone, on standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("ondevice.pair: %(message)s"))
    for package in ("ondevice", "ondevice_programs"):
        logging.getLogger(package).handlers = [handler]
    for name in ("bm25s", "torch", "pypdf", "charset_normalizer"):
        logging.getLogger(name).setLevel(logging.ERROR)


def run_cloud(options: argparse.Namespace) -> None:
    """Listen until interrupted, or until standard input ends where that was asked for."""
    host, port = options.listen
    tls = server_tls(options.certificate, options.key, options.authority) if options.certificate else None
    limits = Limits(options.most_sessions, options.most_k, options.most_tokens, int(1e6 * options.most_memory))
    cloud = Cloud(_node(options), limits=limits, gives_documents=options.gives_documents, **_paces(options))

    async def serve() -> None:
        async with cloud.listening(host, port, tls) as opened:
            print(f"Listening on {host}:{opened}", flush=True)
            if options.until_input_ends:
                await _input_end()
            else:
                await asyncio.Event().wait()

    asyncio.run(serve())


async def _input_end() -> None:
    """Wait until standard input is closed, in a thread that does not hold up an interrupted process."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 2**12):
            pass
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=wait, daemon=True).start()
    await ended.wait()


def run_device(options: argparse.Namespace) -> None:
    """Answer one query, or each line of standard input."""
    host, port = options.connect
    tls = client_tls(options.authority, options.certificate, options.key) if options.authority else None
    asked = Asked(
        options.k, options.limit, options.mode, options.aggregator, options.scheduler, options.temperature,
        options.gamma_remote, options.lookahead, options.cap, options.seed,
    )  # fmt: skip
    documents.check(options)
    request("standard input" if options.query is None else options.query, asked)  # told before models are loaded
    node = _node(options)
    guard = Guard(map(_ids(node), node.documents.texts), options.guard) if options.guard else None
    with Device(node, host, port, tls=tls, patience=options.patience, guard=guard, **_paces(options)) as device:
        try:
            device.connect()
        except Unheard:
            raise
        except Lost as lost:  # it may come yet; so many questions as there are, are answered alone
            print(f"No cloud at {host}:{port}: {lost}.", file=sys.stderr, flush=True)
        for query in [options.query] if options.query is not None else map(str.strip, sys.stdin):
            if query:
                _answer(device, query, asked, options.json)


def _answer(device: Device, query: str, asked: Asked, as_json: bool) -> None:
    tokenizer = device.node.tokenizer
    if as_json:
        print(terminal.as_json(query, device.answer(query, asked), tokenizer), flush=True)
        return
    stream = terminal.Stream(tokenizer, sys.stdout)
    answer = device.answer(query, asked, stream.token, stream.drafts)
    stream.end()
    for note in terminal.notes(answer, tokenizer):
        print(note, file=sys.stderr, flush=True)


def _ids(node: Node) -> Callable[[str], list[int]]:
    """A text's ids."""
    return lambda text: list(node.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def _paces(options: argparse.Namespace) -> dict[str, Any]:
    return {"pace": options.pace_ms / 1000, "prefill": options.prefill_ms / 1000}


def _node(options: argparse.Namespace) -> Node:
    torch.set_num_threads(options.threads)
    loaded = models.load(options.model)
    models.require_trained(loaded.model, "answering")
    found, _ = documents.read(options, loaded.tokenizer)
    lm = CausalLM(loaded.model)
    store = KVStore(options.store, lm, loaded.tokenizer, TEMPLATE.text) if options.store else None
    return Node(lm, loaded.tokenizer, found, store=store, longest=options.longest, name=options.model)


def _parser() -> argparse.ArgumentParser:
    parser = commands.Parser("ondevice-pair", description=__doc__)
    programs = parser.add_subparsers(dest="command", required=True)
    cloud = programs.add_parser(
        "cloud", help="listen for devices", example="ondevice-pair cloud --documents corpus --part 1/2"
    )
    cloud.set_defaults(run=run_cloud)
    cloud.add_argument("--listen", type=address, default="127.0.0.1:7600", metavar="HOST:PORT", help="port 0: any")
    cloud.add_argument("--gives-documents", action="store_true", help="let devices fetch its documents (baselines)")
    cloud.add_argument("--most-sessions", type=count, default=64, help="at a time")
    cloud.add_argument("--most-k", type=count, default=16, help="documents of a session")
    cloud.add_argument("--most-tokens", type=count, default=1024, help="of an answer")
    cloud.add_argument(
        "--most-memory", type=positive, default=2048, metavar="MB", help="keys and values of all sessions"
    )
    cloud.add_argument("--until-input-ends", action="store_true", help="end when standard input is closed")
    device = programs.add_parser(
        "device",
        help="ask, together with a cloud",
        example="ondevice-pair device --documents corpus --part 2/2 --query 'How do I open a file?'",
    )
    device.set_defaults(run=run_device)
    device.add_argument(
        "--connect", type=address, default="127.0.0.1:7600", metavar="HOST:PORT", help="where the cloud listens"
    )
    device.add_argument("--query", help="default: each line of standard input")
    device.add_argument("--k", type=commands.whole(), default=2, help="documents of each side")
    device.add_argument("--limit", type=count, default=64, help="most tokens")
    device.add_argument("--mode", default="speculative", choices=get_args(Mode), help=_MODES)
    device.add_argument(
        "--aggregator",
        default="device",
        choices=get_args(Side),
        help="the side that aggregates first, default: device; with cloud, distributions over private documents leave",
    )
    device.add_argument(
        "--scheduler",
        default="stay",
        choices=get_args(Moves),
        help="greedy (the paper's) and lagging move the aggregator, and distributions over private documents with it; "
        "default: stay",
    )
    device.add_argument("--temperature", type=seconds, default=1.0, help="0 is greedy decoding")
    device.add_argument("--gamma-remote", type=share, default=0.5, help="the paper's 0.5; 1 accepts most remote drafts")
    device.add_argument("--lookahead", type=count, default=16, help="most drafts that wait")
    device.add_argument(
        "--cap", type=commands.whole(codec.SMALLEST, codec.LARGEST), default=codec.CAP, help="bytes of a distribution"
    )
    device.add_argument(
        "--guard",
        type=commands.whole(2),
        metavar="N",
        help="go on alone before N tokens in a row of a private document have left",
    )
    device.add_argument("--seed", type=commands.whole(), help="of sampling (default: another one each time)")
    device.add_argument("--patience", type=seconds, default=2.0, help="seconds to wait for the cloud; then alone")
    device.add_argument("--json", action="store_true", help="a line for each question, with the whole account")
    for side in (cloud, device):
        _add_shared(side)
    documents.add_private(device)
    documents.add_program(programs)
    return parser


def _add_shared(parser: argparse.ArgumentParser) -> None:
    documents.add(parser)
    parser.add_argument("--store", type=writable, help="folder for documents' keys and values")
    parser.add_argument("--threads", type=count, default=1, help="of PyTorch")
    parser.add_argument("--pace-ms", type=seconds, default=0.0, help="least time of a token, as on slower hardware")
    parser.add_argument("--prefill-ms", type=seconds, default=0.0, help="the same of the first token")
    parser.add_argument("--certificate", type=existing, help="TLS: this side's certificate")
    parser.add_argument("--key", type=existing, help="TLS: its key")
    parser.add_argument("--authority", type=existing, help="TLS: whose certificates are trusted")


if __name__ == "__main__":
    main()

"""Two processes that answer together: a cloud with public documents and a device with private ones.

The device's documents leave it in no mode. The question leaves it, and in the modes speculative, shared and
token-wise the answer's tokens, which `device --guard` may stop. With `device --aggregator cloud` or a moving
`device --scheduler`, next-token distributions over private documents leave as well.
"""

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
from ondevice.commands import address, count, existing, positive, seconds, share, writable
from ondevice_papers.dragon.kv_store import KVStore

with commands.loading("ondevice-pair", "pair"):
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
    "speculative (Algorithm 1), shared (one random number for both sides: more drafts are "
    "accepted), token-wise (no drafts ahead), sequence-wise, cloud-only"
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
        "cloud", help="listen for devices", usage="%(prog)s [options]",
        example="ondevice-pair cloud --documents corpus --part 1/2",
    )  # fmt: skip
    cloud.set_defaults(run=run_cloud)
    add = cloud.add_argument
    add("--listen", type=address, default="127.0.0.1:7600", metavar="HOST:PORT", help="port 0: any")
    add("--gives-documents", action="store_true", help="let devices fetch its documents (baselines)")
    add("--most-sessions", type=count, default=64, metavar="N", help="at a time")
    add("--most-k", type=count, default=16, metavar="N", help="documents of a session")
    add("--most-tokens", type=count, default=1024, metavar="N", help="of an answer")
    add("--most-memory", type=positive, default=2048, metavar="MB", help="keys and values of all sessions")
    add("--until-input-ends", action="store_true", help="end when standard input is closed")
    device = programs.add_parser(
        "device", help="ask, together with a cloud", usage="%(prog)s [options]",
        example="ondevice-pair device --documents corpus --part 2/2 --query 'How do I open a file?'",
    )  # fmt: skip
    device.set_defaults(run=run_device)
    add = device.add_argument
    add("--connect", type=address, default="127.0.0.1:7600", metavar="HOST:PORT", help="where the cloud listens")
    add("--query", metavar="TEXT", help="default: each line of standard input")
    add("--k", type=commands.whole(), default=2, help="documents of each side")
    add("--limit", type=count, default=64, metavar="N", help="most tokens of an answer")
    add("--mode", default="speculative", choices=get_args(Mode), metavar="MODE", help=_MODES)
    add("--aggregator", default="device", choices=get_args(Side), metavar="SIDE",
        help="device; cloud: distributions over private documents leave")  # fmt: skip
    add("--scheduler", default="stay", choices=get_args(Moves), metavar="HOW",
        help="stay; greedy (the paper's), lagging: such distributions leave")  # fmt: skip
    add("--guard", type=commands.whole(2), metavar="N",
        help="go on alone before N tokens in a row of a private document leave")  # fmt: skip
    add("--temperature", type=seconds, default=1.0, metavar="T", help="0 is greedy decoding")
    add("--gamma-remote", type=share, default=0.5, metavar="G", help="the paper's 0.5; 1 accepts most remote drafts")
    add("--lookahead", type=count, default=16, metavar="N", help="most drafts that wait")
    add("--cap", type=commands.whole(codec.SMALLEST, codec.LARGEST), default=codec.CAP, metavar="BYTES",
        help="of a distribution")  # fmt: skip
    add("--seed", type=commands.whole(), metavar="N", help="of sampling (default: another one each time)")
    add("--patience", type=seconds, default=2.0, metavar="S", help="seconds to wait for the cloud; then alone")
    add("--json", action="store_true", help="a line for each question, with the whole account")
    for side in (cloud, device):
        _add_shared(side)
    documents.add_private(device)
    documents.add_program(programs)
    return parser


def _add_shared(parser: argparse.ArgumentParser) -> None:
    documents.add(parser)
    parser.add_argument("--store", type=writable, metavar="FOLDER", help="for documents' keys and values")
    parser.add_argument("--threads", type=count, default=1, metavar="N", help="of PyTorch")
    parser.add_argument("--pace-ms", type=seconds, default=0.0, metavar="MS", help="least time per token")
    parser.add_argument("--prefill-ms", type=seconds, default=0.0, metavar="MS", help="least time of the first token")
    for name, words in {"certificate": "this side's", "key": "its key", "authority": "who is trusted"}.items():
        parser.add_argument(f"--{name}", type=existing, metavar="FILE", help=f"TLS: {words}")


if __name__ == "__main__":
    main()

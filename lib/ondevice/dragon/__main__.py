"""`python -m ondevice.dragon cloud` and `device`: the two processes; `documents` says what a side has."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import sys
import threading
from typing import Any, get_args

import torch

from ondevice import commands, models
from ondevice.causal_lm import CausalLM
from ondevice.commands import address, count, existing, positive, seconds, share, writable
from ondevice.dragon import documents
from ondevice.dragon.live.cloud import Cloud
from ondevice.dragon.live.connection import client_tls, server_tls
from ondevice.dragon.live.device import Answer, Asked, Device, request
from ondevice.dragon.live.kv_store import KVStore
from ondevice.dragon.live.node import TEMPLATE, Node
from ondevice.dragon.messages import Mode, Moves, Side


def main(arguments: list[str] | None = None) -> None:
    """Parse, run, and end with one line where something cannot be."""
    options = _parser().parse_args(arguments)
    _log()
    with commands.refusing(f"python -m ondevice.dragon {options.command}"):
        options.run(options)


def _log() -> None:
    """This package's warnings alone, on standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("ondevice.dragon: %(message)s"))
    logging.getLogger("ondevice").handlers = [handler]
    for name in ("bm25s", "torch", "pypdf", "charset_normalizer"):
        logging.getLogger(name).setLevel(logging.ERROR)


def run_cloud(options: argparse.Namespace) -> None:
    """Listen until interrupted, or until standard input ends where that was asked for."""
    host, port = options.listen
    tls = server_tls(options.certificate, options.key, options.authority) if options.certificate else None
    cloud = Cloud(_node(options), gives_documents=options.gives_documents, **_timing(options))

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
    ended, loop = asyncio.Event(), asyncio.get_running_loop()

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
        options.gamma_remote, options.lookahead, seed=options.seed,
    )  # fmt: skip
    documents.check(options)
    request("standard input" if options.query is None else options.query, asked)  # told before models are loaded
    device = Device(
        _node(options), host, port, tls=tls, **_timing(options), patience=options.patience,
    )  # fmt: skip
    for query in [options.query] if options.query is not None else map(str.strip, sys.stdin):
        _report(device.answer(query, asked), f"{host}:{port}", options.json)


def _report(answer: Answer, address: str, as_json: bool) -> None:
    alone = f"; alone from token {answer.alone_from}: {answer.reason}" if answer.alone_from is not None else ""
    if answer.alone_from == 0 and not answer.connections and answer.reason:  # it was never reached
        nobody = answer.reason.startswith("nobody answers")
        why = f"No cloud at {address}" if nobody else answer.reason[:1].upper() + answer.reason[1:]
        print(f"{why}; answered with this side's documents alone.", file=sys.stderr, flush=True)
        alone = "; alone"
    if as_json:
        print(json.dumps(vars(answer)), flush=True)
        return
    print(answer.text, flush=True)
    shares = [f"{name} {kept}/{all_}" for name, (all_, kept) in (("device", answer.device), ("cloud", answer.cloud))]
    print(
        f"[{len(answer.tokens)} tokens, first after {1e3 * answer.ttft:.0f} ms, then {1e3 * answer.per_token:.1f} ms "
        f"each; drafts accepted: {', '.join(shares)}; {answer.sent} bytes sent, {answer.received} received{alone}]",
        file=sys.stderr, flush=True,
    )  # fmt: skip


def _timing(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "pace": options.pace_ms / 1000, "prefill": options.prefill_ms / 1000, "silence": options.silence,
        "beat": options.silence / 8,
    }  # fmt: skip


def _node(options: argparse.Namespace) -> Node:
    torch.set_num_threads(options.threads)
    loaded = models.load(options.model)
    models.require_trained(loaded.model, "answering")
    found, _ = documents.read(options, loaded.tokenizer)
    lm = CausalLM(loaded.model)
    store = KVStore(options.store, lm, loaded.tokenizer, TEMPLATE.text) if options.store else None
    return Node(lm, loaded.tokenizer, found, weight_temperature=options.weight_temperature, store=store,
                longest=options.longest)  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = commands.Parser("python -m ondevice.dragon", description=__doc__)
    programs = parser.add_subparsers(dest="command", required=True)
    cloud = programs.add_parser(
        "cloud", help="listen for devices", example="python -m ondevice.dragon cloud --documents corpus --part 1/2"
    )
    cloud.set_defaults(run=run_cloud)
    cloud.add_argument("--listen", type=address, default="127.0.0.1:7600", metavar="HOST:PORT", help="port 0: any")
    cloud.add_argument("--gives-documents", action="store_true", help="let devices fetch its documents (baselines)")
    cloud.add_argument("--until-input-ends", action="store_true", help="end when standard input is closed")
    device = programs.add_parser(
        "device", help="ask, together with a cloud",
        example="python -m ondevice.dragon device --documents corpus --part 2/2 --query 'How do I open a file?'",
    )  # fmt: skip
    device.set_defaults(run=run_device)
    device.add_argument(
        "--connect", type=address, default="127.0.0.1:7600", metavar="HOST:PORT", help="where the cloud listens"
    )
    device.add_argument("--query", help="default: each line of standard input")
    device.add_argument("--k", type=commands.whole(), default=2, help="documents of each side")
    device.add_argument("--limit", type=count, default=64, help="most tokens")
    device.add_argument("--mode", default="speculative", choices=get_args(Mode), help="how the sides aggregate")
    device.add_argument(
        "--aggregator", default="device", choices=get_args(Side), help="the side that aggregates first, default: device"
    )
    device.add_argument(
        "--scheduler", default="stay", choices=get_args(Moves),
        help="greedy (the paper's) and lagging move the aggregator; default: stay",
    )  # fmt: skip
    device.add_argument("--temperature", type=seconds, default=1.0, help="0 is greedy decoding")
    device.add_argument("--gamma-remote", type=share, default=0.5, help="the paper's 0.5; 1 accepts most remote drafts")
    device.add_argument("--lookahead", type=count, default=16, help="most drafts that wait")
    device.add_argument("--seed", type=commands.whole(), help="of sampling (default: another one each time)")
    device.add_argument("--patience", type=seconds, default=5.0, help="seconds to wait for a lost cloud")
    device.add_argument("--json", action="store_true", help="print the whole account of each answer")
    for side in (cloud, device):
        _add_shared(side)
    documents.add_private(device)
    documents.add_program(programs)
    return parser


def _add_shared(parser: argparse.ArgumentParser) -> None:
    documents.add(parser)
    parser.add_argument("--store", type=writable, help="folder for documents' keys and values")
    parser.add_argument("--weight-temperature", type=positive, default=1.0, help="of scores; the same on both sides")
    parser.add_argument("--threads", type=count, default=1, help="of PyTorch")
    parser.add_argument("--pace-ms", type=seconds, default=0.0, help="least time of a token, as on slower hardware")
    parser.add_argument("--prefill-ms", type=seconds, default=0.0, help="the same of the first token")
    parser.add_argument("--silence", type=positive, default=8.0, help="seconds after which a silent peer is given up")
    parser.add_argument("--certificate", type=existing, help="TLS: this side's certificate")
    parser.add_argument("--key", type=existing, help="TLS: its key")
    parser.add_argument("--authority", type=existing, help="TLS: whose certificates are trusted")


if __name__ == "__main__":
    main()

"""Two processes that answer together: a cloud with public documents and a device with private ones.

The question leaves the device, and in the modes speculative, shared and token-wise the answer's tokens. The guard,
which is on (`device --guard`), keeps longer runs of a private document from leaving: the device goes on alone before
one is told, and says so. With `device --aggregator cloud` or a moving `device --scheduler`, next-token distributions
over private documents leave as well, which the guard does not see.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import sys
import threading
from typing import TYPE_CHECKING, Any, get_args

import torch

from ondevice import commands, models
from ondevice.causal_lm import CausalLM
from ondevice.commands import address, count, existing, positive, seconds, share, writable
from ondevice_papers.dragon.kv_store import KVStore

with commands.loading("ondevice-pair", "pair"):
    from ondevice.retrieval import embedder
    from ondevice_papers.dragon import codec
    from ondevice_papers.dragon.messages import Mode, Moves, Side
    from ondevice_programs.pair import documents, library, relevance, terminal
    from ondevice_programs.pair.answer import AnswerSettings, request
    from ondevice_programs.pair.cloud import Cloud, Limits
    from ondevice_programs.pair.device import Device
    from ondevice_programs.pair.guard import LENGTH
    from ondevice_programs.pair.node import PLAIN, WEIGHT_TEMPERATURE, Node, template_of
    from ondevice_programs.pair.wire import Lost, Refused, Unheard, client_tls, server_tls
    from ondevice_programs.reranker import Reranker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ondevice_programs.pair.decoder import Template

_MODES = (
    "speculative (Algorithm 1), shared (one random number for both sides: more drafts are "
    "accepted), token-wise (no drafts ahead), sequence-wise, cloud-only"
)
NO_RERANKER = "none"
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
    documents.check(options)
    host, port = options.listen
    tls = server_tls(options.certificate, options.key, options.authority) if options.certificate else None
    limits = Limits(options.most_sessions, options.most_k, options.most_tokens, int(1e6 * options.most_memory))
    cloud = Cloud(_node(options), limits=limits, **_paces(options))

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
    settings = AnswerSettings(
        options.k,
        options.limit,
        options.mode,
        options.aggregator,
        options.scheduler,
        options.temperature,
        options.gamma_remote,
        options.lookahead,
        options.cap,
        options.seed,
    )
    documents.check(options)
    request("standard input" if options.query is None else options.query, settings)  # told before models are loaded
    node = _node(options)
    private = options.documents != library.CORPUS  # which is public
    guard = node.guard(options.guard) if options.guard and private else None
    with Device(node, host, port, tls=tls, patience=options.patience, guard=guard, **_paces(options)) as device:
        try:
            device.connect()
        except Unheard:
            raise
        except Lost as lost:  # it may come yet; so many questions as there are, are answered alone
            print(f"No cloud at {host}:{port}: {lost}.", file=sys.stderr, flush=True)
        for query in [options.query] if options.query is not None else map(str.strip, sys.stdin):
            if query:
                _answer(device, query, settings, options.json)


def _answer(device: Device, query: str, settings: AnswerSettings, as_json: bool) -> None:
    tokenizer = device.node.tokenizer
    device.node.require_room(query, settings.limit)
    if as_json:
        answer = device.answer(query, settings)
        private = terminal.texts_used(answer, device.node.documents)
        print(terminal.as_json(query, answer, tokenizer, private), flush=True)
        return
    stream = terminal.AnswerWriter(tokenizer, sys.stdout)
    answer = device.answer(query, settings, stream.token, stream.drafts)
    stream.end()
    for note in terminal.notes(answer, tokenizer, terminal.texts_used(answer, device.node.documents)):
        print(note, file=sys.stderr, flush=True)


def _paces(options: argparse.Namespace) -> dict[str, Any]:
    return {"pace": options.pace_ms / 1000, "prefill": options.prefill_ms / 1000}


def _node(options: argparse.Namespace) -> Node:
    torch.set_num_threads(options.threads)
    loaded = models.load(options.model)
    models.require_trained(loaded.model, "answering")
    scorer = make_scorer(options.reranker, options.reranker_memory)
    template = _template(options.model, loaded.tokenizer)
    collection, _ = documents.read(options, loaded.tokenizer, template)
    over = WEIGHT_TEMPERATURE
    if scorer is not None:
        collection = relevance.Scored(**vars(collection), scorer=scorer)
        over = relevance.TEMPERATURE
    lm = CausalLM(loaded.model)
    store = KVStore(options.store, lm, loaded.tokenizer, template.text) if options.store else None
    return Node(
        lm, loaded.tokenizer, collection, template, over, store=store, longest=options.longest, name=options.model
    )


def make_scorer(reranker: str, memory: float) -> relevance.Scorer | None:
    """What reads question and passage; None, which is said in a line, where passages are scored by BM25 alone.

    memory: MB of the reranker.
    """
    if reranker == NO_RERANKER:
        print(
            "Without a reranker passages are weighed by BM25's share of the question; shares of two searches do not "
            "compare.",
            file=sys.stderr,
            flush=True,
        )
        return None
    return relevance.Scorer(Reranker(reranker, memory_budget=memory, mode="order", calibration=False), embedder())


def _template(name: str, tokenizer: PreTrainedTokenizerBase) -> Template:
    """The model's, with a line where it is no chat template of its own."""
    template = template_of(tokenizer)
    if template == PLAIN:
        text = f"{name} reads passages and questions as plain text, as it has no chat template."
        print(text, file=sys.stderr, flush=True)
    return template


def _parser() -> argparse.ArgumentParser:
    parser = commands.Parser("ondevice-pair", description=__doc__)
    programs = parser.add_subparsers(dest="command", required=True)
    cloud = programs.add_parser(
        "cloud",
        help="listen for devices",
        usage="%(prog)s [options]",
        example="ondevice-pair cloud --documents corpus --part 1/2",
    )
    cloud.set_defaults(run=run_cloud)
    add = cloud.add_argument
    add("--listen", type=address, default="127.0.0.1:7600", metavar="HOST:PORT", help="port 0: any")
    add("--most-sessions", type=count, default=64, metavar="N", help="at a time")
    add("--most-k", type=count, default=16, metavar="N", help="documents of a session")
    add("--most-tokens", type=count, default=1024, metavar="N", help="of an answer")
    add("--most-memory", type=positive, default=2048, metavar="MB", help="keys and values of all sessions")
    add("--until-input-ends", action="store_true", help="end when standard input is closed")
    device = programs.add_parser(
        "device",
        help="ask, together with a cloud",
        usage="%(prog)s [options]",
        example="ondevice-pair device --documents corpus --part 2/2 --query 'How do I open a file?'",
    )
    device.set_defaults(run=run_device)
    add = device.add_argument
    add("--connect", type=address, default="127.0.0.1:7600", metavar="HOST:PORT", help="where the cloud listens")
    add("--query", metavar="TEXT", help="default: each line of standard input")
    add("--k", type=commands.whole(), default=2, help="documents of each side")
    add("--limit", type=count, default=64, metavar="N", help="most tokens of an answer")
    add("--mode", default="speculative", choices=get_args(Mode), metavar="MODE", help=_MODES)
    add(
        "--aggregator",
        default="device",
        choices=get_args(Side),
        metavar="SIDE",
        help="device; cloud: distributions over private documents leave",
    )
    add(
        "--scheduler",
        default="stay",
        choices=get_args(Moves),
        metavar="HOW",
        help="stay; greedy (paper), lagging: such distributions leave",
    )
    add(
        "--guard",
        type=_length,
        default=LENGTH,
        metavar="N",
        help="go on alone before N tokens of a private text leave; 0: off",
    )
    add("--temperature", type=seconds, default=0.0, metavar="T", help="0 is greedy decoding")
    add("--gamma-remote", type=share, default=0.5, metavar="G", help="the paper's 0.5; 1 accepts most remote drafts")
    add("--lookahead", type=count, default=16, metavar="N", help="most drafts that wait")
    add(
        "--cap",
        type=commands.whole(codec.SMALLEST, codec.LARGEST),
        default=codec.CAP,
        metavar="BYTES",
        help="of a distribution",
    )
    add("--seed", type=commands.whole(), metavar="N", help="of sampling (default: another one each time)")
    add("--patience", type=seconds, default=2.0, metavar="S", help="seconds to wait for the cloud; then alone")
    add("--json", action="store_true", help="a line for each question, with the whole account")
    for side in (cloud, device):
        _add_shared(side)
    documents.add_private(device)
    documents.add_program(programs)
    return parser


def _length(text: str) -> int:
    """The type of the guard's length: 0, or 2 and more, as a single token is no quotation."""
    length: int = commands.whole(0)(text)
    if length == 1:
        raise argparse.ArgumentTypeError("a quotation has two tokens or more; 0 switches the guard off")
    return length


def _add_shared(parser: argparse.ArgumentParser) -> None:
    documents.add(parser)
    parser.add_argument(
        "--reranker",
        default=relevance.RERANKER,
        metavar="MODEL",
        help=f"the same on both sides; {NO_RERANKER}: BM25's share",
    )
    parser.add_argument(
        "--reranker-memory", type=positive, default=relevance.MEMORY, metavar="MB", help="of the reranker"
    )
    parser.add_argument("--store", type=writable, metavar="FOLDER", help="for documents' keys and values")
    parser.add_argument("--threads", type=count, default=1, metavar="N", help="of PyTorch")
    for name in ("pace-ms", "prefill-ms"):  # least times of a token and of the first one, to imitate other hardware
        parser.add_argument(f"--{name}", type=seconds, default=0.0, metavar="MS", help=argparse.SUPPRESS)
    for name, words in {"certificate": "this side's", "key": "its key", "authority": "who is trusted"}.items():
        parser.add_argument(f"--{name}", type=existing, metavar="FILE", help=f"TLS: {words}")


if __name__ == "__main__":
    main()

"""Every byte between the two sides, searched for the device's documents: as text, and as runs of their tokens."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import msgspec
import numpy as np
import pytest
import torch
from dragon_tables import Table, TableNode, begin_of
from tiny import random_model

from ondevice import shapes
from ondevice.causal_lm import CausalLM
from ondevice.retrieval import SparseIndex
from ondevice_papers.dragon import codec, messages
from ondevice_papers.dragon.messages import Begin, DraftMessage, Message, Switch, Target
from ondevice_programs.pair.answer import Answer, AnswerSettings
from ondevice_programs.pair.cloud import Cloud
from ondevice_programs.pair.decoder import Template
from ondevice_programs.pair.device import Device
from ondevice_programs.pair.guard import Guard
from ondevice_programs.pair.node import Documents, Node

WINDOW, RUN = 24, 8  # characters of a document, tokens of it: what is searched for
QUERY = "What does Ms Quill take?"
PRIVATE_TEXT = (
    "Patient file 4711, strictly confidential: Jonquil Quill, born 3 May 1961, takes 40 mg of propranolol twice a day "
    "and has told nobody but her doctor that she sees zebras at dusk. Her next visit is on Thursday at ten."
)
PUBLIC_TEXT = (
    "A pharmacy hands out medicine by prescription; the leaflet says how often it is taken, and what else to avoid. "
    "Most tablets are taken with water, after a meal, at the same time of each day, for as long as is prescribed."
)
WAYS = [
    AnswerSettings(mode=mode, aggregator=aggregator, scheduler=scheduler, temperature=1.0)
    for mode, aggregator, scheduler in itertools.product(
        ["speculative", "shared", "token-wise"], ["device", "cloud"], ["stay", "lagging"]
    )
] + [AnswerSettings(mode="sequence-wise", temperature=1.0), AnswerSettings(mode="cloud-only", temperature=1.0)]


# The wire


@dataclass
class Wire:
    """What went over it, each way."""

    up: bytearray = field(default_factory=bytearray)
    down: bytearray = field(default_factory=bytearray)

    def bodies(self, way: str) -> list[bytes]:
        """The WebSocket's messages of one way, in order, unmasked. Every byte is accounted for, or this raises.

        By hand, from RFC 6455: an HTTP head, then frames of a few bytes of header, a mask upwards, and the body.
        """
        data, found = bytes(getattr(self, way)), []
        while data:
            head, _, data = data.partition(b"\r\n\r\n")
            assert head.startswith((b"GET / HTTP/1.1\r\n", b"HTTP/1.1 101 "))
            while data and not data.startswith((b"GET", b"HTTP")):
                kind, size, place = data[0], data[1] & 127, 2
                if size > 125:
                    width = {126: 2, 127: 8}[size]
                    size, place = int.from_bytes(data[place : place + width], "big"), place + width
                mask = data[place : place + 4] if data[1] & 128 else bytes(4)
                assert (data[1] & 128 > 0) == (way == "up") and kind & 0x70 == 0
                place += 4 * (way == "up")
                body = data[place : place + size]
                body = (np.frombuffer(body, np.uint8) ^ np.resize(np.frombuffer(mask, np.uint8), len(body))).tobytes()
                assert len(body) == size and kind in (0x82, 0x88, 0x89, 0x8A), "binary, close, ping, pong"
                assert kind == 0x82 or size <= 30
                found += [body] if kind == 0x82 else []
                data = data[place + size :]
        return found

    def messages(self, way: str) -> list[Message]:
        return [messages.decode(body) for body in self.bodies(way)]

    def raw(self, way: str) -> bytes:
        """What a listener can read: the bytes as they went and, upwards, without their masks."""
        return bytes(getattr(self, way)) + b"".join(self.bodies(way))


@contextlib.asynccontextmanager
async def tapped(target: int) -> AsyncIterator[tuple[int, Wire]]:
    """A proxy that keeps all bytes."""
    wire, tasks = Wire(), []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(2**16):
                kept += data
                writer.write(data)
        writer.close()

    async def opened(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs = await asyncio.open_connection("127.0.0.1", target)
        tasks.append(asyncio.create_task(pump(reader, theirs[1], wire.up)))
        tasks.append(asyncio.create_task(pump(theirs[0], writer, wire.down)))

    server = await asyncio.start_server(opened, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], wire
    finally:
        await asyncio.gather(*tasks)
        server.close()


def talk(
    device: Node, cloud: Node, asked: AnswerSettings, query: str = QUERY, guard: Guard | None = None
) -> tuple[Answer, Wire]:
    async def run() -> tuple[Answer, Wire]:
        async with Cloud(cloud).listening() as port, tapped(port) as (through, wire):
            with Device(device, port=through, patience=30.0, guard=guard) as asking:
                answer = await asking.ask(query, asked)
        return answer, wire

    answer, wire = asyncio.run(run())
    assert answer.connections == 1 and (guard is not None or answer.alone_from is None)
    assert answer.sent == sum(answer.left.values()) == sum(map(len, wire.bodies("up")))
    return answer, wire


# The search


def texts_found(raw: bytes, text: str) -> list[str]:
    """Pieces of the text that stand in these bytes."""
    pieces = (text[i : i + WINDOW] for i in range(len(text) - WINDOW + 1))
    return [piece for piece in pieces if piece.encode() in raw or piece.encode("utf-16-le") in raw]


def varint(number: int) -> bytes:
    return (bytes([number & 127 | 128]) + varint(number >> 7)) if number > 127 else bytes([number])


def written(ids: Sequence[int]) -> set[bytes]:
    """Token ids as bytes, in the ways that programs write them."""
    arrays = {np.array(ids, kind).tobytes() for kind in ("<u2", ">u2", "<u4", ">u4", "<u8")}
    return arrays | {b"".join(map(varint, ids)), b"".join(map(msgspec.msgpack.encode, ids))}


def told(found: Sequence[Message]) -> dict[str, list[int]]:
    """All token ids that messages tell, in their order: decided, drafted, and those of each distribution."""
    several = ([m] if isinstance(m, DraftMessage) else m.drafts if isinstance(m, Switch) else [] for m in found)
    drafts = [draft for some in several for draft in some]
    last = {draft.position: draft.token for draft in drafts}  # drafted anew after each rejection
    ids = {"decided": [m.token for m in found if isinstance(m, Target)], "drafted": [last[i] for i in sorted(last)]}
    for number, draft in enumerate(draft for draft in drafts if draft.distribution):
        p = codec.decode(draft.distribution, VOCABULARY)
        ids[f"likeliest {number}"] = np.argsort(-p, kind="stable")[: np.count_nonzero(p)].tolist()
    return ids


def runs_found(raw: bytes, found: Sequence[Message], ids: Sequence[int]) -> list[tuple[str, int]]:
    """(where, at which of its tokens) a run of the document's tokens is."""
    places = []
    runs = {tuple(ids[i : i + RUN]): i for i in range(len(ids) - RUN + 1)}
    for where, tokens in told(found).items():
        places += [(where, runs[run]) for i in range(len(tokens)) if (run := tuple(tokens[i : i + RUN])) in runs]
    return places + [("bytes", i) for run, i in runs.items() if any(code in raw for code in written(run))]


# Sides whose documents matter

VOCABULARY = 259
TOKENIZER = shapes.byte_tokenizer()


class Copying(Table):
    """The worst case: a model that quotes a document from its beginning, whatever the other side says."""

    def __init__(self, text: str) -> None:
        super().__init__(0, VOCABULARY)
        self.ids = TOKENIZER(text).input_ids

    def log_probs(self, tokens: list[int]) -> np.ndarray:
        p = np.full(VOCABULARY, 0.02 / VOCABULARY)
        p[self.ids[len(tokens) % len(self.ids)]] += 0.98
        return np.log(p)


def copying(text: str, log_weight: float) -> TableNode:
    node = TableNode(0, log_weight, vocabulary=VOCABULARY)
    node.lm, node.tokenizer = Copying(text), TOKENIZER
    return node


@cache
def lm() -> CausalLM:
    return CausalLM(random_model("llama", torch.float32, vocabulary=VOCABULARY, context=512))


def node(text: str) -> Node:
    """The real thing: retrieval, prompt, model."""
    return Node(lm(), TOKENIZER, Documents([text], SparseIndex.build([text])), Template("{document}\n{query}\n"))


SIDES = {
    "copying": lambda: (copying(PRIVATE_TEXT, 0.0), copying(PUBLIC_TEXT, 12.0)),
    "model": lambda: (node(PRIVATE_TEXT), node(PUBLIC_TEXT)),
}
DOCUMENT_IDS = TOKENIZER(PRIVATE_TEXT).input_ids


def name(asked: AnswerSettings) -> str:
    return f"{asked.mode}-{asked.aggregator}-{asked.scheduler}"


def sent_by_device(begin: Begin) -> set[str]:
    """The kinds of messages that the device may send in a session; drafts tell of its documents."""
    kinds = {"Begin", "End"}
    if begin.mode in ("cloud-only", "sequence-wise"):
        return kinds  # the device mixes by itself what the cloud has sent
    moves = begin.scheduler != "stay"
    kinds.add("Resume")
    if begin.aggregator == "device" or moves:
        kinds.add("Target")
    if begin.aggregator == "cloud" or moves:
        kinds.add("Draft")
    return kinds | {"Switch"} if moves else kinds


def keeps_documents(begin: Begin) -> bool:
    """Whether neither a draft nor a distribution of the device's documents leaves it."""
    return not {"Draft", "Switch"} & sent_by_device(begin)


@pytest.mark.parametrize("kind", SIDES)
@pytest.mark.parametrize("way", WAYS, ids=name)
def test_the_device_sends_what_its_way_needs_and_nothing_of_its_documents(kind: str, way: AnswerSettings):
    asked = replace(way, limit=40, seed=11, k=1, lookahead=16)
    answer, wire = talk(*SIDES[kind](), asked)
    begin = begin_of(asked)
    sent, raw = wire.messages("up"), wire.raw("up") + wire.raw("down")

    assert {message.kind for message in sent} <= sent_by_device(begin)
    assert texts_found(raw, PRIVATE_TEXT) == []  # of the drafts' texts too: they are sent as ids
    if keeps_documents(begin):
        assert not any(isinstance(message, DraftMessage | Switch) for message in sent)
        assert runs_found(raw, [*sent, *wire.messages("down")], DOCUMENT_IDS) == []
    elif kind == "copying" and len(told(sent)["drafted"]) > 3 * RUN:  # it did come to that
        assert "drafted" in dict(runs_found(raw, sent, DOCUMENT_IDS))
    assert asked.aggregator == "device" or asked.scheduler != "stay" or len(told(sent)["drafted"]) > 3 * RUN
    assert QUERY.encode() in wire.raw("up")  # which every session tells
    if asked.mode in ("speculative", "shared", "token-wise") and keeps_documents(begin):
        assert [message.token for message in sent if isinstance(message, Target)] == answer.tokens


def test_the_search_finds_text_and_runs_of_tokens():
    """The device's larger weight makes the answer quote its document."""
    device, cloud = copying(PRIVATE_TEXT, 12.0), copying(PUBLIC_TEXT, 0.0)
    settings = AnswerSettings(limit=40, temperature=1.0, seed=3, k=1)
    _, wire = talk(device, cloud, settings, query=f"Why {PRIVATE_TEXT[30:70]}?")
    assert texts_found(wire.raw("up"), PRIVATE_TEXT)[0] == PRIVATE_TEXT[30 : 30 + WINDOW]
    assert ("decided", 0) in runs_found(wire.raw("up"), wire.messages("up"), DOCUMENT_IDS)
    run = DOCUMENT_IDS[5 : 5 + RUN]
    assert all(runs_found(b"##" + code, [], DOCUMENT_IDS) == [("bytes", 5)] for code in written(run))
    assert len(written([200] * RUN)) == 7


# The guard


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("way", WAYS, ids=name)
def test_with_the_guard_no_run_crosses(way: AnswerSettings, seed: int):
    """Sides that copy, of unlike weights: the answer begins to quote sooner or later, or the drafts do."""
    coins = np.random.default_rng([seed, len(name(way))])
    guard = Guard([DOCUMENT_IDS], RUN)
    device = copying(PRIVATE_TEXT, float(coins.choice([-2.0, 0.0, 12.0])))
    asked = replace(way, limit=60, seed=int(coins.integers(2**31)), k=1, lookahead=int(coins.choice([1, 4, 16])))
    answer, wire = talk(device, copying(PUBLIC_TEXT, 0.0), asked, guard=guard)
    sent = wire.messages("up")
    runs = [place for place in runs_found(wire.raw("up"), sent, DOCUMENT_IDS) if not place[0].startswith("likeliest")]
    assert runs == [] and len(answer.tokens) == 60
    assert answer.alone_from is None or answer.reason == "the answer began to quote this device's documents"
    decided = max((message.position + 1 for message in sent if isinstance(message, Target)), default=0)
    assert answer.readable >= decided and answer.readable <= len(answer.tokens)
    if keeps_documents(begin_of(asked)) and way.mode not in ("sequence-wise", "cloud-only"):
        assert answer.readable == decided
    if way.mode not in ("sequence-wise", "cloud-only") and (way.aggregator, way.scheduler) == ("cloud", "stay"):
        assert answer.alone_from is not None  # its drafts are the document

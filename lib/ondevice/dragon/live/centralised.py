"""Centralised RAG on the device: its own documents alone (CRCG), or those of the cloud too (DRCG/Text, DRCG/KV).

Documents are put together in one of two ways (section 2). Context: all in one prompt, as the paper's baselines do, best
first and cut to a budget. Output: each in a prompt of its own and the distributions mixed, which is what DRAGON
computes, here on one side. Rows that are fetched serve output aggregation alone: keys and values depend on all that
stands before them, so those of two documents that were computed apart are not those of the two in one prompt.

Of the device's, the query alone goes to the cloud. The cloud's documents come to the device, as ids where not as text.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, cast

import msgspec
import numpy as np
import torch

from ondevice.causal_lm import CausalLM
from ondevice.dragon import decisions, messages
from ondevice.dragon.live import alone
from ondevice.dragon.live.batch import Member
from ondevice.dragon.live.connection import Connection, Lost
from ondevice.dragon.live.decoder import Decoder
from ondevice.dragon.live.device import Answer, Asked, Device, request
from ondevice.dragon.live.node import Node
from ondevice.dragon.messages import PIECE, End, Failure, Fetch, Message, Rows, Texts
from ondevice.dragon.speculative_aggregation import Stream

if TYPE_CHECKING:
    from ondevice.dragon.live.kv_store import KVStore

Aggregation = Literal["context", "output"]
BUDGET = 256  # tokens of documents in one context (section 7.3)

_T = TypeVar("_T")
_U = TypeVar("_U")
_M = TypeVar("_M", bound=Message)
Ids = tuple[int, ...]


async def device_only(
    device: Device, query: str, asked: Asked | None = None, *, aggregation: Aggregation = "context",
    budget: int | None = BUDGET, on_token: Callable[[int], None] | None = None,
) -> Answer:  # fmt: skip
    """CRCG on the device: its own k documents. Arguments and errors as of `fetched_texts`, but for the cloud's."""
    _check(aggregation, budget)
    async with Request(device, query, asked, on_token) as request:
        own = await beside(request.own, request.stop)
        await request.generate(lambda: _decoder(request, own, aggregation, budget))
    return request.answer


async def fetched_texts(
    device: Device, query: str, asked: Asked | None = None, *, aggregation: Aggregation = "context",
    budget: int | None = BUDGET, on_token: Callable[[int], None] | None = None,
) -> Answer:  # fmt: skip
    """DRCG/Text: the cloud's k documents come as text and are prefilled, beside the device's own k.

    asked: of it count k, limit, temperature, seed, cap, and the mode `shared`. With output aggregation the device's own
    documents come from its store, where it has one.
    budget: tokens of documents in one context, with the template's before each; None takes all as far as the model's
    context reaches, which is as much as output aggregation reads. What query and answer need is always left free.
    Raises ValueError on a request that cannot be and on a cloud that refuses, and Lost where there is none: a baseline
    that went on alone would be another one.
    """
    _check(aggregation, budget)
    async with Request(device, query, asked, on_token, cloud=True) as request:
        own, fetched = await together(beside(request.own, request.stop), request.fetch_texts())
        await request.generate(lambda: _decoder(request, own + fetched, aggregation, budget))
    return request.answer


async def fetched_rows(
    device: Device, query: str, asked: Asked | None = None, *, on_token: Callable[[int], None] | None = None
) -> Answer:
    """DRCG/KV: the keys and values of the cloud's k documents come in the model's dtype; output aggregation.

    Raises as `fetched_texts`, and ValueError on rows that are not of this model.
    """
    async with Request(device, query, asked, on_token, cloud=True) as request:
        own, fetched = await together(beside(request.own, request.stop), request.fetch_rows())
        await request.generate(lambda: _decoder(request, own + fetched, "output", None))
    return request.answer


@dataclass(frozen=True)
class Documents:
    """Documents for one query. prefixes: ids of each one's prompt up to its end. scores: [D] relevance.

    rows: keys and values, each [layers, heads, n, width], of the prefixes that were fetched with them.
    stored: prefixes whose rows the device's store may keep.
    """

    prefixes: list[Ids]
    scores: list[float]
    rows: Mapping[Ids, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    stored: Collection[Ids] = ()

    def __add__(self, other: Documents) -> Documents:
        stored = [*self.stored, *other.stored]
        return Documents(
            self.prefixes + other.prefixes, self.scores + other.scores, {**self.rows, **other.rows}, stored
        )


class Request:
    """One answer of a baseline on its way: what all of them do on the device. An asynchronous context manager.

    cloud: whether one is needed. Raises ValueError on a request that cannot be, before anything is sent.
    """

    def __init__(
        self, device: Device, query: str, asked: Asked | None, on_token: Callable[[int], None] | None,
        *, cloud: bool = False,
    ) -> None:  # fmt: skip
        asked = asked or Asked()
        if cloud and not device.port:
            raise ValueError("This baseline needs a cloud, and the device has none.")
        if cloud and asked.k > messages.MOST:
            raise ValueError(f"This baseline takes at most {messages.MOST} documents of a side, not {asked.k}.")
        self.device, self.node, self.begin = device, device.node, request(query, asked)
        self.answer, self.on_token, self.stop = Answer(), on_token, threading.Event()
        self.began = time.perf_counter()
        self._closing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stop.set()
        if self._closing is not None:
            await self._closing
        self.answer.text = str(self.node.tokenizer.decode(self.answer.tokens, skip_special_tokens=True))

    def own(self) -> Documents:
        """The device's k best."""
        texts, scores = self.node.documents.best(self.begin.query, self.begin.k)
        found = prefixes(self.node, texts)
        return Documents(found, scores, stored=found)

    async def fetch_texts(self) -> Documents:
        """The cloud's k best, from their texts."""
        async with self.connected(Fetch(self.begin.session, self.begin.query, self.begin.k, "text")) as connection:
            found = await received(connection, Texts)
        return Documents(prefixes(self.node, found.texts), list(found.scores))

    async def fetch_rows(self) -> Documents:
        """The cloud's k best, with their rows."""
        taken = list[tuple[Ids, float, tuple[torch.Tensor, torch.Tensor]]]()
        async with self.connected(Fetch(self.begin.session, self.begin.query, self.begin.k, "rows")) as connection:
            shapes = await beside(lambda: _shapes(self.node), self.stop)  # while the rows are on their way
            documents = 1
            while (document := len(taken)) < documents:
                first = await received(connection, Rows)
                documents = documents if document else first.documents
                _require_rows(first, self.node.lm, shapes, document, documents, self.begin.k)
                data = bytearray(first.data)
                for piece in range(1, first.pieces):
                    more = await received(connection, Rows)
                    if more != msgspec.structs.replace(first, tokens=(), piece=piece, data=more.data):
                        raise Lost(f"piece {piece} of document {document} did not come in its turn")
                    data += more.data
                taken.append((first.tokens, first.score, _tensors(first, data)))
        ids, scores, rows = zip(*taken, strict=True)
        return Documents(list(ids), list(scores), dict(zip(ids, rows, strict=True)))

    @contextlib.asynccontextmanager
    async def connected(self, first: Message) -> AsyncIterator[Connection]:
        """A connection to the cloud, which is closed while the answer goes on, as that may take a while.

        first: sent with the greeting.
        """
        connection = await self.device.open(first)
        self.answer.connections += 1
        try:
            yield connection
            connection.send(End(self.begin.session, 0))
        finally:
            self._closing = asyncio.create_task(self._close(connection))

    async def generate(self, build: Callable[[], Decoder]) -> None:
        """Generate the answer in a thread. build: makes the decoder, there."""
        loop = asyncio.get_running_loop()
        await beside(lambda: self._generate(build, loop), self.stop)
        await asyncio.sleep(0)  # the last token is emitted

    def emitted(self, token: int, seconds: float) -> None:
        """The next token, known `seconds` after the question."""
        self.answer.tokens.append(token)
        self.answer.times.append(seconds)
        if self.on_token is not None:
            self.on_token(token)

    def _generate(self, build: Callable[[], Decoder], loop: asyncio.AbstractEventLoop) -> None:
        begin, lock = self.begin, self.node.lock
        with lock:
            decoder = build()
        choose = decisions.drafts(begin, Stream.DEVICE)
        for found in alone.generate(
            decoder, choose, begin.limit, lock=lock, stop=self.stop, cap=begin.cap, pace=self.device.pace,
            prefill=self.device.prefill,
        ):  # fmt: skip
            seconds = time.perf_counter() - self.began
            self.answer.prefilled = self.answer.prefilled or seconds
            loop.call_soon_threadsafe(self.emitted, found.token, seconds)

    async def _close(self, connection: Connection) -> None:
        await connection.close()
        answer = self.answer
        answer.sent, answer.received = answer.sent + connection.sent, answer.received + connection.received
        answer.rtt = connection.rtt


def prefixes(node: Node, texts: Sequence[str]) -> list[Ids]:
    """Ids of each document's prompt up to its end, cut as the node cuts them."""
    return [tuple(node.template.prefix(node.tokenizer, text)[: node.longest]) for text in texts]


def in_one_context(
    documents: Documents, query: Sequence[int], limit: int, budget: int | None, context: int, begin: int | None = None
) -> list[int]:
    """Ids of all documents in one prompt, best first, cut after `budget` tokens and where no room is left.

    query: ids after the documents. limit: tokens of the answer. begin: an id that only the first of them keeps.
    Raises ValueError where query and answer leave no room for a document.
    """
    room = context - len(query) - (limit - 1)  # the last token is not given to the model any more
    if room < 1:
        raise ValueError(
            f"A query of {len(query)} tokens and an answer of {limit} leave no room for documents in the context of "
            f"{context}."
        )
    order = np.argsort(-np.asarray(documents.scores), kind="stable")
    ids = list(documents.prefixes[order[0]])
    for index in order[1:]:
        prefix = documents.prefixes[index]
        ids += prefix[1:] if prefix[:1] == (begin,) else prefix
    return ids[: room if budget is None else min(budget, room)]


async def beside(work: Callable[[], _T], stop: threading.Event) -> _T:
    """Work in a thread. When the caller is cancelled, `stop` is set, and the thread is waited for."""
    working = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.wait({working})
        return working.result()
    finally:
        while not working.done():
            stop.set()
            with contextlib.suppress(asyncio.CancelledError):  # one more: the first is on its way already
                await asyncio.wait({working})
        if not working.cancelled():
            working.exception()  # taken note of, where the caller does not wait for the result any more


async def together(first: Coroutine[Any, Any, _T], second: Coroutine[Any, Any, _U]) -> tuple[_T, _U]:
    """Both results; where one fails, the other is given up, and is over when the error comes out."""
    tasks = asyncio.ensure_future(first), asyncio.ensure_future(second)
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def received(connection: Connection, kind: type[_M]) -> _M:
    """The next message. Raises ValueError where the cloud refuses, and Lost on a message of another kind."""
    message = await connection.receive()
    if isinstance(message, Failure):
        raise ValueError(f"The cloud refuses: {message.reason}")
    if not isinstance(message, kind):
        raise Lost(f"a {type(message).__name__} came in the place of {kind.__name__}")
    return message


class _Source:
    """What stands in a decoder's store's place: rows of fetched documents, and of own ones from the device's store.

    A prefix that neither has is left to the decoder, which computes it with the query.
    """

    def __init__(self, node: Node, documents: Documents) -> None:
        self.lm, self._store, self._documents = node.lm, node.store, documents

    @torch.inference_mode()
    def fill(self, session: Member, prefix: Sequence[int]) -> None:
        """Commit the prefix to the empty session, where its rows are known."""
        ids, documents = tuple(prefix), self._documents
        if ids in documents.rows:
            rows = documents.rows[ids]
            places = session.window(len(ids), *((tensor.shape[1], tensor.shape[3]) for tensor in rows))
            for place, tensor in zip(places, rows, strict=True):
                place.copy_(tensor)
            session.filled(ids)
        elif self._store is not None and ids in documents.stored:
            self._store.fill(session, ids)


def _decoder(request: Request, documents: Documents, aggregation: Aggregation, budget: int | None) -> Decoder:
    """A decoder of these documents; retrieval is over."""
    node, begin = request.node, request.begin
    suffix = node.template.suffix(node.tokenizer, begin.query)
    if aggregation == "context":
        first = node.tokenizer.bos_token_id
        one = in_one_context(documents, suffix, begin.limit, budget, node.lm.context, first)
        documents = Documents([tuple(one)], [0.0])
    source = cast("KVStore", _Source(node, documents))  # a decoder asks of its store no more than `lm` and `fill`
    return Decoder(
        node.lm, documents.prefixes, suffix, documents.scores, temperature=node.weight_temperature,
        sampling_temperature=begin.temperature or 1.0, store=source, end=() if node.end is None else (node.end,),
    )  # fmt: skip


def _check(aggregation: str, budget: int | None) -> None:
    if aggregation not in ("context", "output"):
        raise ValueError(f"Documents are aggregated by `context` or `output`, not by {aggregation!r}.")
    if budget is not None and budget < 1:
        raise ValueError(f"A context has a budget of at least one token, not {budget}.")


_Shape = tuple[int, int, int, int]


def _shapes(node: Node) -> tuple[_Shape, _Shape]:
    """Of the keys and values of one token, found by one forward: what fetched rows have to be like."""
    session = node.lm.start(1)
    with node.lock:
        session.prefill([0])
    keys, values = (tuple(rows.shape) for rows in session.exported())
    return cast(_Shape, keys), cast(_Shape, values)


def _require_rows(
    rows: Rows, lm: CausalLM, shapes: tuple[_Shape, _Shape], document: int, documents: int, k: int
) -> None:
    """Raise ValueError unless this is the first piece of a document's rows, as this model has them."""
    if (rows.document, rows.documents, rows.piece) != (document, documents, 0) or not 0 < documents <= k:
        where = f"piece {rows.piece} of document {rows.document} of {rows.documents}"
        raise ValueError(f"The cloud has sent {where} in the place of document {document} of at most {k}.")
    dtype = getattr(torch, rows.dtype)
    wanted = [(layers, heads, len(rows.tokens), width) for layers, heads, _, width in shapes]
    if [rows.keys, rows.values] != wanted or dtype != lm.model.dtype or not rows.tokens:
        raise ValueError(
            f"Fetched rows are {rows.dtype} of shapes {rows.keys} and {rows.values}; this model's are "
            f"{lm.model.dtype} of {wanted[0]} and {wanted[1]}."
        )
    if len(rows.tokens) > lm.context:
        raise ValueError(f"A fetched document of {len(rows.tokens)} tokens exceeds the context of {lm.context}.")
    size = (math.prod(rows.keys) + math.prod(rows.values)) * dtype.itemsize
    if rows.pieces != -(-size // PIECE):
        raise ValueError(f"Rows of {size} bytes come in pieces of {PIECE}, not in {rows.pieces}.")


def _tensors(first: Rows, data: bytearray) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of these bytes. Raises ValueError where they are not as many as the shapes say."""
    dtype = getattr(torch, first.dtype)
    split = math.prod(first.keys) * dtype.itemsize
    size = split + math.prod(first.values) * dtype.itemsize
    if len(data) != size:
        raise ValueError(f"Fetched rows have {len(data)} bytes, not {size}.")
    whole = torch.frombuffer(data, dtype=torch.uint8)  # views: the bytes are not copied
    return whole[:split].view(dtype).view(first.keys), whole[split:].view(dtype).view(first.values)

"""Centralised RAG on the device: its own documents alone (CRCG), or those of the cloud too (DRCG/Text, DRCG/KV).

Documents are put together in one of two ways (section 2). Context: all in one prompt, as the paper's baselines do, best
first and cut to a budget. Output: each in a prompt of its own and the distributions mixed, which is what DRAGON
computes, here on one side. Rows that are fetched serve output aggregation alone: keys and values depend on all that
stands before them, so those of two documents that were computed apart are not those of the two in one prompt.

Of the device's, the query alone goes to the cloud. The cloud's documents come to the device, as ids where not as text.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, cast

import msgspec
import numpy as np
import torch

from ondevice.causal_lm import CausalLM
from ondevice.dragon import messages
from ondevice.dragon.live.answer import Answer, Asked, request
from ondevice.dragon.live.asking import Asking, OnToken
from ondevice.dragon.live.batch import Member
from ondevice.dragon.live.decoder import Decoder
from ondevice.dragon.live.device import Device
from ondevice.dragon.live.node import Node
from ondevice.dragon.live.shelf import Ids, prefixes
from ondevice.dragon.live.wire import Lost
from ondevice.dragon.messages import PIECE, Begin, End, Failure, Fetch, Message, Rows, Texts

if TYPE_CHECKING:
    from ondevice.dragon.live.kv_store import KVStore

Aggregation = Literal["context", "output"]
BUDGET = 256  # tokens of documents in one context (section 7.3)
What = Literal["text", "rows"]


def fetched_texts(
    device: Device, query: str, asked: Asked | None = None, *, aggregation: Aggregation = "context",
    budget: int | None = BUDGET, on_token: OnToken | None = None,
) -> Answer:  # fmt: skip
    """DRCG/Text: the cloud's k documents come as text and are prefilled, beside the device's own k.

    asked: of it count k, limit, temperature, seed, cap, and the mode `shared`. With output aggregation the device's own
    documents come from its store, where it has one.
    budget: tokens of documents in one context, with the template's before each; None takes all as far as the model's
    context reaches, which is as much as output aggregation reads. What query and answer need is always left free.
    Raises ValueError on a request that cannot be and on a cloud that refuses, and Lost where there is none: a baseline
    that went on alone would be another one.
    """
    if aggregation not in ("context", "output"):
        raise ValueError(f"Documents are aggregated by `context` or `output`, not by {aggregation!r}.")
    if budget is not None and budget < 1:
        raise ValueError(f"A context has a budget of at least one token, not {budget}.")
    return device.run(_generated(device, query, asked, "text", aggregation, budget, on_token))


def fetched_rows(
    device: Device, query: str, asked: Asked | None = None, *, on_token: OnToken | None = None
) -> Answer:  # fmt: skip
    """DRCG/KV: the keys and values of the cloud's k documents come in the model's dtype; output aggregation.

    Raises as `fetched_texts`, and ValueError on rows that are not of this model.
    """
    return device.run(_generated(device, query, asked, "rows", "output", None, on_token))


async def _generated(
    device: Device, query: str, asked: Asked | None, what: What, aggregation: Aggregation, budget: int | None,
    on_token: OnToken | None,
) -> Answer:  # fmt: skip
    begin = request(query, asked or Asked())
    asking = Asking(device, begin, on_token)
    try:
        own = asyncio.wrap_future(device.node.engine.call(lambda: _own(device.node, begin)))
        found = await fetched(asking, what)
        documents = await own + found
        await asking.generate(lambda: _decoder(device.node, begin, documents, aggregation, budget))
    finally:
        asking.close()
    return asking.answer


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


async def fetched(asking: Asking, what: What) -> Documents:
    """The cloud's k best, as text or with their rows; one round trip on the connection that is kept."""
    device, begin, node = asking.device, asking.begin, asking.node
    if device.link is None:
        raise ValueError("This baseline needs a cloud, and the device has none.")
    if begin.k > messages.MOST:
        raise ValueError(f"This baseline takes at most {messages.MOST} documents of a side, not {begin.k}.")
    queue = device.link.join(begin.session)
    loop = asyncio.get_running_loop()
    asking.connection = await device.link.connected(loop.time() + device.patience)
    asking.answer.connections += 1
    asking.send(Fetch(begin.session, begin.query, begin.k, what))
    taken = list[tuple[Ids, float, tuple[torch.Tensor, torch.Tensor] | None]]()
    shapes: tuple[_Shape, _Shape] | None = None
    data, first = bytearray(), cast("Rows | None", None)
    while not isinstance(message := await _heard(queue, asking), End):
        if isinstance(message, Texts) and what == "text" and not taken:
            taken = [(*one, None) for one in zip(prefixes(node, message.texts), message.scores, strict=True)]
        elif isinstance(message, Rows) and what == "rows":
            if shapes is None:
                shapes = await asyncio.wrap_future(node.engine.call(lambda: _shapes(node)))
            if first is None:
                _require_rows(message, node.lm, shapes, len(taken), begin.k)
                first, data = message, bytearray()
            elif message != msgspec.structs.replace(first, tokens=(), piece=-(-len(data) // PIECE), data=message.data):
                raise Lost(f"piece {-(-len(data) // PIECE)} of document {len(taken)} did not come in its turn")
            data += message.data
            if message.piece == first.pieces - 1:
                taken.append((first.tokens, first.score, _tensors(first, data)))
                first = None
        else:
            raise Lost(f"a {type(message).__name__} came in the place of {what}")
    if first is not None or not taken:
        raise Lost(f"the cloud ended before all {what} was there")
    ids, scores, rows = zip(*taken, strict=True)
    known = {one: row for one, row in zip(ids, rows, strict=True) if row is not None}
    return Documents(list(ids), list(scores), known)


async def _heard(queue: asyncio.Queue[tuple[Message | Lost, int]], asking: Asking) -> Message:
    """The next message. Raises ValueError where the cloud refuses, and Lost."""
    try:
        async with asyncio.timeout(asking.device.silence):
            found, size = await queue.get()
    except TimeoutError:
        raise Lost(f"the cloud was silent for {asking.device.silence:g} s") from None
    asking.answer.received += size
    if isinstance(found, Failure):
        raise ValueError(f"The cloud refuses: {found.reason}")
    if isinstance(found, Lost):
        raise found
    return found


def _own(node: Node, begin: Begin) -> Documents:
    """The device's k best."""
    texts, scores = node.documents.best(begin.query, begin.k)
    found = prefixes(node, texts)
    return Documents(found, scores, stored=found)


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


def _decoder(
    node: Node, begin: Begin, documents: Documents, aggregation: Aggregation, budget: int | None
) -> Decoder:  # fmt: skip
    """A decoder of these documents; retrieval is over."""
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


_Shape = tuple[int, int, int, int]


def _shapes(node: Node) -> tuple[_Shape, _Shape]:
    """Of the keys and values of one token, found by one forward: what fetched rows have to be like."""
    session = node.lm.start(1)
    session.prefill([0])
    keys, values = (tuple(rows.shape) for rows in session.exported())
    return cast(_Shape, keys), cast(_Shape, values)


def _require_rows(
    rows: Rows, lm: CausalLM, shapes: tuple[_Shape, _Shape], document: int, k: int
) -> None:
    """Raise ValueError unless this is the first piece of a document's rows, as this model has them."""
    if (rows.document, rows.piece) != (document, 0) or not document < rows.documents <= k:
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

"""The device's half of two live baselines: centralised RAG with the cloud's documents, as text or with their rows.

The cloud's half is `ondevice_programs.pair.fetch`; a cloud gives its documents only where it was told to.

DRCG/Text fetches texts and puts all documents together in one prompt, best first, as the paper's baselines do (section
2). DRCG/KV fetches ids with their rows, the keys and values of each layer. Rows serve output aggregation alone, each
document in a prompt of its own: keys and values depend on all that stands before them, so those of two documents that
were computed apart are not those of the two in one prompt.

The query is all that the device sends. The cloud's documents come to it, as ids where not as text.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

import msgspec
import torch

from ondevice.causal_lm.batch import Member
from ondevice_papers.dragon import messages
from ondevice_papers.dragon.messages import PIECE, Begin, End, Fetch, Rows, Texts
from ondevice_programs.pair.answer import Answer, Asked, request
from ondevice_programs.pair.asking import Asking, GivenUp
from ondevice_programs.pair.decoder import Decoder
from ondevice_programs.pair.fetch import Ids, KeysValues
from ondevice_programs.pair.node import Node
from ondevice_programs.pair.wire import Lost

if TYPE_CHECKING:
    from ondevice_programs.pair.device import Device


@dataclass(frozen=True)
class Documents:
    """Documents for one query. prefixes: ids of each one's prompt up to its end. scores: [D] relevance.

    rows: of the prefixes that were fetched with them.
    """

    prefixes: list[Ids]
    scores: list[float]
    rows: dict[Ids, KeysValues] = field(default_factory=dict)


def fetched_texts(device: Device, query: str, asked: Asked | None = None) -> Answer:
    """DRCG/Text: the cloud's k documents come as text, and are prefilled in one context with the device's own k.

    asked: of it count k, limit, temperature, seed, cap, and the mode `shared`. All documents count, as far as the
    model's context reaches.
    Raises ValueError on a request that cannot be and on a cloud that refuses, and Lost where there is none: a baseline
    that went on alone would be another one.
    """
    return device.run(_generated(device, query, asked, "text"))


def fetched_rows(device: Device, query: str, asked: Asked | None = None) -> Answer:
    """DRCG/KV: the keys and values of the cloud's k documents come in the model's dtype; output aggregation.

    Raises as `fetched_texts`, and ValueError on rows that are not of this model.
    """
    return device.run(_generated(device, query, asked, "rows"))


async def _generated(device: Device, query: str, asked: Asked | None, what: Literal["text", "rows"]) -> Answer:
    node = device.node
    asking = Asking(device, request(query, asked or Asked()))
    try:
        own = asyncio.wrap_future(node.engine.call(lambda: _best(node, asking.begin)))
        theirs = await fetched(asking, what)
        made = _of_texts if what == "text" else _of_rows
        await asking.generate(partial(made, asking, await own, theirs))
    finally:
        asking.close()
    return asking.answer


async def fetched(asking: Asking, what: Literal["text", "rows"]) -> Documents:
    """The cloud's k best, as text or with their rows; one round trip on the connection that is kept."""
    begin = asking.begin
    node = asking.node
    taken = Documents([], [], {})
    data = bytearray()
    if asking.link is None:
        raise ValueError("This baseline needs a cloud, and the device has none.")
    if begin.k > messages.MOST:
        raise ValueError(f"This baseline takes at most {messages.MOST} documents of a side, not {begin.k}.")
    await asking.begun(asking.link, Fetch(begin.session, begin.query, begin.k, what))
    first: Rows | None = None
    try:
        while not isinstance(message := await asking.heard(asking.link), End):
            if isinstance(message, Texts) and what == "text":
                taken = Documents(node.prefixes(message.texts), list(message.scores))
            elif isinstance(message, Rows) and what == "rows":
                first = first or message
                size = _require_next(node, message, first, len(taken.prefixes), -(-len(data) // PIECE))
                data += message.data
                if len(data) >= size:
                    taken.prefixes.append(first.tokens)
                    taken.scores.append(first.score)
                    taken.rows[first.tokens] = tensors(first, data)
                    first = None
                    data = bytearray()
            else:
                raise Lost(f"a {type(message).__name__} came in the place of {what}")
    except GivenUp as given_up:
        raise ValueError(f"The cloud refuses: {given_up}") from None
    if first is not None or not taken.prefixes:
        raise Lost(f"the cloud ended before all {what} was there")
    return taken


def _best(node: Node, begin: Begin) -> Documents:
    """The device's own k best documents."""
    texts, scores = node.documents.best(begin.query, begin.k)
    return Documents(node.prefixes(texts), scores)


def _of_rows(asking: Asking, own: Documents, theirs: Documents) -> Decoder:
    """Output aggregation; the device's documents come from its store, where it has one."""
    node = asking.node
    begin = asking.begin
    store = _Fetched(node, theirs.rows)
    return node.decoder_of(
        own.prefixes + theirs.prefixes, own.scores + theirs.scores, begin.query, begin.temperature, store
    )


def _of_texts(asking: Asking, own: Documents, theirs: Documents) -> Decoder:
    """All documents in one prompt. Raises ValueError where query and answer leave no room for them."""
    node = asking.node
    begin = asking.begin
    query = len(node.template.suffix(node.tokenizer, begin.query))
    room = node.lm.context - query - (begin.limit - 1)  # the last token is not given to the model any more
    if room < 1:
        raise ValueError(
            f"A query of {query} tokens and an answer of {begin.limit} leave no room for documents in the "
            f"context of {node.lm.context}."
        )
    prompt = in_one_context(own.prefixes + theirs.prefixes, own.scores + theirs.scores, node.tokenizer.bos_token_id)
    return node.decoder_of([prompt[:room]], [0.0], begin.query, begin.temperature)


def in_one_context(prefixes: Sequence[Ids], scores: Sequence[float], begin: int | None) -> Ids:
    """Ids of all documents in one prompt, best first. begin: an id that only the first of them keeps."""
    best, *others = sorted(range(len(scores)), key=lambda index: -scores[index])
    ids = prefixes[best]
    for index in others:
        ids += prefixes[index][prefixes[index][:1] == (begin,) :]
    return ids


class _Fetched:
    """In the place of a decoder's store: rows that were fetched, and the device's own store for its documents."""

    def __init__(self, node: Node, rows: dict[Ids, KeysValues]) -> None:
        self._own = node.store
        self._rows = rows

    def fill(self, session: Member, prefix: Sequence[int]) -> None:
        """Commit the prefix to the empty session, where its rows are known."""
        if tuple(prefix) in self._rows:
            session.put(prefix, *self._rows[tuple(prefix)])
        elif self._own is not None:
            self._own.fill(session, prefix)


def _require_next(node: Node, message: Rows, first: Rows, document: int, piece: int) -> int:
    """The document's bytes. Raises Lost unless this is the next piece, and ValueError on rows of another model."""
    tokens = first.tokens if not piece else ()
    if message != msgspec.structs.replace(first, document=document, tokens=tokens, piece=piece, data=message.data):
        raise Lost(f"piece {piece} of document {document} did not come in its turn")
    shape = node.shape(len(first.tokens))
    dtype = node.lm.model.dtype
    if (first.keys, first.values, f"torch.{first.dtype}") != (shape, shape, str(dtype)):
        raise ValueError(
            f"Fetched rows are {first.dtype} of shapes {first.keys} and {first.values}; this model's are {dtype} of "
            f"{shape}."
        )
    return 2 * math.prod(shape) * dtype.itemsize


def tensors(first: Rows, data: bytearray) -> KeysValues:
    """Keys and values of these bytes. Raises ValueError where they are not as many as the shapes say."""
    dtype = getattr(torch, first.dtype)
    size = math.prod(first.keys) * dtype.itemsize
    if len(data) != 2 * size:
        raise ValueError(f"Fetched rows have {len(data)} bytes, not {2 * size}.")
    whole = torch.frombuffer(data, dtype=torch.uint8)  # views: the bytes are not copied
    return whole[:size].view(dtype).view(first.keys), whole[size:].view(dtype).view(first.values)

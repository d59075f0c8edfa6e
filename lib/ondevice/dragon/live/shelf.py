"""The cloud's part in the baselines that move documents or whole answers: DRCG/Text, DRCG/KV and RAG-Sequence."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from ondevice.dragon import messages
from ondevice.dragon.live.centralised import Ids, beside, prefixes
from ondevice.dragon.live.connection import Connection
from ondevice.dragon.live.node import Node
from ondevice.dragon.live.rag_sequence import Side, union
from ondevice.dragon.messages import PIECE, Candidates, End, Failure, Fetch, Message, Propose, Rows, Scores, Texts
from ondevice.dragon.speculative_aggregation import Stream


class Shelf:
    """Serves one device once. gives_documents: whether it may have documents; rows hold them as well as text does.

    pace, prefill: as of `rag_sequence.Side`.
    """

    def __init__(
        self, node: Node, first: Fetch | Propose, connection: Connection, gives_documents: bool, pace: float = 0.0,
        prefill: float = 0.0,
    ) -> None:  # fmt: skip
        self.node, self.first, self.connection, self.gives = node, first, connection, gives_documents
        self.pace, self.prefill, self._stop = pace, prefill, threading.Event()
        self._receiving = asyncio.create_task(connection.receive())  # beside all work, so that a loss ends it
        self._receiving.add_done_callback(self._noticed)

    async def run(self) -> None:
        """Answer, and wait until the device has it all. Raises Lost, and ValueError where it cannot or must not."""
        try:
            if isinstance(self.first, Propose):
                await self._propose(self.first)
            elif not self.gives:
                raise ValueError("This cloud does not give its documents away.")
            elif self.first.what == "text":
                await self._texts(self.first)
            else:
                await self._rows(self.first)
            message = await self._receiving
            if not isinstance(message, End | Failure):
                raise ValueError(f"A {type(message).__name__} has no place after all that was asked for.")
        finally:
            self._stop.set()
            self._receiving.cancel()
            await asyncio.gather(self._receiving, return_exceptions=True)

    async def _texts(self, asked: Fetch) -> None:
        texts, scores = await beside(lambda: self.node.documents.best(asked.query, asked.k), self._stop)
        self.connection.send(Texts(asked.session, tuple(texts), tuple(scores)))

    async def _rows(self, asked: Fetch) -> None:
        """Each document as soon as its rows are there."""
        texts, scores = await beside(lambda: self.node.documents.best(asked.query, asked.k), self._stop)
        for number, (prefix, score) in enumerate(zip(prefixes(self.node, texts), scores, strict=True)):
            keys, values = await beside(partial(self._exported, prefix), self._stop)
            for message in pieces(asked.session, number, len(texts), score, prefix, keys, values):
                if self._stop.is_set():
                    return
                self.connection.send(message)
                await asyncio.sleep(0)  # heartbeats and other sessions come between two pieces

    def _exported(self, prefix: Ids) -> tuple[torch.Tensor, torch.Tensor]:
        node = self.node
        with node.lock:
            if node.store is not None:
                return node.store.session(prefix).exported()
            session = node.lm.start(len(prefix))
            session.prefill(prefix)
            return session.exported()

    async def _propose(self, asked: Propose) -> None:
        begin, connection = asked.begin, self.connection
        if begin.k > messages.MOST:
            raise ValueError(f"RAG-Sequence takes at most {messages.MOST} documents of a side, not {begin.k}.")
        side = Side(self.node, begin, self._stop, Stream.CLOUD, self.pace, self.prefill)
        own = await beside(side.candidates, self._stop)
        if not self._stop.is_set():
            connection.send(Candidates(begin.session, tuple(own)))
        theirs = await self._receiving
        if not isinstance(theirs, Candidates):
            raise ValueError(f"A {type(theirs).__name__} came in the place of Candidates.")
        self._receiving = asyncio.create_task(connection.receive())
        self._receiving.add_done_callback(self._noticed)
        found = await beside(lambda: side.log_probs(union(theirs.sequences, own)), self._stop)
        if not self._stop.is_set():
            connection.send(Scores(begin.session, tuple(map(tuple, found.tolist())), tuple(side.log_weights)))

    def _noticed(self, receiving: asyncio.Task[Message]) -> None:
        if receiving.cancelled() or receiving.exception() is not None:
            self._stop.set()


def pieces(
    session: str, document: int, documents: int, score: float, tokens: Ids, keys: torch.Tensor, values: torch.Tensor
) -> Iterator[Rows]:
    """The messages of one document's rows. keys, values: [layers, heads, n, width], on any device."""
    data = b"".join(rows.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes() for rows in (keys, values))
    dtype: Any = str(keys.dtype).removeprefix("torch.")
    shapes: Any = tuple(keys.shape), tuple(values.shape)
    count = -(-len(data) // PIECE)
    for piece in range(count):
        yield Rows(
            session, document, documents, score, tokens if not piece else (), dtype, shapes[0], shapes[1], piece,
            count, data[piece * PIECE : (piece + 1) * PIECE],
        )  # fmt: skip

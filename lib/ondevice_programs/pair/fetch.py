"""The cloud's documents for a device that fetches them: as text, or with their keys and values."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from ondevice_papers.dragon.messages import PIECE, End, Failure, Fetch, Rows, Texts
from ondevice_programs.pair.node import Node
from ondevice_programs.pair.wire import Connection

Ids = tuple[int, ...]
KeysValues = tuple[torch.Tensor, torch.Tensor]  # [layers, heads, n, width] each


async def send(node: Node, asked: Fetch, connection: Connection) -> None:
    """The node's k best documents for a query, as text or each as soon as its rows are there, then End."""
    try:
        work = node.engine.call(lambda: node.documents.best(asked.query, asked.k))
        texts, scores = await asyncio.wrap_future(work)
        if asked.what == "text":
            connection.send(Texts(asked.session, tuple(texts), tuple(scores)))
        else:
            for number, (prefix, score) in enumerate(zip(node.prefixes(texts), scores, strict=True)):
                rows = await asyncio.wrap_future(node.engine.call(partial(_exported, node, prefix)))
                for message in pieces(asked.session, number, len(texts), score, prefix, *rows):
                    connection.send(message)
                    await asyncio.sleep(0)  # other sessions come between two pieces
        connection.send(End(asked.session, len(texts)))
    except (ValueError, RuntimeError) as error:
        connection.send(Failure(asked.session, (str(error) or type(error).__name__)[:1000]))


def _exported(node: Node, prefix: Ids) -> KeysValues:
    """Rows of a prefix, from the store where the node has one."""
    if node.store is not None:
        return node.store.session(prefix).exported()
    session = node.lm.start(len(prefix))
    session.prefill(prefix)
    return session.exported()


def pieces(
    session: str, document: int, documents: int, score: float, tokens: Ids, keys: torch.Tensor, values: torch.Tensor
) -> Iterator[Rows]:
    """The messages of one document's rows. keys, values: [layers, heads, n, width], on any device."""
    data = b"".join(rows.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes() for rows in (keys, values))
    dtype: Any = str(keys.dtype).removeprefix("torch.")
    shapes: tuple[Any, Any] = tuple(keys.shape), tuple(values.shape)
    count = -(-len(data) // PIECE)
    for piece in range(count):
        yield Rows(
            session, document, documents, score, tokens if not piece else (), dtype, *shapes, piece, count,
            data[piece * PIECE : (piece + 1) * PIECE],
        )  # fmt: skip

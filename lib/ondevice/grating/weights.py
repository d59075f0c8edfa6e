"""Where the engine gets a model's weights from: a loaded model, or its files, layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ondevice.grating.checkpoint import Checkpoint, Reader, extents, grouped, pages
from ondevice.grating.embedding_cache import EmbeddingCache, checked, read_rows
from ondevice.grating.window import Window, views

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHARE = 0.1  # of the vocabulary, whose embedding rows are kept (section 4.4)


class Weights(Protocol):
    """A model's weights by what a pass over its layers needs, in order."""

    layers: int

    def begin(self) -> None:
        """A pass begins: the first layer may be read while embeddings are gathered. Not calling it costs time only."""

    def layer(self, index: int) -> dict[str, Tensor]:
        """A layer's parameters by their names inside it: views, valid until another layer is asked for, or `begin`."""

    def rest(self) -> dict[str, Tensor]:
        """What is small, by full name: final norm, classification head, position and type embeddings; resident."""

    def rows(self, ids: Tensor) -> Tensor:
        """[n, d] embedding rows of token ids [n]."""

    def head_rows(self, ids: Tensor) -> Tensor:
        """[n, d] rows of a language model's output head for token ids [n]: the embedding's where it has no other."""

    def close(self) -> None:
        """Give back memory, threads and files; nothing can be asked for afterwards. A second call does nothing."""


class InMemory:
    """The weights of a loaded model, which keeps them."""

    def __init__(self, model: PreTrainedModel) -> None:
        parameters = {name: value.detach() for name, value in model.named_parameters(remove_duplicate=False)}
        self._groups = grouped(parameters, type(model).__name__)
        self.layers = len(self._groups.layers)

    def begin(self) -> None:
        """Nothing: all is there."""

    def layer(self, index: int) -> dict[str, Tensor]:
        """A layer's parameters."""
        if not 0 <= index < self.layers:
            raise ValueError(f"The model has layers 0 to {self.layers - 1}, not {index}.")
        return dict(self._groups.layers[index])

    def rest(self) -> dict[str, Tensor]:
        """All but layers, token embedding and output head."""
        return dict(self._groups.rest)

    def rows(self, ids: Tensor) -> Tensor:
        """[n, d] embedding rows."""
        return self._groups.table[_at(ids, self._groups.table)]

    def head_rows(self, ids: Tensor) -> Tensor:
        """[n, d] rows of the output head."""
        head = self._groups.table if self._groups.head is None else self._groups.head
        return head[_at(ids, head)]

    def close(self) -> None:
        """Nothing: the model is its owner's."""


class Streamed:
    """The weights of a folder of safetensors files, of which memory holds a window of layers and some embedding rows.

    buffers: layers that memory has room for; two are the paper's sliding window, with more some layers stay
    (`Window`). embedding_rows: most rows kept; by default a tenth of the vocabulary. throttle: bytes a second of a
    simulated slower disk. direct: whether to read past the page cache by O_DIRECT where that is possible.
    Tensors have the files' dtype: nothing is converted. One thread may use it; two windows do not disturb each other.
    Raises ValueError on damaged files, when opened or when a read falls short, and on sizes that make no sense;
    OSError where the disk fails.
    """

    def __init__(
        self, folder: Path | str, *, buffers: int = 2, embedding_rows: int | None = None,
        throttle: float | None = None, direct: bool = True,
    ) -> None:  # fmt: skip
        self.checkpoint = Checkpoint.open(folder)
        groups = self.checkpoint.groups
        kept = max(1, int(SHARE * groups.table.shape[0])) if embedding_rows is None else embedding_rows
        self.layers = len(groups.layers)
        self._reader = Reader(self.checkpoint.files, direct, throttle)
        try:
            self.embeddings = EmbeddingCache(groups.table, kept, self._reader)
            self.window = Window(groups.layers, self._reader, buffers)
            self._rest = self._resident()
        except BaseException:
            self._reader.close()
            raise

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes once all of it has been used."""
        rest = sum(tensor.nbytes for tensor in self._rest.values())
        return self.window.nbytes + self.embeddings.nbytes + rest

    def begin(self) -> None:
        """Start to read the first layer, also where the pass before ended early."""
        self.window.begin()

    def layer(self, index: int) -> dict[str, Tensor]:
        """A layer's parameters, once they are read; the next layer is read meanwhile."""
        return self.window.layer(index)

    def rest(self) -> dict[str, Tensor]:
        """All but layers, token embedding and output head."""
        return dict(self._rest)

    def rows(self, ids: Tensor) -> Tensor:
        """[n, d] embedding rows, read where they are not kept."""
        return self.embeddings.rows(ids)

    def head_rows(self, ids: Tensor) -> Tensor:
        """[n, d] rows of the output head; not kept."""
        head = self.checkpoint.groups.head
        if head is None:
            return self.embeddings.rows(ids)
        return read_rows(head, ids, self._reader)

    def close(self) -> None:
        """Stop the reader, wait for it, and close the files. Memory goes with the last view of it."""
        self.window.close()
        self.embeddings.close()
        self._reader.close()

    def _resident(self) -> dict[str, Tensor]:
        """The tensors of the rest, each in memory of its own, so that no page of an extent stays without use."""
        found = {}
        for name, tensor in self.checkpoint.groups.rest.items():
            for extent in extents([tensor]):
                read = pages(extent.span)
                self._reader.read(extent, memoryview(read))
                found[name] = views({name: tensor}, {extent: 0}, read)[name].clone()
            found.setdefault(name, torch.empty(tensor.shape, dtype=tensor.dtype))
        return found


def _at(ids: Tensor, table: Tensor) -> Tensor:
    return torch.from_numpy(checked(ids, len(table))).to(table.device)

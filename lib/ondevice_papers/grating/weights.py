"""Where the engine gets a model's weights from: a loaded model, or its files, unit by unit."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ondevice_papers.grating.checkpoint import Checkpoint, Reader, extents, grouped, pages
from ondevice_papers.grating.checksums import Checksums
from ondevice_papers.grating.embedding_cache import EmbeddingCache, checked, read_rows
from ondevice_papers.grating.window import Unit, WeightWindow, span, starts_in_memory, views

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHARE = 0.1  # of the vocabulary, whose embedding rows are kept (section 4.4)
Parts = tuple[int, ...]
BY_PART: tuple[Parts, ...] = ((0,), (1,))  # attention, then feed-forward
BY_LAYER: tuple[Parts, ...] = ((0, 1),)  # the paper's window of two layers


class InMemory:
    """The weights of a loaded model, which keeps them. `Streamed` has the same methods, for a pass over layers."""

    def __init__(self, model: PreTrainedModel) -> None:
        parameters = {name: value.detach() for name, value in model.named_parameters(remove_duplicate=False)}
        self._groups = grouped(parameters, type(model).__name__)

    def begin(self) -> None:
        """Nothing to start: all weights are in memory."""

    def layer(self, index: int) -> Iterator[tuple[Parts, dict[str, Tensor]]]:
        """A layer's parts with their parameters by their names inside it: here at once."""
        yield BY_LAYER[0], dict(self._groups.layers[index])

    def rest(self) -> dict[str, Tensor]:
        """All but layers, token embedding and output head, by full name: final norm, position embeddings, head."""
        return dict(self._groups.rest)

    def rows(self, ids: Tensor) -> Tensor:
        """[n, d] embedding rows."""
        return self._groups.table[torch.from_numpy(checked(ids, len(self._groups.table)))]

    def head_rows(self, ids: Tensor) -> Tensor:
        """[n, d] rows of a language model's output head: the embedding's where it has no other."""
        head = self._groups.table if self._groups.head is None else self._groups.head
        return head[torch.from_numpy(checked(ids, len(head)))]


class Streamed:
    """The weights of a folder of safetensors files, of which memory holds a window of units and some embedding rows.

    part_of: of a tensor's name inside a layer (`Architecture.part_of`). units: how a layer is cut. slots: units in
    memory, two or all. embedding_rows: most rows kept; by default a tenth of the vocabulary. window, cache: the
    mechanisms.
    Tensors have the files' dtype: nothing is converted. One thread may use it.
    Raises ValueError on damaged files, when opened or when read, and OSError where the disk fails.
    """

    def __init__(
        self,
        checkpoint: Checkpoint | Path,
        part_of: Callable[[str], int],
        *,
        units: tuple[Parts, ...] = BY_PART,
        slots: int | None = 2,
        embedding_rows: int | None = None,
        window: Callable[..., WeightWindow] = WeightWindow,
        cache: Callable[..., EmbeddingCache] = EmbeddingCache,
    ) -> None:
        self.checkpoint = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint.open(checkpoint)
        groups = self.checkpoint.groups
        self._cut = units
        self.sums = Checksums.load(self.checkpoint)
        kept = max(1, int(SHARE * groups.table.shape[0])) if embedding_rows is None else embedding_rows
        cut = units_of(self.checkpoint, part_of, units)
        self._reader = Reader(self.checkpoint.files)
        try:
            self.embeddings = cache(groups.table, kept, self._reader, self.sums)
            self._rest = {name: self._resident({name: tensor})[name] for name, tensor in groups.rest.items()}
            self.window = window(cut, self._read, len(cut) if slots is None else slots)
        except BaseException:
            self._reader.close()
            raise

    def begin(self) -> None:
        """Start to read the first unit, also where the pass before ended early."""
        self.window.ahead(0)

    def layer(self, index: int) -> Iterator[tuple[Parts, dict[str, Tensor]]]:
        """A layer's units, each once it is read, while the next one is read. Views, valid until the next ones are."""
        for offset, parts in enumerate(self._cut):
            yield parts, self.window.unit(index * len(self._cut) + offset)

    def rest(self) -> dict[str, Tensor]:
        """All but layers, token embedding and output head."""
        return dict(self._rest)

    def rows(self, ids: Tensor) -> Tensor:
        """[n, d] embedding rows, read where they are not kept."""
        return self.embeddings.rows(ids)

    def head_rows(self, ids: Tensor) -> Tensor:
        """[n, d] rows of the output head; not kept."""
        head = self.checkpoint.groups.head
        return self.embeddings.rows(ids) if head is None else read_rows(head, ids, self._reader, self.sums)

    def close(self) -> None:
        """Stop the reader, wait for it, and close the files. Memory goes with the last view of it."""
        self.window.close()
        self.embeddings.close()
        self._reader.close()

    def _read(self, unit: Unit, memory: mmap.mmap) -> None:
        """Fill memory with a unit, and check that it is what it was."""
        with memoryview(memory) as view:
            start = 0
            for extent in extents(unit.values()):
                self._reader.read(extent, view[start : start + extent.span])
                start += extent.span
            for name, begin in starts_in_memory(unit).items():
                self.sums.check(unit[name], view[begin : begin + unit[name].length])

    def _resident(self, unit: Unit) -> dict[str, Tensor]:
        """Tensors in memory of their own, so that no page of an extent stays without use."""
        memory = pages(span(unit))
        self._read(unit, memory)
        empty = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in unit.items()}
        return empty | {name: tensor.clone() for name, tensor in views(unit, memory).items()}


Weights = InMemory | Streamed


def units_of(checkpoint: Checkpoint, part_of: Callable[[str], int], units: tuple[Parts, ...]) -> list[Unit]:
    """The units of all layers, in the order in which they are used."""
    return [
        {name: tensor for name, tensor in layer.items() if part_of(name) in parts}
        for layer in checkpoint.groups.layers
        for parts in units
    ]

"""Keys and values of sessions, in buffers that rows are written into: nothing is copied when a session grows."""

from __future__ import annotations

import threading

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

_LEAST = 64  # rows of the first allocation


class Interrupted(Exception):
    """A forward was stopped between two layers, because its rows' `stop` was set."""


class Rows:
    """Keys and values of every layer, one row a token: two buffers [layers, batch, heads, capacity, width].

    All layers in one tensor, so that keeping a path is two copies and not two a layer. transformers' own DynamicCache
    concatenates: each forward copies the whole cache once a layer, and so does a path that is kept.
    `length` rows count. A forward writes its rows after them, and they count only once the session says so: an
    interrupted forward leaves nothing behind.
    stop: while it is set, a forward raises `Interrupted` at its next layer.
    """

    def __init__(self, layers: int, capacity: int = 0, batch: int = 1) -> None:
        self.length = 0
        self.stop: threading.Event | None = None
        self._layers = layers
        self._batch = batch
        self._capacity = max(capacity, _LEAST)
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None
        self._views: list[tuple[torch.Tensor, torch.Tensor]] = []

    def cache(self) -> Cache:
        """The transformers cache over these rows."""
        return Cache(layers=[_Layer(self, index) for index in range(self._layers)])

    def reserve(self, rows: int) -> None:
        """Make room for `rows` in all; grows by doubling."""
        if rows <= self._capacity:
            return
        self._capacity = max(rows, 2 * self._capacity)
        if self._buffers is not None:
            self._adopt(self._grown(self._buffers[0]), self._grown(self._buffers[1]))

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's new rows [batch, heads, n, width]; returns views of all [batch, heads, length + n, width].

        Raises Interrupted while `stop` is set.
        """
        if self.stop is not None and self.stop.is_set():
            raise Interrupted("The forward was stopped between two layers.")
        if self._buffers is None:
            self._allocate(keys, values)
        all_keys, all_values = self._views[layer]
        start = self.length
        n = keys.shape[2]
        all_keys.narrow(2, start, n).copy_(keys)
        all_values.narrow(2, start, n).copy_(values)
        return all_keys.narrow(2, 0, start + n), all_values.narrow(2, 0, start + n)

    def seen(self, layer: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of a layer's first rows, counted or not: keys and values [batch, heads, rows, width]."""
        keys, values = self._views[layer]
        return keys.narrow(2, 0, rows), values.narrow(2, 0, rows)

    def window(self, keys: torch.Tensor, values: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of all layers' next n rows, not counted, to be written to: [layers, batch, heads, n, width] each.

        keys, values: [1, heads, any, width] tensors like the rows. Raises ValueError where the buffers are not like it.
        """
        self.reserve(self.length + n)
        first, second = (buffer.narrow(-2, self.length, n) for buffer in self.buffers(keys, values))
        return first, second

    def buffers(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The buffers themselves, rows that do not count included: [layers, batch, heads, capacity, width] each.

        keys, values: [1, heads, any, width] tensors like the rows. Raises ValueError where the buffers are not like it.
        """
        if self._buffers is None:
            self._allocate(keys, values)
        assert self._buffers is not None
        for buffer, like in zip(self._buffers, (keys, values), strict=True):
            own, other = ((t.shape[-3], t.shape[-1], t.dtype) for t in (buffer, like))
            if own != other:
                raise ValueError(f"Rows of heads, width and type {other} do not fit to those of {own}.")
        return self._buffers

    def gather(self, rows: list[int]) -> None:
        """Append to the rows that count the uncounted ones at these increasing offsets from `length`, in place."""
        moved = next((k for k, row in enumerate(rows) if row != k), len(rows))  # those before are where they belong
        if moved < len(rows) and self._buffers is not None:
            start = self.length + moved
            source = torch.tensor(rows[moved:]).add_(self.length).to(self._buffers[0].device)
            for buffer in self._buffers:
                buffer.narrow(-2, start, len(source)).copy_(buffer.index_select(-2, source))
        self.length += len(rows)

    def copy(self) -> Rows:
        """An independent copy of the rows that count."""
        twin = self._twin()
        twin.length = self.length
        if self._buffers is not None:
            twin._adopt(self._grown(self._buffers[0]), self._grown(self._buffers[1]))
        return twin

    def _twin(self) -> Rows:
        """Empty rows with as much room."""
        return Rows(self._layers, self._capacity, self._batch)

    def _allocate(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._adopt(self._empty(keys), self._empty(values))

    def _adopt(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._buffers = keys, values
        self._views = list(zip(keys.unbind(), values.unbind(), strict=True))

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_empty(self._layers, self._batch, like.shape[-3], self._capacity, like.shape[-1])

    def _grown(self, old: torch.Tensor) -> torch.Tensor:
        new = self._empty(old)
        new.narrow(-2, 0, self.length).copy_(old.narrow(-2, 0, self.length))
        return new


class _Layer(CacheLayerMixin):
    """One layer of `Rows`, as a model sees it. Cropping and reordering are the session's."""

    is_sliding = False

    def __init__(self, rows: Rows, index: int) -> None:
        super().__init__()
        self.is_initialized = True
        self._rows = rows
        self._index = index

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: `Rows` allocates for all layers at once."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append a layer's new keys and values; returns all that it has."""
        return self._rows.append(self._index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that the next forward sees, and the position of the first."""
        return self._rows.length + query_length, 0

    def get_seq_length(self) -> int:
        """Rows before the next forward."""
        return self._rows.length

    def get_max_length(self) -> int:
        """No limit (-1): the rows grow."""
        return -1

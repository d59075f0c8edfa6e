"""Many sequences of one model in one padded cache: a forward takes new tokens of any of them.

Each sequence has a slot of its own in the cache, from its first column on. The new tokens of all are packed one after
the other, so no matrix multiplies padding. Attention alone knows sequences: those that get one token attend together,
slot by slot under a mask of their lengths, and those that get several attend one by one.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from numpy.typing import ArrayLike
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ondevice.causal_lm import probe, support
from ondevice.causal_lm.rows import Interrupted, Rows
from ondevice.causal_lm.session import CausalLM, Session
from ondevice.causal_lm.tree import integers

_SLOTS = 16  # of a slab
_COLUMNS = 128  # of the narrowest slab


class _Slab:
    """Slots of one width: keys and values [layers, slots, heads, columns, width]. Untouched pages take no memory."""

    def __init__(self, layers: int, columns: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.columns = columns
        self.free = list(range(_SLOTS))[::-1]
        self.keys, self.values = (_zeros(like, layers, _SLOTS, like.shape[1], columns) for like in (keys, values))

    def takes(self, columns: int, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether a sequence with rows like these has a slot here."""
        shapes = [(own.shape[2], own.shape[-1], own.dtype) for own in (self.keys, self.values)]
        wanted = [(like.shape[1], like.shape[-1], like.dtype) for like in (keys, values)]
        return bool(self.free) and self.columns == columns and shapes == wanted


def _zeros(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Zeros, as what is masked must be finite. On the CPU the system brings a page when it is written to."""
    whole = (*shape, like.shape[-1])
    if like.device.type != "cpu":
        return like.new_zeros(whole)
    size = like.itemsize
    for count in whole:
        size *= count
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8).view(like.dtype).view(whole)


class PaddedCache:
    """Keys and values of sequences, each in a slot of its own; slots of one width lie side by side in slabs.

    A width is a power of two of columns. A slab whose last sequence has gone is let go.
    """

    def __init__(self) -> None:
        self._slabs: list[_Slab] = []
        self._lock = threading.RLock()  # a sequence may be let go in any thread

    @property
    def sequences(self) -> int:
        """How many have a slot."""
        return sum(_SLOTS - len(slab.free) for slab in self._slabs)

    def enter(self, layers: int, rows: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[_Slab, int]:
        """A slot for so many rows like these, [1, heads, any, width] each."""
        columns = max(_COLUMNS, 1 << (rows - 1).bit_length())
        with self._lock:
            slab = next((slab for slab in self._slabs if slab.takes(columns, keys, values)), None)
            if slab is None:
                slab = _Slab(layers, columns, keys, values)
                self._slabs.append(slab)
            return slab, slab.free.pop()

    def leave(self, slab: _Slab, slot: int) -> None:
        """The slot is free."""
        with self._lock:
            slab.free.append(slot)
            if len(slab.free) == _SLOTS:
                self._slabs.remove(slab)


class SlotRows(Rows):
    """The rows of one sequence: a slot of a padded cache, and a wider one when it grows."""

    def __init__(self, layers: int, cache: PaddedCache, capacity: int) -> None:
        super().__init__(layers, capacity)
        self._padded = cache
        self.slab: _Slab | None = None
        self.slot = -1

    def __del__(self) -> None:
        if self.slab is not None:
            self._padded.leave(self.slab, self.slot)

    def reserve(self, rows: int) -> None:
        """As of `Rows`."""
        if rows <= self._capacity:
            return
        self._capacity = rows
        if self._buffers is not None and self.slab is not None:
            before = self.slab, self.slot
            old = self._buffers
            self._allocate(old[0][0], old[1][0])
            for new, rest in zip(self._buffers, old, strict=True):
                new.narrow(-2, 0, self.length).copy_(rest.narrow(-2, 0, self.length))
            self._padded.leave(*before)

    def _allocate(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        slab, slot = self.slab, self.slot = self._padded.enter(self._layers, self._capacity, keys, values)
        self._capacity = slab.columns
        self._adopt(slab.keys.narrow(1, slot, 1), slab.values.narrow(1, slot, 1))


class Member(Session):
    """A session whose rows can also be put in and read from outside."""

    _rows: Rows

    @torch.inference_mode()
    def put(self, ids: Sequence[int], *rows: torch.Tensor) -> None:
        """Commit these tokens with copies of their keys and values [layers, heads, n, width].

        Raises ValueError where the context or the heads and width that the session has already do not allow it.
        """
        if self.length + len(ids) > self.lm.context:
            raise ValueError(f"{self.length + len(ids)} tokens are more than the context of {self.lm.context}.")
        keys, values = (part.to(self.lm.device) for part in rows)
        for view, part in zip(self._rows.window(keys[:1], values[:1], len(ids)), (keys, values), strict=True):
            view[:, 0].copy_(part)
        self._rows.length += len(ids)
        self.tokens += [int(token) for token in ids]

    def first(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the first n tokens' keys and of their values, as `put` takes them."""
        assert self._rows._buffers is not None and n <= self.length
        keys, values = (buffer[:, 0, :, :n].clone() for buffer in self._rows._buffers)
        return keys, values


class Batch:
    """D sequences of one model; `members` are sessions, which can be used one by one, and `extend` extends all.

    ends: [D] tokens of each before the first that are common to all, such as their documents' lengths.
    capacity: rows to allocate, of the longest sequence, where its final length is known.
    stop: while it is set, a forward of the batch or of a member raises `Interrupted`.
    cache: where the sequences' rows are; None: in one of their own.
    A failed or interrupted call leaves the batch as it was. Raises ValueError without sequences, and for more than one
    where the model cannot (see `refusal`).
    """

    def __init__(
        self,
        lm: CausalLM,
        ends: Sequence[int],
        capacity: int = 0,
        stop: threading.Event | None = None,
        cache: PaddedCache | None = None,
    ) -> None:
        if not len(ends) or min(ends) < 0:
            raise ValueError(f"A batch has sequences of 0 or more tokens, not {list(ends)}.")
        if max(ends) > lm.context:
            raise ValueError(f"{max(ends)} tokens are more than the context of {lm.context}.")
        reason = refusal(lm)
        if reason and len(ends) > 1:
            raise ValueError(reason)
        self.lm = lm
        self.ends = [int(end) for end in ends]
        self.stop = stop
        ahead = max(0, capacity - max(ends))
        cache = cache or PaddedCache()
        self.members: list[Member] = []
        for end in self.ends:
            size = min(end + ahead, lm.context)
            rows = Rows(lm.layers, size) if reason else SlotRows(lm.layers, cache, size)
            rows.stop = stop
            self.members.append(Member(lm, _rows=rows))

    @property
    def length(self) -> int:
        """Tokens that all have after their ends. Raises ValueError where they are not the same."""
        lengths = [member.length - end for member, end in zip(self.members, self.ends, strict=True)]
        if min(lengths) != max(lengths) or lengths[0] < 0:
            raise ValueError(f"The sequences are not in line: they have {lengths} tokens after their ends.")
        return lengths[0]

    def prefill(self, ids: ArrayLike) -> torch.Tensor:
        """Commit the ids after every sequence; returns the logits [D, V] after the last. Errors as of `extend`."""
        return torch.stack([logits[-1] for logits in self._append(ids, every=False)])

    def extend(self, tokens: ArrayLike) -> torch.Tensor:
        """Commit tokens after every sequence; returns the logits [D, n, V] after each.

        Raises ValueError where the sequences are not in line, and as `Session.extend` does.
        """
        return torch.stack(self._append(tokens, every=True))

    def _append(self, ids: ArrayLike, every: bool) -> list[torch.Tensor]:
        new_ids = integers(ids, "A batch's tokens").tolist()
        _ = self.length  # raises where they are not in line
        return extend_together(self.members, [new_ids] * len(self.members), every=every, stop=self.stop)

    def rollback(self, length: int) -> None:
        """Drop the common tokens from `length` on. Raises ValueError where there are fewer."""
        if not 0 <= length <= self.length:
            raise ValueError(f"A batch of {self.length} common tokens cannot be rolled back to {length}.")
        for member, end in zip(self.members, self.ends, strict=True):
            member.rollback(end + length)


# The packed forward


class _Stretch(NamedTuple):
    """The new tokens of one sequence: `begin` to `end` of the packed ones, behind `past` rows. mask: [n, past + n]."""

    rows: Rows
    begin: int
    end: int
    past: int
    mask: torch.Tensor | None


class _Side(NamedTuple):
    """Sequences of one slab that get one token each. low, high: their slots lie between. mask: [slots, 1, 1, columns].

    begins: [n] among the packed tokens. slots: [n] less `low`. lengths: [n] rows before.
    """

    slab: _Slab
    low: int
    high: int
    begins: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor
    mask: torch.Tensor


class _Packed:
    """What attention must know of a forward's packed tokens."""

    def __init__(self, members: Sequence[Session], counts: Sequence[int], stop: threading.Event | None) -> None:
        self.lm = members[0].lm
        self.stop = stop
        ends = torch.tensor(counts).cumsum(0).tolist()
        self.stretches = [
            _Stretch(member._rows, end - count, end, member.length, None)
            for member, count, end in zip(members, counts, ends, strict=True)
        ]
        self.sides: list[_Side] = []
        self.arranged = False

    def arrange(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Give every sequence a slot, and put those of one token and slab side by side. keys, values: of a layer."""
        self.arranged = True
        dtype, device = keys.dtype, keys.device
        of_slab: dict[_Slab, list[_Stretch]] = {}
        stretches = []
        for stretch in self.stretches:
            rows = stretch.rows
            rows.buffers(keys, values)
            n = stretch.end - stretch.begin
            if n == 1 and isinstance(rows, SlotRows) and rows.slab is not None:
                of_slab.setdefault(rows.slab, []).append(stretch)
                continue
            mask = None if n == 1 else torch.ones(n, stretch.past + n, dtype=torch.bool, device=device)
            stretches.append(stretch._replace(mask=None if mask is None else mask.tril(stretch.past)))
        for slab, group in of_slab.items():
            slots = torch.tensor([stretch.rows.slot for stretch in group])  # type: ignore[attr-defined]
            low = int(slots.min())
            high = int(slots.max()) + 1
            if 2 * len(group) < high - low:  # more slots would be read for nothing than for something
                stretches += group
                continue
            lengths = torch.tensor([stretch.past for stretch in group])
            visible = torch.zeros(high - low, dtype=torch.long)
            visible[slots - low] = lengths + 1
            columns = torch.arange(int(lengths.max()) + 1)
            mask = torch.zeros(high - low, len(columns), dtype=dtype)
            mask.masked_fill_(columns >= visible[:, None], torch.finfo(dtype).min)
            begins = torch.tensor([stretch.begin for stretch in group])
            moved = [tensor.to(device) for tensor in (begins, slots - low, lengths, mask[:, None, None])]
            self.sides.append(_Side(slab, low, high, *moved))
        self.stretches = stretches

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write a layer's new rows, [1, heads, tokens, width] each, behind those of their sequences."""
        if self.stop is not None and self.stop.is_set():
            raise Interrupted("The forward was stopped between two layers.")
        if not self.arranged:
            self.arrange(keys, values)
        for side in self.sides:
            for buffer, new in ((side.slab.keys, keys), (side.slab.values, values)):
                by_column = buffer[layer, side.low : side.high].transpose(1, 2)
                by_column[side.slots, side.lengths] = new[0].transpose(0, 1)[side.begins]
        for stretch in self.stretches:
            part = slice(stretch.begin, stretch.end)
            stretch.rows.append(layer, keys[:, :, part], values[:, :, part])

    def attend(self, layer: int, query: torch.Tensor, scale: float | None) -> torch.Tensor:
        """[1, tokens, heads, width]: each token's attention to its own sequence. query: [1, heads, tokens, width]."""
        _, heads, tokens, width = query.shape
        scale = width**-0.5 if scale is None else scale
        output = query.new_empty(tokens, heads, self._width(layer))
        by_token = query[0].transpose(0, 1)
        for side in self.sides:
            columns = side.mask.shape[-1]
            keys, values = (
                buffer[layer, side.low : side.high, :, :columns] for buffer in (side.slab.keys, side.slab.values)
            )
            rows = query.new_zeros(len(keys), heads, width)
            rows[side.slots] = by_token[side.begins] * scale
            grouped = rows.view(len(keys), keys.shape[1], -1, width)  # heads that share keys
            weights = (grouped @ keys.transpose(-1, -2) + side.mask).softmax(-1)
            output[side.begins] = (weights @ values).flatten(1, 2)[side.slots]
        for stretch in self.stretches:
            keys, values = stretch.rows.seen(layer, stretch.past + stretch.end - stretch.begin)
            output[stretch.begin : stretch.end] = torch.nn.functional.scaled_dot_product_attention(
                query[:, :, stretch.begin : stretch.end],
                keys,
                values,
                attn_mask=stretch.mask,
                scale=scale,
                enable_gqa=keys.shape[1] != heads,
            )[0].transpose(0, 1)
        return output[None]

    def _width(self, layer: int) -> int:
        rows: Any = self.sides[0].slab.values if self.sides else self.stretches[0].rows.seen(layer, 0)[1]
        return int(rows.shape[-1])


class _Layer(CacheLayerMixin):
    """One layer of a packed forward, as a model sees it: attention gets the forward and the layer for keys."""

    is_sliding = False

    def __init__(self, packed: _Packed, index: int) -> None:
        super().__init__()
        self.is_initialized = True
        self._packed = packed
        self._index = index

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: slots are allocated for all layers at once."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object) -> Any:
        """Write the new rows; attention finds all of them by this layer."""
        self._packed.write(self._index, key_states, value_states)
        return self, self

    def attend(self, query: torch.Tensor, scale: float | None) -> torch.Tensor:
        """As of `_Packed`."""
        return self._packed.attend(self._index, query, scale)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Nobody's: the mask that is given is no mask."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """None: positions are given."""
        return 0

    def get_max_length(self) -> int:
        """No limit (-1): the rows grow."""
        return -1


_PACKED = "ondevice_packed"


def _attend(
    module: torch.nn.Module, query: torch.Tensor, key: Any, value: Any, mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """Packed tokens attend to their own sequences; in another thread's forward of the same model all is as ever."""
    if isinstance(key, _Layer):
        return key.attend(query, options.get("scaling")), None
    return sdpa_attention_forward(module, query, key, value, mask, **options)


ALL_ATTENTION_FUNCTIONS.register(_PACKED, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(_PACKED, sdpa_mask)
_forwards: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # by model, packed ones that run
_counting = threading.Lock()


@contextlib.contextmanager
def _packing(model: Any) -> Iterator[None]:
    """The model's attention is `_attend` as long as any thread needs it."""
    with _counting:
        _forwards[model] = _forwards.get(model, 0) + 1
        model.config._attn_implementation = _PACKED
    try:
        yield
    finally:
        with _counting:
            _forwards[model] -= 1
            if not _forwards[model]:
                model.config._attn_implementation = "sdpa"


@torch.inference_mode()
def extend_together(
    members: Sequence[Session],
    ids: Sequence[Sequence[int]],
    *,
    every: bool = False,
    stop: threading.Event | None = None,
) -> list[torch.Tensor]:
    """Commit tokens to some sequences, one or more to each, in one forward.

    Returns each one's logits, [1, V] after its last token; `every`: [n, V] after each. members: of batches of one
    model, of which `refusal` is None. stop: while it is set, the forward raises Interrupted. A failed call leaves all
    as they were. Raises ValueError as `Session.extend` does.
    """
    model, lm = members[0].lm.model, members[0].lm
    tokens = [
        member._checked(integers(new, "A batch's tokens"), "The extension")
        for member, new in zip(members, ids, strict=True)
    ]
    counts = [len(new) for new in tokens]
    for member, count in zip(members, counts, strict=True):
        member._rows.reserve(member.length + count)
    packed = _Packed(members, counts, stop)
    device = lm.device
    positions = [torch.arange(member.length, member.length + n) for member, n in zip(members, counts, strict=True)]
    last = torch.tensor(counts, device=device).cumsum(0) - 1
    options = {"logits_to_keep": last} if lm._one_row and not every else {}
    with _packing(model):
        logits = model(
            input_ids=torch.cat(tokens)[None],
            position_ids=torch.cat(positions).to(device)[None],
            attention_mask=torch.zeros(1, 1, 1, 1, dtype=lm.dtype, device=device),  # given, so that none is made
            past_key_values=Cache(layers=[_Layer(packed, index) for index in range(lm.layers)]),
            use_cache=True,
            return_dict=True,
            **options,
        ).logits[0]
    for member, new in zip(members, tokens, strict=True):
        member._rows.length += len(new)
        member.tokens += new.tolist()
    if every:
        return list(logits.split(counts))
    return list((logits if options else logits[last]).split(1))


# Which models can


_refusals: WeakKeyDictionary[CausalLM, str | None] = WeakKeyDictionary()
_probing = threading.RLock()


def refusal(lm: CausalLM) -> str | None:
    """Why sequences of different lengths cannot share a forward of this model, in a sentence; None where they can.

    They need what a tree needs, positions that are obeyed, and an attention that can be replaced. Architectures that
    our tests do not cover are probed, once a model, with a few tokens.
    """
    if not lm.in_torch:
        return "The lean engine runs one sequence at a time."
    if lm.tree_refusal:
        return f"Several sequences in one forward need a mask and positions, as a tree does: {lm.tree_refusal}"
    if lm.model.config._attn_implementation not in ("sdpa", _PACKED):
        return f"Several sequences in one forward need sdpa attention, not {lm.model.config._attn_implementation}."
    if support.text_config(lm.model).model_type in support.TESTED:
        return None
    with _probing:
        if lm not in _refusals:
            _refusals[lm] = None  # the probe makes a batch
            _refusals[lm] = _probe(lm)
        return _refusals[lm]


def _probe(lm: CausalLM) -> str | None:
    """Compare two sequences of different lengths with sessions of their own."""
    ids = [(7 * k + 11) % lm.vocabulary for k in range(8)]
    prompts = (ids[:5], ids[5:6])
    common = ids[6:]
    try:
        batch = Batch(lm, [len(prompt) for prompt in prompts])
        for member, prompt in zip(batch.members, prompts, strict=True):
            member.prefill(prompt)
        batch.extend(common[:1])
        together = batch.prefill(common[1:])
    except Exception as error:  # whatever a foreign forward raises
        return f"{support.name(lm.model)} cannot run several sequences ({str(error).strip().splitlines()[:1]})."
    for logits, prompt in zip(together, prompts, strict=True):
        right = lm.start().prefill([*prompt, *common])
        if float((logits - right).abs().max() / right.std()) > probe.tolerance(lm):
            return f"{support.name(lm.model)} does not obey the positions and masks of several sequences."
    return None

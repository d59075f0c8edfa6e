"""Sequences of different lengths that get the same next tokens: one forward extends them all.

The rows lie in one buffer, each sequence's shifted so that the last ones stand in one column. A mask hides the columns
before a sequence begins, and position ids count from there, so that the logits are those of sessions of batch one.
Where all sequences are equally long there is neither mask nor ids, as in a session.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from numpy.typing import ArrayLike
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ondevice.causal_lm import probe, support
from ondevice.causal_lm.rows import Rows
from ondevice.causal_lm.session import CausalLM, Session
from ondevice.causal_lm.tree import integers


class AlignedRows(Rows):
    """Rows of D sequences whose next rows are in one column, so that one forward can write them.

    ends: [D] rows of each sequence at some moment at which they are to stand in line. Shorter ones begin later.
    pads: [D] columns before each sequence's first row; they hold zeros. parts: [D] each sequence's own rows, views.
    `length` counts columns, and only while all sequences stand in line: `Batch` sets it.
    """

    def __init__(self, layers: int, ends: Sequence[int], capacity: int = 0) -> None:
        super().__init__(layers, max(capacity, *ends, 0), len(ends))
        self.pads = [max(ends) - end for end in ends]
        self.parts = [_Part(self, index, pad) for index, pad in enumerate(self.pads)]

    def release(self) -> None:
        """Forget the buffers where no part's row counts."""
        if not any(part.length for part in self.parts):
            for rows in (self, *self.parts):
                rows._buffers = None
                rows._views = []

    def _adopt(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super()._adopt(keys, values)
        for part in self.parts:
            part.view(keys, values)

    def _used(self, buffer: torch.Tensor) -> int:
        return buffer.shape[-2]  # a part may have rows that do not count yet


class _Part(Rows):
    """The rows of one sequence of `AlignedRows`."""

    def __init__(self, whole: AlignedRows, index: int, pad: int) -> None:
        super().__init__(whole._layers)
        self._whole, self._index, self._pad = whole, index, pad
        self._capacity = whole._capacity - pad

    def reserve(self, rows: int) -> None:
        self._whole.reserve(self._pad + rows)

    def release(self) -> None:
        self._whole.release()

    def view(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take this part of the whole's buffers, and clear what is before it: a padding must be finite."""
        views = [buffer.narrow(1, self._index, 1) for buffer in (keys, values)]
        for buffer in views:
            buffer.narrow(-2, 0, self._pad).zero_()
        self._capacity = keys.shape[-2] - self._pad
        first, second = (buffer.narrow(-2, self._pad, self._capacity) for buffer in views)
        self._adopt(first, second)

    def _allocate(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._whole._allocate(keys, values)


class Member(Session):
    """A session of a `Batch`. By itself it is as any other; its rows can also be filled from outside."""

    def window(self, n: int, keys: tuple[int, int], values: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Views [layers, heads, n, width] of the keys and values of the next n tokens, to be written to.

        keys, values: heads and width. The tokens are committed by `filled`. Raises ValueError where the context or the
        heads and width that the batch has already do not allow it.
        """
        if self.length + n > self.lm.context:
            raise ValueError(f"{self.length + n} tokens are more than the context of {self.lm.context}.")
        empty = torch.empty(0, dtype=self.lm.model.dtype, device=self.lm.model.device)
        shapes = [(1, heads, 0, width) for heads, width in (keys, values)]
        first, second = self._rows.window(empty.view(shapes[0]), empty.view(shapes[1]), n)
        return first[:, 0], second[:, 0]

    @torch.inference_mode()
    def put(self, ids: Sequence[int], *rows: torch.Tensor) -> None:
        """Commit these tokens with copies of their keys and values [layers, heads, n, width]. Errors as of `window`."""
        keys, values = ((tensor.shape[1], tensor.shape[3]) for tensor in rows)
        for view, tensor in zip(self.window(len(ids), keys, values), rows, strict=True):
            view.copy_(tensor)
        self.filled(ids)

    def filled(self, ids: Sequence[int]) -> None:
        """Commit these tokens: their rows have been written to the window."""
        self._rows.length += len(ids)
        self.tokens += [int(token) for token in ids]

    def release(self) -> None:
        """Let the batch's memory go where nothing is committed, so that rows of another shape can follow."""
        self._rows.release()


class Batch:
    """D sequences of one model; `members` are sessions, which can be used one by one, and `extend` extends all.

    ends: [D] tokens of each before the first that are common to all, such as their documents' lengths.
    capacity: rows to allocate, of the longest sequence, where its final length is known.
    stop: while it is set, a forward of the batch or of a member raises `Interrupted`.
    A failed or interrupted call leaves the batch as it was. Raises ValueError without sequences, and for more than one
    where the model cannot (see `refusal`).
    """

    def __init__(
        self, lm: CausalLM, ends: Sequence[int], capacity: int = 0, stop: threading.Event | None = None
    ) -> None:
        if not len(ends) or min(ends) < 0:
            raise ValueError(f"A batch has sequences of 0 or more tokens, not {list(ends)}.")
        if max(ends) > lm.context:
            raise ValueError(f"{max(ends)} tokens are more than the context of {lm.context}.")
        reason = refusal(lm) if len(ends) > 1 else None
        if reason:
            raise ValueError(reason)
        self.lm = lm
        self.ends = [int(end) for end in ends]
        self._rows = AlignedRows(lm.layers, self.ends, min(capacity, lm.context))
        for rows in (self._rows, *self._rows.parts):
            rows.stop = stop
        self.members = [Member(lm, _rows=part) for part in self._rows.parts]
        self._cache = self._rows.cache()
        self._pads = torch.tensor(self._rows.pads, device=lm.model.device)
        self._hidden: torch.Tensor | None = None  # [D, columns]: 0, or the dtype's least number before a sequence

    @property
    def length(self) -> int:
        """Tokens that all have after their ends. Raises ValueError where they are not the same."""
        lengths = [member.length - end for member, end in zip(self.members, self.ends, strict=True)]
        if min(lengths) != max(lengths) or lengths[0] < 0:
            raise ValueError(f"The sequences are not in line: they have {lengths} tokens after their ends.")
        return lengths[0]

    def prefill(self, ids: ArrayLike) -> torch.Tensor:
        """Commit the ids after every sequence; returns the logits [D, V] after the last. Errors as of `extend`."""
        return self._append(ids, "The prompt", last=True)[:, -1]

    def extend(self, tokens: ArrayLike) -> torch.Tensor:
        """Commit tokens after every sequence; returns the logits [D, n, V] after each.

        Raises ValueError where the sequences are not in line, and as `Session.extend` does.
        """
        return self._append(tokens, "The extension", last=False)

    def rollback(self, length: int) -> None:
        """Drop the common tokens from `length` on. Raises ValueError where there are fewer."""
        if not 0 <= length <= self.length:
            raise ValueError(f"A batch of {self.length} common tokens cannot be rolled back to {length}.")
        for member, end in zip(self.members, self.ends, strict=True):
            member.rollback(end + length)

    @torch.inference_mode()
    def _append(self, ids: ArrayLike, what: str, last: bool) -> torch.Tensor:
        new_ids = integers(ids, "A batch's tokens")
        for member in self.members:
            tokens = member._checked(new_ids, what)
        self._rows.length = max(self.ends) + self.length
        columns = self._rows.length + len(tokens)
        self._rows.reserve(columns)
        logits = self._forward(tokens, columns, last)
        for member in self.members:
            member.filled(new_ids.tolist())
        return logits

    def _forward(self, tokens: torch.Tensor, columns: int, last: bool) -> torch.Tensor:
        """Run the model over the new tokens of all D sequences; returns logits [D, n or 1, V]."""
        options: dict[str, object] = {"logits_to_keep": 1} if last and self.lm._one_row else {}
        if any(self._rows.pads):
            positions = torch.arange(columns - len(tokens), columns, device=tokens.device)
            options["position_ids"] = positions - self._pads[:, None]
            options["attention_mask"] = self._mask(len(tokens), columns)
        return self.lm.model(
            input_ids=tokens.expand(len(self.members), -1), past_key_values=self._cache, use_cache=True,
            return_dict=True, **options,
        ).logits  # fmt: skip

    def _mask(self, n: int, columns: int) -> torch.Tensor:
        """[D, 1, n, columns] to be added to the scores of the last n columns' attention."""
        least = torch.finfo(self.lm.model.dtype).min
        if self._hidden is None or self._hidden.shape[1] < columns:
            indices = torch.arange(2 * columns, device=self._pads.device)
            self._hidden = torch.zeros(len(self.ends), 2 * columns, dtype=self.lm.model.dtype, device=indices.device)
            self._hidden.masked_fill_(indices < self._pads[:, None], least)
        mask = self._hidden[:, None, None, :columns]
        if n == 1:
            return mask
        mask = mask.repeat(1, 1, n, 1)
        mask[..., -n:] += torch.full((n, n), least, dtype=mask.dtype, device=mask.device).triu(1)
        return mask


# Several batches in one forward


class _Layer(CacheLayerMixin):
    """One layer of several batches' rows: attention gets lists with one tensor for each batch."""

    is_sliding = False

    def __init__(self, batches: Sequence[Batch], index: int) -> None:
        super().__init__()
        self.is_initialized = True
        self._batches = batches
        self._index = index
        self._sizes = [len(batch.members) for batch in batches]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the batches' rows allocate for all layers at once."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object) -> Any:
        """Append each batch's part; returns ([keys of each], [values of each])."""
        parts = zip(self._batches, key_states.split(self._sizes), value_states.split(self._sizes), strict=True)
        rows = [batch._rows.append(self._index, keys, values) for batch, keys, values in parts]
        return tuple(zip(*rows, strict=True))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that the longest batch sees, and the position of the first; masks are each batch's own."""
        return max(batch._rows.length for batch in self._batches) + query_length, 0

    def get_seq_length(self) -> int:
        """Rows before the next forward, of the longest batch."""
        return max(batch._rows.length for batch in self._batches)

    def get_max_length(self) -> int:
        """No limit (-1): the rows grow."""
        return -1


_JOINED = "ondevice_joined"


def _attend(
    module: torch.nn.Module, query: torch.Tensor, key: Any, value: Any, mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """Each batch's rows attend to its own keys, under its own mask, which `batches` has in the place of one."""
    if isinstance(key, torch.Tensor):  # another thread's forward of the same model
        return sdpa_attention_forward(module, query, key, value, mask, **options)
    masks = options.pop("batches")
    parts = zip(query.split([len(keys) for keys in key]), key, value, masks, strict=True)
    outputs = [sdpa_attention_forward(module, q, k, v, own, **options)[0] for q, k, v, own in parts]
    return torch.cat(outputs), None


ALL_ATTENTION_FUNCTIONS.register(_JOINED, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(_JOINED, sdpa_mask)


def joins(lm: CausalLM) -> bool:
    """Whether several batches of this model can share a forward."""
    return lm.model.config._attn_implementation in ("sdpa", _JOINED) and refusal(lm) is None


@contextlib.contextmanager
def _joined(lm: CausalLM) -> Iterator[None]:
    config = lm.model.config
    config._attn_implementation = _JOINED
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"


@torch.inference_mode()
def extend_together(batches: Sequence[Batch], tokens: Sequence[int]) -> list[torch.Tensor]:
    """Commit one token to each batch, in one forward; returns each one's logits [D, V].

    All are of one model, of which `joins` is true, and in line. A failed call leaves them as they were.
    """
    lm, positions, masks = batches[0].lm, [], []
    for batch in batches:
        batch._rows.length = max(batch.ends) + batch.length
        columns = batch._rows.length + 1
        batch._rows.reserve(columns)
        positions.append(batch._rows.length - batch._pads)
        masks.append(batch._mask(1, columns) if any(batch._rows.pads) else None)
    sizes = [len(batch.members) for batch in batches]
    ids = torch.tensor(list(tokens), device=lm.model.device).repeat_interleave(torch.tensor(sizes))
    cache = Cache(layers=[_Layer(batches, index) for index in range(lm.layers)])
    whole = torch.zeros(len(ids), 1, 1, 1, dtype=lm.model.dtype, device=ids.device)  # given, so that none is made
    with _joined(lm):
        logits = lm.model(
            input_ids=ids[:, None], position_ids=torch.cat(positions)[:, None], attention_mask=whole, batches=masks,
            past_key_values=cache, use_cache=True, return_dict=True,
        ).logits[:, -1]  # fmt: skip
    for batch, token in zip(batches, tokens, strict=True):
        for member in batch.members:
            member.filled([token])
    return list(logits.split(sizes))


_refusals: WeakKeyDictionary[CausalLM, str | None] = WeakKeyDictionary()
_probing = threading.RLock()


def refusal(lm: CausalLM) -> str | None:
    """Why sequences of different lengths cannot share a forward of this model, in a sentence; None where they can.

    They need what a tree needs: a mask and positions that are obeyed, here of each sequence its own. Architectures that
    our tests do not cover are probed, once a model, with a few tokens.
    """
    if lm.tree_refusal:
        return f"Several sequences in one forward need a mask and positions, as a tree does: {lm.tree_refusal}"
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
        together = batch.extend(common)
    except Exception as error:  # whatever a foreign forward raises
        return f"{support.name(lm.model)} cannot run several sequences ({str(error).strip().splitlines()[:1]})."
    for logits, prompt in zip(together, prompts, strict=True):
        right = lm.start().prefill([*prompt, *common])
        if float((logits[-1] - right).abs().max() / right.std()) > probe.tolerance(lm):
            return f"{support.name(lm.model)} does not obey the positions and masks of several sequences."
    return None

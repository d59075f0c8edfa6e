"""Sessions: a transformers causal LM with a cache that grows by tokens, verifies trees, keeps paths and rolls back."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from ondevice.causal_lm import probe, support
from ondevice.causal_lm.rows import Rows
from ondevice.causal_lm.tree import TokenTree, integers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class CausalLM:
    """A causal LM of transformers, put into evaluation mode, and what it can do; `start` begins a session.

    model: any that has one cache row a token. Architectures that our tests do not cover are probed here, with a few
        forwards of a dozen tokens.
    context: the most tokens a session may hold; by default all that the model was built for.
    in_torch: whether its forwards run in torch. most_rows: that a session may hold, a tree's rows among them, which lie
        behind the committed ones; more than the context where a tree is wider than deep.
    Raises ValueError where sessions cannot be right: encoders, recurrent states, a context longer than the model's.
    """

    in_torch = True
    most_rows = sys.maxsize

    def __init__(self, model: PreTrainedModel, context: int | None = None) -> None:
        support.require_causal(model)
        self.model = model.eval()
        self.context = support.context_of(model, context)
        self.vocabulary = len(model.get_input_embeddings().weight)  # type: ignore[arg-type]
        self.layers = int(support.text_config(model).num_hidden_layers)
        self._one_row = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.tree_refusal = support.tree_refusal(model, self.context)  # one sentence; None where trees can be verified
        if support.text_config(model).model_type not in support.TESTED:
            probe.require_chains(self)
            self.tree_refusal = self.tree_refusal or probe.tree_refusal(self)

    @property
    def dtype(self) -> torch.dtype:
        """Of logits and of cached rows."""
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        """Where tokens and logits are."""
        return self.model.device

    def require_trees(self) -> None:
        """Raise ValueError, with the reason, where only chains can be verified."""
        if self.tree_refusal:
            raise ValueError(self.tree_refusal)

    def tree_room(self, length: int) -> int:
        """Most rows of a tree that branches, behind `length` tokens."""
        return self.most_rows - length

    def start(self, capacity: int = 0) -> Session:
        """An empty session. capacity: rows to allocate at first, where the final length is known."""
        return Session(self, capacity)

    def rows(self, capacity: int = 0) -> Rows:
        """Empty rows of a session. capacity: how many to allocate at first."""
        return Rows(self.layers, min(capacity, self.context))

    @torch.inference_mode()
    def resume(self, tokens: Sequence[int], keys: torch.Tensor, values: torch.Tensor, capacity: int = 0) -> Session:
        """A session that has these tokens committed, by their rows as `Session.exported` gave them.

        Raises ValueError where the rows are not one a token and layer of this model, or not of its type.
        """
        for name, rows in (("keys", keys), ("values", values)):
            if rows.ndim != 4 or rows.shape[0] != self.layers or rows.shape[2] != len(tokens):
                wanted = f"[{self.layers}, heads, {len(tokens)}, width]"
                raise ValueError(f"The {name} have the shape {list(rows.shape)}, not {wanted}.")
            if rows.dtype != self.dtype:
                raise ValueError(f"The {name} are {rows.dtype}, the model is {self.dtype}.")
        if len(tokens) > self.context:
            raise ValueError(f"{len(tokens)} tokens are more than the context of {self.context}.")
        cached = self.rows(max(capacity, len(tokens)))
        cached.reserve(len(tokens))
        device = self.device
        for layer, (k, v) in enumerate(zip(keys.to(device), values.to(device), strict=True)):
            cached.append(layer, k[None], v[None])
        cached.length = len(tokens)
        session = Session(self, _rows=cached)
        session.tokens = [int(token) for token in tokens]
        return session

    def forward(
        self, tokens: torch.Tensor, rows: Rows, cache: object, *, last: bool = False, **shape: torch.Tensor
    ) -> torch.Tensor:
        """Logits [n, V] after each of `tokens` [n] (`last`: [1, V], after the last), whose rows do not count yet."""
        rows.reserve(rows.length + len(tokens))
        options = {"logits_to_keep": 1} if last and self._one_row else {}
        logits = self.model(
            input_ids=tokens[None], past_key_values=cache, use_cache=True, return_dict=True, **options, **shape
        ).logits[0]
        return logits[-1:] if last else logits


class Session:
    """One sequence of tokens and its cache; everything is of batch one and under inference mode.

    A step is `verify`, then `keep`: the tree's rows are uncommitted in between. A failed or interrupted call leaves
    the session as it was. Logits have the model's dtype and device.
    """

    def __init__(self, lm: CausalLM, capacity: int = 0, _rows: Rows | None = None) -> None:
        self.lm = lm
        self.tokens: list[int] = []  # the committed ids
        self._rows = _rows or lm.rows(capacity)
        self._cache = self._rows.cache()
        self._verified: TokenTree | None = None

    @property
    def length(self) -> int:
        """How many tokens are committed."""
        return len(self.tokens)

    def prefill(
        self, ids: ArrayLike, chunk: int | None = None, on_logits: Callable[[int, torch.Tensor], None] | None = None
    ) -> torch.Tensor:
        """Commit a prompt, or a further turn; returns the logits [V] after its last token.

        chunk: tokens per forward; by default all in one.
        on_logits: called after each chunk with the position of its first token and its logits [c, V], which are not
            kept: what is needed of them, such as the top k, is taken here, and n x V numbers never exist.
        """
        tokens = self._checked(integers(ids, "A prompt's ids"), "The prompt")
        if chunk is not None and chunk < 1:
            raise ValueError(f"A chunk holds at least one token, not {chunk}.")
        before = self.length
        try:
            for start in range(0, len(tokens), chunk or len(tokens)):
                part = tokens[start : start + (chunk or len(tokens))]
                logits = self._append(part, last=on_logits is None)
                if on_logits is not None:
                    on_logits(before + start, logits)
        except BaseException:
            self.rollback(before)
            raise
        return logits[-1]

    def extend(self, tokens: ArrayLike) -> torch.Tensor:
        """Commit tokens; returns the logits [k, V] after each."""
        return self._append(self._checked(integers(tokens, "Tokens"), "The extension"), last=False)

    @torch.inference_mode()
    def verify(self, tree: TokenTree) -> torch.Tensor:
        """Logits [n, V] after every node, as if the path to it had been committed, in one forward.

        Nothing is committed: `keep` does that. Raises ValueError where the model can verify only chains.
        """
        topology = tree.topology
        tokens = self._checked(tree.tokens, "The tree", topology.depth)
        if topology.is_chain:  # the model's own causal path: no mask for one token, and its own mask for more
            logits = self.lm.forward(tokens, self._rows, self._cache)
        else:
            self.lm.require_trees()
            room = self.lm.tree_room(self.length)
            if len(tree) > room:
                where = f"Behind {self.length} tokens of a context of {self.lm.context}"
                raise ValueError(f"{where} a tree has at most {room} rows, not {len(tree)}.")
            device, dtype, past = tokens.device, self.lm.dtype, self.length
            mask = torch.zeros(len(tree), past + len(tree), dtype=dtype, device=device)
            mask[:, past:] = topology.hidden(dtype, device)
            positions = topology.offsets(device) + past
            logits = self.lm.forward(
                tokens, self._rows, self._cache, attention_mask=mask[None, None], position_ids=positions[None]
            )
        self._verified = tree
        return logits

    @torch.inference_mode()
    def keep(self, path: Sequence[int]) -> None:
        """Commit a path of the tree just verified and drop its other rows, in place.

        path: rows of the tree from a child of the last committed token downwards; empty to drop the whole tree.
        """
        if self._verified is None:
            raise ValueError("There is no verified tree to keep a path of.")
        self._verified.check_path(path)
        self._rows.gather(list(path))
        self.tokens += self._verified.tokens[list(path)].tolist()
        self._verified = None

    def rollback(self, length: int) -> None:
        """Drop the committed tokens from `length` on, and a verified tree that was not kept."""
        if not 0 <= length <= self.length:
            raise ValueError(f"A session of {self.length} tokens cannot be rolled back to {length}.")
        self._verified = None
        self._rows.length = length
        del self.tokens[length:]

    @torch.inference_mode()
    def fork(self) -> Session:
        """An independent session with the same committed tokens; copies their rows."""
        twin = Session(self.lm, _rows=self._rows.copy())
        twin.tokens = list(self.tokens)
        return twin

    @torch.inference_mode()
    def exported(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the committed keys and of the values, each [layers, heads, n, width]; `CausalLM.resume` takes them.

        Raises ValueError where layers differ in heads or width.
        """
        nothing = torch.empty(1, 1, 0, 1, dtype=self.lm.dtype, device=self.lm.device)
        views = [self._rows.append(layer, nothing, nothing) for layer in range(self.lm.layers)]
        if len({view.shape for layer in views for view in layer}) > 1:
            raise ValueError("The layers' rows have different shapes, so they cannot be exported as one.")
        keys, values = (torch.cat(rows) for rows in zip(*views, strict=True))
        return keys, values

    @torch.inference_mode()
    def _append(self, tokens: torch.Tensor, last: bool) -> torch.Tensor:
        logits = self.lm.forward(tokens, self._rows, self._cache, last=last)
        ids = tokens.tolist()
        self._rows.length += len(ids)
        self.tokens += ids
        return logits

    def _checked(self, ids: NDArray[np.int64], what: str, depth: int | None = None) -> torch.Tensor:
        """The ids on the model's device; raises ValueError where they cannot follow the session."""
        if self._verified is not None:
            raise ValueError("A verified tree is waiting: keep a path of it, or roll back, first.")
        if not len(ids):
            raise ValueError(f"{what} is empty.")
        low = int(ids.min())
        high = int(ids.max())
        if low < 0 or high >= self.lm.vocabulary:
            wrong = low if low < 0 else high
            raise ValueError(f"{what} holds token {wrong}, which is not in the model's {self.lm.vocabulary}.")
        reach = self.length + (len(ids) if depth is None else depth)
        if reach > self.lm.context:
            raise ValueError(f"{what} would reach {reach} tokens, more than the context of {self.lm.context}.")
        return torch.from_numpy(ids.copy()).to(self.lm.device)

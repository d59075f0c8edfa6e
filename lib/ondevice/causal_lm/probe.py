"""Probing an architecture that the tests do not cover: what a session says, against runs without a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from ondevice.causal_lm import support
from ondevice.causal_lm.tree import TokenTree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Rows are far from depths, and every row but the first is wrong where positions or the mask are not obeyed.
_PARENTS = (-1, -1, -1, 0, 0, 2, 3, 5)
_PROMPT = 3


class Probed(Protocol):
    """The parts of a `CausalLM` that a probe needs."""

    model: PreTrainedModel
    vocabulary: int

    def start(self, capacity: int = 0) -> Any: ...


def require_chains(lm: Probed) -> None:
    """Raise ValueError where prefill, extend and rollback do not give what a run without a cache gives."""
    try:
        wrong = _chain_error(lm) > tolerance(lm)
    except Exception as error:  # whatever a foreign forward raises, it cannot be used
        raise ValueError(f"{support.name(lm.model)} cannot run in a session ({_line(error)}).") from error
    if wrong:
        raise ValueError(f"{support.name(lm.model)} answers otherwise with our cache than without one.")


def tree_refusal(lm: Probed) -> str | None:
    """A sentence where a tree's logits are not those of its paths, else None."""
    try:
        wrong = _tree_error(lm) > tolerance(lm)
    except Exception as error:  # as above
        return f"{support.name(lm.model)} cannot verify a tree ({_line(error)}): only chains can be verified."
    if wrong:
        return f"{support.name(lm.model)} does not obey the positions and mask of a tree: only chains can be verified."
    return None


def _chain_error(lm: Probed) -> float:
    ids = _ids(lm, _PROMPT + 4)
    session = lm.start()
    session.prefill(ids[:_PROMPT])
    session.extend(ids[:2])
    session.rollback(_PROMPT)
    return _distance(session.extend(ids[_PROMPT:]), _uncached(lm, ids)[_PROMPT:])


def _tree_error(lm: Probed) -> float:
    ids = _ids(lm, _PROMPT + len(_PARENTS))
    tree = TokenTree(ids[_PROMPT:], _PARENTS)
    session = lm.start()
    session.prefill(ids[:_PROMPT])
    logits = session.verify(tree)
    paths = [ids[:_PROMPT] + tree.tokens[tree.path_to(row)].tolist() for row in range(len(tree))]
    return max(_distance(logits[row], _uncached(lm, path)[-1]) for row, path in enumerate(paths))


def _ids(lm: Probed, n: int) -> list[int]:
    """Ids that differ from each other, as far as the vocabulary goes."""
    return [(7 * k + 11) % lm.vocabulary for k in range(n)]


@torch.inference_mode()
def _uncached(lm: Probed, ids: list[int]) -> torch.Tensor:
    tokens = torch.tensor([ids], device=lm.model.device)
    return lm.model(input_ids=tokens, use_cache=False, return_dict=True).logits[0]


def _distance(logits: torch.Tensor, right: torch.Tensor) -> float:
    """Largest difference, in standard deviations of the right logits (a softmax ignores their mean)."""
    return float((logits - right).abs().max() / right.std())


def tolerance(lm: Probed) -> float:
    """Rounding accumulates over layers; with sharp attention, wrong positions cost 0.9 and more."""
    return 0.25 if torch.finfo(lm.model.dtype).bits == 16 else 1e-4


def _line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:200] or type(error).__name__

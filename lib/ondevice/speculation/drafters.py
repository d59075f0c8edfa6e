"""The drafters by name: one table for the bench, the records, the tests and `speculative("goose")`.

A drafter of your own becomes a row here, and all of these take it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Literal

from ondevice.speculation.drafter import Drafter


@dataclass(frozen=True)
class Entry:
    """A row of the table.

    make: `module:name` of what makes a new drafter, from the number of token ids if it has a parameter `vocabulary`.
    It is imported when it is asked for, so that a record's code is its own drafter's alone. source: whose rules it
    follows. reads: the text's ids alone, or also the model's logits. trees: whether it drafts trees, else chains.
    budget: nodes of its authors' drafts, the root not counted; None where they name none.
    """

    make: str
    source: str
    reads: Literal["ids", "logits"]
    trees: bool
    budget: int | None = None

    @property
    def module(self) -> str:
        """Where it is made."""
        return self.make.partition(":")[0]


_HERE = "ondevice.speculation"
DRAFTERS: dict[str, Entry] = {
    "prompt-lookup": Entry(
        f"{_HERE}.prompt_lookup:PromptLookup.transformers", "transformers' prompt_lookup_num_tokens", "ids", False, 10
    ),
    "sam": Entry(f"{_HERE}.sam_decoding:SamDecoding", "Hu et al. 2024", "ids", False, 39),
    "suffix-decoding": Entry(f"{_HERE}.suffix_decoding:SuffixDecoding", "Oliaro et al. 2024", "ids", True),
    "cacheback": Entry(f"{_HERE}.cacheback:Cacheback", "Ma et al. 2025", "ids", True, 95),
    "token-recycling": Entry(f"{_HERE}.token_recycling:TokenRecycling", "Luo et al. 2024", "logits", True, 80),
    "logit-spec": Entry(f"{_HERE}.logit_spec:LogitSpec", "Liu et al. 2025", "logits", True),
    "goose": Entry(f"{_HERE}.goose:Goose", "Jin et al. 2026", "logits", True),
    "racer": Entry(f"{_HERE}.racer:Racer", "Zhang et al. 2026", "logits", True, 63),
    "diaa": Entry("ondevice_papers.diaa.drafter:diaa", "DIAA, with cold tables", "logits", True, 16),
    "sdnpu": Entry("ondevice_papers.sdnpu.drafter:sdnpu", "sd.npu on SAM", "logits", True, 31),
    "mixture": Entry(f"{_HERE}.bundled:mixture", "ours", "logits", True, 8),
}


def create(name: str, vocabulary: int) -> Drafter:
    """A new drafter. vocabulary: number of token ids. Raises ValueError where the table has no such name."""
    require(name)
    make: Callable[..., Drafter] = resolve_name(DRAFTERS[name].make)
    return make(vocabulary) if "vocabulary" in inspect.signature(make).parameters else make()


def require(name: str) -> None:
    """Raise ValueError, with the names that there are, unless the table has this one."""
    if name not in DRAFTERS:
        raise ValueError(f"There is no drafter {name!r}; there are {', '.join(DRAFTERS)}.")

"""Every method that is recorded, by its name, made from functions that an experiment may replace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ondevice import assets, corpus, models
from ondevice.causal_lm import CausalLM
from ondevice.diaa import ambiguities, extended, tables, tree, warmup
from ondevice.diaa.calibration import Calibration
from ondevice.diaa.drafter import RECYCLING, Diaa
from ondevice.diaa.tables import Fresh, Tables
from ondevice.speculation import Drafter, loop
from ondevice.speculation.layer_skipping import LayerSkipping
from ondevice.speculation.prompt_lookup import PromptLookup
from ondevice.speculation.sam_decoding import SamDecoding, automaton
from ondevice.speculation.small_model import SmallModel
from ondevice.speculation.suffix_automaton import SuffixAutomaton
from ondevice.speculation.token_recycling import TokenRecycling

BASE, SMALL = "pydocs-lm-base", "pydocs-lm-small"
# Our families, and the paper's names of the tasks that they stand for.
TASKS = {"summary": "sum", "doctest": "math", "turns": "mt", "question": "qa", "rag": "rag", "parameters": "trans"}
BUDGET = 32  # nodes of DIAA's tree, which the paper does not state
RECYCLED = 80  # nodes of Token Recycling's template
DIAA, READS, EXTENDED = "DIAA", "DIAA, prompt read", "DIAA, extended"
Made = tuple[Drafter, int]  # and the most nodes of a draft


@dataclass
class Workbench:
    """A model and what methods are made from. Each function is the library's unless an experiment brings its own."""

    model: str = BASE
    generate: Callable[..., loop.Generation] = loop.generate
    grow: Callable[..., tree.Tree] = tree.grow
    update: Callable[..., None] = tables.overwrite
    means: Callable[..., Tables] = warmup.means
    candidates: Callable[..., list[extended.Candidate]] = extended.candidates
    grow_likeliest: Callable[..., extended.Mixed] = extended.grow_likeliest
    size: Callable[..., int] = extended.most_per_second
    calibration: Callable[[], Calibration] = Calibration
    diaa: type[Diaa] = Diaa
    _tables: dict[str, Tables] = field(default_factory=dict, repr=False)

    @cached_property
    def lm(self) -> CausalLM:
        """The model."""
        return CausalLM(models.load(self.model).model)

    @cached_property
    def other(self) -> CausalLM:
        """The other one of the two bundled models: SpS's drafter, and whose tables are lent."""
        return CausalLM(models.load(SMALL if self.model == BASE else BASE).model)

    @cached_property
    def end(self) -> int:
        """The id that ends an answer."""
        return int(corpus.tokenizer().eos_token_id)

    @cached_property
    def static(self) -> SuffixAutomaton:
        """SAM-D's corpus: for a fair comparison DIAA's warm-up text."""
        text = warmup.warm_up_text("tasks", self.end)
        return automaton(part.tolist() for part in np.split(text, np.flatnonzero(text == self.end) + 1) if len(part))

    def tables(self, kind: str = "tasks") -> Tables:
        """A copy of tables: of train `tasks`, `documents`, these by the `other` model, `bigrams`, `pairs`, `cold`."""
        if kind not in self._tables:
            self._tables[kind] = self._warmed(kind)
        return self._tables[kind].copy()

    def _warmed(self, kind: str) -> Tables:
        if kind == "cold":
            return Tables.empty(self.lm.vocabulary)
        text = warmup.warm_up_text("tasks" if kind in ("tasks", "pairs") else "documents", self.end)
        if kind == "bigrams":
            return warmup.bigrams(text, self.lm.vocabulary)
        fresh = said(self.other if kind == "other" else self.lm, text)
        keys = warmup.in_windows(text, ambiguities.pairs) if kind == "pairs" else text
        return self.means(keys, fresh, self.lm.vocabulary)

    def make(self, method: str) -> Made:
        """A new drafter of a recorded method, and its budget. Raises ValueError with the methods there are."""
        if method not in METHODS:
            raise ValueError(f"There is no method {method!r}; there are {', '.join(METHODS)}.")
        return METHODS[method](self)


def said(lm: CausalLM, text: NDArray[np.int64]) -> Fresh:
    """`warmup.said`, kept in data/cache/diaa by weights and text."""
    weights = sha256()
    for name, values in lm.model.state_dict().items():
        weights.update(name.encode() + values.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    key = sha256(f"{weights.hexdigest()} {warmup.WINDOW}".encode() + text.tobytes()).hexdigest()[:24]
    path = assets.cache_folder("diaa") / f"said-{key}.npz"
    if not path.is_file():
        found = warmup.said(lm, text)
        with assets.writing(path) as temporary:
            np.savez(temporary, tokens=found.tokens.astype(np.int32), probabilities=found.probabilities)
    with np.load(path) as kept:
        return Fresh(kept["tokens"].astype(np.int64), kept["probabilities"])


Maker = Callable[[Workbench], Made]


def _diaa(budget: int = BUDGET, warmed: str = "tasks", kind: type[Diaa] | None = None, **options: Any) -> Maker:
    def make(bench: Workbench) -> Made:
        parts = {"grow": bench.grow, "update": bench.update} | options
        return (kind or bench.diaa)(bench.tables(warmed), **parts), budget

    return make


def _extended(budget: int = extended.LARGEST, calibrated: bool = True, sized: bool = True, **options: Any) -> Maker:
    def make(bench: Workbench) -> Made:
        return extended.Extended(
            bench.tables(), update=bench.update, candidates=bench.candidates, grow_likeliest=bench.grow_likeliest,
            calibrate=bench.calibration() if calibrated else None, size=bench.size if sized else None, **options,
        ), budget  # fmt: skip

    return make


# In the order of their importance, in which they are recorded.
METHODS: dict[str, Maker] = {
    "vanilla": lambda bench: (Drafter(), 1),
    DIAA: _diaa(),
    READS: _diaa(reads_prompt=True),
    EXTENDED: _extended(),
    "PLD": lambda bench: (PromptLookup.original(), loop.BUDGET),
    "PLD, transformers' rules": lambda bench: (PromptLookup.transformers(), loop.BUDGET),
    "SAM-D": lambda bench: (SamDecoding(bench.static), loop.BUDGET),
    "TR": lambda bench: (TokenRecycling(bench.lm.vocabulary), RECYCLED),
    "SpS": lambda bench: (SmallModel(bench.other, heuristic=True), loop.BUDGET),
    "SWIFT": lambda bench: (LayerSkipping(bench.lm), loop.BUDGET),
}  # fmt: skip
MAIN = tuple(METHODS)
METHODS |= {
    # Table 3 and Figures 3, 4: without warmed tables, without a grown tree, without both, updates a step late
    "cold": _diaa(warmed="cold"),
    "static 32": _diaa(template=RECYCLING),
    "static 32, cold": _diaa(warmed="cold", template=RECYCLING),
    "one step stale": _diaa(stale=True),
    **{f"static {size}": _diaa(size, template=RECYCLING) for size in (8, 16, 64)},
    **{f"dynamic {size}": _diaa(size) for size in (8, 16, 64)},
    # Figure 8
    "refresh 4": _diaa(refresh=4),
    "refresh 8": _diaa(refresh=8),
    "refresh 4, 8 nodes": _diaa(8, refresh=4),
    "refresh 4, 64 nodes": _diaa(64, refresh=4),
    # Figure 9
    "tables: documents": _diaa(warmed="documents"),
    "tables: other model": _diaa(warmed="other"),
    "tables: bigrams": _diaa(warmed="bigrams"),
    # the paper's ambiguities
    "rule: replace": _diaa(update=ambiguities.replace),
    "rule: union": _diaa(update=ambiguities.union),
    "updates: accepted only": _diaa(learns=ambiguities.accepted_only),
    "key: two tokens": _diaa(warmed="pairs", kind=ambiguities.ByPairs),
    "budget: root counts": _diaa(grow=ambiguities.grow_counting_root),
    "budget: paths": _diaa(grow=ambiguities.grow_counting_paths),
    "ranks: summed": _diaa(grow=ambiguities.grow_summing_ranks),
    # the extended method's parts
    "extended w/o calibration": _extended(calibrated=False),
    "extended w/o sizing": _extended(BUDGET, sized=False),
    "extended w/o suffixes": _extended(suffixes=False),
    "extended w/o prompt": _extended(reads_prompt=False),
}  # fmt: skip
INITIAL = ("cold", "tables: documents", "tables: other model", "tables: bigrams")


def recorded(model: str, which: str) -> list[str]:
    """The methods of a model and set of requests. The small model has no smaller one to draft for it."""
    names = MAIN if which != "tasks" else tuple(METHODS) if model == BASE else MAIN + INITIAL
    return [name for name in names if model == BASE or name != "SpS"]

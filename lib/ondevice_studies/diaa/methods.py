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
from ondevice.causal_lm.lean import engine
from ondevice.speculation import Drafter, loop, mixture
from ondevice.speculation.bundled import answers, stores, text, weights
from ondevice.speculation.goose import Goose
from ondevice.speculation.layer_skipping import LayerSkipping
from ondevice.speculation.logit_spec import LogitSpec
from ondevice.speculation.prompt_lookup import PromptLookup
from ondevice.speculation.sam_decoding import SamDecoding, automaton
from ondevice.speculation.small_model import SmallModel
from ondevice.speculation.store import Store
from ondevice.speculation.suffix_automaton import SuffixAutomaton
from ondevice.speculation.suffix_decoding import SuffixDecoding
from ondevice.speculation.token_recycling import TokenRecycling
from ondevice_papers.diaa import ambiguities, tables, tree, warmup
from ondevice_papers.diaa.drafter import RECYCLING, Diaa
from ondevice_papers.diaa.tables import Fresh, Tables

BASE = "pydocs-lm-base"
SMALL = "pydocs-lm-small"
# Our families, and the paper's names of the tasks that they stand for.
TASKS = {"summary": "sum", "doctest": "math", "turns": "mt", "question": "qa", "rag": "rag", "parameters": "trans"}
BUDGET = 32  # nodes of DIAA's tree, which the paper does not state
LARGEST = 64  # nodes of a mixture's tree that is sized by its cost
NODES = (1, 2, 4, 8, 16, 32, 64)  # of a mixture that is not sized
RECYCLED = 80  # nodes of Token Recycling's template
DIAA, READS, MIXTURE = "DIAA", "DIAA, prompt read", "mixture"
Made = tuple[Drafter, int]  # and the most nodes of a draft


def _cost(first: float, *rest: float) -> NDArray[np.float64]:
    """[1 + LARGEST] ms of a pass that drafts 0, 1 .. nodes, linear between those of 1, 8, 16, 33 and 65 rows."""
    nodes = np.arange(LARGEST + 1)
    drafting = np.where(nodes > 0, 0.05 + 0.034 * nodes, 0.0)  # in this code, on zen5-2c
    return np.interp(1 + nodes, [1, 8, 16, 33, 65], [first, *rest]) + drafting


# What trees are sized by: ms behind 256 tokens, one thread. llama.cpp's T(n)/T(1) on processors without matrix units.
COSTS = {
    "zen5": _cost(3.9, 6.7, 8.6, 12.2, 18.7),
    "zen5, small model": _cost(1.8, 2.7, 3.5, 5.0, 7.8),
    "zen5, 0.5B": _cost(71, 139, 179, 266, 409),
    "zen3, transformers": _cost(14.3, 20.8, 26.5, 40.4, 66.0),
    "llama.cpp": _cost(5, 13, 21.5, 40, 78),
}


@dataclass
class Workbench:
    """A model and what methods are made from. Each function is the library's unless an experiment brings its own."""

    model: str = BASE
    generate: Callable[..., loop.Generation] = loop.generate
    grow: Callable[..., tree.Tree] = tree.grow
    update: Callable[..., None] = tables.overwrite
    means: Callable[..., Tables] = warmup.means
    mix: Callable[..., Any] = mixture.mix
    grow_likeliest: Callable[..., Any] = mixture.grow_likeliest
    size: Callable[..., int] = mixture.most_per_second
    diaa: type[Diaa] = Diaa
    _tables: dict[str, Tables] = field(default_factory=dict, repr=False)

    @cached_property
    def lm(self) -> CausalLM:
        """The model."""
        return engine(models.load(self.model).model)

    @cached_property
    def other(self) -> CausalLM:
        """The other one of the two bundled models: SpS's drafter, and whose tables are lent."""
        return engine(models.load(SMALL if self.model == BASE else BASE).model)

    @cached_property
    def end(self) -> int:
        """The id that ends an answer."""
        return int(corpus.tokenizer().eos_token_id)

    @cached_property
    def static(self) -> SuffixAutomaton:
        """SAM-D's corpus: for a fair comparison DIAA's warm-up text."""
        text = warmup.warm_up_text("tasks", self.end)
        return automaton(part.tolist() for part in np.split(text, np.flatnonzero(text == self.end) + 1) if len(part))

    @cached_property
    def stores(self) -> list[Store]:
        """The mixture's: train text, and answers to train prompts."""
        return stores()

    @cached_property
    def library(self) -> SuffixAutomaton:
        """The same two, for the drafters that search an automaton."""
        return automaton(part.tolist() for part in (*text(), *answers()))

    def tables(self, kind: str = "tasks") -> Tables:
        """A copy of tables: of train `tasks`, `documents`, these by the `other` model, `bigrams`, `cold`."""
        if kind not in self._tables:
            self._tables[kind] = self._warmed(kind)
        return self._tables[kind].copy()

    def _warmed(self, kind: str) -> Tables:
        if kind == "cold":
            return Tables.empty(self.lm.vocabulary)
        read = warmup.warm_up_text("tasks" if kind == "tasks" else "documents", self.end)
        if kind == "bigrams":
            return warmup.bigrams(read, self.lm.vocabulary)
        return self.means(read, said(self.other if kind == "other" else self.lm, read), self.lm.vocabulary)

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


def _mixture(nodes: int = LARGEST, cost: str = "", stored: bool = True) -> Maker:
    def make(bench: Workbench) -> Made:
        return mixture.Mixture(
            weights(stored), bench.stores if stored else (), seconds=COSTS[cost] if cost else None, mix=bench.mix,
            grow=bench.grow_likeliest, size=bench.size,
        ), nodes  # fmt: skip

    return make


# In the order of their importance, in which they are recorded.
METHODS: dict[str, Maker] = {
    "vanilla": lambda bench: (Drafter(), 1),
    DIAA: _diaa(),
    READS: _diaa(reads_prompt=True),
    MIXTURE: _mixture(cost="zen5"),
    "PLD": lambda bench: (PromptLookup.original(), loop.BUDGET),
    "PLD, transformers' rules": lambda bench: (PromptLookup.transformers(), loop.BUDGET),
    "SAM-D": lambda bench: (SamDecoding(bench.static), loop.BUDGET),
    "TR": lambda bench: (TokenRecycling(bench.lm.vocabulary), RECYCLED),
    "SpS": lambda bench: (SmallModel(bench.other, heuristic=True), loop.BUDGET),
    "SWIFT": lambda bench: (LayerSkipping(CausalLM(bench.lm.model)), loop.BUDGET),
}
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
    "budget: root counts": _diaa(grow=ambiguities.grow_counting_root),
}


def _equal_rows(n: int) -> dict[str, Maker]:
    """What lies beyond the paper at equal rows, with the stores and without."""
    return {
        f"PLD {n}": lambda bench: (PromptLookup.transformers(), n),
        f"SAM-D {n}": lambda bench: (SamDecoding(bench.library), n),
        f"SuffixDecoding {n}": lambda bench: (SuffixDecoding(bench.library), n),
        f"LogitSpec {n}": lambda bench: (LogitSpec(), n),
        f"Goose {n}": lambda bench: (Goose(bench.lm.vocabulary, bench.library), n),
        f"SAM-D {n}, no store": lambda bench: (SamDecoding(), n),
        f"SuffixDecoding {n}, no store": lambda bench: (SuffixDecoding(), n),
        f"Goose {n}, no store": lambda bench: (Goose(bench.lm.vocabulary), n),
        f"mixture {n}, no store": _mixture(n, stored=False),
    }


_BEYOND = _equal_rows(8) | _equal_rows(16) | _equal_rows(32)
_BEYOND |= {f"mixture {nodes}": _mixture(nodes) for nodes in NODES}
_BEYOND |= {f"mixture, {cost}": _mixture(cost=cost) for cost in COSTS}
ABLATIONS = tuple(name for name in METHODS if name not in MAIN)
METHODS |= _BEYOND
INITIAL = ("cold", "tables: documents", "tables: other model", "tables: bigrams")
STRONGEST = ("SuffixDecoding 32", "LogitSpec 32", "Goose 32", "mixture 32")


def recorded(model: str, which: str) -> list[str]:
    """The methods of a model and set of requests. The small model has no smaller one to draft for it."""
    if which == "many":
        return ["vanilla", *_BEYOND] if model == BASE else []
    names = MAIN
    if which == "tasks":
        names += ABLATIONS + STRONGEST if model == BASE else INITIAL
    return [name for name in names if model == BASE or name != "SpS"]

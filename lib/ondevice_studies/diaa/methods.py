"""Every method that is recorded, a row of one table each, made from functions that an experiment may replace.

A new drafter is a row of `METHODS`: `docs/extend.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pkgutil import resolve_name
from typing import Any, NamedTuple

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
PLAIN = "vanilla"
DIAA = "DIAA"
READS = "DIAA, prompt read"
MIXTURE = "mixture"
FORGETFUL = (PLAIN, "PLD", "SAM-D", "LogitSpec")  # so begin the names of what keeps nothing from request to request
SETS = ("tasks", "long_prompts", "long_answers", "many")  # of requests; "many" is for what lies beyond the paper
# By model, the sets that record a method: the paper's and its baselines, one part of them left out, beyond the paper.
RequestSets = Mapping[str, tuple[str, ...]]
BOTH: RequestSets = {BASE: SETS[:3], SMALL: SETS[:3]}
LARGER: RequestSets = {BASE: SETS[:3]}
ABLATION: RequestSets = {BASE: ("tasks",)}
FIRST_TABLES: RequestSets = {BASE: ("tasks",), SMALL: ("tasks",)}
BEYOND: RequestSets = {BASE: ("many",)}
STRONGEST: RequestSets = {BASE: ("tasks", "many")}
DrafterWithBudget = tuple[Drafter, int]  # and the most nodes of a draft


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
        return self.means(read, cached_top_k(self.other if kind == "other" else self.lm, read), self.lm.vocabulary)

    def make(self, method: str) -> DrafterWithBudget:
        """A new drafter of a recorded method, and its budget. Raises ValueError with the methods there are."""
        if method not in METHODS:
            raise ValueError(f"There is no method {method!r}; there are {', '.join(METHODS)}.")
        row = METHODS[method]
        return resolve_name(row.make)() if isinstance(row.make, str) else row.make(self), row.budget


def cached_top_k(lm: CausalLM, text: NDArray[np.int64]) -> Fresh:
    """`warmup.top_k_after_each_token`, kept in data/cache/diaa by weights and text."""
    weights = sha256()
    for name, values in lm.model.state_dict().items():
        weights.update(name.encode() + values.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    key = sha256(f"{weights.hexdigest()} {warmup.WINDOW}".encode() + text.tobytes()).hexdigest()[:24]
    path = assets.cache_folder("diaa") / f"said-{key}.npz"
    if not path.is_file():
        fresh = warmup.top_k_after_each_token(lm, text)
        with assets.writing(path) as temporary:
            np.savez(temporary, tokens=fresh.tokens.astype(np.int32), probabilities=fresh.probabilities)
    with np.load(path) as kept:
        return Fresh(kept["tokens"].astype(np.int64), kept["probabilities"])


class Method(NamedTuple):
    """A row of `METHODS`: how a drafter is made, and on which requests it is recorded.

    make: a function of the workbench, or the dotted name of a class or function that takes no arguments. budget: the
    most nodes of a draft. sets: by model, those of `SETS` that record it. replayed: whether "many" replays it on the
    known answers, which a drafter allows that reads no logits.
    """

    make: str | Callable[[Workbench], Drafter]
    budget: int
    sets: RequestSets
    replayed: bool = False


def _diaa(budget: int = BUDGET, warmed: str = "tasks", sets: RequestSets = ABLATION, **options: Any) -> Method:
    def make(bench: Workbench) -> Drafter:
        parts = {"grow": bench.grow, "update": bench.update} | options
        return bench.diaa(bench.tables(warmed), **parts)

    return Method(make, budget, sets)


def _mixture(nodes: int = LARGEST, cost: str = "", stored: bool = True, sets: RequestSets = BEYOND) -> Method:
    def make(bench: Workbench) -> Drafter:
        return mixture.Mixture(
            weights(stored),
            bench.stores if stored else (),
            seconds=COSTS[cost] if cost else None,
            mix=bench.mix,
            grow=bench.grow_likeliest,
            size=bench.size,
        )

    return Method(make, nodes, sets, replayed=True)


def _equal_rows(n: int, sets: RequestSets = BEYOND) -> dict[str, Method]:
    """What lies beyond the paper at equal rows, with the stores and without. sets: of the strongest ones."""
    return {
        f"PLD {n}": Method(lambda bench: PromptLookup.transformers(), n, BEYOND, replayed=True),
        f"SAM-D {n}": Method(lambda bench: SamDecoding(bench.library), n, BEYOND, replayed=True),
        f"SuffixDecoding {n}": Method(lambda bench: SuffixDecoding(bench.library), n, sets, replayed=True),
        f"LogitSpec {n}": Method("ondevice.speculation.logit_spec.LogitSpec", n, sets),
        f"Goose {n}": Method(lambda bench: Goose(bench.lm.vocabulary, bench.library), n, sets),
        f"SAM-D {n}, no store": Method(lambda bench: SamDecoding(), n, BEYOND, replayed=True),
        f"SuffixDecoding {n}, no store": Method(lambda bench: SuffixDecoding(), n, BEYOND, replayed=True),
        f"Goose {n}, no store": Method(lambda bench: Goose(bench.lm.vocabulary), n, BEYOND),
        f"mixture {n}, no store": _mixture(n, stored=False),
    }


# In the order of their importance, in which they are recorded.
METHODS: dict[str, Method] = {
    PLAIN: Method("ondevice.speculation.Drafter", 1, {BASE: SETS, SMALL: SETS[:3]}),
    DIAA: _diaa(sets=BOTH),
    READS: _diaa(reads_prompt=True, sets=BOTH),
    MIXTURE: _mixture(cost="zen5", sets=BOTH),
    "PLD": Method("ondevice.speculation.prompt_lookup.PromptLookup.original", loop.BUDGET, BOTH),
    "PLD, transformers' rules": Method(lambda bench: PromptLookup.transformers(), loop.BUDGET, BOTH),
    "SAM-D": Method(lambda bench: SamDecoding(bench.static), loop.BUDGET, BOTH),
    "TR": Method(lambda bench: TokenRecycling(bench.lm.vocabulary), RECYCLED, BOTH),
    "SpS": Method(lambda bench: SmallModel(bench.other, heuristic=True), loop.BUDGET, LARGER),
    "SWIFT": Method(lambda bench: LayerSkipping(CausalLM(bench.lm.model)), loop.BUDGET, BOTH),
    # Table 3 and Figures 3, 4: without warmed tables, without a grown tree, without both, updates a step late
    "cold": _diaa(warmed="cold", sets=FIRST_TABLES),
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
    "tables: documents": _diaa(warmed="documents", sets=FIRST_TABLES),
    "tables: other model": _diaa(warmed="other", sets=FIRST_TABLES),
    "tables: bigrams": _diaa(warmed="bigrams", sets=FIRST_TABLES),
    # the paper's ambiguities
    "rule: replace": _diaa(update=ambiguities.replace),
    "rule: union": _diaa(update=ambiguities.union),
    "updates: accepted only": _diaa(learns=ambiguities.accepted_only),
    "budget: root counts": _diaa(grow=ambiguities.grow_counting_root),
    # beyond the paper
    **_equal_rows(8),
    **_equal_rows(16),
    **_equal_rows(32, sets=STRONGEST),
    **{f"mixture {nodes}": _mixture(nodes, sets=STRONGEST if nodes == 32 else BEYOND) for nodes in NODES},
    **{f"mixture, {cost}": _mixture(cost=cost) for cost in COSTS},
}


def recorded(model: str, request_set: str) -> list[str]:
    """The methods that are recorded of a model on a set of requests."""
    return [name for name, row in METHODS.items() if request_set in row.sets.get(model, ())]


MAIN = tuple(recorded(BASE, "long_prompts"))  # the methods of Tables 1 and 2

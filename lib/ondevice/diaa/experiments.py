"""The experiments behind the exhibits: the drafters that are compared, and one tidy table for each comparison.

Tables named `runs` have the columns of `ondevice.speculation.measuring.runs`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from ondevice import assets, corpus
from ondevice.diaa.budget import Sizing, VerifyCost
from ondevice.diaa.drafter import RECYCLING, Diaa
from ondevice.diaa.extended import Extended
from ondevice.diaa.tables import Tables, digest
from ondevice.diaa.updates import Fresh
from ondevice.diaa.warmup import WINDOW, Means, warm_up
from ondevice.speculation import Drafter, Generation, Verified, measuring, peers
from ondevice.speculation.layer_skipping import LayerSkipping
from ondevice.speculation.measuring import (
    PLAIN,
    VANILLA,
    Competitor,
    Measured,
    Method,
    Peer,
    by_task,
    goodputs,
    measure,
    plain_generate,
    speedups,
)
from ondevice.speculation.prompt_lookup import PromptLookup
from ondevice.speculation.request_set import Request
from ondevice.speculation.sam_decoding import SamDecoding, automaton
from ondevice.speculation.small_model import SmallModel
from ondevice.speculation.token_recycling import TokenRecycling

if TYPE_CHECKING:
    from collections.abc import Collection

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ondevice.causal_lm import CausalLM

# Our families, and the paper's names of the tasks that they stand for.
TASKS: dict[str, str] = {
    "summary": "sum", "doctest": "math", "turns": "mt", "question": "qa", "rag": "rag", "parameters": "trans",
}  # fmt: skip
BUDGET = 32  # nodes of DIAA's tree, which the paper does not state
LARGEST = 64  # nodes that the extended method may choose from
OVERLAPPED = "DIAA, overlapped"  # the paper's whole method
RECYCLED = 80  # nodes of Token Recycling's template
_FORMAT = 1  # raise it when warm-up changes


@dataclass(frozen=True)
class Setting:
    """A model, and the requests that methods are measured on. model: its name in tables. prime: not measured."""

    model: str
    lm: CausalLM
    requests: Sequence[Request]
    prime: Sequence[Request] = ()
    rounds: int = 1

    def measured(self, methods: Sequence[Competitor]) -> list[Measured]:
        """What the methods gave, and vanilla."""
        every = methods if any(method.name == VANILLA for method in methods) else [PLAIN, *methods]
        return measure(self.lm, every, self.requests, self.rounds, self.prime)

    def runs(self, methods: Sequence[Competitor]) -> pd.DataFrame:
        """The same as a table."""
        return measuring.runs(self.measured(methods), self.model)


# Warm-up


def warm_up_text(
    tokenizer: PreTrainedTokenizerBase, source: Literal["documents", "tasks"], count: int
) -> NDArray[np.int64]:
    """About `count` token ids of train text: windows from all over it, each closed with the end token.

    With another tokenizer than the corpus's the same text, of another number of tokens.
    Raises ValueError under one window, 512 tokens.
    """
    if count < WINDOW:
        raise ValueError(f"A warm-up text has at least one window of {WINDOW} tokens, not {count}.")
    own = corpus.tokenizer()
    every = corpus.document_tokens("train") if source == "documents" else corpus.task_tokens("train")
    size = WINDOW - 1
    starts = np.linspace(0, len(every) - size, count // WINDOW).astype(int)
    windows = [every[start : start + size].astype(np.int64) for start in starts]
    if digest(tokenizer) != digest(own):
        texts = [str(own.decode(window.tolist(), skip_special_tokens=True)) for window in windows]
        windows = [np.array(ids, np.int64) for ids in tokenizer(texts, verbose=False)["input_ids"]]
    return np.concatenate([np.append(window, tokenizer.eos_token_id) for window in windows])


def warmed(lm: CausalLM, ids: NDArray[np.int64], tokenizer: PreTrainedTokenizerBase) -> Tables:
    """`warm_up` on the text `ids`, kept in data/cache/diaa by weights and text."""
    key = sha256(f"{_FORMAT} {weights_digest(lm.model)} {WINDOW}".encode() + ids.tobytes()).hexdigest()[:24]
    path = assets.cache_folder("diaa") / f"tables-{key}.safetensors"
    name = digest(tokenizer)
    if not path.is_file():
        warm_up(lm, ids, name).save(path)
    return Tables.load(path, name)


def weights_digest(model: PreTrainedModel) -> str:
    """A hash of all weights and their types."""
    found = sha256()
    for name, weights in model.state_dict().items():
        found.update(f"{name} {weights.dtype} {tuple(weights.shape)}".encode())
        found.update(weights.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()


def bigrams(ids: NDArray[np.int64], vocabulary: int, tokenizer: str = "") -> Tables:
    """Tables counted from a text without any model: the share of each next token. tokenizer: its digest."""
    counted = Means(vocabulary)
    counted.add(ids[:-1], Fresh(ids[1:, None], np.ones((len(ids) - 1, 1), np.float32)))
    return counted.tables(tokenizer)


def initial_tables(
    lm: CausalLM, small: CausalLM | None, documents: NDArray[np.int64], tasks: NDArray[np.int64],
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Tables]:  # fmt: skip
    """Figure 9's tables: of the model on two texts, of a smaller model of the same vocabulary, of no model, cold."""
    name = digest(tokenizer)
    found = {"documents": warmed(lm, documents, tokenizer), "task text": warmed(lm, tasks, tokenizer)}
    if small is not None:
        found["documents, smaller model"] = warmed(small, documents, tokenizer)
    found["documents, bigrams counted"] = bigrams(documents, lm.vocabulary, name)
    found["cold"] = Tables.empty(lm.vocabulary, tokenizer=name)
    return found


# Drafters


def methods(
    lm: CausalLM, small: CausalLM | None, tables: Tables, corpus_ids: NDArray[np.int64], cost: VerifyCost,
    end: int | None, budget: int = BUDGET,
) -> list[Competitor]:  # fmt: skip
    """All methods of Tables 1 and 2, each with the settings of its paper, and transformers' own.

    small: a smaller model of the same vocabulary; None leaves out SpS and assisted generation. tables: warmed up;
    DIAA gets a copy in every round. corpus_ids: SAM-D's static corpus, for a fair comparison DIAA's warm-up text; its
    sequences are closed by `end`. cost: T(n), for the extended method.
    SWIFT is left out where a model has no layer to skip.
    """
    static = automaton(sequences(corpus_ids, end))  # takes long to build, and is only read
    found: list[Competitor] = [
        PLAIN,
        Method("PLD", PromptLookup.original),
        Method("PLD, transformers' rules", PromptLookup.transformers),
        Method("SAM-D", lambda: SamDecoding(static)),
        Method("SAM[TR]", lambda: SamDecoding(static, TokenRecycling(lm.vocabulary)), RECYCLED),
        Method("TR", lambda: TokenRecycling(lm.vocabulary), RECYCLED),
        diaa("DIAA", tables, budget),
        extended("DIAA, extended", tables, cost),
        Peer("generate", plain_generate),
        Peer("generate, prompt lookup", peers.prompt_lookup),
    ]
    if lm.layers > 2:
        found.insert(3, Method("SWIFT", lambda: LayerSkipping(lm, branches=lm.tree_refusal is None)))
    if small is not None:
        found.insert(3, Method("SpS", lambda: SmallModel(small, schedule="heuristic")))
        found.append(Peer("generate, assistant", partial(_assisted, small)))
    return found


def diaa(
    name: str, tables: Tables, budget: int, *, dynamic: bool = True, overlap: bool = False, refresh: int = 1
) -> Method:
    """DIAA on a copy of the tables. dynamic: whether a tree is grown; else Token Recycling's, cut to the budget."""
    template = None if dynamic else RECYCLING
    return Method(
        name, lambda: Diaa(tables.copy(), template=template, overlap=overlap, refresh=refresh, name=name), budget
    )


def extended(
    name: str, tables: Tables, cost: VerifyCost | None, budget: int = LARGEST, *,
    rule: Literal["ratio", "rate"] = "ratio", calibrated: bool = True, suffixes: bool = True,
) -> Method:  # fmt: skip
    """The extended method on a copy of the tables. cost: None drafts as many nodes as the budget allows."""

    def make() -> Drafter:
        sizing = Sizing(cost, rule) if cost else None
        return Extended(tables.copy(), calibrated=calibrated, sizing=sizing, suffixes=suffixes, name=name)

    return Method(name, make, budget)


def sequences(ids: NDArray[np.int64], end: int | None) -> list[list[int]]:
    """A text cut after every end token, which stays; None: one sequence."""
    if end is None:
        return [ids.tolist()]
    cut = np.split(ids, np.flatnonzero(ids == end) + 1)
    return [part.tolist() for part in cut if len(part)]


def _assisted(
    small: CausalLM, lm: CausalLM, prompt: Sequence[int], limit: int, *, ends: Collection[int] = ()
) -> Generation:
    return peers.assisted(lm, small.model, prompt, limit, ends=ends)


# Comparisons


def ablation(setting: Setting, tables: Tables, budget: int = BUDGET) -> pd.DataFrame:
    """Table 3, `runs`: without warmed tables (LUT), without a grown tree (DT), without both, without overlap (CO).

    As in the paper, all but the last work with overlap; elsewhere `DIAA` is the last, which is faster on a CPU.
    """
    cold = Tables.empty(tables.vocabulary, tables.k, tables.tokenizer)
    return setting.runs([
        diaa(OVERLAPPED, tables, budget, overlap=True),
        diaa("w/o LUT", cold, budget, overlap=True),
        diaa("w/o DT", tables, budget, dynamic=False, overlap=True),
        diaa("w/o LUT+DT", cold, budget, dynamic=False, overlap=True),
        diaa("w/o CO", tables, budget),
    ])  # fmt: skip


def without(runs: pd.DataFrame, full: str = OVERLAPPED) -> pd.DataFrame:
    """An ablation's goodput over the full method's, paired as in `speedups`: model, variant, task, ratio, low, high."""
    table = speedups(runs, over=full).rename(columns={"method": "variant", "speedup": "ratio"})
    return table[~table["variant"].isin([full, VANILLA])].reset_index(drop=True)


def extended_ablation(setting: Setting, tables: Tables, cost: VerifyCost, budget: int = BUDGET) -> pd.DataFrame:
    """`runs` of the extended method without each of its parts. budget: nodes where the size is fixed."""
    return setting.runs([
        diaa("DIAA", tables, budget),
        extended("DIAA, extended", tables, cost),
        extended("w/o calibration", tables, cost, calibrated=False),
        extended("w/o sizing", tables, None, budget),
        extended("w/o suffixes", tables, cost, suffixes=False),
        extended("sized by the rate", tables, cost, rule="rate"),
    ])  # fmt: skip


def static_against_dynamic(setting: Setting, tables: Tables, sizes: Sequence[int]) -> pd.DataFrame:
    """Figures 3 and 4: `by_task` and `speedups` of both kinds of tree at each size, beside columns tree and size.

    size: nodes. static: Token Recycling's template cut to the size, with the same tables.
    """
    kinds = {f"{tree}, {size} nodes": (tree, size) for size in sizes for tree in ("static", "dynamic")}
    compared = [diaa(name, tables, size, dynamic=tree == "dynamic") for name, (tree, size) in kinds.items()]
    return _settled(summary(setting.runs(compared)), kinds, ["tree", "size"])


def size_and_refresh(setting: Setting, tables: Tables, sizes: Sequence[int], intervals: Sequence[int]) -> pd.DataFrame:
    """Figure 8: `by_task` and `speedups` at each size (nodes) and interval N (steps) of growing it anew."""
    kinds = {f"{size} nodes, N = {every}": (size, every) for size in sizes for every in intervals}
    compared = [diaa(name, tables, size, refresh=every) for name, (size, every) in kinds.items()]
    return _settled(summary(setting.runs(compared)), kinds, ["size", "interval"])


def initialised(setting: Setting, initial: Mapping[str, Tables], budget: int = BUDGET) -> pd.DataFrame:
    """Figure 9: `goodputs` and the rest of `by_task` of DIAA begun with different tables.

    Columns first: tables (name), filled (share of rows). low, high: of the goodput.
    """
    kinds = {f"DIAA, {name}": (name, tables.filled) for name, tables in initial.items()}
    compared = [diaa(f"DIAA, {name}", tables, budget) for name, tables in initial.items()]
    runs = setting.runs(compared)
    rest = by_task(runs).drop(columns="goodput_tokens_per_s")
    table = goodputs(runs).merge(rest, on=["model", "method", "task"], validate="one_to_one")
    return _settled(table, kinds, ["tables", "filled"])


def breakdown(runs: pd.DataFrame, method: str = "w/o CO") -> pd.DataFrame:
    """Figure 10: model, part, seconds, share of the decoding time of all tasks. By default of DIAA without overlap.

    Parts: forward; tree (growing it); tables (their update; with overlap it would run beside the forward); choose
    (comparing the model's choices with the tree); keep (the accepted path's cache rows); rest (the loop itself).
    Raises ValueError where the method has no runs.
    """
    mine = runs[runs["method"] == method]
    if mine.empty:
        raise ValueError(f"There are no runs of {method!r}.")
    columns = {"forward": "forward_s", "tree": "draft_s", "tables": "observe_s", "choose": "choose_s", "keep": "keep_s"}
    sums = mine.groupby("model", sort=False)[["decode_s", *columns.values()]].sum()
    parts = pd.DataFrame({part: sums[column] for part, column in columns.items()})
    parts["rest"] = sums["decode_s"] - parts.sum(axis=1)
    long = parts.reset_index().melt("model", var_name="part", value_name="seconds")
    return long.assign(share=long["seconds"] / long["model"].map(sums["decode_s"]))


def summary(runs: pd.DataFrame) -> pd.DataFrame:
    """`by_task` and `speedups` in one table."""
    return by_task(runs).merge(speedups(runs), on=["model", "method", "task"], validate="one_to_one")


def _settled(table: pd.DataFrame, kinds: Mapping[str, tuple[object, object]], names: Sequence[str]) -> pd.DataFrame:
    """The rows of these methods, with what each was set to in columns of its own."""
    mine = table[table["method"].isin(list(kinds))].reset_index(drop=True)
    settings = pd.DataFrame([kinds[method] for method in mine["method"]], columns=list(names))
    return pd.concat([settings, mine], axis=1)


# Confidence


class _Witness(Extended):
    """The extended method on tables alone, which notes what was said of every node that was verified."""

    def __init__(self, tables: Tables) -> None:
        super().__init__(tables, suffixes=False)
        self.notes: list[tuple[float, float, bool]] = []

    def observe(self, step: Verified) -> None:
        if self._drafted and self._drafted[0] is step.draft:
            mixed, right = self._drafted[1], set(step.path)
            said: list[float] = []
            for node, (parent, share) in enumerate(zip(mixed.parents, mixed.said, strict=True)):
                said.append(share if parent < 0 else said[parent] * share)
                self.notes.append((said[node], mixed.chances[node], node in right))
        super().observe(step)


def confidence(setting: Setting, tables: Tables, budget: int = BUDGET) -> pd.DataFrame:
    """What was said of each verified node, and what became of it: model, task, prompt, tables, calibrated, accepted.

    tables: the product of the tables' probabilities on its path. calibrated: the same after calibration, which is what
    the tree was grown by. accepted: whether all of its path was.
    """
    witness = _Witness(tables.copy())
    decode = Method("witness", lambda: witness, budget).fresh()
    for request in setting.prime:
        decode(setting.lm, request.ids, request.limit, ends=request.ends)
    rows: list[tuple[object, ...]] = []
    for request in setting.requests:
        witness.notes = []
        decode(setting.lm, request.ids, request.limit, ends=request.ends)
        rows += [(setting.model, request.task, request.prompt, *note) for note in witness.notes]
    return pd.DataFrame(rows, columns=["model", "task", "prompt", "tables", "calibrated", "accepted"])


def reliability(nodes: pd.DataFrame, bins: int = 10) -> pd.DataFrame:
    """Said against seen, in equal parts of [0, 1]: model, probability, low, high, nodes, said, accepted.

    probability: `tables` or `calibrated`. said: its mean. accepted: the share of the nodes. Empty parts have no row.
    """
    parts = []
    for kind in ("tables", "calibrated"):
        place = np.minimum((nodes[kind] * bins).astype(int), bins - 1)
        groups = nodes.assign(place=place).groupby(["model", "place"])
        table = groups.agg(nodes=(kind, "size"), said=(kind, "mean"), accepted=("accepted", "mean")).reset_index()
        table.insert(1, "probability", kind)
        table.insert(2, "low", table["place"] / bins)
        table.insert(3, "high", (table.pop("place") + 1) / bins)
        parts.append(table)
    return pd.concat(parts, ignore_index=True)


def correlations(nodes: pd.DataFrame) -> pd.DataFrame:
    """Pearson's r of what was said and what was accepted, over nodes: model, probability, r, brier.

    brier: mean square of their difference; what is right on average and sharp has a small one.
    """
    rows = []
    for model, mine in nodes.groupby("model", sort=False):
        for kind in ("tables", "calibrated"):
            accepted = mine["accepted"].astype(float)
            rows.append((model, kind, mine[kind].corr(accepted), ((mine[kind] - accepted) ** 2).mean()))
    return pd.DataFrame(rows, columns=["model", "probability", "r", "brier"])

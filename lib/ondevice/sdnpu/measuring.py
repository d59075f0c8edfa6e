"""Requests, methods run on them one after the other and timed, and what the tables say: one row a request.

Times are of decoding, after the first token, as speculation changes nothing before it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd
from tqdm import tqdm

from ondevice import corpus, models
from ondevice.causal_lm.generation import LONGEST
from ondevice.speculation.draft import Draft
from ondevice.speculation.drafter import Drafter, Verified
from ondevice.speculation.loop import BUDGET, Generation, generate, greedy
from ondevice.speculation.request_set import Request, answered, spread
from ondevice.speculation.verify_cost import verifications

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ondevice.causal_lm import CausalLM

VANILLA = "vanilla"
AVERAGE = "average"  # of the tasks
_DRAWS = 2000  # of the bootstrap


# The requests


def requests(
    families: Sequence[str], count: int, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[corpus.Document], longest: int = LONGEST,
) -> list[Request]:  # fmt: skip
    """For every family `count` requests that are long enough to be timed, and the shorter ones that came before them.

    documents: one split, `corpus.documents("test")`; to prime drafters, "validation". model: in float32, whose greedy
    answers hardly depend on the machine. longest: most tokens of an answer. A family may have fewer such requests.
    Raises ValueError on random weights, an unknown family, and a count below one.
    """
    models.require_trained(model, "the answers to requests")
    if count < 1:
        raise ValueError(f"At least one request a family is needed, not {count}.")
    room = int(model.config.max_position_embeddings) - longest
    groups: dict[str, list[corpus.Task]] = {family: [] for family in families}
    for task in corpus.tasks(documents, list(families)):
        groups[task.family].append(task)
    end = tokenizer.eos_token_id
    found: list[Request] = []
    for family in tqdm(families, desc="answers", unit="task", delay=5, leave=False):
        found += answered(family, _prompts(spread(groups[family]), tokenizer, room), count, model, end, longest)
    return found


def _prompts(
    tasks: Iterable[corpus.Task], tokenizer: PreTrainedTokenizerBase, room: int
) -> Iterator[tuple[str, list[int]]]:
    """Names and ids of the prompts of at most `room` tokens; encoded only as far as they are asked for."""
    for task in tasks:
        ids = tokenizer(task.prompt, verbose=False)["input_ids"]
        if len(ids) <= room:
            yield task.name, ids


# The runs


@dataclass(frozen=True)
class Method:
    """make: gives a new drafter. budget: most nodes a draft."""

    name: str
    make: Callable[[], Drafter]
    budget: int = BUDGET


PLAIN = Method(VANILLA, Drafter, 1)


class Clocked(Drafter):
    """A drafter, timed: what it takes itself, and when the loop reaches the first token and the last."""

    _began = _first = _ended = 0.0

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.name, self.vocabulary = drafter, drafter.name, drafter.vocabulary
        self.wants_prefill, self.drafts_trees = drafter.wants_prefill, drafter.drafts_trees

    @property
    def forwards(self) -> int:  # type: ignore[override]
        """Of the drafter."""
        return self.drafter.forwards

    @property
    def prefill_s(self) -> float:
        """Until the first token was chosen."""
        return self._first - self._began

    @property
    def decode_s(self) -> float:
        """From there to the last."""
        return self._ended - self._first

    def choice(self, logits: Tensor) -> int:
        """Greedy, noting when the first token was chosen."""
        token = greedy(logits)
        self._first = self._first or perf_counter()
        return token

    def begin(self, prompt: Sequence[int]) -> None:
        """Begin the drafter's and the clock's request."""
        self._began, self._draft = perf_counter(), 0.0
        self._first = 0.0
        self.draft_s: list[float] = []
        self.observe_s: list[float] = []
        self.drafter.begin(prompt)

    def prefilled(self, start: int, logits: Tensor) -> None:
        """Of the drafter."""
        self.drafter.prefilled(start, logits)

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """Timed."""
        started = perf_counter()
        draft = self.drafter.propose(tokens, budget)
        self._draft = perf_counter() - started
        return draft

    def observe(self, step: Verified) -> None:
        """Timed."""
        started = perf_counter()
        self.drafter.observe(step)
        self.observe_s.append(perf_counter() - started)
        self.draft_s.append(self._draft)
        self._draft = 0.0

    def end(self, tokens: Sequence[int]) -> None:
        """Stop the clock."""
        self._ended = perf_counter()
        self.drafter.end(tokens)


@dataclass(frozen=True)
class Measured:
    """What one method gave for one request in one round. plain: vanilla's tokens, in the same round and dtype.

    draft_s, observe_s: seconds of the drafter in each step.
    """

    method: str
    request: Request
    round: int
    found: Generation
    plain: Sequence[int]
    prefill_s: float = 0.0
    decode_s: float = 0.0
    draft_s: Sequence[float] = field(default=(), repr=False)
    observe_s: Sequence[float] = field(default=(), repr=False)

    @property
    def identical(self) -> bool:
        """Whether all tokens are vanilla's."""
        return list(self.found.tokens) == list(self.plain)


def measure(lm: CausalLM, methods: Sequence[Method], requests: Sequence[Request], rounds: int = 1) -> list[Measured]:
    """Decode every request by every method, one method after the other, in an order that rotates with each request.

    In every round each method has a new drafter, so none has seen the answers of an earlier round. Garbage is
    collected between requests only. Raises ValueError where vanilla is not among the methods, or two have one name.
    """
    names = [method.name for method in methods]
    if VANILLA not in names or len(set(names)) < len(names) or rounds < 1:
        raise ValueError(f"Methods have different names, one is {VANILLA!r}, and there is a round: {names}, {rounds}.")
    measured: list[Measured] = []
    collecting = gc.isenabled()
    gc.disable()
    try:
        for number in range(rounds):
            clocks = {method.name: Clocked(method.make()) for method in methods}
            for place, request in enumerate(tqdm(requests, desc="requests", delay=5, leave=False)):
                gc.collect()
                turn = (place + number) % len(methods)
                found: dict[str, Measured] = {}
                for method in [*methods[turn:], *methods[:turn]]:
                    clock = clocks[method.name]
                    said = generate(lm, clock, request.ids, request.limit, budget=method.budget, choice=clock.choice,
                                    ends=request.ends)  # fmt: skip
                    found[method.name] = Measured(method.name, request, number, said, (), clock.prefill_s,
                                                  clock.decode_s, clock.draft_s, clock.observe_s)  # fmt: skip
                plain = found[VANILLA].found.tokens
                measured += [Measured(**{**vars(found[name]), "plain": plain}) for name in names]
    finally:
        if collecting:
            gc.enable()
    return measured


class VerifyCost(NamedTuple):
    """Seconds of a forward over so many rows, the root and the nodes."""

    sizes: Sequence[int]
    seconds: Sequence[float]


def verify_cost(lm: CausalLM, length: int, sizes: Iterable[int], repeats: int = 11) -> VerifyCost:
    """Time the verification of trees of `sizes` rows (medians) behind `length` tokens. Their ids do not matter.

    Sizes take turns, so that whatever slows the machine for a while does so to all.
    """
    found = sorted(set(sizes))
    turn = verifications(lm, length, found)
    turns = [turn() for _ in range(repeats)]
    return VerifyCost(found, [median(spent) for spent in zip(*turns, strict=True)])


# The tables


def runs(measured: Iterable[Measured], model: str) -> pd.DataFrame:
    """One row a request, method and round.

    model, method, task, prompt, round; tokens (the first included), steps (verifications after the prefill), drafted,
    accepted; prefill_s, decode_s (wall time after the first token), and of it draft_s and observe_s; identical.
    """
    return pd.DataFrame([
        {
            "model": model, "method": one.method, "task": one.request.task, "prompt": one.request.prompt,
            "round": one.round, "tokens": len(one.found.tokens), "steps": len(one.found.steps),
            "drafted": sum(step.drafted for step in one.found.steps),
            "accepted": sum(step.accepted for step in one.found.steps),
            "prefill_s": one.prefill_s, "decode_s": one.decode_s, "draft_s": sum(one.draft_s),
            "observe_s": sum(one.observe_s), "identical": one.identical,
        } for one in measured
    ])  # fmt: skip


def steps(measured: Iterable[Measured], model: str) -> pd.DataFrame:
    """One row a verification: model, method, task, prompt, round, the columns of `Step`, draft_s, observe_s."""
    return pd.DataFrame([
        {
            "model": model, "method": one.method, "task": one.request.task, "prompt": one.request.prompt,
            "round": one.round, **asdict(step), "draft_s": draft_s, "observe_s": observe_s,
        }
        for one in measured
        for step, draft_s, observe_s in zip(one.found.steps, one.draft_s, one.observe_s, strict=True)
    ])  # fmt: skip


def by_task(runs: pd.DataFrame) -> pd.DataFrame:
    """model, method, task, tokens_per_step (the model's own token included), acceptance_rate: sums over sums.

    Rows with the task `average` hold the plain means over the tasks.
    """
    keys = ["model", "method", "task"]
    groups = runs.assign(decoded=runs["tokens"] - 1).groupby(keys, sort=False)
    sums = groups[["decoded", "steps", "drafted", "accepted"]].sum()
    table = pd.DataFrame({
        "tokens_per_step": sums["decoded"] / sums["steps"], "acceptance_rate": sums["accepted"] / sums["drafted"],
    })  # fmt: skip
    parts = []
    for (model, method), group in table.groupby(["model", "method"], sort=False):
        mean = {"model": model, "method": method, "task": AVERAGE, **group.mean()}
        parts += [group.reset_index(), pd.DataFrame([mean])]
    return pd.concat(parts, ignore_index=True)


def speedups(runs: pd.DataFrame, seed: int = 0) -> pd.DataFrame:
    """Vanilla's seconds a token over the method's: model, method, task, speedup, low, high.

    Paired by prompt and round. Per prompt the median over the rounds, per task the geometric mean over its prompts; the
    task `average` is the arithmetic mean over the tasks. low, high: 95 % of a bootstrap over the prompts of each task.
    Raises ValueError where vanilla has no run of a request in the same round, or no token after the first.
    """
    keys = ["model", "task", "prompt", "round"]
    seconds = runs["decode_s"] / (runs["tokens"] - 1).where(runs["tokens"] > 1)
    timed = runs[["method", *keys]].assign(seconds=seconds)
    base = timed[timed["method"] == VANILLA].set_index(keys)["seconds"].rename("base")
    paired = timed.join(base, on=keys)
    if paired[["base", "seconds"]].isna().any(axis=None):
        raise ValueError(f"A ratio needs a run of {VANILLA!r} of the same model, prompt and round, and a second token.")
    paired["log"] = np.log(paired["base"] / paired["seconds"])
    prompts = paired.groupby(["model", "method", "task", "prompt"], sort=False)["log"].median()
    rows = []
    for (model, method), mine in prompts.groupby(["model", "method"], sort=False):
        random = np.random.default_rng(seed)  # anew, so that methods are compared on the same draws of prompts
        values, draws = {}, {}
        for task, group in mine.groupby("task", sort=False):
            logs = group.to_numpy()
            values[task] = float(np.exp(logs.mean()))
            draws[task] = np.exp(logs[random.integers(0, len(logs), (_DRAWS, len(logs)))].mean(axis=1))
        values[AVERAGE] = float(np.mean(list(values.values())))
        draws[AVERAGE] = np.mean(list(draws.values()), axis=0)
        rows += [(model, method, task, values[task], *np.quantile(draws[task], [0.025, 0.975])) for task in values]
    return pd.DataFrame(rows, columns=["model", "method", "task", "speedup", "low", "high"])

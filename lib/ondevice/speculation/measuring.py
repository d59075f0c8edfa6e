"""Measuring methods against each other: interleaved runs, one row a request, and what tables say of them.

Times are of decoding, after the first token, as speculation changes nothing before it; `prefill=True` counts the
prompt's time too, as an answer's end-to-end latency does.
"""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from ondevice.speculation.drafter import Drafter
from ondevice.speculation.log import Generation, Step
from ondevice.speculation.loop import BUDGET, generate
from ondevice.speculation.peers import own_config
from ondevice.speculation.request_set import Request

if TYPE_CHECKING:
    from ondevice.causal_lm import CausalLM

VANILLA = "vanilla"
AVERAGE = "average"  # of the tasks
_PARTS = ("forward_s", "draft_s", "choose_s", "keep_s", "observe_s")
_COUNTS = ("drafted", "accepted")
_DRAWS = 2000  # of the bootstrap


class Decode(Protocol):
    """Continues a prompt greedily by at most `limit` tokens."""

    def __call__(
        self, lm: CausalLM, prompt: Sequence[int], limit: int, *, ends: Collection[int] = ()
    ) -> Generation: ...


class Cost(Protocol):
    """What verification costs, as `ondevice.diaa.budget.VerifyCost`."""

    def steps(self, budget: int) -> NDArray[np.float64]:
        """[1 + budget] seconds of a step with 0, 1 .. budget nodes."""
        ...


class Competitor(Protocol):
    """What is measured: a name, and a decoder that knows of no earlier round."""

    @property
    def name(self) -> str: ...

    def fresh(self) -> Decode: ...


@dataclass(frozen=True)
class Method:
    """A drafter in our own loop. make: gives a new drafter. budget: most nodes a draft."""

    name: str
    make: Callable[[], Drafter]
    budget: int = BUDGET

    def fresh(self) -> Decode:
        """A decoder with a new drafter, which serves one round of requests."""
        return functools.partial(_drafted, self.make(), self.budget)


@dataclass(frozen=True)
class Peer:
    """Somebody else's loop, which keeps nothing between requests."""

    name: str
    decode: Decode

    def fresh(self) -> Decode:
        """The decoder itself."""
        return self.decode


PLAIN = Method(VANILLA, Drafter, 1)  # in our own loop, without a draft


@dataclass(frozen=True)
class Measured:
    """What one method gave for one request in one round. plain: vanilla's tokens, in the same round and dtype."""

    method: str
    request: Request
    round: int
    found: Generation
    plain: Sequence[int]

    @property
    def agreed(self) -> int:
        """Tokens before the first that differs from vanilla's."""
        pairs = zip(self.found.tokens, self.plain, strict=False)
        shorter = min(len(self.found.tokens), len(self.plain))
        return next((place for place, (mine, theirs) in enumerate(pairs) if mine != theirs), shorter)

    @property
    def identical(self) -> bool:
        """Whether all tokens are vanilla's."""
        return list(self.found.tokens) == list(self.plain)


def measure(
    lm: CausalLM, methods: Sequence[Competitor], requests: Sequence[Request], rounds: int = 1,
    prime: Sequence[Request] = (),
) -> list[Measured]:  # fmt: skip
    """Decode every request by every method, one method after the other, in an order that rotates with each request.

    In every round each method has a new drafter, so none has seen the answers of an earlier round. All are primed by
    the same requests `prime`, of which nothing is kept. Garbage is collected between requests only.
    Raises ValueError where vanilla is not among the methods, or two have one name.
    """
    names = [method.name for method in methods]
    if VANILLA not in names or len(set(names)) < len(names):
        raise ValueError(f"Methods have different names, and one is {VANILLA!r}; not {', '.join(names)}.")
    if rounds < 1:
        raise ValueError(f"There is at least one round, not {rounds}.")
    found: list[Measured] = []
    total = rounds * (len(prime) + len(requests)) * len(methods)
    with _no_collection(), tqdm(total=total, desc="requests x methods", delay=5, leave=False) as bar:
        for number in range(rounds):
            decoders = {method.name: method.fresh() for method in methods}
            for place, request in enumerate([*prime, *requests]):
                gc.collect()
                said: dict[str, Generation] = {}
                for name in rotated(names, place - len(prime) + number):
                    said[name] = decoders[name](lm, request.ids, request.limit, ends=request.ends)
                    bar.update()
                if place >= len(prime):
                    plain = said[VANILLA].tokens
                    found += [Measured(name, request, number, said[name], plain) for name in names]
    return found


def run(
    lm: CausalLM, methods: Sequence[Competitor], requests: Sequence[Request], rounds: int = 1,
    prime: Sequence[Request] = (), model: str = "",
) -> pd.DataFrame:  # fmt: skip
    """`runs` of `measure`. model: its name in the table."""
    return runs(measure(lm, methods, requests, rounds, prime), model)


def rotated(names: Sequence[str], turns: int) -> list[str]:
    """The names, the first `turns` of them (round and round) moved to the end."""
    start = turns % len(names)
    return [*names[start:], *names[:start]]


def runs(measured: Iterable[Measured], model: str) -> pd.DataFrame:
    """One row a request, method and round.

    model, method, task, prompt, round; tokens (the first included), steps (verifications after the prefill), drafted,
    accepted; prefill_s, decode_s (wall time after the first token), and of it, summed over the steps, forward_s,
    draft_s, choose_s, keep_s, observe_s; identical, agreed: against vanilla's tokens.
    """
    rows = []
    for one in measured:
        steps = one.found.steps
        counts = {name: sum(getattr(step, name) for step in steps) for name in _COUNTS}
        parts = {name: math.fsum(getattr(step, name) for step in steps) for name in _PARTS}
        rows.append({
            "model": model, "method": one.method, "task": one.request.task, "prompt": one.request.prompt,
            "round": one.round, "tokens": len(one.found.tokens), "steps": len(steps), **counts,
            "prefill_s": one.found.prefill_s, "decode_s": one.found.decode_s, **parts,
            "identical": one.identical, "agreed": one.agreed,
        })  # fmt: skip
    return pd.DataFrame(rows)


def steps(measured: Iterable[Measured], model: str) -> pd.DataFrame:
    """One row a verification: model, method, task, prompt, round, and the columns of `Step`."""
    parts = []
    for one in measured:
        table = one.found.table()
        keys: dict[str, str | int] = {
            "model": model, "method": one.method, "task": one.request.task, "prompt": one.request.prompt,
            "round": one.round,
        }  # fmt: skip
        for place, (name, value) in enumerate(keys.items()):
            table.insert(place, name, value)
        parts += [table] if len(table) else []
    return pd.concat(parts, ignore_index=True)


def by_task(runs: pd.DataFrame, prefill: bool = False) -> pd.DataFrame:
    """Table 1's numbers: model, method, task and

    goodput_tokens_per_s, latency_ms_per_token: means over the requests, so one is not the inverse of the other;
    tokens_per_step (the model's own token included), acceptance_rate (NaN where nothing was drafted): sums over sums.
    Rows with the task `average` hold the plain means over the tasks.
    """
    seconds = _per_token(runs, prefill)
    keys = ["model", "method", "task"]
    timed = runs[keys].assign(goodput_tokens_per_s=1 / seconds, latency_ms_per_token=1e3 * seconds)
    table = timed.groupby(keys, sort=False).mean()
    sums = _sums(runs)
    table["tokens_per_step"] = sums["decoded"] / sums["steps"]
    table["acceptance_rate"] = sums["accepted"] / sums["drafted"]
    return _with_average(table.reset_index())


def speedups(runs: pd.DataFrame, prefill: bool = False, over: str = VANILLA, seed: int = 0) -> pd.DataFrame:
    """Vanilla's seconds a token over the method's: model, method, task, speedup, low, high.

    Paired by prompt and round. Per prompt the median over the rounds, per task the geometric mean over its prompts; the
    task `average` is the arithmetic mean over the tasks. low, high: 95 % of a bootstrap over the prompts of each task.
    over: another method in vanilla's place.
    Raises ValueError where that has no run of a request in the same round, or no token after the first.
    """
    keys = ["model", "task", "prompt", "round"]
    timed = runs[["method", *keys]].assign(seconds=_per_token(runs, prefill))
    base = timed[timed["method"] == over].set_index(keys)["seconds"].rename("base")
    paired = timed.join(base, on=keys)
    if paired[["base", "seconds"]].isna().any(axis=None):
        raise ValueError(f"A ratio needs a run of {over!r} of the same model, prompt and round, and a second token.")
    paired["log"] = np.log(paired["base"] / paired["seconds"])
    prompts = paired.groupby(["model", "method", "task", "prompt"], sort=False)["log"].median()
    return _intervals(prompts, "speedup", np.exp, seed)


def goodputs(runs: pd.DataFrame, prefill: bool = False, seed: int = 0) -> pd.DataFrame:
    """`by_task`'s goodput with 95 % of a bootstrap over prompts: model, method, task, goodput_tokens_per_s, low, high.

    Absolute, so that it holds what the machine did meanwhile: to compare methods, take `speedups`.
    """
    keys = ["model", "method", "task", "prompt"]
    timed = runs[keys].assign(goodput=1 / _per_token(runs, prefill))
    prompts = timed.groupby(keys, sort=False)["goodput"].mean()
    return _intervals(prompts, "goodput_tokens_per_s", np.positive, seed)


def bound(runs: pd.DataFrame, costs: Mapping[str, Cost]) -> pd.DataFrame:
    """What is lost to all but verification: model, method, task, reached, possible, share.

    reached: the speed-up. possible: tokens a step * T(1) / T(mean rows a step), where drafting and choosing take no
    time. share: reached over possible. The task `average` takes the means of both over the tasks.
    costs: T by model.
    """
    sums = _sums(runs)
    nodes = sums["drafted"] / sums["steps"]
    slower = [_relative(costs[model], mean) for model, mean in zip(nodes.index.get_level_values(0), nodes, strict=True)]
    sums["possible"] = sums["decoded"] / sums["steps"] / slower
    reached = speedups(runs).rename(columns={"speedup": "reached"})[["model", "method", "task", "reached"]]
    possible = _with_average(sums["possible"].reset_index())
    table = reached.merge(possible, on=["model", "method", "task"], validate="one_to_one")
    return table.assign(share=table["reached"] / table["possible"])


def plain_generate(lm: CausalLM, prompt: Sequence[int], limit: int, *, ends: Collection[int] = ()) -> Generation:
    """transformers' greedy `generate` without a draft, by its code.

    A step is a forward and what follows until its token is chosen (`choose_s`).
    """
    model: Any = lm.model
    ids = torch.tensor([list(map(int, prompt))], device=model.device)
    clock, forwards = _Clock(), _Forwards()
    with own_config(model, ends), forwards.timed(model):
        started = perf_counter()
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False, streamer=clock
        )
        finished = perf_counter()
    tokens = found[0, len(prompt) :].tolist()
    gaps = np.diff(clock.times[: len(tokens)]).tolist()
    logged = [
        Step(0, 0, 1, 0, 0, len(prompt) + place, 0.0, forward, gap - forward, 0.0, 0.0)
        for place, (gap, forward) in enumerate(zip(gaps, forwards.seconds[1:], strict=False))
    ]
    first = clock.times[0]
    return Generation(len(prompt), tokens, tokens[-1] in ends, first - started, finished - first, logged)


class _Clock:
    """A streamer that notes when each token was chosen; `generate` first hands it the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._prompted = False

    def put(self, value: object) -> None:
        if self._prompted:
            self.times.append(perf_counter())
        self._prompted = True

    def end(self) -> None:
        """Nothing is held back."""


@dataclass
class _Forwards:
    """Seconds of each forward, the prompt's first."""

    seconds: list[float] = field(default_factory=list)

    @contextmanager
    def timed(self, model: Any) -> Iterator[None]:
        """Note the model's forwards inside."""
        own, forward = model.__dict__.get("forward"), model.forward

        @functools.wraps(forward)  # generate reads the signature
        def noted(*args: Any, **kwargs: Any) -> Any:
            started = perf_counter()
            found = forward(*args, **kwargs)
            if found.logits.is_cuda:
                torch.cuda.synchronize(found.logits.device)
            self.seconds.append(perf_counter() - started)
            return found

        model.__dict__["forward"] = noted
        try:
            yield
        finally:
            model.__dict__.pop("forward")
            if own is not None:
                model.__dict__["forward"] = own


def _drafted(
    drafter: Drafter, budget: int, lm: CausalLM, prompt: Sequence[int], limit: int, *, ends: Collection[int] = ()
) -> Generation:
    return generate(lm, drafter, prompt, limit, budget=budget, ends=ends)


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection but what is called for."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def _per_token(runs: pd.DataFrame, prefill: bool) -> pd.Series:
    """Seconds a token, of each row; NaN where only the prefill's token came and its time does not count."""
    if prefill:
        return (runs["prefill_s"] + runs["decode_s"]) / runs["tokens"]
    return runs["decode_s"] / (runs["tokens"] - 1).where(runs["tokens"] > 1)


def _sums(runs: pd.DataFrame) -> pd.DataFrame:
    """Of every model, method and task: decoded (tokens after the first), steps, drafted, accepted."""
    counted = runs.assign(decoded=runs["tokens"] - 1)
    columns = ["decoded", "steps", "drafted", "accepted"]
    return counted.groupby(["model", "method", "task"], sort=False)[columns].sum()


def _intervals(prompts: pd.Series, name: str, of: Callable[..., Any], seed: int) -> pd.DataFrame:
    """model, method, task, `name`, low, high: `of` the mean over a task's prompts, and the mean of that over the tasks.

    prompts: a value for each (model, method, task, prompt).
    """
    rows = []
    for (model, method), mine in prompts.groupby(["model", "method"], sort=False):
        random = np.random.default_rng(seed)  # anew, so that methods are compared on the same draws of prompts
        values, draws = {}, {}
        for task, group in mine.groupby("task", sort=False):
            found = group.to_numpy()
            values[task] = float(of(found.mean()))
            draws[task] = of(found[random.integers(0, len(found), (_DRAWS, len(found)))].mean(axis=1))
        values[AVERAGE] = float(np.mean(list(values.values())))
        draws[AVERAGE] = np.mean(list(draws.values()), axis=0)
        for task, value in values.items():
            rows.append((model, method, task, value, *np.quantile(draws[task], [0.025, 0.975])))
    return pd.DataFrame(rows, columns=["model", "method", "task", name, "low", "high"])


def _with_average(table: pd.DataFrame) -> pd.DataFrame:
    """The table, and below each method's tasks their mean."""
    parts = []
    for (model, method), group in table.groupby(["model", "method"], sort=False):
        mean = group.drop(columns=["model", "method", "task"]).mean()
        keys = {"model": model, "method": method, "task": AVERAGE}
        parts += [group, pd.DataFrame([keys | mean.to_dict()])]
    return pd.concat(parts, ignore_index=True)


def _relative(cost: Cost, nodes: float) -> float:
    """T(1 + nodes) / T(1)."""
    seconds = cost.steps(math.ceil(nodes))
    return float(np.interp(nodes, np.arange(len(seconds)), seconds) / seconds[0])

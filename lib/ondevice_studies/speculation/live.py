"""What a notebook's first part computes while one watches: plain answers, and drafters that are led along them.

A prompt is read once, and every drafter that answers it begins with a copy of its rows (`AfterPrompt`). An answer is
decoded once, and the logits behind each of its tokens are kept. A drafter that is *led* along it drafts at every token,
and counts what the answer would have accepted. No model runs then, so an experiment takes a second. Two things differ
from decoding: there a draft begins only where the last one ended, and rejected nodes teach the drafter, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ondevice import evidence
from ondevice.causal_lm import CausalLM
from ondevice.causal_lm.loops import loop_start
from ondevice.run.edits import compared
from ondevice.speculation.draft import EMPTY, Draft
from ondevice.speculation.drafter import Drafter, Verified
from ondevice.speculation.loop import PREFILL_CHUNK, Generation, generate, greedy

# What is done where nothing of an answer could be watched: a draft needs a token to go on from, and one to be right.
ENDS = "the model ends at its first token, so it is decoded past its end"
REPEATS = "it repeats itself from its first token on, and is kept all the same"
CUT = "its prompt does not fit the model's context, which has the prompt's end alone"


class AfterPrompt:
    """A model that has read a prompt: `generate` on it begins with a copy of the prompt's rows, without reading again.

    prompt_logits: [len(prompt), V], behind each token of the prompt.
    """

    def __init__(self, lm: CausalLM, prompt: Sequence[int]) -> None:
        parts: list[Tensor] = []
        self.lm, self.read = lm, lm.start(len(prompt))
        self.read.prefill(prompt, PREFILL_CHUNK, lambda start, logits: parts.append(logits.clone()))
        self.prompt_logits = torch.cat(parts)

    def __getattr__(self, name: str) -> Any:
        """The model's."""
        if name == "lm":  # not yet: copying and unpickling look for methods of an object that is still empty
            raise AttributeError(name)
        return getattr(self.lm, name)

    def start(self, capacity: int = 0) -> _Copied:
        """A session that `prefill` gives the prompt's rows."""
        return _Copied(self)


class _Copied:
    """A session of `AfterPrompt`; after `prefill` it is a fork of the one that read the prompt."""

    def __init__(self, lm: AfterPrompt) -> None:
        self._lm = lm

    def prefill(
        self, prompt: Sequence[int], chunk: int = PREFILL_CHUNK, on_logits: Callable[[int, Tensor], None] | None = None
    ) -> Tensor:
        """As `Session.prefill`. Raises ValueError for another prompt than the one that was read."""
        if list(prompt) != self._lm.read.tokens:
            raise ValueError("This is not the prompt that was read.")
        self._session = self._lm.read.fork()
        if on_logits is not None:
            for start in range(0, len(prompt), chunk):
                on_logits(start, self._lm.prompt_logits[start : start + chunk])
        return self._lm.prompt_logits[-1]

    def __getattr__(self, name: str) -> Any:
        """The fork's."""
        if name == "_session":  # before `prefill`
            raise AttributeError(name)
        return getattr(self._session, name)


@dataclass(frozen=True, eq=False)
class PlainAnswer:
    """A plain answer. task: of its prompt, whose ids are `prompt`. tokens: [n], the end token included, before a loop.

    model: after the prompt. logits: [n, V]; row i chose token i. seconds: of decoding, behind the first token.
    remarks: of ENDS, REPEATS and CUT, what holds for it.
    """

    name: str
    task: str
    prompt: Sequence[int]
    tokens: Sequence[int]
    model: AfterPrompt
    logits: Tensor
    seconds: float
    remarks: Sequence[str] = ()

    @property
    def limit(self) -> int:
        """How many tokens every method decodes."""
        return len(self.tokens)


def answered(
    lm: CausalLM, name: str, task: str, prompt: Sequence[int], limit: int, eos_token_ids: Container[int]
) -> PlainAnswer:
    """Decode an answer of at most `limit` tokens plainly; of two at least, where the model's context has room."""
    rows: list[Tensor] = []
    times: list[float] = []

    def choose(logits: Tensor) -> int:
        rows.append(logits.clone())
        times.append(perf_counter())
        return greedy(logits)

    room = lm.context - min(limit, lm.context // 2)
    remarks = [CUT] if len(prompt) > room else []
    prompt = prompt[-room:]
    model = AfterPrompt(lm, prompt)
    decode = partial(generate, cast(CausalLM, model), Drafter(), prompt, limit, choice=choose)
    tokens = decode(eos_token_ids=eos_token_ids).tokens
    if len(tokens) < 2:
        remarks.append(ENDS)
        rows.clear()
        times.clear()
        tokens = decode().tokens
    kept = loop_start(tokens) or len(tokens)
    if kept < 2:
        remarks.append(REPEATS)
        kept = len(tokens)
    seconds = times[kept - 1] - times[0]
    return PlainAnswer(name, task, prompt, tokens[:kept], model, torch.stack(rows[:kept]), seconds, remarks)


def remarks(answers: Sequence[PlainAnswer]) -> list[str]:
    """A line for each remark on the answers, and on how many of them; none where all could be watched as they are."""
    counts = Counter(remark for answer in answers for remark in answer.remarks)
    return [f"{count} of {len(answers)} answers: {remark}." for remark, count in counts.items()]


def ends_of(answer: PlainAnswer, eos_token_ids: Container[int]) -> Container[int]:
    """The tokens that end an answer: none where it was decoded past its end."""
    return () if ENDS in answer.remarks else eos_token_ids


def answered_with(
    generate: Callable[..., Generation],
    drafter: Drafter,
    answers: Sequence[PlainAnswer],
    budget: int,
    eos_token_ids: Container[int],
) -> pd.DataFrame:
    """A drafter answers the prompts: name, task, decoded tokens behind the first, passes, seconds, same (as plainly).

    generate: the loop that runs it.
    """
    rows = []
    for answer in answers:
        times: list[float] = []

        def choose(logits: Tensor, times: list[float] = times) -> int:
            times.append(perf_counter())
            return greedy(logits)

        log = generate(
            answer.model,
            drafter,
            answer.prompt,
            answer.limit,
            budget=budget,
            choice=choose,
            eos_token_ids=ends_of(answer, eos_token_ids),
        )
        spent = perf_counter() - times[0]
        same = list(log.tokens) == list(answer.tokens)
        rows.append((answer.name, answer.task, len(log.tokens) - 1, len(log.steps), spent, same))
    columns = ["name", "task", "decoded", "passes", "seconds", "same"]
    return evidence.born(pd.DataFrame(rows, columns=columns), "measured")


def followed(draft: Draft, coming: Sequence[int]) -> list[int]:
    """The nodes of a draft that a text follows, from the root downwards. coming: its next tokens."""
    children = {key: node for node, key in enumerate(zip(draft.parents.tolist(), draft.tokens.tolist(), strict=True))}
    path: list[int] = []
    for token in coming:
        node = children.get((path[-1] if path else -1, token))
        if node is None:
            break
        path.append(node)
    return path


def led(drafter: Drafter, answers: Sequence[PlainAnswer], budget: int) -> pd.DataFrame:
    """A drafter along the answers, in their order: name, task, position, drafted and accepted nodes of each draft.

    The drafter observes the logits behind every token of an answer, as if it had drafted nothing.
    """
    rows = []
    for answer, position, tokens in steps(drafter, answers):
        draft = drafter.propose(tokens, budget)
        path = followed(draft, answer.tokens[position + 1 :])
        rows.append((answer.name, answer.task, position, len(draft), len(path)))
    return evidence.born(pd.DataFrame(rows, columns=["name", "task", "position", "drafted", "accepted"]), "measured")


def per_answer(table: pd.DataFrame, column: str, over: str = "", seed: int = 0) -> evidence.Estimate:
    """The sum of a column over that of another, or its mean, with the interval of drawing whole answers."""
    values = table[column].to_numpy(float)
    parts = table[over].to_numpy(float) if over else np.ones(len(table))
    return evidence.resampled(
        lambda rows: float(values[rows].sum() / parts[rows].sum()),
        len(values),
        table,
        seed=seed,
        drawn="answers",
        clusters=table["name"].tolist(),
    )


def summarised(
    samples: Mapping[tuple[Any, ...], pd.DataFrame], names: Sequence[str], column: str, over: str = "", seed: int = 0
) -> pd.DataFrame:
    """`per_answer` of several tables: their labels in columns `names`, then value, low and high.

    Of drafts, `nodes` has the mean number drafted.
    """
    rows = []
    for labels, table in samples.items():
        estimate = per_answer(table, column, over, seed)
        row = dict(zip(names, labels, strict=True))
        if "drafted" in table:
            row["nodes"] = table["drafted"].mean()
        rows.append(row | {"value": estimate.value, "low": estimate.low, "high": estimate.high})
    return evidence.derived(pd.DataFrame(rows), *samples.values())


def beside(
    both: Mapping[str, Mapping[tuple[Any, ...], pd.DataFrame]],
    names: Sequence[str],
    column: str,
    over: str = "",
    seed: int = 0,
) -> pd.DataFrame:
    """`summarised` of a display, and of an edit of it (`Edits.both`) with the paired difference."""
    return compared(
        both,
        lambda samples: summarised(samples, names, column, over, seed),
        lambda shipped, yours: difference(shipped, yours, column, over, seed),
    )


def difference(
    shipped: pd.DataFrame, yours: pd.DataFrame, column: str, over: str = "", seed: int = 0
) -> evidence.Estimate:
    """`per_answer` of the second table less that of the first one, from the same drawn answers."""
    sums = [
        table.assign(_over=table[over] if over else 1.0).groupby("name")[[column, "_over"]].sum().astype(float)
        for table in (shipped, yours)
    ]
    answers = sums[0].index.intersection(sums[1].index)
    first, second = (part.loc[answers].to_numpy() for part in sums)

    def less(rows: np.ndarray) -> float:
        before, after = first[rows].sum(axis=0), second[rows].sum(axis=0)
        return float(after[0] / after[1] - before[0] / before[1])

    return evidence.resampled(less, len(answers), (shipped, yours), seed=seed, drawn="answers")


def covered(
    both: Mapping[str, Mapping[str, pd.DataFrame]], by: str, firsts: Sequence[int], seed: int = 0
) -> pd.DataFrame:
    """The share of next tokens among the first k: `by`, k, value, low, high. both: by version ranks, by name."""
    hits = {
        version: {(name, k): table.assign(hit=table["rank"] <= k) for name, table in ranks.items() for k in firsts}
        for version, ranks in both.items()
    }
    return beside(hits, [by, "k"], "hit", seed=seed)


class Watched(Drafter):
    """A drafter whose verified steps are kept. steps: in their order, of all requests."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.wants_prefill = drafter.wants_prefill
        self.drafts_trees = drafter.drafts_trees
        self.steps: list[Verified] = []

    def begin(self, prompt: Sequence[int]) -> None:
        """The drafter's."""
        self.drafter.begin(prompt)
        self.wants_prefill = self.drafter.wants_prefill

    def prefilled(self, start: int, logits: Tensor) -> None:
        """The drafter's."""
        self.drafter.prefilled(start, logits)

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """The drafter's."""
        return self.drafter.propose(tokens, budget)

    def end(self, tokens: Sequence[int]) -> None:
        """The drafter's."""
        self.drafter.end(tokens)

    def observe(self, step: Verified) -> None:
        """Keep the step, and let the drafter observe it."""
        self.steps.append(step)
        self.drafter.observe(step)


def steps(drafter: Drafter, answers: Sequence[PlainAnswer]) -> Iterator[tuple[PlainAnswer, int, list[int]]]:
    """(answer, position, prompt and answer up to it) at every token; the drafter learns what came behind each."""
    for answer in answers:
        drafter.begin(answer.prompt)
        if drafter.wants_prefill:
            drafter.prefilled(0, answer.model.prompt_logits)
        tokens = list(answer.prompt)
        for position, following in enumerate(answer.tokens[1:]):
            root = answer.tokens[position]
            tokens.append(root)
            yield answer, position, tokens
            drafter.observe(Verified(root, EMPTY, answer.logits[position + 1][None], [], [following]))
        drafter.end([*tokens, answer.tokens[-1]])

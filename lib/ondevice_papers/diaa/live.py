"""What the notebook's first part computes while one watches: plain answers, and drafts that are led along them.

An answer is decoded once, and the logits behind each of its tokens are kept. A drafter that is *led* along it drafts at
every token, and counts what the answer would have accepted. No model runs then, so an experiment takes a second. Two
things differ from decoding: there a draft begins only where the last one ended, and rejected nodes teach the drafter,
too.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ondevice import corpus, evidence
from ondevice.causal_lm import CausalLM
from ondevice.causal_lm.generation import loop_start
from ondevice.speculation import Draft, Drafter, Generation, Verified, generate, greedy
from ondevice.speculation.draft import EMPTY
from ondevice.speculation.largest import Likeliest
from ondevice.speculation.mixture import Mixture
from ondevice_papers.diaa.tables import Fresh, K, Tables, likeliest

Update = Callable[[Tables, Sequence[int], Fresh], None]
SOURCES = (  # of a mixture without stores, in the order of its weights
    "request: counts",
    "request: first match",
    "request: newest match",
    "earlier answers",
    "logits: last two tokens",
    "logits: last two, their first",
    "logits: last token, mean",
    "logits: last token, newest",
    "siblings",
    "behind siblings",
    "recent candidates",
)
_WINDOW = 256  # tokens of a document in a warm-up text


@dataclass(frozen=True, eq=False)
class Answer:
    """A plain answer. task: of its prompt, whose ids are `prompt`. tokens: [n], the end token included, before a loop.

    prompt_logits: [len(prompt), V], behind each token of the prompt. logits: [n, V]; row i chose token i. seconds: of
    decoding, behind the first token.
    """

    name: str
    task: str
    prompt: Sequence[int]
    tokens: Sequence[int]
    prompt_logits: Tensor
    logits: Tensor
    seconds: float

    def fresh(self) -> Fresh:
        """The K likeliest tokens behind each token of the answer but the last, [n - 1, K]."""
        return likeliest(self.logits[1:], Likeliest(K))

    @property
    def limit(self) -> int:
        """How many tokens every method decodes."""
        return len(self.tokens)


def answered(
    lm: CausalLM, name: str, task: str, prompt: Sequence[int], limit: int, eos_token_ids: Container[int]
) -> Answer:
    """Decode an answer of at most `limit` tokens plainly."""
    rows: list[Tensor] = []
    times: list[float] = []

    def choose(logits: Tensor) -> int:
        rows.append(logits.clone())
        times.append(perf_counter())
        return greedy(logits)

    reader = _Reader()
    tokens = list(generate(lm, reader, prompt, limit, choice=choose, eos_token_ids=eos_token_ids).tokens)
    kept = loop_start(tokens) or len(tokens)
    read = torch.cat(reader.parts)
    return Answer(name, task, prompt, tokens[:kept], read, torch.stack(rows[:kept]), times[kept - 1] - times[0])


class _Reader(Drafter):
    """Drafts nothing, and keeps the logits of the prompt."""

    wants_prefill = True

    def begin(self, prompt: Sequence[int]) -> None:
        self.parts: list[Tensor] = []

    def prefilled(self, start: int, logits: Tensor) -> None:
        self.parts.append(logits.clone())


def answered_with(
    generate: Callable[..., Generation], lm: CausalLM, drafter: Drafter, answers: Sequence[Answer], budget: int,
    eos_token_ids: Container[int],
) -> pd.DataFrame:  # fmt: skip
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
            lm, drafter, answer.prompt, answer.limit, budget=budget, choice=choose, eos_token_ids=eos_token_ids
        )
        spent = perf_counter() - times[0]
        same = list(log.tokens) == list(answer.tokens)
        rows.append((answer.name, answer.task, len(log.tokens) - 1, len(log.steps), spent, same))
    columns = ["name", "task", "decoded", "passes", "seconds", "same"]
    return evidence.born(pd.DataFrame(rows, columns=columns), "measured")


class FromTables(Drafter):
    """Drafts what `draft` makes of the tables, which every step overwrites as `update` says.

    draft: of (tables, root, budget).
    """

    def __init__(self, tables: Tables, draft: Callable[[Tables, int, int], Draft], update: Update) -> None:
        self.tables, self.draft, self.update = tables, draft, update
        self._find = Likeliest(tables.k)

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """The draft below the last token."""
        return self.draft(self.tables, tokens[-1], budget)

    def observe(self, step: Verified) -> None:
        """Update the root's row."""
        self.update(self.tables, [step.root], likeliest(step.logits[:1], self._find))


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


def led(drafter: Drafter, answers: Sequence[Answer], budget: int) -> pd.DataFrame:
    """A drafter along the answers, in their order: name, task, position, drafted and accepted nodes of each draft.

    The drafter observes the logits behind every token of an answer, as if it had drafted nothing.
    """
    rows = []
    for answer, position, tokens in _steps(drafter, answers):
        draft = drafter.propose(tokens, budget)
        path = followed(draft, answer.tokens[position + 1 :])
        rows.append((answer.name, answer.task, position, len(draft), len(path)))
    return evidence.born(pd.DataFrame(rows, columns=["name", "task", "position", "drafted", "accepted"]), "measured")


def coverage(tables: Tables, answers: Sequence[Answer], update: Update | None = None) -> pd.DataFrame:
    """How far down the row of a token its next token stands: name and rank, 1 to K, or K + 1 where it is missing.

    update: what the model's fresh likeliest tokens do to the tables on the way; None leaves them as they are.
    """
    rows = []
    for answer in answers:
        fresh = answer.fresh()
        for position, (token, following) in enumerate(zip(answer.tokens, answer.tokens[1:], strict=False)):
            ranks = np.flatnonzero(tables.tokens[token] == following)
            rows.append((answer.name, int(ranks[0]) + 1 if len(ranks) else tables.k + 1))
            if update is not None:
                now = slice(position, position + 1)
                update(tables, [token], Fresh(fresh.tokens[now], fresh.probabilities[now]))
    return evidence.born(pd.DataFrame(rows, columns=["name", "rank"]), "measured")


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


def covered(ranks: Mapping[str, pd.DataFrame], by: str, firsts: Sequence[int], seed: int = 0) -> pd.DataFrame:
    """The share of next tokens among the first k: `by`, k, value, low, high. ranks: of `coverage`, by name."""
    hits = {(name, k): table.assign(hit=table["rank"] <= k) for name, table in ranks.items() for k in firsts}
    return summarised(hits, [by, "k"], "hit", seed=seed)


def warm_up_text(tokenizer: PreTrainedTokenizerBase, tokens: int) -> NDArray[np.int64]:
    """[tokens] ids of a text to warm up tables: the beginnings of train documents from all over the corpus."""
    documents = corpus.documents("train")
    stride = max(1, len(documents) * _WINDOW // (2 * tokens))
    text: list[int] = []
    for document in (document for offset in range(stride) for document in documents[offset::stride]):
        text += tokenizer(document.text, verbose=False, add_special_tokens=False).input_ids[:_WINDOW]
        if len(text) >= tokens:
            break
    return np.array(text[:tokens], np.int64)


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


def by_source(drafter: Mixture, answers: Sequence[Answer]) -> tuple[pd.DataFrame, NDArray[np.float64]]:
    """A mixture along the answers: (name, source, rank of the next token) and the sources' chances of it, [n, sources].

    Of the ranks the last source is `mixture`; a token that a source does not have gets rank 99.
    """
    rows = []
    chances = []
    for answer, position, tokens in _steps(drafter, answers):
        drafter.propose(tokens, 1)  # reads the text up to here
        following = answer.tokens[position + 1]
        (seen, below_root, kind, order), _, shares = drafter.sources(tokens[-drafter.text.longest :], True)
        chances.append([share.get(following, 0.0) for share in shares])
        mixed = dict(drafter.mix(drafter.weights[seen][below_root][kind][order], shares))
        for source, share in zip((*SOURCES, "mixture"), (*shares, mixed), strict=True):
            likelier = [p for p in share.values() if p > share.get(following, 0.0)]
            rows.append((answer.name, source, len(likelier) + 1 if following in share else 99))
    return evidence.born(pd.DataFrame(rows, columns=["name", "source", "rank"]), "measured"), np.array(chances)


def _steps(drafter: Drafter, answers: Sequence[Answer]) -> Iterator[tuple[Answer, int, list[int]]]:
    """(answer, position, prompt and answer up to it) at every token; the drafter learns what came behind each."""
    for answer in answers:
        drafter.begin(answer.prompt)
        if drafter.wants_prefill:
            drafter.prefilled(0, answer.prompt_logits)
        tokens = list(answer.prompt)
        for position, following in enumerate(answer.tokens[1:]):
            root = answer.tokens[position]
            tokens.append(root)
            yield answer, position, tokens
            drafter.observe(Verified(root, EMPTY, answer.logits[position + 1][None], [], [following]))
        drafter.end([*tokens, answer.tokens[-1]])

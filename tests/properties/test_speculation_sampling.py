"""Drawn tokens have the model's distribution whatever is drafted: the first two tokens, 20,000 times a drafter.

Full generations would be slow, and are not needed. For every first token, the real loop runs once with the real
drafter, and its first verified step is kept: the draft, and the model's logits after the root and every node. Then
20,000 first tokens are drawn from the prompt's logits, once, as drafters have no part in them; and for each drafter a
second one for every first, by the loop's own walk over what was kept for that first token. Only `choose` draws anew; it
is the one thing in a step that is random.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import numpy as np
import pytest
import torch
from every_drafter import CONTEXT, DRAFTERS, V, next_logits, target, targets, tiny, uncached
from numpy.typing import NDArray
from sampling import Sampling
from scipy.stats import chisquare
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from ondevice.causal_lm import CausalLM
from ondevice.speculation import Choice, Draft, Drafter, Verified, generate, greedy
from ondevice.speculation.loop import accepted

DRAWS = 20_000
TEMPERATURE = 0.8
LEAST = 1e-4  # a p-value; the seeds are fixed, so that what passes once passes always
LENGTH = 44  # tokens of the prompt
BUDGET = 16
# One of each kind: the second token takes a second or two of each. The test with one seed is of all.
NAMES = (
    "vanilla", "PLD", "PLD, transformers", "SAM", "SAM, corpus", "TR", "small model", "layer skipping",
    "layer skipping, unsure", "DIAA, warm", "DIAA, template", "DIAA, refresh", "mixture", "Goose",
)  # fmt: skip

Walk = Callable[[Draft, torch.Tensor, Choice], tuple[list[int], list[int]]]
Kept = tuple[Draft, torch.Tensor]  # a draft, and the logits [1 + n, V] after its root and nodes


@cache
def prompt_of(of: CausalLM) -> list[int]:
    """A text that the model drew, so that what followed a token there is likely to follow it again."""
    return [3, *uncached(of, [3], LENGTH - 1, Sampling(0.5, seed=1))]


@cache
def distribution(of: CausalLM, text: tuple[int, ...], top_k: int, top_p: float) -> NDArray[np.float64]:
    """[V] after a text, from a forward without a cache and transformers' own warpers."""
    scores = TemperatureLogitsWarper(TEMPERATURE)(None, next_logits(of, text)[None])
    scores = TopKLogitsWarper(top_k)(None, scores) if top_k else scores
    scores = TopPLogitsWarper(top_p)(None, scores) if top_p < 1 else scores
    return scores[0].softmax(0).numpy()


def pairs_of(of: CausalLM, top_k: int = 0, top_p: float = 1.0) -> NDArray[np.float64]:
    """[V, V] exact probability of every first and second token."""
    prompt = tuple(prompt_of(of))
    first = distribution(of, prompt, top_k, top_p)
    return first[:, None] * np.stack([distribution(of, (*prompt, token), top_k, top_p) for token in range(V)])


class Told:
    """Says the first token that it is told, then the likeliest ones; keeps the first logits."""

    def __init__(self, first: int) -> None:
        self.first, self.prompt_logits = first, torch.empty(0)

    def __call__(self, logits: torch.Tensor) -> int:
        if len(self.prompt_logits):
            return greedy(logits)
        self.prompt_logits = logits.clone()
        return self.first


def corpus_of(of: CausalLM) -> list[list[int]]:
    """Every first token, where the prompt's end stands before it and two likely ones come after it."""
    prompt = prompt_of(of)
    return [[*prompt[-9:], token, *uncached(of, [*prompt, token], 2, greedy)] for token in range(V)]


@cache
def kept_of(kind: str, name: str) -> tuple[torch.Tensor, list[Kept]]:
    """The prompt's logits, and the draft and logits of the step after each first token; the drafter knows the text.

    Drafters learn between requests as they do in use; that a draft depends on earlier requests changes no probability.
    """
    of = target(kind, name)
    prompt = prompt_of(of)
    drafter = DRAFTERS[name](of, corpus_of(of))
    for seed in range(5):
        generate(of, drafter, prompt, CONTEXT - LENGTH, choice=Sampling(TEMPERATURE, seed=seed))
    told, kept = Told(0), list[Kept]()
    for token in range(V):
        told, steps = Told(token), list[Verified]()
        drafter.observe = partial(note, steps, drafter.observe)
        generate(of, drafter, prompt, 4, budget=BUDGET, choice=told)  # two tokens deep at the first step
        del drafter.observe
        kept.append((steps[0].draft, steps[0].logits))
    return told.prompt_logits, kept


def note(steps: list[Verified], observe: Callable[[Verified], None], step: Verified) -> None:
    """Keep a step on its way to the drafter."""
    steps.append(step)
    observe(step)


@cache
def firsts_of(of: CausalLM, top_k: int = 0, top_p: float = 1.0) -> NDArray[np.int64]:
    """[DRAWS] first tokens, drawn from what the loop reads after the prompt."""
    told, choose = Told(0), Sampling(TEMPERATURE, top_k, top_p, seed=1)
    generate(of, Drafter(), prompt_of(of), 1, choice=told)
    return np.array([choose(told.prompt_logits) for _ in range(DRAWS)])


def seconds_of(
    firsts: NDArray[np.int64], kept: Sequence[Kept], choose: Choice, walk: Walk
) -> tuple[NDArray[np.int64], float]:
    """([V, V] how often each first and second token came together, share of the second tokens that were drafted)."""
    counts, drafted = np.zeros((V, V), np.int64), 0
    for first in firsts.tolist():
        path, tokens = walk(*kept[first], choose)
        counts[first, tokens[0]] += 1
        drafted += bool(path)
    return counts, drafted / len(firsts)


def p_value(counts: NDArray[np.int64], exact: NDArray[np.float64]) -> float:
    """Of a chi-square test; cells of an expectation below 5 count as one, which takes others until it has 5."""
    assert not counts[exact == 0].any()
    seen, expected = counts.ravel(), exact.ravel() * counts.sum()
    order = np.argsort(expected)
    seen, expected = seen[order], expected[order]
    small = max(int((expected < 5).sum()), int(np.searchsorted(np.cumsum(expected), 5)) + 1)
    pooled = [np.r_[values[:small].sum(), values[small:]] for values in (seen, expected)]
    return float(chisquare(*pooled).pvalue)


@pytest.mark.parametrize(("layers", "cuts"), [(2, ()), (4, ()), (2, (12, 0.9))])
def test_the_first_token_has_the_models_distribution(layers: int, cuts: tuple[int, float] | tuple[()]) -> None:
    of = tiny("llama", layers)
    counts = np.bincount(firsts_of(of, *cuts), minlength=V)
    assert p_value(counts, pairs_of(of, *cuts).sum(axis=1)) > LEAST


@pytest.mark.parametrize("name", NAMES)
def test_the_second_token_has_the_models_distribution(name: str) -> None:
    """By itself, and together with the first. What is drawn first is the same for all: the prompt's logits are."""
    of, seed = target("llama", name), 100 + NAMES.index(name)
    logits, kept = kept_of("llama", name)
    assert torch.allclose(logits, next_logits(of, prompt_of(of)), rtol=0, atol=1e-9)
    counts, drafted = seconds_of(firsts_of(of), kept, Sampling(TEMPERATURE, seed=seed), accepted)
    exact = pairs_of(of)
    assert p_value(counts.sum(axis=0), exact.sum(axis=0)) > LEAST
    assert p_value(counts, exact) > LEAST
    assert drafted == 0 if name == "vanilla" else drafted > 0.05  # else nothing was said of drafts


def test_with_top_k_and_top_p_too() -> None:
    of, cuts = tiny("llama"), (12, 0.9)
    choose, exact = Sampling(TEMPERATURE, *cuts, seed=7), pairs_of(of, *cuts)
    counts, drafted = seconds_of(firsts_of(of, *cuts), kept_of("llama", "DIAA, warm")[1], choose, accepted)
    assert p_value(counts.sum(axis=0), exact.sum(axis=0)) > LEAST
    assert p_value(counts, exact) > LEAST
    assert drafted > 0.05


def preferring(draft: Draft, logits: torch.Tensor, choose: Choice) -> tuple[list[int], list[int]]:
    """A lossy walk of one step: a drafted token is taken wherever the model gives it more than 0.1."""
    shares = (logits[0] / TEMPERATURE).softmax(0)
    for node in np.flatnonzero(draft.parents < 0).tolist():
        if shares[draft.tokens[node]] > 0.1:
            return [node], [int(draft.tokens[node])]
    return [], [choose(logits[0])]


def twice(draft: Draft, logits: torch.Tensor, choose: Choice) -> tuple[list[int], list[int]]:
    """A lossy walk of one step: what replaces a rejected draft is drawn as if none had been rejected."""
    path, tokens = accepted(draft, logits, choose)
    return (path[:1], tokens[:1]) if path or not len(draft) else ([], [choose(logits[0])])


@pytest.mark.parametrize("walk", [preferring, twice])
@pytest.mark.parametrize("name", ["PLD", "small model", "DIAA, warm"])
def test_walks_that_favour_the_draft_are_found(name: str, walk: Walk) -> None:
    """The same draws, counts and test; only the second token is wrong."""
    of = target("llama", name)
    counts, _ = seconds_of(firsts_of(of), kept_of("llama", name)[1], Sampling(TEMPERATURE, seed=11), walk)
    exact = pairs_of(of)
    assert p_value(counts.sum(axis=0), exact.sum(axis=0)) < LEAST
    assert p_value(counts, exact) < LEAST


class Counting:
    """A choice, and how often it was asked."""

    def __init__(self, choice: Choice) -> None:
        self.choice, self.asked = choice, 0

    def __call__(self, logits: torch.Tensor) -> int:
        self.asked += 1
        return self.choice(logits)


@pytest.mark.parametrize(("kind", "name"), targets())
def test_with_one_seed_the_tokens_are_those_drawn_without_a_draft_and_without_a_cache(kind: str, name: str) -> None:
    """Sharper than any statistics: not only the distribution, the very tokens are the model's own."""
    of = target(kind, name)
    drafter = DRAFTERS[name](of, corpus_of(of))
    for seed, cuts in ((1, (0, 1.0)), (2, (5, 0.9))):
        choose = Counting(Sampling(TEMPERATURE, *cuts, seed=seed))
        found = generate(of, drafter, [3, 1], 16, budget=BUDGET, choice=choose)
        assert list(found.tokens) == said_without(kind, of.layers, cuts, seed)
        assert choose.asked == len(found.tokens)


@cache
def said_without(kind: str, layers: int, cuts: tuple[int, float], seed: int) -> list[int]:
    return uncached(tiny(kind, layers), [3, 1], 16, Sampling(TEMPERATURE, *cuts, seed=seed))


def test_the_chi_square_itself() -> None:
    """Right draws pass, and a shift of two hundredths does not."""
    random, exact = np.random.default_rng(0), np.random.default_rng(1).dirichlet([0.5] * 60)
    shifted = exact.copy()
    shifted[np.argsort(exact)[-2:]] += 0.02, -0.02
    assert p_value(random.multinomial(DRAWS, exact), exact) > LEAST > p_value(random.multinomial(DRAWS, shifted), exact)

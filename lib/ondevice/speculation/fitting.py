"""The weights of a mixture, by expectation and maximisation on answers that are known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ondevice.causal_lm import CausalLM
from ondevice.speculation.drafter import Verified
from ondevice.speculation.loop import generate
from ondevice.speculation.mixture import LOGITS, LOGITS_SHAPE, TEXTS, Mixture
from ondevice.speculation.store import Store

PRIOR = 10.0  # answers' tokens that a finer class must outweigh
ROUNDS = 60
NODES = 32  # of the trees from which the tables are filled

Answers = Sequence[tuple[Sequence[int], Sequence[int]]]  # (prompt, answer), one after the other, as a session has them
Observed = tuple[NDArray[np.int64], NDArray[np.float64]]


def fit(
    lm: CausalLM,
    sessions: Sequence[Answers],
    weights: NDArray[np.float64] | None = None,
    stores: Sequence[Store] = (),
) -> NDArray[np.float64]:
    """[*LOGITS_SHAPE, sources] weights of a mixture that reads logits, on a model's own greedy answers.

    The model answers anew behind the mixture's trees, which decide what the tables see, so a further call that begins
    with the fitted weights comes closer. Of a model of 135 M, 2,000 tokens take two minutes on a CPU core.
    sessions: each is answered by a new mixture. weights: to begin with; by default all sources weigh alike.
    Raises ValueError where no answer has two tokens.
    """
    sources = TEXTS + len(stores) + LOGITS
    start = np.full((*LOGITS_SHAPE, sources), 1 / sources) if weights is None else weights
    observed = [_observed_live(lm, answers, start, stores) for answers in sessions]
    parts = [pair for pair in observed if len(pair[0])]
    if not parts:
        raise ValueError("Weights are fitted to answers of at least two tokens.")
    return weights_of(*(np.concatenate(part) for part in zip(*parts, strict=True)))


def maximised(chances: NDArray[np.float64], prior: NDArray[np.float64], strength: float) -> NDArray[np.float64]:
    """Weights [sources] of the greatest likelihood of chances [n, sources], `strength` tokens of the prior with them.

    r_is = w_s p_is / sum_s w_s p_is, then w_s = (sum_i r_is + strength * prior_s) / (n + strength), and again. What no
    source had takes its part of n too, so the weights sum to what they explain.
    """
    weights = prior
    for _ in range(ROUNDS):
        parts = weights * chances
        whole = parts.sum(axis=1, keepdims=True)
        explained = np.divide(parts, whole, out=np.zeros_like(parts), where=whole > 0).sum(axis=0)
        weights = (explained + strength * prior) / (len(chances) + strength)
    return weights


def weights_of(classes: NDArray[np.int64], chances: NDArray[np.float64]) -> NDArray[np.float64]:
    """[*LOGITS_SHAPE, sources] weights: those of a class are drawn towards those of all that share its first indices.

    classes: [n, 4] within LOGITS_SHAPE. chances: [n, sources].
    """
    shape = LOGITS_SHAPE
    count = chances.shape[1]
    weights = np.empty((*shape, count))

    def descend(index: tuple[int, ...], rows: NDArray[np.bool_], prior: NDArray[np.float64]) -> None:
        if len(index) == len(shape):
            weights[index] = prior
            return
        for value in range(shape[len(index)]):
            inside = rows & (classes[:, len(index)] == value)
            descend((*index, value), inside, maximised(chances[inside], prior, PRIOR))

    every = np.ones(len(classes), bool)
    descend((), every, maximised(chances, np.full(count, 1 / count), 0.0))
    return weights


class _Observing(Mixture):
    """A mixture that notes, at each token that came, its class and what every source gave the token."""

    def begin(self, prompt: Sequence[int]) -> None:
        super().begin(prompt)
        self.classes: list[tuple[int, ...]] = getattr(self, "classes", [])
        self.chances: list[list[float]] = getattr(self, "chances", [])

    def observe(self, step: Verified) -> None:
        context = self.text.text[-self.text.longest :]
        if context[-1:] != [step.root]:  # nothing was proposed before an answer's last token
            return
        for number, token in enumerate(step.emitted):
            context_class, _, shares = self.sources(context, number == 0)
            self.classes.append(context_class)
            self.chances.append([share.get(token, 0.0) for share in shares])
            context = [*context, token][-self.text.longest :]
        super().observe(step)


def _observed_live(lm: CausalLM, answers: Answers, weights: NDArray[np.float64], stores: Sequence[Store]) -> Observed:
    """Classes [n, 4] and p [n, sources] of a session."""
    mixture = _Observing(weights, stores)
    for prompt, answer in answers:
        generate(lm, mixture, prompt, len(answer), budget=NODES)
    return np.array(mixture.classes), np.array(mixture.chances)

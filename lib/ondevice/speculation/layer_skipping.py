"""Self-speculation: the target without some of its sublayers drafts for the whole target (SWIFT, Xia et al. 2025)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module

from ondevice.causal_lm import CausalLM, TokenTree
from ondevice.extras import needing
from ondevice.speculation.draft import Draft
from ondevice.speculation.drafter import Drafter, Verified
from ondevice.speculation.follower import Follower

LONGEST = 25  # drafted tokens
WINDOW = 50  # generated tokens that a set of skipped sublayers is scored on
SIDE = ((0.95, 3), (0.8, 5), (0.5, 8), (0.0, 10))  # above this confidence, so many candidates at a depth
RATIO = 0.45  # of the parts that are skipped, at least one
BAYES_EVERY = 25  # tries
UCB = 2.5  # standard deviations above the mean
CANDIDATES = 256  # random sets that the surrogate chooses from
Sublayer = tuple[Module, Callable[..., Any]]  # a part of a decoder layer, and what its forward is while it is skipped


class LayerSkipping(Drafter):
    """The target drafts for itself with a share of its attention and MLP sublayers skipped.

    Drafts are greedy and end after the first token whose probability is below `confidence`, with the likeliest
    alternatives at each depth as leaves, the fewer the more confident.
    The set of sublayers is searched while decoding, one try a step, once the output has `window` + 1 tokens: its score
    is the share of these that the skipped model, fed with the output, says. The search goes on over the requests.

    The original shares the target's KV cache. Here the drafter has a session of its own on the same weights: its prompt
    rows come from the whole model, as there, which costs a second prefill; its rows of the output come from the skipped
    model, and are computed anew when the set changes. All of it is charged to this drafter's own time.

    search: by default SWIFT's; `SkipSearch(...)` for other stop rules. longest: tokens of a chain.
    Raises ValueError for models without Llama-like layers, or with fewer than three.
    """

    name = "layer skipping"
    drafts_trees = True

    def __init__(
        self, lm: CausalLM, confidence: float = 0.8, *, longest: int = LONGEST, window: int = WINDOW,
        search: SkipSearch | None = None,
    ) -> None:  # fmt: skip
        self.lm, self.vocabulary, self.forwards = lm, lm.vocabulary, 0
        self._parts = sublayers(lm)
        self.search = search or SkipSearch(len(self._parts))
        self._confidence, self._longest, self._window = confidence, longest, window

    def begin(self, prompt: Sequence[int]) -> None:
        """Prefill the prompt in the drafter's own session."""
        self._follower = Follower(self.lm, prompt)
        self._prompt = len(prompt)
        self._output = list[int]()
        if not self.search.is_over:
            self._judge = self._follower.session.fork()  # the prompt alone

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """The chain first, then its side branches from the root downwards."""
        chain: list[int] = []
        leaves: list[tuple[int, int]] = []  # and the node above
        with skipped([self._parts[index] for index in self.search.best]):
            logits = self._follower.follow(tokens)
            while logits is not None:
                self.forwards += 1
                likely, sure = _likeliest(logits)
                leaves += [(token, len(chain) - 1) for token in likely[1:]]
                chain.append(likely[0])
                if sure < self._confidence or len(chain) >= min(self._longest, budget):
                    break
                logits = self._follower.go_on(chain[-1])
        drafted = [*chain, *(token for token, _ in leaves)]
        parents = [*range(-1, len(chain) - 1), *(node for _, node in leaves)]
        return Draft(drafted[:budget], parents[:budget])

    def observe(self, step: Verified) -> None:
        """Try one more set of sublayers, once the output is long enough."""
        self._output += step.emitted if self._output else [step.root, *step.emitted]
        output = self._output[: self._window + 1]
        fits = self._prompt + len(output) <= self.lm.context
        if self.search.is_over or len(self._output) <= self._window or not fits:
            return
        if self.search.try_one(lambda indices: self._score(indices, output)):
            self._follower.rewind(self._prompt)

    def _score(self, indices: NDArray[np.int64], output: list[int]) -> float:
        """Share of the known output that the model says without these sublayers, in one forward."""
        self.forwards += 1
        with skipped([self._parts[index] for index in indices]):
            likeliest = self._judge.verify(TokenTree.chain(output[:-1])).argmax(-1)
        self._judge.rollback(self._prompt)
        return float(np.mean(likeliest.cpu().numpy() == np.array(output[1:])))


def _likeliest(logits: Tensor) -> tuple[list[int], float]:
    """The candidates at one depth, the likeliest first, and how likely it is."""
    shares = logits.float().softmax(-1)
    sure = float(shares.max())
    first = int(logits.argmax())
    many = next(count for above, count in SIDE if sure > above)
    likely: list[int] = shares.topk(min(many, len(shares))).indices.tolist()
    return [first, *(token for token in likely if token != first)], sure


# Skipping


def sublayers(lm: CausalLM) -> list[Sublayer]:
    """What may be skipped: attention and MLP of every layer but the first and the last, in their order: [2(L - 2)].

    Raises ValueError where the decoder layers are not built as Llama's are, or where there is none to skip.
    """
    layers = list(getattr(lm.model.base_model, "layers", ()))[1:-1]
    if not layers or not all(hasattr(layer, "self_attn") and hasattr(layer, "mlp") for layer in layers):
        raise ValueError(f"{type(lm.model).__name__} has no inner layers with self_attn and mlp: none can be skipped.")
    return [part for layer in layers for part in ((layer.self_attn, _no_attention), (layer.mlp, _no_mlp))]


def _no_attention(hidden_states: Tensor, *args: object, **options: object) -> tuple[Tensor, None]:
    return torch.zeros_like(hidden_states), None


def _no_mlp(hidden_states: Tensor, *args: object, **options: object) -> Tensor:
    return torch.zeros_like(hidden_states)


@contextmanager
def skipped(parts: Sequence[Sublayer]) -> Iterator[None]:
    """These sublayers add nothing to the residual stream inside; the model is as it was after, errors included.

    A hook would run after the work is done, so `forward` itself is replaced. The norms before them still run.
    """
    before = [module.__dict__.get("forward") for module, _ in parts]
    try:
        for module, nothing in parts:
            module.forward = nothing
        yield
    finally:
        for (module, _), forward in zip(parts, before, strict=True):
            module.__dict__.pop("forward", None)
            if forward is not None:  # what another wrapper had put there
                module.forward = forward


# The search


class SkipSearch:
    """The best set so far, and when to stop. A set is a sorted array of indices of `parts`.

    parts: sublayers that may be skipped. It starts from every odd layer, as long as no set has been scored better.
    enough, patience, tries: it stops at a score above `enough`, after `patience` tries that were no better, or after
    `tries` in all.
    """

    def __init__(self, parts: int, enough: float = 0.93, patience: int = 300, tries: int = 1000) -> None:
        with needing("notebooks", "Layer skipping"):  # now, as an answer goes on without a drafter that fails later
            import sklearn.gaussian_process  # noqa: F401
        self.parts, self.size, self._limits = parts, max(1, int(RATIO * parts)), (enough, patience, tries)
        self.best: NDArray[np.int64] = np.flatnonzero(np.arange(parts) // 2 % 2 == 0)  # the first part is in layer 1
        self.score, self._idle = -1.0, 0  # of the best set; not known before the first try
        self._tried: list[NDArray[np.int64]] = []
        self._scores: list[float] = []
        self._random = np.random.default_rng(0)

    @property
    def is_over(self) -> bool:
        """Whether the search has stopped."""
        enough, patience, tries = self._limits
        return self.score > enough or self._idle >= patience or len(self._scores) >= tries

    def try_one(self, score_of: Callable[[NDArray[np.int64]], float]) -> bool:
        """Score one more set; whether it became the best. The first is the start set itself."""
        first = not self._scores
        candidate = self.best if first else self._next()
        score = score_of(candidate)
        self._tried.append(candidate)
        self._scores.append(score)
        if score <= self.score:
            self._idle += 1
            return False
        self.best, self.score, self._idle = candidate, score, 0
        return not first

    def _next(self) -> NDArray[np.int64]:
        if len(self._scores) % BAYES_EVERY:
            return self._drawn()
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import Matern

        surrogate = GaussianProcessRegressor(Matern(nu=2.5), alpha=1e-2, normalize_y=True, random_state=0)
        drawn = [self._drawn() for _ in range(CANDIDATES)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the kernel's length scale may end at a bound, which is of no matter here
            surrogate.fit(self._vectors(self._tried), np.array(self._scores))
            mean, deviation = surrogate.predict(self._vectors(drawn), return_std=True)
        return drawn[int(np.argmax(mean + UCB * deviation))]

    def _drawn(self) -> NDArray[np.int64]:
        return np.sort(self._random.choice(self.parts, self.size, replace=False))

    def _vectors(self, sets: list[NDArray[np.int64]]) -> NDArray[np.float64]:
        """[sets, parts], 1 where a part is skipped."""
        return np.array([np.isin(np.arange(self.parts), indices) for indices in sets], float)

"""RAG-Sequence with documents on both sides: whole answers are weighed, not tokens (Lewis et al., thorough decoding).

Each side answers once from each of its documents. All answers y of both sides are candidates, and each is scored after
each document d: p(y) = Σ_d ω(d) p(y | d), over the documents of both sides. The likeliest candidate is the answer.
DRDG/SW (the paper's baseline, mode `sequence-wise`) mixes the distributions of two different texts position by position
instead; what comes out is neither's answer, and has no such p(y).

The query and the device's candidates go to the cloud as token ids: what they tell of the device's documents is told.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.special import logsumexp

from ondevice.causal_lm import Session
from ondevice.dragon import decisions
from ondevice.dragon.aggregation import Floats
from ondevice.dragon.live.centralised import Ids, Request, beside, prefixes, received, together
from ondevice.dragon.live.decoder import Choose
from ondevice.dragon.live.device import Answer, Asked, Device
from ondevice.dragon.live.node import Node
from ondevice.dragon.messages import Begin, Candidates, Propose, Scores
from ondevice.dragon.speculative_aggregation import Stream


async def rag_sequence(
    device: Device, query: str, asked: Asked | None = None, *, on_token: Callable[[int], None] | None = None
) -> Answer:
    """The likeliest of the candidates of both sides' k documents each; all its tokens come at once.

    asked: of it count k, limit, temperature, seed, and the mode `shared`. With temperature 0 candidates are greedy and
    scored at temperature 1; otherwise they are drawn, each with noise of its own, and scored at that temperature.
    Raises ValueError on a request that cannot be, on a cloud that refuses, and where a candidate of one side has no
    room in the context after a document of the other; Lost where there is no cloud.
    """
    async with Request(device, query, asked, on_token, cloud=True) as request:
        side = Side(request.node, request.begin, request.stop, Stream.DEVICE, device.pace, device.prefill)
        async with request.connected(Propose(request.begin)) as connection:

            async def propose() -> list[Ids]:
                own = await beside(side.candidates, request.stop)
                request.answer.prefilled = side.prefilled
                connection.send(Candidates(request.begin.session, tuple(own)))
                return own

            own, theirs = await together(propose(), received(connection, Candidates))
            found = union(own, theirs.sequences)
            mine, other = await together(
                beside(lambda: side.log_probs(found), request.stop), received(connection, Scores)
            )
            if len(other.log_probs) != len(found):
                raise ValueError(f"The cloud has scored {len(other.log_probs)} candidates, not {len(found)}.")
            whole = np.concatenate([mine, other.log_probs], axis=1)
        best = int(marginal(whole, [*side.log_weights, *other.log_weights]).argmax())
        for token in found[best]:
            request.emitted(token, time.perf_counter() - request.began)
    return request.answer


def marginal(log_probs: ArrayLike, log_weights: ArrayLike) -> Floats:
    """[C] log p(y) of each candidate: Σ_d ω(d) p(y | d) with ω the softmax of the log weights.

    log_probs: [C, D]. log_weights: [D], not normalised. Raises ValueError on shapes that do not fit.
    """
    each, weights = np.asarray(log_probs, float), np.asarray(log_weights, float)
    if each.ndim != 2 or not each.size or weights.shape != each.shape[1:]:
        raise ValueError(f"C candidates after D documents are [C, D] and [D], not {each.shape} and {weights.shape}.")
    return np.asarray(logsumexp(each + weights, axis=1) - logsumexp(weights))


def union(device: Iterable[Ids], cloud: Iterable[Ids]) -> list[Ids]:
    """All candidates, each once: the device's, then the cloud's others; both sides number them so."""
    return list(dict.fromkeys([*device, *cloud]))


class Side:
    """One side's part. Both methods run the model, in a thread; they end early, with nothing right, once `stop` is set.

    pace, prefill: seconds that one token of all its candidates takes at least, and the first with all before it.
    log_weights: [D] relevance of the side's documents over the temperature, not normalised.
    prefilled: seconds until the first tokens were there. Both are known after `candidates`.
    """

    def __init__(
        self, node: Node, begin: Begin, stop: threading.Event, stream: Stream, pace: float = 0.0, prefill: float = 0.0
    ) -> None:
        self.node, self.begin, self.stop, self.stream = node, begin, stop, stream
        self.pace, self.prefill = pace, prefill
        self.log_weights, self.prefilled = list[float](), 0.0
        self._readings = list[_Reading]()

    def candidates(self) -> list[Ids]:
        """An answer from each document, those that are the same once. Raises as `Documents.best`, and on no room."""
        start = time.perf_counter()
        running = self._readings = list(self._read())
        for position in range(min([self.begin.limit, *(reading.room for reading in running)])):
            for reading in running:
                if self.stop.is_set():
                    return []
                with self.node.lock:
                    reading.step(position)
            running = [reading for reading in running if reading.tokens[-1] != self.node.end]
            least = self.pace if position else self.prefill
            stopped = self.stop.wait(max(0.0, least - (time.perf_counter() - start)))
            now = time.perf_counter()
            self.prefilled, start = self.prefilled or now - start, now
            if stopped or not running:
                break
        return union((tuple(reading.tokens) for reading in self._readings), ())

    def log_probs(self, candidates: Sequence[Ids]) -> Floats:
        """[C, D] log p(candidate | document). Raises ValueError where one is none of this model, or has no room."""
        found = np.zeros((len(candidates), len(self._readings)))
        for row, tokens in enumerate(candidates):
            for column, reading in enumerate(self._readings):
                if self.stop.is_set():
                    return found
                with self.node.lock:
                    found[row, column] = reading.log_prob(tokens)
        return found

    def _read(self) -> Iterator[_Reading]:
        node, begin = self.node, self.begin
        texts, scores = node.documents.best(begin.query, begin.k)
        suffix = node.template.suffix(node.tokenizer, begin.query)
        self.log_weights = [score / node.weight_temperature for score in scores]
        for number, prefix in enumerate(prefixes(node, texts)):
            noise = msgspec.structs.replace(begin, seed=(begin.seed + number) % 2**63)
            if self.stop.is_set():
                return
            with node.lock:
                made = _Reading.of(node, prefix, suffix, begin.temperature, decisions.drafts(noise, self.stream))
            yield made


@dataclass(eq=False)
class _Reading:
    """One document with the query. first: [V] log probabilities of the token after it. prompt: its tokens."""

    session: Session
    choose: Choose
    temperature: float
    first: Floats
    prompt: int
    tokens: list[int]

    @classmethod
    def of(cls, node: Node, prefix: Ids, suffix: list[int], temperature: float, choose: Choose) -> _Reading:
        """Prefill, the document from the node's store where it has one."""
        lm, prompt = node.lm, [*prefix, *suffix]
        session = lm.start(len(prompt)) if node.store is None else node.store.session(prefix, len(prompt))
        first = _log_softmax(session.prefill(prompt[session.length :]), temperature or 1.0)
        return cls(session, choose, temperature or 1.0, first, len(prompt), [])

    @property
    def room(self) -> int:
        """Tokens of an answer that fit; the last one is not given to the model."""
        return self.session.lm.context - self.prompt + 1

    def step(self, position: int) -> None:
        """Choose the next token of the document's own answer."""
        following = self.first
        if self.tokens:
            following = _log_softmax(self.session.extend(self.tokens[-1:])[-1], self.temperature)
        self.tokens.append(self.choose(position, following))

    def log_prob(self, tokens: Ids) -> float:
        """log p(tokens | document, query), in one forward."""
        lm = self.session.lm
        if len(tokens) > self.room:
            raise ValueError(
                f"A candidate of {len(tokens)} tokens has no room after {self.prompt} in the context of {lm.context}."
            )
        if not 0 <= min(tokens) <= max(tokens) < lm.vocabulary:
            raise ValueError(f"A candidate has a token that is not in the model's {lm.vocabulary}.")
        found = float(self.first[tokens[0]])
        if len(tokens) > 1:
            self.session.rollback(self.prompt)
            rows = _log_softmax(self.session.extend(tokens[:-1]), self.temperature)
            found += float(rows[np.arange(len(rows)), tokens[1:]].sum())
        return found


def _log_softmax(logits: torch.Tensor, temperature: float) -> Floats:
    """Over the last axis, of logits over the temperature."""
    return (logits.cpu().double() / temperature).log_softmax(-1).numpy()

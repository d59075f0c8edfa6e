"""One side that generates by itself, without aggregation."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ondevice.dragon import codec
from ondevice.dragon.aggregation import Floats
from ondevice.dragon.decisions import Choose
from ondevice.dragon.live.decoder import Decoder


class Token(NamedTuple):
    """A token and what it was drawn from, encoded. seconds: that it took. prior: [V], where the decoder has one."""

    position: int
    token: int
    distribution: bytes
    seconds: float
    prior: Floats | None


def generate(
    decoder: Decoder, choose: Choose, limit: int, *, lock: threading.Lock, stop: threading.Event,
    cap: int = codec.CAP, pace: float = 0.0, prefill: float = 0.0,
) -> Iterator[Token]:  # fmt: skip
    """Tokens from the decoder's position up to `limit` in all, or to an end token, or until `stop` is set.

    Drawn from the same encoded distributions as in a session. pace, prefill: seconds that each and the first of all
    take at least. lock: held while the model runs.
    """
    while decoder.position < limit and not decoder.ended and decoder.room > 0 and not stop.is_set():
        start, position = time.perf_counter(), decoder.position
        with lock:
            p = np.exp(decoder.next_distribution())
            prior = decoder.prior
        payload = codec.encode(p, cap, prior)
        with np.errstate(divide="ignore"):
            token = choose(position, np.log(codec.decode(payload, decoder.lm.vocabulary)))
        decoder.commit(token)
        if stop.wait(max(0.0, (pace if position else prefill) - (time.perf_counter() - start))):
            return
        yield Token(position, token, payload, time.perf_counter() - start, prior)


def follow(decoder: Decoder, tokens: Sequence[int]) -> None:
    """Bring a decoder to exactly these generated tokens, keeping what it has of them."""
    same = 0
    for mine, other in zip(decoder.tokens, tokens, strict=False):
        if mine != other:
            break
        same += 1
    decoder.rollback(same)
    for token in tokens[same:]:
        decoder.commit(token)

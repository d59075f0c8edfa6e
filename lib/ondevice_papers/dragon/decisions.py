"""How a session draws its drafts and decides its tokens: by Algorithm 1, by shared randomness, or greedily."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from ondevice_papers.dragon import codec
from ondevice_papers.dragon.aggregation import Floats, target
from ondevice_papers.dragon.messages import Begin
from ondevice_papers.dragon.scheduler import Greedy, Lagging, Scheduler
from ondevice_papers.dragon.side import Decide, DraftMessage
from ondevice_papers.dragon.speculative_aggregation import (
    Stream,
    aggregate,
    aggregate_shared,
    choose,
    gumbels,
    sample,
    uniforms,
)

# Chooses the next token at a position from its log probabilities [V]: greedy, or drawn with noise of that position.
Choose = Callable[[int, Floats], int]


class Undecidable(ValueError):
    """Two drafts that no honest peer sends: nothing can be decided from them, now or after a new connection."""


def draft(begin: Begin, stream: Stream, position: int, log_probs: Floats) -> int:
    """The token that a side drafts from its own distribution: log probabilities [V] that sum to 1.

    stream: the side's, DEVICE or CLOUD.
    """
    if begin.temperature == 0:
        return int(log_probs.argmax())
    p = np.exp(log_probs)
    if begin.mode == "shared":
        return int(choose(p, gumbels(begin.seed, position, len(p))))
    return int(sample(p, uniforms(begin.seed, stream, position, 1)[0]))


def drafts(begin: Begin, stream: Stream) -> Choose:
    """How a side draws its drafts: `draft` in one session."""
    return partial(draft, begin, stream)


def decide(
    begin: Begin, local: DraftMessage, remote: DraftMessage, position: int, prior: Floats
) -> tuple[int, bool, bool]:
    """The target token, and whether the local and the remote draft are accepted.

    The target is made of both sides' distributions as a receiver fills them in, so that it is the same on either side.
    prior: [V] of this side's model without documents. Raises ValueError on a draft that its distribution cannot give.
    """
    sent = local.distribution, remote.distribution
    p_local, p_remote = (codec.filled(payload, prior) for payload in sent)
    mixed = target(p_local, p_remote, local.log_weight, remote.log_weight)
    if begin.temperature == 0:
        token = int(mixed.argmax())
        return token, local.token == token, remote.token == token
    if begin.mode == "shared":
        noise = gumbels(begin.seed, position, len(prior))
        aggregation = aggregate_shared(local.token, remote.token, mixed, noise)
    else:
        p_local, p_remote = (codec.decode(payload, len(prior)) for payload in sent)
        require_drawn(local.token, p_local)
        require_drawn(remote.token, p_remote)
        numbers = uniforms(begin.seed, Stream.AGGREGATION, position)
        aggregation = aggregate(local.token, remote.token, p_local, p_remote, mixed, numbers, begin.gamma_remote)
    return int(aggregation.token), bool(aggregation.accepted_local), bool(aggregation.accepted_remote)


def decision(
    begin: Begin, priors: Mapping[int, Floats], decide: Callable[..., tuple[int, bool, bool]] = decide
) -> Decide:
    """How the aggregator decides. priors: by position, [V] of this side's model without documents.

    decide: the function above, or an experiment's. It raises Undecidable where a draft cannot have been drawn from its
    distribution.
    """

    def checked(local: DraftMessage, remote: DraftMessage, position: int) -> tuple[int, bool, bool]:
        try:
            return decide(begin, local, remote, position, priors[position])
        except ValueError as error:
            raise Undecidable(str(error)) from None

    return checked


def require_drawn(token: int, p: Floats) -> None:
    """Raise ValueError on a draft that cannot have been drawn from p [V]: the target would be distributed otherwise."""
    if not (0 <= token < len(p) and p[token] > 0):
        raise ValueError(f"Token {token} has probability 0; it was not drawn from this distribution.")


def mover(begin: Begin, rtt: float) -> Scheduler:
    """The session's scheduler; rtt: the round trip in seconds, as first measured."""
    if begin.scheduler == "greedy":
        return Greedy(rtt)
    return Lagging(rtt) if begin.scheduler == "lagging" else Scheduler()


def lookahead(begin: Begin) -> int:
    """Token-wise aggregation drafts nothing past an undecided token."""
    return 1 if begin.mode == "token-wise" else begin.lookahead

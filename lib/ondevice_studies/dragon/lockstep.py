"""Both sides in one process, token by token, without a clock: greedy answers, and how often each rule accepts a draft.

At each token the acceptance of every rule is computed from the two distributions, not drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ondevice_papers.dragon import codec
from ondevice_papers.dragon.aggregation import Floats, share, target
from ondevice_papers.dragon.speculative_aggregation import acceptance, divergence, shared_acceptance
from ondevice_programs.pair.decoder import Decoder, next_together
from ondevice_programs.pair.node import Node
from ondevice_programs.pair.terminal import FUNCTION_WORDS  # the paper does not say which words it counts

RULES = ("greedy", "Algorithm 1", "remote first", "shared randomness")
DRAGON, WHOLE, ON_DEVICE, ON_CLOUD, NONE = "DRAGON", "DRAGON, uncut", "device alone", "cloud alone", "no documents"
METHODS = (DRAGON, WHOLE, ON_DEVICE, ON_CLOUD, NONE)
USED = {ON_DEVICE: ("device",), ON_CLOUD: ("cloud",), NONE: ("device",)}  # sides, of the methods that have not both


@dataclass(frozen=True)
class AggregatedPosition:
    """A position at which both sides, or one, have their next distributions.

    p: by side, [V] what drafts are drawn from. told: [V] what the other side takes for it. log_weight: log h. sizes:
    bytes. whole: [V] the side's own mixture. prior: [V] without documents.
    """

    p: Mapping[str, Floats]
    told: Mapping[str, Floats]
    log_weight: Mapping[str, float]
    sizes: Mapping[str, int]
    whole: Mapping[str, Floats]
    prior: Floats


def step(
    sides: Mapping[str, Decoder], cap: int | None = codec.CAP, filled: Callable[..., Floats] = codec.filled
) -> AggregatedPosition:
    """What the sides tell each other at their next position. cap None: no codec. filled: of `codec`, or another."""
    whole = {name: np.exp(decoder.next_distribution()) for name, decoder in sides.items()}
    weights = {name: decoder.log_weight for name, decoder in sides.items()}
    prior = np.asarray(sides["device" if "device" in sides else "cloud"].prior)
    if cap is None:
        return AggregatedPosition(whole, whole, weights, dict.fromkeys(sides, 0), whole, prior)
    coded = {name: codec.encode(p, cap, sides[name].prior) for name, p in whole.items()}
    p = {name: codec.decode(payload, len(prior)) for name, payload in coded.items()}
    received = {name: filled(payload, prior) for name, payload in coded.items()}
    return AggregatedPosition(
        p, received, weights, {name: len(payload) for name, payload in coded.items()}, whole, prior
    )


def answer(
    nodes: Mapping[str, Node],
    query: str,
    method: str = DRAGON,
    k: int = 2,
    limit: int = 40,
    **hooks: Callable[..., Any],
) -> tuple[list[int], float, list[dict[str, Any]]]:
    """A greedy answer of a method: as of `answers`."""
    sides = {name: nodes[name].decoder(query, k)[0] for name in USED.get(method, nodes)}
    return answers([sides], method, limit, **hooks)[0]


def answers(
    sessions: Sequence[Mapping[str, Decoder]],
    method: str,
    limit: int,
    *,
    target: Callable[..., Floats] = target,
    acceptance: Callable[..., float] = acceptance,
    filled: Callable[..., Floats] = codec.filled,
) -> list[tuple[list[int], float, list[dict[str, Any]]]]:
    """Greedy answers to some questions at once, a forward for a token of each.

    sessions: the new decoders of a question, by side, of one model. Returns of each: tokens, the least margin of the
    likeliest token over the next, and of DRAGON a row per token and side, as of `accepted`. target, acceptance, filled:
    the functions of `aggregation`, `speculative_aggregation` and `codec`, or an experiment's.
    """
    results: list[tuple[list[int], list[float], list[dict[str, Any]]]] = [([], [1.0], []) for _ in sessions]
    steps = [greedily(sides, method, target=target, filled=filled) for sides in sessions]
    while running := [
        number
        for number, sides in enumerate(sessions)
        if len(results[number][0]) < limit and not any(decoder.ended for decoder in sides.values())
    ]:
        waiting = [decoder for number in running for decoder in sessions[number].values() if decoder.in_line]
        if len(waiting) > 1:
            next_together(waiting)
        for number in running:
            tokens, margins, rows = results[number]
            now, p = next(steps[number])
            tokens.append(int(p.argmax()))
            second, first = np.partition(p, -2)[-2:]
            margins.append(float(first - second))
            if method == DRAGON:
                rows += accepted(now, p, tokens[-1], acceptance)
    return [(tokens, min(margins), rows) for tokens, margins, rows in results]


def greedily(
    sides: Mapping[str, Decoder], method: str, *, target: Callable[..., Floats] = target,
    filled: Callable[..., Floats] = codec.filled,
) -> Iterator[tuple[AggregatedPosition, Floats]]:  # fmt: skip
    """A method's next step and distribution [V], whose likeliest token is committed, until the end token."""
    while not any(decoder.ended for decoder in sides.values()):
        now = step(sides, codec.CAP if method == DRAGON else None, filled)
        if len(sides) == 2:
            p = target(now.told["device"], now.told["cloud"], now.log_weight["device"], now.log_weight["cloud"])
        else:
            (p,) = now.whole.values()
            p = now.prior if method == NONE else p
        for decoder in sides.values():
            decoder.commit(int(p.argmax()))
        yield now, p


def accepted(
    now: AggregatedPosition, mixed: Floats, token: int, acceptance: Callable[..., float] = acceptance
) -> list[dict[str, Any]]:
    """A row a side: eta, tv, lost, bytes and the acceptance of its draft by each rule.

    eta: the side's share of the target. tv: total variation between what the two sides draw from. lost: that by which
    the receiver's idea of this side's distribution differs from it. Rules: whether the greedy draft is the target;
    Algorithm 1 as printed; with the resample of the side that does not aggregate, here this one, always taken
    (gamma 1); with shared randomness.
    """
    rows = []
    for name, other in (("device", "cloud"), ("cloud", "device")):
        whole = now.whole[name]
        p = now.p[name]
        rows.append({
            "side": name, "token": token, "eta": share(now.log_weight[name], now.log_weight[other]),
            "tv": divergence(now.p["device"], now.p["cloud"]), "lost": divergence(whole / whole.sum(), now.told[name]),
            "bytes": now.sizes[name], "greedy": float(p.argmax() == token), "Algorithm 1": acceptance(p, mixed, 0.5),
            "remote first": acceptance(p, mixed, 1.0), "shared randomness": shared_acceptance(p, mixed),
        })  # fmt: skip
    return rows


def function_word(word: str) -> bool:
    """Whether a token is one of FUNCTION_WORDS or has neither letter nor digit."""
    plain = word.strip().lower()
    return plain in FUNCTION_WORDS or not any("0" <= c <= "9" or "a" <= c <= "z" for c in plain)

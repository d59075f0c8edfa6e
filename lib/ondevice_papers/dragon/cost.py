"""Latency per token of Speculative Aggregation, and which side should aggregate (sections 5 and 6; Table 1, Eqs. 6-9).

The aggregator's side is local, l; the other one is remote, r. All times are in one unit. Aggregation itself takes none.

The paper prints 2 c_trans^l in Eq. 7 where it means the round trip, rtt = c_trans^l + c_trans^r; with that, its Eqs. 8
and 9 follow, which are right as printed.

Eq. 7 lets each of Table 1's cases repeat for ever. Against the timelines of `aggregation_times` with random acceptance
it is exact if c_dec^l <= c_dec^r, if c_dec^l >= c_dec^r + rtt, and if the local side's drafts are all rejected. In
between it is an upper bound: while the aggregator waits for the remote side after a rejection, a local side with
accepted drafts decodes ahead, and saves some of its own time later. Theorem 3's speed-up is then a lower bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import inf, isfinite


@dataclass(frozen=True)
class Costs:
    """What a draft costs. Raises ValueError on a time that is negative or not finite.

    decode_local, decode_remote: c_dec^l and c_dec^r, the decoding of one draft.
    send_local: c_trans^l, from the local to the remote side. send_remote: c_trans^r, the other way.
    """

    decode_local: float
    decode_remote: float
    send_local: float
    send_remote: float

    def __post_init__(self) -> None:
        for field in fields(self):
            time = getattr(self, field.name)
            if not (isfinite(time) and time >= 0):
                raise ValueError(f"{field.name} is a time, finite and not negative, not {time}.")

    @property
    def round_trip(self) -> float:
        """Time there and back, rtt."""
        return self.send_local + self.send_remote

    @property
    def exchanged(self) -> Costs:
        """The same costs, seen from the other side."""
        return Costs(self.decode_remote, self.decode_local, self.send_remote, self.send_local)


def remaining(total: float, elapsed: float) -> float:
    """φ: what is left of a process of length `total` that began `elapsed` ago (section 5)."""
    return max(0.0, total - elapsed)


def waiting_time(
    costs: Costs,
    accepted_local: bool,
    accepted_remote: bool,
    elapsed_local: float = 0.0,
    elapsed_remote: float = 0.0,
) -> float:
    """From an aggregation to the next pair of drafts (Table 1).

    elapsed_local, elapsed_remote: how long ago the decoding of the next draft began; counts only after acceptance.
    """
    local = remaining(costs.decode_local, elapsed_local if accepted_local else 0.0)
    if accepted_remote:
        return max(local, remaining(costs.decode_remote + costs.send_remote, elapsed_remote))
    return max(local, costs.send_local + costs.decode_remote + costs.send_remote)


def aggregation_times(costs: Costs, accepted_local: Sequence[bool], accepted_remote: Sequence[bool]) -> list[float]:
    """[N + 1] when the aggregations take place whose first N have these outcomes [N]; decoding begins at 0 (Figure 4).

    Each side decodes on without a limit until its draft is rejected. Raises ValueError on lengths that differ.
    """
    if len(accepted_local) != len(accepted_remote):
        raise ValueError(f"Both sides have an outcome each, not {len(accepted_local)} and {len(accepted_remote)}.")
    began_local = began_remote = 0.0
    times = [max(costs.decode_local, costs.decode_remote + costs.send_remote)]
    for local, remote in zip(accepted_local, accepted_remote, strict=True):
        now = times[-1]
        began_local = began_local + costs.decode_local if local else now
        began_remote = began_remote + costs.decode_remote if remote else now + costs.send_local
        times.append(now + waiting_time(costs, local, remote, now - began_local, now - began_remote))
    return times


def latency_per_token(costs: Costs, acceptance_remote: float) -> float:
    """Z^l: time between aggregations if the local side goes on aggregating (Eq. 7).

    acceptance_remote: α^r, of the remote side's drafts when the local side aggregates.
    Z^r: the same with costs.exchanged and the acceptance of the local side's drafts when the remote side aggregates.
    """
    accepted = max(costs.decode_local, costs.decode_remote)
    rejected = max(costs.decode_local, costs.decode_remote + costs.round_trip)
    return acceptance_remote * accepted + (1 - acceptance_remote) * rejected


def should_move(costs: Costs, acceptance_local: float, acceptance_remote: float) -> bool:
    """Whether the remote side should aggregate next: s* of Eq. 6. In a tie the aggregator stays.

    acceptance_local: α^l, of the local side's drafts when the remote side aggregates. With gamma_remote below or above
    0.5 that is not the share of them that is accepted now.
    """
    return latency_per_token(costs, acceptance_remote) > latency_per_token(costs.exchanged, acceptance_local)


def latency_difference(costs: Costs, acceptance_local: float, acceptance_remote: float) -> float:
    """ΔZ = Z^l - Z^r: what moving the aggregator to the remote side saves a token (Eq. 8, as printed)."""
    local, remote, rtt = costs.decode_local, costs.decode_remote, costs.round_trip
    if local <= remote - rtt:
        return (1 - acceptance_remote) * rtt
    if local > remote + rtt:
        return (acceptance_local - 1) * rtt
    rejection = 1 - (acceptance_local if local <= remote else acceptance_remote)
    return rejection * (remote - local) + (acceptance_local - acceptance_remote) * rtt


def speedup(costs: Costs, acceptance_remote: float) -> float:
    """S: how many times faster than token-wise aggregation, which waits as if all drafts were rejected (Theorem 3).

    The printed Eq. 9, turned over. inf if drafts that are always accepted cost no time.
    """
    local, remote, rtt = costs.decode_local, costs.decode_remote, costs.round_trip
    if local > remote + rtt:
        return 1.0
    saved = rtt / (remote + rtt) if local <= remote else 1 - local / (remote + rtt)
    inverse = 1 - saved * acceptance_remote
    return 1 / inverse if inverse > 0 else inf

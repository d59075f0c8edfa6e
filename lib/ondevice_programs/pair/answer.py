"""What is asked of a device, and what comes."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import get_type_hints

import msgspec

from ondevice_papers.dragon import codec
from ondevice_papers.dragon.aggregation import Floats, share
from ondevice_papers.dragon.messages import Begin, Cited, DraftMessage, Mode, Moves, Side


@dataclass(frozen=True)
class AnswerSettings:
    """How an answer is made; the names are those of `messages.Begin`. By default it is greedy: temperature 0.

    seed None: a new one for each answer.
    """

    k: int = 2
    limit: int = 64
    mode: Mode = "speculative"
    aggregator: Side = "device"
    scheduler: Moves = "stay"
    temperature: float = 0.0
    gamma_remote: float = 0.5
    lookahead: int = 16
    cap: int = codec.CAP
    seed: int | None = None


@dataclass(eq=False)
class Answer:
    """What came, and how. Times in seconds from the question.

    times: [n] when each token was known here. device, cloud: [decided, accepted] of each side's drafts, as far as this
    side knows: the cloud's where the device aggregated. decisions: those of the device: position, whether its and the
    cloud's draft were accepted, and the seconds that each draft took. alone_from: the first position that the device
    generated alone, None where there is none; reason: why. prefilled: when the device's first distribution was there.
    moves: of the aggregator, from and to this side. sources: (side, document), best first, as far as they are known.
    share: of the device in the mixture (η), None where the cloud's is not known.
    readable: the first so many tokens, at most, could be read by the cloud.
    sent, received: bytes of messages; left: those sent, by kind. connections: how many were used. rtt: seconds.
    """

    tokens: list[int] = field(default_factory=list)
    decisions: list[tuple[int, bool, bool, float, float]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    device: list[int] = field(default_factory=lambda: [0, 0])
    cloud: list[int] = field(default_factory=lambda: [0, 0])
    alone_from: int | None = None
    reason: str = ""
    prefilled: float | None = None
    moves: int = 0
    sources: list[tuple[Side, Cited]] = field(default_factory=list)
    share: float | None = None
    readable: int = 0
    sent: int = 0
    received: int = 0
    left: dict[str, int] = field(default_factory=dict)
    connections: int = 0
    rtt: float | None = None
    text: str = ""
    evidence: dict[int, tuple[DraftMessage, DraftMessage, Floats]] = field(default_factory=dict, repr=False)

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.times[0]

    @property
    def per_token(self) -> float:
        """Mean seconds between tokens after the first; NaN of fewer than two."""
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1) if len(self.times) > 1 else float("nan")

    @property
    def leaning(self) -> list[float | None]:
        """[n] how much of each token's probability came from the device's documents; None where the cloud decided."""
        shares: list[float | None] = []
        for position, token in enumerate(self.tokens):
            if self.alone_from is not None and position >= self.alone_from:
                shares.append(1.0)
            elif position in self.evidence:
                local, remote, prior = self.evidence[position]
                part = share(local.log_weight, remote.log_weight)
                local_p = part * codec.filled(local.distribution, prior)[token]
                remote_p = (1 - part) * codec.filled(remote.distribution, prior)[token]
                shares.append(float(local_p / (local_p + remote_p)) if local_p + remote_p > 0 else part)
            else:
                shares.append(None)
        return shares


def request(query: str, settings: AnswerSettings) -> Begin:
    """The request of a new session. Raises ValueError on one that cannot be."""
    seed = secrets.randbits(63) if settings.seed is None else settings.seed
    if not query.strip():
        raise ValueError("The query is empty.")
    begin = Begin(session=secrets.token_hex(8), query=query, **{**vars(settings), "seed": seed})
    kinds = get_type_hints(Begin, include_extras=True)
    for name in Begin.__struct_fields__:
        value = getattr(begin, name)
        try:
            msgspec.convert(value, kinds[name])
        except msgspec.ValidationError as error:
            shown = value if not isinstance(value, str) or len(value) < 80 else f"{value[:80]}..."
            raise ValueError(f"A request's {name} cannot be {shown!r}: {error}.") from None
    return begin

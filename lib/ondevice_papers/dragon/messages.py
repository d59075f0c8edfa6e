"""What the two sides say to each other: a closed, versioned schema of small records, as MessagePack arrays.

`decode` takes nothing else: an unknown tag, a missing, unknown or wrong field, a value out of its bounds and bytes left
over each give one ValueError. Nothing is pickled, and no type comes from the peer.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import isfinite
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta
from msgspec.structs import fields

from ondevice_papers.dragon.codec import CAP, LARGEST, SMALLEST

VERSION = 6  # of the schema and of the codes in it; raised with every change
MOST = 64  # documents that a side cites at once

Mode = Literal["speculative", "shared", "token-wise", "sequence-wise", "cloud-only"]
Side = Literal["device", "cloud"]
Moves = Literal["stay", "greedy", "lagging"]
Name = Annotated[str, Meta(min_length=1, max_length=64)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Digest = Annotated[str, Meta(min_length=1, max_length=128)]
Text = Annotated[str, Meta(max_length=2**16)]
Reason = Annotated[str, Meta(min_length=1, max_length=1000)]
Share = Annotated[float, Meta(ge=0, le=1)]
Natural = Annotated[float, Meta(ge=0)]
Cap = Annotated[int, Meta(ge=SMALLEST, le=LARGEST)]
Distribution = Annotated[bytes, Meta(max_length=LARGEST)]


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=str.lower):
    """The base of all messages, a record. Raises ValueError on a number that is not finite, when made and when read."""

    def __post_init__(self) -> None:
        for name in _numbers(type(self)):
            for number in _floats(getattr(self, name)):
                if not isfinite(number):
                    raise ValueError(f"{name} takes finite numbers, not {number}.")

    @property
    def kind(self) -> str:
        """What it is, in a word."""
        return type(self).__name__.removesuffix("Message")


@cache
def _numbers(kind: type[_Message]) -> tuple[str, ...]:
    """The fields that may hold floats."""
    return tuple(field.name for field in fields(kind) if "float" in str(field.type))


def _floats(content: object) -> Iterator[float]:
    """The floats in a field, also in tuples."""
    if isinstance(content, float):
        yield content
    elif isinstance(content, tuple):
        for part in content:
            yield from _floats(part)


class Hello(_Message, frozen=True):
    """Who a side is, shown in the handshake. name: of its model, for people. model, tokenizer, template: digests.

    vocabulary: V. relevance: what scores of passages are made by, with its digest and temperature, in words. All but
    the name are equal on both sides, or they cannot work together.
    """

    version: Count
    name: Name
    model: Digest
    tokenizer: Digest
    vocabulary: Positive
    template: Digest = "none"
    relevance: Digest = "none"


class Begin(_Message, frozen=True):
    """A request, and all that both sides must have alike.

    seed: of the session's shared randomness. k: documents that the receiver retrieves. query: to retrieve and to
    answer. limit: most tokens of the answer. aggregator: who aggregates first. temperature: of the next token's
    distribution, 0 for greedy. gamma_remote: chance that the other side's resample is the target (Algorithm 1: 0.5).
    lookahead: most drafts that are not decided. cap: bytes a distribution. scheduler: what moves the aggregator; with
    `stay` it never leaves its first side. rtt: seconds, as the sender has measured it.
    """

    session: Name
    seed: Seed
    mode: Mode
    k: Positive
    query: Text
    limit: Positive
    aggregator: Side
    temperature: Natural = 1.0
    gamma_remote: Share = 0.5
    lookahead: Positive = 8
    cap: Cap = CAP
    scheduler: Moves = "stay"
    rtt: Natural = 0.0


class DraftMessage(_Message, frozen=True, tag="draft"):
    """A token that the sender drafted at `position`, counted from the answer's first token, 0.

    epoch: how many of the sender's drafts were rejected before, so that stale ones are told. distribution: what the
    token was drawn from, of `codec.encode`; empty where the mode does not send it. log_weight: log h of the sender's
    documents (section 4.1). pace: seconds that decoding it took.
    """

    session: Name
    epoch: Count
    position: Count
    token: Count
    distribution: Distribution = b""
    log_weight: float = 0.0
    pace: Natural = 0.0


class Target(_Message, frozen=True):
    """The token that stands at `position`, and whether the receiver's draft there was accepted.

    If not, the receiver rolls back and drafts on from `token`: rejection and target are one message. epoch: of the
    receiver's drafts from now on.
    """

    session: Name
    epoch: Count
    position: Count
    token: Count
    accepted: bool


class Switch(_Message, frozen=True):
    """The receiver aggregates from `position` on.

    epoch: of the sender's drafts. drafts: the sender's that are not decided, from `position` on. profile: what its
    scheduler has estimated.
    """

    session: Name
    epoch: Count
    position: Count
    drafts: Annotated[tuple[DraftMessage, ...], Meta(max_length=1024)] = ()
    profile: Annotated[tuple[float, ...], Meta(max_length=64)] = ()


class Resume(_Message, frozen=True):
    """After a lost connection: how far the sender is. position: the first without a target. epoch: of its drafts."""

    session: Name
    epoch: Count
    position: Count
    aggregates: bool


class End(_Message, frozen=True):
    """The answer is whole; position: its number of tokens."""

    session: Name
    position: Count


class Failure(_Message, frozen=True):
    """The sender gives a session up. reason: one sentence, with no text of it."""

    session: Name
    reason: Reason


class Cited(_Message, frozen=True):
    """A document that the sender decodes with. file, paragraph: where it stands; weight: its share of the side's h."""

    file: Annotated[str, Meta(max_length=1024)]
    paragraph: Count
    weight: Share


class Sources(_Message, frozen=True):
    """What the cloud's part of an answer comes from, best first, and its log h; sent once, when it is known."""

    session: Name
    cited: Annotated[tuple[Cited, ...], Meta(max_length=MOST)]
    log_weight: float


Message = Begin | DraftMessage | Target | Switch | Resume | End | Failure | Sources
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_HELLO = msgspec.msgpack.Decoder(Hello)
_T = TypeVar("_T")


def encode(message: Message | Hello) -> bytes:
    """The bytes of a message. Raises ValueError on one that the receiver would refuse."""
    try:
        body = _ENCODER.encode(message)
    except (OverflowError, TypeError, UnicodeError) as error:
        raise ValueError(f"A {message.kind} cannot be sent: {error}") from None
    (hello if isinstance(message, Hello) else decode)(body)
    return body


def decode(body: bytes) -> Message:
    """The message of these bytes. Raises ValueError on all that is none."""
    return _decoded(_DECODER, body)


def hello(body: bytes) -> Hello:
    """The handshake of these bytes. Raises ValueError on all that is none."""
    return _decoded(_HELLO, body)


def _decoded(decoder: msgspec.msgpack.Decoder[_T], body: bytes) -> _T:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ValueError(f"No message of version {VERSION}: {error}") from None


def check_peer(cloud: Hello, device: Hello) -> None:
    """Raise ValueError, in words that both sides' users know, where the two cannot work together.

    Models are compared by digest, so the same weights may have other names, and lie in other folders.
    """
    if cloud.version != device.version:
        raise ValueError(
            f"The cloud speaks version {cloud.version} of the protocol, the device version {device.version}; install "
            "the same version on both."
        )
    words = {"tokenizer": "tokenizer", "vocabulary": "vocabulary", "model": "weights"}
    for field, what in words.items():
        if getattr(cloud, field) != getattr(device, field):
            names = f"the cloud {cloud.name}, the device {device.name}"
            raise ValueError(f"The two models have not the same {what} ({names}); give both sides the same --model.")
    if cloud.template != device.template:
        raise ValueError("The chat templates of the two models differ; give both sides the same model folder.")
    if cloud.relevance != device.relevance:
        raise ValueError(
            f"The cloud scores passages by {cloud.relevance}, the device by {device.relevance}, which do not compare; "
            "give both sides the same --reranker."
        )

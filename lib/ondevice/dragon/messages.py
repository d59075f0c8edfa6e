"""What the two sides say to each other: a closed, versioned schema of small records, as MessagePack arrays.

`decode` takes nothing else: an unknown tag, a missing, unknown or wrong field, a value out of its bounds and bytes left
over each give one ValueError. Nothing is pickled, and no type comes from the peer.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ondevice.dragon.codec import CAP, LARGEST, SMALLEST

VERSION = 2  # of the schema and of the codes in it; raised with every change
MOST = 64  # documents of a side that a baseline sends at once
PIECE = 2**19  # bytes of a document's rows in one message; with all else in it below a frame's limit
_TEXTS = 2**19  # bytes of all texts of one message
_IDS = 2**17  # token ids of all candidates of one message

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
Dtype = Literal["float64", "float32", "float16", "bfloat16"]
Shape = tuple[Positive, Positive, Positive, Positive]


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=str.lower):
    """A record. Raises ValueError on a number that is not finite, when made and when read."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            for one in _floats(getattr(self, name)):
                if not isfinite(one):
                    raise ValueError(f"{name} takes finite numbers, not {one}.")


def _floats(value: object) -> Iterator[float]:
    """Those in a field."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, tuple):
        for one in value:
            yield from _floats(one)


class Hello(_Message, frozen=True):
    """The first message of the side that connects. model, tokenizer: digests, equal on both sides; vocabulary: V."""

    version: Count
    model: Digest
    tokenizer: Digest
    vocabulary: Positive


class Welcome(_Message, frozen=True):
    """The answer, with the same about the side that listens."""

    version: Count
    model: Digest
    tokenizer: Digest
    vocabulary: Positive


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


class Draft(_Message, frozen=True):
    """A token that the sender drafted at `position`, counted from the answer's first token, 0.

    epoch: how many of the sender's drafts were rejected before, so that stale ones are told. distribution: what the
    token was drawn from, of `codec.encode`; empty where the mode does not send it. log_weight: log h of the sender's
    documents (section 4.1). pace: seconds that decoding it took.
    """

    session: Name
    epoch: Count
    position: Count
    token: Count
    distribution: Distribution
    log_weight: float
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
    drafts: Annotated[tuple[Draft, ...], Meta(max_length=1024)] = ()
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


class Heartbeat(_Message, frozen=True):
    """That the sender lives. All in seconds.

    sent: the sender's clock. echo: the `sent` last heard from the receiver, 0 where none was; held: how long ago that
    came. So the receiver's round trip is now - echo - held, whatever the sender's clock shows.
    """

    sent: float
    echo: float = 0.0
    held: Natural = 0.0


class Failure(_Message, frozen=True):
    """The sender gives up: a session, or with session None the connection. reason: one sentence, with no text of it."""

    session: Name | None
    reason: Reason


# Of the baselines (section 7.2)


class Fetch(_Message, frozen=True):
    """Asks for the receiver's k best documents for a query: their texts, or their prefixes' keys and values."""

    session: Name
    query: Text
    k: Annotated[int, Meta(ge=1, le=MOST)]
    what: Literal["text", "rows"]


class Texts(_Message, frozen=True):
    """The answer to a Fetch of texts, best first. scores: relevance, one for each text."""

    session: Name
    texts: Annotated[tuple[Text, ...], Meta(min_length=1, max_length=MOST)]
    scores: Annotated[tuple[float, ...], Meta(min_length=1, max_length=MOST)]

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.texts) != len(self.scores):
            raise ValueError(f"{len(self.texts)} texts have as many scores, not {len(self.scores)}.")
        size = sum(len(text.encode()) for text in self.texts)
        if size > _TEXTS:
            raise ValueError(f"Texts take at most {_TEXTS} bytes in all, not {size}.")


class Rows(_Message, frozen=True):
    """A piece of the answer to a Fetch of rows: document 0 first, each in its pieces from 0 on.

    score: the document's relevance. tokens: [n] ids of its prefix, in piece 0; none in the others. keys, values: their
    shapes [layers, heads, n, width]. data: of both, first all keys, in C order and little-endian, cut into pieces of
    PIECE bytes and a last one.
    """

    session: Name
    document: Annotated[int, Meta(ge=0, lt=MOST)]
    documents: Annotated[int, Meta(ge=1, le=MOST)]
    score: float
    tokens: Annotated[tuple[Count, ...], Meta(max_length=2**16)]
    dtype: Dtype
    keys: Shape
    values: Shape
    piece: Count
    pieces: Positive
    data: Annotated[bytes, Meta(min_length=1, max_length=PIECE)]


class Propose(_Message, frozen=True):
    """Asks for RAG-Sequence: each side answers once from each of its documents, then scores what both have answered.

    begin: the request. Of its mode only `shared` counts, as the noise of what is drawn.
    """

    begin: Begin


class Candidates(_Message, frozen=True):
    """The sender's answers, different from each other; an end token is part of one."""

    session: Name
    sequences: Annotated[
        tuple[Annotated[tuple[Count, ...], Meta(min_length=1)], ...], Meta(min_length=1, max_length=MOST)
    ]

    def __post_init__(self) -> None:
        super().__post_init__()
        total = sum(map(len, self.sequences))
        if total > _IDS:
            raise ValueError(f"Candidates have at most {_IDS} tokens in all, not {total}.")


class Scores(_Message, frozen=True):
    """How likely each candidate is after each of the sender's D documents.

    log_probs: [C][D], log p(candidate | document), of the device's candidates and then of the cloud's that are not
    among them. log_weights: [D], the documents' relevance over the temperature, not normalised.
    """

    session: Name
    log_probs: Annotated[tuple[tuple[float, ...], ...], Meta(min_length=1, max_length=2 * MOST)]
    log_weights: Annotated[tuple[float, ...], Meta(min_length=1, max_length=MOST)]

    def __post_init__(self) -> None:
        super().__post_init__()
        for row in self.log_probs:
            if len(row) != len(self.log_weights):
                raise ValueError(f"{len(self.log_weights)} documents give as many scores, not {len(row)}.")


Message = (
    Hello | Welcome | Begin | Draft | Target | Switch | Resume | End | Heartbeat | Failure
    | Fetch | Texts | Rows | Propose | Candidates | Scores
)  # fmt: skip
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """The bytes of a message. Raises ValueError on one that the receiver would refuse."""
    try:
        found = _ENCODER.encode(message)
    except (OverflowError, TypeError, UnicodeError) as error:
        raise ValueError(f"A {type(message).__name__} cannot be sent: {error}") from None
    decode(found)
    return found


def decode(body: bytes) -> Message:
    """The message of these bytes. Raises ValueError on all that is none."""
    try:
        return _DECODER.decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ValueError(f"No message of version {VERSION}: {error}") from None


def check_peer(ours: Hello | Welcome, theirs: Hello | Welcome) -> None:
    """Raise ValueError that names the first of version, tokenizer, vocabulary and model that differs."""
    for name in ("version", "tokenizer", "vocabulary", "model"):
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine != other:
            raise ValueError(f"The other side has the {name} {other!r}, this one {mine!r}; they cannot work together.")

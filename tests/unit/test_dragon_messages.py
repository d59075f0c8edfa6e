"""The closed schema: by hand, and what each kind of bad input gives."""

from __future__ import annotations

import msgspec
import pytest

from ondevice_papers.dragon import codec, messages
from ondevice_papers.dragon.messages import (
    Begin,
    Cited,
    DraftMessage,
    End,
    Failure,
    Hello,
    Resume,
    Sources,
    Switch,
    Target,
    check_peer,
    decode,
    encode,
)
from ondevice_programs.pair import wire

DRAFT = DraftMessage("s1", 3, 41, 151_643, b"\x00\x10\x00\x00\x80", -2.5, 0.02)
BEGIN = Begin("s1", 7, "shared", 4, "What does it return?", 100, "device")
EVERY = [
    BEGIN,
    DRAFT,
    Target("s1", 3, 41, 151_643, False),
    Switch("s1", 3, 41, (DRAFT,), (0.5, 0.02)),
    Resume("s1", 3, 41, True),
    End("s1", 42),
    Failure("s1", "There is no room."),
    Sources("s1", (Cited("a/b.txt", 3, 0.25),), -1.5),
]
NO_MESSAGE = f"No message of version {messages.VERSION}"
ANY_FLOAT = {(DraftMessage, 6), (Sources, 3)}  # fields that take whole numbers below 0 as well


def test_every_bound_keeps_a_message_within_a_frame():
    """The longest question, in characters of four bytes, and as many documents as are cited, with the longest paths."""
    text, large = "\U0001f600" * 2**16, 2**31 - 1
    begin = Begin("s" * 64, 2**63 - 1, "token-wise", large, text, large, "device")
    sources = Sources("s" * 64, (Cited("\U0001f600" * 1024, large, 1.0),) * messages.MOST, 0.5)
    for message in (begin, sources):
        assert 200_000 < len(encode(message)) < wire.LIMIT - 64
        assert decode(encode(message)) == message


@pytest.mark.parametrize("message", EVERY, ids=lambda message: type(message).__name__)
def test_fields_are_exactly_the_schemas(message):
    fields = msgspec.msgpack.decode(encode(message))
    for place in range(1, len(fields)):
        for wrong in ({"a": 1}, [[]], -(2**63), 2**64 - 1, "\0" * 2**17, bytes(2**15)):
            if not (isinstance(wrong, int) and isinstance(fields[place], float) and wrong > 0):  # a float may be whole
                if isinstance(wrong, int) and (type(message), place) in ANY_FLOAT:
                    continue
                with pytest.raises(ValueError, match=NO_MESSAGE):
                    decode(msgspec.msgpack.encode([*fields[:place], wrong, *fields[place + 1 :]]))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "truncated"),
        (encode(DRAFT)[:-1], "truncated"),
        # a pickle of ("end", "s1", 1), written out: no test needs the module either
        (b"\x80\x04\x95\x10\0\0\0\0\0\0\0\x8c\x03end\x94\x8c\x02s1\x94K\x01\x87\x94.", NO_MESSAGE),
        (msgspec.msgpack.encode(["end", "s1", True]), "bool"),
        (msgspec.msgpack.encode(["sources", "s", [], float("nan")]), "log_weight"),
        (msgspec.msgpack.encode(["draft", "s", 0, 0, 0, bytes(codec.LARGEST + 1), 0.0]), "length"),
    ],
)  # fmt: skip
def test_what_is_no_message_is_refused(body, said):
    with pytest.raises(ValueError, match=said):
        decode(body)


@pytest.mark.parametrize(
    "make",
    [
        lambda: DraftMessage("s", 0, 0, 1, b"", float("inf")),
        lambda: DraftMessage("\ud800", 0, 0, 1, b"", 0.0),
        lambda: ["end", "s", 1, 2],
    ],
)
def test_what_the_receiver_would_refuse_is_not_sent(make):
    with pytest.raises(ValueError):
        encode(make())


HELLO = Hello(messages.VERSION, "base", "m" * 64, "t" * 64, 8_192)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("version", 99, "99"),
        ("model", "x", "weights"),
        ("tokenizer", "x", "tokenizer"),
        ("template", "x", "templates"),
        ("relevance", "minilm (0f, 1e) over 1", "--reranker"),
    ],
)
def test_peers_that_differ_are_told(field, value, said):
    assert messages.hello(encode(HELLO)) == HELLO
    check_peer(HELLO, msgspec.structs.replace(HELLO, name="another name of the same weights"))
    with pytest.raises(ValueError, match=said):
        check_peer(msgspec.structs.replace(HELLO, **{field: value}), HELLO)


def test_a_greeting_is_no_message():
    with pytest.raises(ValueError, match=NO_MESSAGE):
        decode(encode(HELLO))
    with pytest.raises(ValueError, match=NO_MESSAGE):
        messages.hello(encode(EVERY[0]))

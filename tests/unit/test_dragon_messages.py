"""The closed schema: by hand, and what each kind of bad input gives."""

from __future__ import annotations

import ast
from pathlib import Path

import msgspec
import pytest

from ondevice_papers.dragon import codec, messages
from ondevice_papers.dragon.messages import (
    Begin,
    Cited,
    Draft,
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

DRAFT = Draft("s1", 3, 41, 151_643, b"\x00\x10\x00\x00\x80", -2.5, 0.02)
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
ANY_FLOAT = {(Draft, 6), (Sources, 3)}  # fields that take whole numbers below 0 as well


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
    with pytest.raises(ValueError, match="length"):
        decode(msgspec.msgpack.encode([*fields, 0]))
    with pytest.raises(ValueError, match="length"):
        decode(msgspec.msgpack.encode(fields[:1]))
    with pytest.raises(ValueError, match="`array`"):
        decode(msgspec.msgpack.encode(dict.fromkeys(map(str, range(3)))))
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
        (b"\x93\xa3nop\xa2ab\x01", "'nop'"),
        (encode(DRAFT)[:-1], "truncated"),
        (encode(DRAFT) + b"\0", "trailing"),
        (b"\x93\xa3end\xa2\xff\xff\x01", "utf-8"),
        # a pickle of ("end", "s1", 1), written out: no test needs the module either
        (b"\x80\x04\x95\x10\0\0\0\0\0\0\0\x8c\x03end\x94\x8c\x02s1\x94K\x01\x87\x94.", NO_MESSAGE),
        (msgspec.msgpack.encode(["end", "s1", True]), "`int`, .* `bool`"),
        (msgspec.msgpack.encode(["end", "", 1]), "length >= 1"),
        (msgspec.msgpack.encode(["sources", "s", [], float("nan")]), "log_weight .* nan"),
        (msgspec.msgpack.encode(["draft", "s", 0, 0, 0, bytes(codec.LARGEST + 1), 0.0]), "length <= 16384"),
    ],
)  # fmt: skip
def test_what_is_no_message_is_refused(body, said):
    with pytest.raises(ValueError, match=said):
        decode(body)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Draft("s", 0, 0, -1, b"", 0.0),
        lambda: Draft("s", 0, 0, 1, b"", float("inf")),
        lambda: Draft("\ud800", 0, 0, 1, b"", 0.0),
        lambda: Draft("s", 0, 0, 1, object(), 0.0),
        lambda: Begin("s", 0, "shared", 0, "q", 1, "cloud"),
        lambda: ["end", "s", 1, 2],
    ],
)
def test_what_the_receiver_would_refuse_is_not_sent(make):
    with pytest.raises(ValueError, match=r"No message|cannot be sent|finite"):
        encode(make())


HELLO = Hello(messages.VERSION, "base", "m" * 64, "t" * 64, 8_192)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("version", 99, f"cloud .* version 99 .* device version {messages.VERSION}"),
        ("model", "x", "not the same weights .*base"),
        ("tokenizer", "x", "not the same tokenizer .*base"),
        ("template", "x", "chat templates .* differ"),
        ("relevance", "minilm (0f, 1e) over 1", "cloud scores .* minilm .* device by none.* --reranker"),
    ],
)
def test_peers_that_differ_are_told_in_words(field, value, said):
    assert messages.hello(encode(HELLO)) == HELLO
    check_peer(HELLO, msgspec.structs.replace(HELLO, name="another name of the same weights"))
    with pytest.raises(ValueError, match=said):
        check_peer(msgspec.structs.replace(HELLO, **{field: value}), HELLO)


def test_a_greeting_is_no_message():
    with pytest.raises(ValueError, match=NO_MESSAGE):
        decode(encode(HELLO))
    with pytest.raises(ValueError, match=NO_MESSAGE):
        messages.hello(encode(EVERY[0]))


@pytest.mark.parametrize("module", [codec, messages])
def test_nothing_is_pickled_or_evaluated(module):
    tree = ast.parse(Path(module.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    allowed = {
        "__future__", "bisect", "collections.abc", "dataclasses", "functools", "math", "struct", "typing",
        "numpy", "numpy.typing", "msgspec", "msgspec.structs", "ondevice_papers.dragon.aggregation",
        "ondevice_papers.dragon.codec", "ondevice_papers.dragon.messages",
    }  # fmt: skip
    assert imported <= allowed
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert not called & {"eval", "exec", "compile", "__import__"}

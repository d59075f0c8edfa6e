"""What crosses between the sides: any distribution, any message, any damage."""

from __future__ import annotations

import itertools
from fractions import Fraction

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ondevice_papers.dragon import codec, messages
from ondevice_programs.pair import wire

CAPS = st.integers(codec.SMALLEST, 700)


@st.composite
def distributions(draw, most: int = 200_000):
    """Peaked, flat, sparse, with ties, of any vocabulary; exponents far beyond what is kept, too."""
    vocabulary = min(most, draw(st.one_of(st.integers(1, 8), st.integers(1, 3000), st.sampled_from([8_192, 151_936]))))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["normal", "ties", "uniform", "few"]))
    logits = random.normal(0, draw(st.floats(0.01, 40)), vocabulary)
    if kind == "ties":
        logits = np.round(logits)
    if kind == "uniform":
        logits = np.zeros(vocabulary)
    p = np.exp(logits - logits.max())
    if kind == "few":
        kept = random.choice(vocabulary, draw(st.integers(1, min(vocabulary, 40))), replace=False)
        p[np.setdiff1d(np.arange(vocabulary), kept)] = 0
    return p / p.sum()


def bit_by_bit(payload: bytes, vocabulary: int) -> list[Fraction]:
    """A second decoder, of the format's description alone: what drafts are drawn from."""
    rice, golomb, last = payload[0] >> 3, payload[0] & 7, payload[2] << 8 | payload[3]
    bits = iter("".join(f"{byte:08b}" for byte in payload[4:]))
    high, widths = ([next_one(bits) for _ in range(last + 1)] for _ in range(2))
    weights, token = [0] * vocabulary, -1
    gaps = [(value << rice) + number(bits, rice) for value in high]
    for gap, width in zip(gaps, widths, strict=True):
        token += gap + 1
        weights[token] = ((1 << width + golomb) + number(bits, width + golomb) - (1 << golomb) + codec.LEAST) ** 2
    assert "1" not in "".join(bits)
    return [Fraction(weight, sum(weights)) for weight in weights]


def next_one(bits) -> int:
    """How many zeros come before the next one."""
    return next(place for place in itertools.count() if next(bits) == "1")


def number(bits, width: int) -> int:
    """The next `width` bits."""
    return int("0" + "".join(itertools.islice(bits, width)), 2)


@given(distributions(), CAPS, st.booleans())
def test_any_distribution_fits_and_both_ends_have_the_same(p, cap, known):
    prior = np.roll(p, 1)
    payload = codec.encode(p, cap, prior if known else None)
    found, told = codec.decode(payload, len(p)), codec.filled(payload, prior)
    assert len(payload) <= cap
    for one in (found, told):
        assert one.shape == p.shape and one.dtype == np.float64 and one.min() >= 0
        assert one.sum() == pytest.approx(1, abs=1e-12)
    assert codec.decode(bytes(payload), len(p)).tobytes() == found.tobytes()
    assert (p[found > 0] > 0).all() and found[p.argmax()] == found.max()


@given(distributions(most=400), CAPS, st.booleans())
def test_a_second_decoder_finds_the_same_numbers(p, cap, known):
    payload = codec.encode(p, cap, p[::-1].copy() if known else None)
    exact = bit_by_bit(payload, len(p))
    assert codec.decode(payload, len(p)).tolist() == [float(value) for value in exact]


def valid_or_refused(payload: bytes, vocabulary: int) -> None:
    """Either a distribution, or one ValueError."""
    prior = np.full(vocabulary, 1 / vocabulary)
    try:
        found = codec.decode(payload, vocabulary), codec.filled(payload, prior)
    except ValueError:
        return
    for one in found:
        assert one.shape == (vocabulary,) and one.min() >= 0 and one.sum() == pytest.approx(1)


@given(distributions(most=300), st.data())
def test_a_damaged_code_is_a_distribution_or_refused(p, data):
    payload = bytearray(codec.encode(p, 64))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    valid_or_refused(bytes(payload), len(p))
    valid_or_refused(bytes(payload), data.draw(st.integers(1, len(p))))


@given(distributions(most=300), CAPS)
def test_a_cut_code_is_refused(p, cap):
    payload = codec.encode(p, cap)
    for cut in {0, 1, 4, len(payload) // 2, len(payload) - 1}:
        with pytest.raises(ValueError, match="encoded"):
            codec.decode(payload[:cut], len(p))
    with pytest.raises(ValueError, match="encoded"):
        codec.decode(payload + b"\0", len(p))


# Messages

NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=64)
COUNTS = st.integers(0, 2**31 - 1)
POSITIVE = st.integers(1, 2**31 - 1)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
NATURAL = st.floats(0, allow_nan=False, allow_infinity=False)
DRAFTS = st.builds(messages.DraftMessage, NAMES, COUNTS, COUNTS, COUNTS, st.binary(max_size=600), FLOATS, NATURAL)
MESSAGES = st.one_of(
    st.builds(
        messages.Begin, NAMES, st.integers(0, 2**63 - 1), st.sampled_from(messages.Mode.__args__), POSITIVE,
        st.text(st.characters(codec="utf-8"), max_size=200), POSITIVE, st.sampled_from(messages.Side.__args__),
        NATURAL, st.floats(0, 1), POSITIVE, st.integers(codec.SMALLEST, codec.LARGEST)),
    DRAFTS,
    st.builds(messages.Target, NAMES, COUNTS, COUNTS, COUNTS, st.booleans()),
    st.builds(
        messages.Switch, NAMES, COUNTS, COUNTS, st.lists(DRAFTS, max_size=4).map(tuple),
        st.lists(FLOATS, max_size=8).map(tuple)),
    st.builds(messages.Resume, NAMES, COUNTS, COUNTS, st.booleans()),
    st.builds(messages.End, NAMES, COUNTS),
    st.builds(messages.Failure, NAMES, NAMES),
    st.builds(
        messages.Sources, NAMES,
        st.lists(st.builds(messages.Cited, NAMES, COUNTS, st.floats(0, 1)), max_size=4).map(tuple), FLOATS),
)  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8) | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)
TAGS = st.sampled_from([one.__struct_config__.tag for one in messages.Message.__args__])


@given(MESSAGES)
def test_every_message_comes_back(message):
    body = messages.encode(message)
    found = messages.decode(body)
    assert found == message
    assert type(found) is type(message)
    assert len(body) <= wire.LIMIT


def message_or_refused(body: bytes) -> None:
    """Either a message, which can be sent on, or one ValueError."""
    try:
        found = messages.decode(body)
    except ValueError as error:
        assert str(error).startswith(f"No message of version {messages.VERSION}: ")
        return
    assert isinstance(found, messages.Message)
    assert messages.decode(messages.encode(found)) == found


@given(MESSAGES, st.data())
def test_a_damaged_message_is_one_or_refused(message, data):
    body = bytearray(messages.encode(message))
    place = data.draw(st.integers(0, len(body) - 1))
    body[place] ^= data.draw(st.integers(1, 255))
    message_or_refused(bytes(body))
    message_or_refused(bytes(body[:place]))


@given(TAGS, st.lists(VALUES, max_size=8), VALUES, st.binary(max_size=80))
def test_any_value_under_any_tag_is_a_message_or_refused(tag, values, value, raw):
    for one in ([tag, *values], value, {"type": tag}):
        message_or_refused(msgspec.msgpack.encode(one))
    message_or_refused(raw)


@given(MESSAGES, VALUES, st.text(max_size=12).filter(lambda tag: tag not in {"", "draft"}))
def test_unknown_fields_and_tags_are_refused(message, more, tag):
    fields = msgspec.msgpack.decode(messages.encode(message))
    with pytest.raises(ValueError, match="length"):
        messages.decode(msgspec.msgpack.encode([*fields, more]))
    with pytest.raises(ValueError, match="'x"):
        messages.decode(msgspec.msgpack.encode([f"x{tag}", *fields[1:]]))

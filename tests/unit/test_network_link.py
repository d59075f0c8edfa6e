"""The link's model of time, and what faults make of a stream of bytes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from broken_relay import Burst, Corrupt, Cut, Drop, Fault, Piece, Repeat, Stall, Stream

from ondevice.dragon import simulator
from ondevice.network.link import SEGMENT, Line, Link, Sinusoid, Wire

DATA = bytes(range(100))

# The link


def arrivals(link: Link, times, amount: int = 100, **named) -> np.ndarray:
    line = Line(link, **named)
    return np.array([line.arrival(now, amount) for now in times])


def test_the_delay_is_added():
    assert arrivals(Link(0.3), [0.0, 0.1, 5.0]) == pytest.approx([0.3, 0.4, 5.3])


def test_the_wire_carries_one_message_after_the_other():
    assert arrivals(Link(0.1, bandwidth=1000.0), [0.0, 0.0, 1.0]) == pytest.approx([0.2, 0.3, 1.2])


def test_connections_share_the_wire_but_do_not_wait_for_each_others_delays():
    wire = Wire()
    links = Link(9.1, bandwidth=1000.0), Link(0.1, bandwidth=1000.0)
    one, other = (Line(link, 0, "up", number, wire) for number, link in enumerate(links))
    assert one.arrival(0.0, 100) == pytest.approx(9.2)
    assert other.arrival(0.0, 100) == pytest.approx(0.3)
    assert one.arrival(0.0, 100) == pytest.approx(9.4)


def test_jitter_is_uniform_seeded_and_keeps_the_order():
    times = np.arange(20_000.0)
    link = Link(0.1, 0.5)
    found = arrivals(link, times, seed=1) - times - 0.1
    assert 0 <= found.min() < 0.01 and 0.49 < found.max() <= 0.5
    assert found.mean() == pytest.approx(0.25, abs=0.01)
    assert (found == arrivals(link, times, seed=1) - times - 0.1).all()
    others = [dict(seed=2), dict(seed=1, direction="down"), dict(seed=1, connection=1)]
    for other in others:
        assert abs(np.corrcoef(found, arrivals(link, times, **other) - times)[0, 1]) < 0.05
    assert (np.diff(arrivals(link, times / 100)) >= 0).all()


def test_a_lost_segment_comes_later_and_what_is_behind_it_waits():
    times = np.arange(20_000.0)
    late = arrivals(Link(0.1, loss=0.02, retransmission=0.3), times) - times - 0.1
    assert set(late.round(9)) == {0.0, 0.3}
    assert (late > 0.2).mean() == pytest.approx(0.02, abs=0.004)
    three = arrivals(Link(loss=0.02, retransmission=0.3), times, amount=2 * SEGMENT + 1) - times
    assert (three > 0.2).mean() == pytest.approx(1 - 0.98**3, abs=0.006)
    close = arrivals(Link(0.1, loss=0.02), times / 1000)
    lost = int(np.flatnonzero(close - times / 1000 > 0.2)[0])
    assert close[lost] == pytest.approx(times[lost] / 1000 + 0.3)
    assert (close[lost : lost + 200] >= close[lost]).all()


def test_the_link_changes_for_what_is_sent_from_then_on():
    line = Line(Link(1.0))
    assert line.arrival(0.0, 10) == 1.0
    line.link = Link(0.1)
    assert line.arrival(0.5, 10) == 1.0  # not before what was sent before
    assert line.arrival(2.0, 10) == pytest.approx(2.1)


def test_delays_that_change_with_time():
    swing = Sinusoid(0.5, 0.1, 4.0)
    assert [swing(now) for now in (0, 1, 2, 3, 4)] == pytest.approx([0.5, 0.6, 0.5, 0.4, 0.5])
    assert Sinusoid(0.5, 0.1).period == pytest.approx(20 * math.pi)
    assert arrivals(Link(swing), [0.0, 1.0]) == pytest.approx([0.5, 1.6])


def test_the_simulator_uses_this_link():
    assert simulator.Link is Link
    none = np.zeros((200, 2), bool)
    lossy = simulator.World(none, 0.1, 0.02, Link(0.1), Link(0.1, loss=0.1, retransmission=0.5), lookahead=1)
    clean = simulator.World(none, 0.1, 0.02, Link(0.1), Link(0.1), lookahead=1)
    extra = [simulator.simulate(lossy, seed=seed).total - simulator.simulate(clean).total for seed in range(20)]
    assert np.mean(extra) == pytest.approx(200 * 0.1 * 0.5, rel=0.1)  # each token waits for one message of the cloud
    assert len(set(extra)) > 5


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: Link(-0.1), "delay is finite and not negative, not -0.1"),
        (lambda: Link(math.nan), "not nan"),
        (lambda: Link(jitter=math.inf), "jitter is finite and not negative, not inf"),
        (lambda: Link(retransmission=-1), "retransmission is finite and not negative, not -1"),
        (lambda: Link(bandwidth=-1.0), "positive bandwidth and a loss from 0 to 1, not -1.0"),
        (lambda: Link(loss=1.1), "from 0 to 1, not inf, 1.1"),
        (lambda: Sinusoid(0.1, 0.2), "0.1 does not swing by 0.2"),
        (lambda: Sinusoid(0.1, 0.05, 0), "positive and finite, not 0"),
        (lambda: Cut(direction="left"), "up or down, not 'left'"),
        (lambda: Cut(connection=-1), "connection is a whole number from 0, not -1"),
        (lambda: Stall(at=0.5), "at is a whole number from 0, not 0.5"),
        (lambda: Stall(after=-1.0), "not -1.0"),
        (lambda: Drop(length=0), "bytes from 1, not 0"),
        (lambda: Corrupt(mask=0), "from 1 to 255, not 0"),
        (lambda: Burst(seconds=math.inf), "not inf"),
    ],
)
def test_bad_links_and_faults_are_refused(build, said):
    with pytest.raises(ValueError, match=said):
        build()


# Faults


def fed(faults: list[Fault], size: int) -> tuple[bytes, list[Piece]]:
    """What becomes of DATA that comes in parts of a size."""
    stream = Stream(faults)
    pieces = [piece for i in range(0, 100, size) for piece in stream.feed(0.0, DATA[i : i + size])]
    return b"".join(piece.data for piece in pieces), pieces


@pytest.mark.parametrize("size", [1, 3, 10, 100])
@pytest.mark.parametrize(
    ("faults", "wanted"),
    [
        ([], DATA),
        ([Stall(at=42)], DATA[:42]),
        ([Stall(at=100)], DATA),
        ([Drop(at=10, length=25)], DATA[:10] + DATA[35:]),
        ([Drop(at=90, length=25)], DATA[:90]),
        ([Corrupt(at=10, length=2, mask=0x81)], DATA[:10] + bytes([10 ^ 0x81, 11 ^ 0x81]) + DATA[12:]),
        ([Repeat(at=10, length=25)], DATA[:35] + DATA[10:]),
        ([Repeat(at=0, length=100)], DATA + DATA),
        ([Repeat(at=90, length=11)], DATA),  # its range is not over
        ([Repeat(at=10, length=25)] * 2, DATA[:35] + DATA[10:35] + DATA[10:]),
        ([Drop(at=5), Drop(at=8), Repeat(at=7, length=2)], DATA[:5] + DATA[6:8] + DATA[7:8] + DATA[9:]),
        ([Corrupt(at=20), Repeat(at=20)], DATA[:20] + bytes([20 ^ 255] * 2) + DATA[21:]),
    ],
)
def test_faults_do_not_depend_on_how_the_bytes_come(faults, wanted, size):
    assert fed(faults, size)[0] == wanted


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("at", [0, 1, 42, 99, 100])
def test_a_cut_comes_right_behind_its_byte_and_is_the_last(at, size):
    cut = Cut(at=at, reset=True)
    data, pieces = fed([cut], size)
    assert data == DATA[:at]
    assert [piece.cut for piece in pieces if piece.cut] == [cut] and pieces[-1].cut is cut
    assert fed([Cut(at=101)], size)[0] == DATA


def test_a_burst_is_late():
    _, pieces = fed([Burst(at=10, length=20, seconds=0.5), Burst(at=25, length=2, seconds=0.7)], 100)
    assert [(piece.data, piece.late) for piece in pieces] == [
        (DATA[:10], 0.0),
        (DATA[10:25], 0.5),
        (DATA[25:27], 0.7),
        (DATA[27:30], 0.5),
        (DATA[30:], 0.0),
    ]


def test_after_a_time_offsets_count_from_there():
    stream = Stream([Drop(at=1, length=2, after=5.0), Stall(after=9.0)])
    assert stream.feed(4.9, b"abcd") == [Piece(b"abcd")]
    assert b"".join(piece.data for piece in stream.feed(5.0, b"efgh")) == b"eh"
    assert not stream.silent(8.0)
    assert stream.feed(9.0, b"ij") == [] and stream.silent(9.0)


def test_ends_are_swallowed_where_the_stream_is_stalled_or_cut():
    for fault in (Stall(at=10), Cut(at=10)):
        stream = Stream([fault])
        stream.feed(0.0, DATA[:9])
        assert not stream.silent(0.0)
        stream.feed(0.0, DATA[9:10])
        assert stream.silent(0.0)

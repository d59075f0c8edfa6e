"""The link's model of time."""

from __future__ import annotations

import numpy as np
import pytest

from ondevice.network.link import Line, Link, Sinusoid, Wire

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


def test_the_link_changes_for_what_is_sent_from_then_on():
    line = Line(Link(1.0))
    assert line.arrival(0.0, 10) == 1.0
    line.link = Link(0.1)
    assert line.arrival(0.5, 10) == 1.0  # not before what was sent before
    assert line.arrival(2.0, 10) == pytest.approx(2.1)


def test_delays_that_change_with_time():
    swing = Sinusoid(0.5, 0.1, 4.0)
    assert [swing(now) for now in (0, 1, 2, 3, 4)] == pytest.approx([0.5, 0.6, 0.5, 0.4, 0.5])
    assert arrivals(Link(swing), [0.0, 1.0]) == pytest.approx([0.5, 1.6])


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: Link(-0.1), "delay"),
        (lambda: Link(bandwidth=-1.0), "bandwidth"),
        (lambda: Sinusoid(0.1, 0.2), "0.2"),
    ],
)
def test_bad_links_are_refused(build, said):
    with pytest.raises(ValueError, match=said):
        build()

"""The history file: what a crash, a damaged byte, the size limit or another tokenizer does to it."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ondevice_papers.sdnpu.drafter import Sam, SdNpu
from ondevice_papers.sdnpu.history import History

V = 300
RESPONSES = [(1, 2, 3), (299,), (7, 7, 7, 0), (250, 8)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with four responses."""
    found = tmp_path / "history.bin"
    history = History(V, "abc", found)
    for response in RESPONSES:
        history.append(response)
    return found


def test_responses_come_back_in_their_order(path):
    history = History(V, "abc", path)
    assert history.responses == RESPONSES and len(history) == 4
    assert history.size == 10 and len(path.read_text().splitlines()) == 5
    history.append([])  # nothing was said
    assert History(V, "abc", path).responses == RESPONSES


def test_without_a_path_it_is_kept_in_memory():
    history = History(V)
    for response in RESPONSES:
        history.append(response)
    assert history.responses == RESPONSES and history.path is None


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.integers(0, V - 1), max_size=9), max_size=6))
def test_any_responses(tmp_path_factory, responses):
    path = tmp_path_factory.mktemp("any") / "history.bin"
    history = History(V, "abc", path)
    for response in responses:
        history.append(response)
    assert History(V, "abc", path).responses == [tuple(response) for response in responses if response]


def test_a_crash_at_any_byte_costs_only_what_was_being_written(path):
    whole = path.read_bytes()
    ends = [place for place, byte in enumerate(whole) if byte == ord("\n")]  # lines are whole here, and behind it
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        right = RESPONSES[: max(0, sum(end <= length for end in ends) - 1)]
        if length in ends or length - 1 in ends or length < ends[0]:
            history = History(V, "abc", path)
        else:
            with pytest.warns(UserWarning, match=f"damaged and dropped; {len(right)} responses are kept"):
                history = History(V, "abc", path)
        assert history.responses == right
        history.append([5, 6])
        assert History(V, "abc", path).responses == [*right, (5, 6)]  # no warning: the damage is gone


def test_no_damaged_byte_changes_a_response(path):
    whole = path.read_bytes()
    header = whole.index(b"\n") + 1
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= (1, 0x80, 0xFF)[place % 3]
        path.write_bytes(damaged)
        if place < header:
            with pytest.raises(ValueError, match=r"history\.bin"):
                History(V, "abc", path)
            continue
        with pytest.warns(UserWarning, match="damaged"):
            found = History(V, "abc", path).responses
        assert len(found) < len(RESPONSES) and found == RESPONSES[: len(found)]


def test_a_failed_write_leaves_a_file_that_can_be_read(path, monkeypatch):
    history = History(V, "abc", path)

    def full(handle: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        history.append([4, 4])
    monkeypatch.undo()
    assert history.responses == RESPONSES
    history.append([9])
    assert History(V, "abc", path).responses == [*RESPONSES, (9,)]


@pytest.mark.parametrize("with_file", [True, False])
def test_the_oldest_responses_go_at_the_limit(tmp_path, with_file):
    path = tmp_path / "small.bin" if with_file else None
    history = History(V, "abc", path, limit=90)
    said = [tuple(range(start, start + 10)) for start in range(60)]
    for number, response in enumerate(said, 1):
        history.append(response)
        assert history.size <= 90
        assert history.responses == said[history.dropped : number]
    assert history.dropped > 40 and len(history) >= 4
    if path:
        assert History(V, "abc", path, limit=90).responses == history.responses
        assert len(History(V, "abc", path, limit=40)) < len(history)


def test_of_a_response_beyond_the_limit_the_last_tokens_are_kept(tmp_path):
    history = History(V, "abc", tmp_path / "small.bin", limit=40)
    history.append(list(range(V)))
    (kept,) = history.responses
    assert len(kept) == 30 and kept == tuple(range(V))[-len(kept) :]
    assert History(V, "abc", history.path, limit=40).responses == [kept]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: History(V, "other", path), r"history\.bin .*'abc' with 300"),
        (lambda path: History(V + 1, "abc", path), "'abc' with 301"),
        (lambda path: History(V, "abc", path, limit=3), "room for 4, not 300 and 3"),
        (lambda path: History(V, "abc", path).append([1, V]), "299.* 300"),
        (lambda path: Sam(V + 1, History(V, "abc", path)), "300 .* 301"),
    ],
)
def test_bad_input_is_one_clear_error_and_changes_nothing(path, make, message):
    before = path.read_bytes()
    with pytest.raises(ValueError, match=message):
        make(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"hello", b"[1]\n", b"\x80\x04K\x01.", b'{"format": "x"}\n'])
def test_another_file_is_refused_and_left_alone(tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"notes\.txt"):
        History(V, "abc", path)
    assert path.read_bytes() == content


def test_a_later_format_is_named(path):
    path.write_bytes(path.read_bytes().replace(b"history 2", b"history 3"))
    with pytest.raises(ValueError, match=r"history 3.*history 2"):
        History(V, "abc", path)


def test_a_drafter_draws_on_finished_requests_across_restarts(tmp_path):
    path = tmp_path / "history.bin"
    drafter = SdNpu(Sam(V, History(V, "abc", path)))
    drafter.begin([1, 2])
    assert not len(drafter.propose([1, 2, 50], 31))
    drafter.end([1, 2, 50, 51, 52, 53])
    for again in (drafter, SdNpu(Sam(V, History(V, "abc", path)))):
        again.begin([3])
        assert again.propose([3, 50], 31).tokens.tolist() == [51, 52, 53]


def test_a_drafter_forgets_what_its_history_dropped():
    history = History(V, limit=70)
    base = Sam(V, history)
    for start in range(0, 200, 10):
        base.begin([1])
        base.end([1, *range(start, start + 10)])
    kept = {response[0] for response in history.responses}
    for start in range(0, 200, 10):
        base.begin([299])
        assert bool(base.retrieve([299, start], 31)[0]) == (start in kept)


def test_an_untouched_history_gives_no_warning(path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(History(V, "abc", path)) == 4

"""The history file: what a crash, the size limit or another tokenizer does to it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ondevice_papers.sdnpu.drafter import Sam
from ondevice_papers.sdnpu.history import History

V = 300
RESPONSES = [(1, 2, 3), (299,), (7, 7, 7, 0), (250, 8)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with four responses."""
    found = tmp_path / "history.json"
    history = History(V, "abc", found)
    for response in RESPONSES:
        history.append(response)
    return found


@settings(max_examples=20)
@given(st.lists(st.lists(st.integers(0, V - 1), max_size=9), max_size=6))
def test_any_responses(tmp_path_factory, responses):
    path = tmp_path_factory.mktemp("any") / "history.json"
    for history in (History(V, "abc", path), History(V)):
        for response in responses:
            history.append(response)
        assert history.responses == [tuple(response) for response in responses if response]
    assert History(V, "abc", path).responses == history.responses


def test_a_failed_write_leaves_a_file_that_can_be_read(path, monkeypatch):
    history = History(V, "abc", path)

    def full(self: Path, text: str, **options: str) -> None:
        raise OSError("no space left on device")

    before = path.read_bytes()
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="no space"):
        history.append([4, 4])
    monkeypatch.undo()
    assert history.responses == RESPONSES and path.read_bytes() == before
    history.append([9])
    assert History(V, "abc", path).responses == [*RESPONSES, (9,)]


@pytest.mark.parametrize("with_file", [True, False])
def test_the_oldest_responses_go_at_the_limit(tmp_path, with_file):
    path = tmp_path / "small.json" if with_file else None
    history = History(V, "abc", path, limit=90)
    said = [tuple(range(start, start + 10)) for start in range(60)]
    for number, response in enumerate(said, 1):
        history.append(response)
        assert sum(map(len, history.responses)) <= 90
        assert history.responses == said[history.dropped : number]
    assert history.dropped > 40 and len(history) >= 4
    if path:
        assert History(V, "abc", path, limit=90).responses == history.responses
        assert len(History(V, "abc", path, limit=40)) < len(history)


def test_of_a_response_beyond_the_limit_the_last_tokens_are_kept():
    history = History(V, limit=40)
    history.append(list(range(V)))
    (kept,) = history.responses
    assert len(kept) == 30 and kept == tuple(range(V))[-len(kept) :]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: History(V, "other", path), "'other'"),
        (lambda path: History(V + 1, "abc", path), "300.*301"),
        (lambda path: History(V, "abc", path, limit=3), "300 and 3"),
        (lambda path: History(V, "abc", path).append([1, V]), "299.* 300"),
        (lambda path: Sam(V + 1, History(V, "abc", path)), "300 .* 301"),
    ],
)
def test_bad_input_is_one_clear_error_and_changes_nothing(path, make, message):
    before = path.read_bytes()
    with pytest.raises(ValueError, match=message):
        make(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"\x80\x04K\x01.", b"[1]\n", b'{"format": "sd.npu history 4"}'])
def test_another_file_is_refused_and_left_alone(tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"notes\.txt"):
        History(V, "abc", path)
    assert path.read_bytes() == content


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

"""The engine: fair turns, orders that become void, failures of one session, and a thread that ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from waiting import wait_for

from ondevice_papers.dragon.side import Decode
from ondevice_programs.pair import engine as module
from ondevice_programs.pair.decoder import Interrupted, Piece
from ondevice_programs.pair.engine import Drafted, Drafting, ModelThread

V = 5
clock = SimpleNamespace(now=0.0)  # seconds, of forwards alone: how long this machine takes decides nothing


def forward() -> None:
    """What a forward takes."""
    clock.now += 0.002
    time.sleep(0.002)


class Model:
    """Notes every forward: the names of the sessions in it, or of the one whose piece it is."""

    def __init__(self) -> None:
        self.turns: list[tuple[str, ...]] = []
        self.gate = threading.Event()
        self.gate.set()


class Decoder:
    """A session's: pieces of so many tokens, then distributions that depend on the tokens. failing: at a position."""

    def __init__(self, model: Model, name: str, pieces: tuple[int, ...] = (), rows: int = 1, failing: int = -1) -> None:
        self.model, self.name, self.sizes, self.rows, self.failing = model, name, pieces, rows, failing
        self.tokens: list[int] = []
        self.prior, self.log_weight, self.shared = np.full(V, 1 / V), 0.5, False
        self.stop = threading.Event()

    in_line = property(lambda self: self.position > 0 and not self.shared)
    position = property(lambda self: len(self.tokens))

    def pieces(self) -> Iterator[Piece]:
        for size in self.sizes:
            self.model.turns.append((f"{self.name} piece",))
            forward()
            yield Piece(size, [])

    def next_distribution(self) -> np.ndarray:
        if not self.shared:
            self.model.turns.append((self.name,))
            forward()
            assert self.model.gate.wait(60)
            if self.position == self.failing:
                raise RuntimeError(f"{self.name} has failed.")
            if self.stop.is_set():
                self.stop.clear()
                raise Interrupted
        self.shared = False
        return np.log(np.eye(V)[(sum(self.tokens) + 1) % V] * 0.9 + 0.02)

    def commit(self, token: int) -> None:
        self.tokens.append(token)

    def rollback(self, position: int) -> None:
        assert position <= self.position
        del self.tokens[position:]

    def interrupt(self) -> None:
        self.stop.set()

    def require_open(self) -> None:
        pass

    def close(self) -> None:
        pass


def together(decoders: list[Decoder]) -> None:
    if any(decoder.position == decoder.failing for decoder in decoders):
        raise RuntimeError("One of them has failed.")
    decoders[0].model.turns.append(tuple(decoder.name for decoder in decoders))
    forward()
    for decoder in decoders:
        decoder.shared = True


@pytest.fixture(autouse=True)
def joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "next_together", together)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.now))


class Session:
    """Drafts on and on, each draft from the one before, `count` of them."""

    def __init__(self, engine: ModelThread, decoder: Decoder, count: int, client: object = None) -> None:
        self.count, self.found, self.error = count, list[Drafted](), list[Exception]()
        self.drafting = Drafting(engine, lambda: decoder, lambda position, p: int(p.argmax()), self.drew,  # type: ignore
                                 self.error.append, client=client)  # fmt: skip
        self.drafting.decode(Decode(0, 0, None))

    def drew(self, drafted: Drafted) -> None:
        self.found.append(drafted)
        if len(self.found) < self.count:
            self.drafting.decode(Decode(0, len(self.found), drafted.token))
        else:
            self.drafting.stop()

    @property
    def done(self) -> bool:
        return len(self.found) == self.count or bool(self.error)


def tokens(count: int) -> list[int]:
    """What a session drafts."""
    found: list[int] = []
    for _ in range(count):
        found.append((sum(found) + 1) % V)
    return found


def held(engine: ModelThread) -> threading.Event:
    """The engine waits for it, in a turn of its own, so that all are there before any has a turn."""
    hold, waiting = threading.Event(), threading.Event()

    def build() -> Any:
        waiting.set()
        hold.wait(60)
        raise ValueError("It was held long enough.")

    Drafting(engine, build, lambda position, p: 0, lambda drafted: None, lambda error: None)
    assert waiting.wait(60)  # else the first ones that come may share its turn
    return hold


def run(*sessions: tuple[str, dict[str, Any]], count: int = 6, rows: int = 96) -> tuple[Model, list[Session]]:
    """All of them at once, until they are done and the engine's thread is gone."""
    before = threading.enumerate()  # other tests of this process may have left an engine at work
    model, engine = Model(), ModelThread(rows)
    hold = held(engine)
    made = [Session(engine, Decoder(model, name, **options), count) for name, options in sessions]
    hold.set()
    wait_for(lambda: all(session.done for session in made))
    wait_for(lambda: engine._thread is None)
    own = {thread for thread in threading.enumerate() if thread.name == "engine"}.difference(before)
    wait_for(lambda: not any(thread.is_alive() for thread in own))  # it has still to end
    return model, made


def test_sessions_draft_what_each_would_alone_and_share_forwards():
    model, made = run(("a", {}), ("b", {}), ("c", {}))
    for session in made:
        assert [one.token for one in session.found] == tokens(6) and not session.error
        assert [one.order.position for one in session.found] == list(range(6))
    assert max(map(len, model.turns)) == 3 and len(model.turns) <= 15


def test_a_forward_has_at_most_so_many_rows_and_all_have_their_turn():
    model, made = run(*((name, {"rows": 4}) for name in "abcde"), rows=8, count=10)
    assert max(map(len, model.turns)) == 2
    assert all([one.token for one in session.found] == tokens(10) for session in made)
    shared = [name for turn in model.turns for name in turn]
    halfway = shared[: len(shared) // 2]
    assert max(halfway.count(name) for name in "abcde") <= min(halfway.count(name) for name in "abcde") + 3


def test_drafts_that_may_be_void_fill_what_is_left_of_a_forward():
    model, engine = Model(), ModelThread(rows=20, spare=4)
    hold = held(engine)
    needed, ahead = (Session(engine, Decoder(model, name, rows=2), 6) for name in "na")
    others = [Session(engine, Decoder(model, name, rows=2), 6) for name in "bc"]
    for session in (ahead, *others):
        session.drafting.decided(1)
    hold.set()
    wait_for(lambda: all(session.done for session in (needed, ahead, *others)))
    joint = [turn for turn in model.turns if len(turn) > 1]
    assert joint and all(len(turn) <= 2 for turn in joint)  # two sessions of two sequences
    place = {name: max(i for i, turn in enumerate(model.turns) if name in turn) for name in "nabc"}
    assert place["n"] < min(place[name] for name in "abc")


def test_one_with_many_documents_holds_up_nobody():
    """Those that have prefilled less come first, and those that decode have half of the time."""
    model, made = run(("greedy", {"pieces": (100,) * 40}), ("a", {"pieces": (100, 100)}), ("b", {"pieces": (100,)}))
    assert all(len(session.found) == 6 for session in made)
    turns = [turn[0] for turn in model.turns]
    first = turns.index("a")
    assert turns[:first].count("greedy piece") <= 8  # one in a forward with pieces of others
    last = max(place for place, turn in enumerate(model.turns) if "a" in turn)
    assert turns[:last].count("greedy piece") <= 20  # six turns of the others, and as much time between


def test_pieces_of_sessions_share_a_forward_up_to_a_size(monkeypatch: pytest.MonkeyPatch):
    forwards = list[list[int]]()
    monkeypatch.setattr(module, "run", lambda pieces: forwards.append([piece.tokens for piece in pieces]))
    run(("a", {"pieces": (50, 50)}), ("b", {"pieces": (60,)}), ("c", {"pieces": (40,)}))
    assert forwards[0] == [50, 60, 40] and all(sum(sizes[:-1]) < module._PACKED for sizes in forwards)


def test_many_sessions_of_one_client_hold_up_nobody():
    model, engine, client = Model(), ModelThread(), object()
    hold = held(engine)
    many = [Session(engine, Decoder(model, f"many{n}", pieces=(100,) * 4), 1, client) for n in range(8)]
    other = Session(engine, Decoder(model, "other", pieces=(100, 100)), 1)
    hold.set()
    wait_for(lambda: other.done and all(session.done for session in many))
    turns = [turn[0] for turn in model.turns]
    assert sum("many" in turn for turn in turns[: turns.index("other")]) <= 8  # of 32


@pytest.mark.parametrize("bad", [{"failing": 3}, {"pieces": (60,)}], ids=["a token", "a piece"])
def test_a_session_that_fails_fails_alone(monkeypatch: pytest.MonkeyPatch, bad: dict[str, Any]):
    def failing(pieces: list[Piece]) -> None:
        if any(piece.tokens == 60 for piece in pieces):
            raise RuntimeError("bad has failed.")

    monkeypatch.setattr(module, "run", failing)
    _, made = run(("a", {"pieces": (50, 50)}), ("bad", bad), ("c", {"pieces": (40,)}))
    assert [str(error) for error in made[1].error] == ["bad has failed."]
    assert len(made[1].found) == bad.get("failing", 0)
    for session in (made[0], made[2]):
        assert [drafted.token for drafted in session.found] == tokens(6) and not session.error


def test_a_rollback_voids_what_runs():
    model, engine, found = Model(), ModelThread(), list[Drafted]()
    decoder = Decoder(model, "a")
    drafting = Drafting(engine, lambda: decoder, lambda position, p: int(p.argmax()), found.append, print)  # type: ignore
    for position, token in enumerate((None, 1, 2)):
        drafting.decode(Decode(0, position, token))
        wait_for(lambda n=position: len(found) == n + 1)  # type: ignore[misc]
    model.gate.clear()
    drafting.decode(Decode(0, 3, 4))
    wait_for(lambda: len(model.turns) >= 4)
    drafting.roll_back(1)
    drafting.decode(Decode(1, 2, 3))
    model.gate.set()
    wait_for(lambda: len(found) == 4)
    time.sleep(0.02)
    assert [one.order.epoch for one in found] == [0, 0, 0, 1] and decoder.tokens == [1, 3]
    assert found[3].token == (1 + 3 + 1) % V
    drafting.stop()
    wait_for(lambda: engine._thread is None)
    assert drafting.decoder is None  # its rows are let go

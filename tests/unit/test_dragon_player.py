"""What the guard holds back: quotations in drafts, targets and both together, now and when a connection comes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from tiny import random_model

from ondevice.causal_lm import CausalLM
from ondevice_papers.dragon import decisions
from ondevice_papers.dragon.messages import Begin, DraftMessage, Message, Resume, Target
from ondevice_papers.dragon.side import Side
from ondevice_papers.dragon.speculative_aggregation import Stream
from ondevice_programs.pair.decoder import Decoder
from ondevice_programs.pair.engine import ModelThread
from ondevice_programs.pair.guard import Guard
from ondevice_programs.pair.player import Player

SECRET = [11, 12, 13, 14, 15, 16]


def guarded(aggregates: bool, work: Any) -> list[Message]:
    """What a player sends that guards runs of three tokens; `work` gets it and a function that drafts."""

    async def run() -> list[Message]:
        sent: list[Message] = []
        machine = Side(
            "s", lambda local, remote, _: (local.token, True, False), aggregates=aggregates, max_new_tokens=9
        )
        player = Player(machine, {}, guard=Guard([SECRET], 3))
        player._drafting = Mock()
        player._act(machine.start(0.0))
        work(player, lambda token: player._act(machine.drafted(0.0, machine.epoch, machine.next, token)), sent)
        return sent

    return asyncio.run(run())


def test_what_was_held_back_without_a_connection_stays_when_one_comes():
    def work(player: Player, draft: Any, sent: list[Message]) -> None:
        for token in (12, 13, 14):
            draft(token)
        player.resume(sent.append, Resume("s", 0, 0, True))

    assert guarded(False, work) == []


@pytest.mark.parametrize("token", [14, 5])
def test_a_rejected_draft_and_what_follows_it_are_a_run_too(token: int):
    """12 is told and rejected for 7; then 13 and 14 would be read behind it."""

    def work(player: Player, draft: Any, sent: list[Message]) -> None:
        player.send = sent.append
        draft(12)
        player.received(Target("s", 1, 0, 7, False))
        draft(13)
        draft(token)
        assert (player.failure is not None) == (token == 14)

    sent = guarded(False, work)
    assert [one.token for one in sent if isinstance(one, DraftMessage)] == [12, 13, *([] if token == 14 else [token])]


def test_a_target_that_ends_a_run_does_not_leave():
    def work(player: Player, draft: Any, sent: list[Message]) -> None:
        player.send = sent.append
        for position, token in enumerate((12, 13, 14)):
            draft(token)
            player.received(DraftMessage("s", position, position, 9))

    assert [message.token for message in guarded(True, work)] == [12, 13]  # type: ignore[union-attr]


# The context


@pytest.mark.parametrize(("limit", "whole"), [(1, True), (20, True), (21, False), (500, False)])
def test_an_answer_that_the_context_cannot_hold_is_refused_before_it_begins(limit: int, whole: bool):
    lm = CausalLM(random_model("llama", vocabulary=61, context=32))
    decoder = Decoder(lm, [[5, 17, 3, 44, 8, 29, 2, 7, 9, 1], [11, 4]], [9, 33, 14], [1.0, 2.5])  # 13 tokens at most
    node: Any = SimpleNamespace(lm=lm, engine=ModelThread(), decoder=lambda *given: (decoder, []))
    begin = Begin("s", 7, "sequence-wise", 2, "Why?", limit, "cloud", temperature=0.0)

    async def run() -> Player:
        priors: dict[int, Any] = {}
        machine = Side(
            "s", decisions.decision(begin, priors), aggregates=True, max_new_tokens=limit, alone=True,
            lookahead=decisions.lookahead(begin),
        )  # fmt: skip
        player = Player(machine, priors)
        player.start(node, begin, Stream.CLOUD)
        await asyncio.wait_for(player.ended.wait(), 60)
        return player

    player = asyncio.run(run())
    assert (player.failure is None) == whole
    if whole:
        assert len(player.machine.tokens) == limit
    else:
        assert "room for 20 tokens" in str(player.failure) and not player.machine.tokens


# The guard


@pytest.mark.parametrize("length", [2, 5, 8])
def test_the_guard_finds_exactly_the_runs_that_are_there(length: int):
    random = np.random.default_rng(length)
    documents = [random.integers(0, 30, size).tolist() for size in (0, 1, length - 1, length, 40, 200)]
    runs = {tuple(one[i : i + length]) for one in documents for i in range(len(one) - length + 1)}
    guard, found = Guard(documents, length), 0
    for one in [*runs, *(tuple(random.integers(0, 30, length).tolist()) for _ in range(3000))]:
        assert guard.quotes([7, 7, *one]) == (one in runs)
        found += one in runs
    assert found >= len(runs) > 100


def test_less_than_a_run_is_no_quotation():
    guard = Guard([[1, 2, 3, 4]], 3)
    assert not guard.quotes([2, 3]) and guard.quotes([2, 3, 4]) and not guard.quotes([2, 3, 4, 5])
    assert not Guard([], 3).quotes([1, 2, 3])


def test_orders_and_neighbours_are_told_apart():
    guard = Guard([[10, 20, 30]], 3)
    assert not any(guard.quotes(one) for one in ([30, 20, 10], [20, 10, 30], [11, 19, 30], [10, 21, 29], [9, 21, 30]))


def test_a_single_token_is_no_quotation():
    with pytest.raises(ValueError, match="not 1"):
        Guard([[1]], 1)

"""One request of DiSCo's router on a virtual clock: dispatch, race, fallback, migration and accounts, exactly."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from routing import DEVICE_FIRST, MESSAGES, NOW, Scripted, Seen, Told, composed, configured, deployment, read, virtually

from ondevice_papers.disco.policy import NEVER
from ondevice_programs.router.delivery import Delivery
from ondevice_programs.router.endpoints import EndpointError, Finish, Usage
from ondevice_programs.router.replay import answer, plain_chat
from ondevice_programs.router.request import ChatRequest, message_text
from ondevice_programs.router.router import Router

TOKENS = 30
ASKED = plain_chat(MESSAGES)
WHOLE = answer(ASKED, TOKENS)
LENGTH = ChatRequest(messages=tuple(MESSAGES)).tokens
PRICED = {"input_cost_per_token": 1.0, "output_cost_per_token": 2.0}
VOICES = {"device": "a", "server": "b"}


@pytest.fixture
def see(tmp_path: Path) -> Any:
    """A stream through a router between scripted endpoints, whose keywords are the router's and the request's."""

    def work(device: Any, server: Any, dispatcher: Told, request: dict[str, Any] | None = None, **more: Any) -> Seen:
        sides = {"device": more.pop("on_device", {}), "server": more.pop("on_server", {})}
        entries = [deployment(side, **PRICED | options) for side, options in sides.items()]
        config = configured(tmp_path, *entries, **{"num_retries": 0} | more)
        sources = {"device": device, "server": server}
        usual = {"messages": tuple(MESSAGES), "limits": {"max_tokens": TOKENS}}
        asked = ChatRequest(**usual | (request or {}))

        async def one() -> Seen:
            router = Router(config, lambda it: sources[it.model_info.side], dispatcher)
            seen = await read(router, asked)
            await asyncio.sleep(1.0)  # cancelled tasks end
            return seen

        return virtually(one())

    return work


@pytest.mark.parametrize(
    ("waits", "device_s", "server_s", "winner", "first", "starts"),
    [
        ((0.0, 0.0), 0.1, 0.3, "device", 0.1, 2),
        ((0.0, 0.0), 0.3, 0.1, "server", 0.1, 2),
        ((0.2, 0.0), 0.1, 0.15, "server", 0.15, 1),  # the device's wait is never over
        ((0.2, 0.0), 0.1, 0.5, "device", 0.3, 2),
        ((NEVER, 0.0), 0.1, 5.0, "server", 5.0, 1),
        ((0.0, NEVER), 5.0, 0.1, "device", 5.0, 1),
    ],
)
def test_a_side_starts_only_if_no_token_has_come_when_its_wait_is_over(
    see: Any, waits: tuple[float, float], device_s: float, server_s: float, winner: str, first: float, starts: int
) -> None:
    dispatcher = Told({"device": waits[0], "server": waits[1]})
    seen = see(Scripted([device_s]), Scripted([server_s]), dispatcher)
    assert seen.texts == WHOLE
    assert seen.switches == [(0, winner, "race")]
    assert seen.times[0] == pytest.approx(first)
    assert sum(what[0] == "start" for what in dispatcher.told) == starts


def test_the_dispatcher_is_told_what_it_learns_from(see: Any) -> None:
    dispatcher = Told({"device": 0.05, "server": 0.0})
    see(Scripted([0.3]), Scripted([0.2]), dispatcher)
    assert dispatcher.told == [
        ("arrive", LENGTH, 0.0),
        ("start", "server", LENGTH),
        ("start", "device", LENGTH),
        ("first", "server", pytest.approx(0.2)),
        ("cut", "device", pytest.approx(0.15)),
        ("close", TOKENS),
    ]


def test_a_start_that_reached_nobody_is_refunded(see: Any) -> None:
    refused = Scripted(fault=(0, 0), error=EndpointError("refused", reached=False))
    dispatcher = Told(DEVICE_FIRST)
    seen = see(refused, Scripted(), dispatcher)
    assert ("refund", "device", LENGTH) in dispatcher.told and ("start", "server", LENGTH) in dispatcher.told
    assert seen.texts == WHOLE and seen.session.entries[0].cost == 0.0


def test_the_loser_is_cancelled_and_paid_and_what_no_endpoint_counts_is_estimated(see: Any) -> None:
    server = Scripted([0.2])
    seen = see(Scripted([0.1]), server, Told())
    assert server.cancelled == 1
    lost, served = seen.session.entries
    assert (lost.outcome, lost.usage.output_tokens, lost.estimated, lost.cost) == ("lost", 0, True, LENGTH * 1.0)
    assert (served.outcome, served.estimated, served.cost) == ("served", False, LENGTH + TOKENS * 2.0)
    assert seen.session.usage()[0].output_tokens == TOKENS and seen.session.usage()[1] is False
    usage, estimated = see(Scripted(usage=False), Scripted(), Told(DEVICE_FIRST)).session.usage()
    assert (usage.prompt_tokens, usage.output_tokens, estimated) == (LENGTH, TOKENS, True)


def test_a_drop_after_the_last_token_needs_no_second_endpoint(see: Any) -> None:
    seen = see(Scripted(fault=(0, TOKENS)), Scripted(), Told(DEVICE_FIRST))
    assert seen.texts == WHOLE and seen.session.finish.reason == "length" and len(seen.outcomes) == 1


def test_when_both_fail_the_reader_gets_the_prefix_and_one_error_with_both_reasons(see: Any) -> None:
    seen = see(Scripted(fault=(0, 3)), Scripted(fault=(0, 4)), Told(DEVICE_FIRST))
    assert seen.texts == WHOLE[:7] and seen.error.status == 502
    assert "device: as scripted" in str(seen.error) and "server: as scripted" in str(seen.error)


def test_a_failed_side_is_asked_again_when_nobody_else_can(see: Any) -> None:
    device, server = Scripted(fault=(0, 3)), Scripted(fault=(0, 4))
    seen = see(device, server, Told(DEVICE_FIRST), num_retries=1)
    assert seen.texts == WHOLE and seen.outcomes[-1] == ("device", "retry", "served")
    final = Scripted(fault=(0, 0), error=EndpointError("no", 401, body={"error": "no"}))
    seen = see(final, Scripted(fault=(0, 0), error=EndpointError("down", 400)), Told(DEVICE_FIRST), num_retries=5)
    assert len(final.asked) == 1 and seen.error.status == 401 and seen.error.body == {"error": "no"}


@pytest.mark.parametrize(
    ("device", "server", "status"),
    [((403, None), (500, None), 403), ((400, None), (500, None), 502), ((400, {"error": "long"}), (500, None), 400),
     ((429, None), (401, None), 401), ((None, None), (404, None), 404), ((400, None), (400, None), 400)],
)  # fmt: skip
def test_the_error_that_helps_the_client_most_is_passed_on(see: Any, device: Any, server: Any, status: int) -> None:
    sources = [Scripted(fault=(0, 0), error=EndpointError("no", *it)) for it in (device, server)]
    error = see(*sources, Told(DEVICE_FIRST)).error
    assert error.status == status and "device: no; server: no" in str(error)


def test_a_pinned_request_is_neither_continued_nor_migrated(see: Any) -> None:
    for device in (Scripted(fault=(0, 3)), Scripted()):
        server, dispatcher = Scripted(), Told(DEVICE_FIRST, buffer=1)
        seen = see(device, server, dispatcher, {"options": {"logprobs": True}}, pace=20.0)
        assert server.asked == [] and not any(what[0] == "migration" for what in dispatcher.told)
        assert (seen.error is None) == (device.fault is None)


def test_the_total_timeout_holds_over_all_attempts_together(see: Any) -> None:
    server = Scripted([9.0])
    device = Scripted(fault=(0, 2), error=None)
    seen = see(device, server, Told(DEVICE_FIRST), timeout=1.0, stream_timeout=0.8)
    assert seen.texts == WHOLE[:2] and seen.error.status == 504
    assert server.cancelled == 1 and seen.outcomes[-1] == ("server", "fallback", "cancelled")


def test_a_deployments_own_timeouts_hold(see: Any) -> None:
    for limit in ({"timeout": 0.25}, {"stream_timeout": 0.05}):
        seen = see(Scripted(), Scripted(), Told(DEVICE_FIRST), on_device=limit)
        assert seen.texts == WHOLE and seen.outcomes[0] == ("device", "race", "failed")


def test_the_spent_side_is_left_out_and_named_when_the_other_fails(see: Any) -> None:
    seen = see(Scripted(), Scripted(), Told(NOW, tokens=0))
    assert seen.texts == WHOLE and seen.outcomes == [("server", "race", "served")]
    seen = see(Scripted(), Scripted(fault=(0, 0)), Told(NOW, tokens=0))
    assert seen.error.status == 429 and "token budget is spent" in str(seen.error)
    long = EndpointError("HTTP 400: too long", 400, {"error": {"message": "too long", "code": "context_length"}})
    seen = see(Scripted(), Scripted(fault=(0, 0), error=long), Told(NOW, tokens=0))
    told = seen.error.body["error"]
    assert (seen.error.status, told["code"]) == (400, "context_length")
    assert "too long" in told["message"] and "token budget is spent" in told["message"]


# Pacing and migration


def late(seen: Seen, pace: float) -> int:
    return sum(time > seen.times[0] + i / pace + 1e-6 for i, time in enumerate(seen.times))


@pytest.mark.parametrize("handover_s", [0.0, 0.3, 0.5])
def test_no_token_is_late_when_the_hand_over_takes_at_most_its_estimate(see: Any, handover_s: float) -> None:
    device, server = Scripted(voice="a"), Scripted([handover_s], tbt=0.04, voice="b")
    dispatcher = Told(DEVICE_FIRST, buffer=10)  # 0.5 s at 20 tokens/s
    seen = see(device, server, dispatcher, {"limits": {"max_tokens": 100}}, pace=20.0)
    at = seen.switches[1][0]
    assert at >= 10 and not "".join(seen.texts[:at])[-1].isspace()
    assert seen.texts == composed(seen, VOICES, ASKED) and len(seen.texts) > at
    assert late(seen, 20.0) == 0 and np.diff(seen.times) == pytest.approx(0.05)
    assert seen.outcomes == [("device", "race", "migrated"), ("server", "migration", "served")]
    assert sum(what[0] == "migration" for what in dispatcher.told) == 1


def test_when_the_target_fails_the_source_goes_on(see: Any) -> None:
    device, server = Scripted(voice="a"), Scripted([0.05], fault=(0, 0))
    seen = see(device, server, Told(DEVICE_FIRST, buffer=10), pace=20.0)
    assert seen.texts == answer(ASKED, TOKENS, "a") and len(device.asked) == 2


def test_there_is_no_migration_away_from_the_free_side_or_without_a_pace_or_to_who_cannot_continue(see: Any) -> None:
    for waits, more in (
        ({"device": NEVER, "server": 0.0}, {"pace": 20.0}),
        (DEVICE_FIRST, {}),
        (DEVICE_FIRST, {"pace": 20.0, "migration": "no"}),
        (DEVICE_FIRST, {"pace": 20.0, "on_server": {"can_continue": False}}),
        (DEVICE_FIRST, {"pace": 20.0, "request": {"streamed": False}}),
    ):
        assert len(see(Scripted(), Scripted(), Told(waits, buffer=1), **more).switches) == 1


def test_pacing_shows_tokens_at_its_rate_and_never_before_they_are_there(see: Any) -> None:
    fast = see(Scripted(tbt=0.01), Scripted(), Told(DEVICE_FIRST), pace=10.0)
    assert np.diff(fast.times) == pytest.approx(0.1)
    slow = see(Scripted(tbt=0.25), Scripted(), Told(DEVICE_FIRST), pace=10.0)
    assert np.diff(slow.times) == pytest.approx(0.25)


def test_a_long_packet_is_several_tokens_of_reading() -> None:
    async def work() -> list[float]:
        out = Delivery(10.0)
        for text in (" one", " packet of many words, forty bytes long.", " two"):
            out.push(text, "device")
        out.close()
        clock = asyncio.get_running_loop().time
        return [clock() async for _ in out.read()]

    assert virtually(work()) == pytest.approx([0.0, 0.1, 1.1])


def test_an_answer_is_never_split_behind_white_space(see: Any) -> None:
    behind = []
    for buffer in range(3, 20):
        device = Scripted(voice="a", tbt=0.0)
        seen = see(device, Scripted(voice="b"), Told(DEVICE_FIRST, buffer=buffer), pace=20.0)
        behind += ["".join(seen.texts[:at])[-1] for at, _, role in seen.switches if role == "migration"]
    assert len(behind) > 10 and not any(letter.isspace() for letter in behind)


@pytest.mark.parametrize(("named", "served"), [(None, True), (30.0, False)])
def test_a_device_may_take_the_time_that_a_long_prompt_is_known_to_take(see: Any, named: Any, served: bool) -> None:
    long = {"messages": ({"role": "user", "content": "x" * 16_500},)}  # 4,125 tokens, 80 of which take a second
    dispatcher = Told(DEVICE_FIRST, tokens=0, constrained="server")
    seen = see(Scripted([52.0]), Scripted(), dispatcher, long, stream_timeout=named)
    assert (seen.error is None) == served
    assert (("cut", "device", 30.0) in dispatcher.told) == (not served)  # what a deadline cuts off is learned, too


TOOLED = {"streamed": False, "options": {"tools": [{"type": "function"}]}}


@pytest.mark.parametrize(("asked", "seconds"), [(TOOLED, 300.0), ({}, 30.0)])
@pytest.mark.parametrize("spent", [False, True])
def test_a_silent_side_leaves_the_other_one_time_to_answer(see: Any, asked: Any, seconds: float, spent: bool) -> None:
    """A whole answer had no limit but the deadline of all; a side over its budget waited for all tries of the other."""
    settings = {"constrained": "server", "over_budget": "fallback", "num_retries": 2}
    dispatcher = Told(DEVICE_FIRST, tokens=0 if spent else NEVER, constrained="server")
    seen = see(Scripted([NEVER]), Scripted(), dispatcher, asked, **settings)
    assert seen.outcomes == [("device", "race", "failed"), ("server", "fallback", "served")]
    assert seen.error is None and seen.times[0] == pytest.approx(seconds + 0.1)


def test_a_side_that_failed_is_asked_again_before_one_that_was_silent(see: Any) -> None:
    seen = see(Scripted([NEVER]), Scripted(fault=(0, 0)), Told(DEVICE_FIRST), num_retries=2)
    assert seen.outcomes[2:] == [("server", "retry", "served")] and seen.times[0] == pytest.approx(30.2)


class Counting(Scripted):
    """Counts a prompt's tokens in its own way: 1.3 of ours, with 1,100 for an image and 900 for tools."""

    async def ask(self, request: ChatRequest, prefix: str, limits: Any, on_event: Any) -> Finish:
        finish = await super().ask(request, prefix, limits, on_event)
        return Finish(finish.reason, Usage(true_tokens(request), finish.usage.output_tokens))


def true_tokens(request: ChatRequest) -> int:
    bare = ChatRequest(messages=tuple({**it, "content": message_text(it)} for it in request.messages))
    images = sum(isinstance(it["content"], list) for it in request.messages)
    return round(1.3 * bare.tokens) + 1100 * images + 900 * bool(request.options.get("tools"))


@pytest.mark.parametrize(("constrained", "b"), [("server", 0.3), ("server", 0.1), ("device", 0.5)])
def test_the_share_holds_by_the_endpoints_own_counts(tmp_path: Path, constrained: str, b: float) -> None:
    """A third of the requests carry an image or tools; the share is that of all true tokens, at every prefix."""
    coins = random.Random(1)
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    tool = {"type": "function", "function": {"name": "find", "description": "Finds what is looked for. " * 30}}

    def request() -> ChatRequest:
        text, kind = "word " * coins.randrange(5, 200), coins.random()
        content: Any = [{"type": "text", "text": text}, picture] if kind < 0.15 else text
        options = {"tools": [tool]} if kind > 0.85 else {}
        return ChatRequest(messages=({"role": "user", "content": content},), limits={"max_tokens": 5}, options=options)

    async def work() -> list[float]:
        config = configured(tmp_path, deployment("device"), deployment("server"), constrained=constrained, budget=b)
        sources = {"device": Counting([0.3, 0.9, 0.2]), "server": Counting([0.5, 0.1, 0.8, 0.4])}
        router = Router(config, lambda it: sources[it.model_info.side])
        arrived = spent = 0.0
        shares = []
        for _ in range(600):
            asked = request()
            seen = await read(router, asked)
            assert seen.error is None
            arrived += true_tokens(asked)
            spent += true_tokens(asked) * sum(entry.side == constrained for entry in seen.session.entries)
            shares.append(spent / arrived)
        return shares

    shares = virtually(work())[200:]
    assert max(shares) <= 1.02 * b and shares[-1] >= 0.8 * b, (max(shares), shares[-1])

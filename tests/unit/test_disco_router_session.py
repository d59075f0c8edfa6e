"""DiSCo's router on a virtual clock: dispatch, race, fallback, migration and accounts, exactly and offline."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ondevice.disco.budget import TokenBucket
from ondevice.disco.distributions import Device
from ondevice.disco.endpoints import Endpoint, EndpointError, Finish, OnEvent, Piece, Usage
from ondevice.disco.handoff import StatedOverhead
from ondevice.disco.online import OnlineDispatcher
from ondevice.disco.policy import NEVER, mixture
from ondevice.disco.replay import answer
from ondevice.disco.request import Request
from ondevice.disco.router import Router
from ondevice.disco.session import StreamError, Summary, Timeouts

T = TypeVar("T")
PROMPT = "Tell me about buffers."
LENGTH = 5  # estimated tokens of PROMPT
TOKENS = 30


PRICED = Endpoint("http://127.0.0.1:1", price_prompt=1.0, price_output=2.0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes only when nothing is left to do, and then jumps to the next timer."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now = max(self.now, self._scheduled[0]._when)  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def run(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


@dataclass
class Scripted:
    """An endpoint on the virtual clock. fault: (request number, tokens before it) of a failure, or None for none."""

    ttft: Sequence[float] = (0.1,)
    tbt: float = 0.01
    voice: str = ""
    fault: tuple[int, int] | None = None
    silent: bool = False
    usage: bool = True
    endpoint: Endpoint = PRICED
    asked: list[str] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    cancelled: int = 0

    async def ask(self, request: Request, prefix: str, max_tokens: int | None, on_event: OnEvent) -> Finish:
        number = len(self.asked)
        self.asked.append(prefix)
        self.starts.append(asyncio.get_running_loop().time())
        tokens = answer((request.prompt or "") + prefix, max_tokens, self.voice)
        try:
            await asyncio.sleep(self.ttft[number % len(self.ttft)])
            for sent, token in enumerate(tokens):
                if sent:
                    await asyncio.sleep(self.tbt)
                await self._fail(number, sent)
                on_event(Piece(token))
            await self._fail(number, len(tokens))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        reason = "length" if len(tokens) == max_tokens else "stop"
        return Finish(reason, Usage(LENGTH, len(tokens)) if self.usage else None)

    async def _fail(self, number: int, sent: int) -> None:
        if self.fault == (number, sent):
            if self.silent:
                await asyncio.Event().wait()
            raise EndpointError("as scripted", 500)

    async def aclose(self) -> None:
        pass


@dataclass
class Seen:
    """What a reader saw: each token's text, and when."""

    texts: list[str]
    times: list[float]
    summary: Summary
    error: StreamError | None

    @property
    def text(self) -> str:
        return "".join(self.texts)


async def read(router: Router, prompt: str = PROMPT, max_tokens: int | None = TOKENS) -> Seen:
    stream = router.stream(prompt, max_tokens)
    clock = asyncio.get_running_loop().time
    texts, times, error = [], [], None
    start = clock()
    try:
        async for token in stream:
            texts.append(token.text)
            times.append(clock() - start)
    except StreamError as caught:
        error = caught
    return Seen(texts, times, stream.summary, error)


def see(router: Router, **options: Any) -> Seen:
    return run(_made(router, options))


async def _made(router: Router, options: dict[str, Any]) -> Seen:
    seen = await read(router, **options)
    await asyncio.sleep(1.0)  # cancelled tasks end
    return seen


def composed(summary: Summary, voices: dict[str, str], length: int, prompt: str = PROMPT) -> list[str]:
    """The answer that the recorded switches promise: each stretch from its source, conditioned on all before it."""
    tokens: list[str] = []
    ends = [switch.at for switch in summary.switches[1:]] + [length] * bool(summary.switches)
    for switch, end in zip(summary.switches, ends, strict=True):
        assert switch.at == len(tokens)
        tokens += answer(prompt + "".join(tokens), end - switch.at, voices[switch.source])
    return tokens


WHOLE = answer(PROMPT, TOKENS)
LONG = next(prompt for prompt in map(str, itertools.count()) if len(answer(prompt, 100, "a")) == 100)
EXPENSIVE, CHEAP = (Endpoint("http://127.0.0.1:1", price_prompt=p, price_output=o) for p, o in ((1.0, 2.0), (0.0, 0.0)))


def test_the_answer_used_here_is_long_enough() -> None:
    assert len(WHOLE) == TOKENS


@pytest.mark.parametrize(
    ("waits", "device_s", "server_s", "winner", "first", "starts"),
    [
        ((0.0, 0.0), 0.1, 0.3, "device", 0.1, ("device", "server")),
        ((0.0, 0.0), 0.3, 0.1, "server", 0.1, ("device", "server")),
        ((0.2, 0.0), 0.1, 0.15, "server", 0.15, ("server",)),  # the device's wait is never over
        ((0.2, 0.0), 0.1, 0.5, "device", 0.3, ("device", "server")),
        ((NEVER, 0.0), 0.1, 5.0, "server", 5.0, ("server",)),
        ((0.0, NEVER), 5.0, 0.1, "device", 5.0, ("device",)),
    ],
)
def test_an_endpoint_starts_only_if_no_token_has_come_when_its_wait_is_over(
    waits: tuple[float, float], device_s: float, server_s: float, winner: str, first: float, starts: tuple[str, ...]
) -> None:
    device, server = Scripted([device_s]), Scripted([server_s])
    seen = see(Router(device, server, lambda _: waits))
    assert seen.texts == WHOLE
    assert seen.summary.winner == winner
    assert seen.summary.started == starts
    assert seen.times[0] == pytest.approx(first)


def test_the_loser_is_cancelled_and_paid() -> None:
    device, server = Scripted([0.1]), Scripted([0.2])
    router = Router(device, server, lambda _: (0.0, 0.0))
    seen = see(router)
    assert server.cancelled == 1 and device.cancelled == 0
    entries = {entry.side: entry for entry in seen.summary.entries}
    assert (entries["server"].outcome, entries["server"].output_tokens, entries["server"].estimated) == (
        "lost",
        0,
        True,
    )
    assert entries["server"].cost == LENGTH * 1.0
    assert (entries["device"].outcome, entries["device"].estimated) == ("served", False)
    assert entries["device"].cost == LENGTH * 1.0 + TOKENS * 2.0
    assert router.ledger.summary()["server"]["wasted_cost"] == LENGTH
    assert seen.summary.cost == pytest.approx(2 * LENGTH + 2 * TOKENS)


def test_without_usage_the_tokens_are_counted_and_marked_as_estimated() -> None:
    seen = see(Router(Scripted(usage=False), Scripted(), lambda _: (0.0, NEVER), count_tokens=lambda text: 7))
    assert [(e.prompt_tokens, e.output_tokens, e.estimated) for e in seen.summary.entries] == [(7, TOKENS, True)]


def test_a_failing_endpoint_starts_the_other_at_once() -> None:
    seen = see(Router(Scripted([0.1]), Scripted([0.05], fault=(0, 0)), lambda _: (9.0, 0.0)))
    assert seen.texts == WHOLE
    assert seen.times[0] == pytest.approx(0.15)
    assert [entry.role for entry in seen.summary.entries] == ["race", "fallback"]


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("at", [0, 1, 17, TOKENS - 1])
def test_a_stream_that_drops_or_stalls_goes_on_from_the_exact_prefix(at: int, silent: bool) -> None:
    device = Scripted(fault=(0, at), silent=silent, voice="a")
    server = Scripted(voice="b")
    limits = Timeouts(first_token=1.0, between_tokens=0.5, total=60.0)
    seen = see(Router(device, server, lambda _: (0.0, NEVER), timeouts=limits))
    assert server.asked == ["".join(answer(PROMPT, at, "a"))]
    assert seen.texts == composed(seen.summary, {"device": "a", "server": "b"}, TOKENS)
    assert [switch.at for switch in seen.summary.switches] == ([0, at] if at else [0])
    assert seen.error is None


def test_a_drop_after_the_last_token_needs_no_second_endpoint() -> None:
    seen = see(Router(Scripted(fault=(0, TOKENS)), Scripted(), lambda _: (0.0, NEVER)))
    assert seen.texts == WHOLE and seen.summary.finish_reason == "length" and seen.summary.started == ("device",)


def test_when_both_fail_the_reader_gets_the_prefix_and_one_error_with_both_reasons() -> None:
    seen = see(Router(Scripted(fault=(0, 3)), Scripted(fault=(0, 4)), lambda _: (0.0, NEVER)))
    assert seen.texts == WHOLE[:7]
    assert seen.error is not None and seen.error.status == 502
    assert "device: as scripted" in str(seen.error) and "server: as scripted" in str(seen.error)


def test_an_endpoint_that_cannot_continue_is_not_asked_to() -> None:
    server = Scripted(endpoint=Endpoint("http://127.0.0.1:1", can_continue=False))
    seen = see(Router(Scripted(fault=(0, 3)), server, lambda _: (0.0, NEVER)))
    assert seen.texts == WHOLE[:3] and server.asked == []
    assert "cannot continue" in str(seen.error)


def test_the_deadline_holds_over_all_attempts_together() -> None:
    limits = Timeouts(first_token=0.8, between_tokens=0.8, total=1.0)
    device, server = Scripted(fault=(0, 2), silent=True), Scripted([9.0])
    router = Router(device, server, lambda _: (0.0, NEVER), timeouts=limits)
    seen = see(router)
    assert seen.texts == WHOLE[:2]
    assert seen.error is not None and seen.error.status == 504
    assert server.cancelled == 1
    assert router.ledger.totals["server"].outcomes == {"cancelled": 1}


def test_leaving_the_stream_cancels_both_endpoints() -> None:
    async def leave(router: Router) -> None:
        async for _ in router.stream(PROMPT):
            break
        await asyncio.sleep(1.0)

    device, server = Scripted([0.1]), Scripted([0.1001])
    router = Router(device, server, lambda _: (0.0, 0.0))
    run(leave(router))
    assert (device.cancelled, server.cancelled) == (1, 1)
    assert router.ledger.totals["device"].outcomes == {"cancelled": 1}
    assert router.ledger.errors == 0


def test_closing_the_router_ends_its_streams_with_an_error() -> None:
    async def close(router: Router) -> Seen:
        reading = asyncio.create_task(read(router))
        await asyncio.sleep(0.15)
        await router.aclose()
        return await reading

    seen = run(close(Router(Scripted(), Scripted(), lambda _: (0.0, NEVER))))
    assert seen.error is not None and seen.error.status == 503


# Pacing and migration


def migrating(mode: Any, overhead_s: float = 0.5, pace: float = 20.0) -> dict[str, Any]:
    rule = StatedOverhead(pace, overhead_s, answer_tokens=128.0, source_output=2.0, target_output=0.0, handoff=mode)
    return {"migration": rule, "pace": pace, "constrained": "device"}


def late(seen: Seen, pace: float) -> int:
    return sum(time > seen.times[0] + i / pace + 1e-6 for i, time in enumerate(seen.times))


@pytest.mark.parametrize("mode", ["stop", "overlap"])
@pytest.mark.parametrize("handover_s", [0.0, 0.3, 0.5])
def test_no_token_is_late_when_the_hand_over_takes_at_most_its_estimate(mode: str, handover_s: float) -> None:
    device = Scripted([0.1], tbt=0.01, voice="a", endpoint=EXPENSIVE)
    server = Scripted([handover_s], tbt=0.04, voice="b", endpoint=CHEAP)
    seen = see(Router(device, server, lambda _: (0.0, NEVER), **migrating(mode)), prompt=LONG, max_tokens=100)
    assert seen.summary.migrated_at == 13  # the first n0 with n0 - k >= 20 * 0.5: 13 generated in 0.12 s, 3 shown
    assert seen.texts == composed(seen.summary, {"device": "a", "server": "b"}, len(seen.texts), LONG)
    assert late(seen, 20.0) == 0
    assert np.diff(seen.times) == pytest.approx(1 / 20.0)
    outcomes = {entry.side: entry.outcome for entry in seen.summary.entries}
    assert outcomes == {"device": "migrated", "server": "served"}


def test_stop_halts_the_source_at_the_trigger_and_overlap_lets_it_run() -> None:
    received = {}
    for mode in ("stop", "overlap"):
        device = Scripted(tbt=0.01, endpoint=EXPENSIVE)
        seen = see(Router(device, Scripted([0.05]), lambda _: (0.0, NEVER), **migrating(mode)))
        assert seen.texts == WHOLE
        received[mode] = next(entry.output_tokens for entry in seen.summary.entries if entry.side == "device")
    assert received["stop"] < received["overlap"]


def test_a_late_target_delays_tokens_in_stop_mode_and_is_dropped_in_overlap_mode() -> None:
    for mode in ("stop", "overlap"):
        device = Scripted(tbt=0.01, voice="a", endpoint=EXPENSIVE)
        server = Scripted([0.9], voice="b", endpoint=CHEAP)
        seen = see(Router(device, server, lambda _: (0.0, NEVER), **migrating(mode)), max_tokens=TOKENS)
        assert seen.texts == composed(seen.summary, {"device": "a", "server": "b"}, TOKENS)
        assert (late(seen, 20.0) > 0) == (mode == "stop")
        assert (seen.summary.migrated_at is None) == (mode == "overlap")


@pytest.mark.parametrize("mode", ["stop", "overlap"])
def test_when_the_target_fails_the_source_goes_on(mode: str) -> None:
    device = Scripted(voice="a", endpoint=EXPENSIVE)
    server = Scripted([0.05], voice="b", fault=(0, 0), endpoint=CHEAP)
    seen = see(Router(device, server, lambda _: (0.0, NEVER), **migrating(mode)))
    assert seen.texts == answer(PROMPT, TOKENS, "a")
    assert len(device.asked) == (2 if mode == "stop" else 1)
    assert seen.summary.migrated_at is None


def test_when_the_source_fails_during_an_overlap_the_target_answers() -> None:
    for handover_s in (0.2, 2.0):
        device = Scripted(voice="a", fault=(0, 16), endpoint=EXPENSIVE)
        server = Scripted([handover_s, 0.1], voice="b", endpoint=CHEAP)
        seen = see(Router(device, server, lambda _: (0.0, NEVER), **migrating("overlap")))
        assert seen.error is None
        assert seen.texts == composed(seen.summary, {"device": "a", "server": "b"}, TOKENS)


def test_there_is_no_migration_without_a_saving_or_away_from_the_free_endpoint_or_twice() -> None:
    even = StatedOverhead(20.0, 0.1, 128.0, source_output=1.0, target_output=1.0)
    dear = StatedOverhead(20.0, 0.1, 128.0, source_output=2.0, target_output=0.0, target_prompt=100.0)
    for rule in (even, dear):
        router = Router(Scripted(), Scripted(), lambda _: (0.0, NEVER), pace=20.0, migration=rule, constrained="device")
        assert see(router).summary.migrated_at is None
    router = Router(Scripted(), Scripted(), lambda _: (NEVER, 0.0), **migrating("stop"))
    assert see(router).summary.started == ("server",)
    assert len(see(Router(Scripted(), Scripted(), lambda _: (0.0, NEVER), **migrating("stop"))).summary.switches) == 2


def test_a_pinned_request_is_never_migrated() -> None:
    device, server = Scripted(), Scripted()
    router = Router(device, server, lambda _: (0.0, NEVER), **migrating("stop"))

    async def pinned() -> Summary:
        stream = router.stream(PROMPT, TOKENS, logprobs=3)
        async for _ in stream:
            pass
        return stream.summary

    assert run(pinned()).migrated_at is None and server.asked == []


def test_pacing_shows_tokens_at_its_rate_and_never_before_they_are_there() -> None:
    fast = see(Router(Scripted(tbt=0.01), Scripted(), lambda _: (0.0, NEVER), pace=10.0))
    assert np.diff(fast.times) == pytest.approx(0.1)
    slow = see(Router(Scripted(tbt=0.25), Scripted(), lambda _: (0.0, NEVER), pace=10.0))
    assert np.diff(slow.times) == pytest.approx(0.25)


# Budgets


@pytest.mark.parametrize("budget", [0.0, 0.25, 0.7, 1.0])
def test_the_bucket_is_never_exceeded_even_by_fallbacks(budget: float) -> None:
    async def ask_all() -> list[tuple[int, int]]:
        device, server = Scripted([0.01], tbt=0.0), Scripted([0.02], tbt=0.0, fault=None)
        bucket = TokenBucket(budget, burst=math.inf)
        router = Router(
            device,
            server,
            lambda _: (0.0, 0.0),
            constrained="device",
            bucket=bucket,
            count_tokens=len,
        )
        levels = []
        for number in range(60):
            server.fault = (len(server.asked), 2) if number % 3 == 0 else None  # then only the device could go on
            await read(router, "x" * (1 + 7 * number % 40), 4)
            spent = router.ledger.totals["device"].starts
            levels.append((router.ledger.started_tokens["device"], spent))
            assert router.ledger.started_tokens["device"] <= budget * router.ledger.input_tokens + 1e-6
            assert bucket.level >= 0
        return levels

    levels = run(ask_all())
    assert (levels[-1][1] == 0) == (budget == 0.0)


def test_a_spent_bucket_starts_the_other_endpoint_and_says_so_when_that_fails() -> None:
    bucket = TokenBucket(0.0)
    router = Router(Scripted(), Scripted(), lambda _: (0.0, NEVER), constrained="device", bucket=bucket)
    assert see(router).summary.started == ("server",)
    router = Router(Scripted(), Scripted(fault=(0, 0)), lambda _: (0.0, 0.0), constrained="device", bucket=bucket)
    assert "token budget is spent" in str(see(router).error)


def test_the_policys_share_of_input_tokens_is_realised() -> None:
    race, alone = (np.zeros(1), np.zeros(1)), (np.full(1, NEVER), np.zeros(1))
    policy = mixture("race", "device", 0.3, alone, race, 0.3)

    async def ask_all() -> float:
        router = Router(Scripted([0.01], tbt=0.0), Scripted([0.02], tbt=0.0), policy, seed=1)
        for number in range(1500):
            await read(router, "x" * (4 + 4 * (number % 7)), 1)
        return router.ledger.share("device")

    # 4 standard errors of a share of 1500 coins over lengths 1..7: 4 * 0.46 * sqrt(20) / (4 * sqrt(1500))
    assert run(ask_all()) == pytest.approx(0.3, abs=0.055)


# Everything at once


faults = st.none() | st.tuples(st.integers(0, 2), st.integers(0, 25))
seconds = st.sampled_from([0.0, 0.01, 0.05, 0.2, 0.7, 2.0])
waits = st.sampled_from([0.0, 0.03, 0.1, 1.0, NEVER])


@st.composite
def endpoints(draw: st.DrawFn, voice: str) -> Scripted:
    return Scripted(
        draw(st.lists(seconds, min_size=1, max_size=3)),
        draw(st.sampled_from([0.0, 0.004, 0.02, 0.1])),
        voice,
        draw(faults),
        draw(st.booleans()),
        draw(st.booleans()),
        Endpoint("http://127.0.0.1:1", can_continue=draw(st.sampled_from([True, True, True, False]))),
    )


@settings(max_examples=400, deadline=None)
@given(
    device=endpoints("a"),
    server=endpoints("b"),
    waits=st.tuples(waits, waits),
    mode=st.sampled_from(["stop", "overlap", None]),
    constrained=st.sampled_from(["device", "server"]),
    pace=st.sampled_from([15.0, 80.0]),
    overhead_s=st.sampled_from([0.0, 0.1, 0.5]),
)
def test_whatever_happens_no_token_is_lost_doubled_or_reordered(
    device: Scripted,
    server: Scripted,
    waits: tuple[float, float],
    mode: Any,
    constrained: Any,
    pace: float,
    overhead_s: float,
) -> None:
    options: dict[str, Any] = {"constrained": constrained}
    if mode is not None:
        options |= migrating(mode, overhead_s, pace) | {"constrained": constrained}
    waits = (0.0, waits[1]) if min(waits) == NEVER else waits
    router = Router(device, server, lambda _: waits, timeouts=Timeouts(1.0, 0.5, 20.0), **options)
    seen = see(router)
    assert seen.texts == composed(seen.summary, {"device": "a", "server": "b"}, len(seen.texts))
    assert all(later >= sooner for sooner, later in itertools.pairwise(seen.times))
    assert len(seen.summary.switches) <= 4
    if seen.error is None:
        last = "a" if seen.summary.switches[-1].source == "device" else "b"
        ended = not answer(PROMPT + seen.text, 1, last)
        assert len(seen.texts) == TOKENS or ended
    # Every start is entered once, and paid at least its prompt.
    totals = router.ledger.totals
    assert totals["device"].starts == len(device.asked) and totals["server"].starts == len(server.asked)
    assert len(seen.summary.entries) == len(device.asked) + len(server.asked)
    assert all(entry.prompt_tokens >= LENGTH for entry in seen.summary.entries)


# Bad configurations, one clear error each


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pace": 0.0}, "pace"),
        ({"migration": StatedOverhead(5.0, 1.0, 9.0, 1.0, 0.0), "constrained": "device"}, "needs a pace"),
        ({"bucket": TokenBucket(0.5)}, "which endpoint is constrained"),
    ],
)
def test_a_router_that_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Router(Scripted(), Scripted(), lambda _: (0.0, 0.0), **options)


def test_an_empty_prompt_is_refused() -> None:
    router = Router(Scripted(), Scripted(), lambda _: (0.0, 0.0))
    for prompt in ("", [], [{"role": "user", "content": ""}]):
        with pytest.raises(ValueError, match=r"prompt is empty|at least one message"):
            router.stream(prompt)


def test_an_online_policy_learns_from_the_streams_and_keeps_its_budget():
    slow_now_and_then = tuple(3.0 if number % 5 == 0 else 0.3 + 1e-3 * number for number in range(20))

    dispatcher = OnlineDispatcher(Device("device", prefill_rate=10.0, decode_rate=20.0), budget=0.3, window=300)

    async def work() -> tuple[Router, list[float], int]:
        device, server = Scripted((0.5,)), Scripted(slow_now_and_then)
        async with Router(device, server, dispatcher) as router:
            first, won = [], 0
            for _ in range(300):
                stream = router.stream(PROMPT, 2)
                assert "".join([token.text async for token in stream]) == "".join(answer(PROMPT, 2))
                first.append(stream.summary.first_token_s)
                won += stream.summary.winner == "device"
            return router, first, won

    router, first, won = run(work())
    assert router.constrained == "device" and router.ledger.share("device") <= 0.3
    assert np.mean(first[:20]) == pytest.approx(0.84, abs=0.02), "nothing is known yet, and the server answers alone"
    assert np.mean(first[100:]) < 0.55, "it waits out the fast answers and spares the slow ones"
    assert 0 < won == sum(not answered for _, answered in dispatcher._seen), "where the device won, S is censored"
    spent = router.ledger.started_tokens["device"]
    assert dispatcher.bucket.level == pytest.approx(0.3 * router.ledger.input_tokens - spent), "every start is charged"

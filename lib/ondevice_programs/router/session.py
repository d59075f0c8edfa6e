"""One request's life: staggered starts, first token wins, fallback and migration, as one state machine.

Everything that happens (a start falls due, a chunk comes, an endpoint fails, a timer runs out) is one call of one
method, on one event loop and without awaiting, so no two of them interleave. Race, fallback and the hand-off of a
migration are the same step: a running attempt whose prefix is the answer so far takes over with its first token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Literal

from ondevice_papers.disco.budgeted import Dispatcher
from ondevice_papers.disco.migration import Migration
from ondevice_papers.disco.policy import NEVER, SIDES, Side
from ondevice_programs.router.config import Settings
from ondevice_programs.router.delivery import Delivery, tokens_of
from ondevice_programs.router.endpoints import EndpointError, Finish, Piece, Usage
from ondevice_programs.router.request import Json, Request
from ondevice_programs.router.sides import Group, Member

Role = Literal["race", "fallback", "retry", "migration"]
# served: it finished the answer. migrated: it handed the answer over. lost: another was first. failed: it broke off.
# cancelled: the user left or the deadline passed.
Outcome = Literal["served", "migrated", "lost", "failed", "cancelled"]
TOLD = ("side", "role", "outcome", "cost", "estimated", "ttft")
# Errors that reach the client as an endpoint said them, those first that tell most about what to do.
PASSED_ON = (400, 404, 413, 415, 422, 401, 403, 429)


class StreamError(EndpointError):
    """The answer could not be finished; status, body and retry_after are the HTTP answer that says so."""


@dataclass(eq=False)
class Attempt:
    """One start of one deployment. base: packets of the answer that it was given as a prefix, of `prefix` tokens.

    progress: when it last gave something, or ended. worst: the most it can cost. queued: seconds that it is expected to
    wait behind others for a device that serves one at a time. ttft: seconds to its first token. usage, cost, estimated:
    once it has an outcome; tokens as the endpoint counted them, else the whole prompt and what was received.
    """

    side: Side
    role: Role
    member: Member
    base: int
    prefix: int
    started: float
    progress: float
    worst: float
    queued: float
    usage: Usage
    packets: int = 0
    ttft: float | None = None
    outcome: Outcome | None = None
    error: EndpointError | None = None
    cost: float = 0.0
    estimated: bool = True
    task: asyncio.Task[None] | None = None
    watch: asyncio.TimerHandle | None = None

    def told(self) -> Json:
        """What the caller may know of it."""
        return {name: getattr(self, name) for name in TOLD} | asdict(self.usage)


@dataclass(frozen=True)
class Setup:
    """What all requests of a router share. seen: told of every attempt that ended."""

    groups: Mapping[Side, Group]
    dispatcher: Dispatcher
    settings: Settings
    seen: Callable[[Attempt], None]
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def device_free_in(self) -> float:
        """Seconds until a device that serves one at a time is free; 0 for one that serves many at once."""
        now = asyncio.get_running_loop().time()
        return min(it.free_in(now) for it in self.groups["device"].members) if self.settings.device_serves_one else 0.0


class Session:
    """One request. `out` carries its packets; all else is complete once `out` is closed."""

    def __init__(self, setup: Setup, request: Request) -> None:
        self.out = Delivery(setup.settings.pace if request.streamed else None)
        self.entries: list[Attempt] = []  # those that ended
        self.switches: list[Attempt] = []  # from packet `base` of each on, the answer comes from it
        self.finish: Finish | None = None
        self.error: BaseException | None = None
        self.first_token_s: float | None = None  # since the request
        self.heard = self.ended = 0.0  # when the first token came and when all was over, by the precise clock
        self._setup, self._settings, self._request = setup, setup.settings, request
        self._loop = asyncio.get_running_loop()
        self.order = setup.dispatcher.arrive(request.tokens, setup.device_free_in())
        self._source: Attempt | None = None
        self._attempts: list[Attempt] = []
        self._timers: list[asyncio.TimerHandle] = []
        self._failures: dict[Side, EndpointError] = {}
        self._tried: dict[Member, EndpointError] = {}
        self._retries = dict.fromkeys(SIDES, setup.settings.num_retries)
        self._plain = request.pinned is None  # until a chunk holds more than text
        self._migration: Migration | None = None
        self._considered = False
        self._ended = False

    def start(self) -> None:
        """Start what is due at once and set timers for the rest; a side that never starts is a fallback."""
        self._timers.append(self._loop.call_later(self._settings.timeout, self._overdue))
        for side in sorted(SIDES, key=lambda side: side == self._settings.constrained):  # the constrained one last
            wait = self.order.waits[side]
            if wait <= 0:
                self._due(side)
            elif wait < NEVER:
                self._timers.append(self._loop.call_later(wait, self._due, side))

    def abandon(self) -> None:
        """The user left: close everything."""
        self._end(StreamError("The reader closed the stream.", 499))

    def usage(self) -> tuple[Usage, bool]:
        """Of the whole answer, and whether some of it is estimated; of a whole pinned one, what the endpoint said."""
        told = self.finish.usage if self.finish else None
        last = self.switches[-1].base if self.switches else 0
        if told and not last:
            return told, False
        before = self.out.tokens_at(last)
        output = before + told.output_tokens if told else self.out.tokens
        return Usage(told.prompt_tokens - before if told else self._request.tokens, output), True

    # What can happen

    def _due(self, side: Side) -> None:
        """The wait of one side is over and no first token has come."""
        idle = all(attempt.side != side for attempt in self._attempts)
        if idle and not self._ended and side not in self._failures and not self._launch(side, "race"):
            self._recover()

    def _event(self, attempt: Attempt, event: Piece | Finish) -> None:
        if attempt.outcome:
            return
        if isinstance(event, Piece):
            self._piece(attempt, event)
        elif attempt.watch is not None:
            attempt.watch.cancel()  # the answer is complete: silence is no failure any more

    def _piece(self, attempt: Attempt, piece: Piece) -> None:
        attempt.progress = self._loop.time()
        attempt.packets += 1
        attempt.usage = Usage(attempt.usage.prompt_tokens, attempt.usage.output_tokens + tokens_of(piece.text))
        if attempt.ttft is None:
            self._first_token(attempt)
        took_over = attempt is not self._source
        if took_over and not self._take_over(attempt):
            return
        self._plain = self._plain and piece.raw is None
        seam = attempt.role if took_over and attempt.base else None
        part = self.out.push(piece.text, attempt.side, piece.raw, seam)
        if self.first_token_s is None:
            self.first_token_s = part.time
            self.heard = time.perf_counter()
        self._consider_migration(attempt)

    def _first_token(self, attempt: Attempt) -> None:
        attempt.ttft = attempt.progress - attempt.started
        if not self._request.whole:
            attempt.member.first_token(attempt.ttft)
            if not attempt.prefix:
                self._setup.dispatcher.first_token(self.order, attempt.side, max(0.0, attempt.ttft - attempt.queued))

    def _finished(self, attempt: Attempt, finish: Finish) -> None:
        if attempt.outcome is None and (attempt is self._source or self._take_over(attempt)):
            self.finish = finish
            self._close(attempt, "served", finish.usage)
            self._end()

    def _failed(self, attempt: Attempt, error: EndpointError) -> None:
        if attempt.outcome:
            return
        self._failures[attempt.side] = self._tried[attempt.member] = error
        attempt.member.failed(error, self._settings)
        if not error.reached or (error.status or 0) in range(400, 500):  # nothing was processed
            self._setup.dispatcher.refund(self.order, attempt.side, self._request.tokens + attempt.prefix)
        self._close(attempt, "failed", error=error)
        if attempt is self._source:
            self._source = None
            self._step_back()
        self._again(attempt.side)
        if self._source is None:
            self._recover()

    def _quiet(self, attempt: Attempt) -> None:
        """The watch of an attempt ran out; it may have had tokens since it was set."""
        if attempt.outcome is None and not self._watch(attempt):
            waited = self._loop.time() - attempt.progress
            what = "no further token" if attempt.packets else "no first token"
            base = attempt.member.deployment.litellm_params.api_base
            self._failed(attempt, EndpointError(f"{base}: {what} for {waited:.3g} s", 504))

    def _overdue(self) -> None:
        self._end(StreamError(f"The answer was not finished within {self._settings.timeout:g} s.", 504))

    # What is done about it

    def _launch(self, side: Side, role: Role, again: bool = False) -> bool:
        """Start a side on the prompt and the answer so far; False, and why in failures, if it may not start."""
        tokens = self._request.tokens + self.out.tokens
        continuing = len(self.out) > 0
        try:
            if continuing and not self._plain:
                raise EndpointError(f"cannot continue what is not plain text ({self._request.pinned or 'its chunks'})")
            if self._request.max_tokens is not None and self.out.tokens >= self._request.max_tokens:
                raise EndpointError("cannot continue an answer of which it is not known what is left")
            member = self._setup.groups[side].choose(self._request, tokens, continuing, self._tried, again)
            if not self._setup.dispatcher.start(self.order, side, tokens):
                raise EndpointError("its token budget is spent", 429)
        except EndpointError as error:
            self._failures.setdefault(side, error)
            return False
        now = self._loop.time()
        worst = member.worst(self._request, tokens)
        queued = member.free_in(now) if side == "device" and self._settings.device_serves_one else 0.0
        attempt = Attempt(side, role, member, len(self.out), self.out.tokens, now, now, worst, queued, Usage(tokens, 0))
        member.started(now, worst)
        self._attempts.append(attempt)
        self._watch(attempt)
        attempt.task = self._loop.create_task(self._run(attempt, self.out.text()))
        self._setup.tasks.add(attempt.task)
        attempt.task.add_done_callback(self._setup.tasks.discard)
        return True

    async def _run(self, attempt: Attempt, prefix: str) -> None:
        limits = {name: limit - attempt.prefix for name, limit in self._request.limits.items()}
        try:
            async with asyncio.timeout(attempt.member.deployment.litellm_params.timeout):
                ask = attempt.member.source.ask
                finish = await ask(self._request, prefix, limits, partial(self._event, attempt))
            self._finished(attempt, finish)
        except asyncio.CancelledError:
            if attempt.outcome is None:  # not by this session
                self._end(StreamError("The router was closed.", 503))
            raise
        except EndpointError as error:
            self._failed(attempt, error)
        except TimeoutError:
            self._failed(attempt, EndpointError("was not finished within its timeout", 504))
        except Exception as error:  # a fault of ours must end the stream, not hang it
            self._end(error)

    def _take_over(self, attempt: Attempt) -> bool:
        """The first token of an attempt: make it the source, unless the reader has passed the point it starts from."""
        if attempt.base < len(self.out):
            if self.out.shown > attempt.base:
                self._close(attempt, "lost")
                return False
            self.out.truncate(attempt.base)
        for other in [other for other in self._attempts if other is not attempt]:
            self._close(other, "migrated" if other is self._source else "lost")
        self._clear_timers(keep=1)
        self._source = attempt
        self._setup.dispatcher.settled(self.order)
        self.switches.append(attempt)
        return True

    def _consider_migration(self, source: Attempt) -> None:
        """Migrate away from the constrained side, once, when the rule says so."""
        if not self._considered:
            self._considered = True
            self._migration = self._rule(source)
        # Templates drop a prefix's trailing white space, so no answer is split there.
        if self._migration is None or not self._plain or self.out.ends_in_space:
            return
        generated = self.out.tokens
        if self._request.max_tokens is not None and generated >= self._request.max_tokens:
            return
        if not self._migration.due(self._request.tokens, generated, self.out.shown_tokens):
            return
        self._migration = None
        if self._settings.migration == "stop":
            self._close(source, "migrated")
            self._source = None
        if not self._launch(_other(source.side), "migration") and self._source is None:
            self._recover()

    def _rule(self, source: Attempt) -> Migration | None:
        pace = self._settings.pace if self._request.streamed else None
        settings = self._settings
        if settings.migration == "no" or pace is None or not self._plain or source.side != settings.constrained:
            return None
        try:
            group = self._setup.groups[_other(source.side)]
            target = group.choose(self._request, self._request.tokens, True, self._tried, False)
        except EndpointError:
            return None
        prices = source.member.deployment.prices, target.deployment.prices
        return self._setup.dispatcher.migration(*prices, pace)

    def _step_back(self) -> None:
        """The source broke off while a migration's target starts: go back to the target's point, or drop the target."""
        for attempt in list(self._attempts):
            if self.out.shown <= attempt.base:
                self.out.truncate(attempt.base)
            else:
                self._close(attempt, "lost")

    def _again(self, side: Side) -> None:
        """Ask another deployment of a side that failed."""
        others = any(member not in self._tried for member in self._setup.groups[side].members)
        if others and self._retries[side] and not self._complete:
            self._retry(side, again=False)

    def _retry(self, side: Side, again: bool) -> bool:
        self._retries[side] -= 1
        if not self._launch(side, "retry", again):
            return False
        del self._failures[side]
        return True

    def _recover(self) -> None:
        """With nothing running, ask a side that has not failed, then one that may be asked again, or end."""
        if self._complete:
            self.finish = Finish("length")
            self._end()
        while not self._attempts and not self._ended:
            untried = [side for side in SIDES if side not in self._failures]
            if untried:
                self._launch(untried[0], "fallback")
            elif not any(self._retries[side] and self._retry(side, again=True) for side in SIDES):
                self._end(_no_endpoint(self._failures))

    @property
    def _complete(self) -> bool:
        """Whether the answer has all its tokens for certain: a packet is at least one."""
        return len(self.out) == self._request.max_tokens

    def _watch(self, attempt: Attempt) -> bool:
        """Set the timer that notices an attempt's silence; False if it has been silent for too long already."""
        if self._request.whole:
            return True  # a whole answer has no first token; the total limit holds
        due = attempt.progress + (
            attempt.member.deployment.litellm_params.stream_timeout or self._settings.stream_timeout
        )
        if due <= self._loop.time():
            return False
        attempt.watch = self._loop.call_at(due, self._quiet, attempt)
        return True

    def _close(
        self, attempt: Attempt, outcome: Outcome, usage: Usage | None = None, error: EndpointError | None = None
    ) -> None:
        """End an attempt and enter its cost; closing its task closes the HTTP stream."""
        attempt.outcome, attempt.error, attempt.estimated = outcome, error, usage is None
        self._attempts.remove(attempt)
        if attempt.watch is not None:
            attempt.watch.cancel()
        if attempt.task is not None and outcome != "served":
            attempt.task.cancel()
        now = attempt.progress = self._loop.time()
        counts = not attempt.prefix and not self._request.whole  # as an observation of a prompt's first token
        if attempt.ttft is None and outcome not in ("served", "failed") and counts:
            self._setup.dispatcher.cut_off(self.order, attempt.side, max(0.0, now - attempt.started - attempt.queued))
        if outcome != "failed" and (attempt.packets or outcome == "served"):
            attempt.member.succeeded()
        reached = error is None or error.reached
        attempt.usage = usage or (attempt.usage if reached else Usage(0, 0))
        attempt.cost = attempt.member.cost(attempt.usage.prompt_tokens, attempt.usage.output_tokens)
        attempt.member.ended(now, attempt.worst, attempt.cost)
        self.entries.append(attempt)
        self._setup.seen(attempt)

    def _end(self, error: BaseException | None = None) -> None:
        if self._ended:
            return
        self._ended, self.error, self.ended = True, error, time.perf_counter()
        self._clear_timers()
        gone = isinstance(error, StreamError) and error.status in (499, 504)
        for attempt in list(self._attempts):
            self._close(attempt, "cancelled" if gone else "lost")
        self._setup.dispatcher.close(self.order, self.usage()[0].output_tokens if self.finish else None)
        self.out.close(error)

    def _clear_timers(self, keep: int = 0) -> None:
        """Cancel the timers of starts that are no longer needed; the first timer is the total limit."""
        for timer in self._timers[keep:]:
            timer.cancel()
        del self._timers[keep:]


def _other(side: Side) -> Side:
    return "server" if side == "device" else "device"


def _no_endpoint(failures: Mapping[Side, EndpointError]) -> StreamError:
    """One error for all failures: what an endpoint said to the client where that helps, else all reasons."""
    for status in PASSED_ON:
        for error in failures.values():
            if error.status == status and (error.body or status != 400):
                return StreamError(_reasons(failures), status, error.body, error.retry_after)
    return StreamError(_reasons(failures), 400 if {error.status for error in failures.values()} == {400} else 502)


def _reasons(failures: Mapping[Side, EndpointError]) -> str:
    reasons = "; ".join(f"{side}: {error}" for side, error in failures.items())
    return f"No endpoint could finish the answer. {reasons}."

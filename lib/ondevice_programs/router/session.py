"""One request's life: staggered starts, first token wins, fallback and migration, as one state machine.

Everything that happens (a start falls due, a chunk comes, an endpoint fails, a timer runs out) is one call of one
method, on one event loop and without awaiting, so no two of them interleave. Race, fallback and the hand-off of a
migration are the same step: a running attempt whose prefix is the answer so far takes over with its first token.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from ondevice_papers.disco.budgeted import Dispatcher
from ondevice_papers.disco.migration import Migration
from ondevice_papers.disco.policy import NEVER, SIDES, Side
from ondevice_programs.router.config import Settings
from ondevice_programs.router.delivery import Delivery, tokens_of
from ondevice_programs.router.endpoints import Alive, AnswerChunk, EndpointError, Finish, Usage
from ondevice_programs.router.request import ChatRequest, Json
from ondevice_programs.router.sides import AT_FAULT, Endpoint

Role = Literal["race", "fallback", "retry", "migration"]
# served: it finished the answer. migrated: it handed the answer over. lost: another was first. failed: it broke off.
# cancelled: the user left or the deadline passed.
Outcome = Literal["served", "migrated", "lost", "failed", "cancelled"]
SPENT = "its token budget is spent"
HIDDEN_TOKENS = 1 << 17  # of what a model thinks and does not show, at most
PATIENCE_S = 30.0  # of silence, before a first or a further token
SUMMARY_FIELDS = ("side", "role", "outcome", "cost", "estimated", "ttft")
# Errors that reach the client as an endpoint said them, those first that tell most about what to do.
PASSED_ON = (400, 404, 413, 415, 422, 401, 403, 429)


log = logging.getLogger("ondevice_programs.router")


class StreamError(EndpointError):
    """The answer could not be finished; status, body and retry_after are the HTTP answer that says so."""


@dataclass(eq=False)
class Attempt:
    """One start of one side. base: packets of the answer that it was given as a prefix, of `prefix` tokens.

    progress: when it last gave something, or ended. worst: the most it can cost. ttft: seconds to its first token.
    usage, cost, estimated: once it has an outcome; tokens as the endpoint counted them, else the whole prompt and what
    was received. refunded: whether its tokens were given back to the budget, as nothing was processed. silence: the
    limit of it while it runs.
    """

    side: Side
    role: Role
    endpoint: Endpoint
    base: int
    prefix: int
    started: float
    progress: float
    worst: float
    usage: Usage
    ttft: float | None = None
    outcome: Outcome | None = None
    error: EndpointError | None = None
    cost: float = 0.0
    estimated: bool = True
    refunded: bool = False
    task: asyncio.Task[None] | None = None
    silence: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))

    def summary(self) -> Json:
        """What the caller may know of it."""
        counts = {"prompt_tokens": self.usage.prompt_tokens, "output_tokens": self.usage.output_tokens}
        return {name: getattr(self, name) for name in SUMMARY_FIELDS} | counts


@dataclass(frozen=True)
class Setup:
    """What all requests of a router share. seen: told of every attempt that ended."""

    endpoints: Mapping[Side, Endpoint]
    dispatcher: Dispatcher
    settings: Settings
    seen: Callable[[Attempt], None]
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def keep(self, task: asyncio.Task[None]) -> None:
        """A task that is cancelled where it still runs when the router ends."""
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)


class RoutedRequest:
    """One request. `out` carries its packets; all else is complete once `out` is closed."""

    def __init__(self, setup: Setup, request: ChatRequest) -> None:
        self.out = Delivery(setup.settings.pace if request.streamed else None, request.stops)
        self.entries: list[Attempt] = []  # those that ended
        self.switches: list[Attempt] = []  # from packet `base` of each on, the answer comes from it
        self.finish: Finish | None = None
        self.error: BaseException | None = None
        self.heard = self.ended = 0.0  # when the first token came and when all was over, by the precise clock
        self.over_budget = False  # whether the constrained side was asked though its budget is spent
        self._setup, self._settings, self._request = setup, setup.settings, request
        self._loop = asyncio.get_running_loop()
        self.order = setup.dispatcher.arrive(request.tokens)
        self._attempts: list[Attempt] = []  # those that run
        self._timers: list[asyncio.TimerHandle] = []
        self._failures: dict[Side, EndpointError] = {}
        self._retries = dict.fromkeys(SIDES, setup.settings.num_retries)
        self._plain = request.pinned is None  # until a chunk holds more than text
        self._migration: Migration | None = None
        self._overspends = False  # whether the constrained side may be asked though its budget is spent

    def start(self) -> None:
        """Start what is due at once and set timers for the rest; a side that never starts is a fallback."""
        overdue = StreamError(f"The answer was not finished within {self._settings.timeout:g} s.", 504)
        self._timers.append(self._loop.call_later(self._settings.timeout, self._end, overdue))
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
        reported = self.finish.usage if self.finish else None
        if reported is None:
            return Usage(self._request.tokens, self.out.tokens), True
        before = self.out.tokens_at(self.switches[-1].base)
        if not before:
            return reported, False
        return Usage(max(0, reported.prompt_tokens - before), before + reported.output_tokens), True

    # What can happen

    def _due(self, side: Side) -> None:
        """The wait of one side is over. It starts where no token has come, and it neither runs nor has failed."""
        running = {attempt.side for attempt in self._attempts}
        if self.ended or self.switches or side in running or side in self._failures:
            return
        if not self._launch(side, "race"):
            self._recover()

    def _event(self, attempt: Attempt, event: AnswerChunk | Finish | Alive) -> None:
        if attempt.outcome:
            return
        attempt.progress = self._loop.time()
        if isinstance(event, AnswerChunk):
            self._piece(attempt, event)
        if attempt.outcome is None:  # once the answer is complete, silence is no failure any more
            attempt.silence.reschedule(None if isinstance(event, Finish) else self._silent_until(attempt))

    def _piece(self, attempt: Attempt, piece: AnswerChunk) -> None:
        if attempt.ttft is None:
            attempt.ttft = attempt.progress - attempt.started
            if not attempt.prefix and not self._request.whole:
                self._setup.dispatcher.first_token(self.order, attempt.side, attempt.ttft)
            self._take_over(attempt)
        attempt.usage = Usage(attempt.usage.prompt_tokens, attempt.usage.output_tokens + tokens_of(piece.text))
        self._plain = self._plain and piece.raw is None
        seam = attempt.role if attempt.base and attempt.base == len(self.out) else None
        self.out.push(piece.text, attempt.side, piece.raw, seam, piece.others)
        self.heard = self.heard or time.perf_counter()
        if self.out.stopped:
            self._finished(attempt, Finish("stop"))
        else:
            self._consider_migration(attempt)

    def _finished(self, attempt: Attempt, finish: Finish) -> None:
        if attempt.outcome:
            return
        if attempt.ttft is None:
            self._take_over(attempt)
        self.finish = finish = self._credible(attempt, finish)
        self._close(attempt, "served", finish.usage)
        self._end()

    def _credible(self, attempt: Attempt, finish: Finish) -> Finish:
        """Without counts that the prompt or the answer cannot have, which others' budget and money would pay for.

        An endpoint that ignores the limit of an answer may well have given a longer one.
        """
        usage, size = finish.usage, self.out.size
        limit = min(attempt.endpoint.limits(self._request).values(), default=size + HIDDEN_TOKENS)
        prompt, output = self._request.most_tokens + size, max(size, self._request.answers * limit)
        if usage is None or (1 <= usage.prompt_tokens <= prompt and usage.output_tokens <= output):
            return finish
        base, counts = attempt.endpoint.deployment.litellm_params.api_base, (usage.prompt_tokens, usage.output_tokens)
        log.warning("%s counted %d tokens of a prompt and %d of its answer; both are estimated", base, *counts)
        return replace(finish, usage=None)

    def _failed(self, attempt: Attempt, error: EndpointError) -> None:
        if attempt.outcome:
            return
        attempt.endpoint.failed(error, self._settings)
        if attempt.base and error.status in AT_FAULT:  # it refuses our prefix, which is no fault of the caller's
            self._failures[attempt.side] = EndpointError(f"cannot continue an answer: {error}", 501)
        else:
            self._failures[attempt.side] = error
        if not error.reached or (error.status or 0) in (*range(400, 500), 503):  # nothing was processed
            self._setup.dispatcher.refund(self.order, attempt.side, self._request.tokens + attempt.prefix)
            attempt.refunded = True
        self._close(attempt, "failed", error=error)
        self._recover()

    # What is done about it

    def _launch(self, side: Side, role: Role, retrying: bool = False) -> bool:
        """Start a side on the prompt and the answer so far; False, and why in failures, if it may not start."""
        endpoint, tokens = self._setup.endpoints[side], self._request.tokens + self.out.tokens
        try:
            self._check(side, tokens, retrying)
        except EndpointError as error:
            self._failures.setdefault(side, error)
            return False
        now = self._loop.time()
        worst = endpoint.worst(self._request, tokens)
        base, prefix = len(self.out), self.out.tokens
        attempt = Attempt(side, role, endpoint, base, prefix, now, now, worst, Usage(tokens, 0))
        endpoint.started(worst)
        self._attempts.append(attempt)
        attempt.task = self._loop.create_task(self._run(attempt, self.out.text()))
        self._setup.keep(attempt.task)
        return True

    def _check(self, side: Side, tokens: int, retrying: bool) -> None:
        """Charge a start of so many tokens, or raise EndpointError that says why there may be none."""
        continuing = len(self.out) > 0
        if continuing and not self._plain:
            raise EndpointError(f"cannot continue what is not plain text ({self._request.pinned or 'its chunks'})")
        if self._has_all:
            raise EndpointError("cannot continue an answer of which it is not known what is left")
        failure = self._failures.get(side)
        refusal = self._setup.endpoints[side].refusal(self._request, tokens, continuing, failure, retrying)
        if refusal is not None:
            raise refusal
        if not self._setup.dispatcher.start(self.order, side, tokens):
            if not self._overspends:
                raise EndpointError(SPENT, 429)
            self.over_budget = True
            self._setup.dispatcher.account.take(self.order.number, tokens)

    @property
    def _has_all(self) -> bool:
        """Whether the answer has all its tokens by our count."""
        return self.out.tokens >= (self._request.max_tokens or NEVER)

    async def _run(self, attempt: Attempt, prefix: str) -> None:
        endpoint = attempt.endpoint
        limits = {name: max(1, limit - attempt.prefix) for name, limit in endpoint.limits(self._request).items()}
        try:
            async with asyncio.timeout(endpoint.deployment.litellm_params.timeout), attempt.silence:
                attempt.silence.reschedule(self._silent_until(attempt))
                finish = await endpoint.source.ask(self._request, prefix, limits, partial(self._event, attempt))
            self._finished(attempt, finish)
        except asyncio.CancelledError:
            if attempt.outcome is None:  # not by this session
                self._end(StreamError("The router was closed.", 503))
            raise
        except EndpointError as error:
            self._failed(attempt, error)
        except TimeoutError:
            late = "was not finished within its timeout"
            if attempt.silence.expired():
                self._cut_off(attempt)
                token = "no first token" if attempt.ttft is None else "no further token"
                late = f"{token} for {self._loop.time() - attempt.progress:.3g} s"
            self._failed(attempt, EndpointError(f"{endpoint.deployment.litellm_params.api_base}: {late}", 504))
        except Exception as error:  # a fault of ours must end the stream, not hang it
            self._end(error)

    def _take_over(self, attempt: Attempt) -> None:
        """The first token of an attempt, or its end without any: from here on the answer comes from it alone."""
        for other in [other for other in self._attempts if other is not attempt]:
            self._close(other, "lost")
        self._setup.dispatcher.settled(self.order)
        self.switches.append(attempt)
        self._migration = self._rule(attempt)

    def _rule(self, source: Attempt) -> Migration | None:
        """When the answer leaves the constrained side; None where it stays to the end."""
        settings, dispatcher = self._settings, self._setup.dispatcher
        moves = settings.migration == "stop" and self._request.streamed and self._plain
        if settings.pace is None or not moves or source.side != settings.constrained:
            return None
        target = self._setup.endpoints[dispatcher.other]
        failure = self._failures.get(dispatcher.other)
        if target.refusal(self._request, self._request.tokens, True, failure, False) is not None:
            return None
        return dispatcher.migration(source.endpoint.deployment.prices, target.deployment.prices, settings.pace)

    def _consider_migration(self, source: Attempt) -> None:
        """Migrate away from the constrained side, once, when the rule says so."""
        # Templates drop a prefix's trailing white space, so no answer is split there.
        if self._migration is None or not self._plain or self.out.ends_in_space or self._has_all:
            return
        if self._migration.due(self._request.tokens, self.out.tokens, self.out.shown_tokens):
            self._migration = None
            self._close(source, "migrated")
            if not self._launch(self._setup.dispatcher.other, "migration"):
                self._recover()

    def _recover(self) -> None:
        """With nothing running, ask a side that has not failed, then one that may be asked again, or end.

        One that was silent is asked again at last.
        """
        if len(self.out) == self._request.max_tokens:  # all its tokens for certain: a packet is at least one
            self.finish = Finish("length")
            self._end()
        constrained = self._settings.constrained
        while not self._attempts and not self.ended:
            untried = [side for side in SIDES if side not in self._failures]
            if untried:
                self._launch(untried[0], "fallback")
            elif any(self._retry(side) for side in SIDES if self._failures[side].status != 504):
                pass
            elif self._failures[constrained].message == SPENT and self._settings.over_budget == "fallback":
                self._overspends = True
                del self._failures[constrained]  # it is asked in the next turn
            elif not any(map(self._retry, SIDES)):
                self._end(_no_endpoint(self._failures))

    def _retry(self, side: Side) -> bool:
        """Ask a side that failed once more, if it may be."""
        if not self._retries[side] or not self._launch(side, "retry", retrying=True):
            return False
        self._retries[side] -= 1
        del self._failures[side]
        return True

    def _silent_until(self, attempt: Attempt) -> float | None:
        """When silence from now on is a failure; None for a whole answer of an endpoint with a timeout of its own.

        Another whole answer, which has no first token, has half of the time of all. Where no limit is named, a device
        that reads a long prompt has twice the time that it is known to take for it.
        """
        parameters = attempt.endpoint.deployment.litellm_params
        if self._request.whole:
            return None if parameters.timeout else self._loop.time() + self._settings.timeout / 2
        named = parameters.stream_timeout or self._settings.stream_timeout
        patience = named or PATIENCE_S
        if not named and attempt.ttft is None and attempt.side == "device":
            expected = self._setup.dispatcher.traffic.device_ttft(self._request.tokens + attempt.prefix)
            patience = max(patience, 2 * float(expected))
        return self._loop.time() + patience

    def _cut_off(self, attempt: Attempt) -> None:
        """Learn that a first token takes longer than an attempt was given for it."""
        if attempt.ttft is None and not attempt.prefix and not self._request.whole:
            self._setup.dispatcher.cut_off(self.order, attempt.side, self._loop.time() - attempt.started)

    def _close(
        self, attempt: Attempt, outcome: Outcome, usage: Usage | None = None, error: EndpointError | None = None
    ) -> None:
        """End an attempt and enter its cost; closing its task closes the HTTP stream."""
        attempt.outcome, attempt.error, attempt.estimated = outcome, error, usage is None
        self._attempts.remove(attempt)
        if attempt.task is not None:
            attempt.task.cancel()
        attempt.progress = self._loop.time()
        if outcome not in ("served", "failed"):
            self._cut_off(attempt)
        if outcome == "served" or (outcome != "failed" and attempt.ttft is not None):
            attempt.endpoint.succeeded()
        attempt.usage = usage or (Usage(0, 0) if attempt.refunded else attempt.usage)
        attempt.cost = attempt.endpoint.cost(attempt.usage.prompt_tokens, attempt.usage.output_tokens)
        attempt.endpoint.ended(attempt.worst, attempt.cost)
        self.entries.append(attempt)
        self._setup.seen(attempt)

    def _end(self, error: BaseException | None = None) -> None:
        if self.ended:
            return
        self.error, self.ended = error, time.perf_counter()
        for timer in self._timers:
            timer.cancel()
        cancelled = isinstance(error, StreamError) and error.status in (499, 504)
        for attempt in list(self._attempts):
            self._close(attempt, "cancelled" if cancelled else "lost")
        self._correct()
        self._setup.dispatcher.close(self.order, self.usage()[0].output_tokens if self.finish else None)
        self.out.close(error)

    def _correct(self) -> None:
        """Enter the prompt's tokens as the side that answered it counted them."""
        counted = [entry.usage.prompt_tokens for entry in self.entries if not entry.estimated and not entry.prefix]
        if counted and counted[0] != self._request.tokens:
            side = self._settings.constrained
            charged = [entry for entry in self.entries if entry.side == side and not entry.refunded]
            self._setup.dispatcher.correct(self.order, counted[0], len(charged))


def _told(body: Json | None, message: str) -> Json | None:
    """An endpoint's own words, unless a spent budget kept the other one from answering: then all reasons."""
    if not body or SPENT not in message:
        return body
    detail = body.get("error")
    return body | {"error": (detail if isinstance(detail, dict) else {}) | {"message": message}}


def _no_endpoint(failures: Mapping[Side, EndpointError]) -> StreamError:
    """One error for all failures: what an endpoint said to the client where that helps, else all reasons."""
    reasons = "; ".join(f"{side}: {error}" for side, error in failures.items())
    message = f"No endpoint could finish the answer. {reasons}."
    for status in PASSED_ON:
        for error in failures.values():
            if error.status == status and (error.body or status != 400):
                return StreamError(message, status, _told(error.body, message), error.retry_after)
    pauses = [error.retry_after for error in failures.values() if error.retry_after]
    status = 400 if {error.status for error in failures.values()} == {400} else 502
    return StreamError(message, status, retry_after=min(pauses, default=None))

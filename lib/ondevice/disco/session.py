"""One request's life: staggered starts, first token wins, fallback and migration, as one state machine.

Everything that happens (a start falls due, a chunk comes, an endpoint fails, a timer runs out) is one call of one
method, on one event loop and without awaiting, so no two of them interleave. Race, fallback and the hand-off of a
migration are the same step: a running attempt whose prefix is the answer so far takes over with its first token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from ondevice.disco.budget import TokenBucket
from ondevice.disco.delivery import Delivery
from ondevice.disco.endpoints import SIDES, EndpointError, Finish, Piece, Side, Source, Usage
from ondevice.disco.handoff import HandoffRule
from ondevice.disco.ledger import Entry, Ledger, Outcome, Role
from ondevice.disco.policy import NEVER
from ondevice.disco.request import Request


class StreamError(Exception):
    """The answer could not be finished. status: the HTTP status that says so."""

    def __init__(self, message: str, status: int = 502) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Timeouts:
    """Seconds. total bounds an answer's generation over all attempts together; the others, one attempt's silence."""

    first_token: float = 30.0
    between_tokens: float = 15.0
    total: float = 300.0

    def __post_init__(self) -> None:
        if not min(self.first_token, self.between_tokens, self.total) > 0:
            raise ValueError(f"A timeout is not above 0 s: {self}.")


@dataclass(frozen=True)
class Setup:
    """What all requests of a router share."""

    sources: Mapping[Side, Source]
    constrained: Side | None
    count_tokens: Callable[[str], int]
    timeouts: Timeouts
    migration: HandoffRule | None
    bucket: TokenBucket | None
    ledger: Ledger
    tasks: set[asyncio.Task[None]]


@dataclass(frozen=True)
class Switch:
    """From token `at` on, the answer comes from `source`."""

    at: int
    source: Side
    role: Role


@dataclass(frozen=True)
class Summary:
    """How an answer came about. winner: whose token was first; migrated_at: the first token after a migration."""

    winner: Side | None
    switches: tuple[Switch, ...]
    migrated_at: int | None
    finish_reason: str | None
    prompt_tokens: int
    output_tokens: int
    first_token_s: float | None
    entries: tuple[Entry, ...]

    @property
    def cost(self) -> float:
        return sum(entry.cost for entry in self.entries)

    @property
    def estimated(self) -> bool:
        """Whether some tokens were counted here because an endpoint gave no usage."""
        return any(entry.estimated for entry in self.entries)

    @property
    def started(self) -> tuple[Side, ...]:
        return tuple(side for side in SIDES if any(entry.side == side for entry in self.entries))


@dataclass(eq=False)
class Attempt:
    """One running request to one endpoint. base: tokens of the answer it was given as a prefix."""

    side: Side
    role: Role
    base: int
    prompt_tokens: int
    progress: float
    open: bool = True
    texts: list[str] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    watch: asyncio.TimerHandle | None = None


class Session:
    """One request. `out` carries its tokens; `summary()` is complete once `out` is closed."""

    def __init__(self, setup: Setup, request: Request, length: int, waits: Mapping[Side, float], out: Delivery) -> None:
        self.out = out
        self.started: set[Side] = set()
        self._setup = setup
        self._request = request
        self._length = length
        self._waits = waits
        self._loop = asyncio.get_running_loop()
        self._source: Attempt | None = None
        self._attempts: list[Attempt] = []
        self._timers: list[asyncio.TimerHandle] = []
        self._failures: dict[Side, EndpointError] = {}
        self._switches: list[Switch] = []
        self._entries: list[Entry] = []
        self._first_token_s: float | None = None
        self._finish_reason: str | None = None
        self._plain = request.pinned is None  # until a chunk holds more than text
        self._moved = False
        self._ended = False

    def start(self) -> None:
        """Start what is due at once and set timers for the rest; an endpoint with an infinite wait is a fallback."""
        self._setup.ledger.requests += 1
        self._setup.ledger.input_tokens += self._length
        if self._setup.bucket is not None:
            self._setup.bucket.arrive(self._length)
        self._timers.append(self._loop.call_later(self._setup.timeouts.total, self._overdue))
        for side in sorted(SIDES, key=lambda side: side == self._setup.constrained):  # the constrained one last
            wait = self._waits[side]
            if wait <= 0:
                self._due(side)
            elif wait < NEVER:
                self._timers.append(self._loop.call_later(wait, self._due, side))

    def abandon(self) -> None:
        """The user left: close everything."""
        if not self._ended:
            self._end(StreamError("The reader closed the stream.", 499))

    def summary(self) -> Summary:
        migrated = next((switch.at for switch in self._switches if switch.role == "migration"), None)
        return Summary(
            winner=self._switches[0].source if self._switches else None,
            switches=tuple(self._switches),
            migrated_at=migrated,
            finish_reason=self._finish_reason,
            prompt_tokens=self._length,
            output_tokens=len(self.out),
            first_token_s=self._first_token_s,
            entries=tuple(self._entries),
        )

    # What can happen

    def _due(self, side: Side) -> None:
        """The wait of one side is over and no first token has come."""
        idle = all(attempt.side != side for attempt in self._attempts)
        if idle and side not in self._failures and not self._launch(side, "race"):
            self._recover()

    def _event(self, attempt: Attempt, event: Piece | Finish) -> None:
        if not attempt.open:
            return
        if isinstance(event, Piece):
            self._piece(attempt, event)
        elif attempt.watch is not None:
            attempt.watch.cancel()  # the answer is complete: silence is no failure any more

    def _piece(self, attempt: Attempt, piece: Piece) -> None:
        attempt.progress = self._loop.time()
        attempt.texts.append(piece.text)
        if len(attempt.texts) == 1:
            self._watch(attempt)  # from now on the shorter limit between tokens holds
        if attempt is not self._source and not self._take_over(attempt):
            return
        self._plain = self._plain and piece.raw is None
        token = self.out.push(piece.text, attempt.side, piece.raw)
        if self._first_token_s is None:
            self._first_token_s = token.time
        if self._setup.migration is not None:
            self._consider_migration(attempt, self._setup.migration)

    def _finished(self, attempt: Attempt, finish: Finish) -> None:
        if attempt.open and (attempt is self._source or self._take_over(attempt)):
            self._close(attempt, "served", finish.usage)
            self._finish_reason = finish.reason
            self._end()

    def _failed(self, attempt: Attempt, error: EndpointError) -> None:
        if not attempt.open:
            return
        self._failures[attempt.side] = error
        self._close(attempt, "failed")
        if attempt is self._source:
            self._source = None
            self._step_back()
        if self._source is None:
            self._recover()

    def _quiet(self, attempt: Attempt) -> None:
        """The watch of an attempt ran out; it may have had tokens since it was set."""
        if attempt.open and not self._watch(attempt):
            waited = self._loop.time() - attempt.progress
            what = "no further token" if attempt.texts else "no first token"
            base = self._setup.sources[attempt.side].endpoint.base
            self._failed(attempt, EndpointError(f"{base}: {what} for {waited:.3g} s", 504))

    def _overdue(self) -> None:
        self._end(StreamError(f"The answer was not finished within {self._setup.timeouts.total:g} s.", 504))

    # What is done about it

    def _launch(self, side: Side, role: Role) -> bool:
        """Start an endpoint on the prompt and the answer so far; False, and why in failures, if it may not start."""
        barred = self._barred(side)
        if barred is not None:
            self._failures[side] = barred
            return False
        base = len(self.out)
        attempt = Attempt(side, role, base, self._length + base, self._loop.time())
        self._attempts.append(attempt)
        if side not in self.started:
            self.started.add(side)
            self._setup.ledger.started_tokens[side] += self._length
        self._watch(attempt)
        attempt.task = self._loop.create_task(self._run(attempt, self.out.text()))
        self._setup.tasks.add(attempt.task)
        attempt.task.add_done_callback(self._setup.tasks.discard)
        return True

    def _barred(self, side: Side) -> EndpointError | None:
        endpoint = self._setup.sources[side].endpoint
        pinned = self._request.pinned
        if pinned and endpoint.api != self._request.api:
            return EndpointError(f"speaks {endpoint.api} only, which cannot express this request ({pinned})", 400)
        if len(self.out):
            if not self._plain:
                return EndpointError(f"cannot continue an answer that is not plain text ({pinned or 'by its chunks'})")
            if not endpoint.can_continue:
                return EndpointError("cannot continue an answer")
        bucket = self._setup.bucket if side == self._setup.constrained and side not in self.started else None
        if bucket is not None:  # a request is charged its prompt once, as the budget counts it
            if bucket.level < self._length * (1 - 1e-12):
                return EndpointError("its token budget is spent", 429)
            bucket.spend(self._length)
        return None

    async def _run(self, attempt: Attempt, prefix: str) -> None:
        limit = self._request.max_tokens
        left = None if limit is None else limit - attempt.base
        source = self._setup.sources[attempt.side]
        try:
            finish = await source.ask(self._request, prefix, left, partial(self._event, attempt))
            self._finished(attempt, finish)
        except asyncio.CancelledError:
            if attempt.open:  # not by this session
                self._end(StreamError("The router was closed.", 503))
            raise
        except EndpointError as error:
            self._failed(attempt, error)
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
        self._switches.append(Switch(attempt.base, attempt.side, attempt.role))
        self._setup.ledger.migrations += attempt.role == "migration"
        return True

    def _consider_migration(self, source: Attempt, rule: HandoffRule) -> None:
        """Migrate away from the constrained endpoint, once, when the rule says so."""
        if self._moved or source.side != self._setup.constrained or not self._plain:
            return
        target: Side = "server" if source.side == "device" else "device"
        shown, generated = self.out.shown, len(self.out)
        able = self._setup.sources[target].endpoint.can_continue and target not in self._failures
        if not able or generated == self._request.max_tokens:
            return
        if not rule.should_migrate(self._length, generated, shown):
            return
        self._moved = True
        if rule.handoff == "stop":
            self._close(source, "migrated")
            self._source = None
        if not self._launch(target, "migration") and self._source is None:
            self._recover()

    def _step_back(self) -> None:
        """The source broke off while a migration's target starts: go back to the target's point, or drop the target."""
        for attempt in list(self._attempts):
            if self.out.shown <= attempt.base:
                self.out.truncate(attempt.base)
            else:
                self._close(attempt, "lost")

    def _recover(self) -> None:
        """With nothing running, ask an endpoint that has not failed; without one, end with the reasons."""
        if len(self.out) == self._request.max_tokens:
            self._finish_reason = "length"
            self._end()
        while not self._attempts and not self._ended:
            untried = [side for side in SIDES if side not in self._failures]
            if not untried:
                self._end(_no_endpoint(self._failures))
            else:
                self._launch(untried[0], "fallback")

    def _watch(self, attempt: Attempt) -> bool:
        """Set the timer that notices an attempt's silence; False if it has been silent for too long already."""
        limits = self._setup.timeouts
        limit = limits.between_tokens if attempt.texts else limits.first_token
        if self._request.whole:
            return True  # a whole answer has no first token; the total limit holds
        due = attempt.progress + limit
        if due <= self._loop.time():
            return False
        if attempt.watch is not None:
            attempt.watch.cancel()
        attempt.watch = self._loop.call_at(due, self._quiet, attempt)
        return True

    def _close(self, attempt: Attempt, outcome: Outcome, usage: Usage | None = None) -> None:
        """End an attempt and enter its cost; closing its task closes the HTTP stream."""
        attempt.open = False
        self._attempts.remove(attempt)
        if attempt.watch is not None:
            attempt.watch.cancel()
        if attempt.task is not None and outcome != "served":
            attempt.task.cancel()
        entry = self._entry(attempt, outcome, usage)
        self._entries.append(entry)
        self._setup.ledger.add(entry)

    def _entry(self, attempt: Attempt, outcome: Outcome, usage: Usage | None) -> Entry:
        endpoint = self._setup.sources[attempt.side].endpoint
        estimated = usage is None
        if usage is None:  # a chunk is at least one token; a chunk may hold several
            text = "".join(attempt.texts)
            output = max(len(attempt.texts), self._setup.count_tokens(text)) if text else len(attempt.texts)
            usage = Usage(attempt.prompt_tokens, output)
        cost = usage.prompt_tokens * endpoint.price_prompt + usage.output_tokens * endpoint.price_output
        return Entry(attempt.side, attempt.role, outcome, usage.prompt_tokens, usage.output_tokens, cost, estimated)

    def _end(self, error: BaseException | None = None) -> None:
        if self._ended:
            return
        self._ended = True
        self._clear_timers()
        left = isinstance(error, StreamError) and error.status in (499, 504)
        for attempt in list(self._attempts):
            self._close(attempt, "cancelled" if left else "lost")
        self._setup.ledger.errors += error is not None and not (isinstance(error, StreamError) and error.status == 499)
        self.out.close(error)

    def _clear_timers(self, keep: int = 0) -> None:
        """Cancel the timers of starts that are no longer needed; the first timer is the total limit."""
        for timer in self._timers[keep:]:
            timer.cancel()
        del self._timers[keep:]


def _no_endpoint(failures: Mapping[Side, EndpointError]) -> StreamError:
    """One error for all failures. Its status is the endpoints' own where the request is at fault or all are busy."""
    reasons = "; ".join(f"{side}: {error}" for side, error in failures.items())
    statuses = {error.status for error in failures.values()}
    own = {400, 404, 413, 415, 422, 429}
    status = statuses.pop() if len(statuses) == 1 and statuses <= own else 502
    return StreamError(f"No endpoint could finish the answer. {reasons}.", status or 502)

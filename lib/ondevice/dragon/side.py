"""One side of speculative aggregation, device or cloud, as a state machine (sections 3 and 4.1).

It does no I/O and has no clock: each event returns the actions that it causes, in order, and the caller, a process or
the simulator, carries them out. Positions count the generated tokens from 0.

Epochs. A side's epoch counts the rejections of its own drafts. Both sides can tell it from the decided tokens alone, so
a draft is valid if its epoch is the one at its position; all others were drafted after a rejected token and are
dropped, whenever they arrive. Only the side that does not aggregate sends its drafts.

Moving the aggregator. Switch carries all that the other side needs: the sender's epoch and its undecided drafts. The
new aggregator's own drafts are still in its queue, so nothing is lost or decided twice: on links that keep order,
exactly one side aggregates or one Switch is under way.

Token-wise aggregation (DRDG/TW, the paper's VDRAG) is lookahead 1: no side drafts past an undecided token.

On the wire the three messages are the structs of the same names and fields in ondevice.dragon.messages, in frames that
keep their order, as TCP does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ondevice.dragon.scheduler import Scheduler, Stay


@dataclass(frozen=True, slots=True)
class Draft:
    """A side's own token for a position. distribution: what it was drawn from, encoded; log_weight: log h (Eq. 4).

    pace: seconds that decoding it took, for the other side's profiler.
    """

    session: str
    epoch: int
    position: int
    token: int
    distribution: bytes = b""
    log_weight: float = 0.0
    pace: float = 0.0


@dataclass(frozen=True, slots=True)
class Target:
    """A decided token. accepted: whether the receiver's draft was. epoch: the receiver's from now on."""

    session: str
    epoch: int
    position: int
    token: int
    accepted: bool


@dataclass(frozen=True, slots=True)
class Switch:
    """The receiver aggregates from `position` on.

    epoch: the sender's. drafts: the sender's, undecided, from `position` on. profile: its scheduler's estimates.
    """

    session: str
    epoch: int
    position: int
    drafts: tuple[Draft, ...] = ()
    profile: tuple[float, ...] = ()


Message = Draft | Target | Switch


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to the other side, after all that were sent before."""

    message: Message


@dataclass(frozen=True, slots=True)
class Decode:
    """Feed `token` (None: the prompt) and draft the next position; ends with `Side.drafted`.

    It takes the place of a decode that still runs, whose result is void: abort it, or let it end and drop it.
    """

    epoch: int
    position: int
    token: int | None


@dataclass(frozen=True, slots=True)
class RollBack:
    """Keep the first `position` generated tokens in the KV cache; those after them are void."""

    position: int


@dataclass(frozen=True, slots=True)
class Emit:
    """A decided token: part of the output from now on."""

    position: int
    token: int


@dataclass(frozen=True, slots=True)
class Done:
    """The output has ended, by its end token or its limit. The last action of a side."""


Action = Send | Decode | RollBack | Emit | Done
Decide = Callable[[Draft, Draft, int], tuple[int, bool, bool]]


class Side:
    """One side of one session.

    decide(local, remote, position): the target token, and whether the local and the remote draft are accepted; called
    once a position, where the aggregator is. An accepted draft's token is the target.
    limit: most tokens. end: the end token, if any; it is emitted. lookahead: most drafts that are not decided, the one
    being decoded included; 1 is token-wise. scheduler: says when the aggregator moves to the other side.
    tokens: what is decided, as far as this side knows. epoch: of its own drafts.
    Raises ValueError on a limit or lookahead below 1, and in `received` on messages that no peer of this kind sends.
    """

    def __init__(
        self, session: str, decide: Decide, *, aggregates: bool, limit: int, end: int | None = None,
        lookahead: int = 16, scheduler: Scheduler | None = None,
    ) -> None:  # fmt: skip
        if limit < 1:
            raise ValueError(f"A session has at least one token, not {limit}.")
        if lookahead < 1:
            raise ValueError(f"A side drafts at least one token ahead, not {lookahead}.")
        self.session, self.decide, self.limit, self.end, self.lookahead = session, decide, limit, end, lookahead
        self.aggregates, self.done = aggregates, False
        self.scheduler = Stay() if scheduler is None else scheduler
        self.tokens: list[int] = []
        self.epoch = 0
        self._own: deque[Draft] = deque()  # undecided, from position len(tokens) on
        self._peer: deque[Draft] = deque()  # the same of the other side; empty where this side does not aggregate
        self._peer_epoch = 0
        self._next = 0  # the position to decode next, or being decoded
        self._began: float | None = None  # when that decode began; None: none runs
        self._rejected: float | None = None  # when the other side's draft was, until it is drafted anew
        self._sent: list[Target] = []
        self._gave = self._took = -1  # the positions at which this side last gave the aggregator away, and got it

    def start(self, now: float) -> list[Action]:
        """Begin to draft. Raises ValueError if it has begun."""
        if self._began is not None or self._next:
            raise ValueError(f"Session {self.session!r} has started already.")
        actions: list[Action] = []
        self._decode(now, actions)
        return actions

    def drafted(
        self, now: float, epoch: int, position: int, token: int, distribution: bytes = b"", log_weight: float = 0.0
    ) -> list[Action]:
        """A decode ended; epoch and position are the action's. Of a decode that became void, nothing follows."""
        if self.done or self._began is None or (epoch, position) != (self.epoch, self._next):
            return []
        pace, self._began = now - self._began, None
        self.scheduler.drafted(position, pace)
        draft = Draft(self.session, epoch, position, token, distribution, log_weight, pace)
        self._own.append(draft)
        self._next += 1
        actions: list[Action] = []
        if self.aggregates:
            self._aggregate(now, actions)
        else:
            actions.append(Send(draft))
        self._decode(now, actions)
        return actions

    def received(self, now: float, message: Message) -> list[Action]:
        """A message came. What is old, of a former epoch or repeated is dropped."""
        if message.session != self.session:
            raise ValueError(f"A message of session {message.session!r} came to session {self.session!r}.")
        actions: list[Action] = []
        if self.done:
            return actions
        if isinstance(message, Draft):
            self._queue(now, message)
            self._aggregate(now, actions)
        elif message.position < len(self.tokens) or (isinstance(message, Switch) and message.position == self._took):
            return actions
        elif self.aggregates or message.position > len(self.tokens):
            role = "aggregates" if self.aggregates else "does not aggregate"
            raise ValueError(f"{message} came to a side that {role} at position {len(self.tokens)}.")
        elif isinstance(message, Target):
            self._follow(message, actions)
        elif isinstance(message, Switch):
            self._take_over(now, message, actions)
        self._decode(now, actions)
        return actions

    def resume(self, position: int, aggregates: bool) -> list[Message]:
        """After a lost connection: what to send anew to a peer that knows `position` tokens, and may aggregate.

        Both sides call it, each with the other's len(tokens) and aggregates as they are when the connection is back.
        """
        if aggregates and self.aggregates:
            raise ValueError(f"Both sides of session {self.session!r} aggregate.")
        messages: list[Message] = [target for target in self._sent if target.position >= position]
        if self.aggregates or self.done:
            return messages
        if aggregates:
            return [*messages, *self._own]
        lost = position <= self._gave == len(self.tokens)
        return [*messages, self._switch()] if lost else messages

    # What follows from an event

    def _decode(self, now: float, actions: list[Action]) -> None:
        """Draft on, unless a decode runs or there is nothing to draft."""
        ahead = self._next - len(self.tokens)
        if self.done or self._began is not None or ahead >= self.lookahead or self._next >= self.limit:
            return
        last = self._own[-1].token if self._own else self.tokens[-1] if self.tokens else None
        if last is not None and last == self.end:
            return
        self._began = now
        actions.append(Decode(self.epoch, self._next, last))

    def _queue(self, now: float, draft: Draft) -> None:
        """Keep the other side's draft if this side aggregates and it is valid and new."""
        expected = len(self.tokens) + len(self._peer)
        if not self.aggregates or draft.epoch < self._peer_epoch or draft.position < expected:
            return
        if (draft.epoch, draft.position) != (self._peer_epoch, expected):
            raise ValueError(
                f"A draft of epoch {draft.epoch}, position {draft.position} came where {self._peer_epoch}, "
                f"{expected} comes next."
            )
        if self._rejected is not None:
            self.scheduler.answered(max(0.0, now - self._rejected - draft.pace))
            self._rejected = None
        self.scheduler.peer_drafted(draft.position, draft.pace)
        self._peer.append(draft)

    def _aggregate(self, now: float, actions: list[Action]) -> None:
        """Decide all positions of which both drafts are there, and move the aggregator where the scheduler says."""
        while self.aggregates and not self.done and self._own and self._peer:
            local, remote, position = self._own.popleft(), self._peer.popleft(), len(self.tokens)
            token, kept_local, kept_remote = self.decide(local, remote, position)
            if (kept_local and local.token != token) or (kept_remote and remote.token != token):
                raise ValueError(f"An accepted draft is the target, but {local.token}, {remote.token} gave {token}.")
            if not kept_remote:
                self._peer_epoch += 1
                self._peer.clear()
                self._rejected = now
            target = Target(self.session, self._peer_epoch, position, token, kept_remote)
            self._sent.append(target)
            actions.append(Send(target))
            self._commit(position, token, kept_local, actions)
            ahead = len(self._own), len(self._peer)
            if self.scheduler.moves(position, kept_local, kept_remote, *ahead) and not self.done:
                self._gave, self.aggregates, self._rejected = position + 1, False, None
                self._peer.clear()
                actions.append(Send(self._switch()))

    def _commit(self, position: int, token: int, accepted: bool, actions: list[Action]) -> None:
        """A token is decided; this side's draft of it is no longer in its queue."""
        self.tokens.append(token)
        actions.append(Emit(position, token))
        if not accepted:
            self.epoch += 1
            self._own.clear()
            self._next, self._began = position + 1, None
            actions.append(RollBack(position))
        if token == self.end or len(self.tokens) == self.limit:
            self.done = True
            actions.append(Done())

    def _switch(self) -> Switch:
        return Switch(self.session, self.epoch, len(self.tokens), tuple(self._own), self.scheduler.profile())

    def _follow(self, target: Target, actions: list[Action]) -> None:
        """The other side decided a token."""
        own = self._own[0].token if self._own else None
        if target.accepted and own != target.token:
            raise ValueError(f"{target} accepts a draft that this side does not have: it drafted {own}.")
        if target.epoch != self.epoch + (not target.accepted):
            raise ValueError(f"{target} came in epoch {self.epoch}.")
        if self._own:
            self._own.popleft()
        self._commit(target.position, target.token, target.accepted, actions)

    def _take_over(self, now: float, switch: Switch, actions: list[Action]) -> None:
        """Aggregate from here on."""
        places = [(draft.epoch, draft.position) for draft in switch.drafts]
        if places != [(switch.epoch, switch.position + i) for i in range(len(places))]:
            raise ValueError(f"A switch at {switch.epoch}, {switch.position} came with drafts of {places}.")
        self.aggregates, self._took = True, switch.position
        self._peer_epoch, self._peer = switch.epoch, deque(switch.drafts)
        self.scheduler.adopt(switch.profile)
        self._aggregate(now, actions)

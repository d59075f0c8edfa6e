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

Its three messages, DraftMessage, Target and Switch, are those of the wire, which keeps their order, as TCP does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import NamedTuple

from ondevice_papers.dragon.messages import DraftMessage, Switch, Target
from ondevice_papers.dragon.scheduler import Scheduler

Message = DraftMessage | Target | Switch


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
    """The output has ended, by its end token or at max_new_tokens. The last action of a side."""


Action = Send | Decode | RollBack | Emit | Done
Decide = Callable[[DraftMessage, DraftMessage, int], tuple[int, bool, bool]]


# What a side does


def draft_on(side: Side, now: float, actions: list[Action]) -> None:
    """Draft the next position, unless a decode runs or there is nothing to draft."""
    ahead = side.next - len(side.tokens)
    if side.done or side.began is not None or ahead >= side.lookahead or side.next >= side.max_new_tokens:
        return
    last = side.own[-1].token if side.own else side.tokens[-1] if side.tokens else None
    if last is None or last not in side.eos_token_ids:
        side.began = now
        actions.append(Decode(side.epoch, side.next, last))


def queue(side: Side, now: float, draft: DraftMessage) -> None:
    """Keep the other side's draft if it is valid and new. A former epoch's follows a rejected token: dropped."""
    expected = len(side.tokens) + len(side.peer)
    if not side.aggregates or draft.epoch < side.peer_epoch or draft.position < expected:
        return
    if (draft.epoch, draft.position) != (side.peer_epoch, expected):
        raise ValueError(
            f"A draft of epoch {draft.epoch}, position {draft.position} came where {side.peer_epoch}, "
            f"{expected} comes next."
        )
    if side.rejected is not None:
        side.scheduler.answered(max(0.0, now - side.rejected - draft.pace))
        side.rejected = None
    side.scheduler.peer_drafted(draft.position, draft.pace)
    side.peer.append(draft)


def settle(side: Side, now: float, actions: list[Action]) -> None:
    """Decide all positions of which both drafts are there, and move the aggregator where the scheduler says."""
    while side.aggregates and not side.done and side.own and side.peer:
        local, remote, position = side.own.popleft(), side.peer.popleft(), len(side.tokens)
        token, kept_local, kept_remote = side.decide(local, remote, position)
        if not kept_remote:  # what the other side drafted after it is void
            side.peer_epoch += 1
            side.peer.clear()
            side.rejected = now
        target = Target(side.session, side.peer_epoch, position, token, kept_remote)
        side.sent.append(target)
        actions.append(Send(target))
        commit(side, position, token, kept_local, actions)
        ahead = len(side.own), len(side.peer)
        if side.scheduler.moves(position, kept_local, kept_remote, *ahead) and not side.done:
            side.handed_over_at = position + 1
            side.aggregates = False
            side.rejected = None
            side.peer.clear()
            actions.append(Send(side.switch()))


def commit(side: Side, position: int, token: int, accepted: bool, actions: list[Action]) -> None:
    """A token is decided. Where this side's draft of it was rejected, all after it is drafted anew."""
    side.tokens.append(token)
    actions.append(Emit(position, token))
    if not accepted:
        side.epoch += 1
        side.own.clear()
        side.next = position + 1
        side.began = None
        actions.append(RollBack(position))
    if token in side.eos_token_ids or len(side.tokens) == side.max_new_tokens:
        side.done = True
        actions.append(Done())


def follow(side: Side, target: Target, actions: list[Action]) -> None:
    """The other side decided a token. Raises ValueError where that does not fit what this side drafted."""
    own = side.own[0].token if side.own else None
    if target.accepted and own != target.token:
        raise ValueError(f"{target} accepts a draft that this side does not have: it drafted {own}.")
    if target.epoch != side.epoch + (not target.accepted):
        raise ValueError(f"{target} came in epoch {side.epoch}.")
    if side.own:
        side.own.popleft()
    commit(side, target.position, target.token, target.accepted, actions)


def take_over(side: Side, now: float, switch: Switch, actions: list[Action]) -> None:
    """Aggregate from here on, with the other side's undecided drafts; this side's own are still in its queue."""
    positions = [(draft.epoch, draft.position) for draft in switch.drafts]
    if positions != [(switch.epoch, switch.position + i) for i in range(len(positions))]:
        raise ValueError(f"A switch at {switch.epoch}, {switch.position} came with drafts of {positions}.")
    side.aggregates = True
    side.took_over_at = switch.position
    side.peer_epoch = switch.epoch
    side.peer = deque(switch.drafts)
    side.scheduler.adopt(switch.profile)
    side.rules.settle(side, now, actions)


class Rules(NamedTuple):
    """What a side does on what comes: the functions above, or an experiment's."""

    draft_on: Callable[[Side, float, list[Action]], None] = draft_on
    queue: Callable[[Side, float, DraftMessage], None] = queue
    settle: Callable[[Side, float, list[Action]], None] = settle
    follow: Callable[[Side, Target, list[Action]], None] = follow
    take_over: Callable[[Side, float, Switch, list[Action]], None] = take_over


RULES = Rules()


class Side:
    """One side of one session.

    decide(local, remote, position): the target token, and whether the local and the remote draft are accepted; called
    once a position, where the aggregator is. An accepted draft's token is the target.
    eos_token_ids: ids of which the first ends the answer, emitted. lookahead: most drafts that are not decided, the one
    being decoded included; 1 is token-wise. scheduler: says when the aggregator moves to the other side.
    tokens: what is decided, as far as this side knows. epoch: of its own drafts. alone: whether it goes on by itself.
    Raises ValueError on max_new_tokens or lookahead below 1, and in `received` on messages that no peer of this kind
    sends.
    """

    def __init__(
        self,
        session: str,
        decide: Decide,
        *,
        aggregates: bool,
        max_new_tokens: int,
        eos_token_ids: Container[int] = (),
        lookahead: int = 16,
        alone: bool = False,
        scheduler: Scheduler | None = None,
        rules: Rules | None = None,
    ) -> None:
        if max_new_tokens < 1:
            raise ValueError(f"A session has at least one token, not {max_new_tokens}.")
        if lookahead < 1:
            raise ValueError(f"A side drafts at least one token ahead, not {lookahead}.")
        self.session = session
        self.decide = decide
        self.max_new_tokens = max_new_tokens
        self.eos_token_ids = eos_token_ids
        self.lookahead = lookahead
        self.aggregates = aggregates and not alone
        self.alone = alone
        self.done = False
        self.rules = rules or RULES
        self.scheduler = Scheduler() if scheduler is None else scheduler
        self.tokens: list[int] = []
        self.epoch = self.peer_epoch = 0
        self.own: deque[DraftMessage] = deque()  # undecided, from position len(tokens) on
        self.peer: deque[DraftMessage] = deque()  # the same of the other side; empty where this side does not aggregate
        self.next = 0  # the position to decode next, or being decoded
        self.began: float | None = None  # when that decode began; None: none runs
        self.rejected: float | None = None  # when the other side's draft was, until it is drafted anew
        self.sent: list[Target] = []
        self.handed_over_at = -1  # the position at which this side last gave the aggregator away
        self.took_over_at = -1  # and at which it last got it

    def start(self, now: float) -> list[Action]:
        """Begin to draft. Raises ValueError if it has begun."""
        if self.began is not None or self.next > len(self.tokens):
            raise ValueError(f"Session {self.session!r} has started already.")
        actions: list[Action] = []
        self.rules.draft_on(self, now, actions)
        return actions

    def drafted(
        self, now: float, epoch: int, position: int, token: int, distribution: bytes = b"", log_weight: float = 0.0
    ) -> list[Action]:
        """A decode ended; epoch and position are the action's. Of a decode that became void, nothing follows."""
        if not self.awaits(epoch, position) or self.began is None:
            return []
        pace = now - self.began
        self.began = None
        self.scheduler.drafted(position, pace)
        draft = DraftMessage(self.session, epoch, position, token, distribution, log_weight, pace)
        self.own.append(draft)
        self.next += 1
        actions: list[Action] = []
        if self.alone:
            self._take_own(actions)
        elif self.aggregates:
            self.rules.settle(self, now, actions)
        else:
            actions.append(Send(draft))
        self.rules.draft_on(self, now, actions)
        return actions

    def awaits(self, epoch: int, position: int) -> bool:
        """Whether this decode runs and is not void."""
        return not self.done and self.began is not None and (epoch, position) == (self.epoch, self.next)

    def go_alone(self, now: float) -> list[Action]:
        """From here on without the other side: what this one drafts is decided. Before or after `start`."""
        self.alone = True
        self.aggregates = False
        self.peer.clear()
        actions: list[Action] = []
        if self.next != len(self.tokens) + len(self.own):  # a draft was spent on what could not be decided
            self.own.clear()
            self.epoch += 1
            self.next = len(self.tokens)
            self.began = None
            actions.append(RollBack(self.next))
        self._take_own(actions)
        self.rules.draft_on(self, now, actions)
        return actions

    def received(self, now: float, message: Message) -> list[Action]:
        """A message came. What is old, of a former epoch or repeated is dropped."""
        if message.session != self.session:
            raise ValueError(f"A message of session {message.session!r} came to session {self.session!r}.")
        actions: list[Action] = []
        if self.done or self.alone:
            return actions
        repeated = isinstance(message, Switch) and message.position == self.took_over_at
        if isinstance(message, DraftMessage):
            self.rules.queue(self, now, message)
            self.rules.settle(self, now, actions)
        elif repeated or message.position < len(self.tokens):
            return actions
        elif self.aggregates or message.position > len(self.tokens):
            role = "aggregates" if self.aggregates else "does not aggregate"
            raise ValueError(f"{message} came to a side that {role} at position {len(self.tokens)}.")
        elif isinstance(message, Target):
            self.rules.follow(self, message, actions)
        else:
            self.rules.take_over(self, now, message, actions)
        self.rules.draft_on(self, now, actions)
        return actions

    def resume(self, position: int, aggregates: bool) -> list[Message]:
        """After a lost connection: what to send anew to a peer that knows `position` tokens, and may aggregate.

        Both sides call it, each with the other's len(tokens) and aggregates as they are when the connection is back.
        """
        if aggregates and self.aggregates:
            raise ValueError(f"Both sides of session {self.session!r} aggregate.")
        messages: list[Message] = [target for target in self.sent if target.position >= position]
        if self.aggregates or self.done:
            return messages
        if aggregates:
            return [*messages, *self.own]
        lost = position <= self.handed_over_at == len(self.tokens)
        return [*messages, self.switch()] if lost else messages

    def switch(self) -> Switch:
        """The message that makes the other side the aggregator."""
        return Switch(self.session, self.epoch, len(self.tokens), tuple(self.own), self.scheduler.profile())

    def _take_own(self, actions: list[Action]) -> None:
        while self.own and not self.done:
            commit(self, len(self.tokens), self.own.popleft().token, True, actions)

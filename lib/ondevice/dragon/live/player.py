"""One session on one side, live: carries out what the state machine says, on a decoder and a connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ondevice.dragon import messages, side
from ondevice.dragon.aggregation import Floats
from ondevice.dragon.decisions import Undecidable
from ondevice.dragon.live.connection import Connection
from ondevice.dragon.live.drafting import Drafted, Drafting
from ondevice.dragon.messages import Message, Resume
from ondevice.dragon.side import Action, Decode, Done, Emit, RollBack, Send, Side


class Player:
    """Lives in the event loop; `drafting` works in its thread and reports here.

    emitted: called with each decided token's position and id. ended: set when the output has ended, or cannot go on.
    failure: why it cannot, or None. While there is no connection nothing is sent: `resume` makes up for it.
    priors: by position, of this side's drafts that are not decided; `decisions.decision` reads it.
    moves: of the aggregator, so far: Switch messages sent and received. waste: drafts that became void, so far.
    """

    def __init__(
        self,
        machine: Side,
        priors: dict[int, Floats],
        emitted: Callable[[int, int], None] = lambda position, token: None,
    ) -> None:
        self.machine, self.priors, self.emitted = machine, priors, emitted
        self.ended = asyncio.Event()
        self.failure: Exception | None = None
        self.accepted = [0, 0]  # of this side's drafts: decided, accepted
        self.moves = 0
        self._drafting: Drafting | None = None
        self._connection: Connection | None = None
        self._loop = asyncio.get_running_loop()

    def start(self, drafting: Callable[[Callable[[Drafted], None], Callable[[Exception], None]], Drafting]) -> None:
        """Begin to draft. drafting: makes it, from what to call with drafts and with a failure."""
        self._drafting = drafting(
            lambda draft: self._post(self._drew, draft), lambda error: self._post(self._failed, error)
        )
        self._act(self.machine.start(self._loop.time()))

    def attach(self, connection: Connection) -> None:
        """Send on this connection from now on."""
        self._connection = connection

    def detach(self) -> None:
        """The connection is lost."""
        self._connection = None

    @property
    def resumption(self) -> Resume:
        """How far this side is."""
        machine = self.machine
        return Resume(machine.session, machine.epoch, len(machine.tokens), machine.aggregates)

    def resume(self, connection: Connection, peer: Resume) -> None:
        """Go on over a new connection with a peer that is so far. Raises ValueError where both sides aggregate."""
        lost = self.machine.resume(peer.position, peer.aggregates)
        self._connection = connection
        for message in lost:
            connection.send(_wire(message))

    def received(self, message: Message) -> None:
        """A message of the session. Raises ValueError on one that no peer of this kind sends."""
        if not isinstance(message, messages.Draft | messages.Target | messages.Switch):
            raise ValueError(f"A {type(message).__name__} has no place in a session that runs.")
        try:
            self.moves += isinstance(message, messages.Switch)
            self._act(self.machine.received(self._loop.time(), _local(message)))
        except Undecidable as error:  # the drafts are spent: resuming would not bring them back
            self._failed(error)

    def stop(self) -> None:
        """End the thread, soon; `ended` is set. Waits for the thread: call it outside the event loop, or at the end."""
        self.ended.set()
        if self._drafting is not None:
            self._drafting.stop()

    @property
    def drafting(self) -> Drafting:
        """Raises ValueError before `start`."""
        if self._drafting is None:
            raise ValueError("The session has not begun.")
        return self._drafting

    def _post(self, call: Callable[..., None], what: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, what)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    def _drew(self, draft: Drafted) -> None:
        if self.ended.is_set():
            return
        order, now = draft.order, self._loop.time()
        self.priors[order.position] = draft.prior
        try:
            actions = self.machine.drafted(
                now, order.epoch, order.position, draft.token, draft.distribution, draft.log_weight
            )
            self._act(actions)
        except ValueError as error:  # the peer's draft, which is only looked at now
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        self.failure = self.failure or error
        self.ended.set()

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self.moves += isinstance(action.message, side.Switch)
                if self._connection is not None:
                    self._connection.send(_wire(action.message))
            elif isinstance(action, Decode):
                self.drafting.decode(action)
            elif isinstance(action, RollBack):
                self.drafting.roll_back(action.position)
            elif isinstance(action, Emit):
                self.priors.pop(action.position, None)
                self.emitted(action.position, action.token)
            elif isinstance(action, Done):
                self.ended.set()


def _wire(message: side.Message) -> Message:
    """The struct of the same name and fields."""
    if isinstance(message, side.Switch):
        drafts = tuple(messages.Draft(*_fields(draft)) for draft in message.drafts)
        return messages.Switch(message.session, message.epoch, message.position, drafts, message.profile)
    kind = messages.Draft if isinstance(message, side.Draft) else messages.Target
    return kind(*_fields(message))


def _local(message: messages.Draft | messages.Target | messages.Switch) -> side.Message:
    if isinstance(message, messages.Switch):
        drafts = tuple(side.Draft(*_values(draft)) for draft in message.drafts)
        return side.Switch(message.session, message.epoch, message.position, drafts, message.profile)
    kind = side.Draft if isinstance(message, messages.Draft) else side.Target
    return kind(*_values(message))


def _fields(message: side.Draft | side.Target) -> tuple:
    return tuple(getattr(message, name) for name in message.__slots__)


def _values(message: messages.Draft | messages.Target) -> tuple:
    return tuple(getattr(message, name) for name in message.__struct_fields__)

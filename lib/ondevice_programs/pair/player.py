"""One session on one side, live: carries out what the state machine says, on an engine and over a connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from ondevice_papers.dragon import decisions
from ondevice_papers.dragon.aggregation import Floats
from ondevice_papers.dragon.messages import Begin, Cited, DraftMessage, Message, Resume, Switch, Target
from ondevice_papers.dragon.side import Action, Decode, Done, Emit, RollBack, Send, Side
from ondevice_papers.dragon.speculative_aggregation import Stream
from ondevice_programs.pair.decoder import Decoder
from ondevice_programs.pair.engine import Drafted, Drafting
from ondevice_programs.pair.guard import Guard
from ondevice_programs.pair.node import Node


class Quotation(Exception):
    """A message was held back by the guard."""


class Player:
    """Lives in the event loop; the engine reports here from its thread.

    priors: by position, of this side's drafts that are not decided; `decisions.decision` reads it.
    emitted: called with each decided token's position and id. drew: with each draft of this side. changed: when its
        undecided drafts have changed. retrieved: with the documents that the decoder is made of, where they have
        sources.
    guard: stops what would quote from leaving; the session fails then.
    pace, prefill: seconds that a token and the first one take at least, to imitate other hardware.
    ended: set when the output has ended, or cannot go on. failure: why it cannot, or None. While `send` is None
    nothing is sent: `resume` makes up for it. progress: when this side last had something new from the other one, or
    began to wait for it. moves: of the aggregator, Switch messages sent and received.
    """

    def __init__(
        self,
        machine: Side,
        priors: dict[int, Floats],
        *,
        emitted: Callable[[int, int], None] = lambda *_: None,
        drew: Callable[[DraftMessage], None] = lambda _: None,
        changed: Callable[[], None] = lambda: None,
        retrieved: Callable[[list[Cited]], None] = lambda _: None,
        guard: Guard | None = None,
        pace: float = 0.0,
        prefill: float = 0.0,
    ) -> None:
        self.machine, self.priors, self.emitted, self.drew, self.changed = machine, priors, emitted, drew, changed
        self.retrieved, self.guard, self.pace, self.prefill = retrieved, guard, pace, prefill
        self.ended = asyncio.Event()
        self.failure: Exception | None = None
        self.broken: Exception | None = None  # what this side's own model or documents failed with
        self._told: dict[bool, dict[int, int]] = {True: {}, False: {}}  # by position, the targets and last drafts sent
        self.send: Callable[[Message], object] | None = None
        self.moves = 0
        self.decoder: Decoder | None = None  # as soon as it is built
        self.prefilled: float | None = None  # when the first distribution was there, by the loop's clock
        self._drafting: Drafting | None = None
        self._late: Drafted | None = None  # a draft that came when it could not go on
        self._loop = asyncio.get_running_loop()
        self.progress = self._loop.time()

    def start(self, node: Node, begin: Begin, stream: Stream, client: object = None) -> None:
        """Begin to draft, behind the tokens that the machine has. client: as of `Drafting`."""
        before = self.machine.tokens[:-1]

        def built() -> Decoder:  # in the engine's thread
            decoder, cited = node.decoder(begin.query, begin.k, begin.temperature)
            if decoder.room < begin.limit:
                raise ValueError(
                    f"Behind the longest document and the question the model's context of {node.lm.context} has room "
                    f"for {max(0, decoder.room)} tokens, not for an answer of up to {begin.limit}."
                )
            for token in before:
                decoder.commit(token)
            self.decoder = decoder
            self._post(self.retrieved, cited)
            return decoder

        self._drafting = Drafting(
            node.engine,
            built,
            decisions.drafts(begin, stream),
            lambda draft: self._post(self._drew, draft),
            lambda error: self._post(self._broke, error),
            begin.cap,
            client,
        )
        self._act(self.machine.start(self._loop.time()))

    @property
    def resumption(self) -> Resume:
        """How far this side is."""
        machine = self.machine
        return Resume(machine.session, machine.epoch, len(machine.tokens), machine.aggregates)

    def resume(self, send: Callable[[Message], object], peer: Resume) -> None:
        """Go on over a new connection with a peer that is so far. Raises ValueError where both sides aggregate."""
        lost = self.machine.resume(peer.position, peer.aggregates)
        if isinstance(self.failure, Quotation):  # what is lost may be the quotation
            return
        self.send = send
        for message in lost:
            send(message)

    def received(self, message: Message) -> None:
        """A message of the session. Raises ValueError on one that no peer of this kind sends."""
        if not isinstance(message, DraftMessage | Target | Switch):
            raise ValueError(f"A {type(message).__name__} has no place in a session that runs.")
        self.progress = self._loop.time()
        try:
            self.moves += isinstance(message, Switch)
            self._act(self.machine.received(self._loop.time(), message))
        except decisions.Undecidable as error:  # the drafts are spent: resuming would not bring them back
            self.fail(error)

    def go_alone(self) -> None:
        """Without the other side from here on."""
        self.send, self.failure, self.guard = None, None, None
        self.ended.clear()
        self._act(self.machine.go_alone(self._loop.time()))
        if self._late is not None:
            self._due(self._late)

    def waits(self) -> float:
        """Seconds for which all that this side could do has waited for the other one; 0 while it works itself."""
        return self._loop.time() - self.progress if self.machine.own and not self.ended.is_set() else 0.0

    def stop(self) -> None:
        """Leave the engine; `ended` is set."""
        self.ended.set()
        if self._drafting is not None:
            self._drafting.stop()

    def fail(self, error: Exception) -> None:
        """It cannot go on."""
        self.failure = self.failure or error
        self.ended.set()

    def _broke(self, error: Exception) -> None:
        self.broken = error
        self.fail(error)

    def _post(self, call: Callable[..., None], what: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, what)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    def _drew(self, drafted: Drafted) -> None:
        due = (self.machine.began or 0.0) + (self.pace if drafted.order.position else self.prefill)
        if due > self._loop.time():
            self._loop.call_at(due, self._due, drafted)
        else:
            self._due(drafted)

    def _due(self, drafted: Drafted) -> None:
        if self.ended.is_set():
            self._late = drafted
        if self.ended.is_set() or not self.machine.awaits(drafted.order.epoch, drafted.order.position):
            return
        order, machine, now = drafted.order, self.machine, self._loop.time()
        self.prefilled = self.prefilled or now
        if not machine.own:
            self.progress = now  # from now on it is the other side's turn
        if drafted.prior is not None:
            self.priors[order.position] = drafted.prior
        what = order.epoch, order.position, drafted.token, drafted.distribution, drafted.log_weight
        self.drew(DraftMessage(machine.session, *what, pace=now - (machine.began or now)))
        try:
            self._act(machine.drafted(now, *what))
        except ValueError as error:  # the peer's draft, which is only looked at now
            self.fail(error)

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._sends(action.message)
            elif isinstance(action, Decode):
                assert self._drafting is not None
                self._drafting.decode(action)
            elif isinstance(action, RollBack):
                assert self._drafting is not None
                self._drafting.roll_back(action.position)
            elif isinstance(action, Emit):
                self.priors.pop(action.position, None)
                self.emitted(action.position, action.token)
            elif isinstance(action, Done):
                self.ended.set()
        if self._drafting is not None:
            self._drafting.decided(len(self.machine.own))
        self.changed()

    def _sends(self, message: Message) -> None:
        if self.guard is not None and any(map(self.guard.quotes, self._known_with(message, self.guard.length))):
            self.send = None
            self.fail(Quotation("the answer began to quote this device's documents"))
        self.moves += isinstance(message, Switch)
        if self.send is not None:
            self.send(message)

    def _known_with(self, message: Message, length: int) -> Iterator[list[int]]:
        """The texts that the other side can put together once it has this message, each up to one of its new tokens.

        That is what is decided and drafted; and what came from this side alone, rejected drafts among it.
        """
        machine = self.machine
        if isinstance(message, Target):
            new = {message.position: message.token}
            text = machine.tokens
        else:
            drafts = message.drafts if isinstance(message, Switch) else (message,)
            new = {draft.position: draft.token for draft in drafts if isinstance(draft, DraftMessage)}
            text = machine.tokens + [draft.token for draft in machine.own]
        targets = self._told[True]
        drafted = self._told[False]
        (targets if isinstance(message, Target) else drafted).update(new)
        views = drafted, targets | drafted, drafted | targets
        for position in new:
            yield text[: position + 1]
            for end in range(position, position + length):
                for view in views:
                    yield [view[index] for index in range(end - length + 1, end + 1) if index in view]

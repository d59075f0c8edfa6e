"""One answer on its way: with the cloud as long as that goes, then alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from ondevice_papers.dragon import decisions
from ondevice_papers.dragon.aggregation import Floats, share
from ondevice_papers.dragon.messages import Begin, Cited, DraftMessage, End, Failure, Message, Resume, Sources, Target
from ondevice_papers.dragon.scheduler import Profiler
from ondevice_papers.dragon.side import Decide, Rules, Side
from ondevice_papers.dragon.speculative_aggregation import Stream
from ondevice_programs.pair.answer import Answer
from ondevice_programs.pair.guard import Guard
from ondevice_programs.pair.link import CloudLink
from ondevice_programs.pair.node import Node
from ondevice_programs.pair.player import Player
from ondevice_programs.pair.wire import Connection, Lost, Refused

OnToken = Callable[[int], object]
OnDrafts = Callable[[list[int]], object]

_MOST = 20  # connections of one session
_ENDED = Lost("the output has ended")


class Asker(Protocol):
    """What of a `device.Device` an answer needs."""

    node: Node
    link: CloudLink | None
    guard: Guard | None
    patience: float
    pace: float
    prefill: float
    decision: Callable[[Begin, Mapping[int, Floats]], Decide]
    rules: Rules | None


class LiveAnswer:
    """One answer on its way, in the device's loop."""

    def __init__(
        self, device: Asker, begin: Begin, on_token: OnToken | None = None, on_drafts: OnDrafts | None = None
    ) -> None:
        self.device, self.node, self.begin, self.link = device, device.node, begin, device.link
        self.answer, self.on_token, self.on_drafts = Answer(), on_token, on_drafts
        self.player: Player | None = None
        self.connection: Connection | None = None
        self.began = time.perf_counter()
        self._loop = asyncio.get_running_loop()
        self._log_weight: float | None = None  # of the cloud
        self._heard = False  # whether the cloud has said anything of this session, so that it knows it
        self._known = self._asked = self._loop.time()  # when it last did, and when it was asked

    async def run(self) -> None:
        if self.link is None:
            await self.by_itself("there is no cloud")
        elif self.begin.mode == "cloud-only":
            await self._listen(self.link)
        elif self.begin.mode == "sequence-wise":
            await self._sequence_wise(self.link)
        else:
            await self._aggregate(self.link)

    def close(self) -> None:
        """Leave nothing behind, whatever happened, and finish the account."""
        answer = self.answer
        player = self.player
        if player is not None:
            player.stop()
            answer.moves = player.moves
            if player.prefilled is not None:
                answer.prefilled = player.prefilled - self._asked
            if player.decoder is not None and self._log_weight is not None:
                answer.share = share(player.decoder.log_weight, self._log_weight)
        if self.begin.mode == "cloud-only" or self.begin.aggregator == "cloud" or answer.moves:  # it decided tokens
            together = len(answer.tokens) if answer.alone_from is None else answer.alone_from
            answer.readable = max(answer.readable, together if answer.connections else 0)
        self._leaves()
        answer.text = str(self.node.tokenizer.decode(answer.tokens, skip_special_tokens=True))

    # Aggregation, token by token

    async def _aggregate(self, link: CloudLink) -> None:
        begin = self.begin
        priors = dict[int, Floats]()
        machine = Side(
            begin.session,
            self._counted(self.device.decision(begin, priors), priors),
            aggregates=begin.aggregator == "device",
            max_new_tokens=begin.limit,
            eos_token_ids=self.node.ends,
            lookahead=decisions.lookahead(begin),
            scheduler=decisions.mover(begin, 0.0),
            rules=self.device.rules,
        )
        player = self._played(machine, priors)
        ending = asyncio.create_task(self._tell(link, player))
        try:
            reason = await self._with_cloud(link, player)
        finally:
            ending.cancel()
        if player.broken is not None:
            raise player.broken
        if not machine.done:
            self._goes_alone(len(machine.tokens), str(player.failure or reason))
            player.go_alone()
            await self._until_its_end(player)

    async def _with_cloud(self, link: CloudLink, player: Player) -> str:
        """Until the output has ended, or the cloud is given up: then why."""
        reason = ""
        while not player.ended.is_set():
            waited = player.waits() if self._heard else 0.0
            by = self._loop.time() + self.device.patience - waited
            try:
                if self.answer.connections == _MOST:
                    raise GivenUp(f"the connection was lost {_MOST} times, at last because {reason}")
                await self._joined(link, player, by)
                await self._follow(link, player)
            except GivenUp as given_up:
                return str(given_up)
            except Refused as refused:
                if not self._heard:
                    raise
                return str(refused)
            except Lost as lost:
                player.send = None
                reason = str(lost)
        link.went_well()
        return ""

    async def _joined(self, link: CloudLink, player: Player, by: float) -> None:
        """Begin the session over the link's connection, or go on with it."""
        begin, queue = self.begin, link.join(self.begin.session)
        try:
            connection = await self._connected(link, by)
        except Lost as lost:  # the patience is at its end
            raise GivenUp(str(lost)) from None
        while not queue.empty():  # of the connection before
            queue.get_nowait()
        if self._heard:
            self.send(player.resumption)
            return  # the cloud's Resume makes it go on
        rtt = connection.rtt or 0.0
        self.send(msgspec.structs.replace(begin, rtt=rtt))
        if isinstance(player.machine.scheduler, Profiler) and rtt:
            player.machine.scheduler.rtt = rtt
        player.resume(self.send, Resume(begin.session, 0, 0, begin.aggregator == "cloud"))

    async def _connected(self, link: CloudLink, by: float | None = None) -> Connection:
        connection = self.connection = await link.connected(by)
        self.answer.connections += 1
        self._known = self._loop.time()
        return connection

    async def _follow(self, link: CloudLink, player: Player) -> None:
        """Pass the cloud's messages on until the output has ended. Raises Lost and GivenUp."""
        while not player.ended.is_set():
            waits = self._known if player.send is None else player.progress if player.machine.own else None
            message = await self._next(link, waits)
            if message is None:
                continue
            try:
                if isinstance(message, Resume):
                    player.resume(self.send, message)
                elif not isinstance(message, End):
                    player.received(message)
            except ValueError as error:  # something between the two is missing; beginning from Resume mends it
                assert self.connection is not None
                self.connection.drop(str(error))
                raise Lost(str(error)) from None

    async def _next(self, link: CloudLink, since: float | None) -> Message | None:
        """The session's next message; None where it is worth looking again.

        since: when the waiting for it began; None: this side works itself. Raises Lost, and GivenUp where the
        patience is at its end or the cloud gives up.
        """
        now = self._loop.time()
        left = self.device.patience - (now - (now if since is None else since))
        if left <= 0:
            reason = f"the cloud was silent for {self.device.patience:g} s"
            link.rest(reason)
            raise GivenUp(reason)
        try:
            async with asyncio.timeout(left):
                message, size = await link.join(self.begin.session).get()
        except TimeoutError:
            return None
        self.answer.received += size
        if message is _ENDED:
            return None
        if isinstance(message, Lost):
            raise message
        if isinstance(message, Failure):
            raise GivenUp(message.reason)
        self._heard, self._known = True, self._loop.time()
        if isinstance(message, Sources):
            self.answer.sources += [("cloud", cited) for cited in message.cited]
            self._log_weight = message.log_weight
            return None
        return message

    async def _tell(self, link: CloudLink, player: Player) -> None:
        """Wake who waits for messages, when the output has ended."""
        await player.ended.wait()
        link.join(self.begin.session).put_nowait((_ENDED, 0))

    def _counted(self, decide: Decide, priors: Mapping[int, Floats]) -> Decide:
        def counted(local: DraftMessage, remote: DraftMessage, position: int) -> tuple[int, bool, bool]:
            token, kept_local, kept_remote = decide(local, remote, position)
            for counts, kept in ((self.answer.device, kept_local), (self.answer.cloud, kept_remote)):
                counts[0] += 1
                counts[1] += kept
            self.answer.decisions.append((position, kept_local, kept_remote, local.pace, remote.pace))
            self.answer.evidence[position] = (local, remote, priors[position])
            return token, kept_local, kept_remote

        return counted

    # The device by itself

    async def by_itself(self, reason: str) -> None:
        """What is left of the answer, from the device's own documents."""
        tokens = list(self.answer.tokens)
        if len(tokens) == self.begin.limit or (tokens and tokens[-1] in self.node.ends):
            return
        self._goes_alone(len(tokens), reason)
        await self._until_its_end(self._played(self._alone(tokens), {}))

    def _alone(self, tokens: list[int]) -> Side:
        begin = self.begin
        machine = Side(
            begin.session,
            _undecided,
            aggregates=False,
            alone=True,
            max_new_tokens=begin.limit,
            eos_token_ids=self.node.ends,
        )
        machine.tokens = list(tokens)
        machine.next = len(tokens)
        return machine

    def _goes_alone(self, position: int, reason: str) -> None:
        self.answer.alone_from = position
        self.answer.reason = reason
        self._leaves()

    def _leaves(self) -> None:
        """The cloud is not needed any more."""
        if self.connection is not None:
            self.answer.rtt = self.connection.rtt
            self.send(End(self.begin.session, len(self.answer.tokens)))
            self.connection = None
        if self.link is not None:
            self.link.leave(self.begin.session)

    async def _until_its_end(self, player: Player) -> None:
        await player.ended.wait()
        if player.broken is not None:
            raise player.broken

    # Baselines in which the cloud generates alone

    async def _listen(self, link: CloudLink) -> None:
        """CRCG on the cloud: take its tokens as they come."""
        try:
            await self._begun(link)
            while (draft := await self._draft(link, len(self.answer.tokens))) is not None:
                self._emitted(draft.position, draft.token)
        except (Lost, GivenUp) as error:
            await self.by_itself(str(error))

    async def _sequence_wise(self, link: CloudLink) -> None:
        """DRDG/SW: both sides generate alone, then the distributions of each position are mixed."""
        begin = self.begin
        priors = dict[int, Floats]()
        own_drafts = list[tuple[DraftMessage, Floats]]()
        cloud_drafts = list[DraftMessage]()
        decide = self._counted(self.device.decision(begin, priors), priors)
        player: Player = self._played(
            self._alone([]),
            {},
            emitted=lambda *_: None,
            drew=lambda draft: own_drafts.append((draft, player.priors[draft.position])),
        )
        reason = ""
        try:
            await self._begun(link)
            while (draft := await self._draft(link, len(cloud_drafts), player)) is not None:
                cloud_drafts.append(draft)
        except (Lost, GivenUp) as error:
            reason = str(error)
        await self._until_its_end(player)
        if reason:
            self._goes_alone(0, reason)
            for own, _ in own_drafts:
                self._emitted(own.position, own.token)
            return
        for (own, prior), remote in zip(own_drafts, cloud_drafts, strict=False):
            priors[own.position] = prior
            token, _, _ = decide(own, remote, own.position)
            self._emitted(own.position, token)
            if token in self.node.ends:
                return

    async def _begun(self, link: CloudLink) -> None:
        """Send the session's first message. Raises Lost."""
        link.join(self.begin.session)
        await self._connected(link)
        self.send(self.begin)

    async def _received(self, link: CloudLink, beside: Player | None = None) -> Message:
        """The session's next message. beside: who works meanwhile: nothing is waited for. Raises Lost and GivenUp."""
        message = None
        while message is None:
            works = beside is not None and not beside.ended.is_set()
            self._known = self._loop.time() if works else self._known
            message = await self._next(link, self._known)
        return message

    async def _draft(self, link: CloudLink, expected: int, beside: Player | None = None) -> DraftMessage | None:
        """The cloud's next draft; None where there are no more."""
        message = await self._received(link, beside)
        if isinstance(message, End):
            return None
        if not isinstance(message, DraftMessage) or message.position != expected or expected >= self.begin.limit:
            raise Lost(f"a {message.kind} came in the place of draft {expected}")
        return message

    # What all of them do

    def _played(self, machine: Side, priors: dict[int, Floats], **hooks: Any) -> Player:
        """A player that has begun."""
        device = self.device
        hooks = {"emitted": self._emitted, "changed": self._changed, **hooks}
        player = self.player = Player(
            machine,
            priors,
            retrieved=self._retrieved,
            guard=device.guard,
            pace=device.pace,
            prefill=device.prefill,
            **hooks,
        )
        player.start(self.node, self.begin, Stream.DEVICE)
        return player

    def _retrieved(self, cited: list[Cited]) -> None:
        self.answer.sources += [("device", document) for document in cited]

    def _emitted(self, position: int, token: int) -> None:
        self.answer.tokens.append(token)
        self.answer.times.append(time.perf_counter() - self.began)
        if self.on_token is not None:
            self.on_token(token)

    def _changed(self) -> None:
        if self.on_drafts is not None and self.player is not None:
            self.on_drafts([draft.token for draft in self.player.machine.own])

    def send(self, message: Message) -> None:
        """To the cloud, and into the account."""
        if self.connection is not None:
            size = self.connection.send(message)
            self.answer.sent += size
            self.answer.left[message.kind] = self.answer.left.get(message.kind, 0) + size
            if isinstance(message, Target):
                self.answer.readable = max(self.answer.readable, message.position + 1)


def _undecided(local: DraftMessage, remote: DraftMessage, position: int) -> tuple[int, bool, bool]:
    raise AssertionError("A side by itself aggregates nothing.")


class GivenUp(Exception):
    """The cloud cannot go on with this session."""

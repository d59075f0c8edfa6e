"""A node's model in one thread: sessions take turns, and those that need one token each share a forward.

Speculation is for spare time. Where the other side has decided all that a session drafted, its next draft is needed;
else it may be void. Forwards take those that are needed, and others only up to `spare` sequences, whose cost is small.

Turns. Sessions whose next token is needed are decoded together, up to `rows` sequences in a forward. After such a turn
others have their documents and prompts prefilled for as long as it took, pieces of several in a forward: first of those
whose client has used the least so far. So many documents cannot hold up few, nor many sessions of one client those of
others, nor any of them those past their first token.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from ondevice.meters import trim
from ondevice_papers.dragon import codec
from ondevice_papers.dragon.aggregation import Floats
from ondevice_papers.dragon.decisions import Choose
from ondevice_papers.dragon.side import Decode
from ondevice_programs.pair.decoder import Decoder, Interrupted, Piece, next_together, run

_LOG = logging.getLogger(__name__)
_GATHER = 0.5  # of a forward's time: so long is waited for those that were in it
_PACKED = 128  # tokens: a forward of pieces takes no further one beyond
_SESSIONS = 8  # that leave, after which the memory they have freed goes back to the system


class Drafted(NamedTuple):
    """What a decode gave. prior: [V], of the model without documents, if the decoder has it; not sent."""

    order: Decode
    token: int
    distribution: bytes
    log_weight: float
    prior: Floats | None


class ModelThread:
    """Runs all that needs a node's model, in a thread that lives as long as there is work.

    rows, spare: sequences of a forward, at most.
    """

    def __init__(self, rows: int = 96, spare: int = 12) -> None:
        self.rows = rows
        self.spare = spare
        self._changed = threading.Condition()
        self._draftings: deque[Drafting] = deque()
        self._thread: threading.Thread | None = None
        self._running: list[Drafting] = []
        self._left = 0

    def add(self, drafting: Drafting) -> None:
        """Work on its orders from now on, until it is stopped."""
        with self._changed:
            self._draftings.append(drafting)
            self._wake()

    def wait(self, seconds: float = 20.0) -> None:
        """Wait for the thread's end, at most so long: a process that ends in a forward, slow beside others, aborts."""
        thread = self._thread
        if thread is not None:
            thread.join(seconds)

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _work(self) -> None:
        owed = turn_seconds = 0.0  # seconds: to those that prefill, and of the last turn
        while True:
            with self._changed:
                if len(self._running) > 1:  # their next orders come in a moment, and one forward serves all
                    self._changed.wait_for(self._all_want, _GATHER * turn_seconds)
                while not (turn := self._turn(owed > 0)):
                    if not self._draftings:
                        self._thread = None
                        self._running = []
                        return
                    self._changed.wait()
                decoding = turn[0].prefilled
                self._running = turn if decoding else []
            began = time.perf_counter()
            if decoding:
                self._decoded(turn)
            else:
                self._prefilled(turn)
            turn_seconds = time.perf_counter() - began
            owed = turn_seconds if decoding else owed - turn_seconds

    def _all_want(self) -> bool:
        return all((drafting.wanted and not drafting.ahead) or drafting.stopped for drafting in self._running)

    def _turn(self, owed: bool) -> list[Drafting]:
        """The draftings of the next forward, or all that prefill, in order; none where nothing is to be done."""
        for drafting in [drafting for drafting in self._draftings if drafting.stopped]:
            self._draftings.remove(drafting)
            drafting.close()
            self._left = (self._left + 1) % _SESSIONS
            if not self._left:
                trim()  # else the heap's holes grow by some megabytes a session
        wanting = [drafting for drafting in self._draftings if drafting.wanted]
        ready = [drafting for drafting in wanting if drafting.prefilled]
        prefilling = [drafting for drafting in wanting if not drafting.prefilled]
        if prefilling and (owed or all(drafting.ahead for drafting in ready)):
            used = Counter[object]()
            for drafting in self._draftings:
                used[drafting.client] += drafting.used
            return sorted(prefilling, key=lambda drafting: (used[drafting.client], drafting.used))
        turn = list[Drafting]()
        taken = 0
        for drafting in sorted(ready, key=lambda drafting: drafting.ahead > 0):
            if turn and taken + drafting.rows > (self.spare if drafting.ahead else self.rows):
                break
            turn.append(drafting)
            taken += drafting.rows
        for drafting in turn:  # whoever had a turn goes behind those who had none
            self._draftings.remove(drafting)
            self._draftings.append(drafting)
        return turn

    def _prefilled(self, turn: list[Drafting]) -> None:
        """Prefill pieces of some, from the first on; those that have no decoder yet get one."""
        pieces = list[tuple[Drafting, Piece]]()
        for drafting in turn:
            piece = drafting.piece()
            if piece is not None:
                pieces.append((drafting, piece))
            if sum(piece.tokens for _, piece in pieces) >= _PACKED:
                break
        if not pieces:
            return
        try:
            run([piece for _, piece in pieces])
        except Exception as error:  # each by itself then, so that only the guilty one fails
            if len(pieces) > 1:
                _LOG.warning("Sessions could not share a forward: %s", error)
            for drafting, piece in pieces:
                drafting.prefill(piece)

    def _decoded(self, turn: list[Drafting]) -> None:
        begun = [drafting for drafting in turn if drafting.prepare()]
        together = [drafting.decoder for drafting in begun if drafting.decoder is not None and drafting.decoder.in_line]
        if len(together) > 1:
            try:
                next_together(together)
            except Exception as error:  # each by itself then, so that only the guilty one fails
                _LOG.warning("Sessions could not share a forward: %s", error)
        for drafting in begun:
            drafting.draft()

    def interrupt(self, drafting: Drafting) -> None:
        """Give up the forward that runs for this drafting alone. The caller holds the lock."""
        if self._running == [drafting] and drafting.decoder is not None:
            drafting.decoder.interrupt()


class Drafting:
    """One session's decoder in an engine; carries out `Decode` and `RollBack`.

    build: makes the decoder, in the engine's thread. choose: the draft from the distribution as it is sent. cap: bytes
    of it. drafted, failed: called in the engine's thread, with a draft, and with what went wrong; after a failure
    nothing follows. client: whom it is for, among whom turns are shared out; None: for itself. used: tokens that were
    prefilled and decoded so far. ahead: drafts that are not decided.
    """

    def __init__(
        self,
        engine: ModelThread,
        build: Callable[[], Decoder],
        choose: Choose,
        drafted: Callable[[Drafted], None],
        failed: Callable[[Exception], None],
        cap: int = codec.CAP,
        client: object = None,
    ) -> None:
        self.client = self if client is None else client
        self._engine, self._build, self._choose, self._cap = engine, build, choose, cap
        self._drafted = drafted
        self._failed = failed
        self._order: Decode | None = None  # not begun
        self._now: Decode | None = None  # begun, and not void
        self._keep: int | None = None  # the least position of the rollbacks since the last decode
        self._pieces: Iterator[Piece] | None = None
        self.decoder: Decoder | None = None
        self.stopped, self.used, self.ahead = False, 0, 0
        engine.add(self)

    def decode(self, order: Decode) -> None:
        """Draft `order.position`; a decode that still runs is given up."""
        with self._engine._changed:
            self._give_up()
            self._order = order

    def decided(self, ahead: int) -> None:
        """So many drafts are not decided now."""
        if ahead != self.ahead:
            with self._engine._changed:
                self.ahead = ahead
                self._engine._changed.notify_all()

    def roll_back(self, position: int) -> None:
        """Void all tokens from `position` on; the next decode does it."""
        with self._engine._changed:
            self._keep = position if self._keep is None else min(self._keep, position)
            self._give_up()
            self._order = None

    def stop(self) -> None:
        """Leave the engine, which lets the decoder go."""
        with self._engine._changed:
            self.stopped = True
            self._order = None
            self._give_up()

    def close(self) -> None:
        """In the engine's thread, once it is stopped: let the decoder go, and its rows, whoever else knows it."""
        if self.decoder is not None:
            self.decoder.close()
        self.decoder = self._pieces = None

    @property
    def wanted(self) -> bool:
        """Whether there is work: an order, or documents to prefill."""
        return self.decoder is None or self._pieces is not None or self._order is not None or self._now is not None

    @property
    def prefilled(self) -> bool:
        """Whether documents and query are, so that an order is all that is wanted."""
        return self.decoder is not None and self._pieces is None

    @property
    def rows(self) -> int:
        """Sequences of a forward."""
        return 1 if self.decoder is None else self.decoder.rows

    def piece(self) -> Piece | None:
        """What is to be prefilled next, of a decoder that is built now where there is none; None where all is done."""
        try:
            if self.decoder is None:
                decoder = self._build()
                self._pieces = decoder.pieces()
                self.decoder = decoder
            piece = next(self._pieces or iter(()), None)
        except Exception as error:  # whatever it is, the session must hear of it
            self._fail(error)
            return None
        if piece is None:
            self._pieces = None
        else:
            self.used += piece.tokens
        return piece

    def prefill(self, piece: Piece) -> None:
        """Prefill a piece by itself."""
        try:
            run([piece])
        except Exception as error:
            self._fail(error)

    def prepare(self) -> bool:
        """Go where the order begins; whether a draft is wanted there."""
        try:
            return self.decoder is not None and self._at_order(self.decoder)
        except Exception as error:
            self._fail(error)
            return False

    def draft(self) -> None:
        """The draft of the order."""
        decoder = self.decoder
        order = self._now
        if decoder is None or order is None:
            return
        try:
            log_probs = decoder.next_distribution()
            prior = decoder.prior
            payload = codec.encode(np.exp(log_probs), self._cap, prior)
            with np.errstate(divide="ignore"):
                token = self._choose(order.position, np.log(codec.decode(payload, len(log_probs))))
        except Interrupted:
            return
        except Exception as error:
            self._fail(error)
            return
        self.used += decoder.rows
        with self._engine._changed:
            if self._now is not order:
                return
            self._now = None
        self._drafted(Drafted(order, token, payload, decoder.log_weight, prior))

    def _at_order(self, decoder: Decoder) -> bool:
        with self._engine._changed:
            order = self._order or self._now
            keep = self._keep
            if self.stopped or order is None:
                return False
            self._order, self._keep, self._now = None, None, order
        if keep is None and decoder.position == order.position:
            return True  # it was interrupted, late, by the order before
        reached = max(0, order.position - 1)
        decoder.rollback(min(decoder.position, reached, reached if keep is None else keep))
        if order.token is not None:
            decoder.commit(order.token)
        if decoder.position != order.position:
            raise RuntimeError(f"{order} came to a decoder at position {decoder.position}.")
        decoder.require_open()
        return True

    def _give_up(self) -> None:
        """Of what runs, nothing is wanted."""
        if self._now is not None or self.stopped:
            self._engine.interrupt(self)
        self._now = None
        self._engine._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        self.stop()
        self._failed(error)

"""A side's decoder in a thread of its own, which always works on the latest order and drops what became void."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ondevice.dragon import codec
from ondevice.dragon.aggregation import Floats
from ondevice.dragon.decisions import Choose
from ondevice.dragon.live.decoder import Decoder, Interrupted
from ondevice.dragon.side import Decode


class Drafted(NamedTuple):
    """What a decode gave. seconds: that it took, waiting for the imposed pace included. prior: [V], not sent."""

    order: Decode
    token: int
    distribution: bytes
    log_weight: float
    seconds: float
    prior: Floats


class Drafting:
    """Carries out `Decode` and `RollBack` on a decoder.

    build: makes the decoder, in the thread: retrieval and prefill.
    choose: the draft from the distribution as it is sent. cap: bytes of it.
    drafted, failed: called in the thread, with a draft and with what went wrong; after a failure nothing follows.
    pace, prefill: seconds that a token and the first one take at least, to imitate slower hardware.
    lock: held while the model runs.
    """

    def __init__(
        self, build: Callable[[], Decoder], choose: Choose, drafted: Callable[[Drafted], None],
        failed: Callable[[Exception], None], *, lock: threading.Lock, cap: int = codec.CAP, pace: float = 0.0,
        prefill: float = 0.0,
    ) -> None:  # fmt: skip
        for seconds in (pace, prefill):
            if not 0 <= seconds < float("inf"):
                raise ValueError(f"A pace is in seconds a token, not {seconds}.")
        self._build, self._choose, self._drafted, self._failed = build, choose, drafted, failed
        self._lock, self._cap, self._pace, self._prefill = lock, cap, pace, prefill
        self._changed = threading.Condition()
        self._order: Decode | None = None
        self._keep: int | None = None  # the least position of the rollbacks since the last decode
        self._stopped = False
        self._running: Decoder | None = None
        self.decoder: Decoder | None = None  # once it is built; for others only when the thread has been stopped
        self.prefilled: float | None = None  # seconds until the first distribution was there
        self._thread = threading.Thread(target=self._work, name="drafting", daemon=True)
        self._began = time.perf_counter()
        self._thread.start()

    def decode(self, order: Decode) -> None:
        """Draft `order.position`; a decode that still runs is given up."""
        with self._changed:
            self._order = order
            self._give_up()

    def roll_back(self, position: int) -> None:
        """Void all tokens from `position` on; the next decode does it."""
        with self._changed:
            self._keep = position if self._keep is None else min(self._keep, position)
            self._order = None
            self._give_up()

    def stop(self) -> None:
        """End the thread, and wait until it has."""
        with self._changed:
            self._stopped = True
            self._give_up()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _give_up(self) -> None:
        if self._running is not None:
            self._running.interrupt()
        self._changed.notify_all()

    def _work(self) -> None:
        try:
            with self._lock:
                self.decoder = self._build()
            while (order := self._next()) is not None:
                found = self._one(self.decoder, order)
                if found is not None:
                    self._drafted(found)
        except Exception as error:  # whatever it is, the session must hear of it
            self._failed(error)

    def _next(self) -> Decode | None:
        """Wait for an order, and bring the decoder to where it begins; None to stop."""
        with self._changed:
            while not self._stopped and self._order is None:
                self._changed.wait()
            if self._stopped or self._order is None or self.decoder is None:
                return None
            order, keep, self._order, self._keep = self._order, self._keep, None, None
        decoder, reached = self.decoder, max(0, order.position - 1)
        decoder.rollback(min(decoder.position, reached, reached if keep is None else keep))
        if order.token is not None:
            decoder.commit(order.token)
        if decoder.position != order.position:
            raise RuntimeError(f"{order} came to a decoder at position {decoder.position}.")
        return order

    def _one(self, decoder: Decoder, order: Decode) -> Drafted | None:
        """The draft; None where the order became void meanwhile."""
        start = time.perf_counter()
        while True:
            with self._lock:
                with self._changed:
                    if self._void():
                        return None
                    self._running = decoder
                try:
                    log_probs = decoder.next_distribution()
                    break
                except Interrupted:  # of this order, or late of the one before
                    continue
                finally:
                    with self._changed:
                        self._running = None
        prior = decoder.prior
        if prior is None:
            raise RuntimeError("A side that drafts needs a decoder with a prior.")
        payload = codec.encode(np.exp(log_probs), self._cap, prior)
        with np.errstate(divide="ignore"):
            token = self._choose(order.position, np.log(codec.decode(payload, len(log_probs))))
        with self._changed:
            least = self._pace if order.position else self._prefill
            self._changed.wait_for(self._void, max(0.0, least - (time.perf_counter() - start)))
            if self._void():
                return None
        if self.prefilled is None:
            self.prefilled = time.perf_counter() - self._began
        return Drafted(order, token, payload, decoder.log_weight, time.perf_counter() - start, prior)

    def _void(self) -> bool:
        return self._stopped or self._order is not None or self._keep is not None

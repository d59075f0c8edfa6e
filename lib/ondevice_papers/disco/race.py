"""Two endpoints race for the first token: requests drawn at random, all of them in expectation, or in time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice_papers.disco.budgeted import Order
from ondevice_papers.disco.distributions import DeviceSpeed, Latency, Lengths
from ondevice_papers.disco.policy import NEVER, SIDES, DispatchPolicy, Side


@dataclass(frozen=True)
class Raced:
    """One entry a request: ttft in seconds, which endpoints ran, and whether the device gave the first token."""

    ttft: NDArray[np.float64]
    device_ran: NDArray[np.bool_]
    server_ran: NDArray[np.bool_]
    device_won: NDArray[np.bool_]

    def ran(self, side: Side) -> NDArray[np.bool_]:
        """Whether a side started, by request."""
        return self.device_ran if side == "device" else self.server_ran


def race(wait_device: Any, wait_server: Any, device_ttft: Any, server_ttft: Any) -> Raced:
    """An endpoint starts when its wait is over, unless the other one's first token has come; the first token counts.

    All in seconds, of any one shape: when each endpoint may start, NEVER for not at all, and its TTFT from then on.
    """
    device_at = wait_device + device_ttft
    server_at = wait_server + server_ttft
    device_ran = np.isfinite(wait_device) & ((wait_device == 0) | (wait_device < server_at))
    server_ran = np.isfinite(wait_server) & ((wait_server == 0) | (wait_server < device_at))
    device_at = np.where(device_ran, device_at, NEVER)
    server_at = np.where(server_ran, server_at, NEVER)
    return Raced(np.minimum(device_at, server_at), device_ran, server_ran, device_ran & (device_at <= server_at))


@dataclass(frozen=True)
class Requests:
    """R requests: prompt tokens, the server's TTFT (s) and a coin in [0, 1) each, in arrays of one shape."""

    prompt: NDArray[np.int64]
    server_ttft: NDArray[np.float64]
    coin: NDArray[np.float64]

    @classmethod
    def draw(
        cls, shape: int | tuple[int, int], lengths: Lengths, server: Latency, rng: np.random.Generator
    ) -> Requests:
        """Requests of a shape, drawn independently from lengths and the server's TTFT."""
        return cls(lengths.sample(shape, rng), rng.choice(server.samples, shape), rng.random(shape))


def play(policy: DispatchPolicy, requests: Requests, device: DeviceSpeed) -> Raced:
    """Race requests under a policy, each by itself: nothing queues."""
    at = np.minimum(requests.prompt, len(policy.chance) - 1)
    coin = (requests.coin < policy.chance[at]).astype(int)
    device_wait = policy.wait_device[coin, at]
    server_wait = policy.wait_server[coin, at]
    return race(device_wait, server_wait, device.ttft(requests.prompt), requests.server_ttft)


@dataclass(frozen=True)
class Expectations:
    """A policy's exact expectations.

    mean, p99: of TTFT, seconds. use: share of all input tokens that the constrained endpoint processes.
    """

    mean: float
    p99: float
    use: float


def expected(
    policy: DispatchPolicy, lengths: Lengths, server: Latency, device: DeviceSpeed, race: Callable[..., Raced] = race
) -> Expectations:
    """What a policy gives without sampling error: every length against every sample of S, either side of the coin.

    race: what comes of waits and TTFTs.
    """
    at = np.minimum(lengths.support, len(policy.chance) - 1)
    coin = np.stack([1 - policy.chance[at], policy.chance[at]])
    alternative, length = np.nonzero(coin * lengths.probability)
    wait_d, wait_s = (wait[alternative, at[length]][:, None] for wait in (policy.wait_device, policy.wait_server))
    raced = race(wait_d, wait_s, device.ttft(lengths.support[length])[:, None], server.samples)
    weight = np.repeat((coin * lengths.probability)[alternative, length] / server.samples.size, server.samples.size)
    ttft, ran = raced.ttft.ravel(), np.broadcast_to(raced.ran(policy.constrained), raced.ttft.shape).ravel()
    order = np.argsort(ttft, kind="stable")
    p99 = ttft[order][np.searchsorted(np.cumsum(weight[order]), 0.99 - 1e-12)]
    tokens = np.repeat(lengths.support[length], server.samples.size)
    return Expectations(float(weight @ ttft), float(p99), float((weight * tokens)[ran].sum() / lengths.mean))


def in_time(
    dispatcher: Any,
    arrivals: NDArray[np.float64],
    prompts: NDArray[np.int64],
    ttft: Mapping[Any, NDArray[np.float64]],
    decoding: NDArray[np.float64] | None = None,
    race: Callable[..., Raced] = race,
) -> tuple[Raced, NDArray[np.float64]]:
    """(what came of each request, the ledger): requests that overlap, under a dispatcher (`budgeted.Dispatcher`).

    arrivals: [R] s, ascending. ttft: [R] seconds of each side from its start. decoding: [R] seconds for which the
    device goes on after its prefill, where it serves one request at a time; else it serves all at once. race: what
    comes of each request, from when its sides started and when their tokens came. The ledger has a row an arrival or
    start of the constrained side: (input tokens so far, its tokens so far).
    """
    count = len(prompts)
    one_by_one = decoding is not None
    orders: list[Order] = [None] * count  # type: ignore[list-item]
    began: list[dict[Side, float]] = [{} for _ in prompts]
    waited = {side: np.full(count, NEVER) for side in SIDES}
    took = {side: np.full(count, NEVER) for side in SIDES}  # from a side's start to its token, if it was served
    first, won, ledger = np.full(count, np.nan), np.zeros(count, bool), [(0, 0)]
    events: list[tuple[float, int, int, Side]] = [(at, i, 0, "device") for i, at in enumerate(arrivals)]
    heapify(events)
    takes = ttft["device"] + (decoding if decoding is not None else 0.0)
    queue: deque[int] = deque()  # of the phone; the first one is served, until `until`
    until = 0.0

    def serve(now: float) -> None:
        """The phone takes the next of its queue that still waits for a token."""
        nonlocal until
        while queue and not np.isnan(first[queue[0]]):
            queue.popleft()
        if queue:
            served = queue[0]
            until = now + takes[served]
            took["device"][served] = now - began[served]["device"] + ttft["device"][served]
            heappush(events, (now + ttft["device"][served], served, 1, "device"))

    while events:
        now, i, what, side = heappop(events)
        tokens = int(prompts[i])
        if what == 0:  # it arrives
            free_in = until - now + takes[list(queue)[1:]].sum() if queue else 0.0
            orders[i] = dispatcher.arrive(tokens, max(0.0, free_in))
            ledger.append((ledger[-1][0] + tokens, ledger[-1][1]))
            for endpoint in SIDES:
                if orders[i].waits[endpoint] < NEVER:
                    heappush(events, (now + orders[i].waits[endpoint], i, 2, endpoint))
        elif what == 2 and np.isnan(first[i]) and dispatcher.start(orders[i], side, tokens):  # a wait is over
            began[i][side] = now
            waited[side][i] = orders[i].waits[side]
            if side == dispatcher.constrained:
                ledger.append((ledger[-1][0], ledger[-1][1] + tokens))
            if side == "device" and one_by_one:
                queue.append(i)
                if len(queue) == 1:
                    serve(now)
            else:
                took[side][i] = ttft[side][i]
                heappush(events, (now + ttft[side][i], i, 1, side))  # of what falls together, tokens are first
        elif what == 1 and np.isnan(first[i]):  # the first token
            first[i] = now - arrivals[i]
            won[i] = side == "device"
            for endpoint, start in began[i].items():
                notice = dispatcher.first_token if endpoint == side else dispatcher.cut_off
                notice(orders[i], endpoint, now - start)
            dispatcher.close(orders[i])
            if queue and queue[0] == i and won[i]:
                heappush(events, (until, i, 3, side))
            elif queue and queue[0] == i:  # a phone that lost is free
                serve(now)
        elif what == 3:  # the phone has told its answer
            serve(now)
    return race(waited["device"], waited["server"], took["device"], took["server"]), np.array(ledger, float)

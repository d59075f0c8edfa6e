"""Waiting in tests: a busy machine makes things late, never early, and what must come is waited for."""

import asyncio
import time
from collections.abc import Callable

PATIENCE = 60.0  # seconds in which on any machine comes what comes at all


def wait_for(true: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Wait until it is so."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


async def until(true: Callable[[], object], seconds: float = PATIENCE) -> bool:
    """Wait until it is so, while the event loop goes on; whether it became so."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.005)
    return True


def one_of(tries: int, good: Callable[[], bool]) -> bool:
    """Whether it comes out well once: other work on the machine may spoil a time, a mistake does every time."""
    return any(good() for _ in range(tries))


def least_time(work: Callable[[], object], below: float, tries: int = 20) -> float:
    """Seconds that some work takes when nothing disturbs it: the least of so many tries, or the first that is below."""
    least = float("inf")
    for _ in range(tries):
        begin = time.perf_counter()
        work()
        least = min(least, time.perf_counter() - begin)
        if least < below:
            break
    return least

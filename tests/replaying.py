"""The replaying endpoint of DiSCo's router with faults on request, which notes what it sees of its callers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ondevice_programs.router import replay


@dataclass(frozen=True)
class Fault:
    """at: tokens sent before a stall, disconnect or malformed chunk."""

    kind: Literal["stall", "429", "500", "disconnect", "malformed", "html"]
    at: int = 0


@dataclass(frozen=True)
class Timing:
    """ttft: seconds to the first token, one a request, in turn. tbt: seconds between tokens."""

    ttft: Sequence[float] = (0.0,)
    tbt: float = 0.0


@dataclass
class Seen:
    """What an endpoint saw of its callers."""

    requests: int = 0
    finished: int = 0
    disconnected: int = 0


def create_replay(timing: Timing | None = None, fault: Callable[[int], Fault | None] = lambda _: None) -> Starlette:
    """The endpoint. fault: from the number of the request (0, 1, ...) to what goes wrong with it.

    `app.state.seen` counts requests, finished answers and callers that left.
    """
    timing = timing or Timing()
    plain: Any = replay.create_replay(timing.ttft, timing.tbt)
    (chat,) = plain.routes
    seen = Seen()

    async def handle(http: Request) -> Response:
        wrong = fault(seen.requests)
        seen.requests += 1
        if wrong and wrong.kind in ("429", "500"):
            later = {"retry-after": "7"} if wrong.kind == "429" else None
            return JSONResponse({"error": {"message": "as asked"}}, int(wrong.kind), later)
        if wrong and wrong.kind == "html":
            return HTMLResponse("<!doctype html><title>Not an API</title>")
        reply = await chat.endpoint(http)
        if isinstance(reply, StreamingResponse):
            reply.body_iterator = _watched(reply.body_iterator, wrong, seen)
        else:
            seen.finished += 1
        return reply

    app = Starlette(routes=[Route(chat.path, handle, methods=["POST"])])
    app.state.seen = seen
    return app


async def _watched(events: AsyncIterable[Any], wrong: Fault | None, seen: Seen) -> AsyncIterator[str]:
    sent = 0
    try:
        async for event in events:
            if wrong and sent == wrong.at:
                if wrong.kind == "stall":
                    await asyncio.Event().wait()
                if wrong.kind == "malformed":
                    yield 'data: {"choices": [{"te\n\n'
                return
            seen.finished += event.startswith("data: [DONE]")
            yield event
            sent += 1
    except (asyncio.CancelledError, GeneratorExit):
        seen.disconnected += 1
        raise

"""The router as an OpenAI-compatible HTTP service (Server-Sent Events)."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import chain
from math import ceil, isfinite
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ondevice_papers.disco.policy import NEVER, SIDES
from ondevice_programs.router.delivery import Part, joined
from ondevice_programs.router.endpoints import EndpointError, Finish
from ondevice_programs.router.request import BadRequest, ChatRequest, Json, parse, read
from ondevice_programs.router.router import Router
from ondevice_programs.router.session import StreamError

LARGEST_BODY = 16 << 20  # bytes
UNNAMED = "default"  # what a model is listed as that callers may ask for by any name
OPEN = {"/health", "/ready"}  # need no key
KINDS = {401: "authentication_error", 429: "rate_limit_error", 504: "timeout_error"}  # of errors, by their status

log = logging.getLogger("ondevice_programs.router")


def create_app(router: Router) -> Starlette:
    """POST /v1/chat/completions, GET /v1/models, /health, /ready and /metrics."""
    own = router.config.model_name or UNNAMED

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with router.running():
            yield

    async def chat(http: HttpRequest) -> Response:
        arrived = time.perf_counter()
        request = parse(*read(await _body(http)))
        served(request.model or own)
        headers = {"x-request-id": http.headers.get("x-request-id") or uuid.uuid4().hex}
        return _Answer(router, replace(request, headers=headers, model=request.model or own), arrived)

    async def bare(_: HttpRequest) -> Response:
        raise BadRequest("Bare completions are not served here: ask /v1/chat/completions.", status=404)

    def served(name: str) -> Json:
        """The description of a model. Raises BadRequest where nobody serves it."""
        if name != own and router.config.model_name:
            raise BadRequest(f"There is no model {name!r} here; there is {own}.", "model", 404, "model_not_found")
        return {"id": name, "object": "model", "created": 0, "owned_by": "ondevice"}

    async def model(http: HttpRequest) -> Response:
        return JSONResponse(served(http.path_params["name"]))

    async def models(_: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [served(own)]})

    async def health(_: HttpRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(_: HttpRequest) -> Response:
        fine = await router.ready()
        return JSONResponse({"status": "ok" if fine else "no endpoint answers"}, 200 if fine else 503)

    async def metrics(_: HttpRequest) -> Response:
        return Response(generate_latest(router.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", bare, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/health", health),
            Route("/ready", ready),
            Route("/metrics", metrics),
        ],
        middleware=[Middleware(_keyed, key=router.config.general_settings.master_key)],
        exception_handlers={HTTPException: _http_error},
        lifespan=lifespan,
    )
    app.state.break_off = router.break_off
    return app


def _keyed(app: ASGIApp, key: str | None) -> ASGIApp:
    """Refuses callers without the router's key, where it has one."""

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        if key and scope["type"] == "http" and scope["path"] not in OPEN:
            callers = Headers(scope=scope).get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(callers.encode(), key.encode()):
                refusal = JSONResponse(_error_body("This key is not the router's.", 401), 401)
                await refusal(scope, receive, send)
                return
        await app(scope, receive, send)

    return checked


async def _body(http: HttpRequest) -> bytes:
    # A web page may post text to a local port without asking; it may not post JSON.
    if http.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise BadRequest("The body must be sent as application/json.", status=415)
    if (encoding := http.headers.get("content-encoding", "identity").strip().lower()) != "identity":
        raise BadRequest(f"The body must not be compressed ({encoding}).", status=415)
    body = bytearray()
    async for block in http.stream():
        body += block
        if len(body) > LARGEST_BODY:
            raise BadRequest("The body is larger than 16 MiB.", status=413)
    return bytes(body)


class _Answer(Response):
    """One answer. Its headers wait for the first token, so that an early failure still has an HTTP status."""

    background = None

    def __init__(self, router: Router, request: ChatRequest, arrived: float) -> None:
        self._router, self._request, self._arrived = router, request, arrived
        self._session = router.open(request)
        self._call = request.headers["x-request-id"]
        self._head: Json = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion.chunk" if request.streamed else "chat.completion",
            "created": int(time.time()),
            "model": request.model,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer unless the caller leaves first; leaving closes the streams behind it."""
        sending = asyncio.create_task(self._send(scope, receive, send))
        leaving = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
            self._session.abandon()
            self._report()
        if not sending.cancelled():
            sending.result()

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._session.start()
        try:
            if self._request.streamed:
                await self._stream(send)
                return
            reply = JSONResponse(self._whole([part async for part in self._session.out.read()]))
        except StreamError as error:
            reply = _passed_on(error)
        reply.raw_headers += self._extra_headers()
        await reply(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        begun = False
        async for event in self._events():
            if not begun:
                await send({"type": "http.response.start", "status": 200, "headers": headers + self._extra_headers()})
            begun = True
            await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        await send({"type": "http.response.body"})

    async def _events(self) -> AsyncIterator[str]:
        """The answer as server-sent events. Raises StreamError where it fails before its first token."""
        # A chunk is this head, the token as JSON, and a constant tail: no object is built per token.
        choice = '{"index": 0, "logprobs": null, "finish_reason": null, "delta": {"content": '
        head, pinned = f'data: {json.dumps(self._head)[:-1]}, "choices": [{choice}', self._request.pinned
        role: Json = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        opening = "" if pinned else self._event([role])
        try:
            async for part in self._session.out.read():
                seam = f": {part.seam} to the {part.side}\n\n" if part.seam else ""
                if part.raw:
                    chunk = f"data: {json.dumps(part.raw | self._head)}"
                else:
                    others = f", {json.dumps(part.others)[1:-1]}" if part.others else ""
                    chunk = f"{head}{json.dumps(part.text)}}}}}]{others}}}"
                yield f"{opening}{seam}{chunk}\n\n"
                opening = ""
        except StreamError as error:
            if not self._session.heard:
                raise
            yield f"data: {json.dumps(_error_body(str(error), error.status or 502))}\n\n"
            return
        if not pinned:
            end: Json = {"index": 0, "delta": {}, "finish_reason": self._finish.reason}
            yield self._event([end], **self._finish.others, disco=self._story())
        if (self._request.options.get("stream_options") or {}).get("include_usage"):
            yield self._event([], usage=self._usage(), disco=self._story())
        yield "data: [DONE]\n\n"

    def _event(self, choices: list[Json], /, **fields: Any) -> str:
        return f"data: {json.dumps(self._head | {'choices': choices} | fields)}\n\n"

    def _whole(self, parts: list[Part]) -> Json:
        if self._request.whole and parts and parts[0].raw is not None:
            return parts[0].raw | {"disco": self._story()}
        message: Json = {"role": "assistant", "content": joined(part.text for part in parts)}
        deltas = [part.raw["choices"][0]["delta"] for part in parts if part.raw]
        names = dict.fromkeys(name for delta in deltas for name in delta if name not in (*message, "tool_calls"))
        for name in names:  # reasoning, sources, ...
            values = [delta[name] for delta in deltas if delta.get(name)]
            if values and all(isinstance(value, str) for value in values):
                message[name] = joined(values)
            elif values and all(isinstance(value, list) for value in values):
                message[name] = [*chain(*values)]
        if calls := _calls(chain(*(delta.get("tool_calls") or () for delta in deltas))):
            message["tool_calls"] = calls
        choice = {"index": 0, "logprobs": None, "finish_reason": self._finish.reason, "message": message}
        others = {name: value for part in parts for name, value in part.others.items()} | self._finish.others
        return self._head | {"choices": [choice], "usage": self._usage()} | others | {"disco": self._story()}

    @property
    def _finish(self) -> Finish:
        assert self._session.finish is not None  # without an error, the answer is complete
        return self._session.finish

    def _extra_headers(self) -> list[tuple[bytes, bytes]]:
        """What is known when the headers go out; of a stream, the rest follows in its last chunk."""
        session = self._session
        headers = {"x-disco-call-id": self._call, "x-request-id": self._call}
        if session.switches:
            headers["x-disco-side"] = session.switches[0].side
        if session.over_budget:
            headers["x-disco-over-budget"] = "true"
        if isfinite(self._router.dispatcher.left):
            headers["x-ratelimit-remaining-tokens"] = str(int(self._router.dispatcher.left))
        return [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]

    def _usage(self) -> Json:
        usage, _ = self._session.usage()
        prompt, output = usage.prompt_tokens, usage.output_tokens
        counts = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
        return counts | dict(usage.details)

    def _story(self) -> Json:
        """The extension that says how the answer came about, and what that took behind the scenes."""
        session = self._session
        return {
            "switches": [{"at": switch.base, "side": switch.side, "role": switch.role} for switch in session.switches],
            "cost": sum(attempt.cost for attempt in session.entries),
            "estimated": session.usage()[1],
            "over_budget": session.over_budget,
            "entries": [attempt.summary() for attempt in session.entries],
        }

    def _report(self) -> None:
        """One line a request, and its metrics. Never what was asked or said."""
        session = self._session
        seconds = time.perf_counter() - self._arrived
        ttft = session.heard - self._arrived if session.heard else None
        status = 200 if session.error is None else getattr(session.error, "status", 500)
        self._router.metrics.request(session, status)
        waits = "/".join(f"{session.order.waits.get(side, NEVER):.3g}" for side in SIDES)
        numbers: Json = {"ttft": ttft, "seconds": seconds, "usage": self._usage()} | self._story()
        if self._request.uncounted:
            numbers["uncounted"] = self._request.uncounted
        log.info("%s status=%s waits=%s %s", self._call, status, waits, json.dumps(numbers))


def _calls(pieces: Iterable[Json]) -> list[Json]:
    """Tool calls that came in pieces: those of one index are of one call, whose arguments follow each other."""
    calls: dict[int, Json] = {}
    for piece in pieces:
        function = piece.get("function") or {}
        call = calls.setdefault(piece.pop("index", len(calls)), piece | {"function": function | {"arguments": ""}})
        call["function"]["arguments"] += function.get("arguments") or ""
    return [*calls.values()]


async def _left(receive: Receive) -> None:
    """Return when the caller has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _passed_on(error: EndpointError) -> JSONResponse:
    headers, status = {}, error.status or 502
    if error.retry_after:
        headers = {"retry-after": str(ceil(error.retry_after)), "retry-after-ms": str(ceil(1e3 * error.retry_after))}
    return JSONResponse(error.body or _error_body(str(error), status), status, headers)


def _error_body(message: str, status: int, param: str | None = None, code: str | None = None) -> Json:
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "upstream_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code or status}}


async def _http_error(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    named = (error.param, error.code) if isinstance(error, BadRequest) else ()
    return JSONResponse(_error_body(error.detail, error.status_code, *named), error.status_code)

"""The router as an OpenAI-compatible HTTP service (Server-Sent Events)."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
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
from ondevice_programs.router.delivery import Part
from ondevice_programs.router.endpoints import EndpointError
from ondevice_programs.router.request import Api, BadRequest, Json, Request, parse
from ondevice_programs.router.router import Router
from ondevice_programs.router.session import StreamError
from ondevice_programs.router.sides import ANY_MODEL

LARGEST_BODY = 16 << 20  # bytes
OPEN = {"/health", "/ready"}  # need no key

log = logging.getLogger("ondevice_programs.router")


def create_app(router: Router) -> Starlette:
    """POST /v1/chat/completions and /v1/completions, GET /v1/models, /health, /ready and /metrics."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with router.running():
            yield

    async def models(_: HttpRequest) -> Response:
        names = dict.fromkeys([*router.models, ANY_MODEL])
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "ondevice"} for name in names]
        return JSONResponse({"object": "list", "data": data})

    async def health(_: HttpRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(_: HttpRequest) -> Response:
        fine = await router.ready()
        return JSONResponse({"status": "ok" if fine else "no deployment answers"}, 200 if fine else 503)

    async def metrics(_: HttpRequest) -> Response:
        return Response(generate_latest(router.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", _completion("chat", router), methods=["POST"]),
            Route("/v1/completions", _completion("completions", router), methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
            Route("/ready", ready),
            Route("/metrics", metrics),
        ],
        middleware=[Middleware(_Keyed, router=router)],
        exception_handlers={HTTPException: _http_error},
        lifespan=lifespan,
    )
    app.state.break_off = router.break_off
    return app


class _Keyed:
    """Refuses callers without the router's key. Where Authorization is the endpoints', the key is X-API-Key."""

    def __init__(self, app: ASGIApp, router: Router) -> None:
        general = router.config.general_settings
        self._app = app
        self._key = general.master_key
        self._header = "x-api-key" if general.forward_authorization else "authorization"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._key and scope["type"] == "http" and scope["path"] not in OPEN:
            given = Headers(scope=scope).get(self._header, "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), self._key.encode()):
                await _error("This key is not the router's.", 401)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _completion(api: Api, router: Router) -> Callable[[HttpRequest], Any]:
    forwards = router.config.general_settings.forward_authorization

    async def handle(http: HttpRequest) -> Response:
        arrived = time.perf_counter()
        try:
            payload = await _payload(http)
            request = parse(api, payload)
        except BadRequest as error:
            return _error(str(error), 400, error.param)
        if request.model not in (None, ANY_MODEL, *router.models):
            said = f"There is no model {request.model!r} here; there are {', '.join([*router.models, ANY_MODEL])}."
            return _error(said, 404, "model", "model_not_found")
        call = http.headers.get("x-request-id") or uuid.uuid4().hex
        headers = {"x-request-id": call}
        if forwards and "authorization" in http.headers:
            headers["authorization"] = http.headers["authorization"]
        return _Answer(router, replace(request, headers=headers), call, arrived)

    return handle


async def _payload(http: HttpRequest) -> Any:
    # A web page may post text to a local port without asking; it may not post JSON.
    if http.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise HTTPException(415, "The body must be sent as application/json.")
    body = bytearray()
    async for block in http.stream():
        body += block
        if len(body) > LARGEST_BODY:
            raise HTTPException(413, "The body is larger than 16 MiB.")
    try:
        return json.loads(bytes(body))
    except ValueError as error:
        raise BadRequest(f"The body is not JSON: {error}.") from None


class _Answer(Response):
    """One answer. Its headers wait for the first token, so that an early failure still has an HTTP status."""

    def __init__(self, router: Router, request: Request, call: str, arrived: float) -> None:
        self._router, self._request, self._call, self._arrived = router, request, call, arrived
        self._usage = bool((request.options.get("stream_options") or {}).get("include_usage"))
        self._chat = request.api == "chat"
        kind = "chat.completion" if self._chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": f"{kind}.chunk" if self._chat and request.streamed else kind,
            "created": int(time.time()),
            "model": request.model or ANY_MODEL,
        }
        # A chunk is this head, the token as JSON, and a constant tail: no object is built per token.
        head = json.dumps(self._head)[:-1]
        field = '"delta": {"content": ' if self._chat else '"text": '
        self._before = f'data: {head}, "choices": [{{"index": 0, "logprobs": null, "finish_reason": null, {field}'
        self._after = "}}]}\n\n" if self._chat else "}]}\n\n"
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer unless the caller leaves first; leaving closes the streams behind it."""
        self._session = self._router.open(self._request)
        try:
            self._session.start()
        except BaseException:
            self._session.abandon()
            raise
        self._opened = time.perf_counter()
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
        parts = self._session.out.read()
        try:
            first = await anext(parts, None)
            if self._request.streamed:
                await self._send_events(first, parts, send)
                return
            reply = await self._whole(first, parts)
        except StreamError as error:
            reply = _passed_on(error)
            reply.raw_headers += self._known()
        await reply(scope, receive, send)

    async def _send_events(self, first: Part | None, parts: AsyncIterator[Part], send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers + self._known()})
        try:
            if first is not None:
                await _body(send, self._opening() + self._chunk(first))
                async for part in parts:
                    await _body(send, self._chunk(part))
            last = self._closing()
        except StreamError as error:
            last = f"data: {json.dumps(_error_body(str(error), error.status or 502))}\n\n"
        await send({"type": "http.response.body", "body": last.encode(), "more_body": False})

    def _opening(self) -> str:
        if not self._chat or self._request.pinned:
            return ""
        return self._event([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])

    def _chunk(self, part: Part) -> str:
        seam = f": {part.seam} to the {part.side}\n\n" if part.seam else ""
        if part.raw is not None:
            return f"{seam}data: {json.dumps(part.raw)}\n\n"
        return f"{seam}{self._before}{json.dumps(part.text)}{self._after}"

    def _closing(self) -> str:
        field: Json = {"delta": {}} if self._chat else {"text": ""}
        choice = {"index": 0, "finish_reason": self._finish_reason, **field}
        end = "" if self._request.pinned else self._event([choice], disco=self._story())
        usage = self._event([], usage=self._usage_told(), disco=self._story()) if self._usage else ""
        return f"{end}{usage}data: [DONE]\n\n"

    def _event(self, choices: list[Json], **more: Any) -> str:
        return f"data: {json.dumps(self._head | {'choices': choices} | more)}\n\n"

    async def _whole(self, first: Part | None, parts: AsyncIterator[Part]) -> Response:
        texts = [first.text] if first is not None else []
        raw = first.raw if first is not None else None
        async for part in parts:
            texts.append(part.text)
        text = "".join(texts)
        field: Json = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        choice = {"index": 0, "logprobs": None, "finish_reason": self._finish_reason, **field}
        reply = self._head | {"choices": [choice], "usage": self._usage_told()}
        if self._request.whole and raw is not None:
            reply = raw
        response = JSONResponse(reply | {"disco": self._story()})
        response.raw_headers += self._known()
        return response

    @property
    def _finish_reason(self) -> str | None:
        return self._session.finish.reason if self._session.finish else None

    def _known(self) -> list[tuple[bytes, bytes]]:
        """What is known when the headers go out; of a stream, the rest follows in its last chunk."""
        session = self._session
        known = {"x-disco-call-id": self._call, "x-request-id": self._call}
        if session.switches:
            known["x-disco-side"] = session.switches[0].side
        came = (session.heard or session.ended) if self._request.streamed else session.ended
        mine = self._opened - self._arrived + time.perf_counter() - came
        known["x-disco-overhead-duration-ms"] = f"{1000 * mine:.3f}"
        known["x-ratelimit-remaining-tokens"] = str(int(self._router.dispatcher.left))
        return [(name.encode(), value.encode("latin-1", "replace")) for name, value in known.items()]

    def _usage_told(self) -> dict[str, int]:
        usage, _ = self._session.usage()
        prompt = usage.prompt_tokens
        output = usage.output_tokens
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}

    def _story(self) -> Json:
        """The extension that says how the answer came about, and what that took behind the scenes."""
        session = self._session
        return {
            "switches": [{"at": it.base, "side": it.side, "role": it.role} for it in session.switches],
            "cost": sum(attempt.cost for attempt in session.entries),
            "estimated": session.usage()[1],
            "entries": [attempt.told() for attempt in session.entries],
        }

    def _report(self) -> None:
        """One line a request, and its metrics. Never what was asked or said."""
        session = self._session
        seconds = time.perf_counter() - self._arrived
        status = 200 if session.error is None else getattr(session.error, "status", 500)
        self._router.metrics.request(self._request, session, status, seconds)
        usage, _ = session.usage()
        log.info(
            "%s status=%s sides=%s failed=%s waits=%s ttft=%s tokens=%d+%d seconds=%.3f",
            self._call, status, ",".join(f"{it.side}:{it.role}@{it.base}" for it in session.switches),
            ",".join(f"{it.side}:{it.error.status or 'connection'}" for it in session.entries if it.error) or "-",
            "/".join(f"{session.order.waits.get(side, NEVER):.3g}" for side in SIDES),
            "-" if session.first_token_s is None else f"{session.first_token_s:.4f}",
            usage.prompt_tokens, usage.output_tokens, seconds,
        )  # fmt: skip


async def _body(send: Send, text: str) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})


async def _left(receive: Receive) -> None:
    """Return when the caller has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _passed_on(error: EndpointError) -> Response:
    headers = {"retry-after": error.retry_after} if error.retry_after else None
    body = error.body
    status = error.status or 502
    return JSONResponse(_error_body(str(error), status) if body is None else body, status, headers)


def _error_body(message: str, status: int, param: str | None = None, code: str | int | None = None) -> Json:
    kinds = {401: "authentication_error", 429: "rate_limit_error", 504: "timeout_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "upstream_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code or status}}


def _error(message: str, status: int, param: str | None = None, code: str | int | None = None) -> Response:
    return JSONResponse(_error_body(message, status, param, code), status)


async def _http_error(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.detail, error.status_code)

"""The router as an OpenAI-compatible HTTP service (Server-Sent Events)."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ondevice.disco.delivery import Token
from ondevice.disco.endpoints import SIDES
from ondevice.disco.request import Api, BadRequest, parse
from ondevice.disco.router import Router, Stream
from ondevice.disco.session import StreamError, Summary

MODEL = "disco"
LARGEST_BODY = 16 << 20  # bytes


def create_app(router: Router) -> Starlette:
    """POST /v1/chat/completions and /v1/completions, GET /v1/models, /health and /metrics."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await router.aclose()

    async def models(_: HttpRequest) -> Response:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "ondevice"}
        return JSONResponse({"object": "list", "data": [model]})

    async def health(_: HttpRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def metrics(_: HttpRequest) -> Response:
        return PlainTextResponse(prometheus(router), media_type="text/plain; version=0.0.4")

    return Starlette(
        routes=[
            Route("/v1/chat/completions", _completion("chat", router), methods=["POST"]),
            Route("/v1/completions", _completion("completions", router), methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        exception_handlers={HTTPException: _http_error},
        lifespan=lifespan,
    )


def prometheus(router: Router) -> str:
    """The ledger's totals in Prometheus' text format."""
    summary = router.ledger.summary()
    lines = []
    for name in ("requests", "errors", "migrations", "input_tokens"):
        lines += [f"# TYPE disco_{name}_total counter", f"disco_{name}_total {summary[name]}"]
    for name in ("starts", "prompt_tokens", "output_tokens", "cost", "wasted_cost", "estimated"):
        lines.append(f"# TYPE disco_endpoint_{name}_total counter")
        lines += [f'disco_endpoint_{name}_total{{endpoint="{side}"}} {summary[side][name]}' for side in SIDES]
    lines.append("# TYPE disco_endpoint_input_share gauge")
    lines += [f'disco_endpoint_input_share{{endpoint="{side}"}} {summary[side]["input_share"]}' for side in SIDES]
    lines.append("# TYPE disco_endpoint_outcomes_total counter")
    for side in SIDES:
        for outcome, count in sorted(summary[side]["outcomes"].items()):
            lines.append(f'disco_endpoint_outcomes_total{{endpoint="{side}",outcome="{outcome}"}} {count}')
    return "\n".join(lines) + "\n"


def _completion(api: Api, router: Router) -> Callable[[HttpRequest], Any]:
    async def handle(http: HttpRequest) -> Response:
        try:
            payload = await _payload(http)
            request = parse(api, payload)
            streamed = bool(payload.get("stream"))
            options = payload.get("stream_options") or {}
            with_usage = isinstance(options, dict) and bool(options.get("include_usage"))
        except BadRequest as error:
            return _error(str(error), 400, error.param)
        if request.pinned and not streamed:
            request = replace(request, whole=True)
        return _Answer(router.answer(request), api, streamed, with_usage)

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

    def __init__(self, stream: Stream, api: Api, streamed: bool, with_usage: bool) -> None:
        self._stream = stream
        self._streamed = streamed
        self._with_usage = with_usage
        self._chat = api == "chat"
        kind = "chat.completion" if self._chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": f"{kind}.chunk" if self._chat and streamed else kind,
            "created": int(time.time()),
            "model": stream.request.model or MODEL,
        }
        # A chunk is this head, the token as JSON, and a constant tail: no object is built per token.
        head = json.dumps(self._head)[:-1]
        field = '"delta": {"content": ' if self._chat else '"text": '
        self._before = f'data: {head}, "choices": [{{"index": 0, "logprobs": null, "finish_reason": null, {field}'
        self._after = "}}]}\n\n" if self._chat else "}]}\n\n"
        self.background = None

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
        if not sending.cancelled():
            sending.result()

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        tokens = aiter(self._stream)
        try:
            first = await anext(tokens, None)
            if self._streamed:
                await self._send_events(first, tokens, send)
                return
            reply = await self._whole(first, tokens)
        except StreamError as error:
            reply = _error(str(error), error.status)
        finally:
            await tokens.aclose()  # type: ignore[attr-defined]  # an async generator, typed as an iterator
        await reply(scope, receive, send)

    async def _send_events(self, first: Token | None, tokens: AsyncIterator[Token], send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        headers += _headers(self._stream.summary)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            if first is not None:
                await _body(send, self._opening() + self._chunk(first))
                async for token in tokens:
                    await _body(send, self._chunk(token))
            last = self._closing()
        except StreamError as error:  # the status line is out: the stream itself must say that it is not whole
            last = f"data: {json.dumps(_error_body(str(error), error.status))}\n\n"
        await send({"type": "http.response.body", "body": last.encode(), "more_body": False})

    def _opening(self) -> str:
        if not self._chat:
            return ""
        return self._event([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])

    def _chunk(self, token: Token) -> str:
        if token.raw is not None:
            return f"data: {json.dumps(token.raw)}\n\n"
        return f"{self._before}{json.dumps(token.text)}{self._after}"

    def _closing(self) -> str:
        summary = self._stream.summary
        field: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        choice = {"index": 0, "finish_reason": summary.finish_reason, **field}
        end = "" if self._stream.request.pinned else self._event([choice], disco=_story(summary))
        usage = self._event([], usage=_usage(summary), disco=_story(summary)) if self._with_usage else ""
        return f"{end}{usage}data: [DONE]\n\n"

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        return f"data: {json.dumps(self._head | {'choices': choices} | more)}\n\n"

    async def _whole(self, first: Token | None, tokens: AsyncIterator[Token]) -> Response:
        texts = [first.text] if first is not None else []
        raw = first.raw if first is not None else None
        async for token in tokens:
            texts.append(token.text)
        summary = self._stream.summary
        text = "".join(texts)
        field: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        choice = {"index": 0, "logprobs": None, "finish_reason": summary.finish_reason, **field}
        reply = self._head | {"choices": [choice], "usage": _usage(summary)}
        if self._stream.request.whole and raw is not None:
            reply = raw
        response = JSONResponse(reply | {"disco": _story(summary)})
        response.raw_headers += _headers(summary, finished=True)
        return response


def _headers(summary: Summary, finished: bool = False) -> list[tuple[bytes, bytes]]:
    """What is known when the headers go out; of a stream, the rest follows in its last chunk."""
    known: dict[str, Any] = {
        "winner": summary.winner,
        "started": ",".join(summary.started) if finished else None,
        "prompt-tokens": summary.prompt_tokens,
        "first-token-ms": None if summary.first_token_s is None else round(1000 * summary.first_token_s, 3),
        "migrated-at": summary.migrated_at if finished else None,
        "cost": f"{summary.cost:.9g}" if finished else None,
    }
    return [(f"x-disco-{name}".encode(), str(value).encode()) for name, value in known.items() if value is not None]


def _usage(summary: Summary) -> dict[str, int]:
    """The usage of the answer as the user sees it; what it took behind the scenes is in `disco`."""
    prompt, output = summary.prompt_tokens, summary.output_tokens
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def _story(summary: Summary) -> dict[str, Any]:
    return {
        "winner": summary.winner,
        "migrated_at": summary.migrated_at,
        "switches": [asdict(switch) for switch in summary.switches],
        "cost": summary.cost,
        "estimated": summary.estimated,
        "entries": [asdict(entry) for entry in summary.entries],
    }


async def _body(send: Send, text: str) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})


async def _left(receive: Receive) -> None:
    """Return when the caller has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _error_body(message: str, status: int, param: str | None = None) -> dict[str, Any]:
    kinds = {429: "rate_limit_error", 504: "timeout_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "upstream_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def _error(message: str, status: int, param: str | None = None) -> Response:
    return JSONResponse(_error_body(message, status, param), status)


async def _http_error(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.detail, error.status_code)

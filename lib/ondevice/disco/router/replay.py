"""An OpenAI-compatible endpoint that replays a trace's timing over a deterministic text, with faults on request."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ondevice.disco.router.request import Api, Message, count_tokens, message_text

# Chosen to be awkward on the way: quotes, line breaks, several bytes a character, an event stream's own marks.
WORDS = (
    " the", " of", " and", " token", " device", " server", " stream", " answer", " 7", " 42", ",", ".", "\n", "\n\n",
    ' "quoted"', " back\\slash", " naïve", " größer", " 数据", "流", " 🚀", "\U0001f469\u200d\U0001f52c", " data:",
    " [DONE]", "\r\n", "\t", " {}", "é", " null", " prefill", " decode", " migrate",
)  # fmt: skip
END_ONE_IN = 200  # chance of ending after a token, so that an answer has 200 tokens on average

FaultKind = Literal["delay", "stall", "429", "500", "disconnect", "malformed", "html"]


@dataclass(frozen=True)
class Fault:
    """at: tokens sent before a stall, disconnect or malformed chunk. seconds: length of a delay before the answer."""

    kind: FaultKind
    at: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Timing:
    """ttft: seconds, one a request, in turn. tbt: seconds between tokens. prefill_rate: r_p, tokens/s; adds l / r_p."""

    ttft: Sequence[float] = (0.0,)
    tbt: float = 0.0
    prefill_rate: float = float("inf")

    def __post_init__(self) -> None:
        if not self.ttft or min(self.ttft) < 0 or self.tbt < 0 or not self.prefill_rate > 0:
            raise ValueError("A timing needs TTFTs and a TBT of at least 0 s and a prefill rate above 0.")


@dataclass
class Seen:
    """What an endpoint saw of its callers. asked: each request's prompt and prefix in one text."""

    requests: int = 0
    finished: int = 0
    disconnected: int = 0
    asked: list[str] = field(default_factory=list)


def plain_chat(messages: Sequence[Message]) -> str:
    """This endpoint's chat template: lines of `role: text`, ending in `assistant:`."""
    lines = [f"{message['role']}: {message_text(message)}\n" for message in messages]
    return "".join(lines) + "assistant:"


def continuation(text: str, voice: str = "") -> Iterator[str]:
    """The tokens that follow `text`: each is a function of all text before it, as with a greedy language model.

    So a text continued from any token boundary of its own answer yields exactly the rest. Voices differ in every word.
    A long word that the text has and breaks off in is finished, as a model would.
    """
    cut = re.search(r"[a-z]{5,}$", text[-40:])
    known = re.search(rf"\b{cut[0]}([a-z]{{5,}})\b", text) if cut else None
    if known:
        yield known[1]
        text += known[1]
    state = hashlib.blake2b(voice.encode() + b"\0" + text.encode("utf-8", "surrogatepass"), digest_size=8)
    while True:
        drawn = int.from_bytes(state.digest(), "big")
        if drawn % END_ONE_IN == 0:
            return
        word = WORDS[(drawn >> 32) % len(WORDS)]
        yield word
        state.update(word.encode())


def answer(text: str, max_tokens: int | None = None, voice: str = "") -> list[str]:
    """The whole answer to `text` as a list of tokens."""
    words = continuation(text, voice)
    return list(words) if max_tokens is None else [word for _, word in zip(range(max_tokens), words, strict=False)]


def prompt_of(api: Api, body: dict[str, Any]) -> str:
    """The text that a request asks to continue; chat is rendered as the router renders it."""
    if api == "completions":
        return body["prompt"]
    messages = body["messages"]
    if body.get("continue_final_message"):
        return plain_chat(messages[:-1]) + messages[-1]["content"]
    return plain_chat(messages)


def create_replay(
    timing: Timing | None = None, voice: str = "", fault: Callable[[int], Fault | None] | None = None
) -> Starlette:
    """The endpoint. fault: from the number of the request (0, 1, ...) to what goes wrong with it.

    `app.state.seen` counts requests, finished answers and callers that left.
    """
    timing = timing or Timing()
    seen = Seen()

    def handler(api: Api) -> Callable[[Request], Any]:
        async def handle(request: Request) -> Response:
            body = await request.json()
            number = seen.requests
            seen.requests += 1
            text = prompt_of(api, body)
            seen.asked.append(text)
            found = fault(number) if fault else None
            wait = timing.ttft[number % len(timing.ttft)] + count_tokens(text) / timing.prefill_rate
            if found is not None:
                if found.kind in ("429", "500"):
                    later = {"retry-after": "7"} if found.kind == "429" else None
                    return JSONResponse({"error": {"message": "as asked"}}, int(found.kind), later)
                if found.kind == "html":
                    return HTMLResponse("<!doctype html><title>Not an API</title>")
                wait += found.seconds
            return _Replies(_Asked(api, text, body), wait, timing.tbt, voice, found, seen)

        return handle

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "replay", "object": "model"}]})

    async def stats(_: Request) -> Response:
        return JSONResponse({name: getattr(seen, name) for name in ("requests", "finished", "disconnected")})

    app = Starlette(
        routes=[
            Route("/v1/completions", handler("completions"), methods=["POST"]),
            Route("/v1/chat/completions", handler("chat"), methods=["POST"]),
            Route("/v1/models", models),
            Route("/stats", stats),
        ]
    )
    app.state.seen = seen
    return app


@dataclass(frozen=True)
class _Asked:
    api: Api
    text: str
    body: dict[str, Any]


class _Replies(Response):
    """One answer, streamed or whole."""

    def __init__(self, asked: _Asked, wait: float, tbt: float, voice: str, fault: Fault | None, seen: Seen) -> None:
        self._api, self._text, self._body = asked.api, asked.text, asked.body
        self._limit = asked.body.get("max_tokens", asked.body.get("max_completion_tokens"))
        self._wait, self._tbt, self._voice, self._fault, self._seen = wait, tbt, voice, fault, seen
        self._sent: list[str] = []
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answering = asyncio.create_task(self._answer(scope, receive, send))
        leaving = asyncio.create_task(_left(receive))
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        self._seen.disconnected += not answering.done()
        for task in (answering, leaving):
            task.cancel()
        await asyncio.gather(answering, leaving, return_exceptions=True)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._body.get("stream"):
            tokens = [token async for token in self._tokens()]
            choice = {"index": 0, "finish_reason": self._reason(), **self._field("".join(tokens), "message")}
            self._seen.finished += 1
            reply = {"id": "replay", "created": 0, "model": "replay", "choices": [choice], "usage": self._usage()}
            await JSONResponse(reply)(scope, receive, send)
            return
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for token in self._tokens():
            if not await self._fine(send):
                return
            await _event(send, {"choices": [{"index": 0, "finish_reason": None, **self._field(token, "delta")}]})
        if not await self._fine(send):
            return
        await _event(send, {"choices": [{"index": 0, "finish_reason": self._reason(), **self._field("", "delta")}]})
        if (self._body.get("stream_options") or {}).get("include_usage"):
            await _event(send, {"choices": [], "usage": self._usage()})
        self._seen.finished += 1
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _tokens(self) -> AsyncIterator[str]:
        """The answer in time: the first token at `wait`, the others on a grid of `tbt` from there."""
        loop = asyncio.get_running_loop()
        due = loop.time() + self._wait
        for token in continuation(self._text, self._voice):
            if len(self._sent) == self._limit:
                break
            await asyncio.sleep(max(0.0, due - loop.time()))
            yield token
            self._sent.append(token)
            due += self._tbt
        else:
            if not self._sent:
                await asyncio.sleep(max(0.0, due - loop.time()))

    async def _fine(self, send: Send) -> bool:
        """Let the fault happen if its token has come; False ends the answer there, and with it the connection."""
        fault = self._fault
        if fault is None or fault.at != len(self._sent):
            return True
        if fault.kind == "stall":
            await asyncio.Event().wait()
        if fault.kind == "malformed":
            await send({"type": "http.response.body", "body": b'data: {"choices": [{"te\n\n', "more_body": True})
        return fault.kind not in ("disconnect", "malformed")

    def _field(self, text: str, name: str) -> dict[str, Any]:
        return {"text": text} if self._api == "completions" else {name: {"content": text}}

    def _reason(self) -> str:
        return "length" if len(self._sent) == self._limit else "stop"

    def _usage(self) -> dict[str, int]:
        prompt, output = count_tokens(self._text), len(self._sent)
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


async def _event(send: Send, chunk: dict[str, Any]) -> None:
    data = json.dumps(chunk | {"id": "replay", "object": "chunk", "created": 0, "model": "replay"})
    await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})


async def _left(receive: Receive) -> None:
    """Return when the caller has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass

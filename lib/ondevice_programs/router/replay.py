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
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ondevice_programs.router.request import LIMITS, Api, Message, count_tokens, message_text

# Chosen to be awkward on the way: quotes, line breaks, several bytes a character, an event stream's own marks.
WORDS = (
    " the", " of", " and", " token", " device", " server", " stream", " answer", " 7", " 42", ",", ".", "\n", "\n\n",
    ' "quoted"', " back\\slash", " naïve", " größer", " 数据", "流", " 🚀", "\U0001f469\u200d\U0001f52c", " data:",
    " [DONE]", "\r\n", "\t", " {}", "é", " null", " prefill", " decode", " migrate",
)  # fmt: skip
END_ONE_IN = 200  # chance of ending after a token, so that an answer has 200 tokens on average

_HEAD = {"id": "replay", "created": 0, "model": "replay"}
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
            text = prompt_of(api, body)
            number = seen.requests
            seen.requests += 1
            seen.asked.append(text)
            wrong = (fault(number) if fault else None) or Fault("delay")
            if wrong.kind in ("429", "500"):
                later = {"retry-after": "7"} if wrong.kind == "429" else None
                return JSONResponse({"error": {"message": "as asked"}}, int(wrong.kind), later)
            if wrong.kind == "html":
                return HTMLResponse("<!doctype html><title>Not an API</title>")
            wait = timing.ttft[number % len(timing.ttft)] + count_tokens(text) / timing.prefill_rate + wrong.seconds
            reply = _Reply(
                api, text, body, answer(text, body.get("max_tokens", body.get("max_completion_tokens")), voice)
            )
            if not body.get("stream"):
                await asyncio.sleep(wait + timing.tbt * max(0, len(reply.tokens) - 1))
                seen.finished += 1
                return JSONResponse(reply.whole())
            return StreamingResponse(reply.events(wait, timing.tbt, wrong, seen), media_type="text/event-stream")

        return handle

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "replay", "object": "model"}]})

    app = Starlette(
        routes=[
            Route("/v1/completions", handler("completions"), methods=["POST"]),
            Route("/v1/chat/completions", handler("chat"), methods=["POST"]),
            Route("/v1/models", models),
        ]
    )
    app.state.seen = seen
    return app


@dataclass(frozen=True)
class _Reply:
    """One answer. tokens: all of it."""

    api: Api
    text: str
    body: dict[str, Any]
    tokens: list[str]

    async def events(self, wait: float, tbt: float, wrong: Fault, seen: Seen) -> AsyncIterator[str]:
        """The first token at `wait`, the others on a grid of `tbt` from there, until the fault's token has come."""
        loop = asyncio.get_running_loop()
        due = loop.time() + wait
        at = wrong.at if wrong.kind != "delay" else -1
        try:
            for sent, token in enumerate([*self.tokens, None]):
                await asyncio.sleep(max(0.0, due - loop.time()) if token is not None or not sent else 0.0)
                due += tbt
                if sent == at:
                    if wrong.kind == "stall":
                        await asyncio.Event().wait()
                    if wrong.kind == "malformed":
                        yield 'data: {"choices": [{"te\n\n'
                    return
                yield self._event("" if token is None else token, self._reason() if token is None else None)
            if (self.body.get("stream_options") or {}).get("include_usage"):
                yield f"data: {json.dumps(_HEAD | {'choices': [], 'usage': self._usage()})}\n\n"
            seen.finished += 1
            yield "data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            seen.disconnected += 1
            raise

    def whole(self) -> dict[str, Any]:
        choice = {"index": 0, "finish_reason": self._reason(), **self._field("".join(self.tokens), "message")}
        return _HEAD | {"choices": [choice], "usage": self._usage()}

    def _event(self, text: str, reason: str | None) -> str:
        choice = {"index": 0, "finish_reason": reason, **self._field(text, "delta")}
        return f"data: {json.dumps(_HEAD | {'object': 'chunk', 'choices': [choice]})}\n\n"

    def _field(self, text: str, name: str) -> dict[str, Any]:
        return {"text": text} if self.api == "completions" else {name: {"role": "assistant", "content": text}}

    def _reason(self) -> str:
        return "length" if len(self.tokens) in (self.body.get(name) for name in LIMITS) else "stop"

    def _usage(self) -> dict[str, int]:
        prompt = count_tokens(self.text)
        output = len(self.tokens)
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}

"""An OpenAI-compatible endpoint whose times one names, over a text that is always the same: no model is needed."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import cycle, islice

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ondevice_programs.router.request import Message, count_tokens, message_text

# Chosen to be awkward on the way: quotes, line breaks, several bytes a character, an event stream's own marks.
WORDS = (
    " the", " of", " and", " token", " device", " server", " stream", " answer", " 7", " 42", ",", ".", "\n", "\n\n",
    ' "quoted"', " back\\slash", " naïve", " größer", " 数据", "流", " 🚀", "\U0001f469\u200d\U0001f52c", " data:",
    " [DONE]", "\r\n", "\t", " {}", "é", " null", " prefill", " decode", " migrate",
)  # fmt: skip
END_ONE_IN = 200  # chance of ending after a token, so that an answer has 200 tokens on average


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
    match = re.search(rf"\b{cut[0]}([a-z]{{5,}})\b", text) if cut else None
    if match:
        yield match[1]
        text += match[1]
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
    return list(islice(continuation(text, voice), max_tokens))


def create_replay(ttft: Sequence[float] = (0.0,), tbt: float = 0.0) -> Starlette:
    """The endpoint. ttft: seconds to the first token, one a request, in turn. tbt: seconds between tokens."""
    waits = cycle(ttft)

    async def chat(http: Request) -> Response:
        body = await http.json()
        prefix = body["messages"].pop()["content"] if body.get("continue_final_message") else ""
        text, limit = plain_chat(body["messages"]) + prefix, body.get("max_tokens", body.get("max_completion_tokens"))
        tokens = answer(text, limit)
        prompt, output = count_tokens(text), len(tokens)
        usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
        reason = "length" if len(tokens) == limit else "stop"
        head = {"id": "replay", "created": 0, "model": "replay"}
        loop = asyncio.get_running_loop()
        first = loop.time() + next(waits)

        def chunk(content: str, reason: str | None = None) -> str:
            choice = {"index": 0, "finish_reason": reason, "delta": {"role": "assistant", "content": content}}
            return f"data: {json.dumps(head | {'object': 'chat.completion.chunk', 'choices': [choice]})}\n\n"

        async def events() -> AsyncIterator[str]:
            for number, token in enumerate(tokens):
                await asyncio.sleep(max(0.0, first + number * tbt - loop.time()))
                yield chunk(token)
            yield chunk("", reason)
            if (body.get("stream_options") or {}).get("include_usage"):
                yield f"data: {json.dumps(head | {'choices': [], 'usage': usage})}\n\n"
            yield "data: [DONE]\n\n"

        if body.get("stream"):
            return StreamingResponse(events(), media_type="text/event-stream")
        await asyncio.sleep(first - loop.time() + tbt * max(0, len(tokens) - 1))
        message = {"role": "assistant", "content": "".join(tokens)}
        choices = [{"index": 0, "finish_reason": reason, "message": message}]
        return JSONResponse(head | {"object": "chat.completion", "choices": choices, "usage": usage})

    return Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])

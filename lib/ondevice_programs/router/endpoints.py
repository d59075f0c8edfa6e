"""The client of one deployment: asks it over HTTP and reads the stream of its answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol
from urllib.parse import urlsplit

import aiohttp

from ondevice_programs.router.config import Deployment, is_loopback
from ondevice_programs.router.request import Json, Message, Request

LONGEST_LINE = 1 << 20  # bytes; a stream without line breaks is not an event stream
USAGE_GRACE_S = 1.0  # after the finish reason, how long the usage and [DONE] may take
CLOSE_GRACE_S = 0.25  # after [DONE], how long the body's end may take (reading it lets the connection be reused)


@dataclass(frozen=True)
class Piece:
    """One chunk of an answer. raw: the chunk itself where it holds more than text (tool calls, reasoning, ...)."""

    text: str
    raw: Json | None = None


@dataclass(frozen=True)
class Usage:
    """Tokens as the endpoint counted them."""

    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Finish:
    """The answer is complete."""

    reason: str
    usage: Usage | None = None


@dataclass(eq=False)
class EndpointError(Exception):
    """An endpoint failed. status, body, retry_after: of its HTTP answer, if it sent one. reached: it was."""

    message: str
    status: int | None = None
    body: Json | None = None
    retry_after: str | None = None
    reached: bool = True

    def __str__(self) -> str:
        return self.message


OnEvent = Callable[[Piece | Finish], None]


class Source(Protocol):
    """What the router needs of an endpoint; EndpointClient is the real one, tests have others."""

    async def ask(self, request: Request, prefix: str, limits: Mapping[str, int], on_event: OnEvent) -> Finish: ...

    async def alive(self) -> bool: ...

    async def aclose(self) -> None: ...


class EndpointClient:
    """Streams answers from one deployment over one pool of connections that are kept open between requests.

    Raises ValueError or OSError where the deployment's tokenizer cannot be read.
    """

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._base = deployment.litellm_params.api_base
        self._headers = {
            "content-type": "application/json",
            "accept": "text/event-stream",
            "accept-encoding": "identity",
        }
        if deployment.litellm_params.api_key:
            self._headers["authorization"] = f"Bearer {deployment.litellm_params.api_key}"
        path = "completions" if deployment.model_info.api == "completions" else "chat/completions"
        self._url = f"{self._base}/{path}"
        self._render = _template(deployment)

    async def ask(self, request: Request, prefix: str, limits: Mapping[str, int], on_event: OnEvent) -> Finish:
        """Stream the answer that follows `prefix`, of at most `limits` tokens; EndpointError if it breaks off.

        on_event gets each Piece as it comes, then a Finish once the answer is complete; the Finish that is returned
        a little later also holds the usage.
        """
        body = json.dumps(self.body(request, prefix, limits), ensure_ascii=False).encode("utf-8", "surrogatepass")
        events = _EventReader(on_event, bool(request.pinned))
        headers = {**request.headers, **self._headers}
        try:
            async with self._http.post(self._url, data=body, headers=headers, allow_redirects=False) as response:
                await _check(response, "application/json" if request.whole else "text/event-stream")
                if request.whole:
                    return _whole(await response.read(), on_event)
                return await events.read(response)
        except (aiohttp.ClientError, OSError) as error:
            if events.finish is not None:
                return events.finish
            reached = not isinstance(error, aiohttp.ClientConnectorError)
            said = f"{self._base}: {type(error).__name__}: {error or 'no details'}".rstrip(".")
            raise EndpointError(said, reached=reached) from None
        except EndpointError as error:
            error.message = f"{self._base}: {error}"
            raise

    async def alive(self) -> bool:
        """Whether it answers GET /models."""
        try:
            async with asyncio.timeout(2.0), self._http.get(f"{self._base}/models", headers=self._headers) as response:
                return response.status < 500
        except (aiohttp.ClientError, OSError):
            return False

    async def aclose(self) -> None:
        await self._http.close()

    def body(self, request: Request, prefix: str, limits: Mapping[str, int]) -> Json:
        """The JSON body that asks to continue the request's answer after `prefix` ("" for a fresh start)."""
        body: Json = {**request.options, **limits, "model": self._deployment.model, "stream": not request.whole}
        if not request.whole:
            body["stream_options"] = {**(request.options.get("stream_options") or {}), "include_usage": True}
        if self._deployment.model_info.api == "completions":
            if request.messages is not None:
                body["max_tokens"] = body.pop("max_completion_tokens", body.get("max_tokens"))
            body["prompt"] = (self._render(request.messages) if request.messages else request.prompt or "") + prefix
        else:
            body["messages"] = [*(request.messages or ())]
            if prefix:
                body["messages"] += [{"role": "assistant", "content": prefix}]
                body |= {"continue_final_message": True, "add_generation_prompt": False}
        return {name: value for name, value in body.items() if value is not None}

    @cached_property
    def _http(self) -> aiohttp.ClientSession:
        """The connections, made on first use: they belong to the event loop that runs then."""
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60.0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),  # the session's timers cover every stage
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=not is_loopback(urlsplit(self._base).hostname or ""),  # a proxy is for the outside world only
        )


def _template(deployment: Deployment) -> Callable[[Sequence[Message]], str]:
    folder = deployment.model_info.tokenizer
    if folder is None:
        return lambda _: ""
    from transformers import AutoTokenizer  # takes seconds

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return lambda messages: tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)


async def _check(response: aiohttp.ClientResponse, expected: str) -> None:
    if response.status != 200:
        body = _json(await response.content.read(LONGEST_LINE))
        said = body.get("error") or body.get("detail") if body else None
        message = f"HTTP {response.status}{f': {_short(said)}' if said else ''}"
        raise EndpointError(message, response.status, body, response.headers.get("retry-after"))
    kind = response.headers.get("content-type", "no content type").partition(";")[0].strip()
    if kind != expected:
        raise EndpointError(f"answered {kind} instead of {expected}; is this an OpenAI-compatible base URL?")


class _EventReader:
    """Reads one event stream (text/event-stream with a JSON object or [DONE] in each data line).

    verbatim: hand on every chunk as it came, for answers that are more than one text.
    """

    def __init__(self, on_event: OnEvent, verbatim: bool) -> None:
        self.finish: Finish | None = None
        self._on_event = on_event
        self._verbatim = verbatim
        self._reason: str | None = None
        self._usage: Usage | None = None
        self._done = False

    async def read(self, response: aiohttp.ClientResponse) -> Finish:
        clock = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(None) as limit:
                pending = b""
                async for block in response.content.iter_any():
                    *lines, pending = (pending + block).split(b"\n")
                    for line in lines:
                        if line.startswith(b"data:"):
                            self._event(line[5:].strip())
                    if len(pending) > LONGEST_LINE:
                        raise EndpointError("sent a line of more than 1 MiB")
                    if self.finish is not None:
                        limit.reschedule(clock() + (CLOSE_GRACE_S if self._done else USAGE_GRACE_S))
        except TimeoutError:
            pass  # the limit is set only once the answer is complete
        if self.finish is None and self._reason is None:
            raise EndpointError("ended the stream before the answer was finished")
        return Finish(self._reason or "stop", self._usage)

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._done = True
            self._complete()
            return
        try:
            chunk = json.loads(data)
            if chunk.get("error"):
                raise EndpointError(f"broke off with the error {_short(chunk['error'])}")
            self._usage = _usage(chunk) or self._usage
            choices = chunk.get("choices")
            if choices:
                self._choice(chunk, choices[0])
        except (ValueError, TypeError, KeyError, AttributeError):
            raise EndpointError(f"sent a malformed chunk: {_short(data.decode('utf-8', 'replace'))}") from None

    def _choice(self, chunk: Json, choice: Json) -> None:
        delta = choice.get("delta")
        text = choice.get("text") if delta is None else delta.get("content")
        if text is not None and not isinstance(text, str):
            raise TypeError
        reason = choice.get("finish_reason")
        more = delta is not None and any(value for name, value in delta.items() if name not in ("role", "content"))
        if more or (self._verbatim and (text or reason)):
            self._on_event(Piece(text or "", chunk))
        elif text:
            self._on_event(Piece(text))
        self._reason = reason or self._reason
        if reason and not self._verbatim:  # of several choices, others may still be running
            self._complete()

    def _complete(self) -> None:
        if self.finish is None:
            self.finish = Finish(self._reason or "stop", self._usage)
            self._on_event(self.finish)


def _whole(body: bytes, on_event: OnEvent) -> Finish:
    reply = _json(body) or {}
    try:
        finish = Finish(reply["choices"][0].get("finish_reason") or "stop", _usage(reply))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        raise EndpointError("answered something other than a completion") from None
    on_event(Piece("", reply))
    return finish


def _usage(chunk: Json) -> Usage | None:
    usage = chunk.get("usage")
    return Usage(int(usage["prompt_tokens"]), int(usage["completion_tokens"])) if usage else None


def _json(body: bytes) -> Json | None:
    try:
        found = json.loads(body)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _short(said: object) -> str:
    text = str(said.get("message", said) if isinstance(said, dict) else said)
    return text if len(text) <= 200 else text[:200] + "..."

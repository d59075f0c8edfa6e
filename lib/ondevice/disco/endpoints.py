"""An OpenAI-compatible endpoint, and the client that streams an answer from it."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

import aiohttp

from ondevice.disco.request import Api, Message, Request, plain_chat

Side = Literal["device", "server"]
SIDES: tuple[Side, Side] = ("device", "server")
Json = dict[str, Any]

LONGEST_LINE = 1 << 20  # bytes; a stream without line breaks is not an event stream
USAGE_GRACE_S = 1.0  # after the finish reason, how long the usage and [DONE] may take
CLOSE_GRACE_S = 0.25  # after [DONE], how long the body's end may take (reading it lets the connection be reused)


@dataclass(frozen=True)
class Endpoint:
    """Where one side answers. Prices are in any one currency (or energy) per token.

    url: the API's base, such as http://127.0.0.1:8000/v1 (a URL without a path gets /v1).
    api: what the endpoint is asked with: `completions` (prompt + prefix) or `chat` (prefix as the last message).
    can_continue: it continues a given prefix. On chat this needs `continue_final_message` (vLLM, TGI, llama.cpp);
        OpenAI's chat API and `transformers serve` lack it, the latter continues through /v1/completions.
    render: turns a conversation into a prompt, for chat requests to a completions endpoint.
    """

    url: str
    model: str | None = None
    api: Api = "completions"
    can_continue: bool = True
    price_prompt: float = 0.0
    price_output: float = 0.0
    api_key: str | None = None
    render: Callable[[Sequence[Message]], str] = plain_chat

    def __post_init__(self) -> None:
        if not re.fullmatch(r"https?://[^/?#\s]+(/[^?#\s]*)?", self.url):
            raise ValueError(f"{self.url!r} is not the http(s) URL of an API.")
        if self.api not in ("completions", "chat"):
            raise ValueError(f"An endpoint's api is 'completions' or 'chat', not {self.api!r}.")
        if self.price_prompt < 0 or self.price_output < 0:
            raise ValueError("A price per token is negative.")

    @property
    def base(self) -> str:
        base = self.url.rstrip("/")
        return base if urlsplit(base).path else f"{base}/v1"

    @property
    def loopback(self) -> bool:
        host = urlsplit(self.url).hostname or ""
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"


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


class EndpointError(Exception):
    """An endpoint failed. status: its HTTP status if it sent an error, else None."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


OnEvent = Callable[[Piece | Finish], None]


class Source(Protocol):
    """What the router needs of an endpoint; EndpointClient is the real one, tests have others."""

    endpoint: Endpoint

    async def ask(self, request: Request, prefix: str, max_tokens: int | None, on_event: OnEvent) -> Finish: ...

    async def aclose(self) -> None: ...


class EndpointClient:
    """Streams answers from one endpoint over one pool of connections that are kept open between requests."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._headers = {
            "content-type": "application/json",
            "accept": "text/event-stream",
            "accept-encoding": "identity",
        }
        if endpoint.api_key:
            self._headers["authorization"] = f"Bearer {endpoint.api_key}"
        self._url = f"{endpoint.base}/{'completions' if endpoint.api == 'completions' else 'chat/completions'}"
        self._http: aiohttp.ClientSession | None = None

    async def ask(self, request: Request, prefix: str, max_tokens: int | None, on_event: OnEvent) -> Finish:
        """Stream the answer that follows `prefix`; EndpointError if it breaks off.

        on_event gets each Piece as it comes, then a Finish once the answer is complete; the Finish that is returned
        a little later also holds the usage.
        """
        body = json.dumps(request_body(self.endpoint, request, prefix, max_tokens), ensure_ascii=False)
        events = _EventReader(on_event, bool(request.pinned))
        try:
            async with self._session().post(
                self._url, data=body.encode("utf-8", "surrogatepass"), headers=self._headers, allow_redirects=False
            ) as response:
                await _check(response, "application/json" if request.whole else "text/event-stream")
                if request.whole:
                    return _whole(await response.read(), on_event)
                return await events.read(response)
        except (aiohttp.ClientError, OSError) as error:
            if events.finish is not None:
                return events.finish
            raise EndpointError(f"{self._url}: {type(error).__name__}: {error or 'no details'}".rstrip(".")) from None
        except EndpointError as error:
            raise EndpointError(f"{self._url}: {error}", error.status) from None

    async def aclose(self) -> None:
        if self._http is not None:
            await self._http.close()

    def _session(self) -> aiohttp.ClientSession:
        """The connections, made on first use: they belong to the event loop that runs then."""
        if self._http is None:
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60.0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),  # the session's timers cover every stage
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=not self.endpoint.loopback,  # a proxy is for the outside world only
            )
        return self._http


async def _check(response: aiohttp.ClientResponse, expected: str) -> None:
    if response.status != 200:
        said = _reason(await response.content.read(LONGEST_LINE))
        raise EndpointError(f"HTTP {response.status}{said}", response.status)
    kind = response.headers.get("content-type", "no content type").partition(";")[0].strip()
    if kind != expected:
        raise EndpointError(f"answered {kind} instead of {expected}; is this an OpenAI-compatible base URL?")


def request_body(endpoint: Endpoint, request: Request, prefix: str, max_tokens: int | None) -> Json:
    """The JSON body that asks `endpoint` to continue the request's answer after `prefix` ("" for a fresh start)."""
    body: Json = {**request.options, "stream": not request.whole}
    if not request.whole:
        body["stream_options"] = {"include_usage": True}
    model = endpoint.model or request.model
    if model:
        body["model"] = model
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    if endpoint.api == "completions":
        body["prompt"] = (request.prompt or endpoint.render(request.messages or ())) + prefix
    else:
        body |= _chat(request, prefix)
    return body


def _chat(request: Request, prefix: str) -> Json:
    messages = list(request.messages or [{"role": "user", "content": request.prompt}])
    if not prefix:
        return {"messages": messages}
    messages.append({"role": "assistant", "content": prefix})
    return {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}


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
            self.finish = Finish(self._reason or "stop")
            self._on_event(self.finish)


def _whole(body: bytes, on_event: OnEvent) -> Finish:
    try:
        reply = json.loads(body)
        choice = reply["choices"][0]
        finish = Finish(choice.get("finish_reason") or "stop", _usage(reply))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        raise EndpointError("answered something other than a completion") from None
    on_event(Piece("", reply))
    return finish


def _usage(chunk: Json) -> Usage | None:
    usage = chunk.get("usage")
    return Usage(int(usage["prompt_tokens"]), int(usage["completion_tokens"])) if usage else None


def _reason(body: bytes) -> str:
    """What an error reply says, if it says it in JSON."""
    try:
        reply = json.loads(body)
    except ValueError:
        return ""
    said = reply.get("error", reply.get("detail", "")) if isinstance(reply, dict) else ""
    return f": {_short(said)}" if said else ""


def _short(said: object) -> str:
    text = str(said.get("message", said) if isinstance(said, dict) else said)
    return text if len(text) <= 200 else text[:200] + "..."

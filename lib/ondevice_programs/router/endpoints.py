"""The client of one endpoint: asks it over HTTP and reads the stream of its answer."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import cached_property
from math import isfinite
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from ondevice.network.listening import is_loopback
from ondevice_programs.router.config import Deployment
from ondevice_programs.router.request import ChatRequest, Json

LONGEST_LINE = 1 << 20  # bytes; a stream without line breaks is not an event stream
USAGE_GRACE_S = 1.0  # after the finish reason, how long the usage and [DONE] may take
LISTING_S = 2.0  # for the list of models
MEMBERS = ("id", "object", "created", "model", "choices", "usage", "disco")  # of a chunk, that the router writes itself
COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")
CLOSE_GRACE_S = 0.25  # after [DONE], how long the body's end may take (reading it lets the connection be reused)
GAVE_UP = ("abort", "error")  # reasons to have ended that are not the model's: the engine broke the answer off


@dataclass(frozen=True)
class AnswerChunk:
    """One chunk of an answer. raw: the chunk itself where it holds more than text (tool calls, reasoning, ...).

    others: of a chunk of text alone, the members that the router neither knows nor writes itself (system_fingerprint).
    """

    text: str
    raw: Json | None = None
    others: Json = field(default_factory=dict)


class Alive:
    """The endpoint said that it works on the answer: a comment or an empty event of its stream, which is no silence."""


@dataclass(frozen=True)
class Usage:
    """Tokens as the endpoint counted them. details: what else it said of them."""

    prompt_tokens: int
    output_tokens: int
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Finish:
    """The answer is complete. others: as of an `AnswerChunk`, the newest of all its chunks."""

    reason: str
    usage: Usage | None = None
    others: Json = field(default_factory=dict)


@dataclass(eq=False)
class EndpointError(Exception):
    """An endpoint failed. status, body, retry_after (s): of its HTTP answer, if it sent one. reached: it was."""

    message: str
    status: int | None = None
    body: Json | None = None
    retry_after: float | None = None
    reached: bool = True

    def __str__(self) -> str:
        return self.message


OnEvent = Callable[[AnswerChunk | Finish | Alive], None]


class EndpointClient:
    """Streams answers from one endpoint over one pool of connections that are kept open between requests."""

    def __init__(self, deployment: Deployment) -> None:
        self._base = deployment.litellm_params.api_base
        self._headers = {
            "content-type": "application/json",
            "accept": "text/event-stream",
            "accept-encoding": "identity",
        }
        if deployment.litellm_params.api_key:
            self._headers["authorization"] = f"Bearer {deployment.litellm_params.api_key}"
        self._tells_usage = deployment.model_info.stream_options  # until it refuses the question
        self._models = [deployment.model] if deployment.model else None  # None until it has been asked for them

    async def ask(self, request: ChatRequest, prefix: str, limits: Mapping[str, int], on_event: OnEvent) -> Finish:
        """Stream the answer that follows `prefix`, of at most `limits` tokens; EndpointError if it breaks off.

        on_event gets each chunk as it comes, then a Finish once the answer is complete; the Finish that is returned
        a little later also holds the usage. An endpoint that refuses `stream_options` is asked without, then and later.
        """
        if self._models is None:
            self._models = await self._listed()
        models = self._models or []
        if len(models) > 1 and request.model not in models:
            message = f"{self._base}: it has {len(models)} models, such as {models[0]}; name the one to ask for"
            raise EndpointError(message, reached=False)
        tells_usage = self._tells_usage  # other requests may find out meanwhile
        try:
            return await self._ask(request, prefix, limits, on_event)
        except EndpointError as error:
            refused = error.status in (400, 422) and "stream_options" in f"{error} {error.body}"
            if not refused or not tells_usage:
                raise
            self._tells_usage = False
            return await self._ask(request, prefix, limits, on_event)

    async def _ask(self, request: ChatRequest, prefix: str, limits: Mapping[str, int], on_event: OnEvent) -> Finish:
        members = self._body(request, prefix, limits).items()
        body = f"{{{', '.join(f'{_dumped(name)}: {text}' for name, text in members)}}}".encode("utf-8", "surrogatepass")
        post = self._http.post(
            f"{self._base}/chat/completions",
            data=body,
            headers={**request.headers, **self._headers},
            allow_redirects=False,
        )
        try:
            async with post as response:
                await _check(response, "application/json" if request.whole else "text/event-stream")
                if request.whole:
                    return _whole(await response.read(), on_event)
                return await _EventReader(on_event, bool(request.pinned), request.answers).read(response)
        except (aiohttp.ClientError, OSError) as error:
            reached = not isinstance(error, aiohttp.ClientConnectorError)
            message = f"{self._base}: {type(error).__name__}: {error or 'no details'}".rstrip(".")
            raise EndpointError(message, reached=reached) from None
        except EndpointError as error:
            error.message = f"{self._base}: {error}"
            raise

    async def _listed(self) -> list[str] | None:
        """The models that it lists. One that has no list, or an empty one, is asked for no model by name.

        Any other answer, as of a server that still loads its model, is None: the next request looks once more.
        """
        url = f"{self._base}/models"
        try:
            async with asyncio.timeout(LISTING_S), self._once.get(url, headers=self._headers) as response:
                listed = _json(await response.content.read(LONGEST_LINE))
            if response.status != 404 and (response.status != 200 or listed is None):
                return None
            return [str(entry["id"]) for entry in (listed or {}).get("data") or []]
        except (aiohttp.ClientError, OSError, TypeError, KeyError):
            return None  # the answer's request says what is wrong

    async def alive(self) -> bool:
        """Whether it answers GET /models."""
        try:
            async with asyncio.timeout(2.0), self._once.get(f"{self._base}/models", headers=self._headers) as response:
                return response.status < 500
        except (aiohttp.ClientError, OSError):
            return False

    async def aclose(self) -> None:
        """Close its connections."""
        await self._http.close()
        await self._once.close()

    def _body(self, request: ChatRequest, prefix: str, limits: Mapping[str, int]) -> dict[str, str]:
        """The JSON that asks to continue the request's answer after `prefix` ("" for a fresh start), by its members.

        The caller's are as they came, but for those that the router decides on.
        """
        own = request.texts or {name: _dumped(value) for name, value in request.options.items() if value is not None}
        messages = own.get("messages") or _dumped(request.messages)
        models = self._models or []
        model = request.model if request.model in models else next(iter(models), None)
        decided: Json = {**limits, "stream": not request.whole} | ({"model": model} if model else {})
        if not request.whole and self._tells_usage:
            decided["stream_options"] = {**(request.options.get("stream_options") or {}), "include_usage": True}
        if prefix:
            messages = f"{messages[:-1]}, {_dumped({'role': 'assistant', 'content': prefix})}]"
            decided |= {"continue_final_message": True, "add_generation_prompt": False}
        unsent = {"stream_options"} if model else {"stream_options", "model"}
        body = {name: text for name, text in own.items() if name not in unsent}
        return body | {name: _dumped(value) for name, value in decided.items()} | {"messages": messages}

    @cached_property
    def _http(self) -> aiohttp.ClientSession:
        """The connections, made on first use: they belong to the event loop that runs then."""
        return self._session(keepalive_timeout=60.0)

    @cached_property
    def _once(self) -> aiohttp.ClientSession:
        """For lists of models. Some servers close the connection behind an error there, and an answer would meet it."""
        return self._session(force_close=True)

    def _session(self, **connections: Any) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, **connections),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),  # the session's timers cover every stage
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=not is_loopback(urlsplit(self._base).hostname or ""),  # a proxy is for the outside world only
        )


async def _check(response: aiohttp.ClientResponse, expected: str) -> None:
    kind = response.headers.get("content-type", "no content type").partition(";")[0].strip().lower()
    if response.status == 200 and kind == expected:
        return
    answers_json = response.status != 200 or kind == "application/json"  # some errors come with status 200
    body = _json(await response.content.read(LONGEST_LINE)) if answers_json else None
    detail = body.get("error") or body.get("detail") if body else None
    if response.status != 200 or detail:
        message = f"HTTP {response.status}{f': {_short(detail)}' if detail else ''}"
        raise EndpointError(message, response.status, body, _retry_after(response.headers))
    raise EndpointError(f"answered {kind} instead of {expected}; is this an OpenAI-compatible base URL?")


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds: of `retry-after-ms`, else of `Retry-After` in seconds or as a date; None where none can be read."""
    readings: list[Callable[[], float]] = [
        lambda: float(headers["retry-after-ms"]) / 1e3,
        lambda: float(headers["retry-after"]),
        lambda: parsedate_to_datetime(headers["retry-after"]).timestamp() - time.time(),
    ]
    for reading in readings:
        with suppress(KeyError, ValueError):
            if isfinite(seconds := reading()):
                return max(0.0, seconds)
    return None


class _EventReader:
    """Reads one event stream (text/event-stream with a JSON object or [DONE] in each data line).

    verbatim: hand on every chunk as it came, for answers that are more than one text. answers: how many choices.
    """

    def __init__(self, on_event: OnEvent, verbatim: bool, answers: int) -> None:
        self._on_event = on_event
        self._verbatim = verbatim
        self._running = set(range(answers))  # choices without a reason to have ended
        self._begun: set[int] = set()  # choices that said anything
        self._finish = Finish("stop")  # as far as it is known
        self._complete = self._done = False

    async def read(self, response: aiohttp.ClientResponse) -> Finish:
        clock = asyncio.get_running_loop().time
        pending = b""
        try:
            async with asyncio.timeout(None) as limit:
                async for block in response.content.iter_any():
                    *lines, pending = (pending + block).split(b"\n")
                    for line in lines:
                        if line.startswith(b":") or line.strip() == b"data:":
                            self._on_event(Alive())
                        elif line.startswith(b"data:"):
                            self._event(line[5:].strip())
                        elif line.startswith(b"error:"):  # llama.cpp, until September 2025
                            detail = _json(line[6:]) or line[6:].decode("utf-8", "replace")
                            raise EndpointError(f"broke off with the error {_short(detail)}")
                    if len(pending) > LONGEST_LINE:
                        raise EndpointError("sent a line of more than 1 MiB")
                    if self._complete:
                        limit.reschedule(clock() + (CLOSE_GRACE_S if self._done else USAGE_GRACE_S))
        # TimeoutError is an OSError: the limit is set once the answer is complete, after which nothing spoils it.
        except (aiohttp.ClientError, OSError, EndpointError):
            if not self._complete:
                raise
        if not self._complete and self._running:
            raise EndpointError("ended the stream before the answer was finished")
        return self._finish

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            # Some endpoints give no reason to have ended, but then for none of the choices.
            ended = self._begun - self._running
            if not self._begun or (ended and self._begun != ended):
                raise EndpointError("ended the stream before the answer was finished")
            self._done = True
            self._end()
            return
        try:
            chunk = _parsed(data)
            choices = chunk.get("choices") or [{}]
            error, usage = _error(chunk, choices), _usage(chunk)
            deltas = [_delta(choice) for choice in (choices if self._verbatim else choices[:1])]
        except (ValueError, TypeError, KeyError, AttributeError):
            raise EndpointError(f"sent a malformed chunk: {_short(data.decode('utf-8', 'replace'))}") from None
        if error:
            raise EndpointError(f"broke off with the error {_short(error)}")
        self._begun |= {index for index, text, extra, reason in deltas if text or extra or reason}
        reasons = {index: reason for index, _, _, reason in deltas if reason}
        text = "".join(text for _, text, _, _ in deltas)
        others = {name: value for name, value in chunk.items() if name not in MEMBERS and value is not None}
        self._finish = Finish(
            next(iter(reasons.values()), self._finish.reason),
            usage or self._finish.usage,
            self._finish.others | others,
        )
        if any(extra for _, _, extra, _ in deltas) or (self._verbatim and (text or reasons)):
            self._on_event(AnswerChunk(text, chunk))
        elif text:
            self._on_event(AnswerChunk(text, None, others))
        if reasons:
            self._running -= reasons.keys()
            if not (self._verbatim and self._running):  # of several choices, others may still be running
                self._end()

    def _end(self) -> None:
        if not self._complete:
            self._complete = True
            self._on_event(self._finish)


def _whole(body: bytes, on_event: OnEvent) -> Finish:
    reply = _json(body) or {}
    try:
        choices = reply.get("choices") or [{}]
        error, usage = _error(reply, choices), _usage(reply)
        reasons = [choice.get("finish_reason") for choice in choices]
        if not (any(choices) or error):
            raise ValueError
    except (ValueError, TypeError, KeyError, AttributeError):
        raise EndpointError("answered something other than a completion") from None
    if error:
        raise EndpointError(f"broke off with the error {_short(error)}")
    if any(reasons) and not all(reasons):  # some endpoints give no reason to have ended, but then for no choice
        raise EndpointError("ended the answer before all choices were finished")
    on_event(AnswerChunk("", reply))
    return Finish(reasons[0] or "stop", usage)


def _delta(choice: Json) -> tuple[int, str, bool, str | None]:
    """(index, text, whether it holds more than text, reason to have ended) of a choice. TypeError on odd ones.

    Its `message`, as some endpoints call it in a stream as well, is its `delta` from here on.
    """
    if choice.get("delta") is None:
        choice["delta"] = choice.pop("message", None) or {}
    delta = choice["delta"]
    text, reason, index = delta.get("content") or "", choice.get("finish_reason"), choice.get("index") or 0
    if not isinstance(text, str) or type(index) is not int:
        raise TypeError
    return index, text, any(value for name, value in delta.items() if name not in ("role", "content")), reason


def _error(chunk: Json, choices: list[Json]) -> object:
    """What an endpoint says went wrong after its status 200; None where nothing did."""
    for choice in choices:
        reason = choice.get("finish_reason")
        if error := choice.get("error") or (f"finish_reason {reason}" if reason in GAVE_UP else None):
            return chunk.get("error") or error
    return chunk.get("error")


def _usage(chunk: Json) -> Usage | None:
    """What the endpoint counted; None where it says nothing, or not both numbers."""
    usage = chunk.get("usage")
    if not isinstance(usage, dict):
        return None
    prompt, output = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if type(prompt) is not int or type(output) is not int:  # true and false are no counts
        return None
    if not 0 <= min(prompt, output) <= max(prompt, output) < 1 << 53:  # what a float holds
        return None
    details = {name: value for name, value in usage.items() if name not in COUNTS and value is not None}
    return Usage(prompt, output, details)


def _parsed(body: bytes) -> Any:
    """JSON, with null for the NaN and infinities that some endpoints write. Raises ValueError."""
    try:
        return json.loads(body, parse_constant=lambda _: None)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _json(body: bytes) -> Json | None:
    try:
        parsed = _parsed(body)
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) else None


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _short(detail: object) -> str:
    text = str(detail.get("message", detail) if isinstance(detail, dict) else detail)
    return text if len(text) <= 200 else text[:200] + "..."

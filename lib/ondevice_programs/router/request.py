"""What a user asks: a conversation, and whether its answer may change endpoint half-way."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic import PositiveInt as Count
from starlette.exceptions import HTTPException

from ondevice_programs.router.config import first_mistake

Message = Mapping[str, Any]
Json = dict[str, Any]

LIMITS = ("max_tokens", "max_completion_tokens")
PART_TOKENS = 765  # of an image of 1,024 by 1,024 pixels in OpenAI's count; other parts count as much, until corrected
# Fields of the OpenAI schema that this module reads itself; all others are handed to the endpoint as they came.
OWN_FIELDS = {"model", "messages", "stream", *LIMITS}
# With one of these the answer is more than a text that can be continued, or depends on one model's vocabulary.
PINNING_FIELDS = (
    "tools", "functions", "logprobs", "top_logprobs", "logit_bias", "prompt_logprobs", "echo", "modalities", "audio",
    "guided_json", "guided_regex", "guided_grammar", "guided_choice", "structured_outputs", "grammar", "json_schema",
    "continue_final_message",
)  # fmt: skip


class BadRequest(HTTPException):
    """The request cannot be served by any endpoint; `param` names the field at fault, `code` the kind of fault."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(status, message)
        self.param, self.code = param, code


@dataclass(frozen=True)
class Request:
    """One request. messages: the conversation. options: all that goes to the endpoint as it came.

    limits: what bounds the answer's tokens, under the caller's own names. headers: for the endpoint.
    streamed: as the caller wants it.
    """

    messages: tuple[Message, ...]
    limits: Mapping[str, int] = field(default_factory=dict)
    model: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    streamed: bool = True

    @property
    def whole(self) -> bool:
        """Whether the endpoint is asked for one JSON answer, which is passed on as it came."""
        return not self.streamed and self.pinned is not None

    @property
    def answers(self) -> int:
        """How many choices are asked for."""
        return self.options.get("n") or 1

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end the answer where one endpoint's text and another's make them together."""
        stop = self.options.get("stop") or ()
        texts = (stop,) if isinstance(stop, str) else tuple(stop)
        return () if self.pinned else tuple(filter(None, texts))

    @property
    def max_tokens(self) -> int | None:
        return min(self.limits.values(), default=None)

    @cached_property
    def tokens(self) -> int:
        """Of the conversation with all that is sent along, estimated."""
        texts = map(message_text, self.messages)
        calls = [message["tool_calls"] for message in self.messages if message.get("tool_calls")]
        given = [self.options[name] for name in ("tools", "functions", "response_format") if self.options.get(name)]
        text = "\n".join(filter(None, [*texts, *map(json.dumps, [*calls, *given])]))
        parts = [part for message in self.messages for part in _parts(message)]
        return count_tokens(text) + PART_TOKENS * sum(not _is_text_part(part) for part in parts)

    @cached_property
    def pinned(self) -> str | None:
        """Why the answer must come from one endpoint, or None when another may continue it."""
        for name in PINNING_FIELDS:
            if self.options.get(name):
                return name
        if self.answers > 1:
            return "n > 1"
        if (self.options.get("response_format") or {}).get("type", "text") != "text":
            return "response_format"
        if not all(map(_is_text, self.messages)):
            return "a message that is not text"
        return None


class _Message(BaseModel):
    role: str
    content: str | list[Any] | None = None


class _Body(BaseModel):
    """The fields that are read here; all others are the endpoint's matter."""

    model_config = ConfigDict(strict=True)

    messages: Annotated[list[_Message], Field(min_length=1)]
    model: str | None = None
    n: Count | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stop: list[str] | str | None = None
    response_format: Json | None = None
    stream_options: Json | None = None


def parse(payload: Any) -> Request:
    """A request from the JSON body of POST /v1/chat/completions; BadRequest says what is wrong."""
    try:
        body = _Body.model_validate(payload)
    except ValidationError as error:
        name, message = first_mistake(error)
        raise BadRequest(f"'{name}': {message}." if name else "The body is not a JSON object.", name or None) from None
    limits = {name: payload[name] for name in LIMITS if payload.get(name) is not None}
    options = {name: value for name, value in payload.items() if name not in OWN_FIELDS}
    request = Request(tuple(payload["messages"]), limits, body.model, options, streamed=bool(payload.get("stream")))
    if not any(map(message_text, request.messages)) and not request.pinned:
        raise BadRequest("The prompt is empty.", "messages")
    return request


def count_tokens(text: str) -> int:
    """A cheap estimate of a text's tokens: one per four UTF-8 bytes, at least one (about right for English BPE)."""
    return max(1, len(text.encode("utf-8", "surrogatepass")) // 4)


def message_text(message: Message) -> str:
    """The text of one chat message, whose content is a string or a list of parts."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part["text"] for part in content if _is_text_part(part))
    return content or ""


def _parts(message: Message) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _is_text(message: Message) -> bool:
    return all(map(_is_text_part, _parts(message))) and not message.get("tool_calls") and message["role"] != "tool"


def _is_text_part(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)

"""What a user asks: a conversation, and whether its answer may change endpoint half-way."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic import PositiveInt as Count
from starlette.exceptions import HTTPException

from ondevice_programs.router.config import first_mistake

Message = Mapping[str, Any]
Json = dict[str, Any]

LIMITS = ("max_tokens", "max_completion_tokens")
PART_TOKENS = 765  # of an image of 1,024 by 1,024 pixels in OpenAI's count; other parts count as much, until corrected
MOST_OF_A_PART = 100_000  # tokens of an image, a document or a recording
TEMPLATE_TOKENS = 8192  # of what an endpoint may put around a conversation, at most
# Fields of the OpenAI schema that this module reads itself; all others are handed to the endpoint as they came.
OWN_FIELDS = {"model", "messages", "stream", *LIMITS}
COUNTED_FIELDS = ("tools", "functions", "response_format")  # with the prompt, by their length
# With these another endpoint continues an answer as the first one would have. The latter ones may take tokens.
PLAIN_FIELDS = {
    "cache_prompt", "frequency_penalty", "ignore_eos", "metadata", "min_p", "n", "parallel_tool_calls",
    "presence_penalty", "priority", "prompt_cache_key", "reasoning_effort", "repetition_penalty", "safety_identifier",
    "seed", "service_tier", "skip_special_tokens", "stop", "stop_token_ids", "store", "stream_options", "temperature",
    "tool_choice", "top_k", "top_p", "typical_p", "user", "verbosity",
}  # fmt: skip
TEMPLATE_FIELDS = {"chat_template", "chat_template_kwargs", "documents"}
# With one of these the answer is more than a text that can be continued, or depends on one model's vocabulary. So may
# an answer with a field that is not known here.
PINNING_FIELDS = (
    "tools", "functions", "logprobs", "top_logprobs", "logit_bias", "prompt_logprobs", "echo", "modalities", "audio",
    "guided_json", "guided_regex", "guided_grammar", "guided_choice", "structured_outputs", "grammar", "json_schema",
    "continue_final_message",
)  # fmt: skip
# Of these, those that take no tokens.
FREE_FIELDS = {"logprobs", "top_logprobs", "logit_bias", "prompt_logprobs", "echo", "continue_final_message"}
_FIELDS = {*PLAIN_FIELDS, *TEMPLATE_FIELDS, *COUNTED_FIELDS, *PINNING_FIELDS}
LONGEST_NAME = 64  # characters of it in the log
PLAIN_KEYS = {"role", "content", "name", "refusal", "tool_calls", "tool_call_id"}  # of a message
_SPACE = re.compile(r"[ \t\n\r]*")


class BadRequest(HTTPException):
    """The request cannot be served by any endpoint; `param` names the field at fault, `code` the kind of fault."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(status, message)
        self.param, self.code = param, code


@dataclass(frozen=True)
class ChatRequest:
    """One request. messages: the conversation. options: all that goes to the endpoint as it came.

    limits: what bounds the answer's tokens, under the caller's own names. headers: for the endpoint.
    streamed: as the caller wants it. texts: the body's fields in the caller's own JSON, which the endpoint gets.
    """

    messages: tuple[Message, ...]
    limits: Mapping[str, int] = field(default_factory=dict)
    model: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    streamed: bool = True
    texts: Mapping[str, str] = field(default_factory=dict)

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
        given = [self.options[name] for name in COUNTED_FIELDS if self.options.get(name)]
        text = "\n".join(filter(None, [*texts, *map(json.dumps, [*calls, *given])]))
        parts = [part for message in self.messages for part in _parts(message)]
        return count_tokens(text) + PART_TOKENS * sum(not _is_text_part(part) for part in parts)

    @cached_property
    def most_tokens(self) -> float:
        """More than any tokenizer makes of it: a token per byte, and what templates and parts may add.

        No bound where something in it may take tokens that cannot be known.
        """
        if self.uncounted and not all(name.startswith("messages.content.") for name in self.uncounted):
            return float("inf")
        sent = [*self.messages, *(self.options.get(name) for name in COUNTED_FIELDS)]
        parts = [part for message in self.messages for part in _parts(message) if not _is_text_part(part)]
        size = len(json.dumps(sent, ensure_ascii=False).encode("utf-8", "replace"))
        return size + TEMPLATE_TOKENS + MOST_OF_A_PART * len(parts)

    @property
    def uncounted(self) -> list[str]:
        """What may take tokens that `tokens` does not know, by its name: fields, keys of messages, kinds of parts."""
        free = {*COUNTED_FIELDS, *PLAIN_FIELDS, *FREE_FIELDS}
        names = [name for name, value in self.options.items() if value and name not in free]
        names += [f"messages.{key}" for message in self.messages for key in _unknown_keys(message)]
        parts = [part for message in self.messages for part in _parts(message) if not _is_text_part(part)]
        names += [f"messages.content.{part.get('type') if isinstance(part, dict) else None}" for part in parts]
        return list(dict.fromkeys(name[:LONGEST_NAME] for name in names))

    @cached_property
    def pinned(self) -> str | None:
        """Why the answer must come from one endpoint, or None when another may continue it."""
        for name, value in self.options.items():
            if (name in PINNING_FIELDS and value) or (name not in _FIELDS and value is not None):
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
    stream: bool | None = None
    stop: list[str] | str | None = None
    response_format: Json | None = None
    stream_options: Json | None = None


class _Refused(ValueError):
    """What JSON, or its reader, leaves open: the message says what a value is or has."""


def _constant(text: str) -> NoReturn:
    raise _Refused(f"{text} is no number of JSON")


def _object(pairs: list[tuple[str, Any]]) -> Json:
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        raise _Refused(f"the key {next(name for name in names if names.count(name) > 1)!r} stands twice")
    return members


_MEMBER = json.JSONDecoder(parse_constant=_constant, object_pairs_hook=_object)


def read(body: bytes) -> tuple[Any, dict[str, str]]:
    """The value of a JSON body, and of an object each member as it stands there, in its order.

    Raises BadRequest for what is no JSON, and for NaN, infinities and a key that stands twice, by the member's name.
    """
    try:
        text = body.decode(json.detect_encoding(body), "surrogatepass")
        payload = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"The body is not JSON: {error}.") from None
    texts: dict[str, str] = {}
    at = _next(text, text.index("{") + 1) if isinstance(payload, dict) and payload else 0
    while at and text[at] != "}":
        name, at = _MEMBER.raw_decode(text, at)
        begin = _next(text, _next(text, at) + 1)  # behind the colon
        try:
            _, end = _MEMBER.raw_decode(text, begin)
            if name in texts:
                raise _Refused("the key stands twice")
        except (_Refused, RecursionError) as error:
            raise BadRequest(f"'{name}': {error}.", name) from None
        texts[name] = text[begin:end]
        at = _next(text, end)
        at = _next(text, at + 1) if text[at] == "," else at
    return payload, texts


def _next(text: str, at: int) -> int:
    """Behind white space."""
    match = _SPACE.match(text, at)
    assert match is not None  # it may be empty
    return match.end()


def parse(payload: Any, texts: Mapping[str, str] | None = None) -> ChatRequest:
    """A request from the JSON body of POST /v1/chat/completions; BadRequest says what is wrong.

    texts: of `read`. Of the fields that are known here, those that are null are left out.
    """
    try:
        body = _Body.model_validate(payload)
    except ValidationError as error:
        name, message = first_mistake(error)
        raise BadRequest(f"'{name}': {message}." if name else "The body is not a JSON object.", name or None) from None
    limits = {name: payload[name] for name in LIMITS if payload.get(name) is not None}
    options = {name: value for name, value in payload.items() if name not in OWN_FIELDS}
    left = {name for name in payload if payload[name] is None and (name in _FIELDS or name in OWN_FIELDS)}
    own = {name: text for name, text in (texts or {}).items() if name not in left}
    streamed = bool(body.stream)
    request = ChatRequest(tuple(payload["messages"]), limits, body.model, options, streamed=streamed, texts=own)
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


def _unknown_keys(message: Message) -> list[str]:
    return [key for key, value in message.items() if value is not None and key not in PLAIN_KEYS]


def _is_text(message: Message) -> bool:
    tools = message.get("tool_calls") or message["role"] == "tool"
    return all(map(_is_text_part, _parts(message))) and not tools and not _unknown_keys(message)


def _is_text_part(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)

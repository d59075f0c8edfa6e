"""What a user asks: a prompt or a conversation, and whether its answer may change endpoint half-way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

Api = Literal["completions", "chat"]
Message = Mapping[str, Any]
Json = dict[str, Any]

LIMITS = ("max_tokens", "max_completion_tokens")
# Fields of the OpenAI schema that this module reads itself; all others are handed to the endpoint as they came.
OWN_FIELDS = {"model", "prompt", "messages", "stream", *LIMITS}
# With one of these the answer is more than a text that can be continued, or depends on one model's vocabulary.
PINNING_FIELDS = (
    "tools", "functions", "logprobs", "top_logprobs", "logit_bias", "prompt_logprobs", "echo", "suffix", "modalities",
    "audio", "guided_json", "guided_regex", "guided_grammar", "guided_choice", "structured_outputs", "grammar",
    "json_schema", "continue_final_message",
)  # fmt: skip


class BadRequest(ValueError):
    """The request cannot be served by any endpoint; `param` names the field at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class Request:
    """One request. Exactly one of prompt (completions) and messages (chat) is set; options go to the endpoint.

    limits: what bounds the answer's tokens, under the caller's own names. headers: for the endpoint.
    streamed: as the caller wants it.
    """

    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    limits: Mapping[str, int] = field(default_factory=dict)
    model: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    streamed: bool = True

    @property
    def api(self) -> Api:
        return "completions" if self.messages is None else "chat"

    @property
    def whole(self) -> bool:
        """Whether the endpoint is asked for one JSON answer, which is passed on as it came."""
        return not self.streamed and self.pinned is not None

    @property
    def max_tokens(self) -> int | None:
        return min(self.limits.values(), default=None)

    @cached_property
    def tokens(self) -> int:
        """Of the prompt, estimated."""
        return count_tokens(self.prompt or "\n".join(message_text(message) for message in self.messages or ()))

    @cached_property
    def pinned(self) -> str | None:
        """Why the answer must come from one endpoint, or None when another may continue it."""
        for name in PINNING_FIELDS:
            if self.options.get(name):
                return name
        for name in ("n", "best_of"):
            if self.options.get(name) not in (None, 1):
                return f"{name} > 1"
        if (self.options.get("response_format") or {}).get("type", "text") != "text":
            return "response_format"
        if any(not _is_text(message) for message in self.messages or ()):
            return "a message that is not text"
        return None


def parse(api: Api, payload: object) -> Request:
    """A request from the JSON body of POST /v1/completions or /v1/chat/completions; BadRequest says what is wrong."""
    if not isinstance(payload, dict):
        raise BadRequest("The body is not a JSON object.")
    options = {name: value for name, value in payload.items() if name not in OWN_FIELDS}
    model = payload.get("model")
    if model is not None and not isinstance(model, str):
        raise BadRequest("'model' is not a string.", "model")
    for name in ("response_format", "stream_options"):
        if not isinstance(options.get(name), dict | None):
            raise BadRequest(f"'{name}' is not an object.", name)
    for name in ("n", "best_of"):
        if not _counts(options.get(name, 1)):
            raise BadRequest(f"'{name}' is not a whole number of at least 1.", name)
    prompt, messages = (_prompt(payload), None) if api == "completions" else (None, _messages(payload))
    request = Request(prompt, messages, _limits(payload), model, options, streamed=bool(payload.get("stream")))
    empty = not request.prompt and not any(map(message_text, request.messages or ()))
    if empty and not request.pinned:
        raise BadRequest("The prompt is empty.", "prompt" if api == "completions" else "messages")
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


def _counts(value: object) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)


def _is_text(message: Message) -> bool:
    content = message.get("content")
    parts_are_text = all(_is_text_part(part) for part in content) if isinstance(content, list) else True
    return parts_are_text and not message.get("tool_calls") and message["role"] != "tool"


def _is_text_part(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _prompt(payload: Json) -> str:
    prompt = payload.get("prompt")
    if not isinstance(prompt, str):
        raise BadRequest("'prompt' is not a string; lists of prompts and token ids are not served.", "prompt")
    return prompt


def _messages(payload: Json) -> tuple[Message, ...]:
    messages = payload.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("'messages' is not a list of at least one message.", "messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRequest("A message is not an object with a 'role'.", "messages")
        if not isinstance(message.get("content"), str | list | None):
            raise BadRequest("A message's 'content' is neither a string nor a list of parts.", "messages")
    return tuple(messages)


def _limits(payload: Json) -> dict[str, int]:
    limits = {name: payload[name] for name in LIMITS if payload.get(name) is not None}
    for name, limit in limits.items():
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            raise BadRequest(f"'{name}' is not a whole number of at least 1.", name)
    return limits

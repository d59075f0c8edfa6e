"""What a caller's body becomes: fields as they came, refusals by name, and the names of what could not be counted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing import MESSAGES, deployment

from ondevice_programs.router.config import Deployment
from ondevice_programs.router.endpoints import EndpointClient
from ondevice_programs.router.request import OWN_FIELDS, BadRequest, ChatRequest, parse, read

CLIENT = EndpointClient(Deployment.model_validate(deployment("device")))
ASKED = json.dumps(MESSAGES)


def parsed(body: str) -> ChatRequest:
    return parse(*read(body.encode("utf-8", "surrogatepass")))


def sent(request: ChatRequest, prefix: str = "") -> dict[str, str]:
    """The members that an endpoint gets, as text."""
    return CLIENT._body(request, prefix, request.limits)


NUMBERS = st.sampled_from(["1.10", "1E5", "-0", "1e999", "12345678901234567890123", "0.1234567890123456789", "0.0"])
SPACES = st.sampled_from(["", " ", "\n\t "])
TEXTS = st.one_of(
    NUMBERS,
    st.sampled_from(["null", "true", "false", '"\\ud83d"', '"\\u00e4 ä 数"', "{}", "[ ]", '{"b" : 1,"a":[1 , 2]}']),
    st.recursive(
        st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda below: st.lists(below) | st.dictionaries(st.text(), below),
        max_leaves=8,
    ).flatmap(lambda value: st.sampled_from([json.dumps(value), json.dumps(value, indent=2, ensure_ascii=False)])),
)
NAMES = st.text(min_size=1).filter(lambda name: name not in {*OWN_FIELDS, "n", "stop", "response_format"})


@given(st.dictionaries(NAMES.map(lambda name: f"x{name}"), TEXTS), SPACES, st.booleans(), st.integers(0, 9))
def test_unknown_fields_reach_the_endpoint_byte_for_byte_and_in_order(
    fields: dict[str, str], space: str, streamed: bool, at: int
) -> None:
    own = {"messages": ASKED, "model": '"m"', "max_tokens": "7", "stream": json.dumps(streamed)}
    members = [*fields.items()]
    members[at:at] = own.items()
    body = ",".join(f"{space}{json.dumps(name)}{space}:{space}{text}{space}" for name, text in members)
    got = sent(parsed(f"{space}{{{body}{space}}}"))
    assert {name: text for name, text in got.items() if name in fields} == fields
    assert [name for name in got if name in fields or name in own] == [name for name, _ in members]
    assert got["messages"] == ASKED and got["max_tokens"] == "7"


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_limit_count_alike(limit: str) -> None:
    request = parsed(f'{{"messages": {ASKED}, "{limit}": 9, "seed": null, "mystery": null}}')
    assert request.max_tokens == 9
    assert sent(request) | {"messages": ""} == {
        "messages": "", limit: "9", "mystery": "null", "model": '"device"', "stream": "true",
        "stream_options": '{"include_usage": true}',
    }  # fmt: skip
    assert json.loads(sent(request, "An")["messages"]) == [*MESSAGES, {"role": "assistant", "content": "An"}]


@pytest.mark.parametrize(
    ("members", "name", "words"),
    [
        ('"temperature": NaN', "temperature", "NaN"),
        ('"mystery": {"a": [1, -Infinity]}', "mystery", "-Infinity"),
        ('"stream": "yes"', "stream", "boolean"),
        ('"stream": 1', "stream", "boolean"),
        ('"n": 1, "n": 2', "n", "twice"),
        ('"mystery": [{"a": 1, "a": 1}]', "mystery", "'a' stands twice"),
        ('"messages": []', "messages", "twice"),
    ],
)
def test_what_json_leaves_open_is_refused_by_the_fields_name(members: str, name: str, words: str) -> None:
    with pytest.raises(BadRequest, match=f"'{name}'.*{words}") as caught:
        parsed(f'{{"messages": {ASKED}, {members}}}')
    assert (caught.value.status_code, caught.value.param) == (400, name)


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    ("more", "named", "moves"),
    [
        ({"temperature": 0.5, "top_k": 3, "user": "a", "stop": "."}, [], True),
        ({"n": 1, "best_of": 3}, ["best_of"], False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, ["chat_template_kwargs"], True),
        ({"tools": [{"type": "function"}], "logprobs": True}, [], False),
        ({"audio": {"voice": "a"}, "modalities": ["audio"]}, ["audio", "modalities"], False),
        ({"audio": None, "logprobs": False, "mystery": None}, [], True),
        ({"min_tokens": 0}, [], False),
        ({"x" * 99: [1]}, ["x" * 64], False),
        ({"messages": [{"role": "user", "content": [PICTURE, PICTURE]}]}, ["messages.content.image_url"], False),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": "An", "prefix": True}]}, ["messages.prefix"], False),
    ],
)
def test_what_was_not_counted_is_named_and_what_is_not_known_is_answered_by_one_endpoint(
    more: dict[str, Any], named: list[str], moves: bool
) -> None:
    request = parsed(json.dumps({"messages": MESSAGES} | more))
    assert request.uncounted == named and (request.pinned is None) == moves

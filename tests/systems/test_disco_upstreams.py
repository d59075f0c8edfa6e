"""DiSCo's router before endpoints that do what public reports tell of: odd usage, cut choices, comments, refusals."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from email.utils import formatdate
from pathlib import Path
from time import time
from typing import Any

import aiohttp
import pytest
from routing import (
    DEVICE_FIRST,
    DONE,
    MESSAGES,
    NOBODY,
    Told,
    Upstream,
    chunk,
    configured,
    deployment,
    serving,
    usage,
)
from starlette.responses import JSONResponse, Response

from ondevice_papers.disco.budgeted import Dispatcher
from ondevice_programs.router.app import create_app
from ondevice_programs.router.router import Router

ANSWER = [chunk("An"), chunk(" answer"), chunk(reason="stop")]


@contextlib.asynccontextmanager
async def asking(folder: Path, upstream: Upstream, dispatcher: Any = "alone", **options: Any) -> AsyncIterator[Any]:
    """Posts a chat, and gives (status, headers, body); only the device is there, unless the options name a server."""
    if dispatcher == "alone":
        dispatcher = Told(DEVICE_FIRST, tokens=0, constrained="server")
    server, on_device = options.pop("server", NOBODY), options.pop("on_device", {})
    named = options.pop("named", {})  # by which both sides are asked
    async with serving(upstream.app) as at, aiohttp.ClientSession() as http:
        sides = deployment("device", at, **named, **on_device), deployment("server", server, **named)
        router = Router(configured(folder, *sides, **({"num_retries": 0} | options)), dispatcher=dispatcher)
        async with serving(create_app(router)) as url:

            async def ask(**body: Any) -> tuple[int, Any, str]:
                async with http.post(f"{url}/v1/chat/completions", json={"messages": MESSAGES} | body) as response:
                    return response.status, response.headers, await response.text()

            async def metrics() -> str:
                async with http.get(f"{url}/metrics") as response:
                    return await response.text()

            ask.metrics = metrics  # type: ignore[attr-defined]
            yield ask


def asked(folder: Path, reply: Any, *bodies: dict[str, Any], **options: Any) -> tuple[list[Any], Upstream]:
    upstream = Upstream(reply)

    async def work() -> list[Any]:
        async with asking(folder, upstream, **options) as ask:
            return [await ask(**body) for body in bodies]

    return asyncio.run(work()), upstream


@pytest.mark.parametrize(
    "counts", ['"prompt_tokens": null', '"total_tokens": 9', '"prompt_tokens": NaN', f'"prompt_tokens": {"9" * 400}']
)
def test_usage_without_counts_spoils_no_answer(tmp_path: Path, counts: str) -> None:
    told = f'data: {{"choices": [], "usage": {{{counts}, "completion_tokens": 2, "cached_tokens": NaN}}}}'
    replies, _ = asked(tmp_path, lambda _: [*ANSWER, told, DONE], {}, {"stream": True})
    whole = json.loads(replies[0][2])
    assert whole["choices"][0]["message"]["content"] == "An answer" and whole["disco"]["estimated"]
    assert "[DONE]" in replies[1][2] and "error" not in replies[1][2]


@pytest.mark.parametrize(
    ("models", "loading", "names"),
    [
        (["phone"], 0, ["phone", "phone"]),
        (["phone"], 1, [None, "phone"]),
        ([], 0, [None, None]),
        (None, 0, [None, None]),
    ],
)
def test_an_endpoint_without_a_name_is_asked_for_its_only_model(
    tmp_path: Path, models: list[str] | None, loading: int, names: list[str | None]
) -> None:
    """One that is still loading its model when it is asked for the first time counted as one without a list."""
    upstream = Upstream(lambda _: [*ANSWER, DONE], models, loading)

    async def work() -> list[Any]:
        async with asking(tmp_path, upstream, on_device={"model": None}, named={"name": None}) as ask:
            return [await ask(), await ask(model="anything")]

    replies = asyncio.run(work())
    assert [status for status, _, _ in replies] == [200, 200]
    assert [body.get("model") for body in upstream.bodies] == names


@pytest.mark.parametrize("streamed", [True, False])
def test_what_a_chunk_says_beside_its_text_reaches_the_caller(tmp_path: Path, streamed: bool) -> None:
    """A stream of text alone lost every member that the router does not know, such as system_fingerprint."""
    beside = {"system_fingerprint": "fp_1", "provider": {"name": "x", "costs": [1, 2]}, "service_tier": None}

    def marked(line: str) -> str:
        return f"data: {json.dumps(json.loads(line.removeprefix('data: ')) | beside)}"

    replies, _ = asked(tmp_path, lambda _: [*map(marked, ANSWER), DONE], {"stream": streamed})
    lines = replies[0][2].splitlines() if streamed else [f"data: {replies[0][2]}"]
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    said = [chunk for chunk in chunks if not streamed or chunk["choices"][0]["delta"].get("content")]
    assert said and all(
        chunk.items() >= {"system_fingerprint": "fp_1", "provider": beside["provider"]}.items() for chunk in said
    )
    assert not any("service_tier" in chunk for chunk in chunks)


@pytest.mark.parametrize("streamed", [True, False])
def test_what_a_chunk_without_text_says_reaches_the_caller(tmp_path: Path, streamed: bool) -> None:
    sources = {"citations": ["https://a", "https://b"]}
    last = f"data: {json.dumps(json.loads(ANSWER[-1][6:]) | sources)}"
    ((_, _, body),), _ = asked(tmp_path, lambda _: [*ANSWER[:-1], last, DONE], {"stream": streamed})
    told = json.loads(body.splitlines()[-4][6:] if streamed else body)
    assert told["citations"] == sources["citations"] and told["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("more", [{}, {"logprobs": True}])
def test_all_chunks_of_a_stream_are_of_one_answer(tmp_path: Path, more: Any) -> None:
    """What was thought had the endpoint's id, created and model, and what was said the router's."""
    named = {"id": "up-1", "created": 5, "model": "phone-7b"}
    lines = [f"data: {json.dumps(named | json.loads(it[6:]))}" for it in (chunk(reasoning="Let me"), *ANSWER)]
    body = {"stream": True, "stream_options": {"include_usage": True}} | more
    ((_, _, text),), _ = asked(tmp_path, lambda _: [*lines, DONE], body)
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    (told,) = {tuple(chunk[name] for name in named) for chunk in chunks}
    assert told[0] != "up-1" and told[2] == "m" and len(chunks) > 4


def test_of_several_models_one_has_to_be_named_by_the_file_or_by_the_caller(tmp_path: Path) -> None:
    upstream = Upstream(lambda _: [*ANSWER, DONE], ["small", "large"])

    async def work() -> list[Any]:
        async with asking(tmp_path, upstream, on_device={"model": None}, named={"name": None}) as ask:
            return [await ask(), await ask(model="other"), await ask(model="large")]

    *refused, served = asyncio.run(work())
    assert all(status != 200 and "has 2 models, such as small; name the one" in body for status, _, body in refused)
    assert served[0] == 200 and [body["model"] for body in upstream.bodies] == ["large"]


@pytest.mark.parametrize("count", [10**9, 10**5, True])
def test_a_count_that_no_prompt_can_have_opens_no_budget(tmp_path: Path, count: int) -> None:
    """Else one device that counts wrongly would let the server have all of the requests behind it."""

    async def work() -> list[Any]:
        device = Upstream(lambda _: [*ANSWER, usage(prompt_tokens=count, completion_tokens=2), DONE])
        server = Upstream(lambda _: [*ANSWER, usage(prompt_tokens=9, completion_tokens=2), DONE])
        async with serving(server.app) as at:
            options = {"server": at, "budget": 0.1, "constrained": "server"}
            async with asking(tmp_path, device, None, **options) as ask:
                return [json.loads((await ask())[2]) for _ in range(30)]

    answers = asyncio.run(work())
    assert all(answer["disco"]["estimated"] for answer in answers if answer["disco"]["switches"][0]["side"] == "device")
    served = sum(answer["disco"]["switches"][0]["side"] == "server" for answer in answers)
    assert served <= 3


def test_a_count_that_leaves_the_prefix_out_is_never_negative(tmp_path: Path) -> None:
    """The side that goes on counts 2 tokens of a prompt whose prefix alone has 5."""

    async def work() -> Any:
        cut = Upstream(lambda _: [chunk(f" w{number}") for number in range(5)])
        server = Upstream(lambda _: [*ANSWER, usage(prompt_tokens=2, completion_tokens=2), DONE])
        async with serving(server.app) as at, asking(tmp_path, cut, Told(DEVICE_FIRST), server=at) as ask:
            return json.loads((await ask())[2])["usage"]

    assert asyncio.run(work()) == {"prompt_tokens": 0, "completion_tokens": 7, "total_tokens": 7}


@pytest.mark.parametrize(
    ("limits", "prompt", "output", "credible"),
    [
        ({"max_tokens": 20}, 9, 20, True), ({"max_tokens": 20}, 9, 10**9, False), ({"max_tokens": 20}, 0, 2, False),
        ({}, 9, 10**5, True), ({}, 9, 10**9, False),  # without a limit some may be hidden
    ],
)  # fmt: skip
def test_a_count_that_no_answer_can_have_is_not_paid_for(
    tmp_path: Path, limits: Any, prompt: int, output: int, credible: bool
) -> None:
    """A billion tokens of an answer of at most twenty spent all of max_budget; a prompt of none opened the budget."""
    told, priced = usage(prompt_tokens=prompt, completion_tokens=output), {"output_cost_per_token": 1.0}
    ((_, _, body),), _ = asked(tmp_path, lambda _: [*ANSWER, told, DONE], limits, on_device=priced)
    story = json.loads(body)["disco"]
    assert (story["estimated"], story["cost"]) == (not credible, output if credible else 2)


def test_an_infinite_logprob_is_null_in_the_whole_answer(tmp_path: Path) -> None:
    """sgl-project/sglang#5984: -inf is no JSON, and a reply that holds it is written by nobody."""
    message = '{"role": "assistant", "content": "An answer"}'
    logprobs = '{"content": [{"logprob": -Infinity}]}'
    body = f'{{"choices": [{{"index": 0, "message": {message}, "logprobs": {logprobs}}}]}}'
    reply = lambda _: Response(body, media_type="application/json")  # noqa: E731
    ((status, _, answer),), _ = asked(tmp_path, reply, {"logprobs": True})
    assert status == 200 and json.loads(answer)["choices"][0]["logprobs"] == {"content": [{"logprob": None}]}


@pytest.mark.parametrize("streamed", [False, True])
def test_a_chunk_nested_beyond_all_measure_is_a_malformed_one(tmp_path: Path, streamed: bool) -> None:
    lines = [f"data: {'[' * 100_000}", *ANSWER, DONE]
    ((status, _, body),), _ = asked(tmp_path, lambda _: lines, {"stream": streamed}, dispatcher=None)
    assert status == 502 and "sent a malformed chunk" in body


def test_details_of_the_usage_are_passed_on(tmp_path: Path) -> None:
    told = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8}}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    replies, _ = asked(tmp_path, lambda _: [*ANSWER, usage(**told), DONE], {}, streamed)
    assert json.loads(replies[0][2])["usage"] == told | {"total_tokens": 11}
    assert json.dumps(told["prompt_tokens_details"]) in replies[1][2]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_what_a_model_thought_is_in_the_whole_answer(tmp_path: Path, name: str) -> None:
    lines = [chunk(**{name: "Let me"}), chunk(**{name: " think."}), *ANSWER, DONE]
    ((status, _, body),), _ = asked(tmp_path, lambda _: lines, {})
    message = json.loads(body)["choices"][0]["message"]
    assert status == 200 and message[name] == "Let me think." and message["content"] == "An answer"


@pytest.mark.parametrize("streamed", [False, True])
def test_a_character_in_two_chunks_is_whole(tmp_path: Path, streamed: bool) -> None:
    lines = [chunk("a\ud83d"), chunk("\ude00b"), chunk(reason="stop"), DONE]
    ((status, _, body),), _ = asked(tmp_path, lambda _: lines, {"stream": streamed})
    if streamed:
        chunks = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]
        text = "".join(part["choices"][0]["delta"].get("content", "") for part in chunks if part["choices"])
        text = text.encode("utf-16", "surrogatepass").decode("utf-16")
    else:
        text = json.loads(body)["choices"][0]["message"]["content"]
    assert status == 200 and text == "a\U0001f600b"


@pytest.mark.parametrize("last", [[], [DONE]])
@pytest.mark.parametrize("ends", [{0}, {0, 1}])
def test_of_several_choices_each_must_end(tmp_path: Path, ends: set[int], last: list[str]) -> None:
    lines = [chunk("one", index=0), chunk("two", index=1), *(chunk(reason="stop", index=index) for index in ends)]
    ((_, _, body),), _ = asked(tmp_path, lambda _: [*lines, *last], {"n": 2, "stream": True})
    whole = len(ends) == 2
    assert (body.count("[DONE]"), "ended the stream before" in body) == ((1, False) if whole else (0, True))


@pytest.mark.parametrize("last", [[], [DONE]])
@pytest.mark.parametrize("ends", [{0}, {1}, {0, 1}])
def test_choices_of_one_chunk_must_end_each(tmp_path: Path, ends: set[int], last: list[str]) -> None:
    both = [{"index": index, "delta": {"content": "word"}} for index in (0, 1)]
    reasons = [{"index": index, "delta": {}, "finish_reason": "stop" if index in ends else None} for index in (0, 1)]
    lines = [f"data: {json.dumps({'choices': choices})}" for choices in (both, reasons)]
    ((_, _, body),), _ = asked(tmp_path, lambda _: [*lines, *last], {"n": 2, "stream": True})
    whole = len(ends) == 2
    assert (body.count("[DONE]"), "ended the stream before" in body) == ((1, False) if whole else (0, True))


@pytest.mark.parametrize(
    ("reasons", "words"),
    [
        (("stop", "length"), ""), ((None, None), ""), (("stop", None), "before all choices"),
        ((None, "stop"), "before all choices"), (("stop", "error"), "finish_reason error"),
    ],
)  # fmt: skip
def test_choices_of_one_whole_answer_must_end_each(tmp_path: Path, reasons: tuple[Any, ...], words: str) -> None:
    message = {"role": "assistant", "content": "word"}
    choices = [{"index": index, "message": message, "finish_reason": reason} for index, reason in enumerate(reasons)]
    ((status, _, body),), _ = asked(tmp_path, lambda _: JSONResponse({"choices": choices}), {"n": 2})
    assert (status == 200) == (not words) and words in body
    assert words or json.loads(body)["choices"] == choices


def test_an_endpoint_may_give_fewer_choices_than_asked_for(tmp_path: Path) -> None:
    ((_, _, body),), _ = asked(tmp_path, lambda _: [*ANSWER, DONE], {"n": 2, "stream": True})
    assert body.count("[DONE]") == 1 and "error" not in body


def test_logprobs_and_the_number_of_a_choice_are_streamed_with_their_reason(tmp_path: Path) -> None:
    """BerriAI/litellm#10686 and #5236."""
    weighed: Any = {"choices": [{"index": 1, "delta": {}, "logprobs": {"content": []}, "finish_reason": "length"}]}
    lines = [chunk("one", "stop", 0), chunk("two", index=1), f"data: {json.dumps(weighed)}", DONE]
    ((_, _, body),), _ = asked(tmp_path, lambda _: lines, {"n": 2, "stream": True, "logprobs": True})
    chunks = [json.loads(line[6:])["choices"] for line in body.splitlines() if line.startswith("data: {")]
    assert chunks == [json.loads(line[6:])["choices"] for line in lines[:-1]] and body.endswith(f"{DONE}\n\n")


def test_what_an_answer_names_besides_its_text_is_in_the_whole_answer(tmp_path: Path) -> None:
    """BerriAI/litellm#9103: sources that were streamed are lost where the answer is put together."""
    sources = [{"type": "url_citation", "url_citation": {"url": f"https://a/{number}"}} for number in range(2)]
    lines = [*ANSWER[:2], *(chunk("", annotations=[source]) for source in sources), chunk(reason="stop"), DONE]
    ((_, _, body),), _ = asked(tmp_path, lambda _: lines, {})
    message = json.loads(body)["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "An answer", "annotations": sources}


@pytest.mark.parametrize("streamed", [True, False])
def test_a_message_in_a_stream_is_the_answer(tmp_path: Path, streamed: bool) -> None:
    """It gave an empty answer of status 200."""
    message = {"index": 0, "message": {"role": "assistant", "content": "An answer"}, "finish_reason": "stop"}
    lines = [f"data: {json.dumps({'choices': [message]})}", DONE]
    ((_, _, body),), _ = asked(tmp_path, lambda _: lines, {"stream": streamed})
    assert '"content": "An answer"' in body.replace('":"', '": "') and "error" not in body


def test_calls_that_nobody_asked_for_are_in_the_whole_answer(tmp_path: Path) -> None:
    """An endpoint with tools of its own: the reason was tool_calls, and there were none."""
    pieces: list[Any] = [
        {"index": 0, "id": "a", "type": "function", "function": {"name": "find", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"q": '}},
        {"index": 0, "function": {"arguments": "1}"}},
        {"index": 1, "id": "b", "type": "function", "function": {"name": "tell", "arguments": "{}"}},
    ]
    lines = [*(chunk(tool_calls=[piece]) for piece in pieces), chunk(reason="tool_calls"), DONE]
    ((_, _, body),), _ = asked(tmp_path, lambda _: lines, {})
    calls = json.loads(body)["choices"][0]["message"]["tool_calls"]
    assert [(call["id"], *call["function"].values()) for call in calls] == [
        ("a", "find", '{"q": 1}'),
        ("b", "tell", "{}"),
    ]


def test_of_many_requests_at_once_max_budget_admits_only_what_it_holds(tmp_path: Path) -> None:
    """BerriAI/litellm#34732."""
    priced = {"output_cost_per_token": 1.0, "max_budget": 25.0}

    async def work() -> list[int]:
        upstream = Upstream(lambda _: [0.1, *ANSWER, usage(prompt_tokens=9, completion_tokens=10), DONE])
        async with asking(tmp_path, upstream, on_device=priced) as ask:
            replies = [*await asyncio.gather(*(ask(max_tokens=10) for _ in range(40))), await ask(max_tokens=10)]
            return [status for status, *_ in replies]

    *statuses, later = asyncio.run(work())
    assert sorted(statuses) == [200] * 2 + [429] * 38 and later == 429, "what was spent stays spent"


def test_an_answer_over_the_budget_is_marked_and_counted(tmp_path: Path) -> None:
    settings = {"constrained": "server", "budget": 0.0, "over_budget": "fallback", "state": "none"}

    async def work() -> tuple[Any, str]:
        down, up = Upstream(lambda _: Response(status_code=503)), Upstream(lambda _: [*ANSWER, DONE])
        async with serving(up.app) as at, asking(tmp_path, down, None, server=at, **settings) as ask:
            return await ask(), await ask.metrics()

    (status, headers, _), metrics = asyncio.run(work())
    assert status == 200 and "x-disco-over-budget" in headers and "disco_over_budget_total 1.0" in metrics


@pytest.mark.parametrize(
    ("status", "headers", "seconds"),
    [
        (429, lambda: {"retry-after": "7.5"}, 8),
        (429, lambda: {"retry-after": formatdate(time() + 40, usegmt=True)}, 40),
        (429, lambda: {"retry-after-ms": "9500", "retry-after": "60"}, 10),
        (429, lambda: {"retry-after-ms": "soon", "retry-after": "20"}, 20),
        (503, lambda: {"retry-after": "20"}, 20),  # BerriAI/litellm#16286
        (429, lambda: {"retry-after": "inf"}, None),
        (429, lambda: {"retry-after": "tomorrow"}, None),
    ],
)
def test_a_retry_after_of_every_form_is_obeyed_and_passed_on_unless_it_says_nothing(
    tmp_path: Path, status: int, headers: Any, seconds: int | None
) -> None:
    reply = lambda _: JSONResponse({"error": {"message": "later"}}, status, headers())  # noqa: E731
    replies, upstream = asked(tmp_path, reply, {}, {}, {}, dispatcher=None)
    assert [status for status, *_ in replies] == [429 if status == 429 else 502] * 3
    assert len(upstream.bodies) == (1 if seconds else 3)
    if seconds:
        assert all(seconds - 2 <= int(told["retry-after"]) <= seconds for _, told, _ in replies)
        assert all(int(told["retry-after-ms"]) <= 1000 * seconds for _, told, _ in replies)


def test_an_endpoint_that_refuses_stream_options_is_asked_without(tmp_path: Path) -> None:
    def reply(body: dict[str, Any]) -> Any:
        if "stream_options" in body:
            return JSONResponse({"error": {"message": "Unknown field stream_options"}}, 422)
        return [*ANSWER, DONE]

    replies, upstream = asked(tmp_path, reply, {}, {"stream": True})
    assert [status for status, *_ in replies] == [200, 200] and len(upstream.bodies) == 3
    _, silent = asked(tmp_path, reply, {}, on_device={"stream_options": False})
    assert len(silent.bodies) == 1

    async def at_once() -> list[int]:
        async with asking(tmp_path, Upstream(reply)) as ask:
            return [status for status, *_ in await asyncio.gather(*(ask() for _ in range(8)))]

    assert asyncio.run(at_once()) == [200] * 8


def test_what_max_budget_counts_on_is_asked_for(tmp_path: Path) -> None:
    priced = {"output_cost_per_token": 1e-6, "max_budget": 1.0, "max_output_tokens": 123}
    _, upstream = asked(tmp_path, lambda _: [*ANSWER, DONE], {}, {"max_completion_tokens": 7}, on_device=priced)
    limits = [{name: value for name, value in body.items() if name.startswith("max")} for body in upstream.bodies]
    assert limits == [{"max_tokens": 123}, {"max_completion_tokens": 7}]
    _, free = asked(tmp_path, lambda _: [*ANSWER, DONE], {})
    assert not any(name.startswith("max") for name in free.bodies[0])


def test_a_choice_without_a_number_is_the_only_one(tmp_path: Path) -> None:
    lines = [chunk("An", index=None), chunk(" answer", index=None), chunk(reason="stop", index=None), DONE]
    ((status, _, body),), _ = asked(tmp_path, lambda _: lines, {})
    assert status == 200 and json.loads(body)["choices"][0]["message"]["content"] == "An answer"


@pytest.mark.parametrize("sign", [": PROCESSING", "event: ping\ndata:", None])
def test_a_comment_is_no_silence(tmp_path: Path, sign: str | None) -> None:
    pauses = [item for _ in range(6) for item in (0.3, *([sign] if sign else []))]
    ((status, *_),), _ = asked(tmp_path, lambda _: [*pauses, *ANSWER, DONE], {}, stream_timeout=0.7)
    assert (status == 200) == bool(sign)


def test_a_router_without_a_budget_races_whatever_was_spent() -> None:
    from ondevice_programs.router.config import Settings
    from ondevice_programs.router.router import dispatcher_of

    dispatcher = dispatcher_of(Settings(), {})
    for _ in range(300):
        order = dispatcher.arrive(100)
        assert order.waits == {"device": 0.0, "server": 0.0}
        assert all(dispatcher.start(order, "server", 100) for _ in range(3))
        dispatcher.close(order, 10)
    assert dispatcher.account.spent == 90_000
    assert isinstance(dispatcher, Dispatcher) and json.dumps(dispatcher.state())


def test_a_server_that_closes_its_connection_behind_an_error_is_asked_on_a_new_one(tmp_path: Path) -> None:
    """As `transformers serve` does where it has no list of models; the request met the closed connection."""
    asked = list[bytes]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            head = await reader.readuntil(b"\r\n\r\n")
            asked.append(head.partition(b" HTTP")[0])
            if head.startswith(b"GET"):
                writer.write(b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 2\r\n\r\nno")
                await writer.drain()
                await asyncio.sleep(0.2)  # closed once the client has taken it back among its connections
            else:
                body = "\n\n".join([*ANSWER, DONE, ""]).encode()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n" + body)
                await writer.drain()
        writer.transport.abort() if asked[-1].startswith(b"GET") else writer.close()

    async def work() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        sides = deployment("device", url, model=None), deployment("server", NOBODY)
        dispatcher = Told(DEVICE_FIRST, tokens=0, constrained="server")
        router = Router(configured(tmp_path, *sides, num_retries=0), dispatcher=dispatcher)
        body = {"messages": MESSAGES, "stream": True}
        async with (
            server,
            serving(create_app(router)) as at,
            aiohttp.ClientSession() as http,
            http.post(f"{at}/v1/chat/completions", json=body) as reply,
        ):
            text = await reply.text()
        assert "answer" in text and "finish_reason" in text and "error" not in text, (text, asked)
        assert b"GET /v1/models" in asked

    asyncio.run(work())

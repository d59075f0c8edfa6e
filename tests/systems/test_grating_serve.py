"""The reranker as a service and as a command: forms of the protocols, refusals, a real server, a real command line."""

from __future__ import annotations

import asyncio
import io
import json
import math
import random
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from waiting import PATIENCE, until

from ondevice_programs.reranker import Reranker, server
from ondevice_programs.reranker import __main__ as program

QUERY = "open file"
TEXTS = ["sum of an array", "open the file", "file of numbers"]  # shares words 0, 2 and 1 with the query
PROGRAM = [sys.executable, "-m", "ondevice_programs.reranker"]


class Fake:
    """Scores by words shared with the query; some queries do what the tests need."""

    spec, budget, truncate, max_seq_length, instructed = "fake", 100.0, True, 512, False
    scoring = SimpleNamespace(recipe=None)

    def __init__(self) -> None:
        self.receipt = SimpleNamespace(truncated=0, tokens=0)
        self.go = threading.Event()
        self.started: list[str] = []
        self.reading: dict[str, Any] = {}

    def rank(
        self, query: str, documents: list[str], top_k: int | None = None, *, activation_fn: Any, **reading: Any
    ) -> list[Any]:
        self.started.append(query)
        self.reading = reading
        if query == "refuse":
            raise ValueError("1 MB of memory are\ntoo few.")
        if query == "break":
            raise OSError(5, "Input/output error")
        if query.startswith("wait"):
            self.go.wait()
        self.receipt.truncated = sum(len(text) > 100 for text in documents)
        self.receipt.tokens = sum(len(f"{query} {text}".split()) for text in documents)
        logits = [float(len(set(query.split()) & set(text.split()))) for text in documents]
        logits = [math.nan] if query == "nan" else logits
        scores = activation_fn(torch.tensor(logits)).tolist()
        order = sorted(range(len(scores)), key=lambda place: -scores[place])[:top_k]
        return [{"corpus_id": place, "score": scores[place]} for place in order]


def asking(fake: Fake, work: Callable[[httpx.AsyncClient], Any]) -> Any:
    """What some work with a client of the app comes to."""

    async def run() -> Any:
        transport = httpx.ASGITransport(server.create_app(fake), raise_app_exceptions=False)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:
            return await work(client)

    return asyncio.run(run())


def post(body: Any, path: str = "/rerank", **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {"content-type": "application/json"} | headers
    return asking(Fake(), lambda client: client.post(path, content=content, headers=named))


def test_both_forms_are_answered():
    sigmoid = torch.sigmoid(torch.tensor([2.0, 1.0, 0.0])).tolist()
    best = list(zip([1, 2, 0], sigmoid, strict=True))
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answer = post({"query": QUERY, "texts": TEXTS, "truncate": True, "model": "any"}, path)
        assert answer.json() == [{"index": place, "score": score} for place, score in best]
    answer = post({"query": QUERY, "texts": TEXTS, "raw_scores": True, "return_text": True})
    assert answer.json()[0] == {"index": 1, "score": 2.0, "text": TEXTS[1]}
    documents = [TEXTS[0], {"text": TEXTS[1], "id": 7}, TEXTS[2]]
    answer = post({"model": "rerank-v3.5", "query": QUERY, "documents": documents, "top_n": 9})
    results = [{"index": place, "relevance_score": score} for place, score in best]
    usage = {
        "usage": {"prompt_tokens": 16, "total_tokens": 16},
        "meta": {"billed_units": {"total_tokens": 16}, "tokens": {"input_tokens": 16}},
    }
    assert answer.json() == {"model": "fake", "results": results} | usage
    assert answer.headers["x-compute-tokens"] == "16"
    answer = post({"query": QUERY, "documents": documents, "top_n": 1, "return_documents": True})
    assert answer.json()["results"] == [{"index": 1, "relevance_score": sigmoid[0], "document": {"text": TEXTS[1]}}]
    assert post({"query": QUERY, "texts": []}).json() == []


WRONG = [
    (400, b"{", "JSON"),
    (400, b'{"query": "a", "texts": ["b"], "raw_scores": NaN}', "JSON"),
    (400, b'{"query": "a", "texts": ["\xff"]}', "JSON"),
    (400, b'{"query": "a", "texts": ' + b"[" * 100_000, "JSON"),
    (422, ["a"], "array"),
    (422, {"query": "a", "texts": ["b"], "documents": ["b"]}, "`documents`"),
    (422, {"query": "a", "texts": ["b", None]}, "`$.texts[1]`"),
    (422, {"query": "a", "texts": ["b"], "truncation_direction": "Up"}, "'Up'"),
    (422, {"query": "a", "texts": ["b"], "temperature": 1}, "`temperature`"),
    (422, {"query": "a", "documents": ["b"], "use_activation": False}, "`use_activation`"),
    (422, {"query": "a", "documents": ["b"], "return_text": True}, "`return_text`"),
    (422, {"query": "a", "documents": [{"text": "b", "title": "c"}]}, "`title`"),
    (422, {"query": "a", "documents": ["b"], "rank_fields": ["title"]}, "rank_fields"),
    (422, {"query": "a", "documents": ["b"], "max_chunks_per_doc": 10}, "max_chunks_per_doc"),
    (422, {"query": "a", "documents": ["b"], "max_tokens_per_doc": 0}, "max_tokens_per_doc"),
    (422, {"query": "a", "documents": ["b"], "truncate_prompt_tokens": 513}, "truncate_prompt_tokens"),
    (422, {"query": "a", "documents": ["b"], "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    (422, {"query": "a", "texts": ["b"], "truncation_side": "middle"}, "truncation_side"),
    (422, {"query": "a", "texts": ["b"], "truncation_side": "left", "truncation_direction": "Right"}, "_direction"),
    (422, {"query": "a", "documents": ["b"], "instruction": "Do it"}, "instruction"),
    (422, {"query": "a", "texts": ["b " * 99, "b"], "truncate": False}, "1 of 2 texts"),
    (422, {"query": "a", "documents": [{"image": "b"}]}, "`image`"),
    (422, {"query": "refuse", "texts": ["b"]}, "1 MB of memory are too few."),
    (500, {"query": "break", "texts": ["b"]}, "Input/output error."),
    (500, {"query": "nan", "texts": ["b"]}, "float values"),
]


HONOURED = [  # fields of a request, and how its pairs are read
    ({}, {}),
    ({"user": "x", "metadata": {"a": [1]}, "request_id": 7, "priority": -1, "client_name": "c", "model": "any"}, {}),
    ({"instruction": "", "truncate_prompt_tokens": -1, "truncation_side": None}, {}),
    ({"max_chunks_per_doc": 1, "rank_fields": ["text"], "max_tokens_per_doc": None}, {}),
    ({"truncate_prompt_tokens": 9, "truncation_side": "left"}, {"max_length": 9, "truncation_side": "left"}),
    ({"max_tokens_per_doc": 5}, {"max_document_tokens": 5}),
    ({"texts": ["b"], "truncation_direction": "Left"}, {"truncation_side": "left"}),
]


@pytest.mark.parametrize(("fields", "reading"), HONOURED)
def test_what_a_request_says_of_reading_is_done(fields, reading):
    body = {"query": "a"} | ({} if "texts" in fields else {"documents": ["b"]}) | fields
    fake = Fake()
    assert asking(fake, lambda client: client.post("/rerank", json=body)).status_code == 200
    assert fake.reading == reading


def test_an_instruction_and_a_side_go_where_the_models_prompt_has_them():
    fake = Fake()
    fake.instructed, fake.scoring = True, SimpleNamespace(recipe="qwen3-reranker")
    body = {"query": "a", "documents": ["b"]}
    asking(fake, lambda client: client.post("/rerank", json=body | {"instruction": "Do it"}))
    assert fake.reading == {"prompt": "Do it"}
    refused = asking(fake, lambda client: client.post("/rerank", json=body | {"truncation_side": "left"}))
    assert refused.status_code == 422 and "truncation_side" in refused.json()["error"]


ALL = {  # fields of public services, with a value that is not their neutral one
    "truncate": False, "truncation": True, "truncation_direction": "left", "raw_scores": True, "return_text": True,
    "top_n": 1, "top_k": 1, "return_documents": True, "max_tokens_per_doc": 3, "max_chunks_per_doc": 3,
    "rank_fields": ["title"], "instruction": "Do it", "truncate_prompt_tokens": 3, "truncation_side": "left",
    "use_activation": False, "activation": True, "softmax": True, "normalize": False, "chat_template": "x",
    "add_special_tokens": False, "mm_processor_kwargs": {"a": 1}, "chat_template_kwargs": {"a": 1}, "overlap_tokens": 1,
    "batch_size": 2, "relevance_threshold": 0.5, "return_embeddings": True, "kwargs": {"a": 1}, "prompt_name": "x",
}  # fmt: skip


def test_no_field_is_left_out_in_silence():
    """Every field alone and 40 pairs of them, in both forms: the reading or the answer changes, or it is named."""
    rng = random.Random(0)
    drawn = [[name] for name in ALL] + [rng.sample(sorted(ALL), 2) for _ in range(40)]

    async def work(client: httpx.AsyncClient) -> None:
        for form in ("texts", "documents"):
            body = {"query": "b", form: ["a b", "b", "c " * 99]}
            right = (await client.post("/rerank", json=body)).text
            for names in drawn:
                answer = await client.post("/rerank", json=body | {name: ALL[name] for name in names})
                if answer.status_code == 422:
                    assert any(name in answer.json()["error"] for name in names), answer.text
                else:
                    assert answer.status_code == 200 and (answer.text != right or fake.reading), names

    fake = Fake()
    asking(fake, work)


@pytest.mark.parametrize(("status", "body", "words"), WRONG)
def test_what_cannot_be_ranked_is_one_sentence(status, body, words):
    answer = post(body)
    error = answer.json()["error"]
    assert answer.status_code == status and words in error and len(error.splitlines()) == 1, answer.text


def test_bodies_that_are_too_large_or_of_another_kind_are_refused(monkeypatch):
    monkeypatch.setattr(server, "LARGEST_BODY", 1 << 20)
    found = post({"query": "a", "texts": ["b" * (1 << 20)]})
    assert found.status_code == 413 and found.json()["error"] == "The body is larger than 1 MiB."
    assert post({"query": "a", "texts": []}, **{"content-type": "text/plain"}).status_code == 415
    assert (post({}, "/nowhere").status_code, post({}, "/health").status_code) == (404, 405)
    assert asking(Fake(), lambda client: client.get("/info")).json()["memory_budget_mb"] == 100.0


def test_requests_take_turns_while_others_are_answered_and_too_many_are_refused(monkeypatch):
    monkeypatch.setattr(server, "WAITING", 2)
    fake = Fake()

    async def work(client: httpx.AsyncClient) -> None:
        bodies = [{"query": f"wait {n}", "texts": ["wait"]} for n in range(2)]
        first, second = (asyncio.create_task(client.post("/rerank", json=body)) for body in bodies)
        assert await until(lambda: fake.started)
        assert (await client.get("/health")).json() == {"status": "ok"}
        third = await client.post("/rerank", json=bodies[0])
        assert (third.status_code, third.json()["error_type"]) == (429, "Overloaded") and len(fake.started) == 1
        fake.go.set()
        assert [(await one).status_code for one in (first, second)] == [200, 200]

    asking(fake, work)


@pytest.fixture
def address() -> Iterator[str]:
    words = [*PROGRAM, "serve", "--port", "0", "--memory-budget", "200MB"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        try:
            yield started.stdout.readline().removeprefix("Listening on ").strip()
            started.send_signal(signal.SIGINT)
            assert started.wait(PATIENCE) == 130
        finally:
            started.kill()


@pytest.mark.gate
def test_a_real_server_gives_the_rerankers_scores(address):
    def ask(body: Any, path: str = "") -> Any:
        asked = urllib.request.Request(address + path, json.dumps(body).encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(asked, timeout=PATIENCE) as answer:
            return json.load(answer)

    with Reranker("minilm-reranker") as reranker:
        best = reranker.rank(QUERY, TEXTS, activation_fn=torch.sigmoid)
    for found in (ask({"query": QUERY, "texts": TEXTS}), ask({"query": QUERY, "documents": TEXTS})["results"]):
        assert [one["index"] for one in found] == [one["corpus_id"] for one in best]
        scores = [one.get("score", one.get("relevance_score")) for one in found]
        assert scores == pytest.approx([one["score"] for one in best], rel=1e-5)
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask({"query": QUERY})
    assert refused.value.code == 422 and "texts" in json.load(refused.value)["error"]


def command(words: list[str], given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*PROGRAM, *words], input=given, capture_output=True, timeout=120, check=False)


def test_rank_prints_the_best_of_lines_or_files(tmp_path):
    with Reranker("minilm-reranker") as reranker:
        best = reranker.rank(QUERY, TEXTS)
    done = command(["rank", QUERY, "--top-k", "2"], "\n\n".join(TEXTS).encode())
    assert done.stdout.decode().splitlines() == [f"{hit['score']:.6f}\t{TEXTS[hit['corpus_id']]}" for hit in best[:2]]
    files = [tmp_path / f"{place}.txt" for place in range(len(TEXTS))]
    for file, text in zip(files, TEXTS, strict=True):
        file.write_text(text)
    done = command(["rank", "--documents", *map(str, files), "--json", "--receipt", "--", QUERY])
    hits, places = json.loads(done.stdout), [hit["corpus_id"] for hit in best]
    assert [(hit["file"], hit["text"]) for hit in hits] == [(str(files[place]), TEXTS[place]) for place in places]
    assert json.loads(done.stderr)["candidates"] == len(TEXTS)


REFUSED = [
    (["rank", QUERY], b"\n \n", "no documents"),
    (["rank", QUERY], b"\xff\n", "UTF-8"),
    (["rank", QUERY, "--documents", "nowhere.txt"], b"", "'nowhere.txt'"),
    (["rank", QUERY, "--top-k", "0"], b"a", "--top-k"),
    (["rank", QUERY, "--model", "nowhere"], b"a", "'nowhere'"),
    (["serve", "--port", "{busy}"], b"", "127.0.0.1:"),
]


@pytest.mark.parametrize(("words", "given", "name"), REFUSED)
def test_wrong_input_is_one_sentence_and_exit_code_2(words, given, name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given), encoding="utf-8"))
    with socket.create_server(("127.0.0.1", 0)) as opened, pytest.raises(SystemExit) as end:
        program.main([word.replace("{busy}", str(opened.getsockname()[1])) for word in words])
    printed = capsys.readouterr()
    assert (end.value.code, printed.out) == (2, "") and name in printed.err, printed.err
    assert len(printed.err.splitlines()) == 1

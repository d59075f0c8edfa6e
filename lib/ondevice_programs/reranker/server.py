"""The reranker over HTTP, in the forms that clients of text-embeddings-inference, Jina and Cohere speak."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

import msgspec
import torch
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ondevice.commands import sentence
from ondevice_programs.reranker import Reranker

LARGEST_BODY = 16 << 20  # bytes
WAITING = 64  # requests at once; more are refused, so that they hold no memory and time out nowhere


class _Texts(msgspec.Struct):
    """As text-embeddings-inference asks. truncate: False refuses texts that are longer than the model reads."""

    query: str
    texts: list[str]
    raw_scores: bool = False
    return_text: bool = False
    truncate: bool | None = None
    truncation_direction: Literal["right", "Right"] = "right"


class _Text(msgspec.Struct):
    text: str


class _Documents(msgspec.Struct):
    """As Jina and Cohere ask. Whatever model is named, the one that there is answers, and says its name."""

    query: str
    documents: list[str | _Text]
    model: str | None = None
    top_n: Annotated[int, msgspec.Meta(ge=1)] | None = None
    return_documents: bool | None = None


_FORMS: dict[str, type[_Texts | _Documents]] = {"texts": _Texts, "documents": _Documents}


def create_app(reranker: Reranker) -> Starlette:
    """POST /rerank, /v1/rerank and /v2/rerank; GET /health and /info.

    Requests take turns. Scores are sigmoids of logits unless they are asked for raw. Errors are {"error": a sentence,
    "error_type": ...}: 400 for what is no JSON, 413 above 16 MiB, 415 for what is not sent as JSON, 422 for what cannot
    be ranked, 429 while too many wait, 500 for what fails here.
    """
    # One thread for all: another would bring torch's own threads and heaps, which are in no memory budget.
    worker, room, turn = ThreadPoolExecutor(1, "rerank"), asyncio.Semaphore(WAITING), asyncio.Lock()

    async def rerank(http: Request) -> Response:
        request = _parsed(await _body(http))
        if room.locked():
            raise HTTPException(429, f"{WAITING} requests are waiting already.")
        async with room, turn:
            if await http.is_disconnected():  # it waited longer than its client
                return Response(status_code=408)
            try:
                answer = await asyncio.get_running_loop().run_in_executor(worker, _answer, reranker, request)
            except ValueError as error:
                raise HTTPException(422, sentence(error)) from None
        return JSONResponse(answer)

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def info(_: Request) -> Response:
        facts = {"model_id": reranker.spec, "memory_budget_mb": reranker.budget, "auto_truncate": reranker.truncate}
        return JSONResponse(facts | {"max_concurrent_requests": WAITING, "max_body_bytes": LARGEST_BODY})

    paths = [Route(f"{version}/rerank", rerank, methods=["POST"]) for version in ("", "/v1", "/v2")]
    return Starlette(
        routes=[*paths, Route("/health", health), Route("/info", info)],
        exception_handlers={HTTPException: _refused, Exception: _failed},
    )


async def _body(http: Request) -> bytes:
    # A web page may post text to a local port without asking; it may not post JSON.
    if http.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise HTTPException(415, "The body must be sent as application/json.")
    body = bytearray()
    async for block in http.stream():
        body += block
        if len(body) > LARGEST_BODY:
            raise HTTPException(413, f"The body is larger than {LARGEST_BODY >> 20} MiB.")
    return bytes(body)


def _parsed(body: bytes) -> _Texts | _Documents:
    """The request, in the form that its keys say."""
    try:
        keys = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        named = [name for name in _FORMS if name in keys]
        if len(named) != 1:
            raise HTTPException(422, "What to rank is a list under either `texts` or `documents`.")
        return msgspec.json.decode(body, type=_FORMS[named[0]])
    except msgspec.ValidationError as error:
        raise HTTPException(422, f"{error}.") from None
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"The body is not JSON: {error}.") from None


def _answer(reranker: Reranker, request: _Texts | _Documents) -> Any:
    """The ranking in the form that was asked in."""
    if isinstance(request, _Texts):
        ranked = _ranked(reranker, request.query, request.texts, None, request.raw_scores)
        cut = reranker.receipt.truncated if reranker.receipt and ranked else 0
        if request.truncate is False and cut:
            raise ValueError(f"{cut} of {len(ranked)} texts are longer than the model reads, and truncate is false.")
        texts = request.texts if request.return_text else None
        return [{"index": index, "score": score} | ({"text": texts[index]} if texts else {}) for index, score in ranked]
    given = [text if isinstance(text, str) else text.text for text in request.documents]
    results: list[dict[str, Any]] = []
    for index, score in _ranked(reranker, request.query, given, request.top_n, False):
        document = {"document": {"text": given[index]}} if request.return_documents else {}
        results.append({"index": index, "relevance_score": score} | document)
    return {"model": reranker.spec, "results": results}


def _ranked(reranker: Reranker, query: str, texts: list[str], count: int | None, raw: bool) -> list[tuple[int, float]]:
    activation = torch.clone if raw else torch.sigmoid
    entries = reranker.rank(query, texts, top_k=count, activation_fn=activation)
    return [(entry["corpus_id"], entry["score"]) for entry in entries]


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = "Overloaded" if error.status_code == 429 else "Validation"
    return JSONResponse({"error": error.detail, "error_type": kind}, error.status_code, error.headers)


async def _failed(_: Request, error: Exception) -> Response:
    """Whatever else goes wrong: the server's log has the traceback, the client a sentence."""
    return JSONResponse({"error": f"The ranking failed: {sentence(error)}", "error_type": "Backend"}, 500)

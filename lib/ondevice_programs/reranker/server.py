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


class _Request(msgspec.Struct, forbid_unknown_fields=True):
    """What both forms have. A field that is not listed is refused, as it would change the answer elsewhere.

    model: whichever is named, the one that there is answers. user, metadata, request_id, priority, client_name: change
    no answer anywhere.
    instruction: in the place of the model's own, where its prompt has one. truncate_prompt_tokens: most tokens of a
    pair, -1 as many as the model reads. truncation_side: which end of what is too long is lost.
    """

    query: str
    model: str | None = None
    instruction: str | None = None
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    truncation_side: Literal["right", "left"] | None = None
    user: Any = None
    metadata: Any = None
    request_id: Any = None
    priority: Any = None
    client_name: Any = None


class _Texts(_Request, kw_only=True, forbid_unknown_fields=True):
    """As text-embeddings-inference asks. truncate: False refuses texts that are longer than the model reads."""

    texts: list[str]
    raw_scores: bool = False
    return_text: bool = False
    truncate: bool | None = None
    truncation_direction: Literal["right", "Right", "left", "Left"] | None = None


class _Text(msgspec.Struct, forbid_unknown_fields=True):
    """A document as an object. Only its text is ranked, so it may have nothing else that another service ranks."""

    text: str
    id: Any = None
    url: Any = None
    metadata: Any = None


class _Documents(_Request, kw_only=True, forbid_unknown_fields=True):
    """As Jina and Cohere ask. max_tokens_per_doc: of each document on its own, which loses its end first.

    rank_fields, max_chunks_per_doc: what is done anyway, or nothing.
    """

    documents: list[str | _Text]
    top_n: Annotated[int, msgspec.Meta(ge=1)] | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_chunks_per_doc: Literal[1] | None = None
    rank_fields: tuple[Literal["text"]] | None = None


_FORMS: dict[str, type[_Texts | _Documents]] = {"texts": _Texts, "documents": _Documents}


def create_app(reranker: Reranker) -> Starlette:
    """POST /rerank, /v1/rerank and /v2/rerank; GET /health and /info.

    Requests take turns. Scores are sigmoids of logits unless they are asked for raw. The tokens that were read are in
    the header x-compute-tokens, and in the form of Jina and Cohere in `usage` and `meta`. Errors are {"error": a
    sentence, "error_type": ...}: 400 for what is no JSON, 413 above 16 MiB, 415 for what is not sent as JSON, 422 for
    what cannot be ranked, or not as it was asked, 429 while too many wait, 500 for what fails here.
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
                answer, tokens = await asyncio.get_running_loop().run_in_executor(worker, _answer, reranker, request)
            except ValueError as error:
                raise HTTPException(422, sentence(error)) from None
        return JSONResponse(answer, headers={"x-compute-tokens": str(tokens)})

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


def _answer(reranker: Reranker, request: _Texts | _Documents) -> tuple[Any, int]:
    """The ranking in the form that was asked in, and how many tokens were read."""
    if isinstance(request, _Texts):
        ranked, tokens = _ranked(reranker, request, request.texts, None, request.raw_scores)
        cut = reranker.receipt.truncated if reranker.receipt and ranked else 0
        if request.truncate is False and cut:
            raise ValueError(f"{cut} of {len(ranked)} texts are longer than the model reads, and truncate is false.")
        texts = request.texts if request.return_text else None
        return [
            {"index": index, "score": score} | ({"text": texts[index]} if texts else {}) for index, score in ranked
        ], tokens
    given = [text if isinstance(text, str) else text.text for text in request.documents]
    results: list[dict[str, Any]] = []
    ranked, tokens = _ranked(reranker, request, given, request.top_n, False)
    for index, score in ranked:
        document = {"document": {"text": given[index]}} if request.return_documents else {}
        results.append({"index": index, "relevance_score": score} | document)
    usage = {  # as Jina and vLLM say it, and as Cohere does
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        "meta": {"billed_units": {"total_tokens": tokens}, "tokens": {"input_tokens": tokens}},
    }
    return {"model": reranker.spec, "results": results} | usage, tokens


def _ranked(
    reranker: Reranker, request: _Texts | _Documents, texts: list[str], count: int | None, raw: bool
) -> tuple[list[tuple[int, float]], int]:
    """Places and scores of the best, and how many tokens were read."""
    reading = _reading(reranker, request)
    activation = torch.clone if raw else torch.sigmoid
    try:
        entries = reranker.rank(request.query, texts, top_k=count, activation_fn=activation, **reading)
    except ValueError as error:
        if "max_length" in reading:  # a recipe's prompt may have no room in it
            raise ValueError(f"With truncate_prompt_tokens {reading['max_length']}: {error}") from None
        raise
    tokens = reranker.receipt.tokens if reranker.receipt and entries else 0
    return [(entry["corpus_id"], entry["score"]) for entry in entries], tokens


def _reading(reranker: Reranker, request: _Texts | _Documents) -> dict[str, Any]:
    """How this request's pairs are read, where it says so. Raises ValueError, naming the field, on what cannot be."""
    reading: dict[str, Any] = {}
    if request.instruction:
        if not reranker.instructed:
            raise ValueError(f"instruction: {reranker.spec} reads a query and a document alone.")
        reading["prompt"] = request.instruction
    if request.truncate_prompt_tokens not in (None, -1):
        if not 1 <= request.truncate_prompt_tokens <= reranker.max_seq_length:
            raise ValueError(f"truncate_prompt_tokens: {reranker.spec} reads 1 to {reranker.max_seq_length} tokens.")
        reading["max_length"] = request.truncate_prompt_tokens
    sides: dict[str, str | None] = {"truncation_side": request.truncation_side}
    if isinstance(request, _Texts):
        sides["truncation_direction"] = request.truncation_direction
    else:
        reading["max_document_tokens"] = request.max_tokens_per_doc
    for name, side in sides.items():
        if side is not None:
            if reading.setdefault("truncation_side", side.lower()) != side.lower():
                raise ValueError(f"{name}: it is not the side that truncation_side says.")
            if side.lower() == "left" and reranker.scoring.recipe:
                raise ValueError(f"{name}: the recipe of {reranker.spec} cuts texts at their ends.")
    return {name: value for name, value in reading.items() if value is not None}


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = "Overloaded" if error.status_code == 429 else "Validation"
    return JSONResponse({"error": error.detail, "error_type": kind}, error.status_code, error.headers)


async def _failed(_: Request, error: Exception) -> Response:
    """Whatever else goes wrong: the server's log has the traceback, the client a sentence."""
    return JSONResponse({"error": f"The ranking failed: {sentence(error)}", "error_type": "Backend"}, 500)

"""What a reranker reads: pairs of a query and a document as rows of token ids.

A text is cut before it is made into tokens, as tokenizers take 50 to 100 bytes a character.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import compress
from typing import TYPE_CHECKING, NamedTuple

from ondevice_papers.grating.architectures import Architecture, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"  # Qwen3-Reranker's default
PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_LONGEST_PROMPT = 8192  # tokens; published with the prompt
_BLOCK = 32_000  # characters that are made into tokens together
_USUAL = 8  # characters that are read at first for each token that has room
_MOST = 64  # characters that are read at most for each token that has room
_BEYOND = 16  # tokens after the room: where a text is cut, the last ones can differ from the whole text's
_SURROGATE = re.compile(r"[\ud800-\udfff]")


@dataclass(frozen=True)
class Encoded:
    """Rows of pairs in their order. truncated: of how many the document was cut."""

    rows: list[Row]
    truncated: int


def answer_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """Ids of "yes" and "no". Raises ValueError where they are not a single token each, and two different ones."""
    token_ids = [_tokens(tokenizer, word) for word in ("yes", "no")]
    if any(len(ids) != 1 for ids in token_ids) or token_ids[0] == token_ids[1]:
        raise ValueError(f'"yes" and "no" are not a token each, but {token_ids}.')
    return token_ids[0][0], token_ids[1][0]


def encode(
    architecture: Architecture, tokenizer: PreTrainedTokenizerBase, queries: Sequence[str], documents: Sequence[str],
    longest: int | None = None, instruction: str = INSTRUCTION,
) -> Encoded:  # fmt: skip
    """Each query with its document as a row of tokens, in the format that the model was trained on; either may be "".

    Causal LMs read Qwen3-Reranker's published prompt, with the instruction. Others read the tokenizer's pair of query
    and document. longest: most tokens of a row, at most the model's; by default 8192 or the tokenizer's limit.
    Longer documents lose their end, and are counted. Of a document that is long, 8 characters are read for each token
    that has room, and more while they give too few tokens, but never above 64: its tokens are those of the whole text,
    unless that has a token of hundreds of characters, or so much white space, that the row is shorter than it could be.
    Raises ValueError, with the place, on what is no text, or none that UTF-8 can encode, and where a query leaves no
    room for its document.
    """
    for kind, texts in (("Query", queries), ("Document", documents)):
        for index, text in enumerate(texts):
            _require_text(kind, index, text)
    if not documents:
        return Encoded([], 0)
    prompted = architecture.answers is not None
    limit = _LONGEST_PROMPT if prompted else int(tokenizer.model_max_length)
    most = min(limit, architecture.longest) if longest is None else longest
    form = _Prompt(tokenizer, most, instruction) if prompted else _PairOfTexts(tokenizer, most)
    rows = []
    truncated = 0
    for block in _blocks(_pairs(form, queries, documents)):
        for row, cut in form.read(block):
            rows.append(row)
            truncated += cut
    return Encoded(rows, truncated)


class _Pair(NamedTuple):
    """A query and as much of its document as is read. cut: whether that is not all."""

    query: str
    document: str
    cut: bool


class _Prompt:
    """Qwen3-Reranker's published prompt. most: tokens of a row.

    taken: tokens of a row without a document. read: each pair's row, and whether its document lost its end.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, most: int, instruction: str) -> None:
        self.tokenizer, self.most, self.instruction = tokenizer, most, instruction
        self.start = _tokens(tokenizer, PREFIX)
        self.end = _tokens(tokenizer, SUFFIX)
        self.room = most - len(self.start) - len(self.end)

    def question(self, query: str) -> str:
        return f"<Instruct>: {self.instruction}\n<Query>: {query}\n<Document>:"

    def taken(self, query: str) -> int:
        return len(self.start) + len(_tokens(self.tokenizer, self.question(query))) + len(self.end)

    def read(self, pairs: Sequence[_Pair]) -> Iterable[tuple[Row, bool]]:
        texts = [f"{self.question(pair.query)} {pair.document}" for pair in pairs]
        bodies = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        for body, pair in zip(bodies, pairs, strict=True):
            ids = array("i", (*self.start, *body[: self.room], *self.end))
            yield Row(ids, len(ids)), pair.cut or len(body) > self.room


class _PairOfTexts:
    """The tokenizer's own pair of texts, with the methods of `_Prompt`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, most: int) -> None:
        self.tokenizer = tokenizer
        self.most = most

    def taken(self, query: str) -> int:
        return len(_tokens(self.tokenizer, query)) + self.tokenizer.num_special_tokens_to_add(pair=True)

    def read(self, pairs: Sequence[_Pair]) -> Iterable[tuple[Row, bool]]:
        rows = self._rows(pairs)
        over = [pair.cut or len(row.ids) > self.most for pair, row in zip(pairs, rows, strict=True)]
        if any(over):
            longer = [*compress(pairs, over)]
            shorter = iter(self._rows(longer, truncation="only_second", max_length=self.most))
            rows = [next(shorter) if cut else row for row, cut in zip(rows, over, strict=True)]
        return zip(rows, over, strict=True)

    def _rows(self, pairs: Sequence[_Pair], **options: object) -> list[Row]:
        queries = [pair.query for pair in pairs]
        documents = [pair.document for pair in pairs]
        encoded = self.tokenizer(queries, documents, verbose=False, **options)
        segments = encoded.get("token_type_ids") or [[]] * len(pairs)
        return [
            Row(array("i", ids), types.index(1) if 1 in types else len(ids))
            for ids, types in zip(encoded["input_ids"], segments, strict=True)
        ]


def _pairs(form: _Prompt | _PairOfTexts, queries: Sequence[str], documents: Sequence[str]) -> Iterator[_Pair]:
    @cache
    def taken(query: str) -> int:
        start, cut = _start(form.tokenizer, query, max(1, form.most))
        return max(form.taken(start), form.most if cut else 0)

    for index, (query, document) in enumerate(zip(queries, documents, strict=True)):
        room = form.most - taken(query)
        if room < 1:
            taking = f"Query {index} and its format take {taken(query)} of {form.most} tokens"
            raise ValueError(f"{taking}: no room is left for a document.")
        yield _Pair(query, *_start(form.tokenizer, document, room))


def _start(tokenizer: PreTrainedTokenizerBase, text: str, room: int) -> tuple[str, bool]:
    """As much of a text as fills a room of tokens, and whether text is left."""
    size = _USUAL * (room + _BEYOND)
    most = _MOST * room
    while size < min(len(text), most) and len(_tokens(tokenizer, text[:size])) < room + _BEYOND:
        size *= 2
    size = min(size, most)
    return text[:size], len(text) > size


def _blocks(pairs: Iterable[_Pair]) -> Iterator[list[_Pair]]:
    """Pairs that are made into tokens together."""
    block: list[_Pair] = []
    size = 0
    for pair in pairs:
        length = len(pair.query) + len(pair.document)
        if block and size + length > _BLOCK:
            yield block
            block = []
            size = 0
        block.append(pair)
        size += length
    if block:
        yield block


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _require_text(kind: str, index: int, text: object) -> None:
    if not isinstance(text, str):
        raise ValueError(f"{kind} {index} is no text but of type {type(text).__name__}.")
    if not text.isascii() and (surrogate := _SURROGATE.search(text)):
        half = f"half a surrogate pair at character {surrogate.start()}"
        raise ValueError(f"{kind} {index} has {half}: not valid Unicode.")

"""What a reranker reads: pairs of a query and a document as rows of token ids.

Three forms: the tokenizer's pair of texts, a chat template with the roles `query` and `document`, both as
sentence-transformers' CrossEncoder reads them, and a published recipe, whose parts are made into tokens apart. A text
is cut before it is made into tokens, as tokenizers take 50 to 100 bytes a character. Texts lose their ends, or with a
tokenizer that truncates on the left their beginnings.
"""

from __future__ import annotations

import contextlib
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ondevice.corpus.pairs import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Side = Literal["right", "left"]  # where what is too long is cut

_BLOCK = 32_000  # characters that are made into tokens together
_USUAL = 8  # characters that are read at first for each token that has room
_MOST = 64  # characters that are read at most for each token that has room
_BEYOND = 16  # tokens after the room: where a text is cut, the last ones can differ from the whole text's
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_SPACE = re.compile(r"\s{16,}")


@dataclass(frozen=True)
class Encoded:
    """Rows of pairs in their order. truncated: how many lost a part of their texts."""

    rows: list[Row]
    truncated: int


class Pair(NamedTuple):
    """As much of a query and a document as is read. cut: whether that is not all."""

    query: str
    document: str
    cut: bool


@dataclass(frozen=True)
class Form:
    """How a pair becomes a row of at most `most` tokens. prompt: what is said beside the pair, by the form's own rule.

    side: where it is cut. document_tokens: most tokens of a document on its own, which is cut first; None: any number.
    `read` gives each pair's row, and whether a part of its texts is not in it.
    """

    tokenizer: PreTrainedTokenizerBase
    most: int
    prompt: str | None = None
    side: Side = field(default="right", kw_only=True)
    document_tokens: int | None = field(default=None, kw_only=True)

    def read(self, pairs: Sequence[Pair]) -> Iterable[tuple[Row, bool]]:
        raise NotImplementedError

    @cached_property
    def drops_space(self) -> bool:
        """Whether white space makes no tokens, so that any run of it is as good as a short one."""
        return not _tokens(self.tokenizer, " " * 100)

    @property
    def instructed(self) -> bool:
        """Whether the prompt is an instruction that the model reads apart from the pair."""
        return False


@dataclass(frozen=True)
class TextPair(Form):
    """The tokenizer's own pair of texts, the longer one cut first. The prompt stands before the query."""

    def read(self, pairs: Sequence[Pair]) -> Iterable[tuple[Row, bool]]:
        rows = self._rows(pairs)
        over = [pair.cut or len(row.ids) > self.most for pair, row in zip(pairs, rows, strict=True)]
        if any(over):
            longer = [*compress(pairs, over)]
            with _truncating(self.tokenizer, self.side):
                shorter = iter(self._rows(longer, truncation="longest_first", max_length=self.most))
            rows = [next(shorter) if cut else row for row, cut in zip(rows, over, strict=True)]
        return zip(rows, over, strict=True)

    def _rows(self, pairs: Sequence[Pair], **options: object) -> list[Row]:
        queries = [(self.prompt or "") + pair.query for pair in pairs]
        documents = [pair.document for pair in pairs]
        encoded = self.tokenizer(queries, documents, verbose=False, **options)
        segments = encoded.get("token_type_ids") or [[]] * len(pairs)
        return [
            Row(array("i", ids), _border(ids, types)) for ids, types in zip(encoded["input_ids"], segments, strict=True)
        ]


@dataclass(frozen=True)
class Chat(Form):
    """The tokenizer's chat template, for a query and a document of these roles. The prompt is the system's message.

    What is too long is cut, and what the template adds at the end stands in the last places again. structured:
    whether the template expects a content of several parts. options: for the template.
    """

    structured: bool = True
    options: Mapping[str, Any] | None = None

    def read(self, pairs: Sequence[Pair]) -> Iterable[tuple[Row, bool]]:
        texts = [self.text(pair.query, pair.document) for pair in pairs]
        for pair, ids in zip(pairs, self._ids(texts), strict=True):
            over = len(ids) > self.most
            if len(ids) >= self.most:  # CrossEncoder takes a row that just fits for one that was cut
                end = self._end[-self.most :]
                ids = _cut(ids, self.most, self.side)
                ids = [*ids[: self.most - len(end)], *end]
            row = array("i", ids)
            yield Row(row, len(row)), pair.cut or over

    def text(self, query: str, document: str) -> str:
        """A pair as the template writes it. Raises ValueError where the template refuses its roles."""
        roles = [("query", query), ("document", document)]
        messages: Any = [
            {"role": role, "content": [{"type": "text", "text": text}] if self.structured else text}
            for role, text in ([("system", self.prompt)] if self.prompt else []) + roles
        ]
        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **(self.options or {})))
        except Exception as error:  # templates raise what they like
            raise ValueError(f"The chat template takes no query and document ({str(error)[:100]}).") from None

    @property
    def instructed(self) -> bool:
        """Whether the template writes the system's message."""
        return replace(self, prompt="0").text("0", "0") != replace(self, prompt="1").text("0", "0")

    def require_roles(self) -> None:
        """Raise ValueError unless the template writes both texts of a pair."""
        texts = {self.text(query, document) for query, document in (("0", "0"), ("1", "0"), ("0", "1"))}
        if len(texts) < 3:
            raise ValueError("The chat template has no roles for a query and a document: it leaves one of them out.")

    @cached_property
    def _end(self) -> list[int]:
        """What the template adds behind the texts: the tokens in which two pairs' rows end alike."""
        first, second = self._ids([self.text(filler, filler) for filler in ("0", "1 2 3 4")])
        alike = 0
        while alike < min(len(first), len(second)) and first[-1 - alike] == second[-1 - alike]:
            alike += 1
        return first[len(first) - alike :] if alike < min(len(first), len(second)) else []

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        encoded: list[list[int]] = self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return encoded


@dataclass(frozen=True)
class Recipe:
    """A published reranker's prompt.

    parts: formats that are made into tokens apart, with {query}, {document} and {prompt}; the document's part is cut,
    and before it a query's that takes more than three quarters. answers: words that the score is read at, one or two.
    prompt: what it says if nothing else is given. limit: tokens of a row, or, if `inner`, of the parts from the query's
    to the document's alone.
    """

    parts: tuple[str, ...]
    answers: tuple[str, ...]
    limit: int
    inner: bool = True
    prompt: str = ""


@dataclass(frozen=True)
class Prompted(Form):
    """A recipe's prompt."""

    recipe: Recipe | None = None

    @property
    def instructed(self) -> bool:
        """Whether the recipe has a place for an instruction."""
        return any("{prompt}" in part for part in self._recipe.parts)

    def read(self, pairs: Sequence[Pair]) -> Iterable[tuple[Row, bool]]:
        if self._room < 1:
            raise ValueError(f"The recipe's prompt alone takes {self._outside} tokens, of {self._most_of_row}.")
        if self.side == "left":
            raise ValueError("A recipe's texts lose their ends: its prompt has no truncation side of left.")
        for pair in pairs:
            parts = self._parts(pair.query, pair.document)
            whole = sum(map(len, parts))
            if self._first != self._last:
                parts[self._first] = parts[self._first][: 3 * self._room // 4]
            rest = sum(map(len, parts)) - len(parts[self._last])
            parts[self._last] = parts[self._last][: max(0, self._most_of_row - rest)]
            row = array("i", [token for part in parts for token in part][: self.most])
            yield Row(row, len(row)), pair.cut or len(row) < whole

    def _parts(self, query: str, document: str) -> list[list[int]]:
        fields = {"query": query, "document": document, "prompt": self.prompt or self._recipe.prompt}
        return [_tokens(self.tokenizer, part.format(**fields)) for part in self._recipe.parts]

    @property
    def _recipe(self) -> Recipe:
        assert self.recipe is not None
        return self.recipe

    @cached_property
    def _first(self) -> int:
        return next(index for index, part in enumerate(self._recipe.parts) if "{query}" in part)

    @cached_property
    def _last(self) -> int:
        return next(index for index, part in enumerate(self._recipe.parts) if "{document}" in part)

    @cached_property
    def _outside(self) -> int:
        """Tokens of the parts before the query's and behind the document's."""
        parts = self._parts("", "")
        return sum(map(len, (*parts[: self._first], *parts[self._last + 1 :])))

    @cached_property
    def _most_of_row(self) -> int:
        return min(self.most, self._recipe.limit + (self._outside if self._recipe.inner else 0))

    @property
    def _room(self) -> int:
        return self._most_of_row - self._outside


_QWEN = "<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\n"
RECIPES = {
    "qwen3-reranker": Recipe(
        (
            _QWEN.format(
                "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note "
                'that the answer can only be "yes" or "no".'
            ),
            "<Instruct>: {prompt}\n<Query>: {query}\n<Document>: {document}",
            "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        ),
        ("yes", "no"),
        8192,
        inner=False,
        prompt="Given a web search query, retrieve relevant passages that answer the query",
    ),
    "bge-reranker-v2-gemma": Recipe(
        ("<bos>A: {query}", "\n", "B: {document}", "\n", "{prompt}"),
        ("Yes",),
        1024,
        prompt="Given a query A and a passage B, determine whether the passage contains an answer to the query by "
        "providing a prediction of either 'Yes' or 'No'.",
    ),
    "mxbai-rerank-v2": Recipe(
        (
            _QWEN.format("You are Qwen, created by Alibaba Cloud. You are a helpful assistant."),
            "query: {query}",
            "\n",
            "document: {document}",
            "\n",
            "You are a search relevance expert who evaluates how well documents match search queries. For each "
            "query-document pair, carefully analyze the semantic relationship between them, then provide your binary "
            "relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:",
            "<|im_end|>\n<|im_start|>assistant\n",
        ),
        ("1", "0"),
        8192,
    ),
}


def answer_ids(tokenizer: PreTrainedTokenizerBase, words: Sequence[str]) -> tuple[int, ...]:
    """Ids of the answers. Raises ValueError where they are not a single token each, and different ones."""
    token_ids = [_tokens(tokenizer, word) for word in words]
    if any(len(ids) != 1 for ids in token_ids) or len({ids[0] for ids in token_ids}) < len(words):
        raise ValueError(f"{' and '.join(map(repr, words))} are not a token each, but {token_ids}.")
    return tuple(ids[0] for ids in token_ids)


def encode(form: Form, queries: Sequence[str], documents: Sequence[str]) -> Encoded:
    """Each query with its document as a row of tokens; either may be "".

    Of a text that is long, 8 characters are read for each token that has room, and more while they give too few tokens,
    but never above 64: its tokens are those of the whole text, unless that has a token of hundreds of characters.
    Raises ValueError, with the place, on what is no text, or none that UTF-8 can encode.
    """
    for kind, texts in (("Query", queries), ("Document", documents)):
        for index, text in enumerate(texts):
            require_text(kind, index, text)
    rows = []
    truncated = 0
    for block in _blocks(_pairs(form, queries, documents)):
        for row, cut in form.read(block):
            rows.append(row)
            truncated += cut
    return Encoded(rows, truncated)


def _pairs(form: Form, queries: Sequence[str], documents: Sequence[str]) -> Iterator[Pair]:
    starts: dict[str, tuple[str, bool]] = {}
    for query, document in zip(queries, documents, strict=True):
        if query not in starts:
            starts = {query: _part(form, query)}  # queries repeat one after the other
        (question, cut), (text, shortened) = starts[query], _part(form, document)
        if form.document_tokens is not None:
            whole, text = text, _within(form, text, form.document_tokens)
            shortened = shortened or text != whole
        yield Pair(question, text, cut or shortened)


def _part(form: Form, text: str) -> tuple[str, bool]:
    """As much of a text as fills a row of tokens, and whether text is left."""
    if len(text) > _USUAL * form.most and form.drops_space:
        text = _SPACE.sub(" ", text)
    size, most = _USUAL * (form.most + _BEYOND), _MOST * form.most
    while (
        size < min(len(text), most) and len(_tokens(form.tokenizer, _cut(text, size, form.side))) < form.most + _BEYOND
    ):
        size *= 2
    size = min(size, most)
    return _cut(text, size, form.side), len(text) > size


def _within(form: Form, text: str, most: int) -> str:
    """A text's longest part of at most so many tokens, cut where tokens meet."""
    if not form.tokenizer.is_fast:
        raise ValueError("A document cannot be cut to a number of tokens: its tokenizer does not say where they lie.")
    encoded = form.tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=True)
    spans = encoded["offset_mapping"]
    if len(spans) <= most:
        return text
    for count in range(most, 0, -1):
        part = text[: spans[count - 1][1]] if form.side == "right" else text[spans[-count][0] :]
        if len(_tokens(form.tokenizer, part)) <= most:  # half a character is none, and a cut can change a token
            return part
    return ""


def _cut(sequence: Any, size: int, side: Side) -> Any:
    """The first so many of a text or of tokens, or the last ones."""
    if side == "right":
        return sequence[:size]
    return sequence[max(0, len(sequence) - size) :]


def _border(ids: Sequence[int], segments: Sequence[int]) -> int:
    """Where the second segment begins. Raises ValueError where there are more than two, or they take turns."""
    border = segments.index(1) if 1 in segments else len(ids)
    if segments and list(segments) != [0] * border + [1] * (len(ids) - border):
        raise ValueError("The tokenizer's segments (token_type_ids) are not one of zeros and one of ones behind it.")
    return border


@contextlib.contextmanager
def _truncating(tokenizer: PreTrainedTokenizerBase, side: Side) -> Iterator[None]:
    """A tokenizer that truncates on this side meanwhile."""
    own = tokenizer.truncation_side
    tokenizer.truncation_side = side
    try:
        yield
    finally:
        tokenizer.truncation_side = own


def _blocks(pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
    """Pairs that are made into tokens together."""
    block: list[Pair] = []
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


def require_text(kind: str, index: int, text: object) -> None:
    """Raise ValueError, with the place, on what is no text, or none that UTF-8 can encode."""
    if not isinstance(text, str):
        raise ValueError(f"{kind} {index} is no text but of type {type(text).__name__}.")
    if not text.isascii() and (surrogate := _SURROGATE.search(text)):
        half = f"half a surrogate pair at character {surrogate.start()}"
        raise ValueError(f"{kind} {index} has {half}: not valid Unicode.")

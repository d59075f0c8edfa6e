"""What a reranker reads: formats, and texts that are cut before they are made into tokens."""

from __future__ import annotations

from array import array
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tiny import word_tokenizer
from tokenizers import processors
from transformers import AutoTokenizer

from ondevice import assets, shapes
from ondevice_papers.grating.architectures import PaddedRows
from ondevice_programs.reranker import reading
from ondevice_programs.reranker.reading import RECIPES, Prompted, TextPair, answer_ids, encode

ENDING = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


QWEN = RECIPES["qwen3-reranker"]
PREFIX, _, SUFFIX = QWEN.parts


def qwen(tokenizer: Any, most: int = 1000, prompt: str | None = None) -> Prompted:
    return Prompted(tokenizer, most, prompt, QWEN)


class Counting:
    """A tokenizer that notes how many characters each call gives it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.given = tokenizer, list[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *texts: Any, **options: Any) -> Any:
        self.given.append(sum(len(text) if isinstance(text, str) else sum(map(len, text)) for text in texts))
        return self._tokenizer(*texts, **options)


# Formats


def test_a_causal_lm_reads_the_published_prompt() -> None:
    tokenizer = shapes.byte_tokenizer()
    found = encode(qwen(tokenizer, 420, "Do it"), ["a query", "other"], ["short", "long " * 50])
    assert tokenizer.decode(list(found.rows[0].ids)) == (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        "<Instruct>: Do it\n<Query>: a query\n<Document>: short" + ENDING
    )
    assert found.truncated == 1 and len(found.rows[1].ids) == found.rows[1].border == 420
    assert "Given a web search query" in tokenizer.decode(list(encode(qwen(tokenizer), ["q"], ["d"]).rows[0].ids))


@pytest.mark.parametrize("name", ["bge-reranker-v2-gemma", "mxbai-rerank-v2"])
def test_recipes_are_the_authors_steps(name: str) -> None:
    """Parts are made into tokens apart; a query keeps three quarters at most, then the document is cut."""
    recipe, tokenizer = RECIPES[name], shapes.byte_tokenizer()
    first, between, second, *behind = recipe.parts if name.startswith("bge") else recipe.parts[1:]
    before = "" if name.startswith("bge") else recipe.parts[0]

    def tokens(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    inner, texts = 200, [("a query", "short"), ("a query", "long " * 80), ("query " * 80, "long " * 80)]
    around = len(tokens(before)) + sum(len(tokens(part.format(prompt=recipe.prompt))) for part in behind)
    form = Prompted(tokenizer, 5000, None, replace(recipe, limit=inner))
    for (query, document), row in zip(texts, encode(form, *zip(*texts, strict=True)).rows, strict=True):
        asked = tokens(first.format(query=query))[: 3 * inner // 4]
        read = (tokens(between) + tokens(second.format(document=document)))[: inner - len(asked)]
        end = [token for part in behind for token in tokens(part.format(prompt=recipe.prompt))]
        assert list(row.ids) == [*tokens(before), *asked, *read, *end] and len(row.ids) <= inner + around


def test_yes_and_no_are_a_token_each() -> None:
    assert answer_ids(word_tokenizer("no maybe yes"), ("yes", "no")) == (6, 4)
    for tokenizer in (shapes.byte_tokenizer(), word_tokenizer("maybe")):
        with pytest.raises(ValueError, match=r"'yes'.*'no'"):
            answer_ids(tokenizer, ("yes", "no"))


def test_other_models_read_the_tokenizers_pair() -> None:
    tokenizer = word_tokenizer("a b c d e f")
    texts = ["a b c d " * 9, "a " * 900, "a", "a b", ""], ["e f " * 9, "b", "b " * 20, "c", "d"]
    found = encode(TextPair(tokenizer, 8), *texts)
    right = tokenizer(*texts, truncation="longest_first", max_length=8)
    assert [list(row.ids) for row in found.rows] == right["input_ids"] and found.truncated == 3
    batch = PaddedRows(found.rows)
    assert [types[: len(row.ids)] for types, row in zip(batch.segments.tolist(), found.rows, strict=True)] == (
        right["token_type_ids"]
    )
    assert batch.ids.tolist() == [token for row in right["input_ids"] for token in row]
    assert encode(TextPair(tokenizer, 7), [], []).rows == []
    asked = encode(TextPair(tokenizer, 7, "c "), ["a"], ["b"]).rows[0]
    assert list(asked.ids) == [0, 6, 4, 2, 5, 2]


# Long texts


@cache
def long_text() -> str:
    """Prose, code, other scripts and emoji: 40,000 characters."""
    mixed = "Ein Satz über Größe. 東京は日本の首都です。 Привет, мир! 🙂🏽 naïve café\n\n\t"
    source = "".join(file.read_text() for file in sorted(Path(reading.__file__).parent.glob("*.py")))
    return "".join(source[start : start + 500] + mixed for start in range(0, len(source), 500))[:40_000]


@pytest.mark.parametrize("spec", ["minilm-reranker", "documentation-tokenizer"])
@pytest.mark.parametrize(("longest", "side"), [(20, "right"), (1000, "right"), (20, "left"), (600, "left")])
def test_a_pairs_kept_tokens_are_those_of_the_whole_text(spec: str, longest: int, side: reading.Side) -> None:
    tokenizer = AutoTokenizer.from_pretrained(assets.data("models", spec), truncation_side=side)
    documents = [long_text()[start:] for start in range(0, 30_000, 9000)] + [long_text()[:n] for n in (0, 80, 700)]
    counting, query = Counting(tokenizer), "Größe of a tensor?"
    form = TextPair(counting, longest, side=side)  # type: ignore[arg-type]
    found = encode(form, [query] * len(documents), documents)
    whole = [tokenizer(query, document, verbose=False)["input_ids"] for document in documents]
    right = tokenizer([query] * len(documents), documents, truncation="longest_first", max_length=longest)["input_ids"]
    assert [list(row.ids) for row in found.rows] == right
    assert found.truncated == sum(len(ids) > longest for ids in whole) > 0
    assert max(counting.given) <= max(32_000, 8 * (longest + 16) + len(query))


@pytest.mark.parametrize("longest", [230, 900])
def test_a_prompts_kept_tokens_are_those_of_the_whole_text(longest: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(assets.data("models", "documentation-tokenizer"))
    documents = [long_text()[start:] for start in range(0, 30_000, 9000)] + ["", "short"]
    found = encode(qwen(tokenizer, longest, "Do it"), ["Größe?"] * len(documents), documents)
    start, end = (tokenizer(text)["input_ids"] for text in (PREFIX, SUFFIX))
    bodies = [
        tokenizer(f"<Instruct>: Do it\n<Query>: Größe?\n<Document>: {document}", verbose=False)["input_ids"]
        for document in documents
    ]
    room = longest - len(start) - len(end)
    assert [list(row.ids) for row in found.rows] == [[*start, *body[:room], *end] for body in bodies]
    assert found.truncated == sum(len(body) > room for body in bodies) == len(documents) - 2


@pytest.mark.parametrize("form", [TextPair, qwen])
@pytest.mark.parametrize(("text", "most"), [("some words " * 500_000, 9), ("a" * 5_000_000, 64)])
def test_little_of_a_huge_text_is_given_to_the_tokenizer(form: Any, text: str, most: int) -> None:
    tokenizer = Counting(AutoTokenizer.from_pretrained(assets.data("models", "minilm-reranker")))
    found = encode(form(tokenizer, 300), ["a query"] * 2, [text, "short"])
    assert found.truncated == 1 and len(found.rows[1].ids) < len(found.rows[0].ids) + 2
    assert len(found.rows[0].ids) == 300 or most == 64
    assert max(tokenizer.given) < most * 300 + 1000 and sum(tokenizer.given) < 4 * most * 300 + 4000


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("most", [1, 7, 300])
def test_a_document_is_cut_to_its_own_number_of_tokens(most: int, side: reading.Side) -> None:
    tokenizer = AutoTokenizer.from_pretrained(assets.data("models", "documentation-tokenizer"))
    for document in (long_text()[:9000], long_text()[700:1500], "東京🙂🏽" * 9, "short", ""):
        form = TextPair(tokenizer, 512, side=side, document_tokens=most)
        (text,) = [pair.document for pair in reading._pairs(form, ["a query"], [document])]
        kept, whole = (
            len(tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]) for part in (text, document)
        )
        assert document.startswith(text) if side == "right" else document.endswith(text)
        assert kept <= most and (kept > most - 8 or text == document), document
        assert encode(form, ["a query"], [document]).truncated == (whole > most)


def test_segments_that_take_turns_are_refused() -> None:
    tokenizer = word_tokenizer("a b")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A", "[CLS] $A [SEP]:1 $B:0", [("[CLS]", 0), ("[SEP]", 2)]
    )
    with pytest.raises(ValueError, match="token_type_ids"):
        encode(TextPair(tokenizer, 8), ["a"], ["b"])


def test_white_space_hides_no_text() -> None:
    tokenizer = Counting(AutoTokenizer.from_pretrained(assets.data("models", "minilm-reranker")))
    far, near = (encode(TextPair(tokenizer, 60), ["a query"], [f"{space}found"]) for space in (" \n" * 2_000_000, ""))  # type: ignore[arg-type]
    assert far == near and not far.truncated and max(tokenizer.given) < 1000


def test_the_blocks_of_texts_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = word_tokenizer("a b c d e f")
    pairs = ["a", "b c", "a", "d"], ["c " * 9, "e", "f", "d e " * 90]
    whole, counting = encode(TextPair(tokenizer, 64), *pairs), Counting(tokenizer)
    monkeypatch.setattr(reading, "_BLOCK", 1)
    assert encode(TextPair(counting, 64), *pairs) == whole  # type: ignore[arg-type]
    assert isinstance(whole.rows[0].ids, array) and len(counting.given) >= 4  # each pair on its own

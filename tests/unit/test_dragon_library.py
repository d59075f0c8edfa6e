"""DRAGON's documents: from a file, a folder or the corpus, shared out between sides, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from ondevice import corpus
from ondevice.dragon.live import library

SUBJECTS = ["birds", "fish", "grass", "rain", "snow"]
TEXTS = [f"document {number} is about {subject}" for number, subject in enumerate(SUBJECTS)]


@pytest.fixture
def file(tmp_path: Path) -> str:
    library.write(tmp_path / "texts.jsonl", TEXTS)
    return str(tmp_path / "texts.jsonl")


def test_a_file_has_a_document_a_line(file: str):
    found = library.documents(file)
    assert sorted(found.texts) == TEXTS and found.index.size == 5
    texts, scores = found.best("snow", 2)
    assert texts[0] == TEXTS[4] and scores[0] > scores[1] and len(texts) == 2


def test_a_written_file_is_read_back(tmp_path: Path):
    odd = ['quotes " and\nlines', "ünïcödé 語", "{braces}"]
    library.write(tmp_path / "odd.jsonl", odd)
    assert sorted(library.documents(str(tmp_path / "odd.jsonl")).texts) == sorted(odd)


def test_a_folder_has_a_document_a_paragraph(tmp_path: Path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\n\n\n")
    (tmp_path / "deep" / "b.md").write_text("three")
    (tmp_path / "c.rst").write_text("four\nstill four\n\none")
    (tmp_path / "d.py").write_text("not this")
    assert sorted(library.documents(str(tmp_path)).texts) == ["four\nstill four", "one", "three", "two"]


def test_parts_share_all_documents_out(file: str):
    parts = [set(library.documents(file, f"{i}/2").texts) for i in (1, 2)]
    assert parts[0] | parts[1] == set(TEXTS) and not parts[0] & parts[1]


def test_parts_do_not_depend_on_the_order_or_on_other_documents(tmp_path: Path, file: str):
    library.write(tmp_path / "more.jsonl", [*TEXTS[::-1], "another"])
    for part in ("1/2", "2/2"):
        assert set(library.documents(file, part).texts) == set(
            library.documents(str(tmp_path / "more.jsonl"), part).texts
        ) - {"another"}


def test_most_takes_the_same_ones_again(file: str):
    few, more = (library.documents(file, most=most).texts for most in (2, 3))
    assert len(few) == 2 and set(few) < set(more)


@pytest.mark.parametrize("part", ["0/2", "3/2", "1", "a/b", "1/0", "", "-1/2", "1/2/3"])
def test_a_part_that_is_none_is_named(file: str, part: str):
    with pytest.raises(ValueError, match=r"A part is `i/n` with i from 1 to n, not '"):
        library.documents(file, part)


@pytest.mark.parametrize("line", ["{}", "no json", '{"text": ""}', '{"text": 3}', "[1]", '"text"', "null", ""])
def test_a_line_that_is_no_document_is_named(tmp_path: Path, line: str):
    (tmp_path / "bad.jsonl").write_text(f'{{"text": "good"}}\n{line}\n{{"text": "good too"}}\n')
    with pytest.raises(ValueError, match=r"^Line 2 of the documents is no JSON object with a `text`\.$"):
        library.documents(str(tmp_path / "bad.jsonl"))


def test_no_documents_are_refused(tmp_path: Path, file: str):
    with pytest.raises(ValueError, match=r"There are no documents at '.*nowhere': neither a file, nor a folder"):
        library.documents(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"Part 1/1 of '.*empty' has no document\."):
        library.documents(str(tmp_path / "empty"))
    with pytest.raises(ValueError, match="has no document"):
        library.documents(file, most=0)
    part = next(f"{i}/50" for i in range(1, 51) if not any(library._hash(text) % 50 == i - 1 for text in TEXTS))
    with pytest.raises(ValueError, match=f"Part {part} of .* has no document"):
        library.documents(file, part)


def test_k_and_the_query_are_checked(file: str):
    found = library.documents(file)
    with pytest.raises(ValueError, match="at least one document, not 0"):
        found.best("rain", 0)
    with pytest.raises(ValueError, match="The query is empty"):
        found.best("  ", 1)
    assert len(found.best("rain", 99)[0]) == 5  # all, where there are fewer


def test_the_corpus_gives_passages(monkeypatch):
    few = corpus.documents("test")[:3]
    monkeypatch.setattr(corpus, "documents", lambda split: few)
    found = library.documents(library.CORPUS, most=4, length=32)
    tokenizer = corpus.tokenizer()
    assert len(found.texts) == 4 and all(len(tokenizer(text).input_ids) <= 40 for text in found.texts)

"""DRAGON's documents: from a file, a folder or the corpus, shared out between sides, and what is refused."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from pathlib import Path

import pytest

from ondevice import corpus, shapes
from ondevice_programs.pair import __main__ as command
from ondevice_programs.pair import library
from ondevice_programs.pair.decoder import Template
from ondevice_programs.pair.node import Source
from ondevice_programs.pair.passages import Splitter

SUBJECTS = ["birds", "fish", "grass", "rain", "snow"]
TEXTS = [f"document {number} is about {subject}" for number, subject in enumerate(SUBJECTS)]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch) -> Path:
    """The user's cache, empty."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("ONDEVICE_CACHE", str(folder))
    return folder


def placed(folder: Path, **named) -> dict[str, tuple[str, int]]:
    """Texts with their sources."""
    found = library.documents(str(folder), **named)
    return {text: (source.file, source.paragraph) for text, source in zip(found.texts, found.sources, strict=True)}


def aged(folder: Path, seconds: float = 60) -> Path:
    """The folder, its files last changed a while ago."""
    for path in folder.rglob("*"):
        os.utime(path, (time.time() - seconds, time.time() - seconds), follow_symlinks=False)
    return folder


def files(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def file(tmp_path: Path) -> str:
    library.write(tmp_path / "texts.jsonl", TEXTS)
    return str(tmp_path / "texts.jsonl")


def test_a_file_has_a_document_a_line(file: str):
    found = library.documents(file)
    assert sorted(found.texts) == TEXTS and found.index.size == 5
    texts, scores = found.best("snow", 2)
    assert texts[0] == TEXTS[4] and scores[0] > scores[1] and len(texts) == 2


def test_relevance_is_the_share_of_the_question_that_a_text_covers(file: str):
    documents = library.documents(file)
    best, _ = documents.index.search(["snow"], 1)
    _, shares = documents.positions("snow", 1)
    assert 0 < shares[0] < 1 and shares[0] == pytest.approx(best[0, 0] / documents.index.ceiling("snow"))


def test_parts_share_all_documents_out(file: str):
    parts = [set(library.documents(file, f"{i}/2").texts) for i in (1, 2)]
    assert parts[0] | parts[1] == set(TEXTS) and not parts[0] & parts[1]


@pytest.mark.parametrize("part", ["0/2", "3/2", "1", "a/b"])
def test_a_part_that_is_none_is_named(file: str, part: str):
    with pytest.raises(ValueError, match="i/n"):
        library.documents(file, part)


@pytest.mark.parametrize("line", ["{}", "no json", '{"text": ""}', '{"text": 3}', "null"])
def test_a_line_that_is_no_document_is_named(tmp_path: Path, line: str):
    (tmp_path / "bad.jsonl").write_text(f'{{"text": "good"}}\n{line}\n{{"text": "good too"}}\n')
    with pytest.raises(ValueError, match="line 2"):
        library.documents(str(tmp_path / "bad.jsonl"))


def test_no_documents_are_refused(tmp_path: Path, file: str):
    (tmp_path / "empty").mkdir()
    for name in ("nowhere", "empty"):
        with pytest.raises(ValueError, match=name):
            library.documents(str(tmp_path / name))
    nothing, account = library.read(str(tmp_path / "empty"), empty=True)
    assert not nothing.texts and nothing.best("anything?", 2) == ([], []) and account.passages == 0
    with pytest.raises(ValueError, match="Part 1/1"):  # a file without a document is a mistake
        library.read(file, most=0, empty=True)


def test_the_corpus_gives_passages_that_are_kept_once(monkeypatch, cache: Path):
    """It is public, whoever reads it, and the same from any folder."""
    texts = [" ".join(f"{word}{n}" for n in range(60)) for word in ("rain", "snow")]
    few = [corpus.Document(f"a.{text[:4]}", "a", "function", "()", text, "") for text in texts]
    monkeypatch.setattr(corpus, "documents", lambda split: few)
    collection = library.documents(library.CORPUS, most=4, length=32, private=True)
    tokenizer = corpus.tokenizer()
    assert len(collection.texts) == 4 and all(len(tokenizer(text).input_ids) <= 40 for text in collection.texts)
    assert {source.file for source in collection.sources} <= {"a.rain", "a.snow"}
    kept = list(files(cache))
    monkeypatch.chdir(cache)
    library.documents(library.CORPUS, most=4, length=32)
    assert kept == list(files(cache)) != []


# Formats and encodings


def pdf(text: str) -> bytes:
    """A page with a text."""
    stream = f"BT /F 9 Tf 9 9 Td ({text}) Tj ET"
    objects = [
        "<</Type/Catalog/Pages 2 0 R>>", "<</Type/Pages/Kids[3 0 R]/Count 1>>",
        "<</Type/Page/Parent 2 0 R/MediaBox[0 0 99 99]/Contents 4 0 R/Resources<</Font<</F 5 0 R>>>>>>",
        f"<</Length {len(stream)}>>stream\n{stream}\nendstream", "<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]  # fmt: skip
    made, places = "%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        places.append(len(made))
        made += f"{number} 0 obj{content}endobj\n"
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    trailer = f"trailer<</Root 1 0 R/Size 6>>\nstartxref\n{len(made)}\n%%EOF\n"
    return f"{made}xref\n0 6\n0000000000 65535 f \n{table}{trailer}".encode()


NOTEBOOK = {
    "cells": [
        {"cell_type": "markdown", "metadata": {}, "source": ["# A\n", "\n", "cell"]},
        {"cell_type": "raw", "metadata": {}, "source": "left out"},
        {"cell_type": "code", "metadata": {}, "source": "x = 1", "outputs": [], "execution_count": None},
    ],
    "metadata": {}, "nbformat": 4, "nbformat_minor": 4,
}  # fmt: skip
HTML = (
    "<html><head><title>Name</title><style>p {}</style></head><body><h1>Head\n ing</h1><p>One <b>bold</b>\n word<p>two"
    "<br>lines</p><script>no()</script><!-- no --><table>"
    "<tr><td>a</td><td>b</td></table><pre>k\n  l</pre></body></html>"
)
PYTHON = 'import os\n\n\ndef f():\n    x = 1\n\n    return x\n\n\nclass A:\n    """Words."""\n'


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("a.TXT", "one\r\n \r\ntwo", {"one": 1, "two": 2}),
        ("a.rst", "one\n===\n\ntwo", {"one\n===": 1, "two": 2}),
        ("a.html", HTML, {"Name": 1, "Head ing": 2, "One bold word": 3, "two\nlines": 4, "a b": 5, "k\n  l": 6}),
        ("a.ipynb", json.dumps(NOTEBOOK), {"# A\n\ncell": 1, "x = 1": 3}),
        ("a.py", PYTHON, {"import os": 1, "def f():\n    x = 1\n\n    return x": 2, 'class A:\n    """Words."""': 3}),
        ("a.jsonl", '{"text": "one\u2028 line"}\n\n{"text": "half \\ud800"}\n', {"one\u2028 line": 1, "half ?": 3}),
    ],
)  # fmt: skip
def test_each_format_has_its_passages_and_places(tmp_path: Path, name: str, content: str, found: dict[str, int]):
    (tmp_path / name).write_bytes(content.encode())
    assert placed(tmp_path) == {text: (name, place) for text, place in found.items()}
    assert placed(tmp_path / name) == placed(tmp_path)  # alone, as in a folder


def test_without_pypdf_a_pdf_is_skipped_and_read_once_it_is_there(tmp_path: Path, monkeypatch):
    (tmp_path / "a.pdf").write_bytes(pdf("a page"))
    (tmp_path / "b.txt").write_text("b")
    aged(tmp_path)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pypdf", None)
        _, account = library.read(str(tmp_path))
    assert "a.pdf" in str(account)
    pytest.importorskip("pypdf")
    assert set(placed(tmp_path)) == {"a page", "b"}


GERMAN = "Die Vögel fliegen über die Dächer, und die Füße der Bären sind größer als die der Mäuse. " * 3


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32", "cp1252"])
def test_encodings_are_known_by_their_mark_or_guessed(tmp_path: Path, encoding: str):
    (tmp_path / "a.txt").write_bytes(GERMAN.encode(encoding))
    assert list(placed(tmp_path)) == [GERMAN.strip()]


# Skipping


def test_what_cannot_be_read_is_skipped_and_counted(tmp_path: Path, monkeypatch):
    folder, read = tmp_path / "folder", Path.read_bytes
    for inner in (".git", "deep"):
        (folder / inner).mkdir(parents=True)
    for name, content in {
        "folder/good.txt": b"good", "folder/empty.txt": b" \n", "folder/binary.txt": bytes(range(256)) * 9,
        "folder/half.txt": b"\xff\xfea", "folder/bad.ipynb": b"{", "folder/bad.jsonl": b"no", "folder/image.png": b"",
        "folder/none": b"", "folder/.hidden.txt": b"x", "folder/.git/a.txt": b"x", "folder/denied.txt": b"x",
        "outside.txt": b"outside",
    }.items():  # fmt: skip
        (tmp_path / name).write_bytes(content)
    links = {"loop.txt": "loop.txt", "out.txt": "../outside.txt", "deep/up": folder, "in.txt": "good.txt"}
    for link, target in links.items():
        (folder / link).symlink_to(target)
    os.mkfifo(folder / "pipe.txt")

    def denied(path: Path) -> bytes:
        if path.name == "denied.txt":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", denied)
    collection, account = library.read(str(folder))
    assert list(collection.texts) == ["good"] and account.files == 2 and account.passages == 1
    assert {reason: {name.split(":")[0] for name in names} for reason, names in account.skipped.items()} == {
        "empty": {"empty.txt"}, "of another kind": {"image.png", "none"}, library.HIDDEN: {".git", ".hidden.txt"},
        library.LINK: {"out.txt", "deep/up"},
        "unreadable": {"bad.ipynb", "bad.jsonl", "binary.txt", "denied.txt", "half.txt", "loop.txt", "pipe.txt"},
    }  # fmt: skip
    assert "\n" not in str(account) and all(name in str(account) for name in ("empty.txt", "bad.ipynb", "denied.txt"))
    (folder / "good.txt").unlink()
    (folder / "in.txt").unlink()
    with pytest.raises(ValueError, match="1 empty"):  # only where nothing is left it is an error
        library.documents(str(folder))


# Splitting and citing


def test_a_long_document_is_split_and_nothing_of_it_is_lost():
    tokenizer = shapes.byte_tokenizer()
    words = [f"Word{n}" + ("." if n % 7 == 6 else "") for n in range(300)]
    text = " ".join(words[:150]) + "\n\n" + "\n".join(words[150:]) + "語" * 90 + "x" * 200
    template = Template("<|passage|>{document}\n{query}")
    pieces = Splitter(tokenizer, 64, template)(text)
    assert "".join("".join(pieces).split()) == "".join(text.split())
    sizes = [len(template.prefix(tokenizer, piece)) for piece in pieces]
    assert max(sizes) <= 64 and min(sizes[:-1]) > 32
    assert pieces[0].endswith(".") and Splitter(tokenizer, 5000, template)(text) == [text]


def test_a_prompt_without_room_is_refused():
    with pytest.raises(ValueError, match="12"):
        Splitter(shapes.byte_tokenizer(), 12, Template("<|passage|>{document}\n{query}"))


def test_passages_have_their_sources(tmp_path: Path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.txt").write_text("rain falls\n\nsnow is white")
    found = library.documents(str(tmp_path))
    (place,), scores = found.positions("snow", 1)
    assert ([found.texts[place]], scores) == found.best("snow", 1) == (["snow is white"], scores)
    assert found.sources[place] == Source("deep/a.txt", 2)


# What is kept


def test_the_second_start_reads_no_unchanged_file(tmp_path: Path, monkeypatch):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"text {name}")
    first, read, taken = placed(aged(tmp_path)), [], []
    old_read, old_blocks = Path.read_bytes, library.blocks
    monkeypatch.setattr(Path, "read_bytes", lambda path: (read.append(path.name), old_read(path))[1])
    monkeypatch.setattr(library, "blocks", lambda suffix, data: (taken.append(data), old_blocks(suffix, data))[1])

    def start() -> tuple[dict[str, tuple[str, int]], list[str], list[bytes]]:
        read.clear()
        taken.clear()
        found = placed(tmp_path)
        return found, [name for name in read if name.endswith(".txt")], list(taken)

    assert start() == (first, [], [])
    (tmp_path / "b.txt").rename(tmp_path / "d.txt")
    assert start()[1:] == (["d.txt"], [b"text b"])
    (tmp_path / "a.txt").write_text("text z")  # of the same length
    found, _, taken_ = start()
    assert taken_ == [b"text z"] and set(found) == {"text z", "text b", "text c"}
    (tmp_path / "c.txt").unlink()
    assert set(start()[0]) == {"text z", "text b"}


def test_a_change_within_the_clocks_tick_is_seen(tmp_path: Path, monkeypatch):
    (tmp_path / "a.txt").write_text("one")
    placed(tmp_path)
    status = (tmp_path / "a.txt").stat()
    (tmp_path / "a.txt").write_text("two")
    os.utime(tmp_path / "a.txt", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert list(placed(tmp_path)) == ["two"]


def test_private_documents_leave_nothing_on_disk(tmp_path: Path, cache: Path):
    (tmp_path / "a.txt").write_text("zebras at dusk")
    assert library.documents(str(tmp_path), private=True).texts == ["zebras at dusk"]
    assert not files(cache) and list(files(tmp_path)) == ["a.txt"]


def test_what_a_named_folder_holds_of_private_documents_is_for_their_owner_alone(tmp_path: Path, cache: Path):
    """A folder with other things in it keeps its own mode."""
    documents, index = tmp_path / "documents", tmp_path / "index"
    documents.mkdir()
    index.mkdir(mode=0o755)
    (documents / "a.txt").write_text("zebras at dusk")
    for _ in range(2):
        assert library.documents(str(documents), private=True, index=index).texts == ["zebras at dusk"]
        assert index.stat().st_mode & 0o777 == 0o755
        assert {path.stat().st_mode & 0o777 for path in index.iterdir()} == {0o700}
        assert {path.stat().st_mode & 0o777 for path in index.rglob("*") if path.is_file()} == {0o600}
    assert len(files(index)) == 2 and not files(cache)


@pytest.mark.parametrize("damage", ["bit", "foreign", "folder"])
def test_a_damaged_cache_is_made_anew_with_a_warning(tmp_path: Path, file: str, cache: Path, damage: str, caplog):
    first = library.documents(file)
    kept = sorted(path for path in cache.rglob("*") if path.is_file())
    for path in kept:
        data = path.read_bytes()
        path.unlink()
        if damage == "folder":
            path.mkdir()
        else:
            flipped = data[:200] + bytes([data[200] ^ 1]) + data[201:]
            path.write_bytes({"bit": flipped, "foreign": b"[1]"}[damage])
    with caplog.at_level(logging.WARNING, "ondevice"):
        again = library.documents(file)
    assert again.texts == first.texts and again.best("snow", 3) == first.best("snow", 3)
    assert len([record for record in caplog.records if record.name.startswith("ondevice")]) >= 2  # passages, and index
    if damage != "folder":
        caplog.clear()
        assert library.documents(file).texts == first.texts and not caplog.records


def test_starts_at_a_time_do_not_damage_the_cache(tmp_path: Path, file: str, cache: Path, caplog):
    found, start = [], threading.Barrier(4)

    def run(number: int) -> None:
        start.wait()
        for turn in range(5):
            if number == 0:
                library.write(Path(file), [*TEXTS, f"more {turn}"])
            texts = library.documents(file).texts
            found.append({text for text in texts if text in TEXTS})

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 20 and [record for record in caplog.records if "anew" in record.getMessage()] == []
    assert set(library.documents(file).texts) == {*TEXTS, "more 4"} and len(files(cache)) == 2


# Apart


@pytest.mark.parametrize(
    ("private", "public"), [("a", "a"), ("a/b", "a"), ("a", "a/b"), ("link", "a"), ("a/b/t.txt", "a")]
)
def test_private_documents_within_public_ones_are_refused(tmp_path: Path, private: str, public: str):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "t.txt").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(ValueError, match="public"):
        library.require_apart(tmp_path / private, tmp_path / public)
    (tmp_path / "ab").mkdir()
    library.require_apart(tmp_path / "ab", tmp_path / public)
    with pytest.raises(ValueError, match="nowhere'"):
        library.require_apart(tmp_path / "ab", tmp_path / "nowhere")


def test_a_device_refuses_a_public_folder_around_its_own(tmp_path: Path, capsys):
    (tmp_path / "a.txt").write_text("x")
    words = ["device", "--documents", str(tmp_path), "--public", str(tmp_path), "--query", "x", "--model", "nowhere"]
    for more, named in (([], str(tmp_path)), (["--force"], "nowhere")):
        with pytest.raises(SystemExit, match="2"):
            command.main([*words, *more])
        assert named in capsys.readouterr().err


# The command


def test_the_command_says_what_a_side_has(tmp_path: Path, cache: Path, capsys):
    (tmp_path / "a.txt").write_text("one\n\ntwo")
    (tmp_path / "b.docx").write_text("x")
    words = ["documents", "--model", "smollm2-135m-instruct", "--documents", str(tmp_path)]
    command.main([*words, "--json"])
    account = json.loads(capsys.readouterr().out)
    assert account.pop("seconds") > 0
    assert {name.partition("/")[0] for name in files(cache)} == {"gguf"}  # what the model itself keeps
    assert account == {"files": 1, "passages": 2, "skipped": {"of another kind": ["b.docx"]}}
    command.main([*words, "--shared"])
    assert len([name for name in files(cache) if not name.startswith("gguf/")]) == 2
    with pytest.raises(SystemExit, match="2"):
        command.main([*words, "--part", "3/2"])

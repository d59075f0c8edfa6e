"""`ondevice-assistant` as it is used: in a folder of its own, on one machine and on two, and misused."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_dragon_privacy import tapped, texts_found

from ondevice_programs.assistant import __main__ as assistant

SECRET = "The backup password of the zebra server is kept in the blue drawer of the third cupboard on the left."
NOTES = f"# My machine\n\n{SECRET}\n\nThe parameter depth_limit of crawl is the number of links that a crawl follows.\n"
DOCS = (
    '# Files\n\nCall open with a path to read a file. The mode "r" opens a file for reading.\n\n'
    "# Crawling\n\nThe function crawl visits pages. The parameter delay is the seconds between two requests.\n"
)
QUESTION = "What does the parameter depth_limit of crawl mean?"
SHORT = "How is a file opened for reading?"
HELD = f"{SECRET} is the number of links that a crawl follows."  # of the notes, what the question does not say
FAST = ["--limit", "8"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the user is: notes and docs, and what is wrong with others."""
    place = tmp_path_factory.mktemp("desk")
    for name, text in {"notes/notes.md": NOTES, "docs/docs.md": DOCS, "docs/inner/more.md": DOCS}.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    (place / "empty").mkdir()
    return place


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


def start(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "ondevice_programs.assistant", *words], cwd=folder, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def port(folder: Path) -> Iterator[int]:
    """Of a cloud on another machine, so to speak."""
    process = start(folder, "--serve", "127.0.0.1:0", "--public", "docs", "--until-input-ends", *FAST)
    try:
        line = process.stdout.readline().decode()
        assert line.startswith("Listening on 127.0.0.1:"), process.stderr.read()
        yield int(line.rsplit(":", 1)[1])
    finally:
        process.communicate(timeout=60)
        process.kill()
    assert process.returncode == 0


def called(*words: str) -> int:
    """The exit code of the command, in this process."""
    try:
        assistant.main(list(words))
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_on_one_machine_an_answer_streams_with_sources_of_both_sides(folder: Path):
    process = start(folder, "--private", "notes", "--public", "docs", *FAST, "--patience", "60", SHORT)
    first = os.read(process.stdout.fileno(), 2**16)
    rest, note = process.communicate(timeout=240)
    note = note.decode()
    assert process.returncode == 0, note
    assert first.strip() and rest, "the text came at once"
    for shown in (r"notes\.md:\d \(device, \d+ %\)", r"docs\.md:\d \(cloud, \d+ %\)", r"Left this device: \d+ bytes",
                  r"and (\d) of the answer's \1 words", r"device \d of 8, cloud \d of 8"):  # fmt: skip
        assert re.search(shown, note), note
    assert "alone" not in note
    assert sorted(path.name for path in folder.iterdir()) == ["docs", "empty", "notes"]  # nothing is left there


def test_on_two_machines_the_budget_chooses_and_no_private_text_leaves(folder: Path, port: int):
    async def asked() -> tuple[tuple[bytes, bytes], int | None, bytes]:
        async with tapped(port) as (through, wire):
            device = start(folder, "--private", "notes", "--connect", f"127.0.0.1:{through}", "--budget", "0.75", *FAST,
                           "--patience", "60")  # fmt: skip
            lines = f"{SHORT}\n\n{QUESTION}\n".encode()
            said = await asyncio.to_thread(device.communicate, lines, 240)
        assert {type(message).__name__ for message in wire.messages("up")} <= {"Hello", "Begin", "Target", "End"}
        return said, device.returncode, wire.raw("up") + wire.raw("down")

    (text, note), code, raw = asyncio.run(asked())
    first, second = note.decode().partition("Nothing left this device.")[::2]
    assert code == 0 and len(text.decode().splitlines()) >= 2, note
    assert "alone" in first and "budget" in first
    assert "(cloud, " in second and "Left this device: " in second and "alone" not in second
    assert "Alone from token 4: the answer began to quote this device's documents." in second
    assert QUESTION.encode() in raw and SHORT.encode() not in raw
    assert texts_found(raw, QUESTION) and not texts_found(raw, HELD) and b"notes.md" not in raw


@pytest.mark.parametrize("cloud", ["--public docs", "--connect 127.0.0.1:1"])
def test_without_dragon_no_cloud_is_started_or_asked(
    here: Path, cloud: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(assistant, "cloud", None)
    words = ["--private", "notes", *cloud.split(), "--without", "DRAGON", "--without", "GRATING", *FAST]
    assert called(*words, QUESTION) == 0
    said = capsys.readouterr()
    assert said.out.strip() and "Nothing left this device." in said.err


def test_a_long_question_is_announced_before_it_is_read(here: Path, capsys: pytest.CaptureFixture[str]):
    """Two thousand words take most of a minute, in which nothing else is said."""
    assert called(*BOTH, *QUICK, QUESTION + " please" * 300) == 0
    assert "Reading a question of 3" in capsys.readouterr().err
    assert called(*BOTH, *QUICK, QUESTION) == 0
    assert "Reading a question" not in capsys.readouterr().err


def test_a_cloud_that_is_not_there_leaves_the_device_alone(here: Path, capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as opened:
        closed = opened.getsockname()[1]
    words = ["--private", "notes", "--connect", f"127.0.0.1:{closed}", "--patience", "0.2", *FAST]
    assert called(*words, QUESTION) == 0
    said = capsys.readouterr()
    assert said.out.strip() and f"127.0.0.1:{closed}" in said.err
    assert "notes.md" in said.err and "Nothing left this device." in said.err


MINE, BOTH = ["--private", "notes"], ["--private", "notes", "--public", "docs"]
QUICK = ["--without", "DRAGON", "--without", "GRATING", *FAST]
WRONG = [
    (["--private", "nowhere", "--public", "docs", "?"], "'nowhere'"),
    ([*MINE, "?"], "--public"),
    ([*BOTH, "--connect", "127.0.0.1:5", "?"], "--connect"),
    (["--private", "docs/inner", "--public", "docs", "?"], "Private"),
    ([*MINE, "--connect", "127.0.0.1:0", "?"], "port"),
    (["--serve", "127.0.0.1:0", *BOTH], "--serve"),
    ([*BOTH, "--without", "ANDROID", "?"], "'ANDROID'"),
    ([*BOTH, "--budget", "2", "?"], "--budget"),
    ([*BOTH, "--memory", "1", "?"], "budget"),
    (["--private", "empty", "--public", "docs", "--without", "GRATING", *FAST, "?"], "'empty'"),
    ([*BOTH, *QUICK, "why " * 9000], "room"),
    ([*BOTH, *QUICK, " "], "query"),
]


@pytest.mark.parametrize(("words", "said"), WRONG, ids=[" ".join(words)[:70] for words, _ in WRONG])
def test_what_cannot_be_is_refused_in_one_sentence_before_a_cloud_starts(
    here: Path, words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(subprocess, "Popen", None)
    code, shown = called(*words), capsys.readouterr()
    assert code == 2 and said in shown.err, shown.err
    assert len(shown.err.splitlines()) == 1 and "Traceback" not in shown.err and not shown.out.strip()


def test_a_cloud_that_does_not_start_says_why(folder: Path):
    process = start(folder, "--private", "notes", "--public", "empty", "--without", "GRATING", *FAST, "?")
    text, note = process.communicate(timeout=240)
    assert process.returncode == 2 and not text and b"'empty'" in note and b"Traceback" not in note


def test_two_machines_with_tls(folder: Path, tmp_path: Path):
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    words = ["openssl", "req", "-x509", *curve, "-nodes", "-days", "2"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = [str(tmp_path / name) for name in ("key.pem", "own.pem")]
    try:
        subprocess.run([*words, *names, "-keyout", files[0], "-out", files[1]], check=True, capture_output=True)
    except OSError:
        pytest.skip("there is no openssl to make a certificate with")
    plain, tls = [*FAST, "--without", "GRATING"], ["--key", files[0], "--certificate", files[1]]
    cloud = start(folder, "--serve", "127.0.0.1:0", "--public", "docs", "--until-input-ends", *plain, *tls)
    try:
        there = "127.0.0.1:" + cloud.stdout.readline().decode().rsplit(":", 1)[1].strip()
        asking = ["--private", "notes", "--connect", there, *plain]
        trusting = ["--authority", files[1]]
        said = [start(folder, *asking, *more, SHORT).communicate(timeout=120)[1] for more in ([], trusting)]
        assert b"docs.md" in said[1] and b"docs.md" not in said[0]
    finally:
        cloud.communicate(timeout=60)

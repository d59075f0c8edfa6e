"""README and docs/: what they show runs as it stands, page by page, and their links lead somewhere.

A block that is neither run nor of a kind in CANNOT_RUN fails its page. Folders and files that examples name are made.
A server takes a free port, which takes the place of its own in the rest of the page.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import nbformat
import pytest
import yaml

from ondevice.assets import ROOT
from ondevice.run.__main__ import main as run_notebooks
from ondevice.run.moved import HOMES
from ondevice_programs.router import config

PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
CANNOT_RUN = {  # how a command or a block begins, by why it is not run
    "needs the network": ("conda env create", "bash .ci/setup", "pip install", "python -m ondevice.data", "litellm"),
    "takes minutes to hours; its tests run small ones": (
        "make", "ondevice-bench", "ondevice-graphs export smollm2-135m-instruct GRAPHS --target htp",
        "ondevice-graphs compile", "python -m ondevice_studies.record", "python tests/benchmarks/", "python -m pytest",
    ),
    "rewrites a file of the repository, to which a test holds it": (
        "python -m ondevice_programs.bench.leaderboard", "python -m ondevice_studies.rules_lock",
        "python -m ondevice_studies.drawings", "python -m ondevice_studies.api",
    ),
    "changes the reader's shell, files or checkout, or names a GPU": (
        "make clean && rm", "source .venv/", "git add", "python -c",
    ),
    "is no command: an output, signatures, a row of a table, a directive of Sphinx": ("text", "pyi", '"', "{"),
}  # fmt: skip
NOT_RUN = tuple(beginning for beginnings in CANNOT_RUN.values() for beginning in beginnings)
FENCE = re.compile(
    r"^(?P<indent> *)(?P<fence>`{3,}|~{3,}) *(?P<kind>[^\n`]*)\n(?P<body>.*?)^(?P=indent)(?P=fence) *$", re.M | re.S
)
LINK = re.compile(r"\[[^]]*]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)")
SERVES = {  # servers: the option of their address, and the port without it
    "ondevice-router serve": ("--port", 8400),
    "ondevice-router replay": ("--port", 8401),
    "ondevice-rerank serve": ("--port", 8080),
    "ondevice-pair cloud": ("--listen", 7600),
    "ondevice-assistant --public": ("--serve", 0),
}
# The module of each command that is run, by pyproject's list.
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PROGRAMS = {name: target.partition(".__main__:")[0] for name, target in PROJECT["scripts"].items()}


class Page:
    """The state that a page's blocks share: a folder, names, servers and their ports."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder, self.stack, self.ports, self.said = folder, stack, {}, []
        self.names: dict[str, Any] = {
            "documents": [f"How to open file {number}." for number in range(12)], "path": folder / "calibration.json",
            "text": "Return the mean of the array elements along the given axis. " * 20,
            "sequences": [[5, 6, 7, 8] * 5], "answers": [([5, 6], [7, 8, 5, 6, 7])],
            "queries": [f"open file {number}" for number in range(199)],
            "candidates": [[f"How to open file {number + more}." for more in range(6)] for number in range(199)],
        }  # fmt: skip
        (folder / "documents.txt").write_text("A file is opened by open().\nA sum adds numbers.\nA list is sorted.\n")
        for name, said in ("PUBLIC_FOLDER", "numpy.sum adds along an axis."), ("PRIVATE_FOLDER", "My file is red."):
            (folder / name).mkdir()
            (folder / name / "page.md").write_text(f"# Notes\n\n{said} {said.lower()}\n")

    def block(self, kind: str, body: str) -> None:
        """Run one block. Raises AssertionError where it fails, or is of a kind that nothing runs."""
        if kind == "python" and "dask_jobqueue" in body:  # needs Slurm
            compile(body, "page", "exec", dont_inherit=True)
        elif kind == "python":
            with contextlib.chdir(self.folder):
                exec(compile(self._moved(body), "page", "exec", dont_inherit=True), self.names)
        elif kind == "yaml":
            self._config(body)
        elif kind == "bibtex":
            papers = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
            plain = re.sub("[{}]", "", body)
            cited = [paper["title"] for paper in (papers, *papers["references"]) if f"= {paper['title']}," in plain]
            assert len(cited) == body.count("\n@") + body.startswith("@") and body.count("{") == body.count("}")
        elif kind in ("", "sh", "bash"):
            for line in body.replace("\\\n", " ").splitlines():
                if words := shlex.split(self._moved(line), comments=True):
                    self.command(line.strip(), words)
        else:
            assert kind.startswith(NOT_RUN), f"a block of kind {kind!r} is neither run nor known not to run"

    def command(self, line: str, words: list[str]) -> None:
        """Run one command, or what can be of it."""
        line, words = line.removeprefix(".venv/bin/"), [words[0].removeprefix(".venv/bin/"), *words[1:]]
        if (words[0] != "make" and line.startswith(NOT_RUN) and words[0] != "pip") or "&&" in words:
            assert line.startswith(NOT_RUN), f"{line!r} is neither run nor known not to run"
        elif words[0] == "make":
            made = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
            assert made.returncode == 0 and made.stdout, made.stderr
        elif words[:2] == ["pip", "install"]:
            named = {name for extras in re.findall(r"\[([\w,]+)]", line) for name in extras.split(",")}
            assert named <= set(PROJECT["optional-dependencies"]), line
        elif words[0] == "ondevice-run":  # planned; what they do is tests/notebooks' matter
            assert run_notebooks([*words[1:], *(["--list"] if "--list" not in words else [])]) == 0, line
        elif words[0] in PROGRAMS:
            self._program(words[0], words[1:])
        elif words[0] == "curl":
            made = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
            assert made.returncode == 0 and "error" not in made.stdout, made.stdout + made.stderr
        else:
            assert line.startswith(NOT_RUN), f"{line!r} is neither run nor known not to run"

    def _program(self, program: str, words: list[str]) -> None:
        served = next((name for name in SERVES if " ".join([program, *words]).startswith(name)), None)
        if served:
            self._serve(program, words, served)
            return
        if "<" in words:
            words, source = words[: words.index("<")], self.folder / words[words.index("<") + 1]
        else:
            source = Path(os.devnull)
        if program == "ondevice-pair" and words[0] == "device":
            words = [*words, "--connect", f"127.0.0.1:{self._port(7600)}", "--limit", "4"]
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(), source.open(encoding="utf-8") as opened:
            warnings.simplefilter("ignore", RuntimeWarning)  # the module is imported already
            patch.chdir(self.folder)
            patch.setattr(sys, "stdin", opened)
            patch.setattr(sys, "argv", [program, *words])
            try:
                runpy.run_module(PROGRAMS[program], run_name="__main__", alter_sys=True)
            except SystemExit as end:
                assert not end.code, f"{program} {words}: exit code {end.code}"

    def _serve(self, program: str, words: list[str], served: str) -> None:
        """Start a server on a free port, and wait until it listens."""
        option, default = SERVES[served]
        given = words[words.index(option) + 1] if option in words else str(default)
        free = "0" if option == "--port" else "127.0.0.1:0"
        command = [sys.executable, "-m", PROGRAMS[program], *words, option, free]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "EXAMPLE_KEY": "key"}
        server = subprocess.Popen(command, cwd=self.folder, env=environment, stdout=subprocess.PIPE, text=True)
        self.stack.callback(server.wait, 30)
        self.stack.callback(server.terminate)
        line = server.stdout.readline() if server.stdout else ""
        found = re.match(r"Listening on .*:(\d+)", line)
        assert found, f"{command} said {line!r}"
        self.ports[int(given.rsplit(":", 1)[-1])] = int(found[1])

    def _moved(self, text: str) -> str:
        """With the ports on which this page's servers listen."""
        return re.sub(r"\b127\.0\.0\.1:(\d+)", lambda it: f"127.0.0.1:{self._port(int(it[1]))}", text)

    def _port(self, printed: int) -> int:
        """The port of a server that was started, for the one that the page has; else one on which nobody listens."""
        if printed not in self.ports:
            with socket.create_server(("127.0.0.1", 0)) as opened:
                self.ports[printed] = opened.getsockname()[1]
        return self.ports[printed]

    def _config(self, body: str) -> None:
        if "routing_strategy" in body:  # LiteLLM's own file
            assert {*yaml.safe_load(body)["model_list"][0]} == {"model_name", "litellm_params"}
            return
        path = self.folder / "config.yaml"
        path.write_text(body, encoding="utf-8")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("EXAMPLE_KEY", "key")
            assert config.load(path, {}).model_list


@pytest.fixture
def page(tmp_path) -> Iterator[Page]:
    with contextlib.ExitStack() as stack:
        yield Page(tmp_path, stack)


def blocks(text: str) -> list[tuple[str, str]]:
    """(kind, body) of every fenced block. Raises AssertionError where a fence is not one of a pair."""
    cut = [(one, re.sub(f"^{one['indent']}", "", one["body"], flags=re.M)) for one in FENCE.finditer(text)]
    found = [(one["kind"].strip(), body) for one, body in cut]
    assert len(re.findall(r"^ *(?:```|~~~)", FENCE.sub("", text), re.M)) == 0, "a fence is left open"
    return found


@pytest.mark.parametrize("path", PAGES, ids=[path.name for path in PAGES])
def test_what_a_page_shows_runs(path, page, capsys):
    found = blocks(path.read_text(encoding="utf-8"))
    for kind, body in sorted(found, key=lambda one: one[0] != "yaml"):  # a file, before the command that reads it
        page.block(kind, body)
    if path.name in ("README.md", "drafters.md"):
        names = page.names
        plain = names["loaded"].model.generate(names["ids"], max_new_tokens=150, do_sample=False)
        assert names["answer"].tolist() == plain[0, names["ids"].shape[1] :].tolist()
    if path.name == "README.md":
        shown, ran = (re.findall(r"^(\d+) passes\n(\d+) tokens: ", text, re.M)[-1]
                      for text in (path.read_text(encoding="utf-8"), capsys.readouterr().out))  # fmt: skip
        assert shown[1] == ran[1]  # tokens; logits that nearly tie differ between processors
        assert int(ran[0]) == pytest.approx(int(shown[0]), rel=0.1)


@pytest.mark.parametrize(("kind", "body"), [
    ("rust", "fn main() {}"), ("", "sudo reboot"), ("", "make reproduse"), ("", "pip install .[everything]"),
    ("", "ondevice-run disco --set alpa=1"), ("", "ondevice-rerank rang"), ("yaml", "model_list: []"),
])  # fmt: skip
def test_a_wrong_block_is_noticed(kind, body, page):
    with pytest.raises((AssertionError, ValueError)):
        page.block(kind, body)


@pytest.mark.parametrize("path", PAGES, ids=[path.name for path in PAGES])
def test_commands_in_a_line_of_text_exist(path):
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    for target in re.findall(r"`make ([\w-]+)", text):
        assert f"\n{target}:" in (ROOT / "Makefile").read_text(encoding="utf-8"), target
    if path.name == "CHANGELOG.md":  # what a line says has left need not be there
        text = re.sub(r"^- .* ha(s|ve) left .*$", "", text, flags=re.M)
    for module in re.findall(r"`(?:python -m )?(ondevice(?:\.\w+)+)", text):
        moved = path.name == "CHANGELOG.md" and module in HOMES
        assert moved or importlib.util.find_spec(module), module


@pytest.mark.parametrize("path", PAGES, ids=[path.name for path in PAGES])
def test_links_lead_to_files_and_headings(path):
    for target, anchor in LINK.findall(FENCE.sub("", path.read_text(encoding="utf-8"))):
        aim = path.parent / unquote(target) if target else path
        assert aim.exists(), target
        if anchor:
            text = aim.read_text(encoding="utf-8")
            if aim.suffix == ".ipynb":
                cells = nbformat.reads(text, as_version=4).cells
                text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
            headings = re.findall(r"^#+ (.*)$", text, re.M)
            by_jupyter = [one.replace(" ", "-") for one in headings]
            by_github = [re.sub(r"[^\w\- ]", "", one).replace(" ", "-").lower() for one in headings]
            assert unquote(anchor) in by_jupyter + by_github, anchor

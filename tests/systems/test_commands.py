"""Every command refuses what cannot be: exit code 2, one sentence on standard error, before anything slow."""

import re
import runpy
import socket
import sys
import tomllib
import warnings

import pytest

from ondevice.assets import ROOT
from ondevice.run.__main__ import main as run

pytestmark = pytest.mark.gate

RUN, TRAINING = "ondevice.run", "ondevice_training"
ROUTER, PAIR = "ondevice_programs.router", "ondevice_programs.pair"
RERANK, GRAPHS = "ondevice_programs.reranker", "ondevice_programs.graphs"
ASSISTANT = "ondevice_programs.assistant"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
COMMANDS = {name: target.partition(".__main__:")[0] for name, target in PROJECT["scripts"].items()}
URLS = ["serve", "--device", "http://127.0.0.1:1", "--server", "http://127.0.0.1:2", "--port", "0"]
TRAIN = ["reranker", "--parent", "all-minilm-l6-v2", "--queries", "8"]

# Program, its words, and what the sentence names: a row per program and kind of mistake. {folder} is empty, {text}
# holds no JSON, {busy} is a port in use.
WRONG = [
    (RUN, ["--colour"], "--colour"),
    (RUN, ["goood"], "goood"),
    (RUN, ["disco", "--set", "alpha=7"], "alpha"),
    (RUN, ["disco", "--params", "nowhere.yaml"], "nowhere.yaml"),
    (ROUTER, [], "command"),
    (ROUTER, [*URLS, "--port", "{busy}"], "listen"),
    (ROUTER, [*URLS, "--budget", "1.5"], "budget"),
    (ROUTER, [*URLS, "--device", "here"], "'here'"),
    (ROUTER, [*URLS, "--server-key", "NO_SUCH_KEY"], "NO_SUCH_KEY"),
    (ROUTER, ["serve", "--config", "{text}"], "text.txt"),
    (PAIR, ["device", "--connect", "here:99999"], "HOST:PORT"),
    (PAIR, ["device", "--documents", "{folder}", "--public", "{folder}"], "Private"),
    (PAIR, ["documents", "--documents", "{text}", "--index", "{text}/index"], "written"),
    (PAIR, ["cloud", "--certificate", "nowhere.pem"], "nowhere.pem"),
    (TRAINING, [*TRAIN, "--out", "{text}/model"], "written"),
    (RERANK, ["serve", "--memory-budget", "much"], "memory budget"),
    (GRAPHS, ["generate", "{folder}", "--prompt", "x"], "graphs"),
    (GRAPHS, ["export", "smollm2-135m-instruct", "{folder}/g", "--context", "99999"], "99999"),
    ("ondevice_programs.bench", ["nowhere", "--drafters", "eagle"], "'eagle'"),
    ("ondevice.data", ["spec_bench"], "'spec_bench'"),
    ("ondevice_studies.record", ["nobody"], "paper"),
]


def start(program: str, words: list[str]) -> object:
    """The exit code of `python -m <program>`, in this process."""
    if program == "ondevice.run":  # its module takes the signals
        sys.exit(run(words))
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the module is imported already
        patch.setattr(sys, "argv", [program, *words])
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    return 0


@pytest.mark.parametrize(("program", "words", "named"), WRONG, ids=[" ".join([p, *w]) for p, w, _ in WRONG])
def test_a_wrong_command_line_is_refused_in_one_sentence(program, words, named, tmp_path, capsys):
    text, folder = tmp_path / "text.txt", tmp_path / "folder"
    text.write_text("words")
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as opened:
        values = {"text": text, "folder": folder, "busy": opened.getsockname()[1]}
        words = [re.sub(r"\{(text|folder|busy)\}", lambda found: str(values[found[1]]), word) for word in words]
        try:
            code = start(program, words)
        except SystemExit as end:
            code = end.code
    error = capsys.readouterr().err
    assert code == 2, error
    assert named in error and len(error.splitlines()) == 1 and "Traceback" not in error, error
    assert not list(folder.iterdir())


WITH_COMMANDS = {  # whose commands have the examples
    ROUTER: "serve replay",
    PAIR: "cloud device documents",
    RERANK: "rank serve",
    GRAPHS: "export compile generate",
}
HELP = [f"{RUN} publish", RUN, "ondevice_programs.bench", ASSISTANT, f"{TRAINING} reranker", *WITH_COMMANDS]
HELP += [f"{program} {command}" for program, commands in WITH_COMMANDS.items() for command in commands.split()]


@pytest.mark.parametrize("program", HELP)
def test_help_fits_a_screen_and_shows_defaults_and_an_example(program, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    first, *rest = program.split()
    with pytest.raises(SystemExit) as end:
        start(first, [*rest, "--help"])
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert end.value.code == 0 and len(lines) <= 40 and max(map(len, lines)) <= 100
    command = next((name for name, module in COMMANDS.items() if module == first), f"python -m {first}")
    assert lines[0].startswith(f"usage: {' '.join([command, *rest])}")
    if program not in WITH_COMMANDS:
        assert "example:\n  " in shown
        assert program.endswith("publish") or "(default: " in " ".join(shown.split())

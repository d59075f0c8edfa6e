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
LM = ["lm", "--size", "tiny", "--tokens", "9", "--out", "{folder}/new"]
EVALUATE = ["evaluate", "--model", "nowhere", "--out", "{folder}"]

# Program, its words, and what the sentence names: a row per kind of mistake. {folder} is empty, {text} holds no JSON,
# {busy} is a port in use.
WRONG = [
    (RUN, ["--jobs", "two"], "--jobs"),
    (RUN, ["--timeout", "nan"], "--timeout"),
    (RUN, ["--colour"], "--colour"),
    (RUN, ["goood"], "goood"),
    (RUN, ["disco", "--set", "sed=3"], "'sed'"),
    (RUN, ["disco", "--set", "alpha=7"], "alpha"),
    (RUN, ["disco", "--set", "runs=many"], "'many'"),
    (RUN, ["disco", "--set", "seed=1", "--set", "seed=2"], "seed twice"),
    (RUN, ["disco", "--params", "nowhere.yaml"], "nowhere.yaml"),
    (RUN, ["publish", "goood"], "goood"),
    (ROUTER, [], "command"),
    (ROUTER, ["serve"], "endpoints"),
    (ROUTER, [*URLS, "--port", "99999"], "--port"),
    (ROUTER, [*URLS, "--port", "{busy}"], "listen"),
    (ROUTER, [*URLS, "--host", "256.1.1.1"], "256.1.1.1"),
    (ROUTER, [*URLS, "--budget", "1.5"], "budget"),
    (ROUTER, [*URLS, "--migration", "soon"], "migration"),
    (ROUTER, [*URLS, "--device", "here"], "'here'"),
    (ROUTER, [*URLS, "--server-key", "NO_SUCH_KEY"], "NO_SUCH_KEY"),
    (ROUTER, ["serve", "--config", "{text}"], "text.txt"),
    (ROUTER, ["replay", "--ttft", "0.1", "soon"], "--ttft"),
    (PAIR, ["device", "--connect", "here:99999"], "HOST:PORT"),
    (PAIR, ["device", "--model", "nowhere", "--query", " "], "query"),
    (PAIR, ["device", "--scheduler", "none"], "'none'"),
    (PAIR, ["device", "--documents", "{folder}", "--public", "{folder}"], "Private"),
    (PAIR, ["documents", "--documents", "nowhere"], "'nowhere'"),
    (PAIR, ["documents", "--documents", "{text}", "--index", "{text}/index"], "written"),
    (PAIR, ["cloud", "--certificate", "nowhere.pem"], "nowhere.pem"),
    (TRAINING, [*LM, "--out", "{text}/model"], "written"),
    (TRAINING, [*EVALUATE, "--limit", "2"], "--limit"),
    (RERANK, ["serve", "--memory-budget", "much"], "memory budget"),
    (GRAPHS, ["generate", "{folder}", "--prompt", "x"], "graphs"),
    (GRAPHS, ["export", "pydocs-lm-small", "{folder}/g", "--context", "99999"], "99999"),
    ("ondevice_programs.bench", ["nowhere", "--drafters", "eagle"], "'eagle'"),
    ("ondevice_studies.diaa.memory", ["now"], "by hand"),
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


HELP = {  # each command, and the options that change what it promises, which its help names
    f"{RUN}": "--params --set --force --jobs --timeout --list publish",
    f"{RUN} publish": "",
    f"{ROUTER}": "--budget --constrained --pace --migration --key",
    f"{ROUTER} serve": "--budget --constrained --pace --migration --key --config --device --server --host --port",
    f"{ROUTER} replay": "--ttft --tbt --host --port",
    f"{PAIR}": "--aggregator --scheduler --guard",
    f"{PAIR} cloud": "--most-memory --model --documents --certificate --authority",
    f"{PAIR} device": "--mode --aggregator --scheduler --guard --temperature --model --documents --public --force",
    f"{PAIR} documents": "--shared --index",
    f"{RERANK}": "--memory-budget",
    f"{RERANK} rank": "--memory-budget --model --top-k",
    f"{RERANK} serve": "--memory-budget --model --host --port",
    f"{GRAPHS}": "--target --drafter --plan",
    f"{GRAPHS} export": "--target --context --texts --weights --cache-bits --blocks --large --small --compared",
    f"{GRAPHS} compile": "--soc",
    f"{GRAPHS} generate": "--drafter --plan --memory --history --tokens",
    "ondevice_programs.bench": "--prompts --threads --formats --drafters --minutes --compare --json --picture",
    ASSISTANT: "--private --public --without --budget --memory --connect --serve --certificate",
}
EXAMPLES = {*HELP, f"{TRAINING} lm"} - {ROUTER, PAIR, RERANK, GRAPHS}  # the last four have commands with examples


def help_of(program, capsys):
    first, *rest = program.split()
    with pytest.raises(SystemExit) as end:
        start(first, [*rest, "--help"])
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("program", HELP)
def test_help_fits_a_screen_and_names_what_changes_the_promise(program, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    lines = help_of(program, capsys).splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 100
    assert set(HELP[program].split()) <= set(re.findall(r"[\w-]+", " ".join(lines)))
    command = next(name for name, module in COMMANDS.items() if module == program.split()[0])
    assert lines[0].startswith(f"usage: {command} {' '.join(program.split()[1:])}".strip())


@pytest.mark.parametrize("program", sorted(EXAMPLES))
def test_help_shows_defaults_and_an_example(program, capsys):
    shown = help_of(program, capsys)
    assert "example:\n  " in shown
    assert program.endswith("publish") or "(default: " in " ".join(shown.split())

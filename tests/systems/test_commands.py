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
RERANKER = ["reranker", "--parent", "nowhere", "--out", "{folder}", "--queries"]

# Program, its words, and what is said; {folder} is empty, {text} a file that is no JSON, {busy} a port in use.
WRONG = [
    (RUN, ["--jobs", "two"], "--jobs: it is a whole number from 1, not 'two'"),
    (RUN, ["--jobs", "0"], "--jobs: it is a whole number from 1, not '0'"),
    (RUN, ["--timeout", "never"], "--timeout: it is a number above 0, not 'never'"),
    (RUN, ["--timeout", "nan"], "--timeout: it is a number above 0"),
    (RUN, ["--colour"], "unrecognized arguments: --colour"),
    (RUN, ["goood"], "There is no notebook for goood"),
    (RUN, ["disco", "--set", "seed"], "write name=value"),
    (RUN, ["disco", "--set", "sed=3"], "disco has no parameter 'sed'; it has model, seed"),
    (RUN, ["disco", "--set", "alpha=7"], "alpha of disco is in (0 to 1), and 7.0 is not"),
    (RUN, ["disco", "--set", "seed=-1"], "seed of disco is in [0 to 1e9], and -1 is not"),
    (RUN, ["disco", "--set", "runs=many"], "runs of disco is int, and 'many' is str"),
    (RUN, ["sdnpu", "--set", "threads=0"], "threads of sdnpu is in [1 to 256], and 0 is not"),
    (RUN, ["sdnpu", "--set", "sample=5"], "sample of sdnpu is in [0 to 4], and 5 is not"),
    (RUN, ["disco", "--set", "seed=1", "--set", "seed=2"], "--set names seed twice"),
    (RUN, ["disco", "--params", "best"], "There is no parameter file notebooks/params/disco.best.yaml"),
    (RUN, ["disco", "--params", "nowhere.yaml"], "There is no parameter file nowhere.yaml"),
    (RUN, ["disco", "--params", "{text}"], "holds no mapping"),
    (RUN, ["publish", "goood"], "There is no notebook for goood"),
    (RUN, ["publish", "--colour"], "unrecognized arguments: --colour"),
    ("ondevice.run.sources", ["goood"], "There is no notebook for goood"),
    (ROUTER, [], "the following arguments are required: command"),
    (ROUTER, ["serve"], "Name the endpoints"),
    (ROUTER, [*URLS, "--port", "99999"], "--port: it is a whole number from 0 to 65535, not '99999'"),
    (ROUTER, [*URLS, "--port", "{busy}"], "Nobody can listen on 127.0.0.1:"),
    (ROUTER, [*URLS, "--host", "256.1.1.1"], "Whoever reaches 256.1.1.1 could spend your budget"),
    (ROUTER, [*URLS, "--host", "256.1.1.1", "--key", "PATH"], "Nobody can listen on 256.1.1.1"),
    (ROUTER, [*URLS, "--budget", "1.5"], "router_settings.budget: input should be less than or equal to 1"),
    (ROUTER, [*URLS, "--migration", "soon"], "router_settings.migration: input should be 'stop' or 'no'"),
    (ROUTER, [*URLS, "--migration", "overlap"], "migration: overlap is not taken any more"),
    (ROUTER, [*URLS, "--pace", "0"], "router_settings.pace: input should be greater than 0"),
    (ROUTER, [*URLS, "--device", "http://127.0.0.1:2"], "http://127.0.0.1:2/v1 default is on both sides"),
    (ROUTER, [*URLS, "--device", "here"], "litellm_params.api_base: 'here' is not the http(s) URL of an API"),
    (ROUTER, [*URLS, "--server-key", "NO_SUCH_KEY"], "the environment variable NO_SUCH_KEY holds nothing"),
    (ROUTER, [*URLS, "--config", "{text}"], "in the file or on the command line, not in both"),
    (ROUTER, ["serve", "--config", "{text}"], "text.txt holds no mapping"),
    (ROUTER, ["serve", "--config", "nowhere.yaml"], "there is no file 'nowhere.yaml' that can be read"),
    (ROUTER, ["replay", "--ttft", "-1"], "--ttft: it is a number from 0"),
    (ROUTER, ["replay", "--ttft", "0.1", "soon"], "--ttft: it is a number from 0, not 'soon'"),
    ("ondevice_studies.disco.traces", ["now"], "unrecognized arguments: now"),
    (PAIR, ["device", "--connect", "here"], "an address is HOST:PORT with a port from 0 to 65535, not 'here'"),
    (PAIR, ["device", "--connect", "here:99999"], "an address is HOST:PORT"),
    (PAIR, ["device", "--model", "nowhere", "--k", "0"], "A request's k cannot be 0"),
    (PAIR, ["device", "--model", "nowhere", "--query", " "], "The query is empty"),
    (PAIR, ["device", "--temperature", "-1"], "--temperature: it is a number from 0"),
    (PAIR, ["device", "--guard", "1"], "a quotation has two tokens or more; 0 switches the guard off"),
    (PAIR, ["device", "--mode", "none"], "invalid choice: 'none' (choose from"),
    (PAIR, ["device", "--scheduler", "none"], "invalid choice: 'none' (choose from"),
    (PAIR, ["device", "--query", "?", "--model", "nowhere"], "nowhere"),
    (PAIR, ["device", "--documents", "{folder}", "--public", "nowhere"], "neither a file nor a folder 'nowhere'"),
    (PAIR, ["device", "--documents", "{folder}", "--public", "{folder}"], "Private documents stand apart"),
    (PAIR, ["documents", "--documents", "nowhere"], "There are no documents at 'nowhere'"),
    (PAIR, ["documents", "--documents", "{folder}"], "has no document"),
    (PAIR, ["documents", "--documents", "{text}", "--index", "{text}/index"], "nothing can be written to"),
    (PAIR, ["documents", "--documents", "{text}", "--longest", "3"], "leave no room"),
    (PAIR, ["cloud", "--listen", ":1"], "an address is HOST:PORT"),
    (PAIR, ["cloud", "--model", "pydocs-lm-small", "--documents", "nowhere"], "nowhere"),
    (PAIR, ["cloud", "--model", "pydocs-lm-small", "--documents", "{text}", "--part", "3/2"], "A part is"),
    (PAIR, ["cloud", "--store", "{text}/store"], "nothing can be written to"),
    (PAIR, ["cloud", "--certificate", "nowhere.pem"], "there is no file 'nowhere.pem'"),
    (PAIR, ["cloud", "--threads", "0"], "--threads: it is a whole number from 1"),
    (TRAINING, [], "the following arguments are required: command"),
    (TRAINING, [*LM, "--size", "huge"], "invalid choice: 'huge'"),
    (TRAINING, [*LM, "--tokens", "many"], "--tokens: it is a whole number from 1"),
    (TRAINING, [*LM, "--out", "{text}/model"], "nothing can be written to"),
    (TRAINING, [*LM, "--threads", "0"], "--threads: it is a whole number from 1"),
    (TRAINING, EVALUATE, "nowhere"),
    (TRAINING, [*EVALUATE, "--limit", "2"], "--limit: it is a number above 0 to 1"),
    (TRAINING, [*EVALUATE, "--log", "nowhere.csv"], "there is no file 'nowhere.csv'"),
    (TRAINING, [*RERANKER, "0"], "--queries: it is a whole number from 1"),
    (TRAINING, [*RERANKER, "8"], "nowhere"),
    (TRAINING, ["evaluate-reranker", "--model", "nowhere", "--out", "{folder}/a.json"], "nowhere"),
    (RERANK, ["serve", "--memory-budget", "much"], "memory budget"),
    ("ondevice_studies.grating.full_size", [], "is not started by hand"),
    ("ondevice_programs.reranker.folder", ["now"], "is not started by hand"),
    (GRAPHS, ["generate", "{folder}", "--prompt", "x"], "holds no graphs of this version"),
    (GRAPHS, ["export", "nowhere", "{folder}/g"], "nowhere"),
    (GRAPHS, ["export", "pydocs-lm-small", "{folder}/g", "--texts", "{text}"], "tokens; ranges and logits take"),
    (GRAPHS, ["export", "pydocs-lm-small", "{folder}/g", "--context", "99999"], "not 99999"),
    (GRAPHS, ["compile", "{folder}", "{folder}/g"], "holds no graphs of this version"),
    (GRAPHS, ["export", "pydocs-lm-small", "{folder}/g", "--small", "33"], "33 does not divide 256"),
    ("ondevice_programs.bench", ["nowhere", "--drafters", "eagle"], "invalid choice: 'eagle' (choose from"),
    ("ondevice_programs.bench.leaderboard", ["now"], "unrecognized arguments: now"),
    ("ondevice_studies.diaa.memory", ["now"], "is not started by hand"),
    ("ondevice_studies.record", [], "Which paper?"),
    ("ondevice_studies.record", ["nobody"], "Which paper?"),
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


@pytest.mark.parametrize(("program", "words", "said"), WRONG, ids=[" ".join([p, *w]) for p, w, _ in WRONG])
def test_a_wrong_command_line_is_refused_in_one_sentence(program, words, said, tmp_path, capsys):
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
    assert said in error and len(error.splitlines()) == 1 and "Traceback" not in error, error
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

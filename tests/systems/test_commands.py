"""Every command refuses what cannot be: exit code 2, one sentence on standard error, before anything slow."""

import re
import runpy
import socket
import sys
import warnings

import pytest

from ondevice.run.__main__ import main as run

pytestmark = pytest.mark.timeout(100)

URLS = ["serve", "--device", "http://127.0.0.1:1", "--server", "http://127.0.0.1:2", "--port", "0"]
LM = ["lm", "--size", "tiny", "--tokens", "9", "--out", "{folder}/new"]
EVALUATE = ["evaluate", "--model", "nowhere", "--out", "{folder}"]
RERANKER = ["reranker", "--parent", "nowhere", "--out", "{folder}", "--queries"]

# Program, its words, and what is said; {folder} is empty, {text} a file that is no JSON, {busy} a port in use.
WRONG = [
    ("ondevice.run", ["--jobs", "two"], "--jobs: it is a whole number from 1, not 'two'"),
    ("ondevice.run", ["--jobs", "0"], "--jobs: it is a whole number from 1, not '0'"),
    ("ondevice.run", ["--timeout", "never"], "--timeout: it is a number above 0, not 'never'"),
    ("ondevice.run", ["--timeout", "nan"], "--timeout: it is a number above 0"),
    ("ondevice.run", ["--colour"], "unrecognized arguments: --colour"),
    ("ondevice.run", ["goood"], "There is no notebook for goood"),
    ("ondevice.run", ["disco", "--set", "seed"], "write name=value"),
    ("ondevice.run", ["disco", "--set", "sed=3"], "disco has no parameter 'sed'; it has seed"),
    ("ondevice.run", ["disco", "--set", "alpha=7"], "alpha of disco is in (0 to 1), and 7.0 is not"),
    ("ondevice.run", ["disco", "--set", "seed=-1"], "seed of disco is in [0 to 1e9], and -1 is not"),
    ("ondevice.run", ["disco", "--set", "runs=many"], "runs of disco is int, and 'many' is str"),
    ("ondevice.run", ["sdnpu", "--set", "threads=0"], "threads of sdnpu is in [1 to 256], and 0 is not"),
    ("ondevice.run", ["sdnpu", "--set", "sample=41"], "sample of sdnpu is in [1 to 40], and 41 is not"),
    ("ondevice.run", ["disco", "--set", "seed=1", "--set", "seed=2"], "--set names seed twice"),
    ("ondevice.run", ["disco", "--params", "best"], "There is no parameter file notebooks/params/disco.best.yaml"),
    ("ondevice.run", ["disco", "--params", "nowhere.yaml"], "There is no parameter file nowhere.yaml"),
    ("ondevice.run", ["disco", "--params", "{text}"], "holds no mapping"),
    ("ondevice.run", ["publish", "goood"], "There is no notebook for goood"),
    ("ondevice.run", ["publish", "--colour"], "unrecognized arguments: --colour"),
    ("ondevice.run.sources", ["goood"], "There is no notebook for goood"),
    ("ondevice_programs.router", [], "the following arguments are required: command"),
    ("ondevice_programs.router", ["serve"], "Name the endpoints"),
    ("ondevice_programs.router", [*URLS, "--port", "99999"], "--port: it is a whole number from 0 to 65535, not '99999'"),
    ("ondevice_programs.router", [*URLS, "--port", "{busy}"], "Nobody can listen on 127.0.0.1:"),
    ("ondevice_programs.router", [*URLS, "--host", "256.1.1.1"], "Whoever reaches 256.1.1.1 could spend your budget"),
    ("ondevice_programs.router", [*URLS, "--host", "256.1.1.1", "--key", "PATH"], "Nobody can listen on 256.1.1.1"),
    ("ondevice_programs.router", [*URLS, "--budget", "1.5"], "--budget: it is a number from 0 to 1, not '1.5'"),
    ("ondevice_programs.router", [*URLS, "--migration", "soon"], "--migration: invalid choice: 'soon'"),
    ("ondevice_programs.router", [*URLS, "--pace", "0"], "--pace: it is a number above 0"),
    ("ondevice_programs.router", [*URLS, "--device", "http://127.0.0.1:2"], "http://127.0.0.1:2/v1 default is on both sides"),
    ("ondevice_programs.router", [*URLS, "--device", "here"], "litellm_params.api_base: 'here' is not the http(s) URL of an API"),
    ("ondevice_programs.router", [*URLS, "--server-key", "NO_SUCH_KEY"], "the environment variable NO_SUCH_KEY holds nothing"),
    ("ondevice_programs.router", [*URLS, "--config", "{text}"], "in the file or on the command line, not in both"),
    ("ondevice_programs.router", ["serve", "--config", "{text}"], "text.txt holds no mapping"),
    ("ondevice_programs.router", ["serve", "--config", "nowhere.yaml"], "there is no file 'nowhere.yaml' that can be read"),
    ("ondevice_programs.router", ["replay", "--ttft", "-1"], "--ttft: it is a number from 0"),
    ("ondevice_programs.router", ["replay", "--ttft-file", "{text}"], "does not hold a JSON list of numbers"),
    ("ondevice_programs.router", ["replay", "--fault", "sneeze"], "sneeze"),
    ("ondevice_programs.router", ["replay", "--fault", "stall:soon"], "stall:soon"),
    ("ondevice_programs.router", ["replay", "--fault-rate", "2"], "--fault-rate: it is a number from 0 to 1"),
    ("ondevice_studies.disco.traces", ["now"], "unrecognized arguments: now"),
    ("ondevice_programs.pair", ["device", "--connect", "here"], "an address is HOST:PORT with a port from 0 to 65535, not 'here'"),
    ("ondevice_programs.pair", ["device", "--connect", "here:99999"], "an address is HOST:PORT"),
    ("ondevice_programs.pair", ["device", "--model", "nowhere", "--k", "0"], "A request's k cannot be 0"),
    ("ondevice_programs.pair", ["device", "--model", "nowhere", "--query", " "], "The query is empty"),
    ("ondevice_programs.pair", ["device", "--temperature", "-1"], "--temperature: it is a number from 0"),
    ("ondevice_programs.pair", ["device", "--mode", "none"], "invalid choice: 'none' (choose from"),
    ("ondevice_programs.pair", ["device", "--scheduler", "none"], "invalid choice: 'none' (choose from"),
    ("ondevice_programs.pair", ["device", "--query", "?", "--model", "nowhere"], "nowhere"),
    ("ondevice_programs.pair", ["device", "--documents", "{folder}", "--public", "nowhere"], "neither a file nor a folder 'nowhere'"),
    ("ondevice_programs.pair", ["device", "--documents", "{folder}", "--public", "{folder}"], "Private documents stand apart"),
    ("ondevice_programs.pair", ["documents", "--documents", "nowhere"], "There are no documents at 'nowhere'"),
    ("ondevice_programs.pair", ["documents", "--documents", "{folder}"], "has no document"),
    ("ondevice_programs.pair", ["documents", "--documents", "{text}", "--index", "{text}/index"], "nothing can be written to"),
    ("ondevice_programs.pair", ["documents", "--documents", "{text}", "--longest", "3"], "leave no room"),
    ("ondevice_programs.pair", ["cloud", "--listen", ":1"], "an address is HOST:PORT"),
    ("ondevice_programs.pair", ["cloud", "--model", "pydocs-lm-small", "--documents", "nowhere"], "nowhere"),
    ("ondevice_programs.pair", ["cloud", "--model", "pydocs-lm-small", "--documents", "{text}", "--part", "3/2"], "A part is"),
    ("ondevice_programs.pair", ["cloud", "--store", "{text}/store"], "nothing can be written to"),
    ("ondevice_programs.pair", ["cloud", "--certificate", "nowhere.pem"], "there is no file 'nowhere.pem'"),
    ("ondevice_programs.pair", ["cloud", "--threads", "0"], "--threads: it is a whole number from 1"),
    ("ondevice_training", [], "the following arguments are required: command"),
    ("ondevice_training", [*LM, "--size", "huge"], "invalid choice: 'huge'"),
    ("ondevice_training", [*LM, "--tokens", "many"], "--tokens: it is a whole number from 1"),
    ("ondevice_training", [*LM, "--out", "{text}/model"], "nothing can be written to"),
    ("ondevice_training", [*LM, "--threads", "0"], "--threads: it is a whole number from 1"),
    ("ondevice_training", EVALUATE, "nowhere"),
    ("ondevice_training", [*EVALUATE, "--limit", "2"], "--limit: it is a number above 0 to 1"),
    ("ondevice_training", [*EVALUATE, "--log", "nowhere.csv"], "there is no file 'nowhere.csv'"),
    ("ondevice_training", [*RERANKER, "0"], "--queries: it is a whole number from 1"),
    ("ondevice_training", [*RERANKER, "8"], "nowhere"),
    ("ondevice_training", ["evaluate-reranker", "--model", "nowhere", "--out", "{folder}/a.json"], "nowhere"),
    ("ondevice_programs.reranker", ["serve", "--memory-budget", "much"], "memory budget"),
    ("ondevice_studies.grating.full_size", [], "is not started by hand"),
    ("ondevice_programs.reranker.folder", ["now"], "is not started by hand"),
    ("ondevice_programs.graphs", ["generate", "{folder}", "--prompt", "x"], "holds no exported graphs"),
    ("ondevice_programs.graphs", ["export", "nowhere", "{folder}/g"], "nowhere"),
    ("ondevice_programs.graphs", ["export", "pydocs-lm-small", "{folder}/g", "--blocks", "99"], "6 layers make 1 to 6 blocks, not 99"),
    ("ondevice_programs.graphs", ["export", "pydocs-lm-small", "{folder}/g", "--small", "33"], "33 does not divide 256"),
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


@pytest.mark.parametrize("program", ["ondevice.run", "ondevice_programs.router serve", "ondevice_programs.pair device", "ondevice_training lm",
                                     "ondevice.run publish"])
def test_help_shows_defaults_and_an_example(program, capsys):
    first, *rest = program.split()
    with pytest.raises(SystemExit) as end:
        start(first, [*rest, "--help"])
    shown = capsys.readouterr().out
    assert end.value.code == 0 and "example:\n  " in shown
    assert program == "ondevice.run publish" or "(default: " in " ".join(shown.split())

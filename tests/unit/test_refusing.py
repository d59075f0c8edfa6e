"""A command ends with one sentence and code 2 on bad input, and with a traceback and code 1 on its own fault."""

import errno
import json
import signal
import subprocess
import sys

import numpy as np
import pytest
import safetensors
import yaml
from tokenizers import Tokenizer

from ondevice import commands
from ondevice.assets import ROOT


class OfALibrary(Exception):
    """A class of another library's own."""


def own(text: str, **names: object) -> None:
    """Run a line of code as the library's own."""
    exec(compile(text, str(ROOT / "lib" / "ondevice_programs" / "bench" / "inputs.py"), "exec"), names)


def raised(error: BaseException) -> None:
    raise error


def damaged(tmp_path, name: str, data: bytes = b"\x10\0\0\0\0\0\0\0{"):
    path = tmp_path / name
    path.write_bytes(data)
    return str(path)


REFUSED = {  # what is run, and words of the sentence
    "our own ValueError": (lambda path: own("raise error", error=ValueError("no such model")), "no such model"),
    "a ValueError elsewhere": (lambda path: raised(ValueError("two\nlines")), "two lines"),
    "without words": (lambda path: raised(ValueError()), "ValueError"),
    "a package that is missing": (lambda path: raised(ImportError("needs bitsandbytes")), "bitsandbytes"),
    "a file that is missing": (lambda path: own("open('nowhere')"), "nowhere: No such file"),
    "a full disk": (lambda path: own("raise error", error=OSError(errno.ENOSPC, "No space left")), "No space left"),
    "no memory": (lambda path: own("zeros(2**62, 'u1')", zeros=np.zeros), "Unable to allocate"),
    "bytes that are no text": (lambda path: own("b'\\xff'.decode()"), "0xff"),
    "no JSON": (lambda path: own("loads('[')", loads=json.loads), "Expecting value"),
    "no YAML": (lambda path: own("load('[')", load=yaml.safe_load), "flow"),
    "no tokenizer": (lambda path: own("read('{}')", read=Tokenizer.from_str), "line 1 column 2"),
    "no tensors": (
        lambda path: own("read(path, 'np')", read=safetensors.safe_open, path=damaged(path, "a.safetensors")), "header",
    ),
    "a class of its own": (lambda path: raised(OfALibrary("no device")), "no device"),
    "a key that a library misses": (lambda path: raised(KeyError("hidden_size")), "KeyError: 'hidden_size'"),
    "a runtime that says no": (lambda path: raised(RuntimeError("a GPU is needed")), "a GPU is needed"),
}  # fmt: skip
FAULTS = {
    "a key": lambda: own("{}['x']"),
    "an attribute": lambda: own("None.model"),
    "a type": lambda: own("len(3)"),
    "an index": lambda: own("[][0]"),
    "a name": lambda: own("nobody"),
    "a division": lambda: own("1 / 0"),
    "a claim": lambda: own("raise error", error=AssertionError("rows")),
    "an error that says so": lambda: own("raise error", error=RuntimeError("came to another position")),
    "a ValueError that nobody wrote": lambda: own("int('x')"),
    "shapes that do not fit": lambda: own("a(2) + a(3)", a=np.zeros),
    "a module of its own": lambda: own("__import__('ondevice.nowhere')"),
}


def ended(run, *given) -> int:
    with pytest.raises(SystemExit) as end, commands.refusing("program"):
        run(*given)
    return end.value.code


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_is_one_sentence(case, tmp_path, capsys):
    run, words = REFUSED[case]
    assert ended(run, tmp_path) == commands.REFUSED == 2
    error = capsys.readouterr().err
    assert error.startswith("program: ") and words in error and len(error.splitlines()) == 1


@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_has_its_traceback_and_asks_for_a_report(case, capsys):
    assert ended(FAULTS[case]) == commands.FAULT == 1
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first.startswith("Traceback") and last.startswith("program: ") and "report" in last


def test_an_interrupt_is_silent(capsys):
    assert ended(raised, KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_what_is_half_written_is_put_away_where_a_command_is_stopped(tmp_path, number, code):
    program = (
        "import sys, tempfile, time\nfrom ondevice import commands\n"
        "with commands.refusing('export'), tempfile.TemporaryDirectory(dir=sys.argv[1]):\n"
        "    print('begun', flush=True)\n    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        assert list(tmp_path.iterdir())
        process.send_signal(number)
        assert process.wait(30) == code
    assert not list(tmp_path.iterdir())

"""Commands and options that messages and help name: each can be used where it is named."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import ondevice
from ondevice import commands

ROOT = Path(ondevice.__file__).parent.parent
PROGRAMS = {  # the entry of each command, and the folders whose messages its user reads
    "run": ("ondevice.run.__main__:main", "ondevice/run"),
    "pair": ("ondevice_programs.pair.__main__:main", "ondevice_programs/pair", "ondevice_papers/dragon"),
    "router": ("ondevice_programs.router.__main__:main", "ondevice_programs/router", "ondevice_papers/disco"),
    "rerank": ("ondevice_programs.reranker.__main__:main", "ondevice_programs/reranker", "ondevice_papers/grating"),
    "graphs": ("ondevice_programs.graphs.__main__:main", "ondevice_programs/graphs", "ondevice_papers/sdnpu"),
    "assistant": ("ondevice_programs.assistant.__main__:main", "ondevice_programs/assistant"),
    "bench": ("ondevice_programs.bench.__main__:main", "ondevice_programs/bench"),
}
COMMAND = re.compile(r"\bondevice-([a-z]+)(?: ([a-z]+)\b)?")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z]\b")
MODULE = re.compile(r"python -m (ondevice[a-z_.]*[a-z])")
OTHERS = re.compile(r"\bpip install [^;:)]*")  # a command line of a program that is not ours


class Caught(BaseException):
    """A parser that is about to read its arguments."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


@cache
def parser(program: str, *words: str) -> argparse.ArgumentParser:
    """The parser that a command's entry reads these words with."""
    module, _, name = PROGRAMS[program][0].partition(":")

    def caught(self: argparse.ArgumentParser, *_: object) -> None:
        raise Caught(self)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Caught) as end:
        patch.setattr(commands.Parser, "parse_args", caught)
        getattr(importlib.import_module(module), name)(list(words))
    return end.value.parser


def subparsers(whole: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return {
        name: parser
        for action in whole._actions
        if isinstance(action, argparse._SubParsersAction)
        for name, parser in action.choices.items()
    }


def options(program: str, word: str | None) -> set[str]:
    """The options of a command, or of one of its words; of all of them where the text names none."""
    whole = parser(program)
    below = subparsers(whole)
    if word in below:
        return set(below[word]._option_string_actions)
    parsers = [whole, *below.values(), *([parser("run", "publish")] if word == "publish" else [])]
    return {option for each in parsers for option in each._option_string_actions}


def texts(file: Path) -> Iterator[tuple[int, str]]:
    """The strings of a file, those with values in braces whole."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            words = [str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values]
            yield node.lineno, "".join(words)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.lineno, node.value


def wrong(text: str, owner: str | None) -> list[str]:
    """What a text names that is not there. owner: the program whose message it is, where it names no other."""
    named = [(program, word) for program, word in COMMAND.findall(text) if program in PROGRAMS]
    odd = [f"ondevice-{program}" for program, _ in COMMAND.findall(text) if program not in PROGRAMS]
    own = OTHERS.sub("", text)
    for option in OPTION.findall(own) if " " in text else []:
        line = next((part for part in own.splitlines() if option in part), own)
        inline = [(program, word) for program, word in COMMAND.findall(line) if program in PROGRAMS] or named
        places = inline or ([(owner, None)] if owner else [])
        if places and not any(option in options(program, word or None) for program, word in places):
            odd.append(option)
    with contextlib.suppress(ModuleNotFoundError):
        return odd + [name for name in MODULE.findall(text) if importlib.util.find_spec(name) is None]
    return [*odd, *MODULE.findall(text)]


def owner(file: Path) -> str | None:
    folder = file.relative_to(ROOT).as_posix()
    return next((name for name, (_, *folders) in PROGRAMS.items() if folder.startswith(tuple(folders))), None)


def test_what_messages_name_can_be_used_there() -> None:
    read = [(file, line, text) for file in sorted(ROOT.glob("ondevice*/**/*.py")) for line, text in texts(file)]
    odd = [(f"{file.relative_to(ROOT)}:{line}", wrong(text, owner(file))) for file, line, text in read]
    assert not [each for each in odd if each[1]]
    assert sum(bool(OPTION.search(text)) and owner(file) is not None for file, _, text in read) > 30


@pytest.mark.parametrize(("text", "program", "names"), [
    ("name a recipe with --recipes", "rerank", ["--recipes"]),
    ("ondevice-rerank rank --port 8080 takes it", None, ["--port"]),
    ("set it by ondevice-ranker", None, ["ondevice-ranker"]),
    ("write it by python -m ondevice_studies.nothing", None, ["ondevice_studies.nothing"]),
    ("pip install --no-deps a package", "bench", []),
    ("with --recipe in the command ondevice-rerank", "bench", []),
])  # fmt: skip
def test_a_remedy_that_is_not_there_is_noticed(text: str, program: str | None, names: list[str]) -> None:
    assert wrong(text, program) == names

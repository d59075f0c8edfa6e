"""What code depends on: the library's modules that it imports, directly or through others, and the data they name.

Imports are read, not carried out, those inside functions too. A string that is a module's whole dotted name, such as
the one behind `-m` in a command line, counts as an import of it.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
RUNNER = "ondevice.run"  # starts notebooks and checks their parameters; no number is made there


@dataclass(frozen=True)
class Closure:
    """modules: file by dotted name. others: top-level names of imported packages that are not the library's.

    strings: every string constant in the code, but for docstrings.
    """

    modules: Mapping[str, Path]
    others: frozenset[str]
    strings: frozenset[str]


def closure(library: Path, code: Iterable[str], leaves: str = "") -> Closure:
    """The closure of pieces of code, such as a notebook's cells. library: the folder with the packages (lib/).

    leaves: a pattern of modules whose text counts, but not what they import. IPython's lines (% and !) do not. The
    runner's own modules do not count. Raises SyntaxError for what is no Python.
    """
    modules: dict[str, Path] = {}
    others = set[str]()
    strings = set[str]()
    sources = [_read(_without_magics(text)) for text in code]
    while sources:
        names, constants = sources.pop()
        strings |= constants
        for name in names:
            files = _files(library, name)
            if not files and not (library / name.partition(".")[0]).is_dir():
                others.add(name.partition(".")[0])
            for module, path in files.items():
                if module not in modules and not f"{module}.".startswith(f"{RUNNER}."):
                    modules[module] = path
                    if not re.fullmatch(leaves, module):
                        sources.append(_read_file(path, path.stat().st_mtime_ns))
    return Closure(modules, frozenset(others), frozenset(strings))


def imports(code: Iterable[str]) -> frozenset[str]:
    """The dotted names that pieces of code import, each a module or an object of one; raises SyntaxError as above."""
    return frozenset[str]().union(*(_read(_without_magics(text))[0] for text in code))


def code_hash(library: Path, modules: Mapping[str, Path]) -> str:
    """SHA-256 over the modules' paths below the library's folder and their texts."""
    digest = hashlib.sha256()
    for path in sorted(set(modules.values())):
        digest.update(f"\0{path.relative_to(library).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def versions(names: Iterable[str]) -> list[tuple[str, str]]:
    """Name and version of the installed distributions that bring these top-level modules, in order."""
    distributions = {each for name in names for each in _distributions().get(name, ())}
    return sorted((name, metadata.version(name)) for name in distributions)


def named(folder: Path, strings: Iterable[str]) -> list[Path]:
    """The files and folders directly below a folder whose name, with or without its suffix, is one of the strings."""
    names = set(strings)
    return sorted(path for path in folder.glob("[!.]*") if path.name in names or path.stem in names)


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    return metadata.packages_distributions()


def _files(library: Path, name: str) -> dict[str, Path]:
    """The modules that an import of a dotted name runs: its packages, and itself where it is one."""
    parts = name.split(".")
    paths = {".".join(parts[:end]): library.joinpath(*parts[:end]) for end in range(1, len(parts) + 1)}
    files = {name: path / "__init__.py" if path.is_dir() else path.with_suffix(".py") for name, path in paths.items()}
    return {module: file for module, file in files.items() if file.is_file()}


def _without_magics(text: str) -> str:
    return "\n".join("pass" if line.lstrip().startswith(("%", "!")) else line for line in text.splitlines())


@functools.cache
def _read_file(path: Path, changed: int) -> tuple[set[str], set[str]]:
    """changed: when the file was last written, so that a later text is read anew."""
    return _read(path.read_text(encoding="utf-8"))


def _read(text: str) -> tuple[set[str], set[str]]:
    """(imported dotted names, each a module or an object of one; strings of constants)."""
    tree = ast.parse(text)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    imports = set[str]()
    strings = set[str]()
    for node in ast.walk(tree):
        imports |= set(_imported(node))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            strings.add(node.value)
            if _DOTTED.fullmatch(node.value):
                imports |= {node.value, f"{node.value}.__main__"}
    return imports, strings


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)

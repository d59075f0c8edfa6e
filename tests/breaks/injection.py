"""Faults in this process: a function, a constant, a claim or a file's content is another one than the repository's.

A function gets another code in place, so that whoever imported it or has it as a default has the fault, too. A changed
file is one that `open` finds elsewhere; nothing is written to the repository.
"""

from __future__ import annotations

import builtins
import inspect
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

from ondevice.assets import ROOT


class Gone(Exception):
    """What a fault changes is not there any more: the fault has to be written anew."""


@dataclass(frozen=True)
class Fault:
    """put: puts it in. check: pytest's id of the test that has to fail, below tests/; of several cases one has to."""

    paper: str
    name: str
    check: str
    put: Callable[[Injection], None]

    @property
    def file(self) -> str:
        """That of its check."""
        return self.check.partition("::")[0]


class Injection:
    """What a fault is put in by.

    folder: of changed files. used: whether a wrong function was called or a changed file read; of a constant or a claim
    that cannot be seen (unseen).
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.used, self.unseen = folder, False, False
        self._files: dict[Path, Path] = {}
        self._open = io.open

    def __call__(self, target: str, wrong: Callable[[Any], Any]) -> None:
        """Put `wrong(right)` in the place of `module:name`: a function or method, wherever it is used, or a constant.

        `module:np.median` is a function of another module, as this module alone uses it.
        """
        module, _, path = target.partition(":")
        *outer, last = path.split(".")
        try:
            user = import_module(module)
            owner = reduce(getattr, outer, user)
            right = inspect.getattr_static(owner, last)
        except (ImportError, AttributeError):
            raise Gone(f"There is no {target} any more.") from None
        if outer and isinstance(owner, ModuleType):
            setattr(user, outer[0], SimpleNamespace(**vars(owner) | {last: self._noting(wrong(right))}))
            return
        function = right.__wrapped__ if hasattr(right, "cache_clear") else right
        if isinstance(function, FunctionType):
            self._swap(function, wrong)
        else:
            setattr(owner, last, wrong(right))
            self.unseen = True
        if function is not right:
            right.cache_clear()

    def claim(self, name: str, change: Callable[[Any], Any]) -> None:
        """Change a row of a paper's table of claims."""
        claims = import_module("ondevice_studies.claims").CLAIMS[name.partition("-")[0]]
        if name not in claims:
            raise Gone(f"There is no claim {name} any more.")
        claims[name] = change(claims[name])
        self.unseen = True

    def file(self, path: str, change: Callable[[Any], Any]) -> None:
        """Whoever opens a file of the repository finds it changed. change: of its text, or of a picture's bytes."""
        real = ROOT / path
        if not real.is_file():
            raise Gone(f"There is no {path} any more.")
        content = real.read_bytes()
        changed = change(content) if real.suffix == ".png" else change(content.decode()).encode()
        if changed == content:
            raise Gone(f"{path} has no longer what is to be changed.")
        other = self.folder / f"{len(self._files)}{real.suffix}"
        other.write_bytes(changed)
        self._files[real] = other
        builtins.open = io.open = self._opened  # type: ignore[assignment]

    def json(self, path: str, **fields: Any) -> None:
        """The same with other fields of a JSON file."""
        self.file(path, lambda text: json.dumps(json.loads(text) | fields))

    def _opened(self, file: Any, *args: Any, **kwargs: Any) -> Any:
        other = self._files.get(Path(file).absolute()) if isinstance(file, str | Path) else None
        self.used |= other is not None
        return self._open(other or file, *args, **kwargs)

    def _noting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            self.used = True
            return function(*args, **kwargs)

        return noting

    def _swap(self, function: FunctionType, wrong: Callable[[Any], Any]) -> None:
        """Give a function's code to a copy of it, and a call of `wrong(copy)` to the function."""
        names = function.__globals__
        right = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
        right.__kwdefaults__ = function.__kwdefaults__
        right.__dict__.update(function.__dict__)
        key, made = f"_fault_{id(right)}", {}
        names[key] = self._noting(wrong(right))
        exec(f"def call(*args, **kwargs): return {key}(*args, **kwargs)", made)
        function.__code__ = made["call"].__code__.replace(co_freevars=function.__code__.co_freevars)
        function.__defaults__ = function.__kwdefaults__ = None
        function.__wrapped__ = right  # which has its signature

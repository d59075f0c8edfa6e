"""The parameters of a notebook, typed once: read from its parameters cell, checked before anything slow.

A line of the cell is `name: type = literal  # help`. The help may end in what values may be: an interval as
`[1 to 80]`, `(0 to 1)` or `[0 to inf)`, where a round bracket leaves the end out, or a choice as `{float32 | float16}`;
of a list, each item is held to it. `checked` serves the runner; `check_parameters` a notebook, so that plain papermill
is stopped, too: by itself it only warns of a misspelt name and runs on with the defaults.
"""

from __future__ import annotations

import ast
import csv
import itertools
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ondevice import cores
from ondevice.run.job import Layout

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_INTERVAL = re.compile(r"(?P<left>[\[(])(?P<low>\S+) to (?P<high>\S+)(?P<right>[\])])$")
_CHOICE = re.compile(r"\{(?P<choices>[^{}]+)\}$")
_OF_TYPE = {"str": "", "int": 0, "float": 0.0, "bool": False, "list": []}  # a value of each, by the annotation
_NONE = ("None", "null")  # as Python and YAML write it


class ParameterError(ValueError):
    """What the user asked for cannot be run; the message says what could."""

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows of it: the sentence alone."""
        return [f"{type(self).__name__}: {self}"]


@dataclass(frozen=True)
class Parameter:
    """One line of a parameters cell: its annotation, default and help, and what values may be by the help's end."""

    name: str
    type: str
    default: Any
    help: str
    limits: re.Match[str] | None

    @property
    def example(self) -> Any:
        """A value of its kind: the default, or where that is None, one of the annotation's type."""
        return _OF_TYPE.get(re.split(r"\W", self.type)[0]) if self.default is None else self.default

    @property
    def optional(self) -> bool:
        """Whether it may be None."""
        return self.default is None or self.type.endswith("| None")


def _within(limits: re.Match[str], item: Any) -> bool:
    if limits.re is _CHOICE:
        return item in re.split(r"\s*\|\s*", limits["choices"].strip())
    low = float(limits["low"])
    high = float(limits["high"])
    return low < item < high or (item == low and limits["left"] == "[") or (item == high and limits["right"] == "]")


def _flat(value: Any) -> list[Any]:
    return [each for item in value for each in _flat(item)] if isinstance(value, list) else [value]


def _like(value: Any, example: Any) -> Any:
    """`value` in the type of the example, items of a list in that of its first."""
    if isinstance(value, list) and isinstance(example, list):
        return [_like(item, example[0]) for item in value] if example else value
    if example is None:  # nothing says what it should be
        return value
    if isinstance(example, float) and type(value) in (int, str):
        return float(value)  # YAML reads 1e-3 as text
    if type(value) is not type(example):  # not isinstance: a bool is no int
        raise TypeError
    return value


def read_parameters(notebook: Path) -> dict[str, Parameter]:
    """The parameters of a notebook, by name, in their order. Raises ParameterError when a default is not a literal."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    text = "".join(next((c["source"] for c in cells if "parameters" in c["metadata"].get("tags", [])), []))
    return _of_cell(text, notebook.stem)


def _of_cell(text: str, paper: str) -> dict[str, Parameter]:
    """The parameters in the text of a cell. Raises ParameterError for a line that is none, SyntaxError."""
    parameters = {}
    for node in ast.parse(text).body:
        try:
            line: Any = node
            name, kind, default = line.target.id, ast.unparse(line.annotation), ast.literal_eval(line.value)
        except (AttributeError, ValueError):
            wrong = ast.unparse(node)
            raise ParameterError(f"{paper}: {wrong} is no parameter, which is name: type = literal.") from None
        last = text.splitlines()[line.end_lineno - 1].encode()[line.end_col_offset :].decode()
        comment = last.partition("  # ")[2]
        parameters[name] = Parameter(name, kind, default, comment, _INTERVAL.search(comment) or _CHOICE.search(comment))
    return parameters


def _executed(cells: Sequence[str], paper: str) -> dict[str, Parameter]:
    """The parameters of the cells that ran and hold nothing else: a copy of a notebook may have other ones."""
    parameters = {}
    for text in cells:
        with suppress(ParameterError, SyntaxError, ValueError):
            parameters.update(_of_cell(text, paper))
    return parameters


def check_parameters(paper: str, namespace: Mapping[str, Any], layout: Layout | None = None) -> dict[str, Any]:
    """A notebook's parameters with their values; called in the cell after the parameters cell, with globals().

    The parameters are those of the notebook and of the cell that ran, whose lines count in a copy of the notebook.
    Raises ParameterError for a value of the wrong type or out of its limits, and for a name that papermill injected
    but the notebook does not have. A parameter `threads` sets that of the numeric libraries; where it is 0, it becomes
    what the runner gives, else all cores that may be used.
    """
    parameters = read_parameters((layout or Layout()).notebook(paper)) | _executed(namespace.get("In", []), paper)
    injected = ast.parse("\n".join(text for text in namespace.get("In", []) if text.startswith("# Parameters\n")))
    names = [ast.unparse(target) for node in injected.body if isinstance(node, ast.Assign) for target in node.targets]
    given = {name: namespace[name] for name in dict.fromkeys([*parameters, *names]) if name in namespace}
    values = checked(paper, parameters, given, "The parameters")
    if "threads" in values:
        values["threads"] = set_threads(values["threads"])
    return values


def set_threads(threads: int) -> int:
    """Limit numeric libraries to so many threads: those loaded later by their variables, the others at once."""
    import threadpoolctl

    threads = threads or int(os.environ.get(THREAD_VARIABLES[0], cores.usable()))
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))
    threadpoolctl.threadpool_limits(threads)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)
    return threads


def grid(paper: str, parameters: Mapping[str, Parameter], settings: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Every combination of settings' values; one empty combination when there are none.

    A setting is `seed=0,1,2`: a name and several values separated by commas, a list in brackets. A text is taken as it
    stands. Quotes hold one with a comma together, unless the default has one: then the whole setting is one text.
    Raises ParameterError as `checked` does, and for a setting of another form.
    """
    named: dict[str, list[Any]] = {}
    for text in settings:
        name, equals, value = (part.strip() for part in text.partition("="))
        if name in named:
            raise ParameterError(f"--set names {name} twice; write the values of a sweep as name=a,b.")
        try:
            named[name] = _values(value, parameters[name].example) if name in parameters else [value]
        except (yaml.YAMLError, csv.Error):
            named[name] = []
        if not (name and equals and named[name]):
            raise ParameterError(f"--set {text}: write name=value, name=value,value or name=[a, list].")
    for values in itertools.product(*named.values()):
        combination = dict(zip(named, values, strict=True))
        for name in combination.keys() & parameters.keys():
            combination[name] = _typed(combination[name], parameters[name].example, parameters[name].optional)
        yield checked(paper, parameters, combination, "--set")


def _values(text: str, example: Any) -> list[Any]:
    """The values of a setting, still as text where the example says of what type they are."""
    if isinstance(example, str):
        quoted = text[:1] in ("'", '"')
        if not text or ("," in example and not quoted):
            return [text] if text or not example else []
        quote = text[0] if quoted else '"'
        pieces = next(csv.reader([text], quotechar=quote, skipinitialspace=True, strict=True))
        return [piece.strip() for piece in pieces] if all(pieces) else []
    plain = isinstance(example, bool | int | float | list)  # not YAML's types: 010 is ten, and 1:30 is not ninety
    values = yaml.load(f"[{text}]", yaml.BaseLoader if plain else yaml.SafeLoader)
    return values if isinstance(values, list) else []


def _typed(value: Any, example: Any, optional: bool = False) -> Any:
    """A setting's text in the example's type; as it is where it cannot be read so."""
    if optional and value in _NONE:
        return None
    if isinstance(value, list) and isinstance(example, list):
        return [_typed(item, example[0]) if example else _plain(item) for item in value]
    if isinstance(value, str) and isinstance(example, bool):
        return yaml.SafeLoader.bool_values.get(value.lower(), value)
    if isinstance(value, str) and isinstance(example, int | float):
        with suppress(ValueError):
            return type(example)(value)
    return value


def _plain(value: Any) -> Any:
    """An item of a list whose default is empty, as YAML reads it."""
    return [_plain(item) for item in value] if isinstance(value, list) else yaml.safe_load(value)


def checked(paper: str, parameters: Mapping[str, Parameter], given: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The given values in the types of their parameters.

    source: where they come from, for the message. Raises ParameterError for an unknown name, a wrong type or value.
    """
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in parameters:
            raise ParameterError(f"{source}: {paper} has no parameter {name!r}; it has {', '.join(parameters)}.")
        parameter = parameters[name]
        if value is None and parameter.optional:
            values[name] = None
            continue
        try:
            values[name] = value = _like(value, parameter.example)
        except (TypeError, ValueError):
            wrong = f"{name} of {paper} is {parameter.type}, and {value!r} is not."
            raise ParameterError(f"{source}: {wrong}") from None
        if parameter.limits and not all(_within(parameter.limits, item) for item in _flat(value)):
            raise ParameterError(f"{source}: {name} of {paper} is in {parameter.limits[0]}, and {value!r} is not.")
    return values

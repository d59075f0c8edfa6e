"""The parameters of a notebook: read from its parameters cell, and checked before a kernel starts.

papermill itself only warns of a misspelt name and runs on with the defaults.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import papermill
import yaml

# What a value is compared with when the default is None and only the annotation says its type.
_EXAMPLES: dict[str, Any] = {"bool": False, "int": 0, "float": 0.0, "str": "", "list": [], "dict": {}}


class ParameterError(ValueError):
    """What the user asked for cannot be run; the message says what could."""


@dataclass(frozen=True)
class Parameter:
    """One line of a parameters cell. type: the annotation, or the name of the default's type."""

    name: str
    type: str
    default: Any
    help: str

    def convert(self, value: Any) -> Any:
        """`value` in the type of the default (an int may stand for a float); raises TypeError for any other type."""
        if value is None and self.type.startswith("Optional"):
            return None
        bare = re.sub(r"^Optional\[(.*)\]$", r"\1", self.type).split("[")[0]
        return _like(value, _EXAMPLES.get(bare) if self.default is None else self.default)


def _like(value: Any, example: Any) -> Any:
    if example is None:
        return value
    if isinstance(example, float) and isinstance(value, str | int) and not isinstance(value, bool):
        try:
            return float(value)  # YAML reads 1e-3 as text
        except ValueError:
            raise TypeError from None
    if type(value) is not type(example):  # not isinstance: a bool is no int
        raise TypeError
    if isinstance(example, list) and example:
        return [_like(item, example[0]) for item in value]
    return value


def read_parameters(notebook: Path) -> dict[str, Parameter]:
    """The parameters that papermill finds in a notebook, by name, in their order.

    Raises ParameterError when a default is not a literal.
    """
    found = papermill.inspect_notebook(papermill_path(notebook))
    parameters = {}
    for name, entry in found.items():
        try:
            default = ast.literal_eval(entry["default"])
        except (SyntaxError, ValueError):
            raise ParameterError(f"{notebook.stem}: {name} = {entry['default']} is no literal.") from None
        kind = entry["inferred_type_name"]
        parameters[name] = Parameter(name, type(default).__name__ if kind == "None" else kind, default, entry["help"])
    return parameters


def read_file(path: Path) -> dict[str, Any]:
    """A parameter file's mapping. Raises ParameterError when it is missing, not YAML or not a mapping."""
    if not path.is_file():
        raise ParameterError(f"There is no parameter file {path}.")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ParameterError(f"{path} is not YAML: {error}") from None
    if not isinstance(values, dict):
        raise ParameterError(f"{path} holds no mapping of names to values.")
    return values


def read_setting(text: str) -> tuple[str, list[Any]]:
    """`seed=0,1,2` as a name and its values: YAML, several separated by commas, a list in brackets."""
    name, sign, value = text.partition("=")
    try:
        values = yaml.safe_load(f"[{value}]")
    except yaml.YAMLError:
        values = None
    if not (sign and name.strip() and values):
        raise ParameterError(f"--set {text}: write name=value, name=value,value or name=[a, list].")
    return name.strip(), values


def grid(settings: Sequence[tuple[str, list[Any]]]) -> Iterator[dict[str, Any]]:
    """Every combination of the settings' values; one empty combination when there are none."""
    names = [name for name, _ in settings]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ParameterError(f"--set names {', '.join(twice)} twice; write the values of a sweep as name=a,b.")
    for values in itertools.product(*(values for _, values in settings)):
        yield dict(zip(names, values, strict=True))


def checked(paper: str, parameters: Mapping[str, Parameter], given: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The given values in the types of their parameters.

    source: where they come from, for the message. Raises ParameterError for an unknown name or wrong type.
    """
    values = {}
    for name, value in given.items():
        if name not in parameters:
            raise ParameterError(f"{source}: {paper} has no parameter {name!r}.\n{described(paper, parameters)}")
        try:
            values[name] = parameters[name].convert(value)
        except TypeError:
            raise ParameterError(
                f"{source}: {name} of {paper} is {parameters[name].type}, and {value!r} is "
                f"{type(value).__name__}.\n{described(paper, parameters)}"
            ) from None
    return values


def described(paper: str, parameters: Mapping[str, Parameter]) -> str:
    """The parameters as lines of text: name, type, default and help."""
    if not parameters:
        return f"{paper} has no parameters."
    heads = {name: f"{name}: {p.type} = {p.default!r}" for name, p in parameters.items()}
    width = max(map(len, heads.values()))
    lines = [f"  {head:{width}}  {parameters[name].help}".rstrip() for name, head in heads.items()]
    return "\n".join([f"The parameters of {paper}:", *lines])


def papermill_path(path: Path) -> str:
    """A path as papermill wants it: it takes paths for format strings, so braces are doubled."""
    return str(path).replace("{", "{{").replace("}", "}}")

"""An edit beside what it replaced: a display's numbers by a notebook's definitions and by the library's.

    edits = Edits("grating")
    def spreads():
        return {(layer,): [dispersion(scores) for scores in of_layer] for layer, of_layer in layers.items()}
    edits.both(spreads)

gives {"shipped": ...} as long as no source cell that `spreads` follows was edited, else {"shipped": ..., "your edit":
...}, of the same requests. A display follows the definitions that it reads by name, directly or through functions of
the notebook; what an earlier cell has computed stays as it is.
"""

from __future__ import annotations

import ast
import importlib
import json
import symtable
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

import numpy as np
import pandas as pd

from ondevice.evidence import Estimate, derived
from ondevice.run import sources
from ondevice.run.job import Layout

SHIPPED, YOURS = "shipped", "your edit"


class Edits:
    """The source cells of a paper's notebook, and which of them were edited. names: by definition its dotted name."""

    def __init__(self, paper: str, layout: Layout | None = None) -> None:
        self.layout = layout or Layout()
        cells = json.loads(self.layout.notebook(paper).read_text(encoding="utf-8"))["cells"]
        self.names = {name.rpartition(".")[2]: name for cell in cells for name in sources.names(cell)}
        self._parsed: dict[str, str] = {}

    def of(self, display: FunctionType) -> list[str]:
        """The definitions that a display follows and that no longer are the library's, comments aside."""
        texts = definitions(display.__globals__.get("In", ()))
        ours = [name for name in self.names if name in followed(texts, display.__name__)]
        return [name for name in ours if ast.dump(texts[name]) != self._shipped(name)]

    def both(self, display: FunctionType) -> dict[str, Any]:
        """What a display, a function of the notebook, returns: by the library, and by an edit that it follows.

        An edit that raises an error is named in a printed line, and only the library's is returned.
        """
        edited = self.of(display)
        if not edited:
            return {SHIPPED: display()}
        both = {SHIPPED: self._by_the_library(display)()}
        try:
            return both | {YOURS: display()}
        except Exception as error:
            print(f"Your edit of {', '.join(edited)} ends with {type(error).__name__}: {error}")
            return both

    def _shipped(self, name: str) -> str:
        """The library's definition, parsed."""
        if name not in self._parsed:
            text = sources.definition(self.layout.library, self.names[name])
            self._parsed[name] = ast.dump(ast.parse(text).body[0])
        return self._parsed[name]

    def _by_the_library(self, display: FunctionType) -> FunctionType:
        """The display over the library's definitions, and over the notebook's functions, which then call those."""
        names: dict[str, Any] = {}
        for name, value in {**display.__globals__, "": display}.items():
            own = isinstance(value, FunctionType) and value.__module__ == display.__module__
            names[name] = _over(value, names) if own else value
        for name, dotted in self.names.items():
            names[name] = getattr(importlib.import_module(dotted.rpartition(".")[0]), name)
        shown: FunctionType = names[""]
        return shown


def compared(
    both: Mapping[str, Mapping[tuple[Any, ...], Any]],
    summarised: Callable[[Mapping[tuple[Any, ...], Any]], pd.DataFrame],
    difference: Callable[[Any, Any], Estimate],
) -> pd.DataFrame:
    """The table of a display, with a column `version` where there are two; then the greatest difference is printed.

    both: by version the sample behind each row, by the row's labels. difference: of a shipped and an edited sample of
    the same units, the latter less the former.
    """
    if YOURS not in both:
        return summarised(both[SHIPPED])
    rows = [labels for labels in both[YOURS] if labels in both[SHIPPED]]
    moved = {labels: difference(both[SHIPPED][labels], both[YOURS][labels]) for labels in rows}
    if moved:
        labels, most = max(moved.items(), key=lambda item: abs(item[1].value))
        where = ", ".join(map(str, labels))
        print(f"{YOURS} less {SHIPPED}, at most: {most:+.3g} at {where} ({most.n} {most.drawn})")
    return _stacked({version: summarised(samples) for version, samples in both.items()})


def exactly(both: Mapping[str, pd.DataFrame], value: str) -> pd.DataFrame:
    """As `compared`, of tables whose rows are exact and in the same order; the columns before `value` name a row."""
    if YOURS not in both:
        return both[SHIPPED]
    if len(both[SHIPPED]) == len(both[YOURS]):
        gaps = (both[YOURS][value] - both[SHIPPED][value]).fillna(0).to_numpy(float)
        most = int(np.abs(gaps).argmax())
        where = ", ".join(map(str, both[YOURS].iloc[most, : list(both[YOURS]).index(value)]))
        print(f"{YOURS} less {SHIPPED}, at most: {gaps[most]:+.3g} at {where}")
    return _stacked(both)


def _stacked(both: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    tables = [table.assign(version=version) for version, table in both.items()]
    return derived(pd.concat(tables, ignore_index=True), *both.values())


def _over(function: FunctionType, names: dict[str, Any]) -> FunctionType:
    """A function that reads other global names."""
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def definitions(inputs: Sequence[str]) -> dict[str, ast.FunctionDef | ast.ClassDef]:
    """The latest definition of each function and class in a session's inputs."""
    latest: dict[str, ast.FunctionDef | ast.ClassDef] = {}
    for text in inputs:
        try:
            statements = ast.parse(text).body
        except SyntaxError:
            continue  # it did not run
        latest |= {part.name: part for part in statements if isinstance(part, ast.FunctionDef | ast.ClassDef)}
    return latest


def followed(texts: Mapping[str, ast.stmt], display: str) -> set[str]:
    """The names of the definitions that a display reads, directly or through others. texts: of `definitions`."""
    names, ahead = set[str](), {display}
    while ahead:
        names |= ahead
        ahead = {name for text in ahead & texts.keys() for name in _read(texts[text])} - names
    return names & texts.keys()


def _read(definition: ast.stmt) -> Iterator[str]:
    """The global names that a definition reads."""
    tables = [symtable.symtable(ast.unparse(definition), "definition", "exec")]
    for table in tables:
        yield from (
            symbol.get_name() for symbol in table.get_symbols() if symbol.is_referenced() and symbol.is_global()
        )
        tables += table.get_children()

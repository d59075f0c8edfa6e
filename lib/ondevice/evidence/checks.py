"""Whether today's code still makes a record's rows: some of them made again, and what came of it.

Of each record that agreed, data/records/<paper>/checks.json holds the program and its hash, the seed, and how many
units were compared.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ondevice import assets
from ondevice.evidence import records, sidecars
from ondevice.evidence.exhibits import as_json, machine_name
from ondevice.evidence.records import Agreement, agreement
from ondevice.evidence.sidecars import UNKNOWN

_FILE = "checks.json"
_WIDTH = 110  # of a printed line
Draw = Callable[[pd.DataFrame, np.random.Generator], pd.DataFrame]


@dataclass(frozen=True)
class Again:
    """How rows of a record are made again.

    functions: those that make them, and classes, as of `Recorder`. unit: columns that name what is compared. draw: the
    rows of a random part of the record. make: the same rows as today's code makes them; it is given what was drawn.
    columns: that have to be equal, numbers within `tolerance`. margin: a column of the drawn rows, and near, as of
    `agreement`.
    """

    functions: Sequence[Callable[..., Any] | str]
    unit: Sequence[str]
    draw: Draw
    make: Callable[[pd.DataFrame], pd.DataFrame]
    columns: Sequence[str]
    tolerance: float | Mapping[str, float] = 0.0
    margin: str | None = None
    near: float = 1e-4


def some(columns: Sequence[str], count: int) -> Draw:
    """Draws the rows of so many units, which these columns name."""

    def draw(table: pd.DataFrame, random: np.random.Generator) -> pd.DataFrame:
        units = table[list(columns)].drop_duplicates()
        chosen = units.iloc[random.permutation(len(units))[:count]]
        return table.merge(chosen, on=list(columns))

    return draw


def check(paper: str, name: str, again: Again, seed: int = 0) -> Agreement:
    """Make some rows of a record again, and note it where they agree; else an earlier note goes."""
    drawn = again.draw(records.load(paper, name), np.random.default_rng(seed))
    made = again.make(drawn)
    result = agreement(drawn, made, again.unit, again.columns, again.margin, again.near, again.tolerance)
    notes = noted(paper)
    notes.pop(name, None)
    if not result.differing:
        today = sidecars.made_by({}, again.functions)
        about = {"seed": seed, "units": result.n, "near_ties": result.near_ties, "machine": machine_name()}
        notes[name] = {"program": today["program"], "code": today["code"], **about}
    path = records.folder() / paper / _FILE
    assets.write_text(path, as_json(dict(sorted(notes.items()))))
    records.enter(path)
    return result


def noted(paper: str) -> dict[str, Mapping[str, Any]]:
    """The notes by record. Raises RecordError where they are not those of the manifest."""
    if not (records.folder() / paper / _FILE).is_file():
        return {}
    notes: dict[str, Mapping[str, Any]] = json.loads(records.listed(paper, _FILE).read_text(encoding="utf-8"))
    return notes


def is_today(origin: Mapping[str, Any]) -> bool:
    """Whether a record's sidecar, or a note, is of today's code."""
    return bool(origin["code"] == sidecars.code(origin["program"]))


def standing() -> dict[str, int]:
    """How many records stand how: of today's code, checked against it, times of a machine, or of other code."""
    counts = {"today": 0, "checked": 0, "times": 0, "other": 0}
    for file, entry in records.manifest().items():
        paper, name = file.partition("/")[0], Path(file).stem
        if "rows" not in entry:
            continue
        note = noted(paper).get(name)
        if is_today(records.sidecar(paper, name)):
            counts["today"] += 1
        elif note and is_today(note):
            counts["checked"] += 1
        else:
            counts["times" if "." in name else "other"] += 1
    return counts


def stale(paper: str) -> list[str]:
    """What speaks against a paper's records, a line for each kind with the names of those that it holds for.

    Other models or package versions of the corpus than today's, other code without a check by today's, a commit that is
    not in the history, uncommitted changes, edits by hand.
    """
    lines_of = {Path(file): entry for file, entry in records.manifest().items() if file.startswith(f"{paper}/")}
    origins = {file.stem: records.sidecar(paper, file.stem) for file, entry in lines_of.items() if "rows" in entry}
    notes = noted(paper)
    own = {name for name, origin in origins.items() if is_today(origin)}
    known = own | {name for name, note in notes.items() if is_today(note)}
    today = records.model_checksums({model for origin in origins.values() for model in origin["models"]})
    corpora = {"", records.corpus_checksum()}  # a record without one reads no corpus
    tests: dict[str, Callable[[str, Mapping[str, Any]], bool]] = {
        "made with other models": lambda _, origin: any(today[model] != sha for model, sha in origin["models"].items()),
        "of other corpus packages": lambda _, origin: origin["corpus"] not in corpora,
        "made by unknown code": lambda name, origin: origin["code"] == UNKNOWN and name not in known,
        "made by other code than today's": lambda name, origin: origin["code"] != UNKNOWN and name not in known,
        "of no commit in the history": lambda name, origin: origin["commit"] == UNKNOWN and name not in known,
        "made with uncommitted changes": lambda name, origin: origin["dirty"] and name not in known,
        "edited by hand": lambda _, origin: "edited" in origin,
    }
    lines = []
    for words, holds in tests.items():
        if names := [name for name, origin in origins.items() if holds(name, origin)]:
            line = f"{len(names)} of {len(origins)} records {words}: {', '.join(names)}"
            lines.append(textwrap.shorten(line, _WIDTH, placeholder=" ...", break_on_hyphens=False))
    if checked := known & origins.keys() - own:
        lines.append(f"{len(checked)} of {len(origins)} records checked: today's code made some rows again, the same")
    return lines or [f"All {len(origins)} records of {paper}: a known commit, today's code, models and corpus."]

"""What a long run recorded: data/records/<paper>/<name>.parquet, or <name>.<machine>.csv for times.

Beside each file stands a sidecar of the same name (.json: how it was made), and manifest.json holds the checksum and
number of rows of every one; of a file without rows, such as a calibration, the checksum. A record is loaded whole and
right or not at all.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ondevice import assets, fetched
from ondevice.evidence import sidecars
from ondevice.evidence.estimates import born
from ondevice.evidence.exhibits import as_json, machine_name
from ondevice.evidence.sidecars import digest, sha256


class RecordError(ValueError):
    """A record that is missing, damaged or does not fit; the message says what to do."""


def folder() -> Path:
    return assets.data("records")


def load(paper: str, name: str, columns: Sequence[str] = ()) -> pd.DataFrame:
    """A recorded table of kind "recorded", with its sidecar in attrs["sidecar"]. name: with the machine, for times.

    columns: those that it must have.
    """
    path = _path(paper, name)
    origin = sidecar(paper, name)
    table = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path, keep_default_na=False)
    label, command = f"data/records/{paper}/{path.name}", f"make record PAPER={paper}"
    if missing := [column for column in [*origin["keys"], *columns] if column not in table]:
        raise RecordError(f"{label} does not fit this version, as it lacks {', '.join(missing)}: {command}.")
    if (len(table), _units(table, origin["keys"])) != (origin["rows"], origin["units"]):
        raise RecordError(f"{label} has not the rows and units that its sidecar counts: git checkout restores it.")
    table.attrs = {"sidecar": origin}
    return born(table, "recorded")


def sidecar(paper: str, name: str) -> dict[str, Any]:
    """How a record was made; raises RecordError unless record, sidecar and line in the manifest belong together."""
    path = _path(paper, name)
    label = f"data/records/{paper}/{path.name}"
    command = f"make record PAPER={paper}"
    if not path.is_file():
        others = ", ".join(machines(paper, name.split(".")[0]))
        raise RecordError(f"{label} is missing ({f'there are of {others}; ' if others else ''}{command} makes it).")
    beside = path.with_suffix(".json")
    entry = manifest().get(f"{paper}/{path.name}")
    if entry is None or not beside.is_file():
        raise RecordError(f"{label} is half-written, as its sidecar or its line in the manifest is missing: {command}.")
    if {"sha256": sha256(path), "sidecar": sha256(beside), "rows": entry.get("rows")} != entry:
        raise RecordError(f"{label} or its sidecar has not the checksum of the manifest: git checkout restores it.")
    origin = json.loads(beside.read_text(encoding="utf-8"))
    if missing := [field for field in sidecars.FIELDS if field not in origin]:
        raise RecordError(f"data/records/{paper}/{beside.name} lacks {', '.join(missing)}: {command} makes it anew.")
    if origin["seal"] != sidecars.seal(origin, path) or origin["rows"] != entry["rows"]:
        raise RecordError(f"{label} or its sidecar was edited since it was made, as its seal shows: git checkout.")
    return origin


def exists(paper: str, name: str) -> bool:
    """Whether there is a record of this name. name: with the machine, for times."""
    return _path(paper, name).is_file()


def listed(paper: str, file: str) -> Path:
    """A file without rows, such as a calibration; raises RecordError unless its checksum is that of the manifest."""
    path = folder() / paper / file
    if not path.is_file() or manifest().get(f"{paper}/{file}") != {"sha256": sha256(path)}:
        command = f"git checkout restores it, make record PAPER={paper} makes it anew"
        raise RecordError(f"data/records/{paper}/{file} is missing or has not the checksum of the manifest: {command}.")
    return path


def enter(path: Path, **facts: Any) -> None:
    """Write a file's line in the manifest: its checksum, and facts."""
    lines = {**manifest(), path.relative_to(folder()).as_posix(): {"sha256": sha256(path), **facts}}
    assets.write_text(folder() / "manifest.json", as_json(dict(sorted(lines.items()))))


def model_checksums(models: Iterable[str]) -> dict[str, str]:
    """SHA-256 over the weights of each bundled model, by data/models/manifest.json, and of a model's one GGUF file.

    Other specs name themselves.
    """
    manifest = json.loads(assets.data("models", "manifest.json").read_text(encoding="utf-8"))
    weights = sorted((file, checksum) for file, checksum in manifest.items() if file.endswith(".safetensors"))
    files = {model: [part for part in weights if part[0].startswith(f"{model}/")] for model in models}
    own = {model: digest(parts) for model, parts in files.items() if parts}
    return {model: own.get(model, fetched.MODEL_SHA256.get(model, model)) for model in files}


def corpus_checksum() -> str:
    """SHA-256 over the versions of the packages that the corpus is read from."""
    from ondevice.corpus.reading import versions

    return digest(versions())


def machines(paper: str, name: str) -> list[str]:
    """The machines with times of this name."""
    return sorted(path.name.removeprefix(f"{name}.")[:-4] for path in (folder() / paper).glob(f"{name}.*.csv"))


def times(paper: str, name: str) -> pd.DataFrame:
    """All machines' times with a column `machine` in front; the sidecars, by machine, in attrs["sidecar"]."""
    tables = {machine: load(paper, f"{name}.{machine}") for machine in machines(paper, name)}
    if not tables:
        raise RecordError(f"data/records/{paper}/{name}.<machine>.csv is missing: make record PAPER={paper} makes it.")
    sidecars = {machine: table.attrs.pop("sidecar") for machine, table in tables.items()}
    together = pd.concat(tables, names=["machine"]).reset_index(level="machine").reset_index(drop=True)
    together.attrs["sidecar"] = sidecars
    return born(together, "recorded")


class Recorder:
    """Collects the rows of a long run, keeps them on disk as it goes, and picks up where a killed one stopped.

    keys: columns that name a unit of work (a model, a request, a method), whose rows are added at once. parameters,
    models, corpus, code and versions decide which unfinished run is gone on with; several processes may share one, each
    with units of its own. machine: for times, whose record is that machine's. every: seconds between checkpoints.
    began: by time.monotonic(), where the work began before. functions: as of `sidecars.made_by`. Raises
    RecordError in a checkout with uncommitted changes whose data/records it would write to.
    """

    def __init__(
        self,
        paper: str,
        name: str,
        keys: Sequence[str],
        parameters: Mapping[str, Any],
        models: Sequence[str] = (),
        *,
        machine: str = "",
        every: float = 120.0,
        began: float | None = None,
        functions: Sequence[Callable[..., Any] | str] = (),
    ) -> None:
        self.paper = paper
        self.name = f"{name}.{machine}" if machine else name
        self.keys = list(keys)
        self.every = every
        self.commit, self.dirty = sidecars.checkout()
        if self.dirty and folder().is_relative_to(assets.ROOT):
            cure = "commit them, or record from another worktree"
            raise RecordError(f"data/records/{paper} cannot be of a checkout with uncommitted changes: {cure}.")
        self.sidecar = {
            "command": shlex.join(["python", *sys.orig_argv[1:]]),
            "parameters": dict(parameters),
            "models": model_checksums(models),
            "corpus": corpus_checksum(),
            "machine": machine or machine_name(),
            **sidecars.made_by(sys._getframe(1).f_globals, functions),
        }
        identity = digest([self.keys, *(value for key, value in self.sidecar.items() if key != "command")])
        self.parts = assets.cache_folder("records") / paper / f"{self.name}-{identity[:12]}"
        self.parts.mkdir(parents=True, exist_ok=True)
        self.fresh: list[pd.DataFrame] = []
        self.done = {unit for part in self._stored() for unit in _rows(part, self.keys)}
        self._last = time.monotonic() if began is None else began
        start = time.gmtime(time.time() - time.monotonic() + self._last)
        self._start = time.strftime("%Y-%m-%dT%H:%M:%SZ", start)
        self._beside = sidecars.busy()

    def add(self, rows: pd.DataFrame | list[dict[str, Any]]) -> None:
        """Add all rows of one or several units; those of units that are done already are left out."""
        table = pd.DataFrame(rows)
        units = _rows(table, self.keys)
        new = table[[unit not in self.done for unit in units]]
        if len(new):
            self.fresh.append(new)
            self.done |= set(units)
        if time.monotonic() - self._last >= self.every:
            self.checkpoint()

    def rows(self) -> pd.DataFrame:
        """All rows that are recorded so far, those on disk first."""
        return pd.concat([*self._stored(), *self.fresh], ignore_index=True)

    def checkpoint(self) -> None:
        """Write what was added since the last one; after kill -9, no more than that is lost."""
        if self.fresh:
            part = pd.concat(self.fresh, ignore_index=True)
            spent = (time.monotonic() - self._last) / 60
            part.attrs = {"start": self._start, "process": os.getpid(), "minutes": spent, "beside": self._beside}
            with assets.writing(self.parts / f"{time.time_ns()}-{os.getpid()}.parquet") as path:
                part.to_parquet(path, index=False)
            self.fresh = []
        self._last = time.monotonic()

    def finish(self) -> Path:
        """Write the record, its sidecar and its line in the manifest, and remove the parts; returns the file."""
        self.checkpoint()
        parts = self._stored()
        if not parts:
            raise RecordError(f"Nothing was recorded for {self.paper}/{self.name}.")
        table = pd.concat(parts, ignore_index=True).sort_values(self.keys, kind="stable", ignore_index=True)
        processes: dict[tuple[str, int], dict[str, Any]] = {}
        for about in (part.attrs for part in parts):
            first = {"start": about["start"], "minutes": 0.0, "beside": about["beside"]}
            processes.setdefault((about["start"], about["process"]), first)["minutes"] += about["minutes"]
        shares = [{**share, "minutes": round(share["minutes"], 2)} for _, share in sorted(processes.items())]
        table.attrs, path = {}, _path(self.paper, self.name)
        with assets.writing(path) as temporary:
            if path.suffix == ".parquet":
                table.to_parquet(temporary, index=False, compression="zstd")
            else:
                table.to_csv(temporary, index=False, float_format="%.6g")
        effort = {
            "commit": self.commit,
            "dirty": self.dirty,
            "keys": self.keys,
            "minutes": round(sum(share["minutes"] for share in shares), 2),
            "parts": shares,
            "beside": sidecars.busy(),
            "rows": len(table),
            "units": _units(table, self.keys),
        }
        beside = sidecars.write(path, {**self.sidecar, **effort})
        enter(path, sidecar=sha256(beside), rows=len(table))
        shutil.rmtree(self.parts)
        return path

    def _stored(self) -> list[pd.DataFrame]:
        """The parts; of a unit that two processes recorded, the first one's rows."""
        seen = set[tuple[Any, ...]]()
        kept = []
        for part in (pd.read_parquet(path) for path in sorted(self.parts.glob("[!.]*.parquet"))):
            units = _rows(part, self.keys)
            kept.append(part[[unit not in seen for unit in units]])
            seen |= set(units)
        return kept


@dataclass(frozen=True)
class Agreement:
    """How a sample that ran again compares with its record. differing: keys of those that are no near-ties."""

    n: int
    agree: int
    near_ties: int
    differing: list[tuple[Any, ...]]

    def line(self) -> str:
        ties = f", {self.near_ties} at a near-tie" if self.near_ties else ""
        counts = f"{self.agree} of {self.n} samples ran again exactly{ties}"
        if not self.differing:
            return f"{counts} (0 wrong of {self.n}: at most {100 - 100 * 0.05 ** (1 / self.n):.1f} % at 95 %)"
        apart = f"{len(self.differing)} differ, as {'/'.join(map(str, self.differing[0]))}"
        return f"{counts}; {apart}: was the algorithm edited? What follows is of this run's sample."


def agreement(
    recorded: pd.DataFrame,
    rerun: pd.DataFrame,
    keys: Sequence[str],
    columns: Sequence[str],
    margin: str | None = None,
    near: float = 1e-4,
    tolerance: float | Mapping[str, float] = 0.0,
) -> Agreement:
    """Compare a sample with its record, unit by unit: equal in all columns, row by row.

    keys: columns that name a unit; it may have several rows. tolerance: within which numbers are equal, of all columns
    or of those that it names. margin: column of the record; where its least in a unit is below `near`, a difference is
    one that another machine's rounding makes, and not wrong.
    """
    if rerun.empty:
        raise ValueError("A sample without a row compares nothing.")
    stored, sample = (dict(list(table.groupby(list(keys), sort=False))) for table in (recorded, rerun))
    same = {unit for unit in sample if unit in stored and _equal(stored[unit], sample[unit], columns, tolerance)}
    apart = [unit for unit in sample if unit not in same]
    ties = [unit for unit in apart if margin and unit in stored and stored[unit][margin].min() < near]
    return Agreement(len(sample), len(same), len(ties), [unit for unit in apart if unit not in ties])


def _equal(
    stored: pd.DataFrame, sample: pd.DataFrame, columns: Sequence[str], tolerance: float | Mapping[str, float]
) -> bool:
    """Whether two tables have the same rows; numbers, and arrays of numbers, within the tolerance."""
    if len(stored) != len(sample):
        return False
    within = tolerance if isinstance(tolerance, Mapping) else dict.fromkeys(columns, tolerance)
    return all(
        _same(first, second, within.get(column, 0.0))
        for column in columns
        for first, second in zip(stored[column], sample[column], strict=True)
    )


def _same(first: Any, second: Any, tolerance: float) -> bool:
    if isinstance(first, str) or isinstance(second, str):
        return bool(first == second)
    if np.shape(first) != np.shape(second):
        return False
    return bool(np.allclose(first, second, rtol=0, atol=tolerance, equal_nan=True))


def _rows(table: pd.DataFrame, columns: Sequence[str]) -> list[tuple[Any, ...]]:
    return list(table[list(columns)].itertuples(index=False, name=None))


def _units(table: pd.DataFrame, keys: Sequence[str]) -> int:
    """How many units of work the rows are of."""
    return len(table[list(keys)].drop_duplicates())


def _path(paper: str, name: str) -> Path:
    return folder() / paper / f"{name}.{'csv' if '.' in name else 'parquet'}"


def manifest() -> dict[str, Any]:
    """The lines of manifest.json, by file below data/records."""
    path = folder() / "manifest.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

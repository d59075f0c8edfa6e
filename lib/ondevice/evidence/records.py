"""What a long run recorded: data/records/<paper>/<name>.parquet, or <name>.<machine>.csv for times.

Beside each file stands a sidecar of the same name (.json: how it was made), and manifest.json holds the checksum and
number of rows of every one. A record is loaded whole and right or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ondevice import assets
from ondevice.evidence.estimates import born
from ondevice.evidence.exhibits import as_json, machine_name


class RecordError(ValueError):
    """A record that is missing, damaged or does not fit; the message says what to do."""


def folder() -> Path:
    return assets.data("records")


def load(paper: str, name: str, columns: Sequence[str] = ()) -> pd.DataFrame:
    """A recorded table of kind "recorded", with its sidecar in attrs["sidecar"]. name: with the machine, for times.

    columns: those that it must have.
    """
    path = _path(paper, name)
    label = f"data/records/{paper}/{path.name}"
    command = f"make record PAPER={paper}"
    if not path.is_file():
        others = ", ".join(machines(paper, name.split(".")[0]))
        raise RecordError(f"{label} is missing ({f'there are of {others}; ' if others else ''}{command} makes it).")
    sidecar = path.with_suffix(".json")
    entry = _manifest().get(f"{paper}/{path.name}")
    if entry is None or not sidecar.is_file():
        raise RecordError(f"{label} is half-written, as its sidecar or its line in the manifest is missing: {command}.")
    if {"sha256": _sha256(path), "sidecar": _sha256(sidecar), "rows": entry["rows"]} != entry:
        raise RecordError(f"{label} or its sidecar has not the checksum of the manifest: git checkout restores it.")
    table = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path, keep_default_na=False)
    if missing := [column for column in columns if column not in table]:
        raise RecordError(f"{label} does not fit this version, as it lacks {', '.join(missing)}: {command}.")
    table.attrs = {"sidecar": json.loads(sidecar.read_text(encoding="utf-8"))}
    return born(table, "recorded")


def stale(paper: str, name: str) -> list[str]:
    """What changed since a record was made: one sentence for each change."""
    sidecar = load(paper, name).attrs["sidecar"]
    label = f"data/records/{paper}/{name}"
    others = [model for model, now in model_checksums(sidecar["models"]).items() if sidecar["models"][model] != now]
    changed = [f"{model} is not the model that {label} was made with: make record PAPER={paper}." for model in others]
    if sidecar["corpus"] != corpus_checksum():
        changed.append(f"The corpus is of other package versions than {label}: only equal prompts can be compared.")
    return changed


def model_checksums(models: Iterable[str]) -> dict[str, str]:
    """SHA-256 over the weights of each bundled model, by data/models/manifest.json; other specs name themselves."""
    manifest = json.loads(assets.data("models", "manifest.json").read_text(encoding="utf-8"))
    weights = sorted((file, checksum) for file, checksum in manifest.items() if file.endswith(".safetensors"))
    files = {model: [part for part in weights if part[0].startswith(f"{model}/")] for model in models}
    return {model: _digest(parts) if parts else model for model, parts in files.items()}


def corpus_checksum() -> str:
    """SHA-256 over the versions of the packages that the corpus is read from."""
    from ondevice.corpus.reading import versions

    return _digest(versions())


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
    models and corpus decide which unfinished run is gone on with; several processes may share one, each with units of
    its own. machine: for times, whose record is that machine's. every: seconds between checkpoints.
    """

    def __init__(
        self, paper: str, name: str, keys: Sequence[str], parameters: Mapping[str, Any], models: Sequence[str] = (),
        *, machine: str = "", every: float = 120.0,
    ) -> None:  # fmt: skip
        self.paper = paper
        self.name = f"{name}.{machine}" if machine else name
        self.keys = list(keys)
        self.every = every
        self.sidecar = {
            "command": shlex.join(["python", *sys.orig_argv[1:]]),
            "parameters": dict(parameters),
            "models": model_checksums(models),
            "corpus": corpus_checksum(),
            "machine": machine or machine_name(),
        }
        identity = _digest([self.keys, *(value for key, value in self.sidecar.items() if key != "command")])
        self.parts = assets.cache_folder("records") / paper / f"{self.name}-{identity[:12]}"
        self.parts.mkdir(parents=True, exist_ok=True)
        self.fresh: list[pd.DataFrame] = []
        self.done = {unit for part in self._stored() for unit in _rows(part, self.keys)}
        self._last = time.monotonic()

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
            part.attrs = {"commit": _commit(), "minutes": (time.monotonic() - self._last) / 60}
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
        commits = {part.attrs["commit"] for part in parts}
        minutes = sum(part.attrs["minutes"] for part in parts)
        table = pd.concat(parts, ignore_index=True).sort_values(self.keys, kind="stable", ignore_index=True)
        table.attrs, path = {}, _path(self.paper, self.name)
        with assets.writing(path) as temporary:
            if path.suffix == ".parquet":
                table.to_parquet(temporary, index=False, compression="zstd")
            else:
                table.to_csv(temporary, index=False, float_format="%.6g")
        sidecar = path.with_suffix(".json")
        effort = {"keys": self.keys, "commits": sorted(commits), "minutes": round(minutes, 1)}
        assets.write_text(sidecar, as_json({**self.sidecar, **effort}))
        line = {"sha256": _sha256(path), "sidecar": _sha256(sidecar), "rows": len(table)}
        manifest = {**_manifest(), f"{self.paper}/{path.name}": line}
        assets.write_text(folder() / "manifest.json", as_json(dict(sorted(manifest.items()))))
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
    recorded: pd.DataFrame, rerun: pd.DataFrame, keys: Sequence[str], columns: Sequence[str],
    margin: str | None = None, near: float = 1e-4,
) -> Agreement:  # fmt: skip
    """Compare a sample with its record, unit by unit: equal in all columns, row by row.

    keys: columns that name a unit; it may have several rows. margin: column of the record; where its least in a unit is
    below `near`, a difference is one that another machine's rounding makes, and not wrong.
    """
    if rerun.empty:
        raise ValueError("A sample without a row compares nothing.")
    stored, sample = (dict(list(table.groupby(list(keys), sort=False))) for table in (recorded, rerun))
    same = {unit for unit in sample if unit in stored and _rows(stored[unit], columns) == _rows(sample[unit], columns)}
    apart = [unit for unit in sample if unit not in same]
    ties = [unit for unit in apart if margin and unit in stored and stored[unit][margin].min() < near]
    return Agreement(len(sample), len(same), len(ties), [unit for unit in apart if unit not in ties])


def _rows(table: pd.DataFrame, columns: Sequence[str]) -> list[tuple[Any, ...]]:
    return list(table[list(columns)].itertuples(index=False, name=None))


def _path(paper: str, name: str) -> Path:
    return folder() / paper / f"{name}.{'csv' if '.' in name else 'parquet'}"


def _manifest() -> dict[str, Any]:
    path = folder() / "manifest.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _commit() -> str:
    """The checkout's commit, with -dirty where files differ from it; empty outside of one."""
    words = ["git", "-C", str(assets.ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()

"""Whether figures/ is what the notebooks make: `python -m ondevice_studies.published [paper ...]` (make check-figures).

A paper's published exhibits are compared with those of its finished quick run, which is made where there is none of the
present code. Each difference is a sentence that names the file and the command that mends it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image

from ondevice import assets, commands, run
from ondevice.evidence.exhibits import DRAWN, name_of

REPEATED = ("exhibit", "title", "kind", "inputs", "note", "timed")  # of a JSON; every run gives the same
SUMMARIES = ("claims.csv", "exhibits.csv")
_MEASURED = ("claim", "exhibit", "statement", "paper", "kind", "note")  # all that repeats of a claim measured anew
_NUMBER = re.compile(r"(-?\d+\.?\d*(?:e[-+]?\d+)?)")
_PIXELS = 20  # may differ between two processors' pictures, at the edges of marks
_ZERO = 1e-12
_LIVE = 0.05  # of a column's largest number: so far may a live model's numbers lie apart on two processors


def faults(folder: Path) -> Iterator[str]:
    """What contradicts itself in a folder of exhibits, without a run: hashes, kinds, machines."""
    summary = _table(folder / "exhibits.csv") if (folder / "exhibits.csv").is_file() else pd.DataFrame()
    rows: list[Any] = list(summary.itertuples())
    kinds: dict[str, str] = {Path(row.file).stem: row.kind for row in rows if row.file}
    for path in sorted(folder.glob("*.json")):
        record = _record(path)
        machine = record.get("machine", {})
        for suffix in ("csv", "png"):
            file = path.with_suffix(f".{suffix}")
            if f"{suffix}_sha256" in record or file.exists():
                whole = file.is_file() and _sha256(file) == record.get(f"{suffix}_sha256")
                if not whole:
                    yield f"{file.name} is not the file that the run wrote"
                elif suffix == "png" and Image.open(file).info.get(DRAWN) != record.get("drawn_sha256"):
                    yield f"{file.name} shows another run's data than its JSON names"
        if kinds and kinds.get(path.stem) != record.get("kind"):
            yield f"{path.name} says {record.get('kind')}, exhibits.csv {kinds.get(path.stem)}"
        facts = name_of(machine.get("facts", {}), machine.get("architecture", ""), machine.get("cores", 0))
        if machine.get("name") != facts:
            yield f"{path.name} names the machine {machine.get('name')}, but its facts give {facts}"
        judging = record.get("parameters", {}).get("machine")
        if judging and not any((assets.data("records")).glob(f"*/*.{judging}.csv")):
            yield f"{path.name} names the machine {judging}, of which there is no record"


def differences(fresh: Path, published: Path) -> Iterator[str]:
    """What differs between a run's folder of exhibits and the published one; times and memory of a run do not count.

    What a model gives live differs a little between processors: of a measured exhibit a column with fractions
    agrees to 5 % of its largest number, and the picture may differ.
    """
    for new in sorted(path for path in fresh.glob("[!.]*") if path.is_file()):
        old = published / new.name
        if not old.is_file():
            yield f"{new.name} is missing"
        elif new.suffix == ".json":
            yield from _other_record(new, old)
        elif new.suffix == ".csv":
            yield from _other_table(new, old)
        elif _repeated(new, old) and _apart(new, old):
            yield f"{old.name} is another picture than the run's"


def surplus(names: Sequence[str], published: Path) -> list[str]:
    """The files of a published folder that are none of these."""
    return sorted({path.name for path in published.glob("[!.]*")} - {*names})


def named(folder: Path) -> list[str]:
    """The files that a folder's own list of exhibits calls for."""
    files = [Path(file) for file in _table(folder / "exhibits.csv")["file"] if file]
    parts = [str(file.with_suffix(end)) for file in files for end in (".csv", ".json", file.suffix)]
    return [*parts, *SUMMARIES]


def main(arguments: Sequence[str]) -> int:
    """Exit code: 0 where figures/ is what the notebooks make, 1 where it differs, 2 for bad input."""
    parser = commands.Parser(
        "check-figures", example="make check-figures PAPER=disco", description="Compare figures/ with the quick runs."
    )
    parser.add_argument("papers", nargs="*", metavar="paper", help="papers to compare (default: all)")
    papers = parser.parse_args(arguments).papers
    with commands.refusing("check-figures"):
        jobs = run.plan(papers)
        layout = run.Layout()
        unknown = surplus(layout.papers(), layout.figures)
        if unknown and not papers:
            raise ValueError(f"figures/{unknown[0]} is of no notebook: git rm -r figures/{unknown[0]} removes it.")
        failed = [outcome.job.paper for outcome in run.run_all(jobs) if outcome.status == "failed"]
        if failed:
            raise ValueError(f"The quick run of {', '.join(failed)} fails: ondevice-run {failed[0]} shows why.")
        count = 0
        for job in jobs:
            fresh, published = job.folder / "figures" / job.paper, layout.figures / job.paper
            if extra := surplus([path.name for path in fresh.iterdir()], published):
                mends = f"make publish PAPER={job.paper} removes it"
                raise ValueError(f"figures/{job.paper}/{extra[0]} is made by no notebook: {mends}.")
            for sentence in (*faults(published), *differences(fresh, published)):
                print(f"figures/{job.paper}/{sentence} (make notebooks makes it anew).")
                count += 1
        print(f"{count} differences between figures/ and the quick runs")
    return int(count > 0)


def _other_record(new: Path, old: Path) -> Iterator[str]:
    now, before = _record(new), _record(old)
    live, (name, published_name) = _live(now), (record.get("machine", {}).get("name") for record in (now, before))
    if live and "inputs" in now:  # a measured exhibit names its machine, in its picture's words, too
        now["inputs"] = [published_name if value == name else value for value in now["inputs"]]
    elsewhere = live and name != published_name
    hashed = "structure_sha256" if live else "drawn_sha256"
    for key in REPEATED if elsewhere else (*REPEATED, hashed):
        if now.get(key) != before.get(key):
            shown = "other data or artists" if key == hashed else f"{key} {before.get(key)!r}, not {now.get(key)!r}"
            yield f"{old.name} has {shown}"
    first, second = ({**record.get("parameters", {}), "threads": 0} for record in (now, before))
    if first != second:
        yield f"{old.name} has other parameters"


def _other_table(new: Path, old: Path) -> Iterator[str]:
    now, before = _table(new), _table(old)
    if list(now) != list(before) or len(now) != len(before):
        sizes = [f"{len(table)} rows of {', '.join(table.columns)}" for table in (before, now)]
        yield f"{old.name} has {sizes[0]}, the run {sizes[1]}"
        return
    timed, live = {"claims.csv": [], "exhibits.csv": ["verdict"]}.get(new.name), False  # which counts claims.csv's
    if timed is None:
        record = _record(new.with_suffix(".json"))
        timed, live = record.get("timed", []), _live(record)
    anew = pd.Series(False, now.index)
    if new.name == "claims.csv":
        anew = now["kind"].str.contains("measured") & before["kind"].str.contains("measured")
    for column in [name for name in now if name not in timed]:
        rows = now.index if column in _MEASURED else now.index[~anew]
        numbers = pd.to_numeric(before[column], errors="coerce")
        fractions = numbers.notna().all() and (numbers % 1).any()  # budgets and counts are exact
        apart = _LIVE * float(numbers.abs().max()) if live and fractions else _ZERO
        other = [row for row in rows if not same(now[column][row], before[column][row], apart)]
        if other:
            row = other[0]
            yield f"{old.name} has {before[column][row]!r} in row {row + 1} of {column}, the run {now[column][row]!r}"


def same(first: str, second: str, apart: float = _ZERO) -> bool:
    """Whether two cells are equal, their numbers to the sixth digit, to which a CSV is rounded, or at most `apart`."""
    parts = [_NUMBER.split(text) for text in (first, second)]
    numbers = zip(*(list(map(float, part[1::2])) for part in parts), strict=False)
    return parts[0][::2] == parts[1][::2] and all(math.isclose(x, y, rel_tol=1e-5, abs_tol=apart) for x, y in numbers)


def _repeated(new: Path, old: Path) -> bool:
    """Whether two pictures should be equal: one Matplotlib drew both, and no times."""
    now, before = (_record(path.with_suffix(".json")) for path in (new, old))
    versions = [record.get("versions", {}).get("matplotlib") for record in (now, before)]
    return not _live(now) and versions[0] == versions[1]


def _live(record: dict[str, Any]) -> bool:
    """Whether an exhibit has what its very run measured."""
    return "measured" in record["kind"]


def _apart(new: Path, old: Path) -> bool:
    first, second = (np.asarray(Image.open(path).convert("RGB"), dtype=int) for path in (new, old))
    return first.shape != second.shape or bool((np.abs(first - second).max(-1) > 50).sum() > _PIXELS)


def _record(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _table(path: Path) -> pd.DataFrame:
    return pd.read_csv(path, dtype=str, keep_default_na=False)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

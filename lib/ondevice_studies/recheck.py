"""Check records against today's code: python -m ondevice_studies.recheck PAPER, which is `make record-check PAPER=...`.

Of each record that was made by other code, a part that a seed draws is made again and compared. Where it agrees, that
is noted in data/records/<paper>/checks.json; where it differs, the record has to be made anew. Times, which a machine
decides, are not compared.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from ondevice import commands
from ondevice.evidence import Again, checks, records

MODULES = {
    "diaa": "ondevice_studies.diaa.record",
    "disco": "ondevice_studies.disco.record",
    "dragon": "ondevice_studies.dragon.record",
    "grating": "ondevice_studies.grating.record",
    "sdnpu": "ondevice_studies.sdnpu.record",
    "speculation": "ondevice_studies.speculation.plain",
}


def again(paper: str, name: str) -> Again | None:
    """How a part of a record is made again; None of times, and of what takes long."""
    way: Again | None = None if "." in name else importlib.import_module(MODULES[paper]).again(name)
    return way


def rechecked(paper: str, names: Sequence[str] = (), seed: int = 0, force: bool = False) -> list[str]:
    """Check a paper's records, or some; returns the names of those that differ. force: those too that need none."""
    differing = []
    for file, entry in records.manifest().items():
        name = Path(file).stem
        if not file.startswith(f"{paper}/") or "rows" not in entry or (names and name not in names):
            continue
        note = checks.noted(paper).get(name)
        known = [records.sidecar(paper, name), *([note] if note else [])]
        if not force and any(map(checks.is_today, known)):
            print(f"{name}: of today's code, or checked against it")
            continue
        way = again(paper, name)
        if way is None:
            print(f"{name}: not compared")
            continue
        began = time.monotonic()
        try:
            result = checks.check(paper, name, way, seed)
        except FileNotFoundError as error:
            print(f"{name}: not compared, as {error}")
            continue
        print(f"{name}: {result.line()} ({time.monotonic() - began:.0f} s)", flush=True)
        if result.differing:
            differing.append(name)
    return differing


def main(argv: Sequence[str] | None = None) -> None:
    """The command; code 1 where a record differs."""
    parser = commands.Parser("make record-check", description=__doc__, example="make record-check PAPER=disco")
    parser.add_argument("paper", choices=list(MODULES))
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="records, as their files are called")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--force", action="store_true", help="those too that need no check")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    with commands.refusing("make record-check"):
        if differing := rechecked(options.paper, options.only, options.seed, options.force):
            print(f"To be made anew: {', '.join(differing)}", file=sys.stderr)
            sys.exit(1)


if __name__ == "__main__":
    main()

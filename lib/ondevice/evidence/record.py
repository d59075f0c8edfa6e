"""Make a paper's records anew: python -m ondevice.evidence.record PAPER ..., which is `make record PAPER=...`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import ondevice
from ondevice import commands


def main(arguments: list[str]) -> int:
    """Call ondevice.<paper>.record.main with the other arguments; exit code 2 on a paper without one."""
    found = (path.parent.name for path in Path(ondevice.__file__).parent.glob("*/record.py"))
    papers = sorted(set(found) - {"evidence"})
    if not arguments or arguments[0] not in papers:
        print(f"Which paper? There are records of: {', '.join(papers) or 'none'}.", file=sys.stderr)
        return 2
    with commands.refusing(f"python -m ondevice.evidence.record {arguments[0]}"):
        return importlib.import_module(f"ondevice.{arguments[0]}.record").main(arguments[1:]) or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

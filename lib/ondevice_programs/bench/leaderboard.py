"""The leaderboard's page from its files: `python -m ondevice_programs.bench.leaderboard` writes docs/leaderboard.md."""

from __future__ import annotations

import sys
from pathlib import Path

from ondevice import assets, commands
from ondevice_programs.bench.predictions import DRAFTED, FASTEST
from ondevice_programs.bench.report import interval
from ondevice_programs.bench.state import read

_PROGRAM = "python -m ondevice_programs.bench.leaderboard"
_HEAD = """# Leaderboard

The fastest drafter that [`ondevice-bench`](bench.md) measured, by model and machine, on its own prompts. Plain decoding
in the same format is the first speed's reference. The second speed is over the fastest plain decoding of all formats.
At 1 or less there, decoding without a drafter is the better choice. Speeds are ratios of times per token, with 95 %
intervals over prompts. A commit with a `+` had uncommitted changes, so its row is a trial.

Rows come from the files in `docs/leaderboard`. [A new row](bench.md#a-row-in-the-leaderboard) is a new file there.

"""
_COLUMNS = [
    *("model", "machine", "threads", "format", "drafter", "budget", "tokens per pass", "ms per token"),
    *("over plain, same format", "over the fastest plain", "prompts", "commit", "command"),
]


def page(folder: Path) -> str:
    """The page of a folder's files, by model and then by ms per token. Raises ValueError on an unfinished bench."""
    rows = sorted((_row(path) for path in folder.glob("*.json")), key=lambda row: (row[0], float(row[7])))
    return _HEAD + "".join(f"| {' | '.join(cells)} |\n" for cells in (_COLUMNS, ["---"] * len(_COLUMNS), *rows))


def _row(path: Path) -> list[str]:
    parts = read(path)
    if not parts["complete"] or "measured" not in parts:
        raise ValueError(f"{path.name} is no complete bench with a drafter.")
    measured = parts["measured"]
    machine = parts["machine"]
    ms = measured["ms_per_token"]
    over_fastest = f"{interval(measured['over_fastest'])} ({measured['fastest']}, {ms[FASTEST]:.2f} ms)"
    cells = [
        *(parts["model"]["spec"], machine["processor"], machine["threads"]),
        *(measured["format"], measured["drafter"], measured["budget"]),
        *(f"{measured['tokens_per_pass']:.2f}", f"{ms[DRAFTED]:.2f}", interval(measured["speed"]), over_fastest),
        *(measured["n"], parts["commit"] or "", f"`{parts['command']}`"),
    ]
    return [str(cell).replace("|", "\\|") for cell in cells]


def main() -> None:
    """The command."""
    commands.no_arguments(_PROGRAM, "Writes docs/leaderboard.md from docs/leaderboard/*.json.")
    with commands.refusing(_PROGRAM):
        assets.write_text(assets.ROOT / "docs" / "leaderboard.md", page(assets.ROOT / "docs" / "leaderboard"))
    sys.exit(0)


if __name__ == "__main__":
    main()

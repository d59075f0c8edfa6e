"""README's table of main numbers, from the published verdicts: `python -m ondevice_studies.readme` writes it."""

from __future__ import annotations

import json
import re

import pandas as pd

from ondevice import assets, evidence, plotting
from ondevice_studies.claims import headlines

FIRST = "<!-- found: written by python -m ondevice_studies.readme -->"
LAST = "<!-- end -->"
_BLOCK = re.compile(f"{re.escape(FIRST)}.*?{re.escape(LAST)}", re.S)


def summary(board: pd.DataFrame) -> str:
    """Markdown: a headline a paper, and how many claims have which verdict. board: of `evidence.scoreboard`."""
    claims = board.set_index("claim")
    lines = ["| what | the paper | here | kind | verdict |", "|---|---|---|---|---|"]
    for claim, words in headlines().items():
        row = claims.loc[claim]
        here = _first(str(row["value"]))
        lines.append(f"| {words} | {row['printed']} | {here} | {row['kind']} | {row['verdict']} |")
    tested = board[board["verdict"] != "untested"]
    verdicts = _counted(board["verdict"], evidence.VERDICTS)
    bases = _counted(tested["kind"].map(plotting.basis_of), ("measurement", "simulation", "formula"))
    null = int(board["remark"].str.contains("does not discriminate").sum())
    return "\n".join([
        *lines, "", f"Of {len(board)} claims: {verdicts}. The {len(tested)} verdicts rest on: {bases}.",
        f"{null} claims do not discriminate: a trivial method gets the same verdict.",
    ])  # fmt: skip


def written(text: str, block: str) -> str:
    """The README's text with the block in its place. Raises ValueError where it has none."""
    made, count = _BLOCK.subn(lambda _: f"{FIRST}\n{block}\n{LAST}", text)
    if count != 1:
        raise ValueError(f"README.md has {count} places for the summary, not one.")
    return made


def main() -> None:
    """Write README.md where its summary is not that of the published verdicts."""
    path = assets.ROOT / "README.md"
    assets.write_text(path, written(path.read_text(encoding="utf-8"), summary(evidence.scoreboard())))


def _first(value: str) -> str:
    """A claim's first value with its interval."""
    found = json.loads(value)
    one = found[0] if isinstance(found, list) else found
    if not isinstance(one, dict):
        return f"{one:.3g}"
    low = f"{one['low']:.3g}"
    high = f"{one['high']:.3g}"
    return f"{one['value']:.3g}" + ("" if low == high else f" [{low}, {high}]")


def _counted(values: pd.Series, order: tuple[str, ...]) -> str:
    counts = values.value_counts()
    return ", ".join(f"{counts[name]} {name}" for name in order if name in counts)


if __name__ == "__main__":
    main()

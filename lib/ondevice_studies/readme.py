"""README's table of main numbers and its map of the library: `python -m ondevice_studies.readme` writes both."""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from pathlib import Path

import pandas as pd

from ondevice import assets, evidence, plotting
from ondevice_studies.board import scoreboard
from ondevice_studies.claims import headlines

FOUND, MAP = "found", "map"  # the blocks that are written here, each between two comments
_BY = "written by python -m ondevice_studies.readme"
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def summary(board: pd.DataFrame) -> str:
    """Markdown: a headline a paper, and how many claims have which verdict. board: of `board.scoreboard`."""
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
    return "\n".join(
        [
            *lines,
            "",
            f"Of {len(board)} claims: {verdicts}. The {len(tested)} verdicts rest on: {bases}.",
            f"{null} claims do not discriminate: a trivial method gets the same verdict.",
        ]
    )


def library_map(library: Path) -> str:
    """Markdown: every folder of the library with its docstring's first line and its code lines, to the next ten.

    library: lib/. Lines of comments and docstrings and empty ones do not count; a package's include its folders'.
    """
    lines = ["| folder of `lib/` | what is inside | code lines |", "|---|---|---:|"]
    for file in sorted(library.rglob("__init__.py"), key=lambda path: path.parent.parts):
        words = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        count = sum(code_lines(path.read_text(encoding="utf-8")) for path in file.parent.rglob("*.py"))
        name = f"{file.parent.relative_to(library).as_posix()}/"
        shown = f"`{name}`" if name.count("/") > 1 else f"**`{name}`**"
        lines.append(f"| {shown} | {words.partition(chr(10))[0].rstrip('.')} | {round(count, -1):,} |")
    return "\n".join(lines)


def code_lines(text: str) -> int:
    """How many lines of a Python text hold code."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = {line for token in tokens if token.type not in _NO_CODE for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            code -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(code)


def written(text: str, block: str, name: str = FOUND) -> str:
    """The README's text with a block in its place. Raises ValueError where it has none."""
    first = f"<!-- {name}: {_BY} -->"
    last = "<!-- end -->"
    new, count = re.subn(
        f"{re.escape(first)}.*?{re.escape(last)}", lambda _: f"{first}\n{block}\n{last}", text, flags=re.S
    )
    if count != 1:
        raise ValueError(f"README.md has {count} places for the block {name!r}, not one.")
    return new


def main() -> None:
    """Write README.md where its summary is not that of the published verdicts, or its map not that of the library."""
    path = assets.ROOT / "README.md"
    text = written(path.read_text(encoding="utf-8"), summary(scoreboard()))
    assets.write_text(path, written(text, library_map(assets.ROOT / "lib"), MAP))


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

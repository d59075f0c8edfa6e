"""Blocks of README and of docs/ that a program writes: `python -m ondevice_studies.readme` writes them all."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pandas as pd

from ondevice import assets, evidence, plotting
from ondevice.evidence import checks
from ondevice.evidence.paper_run import read_value
from ondevice.evidence.rules import Rule, parts_of
from ondevice.run.moved import HOMES
from ondevice_studies import front
from ondevice_studies.board import GROUPS, claims, group, scoreboard, wrapped
from ondevice_studies.claims import CLAIMS, headlines

# The blocks that are written here, each between two comments
FINDINGS = "findings"
NOTEBOOKS = "notebooks"
SUMMARY = "summary"
MAP = "map"
MOVED = "moved"
RECORDS = "records"
EXAMPLE_BLOCK = "example"
EXAMPLE = "diaa"  # the paper whose first headline docs/verdicts.md works out
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
    """Markdown: the numbers of the papers' abstracts beside ours, and how many claims have which verdict.

    board: of `board.scoreboard`.
    """
    claims = board.set_index("claim")
    lines = ["| what | the paper | here | n | rests on | verdict | its null |", "|---|---|---|---|---|---|---|"]
    for claim, words in headlines().items():
        row = claims.loc[claim]
        units = f"{row['n']} {row['drawn']}".strip()
        null = row["null"].rpartition(": ")[2]
        cells = [words, row["printed"], _value(str(row["value"])), units, row["kind"], row["verdict"], null]
        lines.append(f"| {' | '.join(cell or '-' for cell in cells)} |")
    judged = board[board["verdict"] != "untested"]
    verdicts = counted(board["verdict"], evidence.VERDICTS)
    bases = counted(judged["kind"].map(plotting.basis_of), plotting.BASES)
    reproduced = board[board["verdict"] == "reproduced"]
    groups = reproduced.apply(lambda row: group(row["kind"], row["null"], row["remark"]), axis=1)
    worth = ", ".join(f"{(groups == name).sum()} {words}" for name, words in GROUPS.items())
    return "\n".join(
        [
            *lines,
            "",
            f"Of {len(board)} claims: {verdicts}. The {len(judged)} verdicts rest on: {bases}.",
            f"Of the {len(reproduced)} that are reproduced: {worth}.",
        ]
    )


def example(board: pd.DataFrame) -> str:
    """Markdown: how the verdict of one claim came about, from its published row. board: of `board.scoreboard`."""
    claim = next(claim for claim in headlines() if claim in CLAIMS[EXAMPLE])
    row = board.set_index("claim").loc[claim]
    rule = CLAIMS[EXAMPLE][claim].rule
    assert isinstance(rule, Rule)
    trend = f" A *trend* is {rule.trend.words(rule.unit)}." if rule.trend else ""
    remark = (
        " That is as good or better, so the claim does not discriminate." if "not discriminate" in row["remark"] else ""
    )
    return wrapped(
        f"Claim `{claim}`: {row['statement']}. The paper has {row['printed']}.\n\n"
        f"1. The rule measures {rule.quantity}. *Reproduced* is {rule.reproduced.words(rule.unit)}.{trend}\n\n"
        f"2. The value here is {_value(str(row['value']))}, {row['kind']}; {row['n']} {row['drawn']} were drawn.\n\n"
        f"3. The verdict is **{row['verdict']}**.\n\n"
        f"4. The null is {rule.null}. It has {row['null']}.{remark}"
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


def records() -> str:
    """Markdown: how many records today's code makes, or makes in part."""
    counts = checks.standing()
    return wrapped(
        f"Of {sum(counts.values())} records today's code made {counts['today']}, and made a part of "
        f"{counts['checked']} again, the same. {counts['times']} hold a machine's times, made by other code: these are "
        f"not compared. {counts['other']} others are of other code."
    )


def moved() -> str:
    """Markdown: the packages of before the library was five, and where their modules are now."""
    rows = (f"| `{old}` | {', '.join(f'`{name}`' for name in homes)} |" for old, homes in sorted(HOMES.items()))
    return "\n".join(["| before | now |", "|---|---|", *rows])


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


def written(text: str, block: str, name: str) -> str:
    """A page's text with a block in its place. Raises ValueError where it has none."""
    first = f"<!-- {name}: {_BY} -->"
    last = "<!-- end -->"
    new, count = re.subn(
        f"{re.escape(first)}.*?{re.escape(last)}", lambda _: f"{first}\n{block}\n{last}", text, flags=re.S
    )
    if count != 1:
        raise ValueError(f"The page has {count} places for the block {name!r}, not one.")
    return new


def pages() -> dict[Path, str]:
    """The pages that have such blocks, with the text that they should have."""
    board = scoreboard()
    blocks = {
        "README.md": {FINDINGS: front.findings(claims()), NOTEBOOKS: front.notebooks()},
        "CHANGELOG.md": {MOVED: moved()},
        "docs/findings.md": {SUMMARY: summary(board)},
        "docs/house.md": {MAP: library_map(assets.ROOT / "lib")},
        "docs/verdicts.md": {EXAMPLE_BLOCK: example(board), RECORDS: records()},
    }
    texts = {}
    for page, written_blocks in blocks.items():
        path = assets.ROOT / page
        text = path.read_text(encoding="utf-8")
        for name, block in written_blocks.items():
            text = written(text, block, name)
        texts[path] = text
    return texts


def main() -> None:
    """Write each page where a block is not that of the published verdicts or of the library."""
    for path, text in pages().items():
        assets.write_text(path, text)


def _value(text: str) -> str:
    """A claim's value with its interval, of more than two parts the first; empty where there is none."""
    parts = parts_of(read_value(text)) if text else ()
    return ", ".join(f"{part}" for part in (parts if len(parts) <= 2 else parts[:1]))


def counted(values: pd.Series, order: tuple[str, ...]) -> str:
    """`3 reproduced, 1 trend`: how often each of the words in order occurs, those that do."""
    counts = values.value_counts()
    return ", ".join(f"{counts[name]} {name}" for name in order if name in counts)


if __name__ == "__main__":
    main()

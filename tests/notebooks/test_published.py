"""What a run published pins the kinds that a notebook types: no label changes without publishing anew.

The notebooks' stored outputs are of the run that published: both say the same.
"""

import ast
import json
import re

import nbformat
import pandas as pd
import pytest

from ondevice.evidence import kind_of
from ondevice.run import Layout
from ondevice_studies.claims import CLAIMS

LAYOUT = Layout()
EXHIBITED = [paper for paper in LAYOUT.papers() if (LAYOUT.figures / paper / "exhibits.csv").is_file()]
PAPERS = [paper for paper in LAYOUT.papers() if (LAYOUT.figures / paper / "claims.csv").is_file()]


def published(paper: str, name: str) -> pd.DataFrame:
    return pd.read_csv(LAYOUT.figures / paper / f"{name}.csv", dtype=str, keep_default_na=False)


def typed(paper: str) -> dict[str, str]:
    """The kind that the notebook's text gives an exhibit (by stem) or a claim, or a claim's row has, where one does."""
    kinds = {claim: row.kind for claim, row in CLAIMS.get(paper, {}).items() if row.kind}
    for cell in nbformat.read(LAYOUT.notebook(paper), as_version=4).cells:
        lines = [line for line in cell.source.splitlines() if not line.startswith(("%", "!"))]
        for node in ast.walk(ast.parse("\n".join(lines))) if cell.cell_type == "code" else ():
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("save", "judge"):
                given = [word.value for word in node.keywords if word.arg == "kind"]
                if given and isinstance(given[0], ast.Constant) and isinstance(node.args[0], ast.Constant):
                    kinds[node.args[0].value] = given[0].value
    return kinds


def differs(kind: str, published: str | None) -> bool:
    return published not in (None, "", "untested") and kind_of(kind) != kind_of(published)


def stored(paper: str) -> str:
    """What the notebook's cells have printed."""
    outputs = [cell.get("outputs", ()) for cell in nbformat.read(LAYOUT.notebook(paper), as_version=4).cells]
    return "\n".join(output.get("text", "") for each in outputs for output in each)


@pytest.mark.parametrize("paper", PAPERS)
def test_typed_kinds_are_the_published_ones(paper):
    exhibits, claims = published(paper, "exhibits"), published(paper, "claims")
    known = dict(zip(exhibits["file"].str.rpartition(".")[0], exhibits["kind"], strict=True))
    known |= dict(zip(claims["claim"], claims["kind"], strict=True))
    other = {name: kind for name, kind in typed(paper).items() if differs(kind, known.get(name))}
    assert other == {}


def exhibited(paper: str, exhibits: pd.DataFrame, kinds: dict[str, str]) -> list[str]:
    """Files whose kind differs among the list of exhibits, the JSON beside the file and the notebook's output."""
    printed = {file: kind for kind, file in re.findall(rf"^\w+: (\S+), {paper}/(\S+)$", stored(paper), re.M)}
    rows = exhibits[exhibits["file"] != ""].set_index("file")["kind"].to_dict()
    names = {*printed, *rows, *kinds}
    return sorted(name for name in names if not printed.get(name) == rows.get(name) == kinds.get(name))


def judged(paper: str, claims: pd.DataFrame) -> list[str]:
    """Claims whose published verdict, value or kind is not what the notebook's output says.

    Every run measures anew, so the kind alone counts of a claim that is measured.
    """
    text = re.sub(r"\s", "", stored(paper))
    wrong = []
    for row in claims[claims["verdict"] != "untested"].itertuples():
        head, ours = f"{row.claim}{row.statement}: paper {row.paper}, ours", row.ours
        head, ours = (re.escape(re.sub(r"\s", "", part)) for part in (head, ours))
        line = rf"{head}.{{1,400}}?" if row.kind == "measured" else rf"{row.verdict}{head}{ours}(,n\d[^,]*)?"
        if not re.search(rf"{line},{re.escape(row.kind)}(?!\+)", text):
            wrong.append(row.claim)
    return wrong


@pytest.mark.parametrize("paper", EXHIBITED)
def test_exhibits_are_of_the_kind_that_the_notebook_printed(paper):
    files = [path.with_suffix(".png") for path in (LAYOUT.figures / paper).glob("*.json")]
    files = [path if path.is_file() else path.with_suffix(".csv") for path in files]
    kinds = {path.name: json.loads(path.with_suffix(".json").read_text())["kind"] for path in files}
    exhibits = published(paper, "exhibits")
    assert exhibited(paper, exhibits, kinds) == []
    for name, kind in kinds.items():  # relabelled in both places
        other = "measured" if kind != "measured" else "simulated"
        relabelled = exhibits.assign(kind=exhibits["kind"].where(exhibits["file"] != name, other))
        assert exhibited(paper, relabelled, kinds | {name: other}) == [name]


@pytest.mark.parametrize("paper", PAPERS)
def test_verdicts_are_those_that_the_notebook_printed(paper):
    claims = published(paper, "claims")
    assert judged(paper, claims) == []
    for column, other in {"kind": "quoted", "ours": "7 of 7", "verdict": "undecided"}.items():
        first = claims.index[~claims[column].isin(["", "untested", other]) & (claims["kind"] != "measured")][0]
        edited = claims.assign(**{column: claims[column].where(claims.index != first, other)})
        assert judged(paper, edited) == [claims["claim"][first]]

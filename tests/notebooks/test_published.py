"""What a run published pins the kinds that a notebook types: no label changes without publishing anew."""

import ast

import nbformat
import pandas as pd
import pytest

from ondevice.evidence import kind_of
from ondevice.run import Layout
from ondevice_studies.claims import CLAIMS

LAYOUT = Layout()
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


@pytest.mark.parametrize("paper", PAPERS)
def test_typed_kinds_are_the_published_ones(paper):
    exhibits, claims = published(paper, "exhibits"), published(paper, "claims")
    known = dict(zip(exhibits["file"].str.rpartition(".")[0], exhibits["kind"], strict=True))
    known |= dict(zip(claims["claim"], claims["kind"], strict=True))
    other = {name: kind for name, kind in typed(paper).items() if differs(kind, known.get(name))}
    assert other == {}

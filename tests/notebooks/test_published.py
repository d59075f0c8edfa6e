"""The notebooks' stored outputs are of the run that published: both have the same kinds, values and verdicts.

That a fresh run gives both is nbval's to tell.
"""

import json
import re

import nbformat
import pandas as pd
import pytest

from ondevice.run import Layout

LAYOUT = Layout()
EXHIBITED = [paper for paper in LAYOUT.papers() if (LAYOUT.figures / paper / "exhibits.csv").is_file()]
PAPERS = [paper for paper in LAYOUT.papers() if (LAYOUT.figures / paper / "claims.csv").is_file()]


def published(paper: str, name: str) -> pd.DataFrame:
    return pd.read_csv(LAYOUT.figures / paper / f"{name}.csv", dtype=str, keep_default_na=False)


def stored(paper: str) -> str:
    """What the notebook's cells have printed."""
    outputs = [cell.get("outputs", ()) for cell in nbformat.read(LAYOUT.notebook(paper), as_version=4).cells]
    return "\n".join(output.get("text", "") for each in outputs for output in each)


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
    for row in claims[claims["ours"] != ""].itertuples():
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

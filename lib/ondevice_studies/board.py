"""The scoreboard's rows: every published verdict, the section that judges it, and what a first, smaller run gave."""

from __future__ import annotations

import html
import json
import re
import textwrap
from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from ondevice import assets, plotting
from ondevice.evidence.claims import Untested
from ondevice.evidence.exhibits import write_exhibit, write_result
from ondevice.evidence.paper_run import read_value, shown
from ondevice.evidence.rules import Rule, parts_of
from ondevice_studies.claims import CLAIMS

NAMES = {"diaa": "DIAA", "disco": "DiSCo", "dragon": "DRAGON", "grating": "GRATING", "sdnpu": "sd.npu"}
_FILLED = re.compile(r"\{(\S+)\s+(\w+)\s*(\d*)\}")


def scoreboard() -> pd.DataFrame:
    """Every paper's published verdicts (figures/<paper>/claims.csv), with a column `paper` in front.

    The paper's own value is in the column `printed`.
    """
    tables = {
        path.parent.name: pd.read_csv(path, keep_default_na=False, dtype=str).rename(columns={"paper": "printed"})
        for path in sorted((assets.ROOT / "figures").glob("*/claims.csv"))
    }
    if not tables:
        raise FileNotFoundError("No figures/<paper>/claims.csv: run a paper's notebook first.")
    board = pd.concat(tables, names=["paper"]).reset_index(level="paper").reset_index(drop=True)
    return board.fillna("")  # remarks of runs before there were any


def claims() -> pd.DataFrame:
    """`scoreboard` with the columns conditions (the paper's), section (the heading under which a claim is judged),
    machine (whose clock and memory a measurement is of; empty for what is simulated or computed) and basis (what the
    verdict rests on)."""
    board = scoreboard()
    papers = dict.fromkeys(board["paper"])
    machines = {paper: _machines(paper) for paper in papers}
    printed = pd.concat(assets.paper_list("claims", paper) for paper in papers).set_index("claim_id")["conditions"]
    rows: list[Any] = list(board.itertuples())
    kinds = [[machines[row.paper].get(kind, "") for kind in row.kind.split("+")] for row in rows]
    return board.assign(
        conditions=printed.fillna("").reindex(board["claim"]).to_numpy(),
        section=[CLAIMS[row.paper][row.claim].section for row in rows],
        machine=[" and ".join(dict.fromkeys(filter(None, each))) for each in kinds],
        basis=board["kind"].map(plotting.basis_of).where(board["verdict"] != "untested", "untested"),
    )


GROUPS = {  # of reproduced claims: what the verdict is worth, the strongest first, and README's words
    "against a null": "by a measurement against a null",
    "without a possible null": "by a measurement without a possible null",
    "formula": "by a formula",
    "replay": "by a replay",
    "prediction": "by a prediction",
    "simulation": "by a simulation",
    "as its null is": "by a measurement in which the null gets the same verdict",
    "null pending": "by a measurement whose null is pending",
}


def group(kind: str, null: str, remark: str) -> str:
    """One of GROUPS, of a claim that is reproduced. kind, null, remark: its columns in claims.csv."""
    basis = plotting.basis_of(kind)
    if basis != "measurement":
        return basis
    if null.startswith("null pending"):
        return "null pending"
    if null.startswith("no null possible"):
        return "without a possible null"
    return "as its null is" if "does not discriminate" in remark else "against a null"


def link(paper: str, heading: str) -> str:
    """The address of a section, as JupyterLab and nbconvert name it, from a notebook beside its own."""
    return f"{paper}.ipynb#{heading.replace('`', '').replace(' ', '-')}"


def value_text(stored: str) -> str:
    """A claim's value as it was judged, with its 95 % intervals, from the column `value`; empty where there is none."""
    return shown(read_value(stored), "") if stored else ""


def filled(text: str, board: pd.DataFrame) -> str:
    """Prose whose numbers are the verdicts': {claim verdict} is ours, {claim verdict 1} its second part, {claim paper}
    the paper's. Raises ValueError where the claim has not the verdict that the sentence takes it for."""
    rows = board.set_index("claim")

    def number(match: re.Match[str]) -> str:
        row = dict(rows.loc[match[1]])
        word = match[2]
        if word == "paper":
            return str(row["printed"])
        if row["verdict"] != word:
            raise ValueError(f"The text takes {match[1]} for {word}, but it is {row['verdict']}: write it anew.")
        return shown(parts_of(read_value(row["value"]))[int(match[3] or 0)], "")

    return wrapped(_FILLED.sub(number, text))


def verdict_of(rule: Rule | Untested, stored: str) -> str:
    """What a rule says of a stored value; `another quantity` where it judges none or another number of parts."""
    try:
        return rule.verdict(read_value(stored)) if isinstance(rule, Rule) and stored else "another quantity"
    except ValueError:
        return "another quantity"


def wrapped(text: str) -> str:
    """Each paragraph of a text in lines of at most 110 characters."""
    fill = textwrap.TextWrapper(110, break_long_words=False, break_on_hyphens=False).fill
    return "\n\n".join(map(fill, text.strip().split("\n\n")))


def as_html(rows: pd.DataFrame) -> str:
    """A table of claims in words, each with a link to the section that judges it. rows: of `claims`."""
    head = ("claim, section", "in words", "the paper", "here [95 %]", "n", "null", "rests on", "verdict")
    lines = ["<tr>", *(_cell(f"<b>{name}</b>") for name in head), "</tr>"]
    row: Any
    for row in rows.itertuples():
        number = re.match(r"[\d.]*\d", row.section)
        remark = row.remark.partition(":")[0]
        source = ", ".join(word for word in (row.kind, row.machine) if word not in ("", "simulated", "analytic"))
        label = f"{row.claim.rpartition('-')[2]}, {number[0] if number else row.section}"
        texts = [
            f"{row.statement} ({row.conditions})" if row.conditions else row.statement,
            row.printed,
            row.ours or f"Not tested: {row.note}",
            f"{row.n} {row.drawn}".strip(),
            row.null,
            row.basis + (f" ({source})" if source else "") if row.kind else "",
            f"{row.verdict}; {remark}" if remark else row.verdict,
        ]
        anchor = f'<a href="{html.escape(link(row.paper, row.section))}">{html.escape(label)}</a>'
        lines += ["<tr>", _cell(anchor), *(_cell(html.escape(text, quote=False)) for text in texts), "</tr>"]
    return "\n".join(["<table>", *lines, "</table>"]) if len(rows) else "<p>No claim is left by the filters.</p>"


def text_table(rows: pd.DataFrame) -> str:
    """A table of texts as HTML, its columns' names in bold."""
    lines = [[f"<b>{name}</b>" for name in rows]]
    lines += [[html.escape(str(text), quote=False) for text in row] for row in rows.itertuples(index=False)]
    return "\n".join(["<table>", *("\n".join(["<tr>", *map(_cell, line), "</tr>"]) for line in lines), "</table>"])


def verdict_bars(counts: pd.DataFrame) -> Figure:
    """Claims by verdict, one bar a paper; a panel a basis. counts: columns paper, verdict, claims and basis."""
    papers = sorted(set(counts["paper"]))
    names = [NAMES.get(paper, paper) for paper in papers]
    ranks = [*plotting.BASES, "untested"]
    basis = counts.sort_values("basis", key=lambda b: b.map(ranks.index))
    height = 0.7 + 0.27 * len(papers)
    figure, axes = plotting.panels(3, 2, width=3.6, height=height, sharex=True, sharey=True)
    shown = list(plotting.groups(basis, "basis"))
    for axis in axes.ravel()[len(shown) :]:
        axis.remove()
    looks = {verdict: dict(color=plotting.COLOURS[colour]) for verdict, colour in plotting.VERDICTS.items()}
    drawn: Any
    for axis, (rank, rows) in zip(axes.ravel(), shown, strict=False):
        wide = rows.pivot_table(index="paper", columns="verdict", values="claims", aggfunc="sum", fill_value=0)
        plotting.stacked(axis, wide.reindex(papers, fill_value=0).set_axis(names), looks)
        for drawn in axis.containers:
            axis.bar_label(drawn, [f"{v:.0f}" if v else "" for v in drawn.datavalues], label_type="center", fontsize=8)
        axis.set(title=rank)
    for axis in axes[-1]:
        axis.set(xlabel="claims of the paper")
    plotting.legend(figure, None, columns=5)
    words = "Claims by what their verdict rests on. Trend: the direction agrees with the paper, the size does not."
    total = counts["claims"].sum()
    origin = plotting.Origin("Models and machines", "as each paper's notebook names them", f"{total} claims")
    plotting.caption(figure, words, origin)
    return figure


def save_scoreboard(counts: pd.DataFrame, figure: Figure, parameters: Mapping[str, Any]) -> pd.DataFrame:
    """Write the scoreboard's own exhibit and result record; return its row of exhibit, kind, file and verdict."""
    record = {"exhibit": "verdicts", "kind": "measured", "parameters": dict(parameters)}
    file = write_exhibit(assets.figures_folder("scoreboard"), "verdicts", counts, figure, record)
    summary = pd.DataFrame([{"exhibit": "verdicts", "kind": "all", "file": file, "verdict": "no claim"}])
    write_result({"paper": "scoreboard", "parameters": dict(parameters), "exhibits": summary.to_dict("records")})
    return summary


def _cell(text: str) -> str:
    """A table's cell, which JupyterLab would set to the right."""
    return wrapped(f'<td style="text-align:left">{text}</td>')


def _machines(paper: str) -> dict[str, Any]:
    """By kind: the machine that ran the notebook, and the one whose record it judged by."""
    record = json.loads(min((assets.ROOT / "figures" / paper).glob("*.json")).read_text(encoding="utf-8"))
    ran = record["machine"]["name"]
    return {"measured": ran, "recorded": record["parameters"].get("machine", ran)}

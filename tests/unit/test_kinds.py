"""Who may call numbers measured: code that reads a clock or a meter, or runs a model, in this very process.

A kind is attached where numbers are born, and no later check can tell a wrong one.
"""

import ast
import json
import re
from collections.abc import Iterator

from ondevice.run import Layout

LAYOUT = Layout()
METER = re.compile(r"perf_counter|meters|engine|lm|live_\w+")  # names of clocks, of what samples memory, of models
# Without such a name: times that another function or cell took, or the word as a column's name or a filter
OTHERS = {
    "ondevice_studies.disco.cold_start loads", "ondevice_studies.disco.record graded",
    "ondevice_studies.dragon.values aggregation_time",
    "disco.ipynb figure-6-values", "disco.ipynb quality-again", "disco.ipynb stream-drawn", "dragon.ipynb verdicts",
    "grating.ipynb whole-runs",
}  # fmt: skip


def measured(node: ast.AST) -> bool:
    """Whether `measured` stands as a kind in a piece of code."""
    texts = (inner.value for inner in ast.walk(node) if isinstance(inner, ast.Constant))
    return any("measured" in text.split("+") for text in texts if isinstance(text, str))


def meters(node: ast.AST) -> bool:
    names = (getattr(inner, "id", None) or getattr(inner, "attr", None) for inner in ast.walk(node))
    arguments = (inner.arg for inner in ast.walk(node) if isinstance(inner, ast.arg))
    return any(METER.fullmatch(name) for name in (*names, *arguments) if name)


def pieces() -> Iterator[tuple[str, ast.AST]]:
    """The functions of papers and studies, and the notebooks' own cells; modules named `live` run models throughout."""
    for package in ("ondevice_papers", "ondevice_studies"):
        for path in (LAYOUT.library / package).glob("*/**/*.py"):
            if path.stem != "live":
                module = ".".join(path.relative_to(LAYOUT.library).with_suffix("").parts)
                nodes = ast.walk(ast.parse(path.read_text()))
                yield from ((f"{module} {node.name}", node) for node in nodes if isinstance(node, ast.FunctionDef))
    for path in LAYOUT.notebooks.glob("*.ipynb"):
        for cell in json.loads(path.read_text())["cells"]:
            tags = cell["metadata"].get("tags", [])
            if cell["cell_type"] == "code" and not any(tag.startswith("source:") for tag in tags):
                lines = [line for line in "".join(cell["source"]).splitlines() if not line.startswith(("%", "!"))]
                yield f"{path.name} {cell['id']}", ast.parse("\n".join(lines))


def test_what_is_called_measured_reads_a_clock_or_a_meter_or_runs_a_model():
    assert {name for name, node in pieces() if measured(node) and not meters(node)} == OTHERS

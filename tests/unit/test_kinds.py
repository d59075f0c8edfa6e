"""Who may call numbers measured, simulated or replayed: functions and cells, by name.

A kind is attached where numbers are born, and no later check can tell a wrong one. So these places are listed, and each
name under `measured` stands for code that reads a clock or a meter, or runs a model, in this very process.
"""

import ast
import json
from collections import defaultdict

import pytest

from ondevice.run import Layout

LAYOUT = Layout()
KINDS = {
    "measured": {
        "speculation.live.answered_with", "speculation.live.led", "diaa.live.by_source", "diaa.live.coverage",
        "speculation.own_prompts.run_again",
        "diaa.memory.peaks", "disco.cold_start.loads", "disco.device_probe.measure", "disco.record.again",
        "disco.study.policy_times", "dragon.values.aggregation_time", "grating.live.outcomes",
        "diaa.ipynb confidence", "diaa.ipynb cost", "disco.ipynb quality-again", "disco.ipynb stream-drawn",
        "disco.ipynb figure-6-values",
        "dragon.ipynb live-again", "dragon.ipynb verdicts", "grating.ipynb cache-shown", "grating.ipynb whole-runs",
        "sdnpu.ipynb reuse-shown",
    },
    "simulated": {
        "assistant.study.__init__", "diaa.regimes.implied", "diaa.regimes.timed",
        "disco.claims.share_of_cells_that_gain", "disco.study.beyond_the_tail",
        "disco.study.bill", "disco.study.learned", "disco.study._of_savings", "disco.study.sweep", "disco.study.users",
        "dragon.analysis.difference_curves", "dragon.analysis.speedups", "dragon.simulator.__init__",
        "dragon.values.steady", "dragon.values.least_p_value", "dragon.values.saved_where_acceptance_changes",
        "grating.study.end_to_end", "grating.ipynb applications", "grating.ipynb probe-shown", "sdnpu.npu.fitted",
        "disco.ipynb race-shown", "disco.ipynb algorithm-2", "disco.ipynb algorithm-3", "disco.ipynb figure-2",
        "disco.ipynb figure-4", "disco.ipynb held-out", "disco.ipynb learned-shown", "disco.ipynb mean-optimal-shown",
        "disco.ipynb survived-shown", "disco.ipynb plane", "disco.ipynb figure-6-values",
        "dragon.ipynb figure-3", "dragon.ipynb figure-4", "dragon.ipynb figure-5",
        "dragon.ipynb simulator", "dragon.ipynb table-1", "sdnpu.ipynb ratios",
    },
    "replayed": {
        "disco.claims.slowest_rates", "dragon.study.schedules", "dragon.values.exchanged_on_the_cloud",
        "disco.ipynb table-1", "disco.ipynb figure-3", "disco.ipynb table-5",
        "dragon.ipynb figure-10",
    },
}  # fmt: skip


def words(node):
    """The kinds that stand as strings in a piece of code."""
    constants = (inner.value for inner in ast.walk(node) if isinstance(inner, ast.Constant))
    return {word for text in constants if isinstance(text, str) for word in text.split("+")} & {*KINDS}


@pytest.fixture(scope="module")
def births():
    """By kind, the functions of papers and studies, and the notebooks' own cells, whose code names it."""
    names = defaultdict(set)
    files = {"ondevice_papers": "*/**/*.py", "ondevice_studies": "*/**/*.py", "ondevice": "*/live.py"}
    for package, pattern in files.items():
        for path in (LAYOUT.library / package).glob(pattern):
            module = ".".join(path.relative_to(LAYOUT.library / package).with_suffix("").parts)
            for node in ast.walk(ast.parse(path.read_text())):
                for kind in words(node) if isinstance(node, ast.FunctionDef) else ():
                    names[kind].add(f"{module}.{node.name}")
    for path in LAYOUT.notebooks.glob("*.ipynb"):
        for cell in json.loads(path.read_text())["cells"]:
            tags = cell["metadata"].get("tags", [])
            if cell["cell_type"] == "code" and not any(tag.startswith("source:") for tag in tags):
                lines = [line for line in "".join(cell["source"]).splitlines() if not line.startswith(("%", "!"))]
                for kind in words(ast.parse("\n".join(lines))):
                    names[kind].add(f"{path.name} {cell['id']}")
    return names


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_attached_where_it_is_listed_and_nowhere_else(births, kind):
    assert births[kind] - KINDS[kind] == set(), f"calls numbers {kind}: list it here where that is what they are"
    assert KINDS[kind] - births[kind] == set(), f"no longer calls its numbers {kind}"

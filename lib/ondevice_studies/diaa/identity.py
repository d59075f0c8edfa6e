"""Whether drafts change a token: DIAA, its parts and its peers on our 60 prompts, live, in each format (`own_prompts`).

In 8 bits by row, the mixture's trees also on the 480 questions of Spec-Bench.

`make record PAPER=diaa ARGS="--only identity"` records it.
"""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from ondevice import evidence, prompts
from ondevice.evidence import records
from ondevice_studies.diaa import spec_bench
from ondevice_studies.diaa.workbench import Workbench
from ondevice_studies.speculation import own_prompts, plain

# By record, its formats. Each takes an hour of a core.
RECORDS: dict[str, own_prompts.Formats] = {
    "identity": (("float32", "float32"), ("4bit", "int8")),
    "identity-4bit": (("4bit", "float32"),),
    "identity-8bit-rows": (("8bit-rows", "int8"),),
}
SPEC_BENCH = "identity-8bit-rows-spec-bench"  # of the mixture
NAMES = ("DIAA", "cold", "TR", "PLD", "mixture 32", "RACER 32")  # two small trees, a large one, a chain, two peers


def load(model: str) -> pd.DataFrame:
    """The rows of all formats that are recorded, of our own prompts."""
    return _loaded(model, RECORDS)


def load_spec_bench(model: str) -> pd.DataFrame:
    """The rows of Spec-Bench's questions."""
    return _loaded(model, [SPEC_BENCH])


def _loaded(model: str, names: Iterable[str]) -> pd.DataFrame:
    names = [f"{plain.LABELS[model]}-{name}" for name in names]
    tables = [evidence.load("diaa", name) for name in names if records.exists("diaa", name)]
    return evidence.derived(pd.concat(tables, ignore_index=True), *tables)


def again(name: str) -> evidence.Again | None:
    """How answers of a record are made again. None of another record."""
    asked = {f"{label}-{record}": model for model, label in plain.LABELS.items() for record in (*RECORDS, SPEC_BENCH)}
    if name not in asked:
        return None
    methods = {method: spec_bench.METHODS[method] for method in NAMES}
    questions = prompts.spec_bench if name.endswith(SPEC_BENCH) else prompts.own
    return own_prompts.again(Workbench(asked[name]), methods, questions)


def record(model: str) -> None:
    """Record what is missing, a format and a method at a time."""
    methods = {name: spec_bench.METHODS[name] for name in NAMES}
    for name, formats in RECORDS.items():
        if not records.exists("diaa", f"{plain.LABELS[model]}-{name}"):
            own_prompts.record("diaa", f"{plain.LABELS[model]}-{name}", Workbench(model), methods, formats)
    if not records.exists("diaa", name := f"{plain.LABELS[model]}-{SPEC_BENCH}"):
        mixture = {"mixture 32": methods["mixture 32"]}
        questions = prompts.spec_bench()
        own_prompts.record("diaa", name, Workbench(model), mixture, RECORDS["identity-8bit-rows"], asked=questions)

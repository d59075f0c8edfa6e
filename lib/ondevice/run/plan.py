"""From what the user asked for to the jobs that do it; every mistake is found here, before anything runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ondevice import yaml_file
from ondevice.run.job import SCOREBOARD, Job, Layout, read_record
from ondevice.run.moved import new_paths
from ondevice.run.parameters import Parameter, ParameterError, checked, grid, read_parameters


def plan(
    papers: Sequence[str] = (),
    params: str | None = None,
    settings: Sequence[str] = (),
    timeout: float | None = None,
    layout: Layout | None = None,
) -> list[Job]:
    """The jobs for the named papers (all when none is named), one for each combination of the settings.

    params: `full`, `paper` or another name for notebooks/params/<paper>.<name>.yaml, or the path of a YAML file.
    settings: `name=value` texts, which win over the file. Raises ValueError, mostly ParameterError; for a notebook that
    imports an old path of the library, too.
    """
    layout = layout or Layout()
    chosen = sorted(layout.papers(papers), key=lambda paper: (paper == SCOREBOARD, _seconds(paper, layout), paper))
    if not chosen:
        raise ParameterError(f"There are no notebooks in {layout.notebooks}.")
    if (params or settings) and not papers:  # the scoreboard reads published results, which are of the quick runs
        chosen = [paper for paper in chosen if paper != SCOREBOARD]
    jobs = []
    for paper in chosen:
        _require_present_paths(paper, layout)
        parameters = read_parameters(layout.notebook(paper))
        defaults = {name: parameter.default for name, parameter in parameters.items()}
        base = _of_file(params, paper, parameters, layout) if params else {}
        for combination in grid(paper, parameters, settings):
            values = {**defaults, **base, **combination}
            changed = {name: value for name, value in values.items() if value != defaults[name]}
            jobs.append(Job(paper, values, changed, layout, timeout))
    return list({job.folder: job for job in jobs}.values())


def _require_present_paths(paper: str, layout: Layout) -> None:
    """Raise ParameterError where a notebook imports the library by old paths; a syntax error is left to its run."""
    cells = json.loads(layout.notebook(paper).read_text(encoding="utf-8"))["cells"]
    with suppress(SyntaxError):
        moved = new_paths(layout.library, ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"])
        if moved:
            paths = ", ".join(f"{old} is {new} now" for old, new in moved.items())
            raise ParameterError(f"notebooks/{paper}.ipynb imports what has moved: {paths}.")


def _seconds(paper: str, layout: Layout) -> float:
    """What the published exhibits took together, so that the quickest notebook is the first; 0 without any."""
    records = (read_record(path) or {} for path in (layout.figures / paper).glob("*.json"))
    return sum(float(record.get("seconds", 0)) for record in records)


def _of_file(params: str, paper: str, parameters: Mapping[str, Parameter], layout: Layout) -> dict[str, Any]:
    """What a parameter file holds. Raises ParameterError when it is missing or cannot be read."""
    is_path = params.endswith((".yaml", ".yml")) or "/" in params
    path = Path(params) if is_path else layout.parameter_file(paper, params)
    shown = layout.relative(path)
    if not path.is_file():
        raise ParameterError(f"There is no parameter file {shown}; --list names those of {paper}.")
    try:
        values = yaml_file.mapping(path, shown)
    except ValueError as error:
        raise ParameterError(str(error)) from None
    return checked(paper, parameters, values, shown)

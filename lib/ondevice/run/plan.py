"""From what the user asked for to the jobs that do it; every mistake is found here, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ondevice.run.job import Job
from ondevice.run.layout import SCOREBOARD, Layout
from ondevice.run.parameters import ParameterError, checked, grid, read_file, read_parameters, read_setting


def plan(
    papers: Sequence[str] = (),
    params: str | None = None,
    settings: Sequence[str] = (),
    timeout: float | None = None,
    layout: Layout | None = None,
) -> list[Job]:
    """The jobs for the named papers (all when none is named), one for each combination of the settings.

    params: `full`, `paper` or another name for notebooks/params/<paper>.<name>.yaml, or the path of a YAML file.
    settings: `name=value` texts, which win over the file. Raises ParameterError.
    """
    layout = layout or Layout()
    combinations = list(grid([read_setting(text) for text in settings]))
    jobs = []
    for paper in _chosen(papers, layout, quick=not (params or settings)):
        parameters = read_parameters(layout.notebook(paper))
        defaults = {name: parameter.default for name, parameter in parameters.items()}
        file = _file(params, paper, layout)
        base = checked(paper, parameters, read_file(file), layout.relative(file)) if file else {}
        for combination in combinations:
            values = {**defaults, **base, **checked(paper, parameters, combination, "--set")}
            changed = {name: value for name, value in values.items() if value != defaults[name]}
            jobs.append(Job(paper, values, changed, layout, timeout))
    return list({job.folder: job for job in jobs}.values())


def _chosen(papers: Sequence[str], layout: Layout, quick: bool) -> list[str]:
    known = layout.papers()
    if not known:
        raise ParameterError(f"There are no notebooks in {layout.notebooks}.")
    unknown = [paper for paper in papers if paper not in known]
    if unknown:
        raise ParameterError(f"There is no notebook for {', '.join(unknown)}. The papers: {', '.join(known)}.")
    if papers:
        return [paper for paper in known if paper in papers]
    # The scoreboard reads the published results, those of the quick runs; other parameters do not concern it.
    return known if quick else [paper for paper in known if paper != SCOREBOARD]


def _file(params: str | None, paper: str, layout: Layout) -> Path | None:
    if not params:
        return None
    if params.endswith((".yaml", ".yml")) or "/" in params:
        return Path(params)
    file = layout.parameter_file(paper, params)
    if not file.is_file():
        names = [path.name.split(".")[1] for path in sorted(file.parent.glob(f"{paper}.*.yaml"))]
        raise ParameterError(
            f"{paper} has no parameter file {layout.relative(file)}; "
            f"there is {', '.join(names) or 'none'}, or give the path of a YAML file."
        )
    return file

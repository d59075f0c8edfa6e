"""`ondevice-run` runs notebooks; `... publish` puts what their quick runs made into figures/."""

from __future__ import annotations

import filecmp
import shutil
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from ondevice import assets, commands
from ondevice.commands import count, positive
from ondevice.run.job import SCOREBOARD, Job, Layout, read_record
from ondevice.run.parameters import ParameterError, read_parameters
from ondevice.run.plan import plan
from ondevice.run.progress import report
from ondevice.run.schedule import run_all

with commands.loading("ondevice-run", "notebooks"):  # which the processes that it starts need
    import psutil  # noqa: F401


def main(arguments: Sequence[str], layout: Layout | None = None) -> int:
    """Exit code: 0 when every run succeeded, 1 when one failed, 2 for bad input alone, 130 after an interrupt."""
    try:
        with commands.refusing("ondevice-run"):
            return _publish(arguments[1:], layout) if arguments[:1] == ["publish"] else _run(arguments, layout)
    except SystemExit as end:
        if end.code == commands.INTERRUPTED:
            print("Interrupted; what was finished stays, and the same command goes on from there.", file=sys.stderr)
        return int(end.code or 0)


def _run(arguments: Sequence[str], layout: Layout | None) -> int:
    parser = commands.Parser(
        "ondevice-run",
        example="ondevice-run disco --set alpha=0.05,0.3 --jobs 2",
        description="Run the papers' notebooks, each in a process of its own, and judge what comes out. Results go to\n"
        "runs/. A finished run is not repeated while what it uses stays the same (--force repeats it). Verdicts hold\n"
        "for the notebook's own parameters; --params and --set change them. `ondevice-run publish` puts what finished\n"
        "runs made into figures/; nothing else writes there.",
    )
    add = parser.add_argument
    add("papers", nargs="*", metavar="paper", help="notebooks to run (default: all, the quickest first)")
    add(
        "--params",
        metavar="full|paper|FILE",
        help="parameter file: notebooks/params/<paper>.<name>.yaml, or a path "
        "(default: the notebook's own parameters, the quick form)",
    )
    add(
        "--set",
        action="append",
        default=[],
        metavar="name=value",
        dest="settings",
        help="one parameter; seed=0,1,2 sweeps, budgets=[0.1,0.5] is a list, quotes hold a text with a comma together; "
        "may be repeated",
    )
    add("--jobs", type=count, default=1, metavar="N", help="runs at a time, which share the cores")
    add("--timeout", type=positive, metavar="SECONDS", help="limit for each run (default: none)")
    add("--force", action="store_true", help="run again what is finished")
    add("--list", action="store_true", help="show papers, parameters and finished runs; run nothing")
    options = parser.parse_args(arguments)
    jobs = plan(options.papers, options.params, options.settings, options.timeout, layout)
    for line in _not_of_this_layout(jobs):
        print(line)
    if options.list:
        print("\n\n".join(_listed(job) for job in {job.paper: job for job in jobs}.values()))
        return 0
    outcomes = run_all(jobs, workers=options.jobs, force=options.force)
    print(report(outcomes))
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    return int(bool(failed)) * (2 if all(outcome.refused for outcome in failed) else 1)


def _not_of_this_layout(jobs: Sequence[Job]) -> list[str]:
    """A line for each paper of the jobs that has run folders whose results are of an old form, or cannot be read."""
    lines = []
    for paper, layout in {job.paper: job.layout for job in jobs}.items():
        folders = []
        for file in sorted((layout.runs / paper).glob("*/result.json")):
            record = read_record(file) or {}
            present = record.get("parameters_hash") == file.parent.name and "fingerprint" in record
            if file.parent.suffix != ".part" and not present:
                folders.append(layout.relative(file.parent))
        if folders:
            what = "result.json is of an old layout or cannot be read"
            lines.append(f"{paper}: skipped, since their {what}: {', '.join(folders)}")
    return lines


def _publish(arguments: Sequence[str], layout: Layout | None) -> int:
    parser = commands.Parser(
        "ondevice-run publish",
        example="ondevice-run publish disco",
        description="Make figures/<paper>/ what the paper's finished run with default parameters made.",
    )
    parser.add_argument("papers", nargs="*", metavar="paper", help="papers to publish (default: all)")
    lines = publish(parser.parse_args(arguments).papers, layout)
    print("\n".join([*lines, f"{len(lines)} files changed in figures/"]))
    return 0


def publish(papers: Sequence[str], layout: Layout | None) -> list[str]:
    """Publish the papers' finished runs with default parameters (all papers when none is named).

    Returns a line for each file: new, changed or gone. Raises ParameterError, before anything is written, where a paper
    has no finished run of the present code.
    """
    jobs = plan(papers, layout=layout)
    if names := " ".join(job.paper for job in jobs if job.paper != SCOREBOARD and not job.record()):
        missing = f"the present code has no finished quick run of {names} (ondevice-run {names} makes it)"
        raise ParameterError(f"Nothing is published: {missing}.")
    lines = []
    for job in jobs:  # the scoreboard is the last, and reads what was published just now
        if job.paper != SCOREBOARD or run_all([job])[0].status != "failed":
            lines += _mirror(job)
    return lines


def _mirror(job: Job) -> list[str]:
    """Make figures/<paper>/ equal to the run's, each file whole or not at all."""
    new = job.folder / "figures" / job.paper
    published = job.layout.figures / job.paper
    lines = []
    for name in sorted({path.name for folder in (new, published) for path in folder.glob("[!.]*") if path.is_file()}):
        source = new / name
        target = published / name
        if source.is_file() and target.is_file() and filecmp.cmp(source, target, shallow=False):
            continue
        state = "gone" if not source.is_file() else "changed" if target.is_file() else "new"
        lines.append(f"{state:8} {job.layout.relative(target)}")
        if state == "gone":
            target.unlink()
        else:
            with assets.writing(target) as temporary:
                shutil.copyfile(source, temporary)
    return lines


def interrupt_once() -> None:
    """Let SIGTERM act like Ctrl-C, and let a second one not disturb the cleaning up."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)


def _listed(job: Job) -> str:
    """A paper's parameters and parameter files, and whether its run with the default ones is there."""
    paper = job.paper
    layout = job.layout
    parameters = read_parameters(layout.notebook(paper)).values()
    lines = [f"  {f'{p.name}: {p.type} = {p.default!r}':44}  {p.help}" for p in parameters]
    files = [layout.relative(path) for path in sorted(layout.parameter_file(paper, "*").parent.glob(f"{paper}.*.yaml"))]
    finished = "finished and up to date" if plan([paper], layout=layout)[0].record() else "none that is up to date"
    return "\n".join(
        [
            f"{paper} (notebooks/{paper}.ipynb) has the parameters",
            *lines,
            f"Parameter files: {', '.join(files) or 'none'}",
            f"Run with the default parameters: {finished}",
        ]
    )


def program() -> None:
    """The command `ondevice-run`."""
    interrupt_once()
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    program()

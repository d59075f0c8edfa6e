"""The command line of `python -m ondevice.run`."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from ondevice.run.job import read_record
from ondevice.run.layout import Layout
from ondevice.run.parameters import ParameterError, described, read_parameters
from ondevice.run.plan import plan
from ondevice.run.schedule import run_all
from ondevice.run.table import report

_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None, layout: Layout | None = None) -> int:
    """Exit code: 0 when every run succeeded, 1 when one failed, 2 for bad input, 130 after an interrupt."""
    options = _parser().parse_args(arguments)
    layout = layout or Layout()
    try:
        jobs = plan(options.papers, options.params, options.settings, options.timeout, layout)
        if options.list:
            print("\n\n".join(_listed(paper, layout) for paper in dict.fromkeys(job.paper for job in jobs)))
            return 0
        outcomes = run_all(jobs, workers=options.jobs, force=options.force)
    except ParameterError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Interrupted; what was finished stays, and the same command goes on from there.", file=sys.stderr)
        return _INTERRUPTED
    print(report(outcomes))
    return int(any(outcome.status == "failed" for outcome in outcomes))


def interrupt_once() -> None:
    """Let SIGTERM act like Ctrl-C, and let a second one not disturb the cleaning up."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ondevice.run", description="Run the papers' notebooks.")
    parser.add_argument("papers", nargs="*", metavar="paper", help="notebooks to run (default: all)")
    parser.add_argument(
        "--params",
        metavar="full|paper|FILE",
        help="parameter file: notebooks/params/<paper>.<name>.yaml, or a path "
        "(default: the notebook's own parameters, the quick form)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="name=value",
        dest="settings",
        help="one parameter; seed=0,1,2 sweeps, budgets=[0.1,0.5] is a list; may be repeated",
    )
    parser.add_argument("--jobs", type=_at_least_one, default=1, metavar="N", help="runs at a time (default: 1)")
    parser.add_argument("--timeout", type=_positive, metavar="SECONDS", help="limit for each run (default: none)")
    parser.add_argument("--force", action="store_true", help="run again what is finished")
    parser.add_argument("--list", action="store_true", help="show papers, parameters and finished runs; run nothing")
    return parser


def _at_least_one(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return int(text)


def _positive(text: str) -> float:
    if not float(text) > 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return float(text)


def _listed(paper: str, layout: Layout) -> str:
    files = [layout.relative(path) for path in sorted((layout.notebooks / "params").glob(f"{paper}.*.yaml"))]
    default = plan([paper], layout=layout)[0]
    records = [read_record(path) for path in (layout.runs / paper).glob("*/result.json") if "." not in path.parent.name]
    lines = [
        f"{paper} ({layout.relative(layout.notebook(paper))})",
        described(paper, read_parameters(layout.notebook(paper))),
        f"Parameter files: {', '.join(files) or 'none'}",
        f"Runs: {sum(record is not None for record in records)} finished; with the default parameters: "
        f"{'finished and up to date' if default.record() else 'none that is up to date'}",
    ]
    return "\n".join(lines)

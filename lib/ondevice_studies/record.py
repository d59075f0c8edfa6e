"""Make records anew: python -m ondevice_studies.record PAPER ..., which is `make record PAPER=...`.

`machine` in a paper's place (`make record MACHINE=name`) makes what the machine decides, of all papers in turn.
Behind a paper and its arguments, `--executor local|dask|ADDRESS --shares n` has processes share the work: of this
machine, of Dask workers started here, or of a Dask cluster at that address. They have the user's cache in common.

A record is of a commit: a recorder refuses a checkout with uncommitted changes. To edit files meanwhile, call it from
another worktree (`git worktree add ../recording`).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ondevice_studies
from ondevice import assets, commands
from ondevice.evidence.exhibits import MACHINE_VARIABLE, machine_name
from ondevice.evidence.records import Recorder, load, machines
from ondevice.evidence.sidecars import UNKNOWN

_PARTS = {
    "disco --parts": "policy_times device cold_start",
    "sdnpu --parts": "costs memory curves switching whole",
    "grating --only": "memory latency limits",
    "assistant --only": "memory costs live",
    "dragon --only": "latency",
}
# Files of data/records that a machine decides, and what makes them; what takes longest is last.
STEPS = {
    "disco/router": "tests/benchmarks/record_disco_router.py",
    "diaa/limits": "-m ondevice_studies.diaa.limits",
    "diaa/formats": "-m ondevice_studies.diaa.costs",
    "diaa/parts": "-m ondevice_studies.diaa.parts",
    **{
        f"{words.split()[0]}/{part}": f"-m ondevice_studies.record {words} {part}"
        for words, parts in _PARTS.items()
        for part in parts.split()
    },
}


def _drafters(n: int) -> list[list[str]]:
    """The names of DIAA's drafters in n parts."""
    methods = importlib.import_module("ondevice_studies.diaa.spec_bench").METHODS
    return [list(methods)[first::n] for first in range(min(n, len(methods)))]


SHARES: dict[str, Callable[[int], list[list[str]]]] = {  # by paper: what divides its work
    "dragon": lambda n: [["--share", f"{share}/{n}"] for share in range(1, n + 1)],
    "diaa": lambda n: [["--only", "drafters", "--methods", *names] for names in _drafters(n)],
}


def papers() -> list[str]:
    """Those with records."""
    return sorted(
        {path.parent.name for folder in ondevice_studies.__path__ for path in Path(folder).glob("*/record.py")}
    )


def recording(paper: str, arguments: Sequence[str]) -> int:
    """Call ondevice_studies.<paper>.record.main."""
    return importlib.import_module(f"ondevice_studies.{paper}.record").main(list(arguments)) or 0


# What a machine decides


def duration(step: str) -> str:
    """The most that a step took on a machine so far, by the sidecars, in words."""
    paper, name = step.split("/")
    tables = [load(paper, f"{name}.{machine}") for machine in machines(paper, name)]
    minutes = max((spent for table in tables if (spent := table.attrs["sidecar"]["minutes"]) != UNKNOWN), default=-1.0)
    return "never recorded so far" if minutes < 0 else f"{minutes:.0f} minutes at most, elsewhere"


def label(text: str) -> str:
    """The type of an argument that names a machine."""
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", text):
        raise argparse.ArgumentTypeError(f"a machine's name is like zen4-2c, of a-z, 0-9 and -, not {text!r}")
    return text


def of_machine(arguments: Sequence[str]) -> int:
    """Every step in a process of its own; the finished ones are noted, so that the same command goes on behind them."""
    parser = commands.Parser("make record MACHINE=name", description=of_machine.__doc__)
    parser.add_argument("--name", type=label, default=machine_name(), help="of the machine")
    parser.add_argument("--only", nargs="+", choices=list(STEPS), default=list(STEPS), metavar="STEP", help="a part")
    parser.add_argument("--force", action="store_true", help="repeat what is finished")
    parser.add_argument("--plan", action="store_true", help="say what there is to do, and stop")
    options = parser.parse_args(arguments)
    note = assets.cache_folder("records") / f"{options.name}.finished"
    finished = set(note.read_text(encoding="utf-8").split()) if note.is_file() and not options.force else set()
    print(f"What {options.name} decides goes to data/records. It should do nothing else meanwhile.")
    for step in options.only:
        print(f"  {step:24} {'finished; --force repeats it' if step in finished else duration(step)}", flush=True)
    missing = [step for step in options.only if step not in finished and not options.plan]
    failed = []
    for step in missing:
        print(f"== {step}: python {STEPS[step]}", flush=True)
        if _process(STEPS[step].split(), options.name):
            failed.append(step)
        else:
            finished.add(step)
            assets.write_text(note, "\n".join(sorted(finished)))
    if missing:
        _process(["-m", "ondevice_studies.machines"])
    if failed:
        print(f"Not finished: {', '.join(failed)}. The same command tries again.", file=sys.stderr)
    return min(len(failed), 1)


def _process(words: Sequence[str], machine: str = "") -> int:
    """Exit code of a Python process of the checkout. machine: the name that it records under."""
    named = {MACHINE_VARIABLE: machine} if machine else {}
    return subprocess.run([sys.executable, *words], cwd=assets.ROOT, env=os.environ | named, check=False).returncode


# Shares


def kept(recorder: Recorder) -> Path:
    """In the place of `finish`, in a share: whoever started the shares writes what they recorded."""
    recorder.checkpoint()
    return recorder.parts


def shared(paper: str, arguments: Sequence[str], executor: Executor, shares: int = 2) -> int:
    """Make a paper's record in shares, each in a process that a worker of the executor starts; then write it here.

    executor: any of concurrent.futures, as `ondevice.run.run_all` takes. What the first worker's machine is called
    stands in the record. Returns 1 where a share failed; the same call goes on with what it left.
    """
    if paper not in SHARES:
        raise ValueError(f"The work of {paper} cannot be shared; that of {', '.join(SHARES)} can.")
    name = executor.submit(machine_name).result()
    parts = SHARES[paper](shares)
    started = [
        executor.submit(_process, ["-m", __spec__.name, "share", paper, *arguments, *part], name) for part in parts
    ]
    errors = [future.exception() or future.result() for future in started]  # a worker that was lost, or an exit code
    for part, error in zip(parts, errors, strict=True):
        if error:
            print(f"The share {' '.join(part)} failed ({error}). The same command goes on.", file=sys.stderr)
    if any(errors):
        return 1
    with patch.dict(os.environ, {MACHINE_VARIABLE: name}):
        return recording(paper, arguments)


@contextlib.contextmanager
def workers(kind: str, count: int) -> Iterator[Executor]:
    """`count` threads that wait for a process each, as many Dask workers, or those of a cluster at an address."""
    if kind == "local":
        with ThreadPoolExecutor(count) as pool:
            yield pool
        return
    try:
        import distributed
    except ImportError:
        raise ValueError('Dask is missing: pip install "ondevice[cluster]".') from None
    where: Any = {"n_workers": count, "threads_per_worker": 1, "dashboard_address": None}
    with distributed.Client(**(where if kind == "dask" else {"address": kind})) as client:
        yield client.get_executor(pure=False)


def here(arguments: Sequence[str]) -> int:
    """Call what the first word names with the others, with the code of this checkout."""
    first, rest = arguments[0], arguments[1:]
    if first == "machine":
        return of_machine(rest)
    if first == "share":
        with patch.object(Recorder, "finish", kept):
            return recording(rest[0], rest[1:])
    parser = commands.Parser(f"make record PAPER={first}", add_help=False, allow_abbrev=False)
    parser.add_argument("--executor")
    parser.add_argument("--shares", type=commands.count, default=2)
    options, rest = parser.parse_known_args(rest)
    if options.executor:
        with workers(options.executor, options.shares) as executor:
            return shared(first, rest, executor, options.shares)
    return recording(first, rest)


def main(arguments: Sequence[str]) -> int:
    """`here`; exit code 2 on a paper without records."""
    first = arguments[0] if arguments else ""
    with commands.refusing(f"python -m ondevice_studies.record {first}".strip()):
        if first not in (*papers(), "machine") and not (first == "share" and arguments[1:]):
            print(f"Which paper? There are records of: {', '.join(papers()) or 'none'}.", file=sys.stderr)
            return commands.REFUSED
        return here(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

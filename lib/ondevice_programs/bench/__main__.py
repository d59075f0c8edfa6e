"""The fastest way to run a causal LM on this CPU: what a pass costs by format, what each drafter gives, and advice.

MODEL is a folder, a GGUF file, a hub id or a bundled name. With --json an interrupted bench goes on where it was. The
answers are in that file, as token ids, until the bench is complete.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ondevice import commands, cores, models, prompts
from ondevice.causal_lm import support
from ondevice.speculation.drafters import DRAFTERS
from ondevice_programs.bench import formats, inputs, picture
from ondevice_programs.bench.measuring import Measurement
from ondevice_programs.bench.peer import LlamaCpp
from ondevice_programs.bench.report import report
from ondevice_programs.bench.state import begun, read

_PROGRAM = "ondevice-bench"
_PEER = "llama.cpp"
_MINUTES, _LARGER, _LARGE = 5.0, 12.0, 300e6  # minutes, and those of a model with more parameters than the last


def main(arguments: Sequence[str] | None = None) -> None:
    """The command; bad input is one sentence and exit code 2, an interrupt 130, with a report of what there is."""
    options = _parser().parse_args(arguments)
    with commands.refusing(_PROGRAM):
        loaded, source = _given(options)
        head = {
            "model": inputs.model_facts(loaded),
            "machine": inputs.machine(options.threads),
            "commit": inputs.commit(),
            "command": _command(options),
            "settings": _settings(options),
            "prompts": prompts.digest(json.dumps([(prompt.task, prompt.text) for prompt in source])),
        }
        parts = begun(options.json, head)
        code = 0
        if parts["complete"]:
            _say(f"{options.json} is complete: its report is printed, and nothing is measured.")
        else:
            try:
                _bench(options, loaded, source, parts).run()
            except KeyboardInterrupt:
                code = commands.INTERRUPTED
            except OSError as error:  # of a full disk, say: what was measured is printed all the same
                _say(f"{_PROGRAM}: {commands.sentence(error)}")
                code = commands.REFUSED
        _print(parts, options)
        sys.exit(code)


def _given(options: argparse.Namespace) -> tuple[models.Loaded, list[prompts.Prompt]]:
    """The model and the prompts, none for random weights. What can be refused without the model is refused before."""
    source = prompts.from_file(options.prompts) if options.prompts else prompts.own()
    if options.json and options.json.is_dir():
        raise ValueError(f"--json {options.json} is a folder; the numbers go into a file.")
    if options.json and options.json.is_file():
        read(options.json)
    if options.picture:
        picture.require_format(options.picture)
    if options.compare and importlib.util.find_spec("llama_cpp") is None:
        raise ModuleNotFoundError("--compare llama.cpp needs a package: pip install llama-cpp-python.")
    torch.set_num_threads(options.threads)
    loaded = models.load(options.model)
    if loaded.gguf is None:
        support.require_causal(loaded.model)
    if options.compare and loaded.gguf is None:
        raise ValueError("--compare llama.cpp needs a GGUF file, which both programs can read.")
    if not loaded.random:
        return loaded, source
    if options.prompts or options.drafters:
        raise ValueError(f"{loaded.spec} has random weights: only T(n) can be had, without --prompts and --drafters.")
    _say(f"{loaded.spec} has random weights: only T(n) is measured.")
    return loaded, []


def _bench(
    options: argparse.Namespace, loaded: models.Loaded, source: Sequence[prompts.Prompt], parts: dict[str, Any]
) -> Measurement:
    requests = inputs.requests(loaded, source, options.prompts is None, _say) if source else []
    engines, reasons = formats.engines(loaded, options.formats or formats.NAMES, options.threads)
    for reason in dict.fromkeys(reasons.values()):
        _say(f"Without {', '.join(name for name in reasons if reasons[name] == reason)}: {reason}")
    beside: dict[str, Callable[[], list[float]]] = {}
    if options.compare and "curves" not in parts:
        beside[_PEER] = LlamaCpp(loaded, options.threads, formats.PAST, formats.PEER_ROWS).turn
    names = options.drafters or list(DRAFTERS)
    minutes = options.minutes or (_LARGER if parts["model"]["parameters"] > _LARGE else _MINUTES)
    return Measurement(loaded, engines, requests, names, minutes, options.json, parts, _say, beside)


def _print(parts: dict[str, Any], options: argparse.Namespace) -> None:
    """The report, and the picture, on which a missing matplotlib is said."""
    for line in report(parts):
        print(line)
    if options.picture and "curves" in parts:
        try:
            picture.draw(parts, options.picture)
            print(f"Picture: {options.picture}")
        except ModuleNotFoundError as error:
            _say(f"No picture: {commands.sentence(error)}")
    kept = options.json is not None and options.json.is_file()
    print(f"JSON: {options.json}" if kept else "No file was written; --json FILE keeps the numbers.")


def _command(options: argparse.Namespace) -> str:
    """The command line, without the files that are written."""
    words: list[Any] = [_PROGRAM, options.model]
    for name in ("prompts", "threads", "formats", "drafters", "minutes", "compare"):
        value = getattr(options, name)
        if value is not None:
            words += [f"--{name}", *(value if isinstance(value, list) else [value])]
    return shlex.join(map(str, words))


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """What the command line says, without names of files."""
    return {
        "formats": sorted(set(options.formats or formats.NAMES)),
        "drafters": sorted(set(options.drafters or DRAFTERS)),
        "minutes": options.minutes,
        "compare": options.compare,
    }


def _parser() -> commands.Parser:
    example = f"{_PROGRAM} smollm2-135m-instruct --json smollm2.json --picture smollm2.png"
    parser = commands.Parser(_PROGRAM, example, description=__doc__)
    add = parser.add_argument
    several: dict[str, Any] = {"nargs": "+", "metavar": "NAME"}
    minutes = f"{_MINUTES:g}, and {_LARGER:g} beyond {_LARGE / 1e6:g} M parameters"
    own = "60 of the repository's own"
    add("model", metavar="MODEL", help="a folder, a GGUF file, a hub id or a bundled name")
    add("--prompts", type=commands.existing, metavar="FILE", help=f"lines, JSON lines or an array (default: {own})")
    add("--threads", type=commands.count, default=cores.usable(), metavar="N", help="of every engine")
    add("--formats", choices=formats.NAMES, help=f"of {', '.join(formats.NAMES)} (default: all)", **several)
    add("--drafters", choices=list(DRAFTERS), help=f"of {', '.join(DRAFTERS)} (default: all)", **several)
    add("--minutes", type=commands.positive, metavar="M", help=f"to keep to where possible (default: {minutes})")
    add("--compare", choices=[_PEER], help="measure its passes on the same GGUF file, too")
    add("--json", type=commands.writable, metavar="FILE", help="to keep all numbers in, and to go on from")
    add("--picture", type=commands.writable, metavar="FILE", help="PNG, SVG or PDF")
    return parser


def _say(words: str) -> None:
    """Progress, on standard error."""
    print(words, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

"""The command `evaluate` of `python -m ondevice_training`."""

from __future__ import annotations

import argparse
import json
from hashlib import file_digest
from pathlib import Path
from typing import Any

from ondevice import assets, commands, cores
from ondevice.commands import count, existing, positive, writable
from ondevice.precision import bfloat16_pays


def register(programs: Any) -> None:
    """Add the command to the parser; it leaves its handler in `handler`."""
    evaluate = programs.add_parser("evaluate", help="measure a language model on held-out documents")
    evaluate.add_argument("--model", required=True, help="a bundled model's name or a folder")
    evaluate.add_argument("--log", type=existing, help="log.csv of the training run")
    evaluate.add_argument("--out", type=writable, required=True, help="folder that gets evaluation.json")
    evaluate.add_argument("--limit", type=commands.number(0, 1, above=0), default=1.0, help="share of the samples")
    evaluate.add_argument("--vector-rate", type=positive, help="peak rate of AdamW in that run, where not the default")
    evaluate.add_argument("--machine", help="what the run trained on; by default this machine's CPU")
    evaluate.add_argument("--threads", type=count, help="CPU threads (all by default)")
    evaluate.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where to measure")
    evaluate.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> None:
    """The `evaluate` command."""
    import torch

    from ondevice import models
    from ondevice_training.evaluation import bars, suite

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    training = _training(arguments) if arguments.log else None  # read first: a wrong path should fail at once
    loaded = models.load(arguments.model, device=arguments.device)
    digest = _weights_digest(arguments.model)  # before measuring: a training run may write its folder anew meanwhile
    evaluation = suite.evaluate(loaded, arguments.limit)
    evaluation["model"]["weights_sha256"] = digest
    if training is not None:
        evaluation["training"] = training
    assets.write_text(arguments.out / "evaluation.json", json.dumps(evaluation, indent=1) + "\n")
    for bar in bars.BARS:
        print(bar.row(evaluation))
    print(f"wrote {arguments.out.name}/evaluation.json")


def _weights_digest(spec: str) -> str | None:
    """sha256 of a bundled model's or a folder's model.safetensors, as data/models/manifest.json has it."""
    folders = (assets.data("models", spec), Path(spec).expanduser())
    for path in (folder / "model.safetensors" for folder in folders):
        if path.is_file():
            with path.open("rb") as file:
                return file_digest(file, "sha256").hexdigest()
    return None


def _training(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the run's log and the arguments say of it."""
    from ondevice_training.language_model import Recipe
    from ondevice_training.running import facts

    instructions = " with bfloat16 instructions" if bfloat16_pays("cpu") else ""
    machine = arguments.machine or f"{cores.usable()} CPU cores{instructions}"
    rate = arguments.vector_rate or Recipe.vector_rate
    return facts(arguments.log) | {"peak_vector_rate": rate, "machine": machine, "more_tasks_in_decay": True}

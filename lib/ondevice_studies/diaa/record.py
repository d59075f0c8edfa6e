"""What DIAA's exhibits rest on, of public models: `make record PAPER=diaa` makes what is missing, on one thread.

Each part goes on where it was stopped. Several processes can share the work, a part or some drafters each:
`python -m ondevice_studies.record diaa --only drafters --methods DIAA "static 16"`. All drafters take a day of a core;
a record of other code than today's is made anew. What a machine decides (`formats`, `limits`, `parts`) is made by
`make record MACHINE=name`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from ondevice import models
from ondevice.evidence import Again
from ondevice_studies.diaa import identity, quality, sized, spec_bench
from ondevice_studies.speculation import plain

ONLY = {
    "drafters": "every drafter on Spec-Bench's requests",
    "identity": "drafters against plain decoding, in each format, on our own prompts",
    "quality": "perplexity in each format",
    "sized": "mixtures sized by recorded cost curves",
}


def again(name: str) -> Again | None:
    """How a part of a record is made again; None where nothing here makes it."""
    ways = (module.again(name) for module in (spec_bench, identity, quality, sized))
    return next((way for way in ways if way), None)


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    listed = "; ".join(f"{name}: {what}" for name, what in ONLY.items())
    parser = argparse.ArgumentParser(prog="make record PAPER=diaa", description=__doc__, epilog=listed)
    parser.add_argument("--model", choices=list(plain.LABELS), default=models.SMOLLM2)
    parser.add_argument("--only", nargs="+", choices=list(ONLY), default=list(ONLY), metavar="PART")
    parser.add_argument(
        "--methods",
        nargs="+",
        metavar="NAME",
        choices=list(spec_bench.METHODS),
        default=list(spec_bench.METHODS),
        help="of the drafters",
    )
    parser.add_argument("--curves", default="", metavar="TEXT", help="the sized mixtures with TEXT in their names")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    if "drafters" in options.only:
        spec_bench.record(options.model, options.methods)
    for part in (identity, quality):
        if part.__name__.rpartition(".")[2] in options.only:
            part.record(options.model)
    if "sized" in options.only:
        sized.record(options.model, options.curves)


if __name__ == "__main__":
    main()

"""What every paper's drafters are compared with: public models' plain answers to Spec-Bench's requests.

`make record PAPER=speculation` records them; it goes on where it was stopped.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from ondevice_studies.speculation import plain


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="make record PAPER=speculation", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(plain.LABELS), default=list(plain.LABELS))
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    for model in options.models:
        answers = plain.recorder(model)
        plain.record(model, answers)
        print(answers.finish())


if __name__ == "__main__":
    main()

"""The bars that a bundled language model is to pass, and whether it does."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ondevice_training.evaluation.retrieval_gain import STEPS

Results = Mapping[str, Any]
_SENSES: dict[str, Callable[[float, float], bool]] = {
    "at most": operator.le,
    "at least": operator.ge,
    "above": operator.gt,
}


@dataclass(frozen=True)
class Bar:
    """A number that is to be at most or at least a limit. limits: by size; a size without one has no bar.

    measured: takes the estimate (a dictionary as `Estimate.as_json` gives) out of an evaluation's results.
    """

    label: str
    sense: str
    limits: Mapping[str, float]
    measured: Callable[[Results], Mapping[str, float]]
    percent: bool = False

    def row(self, evaluation: Mapping[str, Any]) -> str:
        """The row of a model card's table: limit, value with standard error, 95 % interval, n, whether it is met."""
        estimate = self.measured(evaluation["results"])
        limit = self.limits.get(evaluation["model"]["size"] or "")
        scale, unit = (100, " %") if self.percent else (1, "")
        digits = 1 if self.percent else 2 if abs(estimate["value"]) >= 1 else 3
        value, error, low, high = (
            f"{scale * estimate[key]:.{digits}f}" for key in ("value", "standard_error", "low", "high")
        )
        bar, verdict = "-", "no bar"
        if limit is not None:
            bar = f"{self.sense} {scale * limit:g}{unit}"
            verdict = "met" if _SENSES[self.sense](estimate["value"], limit) else "**not met**"
        return (
            f"| {self.label} | {bar} | {value} ± {error}{unit} | {low}{unit} to {high}{unit} | {estimate['count']} | "
            f"{verdict} |"
        )


def _smallest_step(results: Results) -> Mapping[str, float]:
    steps = results["retrieval"]["reduction_from_step_before"]
    return min((steps[str(n)] for n in STEPS), key=lambda step: step["value"])


def _task(family: str, number: str) -> Callable[[Results], Mapping[str, float]]:
    return lambda results: results["tasks"]["families"][family][number]


BARS = (
    Bar("Perplexity of held-out documents, 8k BPE, context 512", "at most", {"small": 20, "base": 15},
        lambda results: results["perplexity"]["test"]),
    Bar("Copying: loss on a passage's second copy over that on the first", "at most", {"small": 0.4, "base": 0.3},
        lambda results: results["copying"]["documents"]),
    Bar("Retrieval: fall of perplexity at 8 passages, against none", "at least", {"small": 0.08, "base": 0.10},
        lambda results: results["retrieval"]["reduction"]["8"], percent=True),
    Bar("Retrieval: least fall from one of 0, 1, 2, 4, 8 passages to the next", "above", {"small": 0, "base": 0},
        _smallest_step, percent=True),
    Bar("Task outputs that end by themselves without a loop", "at least", {"base": 0.85},
        lambda results: results["tasks"]["ends_well"], percent=True),
    Bar("Questions with passages (`rag`) answered", "at least", {"base": 0.60}, _task("rag", "hit"), percent=True),
)  # fmt: skip

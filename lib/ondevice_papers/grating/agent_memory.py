"""Agent memory (section 6.3, Figure 12): an agent finds the actions of a past task instead of asking a model for each.

Tasks are GENERATED from the templates of data/traces/agent_tasks.json, as the paper's are not published; `video` and
`community` are the names of its workloads. A memory holds past tasks with their actions. A new task is worded
differently; search finds candidates, a reranker the best of them, and if its score is above a cut-off its actions are
replayed. Else a model is asked for each action.

The bundled rerankers were trained on questions about Python documentation, so that nothing they learnt is about agents:
how well they find a task shows what carries over, not what a reranker for this can do.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ondevice import assets


@dataclass(frozen=True)
class Trajectory:
    """A task in words and the actions that do it."""

    task: str
    actions: tuple[str, ...]

    @property
    def text(self) -> str:
        """Task and actions as search and reranker read them."""
        return f"{self.task}\n{'; '.join(self.actions)}"


@dataclass(frozen=True)
class Workload:
    """memory: past tasks. tasks: new ones. validation: others, for the cut-off, with the same memory."""

    name: str
    memory: tuple[Trajectory, ...]
    tasks: tuple[Trajectory, ...]
    validation: tuple[Trajectory, ...]


WORKLOADS = ("video", "community")
TASKS = MEMORY = 200
REPEATED = 0.75  # of the new tasks: that their actions are in the memory; the others are like some that are


def workload(name: str) -> Workload:
    """A generated workload, the same one on every machine.

    Of its new tasks, and of as many for validation, two each are one task in both wordings that the memory lacks; a
    task of the validation is none of the test, in no wording. The memory's tasks are all different, of the 252 that the
    templates have.
    """
    templates = json.loads(assets.data("traces", "agent_tasks.json").read_text(encoding="utf-8"))[name]
    slots = [[(key, value) for value in values] for key, values in templates["slots"].items()]
    every = list(product(templates["intents"], *slots))
    old = round(REPEATED * TASKS / 2)
    new = TASKS // 2 - old
    rng = np.random.default_rng([0, WORKLOADS.index(name)])
    order = [every[index] for index in rng.permutation(len(every))]
    past = order[:MEMORY]
    rest = order[MEMORY:]
    repeated = [past[index] for index in rng.permutation(MEMORY)]

    def worded(chosen: Iterable[Any]) -> tuple[Trajectory, ...]:
        trajectories = [_trajectory(intent, dict(values), wording) for intent, *values in chosen for wording in (1, 2)]
        return tuple(trajectories[index] for index in rng.permutation(TASKS))

    return Workload(
        name,
        tuple(_trajectory(intent, dict(values), 0) for intent, *values in past),
        worded([*repeated[:old], *rest[:new]]),
        worded([*repeated[old : 2 * old], *rest[new : 2 * new]]),
    )


def _trajectory(intent: Mapping[str, Sequence[str]], values: Mapping[str, str], wording: int) -> Trajectory:
    """wording: of the memory (0), near to that (1), or further from it (2)."""
    return Trajectory(
        intent["wordings"][wording].format(**values), tuple(action.format(**values) for action in intent["actions"])
    )


def cut_off(scores: ArrayLike, right: ArrayLike, precision: float = 0.9) -> float:
    """The lowest score such that, of those at or above it, this share is right; infinity where there is none.

    scores: [n] of the best past task of n validation tasks. right: [n] whether its actions are the task's.
    """
    values = np.asarray(scores, np.float64)
    correct = np.asarray(right, bool)
    good = [score for score in np.unique(values) if correct[values >= score].mean() >= precision - 1e-12]
    return float(min(good, default=np.inf))

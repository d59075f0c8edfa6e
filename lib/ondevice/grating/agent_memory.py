"""Agent memory (section 6.3, Figure 12): an agent finds the actions of a past task instead of asking a model for each.

Tasks are GENERATED from templates, as the paper's are not published; `video` and `community` are the names of its
workloads. A memory holds past tasks with their actions. A new task is worded differently; search finds candidates, a
reranker the best of them, and if its score is above a cut-off its actions are replayed. Else a model is asked for each
action.

The bundled rerankers were trained on questions about Python documentation, so that nothing they learnt is about agents:
how well they find a task shows what carries over, not what a reranker for this can do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

_GIVEN = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Trajectory:
    """A task in words and the actions that do it."""

    task: str
    actions: tuple[str, ...]

    @property
    def text(self) -> str:
        """As it is searched and read."""
        return f"{self.task}\n{'; '.join(self.actions)}"


@dataclass(frozen=True)
class Workload:
    """memory: past tasks. tasks: new ones. validation: others, for the cut-off, with the same memory."""

    name: str
    memory: tuple[Trajectory, ...]
    tasks: tuple[Trajectory, ...]
    validation: tuple[Trajectory, ...]


@dataclass(frozen=True)
class _Intent:
    """One kind of task, with slots in braces. wordings: of the memory, near to that, and further from it."""

    wordings: tuple[str, ...]
    actions: tuple[str, ...]


_FIND = ("open {app}", "tap the search field", "type {title}", "tap the first result")
_INTENTS: dict[str, tuple[_Intent, ...]] = {
    "video": (
        _Intent(("Play {title} on {app}", "Please open {app} and play {title}", "I want to watch {title}, use {app}"),
                (*_FIND, "tap play")),
        _Intent(("Give {title} a like on {app}", "Open {app} and like {title}", "Thumbs up for {title}, {app}"),
                (*_FIND, "tap the heart")),
        _Intent(("Download {title} from {app}", "Use {app} to download {title} to my phone",
                 "Save {title} on {app} so that I can see it offline"), (*_FIND, "tap download", "tap best quality")),
        _Intent(("Add {title} to the watch list of {app}", "Please put {title} on my {app} watch list",
                 "Remember {title} for later in {app}"), (*_FIND, "tap the bookmark")),
        _Intent(("Share {title} with a friend by {app}", "In {app}, share {title} with somebody I know",
                 "Send a link to {title} from {app}"), (*_FIND, "tap share", "tap the first contact")),
        _Intent(("Play {title} on {app} with subtitles", "Open {title} on {app}, with subtitles please",
                 "Watch {title} in {app}, captions on"), (*_FIND, "tap play", "tap captions", "tap on")),
        _Intent(("Cast {title} from {app} to the television", "Please cast {title} on my television, it is on {app}",
                 "I want {title} of {app} on the big screen"), (*_FIND, "tap cast", "tap living room")),
    ),
    "community": (
        _Intent(("Follow the author of {title} on {app}", "Open {app} and follow whoever is the author of {title}",
                 "Subscribe on {app} to the writer of {title}"), (*_FIND, "tap the author", "tap follow")),
        _Intent(("Comment 'thank you' on {title} in {app}", "Please leave a thank you comment at {title}, {app}",
                 "Reply to {title} on {app} that I am grateful"),
                (*_FIND, "tap comment", "type thank you", "tap send")),
        _Intent(("Collect the post {title} on {app}", "Find {title} in {app} and collect it",
                 "Keep {title} in my favourites of {app}"), (*_FIND, "tap the star")),
        _Intent(("Like the post {title} on {app}", "Use {app} to like {title}", "Vote {title} up in {app}"),
                (*_FIND, "tap the heart")),
        _Intent(("Report the post {title} to {app}", "Please report {title}, a post on {app}",
                 "Tell {app} that {title} breaks the rules"), (*_FIND, "tap the menu", "tap report", "tap spam")),
        _Intent(("Send the post {title} of {app} to a friend", "Open {app} and send a friend the post {title}",
                 "Pass {title} on {app} on to a contact"), (*_FIND, "tap share", "tap the first contact")),
        _Intent(("Read the latest comments on {title} in {app}", "Show me the latest comments on {title}, {app}",
                 "What do people on {app} say about {title} now?"), (*_FIND, "tap comments", "tap newest")),
    ),
}  # fmt: skip
_SLOTS: dict[str, dict[str, tuple[str, ...]]] = {
    "video": {
        "title": ("Silent Harbor", "Harbor Lights", "The Last Orchard", "Orchard of Glass", "Night Train",
                  "Night Ferry", "Paper Moons", "The Paper City", "City of Rain", "Rain over Lisbon",
                  "Salt and Iron", "Iron Valley"),
        "app": ("StreamBox", "Filmo", "Viewly"),
    },
    "community": {
        "title": ("Ten quiet cafes", "Cafes by the river", "A river walk", "Winter walks", "Winter bread", "Rye bread",
                  "Bread without yeast", "Cheap desks", "A desk by the window", "Window plants", "Plants for shade",
                  "Shade sails"),
        "app": ("Plaza", "Threadly", "RedNote"),
    },
}  # fmt: skip
WORKLOADS = tuple(_INTENTS)


def workload(name: str, tasks: int = 200, memory: int = 200, known: float = 0.75, seed: int = 0) -> Workload:
    """A generated workload. The same arguments give the same one on every machine.

    tasks: new ones, and as many for validation. Two of each are one task in both wordings that the memory lacks; a task
    of the validation is none of the test, in no wording. memory: past tasks, all different. known: share of new tasks
    whose actions are in the memory; the others are like some that are. Raises ValueError on an unknown name and on
    numbers that the templates (252 different tasks) do not have.
    """
    if name not in _INTENTS:
        raise ValueError(f"There is no workload {name!r}; there are {', '.join(WORKLOADS)}.")
    if tasks < 2 or tasks % 2 or not 0 <= known <= 1:
        raise ValueError(f"Tasks come in twos, and the share known is in [0, 1], not {tasks} and {known}.")
    slots = _SLOTS[name]
    every = list(product(_INTENTS[name], *([(key, value) for value in values] for key, values in slots.items())))
    old = round(known * tasks / 2)
    new = tasks // 2 - old
    if not max(1, 2 * old) <= memory <= len(every) - 2 * new:
        raise ValueError(f"A memory of {memory} does not fit {tasks} tasks and the {len(every)} of the templates.")
    rng = np.random.default_rng([seed, WORKLOADS.index(name)])
    order = [every[place] for place in rng.permutation(len(every))]
    past, rest = order[:memory], order[memory:]
    again = [past[place] for place in rng.permutation(memory)]

    def worded(chosen: Iterable[Any]) -> tuple[Trajectory, ...]:
        made = [_made(intent, dict(values), wording) for intent, *values in chosen for wording in (1, 2)]
        return tuple(made[place] for place in rng.permutation(tasks))

    return Workload(
        name, tuple(_made(intent, dict(values), 0) for intent, *values in past),
        worded([*again[:old], *rest[:new]]), worded([*again[old : 2 * old], *rest[new : 2 * new]]),
    )  # fmt: skip


def _made(intent: _Intent, values: Mapping[str, str], wording: int) -> Trajectory:
    def fill(text: str) -> str:
        return _GIVEN.sub(lambda match: values[match.group(1)], text)

    return Trajectory(fill(intent.wordings[wording]), tuple(map(fill, intent.actions)))


def cut_off(scores: ArrayLike, right: ArrayLike, precision: float = 0.9) -> float:
    """The lowest score such that, of those at or above it, this share is right; infinity where there is none.

    scores: [n] of the best past task of n validation tasks. right: [n] whether its actions are the task's.
    """
    found, correct = np.asarray(scores, np.float64), np.asarray(right, bool)
    good = [score for score in np.unique(found) if correct[found >= score].mean() >= precision - 1e-12]
    return float(min(good, default=np.inf))

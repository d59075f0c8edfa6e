"""Number formats of a model's engine, and what a pass costs in each: T(n), the time of a pass over n rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from time import monotonic, sleep
from typing import Any

import numpy as np

from ondevice.causal_lm import CausalLM
from ondevice.causal_lm.lean import engine
from ondevice.models import Loaded
from ondevice.speculation.verify_cost import SETTLED_S, verifications

ROWS = (1, 2, 4, 8, 16, 32)  # of a pass
PEER_ROWS = (1, 8, 32)  # of another program's
PAST = 256  # tokens that a pass is behind
UNPADDED = " unpadded"  # an int8 format whose lone row runs by itself: it decodes without drafts
FORMATS: dict[str, dict[str, Any]] = {  # the arguments of an engine
    "float32": {"weights": "float32", "arithmetic": "float32", "drafts": True},
    "8bit": {"weights": "8bit", "arithmetic": "float32", "drafts": True},
    "4bit": {"weights": "4bit", "arithmetic": "float32", "drafts": True},
    "8bit-int8": {"weights": "8bit", "arithmetic": "int8", "drafts": True},
    "4bit-int8": {"weights": "4bit", "arithmetic": "int8", "drafts": True},
    "8bit-rows": {"weights": "8bit-rows", "arithmetic": "int8", "drafts": True},
    "8bit-int8" + UNPADDED: {"weights": "8bit", "arithmetic": "int8", "drafts": False},
    "4bit-int8" + UNPADDED: {"weights": "4bit", "arithmetic": "int8", "drafts": False},
}
NAMES = [name for name, options in FORMATS.items() if options["drafts"]]  # those that a user chooses from
_REPEATED = ", measured twice"
_FEWEST, _MOST = 3, 25  # turns


def engines(loaded: Loaded, names: Collection[str], threads: int) -> tuple[dict[str, CausalLM], dict[str, str]]:
    """(engines by format, reasons by the formats that cannot be had here). Raises ValueError where none is left."""
    built: dict[str, CausalLM] = {}
    reasons: dict[str, str] = {}
    for name, options in FORMATS.items():
        if name.removesuffix(UNPADDED) in names:
            if loaded.gguf and name == "8bit":
                reasons[name] = "A GGUF's blocks go in as they are, which 4bit measures."
                continue
            try:
                built[name] = engine(loaded, threads=threads, **options)
            except ValueError as error:
                reasons[name] = str(error)
    if not built:
        raise ValueError(" ".join(dict.fromkeys(reasons.values())))
    return built, reasons


def curves(
    built: Mapping[str, CausalLM], seconds: float, beside: Mapping[str, Callable[[], list[float]]]
) -> dict[str, Any]:
    """By format rows, ms (medians over turns), turns and past. Formats take turns, for some seconds or a few turns.

    The first format is measured twice, which shows how far equal things differ here. beside: others that take turns,
    by the name of their curve; each call gives the seconds of PEER_ROWS. A pass has no more rows than the context.
    """
    context = min(lm.context for lm in built.values())
    past = max(1, min(PAST, context - max(ROWS)))
    fitting = tuple(rows for rows in ROWS if past + rows <= context) or (1,)
    rows = {name: fitting if FORMATS[name]["drafts"] else (1,) for name in built} | dict.fromkeys(beside, PEER_ROWS)
    turns = {name: verifications(lm, past, rows[name]) for name, lm in built.items()} | dict(beside)
    order = [*turns, next(iter(built)) + _REPEATED]
    times: dict[str, list[list[float]]] = {name: [] for name in order}
    ends = monotonic() + seconds
    for turn in range(_MOST):
        if turn >= _FEWEST and monotonic() > ends:
            break
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            if name in beside:
                sleep(SETTLED_S)
            times[name].append(turns[name.removesuffix(_REPEATED)]())
    measured = {}
    for name in order:
        ms = (1e3 * np.median(times[name], axis=0)).round(4).tolist()
        measured[name] = {"rows": rows[name.removesuffix(_REPEATED)], "ms": ms, "turns": len(times[name]), "past": past}
    return measured


def milliseconds(curve: Mapping[str, Any], rows: float) -> float:
    """Of a pass over so many rows: linear between those that were measured, and the last one's beyond."""
    return float(np.interp(rows, curve["rows"], curve["ms"]))

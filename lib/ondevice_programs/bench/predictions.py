"""From T(n) and the drafters' passes to the time per token, and from seconds of prompts to a speed with an interval."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ondevice_programs.bench.formats import FORMATS, milliseconds

ANY, TREE, CHAIN = "any", "tree", "chain"  # shapes of drafts; `any`: of drafters that draft nothing but chains
PLAIN, REPEATED, DRAFTED, FASTEST = "plain", "plain, measured twice", "drafted", "fastest plain"  # what is measured
DRAWS = 2000  # resamples of an interval


def arm(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The passes of a drafter at one budget and shape. runs: of prompts, all tasks alike, each with at least one pass.

    tokens_per_pass: of each task; mean: of the tasks. own_ms: the drafter's, per pass. reading_ms: what it adds to the
    reading of the prompt, per token of the whole answer, of which a run may be a part. rows: passes by their rows.
    """
    emitted: Counter[str] = Counter()
    passes: Counter[str] = Counter()
    rows: Counter[str] = Counter()
    for run in runs:
        emitted[run["task"]] += run["emitted"]
        passes[run["task"]] += sum(run["rows"].values())
        rows.update(run["rows"])
    per_pass = {task: emitted[task] / passes[task] for task in emitted}
    return {
        **{name: runs[0][name] for name in ("drafter", "budget", "shape")},
        "n": len(runs),
        "mean": float(np.mean(list(per_pass.values()))),
        "tokens_per_pass": per_pass,
        "own_ms": 1e3 * sum(run["drafting"] for run in runs) / passes.total(),
        "reading_ms": 1e3 * sum(run["reading"] for run in runs) / sum(run["whole"] for run in runs),
        "rows": dict(rows),
        "emitted": emitted.total(),
        "identical": sum(run["identical"] for run in runs),
    }


def per_token(curve: Mapping[str, Any], row: Mapping[str, Any]) -> float:
    """Predicted ms per token of an `arm`: T(rows) of its passes and the drafter's time, over the tokens that came."""
    spent = sum(count * (milliseconds(curve, int(rows)) + row["own_ms"]) for rows, count in row["rows"].items())
    return spent / row["emitted"] + row["reading_ms"]


def predicted(
    curves: Mapping[str, Mapping[str, Any]], shapes: Mapping[str, str], arms: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Every (format, drafter, budget), the fastest first. shapes: TREE or CHAIN by format, of those that take drafts.

    speed: over plain decoding in the same format; over_fastest: over the fastest plain decoding of all.
    """
    fastest = plain(curves)[1]
    table = []
    for form, shape in shapes.items():
        for row in arms:
            if row["shape"] in (ANY, shape):
                ms = per_token(curves[form], row)
                keys = {name: row[name] for name in ("drafter", "budget", "shape", "n")}
                speeds = {"speed": milliseconds(curves[form], 1) / ms, "over_fastest": fastest / ms}
                table.append({"format": form, **keys, "ms_per_token": ms, **speeds})
    return sorted(table, key=lambda row: row["ms_per_token"])


def plain(curves: Mapping[str, Mapping[str, Any]]) -> tuple[str, float]:
    """The format whose single row is fastest, and its ms."""
    alone = {name: milliseconds(curve, 1) for name, curve in curves.items() if name in FORMATS}
    best = min(alone, key=lambda name: alone[name])
    return best, alone[best]


def advice(parts: Mapping[str, Any]) -> dict[str, Any]:
    """The fastest setting: format, drafter (None: plain decoding), budget, and ms per token.

    It is measured where the last part is there, else what T(1) says of plain decoding.
    """
    name, ms = plain(parts["curves"])
    if "measured" in parts:
        measured = parts["measured"]
        name, ms = measured["fastest"], measured["ms_per_token"][FASTEST]
        if measured["ms_per_token"][DRAFTED] < ms:
            setting = {key: measured[key] for key in ("format", "drafter", "budget")}
            return {**setting, "ms_per_token": measured["ms_per_token"][DRAFTED]}
    return {"format": name, "drafter": None, "budget": 1, "ms_per_token": ms}


def speed(slow: Sequence[Sequence[float]], fast: Sequence[Sequence[float]]) -> list[float]:
    """[value, low, high]: the first's time per token over the second's, with a 95 % interval over prompts drawn anew.

    Each is [prompts, 2]: seconds and tokens.
    """
    pairs = np.array([slow, fast], dtype=float)  # [2, prompts, 2]
    prompts = pairs.shape[1]
    draws = np.random.default_rng(0).integers(prompts, size=(DRAWS, prompts))
    sums = np.concatenate([pairs.sum(axis=1)[:, None], pairs[:, draws].sum(axis=2)], axis=1)
    each = sums[..., 0] / sums[..., 1]
    ratios = each[0] / each[1]
    low, high = np.quantile(ratios[1:], (0.025, 0.975)).tolist()
    return [float(ratios[0]), low, high]


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """n, ms per token of plain and drafted answers, speeds with their intervals over prompts, and identity.

    rows: of prompts, each with `times` ([seconds, tokens] by answer), the drafted one's `passes`, and its `identity`.
    """
    times = {name: [row["times"][name] for row in rows] for name in rows[0]["times"]}
    times.setdefault(FASTEST, times[PLAIN])
    sums = {name: np.sum(part, axis=0).tolist() for name, part in times.items()}
    identity = [row["identity"] for row in rows]
    return {
        "n": len(rows),
        "ms_per_token": {name: 1e3 * seconds / tokens for name, (seconds, tokens) in sums.items()},
        "tokens_per_pass": sums[DRAFTED][1] / sum(row["passes"] for row in rows),
        "speed": speed(times[PLAIN], times[DRAFTED]),
        "over_fastest": speed(times[FASTEST], times[DRAFTED]),
        "floor": speed(times[PLAIN], times[REPEATED]),
        "identity": {kind: identity.count(kind) for kind in ("identical", "near-tie", "different")},
    }

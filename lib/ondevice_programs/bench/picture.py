"""A bench as a picture: T(n) by format, tokens per pass by drafter, and the fastest settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ondevice import assets, extras
from ondevice.speculation.drafters import DRAFTERS
from ondevice_programs.bench.formats import ROWS
from ondevice_programs.bench.predictions import ANY, CHAIN, TREE
from ondevice_programs.bench.report import setting

_FORMATS = (".png", ".svg", ".pdf")
_COLOURS = [*(f"C{number}" for number in range(10)), "k"]  # of the drafters
_BEST = 8  # settings


def require_format(path: Path) -> None:
    """Raise ValueError unless the file's name ends as a picture's."""
    if path.suffix.lower() not in _FORMATS:
        raise ValueError(f"A picture is named {', '.join(f'*{suffix}' for suffix in _FORMATS)}, not {path.name}.")


def draw(parts: Mapping[str, Any], path: Path) -> None:
    """Draw what was measured. Raises ModuleNotFoundError without matplotlib."""
    with extras.needing("notebooks", "A picture"):
        from matplotlib.figure import Figure
        from matplotlib.ticker import NullLocator, ScalarFormatter
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for name, curve in parts["curves"].items():
        left.plot(curve["rows"], curve["ms"], marker="o", markersize=3, linewidth=1, label=name)
    left.set(xlabel="rows of a pass", ylabel="ms", title="T(n), the time of a pass", xscale="log", yscale="log")
    left.set_xticks(ROWS, map(str, ROWS))
    left.xaxis.set_minor_locator(NullLocator())
    left.yaxis.set_major_formatter(ScalarFormatter())
    left.yaxis.set_minor_formatter(ScalarFormatter())
    left.legend(fontsize=6)
    drafted = parts.get("drafters", [])
    for number, name in enumerate(DRAFTERS):
        for shape, style in ((ANY, "-"), (TREE, "-"), (CHAIN, "--")):
            rows = [row for row in drafted if (row["drafter"], row["shape"]) == (name, shape)]
            label = name if rows and shape != CHAIN else None
            budgets, means = [row["budget"] for row in rows], [row["mean"] for row in rows]
            middle.plot(budgets, means, f"o{style}{_COLOURS[number]}", markersize=3, linewidth=1, label=label)
    middle.set(xlabel="budget: nodes of a draft", title="Tokens per pass (dashed: chains)")
    if drafted:
        middle.legend(fontsize=6)
    best = parts.get("predictions", [])[:_BEST][::-1]
    right.barh([setting(row) for row in best], [row["over_fastest"] for row in best], color="tab:blue")
    measured = parts.get("measured")
    if measured:
        value, low, high = measured["over_fastest"]
        reach = [[value - low], [high - value]]
        right.errorbar(value, setting(measured), xerr=reach, fmt="o", color="tab:red", label="measured")
        right.legend(fontsize=6)
    right.axvline(1, color="grey", linewidth=1)
    right.set(title="Predicted speed over fastest plain")
    right.tick_params(axis="y", labelsize=6)
    model, machine = parts["model"], parts["machine"]
    figure.suptitle(f"{model['spec']} on {machine['processor']}, {machine['threads']} threads", fontsize=9)
    with assets.writing(path) as temporary:
        figure.savefig(temporary, format=path.suffix[1:].lower(), dpi=120)

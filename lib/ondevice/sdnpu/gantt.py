"""Gantt charts of graph schedules, drawn from their timelines (Figure 8)."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ondevice.plotting import COLOURS, mark_kind, panels
from ondevice.sdnpu.scheduling import Timeline

_STYLE = {"compute on G1": COLOURS["sky"], "compute on G2": COLOURS["orange"], "load of G2": COLOURS["green"]}
_COMPUTE, _LOAD = 1, 0  # rows of a panel
_MOST_NUMBERED = 40  # more bars than that have no room for their block's number


def gantt(timelines: Mapping[str, Timeline], unit: str = "ms", kind: str = "simulated") -> Figure:
    """One panel a timeline, by name, on one time axis: computes above, loads below, blocks numbered from 1.

    A broken line ends each chunk, a full one the whole. Raises ValueError without a timeline.
    """
    if not timelines:
        raise ValueError("A Gantt chart needs a timeline.")
    figure, axes = panels(len(timelines), 1, width=7.0, height=0.95, sharex=True)
    for axis, (name, timeline) in zip(axes[:, 0], timelines.items(), strict=True):
        _draw(axis, timeline)
        axis.set_title(f"{name}: {timeline.latency:.6g} {unit}", fontsize=9, loc="left")
    longest = max(timeline.latency for timeline in timelines.values())
    axes[-1, 0].set(xlabel=f"time ({unit})", xlim=(0, longest * 1.01 or 1.0))
    handles = [Patch(color=colour, label=label) for label, colour in _STYLE.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=3)
    mark_kind(figure, kind)
    return figure


def _draw(axis: Axes, timeline: Timeline) -> None:
    colours = list(_STYLE.values())
    blocks = [one % timeline.prefill.blocks for one in range(timeline.graph.size)]
    starts, ends = timeline.compute_start.ravel().tolist(), timeline.compute_end.ravel().tolist()
    graphs = timeline.graph.ravel().tolist()
    bars = [
        (_COMPUTE, block, start, end, colours[graph - 1])
        for block, start, end, graph in zip(blocks, starts, ends, graphs, strict=True)
    ]
    loads = timeline.load_block.tolist(), timeline.load_start.tolist(), timeline.load_end.tolist()
    bars += [(_LOAD, block, start, end, colours[2]) for block, start, end in zip(*loads, strict=True)]
    for row, block, start, end, colour in bars:
        axis.barh(row, end - start, left=start, height=0.8, color=colour, edgecolor="white", linewidth=0.6)
        if len(bars) <= _MOST_NUMBERED and end > start:
            axis.text((start + end) / 2, row, str(block + 1), ha="center", va="center", fontsize=7)
    for end in timeline.compute_end[:, -1]:
        axis.axvline(end, color=COLOURS["grey"], ls=":", lw=1)
    axis.axvline(timeline.latency, color=COLOURS["black"], lw=1)
    axis.set_yticks([_LOAD, _COMPUTE], ["load", "compute"])
    axis.set_ylim(_LOAD - 0.5, _COMPUTE + 0.5)
    axis.grid(visible=False)

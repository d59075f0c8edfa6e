"""A figure with sliders, where somebody sits at the notebook; elsewhere (papermill, nbval, a page) the figure alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ipywidgets
import matplotlib.pyplot as plt
from IPython import get_ipython
from IPython.display import display
from matplotlib.figure import Figure

from ondevice import plotting


def show(
    values: Callable[..., Mapping[str, float]], kind: Any, over: str, **choices: tuple[float, Sequence[float]]
) -> None:
    """A panel for each of the named values over one of the choices, the present one marked; in grey, as it was first.

    values: called by name with one of each choice, anew at every move, so that an edited function shows. kind: as in
    `plotting.mark_kind`. choices: the first one, and all.
    """
    grids = {name: sorted({first, *every}) for name, (first, every) in choices.items()}
    now = {name: first for name, (first, _) in choices.items()}

    def curves() -> list[Mapping[str, float]]:
        return [values(**now | {over: choice}) for choice in grids[over]]

    def drawn() -> tuple[dict[str, str], Figure]:
        rows = curves()
        here = rows[grids[over].index(now[over])]
        figure, axes = plotting.panels(1, len(here), width=2.7, height=2.1)
        for axis, name in zip(axes[0], here, strict=True):
            axis.plot(grids[over], [row[name] for row in at_first], color=plotting.COLOURS["grey"], lw=4, alpha=0.4)
            axis.plot(grids[over], [row[name] for row in rows])
            axis.plot(now[over], here[name], "o", color=plotting.COLOURS["red"])
            axis.set(xlabel=over, ylabel=name, ylim=(0, None))
        plotting.mark_kind(figure, kind)
        plt.close(figure)  # it is displayed here, not once more at the cell's end
        return {"text/plain": ", ".join(f"{name} {value:.4g}" for name, value in {**now, **here}.items())}, figure

    def move(_: Any) -> None:
        now.update({name: slider.value for name, slider in sliders.items()})
        text, figure = drawn()
        text_at.update(text, raw=True)
        figure_at.update(figure)

    at_first = curves()
    sliders: dict[str, Any] = {}
    kernel = getattr(get_ipython(), "kernel", None)
    if kernel is not None and kernel.get_parent()["content"].get("allow_stdin"):  # somebody is there to be asked
        for name, grid in grids.items():
            options = [(f"{value:g}", value) for value in grid]
            sliders[name] = ipywidgets.SelectionSlider(
                options=options, value=now[name], description=name, continuous_update=False
            )
            sliders[name].observe(move, "value")
        display(ipywidgets.HBox(list(sliders.values())))
    text, figure = drawn()
    text_at = display(text, raw=True, display_id=True)
    figure_at = display(figure, display_id=True)

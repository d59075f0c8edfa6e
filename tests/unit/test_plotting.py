"""The shared parts of figures: marks stand where the table says, the legend is one, the kind is in the corner."""

from __future__ import annotations

from io import BytesIO

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt
from PIL import Image

from ondevice import evidence, plotting


@pytest.fixture(autouse=True)
def style():
    with mpl.rc_context():
        plotting.use_style()
        yield
    plt.close("all")


TABLE = pd.DataFrame(
    [("average", "b", 3.0), ("qa", "b", 1.0), ("qa", "a", 2.0), ("code", "a", 4.0)], columns=["task", "method", "speed"]
)
WITH_ENDS = TABLE.assign(low=TABLE["speed"] - 0.5, high=TABLE["speed"] + 1)


@pytest.mark.parametrize("flat", [False, True])
def test_bars_begin_at_0_stand_by_their_category_and_have_whiskers(flat):
    _, axes = plotting.panels(1, 1)
    axis = axes[0, 0]
    plotting.bars(axis, WITH_ENDS, "task", "speed", "method", flat=flat, texts="{:g} x")
    ticks = axis.get_yticklabels() if flat else axis.get_xticklabels()
    assert [text.get_text() for text in ticks] == ["qa", "code", "average"]  # the average is last
    ends = {}
    for container in (drawn for drawn in axis.containers if isinstance(drawn, mpl.container.BarContainer)):
        for position, bar in enumerate(container.patches):
            box = bar.get_bbox()
            assert (box.x0 if flat else box.y0) == 0 or np.isnan(box.y1 + box.x1)
            ends[container.get_label(), position] = box.x1 if flat else box.y1
    assert ends["b", 0] == 1 and ends["a", 0] == 2 and ends["a", 1] == 4 and ends["b", 2] == 3
    segments = [segment for drawn in axis.collections for segment in drawn.get_segments() if len(segment)]
    whiskers = [segment[:, 0 if flat else 1].tolist() for segment in segments]
    assert [0.5, 2.0] in whiskers and [3.5, 5.0] in whiskers
    assert "4 x" in [text.get_text() for text in axis.texts]


def test_the_kind_comes_from_the_table_and_nothing_stands_on_it():
    figure, axes, _ = plotting.facets(TABLE, across="method")
    table = TABLE.copy()
    table.attrs["kind"] = "simulated"
    axes[0, 0].plot([0, 1], [0, 1], label="a very long name of a series " * 3)
    plotting.legend(figure, table)
    figure.canvas.draw()
    (kind,), (legend,) = figure.texts, figure.legends
    assert kind.get_text() == "simulated"
    others = [legend.get_tightbbox(), *(axis.get_tightbbox() for axis in figure.axes)]
    assert not any(kind.get_window_extent().overlaps(box) for box in others)
    assert not legend.get_tightbbox().overlaps(axes[0, 0].get_tightbbox())


def kind_of(figure):
    (text,) = figure.texts
    return text.get_text()


@pytest.mark.parametrize("first", ["kind", "paper"])
def test_the_kind_has_quoted_where_the_papers_values_are_drawn_and_not_for_a_reference(first):
    figure, axes = plotting.panels(1, 2)
    if first == "kind":
        plotting.mark_kind(figure, "recorded, not your edit")
    plotting.quoted(axes[0, 0], y=1.0, label="budget")
    if first == "kind":
        assert kind_of(figure) == "recorded, not your edit"
    plotting.quoted(axes[0, 1], [1, 2], [3, 4], label="the paper's")
    plotting.quoted(axes[0, 0], y=[1.0, 2.0])
    if first == "paper":
        plotting.legend(figure, "recorded, not your edit")
    assert kind_of(figure) == "recorded+quoted, not your edit"


def test_a_name_has_the_notebooks_look_in_every_figure_and_no_other_series_its_colour():
    plotting.use_style(plotting.looks_by_name("c", ("b", "d")))
    colours = []
    for draw in (plotting.bars, plotting.points, plotting.lines):
        _, axes = plotting.panels(1, 1)
        draw(axes[0, 0], TABLE.assign(task=range(4)), "task", "speed", "method")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        drawn = [handle[0] for handle in handles] if draw != plotting.lines else handles
        own = [each.get_facecolor() if draw == plotting.bars else each.get_color() for each in drawn]
        colours.append(dict(zip(labels, map(mpl.colors.to_hex, own), strict=True)))
    look = plotting.looks_by_name("c", ("b", "d"))
    assert look["b"] == look["d"] != look["c"]
    assert colours[0] == colours[1] == colours[2] == {"b": look["b"]["color"].lower(), "a": look["c"]["color"].lower()}
    plotting.use_style()
    assert plotting.looks_of(["b", "a"]) == [plotting.look(0), plotting.look(1)]
    several = plotting.looks_by_name(*map(str, range(16)))
    assert len({(look["color"], look["marker"]) for look in several.values()}) == 16


def test_a_caption_names_its_origin_and_breaks_no_formula():
    figure, _ = plotting.panels(1, 1, width=2)
    words = r"A sum of $a^{d-1}$ and so on, for-ever. " * 3
    plotting.caption(figure, words, plotting.Origin("model-a", "zen4-2c", "12 prompts"))
    text = figure.get_supxlabel()
    assert text.replace("\n", " ").endswith("for-ever.  model-a; zen4-2c; n = 12 prompts.".replace("  ", " "))
    assert all(line.count("$") % 2 == 0 for line in text.split("\n"))


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (TABLE.drop(columns="task"), "task"),
        (TABLE.head(0), "row"),
        (TABLE.assign(speed=np.nan), "speed .*nan"),
        (pd.concat([TABLE, TABLE]), "task.*method"),
    ],
)
def test_a_table_that_cannot_be_drawn_is_refused(table, said):
    _, axes = plotting.panels(1, 1)
    with pytest.raises(ValueError, match=said):
        plotting.bars(axes[0, 0], table, "task", "speed", "method")


def test_a_panel_has_its_labels_kind_and_caption():
    table = evidence.born(pd.DataFrame({"x": [1, 2], "y": [1.0, 2.0], "by": ["a", "a"]}), "measured")
    figure, axis = plotting.panel(table, "x", "y", "by", labels=("rows", "ms"), words="What to see. " * 20)
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("rows", "ms") and axis.get_ylim()[0] == 0
    assert "measured" in [text.get_text() for text in figure.texts]
    assert "\n" in figure.get_supxlabel() and figure.legends


def test_a_notebook_keeps_pictures_of_few_colours():
    figure, axes = plotting.panels(1, 2)
    for axis in axes.ravel():
        axis.plot(np.random.default_rng(0).normal(size=(40, 5)).cumsum(0))
    whole = BytesIO()
    figure.savefig(whole, format="png", bbox_inches="tight", dpi=figure.dpi)
    small = plotting._picture(figure)
    image, right = Image.open(BytesIO(small)), Image.open(whole)
    assert image.mode == "P" and image.size == right.size and len(small) < 0.5 * len(whole.getvalue())
    assert np.abs(np.asarray(image.convert("RGB"), int) - np.asarray(right.convert("RGB"), int)).mean() < 1

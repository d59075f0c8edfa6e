"""The shared parts of figures: marks stand where the table says, the legend is one, the kind is in the corner."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt

from ondevice import plotting


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
    for container in (one for one in axis.containers if isinstance(one, mpl.container.BarContainer)):
        for place, bar in enumerate(container.patches):
            box = bar.get_bbox()
            assert (box.x0 if flat else box.y0) == 0 or np.isnan(box.y1 + box.x1)
            ends[container.get_label(), place] = box.x1 if flat else box.y1
    assert ends["b", 0] == 1 and ends["a", 0] == 2 and ends["a", 1] == 4 and ends["b", 2] == 3
    segments = [segment for one in axis.collections for segment in one.get_segments() if len(segment)]
    whiskers = [segment[:, 0 if flat else 1].tolist() for segment in segments]
    assert [0.5, 2.0] in whiskers and [3.5, 5.0] in whiskers
    assert "4 x" in [text.get_text() for text in axis.texts]


def test_lines_are_sorted_and_have_a_band_or_whiskers():
    rows = pd.DataFrame({"x": [2.0, 1.0], "y": [20.0, 10.0], "low": [19.0, 9.0], "high": [22.0, 12.0], "by": "a"})
    _, (pair,) = plotting.panels(1, 2)
    plotting.lines(pair[0], rows, "x", "y", "by", looks={"a": dict(ls="--")})
    plotting.lines(pair[1], rows, "x", "y", "by", whiskers=True)
    for axis in pair:
        assert np.column_stack(axis.lines[0].get_data()).tolist() == [[1, 10], [2, 20]]
    assert pair[0].lines[0].get_linestyle() == "--"
    (band,), (whiskers,) = (axis.collections for axis in pair)
    assert band.get_datalim(pair[0].transData).extents.tolist() == [1, 9, 2, 22]
    assert [segment[:, 1].tolist() for segment in whiskers.get_segments()] == [[9, 12], [19, 22]]


def test_the_papers_value_is_hollow_dashed_or_a_band_and_last_in_the_one_legend():
    figure, (pair,) = plotting.panels(1, 2)
    for axis in pair:
        plotting.quoted(axis, [0, 1], [2, 3])
        plotting.quoted(axis, y=2, label="quoted, least")
        plotting.quoted(axis, x=(1, 2), label="quoted, range")
        plotting.bars(axis, TABLE, "task", "speed", "method")
    plotting.legend(figure, "measured")
    marks, dashed = pair[0].lines[:2]
    assert marks.get_markerfacecolor() == "white" and marks.get_ydata().tolist() == [2, 3]
    assert dashed.get_linestyle() == "--" and [*dashed.get_ydata()] == [2, 2]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "b", "a", "quoted", "quoted, least", "quoted, range",
    ]  # fmt: skip
    assert [text.get_text() for text in figure.texts] == ["measured"]


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


def test_facets_are_the_rows_of_their_values():
    _, axes, parts = plotting.facets(TABLE, "method", "task")
    assert axes.shape == (2, 3)
    assert [axis.get_title() for axis, _ in parts][:3] == ["b, qa", "b, code", "b, average"]
    assert [rows["speed"].tolist() for _, rows in parts] == [[1], [], [3], [2], [4], []]


def test_ticks_stand_at_the_values():
    _, axes = plotting.panels(1, 1)
    axes[0, 0].set_xscale("log")
    plotting.ticks_at(axes[0, 0].xaxis, [16, 2, 16])
    assert [text.get_text() for text in axes[0, 0].get_xticklabels()] == ["2", "16"]
    assert not axes[0, 0].get_xticks(minor=True).size


def test_verdicts_are_counted_apart_by_what_they_rest_on():
    counts = pd.DataFrame(
        [("p", "measured", "reproduced", 3), ("p", "quoted+simulated", "undecided", 2), ("p", "analytic", "trend", 1),
         ("q", "recorded", "contradicted", 4), ("q", "", "untested", 5)],
        columns=["paper", "kind", "verdict", "claims"],
    )  # fmt: skip
    figure = plotting.verdict_bars(counts)
    assert [axis.get_title() for axis in figure.axes] == ["measurement", "simulation", "formula", "untested"]
    sizes = {(axis.get_title(), bars.get_label()): [patch.get_width() for patch in bars] for axis in figure.axes
             for bars in axis.containers}  # fmt: skip
    assert sizes["measurement", "reproduced"] == [3, 0] and sizes["measurement", "contradicted"] == [0, 4]
    assert sizes["simulation", "undecided"] == [2, 0] and sizes["untested", "untested"] == [0, 5]


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (TABLE.drop(columns="task"), "needs the columns task"),
        (TABLE.head(0), "without a row"),
        (TABLE.assign(speed=np.nan), "speed holds finite numbers"),
        (pd.concat([TABLE, TABLE]), "two rows for"),
    ],
)
def test_a_table_that_cannot_be_drawn_is_refused(table, said):
    _, axes = plotting.panels(1, 1)
    with pytest.raises(ValueError, match=said):
        plotting.bars(axes[0, 0], table, "task", "speed", "method")

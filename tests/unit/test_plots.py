"""The papers' figures, drawn from the published tables: they show their numbers, whole, with no text on another."""

from __future__ import annotations

import itertools

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt

from ondevice import assets
from ondevice.grating import plots as grating
from ondevice.grating import printed as grating_printed
from ondevice.plotting import use_style


@pytest.fixture(autouse=True)
def style():
    with mpl.rc_context():
        use_style()
        yield
    plt.close("all")


def rows(name: str, **equal: object) -> pd.DataFrame:
    """A published table, of which some columns have these values."""
    table = pd.read_csv(assets.ROOT / "figures" / f"{name}.csv")
    for column, value in equal.items():
        table = table[table[column] == value]
    return table


def by_hand(columns: str, *values: tuple) -> pd.DataFrame:
    return pd.DataFrame(values, columns=columns.split())


def by(table: pd.DataFrame, column: str) -> dict:
    return {str(name): part for name, part in table.groupby(column, sort=False)}


STAGES = by_hand("stage latency_ms peak_mb", ("keyword search", 10.0, 20.0), ("embedding search", 30.0, 80.0),
                 ("reranker", 60.0, 300.0))  # fmt: skip
SCORES = by_hand("model layer candidate probability top", *(
    ("a", layer, one, 0.1 + 0.08 * layer * one / 4, one > 2) for layer in range(1, 9) for one in range(5)))  # fmt: skip
COSTS = by_hand("source rows per_row_ms", *(
    (source, n, 3 + cost / n) for source, cost in (("this CPU, measured", 20), ("fit, simulated", 50))
    for n in (1, 4, 16, 64)))  # fmt: skip
HF, OURS = grating_printed.HF, grating_printed.OURS
TIMES = by_hand("setting method part seconds", *(
    (s, m, part, seconds) for s in ("video", "community") for m, reranking in ((HF, 5.0), (OURS, 2.0))
    for part, seconds in (("keyword search", 1.0), ("reranker", reranking), ("answer", 0.5))))  # fmt: skip
QUALITY = by_hand("setting method precision low high", *(
    (s, m, 0.8, 0.7, 0.9) for s in ("video", "community") for m in (HF, OURS)))  # fmt: skip
SAMPLES = by_hand("method seconds rss_mb anon_mb", (HF, 0, 0, 0), (HF, 5, 1200, 100), (OURS, 0, 0, 0), (OURS, 4, 99, 9))
STANDS_FOR = {"Qwen2.5-1.5B": "pydocs-lm-base", "LLaMA3.2-1B": "pydocs-lm-small"}
CROSSOVER = {rows("grating/beyond_03_hidden_reads")["disk"].iloc[0]: 110.0}
ROUNDS = pd.DataFrame({"layer": range(1, 13), "statistic": np.linspace(0.1, 0.6, 12), "threshold": 0.3})
# (figure of a table, the table, its columns that are drawn)
FIGURES = {
    "grating fig_01": (grating.pipeline, STAGES, "latency_ms peak_mb"),
    "grating fig_02": (lambda t: grating.score_evolution(t, rows("grating/fig_02_score_evolution").assign(model="a")),
                       SCORES, "layer probability"),
    "grating fig_04": (lambda t: grating.pruning(t, ROUNDS, title="a model, K = 5", layers=12),
                       rows("grating/fig_04_pruning"), "probability"),
    "grating fig_08": (grating.latency_and_precision, rows("grating/fig_08_latency_precision_a"), "seconds precision"),
    "grating fig_09": (lambda t: grating.memory_over_time(SAMPLES, t[t["method"].isin(grating_printed.METHODS)]),
                       rows("grating/fig_09_memory"), ""),
    "grating fig_10": (grating.trade_off, rows("grating/fig_10_trade_off"), "threshold computed"),
    "grating fig_12": (lambda t: grating.application(grating_printed.AGENT, t, QUALITY), TIMES, "seconds"),
    "grating fig_15": (lambda t: grating.footprint(grating_printed.CONTEXT, t),
                       rows("grating/fig_15_long_context_footprint"), "mb"),
    "grating fig_16": (grating.ablation, rows("grating/fig_16_ablation"), ""),
    "grating beyond_01": (grating.guarantee, rows("grating/beyond_01_guarantee"), "reached saved"),
    "grating beyond_02": (grating.clustering, rows("grating/beyond_02_clustering"), "n missed changed time_us"),
    "grating beyond_03": (lambda t: grating.hidden_reads(t, CROSSOVER),
                          rows("grating/beyond_03_hidden_reads"), "tokens hidden"),
    "grating beyond_04": (grating.saved_work, rows("grating/beyond_04_probes"), "overlap saved"),
    "grating beyond_05": (grating.embedding_cache, rows("grating/beyond_05_embedding_cache"), "hit_rate added_ms"),
}  # fmt: skip
EACH = pytest.mark.parametrize(("draw", "table", "columns"), FIGURES.values(), ids=FIGURES)
KINDS = ("measured", "simulated", "replayed", "analytic")
UNITS = np.array([1, 1e3, 1e6, 100])  # of a second or a share, as figures draw it


def drawn(figure) -> np.ndarray:
    """Every number that a line, a point or a bar stands for."""
    numbers = [np.asarray(axis_line.get_data(), float).ravel() for axis in figure.axes for axis_line in axis.lines]
    bars = [bar.get_bbox() for axis in figure.axes for bar in axis.patches if isinstance(bar, mpl.patches.Rectangle)]
    return np.concatenate([*numbers, *([[box.width, box.height] for box in bars] or [[]])])


@EACH
def test_a_figure_shows_the_tables_numbers_and_its_kind(draw, table, columns):
    figure = draw(table)
    shown = drawn(figure)
    for column in columns.split():
        for value in table[column].dropna().sample(5, random_state=0, replace=True):
            assert np.isclose(shown[:, None], value * UNITS, rtol=1e-6, atol=1e-12).any(), (column, value)
    assert any(kind in text.get_text() for text in figure.texts for kind in KINDS)


@EACH
def test_nothing_is_cut_and_no_text_stands_on_another(draw, table, columns):
    figure = draw(table)
    figure.canvas.draw()
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert min(box.x0, box.y0, width - box.x1, height - box.y1) > -0.02
    assert 4.5 < width <= 12.1
    for axis in figure.axes:
        texts = [(text.get_text(), text.get_window_extent()) for text in axis.texts if text.get_text()]
        assert [(a, b) for (a, one), (b, other) in itertools.combinations(texts, 2) if one.overlaps(other)] == []
    legends = [legend.get_tightbbox() for legend in figure.legends]
    assert not any(legend.overlaps(axis.get_tightbbox()) for legend in legends for axis in figure.axes)


@pytest.mark.parametrize("name", FIGURES)
def test_a_wrong_table_is_refused(name):
    draw, table, columns = FIGURES[name]
    with pytest.raises(ValueError, match="without a row"):
        draw(table.head(0))
    for column in columns.split():
        with pytest.raises((ValueError, KeyError), match=column):
            draw(table.drop(columns=column))

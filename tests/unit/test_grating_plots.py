"""GRATING's figures: each draws what its table holds, names units, kind and what is quoted, refuses wrong tables."""

from __future__ import annotations

import itertools

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt

from ondevice.grating import agent_memory, applications, plots, printed
from ondevice.grating.printed import HF, NONE, OFFLOAD, OURS, STEPS
from ondevice.plotting import COLOURS, use_style


@pytest.fixture(autouse=True)
def style():
    with mpl.rc_context():
        use_style()
        yield
    plt.close("all")


def by_hand(columns: str, *rows: tuple) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=columns.split())


STAGES = by_hand("stage latency_ms peak_mb", ("keyword search", 10.0, 20.0), ("embedding search", 30, 80),
                 ("reranker", 60, 300))  # fmt: skip
SCORES = by_hand(
    "model layer candidate probability top",
    ("a", 1, 0, 0.4, True), ("a", 8, 0, 0.9, True), ("a", 1, 1, 0.6, False), ("a", 8, 1, 0.1, False),
)  # fmt: skip
AGREEMENT = by_hand("model layer kendall low high", ("a", 1, 0.2, 0.1, 0.3), ("a", 8, 1.0, 1.0, 1.0))
PRUNED = by_hand(
    "layer candidate probability verdict",
    (1, 0, 0.5, "deferred"), (1, 1, 0.5, "deferred"), (1, 2, 0.4, "deferred"),
    (2, 0, 0.9, "selected"), (2, 1, 0.5, "deferred"), (2, 2, 0.1, "dropped"),
)  # fmt: skip
ROUNDS = by_hand("layer statistic threshold", (1, 0.1, 0.3), (2, 0.6, 0.3))
LATENCY = by_hand(
    "model queries k method threshold seconds low high precision",
    ("a", "questions", 1, HF, "", 2.0, 1.9, 2.1, 0.8), ("a", "questions", 1, OFFLOAD, "", 4.0, 3.8, 4.2, 0.8),
    ("a", "questions", 1, OURS, "low", 1.0, 0.9, 1.1, 0.7), ("a", "questions", 1, OURS, "high", 1.6, 1.5, 1.7, 0.8),
    ("a", "questions", 10, OFFLOAD, "", 5.0, 4.8, 5.2, 0.9), ("a", "questions", 10, OURS, "high", 2.0, 1.9, 2.1, 0.9),
)  # fmt: skip
SAMPLES = by_hand(
    "method seconds rss_mb anon_mb", (HF, 0, 0, 0), (HF, 5, 1200, 100), (OURS, 0, 0, 0), (OURS, 4, 110, 100),
    ("other", 3, 50, 40),
)  # fmt: skip
PEAKS = by_hand(
    "method rss_mb anon_mb mean_rss_mb cached_mb first_s seconds",
    (HF, 1200, 100, 600, 0, 5.0, 3.0), (OURS, 110, 100, 55, 0, 4.0, 3.5), ("other", 50, 40, 30, 900, 2.0, 1.0),
)  # fmt: skip
CURVE = by_hand(
    "model k threshold computed precision full",
    ("a", 1, 0.2, 0.4, 0.5, 0.6), ("a", 1, 1.0, 0.8, 0.6, 0.6), ("a", 5, 0.2, 0.5, 0.3, 0.3),
)  # fmt: skip
CHOSEN = by_hand("model k threshold name", ("a", 1, 0.6, "low"))
TIMES = by_hand(
    "setting method part seconds",
    ("video", HF, "keyword search", 1.0), ("video", HF, "reranker", 5.0), ("video", OURS, "keyword search", 1.0),
    ("video", OURS, "reranker", 2.0), ("video", NONE, "keyword search", 9.0),
)  # fmt: skip
QUALITY = by_hand(
    "setting method precision low high", ("video", HF, 0.8, 0.7, 0.9), ("video", OURS, 0.75, 0.7, 0.8),
    ("video", NONE, 0.5, 0.4, 0.6),
)  # fmt: skip
FOOTPRINT = by_hand(
    "setting method seconds mb", ("video", HF, 0, 100), ("video", HF, 1, 1000), ("video", HF, 2, 100),
    ("video", OURS, 0, 100), ("video", OURS, 1, 300),
)  # fmt: skip
ABLATION = pd.DataFrame(dict(step=STEPS, peak_mb=[1000, 1500, 1100, 400, 200.0], seconds=[10.0, 6, 6, 7, 7]))
ABLATION = ABLATION.assign(first_s=2.0 * ABLATION["seconds"], low=ABLATION["seconds"] - 1, high=ABLATION["seconds"] + 1)
PROMISES = by_hand(
    "model k rule promised reached low high saved",
    ("a", 5, "margin", 0.9, 0.95, 0.93, 0.97, 0.4), ("a", 5, "margin", 0.99, 0.995, 0.99, 1.0, 0.2),
    ("a", 5, "threshold", 0.9, 0.85, 0.8, 0.9, 0.1),
)  # fmt: skip
HIDDEN = by_hand("disk tokens hidden", ("direct", 64, 0.6), ("direct", 16, 0.3), ("slow", 64, 0.2))
CLUSTERS = by_hand(
    "method n missed changed time_us", ("exact", 20, 0.0, 0.0, 37.0), ("exact", 60, 0.0, 0.0, 59.0),
    ("Lloyd", 20, 0.5, 0.25, 900.0),
)  # fmt: skip
CACHE = by_hand("stream query hit_rate added_ms", ("Zipf", 1, 0.0, 150.0), ("Zipf", 2, 0.9, 3.0))

FIGURES = {
    "pipeline": (plots.pipeline, [STAGES]),
    "score_evolution": (plots.score_evolution, [SCORES, AGREEMENT]),
    "pruning": (plots.pruning, [PRUNED, ROUNDS]),
    "latency_and_precision": (plots.latency_and_precision, [LATENCY]),
    "memory_over_time": (plots.memory_over_time, [SAMPLES, PEAKS]),
    "trade_off": (plots.trade_off, [CURVE]),
    "rag": (plots.rag, [TIMES, QUALITY, FOOTPRINT]),
    "agent_memory": (plots.agent_memory, [TIMES, QUALITY]),
    "agent_memory_footprint": (plots.agent_memory_footprint, [FOOTPRINT]),
    "long_context": (plots.long_context, [TIMES, QUALITY]),
    "long_context_footprint": (plots.long_context_footprint, [FOOTPRINT]),
    "ablation": (plots.ablation, [ABLATION]),
    "guarantee": (plots.guarantee, [PROMISES]),
    "hidden_reads": (plots.hidden_reads, [HIDDEN]),
    "clustering": (plots.clustering, [CLUSTERS]),
    "embedding_cache": (plots.embedding_cache, [CACHE]),
}
EACH = pytest.mark.parametrize(("draw", "tables"), FIGURES.values(), ids=FIGURES)


def words(figure) -> list[str]:
    return [text.get_text() for one in figure.legends for text in [one.get_title(), *one.get_texts()]]


def lines(axis, label: str) -> list[np.ndarray]:
    """[n, 2] points of each line of this label."""
    return [
        np.column_stack([one.get_xdata(orig=False), one.get_ydata(orig=False)]).astype(float)
        for one in axis.lines if one.get_label() == label
    ]  # fmt: skip


def widths(axis) -> list[float]:
    return [float(bar.get_width()) for one in axis.containers for bar in getattr(one, "patches", [])]


def labels(axis) -> list[str]:
    return [text.get_text() for text in axis.texts]


def cut(figure) -> bool:
    """Whether something that is drawn goes beyond the edge of the picture."""
    figure.canvas.draw()
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    return bool(min(box.x0, box.y0, width - box.x1, height - box.y1) < -0.02)


def overlapping(axis) -> list[tuple[str, str]]:
    """Pairs of texts of a panel that stand on each other."""
    axis.figure.canvas.draw()
    boxes = [(one.get_text(), one.get_window_extent()) for one in axis.texts if one.get_text()]
    return [(a, b) for (a, one), (b, other) in itertools.combinations(boxes, 2) if one.overlaps(other)]


# All figures


@EACH
def test_a_figure_says_its_kind_and_units_and_can_be_saved(draw, tables, tmp_path):
    figure = draw(*tables, kind="simulated")
    assert words(figure)[0].endswith("simulated")
    assert "simulated" not in words(draw(*tables))[0]
    figure.savefig(tmp_path / "a.png")
    assert 6 < figure.get_size_inches()[0] <= 9.2
    assert figure.get_supxlabel() or all(axis.get_xlabel() for axis in figure.axes[-1:])


@EACH
def test_no_text_is_cut_or_covered_and_no_two_legend_entries_look_the_same(draw, tables):
    figure = draw(*tables)
    assert not cut(figure)
    assert [pair for axis in figure.axes for pair in overlapping(axis)] == []
    (legend,) = figure.legends
    looks = [
        (type(one), getattr(one, "get_marker", str)(), getattr(one, "get_linestyle", str)(), getattr(
            one, "get_color", lambda one=one: (one.get_facecolor(), one.get_hatch()))())
        for one in legend.legend_handles if not hasattr(one, "get_segments")
    ]  # fmt: skip
    assert len(set(looks)) == len(looks)


@EACH
def test_a_wrong_table_is_refused(draw, tables):
    for place, table in enumerate(tables):
        for column in table.columns:
            wrong = [*tables[:place], table.drop(columns=column), *tables[place + 1 :]]
            with pytest.raises(ValueError, match="column"):
                draw(*wrong)
        with pytest.raises(ValueError, match=r"without a row|There is no"):
            draw(*tables[:place], table.head(0), *tables[place + 1 :])
        for column in table.select_dtypes("number").columns:
            bad = table.assign(**{column: table[column].astype(float).replace(table[column].iloc[0], np.inf)})
            with pytest.raises(ValueError, match="holds finite numbers"):
                draw(*tables[:place], bad, *tables[place + 1 :])
        plt.close("all")


@pytest.mark.parametrize("name", ["pipeline", "latency_and_precision", "ablation", "clustering", "embedding_cache"])
def test_two_rows_for_one_bar_are_refused(name):
    draw, (table,) = FIGURES[name]
    with pytest.raises(ValueError, match="two rows"):
        draw(pd.concat([table, table.tail(1)]))


@pytest.mark.parametrize(
    ("draw", "match"),
    [
        (lambda: plots.pipeline(STAGES.head(2)), "no stage reranker"),
        (lambda: plots.score_evolution(SCORES, AGREEMENT.assign(model="b")), "no model in the agreement a"),
        (lambda: plots.pipeline(STAGES.replace("keyword search", "guessing")), "no stage guessing"),
        (lambda: plots.pruning(PRUNED.replace("dropped", "lost"), ROUNDS), "no verdict lost"),
        (lambda: plots.pruning(PRUNED, ROUNDS, layers=1), "of 1 layers decides nothing after layer 2"),
        (lambda: plots.latency_and_precision(LATENCY.assign(queries=["a", "b"] * 3)), "one query set, not of a, b"),
        (lambda: plots.trade_off(CURVE.replace(0.2, 0.0)), "above 0, not 0.0"),
        (lambda: plots.trade_off(CURVE, CHOSEN.drop(columns="name")), "columns name"),
        (lambda: plots.memory_over_time(SAMPLES, PEAKS.head(2)), "no method in the peaks other"),
        (lambda: plots.rag(TIMES, QUALITY, FOOTPRINT.assign(setting="b")), "no setting in the memory table video"),
        (lambda: plots.long_context(TIMES.replace("reranker", "guessing"), QUALITY), "no part guessing"),
        (lambda: plots.ablation(ABLATION.replace("pruning", "magic")), "no step magic"),
        (lambda: plots.ablation(ABLATION.tail(4)), "no step in the table baseline"),
        (lambda: plots.hidden_reads(HIDDEN, {"tape": 9.0}), "no disk tape"),
        (lambda: plots.clustering(CLUSTERS.assign(missed=1.5)), "from 0 to 1, not 1.5"),
    ],
)
def test_names_and_values_that_cannot_be_drawn_are_refused(draw, match):
    with pytest.raises(ValueError, match=match):
        draw()


# Each figure


def test_pipeline_writes_shares_with_units_and_places_the_quoted_one():
    latency, memory = plots.pipeline(STAGES).axes
    assert widths(latency) == [10, 30, 60] and widths(memory) == [20, 80, 300]
    assert "60 ms, 60.0 %" in labels(latency) and "300 MB, 75.0 %" in labels(memory)
    label = "quoted, 96.3 % of latency and 67.6 % of memory in the reranker, with our other stages"
    ((quoted, _),) = lines(latency, label)[0]
    assert quoted / (quoted + 40) == pytest.approx(0.963)
    ((quoted, _),) = lines(memory, label)[0]
    assert quoted / (quoted + 100) == pytest.approx(0.676)
    assert (latency.get_xlabel(), memory.get_xlabel()) == ("latency (ms)", "peak memory (MB)")


def test_score_evolution_colours_the_top_and_places_the_quoted_layers_by_their_share_of_the_depth():
    figure = plots.score_evolution(SCORES, AGREEMENT)
    above, below = figure.axes
    assert lines(above, "in the full model's top K")[0].tolist() == [[1, 0.4], [8, 0.9]]
    assert lines(above, "the other candidates")[0][:, 1].tolist() == [0.6, 0.1]
    assert lines(below, "agreement, mean")[0].tolist() == [[1, 0.2], [8, 1.0]]
    assert below.get_xlabel() == "layer, of 8" and labels(above) == ["7", "13"]
    quoted = "quoted, layers 7 and 13, of 24 to 40, of a model not named"
    spans = [[one.get_x(), one.get_x() + one.get_width()] for one in below.patches if one.get_label() == quoted]
    assert np.array(spans) == pytest.approx(8 * np.array([[7 / 40, 7 / 24], [13 / 40, 13 / 24]]))
    assert "its 95 % interval" in words(figure)


def test_pruning_counts_verdicts_and_keeps_equal_scores_apart():
    tied = pd.concat([PRUNED, by_hand("layer candidate probability verdict", (2, 3, 0.1, "dropped"))])
    figure = plots.pruning(tied, ROUNDS, title="a, K = 2, pool 7", layers=12)
    above, below = figure.axes
    assert above.get_title() == "a, K = 2, pool 7" and below.get_xlabel() == "after layer, of 12"
    assert below.get_xlim()[1] > 12
    dropped = lines(above, "dropped")[0]
    ((selected, height),) = lines(above, "selected")[0]
    assert height == 0.9 and dropped[:, 1].tolist() == [0.1, 0.1]
    assert 2 < selected < dropped[0, 0] < dropped[1, 0] < 3
    assert labels(above) == ["active", "3", "4", "selected", "1", "dropped", "2"]
    assert lines(below, "dispersion")[0][:, 1].tolist() == [0.1, 0.6] and lines(below, "threshold")[0][0, 1] == 0.3
    assert plots.pruning(PRUNED, ROUNDS).axes[1].get_xlabel() == "after layer, of 2"


def test_latency_has_speedups_precision_and_the_quoted_cases():
    figure = plots.latency_and_precision(LATENCY)
    precise, _, one, ten = figure.axes
    heights = [bar.get_height() for part in one.containers for bar in getattr(part, "patches", [])]
    assert heights == [2, 4, 1, 1.6]
    assert [text.get_text() for text in one.get_xticklabels()] == ["2.0x", "1.0x", "4.0x", "2.5x"]
    assert figure.get_supxlabel() == "under a bar: HF Offload's latency over it"
    assert lines(one, "quoted, best case (K = 1): 89 % less than HF Offload")[0][:, 1] == pytest.approx([0.44, 0.44])
    hardest = "quoted, hardest case (K = 10): 50 % less (as we read it, than HF Offload)"
    assert lines(ten, hardest)[0].tolist() == [[2, 2.5], [3, 2.5]]
    assert lines(precise, "Precision@K of all test pools, replayed")[0][:, 1] == pytest.approx([0.8, 0.8, 0.7, 0.8])
    names = words(figure)
    assert names[:5] == ["questions, measured", HF, OFFLOAD, "GRATING (low)", "GRATING (high)"]


def test_memory_shows_all_three_numbers_both_latencies_and_the_quoted_ratio():
    rss, anon, peaks, cached, latency = plots.memory_over_time(SAMPLES, PEAKS).axes
    assert lines(rss, HF)[0].tolist() == [[0, 0], [5, 1200]] and lines(anon, OURS)[0][-1].tolist() == [4, 100]
    assert widths(peaks) == [1200, 110, 50, 600, 55, 30] and widths(cached) == [100, 100, 40, 0, 0, 900]
    assert widths(latency) == [3, 3.5, 1, 5, 4, 2] and latency.get_xlabel() == "latency (s)"
    quoted = lines(peaks, "quoted, by its ratio to HF's")[0]
    assert quoted[:, 0] == pytest.approx([1200 / 11.45, 1200 / 5.34])
    assert not lines(peaks, "quoted, by its ratio to HF Offload's")  # not in the table
    assert [one.get_text() for one in peaks.get_yticklabels()] == [HF, OURS, "other", "GRATING, quoted"]
    assert peaks.get_ylim() == cached.get_ylim() == latency.get_ylim()


def test_trade_off_is_latency_and_change_with_the_chosen_thresholds():
    above, below = plots.trade_off(CURVE, CHOSEN).axes
    assert lines(above, "K = 1")[0].tolist() == [[0.2, 0.4], [1, 0.8]]
    assert lines(below, "K = 1")[0][:, 1] == pytest.approx([-10, 0])
    drawn = [line.get_ydata()[0] for line in above.lines if line.get_marker() == "o"]
    assert drawn == pytest.approx([0.6]) and "low threshold" in words(above.figure)
    assert "low threshold" not in words(plots.trade_off(CURVE))


def test_rag_has_latency_precision_and_memory_for_each_reranker():
    model = printed.STANDS_FOR["Bge-Minicmpm"]
    named = [table.replace("video", model) for table in (TIMES, QUALITY, FOOTPRINT)]
    above, below, memory = plots.rag(*named).axes
    assert widths(above)[:3] == [1, 1, 9] and labels(above) == [" 6 s", " 3 s", " 9 s"]
    assert lines(above, "quoted saving, of our HF")[0][0, 0] == pytest.approx(6 * 0.49)
    assert below.get_xlabel() == "Precision@K (%)"
    assert lines(memory, "quoted, GRATING's peak of our HF's, at most")[0][0, 1] == pytest.approx(222)
    assert labels(memory) == ["HF: peak 1000 MB", "GRATING: peak 300 MB"] and memory.get_ylim()[1] > 1300


@pytest.mark.parametrize(
    ("draw", "setting", "what", "left"),
    [
        (plots.agent_memory, "video", "tasks done", 0.748), (plots.agent_memory, "community", "tasks done", 0.566),
        (plots.long_context, "any", "right answers", 0.88),
    ],
)  # fmt: skip
def test_applications_quote_the_saving_of_their_setting(draw, setting, what, left):
    above, below = draw(TIMES.replace("video", setting), QUALITY.replace("video", setting)).axes
    assert lines(above, "quoted saving, of our HF")[0][0, 0] == pytest.approx(6 * left)
    assert above.get_title() == setting and below.get_xlabel() == f"{what} (%)"
    (points,) = [one.lines[0].get_xdata() for one in below.containers]
    assert list(points) == [0.8, 0.75, 0.5]
    other = draw(TIMES.replace("video", "b"), QUALITY.replace("video", "b")).axes[0]
    assert bool(lines(other, "quoted saving, of our HF")) == (what == "right answers")


def test_footprints_quote_a_share_of_our_peak():
    (axis,) = plots.agent_memory_footprint(FOOTPRINT).axes
    assert lines(axis, "quoted, GRATING's peak of our HF's")[0][0, 1] == pytest.approx(370)
    assert lines(axis, OURS)[0].tolist() == [[0, 100], [1, 300]]
    (other,) = plots.long_context_footprint(FOOTPRINT).axes
    assert not [one for one in other.lines if str(one.get_label()).startswith("quoted")]


def test_parts_are_stacked_in_one_order_and_colour_whatever_the_table_begins_with():
    known = {applications.KEYWORDS, applications.EMBEDDING, applications.RERANKER, applications.ANSWER}
    assert known | {agent_memory.CALLS} == set(plots._PARTS)
    stacks = []
    for table in (TIMES, TIMES.sort_values("part", ascending=False)):
        above = plots.long_context(table, QUALITY).axes[0]
        stacks.append([(one.get_label(), one.patches[0].get_facecolor()) for one in above.containers])
    assert stacks[0] == stacks[1] and [label for label, _ in stacks[0]] == ["keyword search", "reranker"]
    methods = {COLOURS[colour] for colour in plots._METHODS.values()}
    assert not {COLOURS[colour] for colour, _ in plots._PARTS.values()} & methods


def test_labels_of_bars_have_room():
    above = plots.long_context(TIMES, QUALITY).axes[0]
    assert above.get_xlim() == (0, pytest.approx(1.25 * 9))


def test_ablation_is_over_the_baseline_in_the_papers_order():
    memory, latency = plots.ablation(ABLATION[::-1]).axes
    assert widths(memory) == pytest.approx([1, 1.5, 1.1, 0.4, 0.2])
    assert widths(latency) == pytest.approx([1, 0.6, 0.6, 0.7, 0.7] * 2)  # next queries, then first ones
    label = "quoted, 60 candidates of 500 tokens on a GPU"
    assert lines(memory, label)[0][:, 0] == pytest.approx([1, 1.448, 1.072, 0.422, 0.216])
    quoted = lines(latency, label)[0][:, 0]
    assert quoted[[0, 1, 4]] == pytest.approx([1, 0.51, 0.515]) and np.isnan(quoted[[2, 3]]).all()
    assert labels(memory)[1] == "1500 MB" and labels(latency)[3] == "7.00 s" and labels(latency)[8] == "14.00 s"
    assert words(memory.figure)[1:3] == ["next query", "first query"]


def test_ablation_of_one_query_a_step_has_no_next_query():
    once = ABLATION.assign(**dict.fromkeys(("seconds", "low", "high"), ABLATION["first_s"]))
    memory, latency = plots.ablation(once).axes
    assert widths(latency) == pytest.approx([1, 0.6, 0.6, 0.7, 0.7])
    assert "first query" in words(memory.figure) and "next query" not in words(memory.figure)


def test_ablation_of_one_query_has_no_interval():
    def ends(table: pd.DataFrame) -> list[list[float]]:
        _, latency = plots.ablation(table).axes
        return [segment[:, 0].tolist() for one in latency.collections for segment in one.get_segments()]

    assert ends(ABLATION)[1] == pytest.approx([0.5, 0.7]) and len(ends(ABLATION)) == 5
    assert ends(ABLATION.assign(low=ABLATION["seconds"], high=ABLATION["seconds"])) == []


def test_guarantee_is_beside_the_promise():
    left, right = plots.guarantee(PROMISES).axes
    promise = lines(left, "as promised")[0]
    assert (promise[:, 0] == promise[:, 1]).all() and promise[0, 0] == 0.8
    assert [list(one.lines[0].get_ydata()) for one in left.containers] == [[0.95, 0.995], [0.85]]
    assert [list(line.get_ydata()) for line in right.lines if len(line.get_xdata())] == [[0.4, 0.2], [0.1]]


def test_hidden_reads_are_sorted_and_have_their_crossover():
    (axis,) = plots.hidden_reads(HIDDEN, {"direct": 110.0}).axes
    assert lines(axis, "direct")[0].tolist() == [[16, 0.3], [64, 0.6]]
    assert lines(axis, "direct: all, from 110 tokens on, analytic")[0][0, 0] == 110
    assert [text.get_text() for text in axis.get_xticklabels()] == ["16", "64"]
    assert not [one for one in plots.hidden_reads(HIDDEN).axes[0].lines if "analytic" in str(one.get_label())]


def test_clustering_and_cache_draw_their_columns():
    missed, changed, time = plots.clustering(CLUSTERS).axes
    assert lines(missed, "Lloyd")[0].tolist() == [[20, 0.5]] and lines(changed, "Lloyd")[0][0, 1] == 0.25
    assert lines(time, "exact")[0][:, 1].tolist() == [37, 59] and time.get_yscale() == "log"
    hits, added = plots.embedding_cache(CACHE).axes
    assert lines(hits, "Zipf")[0][:, 1].tolist() == [0, 0.9] and lines(added, "Zipf")[0][0, 1] == 150
    assert lines(added, "quoted, 4 ms")[0][0, 1] == 4


def test_methods_keep_their_colours_thresholds_have_hatches_and_others_their_own():
    names = [HF, "GRATING (low)", "GRATING (high)", "one (low)", "one (high)", "two"]
    colours = [plots._colour(name, names) for name in names]
    assert colours[:3] == [COLOURS["grey"], COLOURS["blue"], COLOURS["blue"]]
    assert colours[3] == colours[4] and len(set(colours)) == 4
    assert [bool(plots._style(name, names)["hatch"]) for name in names] == [False, True, False, True, False, False]

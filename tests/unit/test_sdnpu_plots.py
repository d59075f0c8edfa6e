"""sd.npu's figures: each draws what its table holds, names units, kind and what is quoted, and refuses wrong tables."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt

from ondevice.plotting import use_style
from ondevice.sdnpu import npu, plots, printed
from ondevice.sdnpu import sensitivity as sensitivities

ARMS = {"NPU vanilla": 180.0, "CPU vanilla": 50.0, "NPU-SAM": 110.0, "sd.npu": 60.0}


@pytest.fixture(autouse=True)
def style():
    with mpl.rc_context():
        use_style()
        yield
    plt.close("all")


def by_hand(columns: str, *rows: tuple) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=columns.split())


TIMES = by_hand(
    "model task source prefill_ms decode_ms decode_share",
    ("larger", "summary", "wall clock, measured", 200.0, 800.0, 0.8),
    ("larger", "rag", "wall clock, measured", 300.0, 700.0, 0.7),
    ("larger", "summary", "fit, simulated", 100.0, 900.0, 0.9),
)
PAIRS = by_hand(
    "pair cosine", ("across", 0.1), ("across", 0.5), ("task", 0.7), ("task", 0.9), ("group", 0.5), ("group", 0.6)
)
SUMMARIES = by_hand("prompt cosine overlap distance", (0, 0.8, 0.2, 0.8), (1, 0.6, 0.4, 0.6))
GRAPHS = pd.concat([
    npu.by_shape(printed.npu_curve(), [16, 32], 4.2).assign(source="fit, simulated"),
    npu.by_shape(npu.Curve(8.0, 0.9), [32, 64], 4.2).assign(source="static graphs, measured"),
])  # fmt: skip
COSTS = by_hand(
    "source rows per_row_ms",
    ("fit, simulated", 32, 5.7),
    ("fit, simulated", 1, 51.1),
    ("this CPU, measured", 1, 20.0),
    ("this CPU, measured", 64, 2.0),
)
LENGTHS = by_hand("method drafted share", ("PLD", 0, 0.6), ("PLD", 10, 0.4), ("SAM", 3, 1.0))
CELLS = pd.DataFrame(
    dict(model="larger", arm=arm, task=task, decode_per_token_ms=ms * more, per_token_ms=2 * ms * more)
    for arm, ms in ARMS.items()
    for task, more in (("summary", 1.0), ("rag", 1.5))
)
JOULES = CELLS.assign(joules_over_ours=CELLS["per_token_ms"] / 100, assumption="one power")
MEMORY = by_hand(
    "model arm peak_mb source",
    ("larger", "vanilla", 400.0, "measured"),
    ("larger", "SAM", 450.0, "measured"),
    ("Qwen2.5-1.5B", "NPU vanilla", 3087.0, "weights, analytic"),
)
PARTS = by_hand(
    "model arm source part ms",
    ("larger", "NPU vanilla", "fit, simulated", "prefill", 300.0),
    ("larger", "NPU vanilla", "fit, simulated", "forward", 700.0),
    ("larger", "sd.npu", "fit, simulated", "forward", 200.0),
    ("larger", "sd.npu", "fit, simulated", "prefill", 300.0),
    ("larger", "sd.npu", "fit, simulated", "calibration", 50.0),
    ("larger", "sd.npu", "fit, simulated", "drafting", 10.0),
    ("larger", "vanilla", "wall clock, measured", "forward", 90.0),
)
CAUSES = by_hand(
    "model task cause share low high count",
    ("larger", "summary", "missing", 0.1, 0.05, 0.2, 10),
    ("larger", "summary", "redundant", 0.9, 0.8, 0.95, 90),
)
GAINS = by_hand(
    "model method task accepted gain",
    ("larger", "PLD", "summary", 1.5, 1.0),
    ("larger", "PLD+calibration", "summary", 1.6, 1.07),
    ("larger", "PLD+Ours", "summary", 1.8, 1.2),
    ("larger", "SAM+reuse", "summary", 1.8, 0.99),
)
RATIOS = by_hand(
    "family rule ratio",
    ("alike", "greedy", 1.0),
    ("alike", "greedy", 1.2),
    ("alike", "greedy", 1.4),
    ("alike", "synchronous", 1.6),
    ("mixed", "greedy", 1.1),
)
SWITCHES = by_hand(
    "method exposed_s total_s kind",
    ("synchronous", 0.5, 1.5, "measured"),
    ("synchronous", 0.7, 1.7, "measured"),
    ("synchronous", 0.6, 1.6, "measured"),
    ("progressive", 0.05, 1.05, "measured"),
    ("synchronous", 0.4, 1.4, "simulated"),
)


def _log(rows: int, tokens: int) -> sensitivities.Log:
    return sensitivities.Log(np.full(10, rows), tokens)


SPEEDUPS = sensitivities.table(
    _log(20, 25), _log(40, 20), _log(1, 10), printed.npu_curve(), [0, 0.01, 0.09, 1], [16, 32], [0, 10]
)


def words(figure) -> list[str]:
    """The legends' entries and titles."""
    legends = [*figure.legends, *(axis.get_legend() for axis in figure.axes if axis.get_legend())]
    return [text.get_text() for one in legends for text in [one.get_title(), *one.get_texts()]]


def line(axis, label: str) -> np.ndarray:
    """[n, 2] points of the one line of this label."""
    (found,) = [one for one in axis.lines if one.get_label() == label]
    return np.column_stack([found.get_xdata(orig=False), found.get_ydata(orig=False)]).astype(float)


def bars(axis, label: str) -> list:
    """Bars of one label, those without a value left out."""
    (found,) = [one for one in axis.containers if one.get_label() == label]
    return [bar for bar in found if np.isfinite([bar.get_width(), bar.get_height()]).all()]


FIGURES = {
    "prefill_and_decode": (lambda t: plots.prefill_and_decode(t), TIMES),
    "similarity, pairs": (lambda t: plots.similarity(t, SUMMARIES), PAIRS),
    "similarity, summaries": (lambda t: plots.similarity(PAIRS, t), SUMMARIES),
    "graph_sizes": (plots.graph_sizes, GRAPHS),
    "draft_lengths, costs": (lambda t: plots.draft_lengths(t, LENGTHS), COSTS),
    "draft_lengths, lengths": (lambda t: plots.draft_lengths(COSTS, t), LENGTHS),
    "per_token": (plots.per_token, CELLS.drop(columns="per_token_ms")),
    "energy": (plots.energy, JOULES[["model", "arm", "task", "assumption", "joules_over_ours"]]),
    "memory": (plots.memory, MEMORY),
    "breakdown": (plots.breakdown, PARTS),
    "rejections": (plots.rejections, CAUSES),
    "gains": (plots.gains, GAINS),
    "scheduling_ratios": (plots.scheduling_ratios, RATIOS),
    "switching": (plots.switching, SWITCHES),
    "sensitivity": (plots.sensitivity, SPEEDUPS),
}
each = pytest.mark.parametrize("name", FIGURES)


@each
def test_a_figure_names_its_kinds_and_what_its_axes_show(name):
    draw, table = FIGURES[name]
    figure = draw(table)
    named = {kind for kind in ("measured", "simulated", "analytic") for text in words(figure) if kind in text}
    told = " ".join(table.select_dtypes(object).astype(str).to_numpy().ravel())
    assert named and all(kind in named for kind in ("measured", "simulated") if kind in told)
    if name != "scheduling_ratios":
        assert any("quoted" in text for text in words(figure))
    shown = [axis.get_xlabel() + axis.get_ylabel() for axis in figure.axes]
    assert any(shown) or figure.get_supxlabel()


@each
def test_a_table_that_lacks_a_column_is_refused(name):
    draw, table = FIGURES[name]
    for column in table:
        with pytest.raises(ValueError, match=f"needs the columns {column},"):
            draw(table.drop(columns=column))


@each
def test_a_table_without_a_row_or_with_a_value_that_is_no_number_is_refused(name):
    draw, table = FIGURES[name]
    with pytest.raises(ValueError, match="without a row"):
        draw(table.iloc[:0])
    for column in table.select_dtypes("number").columns.difference(["prompt"]):
        broken = table.reset_index(drop=True).astype({column: float})
        broken.loc[0, column] = np.nan
        with pytest.raises(ValueError, match=f"{column} holds finite numbers .*, not nan"):
            draw(broken)


@pytest.mark.parametrize("name", sorted(set(FIGURES) - {"similarity, pairs", "scheduling_ratios", "switching"}))
def test_two_rows_for_one_mark_are_refused(name):
    draw, table = FIGURES[name]
    with pytest.raises(ValueError, match="There are two rows for"):
        draw(pd.concat([table, table.iloc[:1]]))


@pytest.mark.parametrize("name", ["prefill_and_decode", "graph_sizes", "draft_lengths, costs", "memory", "breakdown"])
def test_a_source_names_one_kind(name):
    draw, table = FIGURES[name]
    for source in ("this CPU", "measured and simulated"):
        with pytest.raises(ValueError, match=f"A source names its kind, .* unlike '{source}'"):
            draw(table.assign(source=source).head(1))
    with pytest.raises(ValueError, match="names its kind"):
        plots.switching(SWITCHES.assign(kind="seen"))


def test_values_out_of_range_are_named():
    with pytest.raises(ValueError, match=r"decode_share .* from 0 to 1, not 80"):
        plots.prefill_and_decode(TIMES.assign(decode_share=80.0))
    with pytest.raises(ValueError, match="There is no pair friends; there are task, group, across"):
        plots.similarity(PAIRS.assign(pair="friends"), SUMMARIES)
    with pytest.raises(ValueError, match="do not add up to 1"):
        plots.similarity(PAIRS, SUMMARIES.assign(distance=0.5))
    with pytest.raises(ValueError, match=r"per_row_ms .* above 0, not 0"):
        plots.draft_lengths(COSTS.assign(per_row_ms=0.0), LENGTHS)
    with pytest.raises(ValueError, match="The shares of PLD do not add up to 1"):
        plots.draft_lengths(COSTS, LENGTHS.head(1))
    with pytest.raises(ValueError, match=r"A speed-up is of sd\.npu, which is none of the arms CPU vanilla"):
        plots.per_token(CELLS[CELLS["arm"] == "CPU vanilla"])
    with pytest.raises(ValueError, match="needs the columns speedup"):
        plots.per_token(CELLS, implied=CELLS)
    with pytest.raises(ValueError, match="There is no part lunch"):
        plots.breakdown(PARTS.head(1).assign(part="lunch"))
    with pytest.raises(ValueError, match=r"None of the methods is PLD\+calibration"):
        plots.gains(GAINS.head(1))


def test_prefill_and_decode_stack_to_one():
    axis = plots.prefill_and_decode(TIMES).axes[0]
    decode, prefill = bars(axis, "decode, wall clock, measured"), bars(axis, "prefill, wall clock, measured")
    assert [bar.get_height() for bar in decode] == [0.8, 0.7]
    assert [bar.get_y() + bar.get_height() for bar in prefill] == [1, 1]
    (simulated,) = bars(axis, "decode, fit, simulated")
    assert simulated.get_height() == 0.9 and simulated.get_x() > decode[0].get_x()
    assert line(axis, "quoted, decode")[:, 1].tolist() == [0.872, 0.902]
    assert line(axis, "quoted, decode of all tasks")[0, 1] == 0.735
    assert [text.get_text() for text in axis.texts] == ["1 s"] * 3
    assert axis.get_ylabel().endswith("(%)")


def test_similarity_shows_pairs_from_near_to_far_and_the_papers_lines():
    pairs, scatter = plots.similarity(PAIRS, SUMMARIES).axes[:2]
    assert line(pairs, "mean")[:, 1] == pytest.approx([0.8, 0.55, 0.3])
    assert line(pairs, "quoted")[:, 1].tolist() == [0.72, 0.61, 0.38]
    assert len(pairs.collections) == 3
    assert line(scatter, "a summary").tolist() == [[0.2, 0.8], [0.4, 0.6]]
    assert line(scatter, "quoted, cosine > 0.76")[0, 1] == 0.76
    assert line(scatter, "quoted, overlap > 0.11")[0, 0] == 0.11


def test_graph_sizes_crosses_what_the_printed_reading_implies():
    axis = plots.graph_sizes(GRAPHS).axes[0]
    curve = printed.npu_curve()
    assert line(axis, "prefill: fit, simulated")[1] == pytest.approx([32, curve(32) / 32])
    assert line(axis, "decode: static graphs, measured")[0] == pytest.approx([32, (8 + 0.9 * 32 + 3) / 4.2])
    assert line(axis, "decode: quoted").tolist() == [[32, 160]]
    assert line(axis, "prefill: quoted, at most").tolist() == [[32, 8]]
    assert line(axis, "prefill that the quoted\ndecode implies")[0] == pytest.approx([32, 21])
    assert (axis.get_xscale(), axis.get_yscale(), axis.get_ylabel()) == ("log", "log", "ms a token")


def test_draft_lengths_counts_the_steps_below_a_length():
    costs, lengths = plots.draft_lengths(COSTS, LENGTHS).axes
    assert line(costs, "fit, simulated").tolist() == [[1, 51.1], [32, 5.7]]
    assert line(costs, "quoted").tolist() == [[1, 51.1], [32, 5.7]]
    assert line(costs, "quoted, 8 against 64")[0] == pytest.approx([8, 9.935], rel=1e-3)
    assert costs.get_ylabel() == "ms a token"
    found = dict(line(lengths, "PLD, measured"))
    assert (found[0], found[1], found[10], found[11]) == (0, 0.6, 0.6, 1)
    assert dict(line(lengths, "SAM, measured"))[3] == 0 and dict(line(lengths, "SAM, measured"))[11] == 1
    assert line(lengths, "quoted, more than").tolist() == [[8, 0.75], [32, 0.9]]


def test_per_token_draws_times_and_the_speedups_that_they_make():
    quoted = by_hand("model arm task per_token_ms", ("larger", "NPU vanilla", "summary", 57.41))
    implied = by_hand("model arm task speedup", ("larger", "CPU vanilla", "rag", 1.5), ("small", "NPU-SAM", "rag", 9.0))
    times, ratios = plots.per_token(CELLS, quoted, implied).axes
    assert [bar.get_height() for bar in bars(times, "sd.npu")] == [60, 90]
    assert np.nanmax(line(times, "quoted, end to end")) == 57.41
    assert times.get_ylabel() == "ms a token, decoding"
    assert line(ratios, "summary")[:, 1] == pytest.approx([3]) and line(ratios, "rag")[:, 1] == pytest.approx([3])
    drawn = [float(y) for one in ratios.lines for y in one.get_ydata()]
    assert 1.5 in drawn and 9 not in drawn and drawn.count(pytest.approx(50 / 60)) == 2
    (band,) = bars(ratios, "quoted, range")
    assert (band.get_y(), band.get_y() + band.get_height()) == pytest.approx((1.14, 3.81))
    assert plots.per_token(CELLS, value="per_token_ms").axes[0].get_ylabel() == "ms a token, end to end"


def test_energy_has_a_panel_for_each_model_and_assumption():
    both = pd.concat([JOULES, JOULES.assign(assumption="other powers", joules_over_ours=7.0)])
    first, second = plots.energy(both).axes
    assert (first.get_title(), second.get_title()) == ("larger, one power", "larger, other powers")
    assert line(first, "summary")[0, 1] == pytest.approx(3.6) and line(second, "rag")[0, 1] == 7
    assert [tick.get_text() for tick in first.get_xticklabels()] == ["NPU\nvanilla", "CPU\nvanilla", "NPU-\nSAM"]
    assert bars(first, "quoted, range")[0].get_y() == 1.35


def test_memory_draws_the_papers_values_on_its_own_model():
    ours, paper = plots.memory(MEMORY).axes
    assert [bar.get_width() for bar in bars(ours, "measured")] == [400, 450]
    assert [bar.get_width() for bar in bars(paper, "weights, analytic")] == [3087]
    names = [tick.get_text() for tick in paper.get_yticklabels()]
    drawn = {names[int(one.get_ydata()[0])]: [*one.get_xdata()] for one in paper.lines}
    assert drawn["NPU vanilla"] == pytest.approx([3050, 3120]) and drawn["CPU vanilla"] == [6000, 6000]
    assert not ours.lines and paper.get_xlabel() == "memory (MB)"
    assert len(plots.memory(MEMORY.head(2)).axes) == 2


def test_breakdown_stacks_the_parts_in_order():
    simulated, measured = plots.breakdown(PARTS).axes
    forward = bars(simulated, "forward")
    assert [(bar.get_x(), bar.get_width()) for bar in forward] == [(300, 700), (360, 200)]
    assert bars(simulated, "calibration")[1].get_width() == 50
    assert bars(measured, "forward")[0].get_width() == 90

    def drawn(label):
        (found,) = [one for one in simulated.lines if one.get_label() == label]
        return [*found.get_xdata()]

    assert drawn("quoted, decoding begins") == pytest.approx([330, 260])
    assert drawn("quoted, decoding ends") == pytest.approx([350 + 700 / 5.25, 350 + 700 / 8.15])
    assert not measured.lines and measured.get_xlabel() == "ms a request"


def test_rejections_draws_shares_intervals_and_counts():
    missing, redundant = plots.rejections(CAUSES).axes
    assert redundant.containers[0].lines[0].get_xdata().tolist() == [0.9]
    (interval,) = missing.containers[0].lines[2][0].get_segments()
    assert interval[:, 0] == pytest.approx([0.05, 0.2])
    assert line(missing, "quoted, of at least 13 rejections")[0, 0] == 0.154
    assert missing.get_yticklabels()[0].get_text() == "summary, 100"


def test_gains_start_at_one_and_stand_by_drafter():
    quoted = printed.acceptance({printed.BOTH: "larger"}, {"summary": "summary"})
    pld, sam = plots.gains(GAINS, quoted).axes
    ends = {
        label: [bar.get_y() + bar.get_height() for bar in bars(pld, label)] for label in ("calibration alone", "both")
    }
    assert ends["calibration alone"] == pytest.approx([1.07]) and ends["both"] == pytest.approx([1.2])
    (reuse,) = bars(sam, "reuse alone")
    assert reuse.get_y() + reuse.get_height() == pytest.approx(0.99)
    assert not bars(pld, "reuse alone") and not bars(sam, "both")
    assert line(pld, "quoted, both")[0, 1] == pytest.approx(2.91 / 2.53)
    assert line(sam, "quoted, both")[0, 1] == pytest.approx(4.21 / 3.60)
    (band,) = [patch for patch in pld.patches if patch.get_label() == "quoted, range of both"]
    assert (band.get_y(), band.get_y() + band.get_height()) == pytest.approx((1.05, 1.25))


def test_scheduling_ratios_is_a_box_a_rule_in_each_family():
    figure = plots.scheduling_ratios(RATIOS)
    (axis,) = figure.axes
    medians = [one.get_ydata()[0] for one in axis.lines if len(one.get_ydata()) == 2 and one.get_color() == "#000000"]
    assert {1.2, 1.6, 1.1} <= {round(float(value), 6) for value in medians}
    assert words(figure) == ["simulated", "greedy", "synchronous"]
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["alike", "mixed"]


def test_switching_shows_medians_in_milliseconds():
    exposed, whole = plots.switching(SWITCHES).axes
    assert [bar.get_width() for bar in bars(exposed, "median, measured")] == pytest.approx([600, 50])
    assert [bar.get_width() for bar in bars(whole, "median, simulated")] == pytest.approx([1400])
    assert sorted(line(exposed, "a run")[:, 0]) == pytest.approx([50, 500, 600, 700])
    drawn = [one.get_xdata()[0] for one in exposed.lines if one.get_label() == "quoted, 94.9 % of the rest"]
    assert drawn == pytest.approx([949, 949])
    assert (exposed.get_xlabel(), whole.get_xlabel()) == ("exposed load time (ms)", "prefill and switch (ms)")


def test_sensitivity_is_over_the_slope_and_over_the_constant():
    figure = plots.sensitivity(SPEEDUPS)
    axes = np.reshape(figure.axes, (2, 3))
    for axis, column in zip(axes[0], ("over_sam", "over_vanilla", "over_one_row"), strict=True):
        rows = SPEEDUPS[(SPEEDUPS["shape"] == 32) & (SPEEDUPS["constant_ms"] == 0)]
        assert line(axis, "32 rows") == pytest.approx(rows[["ratio", column]].to_numpy())
    rows = SPEEDUPS[(SPEEDUPS["shape"] == 16) & (SPEEDUPS["ratio"] == 0.09)]
    assert line(axes[1, 1], "16 rows") == pytest.approx(rows[["constant_ms", "over_vanilla"]].to_numpy())
    assert line(axes[0, 0], "the fit's slope")[0, 0] == pytest.approx(printed.npu_curve().ratio)
    (band,) = [patch for patch in axes[0, 0].patches if patch.get_label() == "quoted, range"]
    assert (band.get_y(), band.get_y() + band.get_height()) == pytest.approx(printed.OVER_SAM)
    assert len(plots.sensitivity(SPEEDUPS[SPEEDUPS["constant_ms"] == 0]).axes) == 3


def test_a_figure_can_be_drawn_small(tmp_path):
    for name, (draw, table) in FIGURES.items():
        figure = draw(table)
        figure.savefig(tmp_path / "a.png")
        assert figure.get_size_inches()[0] <= 9.1, name
        plt.close(figure)

"""DRAGON's figures: each draws what its tables hold, names units and kinds, and refuses wrong tables."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt

from ondevice.dragon import analysis, plots, printed, replays
from ondevice.plotting import COLOURS, use_style


@pytest.fixture(autouse=True)
def style():
    with mpl.rc_context():
        use_style()
        yield
    plt.close("all")


def by_hand(columns: str, *rows: tuple) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=columns.split())


CURVES = analysis.difference_curves([0.1, 0.6, 1.0], [(0.2, 0.8), (0.8, 0.2)], tokens=20)
BARS, TOKENS = analysis.pipelines(3)
SURFACE = analysis.speedups([0.5, 1.0, 2.0], [1.0, 3.0], [0.0, 0.5, 1.0])
POINTS = analysis.speedups([0.5, 2.0], [1.0, 3.0], [0.5], simulated=True, tokens=20)
WAITING = analysis.waiting_times(tokens=100)
PERPLEXITY = by_hand(
    "method documents perplexity low high model corpus",
    ("no retrieval", 0, 12.0, 11.9, 12.1, "small", "docs"),
    ("DRAGON", 2, 11.5, 11.4, 11.6, "small", "docs"),
    ("DRAGON", 16, 11.0, 10.9, 11.1, "small", "docs"),
    ("context, equal compute", 2, 11.7, 11.6, 11.8, "small", "docs"),
    ("context, equal compute", 16, 11.2, 11.1, 11.3, "small", "docs"),
)
LATENCY = by_hand(
    "method delay_ms per_token_ms low high model pace",
    ("DRAGON", 0, 50.0, 48.0, 52.0, "small", "unpaced"),
    ("DRAGON", 300, 60.0, 58.0, 62.0, "small", "unpaced"),
    ("CRCG/Device", 0, 45.0, 44.0, 46.0, "small", "unpaced"),
    ("DRAGON", 0, 250.0, 240.0, 260.0, "small", "paper's pace imposed"),
    ("DRAGON", 300, 280.0, 270.0, 290.0, "small", "paper's pace imposed"),
)
TTFT = by_hand(
    "method delay_ms ttft_ms low high model",
    ("DRAGON", 0, 100.0, 95.0, 105.0, "small"),
    ("DRAGON", 300, 102.0, 97.0, 107.0, "small"),
    ("DRCG/Text", 0, 900.0, 880.0, 920.0, "small"),
    ("DRCG/Text", 300, 1500.0, 1450.0, 1550.0, "small"),
)
SCHEDULES = replays.summary(replays.replay(replays.drawn(2), 0.26, 0.02, (0.0, 400.0))).assign(
    setting=f"drawn, {printed.OPT}"
)
CASE = replays.case_study()
LIVE = by_hand(
    "method pace delay_ms measured_ms low high simulated_ms",
    ("DRAGON", "unpaced", 0, 50.0, 48.0, 52.0, 51.0),
    ("DRAGON", "unpaced", 300, 60.0, 58.0, 62.0, 66.6),
    ("DRDG/TW", "unpaced", 0, 55.0, 53.0, 58.0, 52.0),
)
FIGURES = {
    "difference": (plots.difference, CURVES),
    "pipelines, bars": (lambda t: plots.pipelines(t, TOKENS), BARS),
    "pipelines, tokens": (lambda t: plots.pipelines(BARS, t), TOKENS.drop(columns="position")),
    "speedup, surface": (lambda t: plots.speedup(t, POINTS), SURFACE),
    "speedup, points": (lambda t: plots.speedup(SURFACE, t), POINTS),
    "waiting": (plots.waiting, WAITING.drop(columns=["cases", "largest_gap_s"])),
    "perplexity": (plots.perplexity, PERPLEXITY),
    "perplexity, quoted": (lambda t: plots.perplexity(PERPLEXITY, t), printed.perplexity()),
    "per_token": (plots.per_token, LATENCY),
    "ttft": (plots.ttft, TTFT),
    "ttft, quoted": (lambda t: plots.ttft(TTFT, t), printed.ttft()),
    "scheduling": (plots.scheduling, SCHEDULES["setting strategy delay_ms total_s low high over_oracle".split()]),  # noqa: SIM905
    "case_study, events": (lambda t: plots.case_study(t, *CASE[1:]), CASE.events),
    "case_study, decisions": (
        lambda t: plots.case_study(CASE.events, t, CASE.delays),
        CASE.decisions.drop(columns="moved"),
    ),
    "case_study, delays": (lambda t: plots.case_study(*CASE[:2], t), CASE.delays),
    "validation": (plots.validation, LIVE),
}
each = pytest.mark.parametrize("name", FIGURES)


def words(figure) -> list[str]:
    """The legends' entries and titles, and those of the panels."""
    legends = [*figure.legends, *(axis.get_legend() for axis in figure.axes if axis.get_legend())]
    told = [text.get_text() for one in legends for text in [one.get_title(), *one.get_texts()]]
    return told + [axis.get_title(place) for axis in figure.axes for place in ("left", "center")]


def line(axis, label: str) -> np.ndarray:
    """[n, 2] points of the one line of this label."""
    (found,) = [one for one in axis.lines if one.get_label() == label]
    return np.column_stack([found.get_xdata(orig=False), found.get_ydata(orig=False)]).astype(float)


@each
def test_a_figure_names_its_kinds_and_what_its_axes_show(name):
    draw, table = FIGURES[name]
    if name == "case_study, decisions":
        table = CASE.decisions
    figure = draw(table)
    shown = [axis.get_xlabel() + axis.get_ylabel() for axis in figure.axes] + [figure.get_supxlabel()]
    assert sum(map(bool, shown)) and any("(" in text or "over" in text for text in shown)
    if name != "validation":  # there the axes say it
        assert any(kind in text for kind in ("measured", "simulated", "replayed") for text in words(figure))


@each
def test_a_table_that_lacks_a_column_is_refused(name):
    draw, table = FIGURES[name]
    optional = {"bars": {"position"}}.get(name.split(", ")[-1], set())
    for column in set(table) - optional:
        if name.endswith("quoted") and column == "corpus":
            continue  # a panel is then a model
        with pytest.raises(ValueError, match=f"needs the columns {column}[,.]| {column},"):
            draw(table.drop(columns=column))


@each
def test_a_table_without_a_row_or_with_a_value_that_is_no_number_is_refused(name):
    draw, table = FIGURES[name]
    with pytest.raises(ValueError, match="without a row"):
        draw(table.iloc[:0])
    for column in table.select_dtypes("number"):
        broken = table.reset_index(drop=True).astype({column: float})
        broken.loc[0, column] = np.nan
        with pytest.raises(ValueError, match=f"{column} holds finite numbers .*, not nan"):
            draw(broken)


@pytest.mark.parametrize("name", ["perplexity", "per_token", "ttft", "scheduling", "validation", "ttft, quoted"])
def test_two_rows_for_one_mark_are_refused(name):
    draw, table = FIGURES[name]
    with pytest.raises(ValueError, match="There are two rows for"):
        draw(pd.concat([table, table.iloc[:1]]))


def test_what_a_figure_cannot_draw_is_named():
    with pytest.raises(ValueError, match="points at rtt 3, where there is no surface"):
        plots.speedup(SURFACE[SURFACE["rtt"] == 1], POINTS)
    with pytest.raises(ValueError, match="no strategy Luck; there are Cloud"):
        plots.scheduling(SCHEDULES.assign(strategy="Luck").head(1))


def test_difference_draws_lines_and_dots_of_one_colour():
    axis = plots.difference(CURVES).axes[0]
    analytic = line(axis, r"$\alpha^l$ = 0.2, $\alpha^r$ = 0.8, analytic")
    assert analytic[[0, -1], 1] == pytest.approx([0.06, -0.24])
    dots = [one for one in axis.lines if "simulated" in str(one.get_label())]
    assert len(dots) == 2 and all(len(one.get_xdata()) == 3 for one in dots)
    colours = [one.get_color() for one in axis.lines if "alpha" in str(one.get_label())]
    assert colours[0] == colours[1] != colours[2] == colours[3]


def test_pipelines_draws_every_decode_and_message():
    accepted, rejected = plots.pipelines(BARS, TOKENS).axes
    for axis, case in ((accepted, "all accepted"), (rejected, "all rejected")):
        bars = BARS[BARS["case"] == case]
        assert len(axis.patches) == (bars["what"] == "decode").sum()
        drafts, targets = (np.column_stack(one.get_data()).reshape(-1, 3, 2)[:, :2] for one in axis.lines[:2])
        assert len(drafts) == (bars["what"] == "draft").sum() and len(targets) == 3
        assert np.ptp(drafts[:, :, 0], axis=1) == pytest.approx(1.8) and (drafts[:, 0, 1] > drafts[:, 1, 1]).all()
        assert np.ptp(targets[:, :, 0], axis=1) == pytest.approx(1.5) and (targets[:, 0, 1] < targets[:, 1, 1]).all()
    assert accepted.get_title("left") == "all accepted: Eq. 7 gives 2 s a token (analytic)"
    assert "4.3 s" in [text.get_text() for text in rejected.texts]
    colours = {mpl.colors.to_hex(bar.get_facecolor(), keep_alpha=False).upper() for bar in rejected.patches}
    assert COLOURS["red"] in colours and COLOURS["sky"] not in colours


def test_speedup_draws_the_curve_nearest_to_the_points():
    figure = plots.speedup(SURFACE, POINTS)
    below = figure.axes[2:4]
    assert line(below[1], r"$\alpha^r$ = 0.5, analytic")[0] == pytest.approx([0.5, 1 / (1 - 0.5 * 3 / 4)])
    assert len(line(below[0], r"$\alpha^r$ = 0.5, simulated")) == 2
    assert figure.axes[0].get_title() == "rtt = 1 $c^r$"


def test_waiting_puts_formulas_on_the_simulated_bars():
    left, right = plots.waiting(WAITING).axes
    assert [bar.get_width() for bar in left.patches] == pytest.approx([2, 4.3, 2, 4.3])
    assert line(left, "formula, analytic")[:, 0] == pytest.approx([2, 4.3, 2, 4.3])
    assert line(right, "formula, analytic")[:, 0] == pytest.approx(WAITING["formula_s"].to_numpy())
    assert left.get_yticklabels()[0].get_text().startswith("$x^l$ rejected, $x^r$ accepted\n$\\max(c^l")


def test_ours_and_the_papers_have_panels_of_their_own():
    ours, qwen, opt = (axis for axis in plots.perplexity(PERPLEXITY, printed.perplexity()).axes if axis.get_visible())
    assert ours.get_title() == "small, docs (measured)"
    assert (qwen.get_title(), opt.get_title()) == (
        f"{printed.QWEN}, wikitext-2\n(quoted)", f"{printed.OPT}, wikitext-103\n(quoted)",
    )  # fmt: skip
    assert line(ours, "DRAGON").tolist() == [[2, 11.5], [16, 11.0]]
    assert line(ours, "no retrieval").tolist() == [[0, 12], [16, 12]]
    assert line(qwen, "DRAGON")[-1] == pytest.approx([16, 10.257], abs=1e-3)
    assert len(ours.collections) >= 2  # intervals


def test_the_paper_begins_a_row_where_ours_and_its_panels_are_many():
    wide = pd.concat([LATENCY, LATENCY.assign(model="base")])
    figure = plots.per_token(wide, printed.per_token())
    shown = [axis for axis in figure.axes if axis.get_visible()]
    rows = [axis.get_subplotspec().rowspan.start for axis in shown]
    assert rows == [0, 0, 0, 0, 1, 1] and [("quoted" in axis.get_title()) for axis in shown] == [False] * 4 + [True] * 2
    assert all(axis.get_ylim()[0] == 0 for axis in shown)
    assert line(shown[0], "CRCG/Device").tolist() == [[0, 45], [300, 45]]


def test_every_method_has_a_look_of_its_own():
    names = ["DRAGON", "one", "DRDG/TW", "two", "three", "CRCG/Device", "CRCG/Cloud"]
    looks = plots._method_styles(names)
    assert list(looks) == names and len(set(looks.values())) == len(names)
    assert looks["DRAGON"] == plots._method_styles(["one", "DRAGON"])["DRAGON"]


def test_ttft_is_logarithmic():
    figure = plots.ttft(TTFT, printed.ttft())
    assert [axis.get_yscale() for axis in figure.axes] == ["log"] * 3
    assert line(figure.axes[2], "DRCG/KV")[-1] == pytest.approx([300, 16762.8])


def test_scheduling_puts_the_papers_totals_on_its_own_setting():
    other = SCHEDULES.assign(setting="recorded, by hand")
    figure = plots.scheduling(pd.concat([SCHEDULES, other]), printed.scheduling())
    drawn, recorded, ratios, _ = figure.axes
    hollow = [one for one in drawn.lines if one.get_markerfacecolor() == "none" and len(one.get_xdata())]
    assert len(hollow) == 4 and not [one for one in recorded.lines if one.get_markerfacecolor() == "none"]
    assert sorted(float(one.get_ydata()[-1]) for one in hollow) == pytest.approx([36.0658, 41.0632, 42.8482, 46.665])
    assert line(ratios, "oracle, lower bound")[:, 1].tolist() == [1, 1]
    assert "quoted, in the shape of each" in words(figure)


def test_case_study_has_a_column_a_case_and_the_papers():
    figure = plots.case_study(*CASE, printed.case_events(), printed.case_decisions())
    titles = [axis.get_title() for axis in figure.axes[:3]]
    assert titles == ["recorded (replayed)", "exchanged (replayed)", "the paper's (quoted)"]
    exchanged, quoted = figure.axes[7:9]
    for axis in (exchanged, quoted):
        first, others = (one.get_offsets()[:, 1].tolist() for one in axis.collections)
        assert len(first) == 1 and first[0] > 0.7 and len(others) == 14 and max(others) < 0
    assert len(plots.case_study(*CASE).axes) == 8


def test_validation_draws_the_ratio_and_the_tolerance():
    left, right = plots.validation(LIVE).axes
    assert line(left, "DRAGON, unpaced").tolist() == [[0, 51 / 50], [300, pytest.approx(1.11)]]
    (band,) = [patch for patch in left.patches if patch.get_label() == "within 10%"]
    assert (band.get_y(), band.get_y() + band.get_height()) == pytest.approx((0.9, 1.1))
    assert right.get_xlabel().startswith("measured") and right.get_ylabel().startswith("simulated")

"""DRAGON's transcribed numbers under our names, and what they say of each other, which others would not."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from ondevice import assets
from ondevice.dragon import printed
from ondevice.dragon.printed import OPT, QWEN

STEMS = sorted(path.stem for path in assets.data("paper", "dragon").glob("*.csv"))


@pytest.fixture
def altered(monkeypatch):
    """Multiplies one column of one file, in the rows that a query finds."""
    original = assets.paper_table

    def put(stem: str, column: str, factor: float, query: str) -> None:
        def table(paper: str, asked: str) -> pd.DataFrame:
            found = original(paper, asked)
            if asked == stem:
                rows = found.query(query).index
                assert len(rows)
                found.loc[rows, column] *= factor
            return found

        monkeypatch.setattr(assets, "paper_table", table)

    return put


def of(table: pd.DataFrame, **where: object) -> pd.Series:
    """The one row of a table with these values."""
    for column, value in where.items():
        table = table[table[column] == value]
    (row,) = table.to_dict("records")
    return pd.Series(row)


# The transcription


@pytest.mark.parametrize("stem", STEMS)
def test_every_file_says_where_its_numbers_come_from(stem):
    table = assets.paper_table("dragon", stem)
    assert len(table) and table["source"].notna().all() and table["source"].str.len().min() > 5
    assert not table.drop(columns="source").duplicated().any()


def test_the_figures_are_whole():
    assert len(STEMS) == 18
    assert printed.perplexity().groupby("model")["documents"].max().to_dict() == {OPT: 16, QWEN: 16}
    assert printed.perplexity()["method"].nunique() == 5 and len(printed.perplexity()) == 66
    assert len(printed.per_token()) == 46 and len(printed.ttft()) == 70 and len(printed.scheduling()) == 40
    assert printed.ttft()["ttft_ms"].between(50, 20_000).all()
    assert not printed.per_token().duplicated(["model", "method", "delay_ms"]).any()
    assert len(printed.waiting_formulas()) == 4


def test_latencies_have_intervals_where_their_runs_are_published():
    table = printed.per_token()
    known = table.dropna()
    assert len(known) == 26 and (known["low"] < known["per_token_ms"]).all()
    row = of(known, model=OPT, method="DRAGON", delay_ms=300)
    assert row["high"] - row["per_token_ms"] == pytest.approx(1.96 * 95.341 / np.sqrt(95), rel=1e-3)


def test_schedulings_intervals_are_of_the_printed_errors():
    row = of(printed.scheduling(), model=QWEN, strategy="DRAGON", delay_ms=400)
    assert (row["total_s"], row["high"] - row["low"]) == pytest.approx((34.9626, 2 * 1.96 * 1.6088))


def test_figure_10_has_a_bar_for_each_event():
    events, decisions = printed.case_events(), printed.case_decisions()
    assert set(events["what"]) == {"decode", "draft", "target", "switch"} and len(events) == 100
    assert (events["end_s"] > events["begin_s"]).all()
    assert ((events["what"] == "decode") == (events["to"] == "")).all()
    assert ((events["what"] == "decode") == (events["position"] >= 0)).all()
    assert decisions["moved"].tolist() == [True] + [False] * 14


# Recordings


def test_figure_10_and_opts_figure_9_have_the_paces_of_one_run():
    paces = printed.paces(printed.CASE_PACES)
    events = printed.case_events()
    decodes = events[(events["what"] == "decode") & (events["side"] == "device")].drop_duplicates("position")
    times = (decodes["end_s"] - decodes["begin_s"]).to_numpy()
    assert times == pytest.approx(paces.device[:15], abs=2e-6)
    assert paces.cloud == pytest.approx(0.019756, abs=1e-6)


@pytest.mark.parametrize("model", [QWEN, OPT])
def test_the_least_totals_of_figure_9_are_the_sums_of_these_recordings(model):
    table = assets.paper_table("dragon", "fig_09_all_strategies_summary")
    table = table[(table["model"] == model) & (table["aggregation"] == "DRAGON")]
    least = table["total_time_s_min"].min()
    assert least == pytest.approx(printed.paces(printed.RECORDINGS[model]).device.sum(), abs=0.05)
    others = [run for run in printed.RECORDINGS.values() if run != printed.RECORDINGS[model]]
    assert abs(printed.paces(others[0]).device.sum() - least) > 1


def test_what_figure_9_calls_opt_decodes_half_as_fast():
    device = of(printed.per_token(), model=OPT, method="CRCG/Device")["per_token_ms"]
    assert 1e3 * printed.paces(printed.RECORDINGS[OPT]).device.mean() > 2 * device


def test_a_run_without_paces_is_refused_and_the_known_ones_are_named():
    with pytest.raises(ValueError, match=f"'lunch'; there are of .*{printed.CASE_PACES}"):
        printed.paces("lunch")


def test_three_of_the_recorded_traces_are_distinct():
    traces = printed.acceptance_traces()
    assert len(traces) == 3 and all(flags.shape[1] == 2 and len(flags) >= 99 for flags in traces.values())
    rates = np.array([flags.mean(0) for flags in traces.values()])
    assert rates[:, 1].min() > 0.98 and rates[:, 0].max() < 0.83  # the cloud's drafts are nearly all accepted
    stored = assets.paper_table("dragon", "acceptance_rates").filter(like="_draft_acceptance_rate")
    for device, cloud in rates:
        assert (np.abs(stored - (device, cloud)).max(axis=1) < 1e-6).any()


def test_the_drawn_rates_are_told_from_the_totals(altered):
    rates = printed.drawn_rates()
    assert rates.shape == (50, 2) and np.array_equal(rates, printed.drawn_rates(OPT))
    assert (rates == 0.49).sum(0).tolist() == [23, 32] and set(rates.ravel()) == {0.49, 0.99}
    first = rates[0].tolist()
    assert first == [0.99, 0.49]  # with the device aggregating it took 47.6 s, with the cloud 27.7 s
    altered("fig_09_per_sequence_400_ms", "device_total_s", 0.5, "sequence_index == 0")
    assert printed.drawn_rates()[0].tolist() == [0.99, 0.99]
    with pytest.raises(ValueError, match="not 'GPT-2'"):
        printed.drawn_rates("GPT-2")


# What the numbers say of each other


def test_the_printed_sizes_of_the_kv_cache_do_not_compute():
    assert (printed.kv_megabytes(OPT), printed.kv_megabytes(QWEN)) == pytest.approx((50.33, 7.34), abs=0.01)
    assert printed.kv_megabytes(OPT, width=2) == pytest.approx(25.2, abs=0.05)
    with pytest.raises(ValueError, match="not 'GPT-2'"):
        printed.kv_megabytes("GPT-2")

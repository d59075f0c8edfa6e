"""The committed traces are consistent, and the stand-ins keep what they promise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ondevice import assets
from ondevice_studies.disco import traces


def test_every_series_has_both_metrics_at_ascending_levels_and_times():
    table = assets.derived_trace("api_quantiles")
    groups = table.groupby(["series", "metric"])
    assert len(groups) == 2 * len(traces.series_names())
    for _, rows in groups:
        assert np.all(np.diff(rows["level"]) > 0)
        assert rows["level"].between(0, 1, inclusive="neither").all()
        assert np.all(np.diff(rows["seconds"]) >= 0)
        assert (rows["seconds"] > 0).all()


@pytest.mark.parametrize("service", traces.PAPER_SERVICES)
def test_the_stand_ins_body_is_the_log_normal_of_table_5(service):
    row = assets.derived_trace("paper_implied_ttft").set_index("trace").loc[service]
    server = traces.inferred(service, 4000)
    assert server.quantile(0.5) == pytest.approx(np.exp(row.implied_logn_mu), rel=0.01)
    tenth = row.implied_logn_mu + 1.2816 * row.implied_logn_sigma
    assert server.quantile(0.9) == pytest.approx(np.exp(tenth), rel=0.01)


@pytest.mark.parametrize("service", ["GPT", "Command"])
def test_where_table_3_implies_a_tail_the_stand_in_has_its_p99(service):
    row = assets.derived_trace("paper_implied_ttft").set_index("trace").loc[service]
    assert traces.inferred(service, 10_000).quantile(0.99) == pytest.approx(row.implied_tm_s, rel=0.01)
    assert row.implied_tm_s > 1.5 * row.implied_body_p99_s


def test_a_server_is_found_by_either_kind_of_name():
    assert traces.server("GPT").samples.size == 1000
    np.testing.assert_array_equal(traces.server("groq-70b").samples, traces.measured("groq-70b").samples)


def test_values_like_a_series_have_its_marginal():
    values, server = traces.ttft_like("bedrock-13b", 20_000, np.random.default_rng(0)), traces.measured("bedrock-13b")
    for q in (0.1, 0.5, 0.9, 0.99):
        assert np.quantile(values, q) == pytest.approx(server.quantile(q), rel=0.05)
    assert server.samples[0] <= values.min()
    assert values.max() <= server.samples[-1]


@pytest.mark.parametrize("series", ["replicate-70b", "bedrock-70b", "together-70b"])
def test_values_like_a_series_have_its_autocorrelation(series):
    values = traces.ttft_like(series, 20_000, np.random.default_rng(1))
    measured = assets.derived_trace("ttft_dependence").query("series == @series").sort_values("lag")["autocorrelation"]
    ranks = np.argsort(np.argsort(values))
    found = [np.corrcoef(ranks[:-lag], ranks[lag:])[0, 1] for lag in (1, 2, 5)]
    assert found == pytest.approx(measured.iloc[[0, 1, 4]].tolist(), abs=0.07)


@pytest.mark.parametrize("user", range(10))
def test_arrival_gaps_have_the_mean_asked_for_and_the_users_burstiness(user):
    row = traces.users().set_index("user").loc[user]
    gaps = traces.arrival_gaps(user, 30.0, 40_000, np.random.default_rng(0))
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(30.0, rel=0.05)
    if row.distribution == "Gamma":
        assert gaps.std() / gaps.mean() == pytest.approx(row["shape"] ** -0.5, rel=0.05)


@pytest.mark.skipif(not ((assets.local_data() or Path()) / "traces").is_dir(), reason="needs the raw traces")
def test_the_committed_tables_are_what_the_raw_traces_give():
    folder = assets.local_data() / "traces"
    for name, table in traces._derive(folder).items():
        assert table.to_csv(index=False) == assets.data("traces", f"{name}.csv").read_text(), name


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: traces.measured("openai-7b"), "'openai-7b'.*anyscale-13b"),
        (lambda: traces.inferred("Gemini"), "'Gemini'.*GPT"),
        (lambda: traces.arrival_gaps(10, 30.0, 5, np.random.default_rng(0)), "10"),
    ],
)
def test_unknown_names_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()

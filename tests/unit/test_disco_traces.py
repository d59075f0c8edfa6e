"""The committed traces are consistent, and the stand-ins keep what they promise."""

from __future__ import annotations

import numpy as np
import pytest

from ondevice import assets
from ondevice.disco import traces

NO_TAIL = ["DeepSeek", "LLaMA"]


@pytest.fixture
def without_raw_traces(monkeypatch):
    monkeypatch.setattr(assets, "local_file", lambda relative: None)


def test_every_series_has_both_metrics_at_ascending_levels_and_times():
    table = assets.derived_trace("api_quantiles")
    groups = table.groupby(["series", "metric"])
    assert len(groups) == 2 * len(traces.series_names())
    for _, rows in groups:
        assert np.all(np.diff(rows["level"]) > 0)
        assert rows["level"].between(0, 1, inclusive="neither").all()
        assert np.all(np.diff(rows["seconds"]) >= 0)
        assert (rows["seconds"] > 0).all()


def test_every_series_is_long_enough_for_a_p99():
    assert min(traces.measured(name).samples.size for name in traces.series_names()) >= traces.MINIMUM_ROWS


def test_length_counts_are_positive_and_unique():
    table = assets.derived_trace("length_counts")
    assert (table["count"] > 0).all()
    assert (table["tokens"] > 0).all()
    assert not table.duplicated(["source", "field", "tokens"]).any()


def test_alpaca_prompts_have_the_length_statistics_of_the_notes():
    lengths = traces.lengths()
    assert lengths.counts.sum() == 999
    assert lengths.mean == pytest.approx(18.4, abs=0.05)
    assert lengths.support[-1] == 163


def test_every_field_of_a_source_counts_the_same_prompts():
    totals = assets.derived_trace("length_counts").groupby(["source", "field"])["count"].sum().unstack()
    assert (totals.nunique(axis=1) == 1).all()


def test_dependence_has_ten_correlations_for_each_series():
    table = assets.derived_trace("ttft_dependence")
    assert sorted(table["series"].unique()) == traces.series_names()
    assert (table.groupby("series")["lag"].apply(list).map(sorted).map(lambda lags: lags == list(range(1, 11)))).all()
    assert table["autocorrelation"].abs().le(1).all()


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


@pytest.mark.parametrize("service", ["GPT", "Command"])
def test_the_stand_ins_tail_joins_its_body_without_a_jump(service):
    samples = traces.inferred(service, 10_000).samples
    assert np.diff(np.log(samples[9600:9900])).max() < 0.02


@pytest.mark.parametrize("service", NO_TAIL)
def test_elsewhere_the_stand_in_has_the_bodys_p99(service):
    row = assets.derived_trace("paper_implied_ttft").set_index("trace").loc[service]
    assert traces.inferred(service, 10_000).quantile(0.99) == pytest.approx(row.implied_body_p99_s, rel=0.02)


def test_a_server_is_found_by_either_kind_of_name():
    assert traces.server("GPT").samples.size == 1000
    np.testing.assert_array_equal(traces.server("groq-70b").samples, traces.measured("groq-70b").samples)


def test_without_raw_traces_the_order_is_simulated_with_the_series_marginal(without_raw_traces):
    values, kind = traces.ttft_in_order("bedrock-13b", 20_000, np.random.default_rng(0))
    server = traces.measured("bedrock-13b")
    assert kind == "simulated"
    for q in (0.1, 0.5, 0.9, 0.99):
        assert np.quantile(values, q) == pytest.approx(server.quantile(q), rel=0.05)
    assert server.samples[0] <= values.min()
    assert values.max() <= server.samples[-1]


@pytest.mark.parametrize("series", ["replicate-70b", "bedrock-70b", "together-70b"])
def test_the_simulated_order_has_the_measured_autocorrelation(series, without_raw_traces):
    values, _ = traces.ttft_in_order(series, 20_000, np.random.default_rng(1))
    measured = assets.derived_trace("ttft_dependence").query("series == @series").sort_values("lag")["autocorrelation"]
    ranks = np.argsort(np.argsort(values))
    found = [np.corrcoef(ranks[:-lag], ranks[lag:])[0, 1] for lag in (1, 2, 5)]
    assert found == pytest.approx(measured.iloc[[0, 1, 4]].tolist(), abs=0.07)


def test_the_simulated_order_repeats_with_its_seed(without_raw_traces):
    first, second = (traces.ttft_in_order("groq-70b", 50, np.random.default_rng(3))[0] for _ in range(2))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("user", range(10))
def test_arrival_gaps_have_the_mean_asked_for_and_the_users_burstiness(user):
    row = traces.users().set_index("user").loc[user]
    gaps = traces.arrival_gaps(user, 30.0, 40_000, np.random.default_rng(0))
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(30.0, rel=0.05)
    if row.distribution == "Gamma":
        assert gaps.std() / gaps.mean() == pytest.approx(row["shape"] ** -0.5, rel=0.05)


def test_there_are_ten_users_from_least_to_most_active():
    assert traces.users()["user"].tolist() == list(range(10))


@pytest.mark.skipif(assets.local_file("traces/llmperf_leaderboard.csv") is None, reason="needs the raw traces")
def test_the_committed_tables_are_what_the_raw_traces_give():
    folder = assets.local_data() / "traces"
    for name, table in traces._derive(folder).items():
        assert table.to_csv(index=False) == assets.data("traces", f"{name}.csv").read_text(), name


@pytest.mark.skipif(assets.local_file("traces/llmperf_leaderboard.csv") is None, reason="needs the raw traces")
def test_with_raw_traces_the_order_is_replayed():
    values, kind = traces.ttft_in_order("replicate-70b", 10, np.random.default_rng(0))
    assert kind == "replayed"
    np.testing.assert_allclose(np.sort(values), traces.measured("replicate-70b").samples, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: traces.measured("openai-7b"), "No series 'openai-7b'.*there are anyscale-13b"),
        (lambda: traces.measured("groq-70b", "latency"), "metric 'latency'"),
        (lambda: traces.inferred("Gemini"), "no service 'Gemini'; it has GPT"),
        (lambda: traces.server("Gemini"), "No series 'Gemini'"),
        (lambda: traces.lengths("sharegpt"), "No lengths of 'sharegpt'"),
        (lambda: traces.lengths(field="words"), "field 'words'"),
        (lambda: traces.ttft_in_order("openai-7b", 5, np.random.default_rng(0)), "No series 'openai-7b'"),
        (lambda: traces.arrival_gaps(10, 30.0, 5, np.random.default_rng(0)), "No user 10"),
        (lambda: traces.arrival_gaps(1, 0.0, 5, np.random.default_rng(0)), "mean gap"),
    ],
)
def test_unknown_names_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()

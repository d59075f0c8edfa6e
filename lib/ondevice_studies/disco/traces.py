"""Measured latencies, lengths and arrivals: the quantiles, counts and fits of data/traces.

`python -m ondevice_studies.disco.traces` derives data/traces/*.csv from the local data folder;
data/traces/README.md names the sources and their licences.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from ondevice import assets, commands
from ondevice_papers.disco.distributions import Latency, Lengths

MINIMUM_ROWS = 100  # a P99 from fewer requests is one request
PAPER_SERVICES = ("GPT", "LLaMA", "DeepSeek", "Command")
# Above this ratio of implied to body P99, the stand-in gets the heavy tail that Table 3 implies.
_TAIL_RATIO = 1.5
_TAIL_FROM = 0.97


@cache
def _quantiles() -> pd.DataFrame:
    return assets.derived_trace("api_quantiles")


def series_names() -> list[str]:
    """The measured API series, e.g. together-70b, in alphabetical order."""
    return sorted(_quantiles()["series"].unique())


def measured(series: str, metric: str = "ttft_s") -> Latency:
    """Distribution of one API series; metric is ttft_s, or tbt_s for a request's mean time between tokens."""
    rows = _quantiles()
    seconds = rows.loc[(rows["series"] == series) & (rows["metric"] == metric), "seconds"]
    if seconds.empty:
        raise ValueError(f"No series {series!r} with metric {metric!r}; there are {', '.join(series_names())}.")
    return Latency.from_seconds(seconds.to_numpy())


def inferred(service: str, size: int = 1000) -> Latency:
    """Stand-in for one of the paper's four services, whose traces are not public: INFERRED from its Tables 3 and 5.

    A log-normal body that explains Table 5's errors of a moving average; where Table 3's buffers imply a P99 far above
    the body's, the top 3 % follow a log-linear tail through that P99. size: number of equally likely samples.
    """
    table = assets.derived_trace("paper_implied_ttft").set_index("trace")
    if service not in table.index:
        raise ValueError(f"The paper has no service {service!r}; it has {', '.join(PAPER_SERVICES)}.")
    row = table.loc[service]
    levels = (np.arange(size) + 0.5) / size
    log_ttft = row.implied_logn_mu + row.implied_logn_sigma * stats.norm.ppf(levels)
    if row.implied_tm_s / row.implied_body_p99_s > _TAIL_RATIO:
        start = row.implied_logn_mu + row.implied_logn_sigma * stats.norm.ppf(_TAIL_FROM)
        slope = (np.log(row.implied_tm_s) - start) / (0.99 - _TAIL_FROM)
        log_ttft = np.where(levels > _TAIL_FROM, start + slope * (levels - _TAIL_FROM), log_ttft)
    return Latency.from_seconds(np.exp(log_ttft))


def server(name: str) -> Latency:
    """Server TTFT by name: a measured series, or one of the paper's services (inferred)."""
    return inferred(name) if name in PAPER_SERVICES else measured(name)


def pairs() -> pd.DataFrame:
    """How often a prompt of Alpaca and its answer have so many tokens: prompt, answer, count."""
    table = assets.derived_trace("length_pairs")
    return table[table["source"] == "alpaca_en_demo"].drop(columns="source")


def lengths() -> Lengths:
    """Lengths of prompts."""
    table = pairs()
    return Lengths(np.bincount(table["prompt"], weights=table["count"]).astype(np.int64))


def users() -> pd.DataFrame:
    """Ten users from least to most active: inter-arrival distribution (Gamma or Weibull) and its shape."""
    return assets.derived_trace("arrivals")


def arrival_gaps(user: int, mean_gap: float, size: int, rng: np.random.Generator) -> np.ndarray:
    """[size] gaps between a user's requests, seconds, with the user's burstiness and the given mean."""
    table = users().set_index("user")
    if user not in table.index:
        raise ValueError(f"No user {user!r}; there are 0 to {len(table) - 1}.")
    if not 0 < mean_gap < float("inf"):
        raise ValueError(f"A mean gap is a positive number of seconds, not {mean_gap!r}.")
    row = table.loc[user]
    if row.distribution == "Weibull":
        return stats.weibull_min.rvs(
            row["shape"], scale=mean_gap / stats.weibull_min.mean(row["shape"]), size=size, random_state=rng
        )
    return rng.gamma(row["shape"], mean_gap / row["shape"], size)


def ttft_like(series: str, size: int, rng: np.random.Generator) -> np.ndarray:
    """[size] TTFTs with a series' quantiles and the autocorrelation of its normal scores.

    A Gaussian copula over an autoregressive process of the order of the committed lags.
    """
    marginal = measured(series)
    rows = assets.derived_trace("ttft_dependence")
    rho = rows.loc[rows["series"] == series].sort_values("lag")["autocorrelation"].to_numpy()
    order = len(rho)
    toeplitz = np.concatenate([[1.0], rho])[np.abs(np.subtract.outer(np.arange(order), np.arange(order)))]
    weights = np.linalg.solve(toeplitz + 1e-6 * np.eye(order), rho)  # Yule-Walker
    innovation = np.sqrt(max(1e-6, 1.0 - weights @ rho))
    burn_in = 20 * order
    scores = np.zeros(size + burn_in)
    noise = rng.normal(0, innovation, size + burn_in)
    for i in range(order, len(scores)):
        scores[i] = weights @ scores[i - order : i][::-1] + noise[i]
    return np.quantile(marginal.samples, stats.norm.cdf(scores[burn_in:]))


def _api_rows(path: Path) -> pd.DataFrame:
    """Per-request rows of the API measurements that have a valid timing, in issue order, with a `series` column."""
    rows = pd.read_csv(path)
    rows = rows[rows["ttft_s"].notna() & rows["error_code"].fillna(0).isin([0, -100])]
    rows = rows.assign(series=rows["provider"] + "-" + rows["model_size"]).rename(columns={"tbt_mean_s": "tbt_s"})
    enough = rows.groupby("series")["ttft_s"].transform("size") >= MINIMUM_ROWS
    return rows[enough].sort_values(["series", "idx"])


def _derive(folder: Path) -> dict[str, pd.DataFrame]:
    """The committed tables from the raw traces in `folder`."""
    rows = _api_rows(folder / "llmperf_leaderboard.csv")
    quantiles = []
    dependence = []
    for series, group in rows.groupby("series"):
        for metric in ("ttft_s", "tbt_s"):
            seconds = np.sort(group[metric].dropna().to_numpy())
            level = (np.arange(len(seconds)) + 0.5) / len(seconds)
            quantiles.append(
                pd.DataFrame({"series": series, "metric": metric, "level": level.round(5), "seconds": seconds.round(6)})
            )
        scores = stats.norm.ppf((stats.rankdata(group["ttft_s"]) - 0.5) / len(group))
        for lag in range(1, 11):
            r = np.corrcoef(scores[:-lag], scores[lag:])[0, 1]
            dependence.append({"series": series, "lag": lag, "autocorrelation": round(r, 4)})
    return {
        "api_quantiles": pd.concat(quantiles),
        "ttft_dependence": pd.DataFrame(dependence),
        "length_pairs": _length_pairs(pd.read_csv(folder / "alpaca_prompt_lengths.csv")),
        "arrivals": _arrivals(pd.read_csv(folder / "servegen_10clients.csv.gz")),
        "paper_implied_ttft": pd.read_csv(folder / "paper_implied_ttft.csv"),
    }


def _length_pairs(rows: pd.DataFrame) -> pd.DataFrame:
    columns = {"tokens_bare": "prompt", "tokens_reference_output": "answer"}
    counted = rows.rename(columns=columns).value_counts(["source", "prompt", "answer"]).rename("count")
    return counted.reset_index().sort_values(["source", "prompt", "answer"])


def _arrivals(rows: pd.DataFrame) -> pd.DataFrame:
    fits = []
    for user, windows in rows.groupby("user"):
        kind = windows["iat_dist"].mode()[0]
        shape = windows.loc[windows["iat_dist"] == kind, "param1"].median()
        fits.append(
            {
                "user": user,
                "windows": len(windows),
                "mean_rate_rps": round(windows["rate_rps"].mean(), 4),
                "median_iat_cv": windows["iat_cv"].median(),
                "distribution": kind,
                "shape": round(shape, 4),
            }
        )
    return pd.DataFrame(fits)


def main() -> None:
    """Derive the committed tables; needs the local data folder."""
    folder = assets.local_data()
    if folder is None:
        raise ValueError(f"Set {assets.LOCAL_DATA_VARIABLE} to the folder that holds traces/ to derive them again.")
    for name, table in _derive(folder / "traces").items():
        path = assets.data("traces", f"{name}.csv")
        assets.write_text(path, table.to_csv(index=False))
        print(f"{path.relative_to(assets.ROOT)}: {len(table)} rows")


if __name__ == "__main__":
    commands.no_arguments("python -m ondevice_studies.disco.traces", __doc__)
    with commands.refusing("python -m ondevice_studies.disco.traces"):
        main()

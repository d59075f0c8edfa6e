"""What the notebook's exhibits share: recorded windows, answers, latencies and schedules as means with intervals.

Every mean is over questions (or documents, sequences) of a task: the holder of the answer, the model, the setting.
Draws for intervals take each task's questions with replacement, the same ones for every method, so methods are compared
in pairs; the whole mix is the mean of the holders.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ondevice.evidence import born, derived
from ondevice.evidence.resampling import Resampled, resample
from ondevice_papers.dragon import codec
from ondevice_papers.dragon.cost import Costs, aggregation_times, latency_per_token
from ondevice_papers.dragon.side import Rules
from ondevice_studies.dragon import lockstep, pair
from ondevice_studies.dragon.language_modelling import DRAGON
from ondevice_studies.dragon.pair import TW
from ondevice_studies.dragon.simulator import World, simulate

Draws = NDArray[np.float64]
MIX = "whole mix"
ACCEPTED = {"device": "bd", "cloud": "bc"}  # letters of `decided` with an accepted draft of the side


def part(sample: Resampled, name: str, task: str = MIX) -> Draws:
    """[1 + DRAWS] of one name: a task's, or the mean of all."""
    return sample[name].mean(axis=1) if task == MIX else sample[name][:, list(sample.tasks).index(task)]


# What validation chooses


def temperature(losses: pd.DataFrame) -> float:
    """The temperature of the least loss. losses: of the record `temperatures`.

    Raises ValueError on windows of another split than the validation split.
    """
    splits = sorted(set(losses["split"]))
    if splits != ["validation"]:
        raise ValueError(f"What is chosen is chosen on the validation split, not on {' and '.join(splits)}.")
    nats = losses.groupby("temperature")["nats"].sum()
    return float(nats.index[int(nats.argmin())])


# Figure 6


def perplexities(windows: pd.DataFrame, seed: int = 0) -> Resampled:
    """Perplexity of names like `DRCG 16`; tasks are the models. `DRAGON 16 at 64` is with 64 bytes per distribution.

    A draw takes windows, each of an article of its own. windows: the record; DRAGON without a cap is with the system's.
    """
    names = windows["method"] + " " + windows["documents"].astype(str)
    other = (windows["method"] == DRAGON) & (windows["cap"] != codec.CAP)
    names = names.where(~other, names + " at " + windows["cap"].astype(str))
    table = derived(windows.assign(task=windows["model"], request=windows["window"], method=names), windows)
    nats, tokens = (resample(table, column, seed, drawn="articles") for column in ("nats", "tokens"))
    rates = nats.over(tokens)
    return replace(rates, values=np.exp(rates.values))


def curves(table: Resampled) -> pd.DataFrame:
    """Figure 6: model, method, documents, perplexity, low, high; intervals are of the difference to DRAGON.

    The windows are the same, so that what all windows share cancels. table: of `perplexities`.
    """
    rows = []
    for name in table.names:
        method, _, documents = name.rpartition(" ")
        ours = f"{DRAGON} {documents}"
        for index, model in enumerate(table.tasks if " at " not in name else ()):
            own = table[name][:, index]
            against = table[ours][:, index] if ours in table.names else np.zeros_like(own)
            difference = table.estimate(own - against)
            base = float(against[0])
            curve = (number + base for number in (difference.value, *difference.interval))
            rows.append((model, method, int(documents), *curve))
    columns = ["model", "method", "documents", "perplexity", "low", "high"]
    return derived(pd.DataFrame(rows, columns=columns), table.kind)


# Latency


def latencies(rows: pd.DataFrame) -> pd.DataFrame:
    """The record with numbers: tokens' times in ms as arrays, ttft_ms, total_ms (from the first distribution), steps.

    total_ms: so that a token takes the device's pace where nothing is waited for. (The paper leaves the first token
    out, which with short answers flatters what waits before it; and sequence-wise all tokens come at once.)
    """
    times = [np.array(str(text).split(), float) for text in rows["times"]]
    last, first = (np.array([series[position] for series in times]) for position in (-1, 0))
    table = rows.assign(
        task=rows["holder"],
        request=rows["question"],
        ttft_ms=first,
        between_ms=last - first,
        total_ms=last - rows["prefilled"].astype(float),
        steps=np.maximum(1, rows["tokens"] - 1),
    )
    table["method"] = rows["method"] + " " + rows["delay_ms"].astype(str)
    return derived(table, rows)


def per_token(table: pd.DataFrame, pace: str, column: str = "total_ms", seed: int = 0) -> Resampled:
    """Milliseconds a token of names like `DRAGON 300`, by holder. table: of `latencies`."""
    answers = _at(table, pace)
    return resample(answers, column, seed, drawn="questions").over(resample(answers, "steps", seed))


def first_token(table: pd.DataFrame, pace: str, seed: int = 0) -> Resampled:
    """Milliseconds to the first token, by holder."""
    return resample(_at(table, pace), "ttft_ms", seed, drawn="questions")


def _at(table: pd.DataFrame, pace: str) -> pd.DataFrame:
    """The answers at a pace; times at the paper's are quoted in part."""
    imposed = ("quoted",) if pace == "imposed" else ()
    return derived(table[table["pace"] == pace], table, *imposed)


def decisions(row: Any) -> NDArray[np.bool_]:
    """[n, 2] whose drafts were accepted, device and cloud."""
    return np.array([[letter in ACCEPTED[side] for side in ("device", "cloud")] for letter in row.decided])


def costs(rows: pd.DataFrame, delay: float) -> Costs:
    """What a draft cost in the median, seconds, after the first one, and the links in the mean. delay: seconds."""
    paces = {side: np.median([float(ms) for text in rows[side] for ms in str(text).split()[1:]]) for side in ACCEPTED}
    up = pair.BASE + pair.BASE_JITTER / 2
    return Costs(float(paces["device"]) / 1000, float(paces["cloud"]) / 1000, up, up + delay)


def against_eq_7(table: pd.DataFrame, pace: str) -> pd.DataFrame:
    """By holder and delay: the cloud's acceptance, and DRAGON's saving over token-wise, percent: Eq. 7's and measured.

    Of the time between tokens, as Eq. 7 is. Token-wise takes as long as if every draft were rejected.
    """
    sample = per_token(table, pace, "between_ms")
    answers = table[table["pace"] == pace]
    rows = []
    for task in (*dict.fromkeys(answers["holder"]), MIX):
        here = answers if task == MIX else answers[answers["holder"] == task]
        for delay in sorted(set(here["delay_ms"])):
            ours = here[here["method"] == f"{DRAGON} {delay}"]
            rate = float(np.concatenate([decisions(row)[:-1, 1] for row in ours.itertuples()]).mean())
            cost = costs(ours, delay / 1000)
            formula = latency_per_token(cost, rate)
            wise = latency_per_token(cost, 0.0)
            measured = {name: part(sample, f"{name} {delay}", task) for name in (DRAGON, TW)}
            saved = sample.estimate(100 * (1 - measured[DRAGON] / measured[TW]))
            rows.append((task, delay, rate, 100 * (1 - formula / wise), saved.value, saved.low, saved.high,
                         float(measured[DRAGON][0]) / 1000 / formula))  # fmt: skip
    columns = ["holder", "delay_ms", "acceptance", "eq_7", "saved", "low", "high", "measured_over_eq_7"]
    return derived(pd.DataFrame(rows, columns=columns), table, "analytic")


def waits(table: pd.DataFrame, pace: str, delay: int) -> pd.DataFrame:
    """Table 1 live: by holder and what became of the two drafts before, the mean wait for a token, ms.

    formula: with φ, of the same decisions at the median costs; tokens: how many waited so.
    """
    answers = table[(table["pace"] == pace) & (table["method"] == f"{DRAGON} {delay}")]
    rows = []
    for holder, here in answers.groupby("holder", sort=False):
        cost = costs(here, delay / 1000)
        for row in here.itertuples():
            flags = decisions(row)
            if len(flags) < 2:
                continue
            measured = np.diff(np.array(str(row.times).split(), float))
            formula = 1000 * np.diff(aggregation_times(cost, *flags.T.tolist()))[: len(measured)]
            for (local, remote), real, predicted in zip(flags, measured, formula, strict=False):
                rows.append((holder, _outcome(local), _outcome(remote), real, predicted))
    waited = pd.DataFrame(rows, columns=["holder", "local", "remote", "measured_ms", "formula_ms"])
    grouped = waited.groupby(["local", "remote", "holder"])
    means = grouped[["measured_ms", "formula_ms"]].mean().join(grouped.size().rename("tokens")).reset_index()
    return derived(means, table, "analytic")


def _outcome(accepted: bool) -> str:
    return "accepted" if accepted else "rejected"


def simulated(row: Any, lookahead: int, seeds: int = 3, rules: Rules | None = None) -> float:
    """Milliseconds a token by the simulator of the session that gave a row of the record.

    Its decisions, its paces and its links go in, and when each side's first draft was there, which depends on retrieval
    and prefill; what the links' jitter was is not known, so it is drawn anew.
    """
    paces = np.array([str(row.device).split(), str(row.cloud).split()], float).T / 1000
    delay = row.delay_ms / 1000
    first = row.prefilled / 1000
    up, down = pair.added(delay)
    paces[0] = first, max(0.0, row.ttft_ms / 1000 - pair.BASE - 0.5 * pair.BASE_JITTER - delay)
    world = World(decisions(row), paces[:, 0], paces[:, 1], up, down, lookahead=lookahead)
    runs = [simulate(world, seed=seed, rules=rules) for seed in range(seeds)]
    return 1000 * float(np.mean([(run.seen[-1] - first) / max(1, len(run.seen) - 1) for run in runs]))


# Answers, acceptance, the attack, schedules


def shares(table: pd.DataFrame, column: str, name: str, by: str = "holder", unit: str = "question") -> Resampled:
    """Means of a column by method (column `name`), task (`by`) and unit."""
    rows = table.assign(task=table[by], request=table[unit], method=table[name], value=table[column].astype(float))
    return resample(derived(rows, table), "value", drawn=f"{unit}s")


def acceptance(tokens: pd.DataFrame) -> Resampled:
    """Mean acceptance a token, of names like `cloud, Algorithm 1`, by holder. tokens: the record `lockstep`."""
    long = tokens.melt(["question", "holder", "side"], list(lockstep.RULES), "rule", "accepted")
    long["method"] = long["side"] + ", " + long["rule"]
    sums = long.groupby(["holder", "question", "method"], sort=False)["accepted"].agg(["sum", "size"]).reset_index()
    table = derived(sums.rename(columns={"holder": "task", "question": "request"}), tokens)
    return resample(table, "sum", drawn="questions").over(resample(table, "size"))


def by_word(
    tokens: pd.DataFrame, rule: str = "Algorithm 1", function_word: Callable[[str], bool] = lockstep.function_word
) -> Resampled:
    """Mean acceptance of `function words` and of `other` tokens, both sides, by holder."""
    kind = tokens["word"].map(lambda word: "function words" if function_word(word) else "other")
    sums = tokens.assign(method=kind).groupby(["holder", "question", "method"], sort=False)[rule].agg(["sum", "size"])
    table = sums.reset_index().rename(columns={"holder": "task", "question": "request"})
    table = derived(table, tokens)
    return resample(table, "sum", drawn="questions").over(resample(table, "size"))


def schedules(table: pd.DataFrame, column: str = "total_s", seed: int = 0) -> Resampled:
    """Seconds of names like `DRAGON 100`, by setting; requests are sequences. table: the record `schedules`."""
    names = table["strategy"] + " " + table["delay_ms"].astype(int).astype(str)
    rows = born(table.assign(task=table["setting"], request=table["sequence"], method=names), "replayed")
    return resample(rows, column, seed, drawn="sequences")

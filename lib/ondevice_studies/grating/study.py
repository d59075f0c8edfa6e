"""What the notebook's experiments share: recorded pools, calibrated rules, what they do, and what that costs.

A rule is calibrated on validation pools for a model, a set of queries and a K. What it does to test pools is replayed;
how long that takes at full size follows from a machine's recorded seconds of a layer by the number of active
candidates, and is checked against whole runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ondevice import evidence
from ondevice.evidence import derived
from ondevice.evidence.resampling import DRAWS, Resampled, resample
from ondevice_papers.grating import margins
from ondevice_papers.grating.clustering import Floats
from ondevice_papers.grating.pools import Pool, measured, replay, sweep, validation
from ondevice_papers.grating.pruning import PoolOutcome, Rule, cluster_rule, select
from ondevice_papers.grating.thresholds import THRESHOLDS, curve, lowest
from ondevice_studies.grating import scoring
from ondevice_studies.grating.full_size import depths
from ondevice_studies.grating.sets import NOTES, PARAGRAPHS, TEST, VALIDATION

SETS = (NOTES, PARAGRAPHS)  # with validation pools
KS = (1, 5, 10)
KEPT = 5  # paragraphs that are kept of a long context; the paper keeps 10 of 20
LOW, HIGH, MARGIN, PROBED = "low", "high", "margin", "margin, probes"
RULES = (LOW, HIGH, MARGIN, PROBED)
OVERLAP, POINT = 0.98, 0.01  # what `high` and the margins keep of the full model's top K; what `low` loses of Precision
HALVED = "half"  # the rule of applications, whose thresholds are of the other half of their pools
HALVINGS = 12
FULL_LAYERS = 28  # of Qwen3-Reranker-0.6B
OURS_NAME = "GRATING"
UNPRUNED = "GRATING without pruning"
NO_RERANKER, FIRST = "no reranker", "the first ones, unranked"


@cache
def recorded() -> pd.DataFrame:
    """The scores of all pools after every layer, as `scoring` recorded them in parts."""
    parts = [evidence.load("grating", f"scores-{part}") for part in scoring.PARTS]
    return derived(pd.concat(parts, ignore_index=True), *parts)


def pools_of(scores: pd.DataFrame, model: str, set_: str, split: str = TEST, probed: bool = False) -> list[Pool]:
    """Recorded pools, in their order. probed: with the probes' scores after every layer but the last."""
    chosen = scores[(scores["model"] == model) & (scores["set"] == set_) & (scores["split"] == split)]
    pools = []
    row: Any
    for row in chosen.itertuples():
        history = np.asarray(row.scores, np.float64).reshape(row.layers, row.n)
        if probed:
            history = np.concatenate([np.asarray(row.probed, np.float64).reshape(row.layers - 1, row.n), history[-1:]])
        pools.append(Pool(row.name, row.split, history, np.asarray(row.relevant, bool)))
    return pools


# Calibration


def rules_of(model: str, set_: str) -> tuple[str, ...]:
    """Those that are calibrated. Probes are a decoder's; on `paragraphs` no model is so precise that it could lose."""
    return tuple(
        rule for rule in RULES if (rule != LOW or set_ == NOTES) and (rule != PROBED or model in scoring.PROBED)
    )


def calibrated(
    scores: pd.DataFrame, model: str, set_: str, k: int, every: Sequence[float] = THRESHOLDS
) -> list[dict[str, Any]]:
    """A row a rule: model, set, k, rule, setting (a threshold, or a chance; infinity or 0: never prune), p_value, n.

    set_: the validation pools. `low` keeps Precision@K within a point of the full model's, `high` keeps 98 % of its top
    K, both by the paper's rule and with no promise; the margins are certified.
    """
    valid = validation(pools_of(scores, model, set_, VALIDATION))
    curves = curve(valid, k, thresholds=every)
    means = {name: values.mean(1) for name, values in curves.items()}
    targets = {LOW: ("precision", means["full"][0] - POINT), HIGH: ("overlap", OVERLAP)}
    rows = []
    for rule in rules_of(model, set_):
        if rule in targets:
            quantity, target = targets[rule]
            setting, p_value, n = lowest(every, means[quantity].tolist(), target), np.nan, len(valid)
        else:
            certified = margins.certify(certifying(scores, model, rule == PROBED), k, OVERLAP)
            setting, p_value, n = certified.chance, certified.p_value, certified.tested
        row = {"rule": rule, "setting": setting, "p_value": p_value, "n": n}
        rows.append({"model": model, "set": set_, "k": k} | row)
    return rows


def certifying(scores: pd.DataFrame, model: str, probed: bool) -> list[Pool]:
    """Pools of both sets that margins are fitted and certified on: those of one alone could not promise 98 %."""
    return [pool for set_ in SETS for pool in pools_of(scores, model, set_, VALIDATION, probed)]


@dataclass(frozen=True)
class Mechanism:
    """The functions by which pruning is replayed: the library's, or a notebook's."""

    cluster_rule: Callable[[float], Rule] = cluster_rule
    gaps: Callable[[Floats, int], Floats] = margins.gaps
    fit: Callable[[Sequence[Pool], int], margins.ErrorModel] = margins.fit
    select: Callable[..., PoolOutcome] = select
    lowest: Callable[[Sequence[float], Sequence[float], float], float] = lowest


OURS = Mechanism()


def setting_of(settings: pd.DataFrame, model: str, set_: str, k: int, rule: str) -> float:
    """A calibrated rule's threshold or chance. settings: rows of `calibrated`.

    Raises ValueError where it was not calibrated.
    """
    row = settings[(settings["model"] == model) & (settings["set"] == set_) & (settings["k"] == k)]
    row = row[row["rule"] == rule]
    if len(row) != 1:
        raise ValueError(f"There is no rule {rule} of {model} for {set_} and K = {k}.")
    return float(row["setting"].iloc[0])


def rule_of(
    scores: pd.DataFrame, settings: pd.DataFrame, model: str, set_: str, k: int, rule: str, how: Mechanism = OURS
) -> Rule | None:
    """A calibrated rule for pools of a set; None prunes nothing. settings, errors: as of `setting_of`."""
    setting = setting_of(settings, model, set_, k, rule)
    if rule in (LOW, HIGH):
        return how.cluster_rule(setting)
    if not setting:
        return None
    first, _ = margins.parted(certifying(scores, model, rule == PROBED))
    return how.fit(first, k).rule(setting, how.gaps)


def outcomes(
    scores: pd.DataFrame,
    settings: pd.DataFrame,
    models: Iterable[str],
    sets: Iterable[str],
    ks: Iterable[int],
    rules: Iterable[str] = RULES,
    how: Mechanism = OURS,
    some: Sequence[int] = (),
) -> pd.DataFrame:
    """What calibrated rules do to test pools: model, set, k, rule, pool, name, saved, precision, full, overlap, layers
    (L), layer ([N] layers run) and kept ([N]).

    some: numbers of pools; none for all.
    """
    rows = []
    made: dict[tuple[Any, ...], Rule | None] = {}  # those of a model and K: margins are the same for both sets
    for model, set_, k, rule in ((m, s, k, r) for m in models for s in sets for k in ks for r in rules):
        if rule not in rules_of(model, set_):
            continue
        about = model, k, rule, setting_of(settings, model, set_, k, rule)
        if about not in made:
            made[about] = rule_of(scores, settings, model, set_, k, rule, how)
        pools = pools_of(scores, model, set_, TEST, rule == PROBED)
        for number in some or range(len(pools)):
            pool = pools[number]
            outcome = replay(pool, k, made[about] if k < len(pool.relevant) else None, select=how.select)
            rows.append({
                "model": model, "set": set_, "k": k, "rule": rule, "pool": number, "name": pool.name,
                **vars(measured(pool, k, outcome)), "layer": outcome.layer, "kept": outcome.kept,
                "layers": len(pool.scores),
            })  # fmt: skip
    return derived(pd.DataFrame(rows), scores)


def halved(
    scores: pd.DataFrame,
    models: Iterable[str],
    set_: str,
    k: int,
    how: Mechanism = OURS,
    seed: int = 0,
    every: Sequence[float] = THRESHOLDS,
) -> pd.DataFrame:
    """What the paper's rule does to the pools of an application, which has no validation pools: columns as `outcomes`.

    The pools are halved at random, HALVINGS times. The threshold that keeps Precision@K of one half within a point of
    the full model's prunes the other half: a row a halving and pool of it.
    """
    rows: list[dict[str, Any]] = []
    random = np.random.default_rng(seed)
    for model in models:
        pools = pools_of(scores, model, set_)
        decided = list(zip(*(_decided(pool, k, how, every) for pool in pools), strict=True))
        precision = np.array([[row["precision"] for row in of_all] for of_all in decided])
        full = np.array([row["full"] for row in decided[0]])
        for _ in range(HALVINGS):
            first, rest = np.array_split(random.permutation(len(pools)), 2)
            reached = how.lowest(every, precision[:, first].mean(1).tolist(), full[first].mean() - POINT)
            of_rest = decided[every.index(reached)]
            rows += [{"model": model, "set": set_, "k": k, "rule": HALVED, "pool": int(n), **of_rest[n]} for n in rest]
    return derived(pd.DataFrame(rows), scores)


def _decided(pool: Pool, k: int, how: Mechanism, thresholds: Sequence[float]) -> list[dict[str, Any]]:
    """By threshold: name, saved, precision, full, overlap, layer, kept and layers of a pool, by the paper's rule."""
    if k < len(pool.relevant):
        outcomes = sweep(pool, k, how.cluster_rule, thresholds, select=how.select)
    else:
        outcomes = [replay(pool, k, select=how.select)] * len(thresholds)
    return [
        {"name": pool.name, **vars(measured(pool, k, outcome)), "layer": outcome.layer, "kept": outcome.kept,
         "layers": len(pool.scores)}
        for outcome in outcomes
    ]  # fmt: skip


# Seconds at full size


@dataclass(frozen=True)
class LayerCosts:
    """Seconds of one machine in one round, with rows of so many tokens: of a layer by active candidates, of all before
    the first layer and of transformers' methods a candidate. active, layer: [m]."""

    machine: str
    tokens: int
    active: Floats
    layer: Floats
    embedding: float
    whole: Mapping[str, float]

    def seconds(self, runs: NDArray[np.int64]) -> float:
        """Of a pass in which each candidate goes through so many layers of the full size."""
        active = (np.arange(1, runs.max() + 1)[:, None] <= runs).sum(1)
        return self.embedding * len(runs) + float(np.interp(active, self.active, self.layer).sum())


def costs(latency: pd.DataFrame, layers: pd.DataFrame, machine: str, tokens: int) -> list[LayerCosts]:
    """From the records of one machine, one a round of `layers`; whole runs are of their own rounds, in turn."""
    own = layers[(layers["machine"] == machine) & (layers["tokens"] == tokens)]
    runs = latency[(latency["machine"] == machine) & (latency["tokens"] == tokens)]
    runs = runs.assign(each=runs["seconds"] / runs["documents"])
    before = pd.to_numeric(runs["embedding"], errors="coerce") / runs["documents"]
    turns = sorted(runs["round"].unique())
    rounds = []
    for number, (_, layer_times) in enumerate(own.sort_values("active").groupby("round")):
        turn = runs["round"] == turns[number % len(turns)]
        whole = {str(name): float(value) for name, value in runs[turn].groupby("method")["each"].median().items()}
        active, layer = (layer_times[name].to_numpy(float) for name in ("active", "seconds"))
        rounds.append(LayerCosts(machine, tokens, active, layer, float(before[turn].median()), whole))
    return rounds


def median_cost(rounds: Sequence[LayerCosts]) -> LayerCosts:
    """The medians over rounds."""
    first = rounds[0]
    layer = np.median([cost.layer for cost in rounds], axis=0)
    whole = {name: float(np.median([cost.whole[name] for cost in rounds])) for name in first.whole}
    return replace(first, layer=layer, whole=whole, embedding=float(np.median([cost.embedding for cost in rounds])))


def timed(outcomes: pd.DataFrame, rounds: Sequence[LayerCosts]) -> pd.DataFrame:
    """`outcomes` with seconds at full size, an array of the rounds, in columns: GRATING, the same without pruning, HF
    and HF Offload."""
    taken: dict[str, list[Floats]] = {method: [] for method in (OURS_NAME, UNPRUNED, "HF", "HF Offload")}
    for layer, layers in zip(outcomes["layer"], outcomes["layers"], strict=True):
        runs = depths(layer, int(layers), FULL_LAYERS)
        taken[OURS_NAME].append(np.array([cost.seconds(runs) for cost in rounds]))
        taken[UNPRUNED].append(np.array([cost.seconds(np.full(len(runs), FULL_LAYERS)) for cost in rounds]))
        for method in ("HF", "HF Offload"):
            taken[method].append(np.array([len(runs) * cost.whole[method] for cost in rounds]))
    table = outcomes.copy()
    for method, seconds in taken.items():
        table[method] = pd.Series(seconds, index=table.index)
    return derived(table, outcomes, "recorded", "predicted")


@cache
def weights(count: int, seed: int) -> Floats:
    """[1 + DRAWS, count] shares of each unit in draws of so many, as in `resample`; first of all of them alike."""
    drawn = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), DRAWS)
    return np.vstack([np.ones(count), drawn]) / count


def means(outcomes: pd.DataFrame, columns: Mapping[str, str], seed: int = 0) -> Resampled:
    """Means over pools of several columns, drawn together: of one model, set, K and rule. columns: name -> column.

    Several questions on one long document are one draw, their mean.
    """
    shared = outcomes.drop_duplicates(["pool"])["name"].duplicated().any()
    named = outcomes.rename(columns={"set": "task", "name": "request"})[["task", "request"]]
    parts = [named.assign(method=name, value=outcomes[column].astype(float)) for name, column in columns.items()]
    return resample(derived(pd.concat(parts), outcomes), "value", seed, drawn="documents" if shared else "pools")


# Applications


def end_to_end(outcomes: pd.DataFrame, before: float, reading: Callable[[int], float] | None = None) -> pd.DataFrame:
    """`timed` with what comes before ranking, and with what a language model takes to read so many candidates.

    before: seconds of the searches. reading: seconds by candidates; then also NO_RERANKER, which reads all of them, and
    FIRST, which reads the first K.
    """
    counts = outcomes["layer"].map(len)
    read = outcomes["k"].map(reading) if reading else 0.0
    table = outcomes.assign(**{method: before + outcomes[method] + read for method in (OURS_NAME, UNPRUNED, "HF")})
    if reading:
        by_round = 0.0 * outcomes["HF"]
        table[NO_RERANKER] = before + counts.map(reading) + by_round
        table[FIRST] = before + read + by_round
    return derived(table, outcomes, "simulated") if reading else table

"""What the notebook's experiments share: recorded pools, calibrated rules, what they do, and what that costs.

A rule is calibrated on validation pools for a model, a set of queries and a K. What it does to test pools is replayed;
how long that takes at full size follows from a machine's recorded seconds of a layer by the number of active
candidates, and is checked against whole runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ondevice.evidence import derived
from ondevice.evidence.resampling import Resampled, resample
from ondevice_papers.grating import margins
from ondevice_papers.grating.agent_memory import cut_off
from ondevice_papers.grating.clustering import Floats
from ondevice_papers.grating.pools import Pool, measured, replay, validation
from ondevice_papers.grating.pruning import Outcome, Rule, cluster_rule, select
from ondevice_papers.grating.thresholds import THRESHOLDS, curve, lowest
from ondevice_studies.grating.full_size import depths
from ondevice_studies.grating.questions import CLOZE, COMMUNITY, CONTEXT, QUESTIONS, RAG, VIDEO

BASE, DEEP, ENCODER = "pydocs-reranker", "pydocs-reranker-deep", "minilm-reranker"
MODELS = (BASE, DEEP, ENCODER)
DECODERS = (BASE, DEEP)
KS = (1, 5, 10)
LOW, HIGH, MARGIN, PROBED = "low", "high", "margin", "margin, probes"
RULES = (LOW, HIGH, MARGIN, PROBED)
OVERLAP, POINT = 0.98, 0.01  # what `high` and the margins keep of the full model's top K; what `low` loses of Precision
AGENTS = (VIDEO, COMMUNITY)
CALIBRATED_ON = {RAG: QUESTIONS, CONTEXT: QUESTIONS}  # the other sets on their own validation pools
FULL_LAYERS = 28  # of Qwen3-Reranker-0.6B
OURS_NAME = "GRATING"
UNPRUNED = "GRATING without pruning"
NO_RERANKER, FIRST = "no reranker", "the first ones, unranked"


def pools_of(scores: pd.DataFrame, model: str, set_: str, split: str = "test", probed: bool = False) -> list[Pool]:
    """Recorded pools, in their order. probed: with the probes' scores after every layer but the last."""
    chosen = scores[(scores["model"] == model) & (scores["set"] == set_) & (scores["split"] == split)]
    found = []
    row: Any
    for row in chosen.itertuples():
        history = np.asarray(row.scores, np.float64).reshape(row.layers, row.n)
        if probed:
            history = np.concatenate([np.asarray(row.probed, np.float64).reshape(row.layers - 1, row.n), history[-1:]])
        found.append(Pool(row.name, row.split, history, np.asarray(row.relevant, bool)))
    return found


# Calibration


def calibrated(
    scores: pd.DataFrame, model: str, set_: str, k: int, exact_order: bool = False, every: Sequence[float] = THRESHOLDS
) -> list[dict[str, Any]]:
    """A row a rule: model, set, k, rule, setting (a threshold, or a chance; infinity or 0: never prune), p_value, n.

    set_: the validation pools. `low` keeps Precision@K within a point of the full model's, `high` keeps 98 % of its top
    K, both by the paper's rule and with no promise; the margins are certified.
    """
    valid = validation(pools_of(scores, model, set_, "validation"))
    curves = curve(valid, k, exact_order=exact_order, thresholds=every)
    found = {name: values.mean(1) for name, values in curves.items()}
    rows = [
        (LOW, lowest(every, found["precision"].tolist(), found["full"][0] - POINT), np.nan, len(valid)),
        (HIGH, lowest(every, found["overlap"].tolist(), OVERLAP), np.nan, len(valid)),
    ]
    for name in (MARGIN, PROBED) if model in DECODERS else (MARGIN,):
        used = certifying(scores, model, set_, name == PROBED)
        certified = margins.certify(used, k, OVERLAP, exact_order=exact_order)
        rows.append((name, certified.chance, certified.p_value, certified.tested))
    columns = ("rule", "setting", "p_value", "n")
    return [{"model": model, "set": set_, "k": k, **dict(zip(columns, row, strict=True))} for row in rows]


def certifying(scores: pd.DataFrame, model: str, set_: str, probed: bool) -> list[Pool]:
    """Validation pools that margins are fitted and certified on: 125 questions alone could not promise 98 %."""
    sets = (QUESTIONS, CLOZE) if set_ in (QUESTIONS, CLOZE) else (set_,)
    return [pool for one in sets for pool in pools_of(scores, model, one, "validation", probed)]


@dataclass(frozen=True)
class Mechanism:
    """The functions by which pruning is replayed: the library's, or a notebook's."""

    cluster_rule: Callable[[float], Rule] = cluster_rule
    gaps: Callable[[Floats, int], Floats] = margins.gaps
    fit: Callable[[Sequence[Pool], int], margins.ErrorModel] = margins.fit
    select: Callable[..., Outcome] = select


OURS = Mechanism()


def rule_of(
    scores: pd.DataFrame, settings: pd.DataFrame, model: str, set_: str, k: int, rule: str, how: Mechanism = OURS
) -> Rule | None:
    """A calibrated rule for pools of a set; None prunes nothing.

    settings: rows of `calibrated`. Raises ValueError where it was not calibrated.
    """
    on = CALIBRATED_ON.get(set_, set_)
    row = settings[(settings["model"] == model) & (settings["set"] == on) & (settings["k"] == k)]
    row = row[row["rule"] == rule]
    if len(row) != 1:
        raise ValueError(f"There is no rule {rule} of {model} for {on} and K = {k}.")
    setting = float(row["setting"].iloc[0])
    if rule in (LOW, HIGH):
        return how.cluster_rule(setting)
    if not setting:
        return None
    first, _ = margins.parted(certifying(scores, model, on, rule == PROBED))
    return how.fit(first, k).rule(setting, how.gaps)


def outcomes(
    scores: pd.DataFrame, settings: pd.DataFrame, models: Iterable[str], sets: Iterable[str], ks: Iterable[int],
    rules: Iterable[str] = RULES, how: Mechanism = OURS, some: Sequence[int] = (),
) -> pd.DataFrame:  # fmt: skip
    """What calibrated rules do to test pools: model, set, k, rule, pool, name, saved, precision, full, overlap, layers
    (L), layer ([N] layers run) and kept ([N]). On agents' tasks in exact order, as a cut-off is of final scores.

    some: numbers of pools; none for all.
    """
    rows = []
    for model, set_, k, rule in ((m, s, k, r) for m in models for s in sets for k in ks for r in rules):
        if rule == PROBED and model not in DECODERS:
            continue
        made = rule_of(scores, settings, model, set_, k, rule, how)
        recorded = pools_of(scores, model, set_, "test", rule == PROBED)
        for number in some or range(len(recorded)):
            pool = recorded[number]
            outcome = replay(pool, k, made if k < len(pool.relevant) else None, set_ in AGENTS, how.select)
            found = measured(pool, k, outcome)
            rows.append({
                "model": model, "set": set_, "k": k, "rule": rule, "pool": number, "name": pool.name,
                **vars(found), "layer": outcome.layer, "kept": outcome.kept, "layers": len(pool.scores),
            })  # fmt: skip
    return derived(pd.DataFrame(rows), scores)


# Seconds at full size


@dataclass(frozen=True)
class Costs:
    """Seconds of one machine with rows of so many tokens: of a layer by active candidates, of all before the first
    layer and of transformers' methods a candidate. active, layer: [m]."""

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


def costs(latency: pd.DataFrame, layers: pd.DataFrame, machine: str, tokens: int) -> Costs:
    """From the records of one machine: medians over rounds."""
    own = layers[(layers["machine"] == machine) & (layers["tokens"] == tokens)].groupby("active")["seconds"].median()
    runs = latency[(latency["machine"] == machine) & (latency["tokens"] == tokens)]
    each = (runs["seconds"] / runs["documents"]).groupby(runs["method"]).median()
    embedding = (pd.to_numeric(runs["embedding"], errors="coerce") / runs["documents"]).median()
    whole = {str(name): value for name, value in each.items()}
    return Costs(machine, tokens, own.index.to_numpy(float), own.to_numpy(float), float(embedding), whole)


def timed(found: pd.DataFrame, cost: Costs) -> pd.DataFrame:
    """`outcomes` with seconds at full size in columns: GRATING, the same without pruning, HF and HF Offload."""
    deep = zip(found["layer"], found["layers"], strict=True)
    ours = [cost.seconds(depths(layer, int(layers), FULL_LAYERS)) for layer, layers in deep]
    counts = found["layer"].map(len)
    whole = {method: counts * cost.whole[method] for method in ("HF", "HF Offload")}
    whole[UNPRUNED] = counts.map({count: cost.seconds(np.full(count, FULL_LAYERS)) for count in counts.unique()})
    return derived(found.assign(GRATING=ours, **whole), found, "recorded")


def means(found: pd.DataFrame, columns: Mapping[str, str], seed: int = 0) -> Resampled:
    """Means over pools of several columns, drawn together: of one model, set, K and rule. columns: name -> column.

    Several questions on one long document are one draw, their mean.
    """
    shared = found["name"].duplicated().any()
    parts = [
        pd.DataFrame(
            {"task": found["set"], "request": found["name"], "method": name, "value": found[column].astype(float)}
        )
        for name, column in columns.items()
    ]
    return resample(derived(pd.concat(parts), found), "value", seed, drawn="documents" if shared else "pools")


# Applications


def end_to_end(found: pd.DataFrame, before: float, reading: Callable[[int], float] | None = None) -> pd.DataFrame:
    """`timed` with what comes before ranking, and with what a language model takes to read so many candidates.

    before: seconds of the searches. reading: seconds by candidates; then also NO_RERANKER, which reads all of them, and
    FIRST, which reads the first K.
    """
    counts = found["layer"].map(len)
    read = found["k"].map(reading) if reading else 0.0
    made = found.assign(**{method: before + found[method] + read for method in (OURS_NAME, UNPRUNED, "HF")})
    if reading:
        made[NO_RERANKER] = before + counts.map(reading)
        made[FIRST] = before + read
    return derived(made, found, "simulated") if reading else made


def agents(
    scores: pd.DataFrame, found: pd.DataFrame, set_: str, call: float, before: float, precision: float = 0.9
) -> pd.DataFrame:
    """Generated tasks with and without pruning: pool, method, seconds, done, replayed; and without a memory.

    found: `timed` outcomes of one rule, K = 1 in exact order. The best past task's actions are replayed if its score
    reaches a cut-off, which validation tasks set so that this share of what is replayed is right; else a model is asked
    for each action, `call` seconds each, and is taken to be right.
    """
    model = str(found["model"].iloc[0])
    valid, test = (pools_of(scores, model, set_, split) for split in ("validation", "test"))
    best = np.array([pool.scores[-1].max() for pool in valid])
    right = np.array([pool.relevant[pool.scores[-1].argmax()] for pool in valid])
    cut = cut_off(best, right, precision)
    rows = []
    row: Any
    for row, pool in zip(found.itertuples(), test, strict=True):
        chosen = {"HF": int(pool.scores[-1].argmax()), OURS_NAME: int(np.flatnonzero(row.kept)[0])}
        calls = len(pool.name.split("; "))
        for method, place in chosen.items():
            replayed = bool(pool.scores[-1, place] >= cut)
            seconds = before + float(getattr(row, method)) + (0 if replayed else calls * call)
            rows.append((row.pool, method, seconds, float(pool.relevant[place] or not replayed), replayed))
        rows.append((row.pool, "no memory", calls * call, 1.0, False))
    made = pd.DataFrame(rows, columns=["request", "method", "seconds", "done", "replayed"]).assign(task=set_)
    return derived(made, found, "simulated")

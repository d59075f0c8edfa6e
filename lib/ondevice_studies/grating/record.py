"""What GRATING's verdicts rest on: `make record PAPER=grating` makes all of it; it goes on where it was stopped.

One record at a time: `python -m ondevice_studies.record grating --only NAME`. Without a clock and in float32, so the
same on every machine but for rounding: `scores-validation`, `scores-test`, `scores-applications` and `smollm2-probes`
of `scoring`, `calibrated` (a rule for each model, set and K) and `curves` (Figure 10).
Of this machine, on full-size shapes with random weights: `latency` and `layers` (seconds of whole runs and of a layer),
`memory` (16 bits) and `limits` (seconds under a hard limit of memory).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from ondevice import evidence, retrieval
from ondevice.corpus.pairs import Row
from ondevice.evidence import Again, Recorder, some
from ondevice_papers.grating import thresholds
from ondevice_programs.reranker.folder import prepare
from ondevice_studies.grating import full_size, scoring, study
from ondevice_studies.grating.full_size import (
    BASELINE,
    CACHE,
    CHUNKS,
    HF,
    HF_8,
    HF_20,
    OFFLOAD,
    ONE_BATCH,
    OURS,
    WHOLE_LAYERS,
    WINDOW,
)
from ondevice_studies.grating.scoring import DEEP, MODELS
from ondevice_studies.grating.sets import NOTES, RAG, TEST, pools

# Pruning, from the scores


CALIBRATED = list(product(MODELS, study.SETS, study.KS))


def curve_rows(scores: pd.DataFrame, model: str, k: int) -> list[dict[str, Any]]:
    """Of `curves`: test pools of `notes and pages` at every threshold."""
    pools_ = study.pools_of(scores, model, NOTES)
    curve = thresholds.curve(pools_, k)
    return [
        {"model": model, "k": k, "threshold": threshold, "pool": number}
        | {name: float(values[row, number]) for name, values in curve.items()}
        for row, threshold in enumerate(thresholds.THRESHOLDS)
        for number in range(len(pools_))
    ]


# Seconds and memory at full size

BM25 = "BM25"  # keyword search, the first stage of Figure 1
SHORT = 128  # tokens of a row
LONG = 500  # tokens of a row
ACTIVE = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 50, 60)
ROUNDS = {(20, SHORT): 10, (60, SHORT): 10, (20, LONG): 10, (1, 32): 10}
MEASURED = 4  # layers of a pass whose seconds count for `layers`, but for the first
FILLED = 1  # layers of ours, or batches of transformers, after which memory does not grow


@dataclass(frozen=True)
class Way:
    """A method, and what drives it: a calibrated rule for K of one model's `notes and pages`, or nothing."""

    method: str
    rule: str = ""
    k: int = 10
    model: str = DEEP


WAYS = {
    (20, SHORT): [Way(HF), Way(f"{HF} again"), Way(OFFLOAD), Way(OURS), Way(WHOLE_LAYERS), Way(full_size.IN_MEMORY),
                  Way(full_size.IN_MEMORY, study.LOW), Way(WHOLE_LAYERS, study.LOW),
                  *(Way(OURS, rule) for rule in (study.LOW, study.HIGH, study.MARGIN)), Way(OURS, study.MARGIN, 5)],
    (20, LONG): [Way(HF), Way(OFFLOAD), Way(OURS), Way(full_size.IN_MEMORY), Way(OURS, study.MARGIN)],
    (60, SHORT): [Way(BASELINE), *(Way(step, study.LOW) for step in (ONE_BATCH, CHUNKS, WINDOW, CACHE))],
    (1, 32): [Way(HF), Way(BM25)],
}  # fmt: skip


def searched() -> Callable[[Sequence[Row]], object]:
    """Keyword search of the candidates of all questions of `RAG`."""
    questions = pools(RAG, TEST)
    index = retrieval.sparse_index(list(dict.fromkeys(text for question in questions for text in question.documents)))
    return lambda given: index.search([questions[0].query], 10)


def decided() -> pd.DataFrame:
    """What rules decide on test pools of `notes and pages`, by which candidates are driven."""
    return study.outcomes(study.recorded(), evidence.load("grating", "calibrated"), [DEEP], [NOTES], study.KS)


def driving(outcomes: pd.DataFrame, way: Way, documents: int, turn: int) -> np.ndarray:
    """[N] layers of the full size that candidates go through, as in recorded pools: others in every round."""
    if not way.rule:
        return np.full(documents, study.FULL_LAYERS)
    of_rule = (outcomes["model"] == way.model) & (outcomes["rule"] == way.rule) & (outcomes["k"] == way.k)
    rows = outcomes[of_rule]
    pools_ = (np.arange(documents // 20) + (7 * turn + 1) * (documents // 20)) % len(rows)
    layer = np.concatenate(rows["layer"].iloc[pools_].to_list())
    return full_size.depths(layer, int(rows["layers"].iloc[0]), study.FULL_LAYERS)


class Methods(contextlib.ExitStack):
    """Methods on a saved shape, which stay open once they have run a little."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.shape = full_size.architecture(folder)
        self.opened = dict[str, Any]()

    def run(self, way: Way, given: Sequence[Row], runs: np.ndarray) -> tuple[float, Any]:
        """Seconds, and the pass of ours. runs: layers that each candidate goes through, of ours."""
        method = HF if way.method in (BASELINE, f"{HF} again") else way.method
        if method not in self.opened:
            scorer = full_size.scorer(self.folder, method, np.full(2, 2))
            self.opened[method] = searched() if method == BM25 else self.enter_context(scorer)
            self.opened[method](full_size.rows(self.shape, 2, 16))
        score = self.opened[method]
        if hasattr(score, "__self__"):
            score.__self__.select = full_size.driven(runs)
        return full_size.timed(score, given)

    def row(self, way: Way, given: Sequence[Row], runs: np.ndarray, turn: int) -> dict[str, Any]:
        """One whole run."""
        seconds, result = self.run(way, given, runs)
        about = {"documents": len(given), "tokens": len(given[0].ids), "round": turn, **vars(way), "seconds": seconds}
        print(about, file=sys.stderr, flush=True)
        if result is None:
            return about | {"embedding": np.nan, "saved": 0.0}
        return about | {"embedding": result.embedding, "saved": result.outcome.saved}


def record_latency(kept: Recorder, layers: Recorder) -> None:
    """latency and layers: all ways of a shape in turn, from another one on in every round."""
    outcomes = decided()
    with Methods(prepare(f"random:{full_size.SHAPE}", full_size.native())) as methods:
        for (documents, tokens), rounds in ROUNDS.items():
            given = full_size.rows(methods.shape, documents, tokens)
            ways = WAYS[documents, tokens]
            for way in ways:  # rows of the table and files that later rounds find warm
                methods.run(way, given, np.ones(documents, np.int64))
            for turn in range(rounds):
                for way in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
                    if (documents, tokens, turn, way.method, way.rule, way.k) not in kept.done:
                        kept.add([methods.row(way, given, driving(outcomes, way, documents, turn), turn)])
                kept.checkpoint()
        for tokens, turn, active in product((SHORT, LONG), range(10), ACTIVE):
            if (tokens, turn, active) not in layers.done:
                given = full_size.rows(methods.shape, active, tokens, turn)
                _, done = methods.run(Way(OURS), given, np.full(active, MEASURED))
                layers.add(
                    [{"tokens": tokens, "round": turn, "active": active, "seconds": float(np.median(done.seconds[1:]))}]
                )
                layers.checkpoint()


def record_memory(kept: Recorder) -> None:
    """memory: each run in a process of its own. Forms whose peak alone counts end after the first layer, whose peak is
    that of all, or after the first batch of four rows, once all documents' rows of the table were read. Transformers'
    peak depends on the rows of a batch: three sizes."""
    folder = prepare(f"random:{full_size.SHAPE}", torch.bfloat16)
    jobs = [(HF, 1, 32, False), (OURS, 20, SHORT, False), (HF, 20, SHORT, False), (OURS, 20, LONG, False),
            (HF, 20, LONG, False), (OFFLOAD, 20, SHORT, True), (OFFLOAD, 20, LONG, True),
            (WHOLE_LAYERS, 20, SHORT, True), (WHOLE_LAYERS, 20, LONG, True), (OURS, 60, LONG, True),
            (HF_8, 20, LONG, False), (HF_20, 20, LONG, False),
            *((step, 60, LONG, True) for step in (ONE_BATCH, CHUNKS, WINDOW, CACHE))]  # fmt: skip
    for run, (method, documents, tokens, cut) in product(range(3), jobs):
        if (method, documents, tokens, run) not in kept.done:
            about = {"method": method, "documents": documents, "tokens": tokens, "run": run, "whole": not cut}
            row = about | used(folder, method, documents, tokens, cut)
            print(row, file=sys.stderr, flush=True)
            kept.add([row])
            kept.checkpoint()


LIMITS = (150, 300, 600, 1300)  # MB over the imports


def record_limits(kept: Recorder) -> None:
    """limits: seconds under a hard limit of memory, each run in a process of its own.

    Where the system lets nobody set one, it says so, and there is no record.
    """
    folder = prepare(f"random:{full_size.SHAPE}", torch.bfloat16)
    for turn, megabytes, method in product(range(3), LIMITS, (HF, OFFLOAD, OURS)):
        if (method, megabytes, turn) not in kept.done:
            job = full_size.Trial(str(folder), method, 20, SHORT, 0, torch.get_num_threads())
            try:
                limited = full_size.limited(job, megabytes)
            except OSError as error:
                print(f"Seconds under a limit of memory are not recorded: {error}", file=sys.stderr)
                return
            row = {"method": method, "limit_mb": megabytes, "round": turn} | limited
            print(row, file=sys.stderr, flush=True)
            kept.add([row])
            kept.checkpoint()


def used(folder: Path, method: str, documents: int, tokens: int, cut: bool) -> dict[str, float]:
    """Memory and seconds of one run. cut: after what fills the memory."""
    job = full_size.Trial(str(folder), method, documents, tokens, FILLED if cut else 0, torch.get_num_threads())
    return full_size.memory(job)


# The recording

RULES = ("calibrated", "curves")
# What makes the rows of a record.
FUNCTIONS: dict[str, tuple[Callable[..., Any], ...]] = {
    "calibrated": (study.calibrated,),
    "curves": (curve_rows,),
    "latency": (Methods, decided, driving, searched),
    "layers": (Methods,),
    "memory": (used,),
    "limits": (full_size.limited,),
}


def recorder(name: str) -> Recorder:
    """Of one record of rules, seconds or memory."""
    threads = torch.get_num_threads()
    fast = {"shape": full_size.SHAPE, "dtype": str(full_size.native()), "threads": threads}
    small = {"shape": full_size.SHAPE, "dtype": "torch.bfloat16", "threads": threads}
    keys: dict[str, tuple[list[str], dict[str, Any], Sequence[str]]] = {
        "calibrated": (["model", "set", "k"], {"overlap": study.OVERLAP, "point": study.POINT}, MODELS),
        "curves": (["model", "k"], {"thresholds": list(thresholds.THRESHOLDS[1:])}, MODELS),
        "latency": (["documents", "tokens", "round", "method", "rule", "k"], fast, ()),
        "layers": (["tokens", "round", "active"], fast, ()),
        "memory": (["method", "documents", "tokens", "run"], small, ()),
        "limits": (["method", "limit_mb", "round"], small, ()),
    }
    machine = "" if name in RULES else evidence.machine_name()
    return Recorder("grating", name, *keys[name], machine=machine, functions=FUNCTIONS[name])


def again(name: str) -> Again | None:
    """How a part of a record is made again; None of this machine's times, and of the probes, which all pools make."""
    if name == scoring.PROBES or name.startswith("scores-"):
        return scoring.rereading(name)
    if name not in RULES:
        return None

    def make(rows: pd.DataFrame) -> pd.DataFrame:
        scores, of_row = study.recorded(), rows.iloc[0]
        if name == "calibrated":
            return pd.DataFrame(study.calibrated(scores, of_row["model"], of_row["set"], of_row["k"]))
        return pd.DataFrame(curve_rows(scores, of_row["model"], of_row["k"]))

    unit = ["model", "set", "k", "rule"] if name == "calibrated" else ["model", "k", "threshold", "pool"]
    columns = ["setting", "n"] if name == "calibrated" else ["saved", "precision", "overlap"]
    return Again(FUNCTIONS[name], unit, some(unit[: unit.index("k") + 1], 1), make, columns, 1e-9)


def record_rules(kept: Recorder, curves: Recorder) -> None:
    """calibrated and curves, from the records of scores."""
    scores = study.recorded()
    for model, set_, k in CALIBRATED:
        if (model, set_, k) not in kept.done:
            kept.add(study.calibrated(scores, model, set_, k))
            print("calibrated", model, set_, k, file=sys.stderr, flush=True)
    for model, k in product(MODELS, study.KS):
        if (model, k) not in curves.done:
            curves.add(curve_rows(scores, model, k))


RECORDS: dict[str, tuple[Callable[..., None], list[str]]] = {
    "rules": (record_rules, ["calibrated", "curves"]),
    "latency": (record_latency, ["latency", "layers"]),
    "memory": (record_memory, ["memory"]),
    "limits": (record_limits, ["limits"]),
}


def main(argv: Sequence[str] | None = None) -> None:
    """The command; a record is written once nothing of it is missing, and gone on with where it was stopped."""
    parser = argparse.ArgumentParser(prog="make record PAPER=grating", description=__doc__)
    of_parts = {f"scores-{part}": part for part in scoring.PARTS}
    every = [*of_parts, *RECORDS]
    parser.add_argument("--only", nargs="+", default=every, choices=every)
    parser.add_argument("--share", default="1/1", help="i/n: this process reads every n-th pool of scores-*")
    options = parser.parse_args(argv)
    share, shares = map(int, options.share.split("/"))
    for name in options.only:
        if name in of_parts:
            print(*scoring.record(of_parts[name], share - 1, shares), sep="\n")
            continue
        make, names = RECORDS[name]
        recorders = list(map(recorder, names))
        make(*recorders)
        print(*(kept.finish() for kept in recorders if kept.done), sep="\n")


if __name__ == "__main__":
    main()

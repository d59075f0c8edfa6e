"""What GRATING's verdicts rest on: `make record PAPER=grating` makes all of it; it goes on where it was stopped.

One record at a time: `python -m ondevice_studies.record grating --only NAME`. Without a clock and in float32, so the
same on every machine but for rounding: `scores` (of all pools after every layer, by each bundled reranker's own head
and by linear probes), `probes` (those that the scores are of), `calibrated` (a rule for each model, set and K),
`curves` (Figure 10), `firsts` (the embedder's first candidates) and `candidates` (all of them, by their places among
the passages of the test split).
Of this machine, on full-size shapes with random weights: `latency` and `layers` (seconds of whole runs and of a layer),
`memory` (16 bits), `limits` (seconds under a hard limit of memory) and `larger` (both, of 4 billion parameters).
In parts, on sets without the documentation of packages: `scores-*` of `scoring`, which verdicts do not rest on yet.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from ondevice import assets, evidence, models, retrieval
from ondevice.corpus.pairs import Row, is_causal, reader, rows
from ondevice.evidence import Again, Recorder, some
from ondevice.retrieval.layer_scores import scores_of
from ondevice.retrieval.texts import digest
from ondevice_papers.grating import probes, thresholds
from ondevice_programs.reranker.folder import prepare
from ondevice_studies.grating import full_size, scoring, study
from ondevice_studies.grating.full_size import (
    BASELINE,
    CACHE,
    CHUNKS,
    HF,
    OFFLOAD,
    ONE_BATCH,
    OURS,
    WHOLE_LAYERS,
    WINDOW,
)
from ondevice_studies.grating.questions import (
    CALIBRATION,
    CLOZE,
    QUESTIONS,
    SPLITS,
    RankingQuestion,
    evaluated,
    of_kind,
    passages,
    pools,
)
from ondevice_studies.grating.study import DECODERS, MODELS

K = 5  # around whose boundary probes are to be right
FITTED = list(product((QUESTIONS, CLOZE), (CALIBRATION, "validation")))  # what probes are fitted on


@torch.inference_mode()
def read(loaded: models.Loaded, question: RankingQuestion) -> tuple[np.ndarray, np.ndarray]:
    """A pool's scores [L, N] float32 after every layer, by transformers in the precision of the loaded model, and the
    states [L - 1, N, d] float16 that a decoder's head is put on, but for the last ones; of an encoder none."""
    pairs = rows(reader(loaded.model, loaded.tokenizer), question.query, question.documents)
    order = sorted(range(len(pairs)), key=lambda index: len(pairs[index].ids))  # `scores_of` leaves such an order be
    back = np.argsort(order)
    kept = list[Tensor]()

    def keep(_: Any, given: tuple[Tensor, ...]) -> None:
        if given[0].ndim == 2:  # the model itself norms [n, tokens, d]
            kept.append(given[0].half())

    decoder: Any = loaded.model.model if is_causal(loaded.model) else None
    with decoder.norm.register_forward_pre_hook(keep) if decoder else contextlib.nullcontext():
        scores = scores_of(loaded.model, [pairs[index] for index in order])[:, back].numpy()
    below = len(scores) - 1
    groups = [torch.stack(kept[start : start + below]) for start in range(0, len(kept), below)]
    return scores, torch.cat(groups, 1)[:, back].numpy() if groups else np.empty(0, np.float16)


def kept_read(folder: Path, loaded: models.Loaded, question: RankingQuestion) -> tuple[np.ndarray, np.ndarray]:
    """`read`, from the folder where it is there: a deep model reads all pools for hours."""
    path = folder / f"{digest([question.set, question.query, *question.documents])}.npz"
    if not path.is_file():
        scores, states = read(loaded, question)
        with assets.writing(path) as temporary, temporary.open("wb") as file:
            np.savez(file, scores=scores, states=states)
    with np.load(path) as stored:
        return stored["scores"], stored["states"]


def score_row(
    name: str, number: int, question: RankingQuestion, scores: np.ndarray, probed: np.ndarray
) -> dict[str, Any]:
    """A row of `scores`. scores: [L, N]. probed: [L - 1, N] or empty."""
    return {
        "model": name, "set": question.set, "split": question.split, "pool": number, "name": question.name,
        "query_sha": digest([question.query])[:12], "candidates_sha": digest(question.documents)[:12],
        "relevant": question.relevant.astype(np.int8), "layers": scores.shape[0], "n": scores.shape[1],
        "scores": scores.astype(np.float32).ravel(), "probed": probed.astype(np.float32).ravel(),
    }  # fmt: skip


def asks(name: str, set_: str) -> bool:
    """Whether a model is asked a set: the applications the decoders alone."""
    return set_ in (QUESTIONS, CLOZE) or name in DECODERS


def model_rows(name: str, folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """All rows of a model: of `scores`, and of `probes` where it has some.

    Pools that probes are fitted on have scores of probes that were fitted on others of them. folder: keeps what was
    read, to go on with.
    """
    loaded = models.load(name)
    folder.mkdir(exist_ok=True)
    probed = name in DECODERS
    fitting = [(number, question) for split in FITTED for number, question in enumerate(pools(*split))]
    others = [
        (number, question)
        for set_, splits in SPLITS.items()
        for split in splits
        if (set_, split) not in FITTED and asks(name, set_)
        for number, question in enumerate(pools(set_, split))
    ]
    first = [kept_read(folder, loaded, question) for _, question in tqdm(fitting, f"{name}, validation")]
    empty, fitted, crossed = np.empty(0, np.float32), None, None
    if probed:
        states = [below for _, below in first]
        final = [scores[-1] for scores, _ in first]
        fitted = probes.rounded(probes.fit(states, final, K))
        crossed = probes.cross_fitted(states, final, K)
    score_rows = [
        score_row(name, *pool, scores, empty if crossed is None else crossed[index])
        for index, (pool, (scores, _)) in enumerate(zip(fitting, first, strict=True))
    ]
    del first
    for number, question in tqdm(others, f"{name}, other sets"):
        scores, below = kept_read(folder, loaded, question)
        by_probes = probes.predicted(fitted, below) if fitted else empty
        score_rows.append(score_row(name, number, question, scores, by_probes))
    layers = zip(fitted.weights, fitted.intercepts, strict=True) if fitted else ()
    return score_rows, [
        {"model": name, "layer": layer, "weights": weights, "intercept": float(intercept)}
        for layer, (weights, intercept) in enumerate(layers, 1)
    ]


def shipped(table: pd.DataFrame) -> dict[str, np.ndarray]:
    """The record `probes` as rerankers load it: weights [L - 1, d] and intercepts [L - 1] of each model."""
    arrays: dict[str, np.ndarray] = {}
    for model, layers in table.sort_values("layer").groupby("model"):
        arrays[f"{model}.weights"] = np.stack(layers["weights"].to_list())
        arrays[f"{model}.intercepts"] = layers["intercept"].to_numpy(np.float32)
    return arrays


# Pruning, from the scores


CALIBRATED = list(product(MODELS, (QUESTIONS, CLOZE), study.KS))


def curve_rows(scores: pd.DataFrame, model: str, k: int) -> list[dict[str, Any]]:
    """Of `curves`: documentation questions of the test split at every threshold."""
    pools_ = study.pools_of(scores, model, QUESTIONS)
    curve = thresholds.curve(pools_, k)
    return [
        {"model": model, "k": k, "threshold": threshold, "pool": number}
        | {name: float(values[row, number]) for name, values in curve.items()}
        for row, threshold in enumerate(thresholds.THRESHOLDS)
        for number in range(len(pools_))
    ]


def first_rows(set_: str) -> list[dict[str, Any]]:
    """Of `firsts`: whether the candidate nearest to the query by the embedder is relevant."""
    return [
        {"set": set_, "pool": number, "relevant": bool(pool.relevant[pool.cosine.argmax()])}
        for number, pool in enumerate(of_kind(set_, "test"))
    ]


def candidate_rows(set_: str) -> list[dict[str, Any]]:
    """Of `candidates`: the questions of the test split, with what search found."""
    positions = {text: position for position, text in reversed(list(enumerate(passages("test"))))}
    return [
        {"set": set_, "pool": number, "name": question.name, "query": question.query, "answer": question.answer,
         "candidates": np.array([positions[text] for text in question.documents], np.int32),
         "candidates_sha": digest(question.documents)[:12], "relevant": question.relevant.astype(np.int8),
         "ranks": question.ranks.astype(np.int8)}
        for number, question in enumerate(evaluated(set_, "test"))
    ]  # fmt: skip


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
    """A method, and what drives it: a calibrated rule for K of one model's documentation questions, or nothing."""

    method: str
    rule: str = ""
    k: int = 10
    model: str = study.DEEP


WAYS = {
    (20, SHORT): [Way(HF), Way(f"{HF} again"), Way(OFFLOAD), Way(OURS), Way(WHOLE_LAYERS), Way(full_size.IN_MEMORY),
                  Way(full_size.IN_MEMORY, study.LOW), Way(WHOLE_LAYERS, study.LOW),
                  *(Way(OURS, rule) for rule in (study.LOW, study.HIGH, study.MARGIN)), Way(OURS, study.MARGIN, 5)],
    (20, LONG): [Way(HF), Way(OFFLOAD), Way(OURS), Way(full_size.IN_MEMORY), Way(OURS, study.MARGIN)],
    (60, SHORT): [Way(BASELINE), *(Way(step, study.LOW) for step in (ONE_BATCH, CHUNKS, WINDOW, CACHE))],
    (1, 32): [Way(HF), Way(BM25)],
}  # fmt: skip


def searched() -> Callable[[Sequence[Row]], object]:
    """Keyword search of all passages of the test split."""
    questions = pools(QUESTIONS, "test")
    index = retrieval.sparse_index(list(dict.fromkeys(text for question in questions for text in question.documents)))
    return lambda given: index.search([questions[0].query], 10)


def decided() -> pd.DataFrame:
    """What rules decide on documentation questions, by which candidates are driven."""
    scores = evidence.load("grating", "scores")
    settings = evidence.load("grating", "calibrated")
    return study.outcomes(scores, settings, [study.DEEP], [QUESTIONS], study.KS)


def driving(outcomes: pd.DataFrame, way: Way, documents: int, turn: int, depth: int = study.FULL_LAYERS) -> np.ndarray:
    """[N] layers of the full size that candidates go through, as in recorded pools: others in every round."""
    if not way.rule:
        return np.full(documents, depth)
    of_rule = (outcomes["model"] == way.model) & (outcomes["rule"] == way.rule) & (outcomes["k"] == way.k)
    rows = outcomes[of_rule]
    count = documents // 20
    layer = np.concatenate(rows["layer"].iloc[(7 * turn + 1) * count : (7 * turn + 2) * count].to_list())
    return full_size.depths(layer, int(rows["layers"].iloc[0]), depth)


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


LARGER = "qwen3-reranker-4b"
LARGER_LAYERS = 36
LARGER_WAYS = (Way(HF), Way(OURS), Way(OURS, study.MARGIN, 5), Way(OURS, study.LOW))


def record_larger(kept: Recorder) -> None:
    """larger: seconds and memory of a model of 4 billion parameters, 20 x 128, in 16 bits. Ways in turn."""
    folder = prepare(f"random:{LARGER}", torch.bfloat16)
    outcomes = decided()
    sizes = {method: used(folder, method, 20, SHORT, method == OURS) for method in (HF, OURS)}
    with Methods(folder) as methods:
        given = full_size.rows(methods.shape, 20, SHORT)
        for turn, way in product(range(2), LARGER_WAYS):
            if (turn, way.method, way.rule, way.k) not in kept.done:
                row = methods.row(way, given, driving(outcomes, way, 20, turn, LARGER_LAYERS), turn)
                kept.add([row | {name: sizes[way.method][name] for name in ("rss_mb", "anon_mb")}])
                kept.checkpoint()


def record_memory(kept: Recorder) -> None:
    """memory: each run in a process of its own. Forms whose peak alone counts end after the first layer, whose peak is
    that of all, or after the first batch of four rows, once all documents' rows of the table were read."""
    folder = prepare(f"random:{full_size.SHAPE}", torch.bfloat16)
    jobs = [(HF, 1, 32, False), (OURS, 20, SHORT, False), (HF, 20, SHORT, False), (OURS, 20, LONG, False),
            (HF, 20, LONG, False), (OFFLOAD, 20, SHORT, True), (OFFLOAD, 20, LONG, True),
            (WHOLE_LAYERS, 20, SHORT, True), (WHOLE_LAYERS, 20, LONG, True), (OURS, 60, LONG, True),
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

# By record without a clock, what makes its rows.
FUNCTIONS: dict[str, tuple[Callable[..., Any], ...]] = {
    "scores": (model_rows,),
    "probes": (model_rows,),
    "calibrated": (study.calibrated,),
    "curves": (curve_rows,),
    "firsts": (first_rows,),
    "candidates": (candidate_rows,),
}


def recorder(name: str) -> Recorder:
    """Of one record."""
    settings = {"sets": {set_: list(splits) for set_, splits in SPLITS.items()}, "probes": {"k": K}}
    threads = torch.get_num_threads()
    fast = {"shape": full_size.SHAPE, "dtype": str(full_size.native()), "threads": threads}
    small = {"shape": full_size.SHAPE, "dtype": "torch.bfloat16", "threads": threads}
    keys: dict[str, tuple[list[str], dict[str, Any], Sequence[str]]] = {
        "scores": (["model", "set", "split", "pool"], settings, MODELS),
        "probes": (["model", "layer"], settings, DECODERS),
        "calibrated": (["model", "set", "k"], {"overlap": study.OVERLAP, "point": study.POINT}, MODELS),
        "curves": (["model", "k"], {"thresholds": list(thresholds.THRESHOLDS[1:])}, MODELS),
        "firsts": (["set"], {}, ()),
        "candidates": (["set"], {}, ()),
        "latency": (["documents", "tokens", "round", "method", "rule", "k"], fast, ()),
        "layers": (["tokens", "round", "active"], fast, ()),
        "memory": (["method", "documents", "tokens", "run"], small, ()),
        "limits": (["method", "limit_mb", "round"], small, ()),
        "larger": (["round", "method", "rule", "k"], small | {"shape": LARGER}, ()),
    }
    machine = "" if name in FUNCTIONS else evidence.machine_name()
    return Recorder("grating", name, *keys[name], machine=machine, functions=FUNCTIONS.get(name, ()))


def again(name: str) -> Again | None:
    """How a part of a record is made again; None of this machine's times, and of the probes, which all pools make."""
    if name == scoring.PROBES or name.startswith("scores-"):
        return scoring.rereading(name)
    if name == "scores":
        unit, columns, tolerance = ["model", "set", "split", "pool"], ["scores"], 2e-4
        return Again(FUNCTIONS[name], unit, some(unit, 3), _scores_again, columns, tolerance)
    if name in ("calibrated", "curves"):
        unit = ["model", "set", "k", "rule"] if name == "calibrated" else ["model", "k", "threshold", "pool"]
        columns = ["setting", "n"] if name == "calibrated" else ["saved", "precision", "overlap"]
        return Again(FUNCTIONS[name], unit, some(unit[: unit.index("k") + 1], 1), _rules_again(name), columns, 1e-9)
    rows_of = {"firsts": first_rows, "candidates": candidate_rows}.get(name)
    if rows_of is None:
        return None

    def make(rows: pd.DataFrame) -> pd.DataFrame:
        return pd.DataFrame(rows_of(rows["set"].iloc[0]))

    columns = ["relevant"] if name == "firsts" else ["candidates_sha"]
    return Again(FUNCTIONS[name], ["set", "pool"], some(["set"], 1), make, columns)


def _scores_again(rows: pd.DataFrame) -> pd.DataFrame:
    made = []
    row: Any
    for row in rows.itertuples():
        question = pools(row.set, row.split)[row.pool]
        scores = read(models.load(row.model), question)[0].astype(np.float32).ravel()
        made.append((row.model, row.set, row.split, row.pool, scores))
    return pd.DataFrame(made, columns=["model", "set", "split", "pool", "scores"])


def _rules_again(name: str) -> Callable[[pd.DataFrame], pd.DataFrame]:
    def make(rows: pd.DataFrame) -> pd.DataFrame:
        scores, of_row = evidence.load("grating", "scores"), rows.iloc[0]
        if name == "calibrated":
            return pd.DataFrame(study.calibrated(scores, of_row["model"], of_row["set"], of_row["k"]))
        return pd.DataFrame(curve_rows(scores, of_row["model"], of_row["k"]))

    return make


def record_scores(kept: Recorder, fitted: Recorder) -> None:
    """scores and probes, a model at a time."""
    for name in MODELS:
        if name not in {unit[0] for unit in kept.done}:
            scores, probed = model_rows(name, kept.parts / name)
            if probed:  # before the scores, whose presence says that a model is done
                fitted.add(probed)
                fitted.checkpoint()
            kept.add(scores)
            kept.checkpoint()


def record_rules(kept: Recorder, curves: Recorder) -> None:
    """calibrated and curves, from the record `scores`."""
    scores = evidence.load("grating", "scores")
    for model, set_, k in CALIBRATED:
        if (model, set_, k) not in kept.done:
            kept.add(study.calibrated(scores, model, set_, k))
            print("calibrated", model, set_, k, file=sys.stderr, flush=True)
    for model, k in product(MODELS, study.KS):
        if (model, k) not in curves.done:
            curves.add(curve_rows(scores, model, k))


def record_sets(rows_of: Callable[[str], list[dict[str, Any]]], kept: Recorder) -> None:
    """firsts or candidates; seconds, but for the vectors of all passages the first time."""
    for set_ in sorted({QUESTIONS, CLOZE} - {unit[0] for unit in kept.done}):
        kept.add(rows_of(set_))


RECORDS: dict[str, tuple[Callable[..., None], list[str]]] = {
    "scores": (record_scores, ["scores", "probes"]),
    "rules": (record_rules, ["calibrated", "curves"]),
    "firsts": (partial(record_sets, first_rows), ["firsts"]),
    "candidates": (partial(record_sets, candidate_rows), ["candidates"]),
    "latency": (record_latency, ["latency", "layers"]),
    "memory": (record_memory, ["memory"]),
    "limits": (record_limits, ["limits"]),
    "larger": (record_larger, ["larger"]),
}


def main(argv: Sequence[str] | None = None) -> None:
    """The command; a record is written once nothing of it is missing, and gone on with where it was stopped."""
    parser = argparse.ArgumentParser(prog="make record PAPER=grating", description=__doc__)
    of_parts = {f"scores-{part}": part for part in scoring.PARTS}
    parser.add_argument("--only", nargs="+", default=list(RECORDS), choices=[*RECORDS, *of_parts])
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
        if "probes" in names:
            models.save_arrays("probes", shipped(evidence.load("grating", "probes")))


if __name__ == "__main__":
    main()

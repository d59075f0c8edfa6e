"""Scores of all pools after every layer, read once: by each reranker's own head, and a decoder's by linear probes, too.

One record a part: `scores-validation`, of pools that rules and probes are fitted on, with `probes` as it fitted them;
then `scores-test` and `scores-applications`. Several processes share the reading of a part, and what was read is kept
on disk. It is in float32 and without a clock, so the same on every machine but for rounding.

Fixed before anything was recorded: rules, bounds and nulls of data/paper/claims.csv stay as they are (the log of rules
has what was changed later, of claims c03, c28, c38 and c39, with the reasons). `paragraphs` and
`notes and pages` take the place of documentation questions and inverse cloze; thresholds and margins are chosen and
certified on their validation pools, verdicts are of test pools. `smollm2-reranker` stands for the paper's decoders and
drives whole runs; it is judged with `minilm-reranker` where a claim is over models. Claim c24 is of a decoder that was
trained with a head on each layer: none is here, so it becomes untested. Applications are calibrated on random halves of
their pools, as before.

Seen in the validation pools: on `paragraphs` the relevant candidate is first in 13 of 100 pools by `smollm2-reranker`,
in 12 by `minilm-reranker`, in 29 by the embedder; on `notes and pages` in 92, 97 and 99. A sentence that a paragraph
has lost is no question; `smollm2-reranker`, which saw some in training, ranks them below the search, too.

So it was settled, before a test pool was read: precision is judged where questions are in natural words. Claims with a
loss of precision, and Figure 10, are of `notes and pages`, whose pools drive whole runs, too; claim c10 is of those and
of the questions of `RAG`. `paragraphs` judge what needs no label: how early the order settles, how much of the full
model's top K is kept. The paper's rule for precision within a point is not calibrated on them: a model that is not
precise loses nothing. Margins are certified, without labels, on the validation pools of both sets together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from ondevice import assets, evidence, models
from ondevice.corpus.pairs import is_causal, reader, rows
from ondevice.evidence import Again, Recorder, some
from ondevice.retrieval.layer_scores import scores_of
from ondevice.retrieval.texts import digest
from ondevice_papers.grating import probes
from ondevice_papers.grating.probes import Probes
from ondevice_studies.grating import sets
from ondevice_studies.grating.sets import CONTEXT, NOTES, PARAGRAPHS, RAG, TEST, VALIDATION, QueryPool

DEEP, ENCODER = "smollm2-reranker", "minilm-reranker"
MODELS = (DEEP, ENCODER)
PROBED = (DEEP,)  # models with probes
PARTS = {
    "validation": [(PARAGRAPHS, VALIDATION), (NOTES, VALIDATION)],
    "test": [(PARAGRAPHS, TEST), (NOTES, TEST)],
    "applications": [(RAG, TEST), (CONTEXT, TEST)],
}
K = 5  # around whose boundary probes are to be right
PROBES = "smollm2-probes"  # the record
_KEYS = ["model", "set", "pool"]


# Reading


@torch.inference_mode()
def read(loaded: models.Loaded, question: QueryPool) -> tuple[np.ndarray, np.ndarray]:
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


def kept_read(folder: Path, loaded: models.Loaded, question: QueryPool) -> tuple[np.ndarray, np.ndarray]:
    """`read`, from the folder where it is there: 30 layers read all pools for an hour."""
    path = folder / f"{loaded.spec}-{digest([question.set, question.query, *question.documents])}.npz"
    if not path.is_file():
        scores, states = read(loaded, question)
        with assets.writing(path) as temporary, temporary.open("wb") as file:
            np.savez(file, scores=scores, states=states)
    with np.load(path) as stored:
        return stored["scores"], stored["states"]


# Rows


def numbered(part: str) -> list[tuple[int, QueryPool]]:
    """Every pool of a part with its number in its set."""
    return [pool for set_split in PARTS[part] for pool in enumerate(sets.pools(*set_split))]


def score_row(name: str, number: int, question: QueryPool, scores: np.ndarray, probed: np.ndarray) -> dict[str, Any]:
    """A row of a record. scores: [L, N]. probed: [L - 1, N] or empty. nearest: the embedder's first is relevant."""
    return {
        "model": name, "set": question.set, "split": question.split, "pool": number, "name": question.name,
        "query_sha": digest([question.query])[:12], "candidates_sha": digest(question.documents)[:12],
        "relevant": question.relevant.astype(np.int8), "ranks": question.ranks.astype(np.int8),
        "nearest": bool(question.relevant[question.nearest]), "layers": scores.shape[0], "n": scores.shape[1],
        "scores": scores.astype(np.float32).ravel(), "probed": probed.astype(np.float32).ravel(),
    }  # fmt: skip


def validation_rows(
    name: str, pools: Sequence[tuple[int, QueryPool]], read: Sequence[tuple[np.ndarray, np.ndarray]]
) -> tuple[list[dict[str, Any]], Probes | None]:
    """Rows of pools that probes are fitted on, and the probes. Each row's are fitted on other pools than its own."""
    crossed: list[Any] = [np.empty(0, np.float32)] * len(pools)
    fitted = None
    if name in PROBED:
        states, final = [below for _, below in read], [scores[-1] for scores, _ in read]
        fitted = probes.rounded(probes.fit(states, final, K))
        crossed = probes.cross_fitted(states, final, K)
    rows_ = [
        score_row(name, *pool, scores, probed)
        for pool, (scores, _), probed in zip(pools, read, crossed, strict=True)
    ]  # fmt: skip
    return rows_, fitted


def later_rows(loaded: models.Loaded, number: int, question: QueryPool, fitted: Probes | None) -> dict[str, Any]:
    """A row of a pool that no probe was fitted on."""
    scores, states = read(loaded, question)
    probed = np.empty(0, np.float32) if fitted is None else probes.predicted(fitted, states)
    return score_row(loaded.spec, number, question, scores, probed)


def recorded_probes(name: str) -> Probes | None:
    """A model's, as the record of validation pools fitted them; None where it has none."""
    if name not in PROBED:
        return None
    layers = evidence.load("grating", PROBES).sort_values("layer")
    return Probes(np.stack(layers["weights"].to_list()), layers["intercept"].to_numpy(np.float32))


# The records

FUNCTIONS: Mapping[str, tuple[Callable[..., Any], ...]] = {
    "validation": (read, validation_rows, sets.pools),
    "test": (later_rows, sets.pools),
    "applications": (later_rows, sets.pools),
}


def recorder(part: str) -> Recorder:
    """Of the scores of a part."""
    sizes = {"most": sets.MOST, "segments": sets.SEGMENTS, "probes": {"k": K}, "threads": torch.get_num_threads()}
    return Recorder("grating", f"scores-{part}", _KEYS, sizes, MODELS, functions=FUNCTIONS[part])


def record(part: str, share: int = 0, shares: int = 1) -> list[Path]:
    """Every `shares`th pool of a part; the record's files once nothing is missing."""
    kept = recorder(part)
    pools = numbered(part)
    if part == "validation":
        return _record_validation(kept, pools, share, shares)
    for name in MODELS:
        loaded, fitted = models.load(name), recorded_probes(name)
        for number, question in tqdm(pools[share::shares], f"{part}, {name}"):
            if (name, question.set, number) not in kept.done:
                kept.add([later_rows(loaded, number, question, fitted)])
    kept.checkpoint()
    every = {(name, question.set, number) for name, (number, question) in product(MODELS, pools)}
    return [kept.finish()] if every <= recorder(part).done else []


def _record_validation(kept: Recorder, pools: Sequence[tuple[int, QueryPool]], share: int, shares: int) -> list[Path]:
    """Reads a share; where all shares are read, fits the probes and writes both records."""
    folder = kept.parts / "read"
    folder.mkdir(exist_ok=True)
    for name in MODELS:
        loaded = models.load(name)
        for _, question in tqdm(pools[share::shares], f"validation, {name}"):
            kept_read(folder, loaded, question)
    if len(list(folder.glob("[!.]*.npz"))) < len(MODELS) * len(pools):
        return []
    fitted_to = Recorder("grating", PROBES, ["layer"], {"k": K}, PROBED, functions=FUNCTIONS["validation"])
    for name in MODELS:
        loaded = models.load(name)
        rows_, fitted = validation_rows(name, pools, [kept_read(folder, loaded, question) for _, question in pools])
        kept.add(rows_)
        if fitted:
            layers = enumerate(zip(fitted.weights, fitted.intercepts, strict=True), 1)
            fitted_to.add([
                {"model": name, "layer": layer, "weights": weights, "intercept": float(intercept)}
                for layer, (weights, intercept) in layers
            ])  # fmt: skip
    return [fitted_to.finish(), kept.finish()]


def rereading(name: str) -> Again | None:
    """How three pools of a record are read again; None of the probes, which all pools make."""
    part = name.partition("-")[2]
    if name == PROBES:
        return None

    def make(table: pd.DataFrame) -> pd.DataFrame:
        by_number = {(question.set, number): question for number, question in numbered(part)}
        rescored = []
        row: Any
        for row in table.itertuples():
            scores, _ = read(models.load(row.model), by_number[row.set, row.pool])
            rescored.append((row.model, row.set, row.pool, scores.astype(np.float32).ravel()))
        return pd.DataFrame(rescored, columns=[*_KEYS, "scores"])

    return Again(FUNCTIONS[part], _KEYS, some(_KEYS, 3), make, ["scores"], 2e-4)

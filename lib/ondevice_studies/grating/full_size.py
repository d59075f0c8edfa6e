"""Full-size shapes with random weights, driven by recorded decisions: seconds and memory of every method.

Random weights rank nothing, so who is active after which layer is an input: what a trained reranker decided for a
recorded pool, its layers mapped by their share of the depth. Rows are random tokens. Memory is measured in a process of
its own that another one watches, from the page cache's bottom: what grows after the imports is weights, states and
temporaries.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from ondevice import commands
from ondevice.corpus.pairs import Row
from ondevice.meters import cached_bytes, evict, mark, sample, trim
from ondevice.meters.limit import hard_limit, join
from ondevice.precision import bfloat16_pays
from ondevice_papers.grating.architectures import Architecture, PaddedRows
from ondevice_papers.grating.engine import CHUNK, Engine, Pass
from ondevice_papers.grating.pruning import PoolOutcome, Rule, ScoresOf
from ondevice_papers.grating.weights import BY_LAYER, BY_PART, InMemory, Streamed

HF, OFFLOAD, OURS = "HF", "HF Offload", "GRATING"
WHOLE_LAYERS = "GRATING, two whole layers"
IN_MEMORY = "GRATING's engine, weights in memory"
STEPS = ("baseline", "pruning", "chunked execution", "sliding window", "embedding cache")
BASELINE, ONE_BATCH, CHUNKS, WINDOW, CACHE = STEPS  # of Figure 16, each with those before it
SHAPE = "qwen3-reranker-0.6b"
HF_8, HF_20 = "HF, 8 rows at once", "HF, 20 rows at once"
BATCHES = {HF: 4, OFFLOAD: 4, BASELINE: 4, HF_8: 8, HF_20: 20}  # rows of a forward of transformers
MMAP = 1 << 16  # bytes: malloc's setting with which accelerate's offload holds least
MB = 1_000_000
Score = Callable[[Sequence[Row]], object]


def native() -> torch.dtype:
    """What products are fast in on this machine."""
    return torch.bfloat16 if bfloat16_pays("cpu") else torch.float32


@cache
def architecture(folder: Path) -> Architecture:
    """Of a saved random shape, with two tokens as its answers."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(folder))
    return Architecture(config, (0, 1) if config.architectures[0].endswith("ForCausalLM") else None)


def rows(shape: Architecture, documents: int, tokens: int, seed: int = 0) -> list[Row]:
    """Random tokens, so that few embedding rows are asked for twice."""
    drawn = np.random.default_rng(seed).integers(5, shape.vocabulary, (documents, tokens))
    return [Row(tuple(row), tokens) for row in drawn.tolist()]


def depths(outcome: ArrayLike, small: int, large: int) -> NDArray[np.int64]:
    """[N] layers of a large model that each candidate goes through, by those of a small one's recorded outcome."""
    return np.ceil(np.asarray(outcome) * large / small).astype(np.int64)


def driven(runs: NDArray[np.int64]) -> Callable[..., PoolOutcome]:
    """A `pruning.select` that has each candidate run through so many layers, whatever its scores."""

    def select(
        scores_of: ScoresOf, candidates: int, layers: int, k: int, rule: Rule | None, exact_order: bool
    ) -> PoolOutcome:
        history = np.full((layers, candidates), np.nan)
        for layer in range(1, int(runs.max()) + 1):
            active = np.flatnonzero(runs >= layer)
            history[layer - 1, active] = scores_of(layer, active)
        return PoolOutcome(history, runs == runs.max(), runs)

    return select


# Methods


def network(folder: Path, **options: Any) -> Any:
    """transformers' model, its weights a mapping of their files."""
    import transformers

    model_class = getattr(transformers, architecture(folder).name)
    return model_class.from_pretrained(str(folder), dtype="auto", **options).eval()


def offloaded(folder: Path) -> Any:
    """accelerate's offload: before a layer runs its weights are read from the files, after it they are dropped."""
    kept = tempfile.TemporaryDirectory(prefix="offload-")
    device_map = {
        "model.embed_tokens": "cpu",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
        "model.layers": "disk",
    }
    model = network(folder, device_map=device_map, offload_folder=kept.name)
    model.offload_folder_of_this_run = kept  # removed with the model
    return model


def by_transformers(folder: Path, model: Any, size: int, batches: int | None = None) -> Score:
    """Batches of like lengths through its own forward, without what a reranker needs not: a cache, other logits.

    size: rows of a batch. batches: how many of them, for memory: one takes what all do, as all rows of the table are
    read first.
    """
    shape = architecture(folder)

    @torch.inference_mode()
    def score(given: Sequence[Row]) -> NDArray[np.float64]:
        scores = []
        for row in given:  # the rows of the table that all batches touch
            model.model.embed_tokens(torch.tensor(row.ids))
        for start in range(0, len(given) if batches is None else batches * size, size):
            batch = PaddedRows(given[start : start + size])
            ids = torch.zeros(batch.real.shape, dtype=torch.int64)
            ids[batch.real] = batch.ids
            hidden = model.model(input_ids=ids, attention_mask=batch.real.long(), use_cache=False).last_hidden_state
            answers = list(shape.answers or ())
            logits = shape.pooled(batch, hidden).float() @ model.lm_head.weight[answers].float().T
            scores.append(logits[:, 0] - logits[:, 1])
        return torch.cat(scores).double().numpy()

    return score


@contextlib.contextmanager
def scorer(
    folder: Path, method: str, runs: NDArray[np.int64] | None = None, batches: int | None = None
) -> Iterator[Score]:
    """A method with its weights loaded, as far as it loads them before it is asked."""
    shape = architecture(folder)
    options: dict[str, Any] = {} if runs is None else {"select": driven(runs)}
    if method in BATCHES:
        model = offloaded(folder) if method == OFFLOAD else network(folder)
        yield by_transformers(folder, model, BATCHES[method], batches)
    elif method in (ONE_BATCH, CHUNKS, IN_MEMORY):
        model = network(folder)
        if runs is not None:  # a pass that ends early reads not all of what a whole one does
            for value in model.parameters():
                value.detach().flatten()[::1024].sum()
        yield Engine(shape, InMemory(model), chunk=1 << 40 if method == ONE_BATCH else CHUNK, **options).score
    else:
        rows = shape.vocabulary if method == WINDOW else None
        weights = Streamed(folder, shape.part_of, units=BY_PART if method == OURS else BY_LAYER, embedding_rows=rows)
        with contextlib.closing(weights):
            if method == WINDOW:  # the whole table in memory, as without the cache
                for ids in torch.arange(shape.vocabulary).split(4096):
                    weights.rows(ids)
            yield Engine(shape, weights, **options).score


def timed(score: Score, given: Sequence[Row]) -> tuple[float, Pass | None]:
    """Seconds, and what a pass of ours gave."""
    began = time.perf_counter()
    result = score(given)
    return time.perf_counter() - began, result if isinstance(result, Pass) else None


# Memory, in a process of its own


@dataclass(frozen=True)
class Trial:
    """What to measure. first: end after so many layers of ours, or batches of transformers; 0 is a whole run.

    group: that limits the process from the moment when everything is imported; "" is none.
    """

    folder: str
    method: str
    documents: int
    tokens: int
    first: int = 0
    threads: int = 2
    group: str = ""


def memory(job: Trial) -> dict[str, float]:
    """MB over the imports: rss, anon (with shared), their mean, cached (in the page cache afterwards); seconds.

    Raises ValueError where memory cannot be measured; RuntimeError, with its last words, where the process fails.
    """
    files = sorted(Path(job.folder).glob("*.safetensors"))
    evict(files)
    sampled = sample(_command(job), environment=_environment(job))
    return {
        "rss_mb": sampled.peak("resident") / MB,
        "anon_mb": sampled.peak("anonymous", "shared") / MB,
        "mean_mb": sampled.mean("resident") / MB,
        "cached_mb": cached_bytes(files) / MB,
        "seconds": sampled.result,
    }


def limited(job: Trial, megabytes: int, patience: float = 600.0) -> dict[str, Any]:
    """Seconds of a run that may have so many MB over the imports, the page cache of its weights counted; how it ended.

    ended: "done", "killed" by the kernel, or "too long", after `patience` seconds; seconds are NaN but for the first.
    Raises OSError where no limit can be set, RuntimeError, with its last words, where the process fails.
    """
    evict(sorted(Path(job.folder).glob("*.safetensors")))
    with hard_limit(megabytes * MB) as group:
        command = _command(replace(job, group=str(group)))
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                check=False,
                timeout=patience,
                env=os.environ | _environment(job),
            )
        except subprocess.TimeoutExpired:
            return {"ended": "too long", "seconds": np.nan}
    if done.returncode == -signal.SIGKILL:
        return {"ended": "killed", "seconds": np.nan}
    if done.returncode:
        raise RuntimeError(f"{job.method} in {megabytes} MB failed: {done.stderr.strip().splitlines()[-1:]}")
    return {"ended": "done", "seconds": float(done.stdout.split()[-1])}


def _command(job: Trial) -> list[str]:
    return [sys.executable, "-m", "ondevice_studies.grating.full_size", "measure", json.dumps(asdict(job))]


def _environment(job: Trial) -> dict[str, str]:
    environment = {"OMP_NUM_THREADS": str(job.threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return environment | ({"MALLOC_MMAP_THRESHOLD_": str(MMAP)} if job.method == OFFLOAD else {})


def _measure(job: Trial) -> None:
    torch.set_num_threads(job.threads)
    folder = Path(job.folder)
    if job.method in BATCHES:
        import accelerate  # noqa: F401
    given = rows(architecture(folder), job.documents, job.tokens)
    for dtype in (torch.float32, torch.bfloat16):
        torch.ones(8, 64, dtype=dtype) @ torch.ones(64, 64, dtype=dtype)
    trim()
    mark("baseline")
    if job.group:
        join(Path(job.group))
    runs = np.full(job.documents, job.first) if job.first else None
    with scorer(folder, job.method, runs, job.first or None) as score:
        seconds, _ = timed(score, given)
        mark("end")
    print(json.dumps(seconds))


if __name__ == "__main__":
    _measure(Trial(**json.loads(commands.child("measure")[1])))

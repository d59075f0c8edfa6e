"""Full-size shapes with random weights, driven by recorded decisions: seconds and memory of every method.

Random weights rank nothing, so who is active after which layer is an input: what a trained reranker decided for a
recorded pool, its layers mapped by their share of the depth. Rows are random tokens. Memory is measured in a process of
its own that another one watches, from the page cache's bottom: what grows after the imports is weights, states and
temporaries.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from ondevice import commands
from ondevice.meters import cached_bytes, evict, mark, sample, trim
from ondevice.precision import bfloat16_pays
from ondevice_papers.grating.architectures import Architecture, Batch, Row
from ondevice_papers.grating.engine import CHUNK, Engine, Pass
from ondevice_papers.grating.pruning import Outcome, Rule, ScoresOf
from ondevice_papers.grating.weights import BY_LAYER, BY_PART, InMemory, Streamed

HF, OFFLOAD, OURS = "HF", "HF Offload", "GRATING"
WHOLE_LAYERS = "GRATING, two whole layers"
IN_MEMORY = "GRATING's engine, weights in memory"
STEPS = ("baseline", "pruning", "chunked execution", "sliding window", "embedding cache")
BASELINE, ONE_BATCH, CHUNKS, WINDOW, CACHE = STEPS  # of Figure 16, each with those before it
SHAPE = "qwen3-reranker-0.6b"
BATCH = 4  # rows of a forward of transformers; with 20 at a time the temporaries are five times as many
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


def rows(of: Architecture, documents: int, tokens: int, seed: int = 0) -> list[Row]:
    """Random tokens, so that few embedding rows are asked for twice."""
    drawn = np.random.default_rng(seed).integers(5, of.vocabulary, (documents, tokens))
    return [Row(tuple(row), tokens) for row in drawn.tolist()]


def depths(outcome: ArrayLike, small: int, large: int) -> NDArray[np.int64]:
    """[N] layers of a large model that each candidate goes through, by those of a small one's recorded outcome."""
    return np.ceil(np.asarray(outcome) * large / small).astype(np.int64)


def driven(runs: NDArray[np.int64]) -> Callable[..., Outcome]:
    """A `pruning.select` that has each candidate run through so many layers, whatever its scores."""

    def select(
        scores_of: ScoresOf, candidates: int, layers: int, k: int, rule: Rule | None, exact_order: bool
    ) -> Outcome:
        history = np.full((layers, candidates), np.nan)
        for layer in range(1, int(runs.max()) + 1):
            active = np.flatnonzero(runs >= layer)
            history[layer - 1, active] = scores_of(layer, active)
        return Outcome(history, runs == runs.max(), runs)

    return select


# Methods


def network(folder: Path, **options: Any) -> Any:
    """transformers' model, its weights a mapping of their files."""
    import transformers

    made = getattr(transformers, architecture(folder).name)
    return made.from_pretrained(str(folder), dtype="auto", **options).eval()


def offloaded(folder: Path) -> Any:
    """accelerate's offload: before a layer runs its weights are read from the files, after it they are dropped."""
    kept = tempfile.TemporaryDirectory(prefix="offload-")
    places = {
        "model.embed_tokens": "cpu",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
        "model.layers": "disk",
    }
    made = network(folder, device_map=places, offload_folder=kept.name)
    made.offload_folder_of_this_run = kept  # removed with the model
    return made


def by_transformers(folder: Path, made: Any, batches: int | None = None) -> Score:
    """Batches of like lengths through its own forward, without what a reranker needs not: a cache, other logits.

    batches: how many of them, for memory: one takes what all do, as all rows of the table are read first.
    """
    of = architecture(folder)

    @torch.inference_mode()
    def score(given: Sequence[Row]) -> NDArray[np.float64]:
        found = []
        for row in given:  # the rows of the table that all batches touch
            made.model.embed_tokens(torch.tensor(row.ids))
        for start in range(0, len(given) if batches is None else batches * BATCH, BATCH):
            batch = Batch(given[start : start + BATCH])
            ids = torch.zeros(batch.real.shape, dtype=torch.int64)
            ids[batch.real] = batch.ids
            hidden = made.model(input_ids=ids, attention_mask=batch.real.long(), use_cache=False).last_hidden_state
            answers = list(of.answers or ())
            logits = of.pooled(batch, hidden).float() @ made.lm_head.weight[answers].float().T
            found.append(logits[:, 0] - logits[:, 1])
        return torch.cat(found).double().numpy()

    return score


@contextlib.contextmanager
def scorer(
    folder: Path, method: str, runs: NDArray[np.int64] | None = None, batches: int | None = None
) -> Iterator[Score]:
    """A method with its weights loaded, as far as it loads them before it is asked."""
    of = architecture(folder)
    options: dict[str, Any] = {} if runs is None else {"select": driven(runs)}
    if method in (HF, BASELINE, OFFLOAD):
        yield by_transformers(folder, offloaded(folder) if method == OFFLOAD else network(folder), batches)
    elif method in (ONE_BATCH, CHUNKS, IN_MEMORY):
        made = network(folder)
        if runs is not None:  # a pass that ends early reads not all of what a whole one does
            for value in made.parameters():
                value.detach().flatten()[::1024].sum()
        yield Engine(of, InMemory(made), chunk=1 << 40 if method == ONE_BATCH else CHUNK, **options).score
    else:
        rows = of.vocabulary if method == WINDOW else None
        weights = Streamed(folder, of.part_of, units=BY_PART if method == OURS else BY_LAYER, embedding_rows=rows)
        with contextlib.closing(weights):
            if method == WINDOW:  # the whole table in memory, as without the cache
                for ids in torch.arange(of.vocabulary).split(4096):
                    weights.rows(ids)
            yield Engine(of, weights, **options).score


def timed(score: Score, given: Sequence[Row]) -> tuple[float, Pass | None]:
    """Seconds, and what a pass of ours gave."""
    began = time.perf_counter()
    found = score(given)
    return time.perf_counter() - began, found if isinstance(found, Pass) else None


# Memory, in a process of its own


@dataclass(frozen=True)
class Job:
    """What to measure. first: end after so many layers of ours, or batches of transformers; 0 is a whole run."""

    folder: str
    method: str
    documents: int
    tokens: int
    first: int = 0
    threads: int = 2


def memory(job: Job) -> dict[str, float]:
    """MB over the imports: rss, anon (with shared), their mean, cached (in the page cache afterwards); seconds.

    Raises ValueError where memory cannot be measured; RuntimeError, with its last words, where the process fails.
    """
    files = sorted(Path(job.folder).glob("*.safetensors"))
    environment = {"OMP_NUM_THREADS": str(job.threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if job.method == OFFLOAD:
        environment["MALLOC_MMAP_THRESHOLD_"] = str(MMAP)
    evict(files)
    command = [sys.executable, "-m", "ondevice_studies.grating.full_size", "measure", json.dumps(asdict(job))]
    found = sample(command, environment=environment)
    return {
        "rss_mb": found.peak("resident") / MB,
        "anon_mb": found.peak("anonymous", "shared") / MB,
        "mean_mb": found.mean("resident") / MB,
        "cached_mb": cached_bytes(files) / MB,
        "seconds": found.result,
    }


def _measure(job: Job) -> None:
    torch.set_num_threads(job.threads)
    folder = Path(job.folder)
    if job.method in (HF, BASELINE, OFFLOAD):
        import accelerate  # noqa: F401
    given = rows(architecture(folder), job.documents, job.tokens)
    for dtype in (torch.float32, torch.bfloat16):
        torch.ones(8, 64, dtype=dtype) @ torch.ones(64, 64, dtype=dtype)
    trim()
    mark("baseline")
    runs = np.full(job.documents, job.first) if job.first else None
    with scorer(folder, job.method, runs, job.first or None) as score:
        seconds, _ = timed(score, given)
        mark("end")
    print(json.dumps(seconds))


if __name__ == "__main__":
    _measure(Job(**json.loads(commands.child("measure")[1])))

"""Memory and time of one way to run a reranker, in a process of its own that another one watches.

The process that asks imports no torch. The one that is measured imports everything, multiplies once, gives free memory
back and only then sets the baseline, so that what grows is weights, states and temporaries.
"""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ondevice import assets, commands
from ondevice.meters import Sampled, cached_bytes, evict, limit_growth, mark, sample, trim

if TYPE_CHECKING:
    from ondevice.grating.architectures import Row
    from ondevice.grating.baselines import Model, Scorer
    from ondevice.grating.engine import Engine
    from ondevice.grating.weights import Streamed

OURS = "ours"
BASELINES = ("transformers", "transformers, copied", "accelerate", "accelerate, all", "CrossEncoder", "int8",
             "layer loading")  # fmt: skip
ABLATION = ("monolithic", "+ pruning", "+ chunked execution", "+ sliding window", "+ embedding cache")  # Figure 16
METHODS = (OURS, *BASELINES, *ABLATION)
MB = 1_000_000  # bytes
_MODULE = "ondevice.grating.measuring"
_ALL_AT_ONCE = 1 << 40  # tokens of a chunk
_LIBRARIES = {  # beside torch and transformers
    "CrossEncoder": ("sentence_transformers",), "accelerate": ("accelerate",), "accelerate, all": ("accelerate",),
    "transformers, copied": ("accelerate",), "int8": ("accelerate",),
}  # fmt: skip


# In the process that asks


@dataclass(frozen=True)
class Job:
    """What to measure: one of METHODS with a reranker's folder, a query and its N documents.

    longest: most tokens of a row; longer documents are cut. repeats: times to rank. threads: of torch.
    batch, whole_head: of transformers' forward, see `baselines.Batched`. chunk: tokens of a chunk of the engine.
    offload: the engine's hidden states between layers go to a file.
    embedding_rows: that its cache has room for; None is a tenth of the vocabulary.
    threshold, first (layer to decide after), top_k: of the paper's pruning, which all steps of Figure 16 but the first
        have; `ours` runs all layers.
    mmap_threshold: bytes from which malloc gives each piece of memory back at once (glibc); None leaves its own rule,
        which keeps what large temporaries took. throttle: bytes a second of a simulated slower disk, `ours` only.
    limit: bytes of private writable memory beyond the imports that the process may have (RLIMIT_DATA).
    """

    method: str
    folder: str
    query: str
    documents: tuple[str, ...]
    longest: int | None = None
    repeats: int = 1
    threads: int = 1
    batch: int = 4
    whole_head: bool = False
    chunk: int = 512
    offload: bool = False
    embedding_rows: int | None = None
    threshold: float = float("inf")
    first: int = 1
    top_k: int = 5
    mmap_threshold: int | None = None
    throttle: float | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"There is no method {self.method!r}; there are {', '.join(METHODS)}.")
        if not self.documents:
            raise ValueError("There are no documents to rank.")
        for name, value in (("repeats", self.repeats), ("threads", self.threads), ("top_k", self.top_k)):
            if value < 1:
                raise ValueError(f"{name} is at least 1, not {value}.")


@dataclass(frozen=True)
class Measured:
    """What a job gave.

    memory: phases "baseline" (loading) and "loaded" (ranking), up to "end". scores: [N] logits; with pruning of
    different layers, so no ranking. loading: seconds. seconds, processor: [repeats] of each time it ranked, by the
    clock and of all the process's threads. stalled: [repeats] seconds that weights were waited for, where known.
    cached: bytes of the weight files that the page cache holds after the process, which began with none there.
    parts: bytes that must be there at the peak, by what they are for; only where the weights are streamed.
    work: layer-candidates computed the last time; NaN where it is not the engine's. tokens: of the longest row.
    """

    job: Job
    memory: Sampled
    scores: NDArray[np.float64]
    loading: float
    seconds: NDArray[np.float64]
    processor: NDArray[np.float64]
    stalled: NDArray[np.float64]
    cached: int
    parts: Mapping[str, int]
    work: float
    tokens: int

    def row(self) -> dict[str, Any]:
        """Of a table: sizes in MB (10**6 bytes), as growth over the imports.

        first_s: seconds of the first time, with nothing in the page cache; next_s: median of the others, NaN without;
        processor_s and stalled_s are of the last time.
        rss, anon (anonymous and shared) and file are peaks from loading on, ranking_rss is of ranking alone.
        """
        memory, job = self.memory, self.job
        return {
            "method": job.method, "documents": len(job.documents), "tokens": self.tokens, "batch": job.batch,
            "head": "whole" if job.whole_head else "two rows", "chunk": job.chunk,
            "malloc": "default" if job.mmap_threshold is None else f"mmap from {job.mmap_threshold}",
            "rss_mb": memory.peak("resident") / MB, "anon_mb": memory.peak("anonymous", "shared") / MB,
            "file_mb": memory.peak("file") / MB, "ranking_rss_mb": memory.peak("resident", phase="loaded") / MB,
            "mean_rss_mb": memory.mean("resident") / MB, "cached_mb": self.cached / MB,
            "parts_mb": sum(self.parts.values()) / MB or float("nan"), "imports_mb": memory.baseline / MB,
            "loading_s": self.loading, "first_s": float(self.seconds[0]),
            "next_s": float(np.median(self.seconds[1:])) if len(self.seconds) > 1 else float("nan"),
            "processor_s": float(self.processor[-1]), "stalled_s": float(self.stalled[-1]),
            "work": self.work,
        }  # fmt: skip


def measure(job: Job) -> Measured:
    """Run a job in a process of its own, from a page cache that has nothing of the weights.

    Raises ValueError where memory cannot be measured; RuntimeError, with its last words, where the process fails.
    """
    files = sorted(Path(job.folder).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{Path(job.folder).name} has no safetensors.")
    environment = {"OMP_NUM_THREADS": str(job.threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if job.mmap_threshold is not None:
        environment["MALLOC_MMAP_THRESHOLD_"] = str(job.mmap_threshold)
    evict(files)
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "job.json"
        written.write_text(json.dumps(asdict(job)), encoding="utf-8")
        memory = sample([sys.executable, "-m", _MODULE, "measure", str(written)], environment=environment)
    found = memory.result
    for name in ("scores", "seconds", "processor", "stalled"):
        found[name] = np.array(found[name], np.float64)
    return Measured(job=job, memory=memory, cached=cached_bytes(files), **found)


def prepared(shape: str) -> Path:
    """The folder of a published shape with random weights, in bfloat16 and the cache; written on first use.

    For time and memory only. Its tokenizer has a token a word (`save_tokenizer`).
    """
    folder = assets.cache_folder("grating") / f"random-{shape}"
    if not (folder / _WORDS).is_file():
        done = subprocess.run(
            [sys.executable, "-m", _MODULE, "prepare", shape, str(folder)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{shape} could not be written: {' '.join(done.stderr.strip().splitlines()[-1:])}")
    return folder


def random_pool(folder: Path, documents: int, tokens: int, seed: int = 0) -> tuple[str, tuple[str, ...]]:
    """A query and documents of random words that with it fill rows of so many tokens, for a folder of `prepared`.

    Words are uniform over the vocabulary, so that few embedding rows are asked for twice. Raises ValueError on rows
    that have no room for a word.
    """
    words = json.loads((folder / _WORDS).read_text(encoding="utf-8"))
    if tokens <= words["prompt"]:
        raise ValueError(f"Rows have more than the {words['prompt']} tokens of query and prompt, not {tokens}.")
    size = documents, tokens - words["prompt"]
    drawn = np.random.default_rng(seed).integers(len(_SPECIAL), words["vocabulary"], size)
    return _QUERY, tuple(" ".join(f"w{token}" for token in row) for row in drawn.tolist())


# In a process of its own

_WORDS, _QUERY = "words.json", "w10 w11 w12"
_SPECIAL = ("<pad>", "<unk>", "<eos>", "yes", "no")
_TEMPLATE = """{%- set part = namespace(query="", document="") -%}
{%- for message in messages -%}
{%- if message.role == "query" -%}{%- set part.query = message.content -%}{%- endif -%}
{%- if message.role == "document" -%}{%- set part.document = message.content -%}{%- endif -%}
{%- endfor -%}
"""


def save_tokenizer(folder: Path, vocabulary: int) -> None:
    """Give a saved model a tokenizer with a token a word: "w7" is token 7, and "yes" and "no" are tokens.

    A causal LM's has a chat template by which CrossEncoder makes the same tokens as the engine.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from ondevice.grating import architectures
    from ondevice.grating.baselines import Model

    words = [*_SPECIAL, *(f"w{token}" for token in range(len(_SPECIAL), vocabulary))]
    made = Tokenizer(models.WordLevel({word: token for token, word in enumerate(words)}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    prompted = config["architectures"][0].endswith("ForCausalLM")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>",
        padding_side="left" if prompted else "right",
    )  # fmt: skip
    if prompted:
        asked = f"<Instruct>: {architectures.INSTRUCTION}\n<Query>: {{{{ part.query }}}}\n"
        end = f"<Document>: {{{{ part.document }}}} {architectures.SUFFIX}"
        tokenizer.chat_template = f"{_TEMPLATE}{architectures.PREFIX}{asked}{end}"
    tokenizer.save_pretrained(folder)
    prompt = len(Model.open(folder).rows(_QUERY, [_QUERY])[0].ids) - len(_QUERY.split())
    (folder / _WORDS).write_text(json.dumps({"vocabulary": vocabulary, "prompt": prompt}), encoding="utf-8")


def _prepare(shape: str, folder: Path) -> None:
    """Write a random model in one step: it is in memory once, and an interrupted one leaves nothing."""
    import torch

    from ondevice import shapes

    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as name:
        made = Path(name) / folder.name
        of = shapes.shape(shape)
        shapes.random_model(of, torch.bfloat16, 0).save_pretrained(made)
        save_tokenizer(made, of.values["vocab_size"])
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)


def _measure(job: Job) -> dict[str, Any]:
    """What a process finds for a job, with marks for the one that watches it."""
    model, make = _imported(job)
    trim()
    mark("baseline")
    if job.limit is not None:
        limit_growth(job.limit)
    started = time.perf_counter()
    scorer = make(model)
    loading = time.perf_counter() - started
    mark("loaded")
    seconds, processor, stalled = [], [], []
    for _ in range(job.repeats):
        started, used = time.perf_counter(), time.process_time()
        scores = scorer.scores(job.query, job.documents)
        seconds.append(time.perf_counter() - started)
        processor.append(time.process_time() - used)
        stalled.append(_stalled(scorer))
    mark("end")
    rows = model.rows(job.query, job.documents)
    return {
        "scores": scores.tolist(), "loading": loading, "seconds": seconds, "processor": processor, "stalled": stalled,
        "parts": _parts(scorer, rows), "work": _work(scorer), "tokens": max(len(row.ids) for row in rows),
    }  # fmt: skip


def _imported(job: Job) -> tuple[Model, Callable[[Model], Scorer]]:
    """All that comes before the baseline: imports, the tokenizer, a first product."""
    import torch

    from ondevice.grating.baselines import Model

    torch.set_num_threads(job.threads)
    for library in _LIBRARIES.get(job.method, ()):
        importlib.import_module(library)
    model = Model.open(job.folder, job.longest)
    for dtype in (torch.float32, torch.bfloat16):
        torch.ones(8, 64, dtype=dtype) @ torch.ones(64, 64, dtype=dtype)
    return model, lambda model: _scorer(model, job)


def _scorer(model: Model, job: Job) -> Scorer:
    """A method with its weights loaded, as far as it loads them before it is asked."""
    from ondevice.grating import baselines

    if job.method == OURS or job.method in ABLATION:
        return _layered(model, job)
    if job.method == "accelerate, all":
        return baselines.offloaded(model, job.batch, job.whole_head, everything=True)
    if job.method == "CrossEncoder":
        return baselines.CrossEncoder(model, job.batch)
    if job.method == "layer loading":
        return baselines.layer_loading(model)
    made: dict[str, Callable[[Model, int, bool], Scorer]] = {
        "transformers": baselines.in_memory, "transformers, copied": baselines.copied,
        "accelerate": baselines.offloaded, "int8": baselines.quantised,
    }  # fmt: skip
    return made[job.method](model, job.batch, job.whole_head)


def _layered(model: Model, job: Job) -> Scorer:
    """The engine with all techniques, or with those of a step of Figure 16 and the ones before it."""
    import torch

    from ondevice.grating.baselines import Layered
    from ondevice.grating.engine import Engine
    from ondevice.grating.hidden_states import Offloaded, Resident
    from ondevice.grating.pruning import ClusterRule
    from ondevice.grating.quantised import Dequantised, is_quantised
    from ondevice.grating.weights import InMemory, Streamed, Weights

    step = len(ABLATION) - 1 if job.method == OURS else ABLATION.index(job.method)
    chunk = job.chunk if step >= ABLATION.index("+ chunked execution") else _ALL_AT_ONCE
    weights: Weights
    if step < ABLATION.index("+ sliding window"):
        weights = InMemory(model.network())
    elif job.method == "+ sliding window":
        weights = Streamed(model.folder, throttle=job.throttle, embedding_rows=model.architecture.vocabulary)
        for ids in torch.arange(model.architecture.vocabulary).split(4096):
            weights.rows(ids)  # the whole table in memory, as without the cache
    else:
        streamed = Streamed(model.folder, throttle=job.throttle, embedding_rows=job.embedding_rows)
        weights = Dequantised(streamed) if is_quantised(streamed.checkpoint) else streamed
    prunes = job.method in ABLATION[1:]
    rule = ClusterRule(job.threshold, first=job.first) if prunes else None
    hidden = Offloaded if job.offload else Resident
    return Layered(model, Engine(model.architecture, weights, chunk=chunk, hidden=hidden), rule, job.top_k)


def _engine(scorer: Scorer) -> Engine | None:
    return getattr(scorer, "engine", None)


def _stalled(scorer: Scorer) -> float:
    latest = getattr(scorer, "latest", None)
    return float("nan") if latest is None else float(latest.stalls.sum())


def _work(scorer: Scorer) -> float:
    latest = getattr(scorer, "latest", None)
    return float("nan") if latest is None else float(latest.work)


def _parts(scorer: Scorer, rows: Sequence[Row]) -> dict[str, int]:
    """Bytes that a pass of all rows cannot do without. Counted, not measured; what libraries take inside is missing.

    layers: the window's buffers. embedding: the rows read so far and the accounts of all. head: norm and head in
    float32. rest: as stored. hidden: the states of all rows, or of the three chunks that are in memory where they are
    offloaded. chunk: the most that one chunk's temporaries were at a time in a layer.
    """
    from ondevice.batching import by_length
    from ondevice.grating.hidden_states import Offloaded
    from ondevice.grating.weights import Streamed

    engine = _engine(scorer)
    if engine is None or not isinstance(engine.weights, Streamed):
        return {}
    weights, architecture = engine.weights, engine.architecture
    table = weights.embeddings.table
    row = table.length // table.shape[0]
    kept = int((weights.embeddings._id >= 0).sum())
    tokens = [sum(len(rows[index].ids) for index in chunk) for chunk in by_length([len(one.ids) for one in rows],
                                                                                  engine.chunk)]  # fmt: skip
    held = 3 * max(tokens) if engine.hidden is Offloaded else sum(tokens)
    return {
        "layers": weights.window.nbytes,
        "embedding": kept * row + weights.embeddings.nbytes - weights.embeddings.capacity * row,
        "head": sum(tensor.nbytes for tensor in engine._head.values()),
        "rest": sum(tensor.nbytes for tensor in weights.rest().values()),
        "hidden": held * architecture.width * table.dtype.itemsize,
        "chunk": _temporaries(engine, weights, rows),
    }  # fmt: skip


def _temporaries(engine: Engine, weights: Streamed, rows: Sequence[Row]) -> int:
    """The most bytes of tensors that a layer of the largest chunk makes and holds at a time."""
    import torch

    from ondevice.batching import by_length
    from ondevice.grating.architectures import Batch

    chunks = by_length([len(row.ids) for row in rows], engine.chunk)
    batch = max((Batch([rows[index] for index in chunk]) for chunk in chunks), key=lambda batch: batch.real.numel())
    dtype = weights.embeddings.table.dtype
    with torch.inference_mode():
        hidden = torch.zeros(*batch.real.shape, engine.architecture.width, dtype=dtype)
        parameters = weights.layer(0)
        with _live() as live:
            engine.architecture.forward(parameters, batch, hidden)
    return live.most


def _live() -> Any:
    """A context that counts the bytes of the tensors made in it: `most` at a time."""
    from torch import Tensor
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode

    class Live(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.most = 0
            self._made: dict[int, tuple[StorageWeakRef, int]] = {}

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = {value.untyped_storage()._cdata for value in _tensors((args, kwargs or {}))}
            found = func(*args, **(kwargs or {}))
            self._made = {key: entry for key, entry in self._made.items() if not entry[0].expired()}
            for value in _tensors(found):
                storage = value.untyped_storage()
                if storage._cdata not in given:
                    self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
            self.most = max(self.most, sum(size for _, size in self._made.values()))
            return found

    def _tensors(found: Any) -> Iterator[Tensor]:
        if isinstance(found, Tensor):
            yield found
        elif isinstance(found, (tuple, list)):
            for value in found:
                yield from _tensors(value)
        elif isinstance(found, dict):
            yield from _tensors(tuple(found.values()))

    return Live()


if __name__ == "__main__":
    words = commands.child("prepare", "measure")
    if words[0] == "prepare":
        _prepare(words[1], Path(words[2]))
    else:
        wanted = json.loads(Path(words[1]).read_text(encoding="utf-8"))
        print(json.dumps(_measure(Job(**wanted | {"documents": tuple(wanted["documents"])}))))

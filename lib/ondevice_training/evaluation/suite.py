"""The whole evaluation of one model: every measurement on held-out documents, with its provenance."""

from __future__ import annotations

import contextlib
import json
import platform
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

from ondevice import corpus
from ondevice.causal_lm.generation import LONGEST
from ondevice.corpus.prompts import DOCUMENT, END, PASSAGE, pick
from ondevice.precision import bfloat16_pays, mixed_precision
from ondevice_training import language_model
from ondevice_training.batches import windows
from ondevice_training.evaluation import estimates, perplexity, retrieval_gain, tasks
from ondevice_training.evaluation.copying import LENGTH, copying_ratio

if TYPE_CHECKING:
    from ondevice.models import Loaded

WINDOWS, COPIES, TEXTS, TEMPERATURE_TEXTS, FREE = 300, 200, 200, 60, 32
TASKS = dict.fromkeys(corpus.FAMILIES, 40) | {"rag": 200, "question": 100}
_LEAST = 4  # units of a measurement, however small the limit


def evaluate(loaded: Loaded, limit: float = 1.0, report: Callable[[str], None] = print) -> dict[str, Any]:
    """Results and provenance, as evaluation.json holds them; report: gets a line a part.

    limit: a share of the samples. Reads the corpus (and builds it where it is not there); the test split, except for
    the validation perplexity and the retrieval temperature.
    """
    loaded.model.eval()
    parts: dict[str, Callable[[Loaded, float], dict[str, Any]]] = {
        "perplexity": _perplexity,
        "copying": _copying,
        "retrieval": _retrieval,
        "tasks": _tasks,
    }
    results = {}
    seconds = {}
    for name, measure in parts.items():
        started = time.perf_counter()
        with contextlib.nullcontext() if name == "tasks" else mixed_precision(loaded.model.device.type):
            results[name] = measure(loaded, limit)
        seconds[name] = round(time.perf_counter() - started, 1)
        report(f"{name}: {seconds[name]:.0f} s")
    return {
        "model": describe(loaded),
        "corpus": provenance(),
        "limit": limit,
        "bootstrap": {"seed": estimates.SEED, "draws": estimates.DRAWS},
        "versions": _versions(),
        "arithmetic": _arithmetic(loaded),
        "seconds": seconds,
        "results": results,
    }


def describe(loaded: Loaded) -> dict[str, Any]:
    """The model's size by name, shape and number of parameters."""
    config = loaded.model.config
    keys = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "vocab_size",
        "max_position_embeddings",
    )
    shape = {key: int(getattr(config, key)) for key in keys}
    sizes = [name for name, size in language_model.SIZES.items() if size.items() <= shape.items()]
    return {"size": sizes[0] if sizes else None, "parameters": loaded.model.num_parameters(), **shape}


def provenance() -> dict[str, Any]:
    """Which build of the corpus: versions, a hash of them, splits, and the licence each package names."""
    manifest = corpus.manifest()
    packages: dict[str, str] = manifest["packages"]
    splits = {
        split: {**counts, "tokens": len(corpus.document_tokens(split))} for split, counts in manifest["splits"].items()
    }
    splits["train"]["task_tokens"] = len(corpus.task_tokens("train"))
    return {
        "sha256_of_packages": sha256(json.dumps(packages, sort_keys=True).encode()).hexdigest(),
        "splits": splits,
        "packages": packages,
        "licences": {name: licence(name) for name in packages},
    }


def licence(package: str) -> str:
    """A distribution's licence as it names it, in a few words; PSF-2.0 for the standard library."""
    if package == "python":
        return "PSF-2.0"
    try:
        fields: Any = metadata.metadata(package)
    except metadata.PackageNotFoundError:
        return "not installed"
    if expression := fields.get("License-Expression"):
        return expression
    prefix = "License :: OSI Approved :: "
    named = [line.removeprefix(prefix) for line in fields.get_all("Classifier") or [] if line.startswith(prefix)]
    first_line = (fields.get("License") or "").strip().split("\n")[0]
    return "; ".join(named) or first_line[:60] or "not named"


def _perplexity(loaded: Loaded, limit: float) -> dict[str, Any]:
    perplexities = {}
    for split in ("test", "validation"):
        held_out = windows(corpus.document_tokens(split), _scaled(WINDOWS, limit), perplexity.CONTEXT)
        perplexities[split] = perplexity.perplexity(loaded.model, held_out).as_json()
    return perplexities


def _copying(loaded: Loaded, limit: float) -> dict[str, Any]:
    """Twice in a stream of documents (the bar), and as a passage with its copy behind the document marker."""
    encode = loaded.tokenizer
    documents = sorted(corpus.documents("test"), key=lambda document: pick(document.name, "evaluation copy", 2**62))
    texts: list[list[int]] = []
    for document in documents:
        ids = encode(document.text, verbose=False)["input_ids"]
        texts += [ids[:LENGTH]] if len(ids) >= LENGTH else []
        if len(texts) == _scaled(COPIES, limit):
            break
    markers = {"documents": (END, END), "passage": (END + PASSAGE, DOCUMENT)}
    return {
        name: copying_ratio(loaded.model, texts, *(encode(marker)["input_ids"] for marker in pair)).as_json()
        for name, pair in markers.items()
    }


def _retrieval(loaded: Loaded, limit: float) -> dict[str, Any]:
    source = retrieval_gain.pool(corpus.documents("train"), loaded.tokenizer)
    chosen = [
        retrieval_gain.texts(corpus.documents(split), loaded.tokenizer, _scaled(count, limit))
        for split, count in (("validation", TEMPERATURE_TEXTS), ("test", TEXTS))
    ]
    return retrieval_gain.measure(loaded.model, loaded.tokenizer, source, *chosen)


def _tasks(loaded: Loaded, limit: float) -> dict[str, Any]:
    documents: Sequence[corpus.Document] = corpus.documents("test")
    counts = {family: _scaled(count, limit) for family, count in TASKS.items()}
    room = int(loaded.model.config.max_position_embeddings) - LONGEST
    chosen, too_long = tasks.choose(documents, loaded.tokenizer, counts, room)
    prompts = [task for family in chosen.values() for task in family] + tasks.closed_book(chosen["rag"])
    judged = tasks.answer(
        loaded.model, loaded.tokenizer, prompts, lambda: (document.docstring for document in corpus.documents("train"))
    )
    free = tasks.free_running(loaded.model, loaded.tokenizer, documents, _scaled(FREE, limit))
    return {**tasks.summary(judged), "passed_over_as_too_long": too_long, "free_running": free}


def _scaled(count: int, limit: float) -> int:
    return max(_LEAST, round(count * limit))


def _arithmetic(loaded: Loaded) -> dict[str, str]:
    """What the greedy answers are computed in, and the teacher-forced scores, as in the training's own log."""
    own = str(loaded.model.dtype).removeprefix("torch.")
    return {"tasks": own, "others": "bfloat16 products" if bfloat16_pays(loaded.model.device.type) else own}


def _versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
    }

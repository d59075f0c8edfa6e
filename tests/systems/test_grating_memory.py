"""The engine and its baselines as processes: equal scores, memory under a hard limit, and what it is made of."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from transformers import AutoConfig

from ondevice.grating import baselines, measuring
from ondevice.grating.baselines import Layered, Model
from ondevice.grating.engine import Engine
from ondevice.grating.measuring import MB, Job, measure
from ondevice.grating.weights import Streamed

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is measured by /proc")

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3ForCausalLM": ("qwen3", {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True}),
    "LlamaForSequenceClassification": ("llama", {"num_key_value_heads": 2, "num_labels": 1}),
    "BertForSequenceClassification": ("bert", {"num_labels": 1}),
}
V = 200
QUERY, DOCUMENTS = "w10 w11", tuple(" ".join(f"w{5 + (7 * n + k) % 190}" for k in range(n)) for n in (3, 30, 11, 11, 1))


def saved(name: str, folder: Path, dtype: torch.dtype, vocabulary: int = V, **sizes: int) -> Path:
    """A random reranker with a tokenizer of one token a word."""
    kind, values = KINDS[name]
    shape = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4) | sizes
    config = AutoConfig.for_model(
        kind, vocab_size=vocabulary, max_position_embeddings=256, pad_token_id=0, architectures=[name],
        **shape, **values,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, name)(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    measuring.save_tokenizer(folder, vocabulary)
    return folder


@pytest.fixture(scope="module", params=KINDS)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model.open(saved(request.param, tmp_path_factory.mktemp("tiny"), torch.float32))


@pytest.fixture(scope="module")
def middling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reranker of 0.22 GB in bfloat16: 24 layers of 6.3 MB, and an embedding of 62 MB."""
    return saved(
        "Qwen3ForCausalLM", tmp_path_factory.mktemp("middling"), torch.bfloat16, 60_000, hidden_size=512,
        intermediate_size=1536, num_hidden_layers=24, num_attention_heads=8,
    )  # fmt: skip


def streamed(model: Model) -> NDArray[np.float64]:
    """The engine's scores with streamed weights."""
    with contextlib.closing(Streamed(model.folder)) as weights:
        return Layered(model, Engine(model.architecture, weights)).scores(QUERY, DOCUMENTS)


# Scores

WAYS: dict[str, Callable[[Model], baselines.Scorer]] = {
    "in memory": lambda model: baselines.in_memory(model, batch=2),
    "whole head": lambda model: baselines.in_memory(model, batch=2, whole_head=True),
    "copied": lambda model: baselines.copied(model, batch=5),
    "layers offloaded": lambda model: baselines.offloaded(model, batch=2),
    "all offloaded": lambda model: baselines.offloaded(model, batch=5, everything=True),
    "layer loading": baselines.layer_loading,
    "CrossEncoder": lambda model: baselines.CrossEncoder(model, batch=2),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_engines_scores(way: str, tiny: Model) -> None:
    engine = streamed(tiny)
    assert np.ptp(engine) > 0.1  # scores that differ: an order that is lost would show
    assert WAYS[way](tiny).scores(QUERY, DOCUMENTS) == pytest.approx(engine, abs=1e-4)


@pytest.mark.parametrize("method", measuring.ABLATION)
def test_every_step_of_figure_16_gives_the_engines_scores_until_it_prunes(method: str, tiny: Model) -> None:
    whole = measuring._layered(tiny, Job(method, str(tiny.folder), QUERY, DOCUMENTS, chunk=40))
    assert whole.scores(QUERY, DOCUMENTS) == pytest.approx(streamed(tiny), abs=1e-4)
    assert measuring._work(whole) == 3 * len(DOCUMENTS)
    pruned = measuring._layered(tiny, Job(method, str(tiny.folder), QUERY, DOCUMENTS, threshold=0.0, first=2, top_k=1))
    pruned.scores(QUERY, DOCUMENTS)
    assert (measuring._work(pruned) < 3 * len(DOCUMENTS)) == (method != "monolithic")
    assert measuring._work(pruned) >= 2 * len(DOCUMENTS)  # no decision before the second layer


def test_quantised_scores_are_near_and_the_layers_are_int8(tiny: Model) -> None:
    found = baselines.quantised(tiny)
    matrices = {name: value for name, value in found.network.named_buffers() if name.endswith(".steps")}
    assert matrices and {value.dtype for value in matrices.values()} == {torch.int8}
    stored = dict(found.network.named_parameters())
    assert not any(".layer" in name and value.ndim == 2 for name, value in stored.items())
    assert {value.dtype for value in stored.values()} == {torch.float32}
    scores, right = found.scores(QUERY, DOCUMENTS), streamed(tiny)
    assert 1e-6 < np.abs(scores - right).max() < 0.1 * np.ptp(right)


# Memory

LIMIT = 48 * MB  # two layers are 12.6, the whole model 220


def job(method: str, folder: Path, **options: Any) -> Job:
    return Job(method, str(folder), *measuring.random_pool(folder, 8, 128), **options)


def test_the_engine_runs_under_a_limit_that_the_model_in_memory_exceeds(middling: Path) -> None:
    ours = measure(job("ours", middling, limit=LIMIT, chunk=256))
    assert ours.tokens == 128 and ours.work == 8 * 24 and ours.cached == 0
    assert ours.memory.marks == ("baseline", "loaded", "end")
    assert sum(ours.parts.values()) < ours.memory.peak("anonymous", "shared") < LIMIT
    with pytest.raises(RuntimeError, match=r"[Cc]annot allocate memory|can't allocate memory"):
        measure(job("transformers", middling, limit=LIMIT))
    right = baselines.in_memory(Model.open(middling)).scores(ours.job.query, ours.job.documents)
    assert np.ptp(right) > 0.1 and np.abs(right - ours.scores).max() < 0.2 * np.ptp(right)  # bfloat16
    row = ours.row()
    assert row["anon_mb"] < 1.6 * row["parts_mb"]  # small tensors: the libraries' own memory counts more


# Bad input


def test_bad_input_is_one_clear_error(tmp_path: Path, middling: Path) -> None:
    for change, message in (
        ({"method": "magic"}, "no method 'magic'; there are ours"), ({"documents": ()}, "no documents"),
        ({"repeats": 0}, "repeats is at least 1, not 0"), ({"threads": 0}, "threads is at least 1"),
        ({"top_k": 0}, "top_k is at least 1"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            Job(**{"method": "ours", "folder": str(tmp_path), "query": "a", "documents": ("b",)} | change)
    with pytest.raises(FileNotFoundError, match="has no safetensors"):
        measure(Job("ours", str(tmp_path), "a", ("b",)))
    with pytest.raises(ValueError, match="more than the 49 tokens of query and prompt, not 20"):
        measuring.random_pool(middling, 2, 20)
    with pytest.raises(RuntimeError, match="no shape 'no-such-model'"):
        measuring.prepared("no-such-model")


def test_a_batch_without_rows_and_a_damaged_folder_are_refused(tiny: Model, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one row, not 0"):
        baselines.in_memory(tiny, batch=0)
    whole = (tiny.folder / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="truncated"):
        baselines.copied(Model(tmp_path, tiny.architecture, tiny.tokenizer))

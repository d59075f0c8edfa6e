"""What a memory budget buys, and the estimate of a chunk's temporaries against what torch allocates."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig

from ondevice.batching import by_length
from ondevice.grating import budget, quantised
from ondevice.grating.architectures import Architecture, Batch, Row
from ondevice.grating.budget import MB, Plan, activations, padded_tokens, plan
from ondevice.grating.checkpoint import Checkpoint
from ondevice.grating.embedding_cache import EmbeddingCache
from ondevice.grating.hidden_states import Offloaded
from ondevice.grating.weights import InMemory, Streamed

NARROW, WIDE = 64, 1024  # feed-forwards: attention, or they, take the most
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "BertForSequenceClassification": ("bert", {}),
    "XLMRobertaForSequenceClassification": ("xlm-roberta", {"type_vocab_size": 1}),
    "LlamaForSequenceClassification": ("llama", {"num_key_value_heads": 1}),
    "Qwen2ForSequenceClassification": ("qwen2", {"num_key_value_heads": 4}),
    "Qwen3ForSequenceClassification": ("qwen3", {"num_key_value_heads": 4, "head_dim": 64}),
}
V, D, LAYERS = 3000, 128, 6


pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def model(name: str, inner: int = WIDE, dtype: torch.dtype = torch.float32) -> Any:
    kind, values = KINDS[name]
    config = AutoConfig.for_model(
        kind, vocab_size=V, hidden_size=D, intermediate_size=inner, num_hidden_layers=LAYERS, num_attention_heads=4,
        max_position_embeddings=2100, pad_token_id=1, architectures=[name], num_labels=1, **values,
    )  # fmt: skip
    return getattr(transformers, name)(config).eval().to(dtype)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("tiny")
    model("Qwen3ForSequenceClassification").save_pretrained(folder)
    return Checkpoint.open(folder)


def planned(saved: Checkpoint, *values: Any, **named: Any) -> Plan:
    return plan(saved, model("Qwen3ForSequenceClassification").config, *values, **named)


# The estimate


def allocated(work: Callable[[], object]) -> int:
    """Most bytes of tensors, and of what operators allocate, at once."""
    with torch.inference_mode(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        kept = work()
    assert kept is not None and recorded.profiler is not None
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


def _embed(architecture: Architecture, weights: InMemory, batch: Batch) -> torch.Tensor:
    return architecture.embed(weights.rest(), batch, weights.rows(batch.ids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("inner", [NARROW, WIDE])
@pytest.mark.parametrize("name", KINDS)
def test_the_estimate_is_at_least_what_is_allocated_and_at_most_half_more(
    name: str, inner: int, dtype: torch.dtype
) -> None:
    built = model(name, inner, dtype)
    architecture, weights = Architecture(built.config), InMemory(built)
    for lengths in ((128,) * 8, (700, 1024), (2048,)):
        batch = Batch([Row(tuple(range(2, 2 + n)), n // 2) for n in lengths])
        hidden = torch.zeros(len(lengths), max(lengths), D, dtype=dtype)
        embedded = allocated(partial(_embed, architecture, weights, batch))
        layer = allocated(partial(architecture.forward, weights.layer(0), batch, hidden))
        estimate = activations(built.config, dtype.itemsize, len(lengths) * max(lengths), max(lengths))
        found, scratch = max(embedded, layer), budget._SCRATCH
        assert found <= estimate + scratch and estimate <= 1.5 * found, (lengths, embedded, layer, estimate)


def test_a_row_longer_than_the_chunk_is_a_chunk() -> None:
    config = model("BertForSequenceClassification").config
    assert activations(config, 4, 100, 2000) == activations(config, 4, 2000, 2000) > activations(config, 4, 100, 100)


# Plans


@pytest.mark.parametrize("candidates", [1, 20, 500])
@pytest.mark.parametrize("longest", [10, 300])
def test_the_smallest_budget_works_and_one_less_does_not(saved: Checkpoint, candidates: int, longest: int) -> None:
    with pytest.raises(ValueError, match=r"1 MB of memory are too few .* smallest budget that works is \d+ MB") as told:
        planned(saved, candidates, longest, 1)
    least = int(str(told.value).split()[-2])
    found = planned(saved, candidates, longest, least)
    assert found.buffers == 2 and found.chunk >= longest and found.total <= least * MB
    with pytest.raises(ValueError, match=f"smallest budget that works is {least} MB"):
        planned(saved, candidates, longest, least - 1)


def test_more_memory_buys_more_and_never_more_than_there_is(saved: Checkpoint) -> None:
    last: tuple[int, ...] = (0, 0, 0, 0)
    seen = set()
    for megabytes in range(23, 70):
        found = planned(saved, 500, 40, megabytes)
        assert found.total <= megabytes * MB
        now = (found.chunk, found.embedding_rows, not found.offload, found.buffers)
        assert now >= last  # a later good is given up for an earlier one
        seen.add(now)
        last = now
    assert last == (512, V // 10, True, LAYERS) and len(seen) > 5


def test_parts_are_those_of_what_they_name(saved: Checkpoint) -> None:
    found = planned(saved, 500, 40, 36, fixed=2 * MB)
    weights = Streamed(saved.folder, buffers=found.buffers, embedding_rows=found.embedding_rows)
    assert found.parts["window"] == pytest.approx(weights.window.nbytes, rel=0.01)
    assert isinstance(weights.embeddings, EmbeddingCache)
    assert found.parts["embedding"] == pytest.approx(weights.embeddings.nbytes, rel=0.01)
    weights.close()
    assert found.offload
    states = Offloaded(saved.folder)
    for chunk in range(4):
        states.put(chunk, torch.zeros(found.chunk // 40, 40, D))
    assert states.nbytes <= found.parts["hidden"] <= 1.3 * states.nbytes
    states.close()
    more = planned(saved, 500, 40, 36, fixed=3 * MB)
    assert more.parts["fixed"] == found.parts["fixed"] + MB


def test_candidates_add_their_index_only_where_states_are_offloaded(saved: Checkpoint) -> None:
    few, many = (planned(saved, candidates, 20, 50, tokens=20 * candidates) for candidates in (2_000, 10_000))
    assert few.offload and many.offload
    assert many.parts["index"] - few.parts["index"] == 8_000 * (20 * 8 + 900 + 32 * LAYERS)
    same = few.parts.keys() - {"index", "window", "embedding"}
    assert {name: few.parts[name] for name in same} == {name: many.parts[name] for name in same}


def test_without_a_budget_it_is_the_papers_setting(saved: Checkpoint) -> None:
    found = planned(saved, 5000, 400, None)
    assert (found.buffers, found.embedding_rows, found.chunk, found.offload) == (2, V // 10, 512, False)
    assert planned(saved, 2, 900, None).chunk == 900


def test_int8_layers_cost_a_quarter_and_one_multiplied_out(saved: Checkpoint, tmp_path: Path) -> None:
    quantised.save(saved.folder, tmp_path)
    whole, small = planned(saved, 10, 40, None), planned(Checkpoint.open(tmp_path), 10, 40, None)
    assert small.parts["window"] == pytest.approx(whole.parts["window"] * 0.75, rel=0.05)
    weights = quantised.Dequantised(Streamed(tmp_path))
    made = quantised.dequantised_bytes(weights.weights.checkpoint)
    assert made <= allocated(partial(weights.layer, 0)) < 1.01 * made  # and no copy of a matrix
    assert weights.nbytes == weights.weights.nbytes + made
    weights.close()


@pytest.mark.parametrize(("values", "words"), [
    ((0, 5, 10), "at least one candidate and token, not 0 and 5"),
    ((5, 0, 10), "at least one candidate and token, not 5 and 0"),
    ((5, 5, 0), "above 0 MB, not 0"),
    ((5, 5, float("nan")), "above 0 MB, not nan"),
])  # fmt: skip
def test_plans_for_nothing_are_refused(saved: Checkpoint, values: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        planned(saved, *values)


def test_padding_is_counted_as_the_batches_have_it() -> None:
    lengths = [3, 9, 4, 40, 12, 3, 33]
    for chunk in (1, 20, 80, 1000):
        batches = by_length(lengths, chunk)
        assert padded_tokens(lengths, chunk) == sum(len(one) * max(lengths[at] for at in one) for one in batches)
    assert padded_tokens(lengths, 1) == sum(lengths) < padded_tokens(lengths, 1000) == 7 * 40


def test_memory_is_read_from_the_system() -> None:
    budget.give_back()
    before = budget.anonymous()
    held = torch.ones(80 * MB // 4)  # above malloc's greatest mmap threshold (32 MiB): in no hole of the heap
    assert 70 * MB < budget.anonymous() - before < 95 * MB
    del held
    budget.give_back()
    assert budget.anonymous() - before < 15 * MB

"""What a memory budget buys, and the estimate of a chunk's temporaries against what torch allocates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from tiny import random_reranker, reranker_config
from torch.profiler import ProfilerActivity, profile

from ondevice.corpus.pairs import Row
from ondevice_papers.grating.architectures import Architecture, PaddedRows
from ondevice_papers.grating.checkpoint import Checkpoint
from ondevice_papers.grating.weights import BY_PART, units_of
from ondevice_papers.grating.window import WeightWindow
from ondevice_programs.reranker import memory_plan as planning
from ondevice_programs.reranker.memory_plan import MB, Model, activations, plan

V, D, LAYERS = 3000, 128, 6
NARROW, WIDE = 64, 1024  # feed-forwards: attention, or they, take the most
DEBERTA = {"relative_attention": True, "position_buckets": 32, "pos_att_type": ["p2c", "c2p"], "share_att_key": True,
           "norm_rel_ebd": "layer_norm", "position_biased_input": False, "type_vocab_size": 0}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "BertForSequenceClassification": ("bert", {}),
    "DebertaV2ForSequenceClassification": ("deberta-v2", DEBERTA),
    "Qwen3ForSequenceClassification": ("qwen3", {"num_key_value_heads": 4, "head_dim": 64}),
    "Gemma2ForSequenceClassification": ("gemma2", {"num_key_value_heads": 2, "head_dim": 32}),
}
QWEN3 = "Qwen3ForSequenceClassification"

pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def built(name: str, inner: int = WIDE, dtype: torch.dtype = torch.float32) -> Any:
    kind, values = KINDS[name]
    sizes = {"vocab_size": V, "hidden_size": D, "intermediate_size": inner, "num_hidden_layers": LAYERS}
    return random_reranker(reranker_config(name, kind, max_position_embeddings=2100, **sizes, **values), dtype)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("tiny")
    built(QWEN3).save_pretrained(folder)
    return Model("tiny", Checkpoint.open(folder), Architecture(built(QWEN3).config))


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("inner", [NARROW, WIDE])
@pytest.mark.parametrize("name", KINDS)
def test_the_estimate_is_at_least_what_is_allocated_and_not_far_above(
    name: str, inner: int, dtype: torch.dtype
) -> None:
    network = built(name, inner, dtype)
    run = Architecture(network.config)
    tensors = {key: value.detach() for key, value in network.named_parameters()}
    layer = {key.partition(".0.")[2]: value for key, value in tensors.items() if ".0." in key and "layer" in key}
    run.hold(tensors)
    for lengths in ((128,) * 8, (700, 1024)):
        batch = PaddedRows([Row(range(2, 2 + n), n // 2) for n in lengths])
        hidden = torch.zeros(len(lengths), max(lengths), D, dtype=dtype)
        found = allocated(partial(run.embed, batch, torch.zeros(sum(lengths), D, dtype=dtype)))
        for part in (0, 1):
            own = {key: value for key, value in layer.items() if run.part_of(key) == part}
            with run.holding(0, own):
                found = max(found, allocated(partial(run.forward, 0, part, batch, hidden)))
        estimate = activations(network.config, dtype.itemsize, len(lengths) * max(lengths), max(lengths))
        assert found <= estimate + planning._SCRATCH and estimate <= 2.5 * found, (lengths, found, estimate)


# Plans


@pytest.mark.parametrize("lengths", [[10], [300], [40] * 500, [5] * 5000, [3, 1000, 7] * 40], ids=len)
def test_the_budget_that_a_refusal_names_works_where_a_process_takes_more_and_five_less_do_not(
    model: Model, lengths: list[int]
) -> None:
    with pytest.raises(ValueError, match=r"1 MB .*tiny.* \d+ MB") as told:
        plan(model, lengths, 1)
    named = int(str(told.value).split()[-2])
    found = plan(replace(model, fixed=3 * MB), lengths, named)
    assert found.slots == 2 and found.chunk >= max(lengths) and found.total <= named * MB
    with pytest.raises(ValueError, match=f" {named} MB"):
        plan(model, lengths, named - 5)


def test_a_budget_is_at_least_what_opening_took(model: Model) -> None:
    opened = replace(model, opening=200 * MB)
    with pytest.raises(ValueError, match="204 MB"):
        plan(opened, [40], 199)
    assert plan(opened, [40], 200) == plan(model, [40], 200)


@pytest.mark.parametrize("lengths", [[40] * 500, [5] * 5000, [3, 700, 7] * 40], ids=len)
def test_more_memory_buys_more_and_never_more_than_there_is(model: Model, lengths: list[int]) -> None:
    last: tuple[int, ...] = (0, 0, 0, 0)
    seen = set()
    for megabytes in range(20, 120):
        try:
            found = plan(model, lengths, megabytes)
        except ValueError:
            assert not seen
            continue
        assert found.total <= megabytes * MB
        now = (found.chunk, found.embedding_rows, not found.offload, found.slots)
        assert now >= last  # a later good is given up for an earlier one
        seen.add(now)
        last = now
    assert last == (max(512, *lengths), V // 10, True, 2 * LAYERS) and len(seen) > 3


def test_without_a_budget_it_is_the_papers_setting(model: Model) -> None:
    found = plan(model, [400] * 5000, None)
    assert (found.slots, found.embedding_rows, found.chunk, found.offload) == (2, V // 10, 512, False)
    assert plan(model, [900, 3], None).chunk == 900


def test_a_windows_part_is_the_memory_that_it_has(model: Model) -> None:
    units = units_of(model.checkpoint, model.architecture.part_of, BY_PART)
    for budget, slots in ((None, 2), (1000, 2 * LAYERS)):
        window = WeightWindow(units, lambda unit, memory: None, slots)
        assert sum(map(len, window.memory)) == plan(model, [40] * 20, budget).parts["window"]
        window.close()

"""Whatever the chunk, the place of hidden states, the window of weights and the padding: transformers' scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import AutoConfig

from ondevice.grating.architectures import Architecture, Row
from ondevice.grating.engine import Engine
from ondevice.grating.hidden_states import Offloaded, Resident
from ondevice.grating.weights import InMemory, Streamed

V, LAYERS, CONTEXT, PAD, YES, NO = 61, 4, 48, 1, 5, 9
BOUND = 1e-4
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "BertForSequenceClassification": ("bert", {}),
    "XLMRobertaForSequenceClassification": ("xlm-roberta", {"type_vocab_size": 1}),
    "LlamaForSequenceClassification": ("llama", {"num_key_value_heads": 2}),
    "Qwen2ForSequenceClassification": ("qwen2", {"num_key_value_heads": 2}),
    "Qwen3ForSequenceClassification": ("qwen3", {"num_key_value_heads": 2, "head_dim": 8}),
    "Qwen3ForCausalLM": ("qwen3", {"num_key_value_heads": 2, "head_dim": 8}),
}
PROFILE = settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@cache
def built(name: str) -> Any:
    """A random float32 model whose scores differ, so that wrong states show."""
    kind, values = KINDS[name]
    labels = {} if "Causal" in name else {"num_labels": 1}
    config = AutoConfig.for_model(
        kind, vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        max_position_embeddings=CONTEXT, pad_token_id=PAD, architectures=[name], tie_word_embeddings=True,
        **labels, **values,
    )  # fmt: skip
    torch.manual_seed(1)
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def saved(name: str, folder: Path, shards: bool) -> Path:
    place = folder / f"{name}-{shards}"
    if not place.exists():
        built(name).save_pretrained(place, max_shard_size="30KB" if shards else "1GB")
    return place


@torch.no_grad()
def logits(model: Any, rows: Sequence[Row], side: str = "right") -> NDArray[np.float64]:
    """[N] what transformers says of padded rows; of an encoder's, whose positions are absolute, padded right."""
    width = max(len(row.ids) for row in rows)
    ids = torch.full((len(rows), width), PAD)
    mask, types = torch.zeros_like(ids), torch.zeros_like(ids)
    for index, row in enumerate(rows):
        start = width - len(row.ids) if side == "left" else 0
        ids[index, start : start + len(row.ids)] = torch.tensor(row.ids)
        mask[index, start : start + len(row.ids)] = 1
        types[index, row.border : len(row.ids)] = 1
    extra = {"token_type_ids": types} if hasattr(model, "bert") else {}
    found = model(ids, attention_mask=mask, **extra).logits
    if found.ndim == 3:
        last = found[torch.arange(len(rows)), (mask * torch.arange(width)).argmax(1)]
        return (last[:, YES] - last[:, NO]).double().numpy()
    return found[:, 0].double().numpy()


@dataclass(frozen=True)
class Setting:
    """How the engine is run. buffers: of a window over the files; 0: weights in memory."""

    chunk: int
    offloaded: bool
    buffers: int
    shards: bool

    def scores(self, name: str, rows: Sequence[Row], folder: Path) -> NDArray[np.float64]:
        """[LAYERS, N]."""
        model = built(name)
        streamed = Streamed(saved(name, folder, self.shards), buffers=self.buffers) if self.buffers else None
        place = (lambda: Offloaded(folder)) if self.offloaded else Resident
        architecture = Architecture(model.config, (YES, NO) if "Causal" in name else None)
        try:
            run = Engine(architecture, streamed or InMemory(model), chunk=self.chunk, hidden=place)
            first, second = run.score(rows).by_layer, run.score(rows).by_layer
        finally:
            if streamed is not None:
                streamed.close()
        assert np.array_equal(first, second)
        return first


SETTINGS = st.builds(
    Setting, chunk=st.integers(1, 150), offloaded=st.booleans(), buffers=st.sampled_from([0, 2, 3, LAYERS]),
    shards=st.booleans(),
)  # fmt: skip
IDS = st.lists(st.integers(2, V - 1), min_size=1, max_size=CONTEXT - PAD - 1)
ROWS = st.lists(st.builds(lambda ids, border: Row(tuple(ids), min(border, len(ids))), IDS, st.integers(0, 50)),
                min_size=1, max_size=9)  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_scores_are_those_of_transformers(name: str, folder: Path) -> None:
    @PROFILE
    @given(rows=ROWS, setting=SETTINGS, side=st.sampled_from(["left", "right"]))
    def check(rows: list[Row], setting: Setting, side: str) -> None:
        decoder = not hasattr(built(name), "bert") and not hasattr(built(name), "roberta")
        found = setting.scores(name, rows, folder)
        right = logits(built(name), rows, side if decoder else "right")
        assert np.abs(found[-1] - right).max() < BOUND
        alone = np.array([logits(built(name), [row])[0] for row in rows])
        assert np.abs(found[-1] - alone).max() < BOUND  # without any padding

    check()


@pytest.mark.parametrize("name", KINDS)
def test_the_bound_rejects_one_other_token(name: str, folder: Path) -> None:
    rows = [Row(tuple(range(2, 12)), 5), Row((3, 7, 8), 2)]
    other = [Row((50, *rows[0].ids[1:]), 5), rows[1]]
    found = Setting(20, True, 2, False).scores(name, other, folder)[-1]
    gap = np.abs(found - logits(built(name), rows))
    assert gap[0] > 10 * BOUND and gap[1] < BOUND


@pytest.mark.parametrize("name", ["BertForSequenceClassification", "Qwen3ForCausalLM"])
def test_who_leaves_changes_nothing_for_who_stays(name: str, folder: Path) -> None:
    @PROFILE
    @given(rows=ROWS, setting=SETTINGS, data=st.data())
    def check(rows: list[Row], setting: Setting, data: st.DataObject) -> None:
        full = setting.scores(name, rows, folder)
        staying = [np.arange(len(rows))]

        def prune(scores: NDArray[np.float64]) -> NDArray[np.int64]:
            assert len(scores) == len(staying[-1])
            left = data.draw(st.sets(st.sampled_from(staying[-1].tolist()))) if len(staying[-1]) else set()
            staying.append(np.array(sorted(left), np.int64))
            return staying[-1]

        architecture = Architecture(built(name).config, (YES, NO) if "Causal" in name else None)
        place = (lambda: Offloaded(folder)) if setting.offloaded else Resident
        run = Engine(architecture, InMemory(built(name)), chunk=setting.chunk, hidden=place)
        found = run.score(rows, prune)
        for candidate, ran in enumerate(found.ran):
            assert ran == sum(candidate in active for active in staying[:LAYERS])
            assert np.abs(found.by_layer[:ran, candidate] - full[:ran, candidate]).max() < BOUND
        assert np.isnan(found.by_layer).sum() == LAYERS * len(rows) - found.work

    check()

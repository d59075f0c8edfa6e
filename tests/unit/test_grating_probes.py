"""Linear probes: a planted signal is found, wrong shapes are refused, and the engine scores early layers with them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import random_reranker, reranker_config, word_tokenizer

from ondevice import assets
from ondevice.corpus.pairs import Row
from ondevice_papers.grating.architectures import Architecture
from ondevice_papers.grating.engine import Engine
from ondevice_papers.grating.probes import Probes, cross_fitted, fit, predicted, scaled
from ondevice_papers.grating.weights import InMemory
from ondevice_programs.reranker import Reranker

LAYERS, WIDTH, N, K = 4, 32, 8, 3
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "BertForSequenceClassification": ("bert", {}),
    "Qwen3ForSequenceClassification": ("qwen3", {"num_key_value_heads": 2, "head_dim": 8}),
}


pytestmark = pytest.mark.usefixtures("one_thread")


def planted(pools: int, noise: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(states [pools, 2, N, 6] of any length, final [pools, N] of any level, direction [6] that is in both layers)."""
    rng = np.random.default_rng(seed)
    direction = np.array([2.0, -1, 0, 0, 1, 0.5])
    raw = np.repeat(rng.normal(size=(pools, 1, N, 6)), 2, axis=1)
    unit = scaled(torch.from_numpy(raw[:, 0])).double().numpy()
    final = unit @ direction + noise * rng.normal(size=(pools, N)) + rng.normal(size=(pools, 1))
    return raw * rng.uniform(0.5, 4, (pools, 2, N, 1)), final, direction


def some(seed: int = 1, layers: int = LAYERS, width: int = WIDTH) -> Probes:
    rng = np.random.default_rng(seed)
    return Probes(rng.normal(size=(layers - 1, width)), rng.normal(size=layers - 1))


# Fitting


def test_a_planted_direction_is_found_whatever_the_length_of_a_state_and_the_level_of_a_pool() -> None:
    states, final, direction = planted(200, 0.05)
    found = fit(states, final, K)
    assert np.abs(found.weights - direction).max() < 0.05
    assert abs(np.mean([predicted(found, pool)[0] for pool in states]) - final.mean()) < 0.01


def test_pools_may_have_different_numbers_of_candidates() -> None:
    states, final, direction = planted(200, 0.05)
    kept = [N if number % 2 else K + 1 + number % 4 for number in range(200)]
    cut, scores = ([part[..., :n, :] for part, n in zip(states, kept, strict=True)],
                   [part[:n] for part, n in zip(final, kept, strict=True)])  # fmt: skip
    assert np.abs(fit(cut, scores, K).weights - direction).max() < 0.05
    assert [pool.shape for pool in cross_fitted(cut, scores, K)] == [(2, n) for n in kept]
    with pytest.raises(ValueError, match="more candidates"):
        fit([states[0][:, :K]], [final[0][:K]], K)


def test_cross_fitted_scores_do_not_depend_on_the_pool_itself() -> None:
    states, final, _ = planted(40, 0.3)
    before, changed = cross_fitted(states, final, K), final.copy()
    changed[7] = -10 * final[7]
    after = cross_fitted(states, changed, K)
    assert np.array_equal(before[7], after[7]) and not np.array_equal(before, after)


# Probes


def test_probes_refuse_other_shapes_and_numbers() -> None:
    for weights, intercepts in ((np.ones((3, 4)), np.ones(4)), (np.full((1, 2), np.nan), [0])):
        with pytest.raises(ValueError, match="probe"):
            Probes(weights, intercepts)


# The engine


@cache
def built(name: str) -> Any:
    kind, values = KINDS[name]
    return random_reranker(reranker_config(name, kind, num_hidden_layers=LAYERS, **values), torch.float32)


def engine(name: str, given: Probes | None = None) -> Engine:
    return Engine(Architecture(built(name).config), InMemory(built(name)), chunk=64, probes=given)


def rows() -> list[Row]:
    generator = torch.Generator().manual_seed(3)
    return [Row(tuple(torch.randint(2, 97, (n,), generator=generator).tolist()), n) for n in (5, 17, 9, 33, 9, 1, 40)]


@pytest.mark.parametrize("name", KINDS)
def test_the_engine_scores_early_layers_by_probes_and_the_last_by_the_head(name: str) -> None:
    plain, probed = (engine(name, given).score(rows()).outcome.history for given in (None, some()))
    assert np.array_equal(plain[-1], probed[-1]) and np.abs(plain - probed)[:-1].mean() > 0.1
    for index, row in enumerate(rows()):
        with torch.no_grad():
            hidden = built(name).base_model(torch.tensor([row.ids]), output_hidden_states=True).hidden_states
        for layer in range(LAYERS - 1):
            state = hidden[layer + 1][0, -1 if "Qwen" in name else 0].double().numpy()
            right = some().weights[layer] @ (state / np.sqrt((state**2).mean())) + some().intercepts[layer]
            assert probed[layer, index] == pytest.approx(right, abs=1e-4)


def test_a_reranker_with_probes_prunes_by_them_and_ranks_by_the_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(assets.CACHE_VARIABLE, str(tmp_path / "cache"))
    folder, words = tmp_path / "model", [f"w{number}" for number in range(90)]
    for part in (built("BertForSequenceClassification"), word_tokenizer(" ".join(words))):
        part.save_pretrained(folder)
    documents = [" ".join(words[start : start + 1 + start % 4]) for start in range(5)]
    with Reranker(folder) as plain, Reranker(folder, probes=some()) as probed:
        assert probed.rank(words[0], documents) == plain.rank(words[0], documents)
    with Reranker(folder, threshold=0.0, probes=some()) as pruned:
        pruned.rank(words[0], documents, top_k=1)
        assert pruned.receipt is not None and pruned.receipt.saved > 0
    with pytest.raises(ValueError, match=f"{LAYERS + 1} layers .*{LAYERS} layers"):
        Reranker(folder, probes=some(layers=LAYERS + 1))

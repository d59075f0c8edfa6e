"""Linear probes: a planted signal is found, wrong shapes are refused, and the engine scores early layers with them."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from matplotlib import pyplot as plt
from transformers import AutoConfig

from ondevice import models
from ondevice.grating import plots, probe_experiments, probe_recordings, probes, recordings
from ondevice.grating.architectures import Architecture, Row
from ondevice.grating.engine import Engine
from ondevice.grating.probes import Probes, cross_fitted, fit, predicted, rounded, scaled
from ondevice.grating.pruning import ClusterRule, Selection
from ondevice.grating.replay import replay
from ondevice.grating.reranker import Reranker
from ondevice.grating.weights import InMemory
from ondevice.precision import mixed_precision

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
    assert abs(predicted(found, states)[:, 0].mean() - final.mean()) < 0.01


def test_noise_alone_is_not_learned() -> None:
    states, final, _ = planted(60, 0.0)
    shuffled = np.random.default_rng(2).permuted(final, axis=1)
    own = recordings.kendall(cross_fitted(states, final, K), final[:, None]).mean()
    other = recordings.kendall(cross_fitted(states, shuffled, K), shuffled[:, None]).mean()
    assert own > 0.95 and abs(other) < 0.1


def test_cross_fitted_scores_do_not_depend_on_the_pool_itself() -> None:
    states, final, _ = planted(40, 0.3)
    before, changed = cross_fitted(states, final, K), final.copy()
    changed[7] = -10 * final[7]
    after = cross_fitted(states, changed, K)
    assert np.array_equal(before[7], after[7]) and not np.array_equal(before, after)


def test_candidates_near_the_boundary_count_more() -> None:
    states, final, direction = planted(300, 0.0)
    order = np.argsort(-final, axis=1)
    far = np.zeros_like(final, bool)
    np.put_along_axis(far, order[:, -2:], True, axis=1)  # of a boundary after the first
    wrong = np.where(far, final - 4, final)
    near, evenly = (fit(states, wrong, k).weights[0] for k in (1, N - 2))
    assert np.abs(near / np.linalg.norm(near) - direction / np.linalg.norm(direction)).max() < 0.2
    assert np.linalg.norm(near - direction) < np.linalg.norm(evenly - direction)


@pytest.mark.parametrize(
    ("states", "final", "k"),
    [((5, 2, N, 6), (5, N + 1), K), ((5, N, 6), (5, N), K), ((3, 2, N, 6), (3, N), K), ((5, 2, N, 6), (5, N), N)],
)
def test_fitting_refuses_other_shapes_and_too_few_pools(states: tuple, final: tuple, k: int) -> None:
    with pytest.raises(ValueError, match=r"^(States are|Probes for K)"):
        fit(np.ones(states), np.ones(final), k)


# Probes


@pytest.mark.parametrize(
    ("weights", "intercepts"), [(np.ones(3), np.ones(3)), (np.ones((3, 4)), np.ones(4)), (np.full((1, 2), np.nan), [0])]
)
def test_probes_refuse_other_shapes_and_numbers(weights: np.ndarray, intercepts: Any) -> None:
    with pytest.raises(ValueError, match=r"probe"):
        Probes(weights, intercepts)


@pytest.mark.parametrize("layer", [0, LAYERS])
def test_a_probe_is_of_a_layer_before_the_last(layer: int) -> None:
    with pytest.raises(ValueError, match=f"layers 1 to {LAYERS - 1}"):
        some().scores(layer, torch.ones(2, WIDTH))


def test_a_score_by_hand() -> None:
    found = Probes([[1.0, 2.0]], [0.5]).scores(1, torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.float16))
    assert found.tolist() == pytest.approx([11 / np.sqrt(12.5) + 0.5, 0.5])


# The engine


@cache
def built(name: str) -> Any:
    kind, values = KINDS[name]
    config = AutoConfig.for_model(
        kind, vocab_size=97, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        max_position_embeddings=64, pad_token_id=1, architectures=[name], num_labels=1, **values,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def engine(name: str, given: Probes | None = None) -> Engine:
    return Engine(Architecture(built(name).config), InMemory(built(name)), chunk=64, probes=given)


def rows() -> list[Row]:
    generator = torch.Generator().manual_seed(3)
    return [Row(tuple(torch.randint(2, 97, (n,), generator=generator).tolist()), n) for n in (5, 17, 9, 33, 9, 1, 40)]


@pytest.mark.parametrize("name", KINDS)
def test_the_engine_scores_early_layers_by_probes_and_the_last_by_the_head(name: str) -> None:
    plain, probed = (engine(name, given).score(rows()).by_layer for given in (None, some()))
    assert np.array_equal(plain[-1], probed[-1]) and np.abs(plain - probed)[:-1].mean() > 0.1
    for index, row in enumerate(rows()):
        with torch.no_grad():
            hidden = built(name).base_model(torch.tensor([row.ids]), output_hidden_states=True).hidden_states
        for layer in range(LAYERS - 1):
            state = hidden[layer + 1][0, -1 if "Qwen" in name else 0].double().numpy()
            right = some().weights[layer] @ (state / np.sqrt((state**2).mean())) + some().intercepts[layer]
            assert probed[layer, index] == pytest.approx(right, abs=1e-4)


def test_a_replay_of_probed_scores_decides_as_the_engine_does() -> None:
    name, rule = "Qwen3ForSequenceClassification", ClusterRule(0.5, "std", on="logit")
    probed = engine(name, some())
    full = probed.score(rows())
    selection = Selection(len(rows()), LAYERS, K, rule)
    found = probed.score(rows(), selection.step)
    right = replay(full.by_layer, K, rule)
    assert found.work == right.work < full.work
    assert selection.outcome().chosen.tolist() == right.chosen.tolist()


@pytest.mark.parametrize("given", [some(layers=LAYERS + 1), some(width=WIDTH + 1)])
def test_the_engine_refuses_probes_of_another_model(given: Probes) -> None:
    with pytest.raises(ValueError, match=f"not for {LAYERS} layers of width {WIDTH}"):
        engine("BertForSequenceClassification", given)


def test_a_reranker_with_probes_prunes_by_them_and_ranks_by_the_head() -> None:
    name, documents = probe_recordings.MODELS[0], ["open(): open it.", "read(): read it.", "close(): close it."]
    with Reranker(name) as plain, Reranker(name, probes=probes.load(name)) as probed:
        right = plain.rank("How do I open a file?", documents)
        assert probed.rank("How do I open a file?", documents) == right
    with Reranker(name, threshold=ClusterRule(0.0, "std"), probes=probes.load(name)) as pruned:
        pruned.rank("How do I open a file?", documents, top_k=1)
        assert pruned.report is not None and pruned.report.saved > 0
    with pytest.raises(ValueError, match="The probes are for 12 layers"):
        Reranker("minilm-reranker", probes=probes.load(name))


# Recordings


def test_the_recorded_scores_of_a_pool_are_what_the_probes_say_of_its_states() -> None:
    name = probe_recordings.MODELS[0]
    recording, loaded = probe_recordings.load(name), models.load(name)
    pools = recordings.asked(recording, recordings.spread(recording, 8))[:1]
    with mixed_precision("cpu"):
        read = probe_recordings.states(loaded.model, loaded.tokenizer, pools)
    apart = np.abs(predicted(probes.load(name), read)[0] - recording.pools.scores[pools[0].place, :-1])
    assert np.median(apart) < 0.05 < recording.pools.scores[:, :-1].std(2).mean() / 4


def test_kept_arrays_hold_the_probes_and_the_scores_of_both_splits() -> None:
    valid, final, _ = planted(40, 0.3)
    valid, test = valid.astype(np.float16), planted(20, 0.3, seed=5)[0].astype(np.float16)
    found = probe_recordings.arrays("m", valid, final, test)
    kept = Probes(found["m/weights"], found["m/intercepts"])
    right = {"validation": cross_fitted(valid, final, probe_recordings.K), "test": predicted(kept, test)}
    for split, scores in right.items():
        packed = {name: found[f"m/{split}/{name}"] for name in ("codes", "low", "step")}
        assert np.abs(recordings.unpack(packed) - scores).max() < 0.002
    assert np.array_equal(rounded(kept).weights, kept.weights)
    assert not np.allclose(right["validation"], predicted(kept, valid))


@pytest.mark.parametrize("name", probe_recordings.MODELS)
def test_recorded_probes_agree_with_the_end_earlier_than_the_head(name: str) -> None:
    for split in ("validation", "test"):
        probed, head = probe_recordings.load(name, split).pools.scores, recordings.load(name, split).pools.scores
        assert np.array_equal(probed[:, -1], head[:, -1])
        ours, own = (recordings.kendall(scores, scores[:, -1:]).mean(0) for scores in (probed, head))
        assert (ours[:4] > own[:4] + 0.05).all() and (ours >= own - 0.01).all()
    assert probes.load(name).layers == probed.shape[1]


def test_what_was_not_recorded_is_refused() -> None:
    with pytest.raises(ValueError, match="no recorded probes of minilm"):
        probes.load("minilm-reranker")
    with pytest.raises(ValueError, match="no probes' scores of minilm"):
        probe_recordings.load("minilm-reranker")


# Table and figure


def test_the_table_has_a_row_for_each_setting_and_the_figure_draws_it() -> None:
    table = probe_experiments.table(probe_recordings.MODELS[:1], targets=(0.97, 0.99))
    assert len(table) == 2 * 2 * 2
    assert (table["low"] <= table["overlap"]).all() and (table["overlap"] <= table["high"]).all()
    saved = table.pivot_table(index=["scores", "rule"], columns="target", values="saved")
    assert (saved[0.97] > saved[0.99]).all()
    figure = plots.saved_work(table)
    (axis,) = figure.axes
    drawn = np.concatenate([line.get_ydata() for line in axis.lines if len(line.get_xdata()) == 2][2:6])
    assert sorted(drawn) == pytest.approx(sorted(table["saved"]))
    plt.close(figure)
    with pytest.raises(ValueError, match="two rows"):
        plots.saved_work(pd.concat([table, table]))

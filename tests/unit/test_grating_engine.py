"""The engine on tiny models: the same scores wherever weights and states are; pruning live and replayed."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny import random_reranker, reranker_config
from torch import Tensor

from ondevice import assets
from ondevice.corpus.pairs import Row
from ondevice_papers.grating import engine as engine_module
from ondevice_papers.grating.architectures import Architecture
from ondevice_papers.grating.engine import Engine
from ondevice_papers.grating.hidden_states import Offloaded
from ondevice_papers.grating.margins import MarginRule
from ondevice_papers.grating.pools import Pool, replay
from ondevice_papers.grating.probes import Probes
from ondevice_papers.grating.pruning import Rule, cluster_rule
from ondevice_papers.grating.weights import BY_LAYER, BY_PART, InMemory, Streamed

BERT, QWEN3, LM = "BertForSequenceClassification", "Qwen3ForSequenceClassification", "Qwen3ForCausalLM"
V, WIDTH, LAYERS, CONTEXT, YES, NO = 97, 32, 5, 64, 5, 9
LENGTHS = (5, 17, 9, 33, 9, 1, 40, 12)

pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def built(name: str) -> Any:
    own = {} if name == BERT else {"num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False}
    return random_reranker(reranker_config(name, "bert" if name == BERT else "qwen3", **own))


def engine(name: str = QWEN3, **options: Any) -> Engine:
    model = built(name)
    return Engine(Architecture(model.config, (YES, NO) if name == LM else None), InMemory(model), **options)


def some_rows() -> list[Row]:
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randint(2, V, (n,), generator=generator).tolist() for n in LENGTHS]
    return [Row(ids, len(ids) // 2) for ids in drawn]


def history(run: Engine, **options: Any) -> NDArray[np.float64]:
    """[layers, N] the scores of one pass."""
    return run.score(some_rows(), **options).outcome.history


@cache
def expected(name: str) -> NDArray[np.float64]:
    """With all in memory, which `test_grating_architectures` compares with transformers'."""
    return history(engine(name))


@pytest.mark.parametrize("units", [BY_PART, BY_LAYER])
@pytest.mark.parametrize("slots", [2, None])
@pytest.mark.parametrize("name", [BERT, LM])
def test_streamed_weights_and_offloaded_states_make_no_difference(
    name: str, slots: int | None, units: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(assets.CACHE_VARIABLE, str(tmp_path / "cache"))
    built(name).save_pretrained(tmp_path)
    run = engine(name).architecture
    weights = Streamed(tmp_path, run.part_of, units=units, slots=slots, embedding_rows=7)
    for rule in (None, cluster_rule(0.1), None):  # a pass may end early, while a unit is being read
        whole = Engine(run, weights, chunk=40, states=lambda *given: Offloaded(*given, tmp_path))
        found = history(whole, k=2, rule=rule)
        ran = ~np.isnan(found)
        assert ran.all() == (rule is None) and np.abs((found - expected(name))[ran]).max() < 1e-10
    weights.close()


# Pruning


RULES: dict[str, Rule] = {
    "cluster": cluster_rule(0.2), "never": cluster_rule(np.inf), "always": cluster_rule(0.0),
    "margin": MarginRule(np.tril(np.ones((LAYERS - 1, LAYERS - 1))) / LAYERS, np.full(LAYERS - 1, 0.3)),
}  # fmt: skip


PROBES = Probes(*(np.random.default_rng(1).normal(size=size) for size in ((LAYERS - 1, WIDTH), LAYERS - 1)))


@pytest.mark.parametrize("exact", [False, True], ids=["set", "order"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("name", "probes"), [(BERT, None), (QWEN3, PROBES)])
def test_what_is_pruned_live_is_the_replay_of_all_scores(
    name: str, probes: Any, rule: str, exact: bool, tmp_path: Path
) -> None:
    run = engine(name, chunk=40, probes=probes, states=lambda *given: Offloaded(*given, tmp_path))
    every = history(run)
    live = run.score(some_rows(), 3, RULES[rule], exact)
    found, right = live.outcome, replay(Pool("", "test", every, np.zeros(8, bool)), 3, RULES[rule], exact)
    assert found.chosen.tolist() == right.chosen.tolist() and found.layer.tolist() == right.layer.tolist()
    assert (found.saved > 0) == (rule != "never")
    ran = ~np.isnan(found.history)
    assert ran.sum(0).tolist() == found.layer.tolist() and np.abs((found.history - every)[ran]).max() < 1e-5
    assert len(live.seconds) == len(found.active) and (live.seconds > 0).all() and live.embedding > 0


# Memory


def test_a_disk_that_gets_full_has_its_room_back_after_the_error(tmp_path: Path) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    run = engine(chunk=40, states=lambda *given: Offloaded(*given, tmp_path))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "pwritev", full)
        with pytest.raises(OSError, match="No space left on device"):
            run.score(some_rows())
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    assert not [path for path in map(os.readlink, filter(os.path.islink, links)) if path.startswith(str(tmp_path))]
    assert np.abs(history(run) - expected(QWEN3)).max() < 1e-10


# Wrong input


@pytest.mark.parametrize(("rows", "words"), [
    ([], "no candidates"),
    ([Row([], 0)], "Candidate 0 .* 0 tokens"),
    ([Row([4], 1), Row([4] * (CONTEXT + 1), 1)], "Candidate 1 .* 65 .* 64"),
    ([Row([4, V], 2)], " 96.* 97"),
])  # fmt: skip
def test_wrong_rows_are_refused(rows: list[Row], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        engine().score(rows)


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_score_that_is_no_finite_number_is_an_error(number: float) -> None:
    def run_layer(*given: Any) -> Tensor:
        found = engine_module.run_layer(*given)
        return found.index_fill(0, torch.tensor([5]), number) if given[5] == 1 else found

    with pytest.raises(ValueError, match=r"candidate 5 .*layer 2 .*finite"):
        engine(run_layer=run_layer).score(some_rows())

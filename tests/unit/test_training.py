"""Training on a toy text: resuming, the schedule, learning, and bad checkpoints."""

import csv
import dataclasses
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from ondevice_training import language_model
from ondevice_training.batches import Batches, windows
from ondevice_training.language_model import Position, Recipe
from ondevice_training.muon import Muon, orthogonal
from ondevice_training.schedule import Schedule

VOCABULARY, CONTEXT = 32, 16
RECIPE = Recipe("tiny", tokens=20 * 64, batch_tokens=64, context=CONTEXT, warmup=4, validate_every=10, log_every=5)
TEXT = np.tile(np.arange(2, 26, dtype=np.uint16), 40)  # an alphabet, over and over


pytestmark = pytest.mark.usefixtures("one_thread")


def _train(folder: Path, recipe: Recipe = RECIPE, batches: object = None) -> tuple[Position, torch.nn.Module]:
    model = language_model.build(recipe.size, VOCABULARY, end=0, pad=1, context=CONTEXT)
    source = batches or Batches(TEXT, TEXT[::-1].copy(), 4, CONTEXT)
    reached = language_model.train(recipe, model, source, windows(TEXT, 4, CONTEXT), folder)  # type: ignore[arg-type]
    return reached, model


class _StopAt:
    """Batches that send SIGTERM to this process when a step is read."""

    def __init__(self, step: int) -> None:
        self.batches, self.step = Batches(TEXT, TEXT[::-1].copy(), 4, CONTEXT), step

    def __call__(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        if step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)
        return self.batches(step)


def _log(folder: Path) -> list[dict[str, str]]:
    with (folder / "log.csv").open() as file:
        return list(csv.DictReader(file))


def _assert_same(one: torch.nn.Module, other: torch.nn.Module) -> None:
    for (name, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_a_stopped_and_resumed_run_ends_as_an_unbroken_one(tmp_path: Path) -> None:
    _, unbroken = _train(tmp_path / "unbroken")
    stopped, _ = _train(tmp_path / "broken", batches=_StopAt(6))
    assert (stopped.step, stopped.stopped) == (7, True)
    reached, resumed = _train(tmp_path / "broken")
    assert (reached.step, reached.stopped) == (20, False)
    _assert_same(unbroken, resumed)
    steps = [[row["step"] for row in _log(tmp_path / name)] for name in ("unbroken", "broken")]
    assert steps[0] == steps[1] == ["5", "10", "15", "20"]


def test_an_extended_run_goes_on_from_before_its_decay(tmp_path: Path) -> None:
    longer = dataclasses.replace(RECIPE, tokens=30 * 64)
    _, whole = _train(tmp_path / "whole", longer)
    _train(tmp_path / "extended")
    _, extended = _train(tmp_path / "extended", longer)
    _assert_same(whole, extended)
    (tmp_path / "extended" / "before-decay.safetensors").unlink()
    with pytest.raises(ValueError, match="decay"):
        _train(tmp_path / "extended", dataclasses.replace(RECIPE, tokens=40 * 64))


def test_loss_falls_and_the_model_loads_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    recipe = dataclasses.replace(RECIPE, tokens=60 * 64)
    _, model = _train(tmp_path, recipe, Batches(TEXT, None, 4, CONTEXT))
    rows = _log(tmp_path)
    assert float(rows[0]["loss"]) > 2.0
    assert float(rows[-1]["perplexity"]) < 1.5
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.dtype == torch.float32  # stored in 16 bits
    held_out = windows(TEXT, 4, CONTEXT)
    assert language_model.perplexity_of(loaded, held_out) == pytest.approx(
        language_model.perplexity_of(model, held_out), rel=0.02
    )


def test_a_damaged_or_foreign_checkpoint_is_refused(tmp_path: Path) -> None:
    _train(tmp_path)
    with pytest.raises(ValueError, match="shape"):
        _train(tmp_path, dataclasses.replace(RECIPE, size="small"))
    path = tmp_path / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"checkpoint\.safetensors"):
        _train(tmp_path)
    with pytest.raises(ValueError, match="'huge'"):
        language_model.build("huge", VOCABULARY, 0, 1)


def test_schedule_rises_stays_and_falls() -> None:
    schedule = Schedule(total=100, warmup=10)
    factors = [schedule(step) for step in range(100)]
    assert schedule.decay_start == 60
    assert factors[:2] == pytest.approx([0.1, 0.2])
    assert set(factors[9:61]) == {1.0}
    assert factors[99] == pytest.approx(1 / 40)
    assert np.diff(factors[60:]) == pytest.approx(-1 / 40)
    assert [Schedule(200, 10)(step) for step in range(60)] == factors[:60]


def test_batches_depend_on_the_step_alone_and_cover_an_epoch() -> None:
    documents, tasks = np.arange(1000, dtype=np.uint16), np.arange(5000, 6000, dtype=np.uint16)
    batches, again = Batches(documents, tasks, 4, CONTEXT), Batches(documents, tasks, 4, CONTEXT)
    for step in (0, 1, 50, 999):
        inputs, targets = batches(step)
        assert np.array_equal(inputs, again(step)[0])
        assert np.array_equal(inputs + 1, targets)
        assert inputs.shape == ((4, 16) if step % 4 == 0 else (8, 8))
    firsts = [batches(step)[0].reshape(4, CONTEXT)[:, 0] for step in range(30)]
    assert all((first >= 5000).tolist() == [False, False, False, True] for first in firsts)
    rows = np.concatenate(firsts)
    starts = rows[rows < 5000][:61]  # an epoch holds (1000 - 1) // 16 - 1 rows
    assert len(np.unique(starts)) == 61


def test_muon_follows_torch_and_makes_updates_orthogonal() -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonal(torch.randn(48, 24)))
    assert 0.6 < float(values.min()) <= float(values.max()) < 1.3
    ours, theirs = (torch.nn.Parameter(torch.full((48, 24), 0.5)) for _ in range(2))
    pair = [Muon([ours], lr=0.02), torch.optim.Muon([theirs], lr=0.02)]
    for _ in range(3):
        gradient = torch.randn(48, 24)
        for parameter, optimizer in zip((ours, theirs), pair, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
    assert torch.allclose(ours, theirs, atol=2e-3)  # theirs iterates in bfloat16
    assert float((ours.detach() - 0.5).abs().max()) > 0.01

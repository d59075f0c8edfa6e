"""The full-size shape driven by recorded decisions: who runs through how many of its layers."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import random_reranker, reranker_config

from ondevice.meters import limit
from ondevice_studies.grating import full_size, record
from ondevice_studies.grating.full_size import depths, driven


def test_layers_are_mapped_by_their_share_of_the_depth():
    assert depths([7, 11, 12], 12, 28).tolist() == [17, 26, 28]  # 16.3 and 25.7: decided after the share, not before


def test_each_candidate_runs_through_its_layers_whatever_it_scores():
    runs, calls = np.array([2, 4, 1, 4]), []

    def scores_of(layer, active):
        calls.append((layer, active.tolist()))
        return np.random.default_rng(layer).normal(size=len(active))

    found = driven(runs)(scores_of, 4, 5, 1, lambda history, slots: np.ones(4, np.int8), False)
    assert calls == [(1, [0, 1, 2, 3]), (2, [0, 1, 3]), (3, [1, 3]), (4, [1, 3])]  # nobody goes through the fifth
    assert (found.active.tolist(), found.layer.tolist()) == ([4, 3, 2, 2], runs.tolist())
    assert found.saved == pytest.approx(1 - 11 / 20)
    assert np.array_equal(~np.isnan(found.history), np.arange(1, 6)[:, None] <= runs)


def test_transformers_scores_the_same_whatever_the_size_of_its_batches(tmp_path: Path):
    """Those of our engine, too, with weights in memory and all rows in one batch."""
    random_reranker(
        reranker_config("Qwen3ForCausalLM", "qwen3", num_key_value_heads=2, head_dim=8), torch.float32
    ).save_pretrained(tmp_path)
    given = full_size.rows(full_size.architecture(tmp_path), 20, 9)
    scores = {}
    for method in (full_size.HF, full_size.HF_8, full_size.HF_20, full_size.ONE_BATCH):
        with full_size.scorer(tmp_path, method) as score:
            result = score(given)
        scores[method] = getattr(result, "outcome", SimpleNamespace(history=[result])).history[-1]
    assert np.ptp(scores[full_size.HF]) > 0.1
    for other in scores.values():
        assert np.allclose(other, scores[full_size.HF], atol=1e-4)


# A hard limit


def of_a_run(monkeypatch, code: str) -> dict:
    monkeypatch.setattr(full_size, "hard_limit", lambda size: contextlib.nullcontext(Path(f"group-of-{size}")))
    monkeypatch.setattr(full_size, "_command", lambda job: [sys.executable, "-c", code, job.group])
    return full_size.limited(full_size.Trial("nowhere", full_size.OURS, 1, 1), 150, 5.0)


def test_a_run_under_a_limit_says_how_it_ended(monkeypatch):
    told = of_a_run(monkeypatch, "import sys; assert sys.argv[1] == 'group-of-150000000'; print('a word'); print(1.5)")
    assert told == {"ended": "done", "seconds": 1.5}
    killed = of_a_run(monkeypatch, "import os; os.kill(os.getpid(), 9)")
    assert killed["ended"] == "killed" and np.isnan(killed["seconds"])
    late = of_a_run(monkeypatch, "import time; time.sleep(60)")
    assert late["ended"] == "too long" and np.isnan(late["seconds"])
    with pytest.raises(RuntimeError, match=r"GRATING in 150 MB failed: .*ValueError: no"):
        of_a_run(monkeypatch, "raise ValueError('no')")


def test_a_limit_that_cannot_be_set_is_said_before_a_run(monkeypatch):
    monkeypatch.setattr(limit, "_mounted", lambda: (2, Path("/nowhere")))
    with pytest.raises(OSError, match="No control group can be made"):
        full_size.limited(full_size.Trial("nowhere", full_size.OURS, 1, 1), 150)


def test_seconds_under_a_limit_that_nobody_can_set_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The records behind it are made all the same."""

    def refused(*_: object) -> None:
        raise OSError("This system has no control groups that limit memory.")

    behind: list[str] = []
    monkeypatch.setattr(full_size, "limited", refused)
    monkeypatch.setattr(record, "prepare", lambda *_: tmp_path)
    monkeypatch.setattr(record, "recorder", lambda _: SimpleNamespace(done=set(), finish=lambda: behind.append("bad")))
    monkeypatch.setitem(record.RECORDS, "memory", (lambda _: behind.append("memory"), ["memory"]))
    record.main(["--only", "limits", "memory"])
    assert behind == ["memory"] and "no control groups" in capsys.readouterr().err

"""Footprints: curves that keep their peak, units, medians, rows under the right names, and a copy that is whole."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from ondevice.grating import findings, footprints, measuring, plots, printed
from ondevice.grating.checkpoint import SINGLE, Checkpoint
from ondevice.grating.footprints import MB, SAMPLES, Measured, curve, peaks, quantised_copy
from ondevice.grating.measuring import Job
from ondevice.grating.quantised import SCALE, is_quantised
from ondevice.meters import Sampled

pytestmark = pytest.mark.usefixtures("one_thread")

BASE = 100 * MB  # of the imports
BEFORE = 3  # samples before the first mark


def sampled(growth: Any, anonymous: Any = 0, after: int = 2) -> Sampled:
    """A process that is sampled every 10 ms and grows by so many MB; the rest of it is files that are mapped.

    Before the first mark and after the last it has a GB more, which is not to be counted.
    """
    grown = np.concatenate([np.full(BEFORE, 1000.0), growth, np.full(after, 1000.0)]) * MB
    own = np.concatenate([np.zeros(BEFORE), anonymous * np.ones(len(growth)), np.zeros(after)]) * MB
    count, last = len(grown), BEFORE + len(growth) - 1
    at = np.array([BEFORE, BEFORE + (len(growth) - 1) // 2, last])
    resident, private = (BASE + grown).astype(np.int64), (BASE // 2 + own).astype(np.int64)
    return Sampled(
        seconds=0.01 * (np.arange(count) - BEFORE), resident=resident, anonymous=private, file=resident - private,
        shared=np.zeros(count, np.int64), marks=("baseline", "loaded", "end"), at=at, highest=np.array([-1, 0, 0]),
        lines=(),
    )  # fmt: skip


def measured(growth: Any = (0, 5, 3), job: Job | None = None, **changes: Any) -> Measured:
    """A run of three queries, of 8, 2 and 4 seconds by the clock and other ones otherwise."""
    found: dict[str, Any] = dict(
        scores=np.zeros(1), loading=9.0, seconds=np.array([8.0, 2.0, 4.0]), processor=np.full(3, 5.0),
        stalled=np.array([7.0, 1.0, 0.5]), cached=7 * MB, parts={"window": 2 * MB, "rest": MB}, work=12.0, tokens=6,
    ) | changes  # fmt: skip
    anonymous = found.pop("anonymous", 0)
    memory = sampled(growth, anonymous)
    return Measured(job=job or Job("ours", "folder", "q", ("d",)), memory=memory, **found)


# Curves


@pytest.mark.parametrize("count", [2, 3, SAMPLES - 1, SAMPLES, SAMPLES + 1, 2 * SAMPLES - 1, 2 * SAMPLES, 12_345])
def test_a_curve_has_few_points_and_begins_at_the_first_mark(count: int):
    found = curve(measured(np.arange(count) / 100))
    assert list(found) == ["seconds", "rss_mb", "anon_mb"]
    assert len(found) == min(count, SAMPLES)
    assert found["seconds"].iloc[0] == 0 and (np.diff(found["seconds"]) > 0).all()
    assert 0.01 * (count - 1) - found["seconds"].iloc[-1] <= 0.01 * -(-count // SAMPLES)
    assert found["rss_mb"].iloc[-1] == pytest.approx((count - 1) / 100)  # the last sample counts


@pytest.mark.parametrize("count", [7, 2 * SAMPLES + 13])
def test_each_point_is_the_greatest_of_its_stretch(count: int):
    """No peak is lost, wherever it is, and none is shown where it was not."""
    random = np.random.default_rng(0)
    growth, own = random.integers(0, 300, count), random.integers(0, 50, count)
    growth[0] = own[0] = 0
    found, seconds = curve(measured(growth, anonymous=own)), 0.01 * np.arange(count)
    starts = [*np.searchsorted(seconds, found["seconds"] - 1e-6), count]
    for column, values in (("rss_mb", growth), ("anon_mb", own)):
        stretches = [values[a:b].max() for a, b in itertools.pairwise(starts)]
        assert found[column].tolist() == pytest.approx(stretches)
    widths = np.diff(starts)
    assert widths.max() - widths.min() <= 1


def test_a_short_curve_is_kept_as_it_is():
    found = curve(measured([0, 40, 20, 5], anonymous=np.array([0, 30, 10, 5])))
    assert found["seconds"].tolist() == pytest.approx([0, 0.01, 0.02, 0.03])
    assert found["rss_mb"].tolist() == pytest.approx([0, 40, 20, 5])  # 10**6 bytes over the first mark
    assert found["anon_mb"].tolist() == pytest.approx([0, 30, 10, 5])


def test_shared_memory_counts_as_anonymous():
    """It cannot be dropped either."""
    run = measured([0, 40, 20])
    run.memory.shared[BEFORE + 1] = 11 * MB
    assert curve(run)["anon_mb"].tolist() == pytest.approx([0, 11, 0])


# One run


def test_peaks_are_those_of_the_run_and_its_seconds_are_of_the_queries_after_the_first():
    found = peaks(measured([0, 40, 20, 5], anonymous=np.array([0, 30, 10, 5])))
    wanted = dict(
        rss_mb=40, peak_mb=40, anon_mb=30, mean_rss_mb=(20 + 30 + 12.5) / 3, cached_mb=7, parts_mb=3, work=12,
        first_s=8, seconds=3, stalled_s=0.5,
    )  # fmt: skip
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)
    assert np.isnan(peaks(measured(parts={}))["parts_mb"])  # weights that are not streamed have no parts


# Many runs


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Job]:
    """What is measured; the n-th run grows by 10 n² MB and its queries take n, n / 10, n / 5 ... seconds."""
    seen = list[Job]()

    def measure(job: Job) -> Measured:
        seen.append(job)
        n = float(len(seen))
        seconds = np.array([n, *(n / 10 * np.arange(1, job.repeats))])
        return measured([0, 10 * n**2, 1], job=job, seconds=seconds, work=100 * n)

    folder = tmp_path / "random-shape"
    monkeypatch.setattr(footprints, "measure", measure)
    monkeypatch.setattr(footprints, "model_layers", lambda folder: 8)
    monkeypatch.setattr(footprints, "quantised_copy", lambda folder: folder.with_name("small"))
    monkeypatch.setattr(measuring, "prepared", lambda shape: folder)
    monkeypatch.setattr(measuring, "random_pool", lambda folder, documents, tokens: (f"{tokens}", ("d",) * documents))
    return seen


def test_each_method_is_measured_and_named(jobs: list[Job], tmp_path: Path):
    samples, table = footprints.memory("shape", 500, documents=3)
    assert table["method"].tolist() == list(footprints.METHODS) and set(printed.METHODS) <= set(table["method"])
    assert table["peak_mb"].tolist() == pytest.approx([10.0 * (1 + at) ** 2 for at in range(len(jobs))])
    assert table["first_s"].tolist() == pytest.approx([1.0 + at for at in range(len(jobs))])
    assert table["seconds"].tolist() == pytest.approx([0.1 * (1 + at) for at in range(len(jobs))])
    assert {job.repeats for job in jobs} == {footprints.REPEATS}
    for name, peak in zip(table["method"], table["peak_mb"], strict=True):
        assert samples.loc[samples["method"] == name, "rss_mb"].tolist() == pytest.approx([0, peak, 1])
    assert set(samples["length"]) == set(table["length"]) == {500} and samples.index.is_unique
    assert {(job.query, job.documents) for job in jobs} == {("500", ("d", "d", "d"))}
    assert all(job.threshold == float("inf") for job in jobs)  # nothing is pruned
    by = dict(zip(table["method"], jobs, strict=True))
    assert {name for name, job in by.items() if Path(job.folder).name == "small"} == {printed.OURS_QUANT}
    assert {name for name, job in by.items() if job.whole_head} == {printed.HF, printed.OFFLOAD, printed.QUANT}
    assert {name for name, job in by.items() if job.method == "ours"} == {printed.OURS, printed.OURS_QUANT}


def test_figures_and_findings_read_the_tables(jobs: list[Job]):
    both = [footprints.memory("shape", tokens, documents=3) for tokens in (100, 500)]
    found = findings.memory(pd.concat([table for _, table in both]))
    order, n = list(footprints.METHODS), len(footprints.METHODS)
    ours, theirs = (n + 1 + order.index(name) for name in (printed.OURS, printed.HF))
    assert found["grating-c20"] == pytest.approx((theirs / ours) ** 2)  # of the longest
    assert plots.memory_over_time(*both[0]).axes


def test_rounds_are_in_turn_with_medians_of_peaks_and_the_first_rounds_curves(jobs: list[Job]):
    samples, table = footprints.memory("shape", 500, 3, [printed.OURS, printed.HF], rounds=3)
    assert [job.method for job in jobs] == ["ours", "transformers"] * 3
    assert table["method"].tolist() == [printed.OURS, printed.HF] and table["length"].tolist() == [500, 500]
    assert table["peak_mb"].tolist() == pytest.approx([90, 160])  # runs 1, 3 and 5; 2, 4 and 6
    assert table["first_s"].tolist() == pytest.approx([3, 4])
    assert samples["method"].tolist() == [printed.OURS] * 3 + [printed.HF] * 3
    assert samples["rss_mb"].tolist() == pytest.approx([0, 10, 1, 0, 40, 1])


def test_only_what_is_asked_for_is_measured(jobs: list[Job]):
    assert footprints.memory("shape", 60, methods=[printed.OURS])[1]["method"].tolist() == [printed.OURS]
    assert len(jobs) == 1
    with pytest.raises(KeyError):
        footprints.memory("shape", 60, methods=["GRATNIG"])


def test_a_step_of_the_ablation_adds_what_it_is_called(jobs: list[Job]):
    table = footprints.ablation("shape", 60, documents=3)
    assert table["step"].tolist() == list(printed.STEPS)
    named = dict(zip(table["step"], [job.method for job in jobs], strict=True))
    assert named == {"baseline": "transformers"} | {step: f"+ {step}" for step in printed.STEPS[1:]}
    assert {job.repeats for job in jobs} == {footprints.REPEATS}
    assert [(job.threshold, job.first) for job in jobs[1:]] == [(0.0, 4)] * 4  # from the middle layer on
    assert [job.whole_head for job in jobs] == [True] + [False] * 4


def test_the_ablation_tells_first_queries_from_the_next_ones(jobs: list[Job]):
    """Run n takes n seconds: the first step's are 1, 6 and 11, the last one's 5, 10 and 15."""
    table = footprints.ablation("shape", 60, documents=3, rounds=3).set_index("step")
    assert len(jobs) == 15 and table.index.tolist() == list(printed.STEPS)
    rows = table.loc[["baseline", "embedding cache"]]
    wanted = dict(peak_mb=[360, 1000], first_s=[6, 10], seconds=[0.6, 1.0], low=[0.1, 0.5], high=[1.1, 1.5],
                  work=[1100, 1500])  # fmt: skip
    assert {name: rows[name].tolist() for name in wanted} == {name: pytest.approx(of) for name, of in wanted.items()}


def test_with_one_query_a_run_its_seconds_are_those_of_the_first(jobs: list[Job]):
    first = footprints.ablation("shape", 60, documents=3, rounds=3, repeats=1).iloc[0]
    assert (first["seconds"], first["low"], first["high"], first["first_s"]) == (6, 1, 11, 6)


# The int8 copy


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of two layers in two files, with a tokenizer."""
    made = tmp_path / "random-shape"
    made.mkdir()
    random = torch.Generator().manual_seed(0)
    tensors = {"model.embed_tokens.weight": torch.randn(11, 7, generator=random)}
    tensors |= {f"model.layers.{i}.mlp.up.weight": torch.randn(5, 7, generator=random) for i in range(2)}
    save_file(tensors, made / SINGLE, {"format": "pt"})
    for name in ("config.json", "tokenizer.json", "words.json"):
        (made / name).write_text(f'{{"{name}": 1}}', encoding="utf-8")
    return made


def test_the_copy_is_int8_with_all_that_belongs_to_the_model(folder: Path):
    made = quantised_copy(folder)
    assert made.parent == folder.parent and made != folder
    assert {path.name for path in made.iterdir()} == {path.name for path in folder.iterdir()}
    assert all((made / name).read_bytes() == (folder / name).read_bytes() for name in ("tokenizer.json", "words.json"))
    assert is_quantised(Checkpoint.open(made)) and not is_quantised(Checkpoint.open(folder))
    stored, own = load_file(made / SINGLE), load_file(folder / SINGLE)
    name = "model.layers.1.mlp.up.weight"
    assert stored[name] * stored[name + SCALE][:, None] == pytest.approx(own[name].numpy(), abs=0.02)
    assert footprints.model_layers(made) == footprints.model_layers(folder) == 2


def test_the_copy_is_made_once(folder: Path, monkeypatch: pytest.MonkeyPatch):
    made = quantised_copy(folder)
    monkeypatch.setattr(footprints.quantised, "save", _fails)
    assert quantised_copy(folder) == made


@pytest.mark.parametrize("place", ["nothing", "the weights"])
def test_a_copy_that_failed_is_not_taken_for_one(place: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
    """It failed after nothing or after the weights; the next call makes all of it, and leaves nothing of before."""
    with monkeypatch.context() as patched:
        if place == "nothing":
            patched.setattr(footprints.quantised, "save", _fails)
        else:
            patched.setattr(footprints.shutil, "copy", _full_at_the_tokenizer)
        with pytest.raises(OSError, match="the disk is full"):
            quantised_copy(folder)
    assert not folder.with_name(f"{folder.name}-int8").exists()
    made = quantised_copy(folder)
    assert {path.name for path in made.iterdir()} == {path.name for path in folder.iterdir()}
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, made.name}


def _fails(source: Path, target: Path) -> None:
    """Stands for what writes a folder; leaves a part of it behind."""
    target.mkdir(parents=True, exist_ok=True)
    (target / "half.safetensors").write_bytes(b"half")
    raise OSError("the disk is full")


def _full_at_the_tokenizer(source: Path, target: Path, copy: Any = shutil.copy) -> None:
    if source.name == "tokenizer.json":
        raise OSError("the disk is full")
    copy(source, target)

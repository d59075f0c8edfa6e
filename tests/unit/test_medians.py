"""Where times are taken several times, one slow turn changes nothing: their median counts, not their mean."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from ondevice.evidence import born
from ondevice.evidence.resampling import median_interval
from ondevice_programs.graphs import switching
from ondevice_studies.diaa import costs as diaa
from ondevice_studies.diaa import limits
from ondevice_studies.disco import cold_start
from ondevice_studies.grating import record as grating
from ondevice_studies.sdnpu import timing as sdnpu

SLOW = 1000.0


def test_the_interval_of_a_median():
    median, low, high = median_interval([[1.0, 2.0]] * 24 + [[SLOW, SLOW]])
    assert (median.tolist(), low.tolist(), high.tolist()) == ([1, 2], [1, 2], [1, 2])


def test_sdnpu_s_times():
    assert sdnpu.summary([1.0] * 14 + [SLOW]) == {"seconds": 1, "low": 1, "high": 1, "n": 15}


def test_diaa_s_curves(monkeypatch):
    turns = iter(([[1.0] * 8] * 14 + [[SLOW] * 8]) * len(diaa.FORMATS))
    given = {name: [next(turns) for _ in range(15)] for name in range(len(diaa.FORMATS))}
    numbers = iter(given)

    def verifications(lm, cached, rows):
        own = iter(given[next(numbers)])
        return lambda: next(own)[: len(rows)]

    loaded = SimpleNamespace()
    monkeypatch.setattr(diaa.models, "load", lambda model: loaded)
    monkeypatch.setattr(diaa, "engine", lambda *given, **more: None)
    monkeypatch.setattr(diaa, "verifications", verifications)
    monkeypatch.setattr(diaa, "CACHED", {"m": (256,)})
    monkeypatch.setattr(diaa, "TURNS", 15)
    monkeypatch.setattr(diaa.gc, "collect", lambda: None)  # of all that this process holds
    curves = diaa.curves("m", 1, float("inf"))
    assert set(curves["seconds"]) == {1.0} and curves["mean"].min() > 60 and set(curves["n"]) == {15}


def test_diaa_s_limits(monkeypatch):
    """A pass, and both kernels: a slow turn of each changes nothing."""
    counts = {}

    def turns(name, size):
        counts[name] = 0

        def turn():
            counts[name] += 1
            return [SLOW if counts[name] == 5 else 1.0] * size

        return turn

    model = torch.nn.ModuleList([torch.nn.Embedding(5, 4), torch.nn.Linear(4, 6, bias=False)])
    monkeypatch.setattr(limits.models, "load", lambda model: None)
    monkeypatch.setattr(limits, "engine", lambda *given, **more: SimpleNamespace(model=model))
    monkeypatch.setattr(limits, "verifications", lambda lm, cached, rows: turns(len(counts), len(rows)))
    monkeypatch.setattr(limits, "reading", lambda size, threads: turns("reading", 1) if size == 24 else None)
    monkeypatch.setattr(limits, "multiplying", lambda size, threads: turns("multiplying", 1) if size == 24 else None)
    monkeypatch.setattr(diaa.gc, "collect", lambda: None)
    table = limits.measured("m", 1, float("inf"))
    assert set(table["seconds"]) == {1.0} and set(table["n"]) == {diaa.TURNS} and set(table["weights"]) == {24}
    assert len(table) == len(limits.FORMS) * len(limits.ROWS) + 2


def test_the_kernels_of_diaa_s_limits_take_time():
    for turn in (limits.reading(4_000, 1), limits.multiplying(10**6, 1)):
        assert len(turn()) == 1 and turn()[0] > 0


def test_a_layer_s_seconds_of_grating(monkeypatch):
    """The first layer of a pass does not count, and a slow one is not the layer's time."""
    done = SimpleNamespace(seconds=np.array([SLOW, 1.0, 1.0, SLOW]))

    class Methods:
        shape = None

        def __init__(self, folder):
            pass

        __enter__ = lambda self: self  # noqa: E731
        __exit__ = lambda self, *error: None  # noqa: E731
        run = lambda self, way, given, runs: (SLOW, done)  # noqa: E731

    for name, fake in (("Methods", Methods), ("ROUNDS", {}), ("decided", lambda: None), ("ACTIVE", (1, 20)),
                       ("prepare", lambda *given: None)):  # fmt: skip
        monkeypatch.setattr(grating, name, fake)
    monkeypatch.setattr(grating.full_size, "rows", lambda *given: None)
    rows = []
    layers = SimpleNamespace(done=set(), add=rows.extend, checkpoint=lambda: None)
    grating.record_latency(SimpleNamespace(), layers)
    assert len(rows) == 40 and {row["seconds"] for row in rows} == {1.0}


def test_the_profile_of_sdnpu_s_graphs(monkeypatch, tmp_path):
    """Loads and runs of a block: one of five is slow."""
    counted = dict.fromkeys(("run", "load"), 0)

    def seconds(act, *given):
        kind = "load" if act is built.load else "run"
        counted[kind] += 1
        return SLOW if counted[kind] % 5 == 0 else 1.0

    (tmp_path / "graph").write_bytes(b"12")
    monkeypatch.setattr(switching, "seconds", seconds)
    files = [tmp_path / "graph"]
    built = SimpleNamespace(
        large_files=files, small_files=files, large=4, small=2, facts={"hidden": 8}, caches=lambda: [None],
        load=lambda path: None,
    )
    profile = switching.profile(built, 5)
    assert (profile.p.tolist(), profile.d.tolist(), profile.s.tolist()) == ([1], [1], [1])


def test_how_disco_s_load_times_grow():
    table = pd.DataFrame([
        {"turn": turn, "page_cache": "cold", "parameters": size, "load_s": size / 1e6 * (SLOW if turn == size else 1)}
        for turn in range(9) for size in (4, 8, 1000)
    ])  # fmt: skip
    assert cold_start.exponents(born(table, "recorded"))["cold"].value == pytest.approx(1)

"""Graphs that are switched while a prefill runs: what loads when, errors in the loader, memory that comes back."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import psutil
import pytest
from tiny import loaded_model

from ondevice.causal_lm import CausalLM
from ondevice.speculation import Drafter, generate
from ondevice_papers.sdnpu.drafter import methods, sdnpu
from ondevice_papers.sdnpu.scheduling import RULES
from ondevice_programs.graphs import exporting, static_graphs, switching
from ondevice_programs.graphs.static_lm import StaticLM

PROMPT = np.random.default_rng(0).integers(3, 259, 150).tolist()


@pytest.fixture(scope="module")
def model():
    return loaded_model().model


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("graphs")
    exporting.export(loaded_model(), folder / "g", [PROMPT * 2], blocks=3, large=64, compared=0)
    return static_graphs.opened(folder / "g", folder / "compiled")


@pytest.fixture(scope="module")
def known(built):
    return switching.profile(built, 2)


def no_loader_is_left():
    return not [thread for thread in threading.enumerate() if thread.name == "sdnpu-loader"]


@pytest.mark.parametrize("memory", [1.0, 1.4, 2.0])
@pytest.mark.parametrize("rule", ["synchronous", "naive", "greedy (paper)", "ours"])
def test_what_happens_keeps_to_the_plan_and_to_the_memory(built, known, rule, memory):
    lm = StaticLM(built, RULES[rule], memory, known)
    lm.start().prefill(PROMPT)
    prefill, plan = lm.plan([64, 64, 22])
    found = lm.timeline
    assert found.load_block.tolist() == [load.block for load in plan] and len(plan) == 3
    assert (found.load_start[1:] >= found.load_end[:-1]).all()
    ends = np.r_[0.0, found.compute_end.ravel()]
    for load, begun, over in zip(plan, found.load_start, found.load_end, strict=True):
        assert begun >= ends[load.after] - 1e-6
        on_g2 = found.compute_start[load.chunk :, load.block]
        assert (on_g2 >= over).all() and (found.graph[load.chunk :, load.block] == 2).all()
    for moment in found.load_start:
        there = sum(size for block, size in enumerate(prefill.g1) if (chunk := plan_chunk(plan, block)) > 0
                    and found.compute_end[chunk - 1, block] > moment + 1e-6)  # fmt: skip
        loaded = found.load_block[found.load_start <= moment]
        there += prefill.g2[loaded].sum()
        assert there <= prefill.memory * (1 + 1e-9)
    assert no_loader_is_left()


def plan_chunk(plan, block):
    return next(load.chunk for load in plan if load.block == block)


def test_whole_requests_say_what_plain_decoding_says_under_every_drafter(built, known, model):
    right = generate(CausalLM(model), Drafter(), PROMPT, 40).tokens
    lm = StaticLM(built, RULES["ours"], 1.0, known)
    for made in (Drafter(), sdnpu(lm.vocabulary), methods(lm.vocabulary)["mixture"][0]()):
        answer = generate(lm, made, PROMPT, 40, budget=31)
        assert answer.tokens == right
    assert len(answer.steps) < 39


def test_what_goes_wrong_in_the_loader_is_raised_by_the_prefill(built, known, monkeypatch):
    lm = StaticLM(built, RULES["naive"], 1.0, known)
    session, read = lm.start(), static_graphs.load

    def broken(path, target):
        if threading.current_thread().name == "sdnpu-loader":
            raise ValueError("the disk is gone")
        return read(path, target)

    monkeypatch.setattr(static_graphs, "load", broken)
    with pytest.raises(ValueError, match="the disk is gone"):
        session.prefill(PROMPT)
    assert no_loader_is_left()


def test_what_goes_wrong_in_a_compute_ends_the_loader(built, known):
    lm = StaticLM(built, lambda prefill: RULES["synchronous"](prefill), 1.0, known)
    session = lm.start()
    session.caches[1] = static_graphs.Cache(session.caches[1].keys[:, :, :10], session.caches[1].values[:, :, :10])
    with pytest.raises(Exception, match=r"\w"):
        session.prefill(PROMPT)
    assert no_loader_is_left()


def test_a_profile_counts_the_runs_of_a_chunk(known):
    prefill = known.instance([64, 22], 32)
    np.testing.assert_allclose(prefill.d[0], 2 * prefill.d[1])
    assert (prefill.p[0] == prefill.p[1]).all() and prefill.memory == pytest.approx(known.g1.sum(), rel=1e-3)


HELD = """
import gc, sys
from pathlib import Path
import psutil
from ondevice_programs.graphs import static_graphs
files, process = [Path(name) for name in sys.argv[1:]], psutil.Process()
static_graphs.load(files[0])  # the first has the runtime's own memory with it
gc.collect()
before = process.memory_info().rss
held = [static_graphs.load(path) for path in files]
most = process.memory_info().rss
del held
gc.collect()
print(most - before, most - process.memory_info().rss)
"""


@pytest.mark.skipif(not psutil.LINUX, reason="resident memory is read as Linux gives it")
def test_memory_of_a_graph_comes_back(tmp_path):
    exporting.export(loaded_model(width=384), tmp_path / "g", [PROMPT * 2], blocks=2, large=64, compared=0)
    known = static_graphs.opened(tmp_path / "g", tmp_path / "compiled")
    size = sum(path.stat().st_size for path in known.small_files)
    done = subprocess.run([sys.executable, "-c", HELD, *map(str, known.small_files)], capture_output=True, text=True,
                          check=True, timeout=120)  # fmt: skip
    added, back = map(int, done.stdout.split())
    assert added > 0.5 * size
    assert back > 0.8 * added

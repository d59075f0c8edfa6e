"""What is judged: tables cell by cell, with intervals over runs."""

from __future__ import annotations

import inspect

import numpy as np
import pandas as pd
import pytest

from ondevice import evidence
from ondevice_papers.disco.distributions import DEVICES
from ondevice_papers.disco.race import Requests, play
from ondevice_studies.disco import study, traces


@pytest.fixture(scope="module")
def sweep():
    lengths = traces.lengths()
    some = list(DEVICES.values())[:2]
    return study.sweep(
        ["GPT", "LLaMA"], some, [0.0, 0.3, 0.6, 1.0], study.policies(lengths), play, lengths, (4, 300), 0
    )


def test_the_sweeps_p99_is_a_ttft_that_occurred():
    drawn = Requests.draw((2, 500), traces.lengths(), traces.server("GPT"), np.random.default_rng(0))
    made = study.policies(traces.lengths())("device", traces.server("GPT"), DEVICES["Pixel 7 Pro, Bloom-560M"], 0.3)
    raced = play(made["Stoch"], drawn, DEVICES["Pixel 7 Pro, Bloom-560M"])
    assert study._by_run(raced, drawn, "device")["p99_s"].tolist() == np.sort(raced.ttft, axis=1)[:, 494].tolist()


def test_answers_belong_to_their_prompts():
    known = set(traces.pairs()[["prompt", "answer"]].itertuples(index=False, name=None))
    server, gaps = traces.server("GPT"), traces.measured("together-70b", "tbt_s")
    default = inspect.signature(study.bill).parameters["pairs"].default
    for pairs, together in ((default, True), (study.joint, True), (study.apart, False)):
        found = study.asked(server, gaps, traces.lengths(), 300, 10**9, pairs, np.random.default_rng(0))
        drawn = set(zip(found.requests.prompt.tolist(), found.answer.tolist(), strict=True))
        assert (drawn <= known) == together


def test_a_table_is_compared_cell_by_cell():
    cells = evidence.born(pd.DataFrame([[1.0, 3.0], [10.0, 10.0], [-4.0, -6.0]]), "simulated")
    distance, order, near, above = (x.value for x in study.beside(cells, [2.0, 14.0, 20.0], 5))
    assert distance == pytest.approx((0 + 4 + 25) / 3)
    assert (order, near, above) == (pytest.approx(-0.5), pytest.approx(2 / 3), pytest.approx(2 / 3))


def test_an_interval_over_runs_shrinks_with_them():
    rng = np.random.default_rng(0)
    few, many = (evidence.born(pd.DataFrame(rng.normal(size=(3, n))), "simulated") for n in (5, 80))
    widths = [found.high - found.low for found in (study.over_runs(np.mean, table) for table in (few, many))]
    assert widths[1] < widths[0] / 2

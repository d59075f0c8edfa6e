"""The draw of what runs again: by the seed alone, over all units, tasks and lengths in turn."""

import numpy as np
import pandas as pd
import pytest

from ondevice.evidence.sampling import sampled

UNITS = pd.DataFrame(
    [
        (model, task, request, 8 + request * (1 + len(task)))
        for model in ("base", "small")
        for task in ("qa", "rag", "summary")
        for request in range(60)
    ],
    columns=["model", "task", "request", "tokens"],
)
WORDS = {"strata": ["model", "task"], "length": "tokens", "name": "request"}


def drawn(units=UNITS, seed=0, number=0, **words):
    return sampled(units, seed, number, **WORDS | words)


@pytest.mark.parametrize(("units", "count"), [(2, 2), (150, 2), (360, 4), (800, 8), (5000, 10)])
def test_one_percent_or_ten_whichever_is_less(units, count):
    table = pd.DataFrame({"model": "base", "task": "qa", "request": range(units), "tokens": 8})
    assert len(drawn(table)) == count and len(drawn(table, number=2)) == 2


def test_strata_and_lengths_take_turns():
    for seed in range(8):
        twelve = drawn(seed=seed, number=12)
        assert (twelve.groupby(["model", "task"]).size() == 2).all() and not twelve.duplicated().any()
        third = twelve["request"] // 20
        assert third.value_counts().tolist() == [4, 4, 4]
        assert third.groupby([twelve["model"], twelve["task"]]).nunique().eq(2).all()
        assert drawn(UNITS[UNITS["task"] == "qa"][:60], seed, 3)["request"].floordiv(20).tolist() == [0, 1, 2]


def test_the_seed_draws_over_all_units_and_the_order_of_rows_does_not_matter():
    shuffled = UNITS.sample(frac=1, random_state=1)
    assert all(drawn(seed=seed).equals(drawn(shuffled, seed)) for seed in range(5))
    half = pd.concat([drawn(seed=seed, number=180) for seed in range(8)]).groupby(["model", "task", "request"])
    assert half.ngroups > 0.95 * len(UNITS) and half.size().mean() < 4.3


def test_fetched_prompts_change_nothing_of_what_every_clone_compares():
    fetched = pd.DataFrame({"model": "base", "task": "spec-bench", "request": range(480), "tokens": np.arange(480)})
    both = pd.concat([UNITS.assign(fetched=False), fetched.assign(fetched=True)])
    table = drawn(both, fetched="fetched")
    assert table[~table["fetched"]][UNITS.columns].equals(drawn())
    assert table["fetched"].sum() == 5


def test_what_was_drawn_is_printed_in_lines_that_fit(capsys):
    table = drawn(number=10)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("drawn by seed 0, 10 of 360: base") and max(map(len, lines)) <= 110
    for row in table.itertuples():
        assert str(row.request) in " ".join(lines)

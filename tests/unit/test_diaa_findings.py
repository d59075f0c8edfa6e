"""What tables say of DIAA's claims, on the paper's own tables and on made ones; its tables under our names."""

from __future__ import annotations

import pandas as pd
import pytest

from ondevice import assets
from ondevice.diaa import findings, printed, questions
from ondevice.diaa.experiments import TASKS

NAMES = {"3B": "larger", "1B": "small"}


@pytest.fixture(scope="module")
def table_1() -> pd.DataFrame:
    """The paper's Table 1 as `by_task` gives ours."""
    found = assets.paper_table("diaa", "table_01_goodput_latency")
    found = found[found["model_label"].isin(NAMES)]
    families = {theirs: ours for ours, theirs in TASKS.items()} | {"average": "average"}
    return found.assign(
        model=found["model_label"].map(NAMES),
        task=found["task"].map(families),
        method=found["method"].replace("Vanilla", "vanilla"),
    )


def test_averages_are_over_the_best_baseline(table_1):
    found = findings.best_on_average(table_1, "larger", "small")
    assert found["diaa-c02"] == pytest.approx(16.37 / 15.38)
    assert found["diaa-c06"] == pytest.approx(41.56 / 37.73)


def test_ranks_and_spreads_are_over_the_tasks(table_1):
    found = findings.across_tasks(table_1, "larger", "small")
    assert found["diaa-c07"] == 1
    assert found["diaa-c08"] == pytest.approx([17.50 / 15.09, 31.60 / 28.66])
    assert max(found["diaa-c10"]) < 1
    worse = table_1.copy()
    worse.loc[(worse["method"] == "DIAA") & (worse["task"] == "rag"), "goodput_tokens_per_s"] = 1.0
    assert findings.across_tasks(worse, "larger", "small")["diaa-c07"] == pytest.approx(10 / 12)


def test_speed_ups_are_those_of_table_2():
    found = findings.table_2(printed.speedups("larger", "small"), "larger", "small")
    assert (round(found["diaa-c12"], 2), round(found["diaa-c14"], 2)) == (2.22, 2.05)
    assert [round(value, 2) for value in found["diaa-c11"]] == [0.93, 1.28]


def test_the_ablation_is_that_of_table_3():
    found = findings.table_3(printed.ablation())
    assert found["diaa-c16"][0] == pytest.approx(16.33 / 15.03)  # qa
    assert found["diaa-c17"][0] == pytest.approx(15.40 / 15.33)  # math
    assert found["diaa-c19"][0] == pytest.approx(16.33 / 15.63) == found["diaa-c18"][0]


def test_trees_are_compared_above_one_row_of_the_table():
    rows = [("static", 16, task, 2.0, 2.0, 0.2) for task in ("rag", "average")]
    rows += [("dynamic", 16, "rag", 3.0, 1.0, 0.3), ("dynamic", 16, "average", 3.0, 3.0, 0.1)]
    rows += [(tree, 8, task, 1.0, 1.0, 0.1) for tree in ("static", "dynamic") for task in ("rag", "average")]
    columns = ["tree", "size", "task", "goodput_tokens_per_s", "tokens_per_step", "acceptance_rate"]
    found = findings.trees(pd.DataFrame(rows, columns=columns))
    assert found == {"diaa-c23": [1.0, 1.0, 0.0], "diaa-c24": (1.0, 0.0)}


def test_the_draft_models_gigabyte_is_counted():
    counted = findings.weights().set_index("model")
    embedding = 128_256 * 2048
    assert counted.loc["llama-3.2-1b, INT4", "weights_gb"] == pytest.approx(
        ((1_235_814_400 - embedding) / 2 + 2 * embedding) / 1e9
    )
    assert findings.memory(findings.weights())["diaa-c31"] == pytest.approx(counted["tables_percent"].iloc[:3].max())


def test_redundancy_is_ranked_against_speed_up():
    tasks = list(TASKS)
    gains = pd.DataFrame({"model": "m", "method": "DIAA", "task": [*tasks, "average"], "speedup": [*range(1, 7), 9]})
    known = pd.DataFrame({"model": "m", "task": tasks[::-1], "redundancy": [6, 5, 4, 3, 2, 1]})
    assert findings.redundancy(gains, known)["diaa-c09"] == (pytest.approx(1.0), 5.0)  # doctest, second of rising six


@pytest.mark.parametrize(("source", "split"), [("elsewhere", "test"), ("corpus", "train")])
def test_requests_come_from_known_places(source, split):
    with pytest.raises(ValueError, match="corpus or spec_bench, test or validation"):
        questions.asked(source, split, 1, None, None, 8)

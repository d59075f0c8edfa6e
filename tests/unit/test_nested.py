"""Draws of prompts that several models answer: a prompt is drawn for all of them, and counted once."""

import numpy as np
import pandas as pd
import pytest

from ondevice.evidence import born, mean
from ondevice_studies.diaa.study import pooled
from ondevice_studies.speculation.nested import resample_models


def answered(second: dict[int, int]) -> pd.DataFrame:
    """Two models' values of 30 prompts of a task. second: the second model's prompt by the first one's."""
    values = np.random.default_rng(0).normal(5, 1, 30)
    rows = [("a", "rag", prompt, "x", value) for prompt, value in enumerate(values)]
    rows += [("b", "rag", second[prompt], "x", value) for prompt, value in enumerate(values)]
    return born(pd.DataFrame(rows, columns=["model", "task", "request", "method", "value"]), "recorded")


def width(table: pd.DataFrame) -> tuple[float, int]:
    """Width of the interval of the mean over both models, and n."""
    samples = list(resample_models(table, "value").values())
    estimate = pooled(samples, np.concatenate([sample["x"] for sample in samples], axis=1).mean(axis=1))
    return estimate.high - estimate.low, estimate.n


def test_two_models_on_the_same_prompts_are_no_more_samples_than_one():
    same = answered({prompt: prompt for prompt in range(30)})
    one = mean(same.loc[same["model"] == "a", "value"].tolist(), "recorded", drawn="prompts")
    assert width(same) == (pytest.approx(one.high - one.low, rel=0.1), 30)
    apart, n = width(answered({prompt: prompt + 30 for prompt in range(30)}))
    assert n == 60 and apart == pytest.approx((one.high - one.low) / 2**0.5, rel=0.15)


def test_an_interval_of_few_prompts_is_as_wide_as_that_of_resampled():
    few = answered({prompt: prompt for prompt in range(30)}).query("request < 5")
    one = mean(few.loc[few["model"] == "a", "value"].tolist(), "recorded", drawn="prompts")
    assert width(few) == (pytest.approx(one.high - one.low, rel=0.1), 5)


def test_of_some_tasks_only_their_prompts_count():
    table = answered({prompt: prompt for prompt in range(30)})
    other = table[table["request"] < 12].assign(task="summary")
    sample = resample_models(born(pd.concat([table, other]), "recorded"), "value")["a"]
    assert sample.tasks == ["rag", "summary"] and sample.n == 42
    assert [sample.only(columns).n for columns in ([0], [1], [0, 1])] == [30, 12, 42]


def test_a_draw_without_any_of_a_models_prompts_takes_all_of_them():
    rows = [("a", "rag", prompt, "x", 1.0) for prompt in range(5)] + [
        ("b", "rag", 9, "x", 2.0),
        ("b", "rag", 8, "x", 2.0),
    ]
    table = born(pd.DataFrame(rows, columns=["model", "task", "request", "method", "value"]), "recorded")
    assert np.allclose(resample_models(table, "value")["b"]["x"], 2.0)

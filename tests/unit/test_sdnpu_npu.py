"""The model of the paper's phones: what it gives back of tables that follow it, and of the paper's own."""

import numpy as np
import pandas as pd
import pytest

from ondevice import assets
from ondevice_papers.sdnpu import npu

ACCEPTED = (3.6, 4.21)


def test_a_token_takes_its_share_of_the_prefill_and_of_a_pass():
    assert npu.per_token(2.0, 1.0, 40.0, 4.0, drafting=4.0) == 14.0


def made(forward: float) -> pd.DataFrame:
    """Table 3 as the model has it, with times that are linear in the weights."""
    rows = {}
    for model, spec in npu.SIZES.items():
        billions = npu.shapes.shape(spec).parameters / 1e9
        times = [1.0 + billions, 0.5 * billions, forward * billions]
        rows[model] = npu.cells(times, ACCEPTED[0], ACCEPTED[1] / ACCEPTED[0], npu.per_token)
    return pd.DataFrame.from_dict(rows, orient="index", columns=list(npu.COLUMNS))


def test_a_table_that_follows_the_model_is_foretold():
    table = npu.fitted(made(20.0), ACCEPTED, {})
    assert table["held_out"].sum() == 5 and table["error"].abs().max() < 1e-3


def test_a_figure_that_contradicts_the_table_pulls_the_fit_off_it():
    table = npu.fitted(made(20.0), ACCEPTED, {"Figure 6": 600.0})
    assert table.loc[table["held_out"], "error"].abs().max() > npu.CLOSE


def test_what_a_row_admits_by_itself_is_an_interval_around_what_made_it():
    row = made(20.0).loc[npu.HELD_OUT]
    forward = 20.0 * npu.shapes.shape(npu.SIZES[npu.HELD_OUT]).parameters / 1e9
    least, greatest = npu.admitted(row, ACCEPTED)
    assert 0.5 * forward < least < forward < greatest < 2 * forward
    assert npu.admitted(row * (1, 0.2, 1, 1, 1), ACCEPTED) != (least, greatest)
    assert all(map(np.isnan, npu.admitted(row * (1, 5, 1, 1, 1), ACCEPTED)))  # hidden switching may not cost more


@pytest.mark.parametrize("figures", [{}, {"Figure 5": 672.0, "Figure 6": 182.4}])
def test_the_papers_own_row_is_missed(figures):
    """As long as this holds, no latency of a phone is judged."""
    printed = assets.paper_table("sdnpu", "table_03_ablation_latency")
    printed = printed.pivot(index="model", columns="paper_label", values="per_token_latency_ms")
    table = npu.fitted(printed, ACCEPTED, figures)
    assert table.loc[table["held_out"], "error"].abs().max() > npu.CLOSE

"""Every source cell of DiSCo's notebook acts: a wrong body put in its place moves the exhibits that rest on it."""

import pandas as pd
import pytest
from cells import Notebook

from ondevice import evidence

pytestmark = pytest.mark.long  # runs most of the notebook

FIGURE_6 = {"fig_06_mean_ttft", "fig_06_measured_services", "fig_06_p99_ttft"}
LEARNED = {"beyond_00_learned", "beyond_02_learned", "beyond_03_learned_figure"}
TTFT = FIGURE_6 | {"table_02_tail_reduction", "fig_05_users"}
MIGRATED = {"table_03_migration", "fig_07_cost"}
BEST = {"beyond_00_optimum", "beyond_01_mean_tail_plane", "beyond_05_held_out", *FIGURE_6, *LEARNED}
# By source cell: what stands there, what is put in its place, and the exhibits that move, or the cell that prints.
EDITS = {
    "race": (
        "np.minimum(device_at, server_at)", "np.minimum(device_at, server_at) + 1.0",
        {"beyond_00_race", "algorithm_2_waits", "algorithm_3_threshold", *BEST, *TTFT, "beyond_06_tail_bound",
         "beyond_00_own_budget"},
    ),
    "play": ("device.ttft(requests.prompt)", "device.ttft(2 * requests.prompt)", TTFT | MIGRATED),
    "device-constrained": (
        "left -= need", "left -= 2 * need",
        {"algorithm_2_waits", "beyond_00_optimum", *TTFT, "fig_07_cost", "beyond_01_mean_tail_plane",
         "beyond_05_held_out"},
    ),
    "server-constrained": (
        "alone = (1 - b) * tokens[-1]", "alone = (1 - b) ** 2 * tokens[-1]",
        {"algorithm_3_threshold", "beyond_00_optimum", *TTFT, *MIGRATED},
    ),
    "equations-4-5": ("pace * seconds", "3 * pace * seconds", {"fig_04_migration", *MIGRATED}),
    "migration": ("generated - shown >=", "generated >=", {"fig_04_migration", *MIGRATED}),
    "stream": ("paced(generated, pace), np.nan", "paced(generated, 2 * pace), np.nan", {"fig_04_migration"}),
    "prices": ("1 - server.cdf(samples)", "server.cdf(samples)", BEST),
    "mean-optimal": ("left = b - (mass", "left = -(mass", BEST - {"beyond_03_learned_figure"}),
    "survived": ("right=seconds[~seen]", "right=2 * seconds[~seen]", {"beyond_00_censored", *LEARNED}),
    "account": ("self.slack[index] -= tokens", "self.slack[index] -= 2 * tokens", LEARNED),
    "choose": ("price * tokens * share", "0.0 * share", LEARNED),
    "migrated": ("begun[:handover]", "begun[: handover // 2]",
                 {"quality-again", "fig_08_quality", "fig_10_quality", "equation_6_bound"}),
    "scenario": ("min(device) > max(server)", "min(device) < max(server)", {"algorithm-1"}),
    "components": ('"layernorm": float(n * 8 * d)', '"layernorm": float(n * 80 * d)',
                   {"table_06_flops_per_token", "table_07_flops_share"}),
}  # fmt: skip
WINNER = ("(device_at <= server_at)", "(device_at > server_at)", MIGRATED)  # a second edit of the race
SHORT = {"runs": 2, "requests": 60, "budget_step": 0.1, "threads": 1, "sample": 2}
LEFT_OUT = {"endpoint", "stream-live", "stream-drawn", "table-5", "table-4", "figure-9"}  # no source cell has a part in


@pytest.fixture(scope="module")
def saved(exhibits_elsewhere):
    """By name the table that an exhibit was saved with last."""
    tables = {}

    def save(self, stem, table=None, *arguments, **options):
        tables[stem] = pd.DataFrame(table).copy()
        return right(self, stem, table, *arguments, **options)

    right = evidence.PaperRun.save
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evidence.PaperRun, "save", save)
        yield tables


@pytest.fixture(scope="module")
def disco(saved):
    book = Notebook("disco", SHORT)
    book.leave(set(book.texts) - LEFT_OUT)
    short = book.texts["learned"].replace("traces.series_names()", '["replicate-7b"]').replace("2000", "200")
    book.texts["learned"] = short
    return book.begin("tables-6-7")


@pytest.fixture(scope="module")
def before(disco, saved):
    """What the notebook saves as it is, and what its cells print."""
    return dict(saved) | disco.said


def test_every_source_cell_has_an_edit(disco):
    assert set(disco.sources) == set(EDITS)


def test_every_exact_or_simulated_exhibit_moves_with_some_edit(disco, saved):
    moved = set().union(*(exhibits for _, _, exhibits in [*EDITS.values(), WINNER]))
    resting = {"table_01_device_rows", "table_08_prices", "beyond_00_own_device", "fig_02_ttft_over_time", "fig_03_tbt"}
    assert set(saved) - moved == resting


@pytest.mark.parametrize(("cell", "edit"), [*EDITS.items(), pytest.param("race", WINNER, id="race-winner")])
def test_a_wrong_body_moves_every_exhibit_that_rests_on_it(disco, saved, before, cell, edit):
    old, new, exhibits = edit
    assert disco.texts[cell].count(old) == 1
    stems = {exhibit.removesuffix("_quality") for exhibit in exhibits}
    makers = [name for name, text in disco.texts.items() if name in exhibits or any(f'"{x}"' in text for x in stems)]
    needed = {name for maker in makers for name in disco.needed(maker)}
    names = [name for name in disco.span(cell, list(disco.texts)[-1]) if name == cell or name in needed]
    saved.clear()
    texts = disco.texts | {cell: disco.texts[cell].replace(old, new)}
    said = disco.run(names, dict(disco.before[cell]) | {"live": {}}, texts)
    assert "Error: " not in list(said.values())[-1], said
    after = dict(saved) | said
    assert [name for name in sorted(exhibits) if same(after[name], before[name])] == []


def same(one, other):
    return one.equals(other) if isinstance(one, pd.DataFrame) else one == other

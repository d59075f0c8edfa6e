"""Every source cell of DiSCo's notebook acts: a wrong body put in its place changes what the cells behind it print."""

import pytest
from cells import Notebook

# By source cell: what stands there, what is put in its place, and the cell that shows it.
EDITS = {
    "race": ("np.minimum(device_at, server_at)", "np.minimum(device_at, server_at) + 1.0", "race-shown"),
    "play": ("device.ttft(requests.prompt)", "device.ttft(2 * requests.prompt)", "race-shown"),
    "scenario": ("min(device) > max(server)", "min(device) < max(server)", "algorithm-1"),
    "device-constrained": ("left -= need", "left -= 2 * need", "algorithm-2"),
    "server-constrained": ("alone = (1 - b) * tokens[-1]", "alone = b * tokens[-1]", "algorithm-3"),
    "equations-4-5": ("pace * seconds", "3 * pace * seconds", "stream-shown"),
    "migration": ("generated - shown >=", "generated >=", "stream-shown"),
    "stream": ("n0 - read[rows, at]", "n0", "stream-shown"),
    "prices": ("1 - server.cdf(samples)", "server.cdf(samples)", "mean-optimal-shown"),
    "mean-optimal": ("left = b - (mass", "left = -(mass", "mean-optimal-shown"),
    "survived": ("right=seconds[~seen]", "right=2 * seconds[~seen]", "survived-shown"),
    "account": ("self.slack[index] -= tokens", "self.slack[index] -= 2 * tokens", "account-shown"),
    "choose": ("price * tokens * share", "0.0 * share", "learned-shown"),
    "components": ('"layernorm": float(n * 8 * d)', '"layernorm": float(n * 80 * d)', "table-7"),
    "migrated": ("begun[:handover]", "begun[: handover // 2]", "quality-again"),
}
FIGURES = {
    "race": "table-2", "device-constrained": "table-2", "mean-optimal": "optimum", "stream": "table-3",
}  # fmt: skip
SHORT = {"runs": 2, "requests": 60, "budget_step": 0.1, "threads": 1, "sample": 2}
LEFT_OUT = {
    "router", "router-check", "figure-2", "figure-2-claim", "figure-3", "figure-3-claim", "table-1", "own-device",
    "table-5", "table-5-save", "figure-6", "mean-claims", "table-2-claims", "tail-bound", "figure-5-queue",
    "figure-7", "figure-7-claims", "figure-9", "figure-9-claims", "table-4", "table-4-claims", "table-7-claim",
}  # fmt: skip


pytestmark = pytest.mark.timeout(900)  # the fixture runs most of the notebook, beside another one


@pytest.fixture(scope="module")
def disco(exhibits_elsewhere):
    book = Notebook("disco", SHORT)
    book.leave(set(book.texts) - LEFT_OUT)
    short = book.texts["learned"].replace("traces.series_names()", '["replicate-7b"]').replace("2000", "200")
    book.texts["learned"] = short
    return book.begin("learned")


def test_every_source_cell_has_an_edit(disco):
    assert set(disco.sources) == set(EDITS)


@pytest.mark.parametrize("cell", EDITS)
def test_a_wrong_body_changes_what_is_printed(disco, cell):
    shown = EDITS[cell][-1]
    assert disco.again(cell, *EDITS[cell]).get(shown) != disco.said[shown]


@pytest.mark.parametrize(("cell", "exhibit"), FIGURES.items())
def test_a_wrong_body_changes_a_simulated_exhibit(disco, cell, exhibit):
    said = disco.again(cell, *EDITS[cell][:2], exhibit)
    assert exhibit in said and said[exhibit] != disco.said[exhibit]


def test_the_sample_says_that_the_hand_over_was_edited(disco):
    assert "ran again exactly" in disco.said["quality-again"] and "differ" not in disco.said["quality-again"]
    assert "differ" in disco.again("migrated", *EDITS["migrated"][:2], "quality-again")["quality-again"]

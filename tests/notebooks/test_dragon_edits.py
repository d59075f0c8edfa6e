"""Every source cell of DRAGON's notebook acts: a wrong body put in its place changes what the cells behind it print."""

import pytest
from cells import Notebook

pytestmark = pytest.mark.long  # runs most of the notebook

# By source cell: what stands there, what is put in its place, and the cell that shows it.
EDITS = {
    "mixture": ("eta_local * p_local +", "eta_local * p_remote +", "mixture-shown"),
    "algorithm-1": ("verifying * p[draft] < p", "verifying * p[draft] > p", "algorithm-1-shown"),
    "acceptance": ("gamma_side * np.minimum", "0.9 * gamma_side * np.minimum", "acceptance-shown"),
    "shared": ("np.log(probabilities) + gumbel", "np.log(probabilities) - gumbel", "acceptance-shown"),
    "kept": ("np.sqrt(p / unit)", "(p / unit)", "codec-shown"),
    "filled": ("(1 - tail) * (kept.weights", "(kept.weights", "codec-shown"),
    "drafting": ("ahead >= side.lookahead", "ahead >= 1", "figure-4"),
    "settling": ("if not kept_remote:", "if kept_remote:", "figure-4"),
    "committing": ("if not accepted:", "if accepted:", "figure-4"),
    "taking-over": ("deque(switch.drafts)", "deque()", "figure-9-again"),
    "numbers": (".random(count)", ".random(count) ** 9", "deciding-shown"),
    "deciding": ("int(sample(p, uniforms(begin.seed, stream, position, 1)[0]))", "int(p.argmin())", "deciding-shown"),
    "waiting": ("costs.send_local + costs.decode_remote + costs.send_remote", "costs.decode_remote", "table-1"),
    "latency": ("costs.decode_remote + costs.round_trip)", "costs.decode_remote)", "table-1"),
    "plan": ("cost = rejected_b * lag", "cost = 0 * lag", "plan-shown"),
    "attack": ("(1 - ETA) * p_cloud + ETA * p_candidate", "p_cloud", "attack-again"),
    "windows-live": ("weights[:, None] + read", "0 * weights[:, None] + read", "windows-again"),
    "oracle-steps": ("now = max(state.decided, drafted[side], ", "now = max(state.decided, ", "figure-9-again"),
    "oracle": ("(i - 1, state.trail)", "(i, state.trail)", "oracle-shown"),
}  # fmt: skip
SHORT = {"pairs": 2, "threads": 1, "answers_again": 5}
SHOWN = {shown for _, _, shown in EDITS.values()} | {"answers-again"}
SET_UP = {"parameters", "checked", "imports", "setup"}


@pytest.fixture(scope="module")
def dragon(exhibits_elsewhere):
    book = Notebook("dragon", SHORT)
    book.leave({*SET_UP, *SHOWN, *book.sources})
    few = "units = units[(units['model'] == record.SMALL) & (units['documents'] == 4)]\ndrawn = "
    book.texts["windows-again"] = book.texts["windows-again"].replace("drawn = ", few)
    return book.begin(max(SHOWN, key=list(book.texts).index))


def test_every_source_cell_has_an_edit(dragon):
    assert set(dragon.sources) == set(EDITS)


@pytest.mark.parametrize("cell", EDITS)
def test_a_wrong_body_changes_what_is_printed(dragon, cell):
    shown = EDITS[cell][-1]
    assert dragon.again(cell, *EDITS[cell]).get(shown) != dragon.said[shown]


def test_a_sample_says_that_the_algorithm_was_edited(dragon):
    wrong = dragon.again("mixture", *EDITS["mixture"][:2], "answers-again")["answers-again"]
    assert "was the algorithm edited?" in wrong and "differ" not in dragon.said["answers-again"]


def test_the_devices_side_of_live_sessions_decides_with_the_cells(dragon):
    """What the live cells hand to the device are the functions of the cells, which call each other."""
    state = dragon.before["answers-again"]
    assert all(function in state["rules"] for function in (state["draft_on"], state["settle"], state["take_over"]))
    names = [state[name].__globals__ for name in ("decide", "settle")]
    assert names[0] is names[1] and names[0]["target"] is state["target"]
    assert "decide=decide" in Notebook("dragon", {}).texts["live"]

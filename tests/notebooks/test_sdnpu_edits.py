"""Every source cell of sd.npu's notebook acts: a wrong body put in its place moves what the cells behind it show."""

import pytest
from cells import Notebook

pytestmark = pytest.mark.long  # runs most of the notebook

# By source cell: what stands there, what is put in its place, the cell that draws it, its table in `live`.
LIVE = {
    "searched": ("reach * p < floor", "reach * p < 2.0", "searched-shown", "searched"),
    "rejected": ("return Rejected(longest,", "return Rejected(longest[:1],", "reuse-shown", "reuse"),
    "agreed-run": ("[parent + 1] == tokens[node]", "[parent + 1] != tokens[node]", "reuse-shown", "reuse"),
    "classify": ('"synonym" if skipped else "missing"', '"missing"', "reuse-shown", "reuse"),
    "pooled": ("for branch in branches:", "for branch in branches[:0]:", "pool-shown", "pool"),
}
# By source cell: what stands there, what is put in its place, and the cell whose text moves.
PRINTED = {
    "execute": ("start = max(free, ends[after])", "start = free", "figure-8"),
    "greedy": ("j = max(fitting)", "j = min(fitting)", "figure-8"),
    "simple-rules": ("Load(block, prefill.p.size, prefill.chunks)", "Load(block, 0, prefill.chunks)", "figure-8"),
    "earliest": ("np.argsort(due, ", "np.argsort(-due, ", "figure-8"),
    "latencies": (" + s[:, k]", "", "ratios"),
    "downhill": ("latency.argmin()]", "latency.argmax()]", "ratios"),
    "ours-schedule": ("return min([*plans", "return max([*plans", "ratios"),
    "scheduling-instance": ("2.0 * half + 2 * m", "4.0 * half", "appendix-a"),
    "forward": ("mask[:, :start] = 0.0", "pass", "graphs-shown"),
    "best-shapes": ("seconds[b - 1]", "seconds[0]", "shapes"),
    "per-token": ("(forward + drafting) / accepted", "forward / accepted", "phones"),
}
EDITS = LIVE | PRINTED
SHORT = {"instances_a_family": 2, "threads": 1, "tokens": 24}


@pytest.fixture(scope="module")
def sdnpu(exhibits_elsewhere):
    book = Notebook("sdnpu", SHORT)
    return book.begin("phones")


def test_every_source_cell_has_an_edit(sdnpu):
    assert set(sdnpu.sources) == set(EDITS)


@pytest.mark.parametrize("cell", LIVE)
def test_a_wrong_body_moves_a_value_beyond_its_interval(sdnpu, cell):
    old, new, last, name = LIVE[cell]
    assert sdnpu.texts[cell].count(old) == 1
    before = sdnpu.before["execute"]["live"][name]
    after = sdnpu.live(cell, last, sdnpu.texts | {cell: sdnpu.texts[cell].replace(old, new)})[name]
    assert ((after["value"] < before["low"]) | (after["value"] > before["high"])).any(), after


def test_an_unedited_repeat_moves_none(sdnpu):
    again = sdnpu.live("searched", "pool-shown")
    for name, before in sdnpu.before["execute"]["live"].items():
        assert again[name].equals(before), name


@pytest.mark.parametrize("cell", PRINTED)
def test_a_wrong_body_changes_what_is_printed(sdnpu, cell):
    shown = PRINTED[cell][-1]
    assert sdnpu.again(cell, *PRINTED[cell]).get(shown) != sdnpu.said[shown]


PLANNED = ("execute", "greedy", "latencies", "downhill", "ours-schedule")


@pytest.mark.parametrize("cell", PLANNED)
def test_a_wrong_rule_moves_the_planned_share_beside_the_recorded_one(sdnpu, cell):
    old, new, _ = PRINTED[cell]
    texts = sdnpu.texts | {cell: sdnpu.texts[cell].replace(old, new)}
    between = [*sdnpu.span(cell, "ours-schedule"), "figure-8", "switching"]
    printed = sdnpu.run(between, dict(sdnpu.before["switching"]), texts)
    assert printed["switching"] != sdnpu.said["switching"]


def agreeing(text):
    return int(text.split(" of ")[0])


def test_the_sample_says_that_the_pool_was_edited(sdnpu):
    wrong = sdnpu.again("pooled", *LIVE["pooled"][:2], "again")["again"]
    assert "differ" in wrong and agreeing(wrong) < agreeing(sdnpu.said["again"])

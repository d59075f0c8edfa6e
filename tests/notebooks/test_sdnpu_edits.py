"""Every source cell of sd.npu's notebook acts: a wrong body put in its place changes what the cells behind it print."""

import pytest
from cells import Notebook

# By source cell: what stands there, what is put in its place, and the cell that shows it.
EDITS = {
    "searched": ("reach * p < floor", "reach * p < 0.4", "searched-shown"),
    "likeliest": ("values.float().softmax(-1)", "(0 * values.float()).softmax(-1)", "learn-shown"),
    "learn": ("table[before, token] = Row(2, tokens, chances)", "pass", "learn-shown"),
    "rejected": ("max(tails, key=len", "min(tails, key=len", "reuse-shown"),
    "agreed-run": ("choices[parent + 1] == tokens[node]", "choices[parent + 1] != tokens[node]", "reuse-shown"),
    "resumed": ("tail[len(emitted) :]", "tail[len(emitted) - 1 :]", "reuse-shown"),
    "standing": ("return 1", "return 3", "pool-shown"),
    "first-guess": ("0.2 + 0.1 * number", "0.1 * number", "pool-shown"),
    "offered": ("max(rate, chances.get(token, 0.0))", "0.0", "pool-shown"),
    "grow": ("heappop(queue)", "queue.pop()", "pool-shown"),
    "observe": ("token == emitted)\n        for branch", "token != emitted)\n        for branch", "again"),
    "merged": ("for branch in branches:", "for branch in branches[::-1]:", "pool-shown"),
    "execute": ("start = max(free, ends[after])", "start = free", "figure-8"),
    "greedy": ("j = max(fitting)", "j = min(fitting)", "figure-8"),
    "simple-rules": ("Load(block, prefill.p.size, prefill.chunks)", "Load(block, 0, prefill.chunks)", "figure-8"),
    "earliest": ("np.argsort(due, ", "np.argsort(-due, ", "figure-8"),
    "latencies": (" + s[:, k]", "", "ratios"),
    "downhill": ("latency.argmin()]", "latency.argmax()]", "ratios"),
    "ours-schedule": ("return min([*plans", "return max([*plans", "ratios"),
    "scheduling-instance": ("2.0 * half + 2 * m", "4.0 * half", "appendix-a"),
    "forward": ("mask[:, :start] = 0.0", "pass", "system"),
    "best-shapes": ("seconds[b - 1]", "seconds[0]", "shapes"),
    "simulate": ("arm.calibrate_ms * table", "0 * table", "figure-10"),
    "classify": ('"synonym" if skipped else "missing"', '"missing"', "table-2"),
}
FIGURES = {
    "execute": "figure-8", "greedy": "figure-8", "simple-rules": "figure-8", "simulate": "figure-10",
    "earliest": "figure-8",
}  # fmt: skip
SHORT = {"instances_a_family": 2, "threads": 1}
LEFT_OUT = {
    "said", "switching", "switching-drawn", "npu-fit", "paper-bounds", "paper-ratios", "consistency",
    "figure-3", "table-4", "table-4-cells", "online", "figure-6", "figure-5", "figure-10-claims",
    "measured-claims", "figure-2", "table-3", "figure-13", "figure-11", "figure-12", "own", "verdicts",
    "untested", "finish", "five-rows", "inputs", "figure-3-claims", "table-4-claims", "figure-6-claims",
    "figure-5-drawn", "analytic-claims",
}  # fmt: skip


pytestmark = pytest.mark.timeout(900)  # the fixture runs most of the notebook, beside another one


@pytest.fixture(scope="module")
def sdnpu(exhibits_elsewhere):
    book = Notebook("sdnpu", SHORT)
    book.leave(set(book.texts) - LEFT_OUT)
    few = 'answers[(answers["model"] == SMALL) & (answers["set"] == "tasks") & (answers["request"] < 2)]'
    drafters = '[lambda rows: rows["method"].isin(["SAM+both", "PLD+both", "SAM+both, printed"])]'
    book.texts["again"] = book.texts["again"].replace("workbench.drawn(answers, seed, sample)", few + drafters)
    return book.begin("figure-10")


def test_every_source_cell_has_an_edit(sdnpu):
    assert set(sdnpu.sources) == set(EDITS)


@pytest.mark.parametrize("cell", EDITS)
def test_a_wrong_body_changes_what_is_printed(sdnpu, cell):
    shown = EDITS[cell][-1]
    assert sdnpu.again(cell, *EDITS[cell]).get(shown) != sdnpu.said[shown]


@pytest.mark.parametrize(("cell", "exhibit"), FIGURES.items())
def test_a_wrong_body_changes_an_exhibit(sdnpu, cell, exhibit):
    said = sdnpu.again(cell, *EDITS[cell][:2], exhibit)
    assert exhibit in said and said[exhibit] != sdnpu.said[exhibit]


def agreeing(text):
    return int(text.split(" of ")[0])


def test_the_sample_says_that_the_pool_was_edited(sdnpu):
    wrong = sdnpu.again("offered", *EDITS["offered"][:2], "again")["again"]
    assert "differ" in wrong and agreeing(wrong) < agreeing(sdnpu.said["again"])

"""Every source cell of GRATING's notebook acts: a wrong body put in its place moves what the cells behind it show."""

import pytest
from cells import Notebook

pytestmark = pytest.mark.long  # runs most of the notebook

# By source cell: what stands there, what is put in its place, the cell that draws it, its table in `live`.
LIVE = {
    "dispersion": ("/ max(p.mean(), 1e-12)", "", "dispersion-shown", "dispersion"),
    "clustering": ("best[first] + cost(first, end)", "best[first] - cost(first, end)", "clustering-shown", "clusters"),
    "boundary": ("np.sign(boundary - labels)", "np.sign(labels - boundary)", "boundary-shown", "boundary"),
    "selection": ("verdicts == DEFER, ACCEPT if left else DROP", "verdicts == DEFER, DROP", "selection-shown",
                  "selection"),
    "replay": ("pool.scores[layer - 1, active]", "pool.scores[-1, active]", "selection-shown", "selection"),
    "thresholds": ("missed[0] if len(missed) else len(values)", "len(values)", "thresholds-shown", "thresholds"),
    "margin": ("distances < -margin", "distances < margin", "margin-shown", "margin"),
    "error-model": ("(predicted > 0) == (final > 0)", "(predicted > 0) != (final > 0)", "margin-shown", "margin"),
    "certificate": ("if p > 1 - confidence", "if p > confidence", "certified-shown", "certified"),
    "probe": ("weighted.T @ wanted", "-weighted.T @ wanted", "probe-shown", "probes"),
    "costs": ("self.layer).sum())", "self.layer).max())", "costs-shown", "costs"),
}  # fmt: skip
# By source cell: what stands there, what is put in its place, and the cell whose text moves.
PRINTED = {
    "layer": ("states.put(group, hidden)", "pass", "live-again"),
    "states": ("hidden[row, :", "hidden[0, :", "live-again"),
    "window": ("if self.holds[slot] != index", "if self.holds[slot] < 0", "live-again"),
    "cache": ("= slots, missing, self.request", "= slots[::-1], missing, self.request", "live-again"),
}
EDITS = LIVE | PRINTED
SHORT = {"sample": 12, "threads": 1}


@pytest.fixture(scope="module")
def grating(exhibits_elsewhere):
    return Notebook("grating", SHORT).begin("use")


def test_every_source_cell_has_an_edit(grating):
    assert set(grating.sources) == set(EDITS)


@pytest.mark.parametrize("cell", LIVE)
def test_a_wrong_body_moves_a_value_beyond_its_interval(grating, cell):
    old, new, last, name = LIVE[cell]
    assert grating.texts[cell].count(old) == 1
    before = grating.before["use"]["live"][name]
    after = grating.live(cell, last, grating.texts | {cell: grating.texts[cell].replace(old, new)})[name]
    assert ((after["value"] < before["low"]) | (after["value"] > before["high"])).any(), after


def test_an_unedited_repeat_moves_none(grating):
    again = grating.live("dispersion", "margin-shown")
    for name in ("dispersion", "clusters", "boundary", "selection", "thresholds", "margin"):
        assert again[name].equals(grating.before["use"]["live"][name]), name


@pytest.mark.parametrize("cell", PRINTED)
def test_the_live_engine_says_that_it_was_edited(grating, cell):
    wrong = grating.again(cell, *PRINTED[cell])["live-again"]
    assert "was the algorithm edited?" in wrong and "differ" not in grating.said["live-again"]
    assert "but for rounding: False" in wrong and "but for rounding: True" in grating.said["live-again"]


def test_the_edited_notebook_runs_to_its_end(grating):
    grating.to_the_end("costs", *EDITS["costs"][:2])

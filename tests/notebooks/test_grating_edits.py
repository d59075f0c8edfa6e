"""Every source cell of GRATING's notebook acts: a wrong body put in its place changes what cells behind it print."""

import pytest
from cells import Notebook

# By source cell: what stands there, what is put in its place, and the cell that shows it.
EDITS = {
    "dispersion": ("/ max(p.mean(), 1e-12)", "", "boundary-shown"),
    "clustering": ("best[first] + cost(first, end)", "best[first] - cost(first, end)", "boundary-shown"),
    "boundary": ("np.sign(boundary - labels)", "np.sign(labels - boundary)", "boundary-shown"),
    "selection": ("verdicts == DEFER, ACCEPT if left else DROP", "verdicts == DEFER, DROP", "worked-example"),
    "replay": ("pool.scores[layer - 1, active]", "pool.scores[-1, active]", "figure-4"),
    "thresholds": ("else len(values)) - 1", "else len(values)) - 2", "calibrated-again"),
    "margin": ("distances < -margin", "distances < margin", "outcomes-again"),
    "error-model": ("(predicted > 0) == (final > 0)", "(predicted > 0) != (final > 0)", "outcomes-again"),
    "certificate": ("if p > 1 - confidence", "if p > confidence", "certificate-shown"),
    "promise": ("measure(rest, k,", "measure(first, k,", "certified-again"),
    "probe": ("weighted.T @ y[part].ravel()", "-weighted.T @ y[part].ravel()", "probe-shown"),
    "layer": ("states.put(group, hidden)", "pass", "live-again"),
    "states": ("hidden[row, :", "hidden[0, :", "live-again"),
    "window": ("if self.holds[slot] != index", "if self.holds[slot] < 0", "live-again"),
    "cache": ("= slots, missing, self.request", "= slots[::-1], missing, self.request", "live-again"),
    "costs": ("self.embedding * len(runs) +", "", "whole-runs"),
    "agents": ("(0 if replayed else calls * call)", "0", "applications"),
}
SHORT = {"sample": 12, "timed_pools": 1, "threads": 1}
SHOWN = {shown for _, _, shown in EDITS.values()}
SET_UP = {"parameters", "checked", "imports", "setup", "figure-1"}
CHOSEN = "chosen = study.outcomes(scores, settings, study.MODELS, [QUESTIONS], [1, 5], some=[3, 40])"


pytestmark = pytest.mark.timeout(900)  # the fixture runs most of the notebook, beside another one


@pytest.fixture(scope="module")
def grating(exhibits_elsewhere):
    book = Notebook("grating", SHORT)
    book.leave({*SET_UP, *SHOWN, *book.sources})
    book.texts["five-rows"] = CHOSEN
    assert 'units["rule"] != study.PROBED]' in book.texts["live-again"]
    few = "units['rule'].isin(['low', 'margin']) & (units['model'] == study.BASE) & (units['k'] == 5)]"
    book.texts["live-again"] = book.texts["live-again"].replace('units["rule"] != study.PROBED]', few)
    return book.begin(max(SHOWN, key=list(book.texts).index))


def test_every_source_cell_has_an_edit(grating):
    assert set(grating.sources) == set(EDITS)


@pytest.mark.parametrize("cell", EDITS)
def test_a_wrong_body_changes_what_is_printed(grating, cell):
    shown = EDITS[cell][-1]
    assert grating.again(cell, *EDITS[cell]).get(shown) != grating.said[shown]


@pytest.mark.parametrize("cell", ["thresholds", "margin", "layer", "states", "window", "cache"])
def test_a_sample_says_that_the_algorithm_was_edited(grating, cell):
    """A live one says, too, that scores are not the recorded ones."""
    shown = EDITS[cell][-1]
    wrong = grating.again(cell, *EDITS[cell])[shown]
    assert "was the algorithm edited?" in wrong and "differ" not in grating.said[shown]
    if shown == "live-again":
        assert "but for rounding: False" in wrong and "but for rounding: True" in grating.said[shown]

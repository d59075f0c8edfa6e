"""Every source cell of DIAA's notebook acts: a wrong body put in its place changes what the cells behind it print."""

import pytest
from cells import Notebook

# By source cell: what stands there, what is put in its place, and the cell that shows it.
EDITS = {
    "means": ("sums / np.bincount(keys)[rows]", "sums", "means-shown"),
    "overwrite": ("fresh.tokens[nodes]", "fresh.tokens[nodes][:, ::-1]", "overwrite-shown"),
    "grow": ("* alpha**rank", "", "grow-shown"),
    "utility": ("np.setdiff1d(np.arange(len(draft)), draft.parents)", "np.arange(len(draft))", "utility-shown"),
    "refill": ("rank - 1]", "0]", "refill-shown"),
    "accepted": ("logits[node + 1]", "logits[node]", "accepted-shown"),
    "loop": ("tokens += emitted", "tokens += emitted[:1]", "drafter-shown"),
    "learning": ("self.update(self.tables, keys, fresh)", "pass", "drafter-shown"),
    "drafter": ("self._age % self.refresh and", "", "drafter-shown"),
    "mix": ("+ weight * p", "+ p", "mix-shown"),
    "maximised": ("(explained + strength * prior)", "explained + 1", "maximised-shown"),
    "grow-likeliest": ("(-above *", "(above *", "size-shown"),
    "size": ("expected / seconds", "expected * seconds", "size-shown"),
}
SHORT = {"again": ["vanilla", "DIAA"], "noted": 1, "threads": 1}


pytestmark = pytest.mark.timeout(900)  # the fixture runs most of the notebook, beside another one


@pytest.fixture(scope="module")
def diaa(exhibits_elsewhere):
    return Notebook("diaa", SHORT).begin("go-on")


def test_every_source_cell_has_an_edit(diaa):
    assert set(diaa.sources) == set(EDITS)


@pytest.mark.parametrize("cell", EDITS)
def test_a_wrong_body_changes_what_is_printed(diaa, cell):
    shown = EDITS[cell][-1]
    assert diaa.again(cell, *EDITS[cell]).get(shown) != diaa.said[shown]


def test_the_sample_says_that_the_algorithm_was_edited_and_goes_on(diaa):
    assert "ran again exactly" in diaa.said["agreement"] and "differ" not in diaa.said["agreement"]
    edited = diaa.texts | {"again": "grow = lambda *a, real=grow: real(a[0], a[1], 4)\n" + diaa.texts["again"]}
    said = diaa.run(diaa.span("again", "go-on"), dict(diaa.before["again"]), edited)
    assert "differ" in said["agreement"] and "Error" not in said["go-on"]


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("tree.parents[0] = 1", "earlier nodes"),  # a cycle
        ("[tree.add(1, -1, 1, 0.5) for _ in range(budget)]", "budget"),
    ],
)
def test_a_tree_that_is_none_is_refused_in_one_sentence(diaa, body, sentence):
    nonsense = f"""def grow(tables, root, budget, real=grow):
    tree = real(tables, root, budget)
    {body}
    return tree
"""
    edited = diaa.texts | {"drafter-shown": nonsense + diaa.texts["drafter-shown"]}
    said = diaa.run(["drafter-shown"], dict(diaa.before["drafter-shown"]), edited)["drafter-shown"]
    assert "ValueError" in said and sentence in said and "\n" not in said.strip()

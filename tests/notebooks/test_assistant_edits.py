"""Every source cell of the assistant's notebook acts: a wrong body in its place changes what a later cell prints."""

import pytest
from cells import Notebook

pytestmark = pytest.mark.long  # runs most of the notebook

# By function: its cell, what stands there, what is put in its place, and the cell that shows it.
EDITS = {
    "likeliest_chain": ("drafting", "int(below[0])", "int(below[-1])", "again"),
    "verify": ("drafting", "min(BUDGET, side.room - 1)", "min(1, side.room - 1)", "again"),
    "learn": ("drafting", "logsumexp(0).float()", "logsumexp(0).float().flip(-1)", "again"),
    "ready": ("costs", '+ costs("layer of a candidate")', '+ 0 * costs("layer of a candidate")', "one-at-a-time"),
    "paces": ("costs", "np.where(widths > 0, passes, 0.0)", "passes", "one-at-a-time"),
    "together": ("together", "lookahead=32", "lookahead=1", "one-at-a-time"),
    "admitted": ("admitted", "< NEVER", ">= NEVER", "one-at-a-time"),
    "raced": ("raced", "server + way).device_won", "server + 99 * way).device_won", "one-at-a-time"),
    "play": ("play", 'if asks[i] and "D" in systems', 'if "D" in systems', "one-at-a-time"),
}  # fmt: skip
SHORT = {"threads": 1, "sample": 2}
KEPT = {"parameters", "checked", "imports", "setup", "played", "again", "one-at-a-time"}
FEW = """
answers = answers[answers["question"].isin(sorted(set(answers.loc[answers["drafter"] != "", "question"]))[:8])]
steps = steps[steps["question"].isin(answers["question"])]
LINKS = (delay,)
"""


@pytest.fixture(scope="module")
def assistant(exhibits_elsewhere):
    """One link, eight questions; a sample of two answers with drafters, whose models are loaded once."""
    book = Notebook("assistant", SHORT)
    book.leave({*KEPT, *book.sources})
    models, sample = book.texts["again"].split("units = answers[")
    assert "drawn = " in sample
    long = "units = units[(units['drafter'] == 'L') & ~units['picked'] & (units['tokens'] > 20)]\ndrawn = "
    sample = sample.replace("drawn = ", long)
    book.texts["setup"] += "\nfull = answers, steps" + FEW
    book.texts["again"] = (
        f"few, (answers, steps) = (answers, steps), full\nunits = answers[{sample}\nanswers, steps = few"
    )
    book.texts = {
        name: text
        for cell, shown in book.texts.items()
        for name, text in ([("models", models)] if cell == "drafting" else []) + [(cell, shown)]
    }
    return book.begin("one-at-a-time")


def test_every_function_of_a_source_cell_has_an_edit(assistant):
    assert set(assistant.sources) == {cell for cell, *_ in EDITS.values()}
    defined = "\n".join(assistant.texts[cell] for cell in assistant.sources)
    assert sorted(EDITS) == sorted(line[4:].split("(")[0] for line in defined.splitlines() if line.startswith("def "))


@pytest.mark.parametrize("function", EDITS)
def test_a_wrong_body_changes_what_is_printed(assistant, function):
    shown = EDITS[function][-1]
    assert assistant.again(*EDITS[function]).get(shown) != assistant.said[shown]


def test_the_sample_agrees_until_the_algorithm_is_edited(assistant):
    wrong = assistant.again(*EDITS["verify"])["again"]
    assert "was the algorithm edited?" in wrong and "differ" not in assistant.said["again"]

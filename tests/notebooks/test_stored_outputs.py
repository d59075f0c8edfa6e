"""What the nbval-check-output cells of the committed notebooks print is what is stored."""

import pytest
from nbval.plugin import get_sanitize_patterns
from validation import SANITIZE


@pytest.mark.slow  # runs the whole notebook
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("unless_unchanged")
def test_a_fresh_run_gives_the_stored_outputs(notebook, nbval):
    result = nbval(notebook)
    assert result.passed > 0 and result.failed == 0, result.output


def test_nbval_reads_every_sanitize_rule():
    """nbval drops a rule without a word when a line stands between its two, or when a space is missing."""
    text = SANITIZE.read_text()
    assert len(get_sanitize_patterns(text)) == text.count("regex:") == text.count("replace:") > 0

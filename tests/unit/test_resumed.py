"""The long command goes on where it was: what passed is left out until what its file uses changes."""

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def run(folder, *words):
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "--rootdir", ".", "--resume", *words]
    made = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return made.stdout.splitlines()[-1].rpartition(" in ")[0]


@pytest.mark.long  # four processes
def test_what_passed_is_left_out_until_its_file_changes(tmp_path):
    """A part that is red near its end must not cost all its minutes again, and a changed file must not be skipped."""
    (tmp_path / "unit").mkdir()
    text = f"import sys\nsys.path.insert(0, {str(TESTS)!r})\npytest_plugins = ['resumed']\n"
    (tmp_path / "conftest.py").write_text(text)
    test = tmp_path / "unit" / "test_some.py"
    test.write_text("def test_good(): pass\ndef test_bad(): assert 0\n")
    assert run(tmp_path) == "1 failed, 1 passed"
    assert run(tmp_path) == "1 failed, 1 deselected"
    test.write_text("def test_good(): pass\ndef test_bad(): assert 1\n")
    assert run(tmp_path) == "2 passed"
    assert run(tmp_path) == "2 deselected"

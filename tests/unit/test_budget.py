"""The gate's budget: what a test and its children take counts, what is imported and long tests do not."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
BUSY = "import time\nend = time.process_time() + {seconds}\nwhile time.process_time() < end:\n    pass\n"


def test_a_test_over_the_budget_fails_and_its_sentence_names_the_mark(tmp_path):
    """Without it slow tests creep in until nobody runs the gate."""
    (tmp_path / "conftest.py").write_text(
        f"import sys\nsys.path.insert(0, {str(TESTS)!r})\nimport budget\nbudget.REPORTED, budget.MOST = 0.1, 0.4\n"
        "pytest_plugins = ['budget']\n"
    )
    (tmp_path / "slow_module.py").write_text(BUSY.format(seconds=0.5))
    (tmp_path / "child.py").write_text(BUSY.format(seconds=0.5))
    (tmp_path / "test_some.py").write_text(
        "import subprocess, sys, time\nimport pytest\n"
        "def work(seconds):\n"
        "    end = time.process_time() + seconds\n"
        "    while time.process_time() < end: pass\n"
        "def test_listed(): work(0.2)\n"
        "def test_slow(): work(0.5)\n"
        "def test_slow_child(): subprocess.run([sys.executable, 'child.py'], check=True)\n"
        "def test_slow_import(): import slow_module\n"
        "@pytest.mark.long\ndef test_long(): work(0.5)\n"
    )
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", "--rootdir", "."]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    made = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    lines = made.stdout.splitlines()
    failed = {line.split("::")[1].split(" ")[0] for line in lines if line.startswith("FAILED")}
    assert failed == {"test_slow", "test_slow_child"}, made.stdout
    listed = [line.split("::")[1] for line in lines if "::" in line and line[0] == " "]
    assert sorted(listed) == ["test_listed", "test_slow", "test_slow_child"]

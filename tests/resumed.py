"""`--resume`: what passed is not run again while nothing that its file uses has changed. For make test-long.

A pytest plugin, which tests/conftest.py names. A file uses the library's modules that it and the helpers beside it
import, directly or through others, the versions of the packages that those import, and, outside tests/unit and
tests/properties, the notebooks, published figures and records, too. Faults on purpose use all tests, their checks.
Random examples (`--hypothesis-profile`) are others each time, so nothing is left out.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ondevice import closure
from ondevice.assets import ROOT

TESTS = Path(__file__).parent
ALONE = {"unit", "properties"}  # folders whose tests use no notebook
STATE = pytest.StashKey[str]()


@functools.cache
def state(path: Path) -> str:
    """SHA-256 over what the tests of a file use."""
    helpers = [file for folder in {TESTS, path.parent} for file in folder.glob("*.py") if file.stem[:5] != "test_"]
    texts = [file.read_text(encoding="utf-8") for file in sorted({path, *helpers})]
    if path.parent.name == "breaks":
        texts += [file.read_text(encoding="utf-8") for file in sorted(TESTS.glob("*/test_*.py"))]
    uses = closure.closure(ROOT / "lib", texts)
    facts = [texts, closure.code_hash(ROOT / "lib", uses.modules), closure.versions(uses.others)]
    digest = hashlib.sha256(json.dumps(facts).encode())
    for file in sorted([] if path.parent.name in ALONE else shown()):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def shown() -> list[Path]:
    """The notebooks, what they published, and the list of records, which has their checksums."""
    return [*ROOT.glob("notebooks/*.ipynb"), *ROOT.glob("figures/*/*.json"), ROOT / "data/records/manifest.json"]


def key(item: pytest.Item) -> str:
    return f"ondevice/passed/{hashlib.sha256(item.nodeid.encode()).hexdigest()[:24]}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--resume", action="store_true", help="leave out what passed and has not changed since")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--resume") or config.getoption("--hypothesis-profile", None):
        return
    for item in items:
        item.stash[STATE] = state(item.path)
    cache = getattr(config, "cache", None)  # absent under -p no:cacheprovider
    passed = [item for item in items if cache and cache.get(key(item), None) == item.stash[STATE]]
    if passed:
        config.hook.pytest_deselected(items=passed)
        items[:] = [item for item in items if item not in set(passed)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    cache = getattr(item.config, "cache", None)  # absent under -p no:cacheprovider
    if report.when == "call" and report.passed and STATE in item.stash and cache:  # type: ignore[attr-defined]
        cache.set(key(item), item.stash[STATE])
    return report

"""The public API is what docs/api.md shows, and what README and the pages import is in it."""

import ast
import re
import tomllib

import pytest
from packaging.version import Version

from ondevice import assets
from ondevice.run.moved import HOMES
from ondevice.run.parameters import read_parameters
from ondevice_studies import api

BLOCK = re.compile(r"^ *```python\n(.*?)^ *```", re.M | re.S)
CHANGES = (assets.ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((assets.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_page_shows_the_librarys_signatures():
    assert (assets.ROOT / api.PAGE).read_text(encoding="utf-8") == api.page(), api.ACCEPT


def imported(text: str) -> set[str]:
    """The dotted names of this library that a page's Python imports."""
    names = set()
    for code in BLOCK.findall(text):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ondevice"):
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names if alias.name.startswith("ondevice")}
    return names


def test_pages_import_only_what_is_public():
    """docs/extend.md alone shows what may change: it is for those who change the library."""
    pages = [assets.ROOT / "README.md", *(assets.ROOT / "docs").glob("*.md")]
    names = set().union(*(imported(page.read_text(encoding="utf-8")) for page in pages if page.name != "extend.md"))
    public = {name for section in api.PUBLIC.values() for name in section}
    modules = {name.rpartition(".")[0] for name in public}
    assert len(names) > 10 and names - public - modules == set()


def test_imports_of_a_page_are_seen():
    page = "```python\nfrom ondevice import chat\nimport ondevice.models\nimport numpy\n```\n`from ondevice import x`\n"
    assert imported(page) == {"ondevice.chat", "ondevice.models"}


def scale(values: list[float], by: float = 2.0, *, name="x") -> None: ...


class Kit:
    def __init__(self, size: int, function=scale) -> None: ...

    @classmethod
    def empty(cls) -> "Kit": ...

    def grow(self, *more: int, **options: int) -> int: ...


LONG = ["    values: list[float],", "    by: float = 2.0,", "    *,", "    name='x',"]


@pytest.mark.parametrize(
    ("name", "value", "lines"),
    [
        ("scale", scale, ["scale(values: list[float], by: float = 2.0, *, name='x') -> None"]),
        ("Kit", Kit, ["Kit(size: int, function=scale)"]),
        ("Kit.empty", Kit.__dict__["empty"], ["Kit.empty() -> Kit"]),
        ("Kit.grow", Kit.grow, ["Kit.grow(*more: int, **options: int) -> int"]),
        ("a" * 90, scale, ["a" * 90 + "(", *LONG, ") -> None"]),
    ],
)
def test_a_signature_by_hand(name, value, lines):
    assert api.signature(name, value) == lines


def test_each_change_of_a_signature_is_another_text():
    def slower(values: list[float], by: float = 3.0, *, name="x") -> None: ...
    def renamed(values: list[float], times: float = 2.0, *, name="x") -> None: ...
    def freer(values: list[float], by: float = 2.0, name="x") -> None: ...
    def richer(values: list[float], by: float = 2.0, *, name="x") -> int: ...

    texts = {"".join(api.signature("f", function)) for function in (scale, slower, renamed, freer, richer)}
    assert len(texts) == 5


def test_a_default_that_is_another_text_in_every_process_is_refused():
    def function(value=object()):  # noqa: B008
        return value

    with pytest.raises(ValueError, match="f has a default"):
        api.signature("f", function)


def test_a_public_name_that_is_gone_is_noticed():
    assert api.resolved("ondevice.models.load").__name__ == "load"
    with pytest.raises(AttributeError, match="no_such"):
        api.resolved("ondevice.models.no_such")


def test_the_failure_names_how_to_accept_a_change():
    assert api.PROGRAM in api.ACCEPT and "CHANGELOG.md" in api.ACCEPT and api.PAGE in api.ACCEPT


def rows(heading: str) -> list[list[str]]:
    """The cells of the table below a heading of CHANGELOG.md, each with what stands in backticks."""
    section = CHANGES.partition(f"### {heading}\n")[2].partition("\n### ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_newest_changes_are_of_this_version_or_the_next():
    versions = [Version(text) for text in re.findall(r"^## ([\d.]+)", CHANGES, re.M)]
    assert versions == sorted(set(versions), reverse=True) and versions[0] >= Version(PROJECT["version"])
    assert ("in preparation" in CHANGES) == (versions[0] > Version(PROJECT["version"]))


def test_every_command_of_before_has_its_new_name():
    commands = {old.strip("`"): new.strip("`") for old, new in rows("Commands")}
    assert {old.removeprefix("python -m ") for old in commands} <= {*HOMES, "ondevice.run"}
    here = {*PROJECT["scripts"], "python -m ondevice_training"}
    assert set(commands.values()) == here - {"ondevice-bench"}  # which is new


def test_parameters_of_before_are_gone_and_their_new_names_are_there():
    named = rows("Parameters of notebooks")
    assert len(named) == 5
    for notebook, old, new in named:
        now = set(read_parameters(assets.ROOT / "notebooks" / f"{notebook}.ipynb"))
        assert not now & set(re.findall(r"`(\w+)`", old)) and set(re.findall(r"`(\w+)`", new)) <= now, notebook

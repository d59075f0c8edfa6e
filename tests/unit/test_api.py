"""The public API is what docs/api.md shows, and what README and the pages import is in it."""

import ast
import re

import pytest

from ondevice import assets
from ondevice_studies import api

BLOCK = re.compile(r"^ *```python\n(.*?)^ *```", re.M | re.S)


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


def test_no_public_class_name_stands_for_two_things():
    """Whoever reads `Draft` in one package should not meet another one in the next."""
    rooms: dict[str, list[str]] = {}
    for path in sorted((assets.ROOT / "lib").rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                rooms.setdefault(node.name, []).append(path.relative_to(assets.ROOT / "lib").as_posix())
    assert {name: files for name, files in rooms.items() if len(files) > 1} == {}


def test_pages_import_only_what_is_public():
    """docs/extend.md alone shows what may change: it is for those who change the library."""
    pages = [assets.ROOT / "README.md", *(assets.ROOT / "docs").glob("*.md")]
    names = set().union(*(imported(page.read_text(encoding="utf-8")) for page in pages if page.name != "extend.md"))
    public = {name for section in api.PUBLIC.values() for name in section}
    modules = {name.rpartition(".")[0] for name in public}
    assert len(names) > 10 and names - public - modules == set()


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
        ("Kit", Kit, ["Kit(size: int, function=scale)"]),
        ("Kit.empty", Kit.__dict__["empty"], ["Kit.empty() -> Kit"]),
        ("Kit.grow", Kit.grow, ["Kit.grow(*more: int, **options: int) -> int"]),
        ("a" * 90, scale, ["a" * 90 + "(", *LONG, ") -> None"]),
    ],
)
def test_a_signature_by_hand(name, value, lines):
    assert api.signature(name, value) == lines


def test_a_default_that_is_another_text_in_every_process_is_refused():
    def function(value=object()):  # noqa: B008
        return value

    with pytest.raises(ValueError, match="default"):
        api.signature("f", function)

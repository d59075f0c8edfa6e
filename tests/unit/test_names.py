"""The library's names say what they hold: few of its bindings have a word for a name that fits anything."""

import ast
from collections.abc import Iterator

from ondevice import assets

OPAQUE = {
    "found", "one", "place", "places", "mine", "theirs", "known", "told", "said", "asked", "asking", "again", "more",
    "follows", "of", "which", "brought", "worked", "took", "gone", "thing", "things", "made",
}  # fmt: skip
MOST = 2  # opaque ones in 1,000 bindings


def bindings(source: str) -> Iterator[tuple[str, int]]:
    """(name, line) of what a module binds: functions, classes, methods, parameters, variables and attributes."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node.lineno
            case ast.arg():
                yield node.arg, node.lineno
            case ast.Name(ctx=ast.Store()):
                yield node.id, node.lineno
            case ast.Attribute(ctx=ast.Store()):
                yield node.attr, node.lineno


def test_few_names_say_nothing():
    total, opaque = 0, []
    for path in sorted((assets.ROOT / "lib").rglob("*.py")):
        names = list(bindings(path.read_text(encoding="utf-8")))
        total += len(names)
        opaque += [f"{path}:{line} {name}" for name, line in names if name.strip("_").lower() in OPAQUE]
    assert 1000 * len(opaque) < MOST * total, "\n".join([f"{len(opaque)} of {total} names say nothing:", *opaque])

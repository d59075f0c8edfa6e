"""The library's names say what they hold: few of its bindings have a word for a name that fits anything."""

import ast
from collections.abc import Iterator

from ondevice import assets

OPAQUE = {
    "found", "one", "place", "places", "mine", "theirs", "known", "told", "said", "asked", "asking", "again", "more",
    "follows", "of", "which", "brought", "worked", "took", "gone", "thing", "things", "made",
}  # fmt: skip
PACKAGES = ("ondevice", "ondevice_papers", "ondevice_programs", "ondevice_studies", "ondevice_training")
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


def opaque(source: str) -> list[tuple[str, int]]:
    return [(name, line) for name, line in bindings(source) if name.strip("_").lower() in OPAQUE]


def test_few_names_say_nothing():
    total = 0
    found_opaque = []
    for package in PACKAGES:
        for path in sorted((assets.ROOT / "lib" / package).rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            total += sum(1 for _ in bindings(source))
            file = path.relative_to(assets.ROOT)
            found_opaque += [f"{file}:{line} {name}" for name, line in opaque(source)]
    assert 1000 * len(found_opaque) < MOST * total, "\n".join(
        [f"{len(found_opaque)} of {total} names say nothing:", *found_opaque]
    )


def test_every_kind_of_binding_counts():
    source = """
class Asked:
    made: int
    def told(self, which, *of, **more):
        self._found = which
        for place in of:
            thing: int = place
        return [one for one in more]
again = Asked()
print(again.told, shown(known=again), said)
"""
    names = [name for name, _ in opaque(source)]
    assert sorted(names) == sorted(
        ["Asked", "made", "told", "which", "of", "more", "_found", "place", "thing", "one", "again"]
    )
    assert opaque("founder = twofold.places = placed = 1") == [("places", 1)]

"""A hash of the code that makes a record: the functions and classes that some functions reach, as they are parsed.

Comments, docstrings, layout and the annotations of functions do not count. Code is read, not run: a function reaches
the names that it uses, in its own module or imported from the library. A class counts whole, as does a module that is
used by itself. A string that names a module, or a part of one as `module:name`, counts as a use of it. What finds
files, keeps records or starts runs makes no number and does not count.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NAMED = re.compile(r"[A-Za-z_]\w*(\.\w+)+(:[\w.]+)?")
_NO_CODE = frozenset({"ctx", "kind", "type_comment", "type_ignores", "type_params", "returns", "annotation"})
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, *_COMPREHENSIONS)
_BLOCKS = (ast.If, ast.With, ast.Try)
_KEEPERS = ("ondevice.assets", "ondevice.commands", "ondevice.evidence", "ondevice.extras", "ondevice.run")
WHOLE = ""  # in a name's place: all of a module


@dataclass(frozen=True)
class _Module:
    """definitions: statements by the name that they bind. imports: by name, (module, attribute or WHOLE).

    unnamed: what binds no name.
    """

    definitions: Mapping[str, list[ast.stmt]]
    imports: Mapping[str, tuple[str, str]]
    unnamed: list[ast.stmt]


def code_hash(library: Path, program: str) -> str:
    """`reached-` and the SHA-256 of what a program reaches; "" where a part of it is not there.

    library: the folder with the packages (lib/). program: a module, a function as `module:name`, or a script's path
    beside that folder; of several, joined by "+".
    """
    reached = _Reached(library)
    for part in program.split("+"):
        script = library.parent / part
        module, name = (part, WHOLE) if script.is_file() else _split(part)
        if script.is_file():
            reached.texts[part] = _parsed(script, script.stat().st_mtime_ns)
        if not reached.knows(module, name):
            return ""
        reached.add(module, name)
    return f"reached-{hashlib.sha256(json.dumps(sorted(reached.code.items())).encode()).hexdigest()}"


class _Reached:
    """code: what is reached so far, by `module:name`."""

    def __init__(self, library: Path) -> None:
        self.library = library
        self.code: dict[str, Any] = {}
        self.texts: dict[str, _Module] = {}
        self.whole = set[str]()  # modules that are reached with all that is in them

    def knows(self, module: str, name: str) -> bool:
        """Whether the library has a module, and it the name."""
        text = self._text(module)
        return text is not None and (name == WHOLE or name in text.definitions or name in text.imports)

    def add(self, module: str, name: str) -> None:
        """A name of a module, with everything that it reaches; nothing where the library has none such."""
        text = self._text(module)
        done = name != WHOLE and f"{module}:{name}" in self.code
        if text is None or done or f"{module}.".startswith(tuple(f"{keeper}." for keeper in _KEEPERS)):
            return
        if name in text.definitions:
            self._add_code(module, name, text.definitions[name])
            self._add_code(module, WHOLE, text.unnamed)
        elif name in text.imports:
            self.add(*text.imports[name])
        elif name and self._text(f"{module}.{name}"):
            self.add(f"{module}.{name}", WHOLE)
        elif name == WHOLE and module not in self.whole:
            self.whole.add(module)
            self._add_code(module, WHOLE, text.unnamed)
            for each in (*text.definitions, *text.imports):
                self.add(module, each)

    def _add_code(self, module: str, name: str, statements: list[ast.stmt]) -> None:
        key = f"{module}:{name}"
        if key in self.code:
            return
        self.code[key] = [_plain(statement) for statement in statements]
        for statement in statements:
            local = dict(_imports(statement))
            for chain in _chains(statement):
                self._use(module, chain, local)

    def _use(self, module: str, chain: list[str], local: Mapping[str, tuple[str, str]]) -> None:
        """Names joined by dots, as a function of a module has them; or a string's module and name."""
        text = self._text(module)
        root, *rest = chain
        if ":" in root:
            self.add(*_split(root))
        elif text and (root in local or (root in text.imports and root not in text.definitions)):
            target, name = local.get(root) or text.imports[root]
            if name and self._text(f"{target}.{name}"):
                target, name = f"{target}.{name}", WHOLE
            while not name and rest:
                name, *rest = rest
                if self._text(f"{target}.{name}"):
                    target, name = f"{target}.{name}", WHOLE
            self.add(target, name)
        else:
            self.add(module, root)

    def _text(self, module: str) -> _Module | None:
        if module not in self.texts:
            path = self.library.joinpath(*module.split("."))
            path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            if not path.is_file():
                return None
            self.texts[module] = _parsed(path, path.stat().st_mtime_ns)
        return self.texts[module]


def _split(name: str) -> tuple[str, str]:
    """The module and the name of `module:name`; of a method, its class."""
    module, _, attribute = name.partition(":")
    return module, attribute.partition(".")[0]


@functools.cache
def _parsed(path: Path, changed: int) -> _Module:
    """changed: when the file was last written, so that a later text is read anew."""
    definitions: dict[str, list[ast.stmt]] = {}
    imports: dict[str, tuple[str, str]] = {}
    unnamed: list[ast.stmt] = []
    for statement in _top_level(ast.parse(path.read_text(encoding="utf-8")).body):
        if isinstance(statement, ast.Import | ast.ImportFrom):
            imports |= dict(_imports(statement))
        elif names := list(_bound(statement)):
            for name in names:
                definitions.setdefault(name, []).append(statement)
        elif not _is_text(statement):
            unnamed.append(statement)
    return _Module(definitions, imports, unnamed)


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """A module's statements, those of its blocks one by one."""
    for statement in body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "__name__ == '__main__'":
            continue
        if isinstance(statement, _BLOCKS):
            for field in ("body", "orelse", "handlers", "finalbody"):
                for inner in getattr(statement, field, []):
                    yield from _top_level(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])
        else:
            yield statement


def _bound(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, _SCOPES):
        yield statement.name
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    for node in (inner for target in targets if target is not None for inner in ast.walk(target)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _imports(statement: ast.AST) -> Iterator[tuple[str, tuple[str, str]]]:
    """(name, (module, attribute or WHOLE)) of every import in a statement."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (
                    alias.asname or alias.name.partition(".")[0],
                    (alias.name if alias.asname else alias.name.partition(".")[0], WHOLE),
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, (node.module, alias.name)


def _chains(node: ast.AST, bound: frozenset[str] = frozenset()) -> Iterator[list[str]]:
    """What a node uses: names with their attributes, and the modules that strings name.

    bound: names that a function around it binds itself.
    """
    if isinstance(node, _FUNCTIONS):
        for outer in _outside(node):
            yield from _chains(outer, bound)
        bound |= {inner.arg for inner in ast.walk(node) if isinstance(inner, ast.arg)}
        bound |= {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}
    chain: list[str] = []
    inner = node
    while isinstance(inner, ast.Attribute):
        chain.append(inner.attr)
        inner = inner.value
    if isinstance(inner, ast.Name):
        if inner.id not in bound:
            yield [inner.id, *reversed(chain)]
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, str) and _NAMED.fullmatch(node.value):
            yield [node.value if ":" in node.value else f"{node.value}:"]
    else:
        for child in _children(node):
            yield from _chains(child, bound)


def _outside(node: ast.AST) -> list[ast.AST]:
    """What a function has around its own names: defaults, decorators, and what a comprehension runs over first."""
    if isinstance(node, _COMPREHENSIONS):
        return [node.generators[0].iter]
    outer: list[ast.AST] = list(getattr(node, "decorator_list", []))
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        outer += [default for default in (*node.args.defaults, *node.args.kw_defaults) if default]
    return outer


def _children(node: ast.AST) -> list[ast.AST]:
    """The nodes below one that count as code."""
    children: list[ast.AST] = []
    for _, value in _fields(node):
        children += [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, ast.AST)]
    return children


def _plain(node: Any) -> Any:
    """A node as lists, the same in all versions of Python."""
    if isinstance(node, list):
        return [_plain(each) for each in node]
    if isinstance(node, ast.AST):
        return [type(node).__name__, *([field, _plain(value)] for field, value in _fields(node))]
    return node if isinstance(node, str | int | float | bool) or node is None else repr(node)


def _fields(node: ast.AST) -> Iterator[tuple[str, Any]]:
    """The fields of a node that count as code."""
    for field, value in ast.iter_fields(node):
        if value is None or value == [] or (field in _NO_CODE and not isinstance(node, ast.AnnAssign)):
            continue
        documented = field == "body" and isinstance(node, _SCOPES)
        yield field, [each for each in value if not _is_text(each)] if documented else value


def _is_text(statement: ast.AST) -> bool:
    """Whether a statement is a string alone, such as a docstring."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )

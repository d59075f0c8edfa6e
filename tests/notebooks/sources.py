"""What is wrong with a notebook's source cells: read and imported, not run."""

from __future__ import annotations

import ast
import builtins
import importlib
import symtable
from collections.abc import Iterator
from pathlib import Path

import nbformat

from ondevice.run import Layout
from ondevice.run.sources import HASH, digest, filled, names

MAX_LINES = 60  # with docstring and comments
MISSING = object()


def problems(path: Path) -> list[str]:
    """A line for each source cell that is not the library's, and for each free name that is another object there."""
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    return [f"{cells[i].id}: {text}" for i in range(len(cells)) if names(cells[i]) for text in of_cell(cells, i)]


def of_cell(cells, index) -> Iterator[str]:
    cell = cells[index]
    if cell.source != filled(Layout().library, cell):
        yield "its text is not the library's (make notebooks fills it)"
    if cell.metadata.get(HASH) != digest(cell.source):
        yield "its hash is not of its text"
    if len(cell.source.splitlines()) > MAX_LINES:
        yield f"has more than {MAX_LINES} lines"
    plain = [other for other in cells if not names(other)]
    defined = {name.rpartition(".")[2]: name for other in cells for name in names(other)}
    lazy = any("from __future__ import annotations" in other.source for other in cells[:index])
    imported = {k: v for other in cells[:index] if not names(other) for k, v in imports(other.source).items()}
    for name in sorted(free_names(cell.source, annotations=not lazy)):
        assigning = [other.id for other in plain if name in assigned(other.source)]
        if assigning:
            yield f"uses {name}, which {assigning[0]} assigns"
        elif name not in defined and name not in imported:
            yield f"uses {name}, which no earlier cell imports"
        else:
            ours = resolved(defined[name]) if name in defined else imported[name]
            theirs = vars(importlib.import_module(names(cell)[0].rpartition(".")[0])).get(name, MISSING)
            if theirs is not MISSING and theirs is not ours:
                yield f"uses another {name} than the library does"


class WithoutAnnotations(ast.NodeTransformer):
    """Takes away what is not evaluated where annotations are kept as text."""

    def visit_arg(self, node):
        return ast.arg(node.arg)

    def visit_FunctionDef(self, node):
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node):
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)


def free_names(text: str, annotations: bool = True) -> set[str]:
    """The global names that the text reads, without builtins."""
    tree = ast.parse(text)
    if not annotations:
        tree = ast.fix_missing_locations(WithoutAnnotations().visit(tree))
    top = symtable.symtable(ast.unparse(tree), "cell", "exec")
    found, tables = set(), [top]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        found |= {s.get_name() for s in table.get_symbols() if s.is_referenced() and (s.is_global() or table is top)}
    return found - set(dir(builtins))


def statements(text: str) -> Iterator[ast.AST]:
    """The nodes of a cell outside functions, classes and comprehensions, whose names are the cell's own."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith(("%", "!"))]
    nodes: list[ast.AST] = [ast.parse("\n".join(lines))]
    scopes = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp)
    while nodes:
        node = nodes.pop()
        yield node
        if not isinstance(node, (*scopes, ast.GeneratorExp)):
            nodes += ast.iter_child_nodes(node)


def assigned(text: str) -> set[str]:
    """The names that a cell gives a value to, but for imports."""
    nodes = list(statements(text))
    made = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    return made | {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def imports(text: str) -> dict[str, object]:
    """The names that a cell imports, with their objects."""
    found = {}
    for node in statements(text):
        if isinstance(node, ast.Import):
            for alias in node.names:
                module = importlib.import_module(alias.name)
                first = importlib.import_module(alias.name.partition(".")[0])
                found[alias.asname or first.__name__] = module if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
            for alias in node.names:
                found[alias.asname or alias.name] = resolved(f"{node.module}.{alias.name}")
    return found


def resolved(name: str) -> object:
    """The object of a dotted name, a module where the package has no such attribute."""
    module, _, last = name.rpartition(".")
    package = importlib.import_module(module)
    return getattr(package, last) if hasattr(package, last) else importlib.import_module(name)

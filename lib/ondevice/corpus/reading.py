"""Documents: the docstrings of Python source files, read with `ast` and never imported."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sysconfig
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath

# What the corpus is made of: direct and indirect dependencies of this project, named one by one so that an
# environment with more packages in it gives the same corpus. "python" is the standard library.
PACKAGES = (
    "python", "numpy", "scipy", "pandas", "scikit-learn", "matplotlib", "torch", "transformers", "sympy", "networkx",
    "datasets", "seaborn", "huggingface-hub", "xgboost-cpu", "jupyterlab", "jupyter-server", "jupyter-client",
    "jupyter-core", "ipython", "ipykernel", "nbformat", "nbconvert", "nbclient", "traitlets", "tornado", "pillow",
    "fonttools", "mpmath", "joblib", "jinja2", "pygments", "requests", "urllib3", "httpx", "httpcore", "anyio",
    "starlette", "uvicorn", "fsspec", "pyarrow", "papermill", "rich", "click", "typer", "tqdm", "attrs", "packaging",
    "python-dateutil", "pyyaml", "pyzmq", "psutil", "platformdirs", "filelock", "jsonschema", "babel",
    "beautifulsoup4", "prompt-toolkit", "jedi", "parso", "dill", "multiprocess", "cycler", "contourpy", "pyparsing",
    "safetensors", "setuptools", "faiss-cpu", "narwhals", "arrow", "argon2-cffi", "bleach", "tinycss2", "mistune",
    "comm", "referencing",
)  # fmt: skip

_SKIPPED = re.compile(
    r"(^|/)(tests?|_tests?|idlelib|lib2to3|turtledemo|ensurepip|site-packages|conftest\.py|test_[^/]*"
    r"|_?vendor(ed)?|externals?|extern|_distutils|distutils)(/|$)|_test\.py$|_testing/|-data/"
)
_WORD = re.compile(r"\w+")
_FEWEST_WORDS = 8  # the length of the n-grams that near-duplicates are found by
_LONGEST_SIGNATURE = 400  # characters
_LONGEST_SOURCE = 1200  # characters


@dataclass(frozen=True)
class Document:
    """One docstring of an installed package, with where it stands.

    name: qualified, `numpy.linalg.norm`. package: distribution. kind: module, class or function.
    signature: `(x, ord=None)` with annotations, a class's bases, or "" for a module.
    source: a short function's code without its docstring, or "".
    """

    name: str
    package: str
    kind: str
    signature: str
    docstring: str
    source: str

    @property
    def heading(self) -> str:
        """The document's first line, as `def numpy.linalg.norm(x, ord=None)`."""
        return heading(self.kind, self.name, self.signature)

    @property
    def text(self) -> str:
        """What a language model reads: the heading, a blank line, the docstring."""
        return f"{self.heading}\n\n{self.docstring}"


def heading(kind: str, name: str, signature: str) -> str:
    """The first line of a document."""
    return f"{'def' if kind == 'function' else kind} {name}{signature}"


def words(text: str) -> list[str]:
    """Lower-case words: what documents are compared by."""
    return _WORD.findall(text.lower())


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Installed version of each distribution; raises a clear error when one is missing."""
    installed = {}
    for package in packages:
        try:
            installed[package] = _python_version() if package == "python" else metadata.version(package)
        except metadata.PackageNotFoundError:
            raise ModuleNotFoundError(f'The corpus needs {package}: pip install "ondevice[notebooks]".') from None
    return installed


def installed_documents(packages: Sequence[str] = PACKAGES) -> list[Document]:
    """Every docstring of the installed packages, sorted by qualified name; names are unique."""
    documents = (document for package in packages for document in read_files(package, *_files(package)))
    return unique(documents)


def read_folder(package: str, root: Path) -> list[Document]:
    """Every docstring below a folder that holds packages, sorted by qualified name."""
    return unique(read_files(package, root, [path.relative_to(root).as_posix() for path in root.rglob("*.py")]))


def read_files(package: str, root: Path, files: Iterable[str]) -> Iterator[Document]:
    """Docstrings of the Python files at `root`/file; tests, vendored copies and unreadable files are passed over."""
    for file in sorted(files):
        if not file.endswith(".py") or _SKIPPED.search(file):
            continue
        try:
            text = (root / file).read_text(encoding="utf-8")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # other people's escape sequences
                tree = ast.parse(text)
        except (SyntaxError, ValueError, OSError):
            continue
        parts = PurePosixPath(file).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        yield from _documents(package, module, tree, text.splitlines())


def _documents(package: str, module: str, tree: ast.Module, lines: list[str]) -> Iterator[Document]:
    for name, node in [(module, tree), *_definitions(module, tree.body)]:
        docstring = _tidy(ast.get_docstring(node, clean=False))
        if len(words(docstring)) < _FEWEST_WORDS:
            continue
        kind = {ast.Module: "module", ast.ClassDef: "class"}.get(type(node), "function")
        source = _source(node, lines) if isinstance(node, ast.FunctionDef) else ""
        yield Document(name, package, kind, _signature(node), docstring, source)


Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _definitions(prefix: str, body: Sequence[ast.stmt]) -> Iterator[tuple[str, Definition]]:
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            yield from _definitions(prefix, node.body)
            yield from _definitions(prefix, node.orelse)
        elif isinstance(node, Definition):
            yield f"{prefix}.{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from _definitions(f"{prefix}.{node.name}", node.body)


def _signature(node: ast.Module | Definition) -> str:
    if isinstance(node, ast.Module):
        return ""
    if isinstance(node, ast.ClassDef):
        text = f"({', '.join(map(ast.unparse, node.bases))})" if node.bases else ""
    else:
        text = f"({ast.unparse(node.args)})" + (f" -> {ast.unparse(node.returns)}" if node.returns else "")
    return text if len(text) <= _LONGEST_SIGNATURE else text[:_LONGEST_SIGNATURE] + " ..."


def _source(node: ast.FunctionDef, lines: list[str]) -> str:
    """The function's lines without decorators and docstring, or "" when nothing is left or it is long."""
    if len(node.body) < 2:
        return ""
    docstring = node.body[0]
    kept = lines[node.lineno - 1 : docstring.lineno - 1] + lines[docstring.end_lineno : node.end_lineno]
    text = textwrap.dedent("\n".join(line.rstrip() for line in kept)).strip()
    return text if len(text) <= _LONGEST_SOURCE else ""


def _tidy(text: str | None) -> str:
    lines = [line.rstrip() for line in inspect.cleandoc(text or "").splitlines()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def unique(documents: Iterable[Document]) -> list[Document]:
    """The first document of each name, sorted by name."""
    first: dict[str, Document] = {}
    for document in documents:
        first.setdefault(document.name, document)
    return [first[name] for name in sorted(first)]


def _files(package: str) -> tuple[Path, list[str]]:
    if package == "python":
        root = Path(sysconfig.get_paths()["stdlib"])
        return root, [path.relative_to(root).as_posix() for path in root.rglob("*.py")]
    distribution = metadata.distribution(package)
    return Path(str(distribution.locate_file(""))), [file.as_posix() for file in distribution.files or ()]


@functools.cache
def _python_version() -> str:
    import platform

    return platform.python_version()

"""docs/api.md, the names that programs may import and their signatures: `python -m ondevice_studies.api` writes it."""

from __future__ import annotations

import importlib
import inspect
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ondevice import assets

PAGE = "docs/api.md"
PROGRAM = "python -m ondevice_studies.api"
ACCEPT = (
    f"The public API is another than {PAGE} shows. Undo the change, or accept it: run `{PROGRAM}` and add a line to "
    "CHANGELOG.md."
)
# By section, each name with those of its members that are public, too. What is left out may change at any time.
PUBLIC: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "Models": {
        "ondevice.models.load": (),
        "ondevice.models.Loaded": (),
        "ondevice.chat.prompt_ids": (),
        "ondevice.causal_lm.CausalLM": (),
        "ondevice.causal_lm.lean.engine": (),
    },
    "Reranker (GRATING)": {
        "ondevice_programs.reranker.Reranker": ("predict", "rank", "calibrate", "close"),
        "ondevice_programs.reranker.Receipt": (),
        "ondevice_programs.reranker.Calibration": (),
    },
    "Drafters behind transformers' `generate`": {
        "ondevice.speculation.custom_generate.speculative": (),
        "ondevice.speculation.drafters.create": (),
        "ondevice.speculation.bundled.mixture": (),
        "ondevice.speculation.mixture.Mixture": (),
        "ondevice.speculation.store.Store": ("from_sequences", "after", "save", "load"),
        "ondevice.speculation.fitting.fit": (),
        "ondevice_papers.diaa.drafter.Diaa": (),
        "ondevice_papers.diaa.warmup.warm_up": (),
        "ondevice_papers.sdnpu.drafter.sdnpu": (),
        "ondevice_papers.sdnpu.history.History": (),
        "ondevice_programs.graphs.exporting.vocabulary_digest": (),
    },
    "Runs and records": {
        "ondevice.run.plan": (),
        "ondevice.run.run_all": (),
        "ondevice.evidence.load": (),
        "ondevice_studies.record.shared": (),
    },
}
_WIDTH = 110


class _Text:
    """An annotation or a default that is shown as it is written."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def page() -> str:
    """The page's text: for each section Sphinx's directives, and every signature at the end."""
    lines = [
        "# What programs use",
        "",
        "Programs may import these names. Everything else may change. A test compares their signatures with this page.",
        "[CHANGELOG.md](../CHANGELOG.md) lists the changes on purpose.",
    ]
    for section, names in PUBLIC.items():
        lines += ["", f"## {section}", "", "```{eval-rst}", *directives(names), "```"]
    lines += ["", "## Signatures", "", "```pyi", *signatures(), "```", "", "## Commands", ""]
    project = tomllib.loads((assets.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines += [*(f"- `{command}`" for command in project["scripts"]), "", "`--help` has the options of each."]
    return "\n".join(lines) + "\n"


def directives(names: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """What Sphinx needs to show these names with their docstrings."""
    for name, members in names.items():
        yield f".. auto{'class' if inspect.isclass(resolved(name)) else 'function'}:: {name}"
        if members:
            yield f"   :members: {', '.join(members)}"


def signatures() -> Iterator[str]:
    """A line or more for each public name, in the order of PUBLIC."""
    for names in PUBLIC.values():
        for name, members in names.items():
            yield from signature(name, resolved(name))
            for member in members:
                yield from signature(f"{name}.{member}", inspect.getattr_static(resolved(name), member))


def resolved(name: str) -> Any:
    """The object of a dotted name. Raises AttributeError or ModuleNotFoundError where there is none."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def signature(name: str, value: Any) -> list[str]:
    """`name(parameters) -> result`, a parameter on each line where it is long, without a method's self or cls.

    Raises ValueError for a default that has another text in every process.
    """
    bound = isinstance(value, classmethod)
    function: Callable[..., Any] = value.__func__ if isinstance(value, classmethod | staticmethod) else value
    given = inspect.signature(function)
    parameters = list(given.parameters.values())
    if parameters and (bound or parameters[0].name == "self"):
        parameters = parameters[1:]
    shown = given.replace(
        parameters=[
            each.replace(annotation=_shown(each.annotation), default=_named(each.default)) for each in parameters
        ],
        return_annotation=inspect.Signature.empty if inspect.isclass(value) else _shown(given.return_annotation),
    )
    if re.search(r" at 0x[0-9a-f]+", str(shown)):
        raise ValueError(f"{name} has a default whose text is another in every process: {shown}")
    line = f"{name}{shown}"
    if len(line) <= _WIDTH:
        return [line]
    result = str(shown).rpartition(") -> ")[2] if shown.return_annotation is not inspect.Signature.empty else ""
    each_alone = _separate([str(each) for each in shown.parameters.values()], list(shown.parameters.values()))
    return [f"{name}(", *(f"    {each}," for each in each_alone), f") -> {result}" if result else ")"]


def _separate(texts: list[str], parameters: list[inspect.Parameter]) -> list[str]:
    """The parameters' texts with the star that begins those which are named alone."""
    kinds = [each.kind for each in parameters]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        texts.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    return texts


def _shown(annotation: Any) -> Any:
    if annotation is inspect.Parameter.empty:
        return annotation
    return _Text(annotation) if isinstance(annotation, str) else _Text(inspect.formatannotation(annotation))


def _named(default: Any) -> Any:
    """A function or class as its name, as a function's own text has its address; anything else as it is."""
    named = default is not inspect.Parameter.empty and (inspect.isroutine(default) or inspect.isclass(default))
    return _Text(default.__qualname__) if named else default


def main() -> None:
    """Write docs/api.md."""
    path: Path = assets.ROOT / PAGE
    assets.write_text(path, page())


if __name__ == "__main__":
    main()

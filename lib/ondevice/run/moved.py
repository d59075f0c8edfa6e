"""Import paths of before the library became five packages, and where their modules are now."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ondevice.closure import imports

HOMES = {  # packages in which an old one's modules are now, looked through in this order; the longest name counts
    "ondevice.assistant": ("ondevice_programs.assistant", "ondevice_studies.assistant"),
    "ondevice.diaa": ("ondevice_papers.diaa", "ondevice_studies.diaa"),
    "ondevice.disco.router": ("ondevice_programs.router",),
    "ondevice.disco": ("ondevice_papers.disco", "ondevice_studies.disco"),
    "ondevice.dragon.live": ("ondevice_programs.pair", "ondevice.causal_lm"),
    "ondevice.dragon": ("ondevice_papers.dragon", "ondevice_studies.dragon", "ondevice_programs.pair"),
    "ondevice.grating.reranker": ("ondevice_programs.reranker", "ondevice_papers.grating"),
    "ondevice.grating": ("ondevice_papers.grating", "ondevice_studies.grating"),
    "ondevice.sdnpu": ("ondevice_papers.sdnpu", "ondevice_studies.sdnpu", "ondevice_programs.graphs"),
    "ondevice.training": ("ondevice_training",),
}


def new_paths(library: Path, code: Iterable[str]) -> dict[str, str]:
    """The old dotted names that pieces of code import, each with what it is called now. library: lib/.

    Raises SyntaxError for what is no Python.
    """
    names = sorted(name for name in imports(code) if _package(name))
    modules = {name: path for name in names if (path := _module(library, name))}
    for name in names:  # an object's name says nothing beside its module's, nor a package's beside its modules'
        package = _package(name)
        if not any(other.startswith(package) for other in modules):
            modules[package] = HOMES[package][0]
    return modules


def _package(name: str) -> str:
    """The old package that a dotted name is in, or nothing."""
    return max((package for package in HOMES if f"{name}.".startswith(f"{package}.")), key=len, default="")


def _module(library: Path, name: str) -> str:
    """What a module below an old package is called now; nothing for the package itself and for objects."""
    package = _package(name)
    rest = name.removeprefix(package)
    for home in HOMES[package] if rest else ():
        path = library.joinpath(*f"{home}{rest}".split("."))
        if path.with_suffix(".py").is_file() or path.is_dir():
            return f"{home}{rest}"
    return ""

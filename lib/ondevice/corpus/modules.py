"""The split by module, on top of the corpus's split by document: half of the modules are never trained on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet

from ondevice.corpus import Document
from ondevice.corpus.prompts import pick

# One module in two: the test split has one document in twenty, few of which have several passages, and a tenth of the
# modules would leave under a hundred queries.
_ONE_IN = 2


def held_out(module: str) -> bool:
    """Whether a module is for evaluation only."""
    return pick(module, "reranker module", _ONE_IN) == 0


def modules(documents: Iterable[Document]) -> Mapping[str, str]:
    """The module of each document, by its qualified name. documents: of all splits, as classes are known by theirs."""
    kinds = {document.name: document.kind for document in documents}
    classes = {name for name, kind in kinds.items() if kind == "class"}
    return {name: name if kind == "module" else _module(name, classes) for name, kind in kinds.items()}


def _module(name: str, classes: AbstractSet[str]) -> str:
    """What is left of an object's name without itself and the classes around it, known or named like classes."""
    head = name.rpartition(".")[0]
    while head in classes or head.rpartition(".")[2].lstrip("_")[:1].isupper():
        head = head.rpartition(".")[0]
    return head

"""Pools of all sets: the same every time, of the sizes and with the relevance that they say, and apart by split."""

from __future__ import annotations

import pytest

from ondevice import assets, corpus, retrieval
from ondevice.corpus.modules import held_out
from ondevice_studies.grating import questions
from ondevice_studies.grating.questions import (
    CALIBRATION,
    CLOZE,
    CONTEXT,
    QUESTIONS,
    RAG,
    SPLITS,
    RankingQuestion,
    pools,
)

MODULES = [name for name in (f"pack.part{n}" for n in range(80)) if held_out(name)][:24]
CALIBRATING = [name for name in (f"pack.other{n}" for n in range(80)) if held_out(name)][:24]
TRAINED = next(name for name in (f"pack.part{n}" for n in range(80)) if not held_out(name))
WORDS = [f"{tens}{ones}" for tens in ("ven", "tor", "mal") for ones in ("ado", "ibra", "oke", "umi", "esta", "yrr")]


def document(module: str, number: int, fields: int = 1) -> corpus.Document:
    """A documented function, 30 tokens or so a parameter."""
    described = "".join(
        f"p{place} : int\n    The {WORDS[number % 18]} measure number {place} of {module} in the list of all here.\n"
        for place in range(fields)
    )
    text = f"Compute the {WORDS[number % 18]} thing of {module}.\n\nParameters\n----------\n{described}"
    return corpus.Document(f"{module}.call", "pack", "function", "(p0)", text.strip(), "")


DOCUMENTS = {
    "test": (*(document(module, number) for number, module in enumerate(MODULES[:22])), document(TRAINED, 3),
             document(MODULES[22], 4, 60)),
    "validation": (*(document(f"{module}x", number) for number, module in enumerate(MODULES)),),
    "train": (*(document(module, number) for number, module in enumerate(CALIBRATING)),),
}  # fmt: skip


def forget() -> None:
    pools.cache_clear()
    questions._evaluation.cache_clear()
    questions.passages.cache_clear()


@pytest.fixture(autouse=True)
def toy(tmp_path, monkeypatch):
    """Toy documents are all the corpus, and indexes go to a temporary folder."""
    real = assets.cache_folder

    def folder(name: str):
        (tmp_path / name).mkdir(exist_ok=True)
        return tmp_path / name if name == "retrieval" else real(name)

    monkeypatch.setattr(assets, "cache_folder", folder)
    monkeypatch.setattr(corpus, "documents", lambda split: DOCUMENTS[split])
    forget()
    yield
    forget()


def content(of: list[RankingQuestion]) -> list[tuple[object, ...]]:
    return [(one.name, one.query, one.documents, one.answer, one.relevant.tolist(), one.ranks.tolist()) for one in of]


@pytest.mark.parametrize("set_", [RAG, CONTEXT])
def test_pools_are_the_same_every_time_and_their_parts_fit(set_):
    found = content(pools(set_, "test"))
    pools.cache_clear()
    assert found == content(pools(set_, "test")) and found
    for one in pools(set_, "test"):
        assert len(one.documents) == len(set(one.documents)) == len(one.relevant)
        assert sorted(one.ranks.tolist()) == list(range(len(one.documents)))
        assert (one.set, one.split) == (set_, "test") and one.relevant.dtype == bool


def test_rag_asks_about_held_out_modules_and_answers_stand_in_what_is_relevant():
    found = pools(RAG, "test")
    assert {one.name.rpartition(".")[0] for one in found} <= set(MODULES)
    for one in found:
        assert len(one.documents) == 20 and one.query.endswith(f" of {one.name}?")
        right = [text.startswith(f"{one.name}\n") and one.answer in " ".join(text.split()) for text in one.documents]
        assert one.relevant.tolist() == right


def test_twenty_are_found_by_either_search_and_the_best_of_both_is_first():
    texts = [f"{word} and other things" for word in WORDS] + ["a motor car", "a vehicle with an engine", "weather"]
    (places,) = questions.searched(texts, ["motor car"])
    assert len(places) == len(set(places)) == 20 and places[0] == 18
    near = retrieval.dense_index(texts).search(["motor car"], 10)[1][0].tolist()
    assert set(near) <= set(places) and 19 in near


def test_splits_and_sets_that_there_are_not_are_refused():
    with pytest.raises(ValueError, match=r"'RAG'.* validation"):
        pools(RAG, "validation")
    with pytest.raises(ValueError, match="'web'"):
        pools("web", "test")


def test_evaluation_pools_are_of_one_kind_and_of_documents_of_their_split():
    for split in SPLITS[QUESTIONS]:
        names = {one.name for one in DOCUMENTS["train" if split == CALIBRATION else split]}
        found = {set_: pools(set_, split) for set_ in (QUESTIONS, CLOZE)}
        assert found[QUESTIONS] and {one.name for of in found.values() for one in of} <= names
        for one in found[QUESTIONS]:
            assert len(one.documents) == 20 and {text.partition("\n")[0] for text in one.documents} <= names
            right = [one.answer in " ".join(text.split()) for text in one.documents]
            assert any(right) and one.relevant.tolist() == right and one.query.startswith("parameter ")

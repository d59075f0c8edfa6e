"""The corpus on small package trees written for the test."""

from pathlib import Path

import pytest

from ondevice import corpus, shapes
from ondevice.corpus import reading, sections, splits, store
from ondevice.corpus.prompts import normal

FOLDER = store.folder  # itself, in whose place tests of the gate have a function that refuses

SCALE = '''
def scale(values, factor=2.0):
    """Multiply every value by a factor and return the products.

    Parameters
    ----------
    values : list of float
        The numbers to multiply. An empty list gives
        an empty list.
    factor : float, optional
        What each number is multiplied by.

    Returns
    -------
    list of float
        The products, in the order of the values.

    See Also
    --------
    shift : Add a constant to every value.

    Examples
    --------
    >>> scale([1, 2])
    [2.0, 4.0]
    """
    result = [value * factor for value in values]
    if not result:
        return []
    return result
'''
SHIFT = '''
class Shifter:
    """Adds a constant to numbers, one list at a time, in place."""

    def apply(self, numbers, amount):
        """Add the amount to every number of the list.

        Args:
            numbers (list): The list that is changed in place by this call.
            amount (float): What is added to each of the numbers.

        Returns:
            The same list, so that calls can be chained together.
        """
        return numbers
'''


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A package with two modules, a test, a vendored copy, a broken file and an import that must not run."""
    files = {
        "toy/__init__.py": '"""A toy package with a scale and a shift, for tests."""\nraise RuntimeError("imported")\n',
        "toy/scale.py": SCALE,
        "toy/shift.py": SHIFT,
        "toy/tests/test_scale.py": SCALE.replace("scale", "tested"),
        "toy/_vendor/copy.py": SCALE.replace("scale", "vendored"),
        "toy/broken.py": "def (:\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def _document(name: str, docstring: str) -> corpus.Document:
    return corpus.Document(name, "toy", "function", "()", docstring, "")


def _name(split: str, prefix: str = "toy.f") -> str:
    return next(name for i in range(1000) if splits.split_of(name := f"{prefix}{i}") == split)


def test_reads_docstrings_without_importing(tree: Path) -> None:
    documents = {document.name: document for document in corpus.read_folder("toy", tree)}
    kinds = {name: document.kind for name, document in documents.items()}
    assert kinds == {"toy": "module", "toy.scale.scale": "function", "toy.shift.Shifter": "class",
                     "toy.shift.Shifter.apply": "function"}  # fmt: skip
    scale = documents["toy.scale.scale"]
    assert scale.text.startswith("def toy.scale.scale(values, factor=2.0)\n\nMultiply every value")
    assert scale.source.startswith("def scale(values, factor=2.0):\n    result = ") and "Multiply" not in scale.source
    with pytest.raises(ModuleNotFoundError, match="no-such-package"):
        reading.versions(["no-such-package"])


def test_splits_are_disjoint_and_repeatable(tree: Path) -> None:
    documents = [*corpus.read_folder("toy", tree)]
    filler = [_document(f"toy.g{i}", " ".join(f"w{i}x{j}" for j in range(12))) for i in range(2000)]
    first, second = corpus.select(documents + filler), corpus.select(documents + filler)
    assert first == second
    names = [{document.name for document in first.documents[split]} for split in corpus.SPLITS]
    assert not (names[0] & names[1] or names[0] & names[2] or names[1] & names[2])
    shares = [len(group) / 2004 for group in names]
    assert shares == pytest.approx([0.9, 0.05, 0.05], abs=0.02)


def test_a_planted_near_duplicate_leaves_the_held_out_split() -> None:
    words = [f"word{i}" for i in range(40)]
    other = [f"other{i}" for i in range(40)]
    original = _document(_name("train"), " ".join(words))
    copy = _document(_name("test"), " ".join([*words[:36], "four", "words", "are", "new"]))
    fresh = _document(_name("test", "toy.fresh"), " ".join(other))
    chosen = corpus.select([original, copy, fresh])
    assert chosen.documents["test"] == [fresh]
    assert chosen.near_duplicates == {"train": 0, "validation": 0, "test": 1}
    assert splits.overlap_with_earlier([original.docstring, copy.docstring])[1] == pytest.approx(29 / 33)


def test_fields_of_both_styles(tree: Path) -> None:
    found = {document.name: document.docstring for document in corpus.read_folder("toy", tree)}
    numpy, google = found["toy.scale.scale"], found["toy.shift.Shifter.apply"]
    assert [(field.name, field.type) for field in sections.parameters(numpy)] == [
        ("values", "list of float"),
        ("factor", "float, optional"),
    ]
    assert sections.parameters(numpy)[0].description == "The numbers to multiply. An empty list gives an empty list."
    assert [field.name for field in sections.parameters(google)] == ["numbers", "amount"]
    for docstring, start in ((numpy, "The products"), (google, "The same list")):
        assert sections.returned(docstring).description.startswith(start)
    assert sections.summary("Returns:\n    The number of things that were counted.") == ""
    (field,) = sections.parameters("Words.\n\n:param int count: How many there are.")
    assert field.description == "How many there are."


def test_every_answer_stands_in_its_document(tree: Path) -> None:
    documents = corpus.read_folder("toy", tree)
    texts = {document.name: document.docstring for document in documents}
    made = list(corpus.tasks(documents))
    assert made == list(corpus.tasks(documents))
    assert {task.family for task in made} == set(corpus.FAMILIES)
    for task in made:
        assert normal(task.answer) in normal(texts[task.name])
    answers = {task.family: task.answer for task in made if task.name == "toy.scale.scale"}
    assert answers["doctest"] == "[2.0, 4.0]"
    assert answers["see_also"] == "shift : Add a constant to every value."
    assert answers["summary"] == "Multiply every value by a factor and return the products."


def test_passages_quote_and_queries_have_relevant_passages(tree: Path) -> None:
    documents = corpus.read_folder("toy", tree)
    tokenizer = shapes.byte_tokenizer()
    found = corpus.passages(documents, tokenizer, 32)
    texts = {document.name: document.docstring for document in documents}
    for passage in found:
        assert passage.text in texts[passage.title]
        assert len(tokenizer(passage.text)["input_ids"]) <= 32
    whole = corpus.passages(documents, tokenizer, 10_000)
    assert [(passage.title, passage.text) for passage in whole] == list(texts.items())
    assert {query.kind for query in corpus.queries(documents)} <= {"parameter", "summary"}
    about = corpus.Query("parameter", "factor of scale", "toy.scale.scale", "What each number is multiplied by.")
    assert [passage.title for passage in whole if about.relevant(passage)] == ["toy.scale.scale"]
    summary = corpus.Query("summary", "Multiply every value.", "toy.scale.scale", "")
    assert [passage.index for passage in found if summary.relevant(passage)][:2] == [1, 2]
    with pytest.raises(ValueError):
        corpus.passages(documents, tokenizer, 0)


def test_written_and_read_back(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = corpus.select(corpus.read_folder("toy", tree))
    store.write(tmp_path / "built", chosen, {"toy": "1"}, 4, 0.0)
    monkeypatch.setattr(store, "folder", lambda: tmp_path / "built")
    store.documents.cache_clear()
    try:
        assert list(store.documents("train")) == chosen.documents["train"]
        assert corpus.manifest()["splits"]["train"]["documents"] == len(chosen.documents["train"])
    finally:
        store.documents.cache_clear()


def test_an_interrupted_build_goes_on_and_the_next_one_reads_nothing(tree: Path, tmp_path: Path, monkeypatch) -> None:
    """A build of minutes that keeps nothing begins again in each test that its time-out ends."""
    monkeypatch.setenv("ONDEVICE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "folder", FOLDER)
    monkeypatch.setattr(store, "versions", lambda: {"one": "1", "two": "1", "three": "1"})
    asked: list[str] = []

    def read(packages: list[str]) -> list[corpus.Document]:
        asked.extend(packages)
        if asked == ["one", "two"]:
            raise KeyboardInterrupt
        return corpus.read_folder(packages[0], tree)

    monkeypatch.setattr(store, "installed_documents", read)
    with pytest.raises(KeyboardInterrupt):
        store.folder()
    assert store.folder() == store.folder() and asked == ["one", "two", "two", "three"]
    assert corpus.manifest()["docstrings_read"] == len(corpus.read_folder("one", tree))  # all have the same names

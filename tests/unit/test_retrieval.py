"""Search: against brute force and by hand, saved and read back, and what is refused."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

from ondevice import assets, retrieval
from ondevice.retrieval import DenseIndex, Hybrid, SparseIndex, store
from ondevice.retrieval.texts import digest

TEXTS = [
    "Return the sum of the elements over an axis.",
    "Plot a histogram of the data.",
    "Read a comma-separated file into a table.",
    "Compute the standard deviation along an axis.",
    "Draw a bar chart.",
    "Open a network connection to a host.",
]


class FakeEmbedder:
    """Unit vectors drawn from a text's hash; counts the texts it was given."""

    key, size = "fake", 16

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, texts):
        self.seen += len(texts)
        rows = [np.random.default_rng(int(digest([text]), 16)).normal(size=self.size) for text in texts]
        made = np.array(rows, np.float32).reshape(len(texts), self.size)
        return made / np.linalg.norm(made, axis=1, keepdims=True)


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setenv(assets.CACHE_VARIABLE, str(tmp_path))
    return tmp_path


@pytest.fixture
def fake():
    return FakeEmbedder()


@pytest.fixture(scope="module")
def minilm():
    return retrieval.embedder()


def clouds(count: int, seed: int = 0) -> np.ndarray:
    """Unit vectors in clusters, as embeddings are."""
    rng = np.random.default_rng(seed)
    made = rng.normal(size=(20, 16))[rng.integers(0, 20, count)] + 0.5 * rng.normal(size=(count, 16))
    return (made / np.linalg.norm(made, axis=1, keepdims=True)).astype(np.float32)


# ---- embedder


def test_vectors_have_length_1_and_do_not_depend_on_the_batch(minilm, monkeypatch):
    texts = [*TEXTS, "", "word " * 400]
    together = minilm(texts)
    assert together.shape == (8, 384) and together.dtype == np.float32
    assert np.linalg.norm(together, axis=1) == pytest.approx(1, abs=1e-6)
    monkeypatch.setattr("ondevice.retrieval.embedding._BATCH_TOKENS", 30)
    assert minilm(texts[::-1])[::-1] == pytest.approx(together, abs=1e-6)
    assert minilm([]).shape == (0, 384)


def test_vectors_are_those_of_the_published_model(minilm):
    # The similarities of the model card's kind of example, computed with sentence-transformers 6.2.
    a, b, c = minilm(["That is a happy person", "That is a happy dog", "Today is a sunny day"])
    assert [float(a @ b), float(a @ c)] == pytest.approx([0.6946, 0.2570], abs=2e-4)


def test_a_text_is_cut_at_256_tokens(minilm):
    short, long = minilm(["word " * 254, "word " * 300 + "entirely different end"])
    assert long == pytest.approx(short, abs=1e-6)


# ---- dense


def test_dense_search_against_brute_force(fake):
    vectors, queries = clouds(2000), clouds(50, seed=1)
    scores, ids = DenseIndex.build(vectors, fake).nearest(queries, 10)
    assert np.array_equal(ids, np.argsort(-(queries @ vectors.T), axis=1)[:, :10])
    assert scores == pytest.approx(np.take_along_axis(queries @ vectors.T, ids, axis=1), abs=1e-5)


# ---- sparse


def test_bm25_by_hand():
    texts = ["apple banana", "apple apple cherry", "date"]
    scores, ids = SparseIndex.build(texts).search(["apple"], 3)

    def bm25(times: int, length: int) -> float:
        frequency = math.log(1 + (3 - 2 + 0.5) / (2 + 0.5))
        return frequency * times / (times + 1.5 * (1 - 0.75 + 0.75 * length / 2))

    assert ids[0].tolist() == [1, 0, 2]
    assert scores[0] == pytest.approx([bm25(2, 3), bm25(1, 2), 0])


def test_words_are_names_and_their_parts():
    assert retrieval.words("Use np.sum_of_squares(LinearModel)") == [
        "use", "np", "sum_of_squares", "sum", "of", "squares", "linearmodel", "linear", "model",
    ]  # fmt: skip
    assert retrieval.words("float32 HTTPServer Größe") == [
        "float32", "float", "32", "httpserver", "http", "server", "größe",
    ]  # fmt: skip


def test_a_ceiling_is_the_sum_of_idf_and_no_text_reaches_it():
    """A word counts as often as the query has it; an unknown one as rarer than any that is known."""
    index = SparseIndex.build(["apple banana", "apple apple cherry", "date"])
    apple, date, unknown = (math.log(1 + (3 - texts + 0.5) / (texts + 0.5)) for texts in (2, 1, 0))
    assert index.ceiling("Apple, date!") == pytest.approx(apple + date)
    assert index.ceiling("apple apple elderberry") == pytest.approx(2 * apple + unknown)
    assert index.ceiling("?!") == 0
    for times, share in ((1, 0.4), (1000, 0.9886)):
        same = SparseIndex.build(["apple " * times, *["date"] * 9])
        assert same.search(["apple apple"], 1)[0][0, 0] / same.ceiling("apple apple") == pytest.approx(share, abs=1e-4)


# ---- hybrid


@dataclass(frozen=True)
class Fixed:
    """An index that answers every query with one list, best first."""

    ids: tuple[int, ...]
    scores: tuple[float, ...]

    @property
    def size(self) -> int:
        return len(self.ids)

    def search(self, queries, k):
        return np.array([self.scores[:k]] * len(queries)), np.array([self.ids[:k]] * len(queries))


DENSE, SPARSE = Fixed((0, 1, 2, 3), (0.9, 0.8, 0.5, 0.1)), Fixed((2, 1, 3, 0), (30.0, 15.0, 5.0, 0.0))


def test_reciprocal_rank_fusion_by_hand():
    scores, ids = Hybrid(DENSE, SPARSE).search(["q"], 4)
    expected = {0: 1 / 61 + 1 / 64, 1: 2 / 62, 2: 1 / 63 + 1 / 61, 3: 1 / 64 + 1 / 63}
    order = sorted(expected, key=lambda index: -expected[index])
    assert ids[0].tolist() == order
    assert scores[0] == pytest.approx([expected[index] / 2 for index in order])


def test_a_hybrid_of_other_parts_is_refused():
    with pytest.raises(ValueError, match=r"4 .*6"):
        Hybrid(DENSE, SparseIndex.build(TEXTS))


# ---- all


def every_index(fake):
    dense, sparse = DenseIndex.build(fake(TEXTS), fake), SparseIndex.build(TEXTS)
    return dense, sparse, Hybrid(dense, sparse)


def test_every_index_gives_k_scores_and_positions_a_query(fake):
    for index in every_index(fake):
        for queries in (["sum"], ["sum", "chart", "file"], []):
            scores, ids = index.search(queries, 2)
            assert scores.shape == ids.shape == (len(queries), 2)
            assert ids.dtype == np.int64


@pytest.mark.parametrize("k", [0, -1, 7])
def test_k_outside_the_pool_is_one_sentence(fake, k):
    for index in every_index(fake):
        with pytest.raises(ValueError, match=f"k = {k}"):
            index.search(["sum"], k)


def test_an_empty_corpus_is_one_sentence(fake):
    for build in (lambda: SparseIndex.build([]), lambda: DenseIndex.build(fake([]), fake)):
        with pytest.raises(ValueError, match="no texts"):
            build()
    with pytest.raises(ValueError, match="no words"):
        SparseIndex.build(["?", "..."])


# ---- cache


def test_a_cached_dense_index_embeds_once_other_texts_or_another_embedder_anew(fake):
    texts = [f"text {n}" for n in range(100)]
    for _ in range(2):
        assert retrieval.dense_index(texts, fake).search(["text 7"], 1)[1].tolist() == [[7]]
    assert fake.seen == 100 + 2  # and the queries
    other = FakeEmbedder()
    other.key = "other"
    retrieval.embeddings(texts, other)
    retrieval.embeddings(texts[:5], fake)
    assert (fake.seen, other.seen) == (107, 100) and digest(["ab", "c"]) != digest(["a", "bc"])


def test_an_interrupted_embedding_keeps_its_finished_blocks(fake, monkeypatch, root):
    monkeypatch.setattr(store, "_BLOCK", 2)

    class Interrupted(FakeEmbedder):
        def __call__(self, texts):
            if self.seen == 4:
                raise KeyboardInterrupt
            return super().__call__(texts)

    with pytest.raises(KeyboardInterrupt):
        retrieval.embeddings(TEXTS, Interrupted())
    assert np.array_equal(retrieval.embeddings(TEXTS, fake), FakeEmbedder()(TEXTS))
    assert fake.seen == 2
    assert not [path for path in (root / "retrieval").iterdir() if path.name.startswith(".")]


def test_a_cached_sparse_index_is_read_back_and_a_damaged_one_is_made_anew(root, caplog, monkeypatch):
    retrieval.sparse_index(TEXTS)
    (path,) = (root / "retrieval").iterdir()
    with monkeypatch.context() as patched:
        patched.setattr(SparseIndex, "build", None)
        assert retrieval.sparse_index(TEXTS).search(["bar chart"], 1)[1].tolist() == [[4]]
    path.write_bytes(path.read_bytes()[:400])
    assert retrieval.sparse_index(TEXTS).search(["bar chart"], 1)[1].tolist() == [[4]]
    assert path.name in caplog.text

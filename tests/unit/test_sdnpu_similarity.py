"""Figure 3: pairs of answers, answers and contexts, edit distance and copied 4-grams, against direct computations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ondevice import retrieval
from ondevice_studies.sdnpu import similarity
from ondevice_studies.speculation.request_set import Request


class Spelled:
    """A tokenizer whose tokens are numbers, 0 a marker."""

    all_special_ids = (0,)

    def decode(self, ids, skip_special_tokens):
        return " ".join(str(token) for token in ids if not (skip_special_tokens and token == 0))


@pytest.fixture
def by_count(monkeypatch):
    """Texts are near where they have the same tokens."""
    monkeypatch.setattr(retrieval, "embedder", lambda: counted)


def counted(texts) -> np.ndarray:
    """Unit vectors of how often each of 40 tokens stands in a text."""
    counts = np.array([[text.split().count(str(token)) for token in range(40)] for text in texts], np.float32)
    return counts / np.linalg.norm(counts, axis=1, keepdims=True)


def request(task: str, prompt: int, ids, said, name: str | None = None) -> Request:
    return Request(task, prompt, name or f"{task}{prompt}", tuple(ids), tuple(said), len(said), frozenset())


# In summary 0 and 1 are nearest to each other and 2 to 1; in rag 0 and 1, and 1 and 2.
REQUESTS = [
    request("summary", 0, [0, 1, 2, 3, 4], [10, 11]), request("summary", 1, [1, 2, 3, 5], [10, 12]),
    request("summary", 2, [1, 5, 6, 7], [13, 14]), request("rag", 0, [20, 21, 0], [10, 30]),
    request("rag", 1, [20, 21, 22], [31, 32]), request("rag", 2, [22, 23], [31, 32], name="summary0"),
]  # fmt: skip


def test_pairs_of_answers_are_told_apart_by_their_contexts(by_count):
    table = similarity.of_answers(REQUESTS, "m", Spelled())
    pairs = {(row.first, row.second): (row.pair, row.cosine) for row in table.itertuples()}
    assert pairs["summary 0", "summary 1"] == ("task", pytest.approx(0.5))
    assert pairs["summary 1", "summary 2"] == ("task", pytest.approx(0.0))
    assert pairs["summary 0", "summary 2"] == ("group", pytest.approx(0.0))
    assert pairs["rag 1", "rag 2"] == ("task", pytest.approx(1.0))
    assert pairs["rag 0", "rag 2"][0] == "group" and pairs["rag 0", "rag 1"][0] == "task"
    assert pairs["summary 0", "rag 0"] == ("across", pytest.approx(0.5))
    assert ("summary 0", "rag 2") not in pairs  # about one document
    assert table["pair"].value_counts().to_dict() == {"across": 8, "task": 4, "group": 2}
    assert (table["model"] == "m").all() and table["cosine"].between(-1, 1).all()


def test_answers_do_not_decide_which_contexts_are_near(by_count):
    other = [request(one.task, one.prompt, one.ids, [k + 1], name=one.name) for k, one in enumerate(REQUESTS)]
    tables = [similarity.of_answers(found, "m", Spelled()) for found in (REQUESTS, other)]
    assert tables[0]["pair"].tolist() == tables[1]["pair"].tolist()
    assert tables[0]["cosine"].tolist() != tables[1]["cosine"].tolist()


def edits(first: list[int], second: list[int]) -> int:
    if not first or not second:
        return len(first) + len(second)
    if first[-1] == second[-1]:
        return edits(first[:-1], second[:-1])
    return 1 + min(edits(first[:-1], second), edits(first, second[:-1]), edits(first[:-1], second[:-1]))


TOKENS = st.lists(st.integers(0, 2), max_size=6)


@given(TOKENS, TOKENS)
def test_the_distance_is_levenshteins(first, second):
    found = similarity.distance(first, second)
    assert found * max(len(first), len(second), 1) == pytest.approx(edits(first, second))
    assert found == similarity.distance(second, first) and 0 <= found <= 1


def test_copied_grams_are_counted_over_a_family():
    said = [
        request("rag", 0, [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]),  # two of three
        request("rag", 1, [9, 9, 9, 9], [1, 2, 3, 4]),  # another request's context is none of its own
        request("turns", 0, [1, 2, 3], [1, 2, 3]),
    ]
    table = similarity.copied(said, "m").set_index("task")
    assert table.loc["rag", "copied"] == 0.5 and table.loc["rag", "grams"] == 4
    assert np.isnan(table.loc["turns", "copied"]) and table.loc["turns", "grams"] == 0

"""Precision@1 of rerankers and of the embedder, of the same candidates."""

import dataclasses

import numpy as np
import pytest

from ondevice.grating import findings, first_places
from ondevice.grating.recordings import CLOZE, QUESTIONS, Asked, Recording
from ondevice.grating.replay import Pools

pytestmark = pytest.mark.usefixtures("one_thread")

TEXTS = ("Bread is baked of flour.", "A guitar has six strings.", "The train leaves at noon.")
QUERIES = ("When does the train leave?", "What is bread made of?", "How many strings has a guitar?")


def recording(model: str, last: list[list[float]]) -> Recording:
    """Three pools of the same texts; the embedder finds what is relevant in the first two, not in the third."""
    scores = np.stack([np.zeros((3, 3)), np.array(last)], 1)
    relevance = np.array([[0, 0, 1], [1, 0, 0], [1, 0, 0]], float)
    candidates = np.tile(np.arange(3, dtype=np.uint64), (3, 1))
    queries = np.array([QUESTIONS, QUESTIONS, CLOZE])
    return Recording(model, "test", Pools(scores, relevance), queries, np.zeros(3, np.uint64), candidates)


@pytest.fixture
def texts(monkeypatch, tmp_path):
    """The pools as they are asked, and an empty cache."""
    pools = [Asked(place, query, TEXTS) for place, query in enumerate(QUERIES)]
    monkeypatch.setattr(first_places, "asked", lambda recording, places: [pools[place] for place in places])
    monkeypatch.setattr("ondevice.assets.cache_folder", lambda name: tmp_path)
    return pools


def test_all_rankers_order_the_same_candidates(texts):
    good, bad = (
        recording("good", [[0, 1, 2], [2, 1, 0], [2, 1, 0]]),
        recording("bad", [[0, 1, 2], [0, 1, 2], [0, 1, 2]]),
    )
    found = first_places.first_places([good, bad]).set_index(["queries", "ranker"])
    assert found["pools"].to_dict() == {(name, ranker): count for name, count in ((QUESTIONS, 2), (CLOZE, 1))
                                        for ranker in ("good", "bad", first_places.EMBEDDER)}  # fmt: skip
    assert found["precision"].tolist() == [1, 0.5, 1, 1, 0, 0]
    assert found.loc[(QUESTIONS, "bad"), ["low", "high"]].tolist() == [0, 1]
    only = found.drop(index=CLOZE, level="queries").reset_index()
    assert findings.over_embedder(only)["grating-c10"] == (-25, -25)


def test_pools_without_their_texts_are_in_no_row(texts, monkeypatch):
    monkeypatch.setattr(first_places, "asked", lambda recording, places: [texts[0], texts[2]])
    found = first_places.first_places([recording("good", [[0, 1, 2], [0, 0, 1], [2, 1, 0]])])
    assert (found["pools"] == 1).all() and found["precision"].tolist() == [1, 1, 1, 0]


def test_recordings_of_other_pools_are_refused():
    one = recording("a", [[0, 1, 2]] * 3)
    for given in ([], [one, dataclasses.replace(one, candidates=one.candidates + np.uint64(1))]):
        with pytest.raises(ValueError, match="one or more, of the same pools"):
            first_places.first_places(given)

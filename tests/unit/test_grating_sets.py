"""GRATING's sets: pools of the sizes and with the relevance that they say, whose splits share no text."""

from __future__ import annotations

import numpy as np
import pytest

from ondevice import assets
from ondevice.corpus import wikitext
from ondevice_studies.grating import scoring
from ondevice_studies.grating.sets import CONTEXT, NOTES, PARAGRAPHS, RAG, SEGMENTS, SPLITS, TEST, VALIDATION, pools

WORDS = ["river", "castle", "engine", "ballad", "harbour", "treaty", "comet", "orchard", "signal", "glacier", "temple"]
ARTICLES = 12
LENGTH = 10  # paragraphs of an article


def sentence(article: int, paragraph: int, number: int) -> str:
    """Nine words of its own and of its article."""
    first, second = WORDS[article % len(WORDS)], WORDS[(paragraph + number) % len(WORDS)]
    return f"The {first} number {paragraph} of {second} has part {number} in record {article}"


def article(number: int) -> list[str]:
    paragraphs = [". ".join(sentence(number, paragraph, part) for part in range(3)) for paragraph in range(LENGTH)]
    return [f" = Article {number} = ", *paragraphs]


@pytest.fixture(autouse=True)
def toy(tmp_path, monkeypatch):
    """A toy WikiText-2 with a question on every article's third paragraph; indexes in a temporary folder."""
    real = assets.cache_folder

    def folder(name: str):
        (tmp_path / name).mkdir(exist_ok=True)
        return tmp_path / name if name == "retrieval" else real(name)

    asked = [(number * (LENGTH + 1) + 3, f"Which part has {sentence(number, 2, 1)}?") for number in range(ARTICLES)]
    monkeypatch.setattr(assets, "cache_folder", folder)
    monkeypatch.setattr(
        wikitext, "text", lambda split: "\n".join(line for number in range(ARTICLES) for line in article(number))
    )
    monkeypatch.setattr(wikitext, "questions", lambda: asked)
    pools.cache_clear()
    yield
    pools.cache_clear()


@pytest.mark.parametrize(("set_", "split"), [(set_, split) for set_, splits in SPLITS.items() for split in splits])
def test_a_pool_has_one_relevant_candidate_and_an_order_of_all(set_, split):
    of = pools(set_, split)
    assert of
    for pool in of:
        count = len(pool.documents)
        assert count == len(set(pool.documents)) == len(pool.relevant) and pool.relevant.sum() == 1
        assert sorted(pool.ranks.tolist()) == list(range(count)) and 0 <= pool.nearest < count
        assert (pool.set, pool.split) == (set_, split)
        assert count == 20 if set_ != CONTEXT else SEGMENTS[0] <= count <= SEGMENTS[1]


@pytest.mark.parametrize("set_", [PARAGRAPHS, NOTES])
def test_the_splits_share_no_text(set_):
    texts = [{text for pool in pools(set_, split) for text in pool.documents} for split in (VALIDATION, TEST)]
    assert all(texts) and not set.intersection(*texts)


def test_a_sentence_that_asks_stands_in_no_candidate_of_its_paragraph():
    for pool in pools(PARAGRAPHS, VALIDATION) + pools(PARAGRAPHS, TEST):
        answer = pool.documents[int(pool.relevant.argmax())]
        number, paragraph = int(pool.query.rsplit(" ", 1)[1]), int(pool.query.split()[3])
        assert pool.query not in answer and answer.startswith(f"Article {number}\n")
        kept = [part for part in range(3) if sentence(number, paragraph, part) in answer]
        assert len(kept) == 2


def test_a_long_context_is_one_article_in_its_order():
    for number, pool in enumerate(pools(CONTEXT, TEST)):
        assert pool.name == f"Article {number}" and pool.ranks.tolist() == list(range(LENGTH))
        assert pool.relevant.tolist() == [paragraph == 2 for paragraph in range(LENGTH)]


def test_sets_and_splits_that_there_are_not_are_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match=rf"'films'.*{PARAGRAPHS} \({VALIDATION}, {TEST}\)"):
        pools("films", TEST)
    with pytest.raises(ValueError, match=RAG):
        pools(RAG, VALIDATION)


# The recorder's rows


def test_every_pool_of_the_sets_is_in_one_part():
    parts = [set_split for part in scoring.PARTS.values() for set_split in part]
    assert sorted(parts) == sorted((set_, split) for set_, splits in SPLITS.items() for split in splits)


def test_rows_of_validation_have_scores_of_probes_that_were_fitted_on_other_pools():
    random = np.random.default_rng(0)
    asked = scoring.numbered("validation")[:24]
    read = [
        (random.normal(size=(3, 20)).astype(np.float32), random.normal(size=(2, 20, 8)).astype(np.float16))
        for _ in asked
    ]
    rows, fitted = scoring.validation_rows(scoring.DEEP, asked, read)
    assert fitted is not None and fitted.weights.shape == (2, 8)
    assert [(row["pool"], row["layers"], row["n"]) for row in rows] == [(number, 3, 20) for number, _ in asked]
    for row, (scores, _) in zip(rows, read, strict=True):
        assert row["scores"].tolist() == scores.ravel().tolist() and row["probed"].shape == (40,)
    plain, none = scoring.validation_rows(scoring.ENCODER, asked, read)
    assert none is None and not any(len(row["probed"]) for row in plain)


def test_a_row_says_whether_the_embedders_first_candidate_is_relevant():
    number, question = scoring.numbered("test")[0]
    row = scoring.score_row("m", number, question, np.zeros((2, 20), np.float32), np.empty(0, np.float32))
    assert row["nearest"] == bool(question.relevant[question.nearest]) and row["relevant"].sum() == 1

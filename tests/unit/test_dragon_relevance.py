"""Relevance that two sides compare, and the questions on which it was chosen and judged."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from tiny import random_model

from ondevice import assets, corpus, shapes
from ondevice.causal_lm import CausalLM
from ondevice.corpus.prompts import normal
from ondevice.retrieval import SparseIndex, embedder
from ondevice_papers.dragon.aggregation import log_weight, share
from ondevice_programs import reranker
from ondevice_programs.pair.decoder import Template
from ondevice_programs.pair.node import WEIGHT_TEMPERATURE, Documents, Node
from ondevice_programs.pair.relevance import CANDIDATES, COSINE, MEMORY, RERANKER, TEMPERATURE, Scored, Scorer
from ondevice_studies.dragon import lockstep, sides
from ondevice_studies.dragon.lockstep import DRAGON, ON_CLOUD, ON_DEVICE

NOTES = ["the alarm code of the cabin is 9921", "the dentist comes on friday", "the cat eats fish"]
FILES = [f"function {word} returns the {word} code of an array" for word in ("sum", "mean", "sort", "alarm", "cabin")]


class Reranker:
    """Its logit of a pair is the number of letters that both begin with."""

    spec = "models/letters"
    fingerprint = "0123456789abcdef"

    def predict(self, pairs: Sequence[tuple[str, str]], **options: object) -> np.ndarray:
        return np.array([_common(*pair) for pair in pairs])


class Embedder:
    """A text's vector points to one of two sides, by whether the text is about functions."""

    key = "two-sides"

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        return np.array([[1.0, 0.0] if "function" in text else [0.0, 1.0] for text in texts])


def _common(query: str, text: str) -> float:
    return float(sum(query[:end] == text[:end] for end in range(1, len(query) + 1)))


def scored(texts: Sequence[str]) -> Scored:
    scorer = Scorer(Reranker(), Embedder())  # type: ignore[arg-type]
    return Scored(texts, SparseIndex.build(texts), scorer=scorer)


def test_a_passage_has_one_relevance_whatever_stands_beside_it():
    query = "the alarm code?"
    alone, among = scored(NOTES[:1]).best(query, 1), scored([*FILES, *NOTES]).best(query, 3)
    assert alone[1][0] == among[1][among[0].index(NOTES[0])] == _common(query, NOTES[0]) + COSINE
    shares = [Documents(texts, SparseIndex.build(texts)).best(query, 1)[1] for texts in (NOTES[:2], [*FILES, *NOTES])]
    assert shares[0] != shares[1]  # which a search's scores are not


def test_the_best_of_the_candidates_come_first():
    texts, scores = scored([*FILES, *NOTES]).best("the alarm code of the cabin", 2)
    assert texts[0] == NOTES[0] and scores == sorted(scores, reverse=True) and len(texts) == 2
    many = [f"word{n} code" for n in range(3 * CANDIDATES)]
    assert len(scored(many).best("code", 2 * CANDIDATES)[0]) == 2 * CANDIDATES  # as many as are asked for


def test_what_scores_are_made_by_is_told_with_a_digest():
    assert scored(NOTES).relevance == "letters (0123456789ab, two-sides)"
    assert Documents(NOTES, SparseIndex.build(NOTES)).relevance == "BM25's share of the question"


# A side without documents


def node(texts: Sequence[str]) -> Node:
    model = random_model("llama", vocabulary=300, context=256, spread=0.3)
    documents = Documents(texts, SparseIndex.build(list(texts) or ["nothing"]))
    return Node(CausalLM(model), shapes.byte_tokenizer(), documents, Template("{document}\n{query}\n"))


def test_a_side_without_documents_drafts_what_the_model_says_and_has_no_part():
    decoder, cited = node([]).decoder("why?", 2)
    other, _ = node(NOTES).decoder("why?", 2)
    assert cited == [] and share(decoder.log_weight, other.log_weight) == 0.0
    assert share(other.log_weight, decoder.log_weight) == 1.0
    assert np.exp(decoder.next_distribution()) == pytest.approx(decoder.prior)


# Answers to several questions at once


@pytest.mark.usefixtures("one_thread")
def test_answers_of_several_questions_are_those_of_each_by_itself():
    nodes = {"device": node(NOTES), "cloud": node(FILES)}
    queries = ["the alarm code of the cabin", "what does sum return?", "who eats fish?"]
    methods = (ON_DEVICE, DRAGON, ON_CLOUD)
    together = sides.answers(nodes, queries, methods, limit=6)
    for query, answer in zip(queries, together, strict=True):
        weights = {side: one.decoder(query, 2)[0].log_weight for side, one in nodes.items()}
        assert answer.log_weights == weights
        assert answer.router == (ON_DEVICE if weights["device"] >= weights["cloud"] else ON_CLOUD)
        for method in methods:
            assert answer.tokens[method] == lockstep.answer(nodes, query, method, limit=6)[0]


# The questions


def rows() -> list[dict]:
    return [json.loads(line) for line in assets.data("corpus", "sides.jsonl").read_text("utf-8").splitlines()]


def test_there_are_60_of_each_kind_apart_from_those_that_settings_were_chosen_on():
    counts = Counter((row["split"], row["holder"]) for row in rows())
    assert counts == {("test", "device"): 60, ("test", "cloud"): 60, ("validation", "device"): 36,
                      ("validation", "cloud"): 36}  # fmt: skip
    for what in ("question", "note", "document"):
        every = [row[what] for row in rows() if what in row]
        assert len(set(every)) == len(every)


def test_every_note_holds_its_answer():
    for split in ("validation", "test"):
        for question in sides.questions(split):  # type: ignore[arg-type]
            assert question.holder == "cloud" or question.right(question.source), question


@pytest.mark.long  # reads the whole corpus
@pytest.mark.parametrize("split", ["validation", "test"])
def test_every_object_that_is_asked_about_holds_its_answer(split: sides.Split):
    """With other versions of the corpus's packages a few objects may be missing."""
    known = {document.name: normal(document.docstring) for document in corpus.documents(split)}
    asked = [question for question in sides.questions(split) if question.holder == "cloud"]
    assert sum(question.right(known.get(question.source, "")) for question in asked) >= 0.8 * len(asked)


def test_an_answer_is_right_by_whole_words():
    question = sides.SideQuestion("device", "How much?", ("870", "eight hundred"), "")
    assert question.right("It is 870, due on the third.") and question.right("EIGHT hundred")
    assert not any(map(question.right, ["8705", "1870", "87", ""]))


@pytest.mark.long  # models
def test_by_the_bundled_models_the_side_that_holds_the_answer_has_the_larger_weight():
    """Of a few questions of a side, by two passages of each side; BM25's shares are no such weights."""
    asked, right = sides.questions("validation"), dict[str, int]()
    some = [question for holder in ("device", "cloud") for question in [q for q in asked if q.holder == holder][:6]]
    plain = {side: Documents(texts, SparseIndex.build(texts)) for side, texts in sides.texts("validation", 600).items()}
    with reranker.Reranker(RERANKER, memory_budget=MEMORY, mode="order", calibration=False) as bundled:
        scorer = Scorer(bundled, embedder())
        scored = {side: Scored(each.texts, each.index, scorer=scorer) for side, each in plain.items()}
        for name, documents, temperature in (("models", scored, TEMPERATURE), ("BM25", plain, WEIGHT_TEMPERATURE)):
            for question in some:
                scores = {side: each.positions(question.text, 2)[1] for side, each in documents.items()}
                larger = max(scores, key=lambda side: log_weight(scores[side], temperature))
                right[name] = right.get(name, 0) + (larger == question.holder)
    assert right["models"] >= len(some) - 1 > right["BM25"] + 2

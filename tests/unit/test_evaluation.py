"""Evaluation of a language model: each number against a direct computation, and the cards' tables."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from ondevice import assets, corpus
from ondevice.causal_lm import CausalLM
from ondevice.causal_lm.generation import greedy, loops, repeated
from ondevice.causal_lm.scoring import score
from ondevice.corpus import answers
from ondevice.corpus.reading import Document
from ondevice_training import language_model
from ondevice_training.evaluation import tasks
from ondevice_training.evaluation.bars import BARS
from ondevice_training.evaluation.perplexity import perplexity
from ondevice_training.evaluation.retrieval_gain import mixture

VOCABULARY, CONTEXT = 32, 64


@pytest.fixture(scope="module")
def model():
    return language_model.build("tiny", VOCABULARY, end=0, pad=1, context=CONTEXT).eval()


@pytest.fixture(scope="module")
def sharp():
    """A model with large embeddings, whose greedy outputs vary with the prompt."""
    made = language_model.build("tiny", VOCABULARY, end=0, pad=1, context=CONTEXT, seed=3).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 2:
                parameter.mul_(12)
    return made


def _ids(rng: np.random.Generator, length: int) -> list[int]:
    return rng.integers(2, VOCABULARY, length).tolist()


def test_perplexity_is_that_of_training_and_its_error_shrinks(model: Any) -> None:
    windows = np.random.default_rng(0).integers(0, VOCABULARY, (64, 16))
    found = perplexity(model, windows)
    # training's own reads in bfloat16 where the CPU has it
    assert found.value == pytest.approx(language_model.perplexity_of(model, windows), rel=2e-3)
    direct = [model(input_ids=torch.tensor(row[None]), labels=torch.tensor(row[None])).loss.item() for row in windows]
    assert found.value == pytest.approx(np.exp(np.mean(direct)), rel=1e-5)
    assert found.standard_error == pytest.approx(found.value * np.std(direct) / 8, rel=0.2)
    assert found.low < found.value < found.high


def test_scores_do_not_depend_on_the_batch(sharp: Any) -> None:
    rng = np.random.default_rng(1)
    prefixes, continuations = [_ids(rng, n) for n in (1, 9, 30)], [_ids(rng, n) for n in (12, 3, 20)]
    together = score(sharp, prefixes, continuations)
    for prefix, continuation, found in zip(prefixes, continuations, together, strict=True):
        logits = sharp(input_ids=torch.tensor([prefix + continuation])).logits[0, len(prefix) - 1 : -1]
        right = torch.log_softmax(logits, -1)[range(len(continuation)), continuation]
        np.testing.assert_allclose(found.log_probs, right.detach().numpy(), atol=1e-4)
        assert found.hits.tolist() == (logits.argmax(-1).numpy() == continuation).tolist()
    for prefix in ([], [1] * CONTEXT):
        with pytest.raises(ValueError):
            score(sharp, [prefix], [[1]])


def test_the_mixture_is_equation_2_in_probabilities() -> None:
    rng = np.random.default_rng(3)
    log_probs, scores = np.log(rng.random((4, 7))), rng.random(4) * 30
    weights = np.exp(scores / 5)
    right = weights @ np.exp(log_probs) / weights.sum()
    np.testing.assert_allclose(np.exp(mixture(log_probs, scores, 5.0)), right, rtol=1e-12)
    np.testing.assert_allclose(mixture(log_probs[:1], scores[:1], 5.0), log_probs[0], rtol=1e-12)
    assert np.isfinite(mixture(log_probs - 5000, scores * 100, 1.0)).all()  # where probabilities underflow


def test_a_loop_is_an_ngram_three_times() -> None:
    eight = list(range(8))
    assert loops([*eight, 50, *eight, 51, *eight]) and loops([7] * 10)
    assert not loops(eight * 2) and not loops([7] * 9) and not loops([])
    assert repeated([1, 2, 3, 4, 1, 2, 3, 4]) == (1, 5) and repeated([1, 2]) == (0, 0)


def test_greedy_batches_say_what_single_sessions_say(sharp: Any) -> None:
    rng = np.random.default_rng(5)
    prompts = [_ids(rng, n) for n in (1, 3, 30, 17, 40, 2, 9)]
    lm, right = CausalLM(sharp), []
    for prompt in prompts:
        session, said = lm.start(), []
        token = int(session.prefill(prompt).argmax())
        while len(said) < 24:
            said.append(token)
            token = int(session.extend([token])[-1].argmax())
        right.append(said)
    free = greedy(sharp, prompts, None, max_new_tokens=24)
    assert [list(output.ids) for output in free] == right
    assert not any(output.ended for output in free)
    end = right[0][10]  # a token that some rows say, at different steps
    for said, output in zip(right, greedy(sharp, prompts, end, max_new_tokens=24), strict=True):
        assert output.ended == (end in said)
        assert list(output.ids) == (said[: said.index(end)] if end in said else said)
    with pytest.raises(ValueError, match="41"):
        greedy(sharp, [[1] * 41], None, max_new_tokens=24)


def test_answers() -> None:
    assert answers.exact("The  axis\nto sum.", "The axis to sum.")
    assert not answers.exact("the axis to sum", "The axis to sum.")
    assert answers.f1("a a b", "a b c d") == pytest.approx(2 * 2 / 7)
    assert answers.f1("", "a") == answers.f1("x", "") == 0
    assert answers.hit("one two three four", "one two three four five")  # 8 / 9
    assert not answers.hit("one two three", "one two three four six")  # 6 / 8
    assert answers.hit(">>>", ">>>") and not answers.hit("...", ">>>")
    train = ["If True, copy the *array*.", "Other text"]
    assert tasks.standing_in(["copy the array", "array other", "cop"], train) == [True, False, False]


def _documents(count: int) -> list[Document]:
    made = []
    for i in range(count):
        fields = "\n".join(
            f"    name_{i}_{k} : int\n        The number of item {i} at place {k} of the table." for k in "ab"
        )
        example = f"Examples\n--------\n>>> f_{i}({i})\n{i} {i}"
        text = f"Count the items of table {i} in its order.\n\nParameters\n----------\n{fields.strip()}\n\n{example}"
        text += "\n\nNotes\n-----\n" + " ".join(str((i + 3) * k * 7919 % 1000) for k in range(1, 60))
        made.append(Document(f"pkg.f_{i:03d}", "pkg", "function", "(a, b)", text, f"def f_{i}(a, b): return {i}"))
    return made


@pytest.fixture(scope="module")
def encoder():
    return corpus.train_tokenizer((document.text for document in _documents(30)), vocabulary=600)


def test_tasks_are_answered_and_judged_by_family(encoder: Any) -> None:
    made = language_model.build("tiny", len(encoder), encoder.eos_token_id, encoder.pad_token_id).eval()
    documents = _documents(30)
    counts = {"rag": 5, "question": 5, "doctest": 3}
    chosen, too_long = tasks.choose(documents, encoder, counts, room=768)
    assert {family: len(members) for family, members in chosen.items()} == counts and not too_long
    none, over = tasks.choose(documents, encoder, {"rag": 5}, room=3)
    assert not none["rag"] and over
    closed = tasks.closed_book(chosen["rag"])
    assert closed[0].prompt.startswith("<|user|>") and closed[0].answer == chosen["rag"][0].answer
    prompts = [task for family in chosen.values() for task in family] + closed
    judged = tasks.answer(made, encoder, prompts, lambda: (document.docstring for document in documents))
    assert not any(one.unseen for one in judged)
    found = tasks.summary(judged)
    assert found["families"]["rag"]["ended"]["count"] == 5
    assert found["families"]["rag"]["hit_of_answers_not_in_train"] is None
    assert found["families"]["rag"]["hit"]["value"] == 0  # the weights are random
    assert found["ends_well"]["count"] == 13  # the questions without their passages are not among them
    assert tasks.free_running(made, encoder, documents, 4)["loops"]["count"] == 4


@pytest.mark.parametrize("name", ["pydocs-lm-base", "pydocs-lm-small"])
def test_every_cards_table_is_what_the_evaluation_says(name) -> None:
    evaluation = json.loads(assets.data("models", name, "evaluation.json").read_text())
    card = assets.data("models", name, "README.md").read_text()
    assert [bar for bar in BARS if bar.row(evaluation) not in card] == []
    if name == "pydocs-lm-base":
        met = BARS[0].row(evaluation)
        evaluation["results"]["perplexity"]["test"]["value"] = 15.01
        assert "not met" in BARS[0].row(evaluation) and "not met" not in met

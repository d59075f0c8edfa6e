"""Who answers the questions of `questions`: DRAGON, one side alone, the model by itself.

A private note and a public page belong together; a question asks of the note, of the page or of both. The null of a
claim about quality is the router: the side of the larger weight answers alone. To a question of both it can have half
of the answer, so what token-wise aggregation brings over it is what it puts together. One side that reads both
documents in one prompt is the upper end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from ondevice import models
from ondevice.causal_lm import CausalLM
from ondevice.evidence import Estimate, derived
from ondevice.evidence.resampling import Resampled
from ondevice.retrieval import SparseIndex
from ondevice_programs.pair import relevance
from ondevice_programs.pair.decoder import Decoder
from ondevice_programs.pair.node import Documents, Node
from ondevice_programs.pair.prefixes import Prefixes
from ondevice_studies.dragon import lockstep, pair, questions, study
from ondevice_studies.dragon.lockstep import DRAGON, NONE, ON_CLOUD, ON_DEVICE, USED
from ondevice_studies.dragon.questions import HOLDERS, Question
from ondevice_studies.dragon.study import part
from ondevice_studies.speculation.prompts import digest

MODEL = models.SMOLLM2
DOCUMENTS = 2  # of each side
LONGEST = 48  # tokens of an answer
TOGETHER = 10  # questions of a forward
EQUAL, ONE_SIDE, ROUTER = "DRAGON, equal weights", "one side, both documents", "larger side alone"
METHODS = (DRAGON, ON_DEVICE, ON_CLOUD, NONE)
OF_BOTH = (*METHODS, EQUAL, ONE_SIDE)  # methods that answer questions of both
_ROWS = 1 << 30  # bytes of a side's keys and values, which hold all documents, so each is prefilled once
BAR = 20.0  # points over the router, from which token-wise aggregation brings something


def methods(question: Question) -> tuple[str, ...]:
    """Those that answer a question."""
    return OF_BOTH if question.holder == "both" else METHODS


def nodes(model: str = MODEL) -> dict[str, Node]:
    """Both sides as `ondevice-pair` has them, weighed by the reranker. model: a spec of `models.load`."""
    loaded = models.load(model)
    lm = CausalLM(loaded.model)
    scorer = pair.scorer()
    scored = {
        side: relevance.Scored(texts, SparseIndex.build(texts), scorer=scorer)
        for side, texts in questions.documents().items()
    }
    return {
        side: Node(
            lm,
            loaded.tokenizer,
            texts,
            weight_temperature=relevance.TEMPERATURE,
            name=model,
            memory=Prefixes(_ROWS),
        )
        for side, texts in scored.items()
    }


class _Equal(Decoder):
    """A side whose documents count as much as the other side's."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.log_weight = 0.0


def answered(
    nodes: Mapping[str, Node], group: Sequence[Question], method: str, **hooks: Callable[..., Any]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Greedy answers to some questions at once: a row each, and DRAGON's tokens as rows of `lockstep`.

    method: of OF_BOTH. hooks: functions of DRAGON, as of `lockstep.answers`. private, public: whether the answer has
    what the note and what the page have to say.
    """
    decoded = {EQUAL: DRAGON, ONE_SIDE: ON_DEVICE}.get(method, method)
    sessions = [session(nodes, question, method) for question in group]
    tokenizer = nodes["device"].tokenizer
    rows, words = list[dict[str, Any]](), list[dict[str, Any]]()
    for question, (tokens, margin, each) in zip(
        group, lockstep.answers(sessions, decoded, LONGEST, **hooks), strict=True
    ):
        text = str(tokenizer.decode(tokens, skip_special_tokens=True))
        about = {"question": question.name, "holder": question.holder}
        rows.append({
            **about, "method": method, "tokens": len(tokens), "answer_sha": digest(tokens), "margin": margin,
            "right": question.right(text), **question.has(text),
        })  # fmt: skip
        if method == DRAGON:
            words += [
                {**about, "position": number // 2, "word": str(tokenizer.decode([token["token"]])), **token}
                for number, token in enumerate(each)
            ]
    return rows, words


def session(nodes: Mapping[str, Node], question: Question, method: str) -> dict[str, Decoder]:
    """The decoders of a method, by side."""
    if method == ONE_SIDE:
        both = [f"{question.note}\n\n{question.page}"]
        node = replace(nodes["device"], documents=Documents(both, SparseIndex.build(both)))
        return {"device": node.decoder(question.text, 1)[0]}
    decodes = _Equal if method == EQUAL else Decoder
    return {
        side: replace(nodes[side], decodes=decodes).decoder(question.text, DOCUMENTS)[0]
        for side in USED.get(method, nodes)
    }


# What the records say


def routed(answers: pd.DataFrame, tokens: pd.DataFrame) -> pd.DataFrame:
    """The answers, and those of the router: of the side that has the larger share of DRAGON's mixture.

    answers, tokens: the records `answers` and `lockstep`.
    """
    of_device = tokens[tokens["side"] == "device"].groupby("question")["eta"].first()
    on_device = answers["question"].map(of_device) >= 0.5
    chosen = ((answers["method"] == ON_DEVICE) & on_device) | ((answers["method"] == ON_CLOUD) & ~on_device)
    return derived(pd.concat([answers, answers[chosen].assign(method=ROUTER)]), answers, tokens)


def right(compared: pd.DataFrame) -> Resampled:
    """Share of right answers of every method that answered all questions, by holder. compared: of `routed`."""
    return study.shares(compared[~compared["method"].isin((EQUAL, ONE_SIDE))], "right", "method")


def over(compared: pd.DataFrame, holder: str, other: str, method: str = DRAGON) -> Estimate:
    """Points of 100 questions of a holder that a method has right more than another one, the same questions."""
    sample = study.shares(compared[compared["holder"] == holder], "right", "method")
    return sample.estimate(100 * (part(sample, method, holder) - part(sample, other, holder)))


def brings(over_router: Estimate, bar: float = BAR) -> bool:
    """Whether it is as much as the bar, and its interval lies above 0."""
    return over_router.value >= bar and over_router.low > 0


def halves(compared: pd.DataFrame) -> pd.DataFrame:
    """Of the questions of both: by method, percent that are right, and that have each part."""
    both = compared[compared["holder"] == HOLDERS[-1]]
    means = 100 * both.groupby("method")[["right", "private", "public"]].mean()
    return derived(means.reindex((ON_DEVICE, ON_CLOUD, ROUTER, DRAGON, EQUAL, ONE_SIDE)).reset_index(), compared)

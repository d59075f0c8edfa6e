"""Questions whose answer needs a private and a public document (data/corpus/both_sides.jsonl), and who answers them.

The null of a claim about quality is the router: the side of the larger weight answers alone. It can have half of such
an answer, so what token-wise aggregation brings over it is what it puts together. One side that reads both documents in
one prompt is the upper end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from ondevice import assets, models
from ondevice.causal_lm import CausalLM
from ondevice.evidence import Estimate, derived
from ondevice.retrieval import SparseIndex, embedder
from ondevice_programs.pair import relevance
from ondevice_programs.pair.decoder import Decoder
from ondevice_programs.pair.node import Documents, Node
from ondevice_programs.reranker import Reranker
from ondevice_studies.dragon import sides, study
from ondevice_studies.dragon.lockstep import DRAGON, ON_CLOUD, ON_DEVICE
from ondevice_studies.dragon.sides import ROUTER

MODEL = models.SMOLLM2
LIMIT = 48  # tokens of an answer
EQUAL, ONE_SIDE = "DRAGON, equal weights", "one side, both documents"
METHODS = (ON_DEVICE, ON_CLOUD, ROUTER, DRAGON, EQUAL, ONE_SIDE)
BAR = 20.0  # points over the router, from which token-wise aggregation brings something


@dataclass(frozen=True)
class TwoSided:
    """note, page: the private and the public document. answers: of each part, texts of which one must stand in it."""

    name: str
    family: str
    text: str
    note: str
    page: str
    answers: tuple[tuple[str, ...], ...]

    @property
    def holders(self) -> list[str]:
        """Of each part of the answer, whose document has it: device, cloud, both or neither."""
        among = {(True, False): "device", (False, True): "cloud", (True, True): "both", (False, False): "neither"}
        return [among[sides.stands(part, self.note), sides.stands(part, self.page)] for part in self.answers]

    def right(self, answer: str) -> bool:
        """Whether an answer has all parts."""
        return all(sides.stands(part, answer) for part in self.answers)

    def has(self, answer: str) -> dict[str, bool]:
        """By side, whether an answer has all parts that its document has."""
        parts = list(zip(self.holders, self.answers, strict=True))
        return {
            side: all(sides.stands(part, answer) for holder, part in parts if holder == side)
            for side in ("device", "cloud")
        }


def questions() -> list[TwoSided]:
    """All of them, family by family."""
    lines = assets.data("corpus", "both_sides.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        TwoSided(row["id"], row["family"], row["question"], row["note"], row["page"], tuple(map(tuple, row["answers"])))
        for row in map(json.loads, lines)
    ]


def nodes(questions: Sequence[TwoSided], model: str = MODEL, public: int = sides.PUBLIC) -> dict[str, Node]:
    """Both sides as `ondevice-pair` has them, weighed by the reranker. public: passages of the cloud, pages included.

    The device has all notes; the cloud has all pages among passages of documentation.
    """
    loaded = models.load(model)
    lm = CausalLM(loaded.model)
    reranker = Reranker(relevance.RERANKER, memory_budget=relevance.MEMORY, mode="order", calibration=False)
    scorer = relevance.Scorer(reranker, embedder())
    pages = [question.page for question in questions]
    texts = {
        "device": [question.note for question in questions],
        "cloud": [*pages, *sides.texts("test", public - len(pages))["cloud"]],
    }
    return {
        side: Node(
            lm, loaded.tokenizer, relevance.Scored(those, SparseIndex.build(those), scorer=scorer),
            weight_temperature=relevance.TEMPERATURE, name=model,
        )
        for side, those in texts.items()
    }  # fmt: skip


class _Equal(Decoder):
    """A side whose documents count as much as the other side's."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.log_weight = 0.0


def answered(pair: Mapping[str, Node], group: Sequence[TwoSided], k: int = 2) -> list[dict[str, Any]]:
    """A row a question and method of METHODS: greedy answers to some questions at once, in lockstep.

    private, public: whether the answer has what the note and the page have to say. retrieved: how many of the two
    documents were read. log_h_device, log_h_cloud: the sides' weights, which ONE_SIDE has not and EQUAL does not heed.
    """
    texts = [question.text for question in group]
    equal = {side: replace(node, decodes=_Equal) for side, node in pair.items()}
    plain = sides.answers(pair, texts, (ON_DEVICE, ON_CLOUD, DRAGON), k, LIMIT)
    halves = sides.answers(equal, texts, (DRAGON,), k, LIMIT)
    rows = list[dict[str, Any]]()
    for question, answer, half in zip(group, plain, halves, strict=True):
        both = [f"{question.note}\n\n{question.page}"]
        alone = {"device": replace(pair["device"], documents=Documents(both, SparseIndex.build(both)))}
        joint = sides.answers(alone, [question.text], (ON_DEVICE,), 1, LIMIT)[0].tokens[ON_DEVICE]
        tokens_of = {**answer.tokens, ROUTER: answer.tokens[answer.router], EQUAL: half.tokens[DRAGON], ONE_SIDE: joint}
        read = [text for node in pair.values() for text in node.documents.best(question.text, k)[0]]
        for method in METHODS:
            text = str(pair["device"].tokenizer.decode(tokens_of[method], skip_special_tokens=True))
            has = question.has(text)
            rows.append({
                "question": question.name, "family": question.family, "method": method, "right": question.right(text),
                "private": has["device"], "public": has["cloud"], "tokens": len(tokens_of[method]), "text": text,
                "retrieved": sum(document in read for document in (question.note, question.page)),
                **{f"log_h_{side}": log_h for side, log_h in answer.log_weights.items()},
            })  # fmt: skip
    return rows


# What the record says


def over_router(rows: pd.DataFrame, method: str = DRAGON) -> Estimate:
    """Points of 100 questions that a method has right more than the router; the interval takes questions in pairs."""
    sample = study.shares(rows.assign(all=""), "right", "method", by="all")
    return sample.estimate(100 * (sample[method] - sample[ROUTER])[:, 0])


def brings(over: Estimate, bar: float = BAR) -> bool:
    """Whether it is as much as the bar, and its interval lies above 0."""
    return over.value >= bar and over.low > 0


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """By method, percent of questions: right, private, public (those halves), over_router with low and high, points."""
    means = 100 * rows.groupby("method")[["right", "private", "public"]].mean().reindex(METHODS)
    over = [over_router(rows, method) for method in METHODS]
    values = [(estimate.value, *estimate.interval) for estimate in over]
    ends = pd.DataFrame(values, METHODS, ["over_router", "low", "high"])
    return derived(means.join(ends).reset_index(names="method"), rows)

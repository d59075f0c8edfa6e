"""The two sides as nodes of DRAGON, with everything that a set of systems puts into them."""

from __future__ import annotations

from functools import partial

from ondevice import models
from ondevice.causal_lm import CausalLM
from ondevice.retrieval import embedder, embeddings
from ondevice_programs.assistant.drafting import Ahead, drafters
from ondevice_programs.assistant.picking import picked
from ondevice_programs.assistant.systems import drafter_of
from ondevice_programs.pair.node import Documents, Node
from ondevice_programs.pair.relevance import MEMORY, RERANKER, TEMPERATURE, Scorer
from ondevice_programs.reranker import Reranker

MODEL = models.SMOLLM2


class Sides:
    """Makes nodes of one loaded model.

    letters: the set's systems. memory: MB of the reranker, None without a bound. model: a spec of `models.load`, of a
    model that answers. Raises ValueError where the reranker does not fit into the memory, and on such a spec as
    `models.load` does.
    """

    def __init__(self, letters: str, memory: float | None = MEMORY, model: str = MODEL) -> None:
        self.letters = letters
        self.reranker = None
        if "G" in letters:
            self.reranker = Reranker(RERANKER, memory_budget=memory, mode="order", calibration=False)
        self.scorer = Scorer(self.reranker, embedder()) if self.reranker else None
        loaded = models.load(model)
        models.require_trained(loaded.model, "answering")
        self.name, self.tokenizer, self.lm = model, loaded.tokenizer, CausalLM(loaded.model)
        self.decodes = partial(Ahead, drafter=drafters(self.lm.vocabulary)[drafter_of(letters)])

    def node(self, documents: Documents, private: bool = False) -> Node:
        """A side with these documents; embeddings of private ones are kept nowhere."""
        vectors = embedder()(documents.texts) if private else embeddings(documents.texts)
        return Node(
            self.lm,
            self.tokenizer,
            picked(documents, vectors, self.scorer),
            name=self.name,
            decodes=self.decodes,
            weight_temperature=TEMPERATURE,
        )

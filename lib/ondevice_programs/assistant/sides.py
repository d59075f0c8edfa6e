"""The two sides as nodes of DRAGON, with everything that a set of systems puts into them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from ondevice import assets, models
from ondevice.causal_lm import CausalLM
from ondevice.evidence.records import folder, listed, model_checksums
from ondevice.retrieval import embedder, embeddings
from ondevice_papers.diaa.tables import Tables
from ondevice_papers.diaa.warmup import warm_up, warm_up_text
from ondevice_programs.assistant.drafting import Ahead, drafters
from ondevice_programs.assistant.picking import RERANKER, picked
from ondevice_programs.assistant.systems import drafter_of, temperature
from ondevice_programs.pair.node import Documents, Node
from ondevice_programs.reranker import Reranker

MODEL = "pydocs-lm-base"
BUDGET_MB = 150


def calibration() -> Path:
    """The reranker's certified rule for two of ten passages, from validation questions (made by `record`)."""
    return folder() / "assistant" / "grating.calibration.json"


def warm_tables(lm: CausalLM, end: int) -> Tables:
    """DIAA's tables of train text, kept in the user's cache."""
    path = assets.cache_folder("assistant") / f"tables-{model_checksums([MODEL])[MODEL][:16]}.npz"
    if not path.is_file():
        tables = warm_up(lm, warm_up_text("tasks", end))
        with assets.writing(path) as temporary, open(temporary, "wb") as file:
            np.savez(file, tokens=tables.tokens, probabilities=tables.probabilities)
    return Tables(**assets.arrays(path))


def reranker(memory: float | None = BUDGET_MB) -> Reranker:
    """GRATING's, within so many MB, pruning as certified. Raises RecordError where the calibration is not intact."""
    certified = listed(calibration().parent.name, calibration().name)
    return Reranker(RERANKER, memory_budget=memory, calibration=certified, mode="order")


class Sides:
    """Makes nodes of one loaded model. letters: the set's systems. memory: MB of the reranker, None without a bound."""

    def __init__(self, letters: str, memory: float | None = BUDGET_MB) -> None:
        loaded = models.load(MODEL)
        self.lm, self.tokenizer, self.letters = CausalLM(loaded.model), loaded.tokenizer, letters
        self.reranker = reranker(memory) if "G" in letters else None
        drafter = drafter_of(letters)
        end = int(self.tokenizer.eos_token_id)
        tables = warm_tables(self.lm, end) if "L" in drafter else Tables.empty(self.lm.vocabulary)
        self.decodes = partial(Ahead, drafter=drafters(tables)[drafter])

    def node(self, documents: Documents, private: bool = False) -> Node:
        """A side with these documents; embeddings of private ones are kept nowhere."""
        vectors = embedder()(documents.texts) if private else embeddings(documents.texts)
        return Node(
            self.lm,
            self.tokenizer,
            picked(documents, vectors, self.reranker),
            name=MODEL,
            decodes=self.decodes,
            weight_temperature=temperature(self.reranker is not None),
        )

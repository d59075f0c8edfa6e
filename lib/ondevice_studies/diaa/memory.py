"""Figure 2: the memory that plain decoding, a draft model and the tables need, each in a process of its own.

SmolLM2 has no smaller model of its vocabulary. Its own first layers, with an embedding of their own, stand for a draft
model: memory does not depend on what weights say.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch

from ondevice import commands, meters, models
from ondevice.causal_lm import CausalLM
from ondevice.evidence import born
from ondevice.speculation import Drafter, generate
from ondevice.speculation.small_model import SmallModel
from ondevice_papers.diaa.drafter import Diaa
from ondevice_papers.diaa.tables import K, Tables

METHODS = ("vanilla", "SpS", "DIAA")
LAYERS = 10  # of the 30, for the draft model: 64 M of 135 M parameters, as the paper's 1B beside its 3B
BUDGET = 16  # nodes
DECODED = 32  # tokens


def peaks(contexts: Sequence[int]) -> pd.DataFrame:
    """Most resident memory while a prompt is prefilled and 32 tokens are decoded, over that of what is imported.

    Columns: method, context (tokens), megabytes (10^6 bytes). A process a method, contexts rising. The engine is
    transformers', which has the weights once. Linux only.
    """
    rows = []
    for method in METHODS:
        samples = meters.sample(
            [sys.executable, "-m", "ondevice_studies.diaa.memory", method, *map(str, sorted(contexts))]
        )
        rows += [(method, context, samples.peak("resident", phase=str(context)) / 1e6) for context in sorted(contexts)]
    return born(pd.DataFrame(rows, columns=["method", "context", "megabytes"]), "measured")


def main() -> None:
    """What is measured: a method, its model loaded, on prompts of some lengths, in a phase each."""
    method, *contexts = commands.child(*METHODS)
    torch.set_num_threads(1)
    models.import_classes()
    meters.mark("loading")
    loaded = models.load(models.SMOLLM2)
    lm = CausalLM(loaded.model)
    if method == "SpS":
        drafter: Drafter = SmallModel(CausalLM(models.first_layers(loaded, LAYERS).model))
    else:
        drafter = Diaa(_full(lm.vocabulary)) if method == "DIAA" else Drafter()
    meters.trim()  # what loading a file of 4 bits into float32 leaves
    for context in contexts:
        meters.mark(context)
        generate(lm, drafter, (np.arange(int(context)) % 1000).tolist(), DECODED, budget=BUDGET)
    meters.mark("end")


def _full(vocabulary: int) -> Tables:
    """Tables whose every row is full, so that trees are as large as they may be; their ids do not matter."""
    tables = Tables.empty(vocabulary)
    tables.tokens[:] = (np.arange(vocabulary)[:, None] + np.arange(1, K + 1)) % vocabulary
    tables.probabilities[:] = 0.5 ** np.arange(1, K + 1)
    return tables


if __name__ == "__main__":
    main()

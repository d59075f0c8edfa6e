"""The mixture's weights that ship for any model: fitted to SmolLM2's answers to our own validation prompts."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ondevice import chat, models, prompts
from ondevice.causal_lm.lean import engine
from ondevice.causal_lm.loops import loop_start
from ondevice.speculation import fitting, generate
from ondevice.speculation.mixture import Mixture

LONGEST = 256  # tokens of an answer
PASSES = 3  # fits, each with the trees that the weights of the one before it draft
NODES = 8  # of a draft while the answers are made


def fit() -> NDArray[np.float64]:
    """[*LOGITS_SHAPE, sources] weights, each task's prompts a session of its own."""
    loaded = models.load(models.SMOLLM2)
    lm = engine(loaded, threads=1)
    drafter = Mixture()
    sessions: dict[str, list[tuple[list[int], list[int]]]] = {}
    for prompt in prompts.own("validation"):
        ids = chat.prompt_ids(loaded.tokenizer, prompt.text)
        answer = generate(lm, drafter, ids, LONGEST, budget=NODES, eos_token_ids=loaded.eos_token_ids).tokens
        sessions.setdefault(prompt.task, []).append((ids, list(answer[: loop_start(answer)])))
    weights = None
    for _ in range(PASSES):
        weights = fitting.fit(lm, list(sessions.values()), weights)
    assert weights is not None
    return weights


def main() -> None:
    """Fit and ship them: some ten minutes of a CPU core. Run: python -m ondevice_studies.speculation.defaults."""
    torch.set_num_threads(1)
    models.save_arrays("mixture", {"any model": fit()})


if __name__ == "__main__":
    main()

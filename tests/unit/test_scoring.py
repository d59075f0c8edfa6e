"""Scores of texts by a language model, and where an answer begins to loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import random_model

from ondevice.causal_lm.loops import loop_start
from ondevice.causal_lm.scoring import score

VOCABULARY, CONTEXT = 32, 64


def _ids(rng: np.random.Generator, length: int) -> list[int]:
    return rng.integers(2, VOCABULARY, length).tolist()


def test_scores_do_not_depend_on_the_batch() -> None:
    model = random_model("llama", vocabulary=VOCABULARY, context=CONTEXT).eval()
    rng = np.random.default_rng(1)
    prefixes, continuations = [_ids(rng, n) for n in (1, 9, 30)], [_ids(rng, n) for n in (12, 3, 20)]
    together = score(model, prefixes, continuations)
    for prefix, continuation, scored in zip(prefixes, continuations, together, strict=True):
        logits = model(input_ids=torch.tensor([prefix + continuation])).logits[0, len(prefix) - 1 : -1]
        right = torch.log_softmax(logits, -1)[range(len(continuation)), continuation]
        np.testing.assert_allclose(scored.log_probs, right.detach().numpy(), atol=1e-4)
        assert scored.hits.tolist() == (logits.argmax(-1).numpy() == continuation).tolist()
    for prefix in ([], [1] * CONTEXT):
        with pytest.raises(ValueError):
            score(model, [prefix], [[1]])


def test_a_loop_begins_where_an_ngram_stands_again_that_comes_a_third_time() -> None:
    eight = list(range(8))
    assert loop_start([*eight, 50, *eight, 51, *eight]) == 9
    assert loop_start([7] * 10) == 1
    assert [loop_start(ids) for ids in (eight * 2, [7] * 9, [])] == [None] * 3

"""Near the context's end: plain decoding's tokens, as many as fit, whatever the engine, the prompt and the draft."""

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny import random_model

from ondevice import shapes
from ondevice.causal_lm import CausalLM, TokenTree
from ondevice.causal_lm.lean import Lean
from ondevice.models import Loaded
from ondevice.speculation import Draft, Drafter, generate
from ondevice_papers.sdnpu.scheduling import RULES
from ondevice_programs.graphs import exporting, static_graphs
from ondevice_programs.graphs.static_lm import StaticLM

pytestmark = pytest.mark.usefixtures("one_thread")
CONTEXT, LARGE, SMALL, VOCABULARY = 24, 8, 4, 40


@cache
def model():
    sizes = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    return random_model("llama", torch.float32, vocabulary=VOCABULARY, context=CONTEXT, spread=0.3, **sizes).eval()


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    folder = tmp_path_factory.mktemp("limits")
    loaded = Loaded("tiny", "folder", model(), shapes.byte_tokenizer())
    texts = [[1 + position % 30 for position in range(256)]]
    sizes = dict(blocks=2, large=LARGE, small=SMALL, context=CONTEXT, compared=0)
    exporting.export(loaded, folder / "graphs", texts, **sizes)
    graphs = StaticLM(static_graphs.opened(folder / "graphs", folder / "compiled"), RULES["keep both"])
    return {"torch": CausalLM(model()), "lean": Lean(model(), threads=1), "graphs": graphs}


class Wide(Drafter):
    """As many nodes as there may be, of tokens and below nodes that a seed draws."""

    name = "wide"
    drafts_trees = True

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def propose(self, tokens, budget):
        parents = self._random.integers(-1, np.arange(budget).clip(max=4))
        return Draft(self._random.integers(VOCABULARY, size=budget), parents)


@torch.inference_mode()
def plainly(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(min(count, CONTEXT + 1 - len(prompt))):
        tokens.append(int(model()(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("engine", ["torch", "lean", "graphs"])
@settings(max_examples=40)
@given(st.integers(1, CONTEXT), st.integers(1, 2 * CONTEXT), st.integers(1, 70), st.integers(0, 99))
@example(CONTEXT, 1, 70, 0)  # nothing fits but the last token
@example(CONTEXT - 2, 40, 9000, 0)  # wider than the lean engine's rows
def test_an_answer_ends_with_the_context(engines, engine, length, count, budget, seed):
    prompt = np.random.default_rng(seed).integers(VOCABULARY, size=length).tolist()
    log = generate(engines[engine], Wide(seed), prompt, count, budget=budget)
    assert list(log.tokens) == plainly(prompt, count)


@pytest.mark.parametrize(
    ("engine", "tree", "limit"), [("torch", [-1, 0], CONTEXT), ("lean", [-1] * 1030, CONTEXT), ("graphs", [-1] * 6, 28)]
)
def test_what_does_not_fit_is_refused_before_it_begins(engines, engine, tree, limit):
    lm = engines[engine]
    with pytest.raises(ValueError, match=str(CONTEXT)):
        generate(lm, Drafter(), [1] * (CONTEXT + 1), 1)
    session = lm.start()
    session.prefill([1] * (CONTEXT - 1))
    with pytest.raises(ValueError, match=f"{limit}"):
        session.verify(TokenTree([1] * len(tree), tree))
    assert session.length == CONTEXT - 1

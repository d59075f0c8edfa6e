"""The verify loop: identity with plain decoding, ends, limits, and drafts that cannot be."""

from __future__ import annotations

import pytest
import torch
from sampling import Sampling
from transformers import LlamaConfig, LlamaForCausalLM

from ondevice.causal_lm import CausalLM
from ondevice.speculation import Draft, Drafter, generate, greedy
from ondevice.speculation.loop import accepted, verifiable
from ondevice_papers.sdnpu.drafter import pooled

VOCABULARY = 40


@pytest.fixture(scope="module")
def lm() -> CausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=96, **shape)
    return CausalLM(LlamaForCausalLM(config).double())


class Oracle(Drafter):
    """Knows the output, and drafts it as one branch among wrong ones; every third step it is wrong altogether."""

    name, drafts_trees = "oracle", True

    def __init__(self, output: list[int], depth: int = 5) -> None:
        self.output, self.depth, self.steps = output, depth, 0

    def propose(self, tokens, budget):
        self.steps += 1
        right = self.output[len(tokens) :][: self.depth]
        wrong = [[(token + 1) % VOCABULARY] * 2 for token in right[:1]]
        return pooled(wrong if self.steps % 3 == 0 else [*wrong, right], budget)


def plain(lm: CausalLM, prompt: list[int], limit: int) -> list[int]:
    ids = torch.tensor([prompt])
    found = lm.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False)
    return found[0, len(prompt) :].tolist()


@pytest.mark.parametrize("prompt", [[3], [1, 2, 3, 4, 5, 6]])
def test_drafts_do_not_change_the_output_and_save_steps(lm, prompt):
    right = plain(lm, prompt, 30)
    vanilla = generate(lm, Drafter(), prompt, 30)
    drafted = generate(lm, Oracle([*prompt, *right]), prompt, 30)
    assert list(vanilla.tokens) == list(drafted.tokens) == right
    assert len(vanilla.steps) == 29
    assert len(drafted.steps) < 12
    assert sum(step.emitted for step in drafted.steps) == 29
    assert all(step.accepted < step.emitted for step in drafted.steps)


def test_nothing_is_drawn_behind_an_end(lm):
    right = list(generate(lm, Drafter(), [1, 2, 3], 8, choice=Sampling(seed=2)).tokens)
    said = []
    for drafter in (Drafter(), Oracle([1, 2, 3, *right])):
        choice = Sampling(seed=2)  # one over both requests: a draw too many in the first changes the second
        options = {"choice": choice, "eos_token_ids": {right[3]}}
        said.append([generate(lm, drafter, [x, 2, 3], 8, **options).tokens for x in (1, 4)])
    assert said[0] == said[1]


def test_the_cuts_of_sampling_are_those_of_transformers():
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    torch.manual_seed(1)
    for _ in range(20):
        logits = torch.randn(50, dtype=torch.float64) * 2
        scores = TemperatureLogitsWarper(0.8)(None, logits[None])
        scores = TopPLogitsWarper(0.7)(None, TopKLogitsWarper(12)(None, scores))
        assert torch.allclose(Sampling(0.8, 12, 0.7).probabilities(logits), scores[0].softmax(0))


def test_the_walk_takes_the_branch_that_the_model_says():
    draft = Draft([5, 6, 7, 8, 9], [-1, -1, 1, 1, 3])
    logits = torch.zeros(6, 12)
    for row, token in enumerate([6, 0, 8, 0, 9, 11]):
        logits[row, token] = 1.0
    assert accepted(draft, logits, greedy) == ([1, 3, 4], [6, 8, 9, 11])


def test_a_draft_is_cut_by_nodes_and_by_depth():
    draft = Draft([1, 2, 3, 4, 5], [-1, 0, -1, 1, 2], [1, 1, 2, 1, 1])
    cut = draft.within(5, 2)
    assert (cut.tokens.tolist(), cut.parents.tolist(), cut.ranks.tolist()) == (
        [1, 2, 3, 5],
        [-1, 0, -1, 2],
        [1, 1, 2, 1],
    )
    assert draft.within(3, 9).tokens.tolist() == [1, 2, 3]
    assert len(draft.within(5, 0)) == 0
    trie = pooled([[1, 2, 3], [1, 4], [5]], 4)
    assert (trie.tokens.tolist(), trie.parents.tolist()) == ([1, 2, 3, 4], [-1, 0, 1, 0])


def test_the_first_chain_is_of_first_children():
    class Chains:
        tree_refusal = "only chains"

    tree = Draft([4, 5, 6, 7, 8, 9], [-1, -1, 1, 0, 0, 3], [1, 2, 1, 1, 2, 1])
    cut = verifiable(Chains, tree)
    assert (cut.tokens.tolist(), cut.parents.tolist()) == ([4, 7, 9], [-1, 0, 1])
    chain = Draft.chain([4, 5])
    assert verifiable(Chains, chain) is chain and len(verifiable(Chains, Draft((), ()))) == 0
    Chains.tree_refusal = None
    assert verifiable(Chains, tree) is tree


class Foreign(Drafter):
    name, vocabulary = "tables", 7


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda lm: generate(lm, Drafter(), [], 5), "prompt.*96"),
        (lambda lm: generate(lm, Drafter(), [1], 5, budget=0), "budget.*0"),
        (lambda lm: generate(lm, Foreign(), [1], 5), "tables.*7.*40"),
        (lambda lm: Draft([1, 2], [-1, 5]), "parents"),
        (lambda lm: Draft([1, 2], [-1]), "parent"),
    ],
)
def test_bad_input_is_one_clear_error(lm, call, message):
    with pytest.raises(ValueError, match=message):
        call(lm)

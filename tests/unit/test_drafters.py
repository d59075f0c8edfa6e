"""The table of drafters: what its rows say is what their drafters do, and any door takes their names."""

import re

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ondevice import assets
from ondevice.causal_lm import CausalLM
from ondevice.speculation import Draft, Drafter, custom_generate, generate
from ondevice.speculation.custom_generate import speculative
from ondevice.speculation.draft import EMPTY
from ondevice.speculation.drafters import DRAFTERS, create

V = 384
PROMPT = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=128, pad_token_id=0, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_row_says_what_its_drafter_drafts(name):
    drafter, entry = create(name, V), DRAFTERS[name]
    assert drafter.drafts_trees == entry.trees and drafter.vocabulary in (None, V)
    drafter.begin(PROMPT)
    draft = drafter.propose([*PROMPT, 7], 4)
    assert len(draft) <= 4 and (len(draft) > 0 or entry.reads == "logits")  # which it has not seen yet


def test_any_door_takes_a_name_with_its_authors_budget(model, monkeypatch):
    budgets, real = [], custom_generate.generate
    monkeypatch.setattr(
        custom_generate, "generate", lambda *given, **named: budgets.append(named["budget"]) or real(*given, **named)
    )
    ids = torch.tensor([PROMPT])
    asked = {"max_new_tokens": 12, "do_sample": False}
    plain = model.generate(ids, **asked).tolist()
    for given in ({"drafter": "racer"}, {"drafter": "racer", "budget": 3}, {"drafter": "goose"}):
        assert model.generate(ids, **asked, custom_generate=speculative(**given)).tolist() == plain
    assert budgets == [63, 3, 64]


def test_a_budget_of_nothing_is_refused_with_a_name_as_with_a_drafter(model):
    """It counted as none given, and the authors' took its place."""
    with pytest.raises(ValueError, match="at least one node, not 0"):
        model.generate(torch.tensor([PROMPT]), max_new_tokens=4, custom_generate=speculative("racer", budget=0))


class Wrong(Drafter):
    """Breaks one of the rules that make drafters comparable."""

    name = "wrong"

    def __init__(self, proposal):
        self.proposal = proposal

    def propose(self, tokens, budget):
        return self.proposal(tokens)


@pytest.mark.parametrize(
    ("proposal", "words"),
    [
        (lambda tokens: Draft.chain([1, 2, 3, 4, 5]), "wrong proposed 5 nodes, where at most 4"),
        (lambda tokens: Draft.chain([1, V]), f"wrong proposed the token {V}; the model's ids end at {V - 1}"),
        (lambda tokens: Draft.chain([-1]), "wrong proposed the token -1"),
        (lambda tokens: [1, 2], "wrong proposed a list, not a Draft"),
        (lambda tokens: tokens.append(1) or EMPTY, "wrong changed the text"),
    ],
)
def test_a_proposal_that_would_compare_unfairly_is_refused(model, proposal, words):
    with pytest.raises(ValueError, match=words):
        generate(CausalLM(model), Wrong(proposal), PROMPT, 12, budget=4)


def test_an_unknown_name_is_refused_before_anything_runs():
    with pytest.raises(ValueError, match=r"'gose'.*goose"):
        speculative("gose")


def test_the_page_has_the_table():
    page = (assets.ROOT / "docs" / "drafters.md").read_text(encoding="utf-8").partition("## By name")[2]
    rows = re.findall(r"^\| `([a-z-]+)` \| .* \| (\w+) \| (\w+) \| (\d*) ?\|$", page, re.M)
    shown = {name: (reads, kind, budget) for name, reads, kind, budget in rows}
    assert shown == {
        name: (entry.reads, "trees" if entry.trees else "chains", str(entry.budget or ""))
        for name, entry in DRAFTERS.items()
    }

"""sd.npu's drafter: any settings say what greedy decoding says, and its history holds finished answers alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from every_drafter import CHAINS_ONLY, CONTEXT, KINDS, V, plain, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from ondevice.speculation import Drafter, Generation, generate
from ondevice_papers.sdnpu.calibration import PromptCalibration
from ondevice_papers.sdnpu.drafter import LMAX, SdNpu
from ondevice_papers.sdnpu.history import History
from ondevice_papers.sdnpu.retrieval import Pld, Sam, Suffixes
from ondevice_papers.sdnpu.reuse import Reuse

token = st.integers(0, V - 1)
budgets = st.integers(1, 40)
few = settings(max_examples=6)
PROMPTS = tuple(
    tuple(np.random.default_rng(seed).integers(0, V, size).tolist()) for seed, size in enumerate((1, 2, 5, 9, 17, 30))
)
prompts = st.one_of(
    st.sampled_from(PROMPTS),
    st.lists(token, min_size=1, max_size=CONTEXT).map(tuple),
    st.builds(lambda part, times: tuple(part * times)[:CONTEXT], st.lists(token, min_size=1, max_size=7), st.just(9)),
)

bases = st.sampled_from([lambda: None, Pld, lambda: Sam(V), Suffixes])
makes = st.builds(
    lambda base, table, again: lambda: SdNpu(base(), table(), again()),
    bases,
    st.sampled_from([lambda: None, PromptCalibration]),
    st.sampled_from([lambda: None, Reuse]),
)
Make = Callable[[], SdNpu]
BOTH: Make = lambda: SdNpu(Sam(V), PromptCalibration(), Reuse())  # noqa: E731


def check(kind: str, drafter: Drafter, prompt: Sequence[int], limit: int, budget: int, end: int) -> Generation:
    """The log, once the output is the right one. end: the place in it of a token that ends it; beyond it, none does."""
    right = plain(tiny(kind), prompt, limit)
    ends = set(right[end : end + 1])
    right = right[: next((place + 1 for place, said in enumerate(right) if said in ends), len(right))]
    found = generate(tiny(kind), drafter, prompt, limit, budget=budget, eos_token_ids=ends)
    assert list(found.tokens) == right
    assert all(step.drafted <= budget for step in found.steps)
    assert sum(step.emitted for step in found.steps) == len(right) - 1
    return found


@pytest.mark.parametrize("kind", KINDS)
@few
@given(
    make=makes, first=prompts, second=st.none() | prompts, limit=st.integers(1, 40), budget=budgets,
    end=st.integers(0, 80),
)  # fmt: skip
def test_any_settings_say_what_plain_decoding_says(kind, make, first, second, limit, budget, end):
    drafter = make()
    for prompt in (first, first if second is None else second, first):
        found = check(kind, drafter, prompt, limit, budget, end)
        assert all(step.drafted < LMAX for step in found.steps)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_drafts_are_right_at_times_and_wrong_at_times(kind):
    """Else identity would be shown for drafts that are never accepted, or never rejected."""
    drafter = BOTH()
    steps = [step for place in (1, 3, 1) for step in check(kind, drafter, PROMPTS[place], 40, 31, 99).steps]
    assert 0 < sum(step.accepted for step in steps) < sum(step.drafted for step in steps)


@pytest.mark.parametrize("kind", CHAINS_ONLY)
def test_where_trees_cannot_be_verified_every_draft_is_a_chain(kind):
    steps = check(kind, BOTH(), PROMPTS[4], 30, 31, 99).steps
    assert all(step.depth == step.drafted for step in steps)


def test_the_history_grows_by_an_answer_when_it_is_finished_and_by_nothing_else():
    history, seen = History(V), []

    class Looking(SdNpu):
        def propose(self, tokens, budget):
            seen.append(list(history.responses))
            return super().propose(tokens, budget)

    drafter = Looking(Sam(V, history), PromptCalibration(), Reuse())
    said = []
    for prompt in PROMPTS[2:5]:
        seen.clear()
        found = generate(tiny("llama"), drafter, prompt, 20)
        assert seen and all(responses == said for responses in seen)
        said.append(tuple(found.tokens))  # without the prompt
        assert history.responses == said

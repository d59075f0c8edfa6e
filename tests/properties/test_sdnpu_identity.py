"""sd.npu's drafter: any settings say what greedy decoding says, and no draft knows what has not been said yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b

import numpy as np
import pytest
import torch
from every_drafter import CHAINS_ONLY, CONTEXT, KINDS, V, plain, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from ondevice.speculation import Drafter, Generation, Verified, generate
from ondevice_papers.sdnpu.calibration import Calibration
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
    st.sampled_from([lambda: None, Calibration]),
    st.sampled_from([lambda: None, Reuse]),
)
Make = Callable[[], SdNpu]
BOTH: Make = lambda: SdNpu(Sam(V), Calibration(), Reuse())  # noqa: E731


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
    for drafter in (Pld(), Sam(V), SdNpu(Pld(), Calibration()), SdNpu(Pld(), None, Reuse())):
        steps = check(kind, drafter, PROMPTS[4], 30, 31, 99).steps
        assert all(step.depth == step.drafted for step in steps)


# Leakage


def logits_after(text: Sequence[int], coming: int | None) -> torch.Tensor:
    """[V], from the text alone, but for the token that comes where the text is the output's so far."""
    seed = int.from_bytes(blake2b(repr(list(text[-2:])).encode(), digest_size=4).digest(), "big")
    found = torch.randn(V, generator=torch.Generator().manual_seed(seed))
    if coming is not None:
        found[coming] = 9.0
    return found


def drafts(drafter: Drafter, prompt: Sequence[int], output: Sequence[int]) -> dict[int, list[tuple[int, int]]]:
    """What is drafted for an output, by the number of output tokens known at that time."""
    text, length, found = [*prompt, *output], len(prompt) + 1, {}
    drafter.begin(prompt)
    if drafter.wants_prefill:
        following = [None] * (len(prompt) - 1) + [output[0]]
        rows = [logits_after(prompt[: end + 1], said) for end, said in enumerate(following)]
        drafter.prefilled(0, torch.stack(rows))
    while length < len(text):
        draft = drafter.propose(text[:length], 31)
        tokens, parents = draft.tokens.tolist(), draft.parents.tolist()
        found[length - len(prompt)] = list(zip(parents, tokens, strict=True))
        paths: list[list[int]] = [[]]
        for said, parent in zip(tokens, parents, strict=True):
            paths.append([*paths[parent + 1], said])
        path: list[int] = []
        children = dict(
            reversed([((parent, said), node) for node, (parent, said) in enumerate(found[length - len(prompt)])])
        )
        while length + len(path) < len(text):
            node = children.get((path[-1] if path else -1, text[length + len(path)]))
            if node is None:
                break
            path.append(node)
        on = {0, *(node + 1 for node in path)}
        rows = []
        for row, above in enumerate(paths):
            place = length + len(above)
            rows.append(
                logits_after([*text[:length], *above], text[place] if row in on and place < len(text) else None)
            )
        emitted = text[length : length + len(path) + 1]
        drafter.observe(Verified(text[length - 1], draft, torch.stack(rows), path, emitted))
        length += len(emitted)
    drafter.end(text)
    return found


def same_until_they_part(one: Drafter, other: Drafter, prompt, begin, first, second) -> None:
    """Two outputs that begin alike have the same drafts until the first token that differs."""
    shorter = min(len(first), len(second))
    parted = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    mine, theirs = (drafts(drafter, prompt, [*begin, *tail]) for drafter, tail in ((one, first), (other, second)))
    known = len(begin) + (shorter - 1 if parted is None else parted)  # nothing is drafted behind the end of the shorter
    early = {length for length in {*mine, *theirs} if length <= known}
    assert early and {length: mine.get(length) for length in early} == {length: theirs.get(length) for length in early}


few_tokens = st.lists(st.integers(0, 7), min_size=1, max_size=12)  # so that texts repeat, and drafts are made and used


@given(
    make=makes | st.just(BOTH), earlier=st.lists(few_tokens, max_size=2), prompt=few_tokens,
    begin=few_tokens, first=few_tokens, second=few_tokens,
)  # fmt: skip
def test_a_draft_depends_on_finished_requests_and_what_was_said(make, earlier, prompt, begin, first, second):
    pair = make(), make()
    for drafter in pair:
        for output in earlier:
            drafts(drafter, prompt, output)
    same_until_they_part(*pair, prompt, begin, first, second)


def test_an_answer_that_leaks_is_found():
    """The check above fails for a history that holds the answer to come."""
    begin, first, second = [1, 2], [3, 4, 5, 6, 7], [3, 8, 9, 10, 11]
    pair = BOTH(), BOTH()
    same_until_they_part(*pair, [0, 1], begin, first, second)
    pair = BOTH(), BOTH()
    for drafter, tail in zip(pair, (first, second), strict=True):
        drafter.base.history.append([*begin, *tail])
    with pytest.raises(AssertionError):
        same_until_they_part(*pair, [0, 1], begin, first, second)


def test_the_history_grows_by_an_answer_when_it_is_finished_and_by_nothing_else():
    history, seen = History(V), []

    class Looking(SdNpu):
        def propose(self, tokens, budget):
            seen.append(list(history.responses))
            return super().propose(tokens, budget)

    drafter = Looking(Sam(V, history), Calibration(), Reuse())
    said = []
    for prompt in PROMPTS[2:5]:
        seen.clear()
        found = generate(tiny("llama"), drafter, prompt, 20)
        assert seen and all(responses == said for responses in seen)
        said.append(tuple(found.tokens))  # without the prompt
        assert history.responses == said

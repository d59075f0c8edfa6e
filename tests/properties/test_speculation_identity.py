"""Any drafter, model, budget, limit and end: the output is greedy decoding's without a cache, and the log adds up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from every_drafter import (
    CHAINS_ONLY,
    CONTEXT,
    DRAFTERS,
    KINDS,
    SHORT,
    SKIPPABLE,
    V,
    plain,
    target,
    targets,
    tiny,
    warm_tables,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from lookup_tables import random_tables, well_formed
from tiny import random_model

from ondevice.causal_lm import CausalLM
from ondevice.speculation import Draft, Drafter, Generation, Verified, generate, loop
from ondevice.speculation.cacheback import Followers
from ondevice.speculation.layer_skipping import LayerSkipping
from ondevice.speculation.mixture import Mixture
from ondevice.speculation.prompt_lookup import PromptLookup
from ondevice.speculation.racer import Racer
from ondevice.speculation.small_model import SmallModel
from ondevice.speculation.token_recycling import TokenRecycling
from ondevice_papers.diaa import ambiguities
from ondevice_papers.diaa.drafter import RECYCLING, Diaa, every_node
from ondevice_papers.diaa.tables import Tables, overwrite
from ondevice_papers.diaa.tree import Tree, grow
from ondevice_papers.sdnpu.drafter import pooled

LONGEST = 24  # new tokens of most requests
token = st.integers(0, V - 1)
few = settings(max_examples=settings().max_examples // 10)  # of the profile: 3 in the gate, 20 in make test-long
many = settings(max_examples=settings().max_examples // 3)


@dataclass(frozen=True)
class Request:
    """ends: places in the plain output; the tokens said there end it."""

    prompt: tuple[int, ...]
    limit: int = LONGEST
    budget: int = 80
    ends: tuple[int, ...] = ()


def repeated(part: list[int], length: int) -> list[int]:
    return (part * length)[:length]


PROMPTS = tuple(
    tuple(np.random.default_rng(seed).integers(0, V, size).tolist()) for seed, size in enumerate((1, 2, 5, 9, 17, 30))
)
prompts = st.one_of(
    st.sampled_from(PROMPTS),
    st.lists(token, min_size=1, max_size=36),
    st.builds(repeated, st.lists(token, min_size=1, max_size=7), st.integers(1, 40)),
    st.builds(repeated, st.lists(token, min_size=1, max_size=7), st.integers(CONTEXT - 12, CONTEXT)),
).map(tuple)
limits = st.sampled_from([LONGEST, 40]) | st.integers(1, LONGEST)
budgets = st.integers(1, 80)
ends = st.just(()) | st.lists(st.integers(1, LONGEST), min_size=1, max_size=2).map(tuple)
single = st.builds(Request, prompts, limits, budgets, ends)


@st.composite
def requests(draw: st.DrawFn) -> list[Request]:
    """One or two; the second may have the prompt of the first, which the drafter then knows."""
    first = draw(single)
    second = draw(st.none() | single | single.map(lambda other: replace(other, prompt=first.prompt)))
    return [first, second] if second else [first]


def corpus_of(of: CausalLM) -> list[list[int]]:
    """What the model says after some prompts."""
    return [[*prompt, *plain(of, prompt, LONGEST)] for prompt in PROMPTS]


@contextmanager
def counted(of: CausalLM) -> Iterator[list[int]]:
    """The rows of each of this target's forwards inside."""
    rows: list[int] = []

    def forward(tokens: torch.Tensor, *arguments: object, **options: object) -> torch.Tensor:
        rows.append(len(tokens))
        return CausalLM.forward(of, tokens, *arguments, **options)

    of.forward = forward
    try:
        yield rows
    finally:
        del of.forward


def check(of: CausalLM, drafter: Drafter, request: Request) -> Generation:
    """The request's log, once its output is the right one and all its numbers fit each other."""
    right = plain(of, request.prompt, request.limit)
    ends = {right[place % len(right)] for place in request.ends}
    right = right[: next((place + 1 for place, said in enumerate(right) if said in ends), len(right))]
    with counted(of) as rows:
        found = generate(of, drafter, request.prompt, request.limit, budget=request.budget, eos_token_ids=ends)
    assert list(found.tokens) == right
    assert found.prompt == len(request.prompt) and found.ended == bool(ends)
    assert rows == [len(request.prompt), *(1 + step.drafted for step in found.steps)]  # one forward a step, no more
    adds_up(found, request.budget)
    return found


def adds_up(found: Generation, budget: int) -> None:
    """The log against itself."""
    assert sum(step.emitted for step in found.steps) == len(found.tokens) - 1
    length = found.prompt
    for step in found.steps:
        assert step.cached == length
        length += step.emitted
        assert 0 <= step.accepted <= step.depth <= step.drafted <= budget
        assert step.cached + 1 + step.depth <= CONTEXT
    whole = found.steps[:-1] if found.ended else found.steps
    assert all(step.emitted == step.accepted + 1 for step in whole)
    assert all(0 <= step.emitted - step.accepted <= 1 for step in found.steps)


# The models


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_vary_within_and_between_prompts(kind: str) -> None:
    """Else a drafter that says the wrong thing could be right by chance."""
    for layers in (2, 4) if kind in SKIPPABLE else (2,):
        said = [tuple(plain(tiny(kind, layers), prompt, LONGEST)) for prompt in PROMPTS]
        assert len(set(said)) == len(PROMPTS)
        assert len({output[0] for output in said}) >= 4 and np.mean([len(set(output)) for output in said]) > 7


@pytest.mark.parametrize("name", [name for name in DRAFTERS if name != "vanilla"])
def test_every_drafter_is_right_at_times_and_wrong_at_times(name: str) -> None:
    """Else identity would be shown for drafts that are never accepted, or never rejected."""
    found: list[Generation] = []
    for kind in ("llama", "qwen3"):
        of = target(kind, name)
        drafter = DRAFTERS[name](of, corpus_of(of))
        found += [check(of, drafter, Request(PROMPTS[place], 30)) for place in (1, 3, 1)]
    steps = [step for one in found for step in one.steps]
    assert 0 < sum(step.accepted for step in steps) < sum(step.drafted for step in steps)


# Every drafter


@pytest.mark.parametrize(("kind", "name"), targets())
@few
@given(given_requests=requests())
def test_every_drafter_says_what_plain_decoding_says(kind: str, name: str, given_requests: list[Request]) -> None:
    of = target(kind, name)
    drafter = DRAFTERS[name](of, corpus_of(of))
    for request in given_requests:
        check(of, drafter, request)


updates = st.sampled_from([overwrite, ambiguities.replace, ambiguities.union])
growths = st.sampled_from([
    grow, partial(grow, delta=0.5, alpha=1.0, tau=0.0), partial(grow, tau=0.2), ambiguities.grow_counting_root,
])  # fmt: skip
learning = st.sampled_from([every_node, ambiguities.accepted_only])


def tables(kind: str) -> st.SearchStrategy[Tables]:
    """Cold, wrong, or warm, with few candidates and many; fresh ones for every example, as drafters write into them."""
    k = st.sampled_from([1, 3, 8])
    cold = st.builds(Tables.empty, st.just(V), k)
    return st.one_of(cold, st.builds(random_tables, st.integers(0, 9), k), st.builds(warm_tables, st.just(tiny(kind))))


@pytest.mark.parametrize("kind", KINDS)
@many
@given(data=st.data(), given_requests=requests())
def test_any_settings_of_diaa(kind: str, data: st.DataObject, given_requests: list[Request]) -> None:
    drafter = data.draw(
        st.builds(
            Diaa, tables(kind), grow=growths, update=updates, learns=learning, reads_prompt=st.booleans(),
            template=st.sampled_from([None, RECYCLING]), refresh=st.sampled_from([1, 3]), stale=st.booleans(),
        )
    )  # fmt: skip
    for request in given_requests:
        check(tiny(kind), drafter, request)
    assert well_formed(drafter.tables)


# Any drafts


@dataclass(frozen=True)
class Sketch:
    """A tree to draft: parents, and each node's token; None stands for what the model says at the node's depth."""

    parents: tuple[int, ...]
    tokens: tuple[int | None, ...]


@st.composite
def sketches(draw: st.DrawFn, most: int = 14) -> Sketch:
    """Siblings may have equal tokens, right ones too."""
    n = draw(st.integers(0, most))
    parents = tuple(draw(st.integers(-1, node - 1)) for node in range(n))
    return Sketch(parents, tuple(draw(st.none() | token) for _ in range(n)))


class Guided(Drafter):
    """Knows prompt and output, and drafts sketches in turn, whether or not they keep within the budget."""

    name, drafts_trees = "guided", True

    def __init__(self, text: Sequence[int], drawn: Sequence[Sketch]) -> None:
        self.text, self.turns, self.seen = list(text), cycle(drawn), list[Verified]()

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        sketch = next(self.turns)
        depths = Draft([0] * len(sketch.parents), sketch.parents).depths
        comes = [*self.text[len(tokens) :], *[0] * len(depths)]
        said = [comes[depth - 1] if said is None else said for said, depth in zip(sketch.tokens, depths, strict=True)]
        return Draft(said[:budget], sketch.parents[:budget])

    def observe(self, step: Verified) -> None:
        self.seen.append(step)


def walked(step: Verified) -> None:
    """The path is one of the draft's, holds what was emitted, and ends only where no child is what came next."""
    parents, tokens = step.draft.parents.tolist(), step.draft.tokens.tolist()
    assert step.logits.shape == (1 + len(step.draft), V)
    above = -1
    for node, said in zip(step.path, step.emitted, strict=False):
        assert parents[node] == above and tokens[node] == said
        above = node
    if len(step.emitted) > len(step.path):
        assert (above, step.emitted[-1]) not in zip(parents, tokens, strict=True)


@pytest.mark.parametrize("kind", KINDS)
@many
@given(request=single, drawn=st.lists(sketches(), min_size=1, max_size=4))
def test_any_trees_with_any_siblings(kind: str, request: Request, drawn: list[Sketch]) -> None:
    drafter = Guided([*request.prompt, *plain(tiny(kind), request.prompt, request.limit)], drawn)
    check(tiny(kind), drafter, request)
    for step in drafter.seen:
        walked(step)


class Knowing(Drafter):
    """Drafts as many of the tokens to come as the budget allows."""

    def __init__(self, text: Sequence[int]) -> None:
        self.text = list(text)

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        return Draft.chain(self.text[len(tokens) :][:budget])


@pytest.mark.parametrize("kind", KINDS)
@many
@given(prompt=prompts, limit=limits, budget=budgets)
def test_what_is_always_right_is_accepted_whole(kind: str, prompt: tuple[int, ...], limit: int, budget: int) -> None:
    right = plain(tiny(kind), prompt, limit)
    found = check(tiny(kind), Knowing([*prompt, *right]), Request(prompt, limit, budget))
    assert all(step.accepted == step.drafted for step in found.steps)
    assert len(found.steps) == -(-(len(right) - 1) // (budget + 1))


@pytest.mark.parametrize("kind", KINDS)
def test_an_end_comes_first_within_and_after_an_accepted_path(kind: str) -> None:
    """Drafts of five: an end is the first token of all, one of the five, or the model's own after them."""
    prompt, inside, after = PROMPTS[2], 0, 0
    right = plain(tiny(kind), prompt, LONGEST)
    for place in {right.index(said) for said in right}:
        found = check(tiny(kind), Knowing([*prompt, *right]), Request(prompt, LONGEST, 5, (place,)))
        if found.steps:
            last = found.steps[-1]
            inside += last.accepted == last.emitted
            after += last.accepted == 5 and last.emitted == 6
        else:
            assert place == 0
    assert inside >= 4 and after >= 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("left", [0, 1, 2, 7])
def test_the_context_ends_the_output_though_more_is_drafted(kind: str, left: int) -> None:
    """`left` rows are free after the prompt; the last token needs none."""
    prompt = tuple(repeated([3, 1, 4, 1, 5, 9, 2], CONTEXT - left))
    for name in DRAFTERS:
        if not name.startswith("layer skipping"):
            drafter = DRAFTERS[name](tiny(kind), corpus_of(tiny(kind)))
            assert len(check(tiny(kind), drafter, Request(prompt, 40)).tokens) == left + 1
    right = plain(tiny(kind), prompt, 40)
    found = check(tiny(kind), Knowing([*prompt, *right, *right]), Request(prompt, 40))
    assert len(found.steps) == min(left, 1)


# Models that can verify only chains


@pytest.mark.parametrize(("kind", "name"), targets(tuple(CHAINS_ONLY)))
def test_where_trees_cannot_be_verified_every_drafter_drafts_chains(kind: str, name: str) -> None:
    of = target(kind, name)
    drafter = DRAFTERS[name](of, corpus_of(of))
    for prompt in (PROMPTS[0], PROMPTS[4], PROMPTS[0]):
        log = check(of, drafter, Request(prompt))
        assert all(step.depth == step.drafted for step in log.steps)


@pytest.mark.parametrize("kind", CHAINS_ONLY)
@many
@given(request=single, drawn=st.lists(sketches(), min_size=1, max_size=4), declared=st.booleans())
def test_of_any_tree_the_first_chain_is_verified_where_nothing_else_can_be(
    kind: str, request: Request, drawn: list[Sketch], declared: bool
) -> None:
    drafter = Guided([*request.prompt, *plain(tiny(kind), request.prompt, request.limit)], drawn)
    drafter.drafts_trees = declared  # what it says of itself; the loop looks at the draft
    check(tiny(kind), drafter, request)
    for step in drafter.seen:
        assert step.draft.parents.tolist() == list(range(-1, len(step.draft) - 1))
        walked(step)


# Bad input


@pytest.mark.parametrize(("kind", "layers"), [("opt", 4), ("gpt_neox", 4), ("bloom", 4), ("llama", 2)])
def test_layers_that_cannot_be_skipped_are_refused(kind: str, layers: int) -> None:
    with pytest.raises(ValueError, match="self_attn"):
        LayerSkipping(tiny(kind, layers))


def foreign() -> CausalLM:
    """A Llama with another vocabulary."""
    return CausalLM(random_model("llama", vocabulary=7, context=CONTEXT, num_hidden_layers=3))


def too_many(tables: Tables, root: int, budget: int) -> Tree:
    """An edited growth that forgets the budget."""
    return Tree([1] * (budget + 1), [-1] * (budget + 1), [1] * (budget + 1))


def circular(tables: Tables, root: int, budget: int) -> Tree:
    """An edited growth whose nodes are each other's parents."""
    return Tree([1, 2], [1, 0], [1, 1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda of: generate(of, Drafter(), [], 5), f"prompt.* {CONTEXT}"),
        (lambda of: generate(of, Drafter(), [1] * (CONTEXT + 1), 5), f"prompt.* {CONTEXT}"),
        (lambda of: generate(of, Drafter(), [1], 0), "token.* 0"),
        (lambda of: generate(of, Drafter(), [1], 5, budget=0), "budget.* 0"),
        (lambda of: Draft([1, 2], [-1, 5]), "parents"),
        (lambda of: Draft([1, 2], [-1]), "parent"),
        (lambda of: generate(of, SmallModel(foreign()), [1], 5), f"small model .* 7 .* {V}"),
        (lambda of: generate(of, LayerSkipping(foreign()), [1], 5), f"layer skipping .* 7 .* {V}"),
        (lambda of: generate(of, Diaa(Tables.empty(V + 1)), [1], 5), f" 49 .* {V}"),
        (lambda of: Mixture(np.zeros((7, 7, 5))), r"\[7, 7, 5\]"),
        (lambda of: Tables.empty(V, 0), " 0"),
        (lambda of: generate(of, Diaa(Tables.empty(V), grow=too_many), [1], 5), "65 nodes.* 64"),
        (lambda of: generate(of, Diaa(Tables.empty(V), grow=circular), [1], 5), "parents.*nodes"),
        (lambda of: TokenRecycling(7), " 7"),
        (lambda of: Racer(7), " 7"),
        (lambda of: Racer(40, nodes=9), " 9"),
        (lambda of: PromptLookup(0, 10, True), "0 and 10"),
        (lambda of: Followers(0, 4), " 0, 4"),
    ],
)
def test_bad_input_is_one_clear_error(call: Callable[[CausalLM], object], message: str) -> None:
    of = tiny("llama")
    with counted(of) as rows, pytest.raises(ValueError, match=message):
        call(of)
    assert len(rows) == ("nodes" in message)  # an edited tree is seen after the prompt


def room_for(rows: int) -> SimpleNamespace:
    return SimpleNamespace(tree_refusal=None, tree_room=lambda cached: rows)


def test_a_draft_is_cut_by_nodes_and_by_depth_and_to_its_first_children() -> None:
    tree = Draft([4, 5, 6, 7, 8, 9], [-1, -1, 1, 0, 0, 3], [1, 2, 1, 1, 2, 1])
    for cut, tokens, parents, ranks in (
        (tree.within(6, 2), [4, 5, 6, 7, 8], [-1, -1, 1, 0, 0], [1, 2, 1, 1, 2]),
        (tree.within(3, 9), [4, 5, 6], [-1, -1, 1], [1, 2, 1]),
        (tree.within(6, 0), [], [], []),
        (loop.verifiable(SimpleNamespace(tree_refusal="only chains"), tree, 5), [4, 7, 9], [-1, 0, 1], [1, 1, 1]),
        (loop.verifiable(room_for(5), tree, 5), [4, 5, 6, 7], [-1, -1, 1, 0], [1, 2, 1, 1]),
        (loop.verifiable(room_for(4), tree, 5), [4, 7, 9], [-1, 0, 1], [1, 1, 1]),
        (loop.verifiable(room_for(1), Draft.chain([4, 5]), 5), [4, 5], [-1, 0], [1, 1]),
        (pooled([[1, 2, 3], [1, 4], [5]], 4), [1, 2, 3, 4], [-1, 0, 1, 0], None),
    ):
        assert (cut.tokens.tolist(), cut.parents.tolist()) == (tokens, parents)
        assert ranks is None or cut.ranks.tolist() == ranks


def test_a_small_model_with_a_short_context_still_drafts_at_first() -> None:
    """So that what it says of contexts that end during decoding is about drafts that end, too."""
    of = tiny("llama")
    drafter = DRAFTERS["small model, short context"](of, ())
    found = check(of, drafter, Request(PROMPTS[3], CONTEXT))
    assert found.steps[0].drafted and not found.steps[-1].drafted and SHORT < CONTEXT

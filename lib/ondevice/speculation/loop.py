"""The verify loop: draft, verify in one forward, emit what the model agrees with, keep its rows, tell the drafter."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from ondevice.causal_lm import CausalLM
from ondevice.speculation.draft import EMPTY, Draft
from ondevice.speculation.drafter import Drafter, Verified
from ondevice.speculation.largest import likeliest

P = ParamSpec("P")
T = TypeVar("T")
BUDGET = 64  # nodes of a draft
Choice = Callable[[Tensor], int]  # a token id from logits [V]; called once for every emitted token, in order
PREFILL_CHUNK = 256  # tokens per forward where a drafter reads the prompt's logits, which are never kept whole


@dataclass(frozen=True)
class Step:
    """The log of one pass of the model after the prompt's: what was drafted, accepted and emitted.

    drafted: nodes verified, without the root. accepted: of these. emitted: tokens that came out, at least one.
    depth: the draft's longest path. cached: tokens in the cache before it. drafting: forwards spent on drafting.
    """

    drafted: int
    accepted: int
    emitted: int
    depth: int
    cached: int
    drafting: int = 0


@dataclass(frozen=True)
class Generation:
    """The output of one request and its log.

    prompt: how many tokens it has. tokens: the output, its end token included. ended: whether that came.
    """

    prompt: int
    tokens: Sequence[int]
    ended: bool
    steps: Sequence[Step] = field(repr=False)


def greedy(logits: Tensor) -> int:
    """The likeliest token; of equally likely ones that with the lowest id, as by `torch.argmax` and `generate`."""
    return int(likeliest(logits))


def torch_beside_runtime(loop: Callable[Concatenate[CausalLM, P], T]) -> Callable[Concatenate[CausalLM, P], T]:
    """A loop during which torch has one thread, where another runtime than torch runs the model.

    The threads of both spin while they wait. With two each on two cores, drafting took four times as long.
    """

    @wraps(loop)
    def run(lm: CausalLM, *given: P.args, **named: P.kwargs) -> T:
        threads = torch.get_num_threads()
        if threads == 1 or getattr(lm, "in_torch", True):  # what stands in for a `CausalLM` may not say
            return loop(lm, *given, **named)
        torch.set_num_threads(1)
        try:
            return loop(lm, *given, **named)
        finally:
            torch.set_num_threads(threads)

    return run


@torch_beside_runtime
def generate(
    lm: CausalLM,
    drafter: Drafter,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    budget: int = BUDGET,
    choice: Choice = greedy,
    eos_token_ids: Container[int] = (),
) -> Generation:
    """Continue a prompt by at most `max_new_tokens`, as the model alone would: the draft changes only the speed.

    budget: most nodes of a draft, which are fewer where the model's rows end. eos_token_ids: they end the output, and
    the first of them is part of it; the model's context ends it too. A draft is cut to what the model can verify of it
    (`verifiable`), which with sliding windows or ALiBi is a chain.
    Raises ValueError, before any work, where `check` does, and on a draft that breaks the rules of `proposed`.
    """
    check(lm, drafter, prompt, max_new_tokens, budget)
    session = lm.start(min(lm.context, len(prompt) + max_new_tokens + budget))
    drafter.begin(prompt)
    reads = (PREFILL_CHUNK, drafter.prefilled) if drafter.wants_prefill else ()
    tokens = [*map(int, prompt), choice(session.prefill(prompt, *reads))]
    rows = getattr(lm, "most_rows", lm.context + budget + 1)  # what stands in for a `CausalLM` may not say
    last = min(len(prompt) + max_new_tokens, lm.context + 1)  # the last token needs no row in the cache
    steps = []
    while len(tokens) < last and tokens[-1] not in eos_token_ids:
        root, cached, before = tokens[-1], session.length, drafter.forwards
        room = last - len(tokens) - 1  # behind the next token
        nodes = min(budget, rows - cached - 1)  # behind the root
        draft = EMPTY
        if room and nodes > 0:
            draft = verifiable(lm, proposed(drafter, tokens, nodes, lm.vocabulary).within(nodes, room), cached)
        logits = session.verify(draft.below(root))
        path, emitted = accepted(draft, logits, choice, eos_token_ids)
        session.keep([0, *(node + 1 for node in path)])
        tokens += emitted
        drafter.observe(Verified(root, draft, logits, path, emitted))
        steps.append(Step(len(draft), len(path), len(emitted), draft.depth, cached, drafter.forwards - before))
    drafter.end(tokens)
    return Generation(len(prompt), tokens[len(prompt) :], tokens[-1] in eos_token_ids, steps)


def proposed(drafter: Drafter, tokens: Sequence[int], budget: int, vocabulary: int) -> Draft:
    """What a drafter proposes behind `tokens`.

    Raises ValueError on anything but a draft of at most `budget` nodes whose tokens are ids of the vocabulary, and on a
    drafter that changes `tokens`: its passes would not compare with those of others, or the output would be its own.
    """
    before = len(tokens), tokens[-1]
    draft = drafter.propose(tokens, budget)
    if not isinstance(draft, Draft):
        raise ValueError(f"{drafter.name} proposed a {type(draft).__name__}, not a Draft.")
    if len(draft) > budget:
        raise ValueError(f"{drafter.name} proposed {len(draft)} nodes, where at most {budget} were asked for.")
    if len(draft) and not 0 <= draft.tokens.min() <= draft.tokens.max() < vocabulary:
        odd = draft.tokens[(draft.tokens < 0) | (draft.tokens >= vocabulary)][0]
        raise ValueError(f"{drafter.name} proposed the token {odd}; the model's ids end at {vocabulary - 1}.")
    if (len(tokens), tokens[-1]) != before:
        raise ValueError(f"{drafter.name} changed the text that it was to continue.")
    return draft


def verifiable(lm: CausalLM, draft: Draft, cached: int) -> Draft:
    """What a model can verify of a draft behind `cached` tokens: all, its first nodes, or its first chain.

    The first chain is the root's first child, that one's, and so on. Of the nodes that fit and the chain the longer is
    kept.
    """
    nodes: list[int] = []
    for node, parent in enumerate(draft.parents.tolist()):
        if parent == (nodes[-1] if nodes else -1):
            nodes.append(node)
    if getattr(lm, "tree_refusal", None):  # what stands in for a `CausalLM` may have none
        room = 0
    else:
        room = lm.tree_room(cached) - 1 if hasattr(lm, "tree_room") else len(draft)  # the root is a row, too
    if len(draft) == len(nodes) or len(draft) <= room:
        return draft
    return Draft.chain(draft.tokens[nodes]) if len(nodes) >= room else draft.within(room, draft.depth)


def accepted(
    draft: Draft, logits: Tensor, choice: Choice, eos_token_ids: Container[int] = ()
) -> tuple[list[int], list[int]]:
    """(path, tokens): the walk down the draft while the model's choice is a child, and the choices made.

    logits: [1 + n, V], after the root and every node. The last choice is the model's own and no node of the path, but
    for one of `eos_token_ids`, behind which nothing is chosen.
    """
    below = zip(draft.parents.tolist(), draft.tokens.tolist(), strict=True)
    children = {key: node for node, key in reversed(list(enumerate(below)))}  # of equal children the first
    path: list[int] = []
    tokens = [choice(logits[0])]
    node = children.get((-1, tokens[0]))
    while node is not None:
        path.append(node)
        if tokens[-1] in eos_token_ids:
            break
        tokens.append(choice(logits[node + 1]))
        node = children.get((node, tokens[-1]))
    return path, tokens


def check(lm: CausalLM, drafter: Drafter, prompt: Sequence[int], max_new_tokens: int, budget: int) -> None:
    """Raise ValueError where `generate` could not begin."""
    if budget < 1:
        raise ValueError(f"A draft's budget is at least one node, not {budget}; to draft nothing, use Drafter().")
    if max_new_tokens < 1:
        raise ValueError(f"At least one token is to be generated, not {max_new_tokens}.")
    if not 1 <= len(prompt) <= lm.context:
        raise ValueError(f"A prompt has 1 to {lm.context} tokens, the model's context, not {len(prompt)}.")
    if drafter.vocabulary is not None and drafter.vocabulary != lm.vocabulary:
        raise ValueError(f"{drafter.name} was made for {drafter.vocabulary} token ids; this model has {lm.vocabulary}.")

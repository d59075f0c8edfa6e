"""The verify loop: draft, verify in one forward, emit what the model agrees with, keep its rows, tell the drafter."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ondevice.causal_lm import CausalLM
from ondevice.speculation.draft import EMPTY, Draft
from ondevice.speculation.drafter import Drafter, Verified

BUDGET = 64  # nodes a draft
Choice = Callable[[Tensor], int]  # a token id from logits [V]; called once for every emitted token, in order
PREFILL_CHUNK = 256  # tokens a forward where a drafter reads the prompt's logits, which are never kept whole


@dataclass(frozen=True)
class Step:
    """A pass of the model after the prompt's.

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
    """What one request gave. prompt: how many tokens. tokens: the output, the end token included where it came."""

    prompt: int
    tokens: Sequence[int]
    ended: bool
    steps: Sequence[Step] = field(repr=False)


def greedy(logits: Tensor) -> int:
    """The likeliest token; of equals the one with the lowest id, as `torch.argmax` and `generate` have it."""
    return int(logits.argmax())


def generate(
    lm: CausalLM, drafter: Drafter, prompt: Sequence[int], limit: int, *,
    budget: int = BUDGET, choice: Choice = greedy, ends: Container[int] = (),
) -> Generation:  # fmt: skip
    """Continue a prompt by at most `limit` tokens, as the model alone would: the draft changes only the speed.

    budget: most nodes a draft. ends: ids that end the output, the first of them included; the model's context ends it
    too. Raises ValueError before any work on what cannot be.
    """
    check(lm, drafter, prompt, limit, budget)
    session = lm.start(min(lm.context, len(prompt) + limit + budget))
    drafter.begin(prompt)
    reads = (PREFILL_CHUNK, drafter.prefilled) if drafter.wants_prefill else ()
    tokens = [*map(int, prompt), choice(session.prefill(prompt, *reads))]
    last = min(len(prompt) + limit, lm.context + 1)  # the last token needs no row in the cache
    steps = []
    while len(tokens) < last and tokens[-1] not in ends:
        root, cached, before = tokens[-1], session.length, drafter.forwards
        room = last - len(tokens) - 1  # behind the next token
        draft = drafter.propose(tokens, budget).within(budget, room) if room else EMPTY
        logits = session.verify(draft.below(root))
        path, emitted = accepted(draft, logits, choice, ends)
        session.keep([0, *(node + 1 for node in path)])
        tokens += emitted
        drafter.observe(Verified(root, draft, logits, path, emitted))
        steps.append(Step(len(draft), len(path), len(emitted), draft.depth, cached, drafter.forwards - before))
    drafter.end(tokens)
    return Generation(len(prompt), tokens[len(prompt) :], tokens[-1] in ends, steps)


def accepted(draft: Draft, logits: Tensor, choice: Choice, ends: Container[int] = ()) -> tuple[list[int], list[int]]:
    """(path, tokens): the walk down the draft while the model's choice is a child, and the choices made.

    logits: [1 + n, V], after the root and every node. The last choice is the model's own and no node of the path, but
    for one of `ends`, behind which nothing is chosen.
    """
    below = zip(draft.parents.tolist(), draft.tokens.tolist(), strict=True)
    children = {key: node for node, key in reversed(list(enumerate(below)))}  # of equal children the first
    path: list[int] = []
    tokens = [choice(logits[0])]
    node = children.get((-1, tokens[0]))
    while node is not None:
        path.append(node)
        if tokens[-1] in ends:
            break
        tokens.append(choice(logits[node + 1]))
        node = children.get((node, tokens[-1]))
    return path, tokens


def check(lm: CausalLM, drafter: Drafter, prompt: Sequence[int], limit: int, budget: int) -> None:
    """Raise ValueError where `generate` could not begin."""
    if budget < 1:
        raise ValueError(f"A draft's budget is at least one node, not {budget}; to draft nothing, use Drafter().")
    if limit < 1:
        raise ValueError(f"At least one token is to be generated, not {limit}.")
    if not 1 <= len(prompt) <= lm.context:
        raise ValueError(f"A prompt has 1 to {lm.context} tokens, the model's context, not {len(prompt)}.")
    if drafter.vocabulary is not None and drafter.vocabulary != lm.vocabulary:
        raise ValueError(f"{drafter.name} was made for {drafter.vocabulary} token ids; this model has {lm.vocabulary}.")
    if drafter.drafts_trees:
        lm.require_trees()

"""sd.npu's drafts: the calibrated tree, reuse, rejections, retrieval and the pool."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import random_model

from ondevice.causal_lm import CausalLM
from ondevice.speculation import Draft, Verified, generate
from ondevice.speculation.prompt_lookup import PromptLookup
from ondevice.speculation.suffix_decoding import SuffixDecoding
from ondevice_papers.sdnpu.calibration import PromptCalibration, searched
from ondevice_papers.sdnpu.drafter import SdNpu, pooled
from ondevice_papers.sdnpu.history import History
from ondevice_papers.sdnpu.rejections import classify, rejected
from ondevice_papers.sdnpu.retrieval import Pld, Sam, Suffixes
from ondevice_papers.sdnpu.reuse import Reuse, agreed_run

V = 12
token = st.integers(0, V - 1)
texts = st.lists(token, min_size=1, max_size=30)


def logits_of(seed: int, n: int, vocabulary: int = V) -> torch.Tensor:
    """[n, V], all values different."""
    return 2 * torch.randn(n, vocabulary, generator=torch.Generator().manual_seed(seed))


# Calibration


def searched_naively(context, top, key, depth, floor, occurrences):
    """All paths, with no bound on the nodes."""
    found: set[tuple[int, ...]] = set()

    def visit(place, path, reach):
        for said, p in top[place]:
            chance = reach * p
            if chance < floor:
                continue
            found.add((*path, said))
            if len(path) + 1 < depth:
                after = [q for q in range(place + 1, len(context)) if context[q] == said]
                before = [q for q in range(place) if context[q] == said]
                if after or before:
                    visit(after[0] if after else before[-1], (*path, said), chance)

    for place in [q for q in range(len(context)) if context[q] == key][:occurrences]:
        visit(place, (), 1.0)
    return found


@given(texts, token, st.integers(1, 4), st.sampled_from([0.0, 0.02, 0.2]), st.integers(1, 8), st.integers(1, 12))
def test_the_calibrated_tree_is_that_of_a_plain_search(context, key, depth, floor, occurrences, nodes):
    table = PromptCalibration()
    table.begin(context)
    table.prefilled(0, logits_of(3, len(context)))
    top = [list(zip(*row, strict=True)) for row in table.samples]
    bounds = dict(depth=depth, floor=floor, occurrences=occurrences)
    whole = searched(table.positions, table.samples, key, nodes=10**6, **bounds)
    paths: list[tuple[int, ...]] = []
    for said, parent in zip(whole.tokens, whole.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), said))
    right = searched_naively(context, top, key, depth, floor, occurrences)
    assert len(set(paths)) == len(paths) and set(paths) == right
    few = searched(table.positions, table.samples, key, nodes=nodes, **bounds)
    assert few.tokens == whole.tokens[:nodes] and few.parents == whole.parents[:nodes]


# Reuse


@st.composite
def rejections(draw: st.DrawFn) -> tuple[Draft, list[int], torch.Tensor]:
    """A tree without equal siblings, what the model says after each node, and the accepted path."""
    n = draw(st.integers(0, 12))
    kept: list[tuple[int, int]] = []
    for _ in range(n):
        child = draw(st.integers(-1, len(kept) - 1)), draw(st.integers(0, 3))
        kept += [] if child in kept else [child]
    draft = Draft([said for _, said in kept], [parent for parent, _ in kept]) if kept else Draft((), ())
    logits = logits_of(draw(st.integers(0, 99)), 1 + len(draft), 4)
    path, above = [], -1
    while (child := (above, int(logits[above + 1].argmax()))) in kept:
        path.append(above := kept.index(child))
    return draft, path, logits


def root_to_leaf(draft: Draft) -> list[list[int]]:
    """Nodes of every path down to a leaf."""
    parents = draft.parents.tolist()
    paths = []
    for leaf in set(range(len(draft))) - set(parents):
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        paths.append(path)
    return paths


@given(rejections())
def test_the_run_is_eq_3_over_all_paths(drawn):
    draft, path, logits = drawn
    said, tokens = logits.argmax(-1).tolist(), draft.tokens.tolist()
    longest = 0
    for nodes in root_to_leaf(draft):
        e = next((place for place, node in enumerate(nodes) if node not in path), len(nodes))
        x, above = [tokens[node] for node in nodes], [-1, *nodes]
        agree = [x[i] == said[above[i] + 1] for i in range(len(nodes))]
        assert not any(agree[e : e + 1])  # x_e is never y_e
        for start in range(e, len(nodes)):
            for end in range(start + 1, len(nodes) + 1):
                longest = max(longest, end - start if all(agree[start:end]) else 0)
    assert len(agreed_run(draft, path, logits)) == longest
    tail = rejected(draft, path)
    lengths = [sum(node not in path for node in nodes) for nodes in root_to_leaf(draft)]
    assert (len(tail.tokens) if tail else 0) == max(lengths, default=0)
    if tail:
        assert any([tokens[node] for node in nodes][tail.accepted :] == tail.tokens for nodes in root_to_leaf(draft))


def test_lifetimes_and_partial_advance():
    """9 in place of 1, and then the model agrees with the draft."""
    logits = torch.eye(V)[[9, 2, 3, 4, 5, 6]]
    verified = Verified(0, Draft.chain([1, 2, 3, 4, 5]), logits, [], [9])
    for emitted, runs in (
        ([], [[2, 3, 4, 5]]), ([[7]], [[2, 3, 4, 5]]), ([[7], [7]], []), ([[2]], [[3, 4, 5]]),
        ([[2], [3, 4]], [[5]]), ([[2, 3, 4, 5]], []),
    ):  # fmt: skip
        made = Reuse()
        made.begin(())
        made.observe(verified)
        for tokens in emitted:
            made.observe(Verified(0, Draft((), ()), logits[:1], [], tokens))
        assert made.runs() == runs


# Rejections


@pytest.mark.parametrize(
    ("tail", "output", "right"),
    [
        ([1, 2, 3], [9, 8, 1, 2, 7], ("missing", 3, 2, 0, 2)),
        ([1, 2, 3, 4], [9, 3, 4], ("synonym", 4, 1, 2, 2)),
        ([1, 2, 1, 2], [9, 1, 2], ("missing", 4, 1, 0, 2)),  # of equals the one that skips least
        ([1, 2, 3], [9, 2, 9, 3], ("redundant", 3, 0, 0, 0)),  # single tokens are chance
    ],
)
def test_cases_of_table_2(tail, output, right):
    assert tuple(classify(tail, output)) == right


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.lists(st.integers(0, 3), max_size=14))
def test_what_is_called_reusable_stands_in_the_output(tail, output):
    if output and output[0] == tail[0]:
        return  # no rejection
    case, rejected_, inserted, skipped, reusable = classify(tail, output)
    assert rejected_ == len(tail) and case == ("redundant" if not reusable else "synonym" if skipped else "missing")
    assert tail[skipped : skipped + reusable] == output[inserted : inserted + reusable]
    starts = range(1, min(len(tail), len(output)) + 1)
    parts = [(a, b, n) for a in range(len(tail)) for b in starts for n in range(2, len(tail) - a + 1)
             if tail[a : a + n] == output[b : b + n]]  # fmt: skip
    assert reusable == max((n for *_, n in parts), default=0)


# Bases and the pool


def matched_naively(texts: Sequence[Sequence[int]]) -> tuple[int, list[int]]:
    """(m, what follows the first occurrence) of the longest suffix of the last text that stands earlier in any."""
    *others, own = texts
    for length in range(len(own), 0, -1):
        for text in [*others, own]:
            last = len(text) - (text is own)
            for end in range(length, last + 1):
                if list(text[end - length : end]) == list(own[-length:]):
                    return length, list(text[end:])
    return 0, []


@given(
    history=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), max_size=3),
    text=st.lists(st.integers(0, 3), min_size=2, max_size=25), prompt=st.integers(1, 24),
)  # fmt: skip
def test_sam_is_one_search_over_history_and_text(history, text, prompt):
    stored = History(V)
    for response in history:
        stored.append(response)
    base = Sam(V, stored)
    base.begin(text[: min(prompt, len(text))])
    for end in range(min(prompt, len(text)), len(text) + 1):
        found, matched = base.retrieve(text[:end], 31)
        length, following = matched_naively([*history, text[:end]])
        assert matched == length
        assert found == ([following[: max(9, min(31, 4 * length))]] if following else [])


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 31))
def test_pld_is_the_lookup_of_three_tokens(text, budget):
    base, plain = Pld(), PromptLookup(3, 10, partial=True)
    base.begin(text[:1])
    plain.begin(text[:1])
    for end in range(1, len(text) + 1):
        found, matched = base.retrieve(text[:end], budget)
        assert (found[0] if found else []) == plain.propose(text[:end], budget).tokens.tolist()
        assert matched == (min(3, matched_naively([text[:end]])[0]) if found else 0)


def test_suffixes_are_the_branches_of_suffix_decoding():
    text = [1, 2, 3, 1, 2, 4, 1, 2, 3, 5, 1, 2]
    base, plain = Suffixes(), SuffixDecoding()
    for each in (base, plain):
        each.begin(text[:4])
    for end in range(4, len(text) + 1):
        branched, matched = base.retrieve(text[:end], 31)
        drafts = pooled(branched, 99), plain.propose(text[:end], 31)
        nodes = [sorted(zip(draft.depths, draft.tokens, strict=True)) for draft in drafts]
        assert nodes[0] == nodes[1]
        assert matched == matched_naively([text[:end]])[0]


def test_the_pool_is_filled_in_order_and_shares_prefixes():
    draft = pooled([[6, 7], [5, 8, 9], [6, 4]], 5)
    assert draft.tokens.tolist() == [6, 7, 5, 8, 9] and draft.parents.tolist() == [-1, 0, -1, 2, 3]
    assert pooled([[6, 7], [5, 8, 9], [6, 4]], 6).parents.tolist()[-1] == 0


def test_retrieved_branches_come_first_after_a_match_of_three(monkeypatch):
    made = SdNpu(Pld(), None, Reuse())
    made.begin([1])
    monkeypatch.setattr(made.reuse, "runs", lambda: [[7]])
    for matched, tokens in ((2, [7, 5, 5]), (3, [5, 5, 7])):
        monkeypatch.setattr(made.base, "retrieve", lambda *given, matched=matched: ([[5, 5]], matched))
        assert made.propose([1], 31).tokens.tolist() == tokens


def test_a_history_of_another_vocabulary_is_refused():
    with pytest.raises(ValueError, match=r"41 .* 40"):
        generate(
            CausalLM(random_model("llama", vocabulary=40, context=64)), SdNpu(Sam(41), PromptCalibration()), [1], 5
        )

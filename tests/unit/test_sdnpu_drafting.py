"""sd.npu's drafts: calibration, reuse, rejections, the trace pool, and what each setting means."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from ondevice.causal_lm import CausalLM
from ondevice.sdnpu.calibration import Calibration, Search
from ondevice.sdnpu.drafter import Branch, Chances, Pld, Retrieved, Sam, SdNpu, grow, merged
from ondevice.sdnpu.history import History
from ondevice.sdnpu.rejections import Watched, classify
from ondevice.sdnpu.reuse import Reuse, Segment, agreed_run, rejected, resumed
from ondevice.speculation import Draft, Drafter, Verified, generate
from ondevice.speculation.largest import Likeliest
from ondevice.speculation.prompt_lookup import PromptLookup

V = 12
token = st.integers(0, V - 1)
texts = st.lists(token, min_size=1, max_size=30)


def logits_of(seed: int, n: int, vocabulary: int = V) -> torch.Tensor:
    """[n, V], all values different."""
    return 2 * torch.randn(n, vocabulary, generator=torch.Generator().manual_seed(seed))


def saying(rows: Sequence[dict[int, float]], vocabulary: int = V) -> torch.Tensor:
    """Logits whose softmax gives these probabilities, and the rest evenly to the others."""
    found = torch.empty(len(rows), vocabulary)
    for row, said in zip(found, rows, strict=True):
        row[:] = (1 - sum(said.values())) / (vocabulary - len(said))
        row[list(said)] = torch.tensor(list(said.values()))
    return found.log()


def step(root: int, draft: Draft, path: Sequence[int], emitted: Sequence[int], logits: torch.Tensor) -> Verified:
    return Verified(root, draft, logits, path, emitted)


# Calibration


@pytest.mark.parametrize(("vocabulary", "k"), [(5, 5), (40, 3), (8_192, 8), (151_936, 4), (50_257, 4)])
def test_the_likeliest_are_those_of_a_full_sort(vocabulary, k):
    logits = logits_of(1, 7, vocabulary).double()
    tokens, shares = Likeliest(k)(logits)
    right = logits.float().softmax(-1).sort(descending=True)
    assert (tokens == right.indices[:, :k]).all()
    np.testing.assert_allclose(shares, right.values[:, :k], rtol=1e-5)


def merged_naively(context, logits, before, token, calibration, occurrences=4):
    """(length of the key, {token: probability}) from all places at once."""
    top = [dict(zip(*(part.tolist() for part in row), strict=True)) for row in zip(*Likeliest(3)(logits), strict=True)]
    pairs = [place for place in range(1, len(context)) if (context[place - 1], context[place]) == (before, token)]
    singles = [place for place in range(len(context)) if context[place] == token]
    length, places = (2, pairs) if pairs and calibration.keys == 2 else (1, singles)
    if not places:
        return 0, {}
    sums: dict[int, float] = {}
    for place in places[-occurrences:]:
        for said, p in top[place].items():
            mean = sums.get(said, 0.0) + p / len(places[-occurrences:])
            sums[said] = mean if calibration.merge == "mean" else max(sums.get(said, 0.0), p)
    return length, sums


@settings(max_examples=60, deadline=None)
@given(
    context=texts, before=token, last=token, chunk=st.integers(1, 40), keys=st.sampled_from([1, 2]),
    merge=st.sampled_from(["mean", "max"]),
)  # fmt: skip
def test_rows_are_those_of_all_places_however_the_prefill_is_cut(context, before, last, chunk, keys, merge):
    logits, calibration = logits_of(2, len(context)), Calibration(V, 3, keys=keys, merge=merge)
    calibration.begin(context)
    for start in range(0, len(context), chunk):
        calibration.prefilled(start, logits[start : start + chunk])
        calibration.row(before, last)  # what is looked up in between is not kept too long
    found, (length, right) = calibration.row(before, last), merged_naively(context, logits, before, last, calibration)
    assert found.keys == length
    best = sorted(right.values(), reverse=True)[:3]
    assert found.probabilities == pytest.approx(best) and len(calibration) == len(context)
    assert [right[said] for said in found.tokens] == pytest.approx(best)


CLINTON, POSSESSIVE, SECURITY, DETAIL, HAS, ARRIVED, AT, DES, MOINES, IN, STOP, OTHER = range(12)


def figure_9(calibration: Calibration) -> Calibration:
    """The context of Figure 9, and what it says of the model."""
    context = [CLINTON, POSSESSIVE, SECURITY, DETAIL, HAS, ARRIVED, AT, DES, MOINES]
    rows: list[dict[int, float]] = [{} for _ in context]
    rows[0] = {ARRIVED: 0.5, HAS: 0.3, POSSESSIVE: 0.1}
    rows[5] = {AT: 0.6, IN: 0.2, STOP: 0.1}
    calibration.begin(context)
    calibration.prefilled(0, saying(rows))
    return calibration


def test_the_example_of_figure_9():
    """The text itself only has "Clinton's security"."""
    calibration = figure_9(Calibration.printed(V))
    found = calibration.tree(CLINTON, Search(depth=2, nodes=9, floor=0.02))
    branches = found.branches()
    assert branches[0] == [ARRIVED, AT] and [ARRIVED, IN] in branches and [ARRIVED, STOP] in branches
    assert {branch[0] for branch in branches} == {ARRIVED, HAS, POSSESSIVE}
    assert dict(zip(found.tokens, found.chances, strict=True))[AT] == pytest.approx(0.5 * 0.6)
    assert merged(branches, 99).tokens.tolist() == found.tokens
    assert calibration.tree(OTHER) == ([], [], [])
    drafter = SdNpu(None, calibration)
    assert drafter.propose([CLINTON], 4).tokens.tolist() == [ARRIVED, HAS, AT, POSSESSIVE]  # by their chances
    assert drafter.propose([OTHER], 9).tokens.tolist() == []


def searched_naively(context, top, key, search):
    """{path: chance}, the largest over all places, with no bound on the nodes."""
    found: dict[tuple[int, ...], float] = {}

    def visit(place, path, reach):
        for said, p in top[place]:
            chance = reach * p
            if chance < search.floor:
                continue
            found[*path, said] = max(found.get((*path, said), 0.0), chance)
            if len(path) + 1 < search.depth:
                after = [q for q in range(place + 1, len(context)) if context[q] == said]
                before = [q for q in range(place) if context[q] == said]
                if after or before:
                    visit(after[0] if after else before[-1], (*path, said), chance)

    for place in [q for q in range(len(context)) if context[q] == key][: search.occurrences]:
        visit(place, (), 1.0)
    return found


searches = st.builds(
    Search, st.integers(1, 4), st.just(10**6), st.sampled_from([0.0, 0.02, 0.2]), st.integers(1, 8)
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(context=texts, key=token, search=searches, nodes=st.integers(1, 12))
def test_the_printed_tree_is_that_of_a_plain_search(context, key, search, nodes):
    calibration, logits = Calibration.printed(V), logits_of(3, len(context))
    calibration.begin(context)
    calibration.prefilled(0, logits)
    tokens, probabilities = (part.tolist() for part in Likeliest(3)(logits))
    top = [list(zip(*row, strict=True)) for row in zip(tokens, probabilities, strict=True)]
    right = searched_naively(context, top, key, search)
    paths: list[tuple[int, ...]] = []
    whole = calibration.tree(key, search)
    for said, parent in zip(whole.tokens, whole.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), said))
    assert dict(zip(paths, whole.chances, strict=True)) == pytest.approx(right)
    assert len(set(paths)) == len(paths)
    few = calibration.tree(key, Search(search.depth, nodes, search.floor, search.occurrences))
    assert few.tokens == whole.tokens[:nodes] and few.parents == whole.parents[:nodes]


def test_what_was_verified_is_learnt_as_context():
    """After a step the accepted tokens have the rows that a prefill of them would have given."""
    draft = Draft([4, 5, 6], [-1, 0, 0])
    logits = logits_of(4, 4)
    verified = step(3, draft, [0, 1], [4, 5, 9], logits)
    rows = {}
    for learns in ("prompt", "accepted", "verified"):
        calibration = Calibration(V, 3, learns=learns)
        calibration.begin([1, 2])
        calibration.prefilled(0, logits_of(5, 2))
        calibration.observe(verified)
        calibration.observe(step(9, Draft([7], [-1]), [], [8], logits_of(6, 2)))
        rows[learns] = calibration
    again = Calibration(V, 3)
    again.begin([1, 2, 3, 4, 5, 9])
    again.prefilled(0, torch.cat([logits_of(5, 2), logits[[0, 1, 2]], logits_of(6, 2)[:1]]))
    keys = [(2, 3), (3, 4), (4, 5), (5, 9), (0, 5)]
    assert [rows["accepted"].row(*key) for key in keys] == [again.row(*key) for key in keys]
    assert rows["accepted"].row(4, 6).keys == 0 and rows["prompt"].row(3, 4).keys == 0
    assert rows["verified"].row(4, 6).keys == 2 and rows["verified"].row(9, 7).keys == 2
    assert (len(rows["prompt"]), len(rows["accepted"]), len(rows["verified"])) == (2, 6, 8)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_new_request_keeps_or_forgets(keeps):
    calibration = figure_9(Calibration(V, 3, keeps=keeps))
    calibration.begin([OTHER])
    assert bool(calibration.row(OTHER, CLINTON).keys) == keeps


def test_at_the_capacity_the_older_half_goes():
    calibration, context = Calibration(V, 2, capacity=10), list(range(11))
    calibration.begin(context)
    logits = logits_of(7, 11)
    for place in range(11):
        calibration.prefilled(place, logits[place : place + 1])
    assert len(calibration) == 5
    assert [calibration.row(key - 1, key).keys for key in range(11)] == [0] * 6 + [2] * 5
    whole = Calibration(V, 2, capacity=10)
    whole.begin(context)
    whole.prefilled(0, logits)  # in one chunk that is longer than the capacity
    assert [whole.row(key - 1, key) for key in range(11)] == [calibration.row(key - 1, key) for key in range(11)]


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


@settings(max_examples=200, deadline=None)
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
        assert any(
            [tokens[node] for node in nodes][tail.accepted :] == list(tail.tokens) for nodes in root_to_leaf(draft)
        )


def test_the_tail_begins_where_the_draft_went_another_way():
    draft = Draft([1, 2, 3, 4, 9, 9], [-1, 0, 1, 2, 0, 4])
    assert rejected(draft, [0]).tokens == (2, 3, 4) and rejected(draft, [0]).accepted == 1
    assert rejected(draft, []).tokens == (1, 2, 3, 4)
    assert rejected(draft, [0, 4, 5]).tokens == (2, 3, 4) and rejected(draft, [0, 4, 5]).accepted == 1
    assert rejected(Draft([1], [-1]), [0]) is None and rejected(Draft((), ()), []) is None


def test_a_shifted_tail_is_lost_to_eq_3_and_found_by_alignment():
    """Missing: the draft is T 1 2 3 4, the model says 9 1 2 3 4, and after each rejected token one that is shifted."""
    draft = Draft.chain([1, 2, 3, 4])
    verified = step(0, draft, [], [9], saying([{said: 0.9} for said in (9, 1, 1, 2, 3)]))
    printed, shifted = Reuse("printed"), Reuse("shifted")
    for reuse in (printed, shifted):
        reuse.observe(verified)
    assert printed.segments() == []
    assert Segment("missing", (1, 2, 3, 4)) in shifted.segments()


def test_a_confirmed_run_is_found_by_both():
    """Synonym: 9 in place of 1, and then the model agrees with the draft."""
    verified = step(0, Draft.chain([1, 2, 3, 4]), [], [9], saying([{said: 0.9} for said in (9, 2, 3, 4, 5)]))
    for rule in ("printed", "both"):
        reuse = Reuse(rule)
        reuse.observe(verified)
        assert list(reuse.segments()[0].tokens) == [2, 3, 4]
    assert Segment("synonym", (2, 3, 4)) in reuse.segments()


@pytest.mark.parametrize(
    ("tail", "said", "kind", "right"),
    [
        ((1, 2, 3), (9,), "missing", (1, 2, 3)),
        ((1, 2, 3), (9, 8), "missing", (1, 2, 3)),
        ((1, 2, 3), (9,), "synonym", (2, 3)),
        ((1, 2, 3), (9, 8), "synonym", (3,)),
        ((1, 2, 3), (9,), "longer synonym", (3,)),
        ((1, 2, 3, 4), (3,), "redundant", (4,)),
        ((1, 5, 2, 5, 6), (2, 5), "redundant", (6,)),  # the longer match, not the first
        ((5, 1, 5, 2), (9, 5), "redundant", (1, 5, 2)),  # the first of equals
    ],
)
def test_where_a_tail_may_go_on(tail, said, kind, right):
    assert Segment(kind, right) in resumed(tail, said)


def test_nothing_is_offered_behind_the_tail():
    assert resumed((1, 2), (2,)) == [Segment("synonym", (2,)), Segment("missing", (1, 2))]
    assert resumed((1, 2), (7, 8, 9)) == [Segment("missing", (1, 2))]


def test_lifetimes_and_partial_advance():
    verified = step(0, Draft.chain([1, 2, 3, 4, 5]), [], [9], saying([{said: 0.9} for said in (9, 2, 3, 4, 5, 6)]))
    nothing = Draft((), ())

    def offered(lifetime: int, *later: list[int]) -> list[list[int]]:
        reuse = Reuse("printed", lifetime)
        reuse.observe(verified)
        for said in later:
            reuse.observe(step(0, nothing, [], said, logits_of(0, 1)))
        return [list(segment.tokens) for segment in reuse.segments()]

    assert offered(1) == [[2, 3, 4, 5]]
    assert offered(1, [7]) == [] and offered(2, [7]) == [[2, 3, 4, 5]] and offered(2, [7], [7]) == []
    assert offered(1, [2]) == [[3, 4, 5]] and offered(1, [2], [3, 4]) == [[5]]
    assert offered(1, [2], [7]) == [] and offered(9, [2, 3, 4, 5]) == []
    shifted = Reuse("shifted", 2)
    shifted.observe(verified)
    shifted.observe(step(0, nothing, [], [8], logits_of(0, 1)))
    assert Segment("synonym", (3, 4, 5)) in shifted.segments()  # 9 8 in place of 1 2
    shifted.observe(step(0, nothing, [], [8], logits_of(0, 1)))
    assert shifted.segments() == []
    shifted.observe(verified)
    shifted.begin()
    assert shifted.segments() == []


# Rejections


@pytest.mark.parametrize(
    ("tail", "output", "right"),
    [
        ([1, 2, 3], [9, 1, 2, 3, 4], ("missing", 3, 1, 0, 3)),
        ([1, 2, 3], [9, 8, 1, 2, 7], ("missing", 3, 2, 0, 2)),
        ([1, 2, 3, 4], [9, 3, 4], ("synonym", 4, 1, 2, 2)),
        ([1, 2, 3, 4, 5], [9, 1, 2, 9, 3, 4, 5], ("synonym", 5, 4, 2, 3)),  # the longest part counts
        ([1, 2, 1, 2], [9, 1, 2], ("missing", 4, 1, 0, 2)),  # of equals the one that skips least
        ([1, 2, 3], [9, 2, 9, 3], ("redundant", 3, 0, 0, 0)),  # single tokens are chance
        ([1, 2], [9, 8, 7, 1, 2], ("redundant", 2, 0, 0, 0)),  # too far away
        ([2, 3], [3, 3, 2, 3], ("missing", 2, 2, 0, 2)),
        ([1], [2, 1], ("redundant", 1, 0, 0, 0)),
        ([1, 2], [], ("redundant", 2, 0, 0, 0)),
    ],
)
def test_cases_of_table_2(tail, output, right):
    assert tuple(classify(tail, output)) == right


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.lists(st.integers(0, 3), max_size=14))
def test_what_is_called_reusable_stands_in_the_output(tail, output):
    if output and output[0] == tail[0]:
        with pytest.raises(ValueError, match="is not the output's"):
            classify(tail, output)
        return
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


@settings(max_examples=80, deadline=None)
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
        found = base.retrieve(text[:end], 31)
        length, following = matched_naively([*history, text[:end]])
        assert found.matched == length
        assert list(found.tokens) == following[: max(9, min(31, 4 * length))]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 31))
def test_pld_is_the_lookup_of_three_tokens(text, budget):
    base, plain = Pld(), PromptLookup(3, 10, partial=True)
    base.begin(text[:1])
    plain.begin(text[:1])
    for end in range(1, len(text) + 1):
        found = base.retrieve(text[:end], budget)
        assert list(found.tokens) == plain.propose(text[:end], budget).tokens.tolist()
        assert found.matched == min(3, matched_naively([text[:end]])[0])


@pytest.mark.parametrize("make", [Pld, lambda: Sam(V)])
def test_with_both_parts_off_it_is_its_base(make):
    text = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2]
    drafter, base = SdNpu(make()), make()
    drafter.begin(text[:4])
    base.begin(text[:4])
    for end in range(4, 11):
        draft = drafter.propose(text[:end], 31)
        assert draft.parents.tolist() == list(range(-1, len(draft) - 1))
        assert draft.tokens.tolist() == list(base.retrieve(text[:end], 31).tokens)
    assert not drafter.drafts_trees and not drafter.wants_prefill and drafter.name == base.name
    assert not len(SdNpu().propose(text, 31)) and SdNpu().name == "vanilla"


def grown_naively(calibration, tail, budget, branches, chances):
    """{path: chance}: every node is scored anew, and the likeliest that is left is taken."""
    found: dict[tuple[int, ...], float] = {}

    def children(path):
        *_, before, last = [*tail, *path]
        row = calibration.row(before, last)
        scale = chances.of("calibrated")[row.keys]
        said = dict(zip(row.tokens, row.probabilities, strict=True))
        offered: dict[int, float] = {}
        for branch in branches:
            if tuple(branch.tokens[: len(path)]) == path and len(branch.tokens) > len(path):
                chance = chances.of(branch.kind)[min(16, branch.matched + len(path))]
                offered[branch.tokens[len(path)]] = max(chance, offered.get(branch.tokens[len(path)], 0.0))
        left = np.prod([1 - chance for chance in offered.values()])
        return {key: max(offered.get(key, 0.0), scale * said.get(key, 0.0) * (1 if key in offered else left))
                for key in {*offered, *said}}  # fmt: skip

    while len(found) < budget:
        offers = {(*path, key): chance * share for path, chance in [((), 1.0), *found.items()]
                  for key, share in children(path).items() if (*path, key) not in found}  # fmt: skip
        if not offers:
            break
        best = max(offers, key=offers.__getitem__)
        found[best] = offers[best]
    return found


kinds = st.sampled_from(["match", "run", "missing"])
branches = st.lists(
    st.builds(Branch, kinds, st.lists(token, min_size=1, max_size=7), st.integers(0, 20)), max_size=4
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(context=texts, tail=st.tuples(token, token), budget=st.integers(1, 14), offered=branches)
def test_the_pool_holds_the_likeliest_nodes(context, tail, budget, offered):
    calibration, chances = Calibration(V, 3), Chances()
    calibration.begin(context)
    calibration.prefilled(0, logits_of(8, len(context)))
    pool = grow(tail, budget, calibration, offered, chances, 0.0)
    right = grown_naively(calibration, tail, budget, offered, chances)
    paths: list[tuple[int, ...]] = []
    for said, parent in zip(pool.tokens, pool.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), said))
    assert len(set(paths)) == len(paths) == len(right)
    whole = grown_naively(calibration, tail, 10**3 if len(right) < budget else budget + 9, offered, chances)
    np.testing.assert_allclose(sorted(whole[path] for path in paths), sorted(right.values()))  # equals may differ
    pruned = grow(tail, budget, calibration, offered, chances, 0.1)
    assert pruned.tokens == [said for said, path in zip(pool.tokens, paths, strict=True) if whole[path] >= 0.1]


def test_the_printed_pool_is_filled_in_its_order():
    """Reused segments, the retrieved branch, calibrated ones; after three matched tokens the retrieved one first."""
    calibration = figure_9(Calibration.printed(V))

    class Fixed(Pld):
        matched = 1

        def retrieve(self, tokens: Sequence[int], budget: int) -> Retrieved:
            return Retrieved([ARRIVED, DES, MOINES], self.matched)

    drafter = SdNpu(Fixed(), calibration, Reuse("printed"), order="printed", search=Search(depth=2))
    drafter.reuse.observe(
        step(0, Draft.chain([1, HAS, AT]), [], [CLINTON], saying([{0: 0.9}, {HAS: 0.9}, {AT: 0.9}, {}]))
    )
    calibrated = calibration.tree(CLINTON, Search(depth=2)).branches()
    first = drafter.propose([CLINTON], 31)
    right = merged([[HAS, AT], [ARRIVED, DES, MOINES], *calibrated], 31)
    assert first.tokens.tolist() == right.tokens.tolist() and first.parents.tolist() == right.parents.tolist()
    assert drafter.propose([CLINTON], 4).tokens.tolist() == [HAS, AT, ARRIVED, DES]  # the last branch is cut
    Fixed.matched = 3
    assert drafter.propose([CLINTON], 4).tokens.tolist() == [ARRIVED, DES, MOINES, HAS]


def test_a_source_that_is_wrong_loses_its_place():
    chances = Chances()
    before = chances.of("missing")[0], chances.of("match")[0]
    for _ in range(20):
        chances.observe("missing", 0, 1.0, False)
        chances.observe("match", 0, 1.0, True)
    assert chances.of("missing")[0] < 0.1 * before[0] + 0.06 and chances.of("match")[0] > 0.8
    for _ in range(2000):
        chances.observe("calibrated", 1, 0.2, True)
    assert chances.of("calibrated")[1] == 1  # a promise is kept at most


@pytest.fixture(scope="module")
def lm() -> CausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = LlamaConfig(vocab_size=40, max_position_embeddings=128, initializer_range=0.4, **shape)
    return CausalLM(LlamaForCausalLM(config).double())


def test_each_part_saves_steps_and_changes_no_token(lm):
    prompt = [*range(1, 20), *range(1, 20)]
    plain = list(generate(lm, Drafter(), prompt, 60).tokens)
    steps = {}
    for name, drafter in {
        "base": SdNpu(Pld()),
        "calibration": SdNpu(Pld(), Calibration(40)),
        "reuse": SdNpu(Pld(), None, Reuse()),
        "both": SdNpu(Pld(), Calibration(40), Reuse()),
        "small": SdNpu(Pld(), Calibration(40), Reuse(), limit=2),
    }.items():
        found = generate(lm, drafter, prompt, 60)
        assert list(found.tokens) == plain
        assert max(step.drafted for step in found.steps) <= drafter.limit - 1
        steps[name] = len(found.steps)
    assert steps["both"] <= steps["calibration"] < steps["base"] and steps["reuse"] <= steps["base"]
    assert max(steps.values()) < 60


def test_rejections_are_counted_over_whole_outputs(lm):
    watched = Watched(SdNpu(Sam(40), Calibration(40), Reuse()))
    found = generate(lm, watched, [1, 2, 3, 1, 2], 60)
    rejecting = [one for one in found.steps if one.drafted > one.accepted]
    assert 0 < len(watched.rejections) <= len(rejecting)
    assert list(found.tokens) == list(generate(lm, Drafter(), [1, 2, 3, 1, 2], 60).tokens)
    before = len(watched.rejections)
    generate(lm, watched, [1, 2, 3, 1, 2], 20)
    assert len(watched.rejections) > before or all(one.drafted == one.accepted for one in found.steps[:2])


# Bad input


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda lm: SdNpu(Pld(), limit=1), "root and a drafted token, 2 tokens, not 1"),
        (lambda lm: SdNpu(Pld(), order="best"), "no order 'best'"),
        (lambda lm: SdNpu(Sam(7), Calibration(8)), "have 7 and 8 token ids"),
        (lambda lm: SdNpu(Pld(), Calibration(40)).begin([]), "at least one token, not 0"),
        (lambda lm: Calibration(40).begin([]), "at least one token, not 0"),
        (lambda lm: generate(lm, SdNpu(Pld(), Calibration(40)), [], 5), "not 0"),
        (lambda lm: generate(lm, SdNpu(Pld(), Calibration(41)), [1], 5), "made for 41 token ids; this model has 40"),
        (lambda lm: generate(lm, SdNpu(Sam(7)), [1], 5), "SAM was made for 7 token ids"),
        (lambda lm: Calibration(40, 41), "1 to 40 candidates, the vocabulary, not 41"),
        (lambda lm: Calibration(40, 0), "1 to 40 candidates, the vocabulary, not 0"),
        (lambda lm: Calibration(40, keys=3), "no calibration by 3 tokens"),
        (lambda lm: Calibration(40, capacity=1), "1 occurrence and 2 places"),
        (lambda lm: Search(depth=0), "at least one level"),
        (lambda lm: Search(floor=1.0), "floor in"),
        (lambda lm: Reuse("always"), "no reuse 'always'"),
        (lambda lm: Reuse(lifetime=0), "at least one step"),
        (lambda lm: classify([1, 2], [1, 3]), "its first is not the output's"),
        (lambda lm: classify([1, 2], [3], 0), "at least one token, not 0"),
    ],
)
def test_bad_input_is_one_clear_error(lm, call, message):
    with pytest.raises(ValueError, match=message):
        call(lm)


def test_a_model_with_another_vocabulary_is_noticed_at_the_first_logits():
    calibration = Calibration(V)
    calibration.begin([1])
    with pytest.raises(ValueError, match="for 12 token ids, not 13"):
        calibration.prefilled(0, logits_of(0, 1, 13))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Calibration(8).begin([1, 99]), "ids are from 0 to 7, not 1 to 99"),
        (lambda: begun().prefilled(2, torch.zeros(2, 8)), "Logits 2 to 4 are not of the prompt of 3 tokens"),
        (lambda: begun().prefilled(-1, torch.zeros(1, 8)), "Logits -1 to 0"),
        (lambda: Calibration(8).prefilled(0, torch.zeros(1, 8)), "prompt of 0 tokens"),
        (lambda: SdNpu(least=2.0), r"least chance is in \[0, 1\), not 2.0"),
        (lambda: SdNpu(None, Reuse(), Calibration(8)), "in this order"),
    ],
)
def test_more_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def begun() -> Calibration:
    found = Calibration(8)
    found.begin([1, 2, 3])
    return found

"""The baseline drafters: each rule on hand-made sequences, against brute force, and identity with plain decoding."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from ondevice.speculation import Draft, Drafter
from ondevice.speculation.cacheback import Cacheback, Followers
from ondevice.speculation.drafter import Verified
from ondevice.speculation.goose import Goose
from ondevice.speculation.logit_spec import COPIED, GUESSES, LogitSpec
from ondevice.speculation.prompt_lookup import PromptLookup
from ondevice.speculation.racer import NGRAM, Patterns, Racer
from ondevice.speculation.sam_decoding import SamDecoding, automaton
from ondevice.speculation.suffix_automaton import SEPARATOR, Match, SuffixAutomaton
from ondevice.speculation.suffix_decoding import SuffixDecoding
from ondevice.speculation.token_recycling import PARENTS, RANKS, TokenRecycling

VOCABULARY = 40
CORPUS = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [7, 8, 9, 20, 21]]
def drafted(drafter: Drafter, text: list[int], budget: int = 80) -> list[int]:
    """What a fresh request over all but the last token drafts after the last one."""
    drafter.begin(text[:-1])
    found = drafter.propose(text, budget)
    assert (found.parents == np.arange(-1, len(found) - 1)).all()
    return found.tokens.tolist()


# Prompt lookup


@pytest.mark.parametrize(("ngram", "tokens"), [(2, 10), (3, 4), (1, 1)])
def test_the_second_rule_is_that_of_transformers(ngram, tokens):
    theirs = PromptLookupCandidateGenerator(None, tokens, ngram, max_length=10_000)
    draw = random.Random(ngram)
    for _ in range(60):
        text = draw.choices(range(draw.randint(1, 6)), k=draw.randint(1, 40))
        right = theirs.get_candidates(torch.tensor([text]))[0][0, len(text) :].tolist()
        assert drafted(PromptLookup.transformers(tokens, ngram), text) == right


def test_the_original_rule_against_a_search():
    draw = random.Random(1)
    for _ in range(100):
        text = draw.choices(range(draw.randint(1, 3)), k=draw.randint(1, 40))
        right: list[int] = []
        for size in (3, 2, 1):
            starts = [at + size for at in range(len(text) - size + 1) if text[at : at + size] == text[-size:]]
            fits = [start for start in starts if start + 10 <= len(text) and start < len(text) - size]
            if fits and len(text) > size:
                right = text[fits[0] : fits[0] + 10]
                break
        assert drafted(PromptLookup.original(), text) == right


# The suffix automaton

texts = st.integers(1, 4).flatmap(lambda letters: st.lists(st.integers(0, letters), max_size=40))


def longest(text: list[int], said: list[int]) -> tuple[int, int]:
    """Brute force: length of the longest suffix of `said` that occurs in `text`, and the earliest end."""
    for size in range(len(said), 0, -1):
        for end in range(size, len(text) + 1):
            if text[end - size : end] == said[len(said) - size :]:
                return size, end
    return 0, 0


def first_end(of: SuffixAutomaton, match: Match) -> int:
    """Where the first occurrence of a match ends."""
    return len(of.text) - len(of.continuation(match, len(of.text)))


@given(texts)
def test_its_own_match_is_the_longest_suffix_that_occurs_earlier(text):
    known = SuffixAutomaton()
    for end in range(1, len(text) + 1):
        known.extend(text[end - 1 : end])
        right = next(
            ((size, at) for size in range(end - 1, 0, -1) for at in range(size, end)
             if text[at - size : at] == text[end - size : end]),
            (0, 0),
        )  # fmt: skip
        assert (known.match.length, first_end(known, known.match)) == right


@given(texts, texts)
def test_a_pointer_over_another_text_is_the_longest_suffix_that_occurs(text, other):
    known, match = SuffixAutomaton(text), Match()
    for end in range(1, len(other) + 1):
        match = known.advance(match, other[end - 1])
        size, at = longest(text, other[:end])
        assert (match.length, first_end(known, match)) == (size, at)
        assert known.continuation(match, 3) == text[at : at + 3]


def test_a_continuation_ends_at_a_separator():
    known = SuffixAutomaton([1, 2, 3, SEPARATOR, 4, 5])
    assert known.continuation(known.advance(Match(), 1), 9) == [2, 3]
    assert known.continuation(known.advance(Match(), 3), 9) == []
    assert known.continuation(known.advance(Match(), 4), 0) == []


# SAM-Decoding


def test_a_match_of_m_tokens_drafts_four_times_as_many():
    text = [1, 2, *range(100, 160), 3, 1, 2]
    assert drafted(SamDecoding(), text[:-1]) == [2, 100, 101, 102]
    assert drafted(SamDecoding(), text) == list(range(100, 108))
    assert drafted(SamDecoding(), text, budget=3) == [100, 101, 102]
    assert drafted(SamDecoding(), [*range(20), *range(100, 160), *range(20)]) == list(range(100, 139))
    assert drafted(SamDecoding(), [1, 2, 3]) == drafted(SamDecoding(), [7]) == []


def test_a_match_in_the_corpus_counts_five_less():
    corpus = automaton([list(range(30))])
    assert drafted(SamDecoding(corpus), [1, 2, 3, 4, 5]) == []
    assert drafted(SamDecoding(corpus), [1, 2, 3, 4, 5, 6]) == [7, 8, 9, 10]
    assert drafted(SamDecoding(corpus), [7, 90, 0, 1, 2, 3, 4, 5, 6, 7]) == list(range(8, 20))  # 8 - 5 against 1
    assert drafted(SamDecoding(corpus), [6, 90, 1, 2, 3, 4, 5, 6]) == [90, 1, 2, 3]  # 6 - 5 against 1: the text


def test_the_corpus_is_kept_and_the_text_is_not():
    drafter = SamDecoding(automaton([list(range(30))]))
    assert drafted(drafter, [50, 51, 52, 50]) == [51, 52]
    assert drafted(drafter, [50]) == []
    assert drafted(drafter, [1, 2, 3, 4, 5, 6]) == [7, 8, 9, 10]
    drafter.begin([1, 2, 3])  # the pointer goes on over steps of several tokens
    assert len(drafter.propose([1, 2, 3, 4], 80)) == 0
    assert drafter.propose([1, 2, 3, 4, 5, 6], 80).tokens.tolist() == [7, 8, 9, 10]


# Token Recycling


def test_the_template_is_the_published_one():
    depths = Draft(np.arange(80), PARENTS, RANKS).depths
    assert np.bincount(depths)[1:].tolist() == [8, 21, 25, 15, 8, 3]
    paths: list[str] = []
    for parent, rank in zip(PARENTS, RANKS, strict=True):
        paths.append((paths[parent] if parent >= 0 else "") + str(rank - 1))
    counts = {path: sum(other[:-1] == path for other in paths) for path in ["", *paths]}
    inner = {path: count for path, count in counts.items() if count > 1}
    assert inner == {"": 8, "0": 8, "1": 4, "2": 3, "3": 2, "00": 8, "01": 3, "02": 2, "10": 2, "000": 5, "001": 2,
                     "0000": 3, "00000": 2}  # fmt: skip
    assert " ".join(path for path, count in counts.items() if count == 1) == (
        "4 5 6 7 03 04 05 06 07 11 20 30 40 50 002 003 004 010 020 100 200 300 0001 0002 0010 0100 1000 00010"
    )
    assert paths == sorted(paths, key=lambda path: (len(path), path))


def test_each_child_is_its_rank_in_its_parents_row():
    drafter = TokenRecycling(30)
    drafter.matrix[:] = np.random.default_rng(0).integers(0, 30, (30, 8))
    draft = drafter.propose([4, 17], 80)
    above = np.where(draft.parents < 0, 17, draft.tokens[draft.parents])
    assert len(draft) == 80 and (draft.tokens == drafter.matrix[above, draft.ranks - 1]).all()
    cut = drafter.propose([4, 17], 20)
    assert cut.tokens.tolist() == draft.tokens[:20].tolist() and cut.parents.tolist() == PARENTS[:20].tolist()


def test_every_verified_node_overwrites_its_row_and_the_later_wins():
    drafter = TokenRecycling(20)
    logits = torch.randn(4, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    drafter.observe(Verified(3, Draft([5, 3, 5], [-1, -1, 1]), logits, [], [9]))
    right = logits.topk(8).indices.numpy()
    assert (drafter.matrix[3] == right[2]).all() and (drafter.matrix[5] == right[3]).all()
    assert not np.delete(drafter.matrix, [3, 5], axis=0).any()
    drafter.begin([1])
    drafter.end([1, 2])
    assert drafter.matrix[3].any()  # requests share it


# SuffixDecoding


@given(text=st.lists(st.integers(0, 3), min_size=1, max_size=25))
def test_an_automaton_counts_every_substring(text):
    """Every state's shares against the places of a string that it stands for."""
    automaton, ends = SuffixAutomaton(text), {}
    for start in range(len(text)):
        match = Match()
        for end in range(start + 1, len(text) + 1):
            match = automaton.advance(match, text[end - 1])
            ends.setdefault(match.state, tuple(text[start:end]))
    for state, string in ends.items():
        places = [p for p in range(len(string), len(text) + 1) if tuple(text[p - len(string) : p]) == string]
        following = [text[place] for place in places if place < len(text)]
        found = {token: share for token, _, share in automaton.following(state)}
        assert found == pytest.approx({token: following.count(token) / len(places) for token in set(following)})


def scored(text: list[int], length: int, nodes: int) -> list[tuple[tuple[int, ...], float]]:
    """(path, score) of the best nodes below the last `length` tokens, by counting every path anew."""
    pattern, found = text[len(text) - length :], []

    def count(tokens):
        return sum(text[p : p + len(tokens)] == tokens for p in range(len(text) - len(tokens) + 1))

    waiting = [((token,), count([*pattern, token]) / count(pattern)) for token in set(text)]
    while len(found) < nodes and (waiting := [one for one in waiting if one[1] > 0]):
        best = max(waiting, key=lambda one: one[1])
        waiting.remove(best)
        found.append(best)
        path = [*pattern, *best[0]]
        waiting += [((*best[0], token), best[1] * count([*path, token]) / count(path)) for token in set(text)]
    return found


@given(text=st.lists(st.integers(0, 2), min_size=3, max_size=18), alpha=st.sampled_from([1.0, 2.0, 8.0]))
def test_the_tree_of_the_best_match_has_the_greatest_score(text, alpha):
    drafter = SuffixDecoding(alpha=alpha)
    drafter.begin(text[:-1])
    draft, scores = drafter.propose(text, 6), [0.0]
    for length in range(1, len(text)):
        if any(text[p : p + length] == text[-length:] for p in range(len(text) - length)):
            scores.append(sum(score for _, score in scored(text, length, min(6, int(alpha * length)))))
    tree, totals = draft.below(text[-1]), [0.0]
    paths = [tuple(tree.tokens[tree.path_to(row)[1:]].tolist()) for row in range(1, len(tree))]
    for length in range(1, len(text)):
        of = dict(scored(text, length, 400))
        totals.append(sum(of.get(path, 0.0) for path in paths))
    assert any(total == pytest.approx(max(scores)) for total in totals) and len(set(paths)) == len(paths)


def test_earlier_outputs_are_searched_and_prompts_are_not():
    drafter = SuffixDecoding()
    drafter.begin([1, 2, 3])
    drafter.end([1, 2, 3, 7, 8, 9])
    drafter.begin([5])
    assert drafter.propose([5, 7], 4).tokens.tolist() == [8, 9]
    assert len(drafter.propose([5, 7, 2], 4)) == 0


# LogitSpec


def test_guesses_stand_beside_what_was_copied():
    drafter = LogitSpec()
    drafter.begin([1, 2, 3, 4, 5, 6, 7, 8, 20, 21, 22, 23])
    scores = torch.zeros(1, VOCABULARY)
    scores[0, 1], scores[0, 20], scores[0, 30] = 3.0, 2.0, 1.0  # 1 was said; 20 and 30 may come after it
    drafter.observe(Verified(23, Draft((), ()), scores, [], [1]))
    draft = drafter.propose([1, 2, 3, 4, 5, 6, 7, 8, 20, 21, 22, 23, 1], COPIED + 5)
    assert draft.tokens.tolist() == [2, 3, 4, 5, 6, 7, 20, 21, 22, 23, 30]
    assert draft.parents.tolist() == [-1, 0, 1, 2, 3, 4, -1, 6, 7, 8, -1]


def test_the_newest_place_that_goes_on_for_long_counts():
    text = [9, 1, *range(10, 16), 9, 2, *range(20, 26), 9, 3, 9]
    drafter = LogitSpec()
    drafter.begin(text[:-1])
    assert drafter.propose(text, 8).tokens.tolist() == [2, *range(20, 25)]
    assert GUESSES >= 32  # ranks up to the longest of LENGTHS are guessed


# Goose


def test_branches_hang_along_the_spine_by_rank():
    drafter = Goose(VOCABULARY, share=0.5)
    drafter.matrix[3], drafter.matrix[4], drafter.matrix[5] = range(4, 12), range(10, 18), range(20, 28)
    drafter.begin([1, 2, 3, 4, 5, 1, 2])
    draft = drafter.propose([1, 2, 3, 4, 5, 1, 2, 3], 6)
    # the spine is 4 5 1; the first candidate at the root is on it, those at 4 and 5 are 10 and 20
    assert draft.tokens.tolist() == [4, 5, 1, 10, 20, 0] and draft.parents.tolist() == [-1, 0, 1, 0, 1, 2]


# RACER


def tree(drafter: Drafter, text: list[int], budget: int) -> tuple[list[int], list[int]]:
    """(tokens, parents) of a fresh request's draft after a text whose last token was just generated."""
    drafter.begin(text[:-1])
    draft = drafter.propose(text, budget)
    return draft.tokens.tolist(), draft.parents.tolist()


@given(text=st.lists(st.integers(0, 2), min_size=2, max_size=30), budget=st.integers(1, 12))
def test_the_retrieval_tree_has_the_most_frequent_nodes(text, budget):
    patterns = [tuple(text[start : start + NGRAM]) for start in range(len(text) - NGRAM)]
    counts: dict[tuple[int, ...], int] = {}
    for size in range(2, NGRAM):
        suffix = tuple(text[-size:])
        for path in {pattern[size:end] for pattern in patterns for end in range(size + 1, NGRAM + 1)
                     if len(suffix) == size and pattern[:size] == suffix}:  # fmt: skip
            passing = sum(pattern[: size + len(path)] == suffix + path for pattern in patterns)
            counts[path] = max(counts.get(path, 0), passing)
    drafter = Racer(VOCABULARY)
    drafter.begin(text[:-1])
    whole = drafter.propose(text, budget).below(text[-1])
    paths = [tuple(whole.tokens[whole.path_to(row)[1:]].tolist()) for row in range(1, len(whole))]
    assert len(set(paths)) == len(paths) == min(budget, len(counts))
    assert [counts[path] for path in paths] == sorted(counts.values(), reverse=True)[: len(paths)]


def test_the_logits_tree_has_the_published_breadths():
    drafter = Racer(VOCABULARY)
    drafter.rows[:] = [np.random.default_rng(token).permutation(VOCABULARY)[:8] for token in range(VOCABULARY)]
    drafter.begin([3])
    draft = drafter.propose([3, 17], 63)
    assert np.bincount(draft.depths)[1:].tolist() == [8, 12, 17, 18, 8]
    children = np.bincount(draft.parents + 1, minlength=64)
    assert children[:1].tolist() == [8] and children[1:9].tolist() == [4, 2, 1, 1, 1, 1, 1, 1]
    assert children[9:15].tolist() == [4, 2, 1, 1, 2, 1]  # below the first two of depth 1
    assert draft.tokens[:8].tolist() == drafter.rows[17].tolist()
    assert draft.tokens[8:12].tolist() == drafter.rows[draft.tokens[0], :4].tolist()


def test_logits_fill_what_retrieval_leaves_and_share_its_nodes():
    drafter = Racer(VOCABULARY)
    drafter.rows[2] = [3, 9, 33, 34, 35, 36, 37, 38]
    drafter.rows[3] = [4, 39, 31, 32, 25, 26, 27, 28]
    tokens, parents = tree(drafter, [*range(1, 13), 30, 1, 2], 12)
    assert tokens == [*range(3, 11), 9, 33, 34, 35] and parents[8:] == [-1] * 4
    tokens, parents = tree(drafter, [*range(1, 13), 30, 1, 2], 16)
    assert tokens[8:] == [9, 33, 34, 35, 36, 37, 38, 39] and parents[8:] == [-1] * 7 + [0]


def test_a_row_is_what_the_model_said_where_its_token_was_last_seen():
    drafter = Racer(20)
    logits = torch.randn(9, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    right = logits.topk(8).indices.numpy()
    drafter.begin([5, 6, 5, 7])
    drafter.prefilled(0, logits[:3])
    drafter.prefilled(3, logits[3:4])
    assert (drafter.rows[[6, 5, 7]] == right[[1, 2, 3]]).all()
    drafter.observe(Verified(7, Draft([8, 7, 8], [-1, -1, 1]), logits[4:8], [], [9]))
    assert (drafter.rows[[7, 8]] == right[[6, 7]]).all() and (drafter.rows[5] == right[2]).all()
    assert (np.delete(drafter.rows, [5, 6, 7, 8], axis=0) == -1).all()
    drafter.begin([1])
    assert (drafter.rows[5] == right[2]).all()  # requests share it


def test_the_leaf_unused_for_the_longest_leaves_the_patterns():
    patterns = Patterns(nodes=22)
    for first in (0, 10):
        patterns.add(range(first, first + NGRAM))
    assert len(patterns) == 20
    patterns.use(patterns.matches([0, 1])[0])  # the two nodes of 0 1, but not what is below them
    patterns.add(range(20, 30))
    assert len(patterns) == 22 and patterns.matches([0, 1]) and not patterns.matches([0, 1, 2, 3])
    assert patterns.matches([0, 1])[0].children == {} and len(patterns.matches(range(20, 30))) == 1
    assert [len(patterns.matches(range(10, 10 + size))) for size in range(2, NGRAM + 1)] == [1] * 9
    patterns.add(range(30, 40))
    assert len(patterns) == 22 and patterns.matches([0, 1]) and not patterns.matches(range(10, 20))


def test_patterns_outlive_a_request_and_do_not_cross_into_the_next():
    drafter = Racer(VOCABULARY)
    assert tree(drafter, [*range(1, 9), 30], 9) == ([], [])
    assert tree(drafter, [*range(9, 20), 1, 2], 9) == ([], [])
    assert tree(drafter, [9, 10], 9) == (list(range(11, 19)), list(range(-1, 7)))


# Cacheback


def test_the_newest_follower_comes_first_and_is_chained_to_what_followed_its_end():
    text = [1, 2, 3, 4, 1, 5, 6, 7, 1]
    assert tree(Cacheback(), text, 95) == ([5, 6, 7, 2, 3, 4, 1, 5, 6], [-1, 0, 1, -1, 3, 4, 5, 6, 7])
    assert tree(Cacheback(), text, 8)[0] == [5, 6, 7, 2, 3, 4]  # whole followers, and a level before the next
    assert tree(Cacheback(), text, 2)[0] == []
    assert tree(Cacheback(), [1, 2, 3, 1], 8) == ([2, 3, 1, 2, 3, 1], [-1, 0, 1, 2, 3, 4])
    assert tree(Cacheback(), [1, 2, 1], 95) == tree(Cacheback(), [1], 95) == ([], [])  # no follower of three tokens


def test_a_sixth_of_the_rows_is_kept_from_the_first_level():
    text = [token for first in range(10, 40) for token in (1, first, 2, 3)] + [1]
    tokens, parents = tree(Cacheback(), text, 95)
    firsts = [token for token, parent in zip(tokens, parents, strict=True) if parent < 0]
    assert firsts == list(range(39, 13, -1))  # 26 of three tokens in 79 of the 95 rows
    assert len(tokens) == 95 or len(tokens) + 3 > 95
    assert tokens[78:81] == [1, 39, 2] and parents[78:81] == [2, 78, 79]  # behind the 3 of the newest


def test_followers_with_one_beginning_share_its_nodes():
    text = [1, 2, 3, 4, 1, 2, 3, 9, 1, 2, 8, 7, 1]
    assert tree(Cacheback(), text, 7) == ([2, 8, 7, 3, 9, 4], [-1, 0, 1, 0, 3, 3])


def test_the_least_recent_leader_and_follower_leave_and_a_repeated_one_is_the_newest():
    table = Followers(leaders=2, followers=2)
    for end in ([2, 2, 2], [3, 3, 3], [2, 2, 2], [4, 4, 4]):
        table.read([1, *end])
    assert list(table.after((1,))) == [(4, 4, 4), (2, 2, 2)]
    table.read([5, 6, 6, 6])
    table.use((1,))
    table.read([7, 8, 8, 8])
    assert len(table) == 2 and list(table.after((5,))) == [] and list(table.after((7,))) == [(8, 8, 8)]
    assert list(table.after((1,))) == [(4, 4, 4), (2, 2, 2)]


def test_a_request_forgets_the_last_one_and_the_corpus_comes_behind():
    drafter = Cacheback([[1, 20, 21, 22], [22, 23, 24, 25]])
    assert tree(drafter, [1, 2, 3, 4, 1], 6)[0] == [2, 3, 4]  # 20 21 22 would be 6 of 5 rows
    assert tree(drafter, [1, 2, 3, 4, 1], 20)[0] == [2, 3, 4, 20, 21, 22, 23, 24, 25]
    assert tree(drafter, [9, 1], 20)[0] == [20, 21, 22, 23, 24, 25]


@pytest.mark.parametrize("make", [PromptLookup.original, SamDecoding, LogitSpec, Cacheback])
def test_reading_in_steps_is_reading_at_once(make):
    text = random.Random(3).choices(range(4), k=50)
    stepwise = make()
    stepwise.begin(text[:2])
    for end in range(3, 51):
        draft = stepwise.propose(text[:end], 30)
        assert (draft.tokens.tolist(), draft.parents.tolist()) == tree(make(), text[:end], 30)

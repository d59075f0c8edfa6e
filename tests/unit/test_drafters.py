"""The baseline drafters: each rule on hand-made sequences, against brute force, and identity with plain decoding."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from ondevice.causal_lm import CausalLM
from ondevice.speculation import Draft, Drafter, generate
from ondevice.speculation.drafter import Verified
from ondevice.speculation.goose import Goose
from ondevice.speculation.logit_spec import COPIED, GUESSES, LogitSpec
from ondevice.speculation.prompt_lookup import PromptLookup
from ondevice.speculation.sam_decoding import SamDecoding, automaton
from ondevice.speculation.suffix_automaton import SEPARATOR, Match, SuffixAutomaton
from ondevice.speculation.suffix_decoding import SuffixDecoding
from ondevice.speculation.token_recycling import PARENTS, RANKS, TokenRecycling

VOCABULARY = 40
CONTEXT = 96
CORPUS = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [7, 8, 9, 20, 21]]
DRAFTERS = {
    "PLD": PromptLookup.original,
    "PLD (transformers)": PromptLookup.transformers,
    "SAM": SamDecoding,
    "SAM with a corpus": lambda: SamDecoding(automaton(CORPUS)),
    "TR": lambda: TokenRecycling(VOCABULARY),
    "SuffixDecoding": lambda: SuffixDecoding(automaton(CORPUS)),
    "LogitSpec": LogitSpec,
    "Goose": lambda: Goose(VOCABULARY, automaton(CORPUS)),
}


@pytest.fixture(scope="module")
def lm() -> CausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=CONTEXT, **shape)
    return CausalLM(LlamaForCausalLM(config).double())


@pytest.fixture(params=DRAFTERS)
def drafter(request) -> Drafter:
    return DRAFTERS[request.param]()


@cache
def plain(lm: CausalLM, prompt: tuple[int, ...], limit: int) -> tuple[int, ...]:
    return tuple(generate(lm, Drafter(), prompt, limit).tokens)


def drafted(drafter: Drafter, text: list[int], budget: int = 80) -> list[int]:
    """What a fresh request over all but the last token drafts after the last one."""
    drafter.begin(text[:-1])
    found = drafter.propose(text, budget)
    assert (found.parents == np.arange(-1, len(found) - 1)).all()
    return found.tokens.tolist()


# Prompt lookup


def test_the_original_drafts_ten_tokens_or_none():
    text = [1, 2, 3, *range(10, 20), 1, 2, 3]
    assert drafted(PromptLookup.original(), text) == list(range(10, 20))
    assert drafted(PromptLookup.original(), text, budget=4) == [10, 11, 12, 13]
    assert drafted(PromptLookup.original(), [1, 2, 3, *range(10, 16), 1, 2, 3]) == []
    assert drafted(PromptLookup.original(), [1, 2, 3, *range(10, 17), 1, 2, 3]) == [*range(10, 17), 1, 2, 3]
    assert drafted(PromptLookup.original(), [7]) == []


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


def test_reading_in_steps_is_reading_at_once():
    text = random.Random(2).choices(range(4), k=60)
    stepwise = PromptLookup.original()
    stepwise.begin(text[:1])
    for end in range(2, 61):
        assert stepwise.propose(text[:end], 80).tokens.tolist() == drafted(PromptLookup.original(), text[:end])


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


@settings(max_examples=50, deadline=None)
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


@settings(max_examples=50, deadline=None)
@given(texts, texts)
def test_a_pointer_over_another_text_is_the_longest_suffix_that_occurs(text, other):
    known, match = SuffixAutomaton(text), Match()
    for end in range(1, len(other) + 1):
        match = known.advance(match, other[end - 1])
        size, at = longest(text, other[:end])
        assert (match.length, first_end(known, match)) == (size, at)
        assert known.continuation(match, 3) == text[at : at + 3]


@settings(max_examples=50, deadline=None)
@given(texts.filter(len))
def test_a_lookup_before_the_token_is_added_finds_what_one_after_it_does(text):
    known = SuffixAutomaton(text[:-1])
    before = known.advance(known.match, text[-1])
    end = first_end(known, before)
    known.extend(text[-1:])
    assert (known.match.length, first_end(known, known.match)) == (before.length, end)


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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda lm: PromptLookup(0, 10, True), "0 and 10"),
        (lambda lm: PromptLookup.transformers(0), "2 and 0"),
        (lambda lm: TokenRecycling(7), "8 .* 7"),
        (lambda lm: generate(lm, TokenRecycling(50), [1], 5), "TR .* 50 "),
    ],
)
def test_bad_input_is_one_clear_error(lm, call, message):
    with pytest.raises(ValueError, match=message):
        call(lm)


# SuffixDecoding


@settings(deadline=None, max_examples=60)
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


@settings(deadline=None, max_examples=60)
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

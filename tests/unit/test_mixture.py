"""The mixture: what its sources say against brute force, the tree's order, the weights' fit, and known answers."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import random_model

from ondevice.causal_lm import CausalLM
from ondevice.speculation import Draft, Drafter, Verified, fitting, generate
from ondevice.speculation.custom_generate import _Guarded
from ondevice.speculation.logit_tables import FADING, FAINT, RECENT, WIDE, LogitTables
from ondevice.speculation.mixture import (
    KEPT,
    LEAST,
    LOGITS,
    LOGITS_SHAPE,
    LONGEST_READ,
    SHAPE,
    TEXTS,
    Mixture,
    grow_likeliest,
    most_per_second,
)
from ondevice.speculation.ngrams import NGrams
from ondevice.speculation.store import ORDERS, K, Store
from ondevice_programs.bench.drafters import Timed
from ondevice_studies.speculation.live import Watched

V = 40
texts = st.lists(st.integers(0, 4), max_size=40)


# Sources


@given(text=texts, context=st.lists(st.integers(0, 4), min_size=1, max_size=8), longest=st.integers(1, 5))
def test_ngrams_know_where_the_longest_suffix_went_on(text, context, longest):
    length, places = NGrams(text, longest).after(context)
    for size in range(min(longest, len(context)), 0, -1):
        ends = [end for end in range(size, len(text)) if text[end - size : end] == context[-size:]]
        if ends:
            assert (length, places) == (size, ends)
            return
    assert (length, places) == (0, [])


def witten_bell(sequences, context, token):
    """p(token | context) by the definition, over every place of the text; contexts must not be lengthened once seen."""
    nexts = Counter(
        sequence[end] for sequence in sequences for end in range(len(context), len(sequence))
        if tuple(sequence[end - len(context) : end]) == tuple(context)
    )  # fmt: skip
    n, kinds = nexts.total(), len(nexts)
    if not context:
        return nexts[token] / n
    return (nexts[token] + kinds * witten_bell(sequences, context[1:], token)) / (n + kinds)


@given(sequences=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=5))
def test_a_store_backs_off_as_witten_and_bell_do(sequences):
    if max(map(len, sequences)) < 2:
        with pytest.raises(ValueError, match="at least two tokens"):
            Store.from_sequences(sequences)
        return
    store = Store.from_sequences(sequences)
    after_first = [sequence for sequence in sequences if len(sequence) > 1]
    for sequence in after_first:
        for end in range(1, len(sequence)):
            order, chances = store.after(sequence[:end])
            context = tuple(sequence[end - order : end])
            assert order >= 1 and sequence[end] in chances and sum(chances.values()) <= 1 + 1e-6
            seen = Counter(
                s[e] for s in sequences for e in range(order, len(s)) if tuple(s[e - order : e]) == context
            )
            for token in seen:
                assert chances[token] == pytest.approx(witten_bell(sequences, context, token), abs=1e-6)
            assert order in (ORDERS, end) or seen.total() == 1 or not _goes_on(sequences, sequence, end, order)


def _goes_on(sequences, sequence, end, order):
    longer = tuple(sequence[end - order - 1 : end])
    return any(tuple(s[e - order - 1 : e]) == longer for s in sequences for e in range(order + 1, len(s)))


def test_a_store_keeps_the_likeliest_few_and_says_nothing_of_what_it_has_not_seen():
    store = Store.from_sequences([[0, token] for token in range(1, 12) for _ in range(token)])
    order, chances = store.after([7, 0])
    assert order == 1 and list(chances) == list(range(11, 11 - K, -1))
    assert store.after([33]) == (0, {}) and store.after([]) == (0, {})
    assert store.after(np.array([7, 0])) == (order, chances)


def test_contexts_of_equal_sums_are_different_contexts():
    store = Store.from_sequences([[a, b, 10 * a + b] for a, b in product(range(6), repeat=2)])
    for a, b in product(range(6), repeat=2):
        order, chances = store.after([a, b])
        assert order == 2 and max(chances, key=chances.get) == 10 * a + b


def test_a_store_is_the_same_from_its_files(tmp_path):
    random = np.random.default_rng(0)
    made = Store.from_sequences(random.integers(0, 30, (20, 50)))
    made.save(tmp_path / "store")
    again = Store.load(tmp_path / "store")
    for context in random.integers(0, 30, (50, 6)).tolist():
        assert made.after(context) == again.after(context)
    assert made.megabytes == again.megabytes == pytest.approx(
        sum(path.stat().st_size - 128 for path in (tmp_path / "store").iterdir()) / 1e6
    )


def test_a_store_appears_whole_and_replaces_none(tmp_path, monkeypatch):
    store, folder = Store.from_sequences([[1, 2, 3]]), tmp_path / "of" / "store"
    with monkeypatch.context() as patch, pytest.raises(OSError, match="full"):
        patch.setattr(np, "save", lambda path, array: (_ for _ in ()).throw(OSError("the disk is full")))
        store.save(folder)
    assert not list(folder.parent.iterdir())
    store.save(folder)
    with pytest.raises(OSError):
        store.save(folder)
    assert [path.name for path in folder.parent.iterdir()] == ["store"] and Store.load(folder).after([1])[0] == 1


def test_ids_beyond_16_bits_can_be_stored():
    store = Store.from_sequences([[1, 150_000, 150_001]] * 2)
    assert store.after([1, 150_000])[1] == pytest.approx({150_001: 1.0}, rel=0.3)


# The tree


@given(seed=st.integers(0, 10_000), budget=st.integers(1, 30))
def test_the_tree_has_the_likeliest_nodes_of_all(seed, budget):
    """Against every path of a random process over three tokens, to the depth that the budget can reach."""
    random = np.random.default_rng(seed)
    rows = {token: random.dirichlet([0.5] * 3) * random.uniform(0.3, 1) for token in range(3)}

    def children(context):
        row = rows[context[-1]]
        return sorted(((token, float(row[token])) for token in range(3)), key=lambda pair: -pair[1]), 1

    tokens, parents, chances = grow_likeliest(children, [0], budget)
    every = []
    frontier = [((), 0, 1.0)]
    while frontier:
        path, last, chance = frontier.pop()
        for token in range(3):
            p = chance * rows[last][token]
            if p > LEAST and len(path) < budget:
                every.append(p)
                frontier.append(((*path, token), token, p))
    assert chances == pytest.approx(sorted(every, reverse=True)[:budget])
    for node, (token, parent, chance) in enumerate(zip(tokens, parents, chances, strict=True)):
        above, last = (1.0, 0) if parent < 0 else (chances[parent], tokens[parent])
        assert parent < node and chance == pytest.approx(above * rows[last][token])


@given(st.lists(st.floats(0, 1), max_size=30), st.floats(0.001, 1))
def test_the_size_is_the_best_of_all(chances, row):
    chances, seconds = sorted(chances, reverse=True), 1 + row * np.arange(65)
    rates = [(1 + sum(chances[:m])) / seconds[m] for m in range(len(chances) + 1)]
    assert rates[most_per_second(chances, seconds)] == pytest.approx(max(rates))


def test_what_was_said_before_is_drafted_and_what_cannot_pay_is_not():
    prompt = [1, 2, 3, 4, 5, 6, 1, 2]
    drafter = Mixture()
    drafter.begin(prompt)
    assert drafter.propose([*prompt, 3], 3).tokens.tolist() == [4, 5, 6]
    dear = Mixture(seconds=1 + 5.0 * np.arange(9))
    dear.begin(prompt)
    assert len(dear.propose([*prompt, 3], 8)) == 0
    cheap = Mixture(seconds=1 + 0.01 * np.arange(5))
    cheap.begin(prompt)
    assert len(cheap.propose([*prompt, 3], 64)) == 4  # no cost is known beyond


def test_the_size_without_a_floor_is_the_same():
    """The floor leaves out only nodes that cannot pay."""
    random = np.random.default_rng(2)
    store = Store.from_sequences(random.integers(0, 6, (30, 40)))
    for slope in (0.02, 0.1, 0.4):
        seconds = 1 + slope * np.arange(33)
        one, other = Mixture(stores=[store], seconds=seconds), Mixture(stores=[store], seconds=seconds)
        other.least = LEAST
        prompt = random.integers(0, 6, 60).tolist()
        for drafter in (one, other):
            drafter.begin(prompt[:-1])
        found, whole = one.propose(prompt, 32), other.propose(prompt, 32)
        assert found.tokens.tolist() == whole.tokens.tolist() and found.parents.tolist() == whole.parents.tolist()


def test_answers_help_later_requests_and_are_forgotten_after_very_many():
    drafter = Mixture()
    drafter.begin([1])
    drafter.end([1, 7, 8, 9])
    drafter.begin([2])
    assert drafter.propose([2, 7], 4).tokens.tolist()[:2] == [8, 9]
    drafter.answers.extend([30] * (KEPT + 1))
    drafter.end([2, 7, 8])
    drafter.begin([3])
    assert len(drafter.answers) < 10 and drafter.propose([3, 7], 4).tokens.tolist() == [8]


# Logits


def logits(*rows):
    """[n, 8] whose softmax is the given rows, each {token: p}; the other tokens share what is left."""
    table = np.full((len(rows), 8), 0.0)
    for line, row in zip(table, rows, strict=True):
        line[:] = (1 - sum(row.values())) / (8 - len(row))
        line[list(row)] = list(row.values())
    return torch.from_numpy(table).log().float()


def first_choices(rows):
    """Of the pair's row and of the last token's newest row."""
    pair, _, single = rows
    return [next(iter(pair), None), next(iter(single), None)]


def test_rows_are_kept_by_two_tokens_and_by_one_and_the_newest_counts():
    tables = LogitTables()
    tables.begin([1, 2, 1, 3, 1])
    tables.prefilled(0, logits({2: 0.9}, {1: 0.8}, {3: 0.7}))
    tables.prefilled(3, logits({1: 0.6}, {4: 0.5}))
    assert first_choices(tables.after(3, 1)) == [4, 4] and first_choices(tables.after(2, 1)) == [3, 4]
    assert first_choices(tables.after(5, 1)) == [None, 4] and first_choices(tables.after(5, 6)) == [None, None]
    assert tables.after(1, 3)[0][1] == pytest.approx(0.6) and len(tables) == 4


def test_every_verified_node_is_entered_below_its_own_path():
    tables = LogitTables()
    draft = Draft([1, 2, 3], [-1, 0, 0])
    step = Verified(0, draft, logits({1: 0.9}, {2: 0.8}, {4: 0.7}, {5: 0.6}), [0, 1], [1, 2, 4])
    tables.observe(7, step)
    keys = [(7, 0), (0, 1), (1, 2), (1, 3)]
    assert [first_choices(tables.after(*key)) for key in keys] == [[1, 1], [2, 2], [4, 4], [5, 5]] and len(tables) == 4
    tables.observe(None, Verified(6, Draft([], []), logits({2: 0.9}), [], [2]))
    assert first_choices(tables.after(7, 6)) == [None, 2]


def test_the_key_that_was_not_renewed_for_the_longest_time_leaves():
    tables = LogitTables(pairs=4)
    for prompt in ([1, 2, 3], [2, 3, 4], [1, 2, 5]):
        tables.begin(prompt)
        tables.prefilled(0, logits(*[{prompt[-1]: 0.9}] * 3))
    assert len(tables) == 4 and all(tables.after(*pair)[0] for pair in ((1, 2), (2, 3), (3, 4), (2, 5)))
    assert first_choices(tables.after(1, 2)) == [5, 5] and first_choices(tables.after(2, 3)) == [4, None]
    tables.begin([0, 1])
    tables.prefilled(0, logits({7: 0.9}, {6: 0.9}))
    assert tables.after(2, 3) == ({}, {}, {}) and first_choices(tables.after(0, 1)) == [6, 6]
    with pytest.raises(ValueError, match="two pairs of tokens at least"):
        LogitTables(pairs=1)


def test_older_rows_of_a_token_fade_from_its_mean_which_is_cut():
    tables = LogitTables()
    tables.begin([1, 2, 1])
    rows = logits({2: 0.9}, {3: 0.9}, {4: 0.9})
    tables.prefilled(0, rows)
    row = rows.softmax(-1).numpy()
    assert tables.after(0, 1)[1] == pytest.approx(dict(enumerate(FADING * row[0] + (1 - FADING) * row[2])))
    for start in range(8, 108, 8):
        wide = torch.full((1, 120), -9.0)
        wide[0, start : start + 8] = 1.0
        tables.observe(None, Verified(1, Draft([], []), wide, [], [start]))
    mean = tables.after(0, 1)[1]
    assert WIDE < len(mean) < 1 / FAINT and set(range(96, 112)) < set(mean) and not set(range(8, 50)) & set(mean)


def test_rejected_siblings_say_what_comes_after_the_token_in_their_place():
    tables = LogitTables()
    rows = logits({3: 0.5, 1: 0.3, 2: 0.1}, {4: 0.8}, {5: 0.6})
    tables.observe(None, Verified(0, Draft([1, 2], [-1, -1]), rows, [], [3]))
    assert 3 not in tables.siblings and tables.siblings[1] == pytest.approx(0.3)
    row = rows.softmax(-1).numpy()
    assert tables.after_siblings == pytest.approx(dict(enumerate((0.3 * row[1] + 0.1 * row[2]) / 0.4)))
    tables.observe(0, Verified(3, Draft([6], [-1]), logits({6: 0.9}, {7: 0.9}), [0], [6, 7]))
    assert tables.after_siblings == {} and 7 not in tables.siblings
    tables.begin([1])
    assert tables.siblings == tables.candidates == {} and first_choices(tables.after(0, 3)) == [6, 6]


def test_candidates_are_the_mean_of_the_last_accepted_rows():
    tables = LogitTables()
    for _ in range(3):
        tables.observe(None, Verified(0, Draft([2], [-1]), logits({1: 0.9}, {5: 0.9}), [], [1]))
    assert tables.candidates == pytest.approx(dict(enumerate(logits({1: 0.9}).softmax(-1)[0].tolist())))
    for _ in range(RECENT):
        tables.observe(None, Verified(0, Draft([], []), logits({3: 0.9}), [], [3]))
    assert next(iter(tables.candidates)) == 3 and tables.candidates[3] == pytest.approx(0.9)


def only(*sources):
    """Weights of a mixture that hears these sources alone, by their numbers behind the texts."""
    weights = np.zeros((*LOGITS_SHAPE, TEXTS + LOGITS))
    weights[..., [TEXTS + source for source in sources]] = 1 / len(sources)
    return weights


def test_a_mixture_drafts_what_the_model_said_after_the_same_two_tokens():
    drafter = Mixture(only(0))
    drafter.begin([1, 2, 5, 2])
    drafter.prefilled(0, logits({2: 0.9}, {3: 0.6, 4: 0.3}, {2: 0.9}, {6: 0.9}))
    draft = drafter.propose([1, 2, 5, 2, 1, 2], 2)
    assert draft.tokens.tolist() == [3, 4] and draft.parents.tolist() == [-1, -1]
    drafter.observe(Verified(2, draft, logits({7: 0.9}, {1: 0.9}, {1: 0.9}), [], [7]))
    drafter.end([1, 2, 5, 2, 1, 2, 7])
    drafter.begin([0, 1])
    assert drafter.propose([0, 1, 2], 1).tokens.tolist() == [7]  # rows outlive requests


@pytest.mark.parametrize(("length", "reads"), [(LONGEST_READ, True), (1 + LONGEST_READ, False)])
def test_a_long_prompt_is_not_read_also_behind_what_wraps_a_drafter(length, reads):
    for drafter in (wrap(Mixture(only(3))) for wrap in (lambda drafter: drafter, Timed, _Guarded, Watched)):
        drafter.begin([1] * 9)
        assert drafter.wants_prefill
        drafter.begin([1] * length)
        assert drafter.wants_prefill == reads


@pytest.mark.parametrize("stored", [0, 1, 2])
def test_without_weight_for_logits_a_mixture_is_one_of_texts_and_reads_none(stored):
    random = np.random.default_rng(stored)
    stores = [Store.from_sequences(random.integers(0, 9, (20, 40))) for _ in range(stored)]
    texts = TEXTS + stored
    weights = random.dirichlet([1.0] * texts, SHAPE)
    padded = np.zeros((*LOGITS_SHAPE, texts + LOGITS))
    padded[..., :texts] = weights
    plain = Mixture(weights, stores)
    silent = Mixture(padded, stores)
    assert not plain.wants_prefill and not silent.wants_prefill and Mixture(only(3)).wants_prefill
    for _ in range(4):
        tokens = random.integers(0, 9, 30).tolist()
        plain.begin(tokens)
        silent.begin(tokens)
        for _ in range(8):
            tokens = [*tokens, int(random.integers(0, 9))]
            draft = plain.propose(tokens, 16)
            same = silent.propose(tokens, 16)
            assert same.tokens.tolist() == draft.tokens.tolist() and same.parents.tolist() == draft.parents.tolist()
            silent.observe(Verified(tokens[-1], same, torch.randn(1 + len(same), 9), [], [1]))
        plain.end(tokens)
        silent.end(tokens)
    assert len(silent.tables) == 0


def small_model():
    """A random model, whose answers repeat themselves."""
    return CausalLM(random_model("llama", vocabulary=V, context=96, num_hidden_layers=1))


PROMPTS = ((3,), (1, 2, 3, 1, 2, 3, 1), (5, 6), (1, 2, 3, 4))


def test_weights_are_fitted_to_a_model_by_its_own_answers():
    """After unseen tokens the texts explain nothing; behind a pair that was seen its own row does."""
    lm = small_model()
    answers = [(prompt, generate(lm, Drafter(), prompt, 40).tokens) for prompt in PROMPTS]
    start = np.full((*LOGITS_SHAPE, TEXTS + LOGITS), 1 / (TEXTS + LOGITS))
    classes, chances = fitting._observed_live(lm, answers, start, ())
    assert len(chances) >= sum(len(answer) - 2 for _, answer in answers)
    assert classes.shape == (len(chances), 4) and (classes < LOGITS_SHAPE).all() and (classes >= 0).all()
    weights = fitting.fit(lm, [answers[:2], answers[2:]])
    assert weights.shape == start.shape and (weights >= 0).all() and (weights.sum(-1) <= 1 + 1e-9).all()
    likelihood = [np.log(np.maximum(1e-3, (w[tuple(classes.T)] * chances).sum(-1))).mean() for w in (weights, start)]
    assert likelihood[0] > likelihood[1]
    with pytest.raises(ValueError, match="at least two tokens"):
        fitting.fit(lm, [[((1, 2), (3,))]])


# Weights


def test_no_other_weights_have_a_greater_likelihood():
    random = np.random.default_rng(1)
    chances = random.dirichlet([0.5] * 3, 400)
    best = fitting.maximised(chances, np.full(3, 1 / 3), 0.0)
    most = np.log(chances @ best).sum()
    for other in random.dirichlet([1.0] * 3, 200):
        assert np.log(chances @ other).sum() <= most + 0.05


def test_a_class_without_answers_has_the_weights_of_all():
    classes = np.zeros((50, 4), np.int64)
    chances = np.tile([1.0, 0.0, 0.0, 0.0], (50, 1))
    weights = fitting.weights_of(classes, chances)
    assert weights.shape == (*LOGITS_SHAPE, 4) and weights[1, 0, 3, 2] == pytest.approx([1, 0, 0, 0], abs=1e-6)


# Known answers

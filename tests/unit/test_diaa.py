"""DIAA: the tables, their updates and warm-up, the tree, the overlap, and output equal to plain decoding."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from ondevice.causal_lm import CausalLM
from ondevice.diaa import budget, merging, tree, utility
from ondevice.diaa.calibration import Calibration
from ondevice.diaa.drafter import RECYCLING, Diaa
from ondevice.diaa.extended import Extended
from ondevice.diaa.tables import NONE, Tables, digest
from ondevice.diaa.tree import Growth, grow, refill
from ondevice.diaa.updates import Fresh, Rule, likeliest, refreshed
from ondevice.diaa.warmup import Means, warm_up
from ondevice.speculation import Draft, Drafter, Verified, generate
from ondevice.speculation.largest import Likeliest
from ondevice.speculation.token_recycling import TokenRecycling

V = 40


@pytest.fixture(scope="module")
def lm() -> CausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = LlamaConfig(vocab_size=V, max_position_embeddings=96, initializer_range=0.4, **shape)
    return CausalLM(LlamaForCausalLM(config).double())


def random_tables(seed: int, vocabulary: int = V, k: int = 8) -> Tables:
    """Rows of 0 to k candidates."""
    random, found = np.random.default_rng(seed), Tables.empty(vocabulary, k)
    for key in range(vocabulary):
        n = random.integers(0, k + 1)
        found.tokens[key, :n] = random.permutation(vocabulary)[:n]
        found.probabilities[key, :n] = -np.sort(-random.dirichlet([0.3] * (n + 1))[:n])
    found.check()
    return found


# Tables


def test_memory_is_that_of_table_4():
    assert Tables.empty(128_256).mebibytes == pytest.approx((7.83, 3.91), abs=0.005)
    assert Tables.empty(32_000).mebibytes == pytest.approx((1.95, 0.98), abs=0.005)
    assert Tables.empty(32_000).bytes == (32_000 * 8 * 8, 32_000 * 8 * 4)


def test_tables_are_saved_and_refused_for_another_tokenizer(tmp_path):
    tables = random_tables(1)
    named = Tables(tables.tokens, tables.probabilities, "abc")
    named.save(tmp_path / "tables.safetensors")
    found = Tables.load(tmp_path / "tables.safetensors", "abc")
    assert (found.tokens == tables.tokens).all() and (found.probabilities == tables.probabilities).all()
    with pytest.raises(ValueError, match="another tokenizer"):
        Tables.load(tmp_path / "tables.safetensors", "abd")
    (tmp_path / "tables.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="damaged"):
        Tables.load(tmp_path / "tables.safetensors", "abc")


def test_a_digest_depends_on_entries_and_ids():
    class Fake:
        def __init__(self, entries):
            self.get_vocab = lambda: entries

    one = digest(Fake({"a": 0, "b": 1}))
    assert one == digest(Fake({"b": 1, "a": 0})) and len({one, digest(Fake({"a": 1, "b": 0}))}) == 2


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: t.probabilities[3].put([0, 1], [0.1, 0.2]), "falling order"),
        (lambda t: t.tokens[3].put([0, 1], [7, 7]), "twice"),
        (lambda t: t.tokens[3].put([0], [V]), "not in the vocabulary"),
    ],
)
def test_damaged_rows_are_refused(spoil, message):
    tables = Tables.empty(V)
    tables.tokens[3, :2], tables.probabilities[3, :2] = [5, 6], [0.5, 0.2]
    tables.check()
    spoil(tables)
    with pytest.raises(ValueError, match=message):
        tables.check()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Tables.empty(5, 8), "1 to 5 candidates"),
        (lambda: Rule("merge"), "no update 'merge'"),
        (lambda: Rule("replace", 0), "At least one entry"),
        (lambda: Growth(delta=1.5), "Decays are in"),
        (lambda: Growth(counts="leaves"), "counts: nodes"),
        (lambda: Diaa(Tables.empty(V), refresh=0), "every 0 steps"),
        (lambda: budget.VerifyCost([1, 1], [1.0, 1.0]), "which increase"),
        (lambda: budget.VerifyCost([1, 2], [1.0, 0.0]), "positive"),
        (lambda: budget.Sizing(budget.VerifyCost([1], [1.0]), "most"), "no rule 'most'"),
        (lambda: Calibration(8, prior=0), "prior is positive"),
    ],
)
def test_bad_settings_are_one_clear_error(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# Updates


def test_likeliest_is_the_softmax_over_the_whole_vocabulary():
    logits = torch.randn(5, V, dtype=torch.float64) * 3
    right = logits.float().softmax(-1).sort(descending=True)
    found = likeliest(logits, 8)
    assert (found.tokens == right.indices[:, :8].numpy()).all()
    np.testing.assert_allclose(found.probabilities, right.values[:, :8], rtol=1e-5)
    assert found.tokens.dtype == np.int64 and found.probabilities.dtype == np.float32


def test_likeliest_gives_each_call_its_own_answer_and_leaves_the_logits_alone():
    find, wide = Likeliest(8), torch.randn(7, 2048).bfloat16()
    for rows in (7, 3, 5):
        logits = (wide[:rows] * rows).float()
        before = logits.clone()
        first, right = refreshed(logits, find), logits.softmax(-1).sort(descending=True)
        find(torch.randn(2, 2048))
        np.testing.assert_allclose(first.probabilities, right.values[:, :8], rtol=1e-5)
        assert torch.equal(logits, before)


def updated_naively(rule: Rule, old: dict[int, float], fresh: dict[int, float], k: int) -> dict[int, float]:
    """Entry by entry, as Fig. 6 draws it. Both in falling order."""
    if rule.kind == "overwrite":
        return fresh
    if rule.kind == "union":
        return dict(sorted({**old, **fresh}.items(), key=lambda entry: -entry[1])[:k])
    row, protected = dict(old), set(list(fresh)[: rule.fresh])
    for token in list(fresh)[: rule.fresh]:
        if token not in row and len(row) == k:
            del row[min((t for t in row if t not in protected), key=row.__getitem__)]
        row[token] = fresh[token]
    return dict(sorted(row.items(), key=lambda entry: -entry[1]))


@pytest.mark.parametrize("rule", [Rule(), Rule("replace", 1), Rule("replace", 4), Rule("replace", 8), Rule("union")])
def test_updates_are_those_of_the_naive_rule(rule):
    random, k = np.random.default_rng(3), 8
    tables = random_tables(3)
    rows = {key: {t: p for t, p in zip(*tables.row(key), strict=True) if t != NONE} for key in range(V)}
    keys = random.integers(0, 6, 50)  # many equal ones: the later wins
    fresh = likeliest(torch.randn(50, V) * 2, k)
    rule.apply(tables, keys, fresh)
    for key, tokens, probabilities in zip(keys.tolist(), *(part.tolist() for part in fresh), strict=True):
        rows[key] = updated_naively(rule, rows[key], dict(zip(tokens, probabilities, strict=True)), k)
    tables.check()
    for key, row in rows.items():
        assert dict(zip(*([part[: len(row)] for part in tables.row(key)]), strict=True)) == pytest.approx(row)


def test_replacing_all_entries_is_overwriting():
    one, other = random_tables(4), random_tables(4)
    fresh = likeliest(torch.randn(V, V), 8)
    Rule().apply(one, np.arange(V), fresh)
    Rule("replace", 8).apply(other, np.arange(V), fresh)
    assert (one.tokens == other.tokens).all() and (one.probabilities == other.probabilities).all()


# Warm-up


def test_warm_up_is_the_mean_over_occurrences(lm):
    corpus = np.random.default_rng(5).integers(0, 12, 100)
    sums, counts = defaultdict(lambda: defaultdict(float)), defaultdict(int)
    for start in range(0, 100, 32):
        window = torch.tensor(corpus[start : start + 32])
        with torch.inference_mode():
            found = likeliest(lm.model(window[None]).logits[0], 8)
        for key, tokens, probabilities in zip(window.tolist(), *found, strict=True):
            counts[key] += 1
            for token, probability in zip(tokens.tolist(), probabilities.tolist(), strict=True):
                sums[key][token] += probability
    tables = warm_up(lm, corpus, "abc", window=32, chunk=10)
    tables.check()
    assert tables.tokenizer == "abc" and tables.filled == len(counts) / V
    for key, row in sums.items():
        best = sorted(((p / counts[key], t) for t, p in row.items()), reverse=True)[:8]
        assert tables.tokens[key].tolist() == [t for _, t in best]
        np.testing.assert_allclose(tables.probabilities[key], [p for p, _ in best], rtol=1e-5)
    with pytest.raises(ValueError, match="no token"):
        warm_up(lm, [])


def test_means_do_not_depend_on_when_they_are_summed_up():
    whole, parts = Means(V), Means(V)
    for seed in range(3):
        torch.manual_seed(seed)
        fresh = likeliest(torch.randn(V, V), 8)
        whole.add(np.arange(V), fresh)
        parts.add(np.arange(V)[:7], Fresh(fresh.tokens[:7], fresh.probabilities[:7]))
        parts.tables()
        parts.add(np.arange(V)[7:], Fresh(fresh.tokens[7:], fresh.probabilities[7:]))
    assert (whole.tables().tokens == parts.tables().tokens).all()


# Tree


def grown_naively(tables: Tables, root: int, limit: int, growth: Growth) -> list[tuple]:
    """(token, parent, rank, path product, score) of every node: Eq. 2 for every path anew, the best by search."""
    nodes: list[tuple] = []

    def ranks(node: int) -> list[int]:
        return [*ranks(nodes[node][1]), nodes[node][2]] if node >= 0 else []

    def cost() -> int:
        lengths = [len(ranks(node)) for node in range(len(nodes)) if node not in {n[1] for n in nodes}]
        return {"nodes": len(nodes), "root": len(nodes) + 1, "paths": sum(lengths)}[growth.counts]

    def expand(node: int) -> None:
        token, product = (nodes[node][0], nodes[node][3]) if node >= 0 else (root, 1.0)
        for rank, (child, p) in enumerate(zip(*tables.row(token), strict=True), 1):
            above = ranks(node)
            topk = rank if growth.ranks == "last" else sum(above) + rank - len(above)
            score = product * p * growth.delta ** len(above) * growth.alpha ** (topk - 1)
            if child == NONE or (node >= 0 and score < growth.tau):
                continue
            nodes.append((child, node, rank, product * p, score))
            if cost() > limit:
                nodes.pop()
                return
            waiting.append(len(nodes) - 1)

    waiting: list[int] = []
    expand(-1)
    while waiting:
        best = max(waiting, key=lambda node: (nodes[node][4], -node))
        waiting.remove(best)
        expand(best)
    return nodes


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 50), root=st.integers(0, 11), limit=st.integers(1, 40),
    growth=st.builds(Growth, delta=st.sampled_from([0.5, 0.8, 1.0]), alpha=st.sampled_from([0.7, 1.0]),
                     tau=st.sampled_from([0.0, 5e-3, 0.1]), ranks=st.sampled_from(["last", "sum"]),
                     counts=st.sampled_from(["nodes", "root", "paths"])),
)  # fmt: skip
def test_the_tree_is_that_of_the_naive_growth(seed, root, limit, growth):
    tables = random_tables(seed, 12)
    found = grow(tables, root, limit, growth)
    right = grown_naively(tables, root, limit, growth)
    assert list(zip(found.tokens, found.parents, found.ranks, strict=True)) == [node[:3] for node in right]
    np.testing.assert_allclose([*found.paths, *found.scores], [n[3] for n in right] + [n[4] for n in right])
    draft = found.draft()  # refuses parents that do not come first
    assert len(draft) <= limit
    again = refill(tables, root, draft)
    assert (again.tokens == draft.tokens).all() and (again.parents == draft.parents).all()


@pytest.fixture
def figure_7() -> Tables:
    """A table under which a tree grows as Fig. 7 tells it; its own probabilities are in the picture only.

    0 is the root, 1 to 3 are t1 to t3, 4 to 6 are t11 to t13.
    """
    tables = Tables.empty(10, 3)
    for key, row in {0: {1: 0.6, 2: 0.2, 3: 0.1}, 1: {4: 0.5, 5: 0.3, 6: 0.02}, 4: {7: 0.5}, 2: {8: 0.9}}.items():
        tables.tokens[key, : len(row)], tables.probabilities[key, : len(row)] = list(row), list(row.values())
    return tables


@pytest.mark.parametrize("counts", ["paths", "root"])
def test_the_worked_example_of_figure_7(figure_7, counts):
    found = grow(figure_7, 0, 6, Growth(counts=counts))
    assert found.tokens == [1, 2, 3, 4, 5]  # all of the first level; t1's children but t13, whose score is below tau
    assert found.parents == [-1, -1, -1, 0, 0]
    right = [0.6, 0.2 * 0.7, 0.1 * 0.7**2, 0.6 * 0.5 * 0.8, 0.6 * 0.3 * 0.8 * 0.7]
    assert found.scores == pytest.approx(right, rel=1e-6)
    assert 0.6 * 0.02 * 0.8 * 0.7**2 < 5e-3
    assert utility.printed_cost(found.draft()) == 6  # C(T) = 1 + 1 + 2 + 2, as printed; five nodes, six with the root


def test_the_default_budget_is_of_drafted_nodes(figure_7):
    found = grow(figure_7, 0, 6, Growth())
    assert found.tokens == [1, 2, 3, 4, 5, 7] and found.parents[-1] == 3  # t11 has the best score that is left


def test_the_first_level_is_exempt_from_tau_and_cold_tables_draft_nothing(figure_7):
    assert grow(figure_7, 0, 9, Growth(tau=1.0)).tokens == [1, 2, 3]
    assert grow(Tables.empty(10), 0, 9, Growth()).tokens == []


def test_refilled_nodes_without_a_candidate_are_left_out_with_all_below_them(figure_7):
    shape = Draft([1, 2, 3, 4, 7], [-1, -1, -1, 1, 3], [1, 2, 3, 1, 1])
    found = refill(figure_7, 1, shape)  # 4 5 6 below 1; 5 has no row, so the fourth node and the one below it go
    assert (found.tokens.tolist(), found.parents.tolist(), found.ranks.tolist()) == ([4, 5, 6], [-1] * 3, [1, 2, 3])
    assert refill(figure_7, 0, shape).tokens.tolist() == [1, 2, 3, 8]


def test_printed_utility_never_rewards_depth_and_expected_tokens_do():
    shallow, deep = Draft([1], [-1]), Draft.chain([1, 2])
    assert utility.printed_utility(deep, [0.9, 0.72]) == 0.72 < utility.printed_utility(shallow, [0.9]) == 0.9
    assert utility.expected_accepted([0.9, 0.72]) == pytest.approx(1.62)
    assert utility.printed_cost(Draft([1, 2, 3], [-1, 0, 0])) == 4  # the shared node twice


# Drafting


def switches():
    yield "cold, sequential", lambda: Diaa(Tables.empty(V), overlap=False)
    yield "cold, overlap", lambda: Diaa(Tables.empty(V), overlap=True)
    yield "warm, sequential", lambda: Diaa(random_tables(1), overlap=False)
    yield "warm, overlap", lambda: Diaa(random_tables(1), overlap=True)
    yield "template", lambda: Diaa(random_tables(1), template=RECYCLING, overlap=False)
    yield "template, cold, overlap", lambda: Diaa(Tables.empty(V), template=RECYCLING, overlap=True)
    yield "refresh", lambda: Diaa(random_tables(1), refresh=3, reads_prompt=True)
    yield "accepted only", lambda: Diaa(random_tables(1), rule=Rule("replace", 1, accepted_only=True))
    yield "union", lambda: Diaa(Tables.empty(V), rule=Rule("union"), reads_prompt=True, overlap=False)
    yield "extended, tables alone", lambda: Extended(Tables.empty(V), suffixes=False)
    yield "extended, uncalibrated", lambda: Extended(Tables.empty(V), calibrated=False, overlap=False)
    yield "extended, all, overlap", lambda: Extended(Tables.empty(V), sizing=budget.Sizing(COST), overlap=True)
    yield "extended, rate", lambda: Extended(random_tables(1), sizing=budget.Sizing(COST, "rate"), overlap=False)


COST = budget.VerifyCost([1, 8, 64], [1.0, 1.1, 2.0], 0.05)


@pytest.fixture(scope="module")
def plain(lm) -> list[int]:
    return list(generate(lm, Drafter(), [1, 2, 3], 40).tokens)


@pytest.mark.parametrize(("name", "make"), switches(), ids=lambda value: value if isinstance(value, str) else "")
def test_every_combination_says_what_the_model_alone_says(lm, plain, name, make):
    drafter = make()
    found = [generate(lm, drafter, [1, 2, 3], 40, budget=12) for _ in range(2)]
    assert list(found[0].tokens) == list(found[1].tokens) == plain
    assert max(step.drafted for step in found[0].steps) <= 12
    assert len(found[1].steps) < 36  # the second time, the tables know the text
    drafter.tables.check()
    ended = generate(lm, drafter, [1, 2, 3], 40, budget=12, ends={plain[7]})
    assert list(ended.tokens) == plain[: plain.index(plain[7]) + 1]


@pytest.mark.parametrize("limit", [5, 40, 80])
def test_without_a_dynamic_tree_it_is_token_recycling(limit):
    tables, recycling = Tables.empty(V), TokenRecycling(V)
    Rule().apply(tables, np.arange(V), likeliest(torch.randn(V, V), 8))
    recycling.matrix[:] = tables.tokens
    drafter = Diaa(tables, template=RECYCLING, overlap=False)
    draft, seen = drafter.propose([1, 2], limit), recycling.propose([1, 2], limit)
    assert (draft.tokens == seen.tokens).all() and (draft.parents == seen.parents).all()
    verified = step(2, draft, 9)
    drafter.observe(verified)
    recycling.observe(verified)
    assert (tables.tokens == recycling.matrix).all()


def test_a_foreign_vocabulary_is_refused(lm):
    with pytest.raises(ValueError, match=f"DIAA was made for 7 token ids; this model has {V}"):
        generate(lm, Diaa(Tables.empty(7, 3)), [1], 5)


def step(root: int, draft: Draft, seed: int, path: tuple[int, ...] = ()) -> Verified:
    torch.manual_seed(seed)
    return Verified(root, draft, torch.randn(1 + len(draft), V), path, [0])


@pytest.mark.parametrize("overlap", [False, True])
def test_with_overlap_a_tree_sees_the_tables_of_one_step_before(overlap):
    tables = Tables.empty(V)
    drafter = Diaa(tables, overlap=overlap)
    drafter.begin([1])
    first, second = step(5, Draft([6], [-1]), 0), step(7, Draft((), ()), 1)
    drafter.observe(first)
    seen = len(drafter.propose([1, 5], 8))
    assert seen == (0 if overlap else 8)
    drafter.observe(second)  # by now the first step is written, whatever the threads did
    assert (tables.tokens[[5, 6]] == likeliest(first.logits, 8).tokens).all()
    assert len(drafter.propose([1, 5], 8)) == 8
    assert (tables.tokens[7, 0] == NONE) == overlap
    drafter.end([1, 5, 7])
    assert (tables.tokens[7] == likeliest(second.logits, 8).tokens[0]).all()


def test_updates_go_breadth_first_and_the_later_node_wins():
    draft = Draft([9, 9, 9], [-1, 0, -1])  # inserted depth first: the second is the deepest, and the last to count
    seen = step(9, draft, 2, (0,))
    drafter = Diaa(Tables.empty(V), overlap=False)
    drafter.observe(seen)
    assert (drafter.tables.tokens[9] == likeliest(seen.logits, 8).tokens[2]).all()
    drafter = Diaa(Tables.empty(V), overlap=False, rule=Rule(accepted_only=True))
    drafter.observe(seen)
    assert (drafter.tables.tokens[9] == likeliest(seen.logits, 8).tokens[1]).all()


def test_between_refreshes_the_shape_stays():
    drafter = Diaa(random_tables(8, k=4), refresh=3)
    drafter.begin([1])
    full = [key for key in range(V) if drafter.tables.tokens[key, -1] != NONE]
    shapes = [drafter.propose([1, key], 4) for key in full[:4]]
    assert shapes[0].ranks.tolist() == shapes[1].ranks.tolist() == [1, 2, 3, 4]
    right = grow(drafter.tables, full[3], 4, Growth()).draft()
    assert (shapes[3].tokens == right.tokens).all()
    assert len(drafter.propose([1, full[0]], 2)) == 2  # a smaller budget is kept at once


# Beyond the paper


def test_calibration_learns_what_is_accepted():
    random, calibration = np.random.default_rng(0), Calibration(2)
    assert calibration([0.6, 0.2]) == [0.6, 0.2]
    for _ in range(600):  # in truth half of what the tables say of first ranks, and twice that of second ones
        first = random.random() < 0.3
        calibration.observe([(1, 0.6, first), (2, 0.2, not first and random.random() < 0.4 / 0.7)])
    assert calibration([0.6, 0.2]) == pytest.approx([0.3, 0.4], abs=0.05)
    assert sum(calibration([0.6, 0.4])) <= 1


@given(st.lists(st.floats(0, 1), max_size=30), st.lists(st.floats(0.1, 2), min_size=1, max_size=6), st.floats(0, 1))
@settings(max_examples=50, deadline=None)
def test_the_size_is_the_best_of_all(gains, increments, overhead):
    cost = budget.VerifyCost([2**k for k in range(len(increments))], np.cumsum(increments).tolist(), overhead)
    gains = sorted(gains, reverse=True)
    times = cost.steps(len(gains))
    n = budget.Sizing(cost)(gains)
    rates = [(1 + sum(gains[:m])) / times[m] for m in range(len(gains) + 1)]
    assert rates[n] == pytest.approx(max(rates)) and (np.diff(times) >= 0).all()


def test_pricing_a_step_by_the_rate_of_all_steps_beats_each_step_by_itself():
    """Steps in turn: one where much can be won, one where little can. The ratio spends too little on the first."""
    cost = budget.VerifyCost([1, 33], [1.0, 3.0])
    kinds = [[0.9**k for k in range(1, 33)], [0.12] * 32]
    rates = {}
    for rule in ("ratio", "rate"):
        sizing, won, spent = budget.Sizing(cost, rule), 0.0, 0.0
        for turn in range(400):
            gains = kinds[turn % 2]
            n = sizing(gains)
            sizing.observe(n, 1 + sum(gains[:n]))
            won, spent = won + 1 + sum(gains[:n]), spent + cost.steps(n)[-1]
        rates[rule] = won / spent
    assert rates["rate"] > rates["ratio"]


def test_the_measured_cost_is_a_curve(lm):
    cost = budget.measure(lm, 8, (1, 2, 4), repeats=2)
    assert list(cost.sizes) == [1, 2, 4] and min(cost.seconds) > 0


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 40), st.integers(0, 11), st.integers(1, 30), st.lists(st.integers(0, 11), max_size=6))
def test_a_mixed_tree_holds_the_likeliest_nodes_once_each(seed, root, limit, tokens):
    tables, continuing = random_tables(seed, 12), merging.Continuing()
    branch = merging.Branch(tokens, 3 if tokens else 0)
    found = merging.grow(tables, root, limit, None, branch, continuing)
    draft = found.draft(limit)
    assert len(draft) <= limit and found.chances == sorted(found.chances, reverse=True)
    children = list(zip(found.parents, found.tokens, strict=True))
    assert len(set(children)) == len(children)
    for parent in {-1, *range(len(draft))}:
        reach = found.chances[parent] if parent >= 0 else 1.0
        below = sum(c for p, c in zip(found.parents, found.chances, strict=True) if p == parent)
        assert below <= reach + 1e-6
    if limit >= 30 and tokens:  # a half-likely token is among so many
        assert found.matched.count(3) == 1
    alone = merging.grow(tables, root, limit, None, merging.Branch(), continuing)
    best = tree.grow(tables, root, 200, Growth(delta=1.0, alpha=1.0, tau=0.0))
    np.testing.assert_allclose(alone.chances, sorted(best.paths, reverse=True)[: len(alone.chances)], rtol=1e-6)


def test_a_match_is_drafted_beside_the_tables_candidates():
    tables = Tables.empty(V, 2)
    tables.tokens[3], tables.probabilities[3] = [7, 5], [0.4, 0.3]
    drafter = Extended(tables, calibrated=False)
    drafter.begin([2, 3, 5, 6])
    draft = drafter.propose([2, 3, 5, 6, 2, 3], 6)
    # 5 followed 2 3 and is the table's second candidate; half-likely, it leaves 0.5 / 0.7 of 0.4 to the first.
    assert draft.tokens.tolist() == [5, 7, 6, 2, 3, 7] and draft.parents.tolist() == [-1, -1, 0, 2, 3, 4]
    assert draft.ranks.tolist() == [2, 1, 0, 0, 0, 1]  # 0: not in the table's row


def test_trust_in_matches_grows_with_their_length_where_it_is_earned():
    continuing = merging.Continuing()
    assert continuing(1) == continuing(99) == 0.5
    for _ in range(30):
        continuing.observe(1, False)
        continuing.observe(40, True)
    assert continuing(1) < 0.1 and continuing(16) == continuing(99) > 0.9


def test_what_was_not_drafted_is_judged_too_and_nothing_behind_an_end():
    tables = Tables.empty(V, 2)
    tables.tokens[1], tables.probabilities[1] = [2, 3], [0.5, 0.4]
    tables.tokens[2], tables.probabilities[2] = [4, 5], [0.9, 0.05]
    dear = budget.Sizing(budget.VerifyCost([1, 2], [1.0, 100.0]))
    drafter = Extended(tables, sizing=dear, overlap=False, rule=Rule(accepted_only=True))
    drafter.begin([1])
    draft = drafter.propose([0, 1], 8)
    assert len(draft) == 0  # no node pays
    drafter.observe(Verified(1, draft, torch.randn(1, V), [], [3]))
    assert drafter.calibration([0.5, 0.4]) != [0.5, 0.4]  # the second candidate was said, the first was not
    assert drafter.calibration([0.9, 0.05]) == [0.9, 0.05]  # below the first: never reached

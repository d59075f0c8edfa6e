"""Invariants of sd.npu's graph schedules: every timeline can be run, and the optimum is one."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ondevice_papers.sdnpu.scheduling import RULES, Prefill, Timeline, execute, optimum

TIMES = st.one_of(st.integers(0, 12), st.floats(0, 12, width=32))


@st.composite
def prefills(draw, most_blocks: int = 6, most_chunks: int = 4, times=TIMES, slower: bool = False):
    """d may be less than p unless `slower`; times may differ by chunk."""
    blocks, chunks = draw(st.integers(1, most_blocks)), draw(st.integers(1, most_chunks))
    row = st.lists(times, min_size=blocks, max_size=blocks)
    by_chunk = draw(st.booleans())
    p, d = (draw(st.lists(row, min_size=chunks, max_size=chunks) if by_chunk else row) for _ in range(2))
    d = (np.add(p, d) if slower else np.array(d)).tolist()
    return Prefill(p, d, draw(st.lists(st.integers(0, 40), min_size=blocks, max_size=blocks)), chunks)


def check(timeline: Timeline, *, all_loaded: bool = True) -> None:
    """What the model of section 3.2 asks of any timeline; times to within rounding."""
    prefill, slack = timeline.prefill, 1e-9 * (1 + timeline.latency)
    starts, ends = timeline.compute_start, timeline.compute_end
    assert starts[0, 0] >= 0
    assert (starts.ravel()[1:] >= ends.ravel()[:-1] - slack).all()  # in order, one at a time
    assert np.allclose(ends - starts, np.where(timeline.graph == 2, prefill.d, prefill.p))
    loads = timeline.load_block
    assert len(set(loads.tolist())) == len(loads) == (prefill.blocks if all_loaded else 0)
    assert np.allclose(timeline.load_end - timeline.load_start, prefill.s[loads])
    assert (timeline.load_start >= 0).all()
    assert (timeline.load_start[1:] >= timeline.load_end[:-1] - slack).all()  # one load at a time
    for block, begin, end in zip(loads, timeline.load_start, timeline.load_end, strict=True):
        on_g2 = timeline.graph[:, block] == 2
        assert (starts[on_g2, block] >= end - slack).all()  # on G2 only once it is there
        assert (ends[~on_g2, block] <= begin + slack).all()  # on G1 only before; so not during the load
    if not all_loaded:
        assert (timeline.graph == 1).all()
    last = max([float(ends.max()), *timeline.load_end.tolist()])
    assert timeline.latency == last


@given(prefills(most_blocks=8, most_chunks=5))
def test_every_timeline_can_be_run(prefill):
    for name, rule in RULES.items():
        check(execute(prefill, rule(prefill)), all_loaded=name != "keep both")


@given(prefills())
def test_no_rule_is_better_than_the_optimum(prefill):
    best = optimum(prefill)
    check(best)
    for name, rule in RULES.items():
        if name != "keep both":
            assert best.latency <= execute(prefill, rule(prefill)).latency * (1 + 1e-9)


@given(prefills(most_blocks=8, most_chunks=5, slower=True))
def test_order_of_the_rules(prefill):
    found = {name: execute(prefill, rule(prefill)).latency for name, rule in RULES.items()}
    ours = found["ours"] * (1 - 1e-9)
    assert ours <= min(found["greedy (paper)"], found["naive"])
    assert found["naive"] <= found["synchronous"] * (1 + 1e-9)
    assert found["keep both"] <= ours * (1 + 1e-8)


def ticks(prefill: Prefill) -> int:
    """The least latency by search over whole time steps, with any idling of both engines: no use of our other code."""
    n, blocks = prefill.p.size, prefill.blocks
    p, d, s = (array.astype(int).ravel().tolist() for array in (prefill.p, prefill.d, prefill.s))
    frontier, seen, time = {(0, 0, frozenset(), -1, 0)}, set(), 0
    while True:
        following = set()
        for position, computing, done, loading, left in frontier:  # `computing` steps left of compute position - 1
            if position == n and not computing and len(done) == blocks:
                return time
            busy = (position - 1) % blocks if computing else -1
            starts = [(position, computing)]
            if not computing and position < n and position % blocks != loading:
                starts.append((position + 1, d[position] if position % blocks in done else p[position]))
            for to, running in starts:
                at_work = (to - 1) % blocks if to > position else busy
                picks = [(loading, left)]
                if loading < 0:
                    picks += [(block, s[block]) for block in range(blocks) if block not in done and block != at_work]
                for block, rest in picks:
                    ended = done | {block} if block >= 0 and rest == 1 else done
                    following.add((to, max(0, running - 1), ended, -1 if rest <= 1 else block, max(0, rest - 1)))
        seen |= frontier
        frontier, time = following - seen, time + 1


@given(prefills(most_blocks=3, most_chunks=3, times=st.integers(1, 3)))
def test_the_optimum_is_the_optimum_by_brute_force(prefill):
    small = Prefill(prefill.p, np.maximum(prefill.d, 1), prefill.s % 6 + 1)
    assert optimum(small).latency == ticks(small)


@st.composite
def tight(draw, most_blocks: int = 6, most_chunks: int = 4):
    """Graphs of several sizes, and memory from none to spare to some."""
    prefill = draw(prefills(most_blocks, most_chunks))
    sizes = st.lists(st.integers(1, 4), min_size=prefill.blocks, max_size=prefill.blocks)
    g1 = draw(sizes)
    g2 = g1 if draw(st.booleans()) else draw(sizes)
    memory = max(sum(g1), sum(g2)) + draw(st.integers(0, 6))
    return Prefill(prefill.p, prefill.d, prefill.s, g1=g1, g2=g2, memory=memory)


@given(tight(most_blocks=8))
def test_graphs_fit_the_memory_at_every_load(prefill):
    for name, rule in RULES.items():
        timeline = execute(prefill, rule(prefill))
        for begin in timeline.load_start if name != "keep both" else ():
            on_g1 = np.where(timeline.graph == 1, timeline.compute_end, 0).max(0)
            held = prefill.g1[on_g1 > begin].sum() + prefill.g2[timeline.load_block[timeline.load_start <= begin]].sum()
            assert held <= prefill.memory

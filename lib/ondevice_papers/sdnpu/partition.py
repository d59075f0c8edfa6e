"""Appendix A as something that runs: a Partition instance turned into a graph scheduling instance.

Partition asks whether positive integers a_1 .. a_m can be split into two halves of equal sum B. The reduction has two
chunks, a block with load time a_j and next to no computing for each integer, and behind them a long block that computes
for B and has nothing to load. Loads hide only while the long block computes: two windows of length B for 2 B of loads.

What the appendix gets wrong, and what is done here:
- It asks whether T is "not larger than the prefill completion time". That is no number, and some schedule always says
  yes: load all blocks first. Then the last compute ends last, at about 4 B, whatever the integers. The question needs
  a fixed limit.
- Its limit in mind, twice the long block, leaves out the items' own computes. Loaded in chunk 1's window, an item runs
  chunk 2 at d_j = epsilon > p_j, which puts off the second window; there are 2 m such computes. So the limit here is
  2 B + 2 m epsilon.
- "The only available periods" are not just the two windows: an item's load also runs beside the other items'
  computes. Both slips need epsilon "very small" made a number: without a partition some window is too short by 1/2 or
  more (1 where B is whole), so 2 m epsilon < 1/2 will do. Here epsilon = 1 / (4 m + 2), and all times are multiplied by
  4 m + 2 and so whole and exact.
- "Essentially equivalent" to Partition is not shown: the reduction goes one way. It also shows weak hardness only; with
  small whole numbers Partition is easy.
"""

from __future__ import annotations

from collections.abc import Sequence

from ondevice_papers.sdnpu.scheduling import Prefill, optimum


def scheduling_instance(integers: Sequence[int]) -> tuple[Prefill, float]:
    """The prefill, and the latency that it can keep to if and only if the integers can be halved.

    The long block is the last. Raises ValueError on no integer and on one below 1.
    """
    if not integers or min(integers) < 1 or any(a != int(a) for a in integers):
        raise ValueError(f"Partition is about positive integers, not {list(integers)}.")
    m = len(integers)
    scale = 4 * len(integers) + 2
    half = scale * sum(integers) // 2
    prefill = Prefill(
        p=[0.0] * m + [half],
        d=[1.0] * m + [half + 1],
        s=[scale * a for a in integers] + [0.0],
        chunks=2,
    )
    return prefill, 2.0 * half + 2 * m


def halves(integers: Sequence[int]) -> tuple[list[int], list[int]] | None:
    """Two parts of the integers with equal sums, read off an optimal schedule; None where there are none.

    At most 9 integers, beyond which `optimum` raises ValueError.
    """
    prefill, limit = scheduling_instance(integers)
    timeline = optimum(prefill)
    if timeline.latency > limit:
        return None
    early = set(timeline.load_block[timeline.load_start < timeline.compute_end[0, -1]].tolist())
    parts: tuple[list[int], list[int]] = [], []
    for item, value in enumerate(integers):
        parts[item not in early].append(value)
    return parts

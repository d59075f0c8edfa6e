"""Random prefills to schedule, in families that differ in what makes scheduling hard. Times have no unit."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd

from ondevice_papers.sdnpu.scheduling import RULES, Load, Prefill, Timeline, execute, optimum

Random = np.random.Generator


def homogeneous(random: Random) -> Prefill:
    """Equal blocks."""
    p = 10.0
    blocks = int(random.integers(3, 7))
    d = p * random.uniform(1, 2)
    s = random.uniform(1, 40)
    return Prefill([p] * blocks, [d] * blocks, [s] * blocks, int(random.integers(2, 6)))


def heterogeneous(
    random: Random, blocks: int = 0, chunks: int = 0, load: float = 2.0, slower: float = 2.0, faster: float = 1.0
) -> Prefill:
    """p from 1 to 20, d/p from `faster` to `slower`, s from next to nothing to 2 `load` mean computes."""
    blocks = blocks or int(random.integers(3, 7))
    chunks = chunks or int(random.integers(2, 6))
    p = random.uniform(1, 20, blocks)
    return Prefill(p, p * random.uniform(faster, slower, blocks), random.uniform(0.1, 2, blocks) * load * 10.5, chunks)


def paper_like(random: Random) -> Prefill:
    """Figure 8 with spread: N = 6, a load takes about two computes, G2 10 to 40 % slower."""
    p = random.uniform(8, 12, 6)
    return Prefill(p, p * random.uniform(1.1, 1.4, 6), random.uniform(18, 22, 6), int(random.integers(2, 6)))


def growing(random: Random) -> Prefill:
    """Later chunks take longer, as attention looks back further."""
    prefill = heterogeneous(random)
    factor = 1 + 0.2 * np.arange(prefill.chunks)[:, None]
    return Prefill(prefill.p * factor, prefill.d * factor, prefill.s)


FAMILIES: dict[str, Callable[[Random], Prefill]] = {
    "homogeneous, N 3-6, C 2-5": homogeneous,
    "heterogeneous, N 3-6, C 2-5": heterogeneous,
    "load ~ compute, C = 2": lambda random: heterogeneous(random, chunks=2, load=1.0),
    "long loads, s ~ a whole chunk": lambda random: heterogeneous(random, load=6.0),
    "G2 up to 4 times slower": lambda random: heterogeneous(random, slower=4.0),
    "paper-like, N = 6, C 2-5": paper_like,
    "chunks that grow": growing,
    "G2 faster in some blocks": lambda random: heterogeneous(random, faster=0.4),
    "N = 8, C = 3": lambda random: heterogeneous(random, 8, 3),
    "N = 10, C = 2": lambda random: heterogeneous(random, 10, 2),
}


def ratios(
    families: Mapping[str, Callable[[Random], Prefill]],
    count: int,
    seed: int = 0,
    rules: Mapping[str, Callable[[Prefill], list[Load]]] = RULES,
    execute: Callable[..., Timeline] = execute,
) -> pd.DataFrame:
    """Every rule's latency over the optimum's, on `count` instances of each family: family, rule, ratio.

    keep both is left out: it switches nothing.
    """
    rows = []
    for family, draw in families.items():
        random = np.random.default_rng(seed)
        for _ in range(count):
            prefill = draw(random)
            best = optimum(prefill).latency
            for name, rule in rules.items():
                if name != "keep both":
                    rows.append((family, name, execute(prefill, rule(prefill)).latency / best))
    return pd.DataFrame(rows, columns=["family", "rule", "ratio"])

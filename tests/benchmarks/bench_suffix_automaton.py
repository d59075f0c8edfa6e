"""The suffix automaton's cost a token, against the length of the text: reading it, and following what is said next.

`extend` appends a token, `lookup` is what a drafter does after each: the longest earlier match and 16 tokens that
follow it. Amortised both are constant, so the times a token should not rise with the length but for the processor's
caches, and the whole is linear. The text is drawn: half of it repeats stretches of what was before, half is new (Zipf).
`distinct` never matches, `loop` always does.

Run: python tests/benchmarks/bench_suffix_automaton.py [--repeats N]
"""

from __future__ import annotations

import argparse
import sys
import time
import tracemalloc
from collections.abc import Callable

import numpy as np

from ondevice.speculation.suffix_automaton import SuffixAutomaton

LENGTHS = (1_000, 10_000, 100_000)
VOCABULARY = 8192
REACH = 16
TARGET_US = 20.0  # extend and lookup, a token


def text(length: int, seed: int = 0) -> list[int]:
    """Half new, half repeated in stretches of 4 to 40 tokens."""
    random = np.random.default_rng(seed)
    found: list[int] = []
    while len(found) < length:
        stretch = int(random.integers(4, 40))
        if len(found) > stretch and random.random() < 0.5:
            start = int(random.integers(0, len(found) - stretch))
            found += found[start : start + stretch]
        else:
            found += (random.zipf(1.2, stretch) % VOCABULARY).tolist()
    return found[:length]


TEXTS: dict[str, Callable[[int], list[int]]] = {
    "text": text,
    "distinct": lambda length: list(range(length)),
    "loop": lambda length: [token % 7 for token in range(length)],
}


def extended(tokens: list[int]) -> SuffixAutomaton:
    """An automaton that has read the tokens one by one."""
    found = SuffixAutomaton()
    for token in tokens:
        found.extend((token,))
    return found


def followed(tokens: list[int]) -> SuffixAutomaton:
    """The same, and a lookup after each token."""
    found = SuffixAutomaton()
    for token in tokens:
        found.extend((token,))
        found.continuation(found.match, REACH)
    return found


def microseconds(run: Callable[[list[int]], object], tokens: list[int], repeats: int) -> float:
    """Median over the repeats, a token."""
    found = []
    for _ in range(repeats):
        start = time.process_time()  # steady on a busy machine
        run(tokens)
        found.append(1e6 * (time.process_time() - start) / len(tokens))
    return float(np.median(found))


def bytes_per_token(tokens: list[int]) -> float:
    """Of Python's memory that an automaton holds, without the text's own numbers."""
    tracemalloc.start()
    held = extended(tokens)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return size / len(held)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    print(f"Python {sys.version.split()[0]}; microseconds of CPU time a token, measured here")
    row = "{:<10}{:>9}{:>10}{:>18}{:>14}  {}"
    print(row.format("text", "tokens", "extend", "extend + lookup", "bytes/token", ""))
    for name, make in TEXTS.items():
        both: list[float] = []
        for length in LENGTHS:
            tokens = make(length)
            both.append(microseconds(followed, tokens, repeats))
            verdict = f"target {TARGET_US:g}: {'met' if both[-1] <= TARGET_US else 'MISSED'}"
            print(row.format(name, length, f"{microseconds(extended, tokens, repeats):.2f}", f"{both[-1]:.2f}",
                             f"{bytes_per_token(tokens):.0f}", verdict))  # fmt: skip
            sys.stdout.flush()
        print(f"{'':<10}a token costs {both[-1] / both[0]:.2f} times as much at {LENGTHS[-1]} as at {LENGTHS[0]}; "
              f"quadratic work would give {LENGTHS[-1] // LENGTHS[0]}")  # fmt: skip


if __name__ == "__main__":
    main()

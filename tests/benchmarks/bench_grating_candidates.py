"""10,000 candidates within a budget of 300 MB, on a trained reranker: memory, and what grows with their number.

Candidates are passages of the documentation corpus, over and over where there are not enough. Each run is a process of
its own, watched from outside, in MB (10^6 bytes) of anonymous and shared memory over the constructor's first line.

Run: python tests/benchmarks/bench_grating_candidates.py [MODEL] [BUDGET] [CANDIDATES ...]
"""

from __future__ import annotations

import json
import sys

from ondevice.meters import mark, sample, trim


def ranked(model: str, budget: float, count: int) -> None:
    """In a process of its own: rank so many passages for one question."""
    from ondevice import corpus
    from ondevice.grating.reranker import Reranker

    found = corpus.passages(corpus.documents("train"), corpus.tokenizer())
    texts = [found[place % len(found)].text for place in range(count)]
    trim()
    mark("baseline")
    with Reranker(model, memory_budget=budget) as reranker:
        best = reranker.rank("How is a file opened for reading?", texts, top_k=10)
        receipt = reranker.receipt
    mark("end")
    assert receipt is not None and len(best) == 10
    print(json.dumps({"seconds": sum(receipt.layer_seconds), "plan": receipt.plan_mb}))


def main(model: str, budget: float, counts: list[int]) -> int:
    missed = 0
    for count in counts:
        found = sample([sys.executable, __file__, "child", model, str(budget), str(count)])
        peak, told = found.peak("anonymous", "shared") / 1e6, found.result
        missed += peak > budget
        print(f"{count:6} candidates: {peak:.1f} MB of {budget:g}, planned {sum(told['plan'].values()):.1f}, "
              f"{told['seconds']:.0f} s: {'met' if peak <= budget else 'NOT MET'}", flush=True)  # fmt: skip
    return int(missed > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        ranked(sys.argv[2], float(sys.argv[3]), int(sys.argv[4]))
    else:
        words = sys.argv[1:]
        sys.exit(main(words[0] if words else "minilm-reranker", float(words[1]) if words[1:] else 300,
                      [int(word) for word in words[2:]] or [1000, 10_000]))  # fmt: skip

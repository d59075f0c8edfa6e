"""10,000 candidates within a budget of 300 MB, on a trained reranker: memory, and what grows with their number.

Candidates are passages of the documentation corpus, over and over where there are not enough. Each run is a process of
its own, watched from outside, in MB (10^6 bytes) of anonymous and shared memory over its imports; index is what the
plan states for token ids, scores and results. The bar: within the budget, with hidden states in a file, and from the
fewest candidates to the most no more growth than the index's.

Run: python tests/benchmarks/bench_grating_candidates.py [--model NAME] [--budget MB] [--candidates N ...]
"""

from __future__ import annotations

import argparse
import json
import sys

from ondevice.meters import mark, sample, trim

MB = 1_000_000


def ranked(model: str, budget: float, count: int) -> None:
    """In a process of its own: rank so many passages for one question."""
    import torch

    from ondevice import corpus
    from ondevice.grating.reranker import Reranker

    torch.set_num_threads(2)
    found = corpus.passages(corpus.documents("train"), corpus.tokenizer())
    texts = [found[place % len(found)].text for place in range(count)]
    for dtype in (torch.float32, torch.bfloat16):
        torch.ones(8, 64, dtype=dtype) @ torch.ones(64, 64, dtype=dtype)
    Reranker(model).close()  # what preparing and reading a tokenizer import is no part of the growth
    trim()
    mark("baseline")
    with Reranker(model, budget) as reranker:
        mark("loaded")
        best = reranker.rank("How is a file opened for reading?", texts, top_k=10)
        mark("end")
        report = reranker.report
    assert report is not None and len(best) == 10
    parts = report.plan.parts
    print(json.dumps({"offload": report.plan.offload, "chunk": report.plan.chunk, "index": parts["index"] / MB,
                      "seconds": float(report.seconds.sum() + report.embedding_seconds),
                      "waited": report.offload_waited, "plan": report.plan.total / MB}))  # fmt: skip


def judged(model: str, budget: float, counts: list[int]) -> None:
    """A line a run, and the bars."""
    peaks, indexes = [], []
    for count in sorted(counts):
        found = sample([sys.executable, __file__, "--child", "--model", model, "--budget", str(budget), "--candidates",
                        str(count)])  # fmt: skip
        peak, told = found.peak("anonymous", "shared") / MB, found.result
        print(f"{count:6} candidates: {peak:.1f} MB of {budget:g} (planned {told['plan']:.1f}, index "
              f"{told['index']:.1f}), offload {told['offload']}, {told['seconds']:.0f} s, {told['waited']:.0f} of them "
              f"waiting for hidden states", flush=True)  # fmt: skip
        print(f"    {'met' if peak <= budget else 'NOT MET'}: within the budget")
        peaks.append(peak)
        indexes.append(told["index"])
    grown, stated = peaks[-1] - peaks[0], indexes[-1] - indexes[0]
    print(f"{'met' if grown <= stated else 'NOT MET'}: {grown:.1f} MB more for the most candidates; index {stated:.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pydocs-reranker")
    parser.add_argument("--budget", type=float, default=300)
    parser.add_argument("--candidates", type=int, nargs="+", default=[5000, 10000])
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        ranked(given.model, given.budget, given.candidates[0])
    else:
        judged(given.model, given.budget, given.candidates)

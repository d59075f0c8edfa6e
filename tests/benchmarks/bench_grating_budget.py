"""The memory budget, measured from outside: random configurations, each in a process of its own that another watches.

    python tests/benchmarks/bench_grating_budget.py [configurations, 200] [seed, 0] [fewest MB, 60]

Real tokenizers, mixed lengths, 1 to 10,000 texts, now and then one of 5 MB, 1, 2 or default threads, budgets from 60 to
300 MB. What counts is the most anonymous and shared memory over the constructor's first line, and what the page cache
holds of the weights afterwards. A budget may be refused; a run above its budget is a violation, and exit code 1.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from ondevice import corpus
from ondevice.meters import cached_bytes, evict, mark, sample, trim
from ondevice_programs.reranker.folder import prepare

MODELS = ("minilm-reranker", "smollm2-reranker")
TOKENS = 120_000  # of a configuration, roughly: what keeps it short


def configuration(number: int, seed: int, fewest: float) -> dict:
    drawn = np.random.default_rng([seed, number])
    count = int(np.exp(drawn.uniform(0, np.log(10_000))))
    longest = max(8, min(2_000, TOKENS * 4 // count))  # characters
    return {
        "number": number, "model": str(drawn.choice(MODELS)), "budget": round(float(drawn.uniform(fewest, 300))),
        "texts": count, "longest": int(drawn.integers(8, longest + 1)), "huge": bool(drawn.random() < 0.1),
        "threads": int(drawn.choice([0, 1, 2])), "seed": seed, "mode": str(drawn.choice(["set", "order"])),
        "threshold": 0.5 if drawn.random() < 0.5 else None, "calls": int(drawn.integers(1, 4)),
    }  # fmt: skip


def texts(of: dict) -> list[str]:
    drawn = np.random.default_rng([of["seed"], of["number"], 1])
    whole = "\n".join(document.docstring for document in corpus.documents("test")[:400])
    starts = drawn.integers(0, len(whole) - of["longest"], of["texts"])
    lengths = drawn.integers(1, of["longest"] + 1, of["texts"])
    found = [whole[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    if of["huge"]:
        found[0] = (whole * (5_000_000 // len(whole) + 1))[:5_000_000]
    return found


def child(of: dict) -> None:
    import torch

    from ondevice_programs.reranker import Reranker

    if of["threads"]:
        torch.set_num_threads(of["threads"])
    given = texts(of)
    trim()
    mark("baseline")
    try:
        with Reranker(of["model"], memory_budget=of["budget"], mode=of["mode"], threshold=of["threshold"]) as reranker:
            for _ in range(of["calls"]):
                reranker.rank("How is a file opened?", given, top_k=5)
            said = {"peak": reranker.receipt.peak_mb, "plan": reranker.receipt.plan_mb}
    except ValueError as error:
        said = {"refused": str(error)}
    mark("end")
    print(json.dumps(said))


def main(count: int = 200, seed: int = 0, fewest: float = 60.0) -> int:
    over, refused, worst = 0, 0, 0.0
    corpus.documents("test")
    folders = {model: prepare(model) for model in MODELS}
    for number in range(count):
        of = configuration(number, seed, fewest)
        files = sorted(Path(folders[of["model"]]).glob("*.safetensors"))
        evict(files)
        found = sample([sys.executable, __file__, "child", json.dumps(of)], environment={"TOKENIZERS_PARALLELISM": ""})
        said = found.result
        if "refused" in said:
            refused += 1
            print("refused", of["model"], of["budget"], of["texts"], said["refused"][-60:], flush=True)
            continue
        grown = found.peak("anonymous", "shared") / 1e6
        left = cached_bytes(files) / 1e6
        worst = max(worst, (grown + left) / of["budget"])
        bad = grown + left > of["budget"]
        over += bad
        plan = {name: round(size, 1) for name, size in said["plan"].items()}
        print(f"{'OVER' if bad else 'held'} {grown + left:.1f} of {of['budget']} MB, planned {sum(plan.values()):.1f}:",
              of, plan if bad else "", flush=True)  # fmt: skip
    print(f"{over} violations, {refused} refused, of {count}; the most was {100 * worst:.0f} % of a budget")
    return int(over > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(json.loads(sys.argv[2]))
    else:
        sys.exit(main(*(kind(word) for kind, word in zip((int, int, float), sys.argv[1:], strict=False))))

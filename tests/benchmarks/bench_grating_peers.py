"""Rerankers side by side on recorded pools of documentation questions: seconds, peak memory and nDCG@10.

The same weights (a bundled reranker) in sentence-transformers (torch; ONNX int8 where optimum is installed), by
accelerate's offload, and in ours: unpruned, in a budget, and with a calibrated margin rule at K = 10. Each runs in a
process of its own; memory is resident growth over the imports. FlashRank and llama.cpp need models of their own that
have to be downloaded, and are left out.

Run: python tests/benchmarks/bench_grating_peers.py [MODEL, minilm-reranker] [POOLS, 20]
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ondevice.meters import mark, sample, trim

WAYS = ("sentence-transformers", "sentence-transformers, onnx int8", "accelerate offload", "ours", "ours, 150 MB",
        "ours, pruned")  # fmt: skip


def ndcg(order: Sequence[int], relevant: np.ndarray, k: int = 10) -> float:
    gains = 1 / np.log2(np.arange(2, k + 2))
    best = gains[: int(min(k, relevant.sum()))].sum()
    return float((relevant[list(order)[:k]] * gains[: len(order[:k])]).sum() / best) if best else 0.0


def opened(way: str, model: str) -> Callable[[str, list[str]], list[int]]:
    """Ranks documents: places, best first."""
    if way.startswith("ours"):
        from ondevice import evidence
        from ondevice.grating import study
        from ondevice.grating.reranker import Reranker

        made: Any = Reranker(model, calibration=False, memory_budget=150 if "150" in way else None)
        if way.endswith("pruned"):
            scores, settings = (evidence.load("grating", name) for name in ("scores", "calibrated"))
            rule = study.rule_of(scores, settings, model, study.QUESTIONS, 10, study.MARGIN)
            made._rule = lambda k: rule
        return lambda query, texts: [one["corpus_id"] for one in made.rank(query, texts, top_k=10)]
    from sentence_transformers import CrossEncoder

    from ondevice.grating.reranker.folder import prepare

    options: dict[str, Any] = {}
    if way.endswith("int8"):
        options = {"backend": "onnx", "model_kwargs": {"file_name": "onnx/model_qint8_avx512.onnx"}}
    elif way.startswith("accelerate"):
        options = {"model_kwargs": {"device_map": {"": "disk"}, "offload_folder": "/tmp/offload"}}
    encoder = CrossEncoder(str(prepare(model)), device="cpu", **options)
    return lambda query, texts: [one["corpus_id"] for one in encoder.rank(query, texts, top_k=10, batch_size=4)]


def child(way: str, model: str, count: int) -> None:
    import sentence_transformers  # noqa: F401

    from ondevice.grating import reranker  # noqa: F401
    from ondevice.grating.questions import QUESTIONS, pools

    asked = pools(QUESTIONS, "test")[:count]
    trim()
    mark("baseline")
    rank = opened(way, model)
    rank(asked[0].query, list(asked[0].documents))
    began, found = time.perf_counter(), []
    for one in asked:
        found.append(ndcg(rank(one.query, list(one.documents)), one.relevant))
    seconds = (time.perf_counter() - began) / len(asked)
    mark("end")
    print(json.dumps({"seconds": seconds, "ndcg@10": float(np.mean(found))}))


def main(model: str = "minilm-reranker", count: int = 20) -> None:
    for way in WAYS:
        try:
            found = sample([sys.executable, __file__, "child", way, model, str(count)])
        except RuntimeError as error:
            print(f"{way:34} left out: {str(error).rpartition(': ')[2][:80]}", flush=True)
            continue
        peak = found.peak("resident") / 1e6
        print(f"{way:34} {1000 * found.result['seconds']:7.0f} ms a pool, {peak:6.0f} MB, nDCG@10 "
              f"{found.result['ndcg@10']:.3f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        main(*sys.argv[1:2], *(int(word) for word in sys.argv[2:3]))

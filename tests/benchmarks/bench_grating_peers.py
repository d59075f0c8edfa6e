"""Rerankers side by side, on the same weights and recorded pools: seconds, peak memory, nDCG@10 and equal scores.

Each way runs in a process of its own, watched from outside; ways take turns within a round, so that load meets them
alike. Memory is the peak of resident growth over the imports, loading included. Scores are compared as logits with
sentence-transformers' in torch; int8 and pruning change them. Of files that another engine needs (a graph, GGUF) the
making is not counted. All peers take batches of 4 of like lengths.

sentence-transformers' own ONNX and OpenVINO backends need optimum, which no version of transformers that it itself
needs goes with. So the engines below them are called directly, on graphs that torch traces; int8 is onnxruntime's
dynamic quantisation, and nncf's with ranges from other pools. FlashRank would have to download a model of its own, and
llama.cpp ended on a file of these weights without a vocabulary: both are left out.

Run: python tests/benchmarks/bench_grating_peers.py [--model minilm-reranker] [--pools 20] [--rounds 3] [--only WORD]
Models are of BERT's type with one score. The peers: pip install -e '.[peers]'.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ondevice.meters import Sampled, mark, sample, trim

PLAIN, ONNX, ONNX8, OPENVINO, OPENVINO8, OFFLOAD = (
    "sentence-transformers", "onnxruntime", "onnxruntime, int8", "openvino", "openvino, int8", "accelerate, disk",
)  # fmt: skip
OURS, SMALL, PRUNED = "ours", "ours, 150 MB", "ours, pruned"
WAYS = (PLAIN, ONNX, ONNX8, OPENVINO, OPENVINO8, OFFLOAD, OURS, SMALL, PRUNED)
NAMES = ["input_ids", "attention_mask", "token_type_ids"]  # what a graph is given
BATCH, K, THREADS = 4, 10, torch.get_num_threads()
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}
MMAP = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16)}  # with which accelerate's offload holds least
Logits = Callable[[str, list[str]], np.ndarray]  # of a query and N documents: [N], nan for what was pruned


# Files, made once


def keep(folder: Path, split: str, count: int) -> None:
    """The first pools of `notes and pages` of a split, so that no other process has to search for them."""
    from ondevice_studies.grating.sets import NOTES, pools

    rows = [(one.query, one.documents, one.relevant.tolist()) for one in pools(NOTES, split)[:count]]
    (folder / f"{split}.json").write_text(json.dumps(rows), encoding="utf-8")


def asked(folder: Path, split: str) -> list[tuple[str, list[str], np.ndarray]]:
    """Query, N documents, [N] whether each is relevant, of every pool that was kept."""
    rows = json.loads((folder / f"{split}.json").read_text(encoding="utf-8"))
    return [(query, texts, np.array(relevant)) for query, texts, relevant in rows]


def classifier(model: str, **options: Any) -> Any:
    """transformers' model of the prepared weights."""
    from transformers import AutoModelForSequenceClassification

    from ondevice_programs.reranker.folder import prepare

    return AutoModelForSequenceClassification.from_pretrained(str(prepare(model)), **options).eval()


def make(way: str, model: str, folder: Path) -> None:
    """The file that a way opens, in a folder that other ways share."""
    network = classifier(model)
    example = {name: torch.ones(2, 9, dtype=torch.int64) for name in NAMES}
    if way in (ONNX, ONNX8):
        from onnxruntime.quantization import QuantType, quantize_dynamic

        path = str(folder / f"{way}.onnx")
        axes = {name: {0: "rows", 1: "tokens"} for name in NAMES} | {"logits": {0: "rows"}}
        torch.onnx.export(network, tuple(example.values()), path, dynamo=False, input_names=NAMES,
                          output_names=["logits"], dynamic_axes=axes)  # fmt: skip
        if way == ONNX8:  # where 8-bit sums can overflow, weights take 7
            narrow = "vnni" not in Path("/proc/cpuinfo").read_text(encoding="utf-8")
            quantize_dynamic(path, path, weight_type=QuantType.QInt8, per_channel=True, reduce_range=narrow)
    elif way in (OPENVINO, OPENVINO8):
        import openvino

        graph = openvino.convert_model(network, example_input=example)
        if way == OPENVINO8:
            import nncf

            seen = nncf.Dataset(calibrating(model, folder))
            graph = nncf.quantize(graph, seen, model_type=nncf.ModelType.TRANSFORMER)
        openvino.save_model(graph, folder / f"{way}.xml", compress_to_fp16=False)


def calibrating(model: str, folder: Path) -> list[dict[str, np.ndarray]]:
    """Batches of other pools, that ranges of activations are taken from."""
    read = tokenizer(model)
    return [read([query] * BATCH, texts[:BATCH]) for query, texts, _ in asked(folder, "validation")]


# The ways


def tokenizer(model: str) -> Callable[[list[str], list[str]], dict[str, np.ndarray]]:
    """Pairs as CrossEncoder reads them: cut to the model's length, padded to the longest."""
    from transformers import AutoTokenizer

    from ondevice_programs.reranker.folder import prepare

    made = AutoTokenizer.from_pretrained(str(prepare(model)))
    return lambda queries, texts: dict(made(queries, texts, padding=True, truncation=True, return_tensors="np"))


def batched(model: str, forward: Callable[[dict[str, np.ndarray]], Any]) -> Logits:
    """Logits by batches, the longest documents first, as CrossEncoder makes them."""
    read = tokenizer(model)

    def logits(query: str, texts: list[str]) -> np.ndarray:
        found, order = np.empty(len(texts)), np.argsort([-len(text) for text in texts])
        for part in np.split(order, range(BATCH, len(order), BATCH)):
            found[part] = np.asarray(forward(read([query] * len(part), [texts[place] for place in part])))[:, 0]
        return found

    return logits


def opened(way: str, model: str, folder: Path) -> Logits:
    """A way with its weights loaded."""
    if way.startswith("ours"):
        return ours(way, model)
    if way in (ONNX, ONNX8):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = THREADS
        session = onnxruntime.InferenceSession(folder / f"{way}.onnx", options, providers=["CPUExecutionProvider"])
        return batched(model, lambda batch: session.run(["logits"], batch)[0])
    if way in (OPENVINO, OPENVINO8):
        import openvino

        exact = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": THREADS}  # else bfloat16 where it is there
        graph = openvino.Core().compile_model(folder / f"{way}.xml", "CPU", exact)
        return batched(model, lambda batch: graph(batch)[0])
    if way == OFFLOAD:
        places = {"bert.embeddings": "cpu", "bert.encoder": "disk", "bert.pooler": "cpu", "classifier": "cpu"}
        network = classifier(model, device_map=places, offload_folder=str(folder))
        run = torch.inference_mode()(lambda batch: network(**{k: torch.from_numpy(v) for k, v in batch.items()}))
        return batched(model, lambda batch: run(batch).logits)
    from sentence_transformers import CrossEncoder

    from ondevice_programs.reranker.folder import prepare

    encoder = CrossEncoder(str(prepare(model)), device="cpu", activation_fn=torch.nn.Identity())
    return lambda query, texts: encoder.predict([(query, text) for text in texts], batch_size=BATCH)


def ours(way: str, model: str) -> Logits:
    """Ours; pruned, the K best by the margin rule, ranked by final scores, as numbers that keep their order."""
    from ondevice import evidence
    from ondevice_programs.reranker import Reranker
    from ondevice_studies.grating import study
    from ondevice_studies.grating.sets import NOTES

    made: Any = Reranker(model, calibration=False, memory_budget=150 if way == SMALL else None,
                         mode="order" if way == PRUNED else "set", activation_fn=torch.nn.Identity())  # fmt: skip
    if way == PRUNED:
        settings = evidence.load("grating", "calibrated")
        rule = study.rule_of(study.recorded(), settings, model, NOTES, K, study.MARGIN)
        made._rule = lambda *_: rule

    def logits(query: str, texts: list[str]) -> np.ndarray:
        best = made.rank(query, texts, top_k=K if way == PRUNED else None)
        found = np.full(len(texts), np.nan)
        found[[one["corpus_id"] for one in best]] = [-place if way == PRUNED else one["score"]
                                                     for place, one in enumerate(best)]  # fmt: skip
        return found

    return logits


# Measuring


def ndcg(order: Sequence[int], relevant: np.ndarray, k: int = K) -> float:
    gains = 1 / np.log2(np.arange(2, k + 2))
    best = gains[: int(min(k, relevant.sum()))].sum()
    return float((relevant[list(order)[:k]] * gains[: len(order[:k])]).sum() / best) if best else 0.0


def child(way: str, model: str, folder: Path) -> None:
    """In a process of its own: load, warm up, rank every pool; prints seconds a pool, nDCG@10 and logits."""
    import sentence_transformers  # noqa: F401

    from ondevice import evidence  # noqa: F401

    packages = {"onnxruntime": (ONNX, ONNX8), "openvino": (OPENVINO, OPENVINO8)}
    for package in (name for name, ways in packages.items() if way in ways):
        importlib.import_module(package)
    pools = asked(folder, "test")
    trim()
    mark("baseline")
    logits = opened(way, model, folder)
    logits(*pools[0][:2])
    began = time.perf_counter()
    found = [logits(query, texts) for query, texts, _ in pools]
    seconds = (time.perf_counter() - began) / len(pools)
    mark("end")
    gained = [ndcg(np.argsort(-each, kind="stable"), pool[2]) for each, pool in zip(found, pools, strict=True)]
    print(json.dumps({"seconds": seconds, "ndcg": float(np.mean(gained)), "logits": np.concatenate(found).tolist()}))


def made(ways: Sequence[str], model: str, folder: Path) -> list[str]:
    """The ways whose files could be made; of others says why not."""
    left = []
    for way in ways:
        words = [sys.executable, __file__, "make", way, model, str(folder)]
        needed = way in (ONNX, ONNX8, OPENVINO, OPENVINO8)
        done = needed and subprocess.run(words, capture_output=True, text=True, check=False)
        if done and done.returncode:
            print(f"{way:22} left out: {(done.stderr.strip().splitlines() or [''])[-1][:90]}", flush=True)
        else:
            left.append(way)
    return left


def table(rounds: dict[str, list[Sampled]]) -> None:
    """Medians over rounds; a ratio is to sentence-transformers of the same round."""
    plain = [one.result for one in rounds[PLAIN]]
    for way, runs in rounds.items():
        found = [one.result for one in runs]
        seconds = np.array([one["seconds"] for one in found])
        ratio = np.median(seconds / [one["seconds"] for one in plain])
        peak = np.median([one.peak("resident") for one in runs]) / 1e6
        apart = np.abs(np.array(found[0]["logits"]) - plain[0]["logits"]).max()
        equal = "pruned" if way == PRUNED else f"logits within {apart:.1e}"
        print(f"{way:22} {1000 * np.median(seconds):6.0f} ms a pool, {ratio:5.2f} of its time, {peak:5.0f} MB, "
              f"nDCG@10 {found[0]['ndcg']:.3f}, {equal}", flush=True)  # fmt: skip


def main() -> None:
    """Make files, take turns, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="minilm-reranker")
    parser.add_argument("--pools", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="a word of the ways to run beside sentence-transformers")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        keep(folder, "test", wanted.pools)
        keep(folder, "validation", 75)
        ways = made([way for way in WAYS if way == PLAIN or wanted.only in way], wanted.model, folder)
        rounds: dict[str, list[Sampled]] = {way: [] for way in ways}
        for _ in range(wanted.rounds):
            for way in list(rounds):
                words = [sys.executable, __file__, "child", way, wanted.model, str(folder)]
                try:
                    rounds[way].append(sample(words, environment=ENVIRONMENT | (MMAP if way == OFFLOAD else {})))
                except RuntimeError as error:
                    print(f"{way:22} left out: {str(error).rpartition(': ')[2][:90]}", flush=True)
                    del rounds[way]
    table(rounds)


if __name__ == "__main__":
    if sys.argv[1:2] in (["child"], ["make"]):
        {"child": child, "make": make}[sys.argv[1]](sys.argv[2], sys.argv[3], Path(sys.argv[4]))
    else:
        main()

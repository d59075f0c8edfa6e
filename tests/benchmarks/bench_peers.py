"""Other programs' answers to Spec-Bench's requests beside ours: one GGUF file, whole greedy answers in turns.

llama.cpp decodes plainly, and with the drafts of llama-cpp-python's prompt lookup. OpenVINO GenAI decodes plainly, and
with its own prompt lookup. Ours are the fastest plain decoding, and the mixture in `8bit-rows`. Each program has its
defaults but for the number of threads. Times are per token behind an answer's first. Ratios have 95 % over requests. A
peer that is not installed is left out (`pip install llama-cpp-python openvino-genai`).

Run: python tests/benchmarks/bench_peers.py [MODEL] [--each 4] [--tokens 64] [--threads 1]
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from itertools import groupby
from time import perf_counter, sleep
from typing import Any

import numpy as np

from ondevice import chat, models, prompts
from ondevice.causal_lm.lean import engine
from ondevice.models import Loaded
from ondevice.speculation import Drafter
from ondevice.speculation.bundled import mixture
from ondevice_programs.bench.drafters import answered
from ondevice_programs.bench.predictions import speed

PAUSE = 0.3  # s: threads of the program before keep turning for a while
LOOKED_UP = (2, 5, 10)  # tokens that prompt lookup drafts: llama-cpp-python's advice for a CPU, between, its default
NGRAM = 2  # tokens of its key, by default
PLAIN = "ours, plain in 4 bits, integers"
Answer = Callable[[Sequence[int]], tuple[list[int], float]]  # of a prompt's ids: tokens, seconds behind the first


class LlamaCpp:
    """A context of llama.cpp, answering greedily, with `drafted` tokens of a prompt lookup in each pass or none."""

    def __init__(self, loaded: Loaded, threads: int, tokens: int, drafted: int = 0) -> None:
        import llama_cpp
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        self._c: Any = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._quiet, None)
        self._draft = LlamaPromptLookupDecoding(NGRAM, drafted) if drafted else None
        self._tokens, self._ends = tokens, loaded.eos_token_ids
        parameters = llama_cpp.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(loaded.gguf.path).encode(), parameters)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = settings.n_batch = 4096
        settings.n_threads = settings.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, settings)

    def answer(self, ids: Sequence[int]) -> tuple[list[int], float]:
        self._c.llama_memory_clear(self._c.llama_get_memory(self._context), True)
        text = [*ids, int(self._read(ids, 0, 1)[-1])]
        began = perf_counter()
        while len(text) < len(ids) + self._tokens and text[-1] not in self._ends:
            room = len(ids) + self._tokens - len(text) - 1
            draft = self._draft(np.array(text))[:room].tolist() if self._draft and room else []
            said = self._read([text[-1], *draft], len(text) - 1, 1 + len(draft)).tolist()
            right = next((n for n, token in enumerate(draft) if token != said[n]), len(draft))
            new = said[: right + 1]
            text += new[: next((n + 1 for n, token in enumerate(new) if token in self._ends), len(new))]
            self._c.llama_memory_seq_rm(self._c.llama_get_memory(self._context), 0, len(text) - 1, -1)
        return text[len(ids) :], perf_counter() - began

    def _read(self, ids: Sequence[int], start: int, wanted: int) -> np.ndarray:
        """The likeliest token after each of the last `wanted` ids."""
        batch = self._c.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for row, token in enumerate(ids):
            batch.token[row], batch.pos[row], batch.n_seq_id[row] = token, start + row, 1
            batch.seq_id[row][0], batch.logits[row] = 0, row >= len(ids) - wanted
        assert not self._c.llama_decode(self._context, batch)
        self._c.llama_synchronize(self._context)
        self._c.llama_batch_free(batch)
        logits = np.ctypeslib.as_array(self._c.llama_get_logits(self._context), (wanted, self._vocabulary))
        return logits.argmax(-1)


class OpenVino:
    """A pipeline of OpenVINO GenAI on a CPU, answering greedily, with its prompt lookup of `drafted` tokens or none."""

    def __init__(self, loaded: Loaded, threads: int, tokens: int, drafted: int = 0) -> None:
        import openvino
        import openvino_genai

        lookup = {"prompt_lookup": True} if drafted else {}
        self._pipeline = openvino_genai.LLMPipeline(
            str(loaded.gguf.path), "CPU", INFERENCE_NUM_THREADS=threads, **lookup
        )
        self._settings = openvino_genai.GenerationConfig(
            max_new_tokens=tokens, do_sample=False, eos_token_id=min(loaded.eos_token_ids),
            stop_token_ids=set(loaded.eos_token_ids),
        )  # fmt: skip
        if drafted:
            self._settings.num_assistant_tokens, self._settings.max_ngram_size = drafted, NGRAM
        self._inputs, self._tensor = openvino_genai.TokenizedInputs, openvino.Tensor

    def answer(self, ids: Sequence[int]) -> tuple[list[int], float]:
        given = self._inputs(self._tensor(np.array([ids])), self._tensor(np.ones((1, len(ids)), np.int64)))
        began = perf_counter()
        result = self._pipeline.generate(given, self._settings)
        seconds = perf_counter() - began
        return list(result.tokens[0]), seconds - result.perf_metrics.get_ttft().mean / 1e3


def ours(loaded: Loaded, threads: int, tokens: int, weights: Any, drafter: Drafter | None, nodes: int = 1) -> Answer:
    lm = engine(loaded, threads=threads, weights=weights, arithmetic="int8", drafts=drafter is not None)

    def answer(ids: Sequence[int]) -> tuple[list[int], float]:
        log = answered(lm, drafter or Drafter(), ids, tokens, loaded.eos_token_ids, nodes)
        return log["tokens"], log["seconds"] - log["first"]

    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", default=models.SMOLLM2, help="a GGUF file or a bundled name of one")
    parser.add_argument("--each", type=int, default=4, help="requests of a task")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, at most")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    loaded = models.load(options.model)
    given = loaded, options.threads, options.tokens
    answers: dict[str, Answer] = {
        PLAIN: ours(*given, "4bit", None),
        "ours, plain in 8bit-rows": ours(*given, "8bit-rows", Drafter()),
        "ours, mixture of 8 nodes in 8bit-rows": ours(*given, "8bit-rows", mixture(), 8),
    }
    for name, peer, package in (
        ("llama.cpp", LlamaCpp, "llama_cpp"), ("OpenVINO GenAI", OpenVino, "openvino_genai"),
    ):  # fmt: skip
        if importlib.util.find_spec(package):
            answers[f"{name}, plain"] = peer(*given).answer
            for drafted in LOOKED_UP:
                answers[f"{name}, prompt lookup of {drafted}"] = peer(*given, drafted).answer
    by_task = groupby(sorted(prompts.spec_bench(), key=lambda prompt: prompt.task), key=lambda prompt: prompt.task)
    requests = [prompt for _, group in by_task for prompt in list(group)[: options.each]]
    times: dict[str, list[tuple[float, int]]] = {name: [] for name in answers}
    for number, prompt in enumerate(requests):
        ids = chat.prompt_ids(loaded.tokenizer, prompt.text)
        for name in [*answers][number % len(answers) :] + [*answers][: number % len(answers)]:
            sleep(PAUSE)
            tokens, seconds = answers[name](ids)
            times[name].append((seconds, len(tokens) - 1))
    print(f"{options.model}, {len(requests)} requests, threads: {options.threads}")
    for name, pairs in times.items():
        seconds, tokens = (sum(pair[k] for pair in pairs) for k in (0, 1))
        value, low, high = speed(pairs, times[PLAIN])
        print(f"{name:40}{1e3 * seconds / tokens:8.2f} ms per token, {value:.2f} [{low:.2f}, {high:.2f}] times {PLAIN}")


if __name__ == "__main__":
    main()

"""What a forward costs in three engines: transformers, the lean one, and llama.cpp where llama-cpp-python is installed.

T(n) of n rows, a binary tree, behind `past` cached rows (llama.cpp: a chain, which costs it the same), and a prompt's
forward with its last logits. Engines take turns within a repeat, so that load meets them alike; medians, in float32,
with ratios and their quartiles over repeats. Before timing, a greedy answer of each engine is compared.

Run: python tests/benchmarks/bench_lean.py [--model smollm2-135m-instruct] [--threads 1] [--past 256] [--repeats 60]
The peer: pip install -e '.[peers]', which builds llama.cpp.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ondevice import models
from ondevice.causal_lm import CausalLM, TokenTree
from ondevice.causal_lm.lean import Lean

ROWS = (1, 2, 4, 8, 16, 33, 64)
PROMPT = 512


class Ours:
    """A session's forwards."""

    def __init__(self, lm: CausalLM, past: list[int]) -> None:
        self.lm, self.session = lm, lm.start(len(past) + max(ROWS))
        self.session.prefill(past)

    def rows(self, n: int) -> np.ndarray:
        """[n, V] after a tree of n nodes, dropped again."""
        logits = self.session.verify(TokenTree(np.arange(n) + 3, (np.arange(n) + 1) // 2 - 1))
        self.session.keep([])
        return logits.numpy()

    def prompt(self, ids: list[int]) -> np.ndarray:
        """[V] after a prompt, in a session of its own."""
        return self.lm.start(len(ids)).prefill(ids).numpy()

    def answer(self, ids: list[int], count: int) -> list[int]:
        """Greedy ids."""
        session = self.lm.start()
        logits, found = session.prefill(ids), []
        for _ in range(count):
            found.append(int(logits.argmax()))
            logits = session.extend(found[-1:])[0]
        return found


class LlamaCpp:
    """llama.cpp through its C interface, on a GGUF file of the same weights in float32.

    Its cache is in float16, its default: in float32 its attention is slower.
    """

    def __init__(self, model: Any, past: list[int], threads: int, folder: Path) -> None:
        import llama_cpp

        sys.path.append(str(Path(__file__).parents[1]))
        from tiny import write_gguf

        self.c, self.vocabulary, self.past = llama_cpp, model.config.vocab_size, len(past)
        llama_cpp.llama_log_set(_SILENT, None)
        path = folder / "model.gguf"
        write_gguf(model, path, rope_dimension_count=model.config.head_dim, tokenizer_model="none")
        parameters = llama_cpp.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
        self.context, self.other = self._context(threads), self._context(threads)
        self._decode(self.context, past, 0, False)

    def _context(self, threads: int) -> Any:
        parameters = self.c.llama_context_default_params()
        parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = 1024
        parameters.n_threads = parameters.n_threads_batch = threads
        return self.c.llama_init_from_model(self.model, parameters)

    def _decode(self, context: Any, ids: list[int], start: int, every: bool) -> np.ndarray:
        batch = self.c.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for row, token in enumerate(ids):
            batch.token[row], batch.pos[row], batch.n_seq_id[row] = token, start + row, 1
            batch.seq_id[row][0], batch.logits[row] = 0, every or row == len(ids) - 1
        if self.c.llama_decode(context, batch):
            raise RuntimeError("llama.cpp could not decode.")
        rows = len(ids) if every else 1
        logits = np.ctypeslib.as_array(self.c.llama_get_logits(context), (rows, self.vocabulary)).copy()
        self.c.llama_batch_free(batch)
        return logits

    def _drop(self, context: Any, start: int) -> None:
        self.c.llama_memory_seq_rm(self.c.llama_get_memory(context), 0, start, -1)

    def rows(self, n: int) -> np.ndarray:
        """[n, V] after a chain of n tokens, dropped again."""
        logits = self._decode(self.context, list(range(3, n + 3)), self.past, True)
        self._drop(self.context, self.past)
        return logits

    def prompt(self, ids: list[int]) -> np.ndarray:
        """[V] after a prompt."""
        logits = self._decode(self.other, ids, 0, False)[0]
        self._drop(self.other, 0)
        return logits

    def answer(self, ids: list[int], count: int) -> list[int]:
        """Greedy ids."""
        logits, found = self._decode(self.other, ids, 0, False)[0], []
        for step in range(count):
            found.append(int(logits.argmax()))
            logits = self._decode(self.other, found[-1:], len(ids) + step, False)[0]
        self._drop(self.other, 0)
        return found


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _SILENT(level: int, text: bytes, user: object) -> None:
    """Drop what llama.cpp logs."""


def main() -> None:
    """Compare, time, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--past", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=60)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    torch.set_grad_enabled(False)
    model = models.load(asked.model).model
    rng = np.random.default_rng(0)
    past, prompt = (rng.integers(3, model.config.vocab_size, count).tolist() for count in (asked.past, PROMPT))
    engines: dict[str, Any] = {"transformers": Ours(CausalLM(model), past), "lean": Ours(Lean(model), past)}
    with tempfile.TemporaryDirectory() as folder:
        try:
            engines["llama.cpp"] = LlamaCpp(model, past, asked.threads, Path(folder))
        except ImportError as error:
            print(f"Without llama.cpp: {error}.")
        answers = {name: engine.answer(past[:64], 64) for name, engine in engines.items()}
        first = answers["transformers"]
        print("64 greedy ids like transformers':", {name: found == first for name, found in answers.items()})
        jobs = {f"{n} rows": (lambda engine, n=n: engine.rows(n)) for n in ROWS}
        jobs[f"prompt of {PROMPT}"] = lambda engine: engine.prompt(prompt)
        times = {(job, name): [] for job in jobs for name in engines}
        for _ in range(asked.repeats + 3):
            for job, run in jobs.items():
                for name, engine in engines.items():
                    start = time.perf_counter()
                    run(engine)
                    times[job, name].append((time.perf_counter() - start) * 1e3)
    print(f"{asked.model}, {asked.threads} thread(s), {asked.past} rows cached; ms, and the lean engine's share")
    for job in jobs:
        taken = {name: np.array(times[job, name][3:]) for name in engines}
        line = "  ".join(f"{name} {np.median(each):7.2f}" for name, each in taken.items())
        for name in set(engines) - {"lean"}:
            low, middle, high = np.quantile(taken["lean"] / taken[name], (0.25, 0.5, 0.75))
            line += f"  of {name} {middle:.2f} [{low:.2f}, {high:.2f}]"
        print(f"{job:>13}  {line}")


if __name__ == "__main__":
    main()

"""llama.cpp's time of a pass on the same GGUF file, through the C interface of llama-cpp-python."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from time import perf_counter, sleep
from typing import Any

import torch

from ondevice.models import Loaded

_FIRST = 3  # the ids of a pass count from here; which they are does not matter
_PAUSE = 0.3  # s, as the threads of an engine that ran just before keep turning for a while


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _silent(level: int, text: bytes, user: object) -> None:
    """Drop what llama.cpp logs."""


class LlamaCpp:
    """A context of llama.cpp with `past` tokens in it. Its cache is in float16, its default; AMX is not used.

    Raises ValueError where llama.cpp cannot load the file.
    """

    def __init__(self, loaded: Loaded, threads: int, past: int, rows: Sequence[int]) -> None:
        import llama_cpp  # type: ignore[import-not-found, unused-ignore]

        self._c: Any = llama_cpp
        self._past, self._rows = past, rows
        llama_cpp.llama_log_set(_silent, None)
        parameters = llama_cpp.llama_model_default_params()
        parameters.n_gpu_layers = 0
        # Its AMX kernels end the process on some virtual machines. Without AMX these buffers are for faster kernels.
        parameters.use_extra_bufts = not torch.cpu.get_capabilities().get("amx_int8")
        assert loaded.gguf is not None
        self._model = llama_cpp.llama_model_load_from_file(str(loaded.gguf.path).encode(), parameters)
        if not self._model:
            raise ValueError(f"llama.cpp cannot load {loaded.gguf.path.name}.")
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = past + 2 * max(rows)
        settings.n_threads = settings.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        self._decode(past, 0)
        self.turn()

    def turn(self) -> list[float]:
        """Seconds of a pass over each number of rows, every row's logits with it; nothing is kept of them."""
        seconds = []
        sleep(_PAUSE)
        for count in self._rows:
            began = perf_counter()
            self._decode(count, self._past)
            seconds.append(perf_counter() - began)
            self._c.llama_memory_seq_rm(self._c.llama_get_memory(self._context), 0, self._past, -1)
        return seconds

    def _decode(self, count: int, start: int) -> None:
        batch = self._c.llama_batch_init(count, 0, 1)
        batch.n_tokens = count
        for row in range(count):
            batch.token[row], batch.pos[row], batch.n_seq_id[row] = _FIRST + row, start + row, 1
            batch.seq_id[row][0], batch.logits[row] = 0, True
        failed = self._c.llama_decode(self._context, batch)
        self._c.llama_synchronize(self._context)
        self._c.llama_batch_free(batch)
        if failed:
            raise ValueError("llama.cpp could not decode.")

"""Measure a causal language model on this machine as DiSCo's device: load time, TTFT by prompt length, TBT."""

from __future__ import annotations

import gc
import time
from typing import Any

import numpy as np
import pandas as pd


def load(model: str) -> tuple[Any, float]:
    """(model, seconds to load it), on the GPU where there is one. model: a hub id or a folder with safetensors.

    float32 on a CPU, where bf16 is slow without instructions for it; the checkpoint's own type on a GPU.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    gpu = torch.cuda.is_available()
    logging.disable_progress_bar()
    gc.collect()
    start = time.perf_counter()
    loaded = AutoModelForCausalLM.from_pretrained(model, use_safetensors=True, dtype="auto" if gpu else torch.float32)
    torch.nn.Module.to(loaded, "cuda" if gpu else "cpu").eval()
    return loaded, time.perf_counter() - start


def measure(model: Any, lengths: np.ndarray, new_tokens: int, seed: int) -> pd.DataFrame:
    """Time greedy answers to prompts of the given lengths; the ids are random, which does not change the time.

    lengths: [N] tokens. new_tokens: at least 2. Columns: length, ttft_s, tbt_s (mean of the answer), in request order.
    """
    import torch

    if new_tokens < 2:
        raise ValueError(f"A time between tokens needs at least two of them, not {new_tokens}.")
    rng = np.random.default_rng(seed)
    rows = []
    with torch.inference_mode():
        for length in [int(lengths[0]), *(int(x) for x in lengths)]:  # the first is a warm-up
            ids = torch.from_numpy(rng.integers(0, model.config.vocab_size, (1, length))).to(model.device)
            start = time.perf_counter()
            output = model(input_ids=ids, use_cache=True, logits_to_keep=1)
            token = output.logits.argmax(-1)
            token.item()  # waits for a GPU
            first = time.perf_counter()
            for _ in range(new_tokens - 1):
                output = model(input_ids=token, past_key_values=output.past_key_values, use_cache=True)
                token = output.logits.argmax(-1)
                token.item()
            rows.append((length, first - start, (time.perf_counter() - first) / (new_tokens - 1)))
    return pd.DataFrame(rows[1:], columns=["length", "ttft_s", "tbt_s"])

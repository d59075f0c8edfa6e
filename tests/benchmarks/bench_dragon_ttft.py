"""The prefill part of the time to first token, with and without stored documents, and decoding k documents against one.

Prefill: from the ids of the template, k documents and the query to the side's first distribution (a Decoder is made
and asked). `text` computes everything, `stored` reads the documents' rows from the folder, `dropped` the same after the
folder's pages were dropped from the file cache; waiting for the disk shows with --clock wall only. `query` is the part
of `stored` after the documents have been read: text over query is what no faster reading could exceed. The bar: stored
at least 8 times under text at 512 tokens.
Decode: one token of a side with k documents, over that of a side with one; `bare` is one forward of the model alone
with k rows (transformers' DynamicCache) over one with one row, as a reference.

Arms run in turn, so that load on the machine meets them alike. Run: python tests/benchmarks/bench_dragon_ttft.py
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import DynamicCache
from transformers.utils import logging

from ondevice import models
from ondevice.causal_lm import CausalLM
from ondevice.corpus.prompts import ASSISTANT, PASSAGE, USER
from ondevice.dragon.live.decoder import Decoder, Template
from ondevice.dragon.live.kv_store import KVStore

BAR, BAR_TOKENS = 8.0, 512
TEMPLATE = Template(f"{PASSAGE}{{document}}{USER}{{query}}{ASSISTANT}")
QUERY = "What is the parameter axis of numpy.linalg.norm?"
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


def documents(loaded: models.Loaded, tokens: int, count: int) -> list[list[int]]:
    """Prefixes of exactly that many tokens, from docstrings of NumPy that the environment has."""
    texts = dict.fromkeys(str(getattr(np, name).__doc__) for name in sorted(dir(np)) if callable(getattr(np, name)))
    prefixes = (TEMPLATE.prefix(loaded.tokenizer, text)[:tokens] for text in texts)
    found = [prefix for prefix in prefixes if len(prefix) == tokens][:count]
    if len(found) < count:
        raise ValueError(f"NumPy has only {len(found)} docstrings of {tokens} tokens, not {count}.")
    return found


def drop_pages(folder: Path) -> None:
    """Take the folder's files out of the file cache, so that they are read from the disk."""
    os.sync()
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def prefill(
    lm: CausalLM, prefixes: Sequence[Sequence[int]], suffix: Sequence[int], folder: KVStore, repeats: int,
    clock: Callable[[], float],
) -> dict[str, np.ndarray]:  # fmt: skip
    """Seconds [repeats] of each arm and of the query alone; also checks that all arms give one distribution."""
    arms: dict[str, KVStore | None] = {"text": None, "stored": folder, "dropped": folder}
    times: dict[str, list[float]] = {name: [] for name in (*arms, "query")}
    first: dict[str, np.ndarray] = {}
    for prefix in prefixes:
        folder.session(prefix)
    for repeat in range(repeats + 1):
        for name, store in arms.items():
            if name == "dropped":
                drop_pages(folder.folder)
            start = clock()
            decoder = Decoder(lm, prefixes, suffix, np.zeros(len(prefixes)), store=store)
            read = clock()
            found = decoder.next_distribution()
            end = clock()
            if repeat:  # the first warms up
                times[name].append(end - start)
                if name == "stored":
                    times["query"].append(end - read)
            first[name] = found
    worst = max(np.abs(np.exp(first[name]) - np.exp(first["text"])).max() for name in arms)
    if worst > 1e-5:
        raise ValueError(f"The arms' first distributions differ by {worst:.1e}.")
    return {name: np.array(found) for name, found in times.items()}


class Batch:
    """One bare forward over k rows after `past` tokens."""

    def __init__(self, lm: CausalLM, past: int, k: int) -> None:
        self.lm, self.cache = lm, DynamicCache()
        self.token = torch.full((k, 1), 5)
        with torch.inference_mode():
            lm.model(input_ids=torch.full((k, past), 7), past_key_values=self.cache, logits_to_keep=1)

    @torch.inference_mode()
    def __call__(self) -> None:
        """Decode one token of each row, and forget it."""
        self.lm.model(input_ids=self.token, past_key_values=self.cache)
        self.cache.crop(-1)


def decode(
    lm: CausalLM, prefixes: Sequence[Sequence[int]], suffix: Sequence[int], counts: Sequence[int], repeats: int,
    clock: Callable[[], float],
) -> dict[int, np.ndarray]:  # fmt: skip
    """For each k: [repeats, 2] seconds of one token of a side, and of one forward over k rows."""
    sides = {k: Decoder(lm, prefixes[:k], suffix, np.zeros(k)) for k in counts}
    batches = {k: Batch(lm, len(prefixes[0]) + len(suffix), k) for k in counts}
    for side in sides.values():
        side.next_distribution()
    times: dict[int, list[tuple[float, float]]] = {k: [] for k in counts}
    for repeat in range(repeats + 2):
        for k in counts:
            begin = clock()
            sides[k].commit(int(sides[k].next_distribution().argmax()))
            sides[k].next_distribution()
            middle = clock()
            batches[k]()
            if repeat >= 2:  # the first two warm up
                times[k].append((middle - begin, clock() - middle))
    return {k: np.array(rows) for k, rows in times.items()}


def spread(ratios: np.ndarray) -> str:
    """Median and quartiles."""
    low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pydocs-lm-base")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 256, BAR_TOKENS], help="of a document")
    parser.add_argument("--documents", type=int, nargs="+", default=[1, 2, 4], help="k, for the prefill")
    parser.add_argument("--sides", type=int, nargs="+", default=[1, 2, 4, 8], help="k, for decoding; the first is one")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=CLOCKS, default="cpu", help="cpu: of this process, steady on a busy machine")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.set_verbosity_error()  # docstrings longer than the context are cut
    loaded, clock = models.load(options.model), CLOCKS[options.clock]
    lm, suffix = CausalLM(loaded.model), TEMPLATE.suffix(loaded.tokenizer, QUERY)
    print(f"torch {torch.__version__}, {options.model}, float32, {options.threads} thread(s), {options.clock} clock")
    print(f"query and template after the document: {len(suffix)} tokens; medians of {options.repeats} [quartiles]")
    print(f"bar: text/stored at least {BAR:.0f} with documents of {BAR_TOKENS} tokens\n")
    heads = f"{'text/stored':>24}{'text/dropped':>24}{'text/query':>22}"
    print(f"{'tokens':>6}{'k':>4}{'text ms':>10}{'stored ms':>11}{heads}{'MB':>7}")
    for tokens in options.tokens:
        for k in options.documents:
            with tempfile.TemporaryDirectory() as folder:
                store = KVStore(Path(folder), lm, loaded.tokenizer, TEMPLATE.text)
                prefixes = documents(loaded, tokens, k)
                times = prefill(lm, prefixes, suffix, store, options.repeats, clock)
                size = sum(path.stat().st_size for path in Path(folder).iterdir()) / 1e6
            text, stored, dropped, query = times.values()
            verdict = "" if tokens != BAR_TOKENS else "  met" if np.median(text / stored) >= BAR else "  missed"
            print(
                f"{tokens:>6}{k:>4}{1e3 * np.median(text):>10.1f}{1e3 * np.median(stored):>11.1f}"
                f"{spread(text / stored):>24}{spread(text / dropped):>24}{spread(text / query):>22}"
                f"{size:>7.1f}{verdict}", flush=True,
            )  # fmt: skip
    found = decode(lm, documents(loaded, 256, max(options.sides)), suffix, options.sides, 3 * options.repeats, clock)
    one = found[options.sides[0]]
    print(f"\n{'k':>4}{'token ms':>10}{'to one':>22}{'bare to one':>22}   documents of 256 tokens")
    for k, rows in found.items():
        side, bare = (rows / one).T
        print(f"{k:>4}{1e3 * np.median(rows[:, 0]):>10.2f}{spread(side):>22}{spread(bare):>22}")


if __name__ == "__main__":
    main()

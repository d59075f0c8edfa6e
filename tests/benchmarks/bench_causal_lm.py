"""What verifying n rows costs: T(n) / T(1), and what a session adds to the model's forward.

T(n) is the median time of one forward over a tree of n rows (a binary tree from the last committed token). A step is
verify + keep of the tree's longest path. `own` is the part of a step outside the model's forward, over that forward,
within one call; `step/bare` compares with the same forward by hand on transformers' DynamicCache, mask and positions
ready, nothing kept. All variants of a repeat run one after another, so that load on the machine meets them alike.

Weights are random: for timing only. Run: python tests/benchmarks/bench_causal_lm.py [--shape 0.5b] [--threads 2]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.utils import logging

from ondevice.causal_lm import CausalLM, Session, TokenTree

ROWS = (1, 2, 4, 8, 16, 32)
OWN_TARGET = 5.0  # % of the forward, for 0.1B parameters and more
# name: (type, hidden, inner, layers, heads, key-value heads, vocabulary)
SHAPES = {
    "7m": ("llama", 256, 704, 6, 4, 4, 8192),  # pydocs-lm-small
    "base": ("llama", 384, 1024, 12, 6, 6, 8192),
    "0.14b": ("llama", 768, 3072, 12, 12, 12, 32_000),  # vicuna-160m, with tied embeddings
    "0.5b": ("qwen2", 896, 4864, 24, 14, 2, 151_936),  # Qwen2.5-0.5B
}
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


def build(shape: str, dtype: torch.dtype, context: int) -> PreTrainedModel:
    """A model of that shape with random weights."""
    kind, hidden, inner, layers, heads, kv_heads, vocabulary = SHAPES[shape]
    config = AutoConfig.for_model(
        kind, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=vocabulary, max_position_embeddings=context, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def binary_tree(n: int) -> TokenTree:
    """n rows, each with up to two children."""
    return TokenTree(np.arange(n) + 3, (np.arange(n) + 1) // 2 - 1)


class Arms:
    """The two ways to run one tree at one cache length; each call leaves the cache as it found it."""

    def __init__(self, session: Session, bare: DynamicCache, tree: TokenTree, clock: Callable[[], float]) -> None:
        self.session, self.cache, self.tree, self.clock = session, bare, tree, clock
        past, dtype, topology = session.length, session.lm.model.dtype, tree.topology
        mask = torch.zeros(len(tree), past + len(tree), dtype=dtype)
        mask[:, past:] = topology.hidden(dtype, mask.device)
        self.shape = (
            {}
            if topology.is_chain
            else {"attention_mask": mask[None, None], "position_ids": (topology.offsets(mask.device) + past)[None]}
        )
        self.ids = torch.tensor(tree.tokens)[None]
        self.path = tree.path_to(len(tree) - 1)

    def step(self) -> tuple[float, float]:
        """(seconds of verify + keep, seconds of the model's forward within it)."""
        model, past, inside = self.session.lm.model, self.session.length, 0.0
        forward = model.forward

        def timed(*args: object, **kwargs: object) -> object:
            nonlocal inside
            start = self.clock()
            found = forward(*args, **kwargs)
            inside = self.clock() - start
            return found

        model.forward = timed
        try:
            start = self.clock()
            self.session.verify(self.tree)
            self.session.keep(self.path)
            total = self.clock() - start
        finally:
            model.forward = forward
        self.session.rollback(past)
        return total, inside

    @torch.inference_mode()
    def by_hand(self) -> float:
        """Seconds of the bare forward."""
        start = self.clock()
        self.session.lm.model(input_ids=self.ids, past_key_values=self.cache, use_cache=True, **self.shape)
        seconds = self.clock() - start
        self.cache.crop(-len(self.tree))
        return seconds


def measured(model: PreTrainedModel, past: int, repeats: int, clock: Callable[[], float]) -> dict[int, np.ndarray]:
    """For each n: [repeats, 3] seconds of a step, of the forward within it, and of the bare forward."""
    prompt = np.arange(past) % 4096
    session, cache = CausalLM(model).start(), DynamicCache()
    session.prefill(prompt)
    with torch.inference_mode():
        model(input_ids=torch.tensor(prompt)[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
    arms = {n: Arms(session, cache, binary_tree(n), clock) for n in ROWS}
    times: dict[int, list[tuple[float, float, float]]] = {n: [] for n in ROWS}
    for repeat in range(repeats + 2):
        for n, arm in arms.items():
            row = (*arm.step(), arm.by_hand())
            if repeat >= 2:  # the first two warm up
                times[n].append(row)
    return {n: np.array(rows) for n, rows in times.items()}


def report(name: str, parameters: int, times: dict[int, np.ndarray], past: int) -> None:
    """A table of one shape."""
    print(
        f"\n{name}: {parameters / 1e6:.1f} M parameters, {past} tokens cached; medians of {len(times[1])} [quartiles]"
    )
    print(f"{'n':>4}{'T(n) ms':>10}{'T(n)/T(1)':>22}{'own ms':>9}{'own %':>8}{'step/bare':>22}")
    for n, rows in times.items():
        step, forward, bare = rows.T
        own = np.median(step - forward)
        print(
            f"{n:>4}{1e3 * np.median(forward):>10.2f}{spread(forward / times[1][:, 1]):>22}{1e3 * own:>9.3f}"
            f"{100 * own / np.median(forward):>8.2f}{spread(step / bare):>22}"
        )


def spread(ratios: np.ndarray) -> str:
    """Median and quartiles."""
    low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["7m", "0.14b"])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=CLOCKS, default="cpu", help="cpu: of this process, steady on a busy machine")
    parser.add_argument("--past", type=int, default=256, help="tokens in the cache")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.dtype}, {options.threads} thread(s), {options.clock} clock")
    print(f"target: own under {OWN_TARGET:.0f} % of the forward for 0.1B parameters and more")
    for shape in options.shape:
        model = build(shape, getattr(torch, options.dtype), options.past + 64)
        times = measured(model, options.past, options.repeats, CLOCKS[options.clock])
        report(shape, model.num_parameters(), times, options.past)


if __name__ == "__main__":
    main()

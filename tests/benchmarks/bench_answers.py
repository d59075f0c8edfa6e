"""Whole answers beside llama.cpp's: its plain decoding and its prompt lookup, and the lean engine's, with the mixture.

Recorded prompts, greedy, one thread, every way in turn on each prompt; decoding is what comes after the first token.
llama.cpp has float32 weights and its default cache, so that an answer may differ.

Run: python tests/benchmarks/bench_answers.py [--prompts 8]
The peer: pip install -e '.[peers]', which builds llama.cpp.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from bench_lean import write_gguf

from ondevice import evidence
from ondevice.speculation import Drafter, bundled, generate, greedy
from ondevice.speculation.prompt_lookup import PromptLookup
from ondevice_studies.diaa.methods import COSTS, Workbench
from ondevice_studies.diaa.record import sample
from ondevice_studies.speculation.request_set import Request

NGRAM, TOKENS = 2, 10  # of a lookup
Answer = tuple[list[int], float, float]  # tokens, seconds of decoding, of all


def peer(llama: Any, request: Request) -> Answer:
    """llama.cpp's."""
    found: list[int] = []
    began = first = perf_counter()
    for token in llama.generate(list(request.ids), temp=0.0, top_k=1):
        first = first if found else perf_counter()
        found.append(token)
        if len(found) == request.limit or token in request.ends:
            break
    return found, perf_counter() - first, perf_counter() - began


def lean(lm: Any, drafter: Drafter, nodes: int, request: Request) -> Answer:
    """The lean engine's."""
    chosen: list[float] = []

    def choice(logits: torch.Tensor) -> int:
        token = greedy(logits)
        chosen.append(perf_counter())
        return token

    began = perf_counter()
    found = generate(lm, drafter, request.ids, request.limit, budget=nodes, choice=choice, eos_token_ids=request.ends)
    return list(found.tokens), perf_counter() - chosen[0], perf_counter() - began


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8, help="of each task")
    many = parser.parse_args().prompts
    torch.set_num_threads(1)
    bench = Workbench()
    sized = {"seconds": COSTS["zen5"]}
    drafters = {"lean": (Drafter(), 1), "lean, lookup": (PromptLookup.transformers(TOKENS, NGRAM), TOKENS),
                "lean, mixture": (bundled.mixture(**sized), 64),
                "lean, mixture without stores": (bundled.mixture(False, **sized), 64)}  # fmt: skip
    ways: dict[str, Callable[[Request], Answer]] = {
        name: lambda request, made=made: lean(bench.lm, *made, request) for name, made in drafters.items()
    }
    try:
        import llama_cpp
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
    except ImportError as error:
        print(f"Without llama.cpp: {error}.")
    else:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            write_gguf(bench.lm.model, path)
            options: dict[str, Any] = dict(n_ctx=1024, n_threads=1, n_threads_batch=1, verbose=False)
            lookup = LlamaPromptLookupDecoding(max_ngram_size=NGRAM, num_pred_tokens=TOKENS)
            for name, draft in (("llama.cpp", None), ("llama.cpp, lookup", lookup)):
                made = llama_cpp.Llama(str(path), draft_model=draft, logits_all=draft is not None, **options)
                ways[name] = lambda request, made=made: peer(made, request)
    asked = sample(bench, evidence.load("diaa", "answers"), number=many)
    done: dict[str, list[Answer]] = {name: [] for name in ways}
    for place, request in enumerate(asked):
        turn = place % len(ways)
        for name in [*ways][turn:] + [*ways][:turn]:
            done[name].append(ways[name](request))
    base = sum(seconds for _, seconds, _ in done["lean"])
    print(f"{evidence.machine_name()}, {bench.model}, {len(asked)} answers of {sum(one.limit for one in asked)} tokens")
    for name, answers in done.items():
        decoding, whole = (sum(answer[part] for answer in answers) for part in (1, 2))
        same = sum(mine[0] == plain[0] for mine, plain in zip(answers, done["lean"], strict=True))
        tokens = sum(one.limit - 1 for one in asked)
        print(f"{name:30} {1e3 * decoding / tokens:6.2f} ms a decoded token, {base / decoding:.2f} of lean's speed, "
              f"{1e3 * whole / (tokens + len(asked)):6.2f} with the prompt; {same} as plain")  # fmt: skip


if __name__ == "__main__":
    main()

"""Is every drafter's output the model's own? Ids on prompts of the test split, against plain greedy decoding.

Prompts of all task families, chosen as the evaluation chooses them; each goes to plain decoding, to transformers'
`generate` and to every drafter in turn. Drafters keep what they learn from one prompt to the next. `tokens/step` is 1
without drafts, so it shows that there was something to verify.

In float32, any difference ends the run with status 1; in bfloat16, differences are only reported, since there a forward
of several rows rounds otherwise than one of a single row. A difference is named by its first place in the output, and
by the gap between the two largest logits there, from a forward over the whole text without a cache: a gap near the
precision is a tie that rounding decides, a larger one is a fault.

Run: python tests/benchmarks/bench_identity.py [--model pydocs-lm-small] [--dtype bfloat16] [--prompts 210]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from tqdm import tqdm
from transformers import GenerationConfig

from ondevice import corpus, models
from ondevice.causal_lm import CausalLM
from ondevice.diaa.ambiguities import union
from ondevice.diaa.drafter import RECYCLING, Diaa
from ondevice.diaa.tables import Tables
from ondevice.diaa.warmup import warm_up
from ondevice.speculation import Drafter, generate
from ondevice.speculation.bundled import mixture
from ondevice.speculation.layer_skipping import LayerSkipping
from ondevice.speculation.loop import check
from ondevice.speculation.prompt_lookup import PromptLookup
from ondevice.speculation.sam_decoding import SamDecoding, automaton
from ondevice.speculation.small_model import SmallModel
from ondevice.speculation.token_recycling import TokenRecycling
from ondevice.training.evaluation.tasks import choose

BUDGET = 64  # nodes
DOCUMENTS = 200  # about, of the train split: SAM's corpus, and what warms the tables up
WARM_UP = 20_000  # tokens of them at most
WINDOW = 16  # tokens after which layer skipping searches; its own 50 would be beyond the limit
SHOWN = 40  # differences printed one by one
TRANSFORMERS = "generate (transformers)"


@dataclass(frozen=True)
class Difference:
    """Where an output first differs. said, right: ids, -1 past an output's end. gap: of the two largest logits."""

    task: str
    position: int
    said: int
    right: int
    gap: float


@dataclass
class Tally:
    """What one method said, over all prompts. steps, emitted: after prefill; 0 where they are not known."""

    outputs: int = 0
    tokens: int = 0
    steps: int = 0
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0
    differences: list[Difference] = field(default_factory=list)


def drafters(lm: CausalLM, loaded: models.Loaded, small: str) -> dict[str, Callable[[], Drafter]]:
    """One of every kind, to be made when it is needed; they raise ValueError where the model does not allow them."""
    train = corpus.documents("train")
    spread = train[:: max(1, len(train) // DOCUMENTS)]
    texts = [loaded.tokenizer(document.text, verbose=False)["input_ids"] for document in spread]
    warm = warm_up(lm, np.concatenate(texts)[:WARM_UP])
    vocabulary = lm.vocabulary

    def assistant() -> CausalLM:
        return CausalLM(models.load(small, lm.model.dtype, str(lm.model.device)).model)

    return {
        "vanilla": Drafter,
        "PLD": PromptLookup.original,
        "PLD, transformers' rules": PromptLookup.transformers,
        "SAM": SamDecoding,
        "SAM, corpus": lambda: SamDecoding(automaton(texts)),
        "TR": lambda: TokenRecycling(vocabulary),
        "small model": lambda: SmallModel(assistant()),
        "small model, heuristic": lambda: SmallModel(assistant(), heuristic=True),
        "layer skipping": lambda: LayerSkipping(lm, window=WINDOW),
        "layer skipping, unsure": lambda: LayerSkipping(lm, 0.3, window=WINDOW),
        "DIAA": lambda: Diaa(warm.copy()),
        "DIAA, cold": lambda: Diaa(Tables.empty(vocabulary), stale=True),
        "DIAA, template": lambda: Diaa(warm.copy(), template=RECYCLING),
        "DIAA, refresh 3, union": lambda: Diaa(warm.copy(), refresh=3, update=union, reads_prompt=True),
        "mixture": mixture,
    }


def chosen(loaded: models.Loaded, prompts: int, room: int) -> list[tuple[str, list[int]]]:
    """(family and document, prompt) of test tasks, the families in equal parts."""
    counts = dict.fromkeys(corpus.FAMILIES, -(-prompts // len(corpus.FAMILIES)))
    found, too_long = choose(corpus.documents("test"), loaded.tokenizer, counts, room)
    sizes = ", ".join(f"{family} {len(members)}" for family, members in found.items())
    print(f"prompts: {sizes}; passed over as too long: {too_long}")
    return [
        (f"{task.family} of {task.name}", loaded.tokenizer(task.prompt, verbose=False)["input_ids"])
        for members in found.values()
        for task in members
    ]


def by_transformers(lm: CausalLM, prompt: Sequence[int], limit: int) -> list[int]:
    """What `generate` says."""
    ids = torch.tensor([list(prompt)], device=lm.model.device)
    found = lm.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False)
    return found[0, len(prompt) :].tolist()


def first_difference(said: Sequence[int], right: Sequence[int]) -> int | None:
    """Its place; where one output is the other's beginning, the shorter one's end; None where they are equal."""
    places = (place for place, pair in enumerate(zip(said, right, strict=False)) if pair[0] != pair[1])
    return next(places, None if len(said) == len(right) else min(len(said), len(right)))


@torch.inference_mode()
def gap(lm: CausalLM, text: Sequence[int]) -> float:
    """Between the two largest logits after a text."""
    ids = torch.tensor([list(text)], device=lm.model.device)
    largest = lm.model(input_ids=ids, use_cache=False).logits[0, -1].float().topk(2).values.tolist()
    return largest[0] - largest[1]


def compare(
    lm: CausalLM, methods: dict[str, Drafter], prompts: Sequence[tuple[str, list[int]]], limit: int, end: int
) -> dict[str, Tally]:
    """Every method on every prompt, against plain decoding, which is run anew."""
    tallies = {name: Tally() for name in (TRANSFORMERS, *methods)}
    for task, prompt in tqdm(prompts, desc="identity", unit="prompt"):
        right = list(generate(lm, Drafter(), prompt, limit, ends={end}).tokens)
        for name, tally in tallies.items():
            if name == TRANSFORMERS:
                said = by_transformers(lm, prompt, limit)
            else:
                found = generate(lm, methods[name], prompt, limit, budget=BUDGET, ends={end})
                said = list(found.tokens)
                tally.steps += len(found.steps)
                tally.emitted += len(said) - 1
                tally.drafted += sum(step.drafted for step in found.steps)
                tally.accepted += sum(step.accepted for step in found.steps)
            tally.outputs += 1
            tally.tokens += len(said)
            place = first_difference(said, right)
            if place is not None:
                ids = (tokens[place] if place < len(tokens) else -1 for tokens in (said, right))
                tally.differences.append(Difference(task, place, *ids, gap(lm, [*prompt, *right[:place]])))
    return tallies


def report(tallies: dict[str, Tally]) -> None:
    """A row a method, then the differences."""
    print(
        f"\n{'':26}{'equal':>14}{'%':>8}{'tokens':>9}{'tokens/step':>13}{'accepted %':>12}{'first at':>10}{'gap':>20}"
    )
    for name, tally in tallies.items():
        n, wrong = tally.outputs, tally.differences
        per_step = f"{tally.emitted / tally.steps:.2f}" if tally.steps else ""
        accepted = f"{100 * tally.accepted / tally.drafted:.1f}" if tally.drafted else ""
        gaps = [difference.gap for difference in wrong]
        first = f"{np.median([difference.position for difference in wrong]):.0f}" if wrong else ""
        spread = f"{np.median(gaps):.2g} (to {max(gaps):.2g})" if wrong else ""
        equal = f"{n - len(wrong)} of {n}"
        print(
            f"{name:26}{equal:>14}{100 * (n - len(wrong)) / n:>8.2f}{tally.tokens:>9}{per_step:>13}{accepted:>12}"
            f"{first:>10}{spread:>20}"
        )
    lines = [
        f"{name}: {one.task}, place {one.position}: {one.said} instead of {one.right}, gap {one.gap:.3g}"
        for name, tally in tallies.items()
        for one in tally.differences
    ]
    if lines:
        print("\nFirst differences (medians over outputs above)", *lines[:SHOWN], sep="\n")
        print(f"... and {len(lines) - SHOWN} more" if len(lines) > SHOWN else "")


def main() -> None:
    """Print the table; end with status 1 where float32 differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pydocs-lm-base", help="a bundled model, a folder, or a hub id")
    parser.add_argument("--small", default="pydocs-lm-small", help="the drafting model; of the same vocabulary")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--prompts", type=int, default=210, help="in all; every family gives as many")
    parser.add_argument("--limit", type=int, default=48, help="new tokens")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loaded = models.load(options.model, getattr(torch, options.dtype), options.device)
    models.require_trained(loaded.model, "outputs to compare")
    lm, end = CausalLM(loaded.model), int(loaded.tokenizer.eos_token_id)
    loaded.model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end)  # no penalties of its own
    print(f"{options.model}, {options.dtype}, torch {torch.__version__}, {options.threads} thread(s)")
    prompts = chosen(loaded, options.prompts, lm.context - options.limit)
    methods: dict[str, Drafter] = {}
    for name, make in drafters(lm, loaded, options.small).items():
        try:
            methods[name] = make()
            check(lm, methods[name], prompts[0][1], options.limit, BUDGET)
        except ValueError as error:
            methods.pop(name, None)
            print(f"{name} is left out: {error}")
    tallies = compare(lm, methods, prompts, options.limit, end)
    report(tallies)
    different = sum(len(tally.differences) for tally in tallies.values())
    if different and options.dtype == "float32":
        raise SystemExit(1)


if __name__ == "__main__":
    main()

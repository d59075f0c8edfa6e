"""Greedy answers of the two real processes beside a brute force that shares no decoding code with them.

The brute force reads every prompt from its beginning for every token, without keys and values, mixes with plain sums,
and only the codec is the library's. It prints how many answers are equal, token by token.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch

from ondevice.dragon import codec, pair
from ondevice.dragon.live.node import Node
from ondevice.dragon.world import world

LIMIT = 20


@torch.inference_mode()
def next_rows(node: Node, prompts: list[list[int]]) -> np.ndarray:
    """[D, V] probabilities after each prompt, each in a forward of its own."""
    rows = [node.lm.model(torch.tensor([ids]), use_cache=False).logits[0, -1].double().softmax(-1) for ids in prompts]
    return torch.stack(rows).numpy()


def brute(nodes: dict[str, Node], query: str) -> list[int]:
    """The greedy answer."""
    sides = []
    for node in nodes.values():
        texts, relevance = node.documents.best(query, pair.GREEDY.k)
        suffix = node.template.suffix(node.tokenizer, query)
        fronts = [node.template.prefix(node.tokenizer, text)[: node.longest] + suffix for text in [*texts, ""]]
        sides.append((node, fronts, np.exp((np.array(relevance) - 1) / node.weight_temperature)))
    tokens: list[int] = []
    while len(tokens) < LIMIT and tokens[-1:] != [sides[0][0].end]:
        mixed: np.ndarray | float = 0.0
        for node, fronts, heights in sides:
            *documents, prior = next_rows(node, [front + tokens for front in fronts])
            own = heights @ np.array(documents) / heights.sum()
            mixed = mixed + heights.sum() * codec.filled(codec.encode(own / own.sum(), pair.GREEDY.cap, prior), prior)
        tokens.append(int(np.argmax(mixed)))
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=52, help="a fourth of them of each holder")
    parser.add_argument("--model", default="pydocs-lm-base")
    options = parser.parse_args()
    torch.set_num_threads(1)
    asked = world().first(options.prompts // 4)
    with tempfile.TemporaryDirectory() as name:
        folder = pair.write(Path(name), world())
        with pair.both(options.model, folder) as (device, _):
            live = [device.answer(one.query, pair.GREEDY).tokens for one in asked]
        nodes = pair.nodes(options.model, folder)
        right = [brute(nodes, one.query) for one in asked]
    equal = sum(one == other for one, other in zip(live, right, strict=True))
    print(f"{equal} of {len(asked)} live greedy answers are the brute force's, {sum(map(len, right))} tokens")


if __name__ == "__main__":
    main()

"""What the small language model answers from K segments of a long document, by who chose them.

In the paper K is 10 of 20; a long document here has 14 segments of 96 tokens, of which 5 are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import torch

from ondevice import models, retrieval
from ondevice.causal_lm.generation import greedy
from ondevice.corpus.answers import f1, hit
from ondevice.corpus.prompts import ASSISTANT, PASSAGE, USER
from ondevice_papers.grating.pruning import ranking
from ondevice_studies.grating.questions import Asked, pools

WRITER = "pydocs-lm-base"
POOLS = 80  # of long documents, the first ones
KEPT = 5  # K, of some fourteen segments
TOKENS = 64  # of an answer, at most: the corpus's answers have up to 240 characters
ALL, FIRST, EMBEDDER, FULL = "all", "first", "embedder", "full"

Choices = Mapping[int, Sequence[int]]  # places of the chosen candidates, the best first, by pool


def prompt(asked: Asked, chosen: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Token ids, and how many of the best they hold: as many as fit the context, in the order of the search.

    Raises ValueError where not one fits.
    """
    for count in range(len(chosen), 0, -1):
        shown = sorted(chosen[:count], key=lambda place: int(asked.found[place]))
        passages = "".join(f"{PASSAGE}{asked.documents[place]}" for place in shown)
        ids = _writer().tokenizer(f"{passages}{USER}{asked.query}{ASSISTANT}", verbose=False)["input_ids"]
        if len(ids) + TOKENS <= _writer().model.config.max_position_embeddings:
            return tuple(ids), count
    raise ValueError(f"Not one candidate of {asked.query!r} fits the context of {WRITER}.")


def answered(set_: str, ways: Mapping[str, Choices], model: str = "") -> Iterator[dict[str, Any]]:
    """A row of `answers` a way and pool of the test split. model: the reranker that chose; "" where none did.

    chosen: places, the best first. fitted: how many of the first of these the prompt holds. tokens: of the prompt.
    margin: by how much the likeliest token's logit leads, at the least. Equal prompts are answered once.
    """
    for way, choices in ways.items():
        for number, chosen in choices.items():
            asked = pools(set_, "test")[number]
            ids, fitted = prompt(asked, chosen)
            text, margin = _written(ids)
            yield {
                "set": set_, "pool": number, "model": model, "way": way, "chosen": [int(place) for place in chosen],
                "fitted": fitted, "answer": text, "right": hit(text, asked.answer), "f1": f1(text, asked.answer),
                "tokens": len(ids), "margin": margin,
            }  # fmt: skip


def choices(
    set_: str, scores: pd.DataFrame, rerankers: Sequence[str], pruned: pd.DataFrame
) -> Iterator[tuple[str, dict[str, Choices]]]:
    """Who chooses: (model, its ways). scores: the record.

    all: all segments from the first on. first: the first K. embedder: the K nearest. full: a reranker's best K after
    its last layer. The names of rules: of `pruned` (`study.outcomes`), the K that pruning keeps.
    """
    asked = pools(set_, "test")[:POOLS]
    whole = {number: np.argsort(one.found).tolist() for number, one in enumerate(asked)}
    first = {number: order[:KEPT] for number, order in whole.items()}
    near = {number: nearest(one) for number, one in enumerate(asked)}
    yield "", {ALL: whole, FIRST: first, EMBEDDER: near}
    for model in rerankers:
        rows = scores[(scores["model"] == model) & (scores["set"] == set_) & (scores["split"] == "test")]
        final = zip(rows["pool"], rows["scores"], rows["n"], strict=True)
        full = {int(number): ranking(values[-n:])[:KEPT].tolist() for number, values, n in final if number < POOLS}
        ways: dict[str, Choices] = {FULL: full}
        for rule, found in pruned[pruned["model"] == model].groupby("rule", sort=False):
            each = zip(found["pool"].tolist(), found["kept"], strict=True)
            ways[str(rule)] = {number: np.flatnonzero(kept).tolist() for number, kept in each if number < POOLS}
        yield model, ways


def nearest(asked: Asked) -> list[int]:
    """Places of the K candidates nearest to the query by the embedder."""
    vectors = retrieval.embedder()([asked.query, *asked.documents])
    return ranking(vectors[1:] @ vectors[0])[:KEPT].tolist()


@cache
def _writer() -> models.Loaded:
    return models.load(WRITER)


@cache
@torch.inference_mode()
def _written(ids: tuple[int, ...]) -> tuple[str, float]:
    """The answer to a prompt, and its least margin, the end token's included where it came."""
    model = _writer().model
    tokenizer = _writer().tokenizer
    output = greedy(model, [ids], tokenizer.eos_token_id, TOKENS)[0]
    count = len(output.ids) + output.ended
    whole = torch.tensor([[*ids, *output.ids][: len(ids) + count - 1]])
    logits = model(input_ids=whole, use_cache=False, logits_to_keep=count).logits[0]
    two = logits.topk(2).values
    return str(tokenizer.decode(list(output.ids))), float((two[:, 0] - two[:, 1]).min())

"""The rerankers' commands: `reranker` and `evaluate-reranker`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers

from ondevice import assets, models, retrieval
from ondevice.commands import count, positive, writable
from ondevice.corpus.pairs import reader, rows
from ondevice.precision import mixed_precision
from ondevice.retrieval.layer_scores import scores_of
from ondevice.retrieval.pools import CandidatePool, for_evaluation, paragraph_pools
from ondevice_training.reranking import examples, learning
from ondevice_training.reranking.evaluation import mean_ndcg, report
from ondevice_training.reranking.lists import Lists

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_VALIDATED = 48  # pools for the log's nDCG
_RATES = {True: 1e-3, False: 1e-4}  # of an adapter, of an encoder's trunk


def register(programs: Any) -> None:
    """Add the commands to a parser's subparsers; each sets `handler`."""
    training = programs.add_parser(
        "reranker",
        help="a reranker from an encoder, or an adapter that makes one of a decoder",
        example="python -m ondevice_training reranker --parent all-minilm-l6-v2 --queries 4000 --out runs/reranker",
    )
    training.add_argument("--parent", required=True, help="all-minilm-l6-v2, smollm2-135m-instruct or a folder")
    training.add_argument("--queries", type=count, required=True, help="length of the run, eight queries a step")
    training.add_argument("--out", type=writable, required=True, help="folder of checkpoint, log, model; resumed")
    rates = "peak rate: 0.0001 of an encoder's trunk, 0.001 of an adapter by default"
    training.add_argument("--rate", type=positive, help=rates)
    training.add_argument("--head-rate", type=positive, default=1e-3, help="peak rate of the head")
    training.add_argument("--rank", type=count, help="of the adapter, which a decoder needs")
    training.add_argument("--threads", type=count, help="CPU threads (all by default)")
    training.set_defaults(handler=train_reranker)

    evaluating = programs.add_parser(
        "evaluate-reranker",
        help="metrics of a reranker and its baselines, as JSON",
        example="python -m ondevice_training evaluate-reranker --model minilm-reranker --out reranking.json",
    )
    evaluating.add_argument("--model", required=True, help="a bundled model's name or a folder")
    evaluating.add_argument(
        "--split",
        choices=["validation", "test", "wikitext"],
        default="test",
        help="whose pools; wikitext: our own questions about its paragraphs",
    )
    evaluating.add_argument("--out", type=writable, required=True, help="the JSON file")
    evaluating.add_argument("--threads", type=count, help="CPU threads (all by default)")
    evaluating.set_defaults(handler=evaluate_reranker)


def train_reranker(arguments: argparse.Namespace) -> None:
    """The `reranker` command."""
    _prepare(arguments.threads)
    rank = arguments.rank or 0
    model, tokenizer = learning.start(arguments.parent, rank)
    rate = arguments.rate or _RATES[bool(rank)]
    recipe = learning.TrainingRecipe(arguments.queries, rate, arguments.head_rate, rank)
    lists = Lists(examples.for_training(with_questions=bool(rank)), tokenizer)
    pools = for_evaluation("validation").pools[:_VALIDATED]

    def validate(reranker: PreTrainedModel) -> float:
        with mixed_precision(reranker.device.type):
            scores = pool_scores(reranker, tokenizer, pools, every=False)
        return mean_ndcg([layers[-1] for layers in scores], pools).mean

    print(f"{len(lists.examples)} queries to train on", flush=True)
    reached = learning.train(recipe, model, lists, validate, arguments.out, tokenizer, arguments.parent)
    state = "stopped" if reached.stopped else "finished"
    print(f"{state} at step {reached.step}, {reached.tokens} tokens, {reached.seconds:.0f} s")


def evaluate_reranker(arguments: argparse.Namespace) -> None:
    """The `evaluate-reranker` command."""
    _prepare(arguments.threads)
    loaded = models.load(arguments.model)
    models.require_trained(loaded.model, "a ranking")
    on_paragraphs = arguments.split == "wikitext"
    evaluation = paragraph_pools(retrieval.embedder()) if on_paragraphs else for_evaluation(arguments.split)
    with mixed_precision(loaded.model.device.type):
        scores = pool_scores(loaded.model, reader(loaded.model, loaded.tokenizer), evaluation.pools)
    results = report(evaluation, scores)
    name = arguments.model if loaded.origin != "folder" else Path(arguments.model).name
    assets.write_text(arguments.out, json.dumps({"model": name, "split": arguments.split, **results}, indent=1) + "\n")
    means = {ranker: round(metrics["ndcg@10"]["mean"], 3) for ranker, metrics in results["metrics"].items()}
    print(f"nDCG@10 on {results['queries']} queries: {means}")


def _prepare(threads: int | None) -> None:
    if threads:
        torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()


@torch.inference_mode()
def pool_scores(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pools: Sequence[CandidatePool], every: bool = True
) -> list[np.ndarray]:
    """[layers, candidates] scores of each pool ([1, candidates] for the last layer only)."""
    scores = []
    for pool in pools:
        pairs = rows(tokenizer, pool.query.text, pool.passages)
        scores.append(scores_of(model, pairs, every).cpu().numpy())
    return scores

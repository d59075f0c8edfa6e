"""Command line: `python -m ondevice_training lm --size small --tokens 10_000_000 --out FOLDER`."""

from __future__ import annotations

import argparse

import torch
import transformers

from ondevice import commands, corpus
from ondevice.commands import count, positive, writable

with commands.loading("python -m ondevice_training", "notebooks"):
    from ondevice_training import language_model
    from ondevice_training.batches import Batches, windows
    from ondevice_training.evaluation import command as evaluation
    from ondevice_training.reranking import commands as reranking

HELD_OUT = 64  # windows of 512 tokens for the perplexity in the log


def main(given: list[str] | None = None) -> None:
    """Train a bundled model, or go on training it; evaluate one."""
    parser = commands.Parser("python -m ondevice_training", description=main.__doc__)
    programs = parser.add_subparsers(dest="command", required=True)
    lm = programs.add_parser(
        "lm",
        help="a language model on the documentation corpus",
        example="python -m ondevice_training lm --size small --tokens 10_000_000 --out runs/small",
    )
    lm.add_argument("--size", choices=list(language_model.SIZES), required=True, help="of the model")
    lm.add_argument("--tokens", type=count, required=True, help="length of the run; more than before extends it")
    lm.add_argument("--out", type=writable, required=True, help="folder of checkpoints, log, model; resumed if begun")
    lm.add_argument("--batch-tokens", type=count, default=4096, help="tokens of a step")
    lm.add_argument("--matrix-rate", type=positive, default=0.02, help="peak learning rate of Muon")
    lm.add_argument("--vector-rate", type=positive, default=0.005, help="peak learning rate of AdamW")
    lm.add_argument("--threads", type=count, help="CPU threads (all by default)")
    lm.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where to train")
    lm.add_argument("--compile", action="store_true", help="use torch.compile")
    lm.set_defaults(handler=train_language_model)
    evaluation.register(programs)
    reranking.register(programs)
    arguments = parser.parse_args(given)
    with commands.refusing(f"{parser.prog} {arguments.command}"):
        arguments.handler(arguments)


def train_language_model(arguments: argparse.Namespace) -> None:
    """The `lm` command."""
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    automatic = "cuda" if torch.cuda.is_available() else "cpu"
    device = automatic if arguments.device == "auto" else arguments.device
    recipe = language_model.Recipe(
        arguments.size,
        arguments.tokens,
        arguments.batch_tokens,
        matrix_rate=arguments.matrix_rate,
        vector_rate=arguments.vector_rate,
        compiled=arguments.compile,
    )
    transformers.utils.logging.disable_progress_bar()
    tokenizer = corpus.tokenizer()
    rows = max(1, recipe.batch_tokens // recipe.context)
    batches = Batches(
        corpus.document_tokens("train"),
        corpus.task_tokens("train"),
        rows,
        recipe.context,
        decay_start=recipe.schedule.decay_start,
    )
    held_out = windows(corpus.document_tokens("validation"), HELD_OUT, 512)
    model = language_model.build(arguments.size, len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
    reached = language_model.train(recipe, model, batches, held_out, arguments.out, tokenizer, device)
    state = "stopped" if reached.stopped else "finished"
    print(f"{state} at step {reached.step}, {reached.step * recipe.batch_tokens} tokens, {reached.seconds:.0f} s")


if __name__ == "__main__":
    main()

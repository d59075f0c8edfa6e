"""ondevice-graphs export MODEL FOLDER writes a model's static graphs; generate FOLDER runs them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from ondevice import commands, corpus, models
from ondevice.speculation import Drafter, generate
from ondevice_papers.sdnpu import drafter
from ondevice_papers.sdnpu.history import History
from ondevice_papers.sdnpu.scheduling import RULES
from ondevice_programs.graphs import static_graphs as graphs
from ondevice_programs.graphs.static_lm import StaticLM

PLANS = {name.split(" ")[0] if name != "keep both" else "keep-both": rule for name, rule in RULES.items()}
TEXTS = 4  # windows of 256 tokens that int8's ranges are found on


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; bad input is one sentence and exit code 2."""
    parser = argparse.ArgumentParser(prog="ondevice-graphs", description=__doc__)
    several = parser.add_subparsers(dest="command", required=True)
    write = several.add_parser("export", help="write a model's graphs into a folder: ONNX, opset 17, static shapes")
    write.add_argument("model", help="a bundled name, a folder or a hub id")
    write.add_argument("folder", type=Path)
    write.add_argument("--precision", choices=graphs.PRECISIONS, default="fp32")
    write.add_argument("--blocks", type=int, default=6, help="into which the layers are dealt (6)")
    write.add_argument("--large", type=int, default=graphs.LARGE, help="rows of the prefill graph (256)")
    write.add_argument("--small", type=int, default=graphs.SMALL, help="rows of the decode graph (32)")
    say = several.add_parser("generate", help="answer a prompt on exported graphs")
    say.add_argument("folder", type=Path)
    say.add_argument("--prompt", required=True, help="the text, or - for standard input")
    say.add_argument("--tokens", type=int, default=64, help="of the answer, at most (64)")
    say.add_argument("--history", type=Path, help="file of earlier answers to draft from; it grows")
    say.add_argument("--drafter", choices=("ours", "printed", "sam", "none"), default="ours")
    say.add_argument("--plan", choices=tuple(PLANS), default="ours", help="how graphs are switched")
    say.add_argument("--memory", type=float, default=1.0, help="for graphs, over the bytes of all prefill graphs (1.0)")
    options = parser.parse_args(arguments)
    with commands.refusing(f"ondevice-graphs {options.command}"):
        torch.set_num_threads(1)
        return exported(options) if options.command == "export" else said(options)
    return 2


def exported(options: argparse.Namespace) -> int:
    """Write the graphs."""
    if (options.folder / graphs.FACTS).exists():
        raise ValueError(f"{options.folder} holds exported graphs already; name another folder.")
    loaded = models.load(options.model)
    texts = []
    if options.precision == "int8":
        text = corpus.documents("validation")
        ids = loaded.tokenizer("\n\n".join(one.docstring for one in text[:200]), verbose=False)["input_ids"]
        texts = [ids[start : start + 256] for start in np.linspace(0, len(ids) - 256, TEXTS).astype(int)]
    graphs.export(
        loaded.model, options.folder, name=options.model, blocks=options.blocks, large=options.large,
        small=options.small, precision=options.precision, texts=texts, tokenizer=loaded.tokenizer,
    )  # fmt: skip
    files = sorted(options.folder.glob("*.onnx"))
    size = (options.folder / graphs.WEIGHTS).stat().st_size / 1e6
    what = f"{len(files)} graphs, opset {graphs.OPSET}, {options.precision}, weights {size:.1f} MB"
    print(f"{options.folder}: {what}; checked and run.")
    return 0


def said(options: argparse.Namespace) -> int:
    """Print the answer, and on stderr what it took."""
    text = sys.stdin.read() if options.prompt == "-" else options.prompt
    built = graphs.compiled(options.folder)
    tokenizer = _tokenizer(options.folder, built.facts["tokenizer"])
    digest = built.facts["tokenizer"]
    vocabulary = int(built.facts["vocabulary"])
    history = History(vocabulary, digest, options.history) if options.history else None
    if not options.memory >= 1 or options.memory == float("inf"):
        raise ValueError(f"The graphs take 1.0 of the prefill graphs' bytes; a memory of {options.memory:g} cannot be.")
    ids = tokenizer(text, verbose=False)["input_ids"]
    room = int(built.facts["context"]) - len(ids)
    if not ids or room < 1:
        raise ValueError(f"The prompt has {len(ids)} tokens; these graphs hold 1 to {built.facts['context'] - 1}.")
    lm: Any = StaticLM(built, PLANS[options.plan], options.memory)
    made: dict[str, Callable[[], Drafter]] = {
        "ours": lambda: drafter.sdnpu(vocabulary, history),
        "none": Drafter,
        "sam": lambda: drafter.base("SAM", vocabulary, history),
        "printed": lambda: drafter.sdnpu(vocabulary, history, printed=True),
    }
    first: list[float] = []

    def choice(logits: torch.Tensor) -> int:
        first.append(perf_counter())
        return int(logits.argmax())

    lm.start()
    began = perf_counter()
    ends = {tokenizer.eos_token_id} - {None}
    hand = made[options.drafter]()
    budget = drafter.LMAX - 1
    found = generate(lm, hand, ids, options.tokens, budget=budget, ends=ends, choice=choice)
    spent = perf_counter() - began
    print(tokenizer.decode(list(found.tokens), skip_special_tokens=True))
    print(f"{len(ids)} + {len(found.tokens)} tokens, {len(found.steps)} passes; first token after "
          f"{first[0] - began:.3f} s, all after {spent:.3f} s", file=sys.stderr)  # fmt: skip
    return 0


def _tokenizer(folder: Path, digest: str) -> Any:
    from transformers import AutoTokenizer

    if not digest:
        raise ValueError(f"{folder} has no tokenizer: it was exported without one.")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if graphs.tokenizer_digest(tokenizer) != digest:
        raise ValueError(f"The tokenizer in {folder} is not the one that the graphs were exported with.")
    return tokenizer


if __name__ == "__main__":
    sys.exit(main())

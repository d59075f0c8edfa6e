"""A model's static graphs as sd.npu has them: `export` writes them, `generate` answers a prompt on them.

With `export --precision fp32` the tokens are those of greedy decoding, whatever `generate --drafter` and `--plan`;
fp16 and int8 round, so a token may differ. `generate --memory` limits the bytes of the graphs that are loaded.
"""

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
from ondevice_programs.graphs import static_graphs
from ondevice_programs.graphs.static_lm import StaticLM

PLANS = {name.split(" ")[0] if name != "keep both" else "keep-both": rule for name, rule in RULES.items()}
TEXTS = 4  # windows of 256 tokens that int8's ranges are found on


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; bad input is one sentence and exit code 2."""
    options = _parser().parse_args(arguments)
    with commands.refusing(f"ondevice-graphs {options.command}"):
        torch.set_num_threads(1)
        return exported(options) if options.command == "export" else generated(options)
    return 2


def exported(options: argparse.Namespace) -> int:
    """`ondevice-graphs export`: write a model's graphs into a new folder."""
    if (options.folder / static_graphs.FACTS).exists():
        raise ValueError(f"{options.folder} holds exported graphs already; name another folder.")
    loaded = models.load(options.model)
    texts = []
    if options.precision == "int8":
        text = corpus.documents("validation")
        ids = loaded.tokenizer("\n\n".join(document.docstring for document in text[:200]), verbose=False)["input_ids"]
        texts = [ids[start : start + 256] for start in np.linspace(0, len(ids) - 256, TEXTS).astype(int)]
    static_graphs.export(
        loaded.model, options.folder, name=options.model, blocks=options.blocks, large=options.large,
        small=options.small, precision=options.precision, texts=texts, tokenizer=loaded.tokenizer,
    )  # fmt: skip
    files = sorted(options.folder.glob("*.onnx"))
    size = (options.folder / static_graphs.WEIGHTS).stat().st_size / 1e6
    what = f"{len(files)} graphs, opset {static_graphs.OPSET}, {options.precision}, weights {size:.1f} MB"
    print(f"{options.folder}: {what}; checked and run.")
    return 0


def generated(options: argparse.Namespace) -> int:
    """`ondevice-graphs generate`: print the answer, and on stderr what it took."""
    text = sys.stdin.read() if options.prompt == "-" else options.prompt
    built = static_graphs.compiled(options.folder)
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
    drafters: dict[str, Callable[[], Drafter]] = {
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
    hand = drafters[options.drafter]()
    budget = drafter.LMAX - 1
    generation = generate(lm, hand, ids, options.tokens, budget=budget, eos_token_ids=ends, choice=choice)
    spent = perf_counter() - began
    print(tokenizer.decode(list(generation.tokens), skip_special_tokens=True))
    print(f"{len(ids)} + {len(generation.tokens)} tokens, {len(generation.steps)} passes; first token after "
          f"{first[0] - began:.3f} s, all after {spent:.3f} s", file=sys.stderr)  # fmt: skip
    return 0


def _parser() -> commands.Parser:
    parser = commands.Parser("ondevice-graphs", description=__doc__)
    programs = parser.add_subparsers(dest="command", required=True)
    example = "ondevice-graphs export pydocs-lm-base GRAPHS --precision int8"
    export = programs.add_parser("export", help="write graphs into a folder: ONNX, opset 17", example=example)
    add = export.add_argument
    add("model", help="a bundled name, a folder or a hub id")
    add("folder", type=Path, help="to write them to; it must not hold graphs yet")
    add("--precision", choices=static_graphs.PRECISIONS, default="fp32", help="of the weights; int8 is QDQ")
    add("--blocks", type=int, default=6, metavar="N", help="into which the layers are dealt")
    add("--large", type=int, default=static_graphs.LARGE, metavar="ROWS", help="of the prefill graph")
    add("--small", type=int, default=static_graphs.SMALL, metavar="ROWS", help="of the decode graph")
    example = 'ondevice-graphs generate GRAPHS --prompt "def mean(values):"'
    answer = programs.add_parser("generate", help="answer a prompt on exported graphs", example=example)
    add = answer.add_argument
    add("folder", type=Path, help="of exported graphs")
    add("--prompt", required=True, metavar="TEXT", help="or - for standard input")
    add("--tokens", type=int, default=64, metavar="N", help="of the answer, at most")
    add("--history", type=Path, metavar="FILE", help="earlier answers to draft from; it grows")
    add("--drafter", choices=("ours", "printed", "sam", "none"), default="ours", help="printed: as the paper has it")
    add("--plan", choices=tuple(PLANS), default="ours", help="how graphs are switched")
    add("--memory", type=float, default=1.0, metavar="SHARE", help="for graphs, over the bytes of all prefill graphs")
    return parser


def _tokenizer(folder: Path, digest: str) -> Any:
    from transformers import AutoTokenizer

    if not digest:
        raise ValueError(f"{folder} has no tokenizer: it was exported without one.")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if static_graphs.tokenizer_digest(tokenizer) != digest:
        raise ValueError(f"The tokenizer in {folder} is not the one that the graphs were exported with.")
    return tokenizer


if __name__ == "__main__":
    sys.exit(main())

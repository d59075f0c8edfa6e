"""A model as static graphs for an NPU: `export` writes them, `compile` asks the HTP's compiler, `generate` answers.

With `export --target cpu` the tokens are those of greedy decoding with these weights, whatever `generate --drafter` and
`--plan`. For the HTP, Qualcomm's NPU, what is multiplied is rounded, so a token may differ; the folder says how often.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from ondevice import chat, commands, models
from ondevice.speculation import Drafter, generate, greedy
from ondevice.speculation.bundled import mixture
from ondevice_papers.sdnpu import drafter
from ondevice_papers.sdnpu.history import History
from ondevice_papers.sdnpu.scheduling import RULES
from ondevice_programs.graphs import exporting, htp, static_graphs
from ondevice_programs.graphs.static_lm import StaticLM

PLANS = {name.split(" ")[0] if name != "keep both" else "keep-both": rule for name, rule in RULES.items()}
FAILED = 3  # exit code where the compiler refuses a graph


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; bad input is one sentence and exit code 2, a graph that the compiler refuses one and code 3."""
    options = _parser().parse_args(arguments)
    with commands.refusing(f"ondevice-graphs {options.command}"):
        torch.set_num_threads(1)
        try:
            return {"export": exported, "compile": compiled, "generate": generated}[options.command](options)
        except htp.CompilerRefused as error:
            print(f"ondevice-graphs {options.command}: {error}", file=sys.stderr)
            return FAILED
    return 2


def exported(options: argparse.Namespace) -> int:
    """`ondevice-graphs export`: write a model's graphs into a new folder."""
    loaded = models.load(options.model)
    sizes = options.context, options.blocks, options.large, options.small
    exporting.check(loaded, options.folder, *sizes)  # before the texts are read, which may take minutes
    facts = exporting.export(
        loaded,
        options.folder,
        exporting.texts(loaded, options.texts),
        target=options.target,
        context=options.context,
        blocks=options.blocks,
        large=options.large,
        small=options.small,
        weights=options.weights,
        cache_bits=options.cache_bits,
        compared=options.compared,
    )
    size = (options.folder / static_graphs.WEIGHTS).stat().st_size / 1e6
    print(
        f"{options.folder}: {len(facts['layers'])} blocks of {facts['large']} and {facts['small']} rows for "
        f"{facts['target']}, weights {facts['weights']}, {size:.1f} MB."
    )
    if "compared" in facts:
        compared = facts["compared"]
        print(
            f"Compared with the model in float32 on {compared['tokens']} tokens: the same likeliest token after "
            f"{100 * compared['argmax_agreement']:.1f} percent, loss {compared['loss']:.3f} per token, the model's "
            f"{compared['model_loss']:.3f}."
        )
    return 0


def compiled(options: argparse.Namespace) -> int:
    """`ondevice-graphs compile`: both graphs of each block in one binary, and in one each; print what they take.

    The folder is there once all are compiled, or not at all.
    """
    facts = static_graphs.facts_of(options.graphs)
    if facts["target"] != "htp":
        raise ValueError(f"{options.graphs} was exported for {facts['target']}; the compiler takes --target htp.")
    if options.folder.exists():
        raise ValueError(f"{options.folder} is there already; name a new folder.")
    sums = np.zeros((2, 2))  # shared or not; MB of binaries and of spill memory
    print(f"{'MB of':8}{'shared':>10}{'apart':>10}{'spill':>10}{'apart':>10}")
    options.folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder.parent, prefix=f".{options.folder.name}-") as scratch:
        new = Path(scratch) / "new"
        for part, *sizes in htp.both_ways(options.graphs, facts, new, str(options.soc)):
            row = np.array(sizes) / 1e6
            print(f"{part:8}{row[0, 0]:10.1f}{row[1, 0]:10.1f}{row[0, 1]:10.1f}{row[1, 1]:10.1f}", flush=True)
            sums += row
        new.rename(options.folder)
    print(f"{'all':8}{sums[0, 0]:10.1f}{sums[1, 0]:10.1f}{sums[0, 1]:10.1f}{sums[1, 1]:10.1f}")
    print(f"{options.folder}: compiled for SoC {options.soc}, HTP v{htp.ARCHITECTURE}; no node is left to the CPU.")
    return 0


def generated(options: argparse.Namespace) -> int:
    """`ondevice-graphs generate`: print the answer, and on stderr what it took."""
    text = sys.stdin.read() if options.prompt == "-" else options.prompt
    built = static_graphs.opened(options.folder)
    tokenizer = _tokenizer(options.folder, built.facts["tokenizer"])
    vocabulary = int(built.facts["vocabulary"])
    history = History(vocabulary, built.facts["tokenizer"], options.history)
    earlier = History(vocabulary)  # in memory, to draft from
    earlier.responses = [*history.responses]
    if not options.memory >= 1 or options.memory == float("inf"):
        raise ValueError(f"The graphs take 1.0 of the prefill graphs' bytes; a memory of {options.memory:g} cannot be.")
    ids = chat.prompt_ids(tokenizer, text)
    if not 1 <= len(ids) < built.facts["context"]:
        raise ValueError(f"The prompt has {len(ids)} tokens; these graphs hold 1 to {built.facts['context'] - 1}.")
    lm: Any = StaticLM(built, PLANS[options.plan], options.memory)
    drafters: dict[str, Callable[[], Drafter]] = {
        "mixture": lambda: _informed(mixture(), earlier),
        "sdnpu": lambda: drafter.sdnpu(vocabulary, earlier),
        "sam": lambda: drafter.base("SAM", vocabulary, earlier),
        "none": Drafter,
    }
    room = built.facts["context"] + 1 - len(ids)  # the last token needs no row
    if options.tokens > room:
        print(f"The answer has at most {room} tokens: these graphs hold {built.facts['context']}.", file=sys.stderr)
    first: list[float] = []
    tokens: list[int] = []

    def choice(logits: torch.Tensor) -> int:
        first.append(perf_counter())
        tokens.append(greedy(logits))
        return tokens[-1]

    lm.start()
    began = perf_counter()
    ends = frozenset(built.facts["eos_token_ids"])
    budget = drafter.LMAX - 1
    try:
        generation = generate(
            lm, drafters[options.drafter](), ids, options.tokens, budget=budget, eos_token_ids=ends, choice=choice
        )
    finally:  # after an interrupt, too
        spent = perf_counter() - began
        print(tokenizer.decode(tokens, skip_special_tokens=True), flush=True)
    print(
        f"{len(ids)} + {len(generation.tokens)} tokens, {len(generation.steps)} passes; first token after "
        f"{first[0] - began:.3f} s, all after {spent:.3f} s",
        file=sys.stderr,
    )
    history.append(generation.tokens)  # at last, so that a full disk loses no answer
    return 0


def _informed(drafter: Drafter, history: History) -> Drafter:
    """A drafter that has seen the answers of a history."""
    for response in history.responses:
        drafter.begin(())
        drafter.end(response)
    return drafter


def _parser() -> commands.Parser:
    parser = commands.Parser("ondevice-graphs", description=__doc__)
    programs = parser.add_subparsers(dest="command", required=True)
    example = "ondevice-graphs export smollm2-135m-instruct GRAPHS --weights 4bit"
    export = programs.add_parser("export", help="write graphs into a new folder, as ONNX", example=example)
    add = export.add_argument
    add("model", help="a bundled name, a folder, a GGUF file or a hub id")
    add("folder", type=commands.writable, help="to write them to, which must not be there yet")
    add("--target", choices=("cpu", "htp"), default="cpu", help="htp: Qualcomm's NPU; needs the extra npu")
    add("--context", type=commands.count, default=1024, metavar="N", help="tokens that a session may have")
    add(
        "--texts",
        type=commands.existing,
        metavar="FILE",
        help="as the model will read them: ranges and logits are taken from them (default: prompts of this package)",
    )
    add("--weights", choices=("float32", "8bit", "4bit"), default="float32", help="of target cpu; htp has 8 bits")
    add("--cache-bits", type=int, choices=(8, 16), default=16, help="of the HTP's keys and values")
    add("--blocks", type=commands.count, default=exporting.BLOCKS, metavar="N", help="into which layers are dealt")
    add("--large", type=commands.count, default=exporting.LARGE, metavar="ROWS", help="of the prefill graph")
    add("--small", type=commands.count, default=exporting.SMALL, metavar="ROWS", help="of the decode graph")
    add(
        "--compared",
        type=commands.whole(),
        default=-1,
        metavar="N",
        help=f"tokens, {exporting.READ} at most, whose logits are compared with the model's (default: 512, on the "
        "HTP's emulator 32)",
    )
    example = "ondevice-graphs compile GRAPHS BINARIES"
    compiler = programs.add_parser("compile", help="have Qualcomm's compiler take a folder's graphs", example=example)
    add = compiler.add_argument
    add("graphs", type=Path, help="a folder that was exported with --target htp")
    add("folder", type=commands.writable, help="to write the binaries to, which must not be there yet")
    add(
        "--soc",
        type=commands.count,
        default=int(htp.SOC),
        metavar="MODEL",
        help="Qualcomm's number of the chip; 57 is Snapdragon 8 Gen 3",
    )
    example = 'ondevice-graphs generate GRAPHS --prompt "def mean(values):"'
    answer = programs.add_parser("generate", help="answer a prompt on exported graphs", example=example)
    add = answer.add_argument
    add("folder", type=Path, help="of exported graphs")
    add("--prompt", required=True, metavar="TEXT", help="or - for standard input")
    add("--tokens", type=commands.count, default=64, metavar="N", help="of the answer, at most")
    add("--history", type=Path, metavar="FILE", help="earlier answers to draft from; it grows")
    add(
        "--drafter",
        choices=("mixture", "sdnpu", "sam", "none"),
        default="mixture",
        help="sdnpu: the paper's; mixture: the library's strongest",
    )
    add("--plan", choices=tuple(PLANS), default="ours", help="how graphs are switched")
    add("--memory", type=float, default=1.0, metavar="SHARE", help="for graphs, over the bytes of all prefill graphs")
    return parser


def _tokenizer(folder: Path, digest: str) -> Any:
    from transformers import AutoTokenizer

    if not digest:
        raise ValueError(f"{folder} has no tokenizer: it was exported without one.")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if exporting.vocabulary_digest(tokenizer) != digest:
        raise ValueError(f"The tokenizer in {folder} is not the one that the graphs were exported with.")
    return tokenizer


if __name__ == "__main__":
    sys.exit(main())

"""What Qualcomm's compiler makes of static graphs, and what its emulator's logits are worth.

`make record PAPER=sdnpu ARGS="--parts compiled emulated"` records both; it needs the extra npu. Both are
taken for the same on every machine, as compiler and emulator are one package; this was not tried on a second one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np
import torch

from ondevice import corpus, models
from ondevice.evidence import Recorder
from ondevice.models import QWEN, SMOLLM2, Loaded
from ondevice_programs.graphs import exporting, htp, static_graphs

CONTEXT = 768  # tokens, as the long prompts that are switched in have
TOKENS = 700  # of a text that the emulator reads
SHAPE = "random:qwen2.5-0.5b"  # where the larger model's file is not on this machine
FIRST = 20  # documents of the test split that earlier trials of the arithmetic had read


def exported(loaded: Loaded, folder: Path) -> None:
    """Write a model's graphs for the HTP."""
    exporting.export(loaded, folder, exporting.texts(loaded), target="htp", context=CONTEXT, compared=0)


def larger() -> str:
    """The larger model, or its shape with random weights where its file is not on this machine."""
    try:
        models.load(QWEN)
    except (FileNotFoundError, ValueError):
        return SHAPE
    return QWEN


def compiled() -> None:
    """Each block's two graphs in one binary, which has the weights once, and in a binary each."""
    specs = (SMOLLM2, larger())
    parameters = {"context": CONTEXT, "soc": htp.SOC}
    recorder = Recorder("sdnpu", "compiled", ["model", "part"], parameters, specs, functions=[compiled])
    for spec in specs:
        with TemporaryDirectory() as scratch:
            folder = Path(scratch) / "graphs"
            exported(models.load(spec), folder)
            facts = static_graphs.facts_of(folder)
            done = {part for model, part in recorder.done if model == spec}
            for part, shared, apart in htp.both_ways(folder, facts, Path(scratch) / "binaries", skipped=done):
                row = {
                    "shared_mb": shared.size / 1e6,
                    "apart_mb": apart.size / 1e6,
                    "shared_spill_mb": shared.spill / 1e6,
                    "apart_spill_mb": apart.spill / 1e6,
                }
                recorder.add([{"model": spec, "part": part, **row}])
                recorder.checkpoint()
                print(spec, part, row, flush=True)
    print(recorder.finish())


def emulated() -> None:
    """A row per token of a text: whether the emulator's likeliest next token is the model's, both losses, seconds."""
    spec = SMOLLM2
    parameters = {"context": CONTEXT, "tokens": TOKENS, "soc": htp.SOC}
    recorder = Recorder("sdnpu", "emulated", ["model"], parameters, [spec], functions=[emulated])
    loaded = models.load(spec)
    documents = corpus.documents("test")[FIRST : FIRST + 200]
    text = "\n\n".join(document.text for document in documents)
    ids = loaded.tokenizer(text, verbose=False).input_ids[: TOKENS + 1]
    with torch.inference_mode():
        right = loaded.model(torch.tensor([ids[:-1]])).logits[0]
    with TemporaryDirectory() as scratch:
        exported(loaded, Path(scratch) / "graphs")
        built = static_graphs.opened(Path(scratch) / "graphs")
        blocks = [built.load(path) for path in built.small_files]
        caches = built.caches()
        rows = []
        for start in range(0, TOKENS, built.small):
            began = perf_counter()
            part = ids[start : min(start + built.small, TOKENS)]
            hidden = built.embed(part)
            causal = np.tri(len(part), dtype=bool)
            for graph, cache in zip(blocks, caches, strict=True):
                hidden = static_graphs.forward(graph, hidden, cache, start, causal, range(start, start + len(part)))
            logits = built.logits(hidden)
            spent = (perf_counter() - began) / len(part)
            for index, row in enumerate(logits):
                position = start + index
                following = ids[position + 1]
                losses = [-float(torch.log_softmax(each, -1)[following]) for each in (row, right[position])]
                agrees = bool(row.argmax() == right[position].argmax())
                rows.append({"model": spec, "position": position, "agrees": agrees, "loss": losses[0],
                             "model_loss": losses[1], "seconds": spent})  # fmt: skip
            print(f"{spec}: {len(rows)} tokens, {np.mean([row['agrees'] for row in rows]):.3f} agree", flush=True)
    recorder.add(rows)
    print(recorder.finish())


PARTS: dict[str, Callable[[], None]] = {"compiled": compiled, "emulated": emulated}

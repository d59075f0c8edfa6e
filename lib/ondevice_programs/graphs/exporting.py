"""A model written as a folder of static graphs, with what its logits are worth in the target's own arithmetic."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

import numpy as np
import onnx
import torch
from onnx.external_data_helper import set_external_data
from torch.nn import functional

from ondevice import prompts
from ondevice.causal_lm import drawing
from ondevice.causal_lm.drawing import Weights
from ondevice.models import Loaded
from ondevice_programs.graphs import htp, static_graphs
from ondevice_programs.graphs.drawn import HTPDrawing, StaticDrawing
from ondevice_programs.graphs.static_graphs import FACTS, WEIGHTS

LARGE = 256  # rows of G1 (section 3.2)
SMALL = 32  # rows of G2
BLOCKS = 6
FEWEST = 256  # tokens of texts
READ = 2048  # tokens that are read of longer ones
COMPARED = {"cpu": 512, "htp": 32}  # tokens; the emulator takes seconds for each
_PAGE = 4096
_INLINE = 1024  # bytes of a constant that stays in the graph


def export(
    loaded: Loaded,
    folder: Path,
    texts: Sequence[Sequence[int]],
    *,
    target: str = "cpu",
    context: int = 1024,
    blocks: int = BLOCKS,
    large: int = LARGE,
    small: int = SMALL,
    weights: Weights = "float32",
    cache_bits: int = 16,
    compared: int = -1,
) -> dict[str, Any]:
    """Write a model's graphs into a new folder, whole or not at all; returns the folder's facts.

    texts: token ids. The HTP's ranges are those that the model has on them, but for the last where there are several:
        on that its logits are compared. On the CPU they are compared on the first.
    context: tokens that a session may have. blocks: into which the layers are dealt, at most as many as there are.
    large, small: rows of the two graphs of each block. weights: of target cpu. cache_bits: of the HTP's keys, values.
    compared: tokens whose logits are compared with the model's; by default 512 on the CPU, 32 in the HTP's emulator.
    Raises ValueError for a model that cannot be drawn, numbers that do not fit and a folder that is there,
    htp.CompilerRefused where the HTP's compiler does not take a graph, and OSError where the folder cannot be written.
    """
    config = loaded.config
    form: Weights = "8bit" if target == "htp" else weights
    structure, matrix = drawing.matrices(loaded if target == "cpu" else loaded.model, form, False)
    drawing.require_drawable(structure, "Graphs are")
    blocks = min(blocks, config.num_hidden_layers)
    check(loaded, folder, context, blocks, large, small)
    if (count := sum(map(len, texts))) < FEWEST:
        raise ValueError(f"The texts have {count} tokens; ranges and logits take at least {FEWEST}.")
    noted = htp.noted(loaded.model, texts[:-1] or texts, cache_bits) if target == "htp" else None
    embedding: Any = structure.get_input_embeddings()
    parts = np.array_split(np.arange(config.num_hidden_layers), blocks)
    capacity = context + small  # a draft lies behind a full context
    facts: dict[str, Any] = {
        "format": 2,
        "model": loaded.spec,
        "target": target,
        "weights": "int8 by channel" if target == "htp" else weights,
        "context": context,
        "capacity": capacity,
        "large": large,
        "small": small,
        "layers": [len(part) for part in parts],
        "hidden": config.hidden_size,
        "groups": drawing.heads(config)[1],
        "size": drawing.heads(config)[2],
        "vocabulary": int(embedding.weight.shape[0]),
        "cache": f"uint{cache_bits}" if target == "htp" else "float32",
        "eos_token_ids": sorted(loaded.eos_token_ids),
        "tokenizer": vocabulary_digest(loaded.tokenizer) if loaded.tokenizer else "",
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        new = Path(scratch) / "new"
        new.mkdir()
        with (new / WEIGHTS).open("wb") as file:
            shared = _Weights(file)
            for rows in (large, small):
                plain = partial(StaticDrawing, structure, rows, capacity, matrix)
                drawn = partial(HTPDrawing, loaded.model, rows, capacity, noted) if noted else plain
                shared.write(new / f"embed-{rows}.onnx", plain().embedding())
                for number, part in enumerate(parts):
                    shared.write(new / f"block{number:02}-{rows}.onnx", drawn().block(part.tolist()))
                shared.write(new / f"head-{rows}.onnx", drawn().head())
        files = sorted(new.iterdir())
        facts["files"] = {path.name: [static_graphs.checksum(path), path.stat().st_size] for path in files}
        if facts["tokenizer"]:
            loaded.tokenizer.save_pretrained(new)
        tokens = COMPARED[target] if compared < 0 else compared
        (new / FACTS).write_text(json.dumps(facts, indent=1), encoding="utf-8")
        if tokens:
            facts["compared"] = comparison(
                new, loaded.model, texts[::-1] if noted else texts, min(tokens, READ), context
            )
            (new / FACTS).write_text(json.dumps(facts, indent=1), encoding="utf-8")
        if folder.is_dir():
            folder.rmdir()  # it is empty
        new.rename(folder)
    return facts


def texts(loaded: Loaded, path: Path | None = None) -> list[list[int]]:
    """Windows of `FEWEST` token ids, `READ` in all: from a file's start, or spread over the package's own prompts."""
    if path is None:
        own = "\n\n".join(prompt.text for prompt in prompts.own("validation"))
        ids = loaded.tokenizer(own, verbose=False)["input_ids"]
        starts = np.linspace(0, max(0, len(ids) - FEWEST), READ // FEWEST).astype(int).tolist()
    else:
        ids = loaded.tokenizer(path.read_text(encoding="utf-8"), verbose=False)["input_ids"]
        starts = list(range(0, min(len(ids), READ), FEWEST))
    return [ids[start : start + FEWEST] for start in starts]


def comparison(folder: Path, model: Any, texts: Sequence[Sequence[int]], most: int, context: int) -> dict[str, float]:
    """Logits of exported graphs, in the target's arithmetic, beside the float32 model's: on the first `most` tokens.

    Each text is read by itself, up to the context. tokens: that were read. argmax_agreement: share of them whose
    likeliest next token is the same. loss, model_loss: per token, in nats. greatest_difference: of two logits, in
    standard deviations of the model's behind the same text.
    """
    built = static_graphs.opened(folder)
    tokens, same, followed, greatest = 0, 0, 0, 0.0
    losses = np.zeros(2)
    for text in texts:
        ids = list(text[: min(most - tokens, context)])
        if not ids:
            break
        ours = static_graphs.read(built, ids)
        with torch.inference_mode():
            right = model(torch.tensor([ids])).logits[0]
        following = torch.tensor(ids[1:], dtype=torch.long)
        for number, logits in enumerate((ours, right)):
            losses[number] += float(functional.cross_entropy(logits[:-1].float(), following, reduction="sum"))
        tokens += len(ids)
        followed += len(following)
        same += int((ours.argmax(-1) == right.argmax(-1)).sum())
        greatest = max(greatest, float((ours - right).abs().max() / right.std()))
    loss, model_loss = (losses / max(1, followed)).tolist()
    return {
        "tokens": tokens,
        "argmax_agreement": same / tokens,
        "loss": loss,
        "model_loss": model_loss,
        "greatest_difference": greatest,
    }


def vocabulary_digest(tokenizer: Any) -> str:
    """12 hex digits of a vocabulary, so that a history of other ids is noticed."""
    return sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:12]


class _Weights:
    """The graphs of a folder, over one file of weights: equal constants lie in it once, each on a page of its own."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._offsets: dict[bytes, int] = {}

    def write(self, path: Path, proto: onnx.ModelProto) -> None:
        """Write a graph to its path, its large constants into the file of weights."""
        for tensor in proto.graph.initializer:
            data = tensor.raw_data
            if len(data) < _INLINE:
                continue
            key = sha256(data).digest()
            if key not in self._offsets:
                self._file.write(bytes(-self._file.tell() % _PAGE))
                self._offsets[key] = self._file.tell()
                self._file.write(data)
            set_external_data(tensor, WEIGHTS, self._offsets[key], len(data))
            tensor.ClearField("raw_data")
        for number, node in enumerate(proto.graph.node):
            node.name = f"{node.op_type}_{number}"
        path.write_bytes(proto.SerializeToString())


def check(loaded: Loaded, folder: Path, context: int, blocks: int, large: int, small: int) -> None:
    """Raise ValueError, as `export` does, where its numbers do not fit or its folder is there."""
    if (folder / FACTS).exists():
        raise ValueError(f"{folder} holds exported graphs already; name another folder.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not an empty folder; name a new one.")
    most = int(loaded.config.max_position_embeddings)
    if not large <= context <= most:
        raise ValueError(f"The context is from {large}, a chunk of the prompt, to the model's {most}, not {context}.")
    if not 1 <= small < large or large % small:
        raise ValueError(f"The small chunk must divide a larger one: {small} does not divide {large}.")
    if blocks < 1:
        raise ValueError(f"There is at least one block, not {blocks}.")

"""What the paper compares with: a reranker in memory, offloaded by accelerate, quantised, and in CrossEncoder.

All give the logit that the engine gives (of "yes" against "no", or of the classification head), of the same tokens.
Those on transformers' own forward are spared what a reranker does not need: a cache, and logits of any token but the
last, which for a vocabulary of 150,000 would be most of their memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import safetensors
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from ondevice.grating.architectures import Architecture, Batch, Row, answer_ids, encode
from ondevice.grating.checkpoint import Checkpoint, StoredTensor
from ondevice.grating.engine import Engine, Scores
from ondevice.grating.pruning import Rule, Selection
from ondevice.grating.quantised import quantise
from ondevice.meters import trim

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH = 4  # rows of a forward; with 20 at a time the temporaries are five times as many, and it is not faster


class Scorer(Protocol):
    """A way to run a reranker."""

    def scores(self, query: str, documents: Sequence[str]) -> NDArray[np.float64]:
        """[N] logits of the documents."""


@dataclass(frozen=True)
class Model:
    """A reranker's folder without its weights. longest: most tokens of a row, see `architectures.encode`."""

    folder: Path
    architecture: Architecture
    tokenizer: PreTrainedTokenizerBase
    longest: int | None = None

    @classmethod
    def open(cls, folder: Path | str, longest: int | None = None) -> Model:
        """From config.json and the tokenizer's files; raises ValueError where it cannot be run layer by layer."""
        from transformers import AutoConfig, AutoTokenizer

        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        causal = (config.architectures or [""])[0].endswith("ForCausalLM")
        return cls(Path(folder), Architecture(config, answer_ids(tokenizer) if causal else None), tokenizer, longest)

    def rows(self, query: str, documents: Sequence[str]) -> list[Row]:
        """The tokens of each document with the query."""
        return encode(self.architecture, self.tokenizer, query, documents, self.longest).rows

    def network(self, **options: Any) -> Any:
        """transformers' model with the weights of the folder, in the dtype they are stored in."""
        import transformers

        made = getattr(transformers, self.architecture.name)
        return made.from_pretrained(str(self.folder), dtype="auto", trust_remote_code=False, **options).eval()


class Layered:
    """The engine of this package, on any weights. latest: all that its last pass gave.

    rule, top_k: of pruning; a document that was decided early has the logit of that layer. Without a rule, or with no
    document too many, all layers.
    """

    def __init__(self, model: Model, engine: Engine, rule: Rule | None = None, top_k: int = 1) -> None:
        self.model, self.engine, self.rule, self.top_k = model, engine, rule, top_k
        self.latest: Scores | None = None

    def scores(self, query: str, documents: Sequence[str]) -> NDArray[np.float64]:
        """[N] logits."""
        rows = self.model.rows(query, documents)
        prunes = self.rule is not None and self.top_k < len(rows)
        prune = Selection(len(rows), self.model.architecture.layers, self.top_k, self.rule).step if prunes else None
        self.latest = self.engine.score(rows, prune)
        return self.latest.last


class Batched:
    """transformers' forward on batches of like lengths.

    network: its model, with or without hooks. batch: most rows of a forward. whole_head: whether a causal LM gives the
    logits of the whole vocabulary at the last token, as its own forward does, and not of "yes" and "no" alone.
    """

    def __init__(self, model: Model, network: Any, batch: int = BATCH, whole_head: bool = False) -> None:
        if batch < 1:
            raise ValueError(f"A batch has at least one row, not {batch}.")
        self.model, self.network, self.batch, self.whole_head = model, network, batch, whole_head

    @torch.inference_mode()
    def scores(self, query: str, documents: Sequence[str]) -> NDArray[np.float64]:
        """[N] logits."""
        rows = self.model.rows(query, documents)
        order = sorted(range(len(rows)), key=lambda index: len(rows[index].ids))
        found = np.empty(len(rows))
        for start in range(0, len(order), self.batch):
            group = order[start : start + self.batch]
            found[group] = self._logits(Batch([rows[index] for index in group])).double().numpy()
        return found

    def _logits(self, batch: Batch) -> Tensor:
        """[n] logits of a batch."""
        architecture, network = self.model.architecture, self.network
        ids = torch.zeros(batch.real.shape, dtype=torch.int64)
        ids[batch.real] = batch.ids
        inputs = {"input_ids": ids, "attention_mask": batch.real.long()}
        if not architecture.causal:
            if architecture.config.type_vocab_size > 1:
                inputs["token_type_ids"] = batch.segments
            return network(**inputs).logits[:, 0]
        states = architecture.pooled(batch, network.model(**inputs, use_cache=False).last_hidden_state)
        if architecture.answers is None:
            return network.score(states).float()[:, 0]
        logits = self._answers(states, list(architecture.answers))
        return logits[:, 0] - logits[:, 1]

    def _answers(self, states: Tensor, answers: list[int]) -> Tensor:
        """[n, 2] logits of two tokens. The states are of two dimensions: of three, it can take a slow path."""
        head = self.network.lm_head
        if self.whole_head or head.weight.is_meta:  # offloaded: its hook reads the whole table
            return head(states)[:, answers].float()
        return functional.linear(states.float(), head.weight[answers].float())


def in_memory(model: Model, batch: int = BATCH, whole_head: bool = False) -> Batched:
    """transformers as it is: the weights are a mapping of their files, which the system can drop and read again."""
    return Batched(model, model.network(), batch, whole_head)


def copied(model: Model, batch: int = BATCH, whole_head: bool = False) -> Batched:
    """transformers with its weights copied off the mapping, layer by layer, into memory of its own."""
    return Batched(model, _filled(model, lambda layer: None), batch, whole_head)


def offloaded(model: Model, batch: int = BATCH, whole_head: bool = False, everything: bool = False) -> Batched:
    """accelerate's offload: before a module runs its weights are read from the files, after it they are dropped.

    everything: the embedding and the head too, else the layers only. Each batch reads all of it again.
    """
    folder = tempfile.TemporaryDirectory(prefix="offload-")
    places = {"": "disk"} if everything else _places(model)
    network = model.network(device_map=places, offload_folder=folder.name)
    network.offload_folder_of_this_run = folder  # removed with the model
    return Batched(model, network, batch, whole_head)


def _places(model: Model) -> Mapping[str, str]:
    """accelerate's device map: the layers on the disk, all else in memory."""
    network = model.architecture._model
    trunk = network.base_model_prefix
    layers = f"{trunk}.layers" if model.architecture.causal else f"{trunk}.encoder"
    found = {f"{trunk}.{name}": "cpu" for name, _ in getattr(network, trunk).named_children()}
    return found | {name: "cpu" for name, _ in network.named_children() if name != trunk} | {layers: "disk"}


def quantised(model: Model, batch: int = BATCH, whole_head: bool = False) -> Batched:
    """int8 weight-only linear layers, a scale an output row (`quantised.quantise`); embedding and head as stored.

    Layer by layer, so that there is never more than one of them unquantised. What quantising one left on the heap is
    given back: it would be more than the quantised weights.
    """

    def small(layer: nn.Module) -> None:
        for module in layer.modules():
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, _Int8Linear(child))
        trim()

    return Batched(model, _filled(model, small), batch, whole_head)


class _Int8Linear(nn.Module):
    """A linear layer whose weights are multiplied out for each call: faster on these CPUs than int8 kernels are."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        steps, scale = quantise(linear.weight.detach())
        self.register_buffer("steps", steps)
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., out] of x [..., in]."""
        weight = self.get_buffer("steps").to(x.dtype).mul_(self.get_buffer("scale")[:, None])
        return functional.linear(x, weight, self.bias)


def _filled(model: Model, each: Callable[[nn.Module], None]) -> Any:
    """transformers' model, filled from the files layer by layer, the largest tensors first.

    each: is called with every layer once it is full.
    """
    import accelerate
    import transformers

    architecture, groups = model.architecture, Checkpoint.open(model.folder).groups
    with accelerate.init_empty_weights(include_buffers=False):
        network = getattr(transformers, architecture.name)(architecture.config).eval()
    others = [groups.table, *([] if groups.head is None else [groups.head]), *groups.rest.values()]
    network.load_state_dict(_loaded({tensor.name: tensor for tensor in others}), assign=True, strict=False)
    trunk = network.base_model
    for layer, tensors in zip(trunk.layers if architecture.causal else trunk.encoder.layer, groups.layers, strict=True):
        layer.load_state_dict(_loaded(tensors), assign=True)
        each(layer)
    network.tie_weights()
    empty = [name for name, value in network.named_parameters() if value.is_meta]
    if empty:
        raise ValueError(f"{model.folder.name} has no {empty[0]}.")
    return network


class CrossEncoder:
    """sentence-transformers' CrossEncoder.rank, with its own tokenisation, batches and head."""

    def __init__(self, model: Model, batch: int = BATCH) -> None:
        import sentence_transformers

        self.batch = batch
        self.network = sentence_transformers.CrossEncoder(
            str(model.folder), device="cpu", max_length=model.longest, model_kwargs={"dtype": "auto"},
            activation_fn=torch.nn.Identity(), local_files_only=True,
        )  # fmt: skip

    def scores(self, query: str, documents: Sequence[str]) -> NDArray[np.float64]:
        """[N] logits."""
        found = np.empty(len(documents))
        for entry in self.network.rank(query, list(documents), batch_size=self.batch, show_progress_bar=False):
            found[entry["corpus_id"]] = entry["score"]
        return found


class LayerLoading:
    """Weights as AirLLM has them: each layer is loaded when it is its turn, into new memory, and nothing meanwhile.

    `weights.Weights`; the embedding table and the head stay in memory.
    """

    def __init__(self, folder: Path) -> None:
        self._groups = Checkpoint.open(folder).groups
        self.layers = len(self._groups.layers)
        self._rest = _loaded(self._groups.rest)
        self._table = _loaded({"table": self._groups.table})["table"]
        self._head = self._table if self._groups.head is None else _loaded({"head": self._groups.head})["head"]

    def begin(self) -> None:
        """Nothing is read ahead."""

    def layer(self, index: int) -> dict[str, Tensor]:
        """A layer's parameters, read now."""
        return _loaded(self._groups.layers[index])

    def rest(self) -> dict[str, Tensor]:
        """All but layers, embedding and head."""
        return self._rest

    def rows(self, ids: Tensor) -> Tensor:
        """[n, d] embedding rows."""
        return self._table[ids]

    def head_rows(self, ids: Tensor) -> Tensor:
        """[n, d] rows of the head."""
        return self._head[ids]

    def close(self) -> None:
        """Forget the table."""
        self._table = self._head = self._table.new_empty(0, self._table.shape[1])


def layer_loading(model: Model) -> Layered:
    """The whole pool through one layer after the other, as AirLLM does."""
    return Layered(model, Engine(model.architecture, LayerLoading(model.folder), chunk=1 << 40))


def _loaded(tensors: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """Tensors by safetensors, in memory of their own: what it gives is a view of the file's mapping."""
    found = {}
    for file in {tensor.file for tensor in tensors.values()}:
        with safetensors.safe_open(file, framework="pt") as opened:
            for name, tensor in tensors.items():
                if tensor.file == file:
                    found[name] = opened.get_tensor(tensor.name).clone()
    return found

"""Which cross-encoders can be run layer by layer, and how.

A layer is two parts, attention and feed-forward, each with its norms. Both are transformers' own modules, built without
memory (on torch's meta device) and called with parameters from wherever they are, so the arithmetic is the library's.
What a reranker never needs is left out: a cache, logits of any token but the one it is pooled at, and of a causal LM's
vocabulary all but "yes" and "no".
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from ondevice_papers.grating.checkpoint import StoredTensor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_ROPES = ("default", "linear", "llama3", "yarn")  # in others a token's rotation depends on the longest row beside it
_ATTENDED = ("full_attention", "sliding_attention")

Call = Callable[..., Tensor]  # a submodule's path and its arguments: its output; attention's is a tuple's first


@dataclass(frozen=True)
class Row:
    """Token ids of a query-document pair. border: where an encoder's second segment begins, else its length."""

    ids: Sequence[int]
    border: int


@dataclass(frozen=True)
class Batch:
    """Rows of a chunk, padded on the right."""

    rows: Sequence[Row]

    @cached_property
    def lengths(self) -> Tensor:
        """[n] int64 real tokens of each row."""
        return torch.tensor([len(row.ids) for row in self.rows])

    @cached_property
    def real(self) -> Tensor:
        """[n, width] bool: which places hold a token and no padding."""
        return torch.arange(int(self.lengths.max())) < self.lengths[:, None]

    @cached_property
    def ids(self) -> Tensor:
        """[tokens] int64 ids of the real tokens, row by row."""
        return torch.tensor([token for row in self.rows for token in row.ids])

    @property
    def segments(self) -> Tensor:
        """[n, width] int64: 1 from each row's border on."""
        borders = torch.tensor([[row.border] for row in self.rows])
        return ((torch.arange(self.real.shape[1]) >= borders) & self.real).long()

    @property
    def mask(self) -> Tensor | None:
        """[n, 1, 1, width] bool of the places that are attended to; None where there is no padding."""
        return None if bool(self.real.all()) else self.real[:, None, None]


class Architecture:
    """A reranker without its weights: embeddings, parts of layers and head, each called with the tensors it needs.

    config: a transformers configuration. answers: ids of "yes" and "no", at which a causal LM is read.
    layers; width: of a hidden state; vocabulary: rows of the token embedding; causal: decoder-only, pooled at the last
    token; longest: most tokens of a row, for a decoder no more than a sliding window, within which it attends to all.
    Rows are padded on the right, whatever the tokenizer says: positions start at 0 in every row, a decoder needs no
    mask, and a score does not depend on the rows beside it. Left padding, which decoder-only rerankers are published
    with, differs from this by rounding only, as their positions are relative.
    Raises ValueError, naming it, on what cannot be run so.
    """

    def __init__(self, config: PreTrainedConfig, answers: tuple[int, int] | None = None) -> None:
        import transformers

        self.name = (config.architectures or ["a model without an architecture"])[0]
        if self.name not in _KINDS:
            own = "its class comes as code of its own, which is not run here; a class of transformers would be needed"
            why = own if getattr(config, "auto_map", None) else f"what can: {', '.join(_KINDS)}"
            raise ValueError(f"{self.name} cannot be run layer by layer: {why}.")
        self._kind = _KINDS[self.name](config)
        if trouble := self._kind.trouble():
            raise ValueError(f"{self.name} {trouble}")
        if answers is None and self.name.endswith("ForCausalLM"):
            raise ValueError(f'{self.name} is scored by the logits of "yes" and "no": give the ids of both.')
        if answers is None and config.num_labels != 1:
            raise ValueError(f"{self.name} gives {config.num_labels} numbers a row; a reranker gives one.")
        self.config = config
        self.answers = answers
        self.causal, self.longest = self._kind.causal, self._kind.longest
        self.layers = int(config.num_hidden_layers)
        self.width = int(config.hidden_size)
        self.vocabulary = int(config.vocab_size)
        kinds = self._kind.layers()
        self._alike = [kinds.index(kind) for kind in kinds]  # of each layer: the first one with the same modules
        small = copy.deepcopy(config)
        small.num_hidden_layers = max(self._alike) + 1
        small._attn_implementation = self._kind.attention
        with torch.device("meta"):
            self._model: nn.Module = getattr(transformers, self.name)(small).eval()
        self._stack: Any = self._model.get_submodule(self._kind.stack)
        rotary: Any = getattr(self._model.base_model, "rotary_emb", None)
        self._kind.rotary = rotary and type(rotary)(config)
        self._heads = ("model.norm",) if answers else self._kind.heads

    def part_of(self, name: str) -> int:
        """Which part of a layer a tensor belongs to, by its name inside the layer: 0 attention, 1 feed-forward."""
        return int(name.partition(".")[0] not in self._kind.first)

    def require(self, layers: Sequence[Mapping[str, StoredTensor]], dtype: torch.dtype) -> None:
        """Raise ValueError where stored layers are not this architecture's, or not all of the embeddings' dtype."""
        if len(layers) != self.layers:
            raise ValueError(f"The weights of {self.name} have {len(layers)} layers; its config says {self.layers}.")
        for index, layer in enumerate(layers):
            right = {name: list(value.shape) for name, value in self._stack[self._alike[index]].named_parameters()}
            stored = {name: list(tensor.shape) for name, tensor in layer.items()}
            if odd := sorted(name for name in stored | right if stored.get(name) != right.get(name)):
                there, wanted = (shapes.get(odd[0], "missing") for shapes in (stored, right))
                raise ValueError(f"Layer {index} does not fit {self.name}: {odd[0]} is {there}, not {wanted}.")
            for name, tensor in layer.items():
                if tensor.dtype.is_floating_point and tensor.dtype != dtype:
                    raise ValueError(f"Layer {index}'s {name} is {tensor.dtype}, the embeddings are {dtype}.")

    def prepared(self, rest: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What `embed` and `forward` read of the resident tensors, and what is made of them once for all layers."""
        parameters = self._taken(rest, self._kind.inputs)
        return self._kind.prepared(_caller(self._model, parameters), parameters)

    def embed(self, rest: Mapping[str, Tensor], batch: Batch, rows: Tensor) -> Tensor:
        """[n, width, d] what the first layer reads. rest: as `prepared`. rows: [tokens, d] of `batch.ids`."""
        embedded = rows.new_zeros(*batch.real.shape, rows.shape[1])
        embedded[batch.real] = rows
        return self._kind.embed(_caller(self._model, rest), batch, embedded)

    @contextlib.contextmanager
    def holding(self, layer: int, parameters: Mapping[str, Tensor]) -> Iterator[None]:
        """A layer's modules hold these parameters meanwhile: put there once for all chunks, not at each call."""
        module = self._stack[self._alike[layer]]
        empty = {name: value for name, value in module.named_parameters() if name in parameters}
        module.load_state_dict(parameters, strict=False, assign=True)
        try:
            yield
        finally:
            module.load_state_dict(empty, strict=False, assign=True)

    def forward(self, layer: int, part: int, rest: Mapping[str, Tensor], batch: Batch, hidden: Tensor) -> Tensor:
        """[n, width, d] a part's output, residual included; its parameters are held (`holding`).

        rest: as `prepared`. hidden: output of the part before.
        """
        module = self._stack[self._alike[layer]]

        def call(path: str, *given: Any, **named: Any) -> Any:
            return module.get_submodule(path)(*given, **named)

        return self._kind.feed(call, hidden) if part else self._kind.attend(call, layer, rest, batch, hidden)

    def pooled(self, batch: Batch, hidden: Tensor) -> Tensor:
        """[n, d] a copy of the states that scores are made of: each row's last real token, or an encoder's first.

        Where an encoder takes the mean of normed states, it is made here, without the norm's weight and bias.
        """
        return self._kind.pooled(batch, hidden)

    def head(self, rest: Mapping[str, Tensor], answer_rows: Tensor | None = None) -> dict[str, Tensor]:
        """The tensors that `scores` needs, copied, in float32 (or wider).

        answer_rows: [2, d] output rows of "yes" and "no", where there are answers.
        """
        parameters = self._taken(rest, self._heads)
        if answer_rows is not None:
            parameters["lm_head.weight"] = answer_rows
        wide = torch.promote_types(next(iter(parameters.values())).dtype, torch.float32)
        return {name: value.to(wide, copy=True) for name, value in parameters.items()}

    def scores(self, head: Mapping[str, Tensor], states: Tensor) -> Tensor:
        """[n] logits z by the model's own norm and head (sections 3.1 and 4.1). states: [n, d] pooled of any layer.

        A causal LM's is logit("yes") - logit("no"): sigmoid(z) is the probability of "yes" among the two.
        Every product is of two dimensions, as one of three with weights that need no gradient takes a slow path.
        """
        call = _caller(self._model, head)
        logits = self._kind.logits(call, head, states.to(next(iter(head.values())).dtype))
        return logits[:, 0] if self.answers is None else logits[:, 0] - logits[:, 1]

    def _taken(self, rest: Mapping[str, Tensor], modules: Iterable[str]) -> dict[str, Tensor]:
        """The parameters of these modules, but for the token embedding's."""
        names = [f"{path}.{name}" for path in modules for name, _ in self._model.get_submodule(path).named_parameters()]
        names = [name for name in names if not name.endswith(_TABLES)]
        for name in names:
            if name not in rest:
                raise ValueError(f"The weights of {self.name} lack {name}.")
        return {name: rest[name] for name in names}


def _caller(module: nn.Module, parameters: Mapping[str, Tensor]) -> Call:
    """How to call a module's submodules with these parameters, named as in the module."""

    def call(path: str, *given: Any, **named: Any) -> Any:
        before = f"{path}."
        own = {name.removeprefix(before): value for name, value in parameters.items() if name.startswith(before)}
        return functional_call(module.get_submodule(path), own, given, named)

    return call


# Kinds of models: what differs between them


class _Kind:
    """As it stands BERT: positions are embedded; the module behind each residual adds it and norms the sum.

    stack: where the layers are. inputs, heads: modules whose tensors embedding and scores need. first: of a layer's
    modules, those of its first part. attention: transformers' name of its implementation. rotary: makes rotations.
    """

    causal, stack, attention = False, "bert.encoder.layer", "sdpa"
    inputs: tuple[str, ...] = ("bert.embeddings",)
    heads: tuple[str, ...] = ("bert.pooler", "classifier")
    first: tuple[str, ...] = ("attention",)

    def __init__(self, config: Any) -> None:
        self.config = config
        self.rotary: Any = None

    def trouble(self) -> str | None:
        """Why this configuration cannot be run, to be read after its name."""
        if getattr(self.config, "is_decoder", False) or getattr(self.config, "add_cross_attention", False):
            return "is configured as a decoder (is_decoder or add_cross_attention), not as an encoder."
        return None

    @property
    def longest(self) -> int:
        return int(self.config.max_position_embeddings)

    def layers(self) -> list[Any]:
        """Something for each layer that is equal for those with the same modules."""
        return [None] * int(self.config.num_hidden_layers)

    def prepared(self, call: Call, rest: dict[str, Tensor]) -> dict[str, Tensor]:
        return rest

    def embed(self, call: Call, batch: Batch, embedded: Tensor) -> Tensor:
        types = batch.segments if self.config.type_vocab_size > 1 else torch.zeros_like(batch.segments)
        positions = self.positions(batch)
        return call(self.inputs[0], inputs_embeds=embedded, token_type_ids=types, position_ids=positions)

    def positions(self, batch: Batch) -> Tensor:
        """[n, width] each token's position."""
        return torch.arange(batch.real.shape[1]).expand(batch.real.shape)

    def attend(self, call: Call, layer: int, rest: Mapping[str, Tensor], batch: Batch, hidden: Tensor) -> Tensor:
        return call("attention", hidden, batch.mask)[0]

    def feed(self, call: Call, hidden: Tensor) -> Tensor:
        return call("output", call("intermediate", hidden), hidden)

    def pooled(self, batch: Batch, hidden: Tensor) -> Tensor:
        return hidden[:, 0].clone()

    def logits(self, call: Call, head: Mapping[str, Tensor], states: Tensor) -> Tensor:
        return call("classifier", call(self.heads[0], states[:, None]))


class _Roberta(_Kind):
    """As BERT, but positions begin after the padding token's, and the classifier holds the pooler."""

    stack, inputs, heads = "roberta.encoder.layer", ("roberta.embeddings",), ("classifier",)

    @property
    def longest(self) -> int:
        return int(self.config.max_position_embeddings) - int(self.config.pad_token_id) - 1

    def positions(self, batch: Batch) -> Tensor:
        return (super().positions(batch) + 1) * batch.real + int(self.config.pad_token_id)

    def logits(self, call: Call, head: Mapping[str, Tensor], states: Tensor) -> Tensor:
        return call("classifier", states[:, None])


class _Deberta(_Kind):
    """As BERT, but attention adds terms of the relative positions, which all layers read from one table."""

    stack, heads, attention = "deberta.encoder.layer", ("pooler", "classifier"), "eager"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.normed = "layer_norm" in getattr(config, "norm_rel_ebd", "none").lower()
        table = ("deberta.encoder.rel_embeddings",) if config.relative_attention else ()
        norm = ("deberta.encoder.LayerNorm",) if self.normed else ()
        self.inputs = ("deberta.embeddings", *table, *norm)

    def trouble(self) -> str | None:
        if getattr(self.config, "conv_kernel_size", 0) > 0:
            return "has a convolution beside its first layer (conv_kernel_size), which no part of a layer holds."
        return super().trouble()

    def prepared(self, call: Call, rest: dict[str, Tensor]) -> dict[str, Tensor]:
        parameters = {name: value for name, value in rest.items() if name.startswith("deberta.embeddings.")}
        if self.config.relative_attention:
            table = rest["deberta.encoder.rel_embeddings.weight"]
            parameters["relative"] = call("deberta.encoder.LayerNorm", table) if self.normed else table
        return parameters

    def attend(self, call: Call, layer: int, rest: Mapping[str, Tensor], batch: Batch, hidden: Tensor) -> Tensor:
        return call("attention", hidden, batch.real[:, None, None], rel_embeddings=rest.get("relative"))[0]


class _ModernBert(_Kind):
    """Norms before each part, rotated positions; some layers attend to a window, and have a rotation of their own."""

    stack, inputs, heads = "model.layers", ("model.embeddings",), ("model.final_norm", "head", "classifier")
    first = ("attn_norm", "attn")

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.mean = config.classifier_pooling == "mean"

    def trouble(self) -> str | None:
        return _odd_ropes(*(self.config.rope_parameters[kind] for kind in _ATTENDED))

    def layers(self) -> list[Any]:
        return [(index > 0, kind) for index, kind in enumerate(self.config.layer_types)]  # the first has no norm

    def embed(self, call: Call, batch: Batch, embedded: Tensor) -> Tensor:
        return call("model.embeddings", inputs_embeds=embedded)

    def attend(self, call: Call, layer: int, rest: Mapping[str, Tensor], batch: Batch, hidden: Tensor) -> Tensor:
        kind, positions, mask = self.config.layer_types[layer], torch.arange(hidden.shape[1]), batch.mask
        if kind == "sliding_attention" and len(positions) - 1 > self.config.sliding_window:
            near = (positions[:, None] - positions).abs() <= self.config.sliding_window
            mask = near[None, None] if mask is None else near & mask
        rotated = self.rotary(hidden, positions[None], kind)
        normed = call("attn_norm", hidden)
        return hidden + call("attn", normed, position_embeddings=rotated, attention_mask=mask)[0]

    def feed(self, call: Call, hidden: Tensor) -> Tensor:
        return hidden + call("mlp", call("mlp_norm", hidden))

    def pooled(self, batch: Batch, hidden: Tensor) -> Tensor:
        if not self.mean:
            return super().pooled(batch, hidden)
        normed = functional.layer_norm(hidden, hidden.shape[-1:], eps=self.config.norm_eps)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        return normed.masked_fill_(~batch.real[..., None], 0).sum(1, dtype=wide) / batch.lengths[:, None]

    def logits(self, call: Call, head: Mapping[str, Tensor], states: Tensor) -> Tensor:
        if self.mean:  # of states that are normed already
            states = states * head["model.final_norm.weight"] + head.get("model.final_norm.bias", 0)
        else:
            states = call("model.final_norm", states)
        return call("classifier", call("head", states))


class _Decoder(_Kind):
    """Norms before each part, rotated positions, and the score or the answers' logits at the last token.

    Attention without a mask is causal: a row's padding comes after all that is read of it.
    """

    stack, inputs, heads = "model.layers", (), ("model.norm", "score")
    first: tuple[str, ...] = ("input_layernorm", "self_attn")
    causal = True

    def trouble(self) -> str | None:
        if odd := sorted(set(self.kinds) - set(_ATTENDED)):
            return f"has layers of {', '.join(odd)}; what can be run: {', '.join(_ATTENDED)}."
        if getattr(self.config, "use_bidirectional_attention", False):
            return "attends in both directions (use_bidirectional_attention); a decoder attends to what came before."
        return _odd_ropes(self.config.rope_parameters or {})

    @property
    def kinds(self) -> list[str]:
        return list(getattr(self.config, "layer_types", None) or ["full_attention"])

    @property
    def longest(self) -> int:
        windows = [int(self.config.sliding_window)] if "sliding_attention" in self.kinds else []
        return min([super().longest, *windows])

    def embed(self, call: Call, batch: Batch, embedded: Tensor) -> Tensor:
        return embedded

    def attend(self, call: Call, layer: int, rest: Mapping[str, Tensor], batch: Batch, hidden: Tensor) -> Tensor:
        return hidden + self.attended(call, hidden, None)

    def attended(self, call: Call, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """[n, width, d] attention's output, without the residual."""
        # Made anew for each chunk: kept, it would stand among temporaries, and the heap would grow by half of them.
        rotated = self.rotary(hidden, torch.arange(hidden.shape[1])[None])
        normed = call("input_layernorm", hidden)
        return call("self_attn", normed, position_embeddings=rotated, attention_mask=mask)[0]

    def feed(self, call: Call, hidden: Tensor) -> Tensor:
        return hidden + call("mlp", call("post_attention_layernorm", hidden))

    def pooled(self, batch: Batch, hidden: Tensor) -> Tensor:
        return hidden[torch.arange(len(batch.lengths)), batch.lengths - 1]

    def logits(self, call: Call, head: Mapping[str, Tensor], states: Tensor) -> Tensor:
        return call("lm_head" if "lm_head.weight" in head else "score", call("model.norm", states))


class _Gemma(_Decoder):
    """A decoder whose embeddings are scaled by the root of the width."""

    def embed(self, call: Call, batch: Batch, embedded: Tensor) -> Tensor:
        return embedded * torch.tensor(self.config.hidden_size**0.5, dtype=torch.float32).to(embedded.dtype)


class _Gemma2(_Gemma):
    """A Gemma with norms also after each part; scores of attention and logits are capped.

    Fused attention cannot cap its scores.
    """

    first = (*_Decoder.first, "post_attention_layernorm")
    attention = "eager"

    def attend(self, call: Call, layer: int, rest: Mapping[str, Tensor], batch: Batch, hidden: Tensor) -> Tensor:
        later = hidden.new_full((hidden.shape[1],) * 2, torch.finfo(hidden.dtype).min).triu(1)
        return hidden + call("post_attention_layernorm", self.attended(call, hidden, later[None, None]))

    def feed(self, call: Call, hidden: Tensor) -> Tensor:
        output = call("mlp", call("pre_feedforward_layernorm", hidden))
        return hidden + call("post_feedforward_layernorm", output)

    def logits(self, call: Call, head: Mapping[str, Tensor], states: Tensor) -> Tensor:
        logits = super().logits(call, head, states)
        cap = self.config.final_logit_softcapping
        return logits if cap is None or "lm_head.weight" not in head else (logits / cap).tanh() * cap


def _odd_ropes(*ropes: Mapping[str, Any]) -> str | None:
    odd = [rope["rope_type"] for rope in ropes if rope.get("rope_type", "default") not in _ROPES]
    return f"has rotary positions of type {odd[0]!r}; what can be run: {', '.join(_ROPES)}." if odd else None


_TABLES = ("word_embeddings.weight", "tok_embeddings.weight")  # token embeddings, which are read row by row
_ENCODERS: dict[str, type[_Kind]] = {
    "Bert": _Kind, "Roberta": _Roberta, "XLMRoberta": _Roberta, "ModernBert": _ModernBert, "DebertaV2": _Deberta,
}  # fmt: skip
_DECODERS = {"Llama": _Decoder, "Qwen2": _Decoder, "Qwen3": _Decoder, "Gemma": _Gemma, "Gemma2": _Gemma2}
_KINDS = {f"{name}ForSequenceClassification": kind for name, kind in (_ENCODERS | _DECODERS).items()}
_KINDS |= {f"{name}ForCausalLM": kind for name, kind in _DECODERS.items()}

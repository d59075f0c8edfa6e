"""How a cross-encoder of transformers is run layer by layer: by its own forward, caught at its layers.

The model is built without memory, on torch's meta device. Its forward runs up to the last layer, with what each layer
would be given kept instead of computed: masks, rotations, relative positions. So a layer can then be called alone, with
parameters from wherever they are. A score is the same forward once more, with a state given in the last layer's place.
All arithmetic is the library's. What a reranker never needs is left out: a cache, and of a causal LM's vocabulary all
but the tokens that it answers with.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ondevice.corpus.pairs import Row
from ondevice_papers.grating.checkpoint import StoredTensor
from ondevice_papers.grating.weights import BY_LAYER, BY_PART, Parts

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_ROPES = ("default", "linear", "llama3", "yarn", "proportional")  # in others a rotation depends on the longest row
_HEADS = ("ForSequenceClassification", "ForCausalLM")
_KEPT = 2_000_000  # bytes of masks and rotations of one shape that are kept from layer to layer
_SHAPES = 16  # shapes of which they are kept

Named = dict[str, Any]  # what a layer is given beside the hidden states, by the names of its arguments


@dataclass(frozen=True)
class PaddedRows:
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

    def last(self, passed_over: int | None = None) -> Tensor:
        """[n] int64 place of each row's last token that is another one; 0 where a row has no other."""
        if passed_over is None:
            return self.lengths - 1
        others = torch.zeros(self.real.shape, dtype=torch.int64)
        others[self.real] = (self.ids != passed_over).long()
        return (others * torch.arange(self.real.shape[1])).argmax(1)

    @property
    def segments(self) -> Tensor:
        """[n, width] int64: 1 from each row's border on."""
        borders = torch.tensor([[row.border] for row in self.rows])
        return ((torch.arange(self.real.shape[1]) >= borders) & self.real).long()


class Architecture:
    """A reranker without its weights: a model of transformers whose layers are called one by one.

    config: a transformers configuration. answers: ids of the tokens that a causal LM is read at, one or two.
    layers; width: of a hidden state; vocabulary: rows of the token embedding; causal: decoder-only; longest: most
    tokens of a row; units: how a layer's weights are cut: in attention and feed-forward where that is known, else not.
    Rows are padded on the right, whatever the tokenizer says: positions start at 0 in every row, padding comes after
    all that a decoder reads, and a score does not depend on the rows beside it. Left padding, which decoder-only
    rerankers are published with, differs from this by rounding only, as their positions are relative.
    A decoder's score head reads the last token that is not the configuration's padding, as in transformers. Where the
    padding is also the end of a text, a row's own end tokens are passed over.
    Raises ValueError, naming it, on what cannot be run so.
    """

    def __init__(self, config: PreTrainedConfig, answers: tuple[int, ...] | None = None) -> None:
        self.name = (config.architectures or ["a model without an architecture"])[0]
        padded = config.get_text_config().pad_token_id is not None  # else transformers reads each row's last token
        self.config = config = _prepared(self.name, config, answers)
        self.answers = answers
        self.layers, self.width = int(config.num_hidden_layers), int(config.hidden_size)
        self.vocabulary = int(config.vocab_size)
        self._model: Any = _built(self.name, config)
        self._table = self._model.get_input_embeddings()
        self._table.padding_idx = None  # of no use without a gradient, and out of the range of rows that are given
        path, self._stack = _stack(self._model, self.layers)
        heads = [name for name, module in self._model.named_modules() if module is self._model.get_output_embeddings()]
        if answers is not None:
            if getattr(self._model.get_output_embeddings(), "bias", None) is not None:
                raise ValueError(f"{self.name} has an output head with a bias, which is not read here.")
            self._model.set_output_embeddings(nn.Linear(self.width, len(answers), bias=False, device="meta"))
        skipped = (f"{path}.", *(f"{name}." for name in heads))
        table = next(name for name, module in self._model.named_modules() if module is self._table)
        self._rest = [
            name
            for name, _ in self._model.named_parameters()
            if not name.startswith(skipped) and name != f"{table}.weight"
        ]
        self._head_names = [f"{name}.weight" for name in heads] if answers is not None else []
        self._halves = _HALVES.get(type(self._stack[0]).__name__)
        self.units: tuple[Parts, ...] = BY_PART if self._halves else BY_LAYER
        self.causal = any(getattr(module, "is_causal", False) for module in self._stack[0].modules())
        if self.causal and getattr(config, "is_causal", None) is False:
            raise ValueError(f"{self.name} attends in both directions (is_causal is false), also to the padding.")
        self.longest = _longest(self._model, config)
        self.reads = "last"  # or first or whole: the states that scores are made of, which `hold` finds out
        self._passed_over: int | None = None  # the padding token, if the head looks for the last other one
        self._padded = padded
        self._tuples = False  # whether the model's forward takes a layer's output for a tuple
        self._head: dict[str, Tensor] = {}
        self._entering: list[Named] | None = None
        self._hidden = torch.empty(0)  # that the first layer is given, or the last one gives
        self._kept: dict[Any, list[Named]] = {}
        for number, layer in enumerate(self._stack):
            layer.forward = self._caught(number, layer)

    def part_of(self, name: str) -> int:
        """Which part of a layer a tensor belongs to, by its name inside the layer: 0 attention, 1 feed-forward."""
        return int(self._halves is not None and name.partition(".")[0] not in self._halves.first)

    def require(self, layers: Sequence[Mapping[str, StoredTensor]], dtype: torch.dtype) -> None:
        """Raise ValueError where stored layers are not this architecture's, or not all of the embeddings' dtype."""
        if len(layers) != self.layers:
            raise ValueError(f"The weights of {self.name} have {len(layers)} layers; its config says {self.layers}.")
        for index, layer in enumerate(layers):
            right = {name: list(value.shape) for name, value in self._stack[index].named_parameters()}
            stored = {name: list(tensor.shape) for name, tensor in layer.items()}
            if odd := sorted(name for name in stored | right if stored.get(name) != right.get(name)):
                there, wanted = (shapes.get(odd[0], "missing") for shapes in (stored, right))
                raise ValueError(f"Layer {index} does not fit {self.name}: {odd[0]} is {there}, not {wanted}.")
            for name, tensor in layer.items():
                if tensor.dtype.is_floating_point and tensor.dtype != dtype:
                    raise ValueError(f"Layer {index}'s {name} is {tensor.dtype}, the embeddings are {dtype}.")

    def require_rest(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Raise ValueError where a tensor of no layer, as the score's head, is missing or of another shape."""
        parameters = dict(self._model.named_parameters())
        for name in self._rest:
            there, wanted = shapes.get(name), list(parameters[name].shape)
            if there is None:
                raise ValueError(f"The weights of {self.name} lack {name}.")
            if list(there) != wanted:
                raise ValueError(f"The weights of {self.name} do not fit: {name} is {list(there)}, not {wanted}.")

    @torch.inference_mode()
    def hold(self, rest: Mapping[str, Tensor], answer_rows: Tensor | None = None) -> None:
        """Take the tensors that stay in memory: those of no layer. The head's are copied, in float32 or wider.

        answer_rows: [answers, d] rows of a causal LM's output head.
        Raises ValueError where one is missing, and for a model whose forward does not run so.
        """
        self.require_rest({name: list(tensor.shape) for name, tensor in rest.items()})
        own = {name: rest[name] for name in self._rest}
        self._model.load_state_dict(own, strict=False, assign=True)
        self._kept.clear()
        if answer_rows is not None:
            own = own | dict.fromkeys(self._head_names, answer_rows)
        self._head = {
            name: value.to(torch.promote_types(value.dtype, torch.float32), copy=True) for name, value in own.items()
        }
        dtype = next(iter(own.values())).dtype
        try:
            self._learn(dtype)
        except (RuntimeError, TypeError, ValueError, AttributeError, LookupError, _Changed) as error:
            why = str(error).strip().partition("\n")[0][:150]
            raise ValueError(f"{self.name} cannot be run layer by layer ({why}).") from error

    def embed(self, batch: PaddedRows, rows: Tensor) -> Tensor:
        """[n, width, d] what the first layer reads. rows: [tokens, d] of `batch.ids`."""
        positions = torch.zeros(batch.real.shape, dtype=torch.int64)
        positions[batch.real] = torch.arange(1, len(rows) + 1)
        self._enter(batch, torch.cat([rows.new_zeros(1, rows.shape[1]), rows]), positions)
        return self._hidden

    @contextlib.contextmanager
    def holding(self, layer: int, parameters: Mapping[str, Tensor]) -> Iterator[None]:
        """A layer's modules hold these parameters meanwhile: put there once for all chunks, not at each call."""
        module = self._stack[layer]
        empty = {name: value for name, value in module.named_parameters() if name in parameters}
        module.load_state_dict(parameters, strict=False, assign=True)
        try:
            yield
        finally:
            module.load_state_dict(empty, strict=False, assign=True)

    def forward(self, layer: int, part: int, batch: PaddedRows, hidden: Tensor) -> Tensor:
        """[n, width, d] a part's output, residual included; its parameters are held (`holding`).

        hidden: output of the part before. Where a layer is not cut, part 0 is all of it.
        """
        module = self._stack[layer]
        if part:
            return self._halves.feed(module, hidden) if self._halves else hidden
        given = self._given(batch, hidden.dtype)[layer]
        if self._halves:
            return self._halves.attend(module, hidden, given)
        output = type(module).forward(module, hidden, **given)
        return output if isinstance(output, Tensor) else output[0]

    def pooled(self, batch: PaddedRows, hidden: Tensor) -> Tensor:
        """[n, d] a copy of the states that scores are made of: of each row's last token, or of an encoder's first.

        Where a model reads all tokens, as for their mean, [n, 1] the scores themselves.
        """
        if self.reads == "whole":
            return self._released(hidden, None if bool(batch.real.all()) else batch.real)[:, None]
        places = batch.last(self._passed_over) if self.reads == "last" else 0
        return hidden[torch.arange(len(batch.lengths)), places]

    def scores(self, pooled: Tensor) -> Tensor:
        """[n] logits z by the model's own norm and head (sections 3.1 and 4.1). pooled: of any layer.

        A causal LM's is the first answer's logit, less the second's if there are two: sigmoid(z) is then the
        probability of the first among the two.
        """
        return pooled[:, 0] if self.reads == "whole" else self._released(pooled[:, None])

    # The model's own forward

    def _caught(self, number: int, layer: nn.Module) -> Callable[..., Any]:
        """In place of a layer's forward: keep what it is given, or give the state that was handed in."""
        names = list(inspect.signature(type(layer).forward).parameters)[2:]

        def forward(hidden: Tensor, *given: Any, **named: Any) -> Any:
            if self._entering is not None:
                if number and hidden is not self._hidden:
                    raise _Changed("it changes the hidden states between its layers")
                self._hidden = hidden
                self._entering.append(dict(zip(names, given, strict=False)) | named)
                if number == self.layers - 1:
                    raise _Entered
            elif number == self.layers - 1:
                hidden = self._hidden
            return (hidden, None) if self._tuples else hidden

        return forward

    def _run(
        self,
        ids: Tensor,
        mask: Tensor | None,
        segments: Tensor,
        rows: Tensor,
        positions: Tensor,
        parameters: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> Any:
        """The model's forward, which embeds token [i, j] as rows[positions[i, j]]. parameters: in place of its own."""
        table, weight = self._table, self._table.weight
        table.forward = lambda _: type(table).forward(table, positions)
        table.weight = nn.Parameter(rows, requires_grad=False)
        named: Named = {"input_ids": ids, "attention_mask": None if mask is None else mask.long()}
        if self._segmented:
            named["token_type_ids"] = segments
        try:
            return functional_call(self._model, dict(parameters), (), named) if parameters else self._model(**named)
        finally:
            table.weight = weight
            del table.forward

    @cached_property
    def _segmented(self) -> bool:
        takes = "token_type_ids" in inspect.signature(type(self._model).forward).parameters
        return takes and getattr(self.config, "type_vocab_size", 0) > 1

    def _enter(self, batch: PaddedRows, rows: Tensor, positions: Tensor) -> list[Named]:
        """What each layer is given of a batch; `_hidden` is what the first one reads."""
        ids = torch.full(batch.real.shape, int(self.config.pad_token_id))
        ids[batch.real] = batch.ids
        mask = None if self.causal or bool(batch.real.all()) else batch.real
        given: list[Named] = []
        self._entering = given
        try:
            self._run(ids, mask, batch.segments, rows, positions)
        except _Entered:
            pass
        finally:
            self._entering = None
        masks = {id(named.get("attention_mask")): named.get("attention_mask") for named in given}
        narrow = {key: _narrowed(mask) for key, mask in masks.items()}
        return [
            named | {"attention_mask": narrow[id(named["attention_mask"])]} if "attention_mask" in named else named
            for named in given
        ]

    def _given(self, batch: PaddedRows, dtype: torch.dtype) -> list[Named]:
        """What each layer is given, kept by the batch's shape while it is small.

        A decoder's depends on the width alone, as nothing reads the padding behind it.
        """
        lengths = tuple(batch.lengths.tolist())
        key = max(lengths) if self.causal else lengths
        if key in self._kept:
            return self._kept[key]
        like = PaddedRows([Row([self._filler] * max(lengths), max(lengths))]) if self.causal else batch
        given = self._enter(like, torch.zeros(1, self._row_width, dtype=dtype), torch.zeros(like.real.shape).long())
        if _bytes(given) <= _KEPT:
            if len(self._kept) >= _SHAPES:
                self._kept.pop(next(iter(self._kept)))
            self._kept[key] = given
        return given

    def _released(self, hidden: Tensor, mask: Tensor | None = None, ids: Tensor | None = None) -> Tensor:
        """[n] logits of states [n, width, d] in the last layer's place. ids: [n, width], None for a token at random."""
        rows = torch.zeros(1, self._row_width, dtype=next(iter(self._head.values())).dtype)
        self._hidden = hidden.to(rows.dtype)
        positions = torch.zeros(hidden.shape[:2], dtype=torch.int64)
        ids = torch.full(positions.shape, self._filler) if ids is None else ids
        if mask is not None:
            ids[~mask] = int(self.config.pad_token_id)
        logits = self._run(ids, mask, torch.zeros_like(ids), rows, positions, self._head).logits
        logits = logits[:, -1] if logits.ndim == 3 else logits
        return logits[:, 0] - logits[:, 1] if logits.shape[1] == 2 else logits[:, 0]

    @property
    def _filler(self) -> int:
        """A token that is no padding."""
        return int(not self.config.pad_token_id)

    @property
    def _row_width(self) -> int:
        """d of an embedding row, which some models widen."""
        return int(self._table.weight.shape[1])

    def _learn(self, dtype: torch.dtype) -> None:
        """Find out whether layers give tuples, and which states are read: by the model's forward on made-up states."""
        batch = PaddedRows([Row([self._filler] * 3, 3)] * 2)
        try:
            self._given(batch, dtype)
        except (_Changed, ValueError):
            self._tuples = True
            self._given(batch, dtype)
        if self.answers is None:
            states = torch.randn(2, 3, self.width, generator=torch.Generator().manual_seed(0))
            whole = self._released(states)
            self.reads = "whole"
            for name, part in (("first", states[:, :1]), ("last", states[:, -1:])):
                if torch.allclose(self._released(part), whole, 1e-3, 1e-4):
                    self.reads = name
            if self.reads == "last" and self._padded:
                padding = int(self.config.pad_token_id)
                ids = torch.tensor([[self._filler, self._filler, padding]] * 2)
                other = not torch.allclose(self._released(states, ids=ids), whole, 1e-3, 1e-4)
                self._passed_over = padding if other else None


class _Entered(Exception):
    """The forward has come to its last layer."""


class _Changed(Exception):
    """A layer was not given what the one before it gave."""


@dataclass(frozen=True)
class _Halves:
    """A layer in two parts, each with its norms and residual. first: its modules of the first part."""

    first: tuple[str, ...]
    attend: Callable[[Any, Tensor, Named], Tensor]
    feed: Callable[[Any, Tensor], Tensor]


_AFTER = _Halves(  # the module behind each residual adds it and norms the sum
    ("attention",),
    lambda layer, hidden, given: layer.attention(hidden, **_taken(layer.attention, given))[0],
    lambda layer, hidden: layer.output(layer.intermediate(hidden), hidden),
)
_BEFORE = _Halves(
    ("input_layernorm", "self_attn"),
    lambda layer, hidden, given: hidden + layer.self_attn(layer.input_layernorm(hidden), **given)[0],
    lambda layer, hidden: hidden + layer.mlp(layer.post_attention_layernorm(hidden)),
)
_AROUND = _Halves(
    ("input_layernorm", "self_attn", "post_attention_layernorm"),
    lambda layer, hidden, given: (
        hidden + layer.post_attention_layernorm(layer.self_attn(layer.input_layernorm(hidden), **given)[0])
    ),
    lambda layer, hidden: hidden + layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(hidden))),
)
_MODERN = _Halves(
    ("attn_norm", "attn"),
    lambda layer, hidden, given: hidden + layer.attn(layer.attn_norm(hidden), **given)[0],
    lambda layer, hidden: hidden + layer.mlp(layer.mlp_norm(hidden)),
)
_HALVES = {
    **dict.fromkeys(("BertLayer", "RobertaLayer", "XLMRobertaLayer", "ElectraLayer", "DebertaV2Layer"), _AFTER),
    **dict.fromkeys((f"{name}DecoderLayer" for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma")), _BEFORE),
    "Gemma2DecoderLayer": _AROUND,
    "ModernBertEncoderLayer": _MODERN,
}


def _prepared(name: str, config: PreTrainedConfig, answers: tuple[int, ...] | None) -> Any:
    """A copy of the configuration, without a cache and with a padding token, or ValueError why it cannot be run."""
    import transformers

    if not name.endswith(_HEADS) or not hasattr(transformers, name):
        own = "its class comes as code of its own, which is not run here; a class of transformers would be needed"
        why = own if getattr(config, "auto_map", None) else f"a reranker is one of transformers' {' or '.join(_HEADS)}"
        raise ValueError(f"{name} cannot be run layer by layer: {why}.")
    if answers is None and name.endswith("ForCausalLM"):
        raise ValueError(f'{name} is scored by the logits of answers such as "yes" and "no": give their ids.')
    if answers is None and config.num_labels != 1:
        raise ValueError(f"{name} gives {config.num_labels} numbers a row; a reranker gives one.")
    config = copy.deepcopy(config)
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder with a decoder, of which a layer is not all that a row goes through.")
    if name.endswith(_HEADS[0]) and (
        getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False)
    ):
        raise ValueError(f"{name} is configured as a decoder (is_decoder or add_cross_attention), not as an encoder.")
    if getattr(config, "use_bidirectional_attention", False):
        raise ValueError(f"{name} attends in both directions (use_bidirectional_attention), also to the padding.")
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in ropes.values() if all(isinstance(value, dict) for value in ropes.values()) and ropes else [ropes]:
        if rope.get("rope_type", "default") not in _ROPES:
            able = ", ".join(_ROPES)
            raise ValueError(f"{name} has rotary positions of type {rope['rope_type']!r}; what can be run: {able}.")
    lacking = [name for name in ("num_hidden_layers", "hidden_size", "vocab_size") if not hasattr(config, name)]
    if lacking:
        raise ValueError(f"{name} has a configuration without {lacking[0]}: it is no model of texts alone.")
    config.use_cache = False
    if config.pad_token_id is None:
        config.pad_token_id = 0
    return config


def _built(name: str, config: Any) -> Any:
    """The model without memory, but for what it computes of its configuration, such as rotations."""
    import transformers

    soft = getattr(config, "attn_logit_softcapping", None)  # fused attention cannot cap its scores
    with torch.device("meta"):
        model = getattr(transformers, name)._from_config(config, attn_implementation="eager" if soft else None).eval()
    for module in model.modules():
        computed = {key: value for key, value in module._buffers.items() if value is not None and value.is_meta}
        for key, value in computed.items():
            module._buffers[key] = torch.full_like(value, torch.nan if value.is_floating_point() else -1, device="cpu")
        if computed:
            model._init_weights(module)
        for key in computed:
            value = module._buffers[key]
            if bool(value.isnan().any() if value.is_floating_point() else (value < 0).any()):
                raise ValueError(f"{name} has a buffer {key} that is not made from its configuration.")
    return model


def _stack(model: nn.Module, layers: int) -> tuple[str, Any]:
    """(path, modules) of the model's layers."""
    several = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == layers and path.endswith(("layer", "layers"))
    }
    if len(several) != 1:
        raise ValueError(f"{type(model).__name__} has {len(several)} stacks of {layers} layers; one is needed.")
    return next(iter(several.items()))


def _longest(model: nn.Module, config: Any) -> int:
    """Most tokens of a row: by the table of positions, of which some models leave out those up to the padding's."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding) and path.endswith("position_embeddings"):
            return int(module.num_embeddings) - (0 if module.padding_idx is None else module.padding_idx + 1)
    return int(config.max_position_embeddings)


def _taken(module: nn.Module, given: Named) -> Named:
    """Of what a layer is given, what its attention takes."""
    names = inspect.signature(type(module).forward).parameters
    return {name: value for name, value in given.items() if name in names}


def _narrowed(mask: Any) -> Any:
    """[n, 1, 1, width] of a mask [n, 1, width, width] that is the same for all that attend, as padding is."""
    if isinstance(mask, Tensor) and mask.ndim == 4 and bool((mask == mask[:, :, :1]).all()):
        return mask[:, :, :1].clone()
    return mask


def _bytes(given: Sequence[Named]) -> int:
    """Of the tensors that layers are given, each counted once."""
    tensors = [
        value
        for named in given
        for entry in named.values()
        for value in (entry if isinstance(entry, tuple) else (entry,))
        if isinstance(value, Tensor)
    ]
    return sum({value.data_ptr(): value.untyped_storage().nbytes() for value in tensors}.values())

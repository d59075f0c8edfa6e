"""A decoder's layers drawn as an ONNX graph: what Llama, Qwen 2 and Qwen 3 share, whatever their attention reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import onnx
import onnxruntime  # type: ignore[import-untyped]
import torch
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from ondevice.blocks import Blocks, Bytes, quantised
from ondevice.gguf_file import GGUF, source_of
from ondevice.models import Loaded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Weights = Literal["float32", "8bit", "8bit-rows", "4bit"]
Matrix = NDArray[np.float32] | Blocks

SUPPORTED = ("llama", "qwen2", "qwen3")
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")  # whose angles do not depend on the length
OPSET = 23  # the first with RMSNormalization


class Drawing:
    """Nodes of a graph that is drawn layer by layer; `attention` is the subclass's.

    matrix: the weights of a linear layer by their name; without it the model's own. integers: whether products with
    blocks are in int8.
    """

    def __init__(
        self, model: PreTrainedModel, matrix: Callable[[str], Matrix] | None = None, integers: bool = False
    ) -> None:
        self.model: Any = model
        self.heads, self.groups, self.size = heads(model.config)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}
        self._matrix = matrix or matrices(model, "float32", False)[1]
        self._integers = integers
        self._names = {module: name for name, module in model.named_modules()}
        self._sums: dict[tuple[str, int], str] = {}  # of a state's blocks, by the state and the size of a block
        self._ones: dict[tuple[int, int], str] = {}  # what sums them

    def attention(self, index: int, part: Any, given: str) -> str:
        """What a layer's attention adds to the state. index: of the layer in the graph."""
        raise NotImplementedError

    def layer(self, index: int, layer: Any, state: str) -> str:
        """Draw a decoder layer; returns the name of the state after it."""
        state = self.op("Add", state, self.attention(index, layer.self_attn, self.norm(state, layer.input_layernorm)))
        given = self.norm(state, layer.post_attention_layernorm)
        gate = self.linear(given, layer.mlp.gate_proj)
        gate = self.op("Mul", gate, self.op("Sigmoid", gate))
        inner = self.op("Mul", gate, self.linear(given, layer.mlp.up_proj))
        return self.op("Add", state, self.linear(inner, layer.mlp.down_proj))

    def norm(self, state: str, norm: Any) -> str:
        """Draw the root-mean-square normalisation of the last axis."""
        scale = self.constant(norm.weight)
        return self.op("RMSNormalization", state, scale, axis=-1, epsilon=norm.variance_epsilon)

    def linear(self, state: str, linear: Any) -> str:
        """Draw a projection, with its bias where it has one."""
        matrix = self._matrix(f"{self._names[linear]}.weight")
        if isinstance(matrix, Blocks):
            product = self._blocked(state, matrix)
        else:
            product = self.op("MatMul", state, self.constant(matrix.T))
        return product if linear.bias is None else self.op("Add", product, self.constant(linear.bias))

    def _blocked(self, state: str, matrix: Blocks) -> str:
        """Draw a product with blocks.

        The runtime is fast for codes of 4 bits, and in integers for those of 8, whose zero point is their centre. So a
        weight is scale * (code - centre) + offset, and the offsets meet the sums of the state's blocks. In float32 a
        code of 8 bits is two of 4: 16 * high + low, from the centre, or beside minima from 0, as a centre far from the
        codes would cost digits.
        """
        centre = 2 ** (matrix.bits - 1)
        if matrix.bits == 8 and matrix.minima is not None and self._integers:
            # Codes far from the centre would multiply what the activations lose.
            centre = (int(matrix.codes.max()) + 1) // 2
            matrix = Blocks(matrix.codes + np.uint8(128 - centre), matrix.scales, matrix.minima, 8)
        if matrix.bits == 8 and not self._integers:
            high, low = halves(matrix)
            centre = 0 if matrix.minima is not None else centre
            upper = self._product(state, high, centred=matrix.minima is None)
            product = self.op("Add", upper, self._product(state, low, centred=False))
        else:
            product = self._product(state, matrix)
        if matrix.minima is None:
            return product
        offsets = matrix.minima + np.float32(centre) * matrix.scales
        sums = self._summed(state, matrix.shape[1], matrix.size)
        return self.op("Add", product, self.op("MatMul", sums, self.constant(offsets.T.astype(np.float32))))

    def _product(self, state: str, matrix: Blocks, centred: bool = True) -> str:
        """Draw a product with scale * (code - centre), or with scale * code."""
        rows, columns = matrix.shape
        codes = packed(matrix)
        inputs = [state, self.constant(codes), self.constant(matrix.scales.reshape(-1))]
        if not centred:
            inputs.append(self.constant(np.zeros((rows, -(-codes.shape[1] // 2)), np.uint8)))
        name = f"node{len(self.nodes)}_0"
        self.nodes.append(
            helper.make_node(
                "MatMulNBits",
                inputs,
                [name],
                domain="com.microsoft",
                K=columns,
                N=rows,
                bits=matrix.bits,
                block_size=matrix.size,
                accuracy_level=4 if self._integers else 1,
            )
        )
        return name

    def _summed(self, state: str, columns: int, size: int) -> str:
        """[..., columns / size] the sums of a state's blocks."""
        if (columns, size) not in self._ones:
            ones = np.repeat(np.eye(columns // size, dtype=np.float32), size, axis=0)
            self._ones[columns, size] = self.constant(ones)
        if (state, size) not in self._sums:
            self._sums[state, size] = self.op("MatMul", state, self._ones[columns, size])
        return self._sums[state, size]

    def shaped(self, state: str, shape: Sequence[int]) -> str:
        """The state in another shape; 0 keeps an axis."""
        return self.op("Reshape", state, self.constant(np.array(shape)))

    def constant(self, value: Any) -> str:
        """Draw a weight, or any array, as a constant; returns its name."""
        array = value.detach().float().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
        name = f"constant{len(self.constants)}"
        self.constants[name] = self.stored(name, np.ascontiguousarray(array).reshape(array.shape))
        return name

    def stored(self, name: str, array: np.ndarray) -> onnx.TensorProto:
        """How a constant lies in the graph: here inside it."""
        return numpy_helper.from_array(array, name)

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Draw a node; returns the name of its first output."""
        return self.ops(1, kind, *inputs, **attributes)[0]

    def ops(self, outputs: int, kind: str, *inputs: str, **attributes: Any) -> list[str]:
        """Draw a node; returns the names of all its outputs."""
        names = [f"node{len(self.nodes)}_{index}" for index in range(outputs)]
        self.nodes.append(helper.make_node(kind, list(inputs), names, **attributes))
        return names

    def proto(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], **domains: int) -> onnx.ModelProto:
        """The graph as a file. inputs, outputs: shapes by name, of float32, or (type, shape)."""
        graph = helper.make_graph(
            self.nodes, "decoder", _declared(inputs), _declared(outputs), list(self.constants.values())
        )
        own = helper.make_opsetid("", OPSET)
        runtimes = [helper.make_opsetid(domain, version) for domain, version in domains.items()]
        version = helper.find_min_ir_version_for([own])
        return helper.make_model(graph, opset_imports=[own, *runtimes], ir_version=version)


def matrices(
    model: PreTrainedModel | Loaded, weights: Weights, integers: bool
) -> tuple[PreTrainedModel, Callable[[str], Matrix]]:
    """(a model with its structure, its matrices by name). A GGUF's structure has no matrices of its own.

    weights: a GGUF's own blocks come as they are, for integers in codes of 8 bits where 8 bits are asked for. Another
    model's matrices are quantised, in blocks of 32, with 8 bits for the embedding and the head.
    """
    source = model.source if isinstance(model, Loaded) else model
    if isinstance(source, GGUF) or (weights != "float32" and source_of(source)):
        file = source if isinstance(source, GGUF) else source_of(source)
        assert file is not None

        def stored(name: str) -> Matrix:
            name = name if name in file.tensors else EMBEDDING  # a tied head
            matrix = file.array(name) if weights == "float32" else file.parameter(name)
            # Wider codes are of use in integers alone: products in float32 read the narrow ones as they are.
            return matrix.widened() if weights == "8bit" and integers and isinstance(matrix, Blocks) else matrix

        return file.skeleton(), stored
    parameters = dict(source.named_parameters())

    def in_blocks(name: str) -> Matrix:
        array = parameters.get(name, parameters.get(EMBEDDING)).detach().numpy()  # type: ignore[union-attr]
        if weights == "float32":
            return array
        return quantised(array, 4 if weights == "4bit" and name not in (EMBEDDING, HEAD) else 8)

    return source, in_blocks


def halves(matrix: Blocks) -> tuple[Blocks, Blocks]:
    """(high, low) codes of 4 bits of a matrix in codes of 8: each is 16 * high + low."""
    high = Blocks(matrix.codes >> np.uint8(4), 16 * matrix.scales, None, 4)
    return high, Blocks(matrix.codes & np.uint8(15), matrix.scales, None, 4)


def packed(matrix: Blocks) -> Bytes:
    """[rows, blocks, bytes of a block] the codes; those of 4 bits two in a byte, the first one in the low half."""
    codes = matrix.codes.reshape(*matrix.scales.shape, matrix.size)
    return codes if matrix.bits == 8 else codes[..., ::2] | (codes[..., 1::2] << np.uint8(4))


def require_drawable(model: PreTrainedModel, what: str) -> None:
    """Raise ValueError unless the model is in float32 on the CPU and its layers are plain ones of `SUPPORTED`.

    Adapters, quantised layers and hooks are no part of the weights, which are all that is drawn. Matrices on the meta
    device beside real vectors are a GGUF's, which come from its file.
    """
    config: Any = model.config
    vectors = {parameter.device.type for parameter in model.parameters() if parameter.ndim < 2}
    matrices = {parameter.device.type for parameter in model.parameters() if parameter.ndim > 1}
    if model.dtype != torch.float32 or vectors != {"cpu"} or not matrices <= {"cpu", "meta"}:
        raise ValueError(f"{what} built of a float32 model on the CPU, not of {model.dtype} on {model.device}.")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in _FIXED_ROPE:
        raise ValueError(f"{what} built of {', '.join(_FIXED_ROPE)} rotary angles, not {rope} ones.")
    types = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    activation = getattr(config, "hidden_act", None)
    odd = [f"layers of type {', '.join(types)}"] if types else []
    odd += [f"the activation {activation}"] if activation not in (None, "silu") else []
    if config.model_type not in SUPPORTED or odd:
        raise ValueError(
            f"{what} built of {', '.join(SUPPORTED)} with full attention and SiLU alone. This model is "
            f"{' with '.join([config.model_type, ' and '.join(odd)]) if odd else config.model_type}."
        )
    for name, module in model.named_modules():
        changed = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
        if changed or (name.endswith(("_proj", "lm_head")) and type(module) is not torch.nn.Linear):
            raise ValueError(f"{what} built of plain linear layers without hooks, which {name or 'the model'} is not.")


def heads(config: Any) -> tuple[int, int, int]:
    """How many query heads and key-value heads a configuration has, and the size of a head."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_attention_heads, config.num_key_value_heads, size


def options(threads: int = 1) -> Any:
    """The runtime's options for that many threads, the calling one among them."""
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    settings.inter_op_num_threads = 1
    settings.log_severity_level = 3  # not the warning that an optimised file is for this kind of processor
    return settings


@contextmanager
def flushing_denormals() -> Iterator[None]:
    """Take the tiny numbers of this thread for 0 meanwhile.

    The runtime's exp of a hidden key's score is such a number, not 0, and attention is up to three times slower with
    them. Its own option for this would stay set for whatever else the thread does.
    """
    before = bool(np.float32(1e-40) * np.float32(1) == 0)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def _declared(shapes: Mapping[str, Any]) -> list[onnx.ValueInfoProto]:
    float_type = onnx.TensorProto.FLOAT
    typed = {name: shape if isinstance(shape, tuple) else (float_type, shape) for name, shape in shapes.items()}
    return [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in typed.items()]

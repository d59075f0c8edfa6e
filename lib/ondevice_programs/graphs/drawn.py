"""A decoder's blocks drawn as static graphs: named tensors, a static cache, for a CPU or for Qualcomm's HTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray

from ondevice.blocks import Blocks
from ondevice.causal_lm import drawing

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    from ondevice.causal_lm.drawing import Matrix

INT32 = onnx.TensorProto.INT32
TYPES = {"float32": onnx.TensorProto.FLOAT, "uint16": onnx.TensorProto.UINT16, "uint8": onnx.TensorProto.UINT8}


@dataclass(frozen=True)
class Range:
    """The least and greatest value of a tensor, 0 among them, in `bits` bits: x = scale * (code - zero)."""

    low: float
    high: float
    bits: int = 16

    @property
    def scale(self) -> np.float32:
        """The step between two codes."""
        return np.float32(max(self.high - self.low, 1e-6) / (2**self.bits - 1))

    @property
    def zero(self) -> NDArray[Any]:
        """The code of 0, of the codes' type."""
        code = round(-self.low / float(self.scale))
        return np.array(min(max(code, 0), 2**self.bits - 1), np.uint16 if self.bits == 16 else np.uint8)


@dataclass(frozen=True)
class ChannelRanges:
    """Of each channel of a tensor the least and greatest value and the root mean square: [channels] each."""

    low: NDArray[np.float32]
    high: NDArray[np.float32]
    size: NDArray[np.float32]

    @property
    def balance(self) -> NDArray[np.float32]:
        """What a channel is divided by, and its weights multiplied with, before both are rounded: 1 on average.

        Weights that meet large values are rounded more finely then (AWQ, arXiv 2306.00978; here with exponent 1/4).
        """
        root = np.maximum(self.size, 1e-4) ** np.float32(0.25)
        return (root / root.mean()).astype(np.float32)

    @property
    def balanced(self) -> Range:
        """The range of the tensor once its channels are divided so."""
        return Range(float((self.low / self.balance).min()), float((self.high / self.balance).max()))


@dataclass(frozen=True)
class Noted:
    """What a model's tensors were on texts. inputs: of each linear layer, by its name.

    ranges: of each linear layer's output without its bias, by its name, and of keys and values, as `keys.0`.
    """

    inputs: Mapping[str, ChannelRanges]
    ranges: Mapping[str, Range]


class StaticDrawing(drawing.Drawing):
    """Graphs of c rows at a time over a cache of K rows.

    A block's inputs: hidden [c, h], mask [c, K + c] (added to the scores; the cache's columns first), positions [c],
    and past_keys_I, past_values_I [g, K, d] of its layer I. Its outputs: hidden_out [c, h] and the new rows keys_I,
    values_I [g, c, d]. matrix: as `drawing.Drawing` has it.
    """

    def __init__(
        self, model: PreTrainedModel, rows: int, capacity: int, matrix: Callable[[str], Matrix] | None = None
    ) -> None:
        super().__init__(model, matrix)
        self._rows = rows
        self._capacity = capacity
        self._outputs: dict[str, Any] = {}
        self.cache_type = "float32"

    def block(self, layers: Sequence[int]) -> onnx.ModelProto:
        """The graph of some layers, in order."""
        with torch.inference_mode():
            angles = self.model.model.rotary_emb(torch.zeros(1), torch.arange(self._capacity)[None])
        self._angles = [self.op("Gather", self.constant(table[0]), "positions", axis=0) for table in angles]
        hidden = [self._rows, self.model.config.hidden_size]
        inputs: dict[str, Any] = {
            "hidden": hidden,
            "mask": [self._rows, self._capacity + self._rows],
            "positions": (INT32, [self._rows]),
        }
        state = "hidden"
        for index, number in enumerate(layers):
            cached = (TYPES[self.cache_type], [self.groups, self._capacity, self.size])
            inputs |= {f"past_keys_{index}": cached, f"past_values_{index}": cached}
            self._layer = number
            state = self.layer(index, self.model.model.layers[number], state)
        self._named(state, "hidden_out")
        return self.proto(inputs, {"hidden_out": hidden} | self._outputs)

    def embedding(self) -> onnx.ModelProto:
        """The graph of the embedding: ids [c] to hidden [c, h]. It runs on the CPU, whatever the target.

        Blocks lie as the head's do, so that tied ones are stored once.
        """
        table = self._matrix(drawing.EMBEDDING)
        shape = [self._rows, self.model.config.hidden_size]
        if isinstance(table, Blocks):
            codes = self._codes(table)
            scales = self.op("Gather", self.constant(table.scales[..., None]), "ids")
            if table.minima is None:
                least = self.op("Mul", scales, self.constant(np.float32(-(2 ** (table.bits - 1)))))
            else:
                least = self.op("Gather", self.constant(table.minima[..., None]), "ids")
            weights = self.op("Add", self.op("Mul", codes, scales), least)
            self._named(self.shaped(weights, shape), "hidden")
        else:
            self._named(self.op("Gather", self.constant(table), "ids"), "hidden")
        return self.proto({"ids": (INT32, [self._rows])}, {"hidden": shape})

    def _codes(self, table: Blocks) -> str:
        """The codes of the tokens' rows, [c, blocks, size] in float32."""
        if table.bits == 8:
            high, low = (self._codes(half) for half in drawing.halves(table))
            return self.op("Add", self.op("Mul", high, self.constant(np.float32(16))), low)
        pairs = self.op("Gather", self.constant(drawing.packed(table)), "ids")
        first = self.op("BitwiseAnd", pairs, self.constant(np.uint8(15)))
        second = self.op("BitShift", pairs, self.constant(np.uint8(4)), direction="RIGHT")
        last = self.constant(np.array([3]))
        both = self.op("Concat", *(self.op("Unsqueeze", half, last) for half in (first, second)), axis=3)
        codes = self.shaped(both, [self._rows, -1, table.size])
        return self.op("Cast", codes, to=onnx.TensorProto.FLOAT)

    def head(self) -> onnx.ModelProto:
        """The graph of the last norm and the head: hidden [c, h] to logits [c, V]."""
        self._named(self.linear(self.norm("hidden", self.model.model.norm), self.model.lm_head), "logits")
        width = self.model.get_input_embeddings().weight.shape[0]
        return self.proto({"hidden": [self._rows, self.model.config.hidden_size]}, {"logits": [self._rows, width]})

    def linear(self, state: str, linear: Any) -> str:
        """As of `Drawing`. The head's matrix lies as the embedding's does, so that a tied one is stored once."""
        matrix = self._matrix(drawing.HEAD) if linear is self.model.lm_head else None
        if not isinstance(matrix, np.ndarray):
            return super().linear(state, linear)
        return self.op("MatMul", state, self.op("Transpose", self.constant(matrix), perm=[1, 0]))

    def norm(self, state: str, norm: Any) -> str:
        """Draw the root-mean-square normalisation of the last axis; its weight is a product of its own.

        The HTP's compiler takes no RMSNormalization with a weight in front of a quantised product.
        """
        ones = self.constant(np.ones(norm.weight.shape[0], np.float32))
        normed = self.op("RMSNormalization", state, ones, axis=-1, epsilon=norm.variance_epsilon)
        return self.op("Mul", normed, self.constant(norm.weight))

    def attention(self, index: int, part: Any, given: str) -> str:
        """The query heads of a group lie behind each other, so that keys and values are not repeated for them."""
        rows, groups, size = self._rows, self.groups, self.size
        share = self.heads // groups
        queries = self._split(
            self.linear(given, part.q_proj), [rows, groups, share, size], [1, 2, 0, 3], part, "q_norm"
        )
        keys = self._split(self.linear(given, part.k_proj), [rows, groups, size], [1, 0, 2], part, "k_norm")
        values = self._split(self.linear(given, part.v_proj), [rows, groups, size], [1, 0, 2])
        all_keys = self._cached(f"keys_{index}", self._rotated(keys))
        all_values = self._cached(f"values_{index}", values)
        queries = self.op("Mul", self._rotated(queries), self.constant(np.float32(part.scaling)))
        queries = self.shaped(queries, [groups, share * rows, size])
        scores = self.op("MatMul", queries, self.op("Transpose", all_keys, perm=[0, 2, 1]))
        width = self._capacity + rows
        scores = self.op("Add", self.shaped(scores, [groups, share, rows, width]), "mask")
        shares = self.shaped(self.op("Softmax", scores, axis=-1), [groups, share * rows, width])
        mixed = self.shaped(self.op("MatMul", shares, all_values), [groups, share, rows, size])
        mixed = self.shaped(self.op("Transpose", mixed, perm=[2, 0, 1, 3]), [rows, self.heads * size])
        return self.linear(mixed, part.o_proj)

    def _cached(self, name: str, rows: str) -> str:
        """Draw the cache with new rows behind it; these are an output."""
        self._put_out(name, rows)
        return self.op("Concat", f"past_{name}", name, axis=1)

    def _put_out(self, name: str, rows: str) -> None:
        """Have new rows of the cache come out under a name."""
        self._named(rows, name)
        self._outputs[name] = (TYPES[self.cache_type], [self.groups, self._rows, self.size])

    def _named(self, state: str, name: str) -> None:
        """Give a node's output a name for the graph's outside."""
        node = next(node for node in reversed(self.nodes) if state in node.output)
        node.output[list(node.output).index(state)] = name
        for later in self.nodes[self.nodes.index(node) + 1 :]:
            later.input[:] = [name if given == state else given for given in later.input]

    def _split(self, flat: str, shape: Sequence[int], order: Sequence[int], part: Any = None, norm: str = "") -> str:
        """Heads out of a projection; Qwen 3 normalises those of queries and keys."""
        heads = self.shaped(flat, shape)
        if hasattr(part, norm):
            heads = self.norm(heads, getattr(part, norm))
        return self.op("Transpose", heads, perm=list(order))

    def _rotated(self, heads: str) -> str:
        """Rotary positions on the halves of each head."""
        halves = self.constant(np.array([self.size // 2] * 2))
        first, second = self.ops(2, "Split", heads, halves, axis=-1)
        turned = self.op("Concat", self.op("Neg", second), first, axis=-1)
        cosines, sines = self._angles
        return self.op("Add", self.op("Mul", heads, cosines), self.op("Mul", turned, sines))


class HTPDrawing(StaticDrawing):
    """The same for Qualcomm's HTP: products with weights in integers, the rest in float, which the HTP runs in 16 bits.

    Weights have 8 bits by output channel, what goes in and comes out of a product 16 bits, keys and values 16 or 8.
    noted: the ranges that are covered (`htp.noted`).
    """

    def __init__(self, model: PreTrainedModel, rows: int, capacity: int, noted: Noted) -> None:
        super().__init__(model, rows, capacity)
        self._noted = noted
        self._inputs: dict[str, str] = {}  # of products, by the state that they come from
        self.cache_type = f"uint{noted.ranges['keys.0'].bits}"

    def linear(self, state: str, linear: Any) -> str:
        """Draw a projection in integers; a bias is added in float."""
        name = self._names[linear]
        given = self._noted.inputs[name]
        if state not in self._inputs:
            balanced = self.op("Mul", state, self.constant(1 / given.balance))
            self._inputs[state] = self._rounded(balanced, given.balanced)
        weight = np.asarray(self._matrix(f"{name}.weight")) * given.balance
        scale = np.maximum(np.abs(weight).max(axis=1), 1e-9) / 127
        codes = np.rint(weight / scale[:, None]).astype(np.int8).T
        channels = [self.constant(value) for value in (codes, scale.astype(np.float32), np.zeros(len(scale), np.int8))]
        matrix = self.op("DequantizeLinear", *channels, axis=1)
        product = self._rounded(self.op("MatMul", self._inputs[state], matrix), self._noted.ranges[name])
        return product if linear.bias is None else self.op("Add", product, self.constant(linear.bias))

    def _cached(self, name: str, rows: str) -> str:
        """Rows come out as codes; the compiler takes no concatenation of codes alone."""
        kind, _ = name.split("_")
        steps = self._steps(self._noted.ranges[f"{kind}.{self._layer}"])
        self._put_out(name, self.op("QuantizeLinear", rows, *steps))
        past, new = (self.op("DequantizeLinear", codes, *steps) for codes in (f"past_{name}", name))
        return self.op("Concat", past, new, axis=1)

    def _rounded(self, state: str, values: Range) -> str:
        """Draw the rounding of a state to its codes."""
        steps = self._steps(values)
        return self.op("DequantizeLinear", self.op("QuantizeLinear", state, *steps), *steps)

    def _steps(self, values: Range) -> list[str]:
        return [self.constant(values.scale), self.constant(values.zero)]

"""The lean engine in integers, with trees whose rows equal their chains' bit for bit.

A product in integers is the same for a row among any rows. What stays in float32 is a row's own, but for attention,
which sums over positions: the exponentials of the scores, of which masked ones are 0, are multiplied with the values,
and with ones, in the positions' order. The runtime's softmax sums in lanes instead, where masked positions move the
others to other lanes. Its products sum block by block of positions, so a tree lies within one block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import onnx
import onnxruntime  # type: ignore[import-untyped]
import torch
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from ondevice.blocks import LARGEST
from ondevice.causal_lm import channels, drawing
from ondevice.causal_lm.drawing import Matrix, Weights
from ondevice.causal_lm.graph_lm import DecoderDrawing, GraphLM
from ondevice.causal_lm.rows import Rows
from ondevice.causal_lm.tree import TokenTree
from ondevice.meters.memory import trim
from ondevice.models import Loaded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STEP = 64  # rows by which a session's buffers grow: attention reads them whole
_CENTRE = 128  # the code of an activation of 0
_TINY = 1e-30  # the least scale of a row, so that a row of zeros has codes
_ONES = 16  # columns that sum the exponentials: a single one takes a kernel that sums in lanes
_CACHED_TRIED = 6  # tokens behind which chains of up to as many are tried
_ROWS_TRIED = (3, 4, 5, 8, 17, 33)  # of a forward whose first two rows must be those of a forward of two
_LEAST_BLOCK = 32  # positions: shorter ones would cut most trees
_LONGEST = 1024  # positions over which the runtime's blocks are looked for
_MICROSOFT = "com.microsoft"
_TYPES = onnx.TensorProto


class Exact(GraphLM):
    """A model whose products are of integers, with logits of a row that are the same beside any rows, bit for bit.

    So drafts change no token, those of trees included. A tree has at most `tree_room` rows.
    model, context, threads: as of `lean.Lean`. weights: "8bit-rows" are int8 with one scale by output channel, and
    activations one by row. "4bit" and "8bit" are blocks, as of `lean.Lean`: the runtime computes a lone row by another
    kernel than several rows, so a lone row is run as two.
    Raises ValueError as `lean.Lean` does, and where rows are not the same on this processor.
    """

    def __init__(
        self,
        model: PreTrainedModel | Loaded,
        context: int | None = None,
        threads: int = 0,
        *,
        weights: Weights = "8bit-rows",
    ) -> None:
        if weights not in ("8bit-rows", "8bit", "4bit"):
            raise ValueError(f"Arithmetic in int8 has weights 8bit-rows, 8bit or 4bit, not {weights}.")
        structure, matrix = drawing.matrices(model, weights, True)
        self.weights, self.arithmetic, self.integers = weights, "int8", True
        self._prepare(structure, context)
        heads, groups, size = drawing.heads(structure.config)
        self._block = positions_summed_together(size)
        drawn: _Drawing
        if weights == "8bit-rows":
            kept = channels.kept(model)
            self._table = kept.matrix("model.embed_tokens")
            self._pads = heads == groups  # a lone row of one head would take another kernel
            drawn = _ByRows(structure, self.most_rows, kept)
        else:
            self._table = matrix(drawing.EMBEDDING)
            self._pads = True
            drawn = _Drawing(structure, self.most_rows, matrix, integers=True)
        self._open(drawn, threads)
        if not (self._rows_agree() and self._trees_agree()):
            raise ValueError(
                "On this processor a row in int8 depends on the rows beside it, so drafts cannot be verified: "
                "drafts=False gives plain decoding, but for 8bit-rows."
            )
        trim()  # what trying the rows took

    def tree_room(self, length: int) -> int:
        """Rows of a tree behind `length` tokens: to the end of the block of positions that the runtime sums."""
        return min(self._block - length % self._block, super().tree_room(length))

    def rows(self, capacity: int = 0) -> Rows:
        """Empty rows. capacity: is not used, as attention reads the buffers whole."""
        return _Steps(self.layers)

    def _attended(self, past: int, n: int, mask: torch.Tensor | None, capacity: int) -> dict[str, torch.Tensor]:
        # In numpy, as torch's calls find cold caches behind a pass, and some wake its threads, which then spin.
        hidden = np.full((n, capacity), -np.inf, np.float32)
        if mask is None:
            hidden[:, :past] = 0
            hidden[:, past : past + n][np.tri(n, dtype=bool)] = 0
        else:
            hidden[:, : past + n] = mask[0, 0].numpy()
        written = np.zeros((1, self._groups, n, 3), np.int64)
        written[..., 1] = np.arange(self._groups)[:, None]
        written[..., 2] = np.arange(past, past + n)
        given = {"mask": hidden, "written": written, "ones": np.ones((capacity, _ONES), np.float32)}
        if self.weights == "8bit-rows":
            given["centres"] = np.full(n, _CENTRE, np.uint8)
        return {name: torch.from_numpy(array) for name, array in given.items()}

    def _rows_agree(self) -> bool:
        """Whether rows are the same whatever rows come behind them, bit for bit, without a cache and behind one."""
        tokens = torch.arange(max(_ROWS_TRIED)) % self.vocabulary
        rows = self.rows()
        pair = self.forward(tokens[:2], rows, None)
        if not all(torch.equal(pair, self.forward(tokens[:n], rows, None)[:2]) for n in _ROWS_TRIED):
            return False
        cached, chain = tokens[:_CACHED_TRIED].tolist(), tokens[_CACHED_TRIED : 2 * _CACHED_TRIED].tolist()
        alone = self.start()
        alone.prefill(cached)
        singly = torch.stack([alone.extend([token])[-1] for token in chain])
        for n in range(2, len(chain) + 1):
            session = self.start()
            session.prefill(cached)
            if not torch.equal(session.verify(TokenTree.chain(chain[:n]))[:n], singly[:n]):
                return False
        return True

    def _trees_agree(self) -> bool:
        """Whether a tree's rows are those of its paths, bit for bit, behind a prompt."""
        prompt, tokens = np.arange(9) % self.vocabulary, np.arange(20, 29) % self.vocabulary
        tree = TokenTree(tokens, [-1, 0, 0, -1, 1, 3, 4, 4, 5])
        session = self.start()
        session.prefill(prompt)
        logits = session.verify(tree)
        for row in range(len(tree)):
            session.rollback(len(prompt))
            if not torch.equal(session.extend(tree.tokens[tree.path_to(row)])[-1], logits[row]):
                return False
        return True


class _Steps(Rows):
    """Rows whose buffers grow step by step, and are 0 where nothing was written: masked rows must be finite."""

    def __init__(self, layers: int, capacity: int = STEP) -> None:
        super().__init__(layers, capacity)

    def reserve(self, rows: int) -> None:
        """Make room for `rows` in all, and no more than to the next step."""
        if rows > self._capacity:
            self._capacity = -(-rows // STEP) * STEP
            if self._buffers is not None:
                self._adopt(*map(self._grown, self._buffers))

    def _twin(self) -> Rows:
        return _Steps(self._layers, self._capacity)

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        return super()._empty(like).zero_()


class _Drawing(DecoderDrawing):
    """With attention by exponentials.

    Its inputs: mask [n, capacity] (added to the scores), written [1, g, n, 3] (where the rows go), ones [capacity, 16].
    """

    attended: ClassVar = {
        "mask": ["n", "capacity"],
        "written": (_TYPES.INT64, [1, None, "n", 3]),
        "ones": ["capacity", _ONES],
    }

    def __init__(
        self,
        model: PreTrainedModel,
        rows: int,
        matrix: Callable[[str], Matrix] | None = None,
        integers: bool = False,
    ) -> None:
        super().__init__(model, rows, matrix, integers)
        self._last = self.constant(np.array([-1]))
        self._zero, self._first = self.constant(np.array([0])), self.constant(np.array([1]))
        # Rows of attention are those of each group's first head, then of the second, and so on.
        self._mask = self.op("Concat", *["mask"] * (self.heads // self.groups), axis=0)

    def attention(self, index: int, part: Any, given: str) -> str:
        """Grouped queries by exponentials; Qwen 3 normalises queries' and keys' heads."""
        heads, groups, size = self.heads, self.groups, self.size
        queries, keys, values = self.projected(given, [part.q_proj, part.k_proj, part.v_proj])
        queries = self._turned(queries, heads, getattr(part, "q_norm", None))
        keys = self._turned(keys, groups, getattr(part, "k_norm", None))
        values = self.op("Transpose", self.shaped(values, [1, -1, groups, size]), perm=[0, 2, 1, 3])
        for name, new in (("keys", keys), ("values", values)):
            self.nodes.append(helper.make_node("ScatterND", [f"{name}{index}", "written", new], [f"new_{name}{index}"]))
        grouped = self.shaped(queries, [1, groups, -1, size])
        scores = self.op(
            "FusedMatMul", grouped, f"new_keys{index}", domain=_MICROSOFT, transB=1, alpha=float(part.scaling)
        )
        scores = self.op("Add", scores, self._mask)
        chances = self.op("Exp", self.op("Sub", scores, self.op("ReduceMax", scores, self._last)))
        sums = self.op("Slice", self.op("MatMul", chances, "ones"), self._zero, self._first, self._last)
        output = self.op("Div", self.op("MatMul", chances, f"new_values{index}"), sums)
        output = self.op("Transpose", self.shaped(output, [1, heads, -1, size]), perm=[0, 2, 1, 3])
        return self.linear(self.shaped(output, [1, -1, heads * size]), part.o_proj)

    def projected(self, state: str, linears: Sequence[Any]) -> Sequence[str]:
        """Draw several projections of one state."""
        return [self.linear(state, linear) for linear in linears]

    def _turned(self, flat: str, count: int, norm: Any) -> str:
        """[1, count, n, size] heads, normalised where the model does, and turned by their positions."""
        split = self.shaped(flat, [1, -1, count, self.size])
        split = split if norm is None else self.norm(split, norm)
        split = self.op("Transpose", split, perm=[0, 2, 1, 3])
        return self.op("RotaryEmbedding", split, "positions", *self.angles, domain=_MICROSOFT)


class _ByRows(_Drawing):
    """With int8 weights by output channel, and activations whose scale is a row's.

    A further input: centres [n] (the code of 0).
    """

    attended: ClassVar = _Drawing.attended | {"centres": (_TYPES.UINT8, ["n"])}

    def __init__(self, model: PreTrainedModel, rows: int, kept: channels.StoredMatrices) -> None:
        super().__init__(model, rows)
        self._kept = kept
        self._one = self.constant(np.float32(1))
        self._centre = self.constant(np.uint8(_CENTRE))
        self._step, self._tiny = self.constant(np.float32(1 / LARGEST)), self.constant(np.float32(_TINY))

    def layer(self, index: int, layer: Any, state: str) -> str:
        """As of a `Drawing`, with the gate and what it opens in one product."""
        state = self.op("Add", state, self.attention(index, layer.self_attn, self.norm(state, layer.input_layernorm)))
        part = layer.mlp
        gate, inner = self.projected(self.norm(state, layer.post_attention_layernorm), [part.gate_proj, part.up_proj])
        opened = self.op("QuickGelu", gate, domain=_MICROSOFT, alpha=1.0)  # SiLU
        width = part.down_proj.in_features
        rotation = channels.inner_rotation(width).numpy()
        groups = self.shaped(self.op("Mul", opened, inner), [1, -1, width // len(rotation), len(rotation)])
        turned = self.shaped(self.op("MatMul", groups, self.constant(rotation)), [1, -1, width])
        return self.op("Add", state, self.linear(turned, part.down_proj))

    def norm(self, state: str, norm: Any) -> str:
        """As of a `Drawing`, with the rotated model's weights."""
        scale = self.constant(self._kept.vector(f"{self._names[norm]}.weight"))
        return self.op("RMSNormalization", state, scale, axis=-1, epsilon=norm.variance_epsilon)

    def linear(self, state: str, linear: Any) -> str:
        """Draw a projection in integers."""
        return self._products(state, [linear])

    def projected(self, state: str, linears: Sequence[Any]) -> Sequence[str]:
        """Draw several projections of one state as one product."""
        widths = self.constant(np.array([linear.out_features for linear in linears]))
        return self.ops(len(linears), "Split", self._products(state, linears), widths, axis=-1)

    def _products(self, state: str, linears: Sequence[Any]) -> str:
        """Draw projections of one state as one product of integers, behind each other."""
        names = [self._names[linear] for linear in linears]
        matrices = [self._kept.matrix(name) for name in names]
        codes = np.concatenate([each.codes for each in matrices]).T
        offset = 0 if signed_products_are_exact() else 128
        weights = (codes.astype(np.int16) + offset).astype(np.uint8 if offset else np.int8)
        scales = np.concatenate([each.scales for each in matrices])
        kept = linears == [self.model.lm_head]
        activations, row_scales = self._codes(state, self.op("Gather", "centres", "kept") if kept else "centres")
        product = self.op(
            "MatMulIntegerToFloat",
            activations,
            self.constant(weights),
            self._one,
            self.constant(scales),
            self._centre,
            self.constant(weights.dtype.type(offset)),
            domain=_MICROSOFT,
        )
        product = self.op("Mul", product, row_scales)
        if all(linear.bias is None for linear in linears):
            return product
        biases = [
            np.zeros(linear.out_features, np.float32) if linear.bias is None else self._kept.vector(f"{name}.bias")
            for name, linear in zip(names, linears, strict=True)
        ]
        return self.op("Add", product, self.constant(np.concatenate(biases)))

    def _codes(self, state: str, centres: str) -> tuple[str, str]:
        """A state's codes, and the scale of each row [..., 1]. centres: [rows] the code of 0."""
        largest = self.op("ReduceMax", self.op("Abs", state), self._last, keepdims=0)
        scales = self.op("Max", self.op("Mul", largest, self._step), self._tiny)
        flat = self.op("Reshape", scales, self._last)
        codes = self.op("QuantizeLinear", state, flat, centres, axis=-2)
        return codes, self.op("Unsqueeze", scales, self._last)


@cache
def signed_products_are_exact() -> bool:
    """Whether this processor's products of uint8 with int8 are exact.

    Without VNNI (AVX-512 VNNI or AVX-VNNI) sums of two saturate at 16 bits; those of uint8 with uint8 never do.
    """
    codes, weights = np.full((2, 64), 255, np.uint8), np.full((64, 32), -LARGEST, np.int8)
    node = helper.make_node("MatMulInteger", ["codes", "weights", "centre"], ["product"])
    product = _computed(node, codes=codes, weights=weights, centre=np.array(_CENTRE, np.uint8))
    return bool((product == (codes.astype(np.int32) - _CENTRE) @ weights.astype(np.int32)).all())


@cache
def positions_summed_together(width: int) -> int:
    """Positions in a block of the runtime's products of attention, for heads of a width: a sum in order within each.

    The last number of a sum is moved on by one position, over a 0. Where that changes the sum, a block begins.
    Raises ValueError where blocks have no common length.
    """
    draws = np.random.default_rng(0)
    begins: set[int] = set()
    node = helper.make_node("MatMul", ["chances", "values"], ["sums"])
    for positions in (_LONGEST // 4, _LONGEST // 2, _LONGEST):
        chances = np.tril(draws.random((positions, positions), np.float32))[:-1]  # row m ends at position m
        moved, last = chances.copy(), np.arange(positions - 1)
        moved[last, last], moved[last, last + 1] = 0, chances[last, last]
        for columns in (width, _ONES):
            values = np.tile(draws.random(columns, np.float32), (positions, 1))
            before, behind = (_computed(node, chances=each, values=values) for each in (chances, moved))
            begins.update((np.flatnonzero((before != behind).any(axis=-1)) + 1).tolist())
    block = math.gcd(*begins) if begins else _LONGEST
    if block < _LEAST_BLOCK:
        raise ValueError("On this processor sums over positions depend on masked ones between them: no trees in int8.")
    return block


def _computed(node: onnx.NodeProto, **given: NDArray[Any]) -> NDArray[Any]:
    """What the runtime makes of a node, whose inputs but for the first are constants."""
    (name, first), *constants = given.items()
    types = {"MatMul": _TYPES.FLOAT, "MatMulInteger": _TYPES.INT32}
    graph = helper.make_graph(
        [node],
        "node",
        [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(first.dtype), first.shape)],
        [helper.make_tensor_value_info(node.output[0], types[node.op_type], [None] * first.ndim)],
        [numpy_helper.from_array(np.asarray(array), other) for other, array in constants],
    )
    own = helper.make_opsetid("", drawing.OPSET)
    proto = helper.make_model(graph, opset_imports=[own], ir_version=helper.find_min_ir_version_for([own]))
    session = onnxruntime.InferenceSession(proto.SerializeToString(), drawing.options(), ["CPUExecutionProvider"])
    return session.run(None, {name: first})[0]

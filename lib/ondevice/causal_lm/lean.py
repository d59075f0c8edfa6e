"""The lean engine: a causal LM's forward as one ONNX graph over the session's own buffers, in float32 on the CPU.

transformers' forward of a small model spends most of its time between the matrices: thousands of calls a pass. Here a
pass is one call of ONNX Runtime. Attention (GroupQueryAttention of com.microsoft) writes its new rows into the cache in
place and takes a tree's mask as a bias.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import onnx
import onnxruntime  # type: ignore[import-untyped]
import torch
from onnx import helper

from ondevice.causal_lm import drawing
from ondevice.causal_lm.rows import Interrupted, Rows
from ondevice.causal_lm.session import CausalLM

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FIXED_ROPE = ("default", "linear", "llama3", "yarn")  # whose angles do not depend on the length
_TREE = 1024  # rows beyond the context: a tree is wider than deep
_INT64 = onnx.TensorProto.INT64
_INT32 = onnx.TensorProto.INT32


class Lean(CausalLM):
    """A `CausalLM` whose forwards run in ONNX Runtime; sessions, trees and rows are the same.

    threads: of the runtime, by default torch's. The weights are packed here, so they are in memory twice, and what is
    changed in the model later, as layers that are skipped, does not reach them.
    Raises ValueError for a model that is not in float32 on the CPU, of another family than `drawing.SUPPORTED`, or with
    heads or rotary angles that the runtime's attention does not have.
    """

    def __init__(self, model: PreTrainedModel, context: int | None = None, threads: int = 0) -> None:
        drawing.require_drawable(model, "The lean engine is")
        rope = (getattr(model.config, "rope_parameters", None) or {}).get("rope_type", "default")
        if rope not in _FIXED_ROPE:
            raise ValueError(f"The lean engine has no {rope} rotary scaling, only {', '.join(_FIXED_ROPE)}.")
        _, groups, size = drawing.heads(model.config)
        if size % 16:
            raise ValueError(f"The lean engine's attention has heads of a multiple of 16, not {size}.")
        super().__init__(model, context)
        self._most = self.context + _TREE
        self._bindings: WeakKeyDictionary[Rows, tuple[Any, Any]] = WeakKeyDictionary()
        self._empty = torch.empty(1, groups, 0, size, dtype=torch.float32, device="cpu")
        drawn = _Drawing(self.model, self._most)
        options = drawing.options(threads or torch.get_num_threads())
        proto = drawn.decoder().SerializeToString()
        options.add_external_initializers(list(drawn.arrays), list(drawn.arrays.values()))
        self._session = onnxruntime.InferenceSession(proto, options, providers=["CPUExecutionProvider"])

    def forward(
        self, tokens: torch.Tensor, rows: Rows, cache: object, *, last: bool = False, **shape: torch.Tensor
    ) -> torch.Tensor:
        """Logits [n, V] after each of `tokens` [n] (`last`: [1, V], after the last), whose rows do not count yet.

        Raises ValueError for a tree too wide for the end of the context, and for a batch's rows.
        """
        if rows.stop is not None and rows.stop.is_set():
            raise Interrupted("The forward was stopped before it began.")
        n = len(tokens)
        past = rows.length
        if past + n > self._most:
            raise ValueError(f"A tree may reach {_TREE} rows beyond the context of {self.context}, not {past + n}.")
        rows.reserve(past + n)
        keys, values = rows.buffers(self._empty, self._empty)
        if not (keys[0].is_contiguous() and values[0].is_contiguous()):
            raise ValueError("The lean engine runs one sequence at a time, not a batch's.")
        mask = shape.get("attention_mask")
        positions = shape.get("position_ids")
        given = {
            "tokens": tokens[None],
            "positions": torch.arange(past, past + n, device="cpu")[None] if positions is None else positions,
            "mask": self._empty.new_zeros(1, 1, n, past + n) if mask is None else mask,
            "kept": torch.arange(n - 1 if last else 0, n, device="cpu"),
            "before": torch.tensor([past + n - 1], dtype=torch.int32, device="cpu"),
            "total": torch.tensor([past + n], dtype=torch.int32, device="cpu"),
        }
        logits = self._empty.new_empty(1 if last else n, self.vocabulary)
        bound = self._bound(rows, keys, values)
        for name, tensor in given.items():
            bound.bind_input(name, "cpu", 0, _NUMPY[tensor.dtype], tensor.shape, tensor.data_ptr())
        bound.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.data_ptr())
        with drawing.flushing_denormals():
            self._session.run_with_iobinding(bound)
        return logits

    def _bound(self, rows: Rows, keys: torch.Tensor, values: torch.Tensor) -> Any:
        """A binding to the buffers of rows, kept as long as they are the same ones."""
        state = keys.data_ptr(), values.data_ptr(), keys.shape
        binding = self._bindings.get(rows)
        if binding and binding[0] == state:
            return binding[1]
        bound = self._session.io_binding()
        for name, buffers in (("keys", keys), ("values", values)):
            for layer, buffer in enumerate(buffers):  # the same memory: rows are appended in place
                where = "cpu", 0, np.float32, buffer.shape, buffer.data_ptr()
                bound.bind_input(f"{name}{layer}", *where)
                bound.bind_output(f"new_{name}{layer}", *where)
        self._bindings[rows] = state, bound
        return bound


def engine(model: PreTrainedModel, context: int | None = None, threads: int = 0) -> CausalLM:
    """The fastest that a model has: a `Lean` where it can be one, else a `CausalLM`; arguments are theirs."""
    try:
        return Lean(model, context, threads)
    except ValueError:
        return CausalLM(model, context)


_NUMPY = {torch.float32: np.float32, torch.int64: np.int64, torch.int32: np.int32}


class _Drawing(drawing.Drawing):
    """The whole decoder, n tokens at a time, over rows that it appends to.

    Inputs: tokens and positions [1, n], mask [1, 1, n, past + n] (added to the scores), kept (rows whose logits are
    wanted), before and total [1] (past + n - 1 and past + n), and keysI, valuesI [1, g, capacity, d] of layer I, whose
    outputs new_keysI, new_valuesI are the same memory. Output: logits [kept, V].
    """

    def __init__(self, model: PreTrainedModel, rows: int) -> None:
        super().__init__(model)
        self.arrays: dict[str, Any] = {}
        positions = torch.arange(rows, device="cpu")
        with torch.inference_mode():
            angles = model.model.rotary_emb(torch.zeros(1, dtype=torch.float32, device="cpu"), positions[None])
        # The halves of a head turn by the same angles.
        self._angles = [self.constant(np.ascontiguousarray(a[0, :, : self.size // 2].numpy())) for a in angles]

    def decoder(self) -> onnx.ModelProto:
        """The graph, without its weights: `arrays` has them."""
        model = self.model
        n = "n"
        state = self.op("Gather", self.constant(model.get_input_embeddings().weight), "tokens")
        for index, layer in enumerate(model.model.layers):
            state = self.layer(index, layer, state)
        state = self.op("Gather", state, "kept", axis=1)
        state = self.op("Squeeze", self.norm(state, model.model.norm), self.constant(np.array([0])))
        self.nodes.append(helper.make_node("Identity", [self.linear(state, model.lm_head)], ["logits"]))
        rows = [1, self.groups, "capacity", self.size]
        inputs: dict[str, Any] = {
            "tokens": (_INT64, [1, n]), "positions": (_INT64, [1, n]), "mask": [1, 1, n, "all"],
            "kept": (_INT64, ["kept_rows"]), "before": (_INT32, [1]), "total": (_INT32, [1]),
        }  # fmt: skip
        cached = [f"{name}{layer}" for layer in range(len(model.model.layers)) for name in ("keys", "values")]
        outputs = {"logits": ["kept_rows", None]} | {f"new_{name}": rows for name in cached}
        return self.proto(inputs | dict.fromkeys(cached, rows), outputs, **{"com.microsoft": 1})

    def attention(self, index: int, part: Any, given: str) -> str:
        """Grouped queries over the rows; Qwen 3 normalises queries' and keys' heads."""
        queries = self._heads(given, part, "q")
        keys = self._heads(given, part, "k")
        output = f"attended{index}"
        self.nodes.append(helper.make_node(
            "GroupQueryAttention",
            [queries, keys, self.linear(given, part.v_proj), f"keys{index}", f"values{index}", "before", "total",
             *self._angles, "positions", "mask"],
            [output, f"new_keys{index}", f"new_values{index}"], domain="com.microsoft",
            num_heads=self.heads, kv_num_heads=self.groups, scale=float(part.scaling), do_rotary=1,
        ))  # fmt: skip
        return self.linear(output, part.o_proj)

    def _heads(self, given: str, part: Any, name: str) -> str:
        flat = self.linear(given, getattr(part, f"{name}_proj"))
        norm = getattr(part, f"{name}_norm", None)
        if norm is None:
            return flat
        count = self.heads if name == "q" else self.groups
        split = self.norm(self.shaped(flat, [0, 0, count, self.size]), norm)
        return self.shaped(split, [0, 0, count * self.size])

    def stored(self, name: str, array: np.ndarray) -> onnx.TensorProto:
        """Weights stay outside of the graph, which could not hold more than 2 GiB."""
        if array.size < 1024:  # shapes, which the runtime wants to see
            return super().stored(name, array)
        self.arrays[name] = onnxruntime.OrtValue.ortvalue_from_numpy(array)
        tensor = onnx.TensorProto(name=name, data_type=helper.np_dtype_to_tensor_dtype(array.dtype), dims=array.shape)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", f"memory/{name}"), ("offset", "0"), ("length", str(array.nbytes))):
            tensor.external_data.add(key=key, value=value)
        return tensor

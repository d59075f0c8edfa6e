"""A causal LM whose forward is one graph of ONNX Runtime on the CPU, over the session's own buffers.

`lean` and `exact` draw the graphs. transformers' forward of a small model spends most of its time between the matrices:
thousands of calls a pass. Here a pass is one call of ONNX Runtime, which writes its new rows into the cache in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import onnx
import onnxruntime  # type: ignore[import-untyped]
import torch
from onnx import helper

from ondevice.blocks import Channels
from ondevice.causal_lm import drawing
from ondevice.causal_lm.drawing import Matrix
from ondevice.causal_lm.rows import Interrupted, Rows
from ondevice.causal_lm.session import CausalLM, Session
from ondevice.gguf_file import weights_state
from ondevice.meters.memory import trim

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TREE = 1024  # rows beyond the context: a tree is wider than deep
_INT64 = onnx.TensorProto.INT64
_NUMPY = {torch.float32: np.float32, torch.int64: np.int64, torch.int32: np.int32, torch.uint8: np.uint8}


class GraphLM(CausalLM):
    """A `CausalLM` that a subclass draws as a graph: it calls `_prepare`, sets `_table` and `_pads`, and then `_open`.

    Raises ValueError, from `start` on, once the model's weights have changed.
    """

    in_torch = False
    _table: Matrix | Channels  # the embedding
    _pads: bool  # whether a lone row is run as two

    def _prepare(self, structure: PreTrainedModel, context: int | None) -> None:
        """What an engine of any form has."""
        drawing.require_drawable(structure, "The lean engine is")
        _, self._groups, size = drawing.heads(structure.config)
        if size % 16:
            raise ValueError(f"The lean engine's attention has heads of a multiple of 16, not {size}.")
        super().__init__(structure, context)
        self._state = weights_state(structure)
        self.most_rows = self.context + _TREE
        self._bindings: WeakKeyDictionary[Rows, tuple[Any, Any]] = WeakKeyDictionary()
        self._empty = torch.empty(1, self._groups, 0, size, dtype=torch.float32, device="cpu")

    def _open(self, drawn: DecoderDrawing, threads: int) -> None:
        """Have the runtime pack the graph's matrices."""
        options = drawing.options(threads or torch.get_num_threads())
        proto = drawn.decoder().SerializeToString()
        options.add_external_initializers(list(drawn.arrays), list(drawn.arrays.values()))
        self._session = onnxruntime.InferenceSession(proto, options, providers=["CPUExecutionProvider"])
        drawn.arrays.clear()
        del options
        trim()  # what the matrices took on their way is twice what they are

    @property
    def dtype(self) -> torch.dtype:
        """Of logits and of cached rows."""
        return torch.float32

    @property
    def device(self) -> torch.device:
        """Where tokens and logits are."""
        return torch.device("cpu")

    def start(self, capacity: int = 0) -> Session:
        """An empty session. Raises ValueError where the model's weights are not those that were packed."""
        if weights_state(self.model) != self._state:
            raise ValueError("The model's weights have changed since this engine packed them: make a new engine.")
        return super().start(capacity)

    def forward(
        self, tokens: torch.Tensor, rows: Rows, cache: object, *, last: bool = False, **shape: torch.Tensor
    ) -> torch.Tensor:
        """Logits [n, V] after each of `tokens` [n] (`last`: [1, V], after the last), whose rows do not count yet.

        Raises ValueError for a tree too wide for the end of the context, and for a batch's rows.
        """
        if rows.stop is not None and rows.stop.is_set():
            raise Interrupted("The forward was stopped before it began.")
        alone = self._pads and len(tokens) == 1  # the second row writes behind the first, and does not count
        if alone:
            tokens, shape = tokens.repeat(2), {}
        n = len(tokens)
        past = rows.length
        if past + n > self.most_rows:
            raise ValueError(f"A tree may reach {_TREE} rows beyond the context of {self.context}, not {past + n}.")
        rows.reserve(past + n)
        keys, values = rows.buffers(self._empty, self._empty)
        if not (keys[0].is_contiguous() and values[0].is_contiguous()):
            raise ValueError("The lean engine runs one sequence at a time, not a batch's.")
        mask = shape.get("attention_mask")
        positions = shape.get("position_ids")
        first, end = (0, 1) if alone else (n - 1 if last else 0, n)
        given = {
            "states": self._embedded(tokens),
            "positions": torch.arange(past, past + n, device="cpu")[None] if positions is None else positions,
            "kept": torch.arange(first, end, device="cpu"),
        } | self._attended(past, n, mask, keys.shape[-2])
        logits = self._empty.new_empty(end - first, self.vocabulary)
        bound = self._bound(rows, keys, values)
        for name, tensor in given.items():
            bound.bind_input(name, "cpu", 0, _NUMPY[tensor.dtype], tensor.shape, tensor.data_ptr())
        bound.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.data_ptr())
        with drawing.flushing_denormals():
            self._session.run_with_iobinding(bound)
        return logits

    def _attended(self, past: int, n: int, mask: torch.Tensor | None, capacity: int) -> dict[str, torch.Tensor]:
        """What attention is given. mask: [1, 1, n, past + n], or None for a chain. capacity: rows of the buffers."""
        raise NotImplementedError

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """[1, n, hidden] the tokens' rows of the embedding."""
        index = tokens.numpy()
        rows = self._table[index] if isinstance(self._table, np.ndarray) else self._table.rows(index).values()
        return torch.from_numpy(rows)[None]

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


class DecoderDrawing(drawing.Drawing):
    """The whole decoder, n tokens at a time, over rows that it appends to.

    matrix, integers: as of a `Drawing`.
    Inputs: states [1, n, hidden], positions [1, n], kept (rows whose logits are wanted), those of `attention`, and
    keysI, valuesI [1, g, capacity, d] of layer I, whose outputs new_keysI, new_valuesI are the same memory.
    Output: logits [kept, V].
    """

    attended: ClassVar[dict[str, Any]]  # attention's inputs

    def __init__(
        self,
        model: PreTrainedModel,
        rows: int,
        matrix: Callable[[str], Matrix] | None = None,
        integers: bool = False,
    ) -> None:
        super().__init__(model, matrix, integers)
        self.arrays: dict[str, Any] = {}
        positions = torch.arange(rows, device="cpu")
        with torch.inference_mode():
            angles = self.model.model.rotary_emb(torch.zeros(1, dtype=torch.float32, device="cpu"), positions[None])
        # The halves of a head turn by the same angles.
        self.angles = [self.constant(np.ascontiguousarray(a[0, :, : self.size // 2].numpy())) for a in angles]

    def decoder(self) -> onnx.ModelProto:
        """The graph, without its weights: `arrays` has them."""
        model = self.model
        state = "states"
        for index, layer in enumerate(model.model.layers):
            state = self.layer(index, layer, state)
        state = self.op("Gather", state, "kept", axis=1)
        state = self.op("Squeeze", self.norm(state, model.model.norm), self.constant(np.array([0])))
        self.nodes.append(helper.make_node("Identity", [self.linear(state, model.lm_head)], ["logits"]))
        rows = [1, self.groups, "capacity", self.size]
        inputs: dict[str, Any] = {
            "states": [1, "n", model.config.hidden_size],
            "positions": (_INT64, [1, "n"]),
            "kept": (_INT64, ["kept_rows"]),
        }
        cached = [f"{name}{layer}" for layer in range(len(model.model.layers)) for name in ("keys", "values")]
        outputs = {"logits": ["kept_rows", None]} | {f"new_{name}": rows for name in cached}
        return self.proto(inputs | self.attended | dict.fromkeys(cached, rows), outputs, **{"com.microsoft": 1})

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

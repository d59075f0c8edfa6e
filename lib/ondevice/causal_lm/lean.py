"""The lean engine: weights in float32, or in blocks of 8 or 4 bits (MatMulNBits), with attention of the runtime's own.

Its GroupQueryAttention (of com.microsoft) takes a tree's mask as a bias.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

import onnx
import torch
from onnx import helper

from ondevice.causal_lm import drawing
from ondevice.causal_lm.drawing import Weights
from ondevice.causal_lm.exact import Exact
from ondevice.causal_lm.graph_lm import DecoderDrawing, GraphLM
from ondevice.causal_lm.session import CausalLM
from ondevice.models import Loaded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Arithmetic = Literal["float32", "int8"]

_INT32 = onnx.TensorProto.INT32


class Lean(GraphLM):
    """A `CausalLM` whose forwards run in ONNX Runtime; sessions, trees and rows are the same.

    model: of transformers, in float32 on the CPU, or one that `models.load` has loaded. weights: a GGUF's own blocks go
    in as they are ("8bit": the same weights in wider codes); another model's matrices are quantised here, in blocks of
    32, with 8 bits for the embedding and the head. arithmetic: of products with blocks. "int8" quantises the
    activations too, so logits change; weights in float32 have float32 alone.
    In int8 the runtime computes a lone row by another kernel than several rows, and attention rounds otherwise beside
    a branch, which integers magnify. So int8 is for plain decoding here: `exact.Exact` verifies drafts.
    threads: of the runtime, by default torch's. The weights are packed here, so a float32 model is in memory twice.
    Raises ValueError for a model that is not in float32 on the CPU, of another family than `drawing.SUPPORTED`, or with
    heads or rotary angles that the runtime's attention does not have; and, from `start` on, once the model's weights
    have changed.
    """

    def __init__(
        self,
        model: PreTrainedModel | Loaded,
        context: int | None = None,
        threads: int = 0,
        *,
        weights: Weights = "float32",
        arithmetic: Arithmetic = "float32",
    ) -> None:
        if weights not in ("float32", "8bit", "4bit") or arithmetic not in ("float32", "int8"):
            raise ValueError(
                f"Weights are float32, 8bit or 4bit and arithmetic float32 or int8, not {weights} and {arithmetic}."
            )
        self.integers = arithmetic == "int8"
        if self.integers and weights == "float32":
            raise ValueError("Weights in float32 have arithmetic in float32 alone.")
        structure, matrix = drawing.matrices(model, weights, self.integers)
        self.weights, self.arithmetic = weights, arithmetic
        self._prepare(structure, context)
        self._table = matrix(drawing.EMBEDDING)
        self._pads = False
        self._open(_Drawing(structure, self.most_rows, matrix, self.integers), threads)
        if self.integers:
            self.tree_refusal = "This engine in int8 is for plain decoding (drafts=False): a branch changes its rows."

    def _attended(self, past: int, n: int, mask: torch.Tensor | None, capacity: int) -> dict[str, torch.Tensor]:
        return {
            "mask": self._empty.new_zeros(1, 1, n, past + n) if mask is None else mask,
            "before": torch.tensor([past + n - 1], dtype=torch.int32, device="cpu"),
            "total": torch.tensor([past + n], dtype=torch.int32, device="cpu"),
        }


def engine(
    model: PreTrainedModel | Loaded,
    context: int | None = None,
    threads: int = 0,
    *,
    weights: Weights = "float32",
    arithmetic: Arithmetic = "float32",
    drafts: bool = True,
) -> CausalLM:
    """The fastest that a model has: a `Lean` or an `Exact` where it can be one, else, in float32, a `CausalLM`.

    Arguments and errors are those of both; weights may be "8bit-rows", too, whose arithmetic is int8.
    drafts: whether drafts are to be verified. In int8 they need an `Exact`. Blocks in int8 without drafts are a `Lean`,
    whose lone rows are faster, and whose logits differ from an `Exact`'s.
    """
    if weights == "8bit-rows" and arithmetic != "int8":
        raise ValueError("8bit-rows has arithmetic int8 alone.")
    if weights == "8bit-rows" or (arithmetic == "int8" and drafts and weights in ("4bit", "8bit", "float32")):
        return Exact(model, context, threads, weights=weights)
    try:
        return Lean(model, context, threads, weights=weights, arithmetic=arithmetic)
    except ValueError:
        if weights != "float32" or arithmetic != "float32":
            raise
        return CausalLM(model.model if isinstance(model, Loaded) else model, context)


class _Drawing(DecoderDrawing):
    """With grouped queries of the runtime.

    Its inputs: mask [1, 1, n, past + n] (added to the scores), before and total [1] (past + n - 1 and past + n).
    """

    attended: ClassVar = {"mask": [1, 1, "n", "all"], "before": (_INT32, [1]), "total": (_INT32, [1])}

    def attention(self, index: int, part: Any, given: str) -> str:
        """Grouped queries over the rows; Qwen 3 normalises queries' and keys' heads."""
        queries = self._heads(given, part, "q")
        keys = self._heads(given, part, "k")
        output = f"attended{index}"
        self.nodes.append(helper.make_node(
            "GroupQueryAttention",
            [queries, keys, self.linear(given, part.v_proj), f"keys{index}", f"values{index}", "before", "total",
             *self.angles, "positions", "mask"],
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

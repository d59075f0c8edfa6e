"""The largest few of a whole vocabulary's scores, faster than by `torch.topk`, which drafters need at every step."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ROWS = 64  # rows that are worked on at once
_BLOCK = 128  # ids of a block: fastest of 16 to 512 at vocabularies of 8,192 and 151,936
_SAMPLED = 8  # of so many blocks one stands for the others


def likeliest(logits: Tensor) -> NDArray[np.int64]:
    """The likeliest token of each row of logits [..., V]; of equally likely ones that with the lowest id.

    In a CPU's memory numpy finds it in a tenth of torch's time (tests/benchmarks/bench_likeliest.py).
    """
    scores = logits.detach()
    if scores.device.type != "cpu":  # only the ids leave the device
        return np.asarray(scores.argmax(-1).cpu().numpy())
    return np.asarray((scores.float() if scores.dtype == torch.bfloat16 else scores).numpy().argmax(-1))


def largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(values, ids) of the k largest of each row of scores [n, V], falling.

    They lie in the k blocks with the greatest maxima, so only these are searched.
    """
    width = scores.shape[1]
    if width % _BLOCK or k >= width // _BLOCK:
        top = scores.topk(k, dim=-1)
        return top.values, top.indices
    return _in_blocks(*_searched(scores, k), k)


def estimated_likeliest(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(tokens, probabilities), each [n, k], falling, of the k likeliest of each row of logits [n, V], in float32.

    The tokens are exact. The softmax's denominator is summed over the blocks that are searched and estimated from every
    eighth of the others, which saves most exponentials: with SmolLM2, probabilities above 0.95 are off by 0.2 %, those
    below 0.2 by 13 % (standard deviations), and by nothing in the mean. Small vocabularies are summed whole, and so is
    what is not in a CPU's memory.
    """
    scores = logits.detach().float()
    width = scores.shape[1]
    blocks = width // _BLOCK
    if scores.device.type != "cpu" or width % _BLOCK or blocks < 2 * _SAMPLED * max(k, _SAMPLED):
        values, tokens = largest(scores, k)
        return tokens, (values - scores.logsumexp(-1, keepdim=True)).exp()
    tokens, probabilities = map(torch.from_numpy, _estimator(blocks, k).run(None, {"logits": scores.numpy()}))
    return tokens, probabilities


@cache
def _estimator(blocks: int, k: int) -> Any:
    """A session of ONNX Runtime that makes tokens and probabilities of logits [n, blocks * _BLOCK].

    Behind a pass of the model it takes half of torch's time: a call for each operation finds cold caches.
    """
    import onnx
    import onnxruntime  # type: ignore[import-untyped]
    from onnx import parser

    graph = f"""
        <ir_version: 10, opset_import: ["" : 21]>
        estimate (float[n, {blocks * _BLOCK}] logits) => (int64[n, {k}] tokens, float[n, {k}] probabilities)
        <int64[1] last = {{-1}}, int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] k = {{{k}}},
         int64[1] end = {{{blocks}}}, int64[1] sampled = {{{_SAMPLED}}}, int64 width = {{{_BLOCK}}},
         int64[3] in_blocks = {{-1, {blocks}, {_BLOCK}}}, int64[2] in_rows = {{-1, {k * _BLOCK}}},
         float unsearched = {{{blocks - k}}}, float[1] whole = {{1}}>
        {{
            scores = Reshape(logits, in_blocks)
            maxima = ReduceMax <keepdims = 0> (scores, last)
            greatest, best = TopK(maxima, k)
            block = Unsqueeze(best, last)
            searched_blocks = GatherND <batch_dims = 1> (scores, block)
            searched = Reshape(searched_blocks, in_rows)
            values, inside = TopK(searched, k)
            which = Div(inside, width)
            its_block = GatherElements <axis = 1> (best, which)
            before = Mul(its_block, width)
            behind = Mod(inside, width)
            tokens = Add(before, behind)

            top = Slice(values, zero, one, last)
            from_top = Sub(searched, top)
            searched_exp = Exp(from_top)
            searched_sum = ReduceSum(searched_exp, last)
            others = Slice(scores, zero, end, one, sampled)
            every_top = Unsqueeze(top, last)
            others_from_top = Sub(others, every_top)
            others_exp = Exp(others_from_top)
            other_sums = ReduceSum <keepdims = 0> (others_exp, last)
            nothing = Sub(values, values)
            ones_shape = Shape(maxima)
            ones = Expand(whole, ones_shape)
            outside_all = ScatterElements <axis = 1> (ones, best, nothing)
            outside = Slice(outside_all, zero, end, one, sampled)
            other_sums_outside = Mul(other_sums, outside)
            sum_outside = ReduceSum(other_sums_outside, last)
            blocks_outside = ReduceSum(outside, last)
            mean_outside = Div(sum_outside, blocks_outside)
            rest = Mul(mean_outside, unsearched)
            denominator = Add(searched_sum, rest)
            values_from_top = Sub(values, top)
            values_exp = Exp(values_from_top)
            probabilities = Div(values_exp, denominator)
        }}
    """
    model = parser.parse_model(graph)
    onnx.checker.check_model(model, full_check=True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # further ones would wait in turns with the model's
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _searched(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k blocks [n, k] with the greatest maxima of each row, and their scores [n, k * _BLOCK]."""
    rows, width = scores.shape
    blocks = width // _BLOCK
    best = scores.view(rows, blocks, _BLOCK).amax(-1).topk(k, dim=-1).indices
    flat = best + torch.arange(0, rows * blocks, blocks, device=best.device)[:, None]
    return best, scores.view(-1, _BLOCK)[flat.view(-1)].view(rows, -1)


def _in_blocks(best: Tensor, searched: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(values, ids) of the k largest in the searched blocks."""
    values, inside = searched.topk(k, dim=-1)
    return values, best.gather(1, inside // _BLOCK) * _BLOCK + inside % _BLOCK


class Likeliest:
    """Finds the k likeliest tokens of each row of logits [n, V], and their softmax in float32 over the vocabulary.

    It keeps the float32 copy that it works on, of at most 64 rows: touching fresh memory took longer than the search.
    """

    def __init__(self, k: int) -> None:
        self.k = k
        self._room = torch.empty(0, 0)

    @torch.inference_mode()
    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The k likeliest tokens and their probabilities, each [n, k], falling."""
        batches = [self._part(part) for part in logits.split(_ROWS)]
        tokens, probabilities = (torch.cat(parts) for parts in zip(*batches, strict=True))
        return tokens, probabilities

    def _part(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = self._copy(logits)
        values, tokens = largest(scores, self.k)
        top = values[:, :1]
        total = scores.sub_(top).exp_().sum(-1, keepdim=True)
        return tokens, (values - top).exp() / total

    def _copy(self, logits: Tensor) -> Tensor:
        rows, width = logits.shape
        if len(self._room) < rows or self._room.shape[1] != width or self._room.device != logits.device:
            self._room = torch.empty(rows, width, device=logits.device)
        return self._room[:rows].copy_(logits)

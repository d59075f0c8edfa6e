"""Qualcomm's HTP: ranges of what is rounded, its compiler, and the emulator of its arithmetic (onnxruntime-qnn)."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnx
import onnxruntime  # type: ignore[import-untyped]
import torch

from ondevice import extras
from ondevice.causal_lm import drawing
from ondevice_programs.graphs.drawn import ChannelRanges, Noted, Range

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SOC = "57"  # Snapdragon 8 Gen 3
ARCHITECTURE = "75"  # its HTP's version
WINDOW = 512  # tokens that the model reads at once while ranges are noted


class CompilerRefused(ValueError):
    """The compiler took a graph in part only, or not at all."""


def noted(model: PreTrainedModel, texts: Sequence[Sequence[int]], cache_bits: int) -> Noted:
    """What a float32 model's tensors are on texts of token ids. cache_bits: of keys and values, 8 or 16."""
    inputs: dict[str, list[torch.Tensor]] = {}
    limits: dict[str, tuple[float, float]] = {}

    def note(name: str, tensor: torch.Tensor) -> None:
        low, high = limits.get(name, (0.0, 0.0))
        limits[name] = (min(low, float(tensor.min())), max(high, float(tensor.max())))

    def note_linear(name: str, module: torch.nn.Linear, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        rows = given[0].flatten(0, -2)
        low, high, squares = inputs.get(name, [torch.zeros(1)] * 3)
        inputs[name] = [rows.amin(0).minimum(low), rows.amax(0).maximum(high), squares + rows.square().sum(0)]
        note(name, output if module.bias is None else output - module.bias)

    with contextlib.ExitStack() as hooks, torch.inference_mode():
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear):
                hooks.enter_context(module.register_forward_hook(partial(note_linear, name)))
        for text in texts:
            for start in range(0, len(text), WINDOW):
                output: Any = model(torch.tensor([list(text[start : start + WINDOW])]), use_cache=True)
                for number, layer in enumerate(output.past_key_values.layers):
                    note(f"keys.{number}", layer.keys)
                    note(f"values.{number}", layer.values)
    tokens = sum(map(len, texts))
    channels = {
        name: ChannelRanges(low.numpy(), high.numpy(), (squares / tokens).sqrt().numpy())
        for name, (low, high, squares) in inputs.items()
    }
    cached = ("keys.", "values.")
    ranges = {name: Range(*pair, cache_bits if name.startswith(cached) else 16) for name, pair in limits.items()}
    return Noted(channels, ranges)


# The compiler


class Context(NamedTuple):
    """Compiled binaries, one where the weights are shared. size: bytes of all. spill: bytes of their spill memory."""

    size: int
    spill: int


@cache
def _devices() -> tuple[Any, Any]:
    """(the package, its device). Raises ModuleNotFoundError without the package."""
    with extras.needing("npu", "The target htp"):
        import onnxruntime_qnn  # type: ignore[import-not-found, import-untyped, unused-ignore]

    onnxruntime.register_execution_provider_library(onnxruntime_qnn.EP_NAME, onnxruntime_qnn.get_library_path())
    devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == onnxruntime_qnn.EP_NAME]
    return onnxruntime_qnn, devices[:1]


def session(path: Path, soc: str = SOC, entries: Mapping[str, str] | None = None, **provided: str) -> Any:
    """A session of a graph that is compiled for the HTP and, on x86-64, runs in its emulator; no node is left out.

    entries: of the session's configuration. provided: options of the compiler. Raises CompilerRefused where the
    compiler does not take all of the graph, with its first reason, OSError where its binary cannot be written, and
    ModuleNotFoundError without the package.
    """
    whole = {"session.disable_cpu_ep_fallback": "1"}
    _devices()
    try:
        return _session(path, whole | dict(entries or {}), soc_model=soc, **provided)
    except Exception as error:  # the runtime's errors have no common class of their own
        if "Failed to write" in str(error):
            raise OSError(f"The binary of {path.name} cannot be written: is the disk full?") from None
        raise CompilerRefused(f"The HTP's compiler refuses {path.name}: {_reason(path, str(error))}") from None


def _session(path: Path, entries: Mapping[str, str], **provided: str) -> Any:
    package, devices = _devices()
    options = drawing.options()
    options.log_severity_level = 4
    for name, value in entries.items():
        options.add_session_config_entry(name, value)
    provider = {"backend_path": package.get_qnn_htp_path(), "htp_arch": ARCHITECTURE, **provided}
    options.add_provider_for_devices(devices, provider)
    return onnxruntime.InferenceSession(str(path), options)


def _reason(path: Path, error: str) -> str:
    """The nodes of a graph that the compiler leaves to the CPU, or what the runtime said."""
    left: list[str] = []
    with contextlib.suppress(Exception):
        assigned = _session(path, {"session.record_ep_graph_assignment_info": "1"}).get_provider_graph_assignment_info()
        for part in assigned:
            if part.ep_name == "CPUExecutionProvider":
                left += [f"{node.op_type} {node.name}" for node in part.get_nodes()]
    if left:
        return f"{len(left)} nodes would run on the CPU, the first of them {min(left)}."
    return error.split(" : ")[-1].split("\n")[0][:200]


def compiled(graphs: Sequence[Path], folder: Path, shared: bool, soc: str = SOC) -> Context:
    """Compile graphs of the same weights into a folder: into one binary that has the weights once, or one binary each.

    Raises as `session`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    contexts = [folder / f"{path.stem}_ctx.onnx" for path in graphs]
    for number, (path, context) in enumerate(zip(graphs, contexts, strict=True)):
        entries = {
            "ep.context_enable": "1",
            "ep.context_embed_mode": "0",
            "ep.context_file_path": str(context),
        }
        provided = {
            "enable_htp_spill_fill_buffer": "1",
            "htp_graph_finalization_optimization_mode": "3",  # the most; by default a binary may be twice as large
        }
        if shared:
            entries["ep.share_ep_contexts"] = "1"
            provided["enable_htp_weight_sharing"] = "1"
            if number == len(graphs) - 1:
                entries["ep.stop_share_ep_contexts"] = "1"
        session(path, soc, entries, **provided)
    nodes = [node for path in contexts for node in onnx.load(path).graph.node]
    spills = [attribute.i for node in nodes for attribute in node.attribute if attribute.name == "max_size"]
    size = sum(path.stat().st_size for path in folder.glob("*.bin"))
    return Context(size, int(np.max(spills) if shared else np.sum(spills)))


def both_ways(
    folder: Path, facts: Mapping[str, Any], new: Path, soc: str = SOC, skipped: Container[str] = ()
) -> Iterator[tuple[str, Context, Context]]:
    """Compile the parts of an exported folder into a new one: yields (part, with shared weights, with a binary each).

    A part has two graphs: a block's, and the head's. facts: of the folder. Raises as `session`.
    """
    for part in [*(f"block{number:02}" for number in range(len(facts["layers"]))), "head"]:
        if part not in skipped:
            graphs = [folder / f"{part}-{facts[rows]}.onnx" for rows in ("large", "small")]
            yield part, compiled(graphs, new / part, True, soc), compiled(graphs, new / "apart" / part, False, soc)

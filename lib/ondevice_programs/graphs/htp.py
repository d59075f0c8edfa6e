"""Qualcomm's HTP: ranges of what is rounded, its compiler, and the emulator of its arithmetic (onnxruntime-qnn)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnx
import onnxruntime  # type: ignore[import-untyped]
import torch

from ondevice import extras
from ondevice.causal_lm import drawing
from ondevice_programs.graphs.drawn import Channels, Noted, Range

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SOC = "57"  # Snapdragon 8 Gen 3
ARCHITECTURE = "75"  # its HTP's version
WINDOW = 512  # tokens that the model reads at once while ranges are noted


class Refused(ValueError):
    """The compiler took a graph in part only, or not at all."""


def noted(model: PreTrainedModel, texts: Sequence[Sequence[int]], cache_bits: int) -> Noted:
    """What a float32 model's tensors are on texts of token ids. cache_bits: of keys and values, 8 or 16."""
    inputs: dict[str, list[torch.Tensor]] = {}
    limits: dict[str, tuple[float, float]] = {}

    def note(name: str, tensor: torch.Tensor) -> None:
        low, high = limits.get(name, (0.0, 0.0))
        limits[name] = (min(low, float(tensor.min())), max(high, float(tensor.max())))

    def hook(name: str) -> Any:
        def after(module: torch.nn.Module, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            rows = given[0].flatten(0, -2)
            low, high, squares = inputs.get(name, [torch.zeros(1)] * 3)
            parts = (rows.amin(0).minimum(low), rows.amax(0).maximum(high), squares + rows.square().sum(0))
            inputs[name] = list(parts)
            bias = getattr(module, "bias", None)
            note(name, output if bias is None else output - bias)

        return after

    modules = [(name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    handles = [module.register_forward_hook(hook(name)) for name, module in modules]
    try:
        with torch.inference_mode():
            for text in texts:
                for start in range(0, len(text), WINDOW):
                    given: Any = model(torch.tensor([list(text[start : start + WINDOW])]), use_cache=True)
                    for number, layer in enumerate(given.past_key_values.layers):
                        note(f"keys.{number}", layer.keys)
                        note(f"values.{number}", layer.values)
    finally:
        for handle in handles:
            handle.remove()
    tokens = sum(map(len, texts))
    channels = {
        name: Channels(low.numpy(), high.numpy(), (squares / tokens).sqrt().numpy())
        for name, (low, high, squares) in inputs.items()
    }
    cached = ("keys.", "values.")
    ranges = {name: Range(*pair, cache_bits if name.startswith(cached) else 16) for name, pair in limits.items()}
    return Noted(channels, ranges)


# The compiler


class Context(NamedTuple):
    """A compiled binary. files: it and the graphs that name it. size: of the binary. spill: bytes of its spill memory.

    Without shared weights `files` and `size` are of several binaries.
    """

    files: tuple[Path, ...]
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


def session(path: Path, soc: str = SOC, **entries: str) -> Any:
    """A session of a graph that is compiled for the HTP and, on x86-64, runs in its emulator; no node is left out.

    entries: of the session's configuration, dots as two underscores. Raises Refused where the compiler does not take
    all of the graph, with its first reason, and ModuleNotFoundError without the package.
    """
    package, devices = _devices()
    options = drawing.options()
    options.log_severity_level = 4
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    provider = {"backend_path": package.get_qnn_htp_path(), "soc_model": soc, "htp_arch": ARCHITECTURE}
    for name, value in entries.items():
        if name.startswith("ep__"):
            options.add_session_config_entry(name.replace("__", "."), value)
        else:
            provider[name] = value
    options.add_provider_for_devices(devices, provider)
    try:
        return onnxruntime.InferenceSession(str(path), options)
    except Exception as error:  # the runtime's errors have no common class of their own
        raise Refused(f"The HTP's compiler refuses {path.name}: {_reason(path, soc, str(error))}") from None


def _reason(path: Path, soc: str, error: str) -> str:
    """The nodes of a graph that the compiler leaves to the CPU, or what the runtime said."""
    left = sorted(_left_to_the_cpu(path))
    if left:
        return f"{len(left)} nodes would run on the CPU, the first of them {left[0]}."
    return error.split(" : ")[-1].split("\n")[0][:200]


def _left_to_the_cpu(path: Path) -> Iterator[str]:
    """`operator name` of each node that is left to the CPU."""
    package, devices = _devices()
    options = drawing.options()
    options.log_severity_level = 4
    options.add_provider_for_devices(devices, {"backend_path": package.get_qnn_htp_path(), "htp_arch": ARCHITECTURE})
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    with contextlib.suppress(Exception):
        for part in onnxruntime.InferenceSession(str(path), options).get_provider_graph_assignment_info():
            if part.ep_name == "CPUExecutionProvider":
                yield from (f"{node.op_type} {node.name}" for node in part.get_nodes())


def compiled(graphs: Sequence[Path], folder: Path, shared: bool, soc: str = SOC) -> Context:
    """Compile graphs of the same weights into a folder: into one binary that has the weights once, or one binary each.

    Raises as `session`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    contexts = [folder / f"{path.stem}_ctx.onnx" for path in graphs]
    for number, (path, context) in enumerate(zip(graphs, contexts, strict=True)):
        entries = {
            "ep__context_enable": "1",
            "ep__context_embed_mode": "0",
            "ep__context_file_path": str(context),
            "enable_htp_spill_fill_buffer": "1",
            "htp_graph_finalization_optimization_mode": "3",  # the most; by default a binary may be twice as large
        }
        if shared:
            entries |= {"ep__share_ep_contexts": "1", "enable_htp_weight_sharing": "1"}
            if number == len(graphs) - 1:
                entries["ep__stop_share_ep_contexts"] = "1"
        session(path, soc, **entries)
    binaries = sorted(folder.glob("*.bin"))
    nodes = [node for path in contexts for node in onnx.load(path).graph.node]
    spills = [attribute.i for node in nodes for attribute in node.attribute if attribute.name == "max_size"]
    sizes = [path.stat().st_size for path in binaries]
    return Context((*contexts, *binaries), sum(sizes), int(np.max(spills) if shared else np.sum(spills)))

"""Peak memory of a method: its process, the measurement in it, and what is counted beside."""

from __future__ import annotations

import contextlib
import json
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from tqdm import tqdm

from ondevice import models, shapes
from ondevice.causal_lm import CausalLM
from ondevice.speculation.loop import generate

if TYPE_CHECKING:
    from ondevice.speculation.drafter import Drafter

DECODED = 32  # tokens
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


# In the process that asks


def in_processes(module: str, jobs: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """What `module`, run as a program by `main`, finds for each job; a process a job.

    From "peak" and "serving" the peak of a process that only imports is taken off.
    Raises RuntimeError, with the process's last line, where one fails.
    """
    imported = _run(module, "import")
    for job in tqdm(jobs, desc="memory", unit="process", delay=5, leave=False):
        found = _run(module, "measure", json.dumps(job))
        yield found | {name: found[name] - imported for name in ("peak", "serving")}


def require_room(specs: Sequence[str], itemsize: int) -> None:
    """Raise MemoryError where shapes with random weights would not fit the free memory."""
    names = [spec.removeprefix("random:") for spec in specs if spec.startswith("random:")]
    needed = sum(shapes.shape(name).parameters for name in names) * itemsize
    free = psutil.virtual_memory().available
    if 1.2 * needed > free:
        raise MemoryError(f"{', '.join(names)} needs {needed / 2**30:.1f} GiB; {free / 2**30:.1f} GiB are free.")


def _run(module: str, *arguments: str) -> Any:
    """The last line that a fresh process of a module prints, from JSON."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"Memory could not be measured: {' '.join(done.stderr.strip().splitlines()[-1:])}")
    return json.loads(done.stdout.strip().splitlines()[-1])


# In a process of its own


def main(measure: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    """The program of a module for `in_processes`: print what `measure` finds for the job of the command line."""
    print(json.dumps(measure(json.loads(sys.argv[2])) if sys.argv[1] == "measure" else _imported()))


def load(spec: str, dtype: str) -> CausalLM:
    """A model by its spec and the name of torch's dtype."""
    return CausalLM(models.load(spec, getattr(torch, dtype)).model)


def require_context(lm: CausalLM, tokens: int) -> None:
    """Raise ValueError where a prompt of so many tokens and what is decoded do not fit the model."""
    if tokens + DECODED > lm.context:
        raise ValueError(f"{tokens} tokens and {DECODED} more exceed the model's context of {lm.context}.")


def serving(lm: CausalLM, drafter: Drafter, prompt: Sequence[int], budget: int) -> dict[str, int]:
    """Bytes while a prompt is prefilled and 32 tokens are decoded: peak (of the process so far), serving (from now)."""
    loaded = peak_bytes()
    _forget_peak()
    found = generate(lm, drafter, prompt, DECODED, budget=budget)
    assert len(found.tokens) == DECODED
    most = peak_bytes()
    return {"peak": max(loaded, most), "serving": most}


def peak_bytes() -> int:
    """Most resident memory of this process so far.

    On Linux from its status: getrusage's value is inherited, so that a process which a large one starts looks large.
    """
    if _STATUS.is_file():
        lines = _STATUS.read_text(encoding="utf-8").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most  # macOS counts bytes


def weight_bytes(lm: CausalLM) -> int:
    """Of all parameters."""
    return sum(weights.numel() * weights.element_size() for weights in lm.model.parameters())


def row_bytes(lm: CausalLM) -> int:
    """Of the keys and values of one token."""
    config: Any = lm.model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * lm.layers * int(heads) * int(width) * int(lm.model.dtype.itemsize)


def _forget_peak() -> None:
    """Have the peak begin anew from what is resident now, where the system can."""
    with contextlib.suppress(OSError):
        _RESET.write_text("5", encoding="utf-8")


def _imported() -> int:
    """Import what a measurement does beside the module itself: the peak."""
    import transformers

    for lazy in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer", "LlamaForCausalLM", "Qwen2ForCausalLM"):
        getattr(transformers, lazy)
    return peak_bytes()

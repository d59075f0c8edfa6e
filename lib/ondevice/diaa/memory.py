"""Figure 2: what each method needs of memory at a context length, in a process of its own."""

from __future__ import annotations

import contextlib
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import psutil
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from ondevice import models, shapes
from ondevice.causal_lm import CausalLM
from ondevice.diaa.drafter import Diaa
from ondevice.diaa.experiments import BUDGET, RECYCLED
from ondevice.diaa.tables import K, Tables
from ondevice.speculation import Drafter, generate
from ondevice.speculation.layer_skipping import LayerSkipping
from ondevice.speculation.sam_decoding import SamDecoding
from ondevice.speculation.small_model import SmallModel
from ondevice.speculation.token_recycling import TokenRecycling

if TYPE_CHECKING:
    from collections.abc import Callable

METHODS = ("vanilla", "SpS", "SWIFT", "SAM-D", "TR", "DIAA")
DECODED = 32  # tokens
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class _Job:
    """What a process is to measure. corpus: file of SAM-D's text; small: spec of SpS's drafter."""

    spec: str
    method: str
    context: int
    dtype: str
    small: str
    corpus: str


def peaks(
    spec: str, methods: Sequence[str], contexts: Sequence[int], *, dtype: str = "float32", small: str = "",
    corpus: NDArray[np.int64] | None = None,
) -> pd.DataFrame:  # fmt: skip
    """Prefill `contexts` tokens, decode 32 more by each of METHODS, and note the peak; one process a row.

    spec, small (SpS's drafter): as `models.load` takes them, `random:` shapes too. dtype: of torch, by name.
    corpus: SAM-D's static text, token ids.
    Columns: model, method, context, kind (measured), and in MB (10**6 bytes)
    megabytes: most resident memory since the weights were loaded, less that of a process that only imports;
    peak_megabytes: the same over the process' whole life, as loading takes more than holding (the only peak that some
    systems tell, and then `megabytes` too);
    weights_megabytes (the drafter's too), cache_megabytes (the rows in use), tables_megabytes (NaN where they are
    Python objects): counted, not measured.
    Raises ValueError on an unknown method and a missing drafter or text, MemoryError where a shape cannot fit.
    """
    for method in methods:
        if method not in METHODS:
            raise ValueError(f"There is no method {method!r}; there are {', '.join(METHODS)}.")
    if "SpS" in methods and not small:
        raise ValueError("SpS needs a small model.")
    if "SAM-D" in methods and corpus is None:
        raise ValueError("SAM-D needs a corpus.")
    _require_room([spec, small], getattr(torch, dtype).itemsize)
    imported = json.loads(_in_a_process("import"))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "corpus.npy"
        if corpus is not None:
            np.save(text, corpus)
        jobs = [_Job(spec, method, context, dtype, small, str(text)) for context in contexts for method in methods]
        for job in tqdm(jobs, desc="memory", unit="process", delay=5, leave=False):
            found = json.loads(_in_a_process("measure", json.dumps(asdict(job))))
            rows.append({
                "model": spec.rstrip("/").rpartition("/")[2], "method": job.method, "context": job.context,
                "kind": "measured", "megabytes": (found["serving"] - imported) / 1e6,
                "peak_megabytes": (found["peak"] - imported) / 1e6, "weights_megabytes": found["weights"] / 1e6,
                "cache_megabytes": found["cache"] / 1e6,
                "tables_megabytes": float("nan") if found["tables"] is None else found["tables"] / 1e6,
            })  # fmt: skip
    return pd.DataFrame(rows)


def peak_bytes() -> int:
    """Most resident memory of this process so far.

    On Linux from its status: getrusage's value is inherited, so that a process which a large one starts looks large.
    """
    if _STATUS.is_file():
        lines = _STATUS.read_text(encoding="utf-8").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most  # macOS counts bytes


def _forget_peak() -> None:
    """Have the peak begin anew from what is resident now, where the system can."""
    with contextlib.suppress(OSError):
        _RESET.write_text("5", encoding="utf-8")


def _measure(job: _Job) -> dict[str, Any]:
    """Bytes: peak, serving (the peak after loading), weights, cache, tables (None where not counted)."""
    torch.set_num_threads(1)
    lm = _load(job.spec, job.dtype)
    if job.context + DECODED > lm.context:
        raise ValueError(f"{job.context} tokens and {DECODED} more exceed the model's context of {lm.context}.")
    drafter, budget = _DRAFTERS[job.method](lm, job)
    loaded = peak_bytes()
    _forget_peak()
    found = generate(lm, drafter, np.arange(job.context) % lm.vocabulary, DECODED, budget=budget)  # type: ignore[arg-type]
    assert len(found.tokens) == DECODED
    drafting = [drafter.lm] if isinstance(drafter, SmallModel | LayerSkipping) else []
    length = job.context + DECODED
    return {
        "peak": max(loaded, peak_bytes()),
        "serving": peak_bytes(),
        "weights": sum(map(_weight_bytes, {lm, *drafting})),
        "cache": sum(map(_row_bytes, [lm, *drafting])) * length + _row_bytes(lm) * budget,
        "tables": _table_bytes(drafter),
    }


def _load(spec: str, dtype: str) -> CausalLM:
    return CausalLM(models.load(spec, getattr(torch, dtype)).model)


_Made = tuple[Drafter, int]  # a drafter and its budget
_DRAFTERS: dict[str, Callable[[CausalLM, _Job], _Made]] = {
    "vanilla": lambda lm, job: (Drafter(), 1),
    "SpS": lambda lm, job: (SmallModel(_load(job.small, job.dtype), schedule="heuristic"), BUDGET),
    "SWIFT": lambda lm, job: (LayerSkipping(lm, branches=lm.tree_refusal is None), BUDGET),
    "SAM-D": lambda lm, job: (SamDecoding([np.load(job.corpus).tolist()]), BUDGET),
    "TR": lambda lm, job: (TokenRecycling(lm.vocabulary), RECYCLED),
    "DIAA": lambda lm, job: (Diaa(_full(lm.vocabulary)), BUDGET),
}


def _full(vocabulary: int) -> Tables:
    """Tables whose every row is full, so that trees are as large as they may be; their ids do not matter."""
    tables = Tables.empty(vocabulary)
    tables.tokens[:] = (np.arange(vocabulary)[:, None] + np.arange(1, K + 1)) % vocabulary
    tables.probabilities[:] = 0.5 ** np.arange(1, K + 1)
    return tables


def _table_bytes(drafter: Drafter) -> int | None:
    if isinstance(drafter, Diaa):
        return sum(drafter.tables.bytes)
    if isinstance(drafter, TokenRecycling):
        return int(drafter.matrix.nbytes)
    return None if isinstance(drafter, SamDecoding) else 0


def _weight_bytes(lm: CausalLM) -> int:
    return sum(weights.numel() * weights.element_size() for weights in lm.model.parameters())


def _row_bytes(lm: CausalLM) -> int:
    """Of the keys and values of one token."""
    config: Any = lm.model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * lm.layers * int(heads) * int(width) * int(lm.model.dtype.itemsize)


def _require_room(specs: Sequence[str], itemsize: int) -> None:
    """Raise MemoryError where shapes with random weights would not fit the free memory."""
    names = [spec.removeprefix("random:") for spec in specs if spec.startswith("random:")]
    needed = sum(shapes.shape(name).parameters for name in names) * itemsize
    free = psutil.virtual_memory().available
    if 1.2 * needed > free:
        raise MemoryError(f"{', '.join(names)} needs {needed / 2**30:.1f} GiB; {free / 2**30:.1f} GiB are free.")


def _import() -> None:
    """Import what a measurement does, and print the peak."""
    import transformers

    for lazy in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer", "LlamaForCausalLM", "Qwen2ForCausalLM"):
        getattr(transformers, lazy)
    print(peak_bytes())


def _in_a_process(*arguments: str) -> str:
    """The last line that a fresh process of this module prints."""
    command = [sys.executable, "-m", "ondevice.diaa.memory", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"Memory could not be measured: {' '.join(done.stderr.strip().splitlines()[-1:])}")
    return done.stdout.strip().splitlines()[-1]


if __name__ == "__main__":
    if sys.argv[1] == "import":
        _import()
    else:
        print(json.dumps(_measure(_Job(**json.loads(sys.argv[2])))))

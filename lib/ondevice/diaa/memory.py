"""Figure 2: what each method needs of memory at a context length, in a process of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from ondevice.diaa.drafter import Diaa
from ondevice.diaa.experiments import BUDGET, RECYCLED
from ondevice.diaa.tables import K, Tables
from ondevice.speculation import Drafter
from ondevice.speculation.layer_skipping import LayerSkipping
from ondevice.speculation.memory import (
    DECODED,
    in_processes,
    load,
    main,
    require_context,
    require_room,
    row_bytes,
    serving,
    weight_bytes,
)
from ondevice.speculation.sam_decoding import SamDecoding
from ondevice.speculation.small_model import SmallModel
from ondevice.speculation.token_recycling import TokenRecycling

if TYPE_CHECKING:
    from collections.abc import Callable

    from ondevice.causal_lm import CausalLM

METHODS = ("vanilla", "SpS", "SWIFT", "SAM-D", "TR", "DIAA")


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
    require_room([spec, small], getattr(torch, dtype).itemsize)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "corpus.npy"
        if corpus is not None:
            np.save(text, corpus)
        jobs = [_Job(spec, method, context, dtype, small, str(text)) for context in contexts for method in methods]
        for job, found in zip(jobs, in_processes("ondevice.diaa.memory", [asdict(job) for job in jobs]), strict=True):
            rows.append({
                "model": spec.rstrip("/").rpartition("/")[2], "method": job.method, "context": job.context,
                "kind": "measured", "megabytes": found["serving"] / 1e6,
                "peak_megabytes": found["peak"] / 1e6, "weights_megabytes": found["weights"] / 1e6,
                "cache_megabytes": found["cache"] / 1e6,
                "tables_megabytes": float("nan") if found["tables"] is None else found["tables"] / 1e6,
            })  # fmt: skip
    return pd.DataFrame(rows)


def _measure(job: _Job) -> dict[str, Any]:
    """Bytes: peak, serving (the peak after loading), weights, cache, tables (None where not counted)."""
    torch.set_num_threads(1)
    lm = load(job.spec, job.dtype)
    require_context(lm, job.context)
    drafter, budget = _DRAFTERS[job.method](lm, job)
    drafting = [drafter.lm] if isinstance(drafter, SmallModel | LayerSkipping) else []
    length = job.context + DECODED
    return {
        **serving(lm, drafter, (np.arange(job.context) % lm.vocabulary).tolist(), budget),
        "weights": sum(map(weight_bytes, {lm, *drafting})),
        "cache": sum(map(row_bytes, [lm, *drafting])) * length + row_bytes(lm) * budget,
        "tables": _table_bytes(drafter),
    }


_Made = tuple[Drafter, int]  # a drafter and its budget
_DRAFTERS: dict[str, Callable[[CausalLM, _Job], _Made]] = {
    "vanilla": lambda lm, job: (Drafter(), 1),
    "SpS": lambda lm, job: (SmallModel(load(job.small, job.dtype), schedule="heuristic"), BUDGET),
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


if __name__ == "__main__":
    main(lambda job: _measure(_Job(**job)))

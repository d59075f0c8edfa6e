"""Figure 12: peak memory by arm, each in a process of its own, and what of it is counted."""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import psutil
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from ondevice import commands, corpus, meters, models, shapes
from ondevice.causal_lm import CausalLM
from ondevice.sdnpu.drafter import LMAX, LONGEST, Sam, SdNpu
from ondevice.sdnpu.experiments import OURS, methods
from ondevice.sdnpu.measuring import VANILLA
from ondevice.speculation import generate
from ondevice.speculation.small_model import SmallModel

if TYPE_CHECKING:
    from ondevice.sdnpu.history import History
    from ondevice.speculation import Drafter

DRAFT_MODEL = "draft model"  # stands where the paper has EAGLE, of which we have no trained one
DECODED = 32  # tokens
ARMS = (VANILLA, "PLD", "SAM", OURS, DRAFT_MODEL)
# Tokens of an arm's longest draft: what its rows are allocated for.
_BUDGETS = {VANILLA: 1, "PLD": 10, "SAM": LONGEST - 1, OURS: LMAX - 1, DRAFT_MODEL: 5}
_SHARED = (type, ModuleType, FunctionType, BuiltinFunctionType)  # what a drafter refers to but does not own


@dataclass(frozen=True)
class _Job:
    """What a process is to measure. text, history: files of token ids; small: spec of the draft model."""

    spec: str
    arm: str
    context: int
    dtype: str
    small: str
    text: str
    history: str


def peaks(
    spec: str, arms: Sequence[str], contexts: Sequence[int], *, history: Sequence[Sequence[int]] = (), small: str = "",
    text: NDArray[np.integer[Any]] | None = None, dtype: str = "float32",
) -> pd.DataFrame:  # fmt: skip
    """Prefill `contexts` tokens, decode 32 more by each of ARMS, and note the peak; one process a row.

    spec, small (the draft model): as `models.load` takes them. dtype: of torch, by name.
    history: responses, as token ids, that the arms with SAM begin with.
    text: token ids whose first ones are the prompt; by default the documents of the test split.
    Columns: model, arm, context, source ("measured"), and in MB (10**6 bytes)
    peak_mb: most resident memory since the weights were loaded, over that of what is imported;
    loading_mb: the same over the process' whole life, as loading may take more than serving;
    and counted, not measured, parts of the peak, which are not all of it: weights_mb and cache_mb, the rows in use with
    a whole draft, both of the target; drafter_mb, a draft model's weights and rows, or a lookup's Python objects.

    Vanilla and lookups without calibration prefill in one forward; calibration, which reads the prompt's logits, in
    chunks of 256 rows. Only with contexts up to 256 do all arms prefill alike; beyond, the chunks save activations.
    Raises ValueError on an unknown arm, a missing draft model, and token ids that are too few or not the model's;
    MemoryError where a shape cannot fit; RuntimeError where a process fails. Linux only.
    """
    text = corpus.document_tokens("test") if text is None else text
    _check(arms, contexts, small, len(text))
    _require_room([spec, small], getattr(torch, dtype).itemsize)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        prompts, past = Path(folder) / "text.npy", Path(folder) / "history.json"
        np.save(prompts, text[: max(contexts)])
        past.write_text(json.dumps([list(map(int, response)) for response in history]), encoding="utf-8")
        jobs = [_Job(spec, arm, context, dtype, small, str(prompts), str(past)) for context in contexts for arm in arms]
        for job in tqdm(jobs, desc="memory", unit="process", delay=5, leave=False):
            found = meters.sample([sys.executable, "-m", "ondevice.sdnpu.memory", "measure", json.dumps(asdict(job))])
            rows.append({
                "model": spec.rstrip("/").rpartition("/")[2], "arm": job.arm, "context": job.context,
                "source": "measured", "peak_mb": found.peak("resident", phase="serving") / 1e6,
                "loading_mb": found.peak("resident") / 1e6,
                **{f"{part}_mb": counted / 1e6 for part, counted in found.result.items()},
            })  # fmt: skip
    return pd.DataFrame(rows)


def object_bytes(root: object) -> int:
    """Bytes of all that a Python object holds, itself included; nothing twice, and no classes, functions or modules."""
    return sum(sys.getsizeof(one) + _data(one) for one in _reached(root))


def _check(arms: Sequence[str], contexts: Sequence[int], small: str, available: int) -> None:
    for arm in arms:
        if arm not in ARMS:
            raise ValueError(f"There is no arm {arm!r}; there are {', '.join(ARMS)}.")
    if not arms or not contexts:
        raise ValueError("Memory is measured for at least one arm and one context.")
    if DRAFT_MODEL in arms and not small:
        raise ValueError(f"The arm {DRAFT_MODEL!r} needs a small model.")
    for context in contexts:
        if not 1 <= context <= available:
            raise ValueError(f"A context has 1 to {available} tokens, as many as the text, not {context}.")


def _require_room(specs: Sequence[str], itemsize: int) -> None:
    """Raise MemoryError where shapes with random weights would not fit the free memory."""
    names = [spec.removeprefix("random:") for spec in specs if spec.startswith("random:")]
    needed = sum(shapes.shape(name).parameters for name in names) * itemsize
    free = psutil.virtual_memory().available
    if 1.2 * needed > free:
        raise MemoryError(f"{', '.join(names)} needs {needed / 2**30:.1f} GiB; {free / 2**30:.1f} GiB are free.")


# In a process of its own


def main() -> None:
    """Measure the job of the command line; print what is counted beside."""
    job = _Job(**json.loads(commands.child("measure")[1]))
    torch.set_num_threads(1)
    models.import_classes()
    meters.mark("loading")
    counted = _measure(job)
    meters.mark("end")
    print(json.dumps(counted))


def _measure(job: _Job) -> dict[str, int]:
    """Serve once, in the phase `serving`. Bytes: weights, cache, drafter."""
    lm = _load(job.spec, job.dtype)
    if job.context + DECODED > lm.context:
        raise ValueError(f"{job.context} tokens and {DECODED} more exceed the model's context of {lm.context}.")
    prompt = np.load(job.text)[: job.context].tolist()
    if max(prompt) >= lm.vocabulary:
        raise ValueError(f"The prompt holds the token id {max(prompt)}; the model has {lm.vocabulary} of them.")
    drafter, budget = _made(lm, job), _BUDGETS[job.arm]
    meters.mark("serving")
    found = generate(lm, drafter, prompt, DECODED, budget=budget)
    assert len(found.tokens) == DECODED
    return {
        "weights": _weight_bytes(lm), "cache": _row_bytes(lm) * (job.context + DECODED + budget),
        "drafter": _drafter_bytes(drafter, job.context + DECODED),
    }  # fmt: skip


def _load(spec: str, dtype: str) -> CausalLM:
    """A model by its spec and the name of torch's dtype."""
    return CausalLM(models.load(spec, getattr(torch, dtype)).model)


def _weight_bytes(lm: CausalLM) -> int:
    """Of all parameters."""
    return sum(weights.numel() * weights.element_size() for weights in lm.model.parameters())


def _row_bytes(lm: CausalLM) -> int:
    """Of the keys and values of one token."""
    config: Any = lm.model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * lm.layers * int(heads) * int(width) * int(lm.model.dtype.itemsize)


def _made(lm: CausalLM, job: _Job) -> Drafter:
    """A drafter, with its history where it has one."""
    if job.arm == DRAFT_MODEL:
        return SmallModel(_load(job.small, job.dtype), _BUDGETS[DRAFT_MODEL])
    drafter = next(method for method in methods(lm.vocabulary) if method.name == job.arm).make()
    history = _history(drafter)
    if history is not None:
        for response in json.loads(Path(job.history).read_text(encoding="utf-8")):
            history.append(response)
    return drafter


def _history(drafter: Drafter) -> History | None:
    base = drafter.base if isinstance(drafter, SdNpu) else drafter
    return base.history if isinstance(base, Sam) else None


def _drafter_bytes(drafter: Drafter, length: int) -> int:
    if isinstance(drafter, SmallModel):
        return _weight_bytes(drafter.lm) + _row_bytes(drafter.lm) * length
    return object_bytes(drafter)


def _reached(root: object) -> Iterator[object]:
    known, waiting = {id(root)}, [root]
    while waiting:
        one = waiting.pop()
        yield one
        for other in gc.get_referents(one):
            if id(other) not in known and not isinstance(other, _SHARED):
                known.add(id(other))
                waiting.append(other)


def _data(one: object) -> int:
    """Of a tensor, whose size Python does not know."""
    return one.nbytes if isinstance(one, torch.Tensor) else 0


if __name__ == "__main__":
    main()

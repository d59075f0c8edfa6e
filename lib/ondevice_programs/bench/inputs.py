"""The model, the prompts and the machine of a bench, checked before anything slow."""

from __future__ import annotations

import json
import math
import platform
import subprocess
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ondevice import assets, chat, cores, prompts
from ondevice.causal_lm import support
from ondevice.digests import tokenizer_digest, weights_digest
from ondevice.models import Loaded

LONGEST = 256  # new tokens of an answer
ROUND = 6  # prompts that every drafter answers before any of them answers others, at least


@dataclass(frozen=True)
class BenchRequest:
    """A prompt as the model reads it. limit: tokens of its answer, at most."""

    id: str
    task: str
    ids: tuple[int, ...]
    limit: int


def requests(
    loaded: Loaded, source: Sequence[prompts.Prompt], own: bool, say: Callable[[str], None]
) -> list[BenchRequest]:
    """The prompts, rendered by the model's template, all tasks' first ones first.

    own: whether they are the repository's, of which those that are too long for the model are left out; of a user's
    file each must fit, else ValueError names it. A request's id is its place, as a file may be renamed.
    """
    if loaded.tokenizer.chat_template is None:
        say("This model has no chat template, so it reads the prompts as plain text.")
    kept: list[BenchRequest] = []
    without_weights: Any = SimpleNamespace(config=loaded.config)  # a GGUF's are not needed to know its context
    context = support.context_of(without_weights, None)
    for number, prompt in enumerate(source):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the missing template
            ids = tuple(chat.prompt_ids(loaded.tokenizer, prompt.text))
        if len(ids) < context:
            kept.append(BenchRequest(str(number), prompt.task, ids, min(LONGEST, context - len(ids))))
        elif not own:
            raise ValueError(f"The prompt {prompt.id} has {len(ids)} tokens; the model's context is {context}.")
    if not kept:
        raise ValueError(f"No prompt fits the model's context of {context} tokens.")
    if len(kept) < len(source):
        say(f"{len(source) - len(kept)} prompts are longer than the model's context and are left out.")
    return in_turns(kept)


def in_turns(several: Sequence[BenchRequest]) -> list[BenchRequest]:
    """The first request of every task, then the second of each, and so on."""
    seen: Counter[str] = Counter()
    turns = []
    for request in several:
        turns.append((seen[request.task], request))
        seen[request.task] += 1
    return [request for _, request in sorted(turns, key=lambda turn: turn[0])]


def rounds(several: Sequence[BenchRequest]) -> list[list[BenchRequest]]:
    """Parts of requests with equally many of every task, as long as all tasks have so many."""
    counts = Counter(request.task for request in several)
    fewest = min(counts.values(), default=0)
    each = min(fewest, math.ceil(ROUND / max(1, len(counts))))
    alike = in_turns(several)[: len(counts) * fewest]
    size = max(1, len(counts) * each)
    return [alike[start : start + size] for start in range(0, len(alike) - size + 1, size)]


def model_facts(loaded: Loaded) -> dict[str, Any]:
    """spec, sha256, and parameters (tied ones once).

    sha256: of a GGUF file; of another model what its answers depend on: configuration, weights, tokenizer, template and
    end tokens. Where its files lie, and how its weights are dealt into them, is no part of it.
    """
    if loaded.gguf:
        count = sum(math.prod(stored.shape) for stored in loaded.gguf.tensors.values())
        return {"spec": loaded.spec, "sha256": loaded.gguf.sha256, "parameters": count}
    template, ends = loaded.tokenizer.chat_template, sorted(loaded.eos_token_ids)
    content = [weights_digest(loaded.model), tokenizer_digest(loaded.tokenizer), template, ends]
    digest = sha256(json.dumps(content).encode()).hexdigest()
    return {
        "spec": loaded.spec,
        "sha256": digest,
        "parameters": sum(parameter.numel() for parameter in loaded.model.parameters()),
    }


def machine(threads: int) -> dict[str, Any]:
    """Processor, cores, threads, system, and versions of what computes."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text(encoding="utf-8").splitlines() if facts.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "cores": cores.usable(),
        "threads": threads,
        "system": platform.system(),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("onnxruntime", "torch", "transformers")},
    }


def commit() -> str | None:
    """The checkout's commit, with a plus where files differ from it; None where there is no checkout."""
    command = ["git", "-C", str(assets.ROOT), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    if not (assets.ROOT / ".git").exists():
        return None
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None

"""Low-rank adapters in peft's form, added to the weights of the model that they were trained on.

A folder has adapter_config.json and adapter_model.safetensors: of some matrices W [out, in] a product B A of rank r,
which W becomes W + lora_alpha / r B A with, and a new head, whole.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
SCORE = "SEQ_CLS"  # the task of a model with a head for one score
_TASKS = (SCORE, "CAUSAL_LM")
_UNREAD = ("use_dora", "use_rslora", "fan_in_fan_out", "lora_bias", "rank_pattern", "alpha_pattern",
           "layer_replication", "trainable_token_indices")  # fmt: skip
_PREFIX = "base_model.model."


@dataclass(frozen=True)
class Adapter:
    """A folder's adapter. base: the spec of its model. task: "SEQ_CLS" or "CAUSAL_LM". scale: of every product."""

    folder: Path
    base: str
    task: str
    scale: float


def is_adapter(folder: Path) -> bool:
    """Whether a folder has an adapter and no whole model."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def opened(folder: Path) -> Adapter:
    """The adapter of a folder. Raises ValueError where it is damaged, or of a form that is not read here."""
    try:
        facts = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        adapter = Adapter(
            folder, str(facts["base_model_name_or_path"]), str(facts["task_type"]), facts["lora_alpha"] / facts["r"]
        )
    except (ValueError, KeyError, TypeError, ZeroDivisionError):
        raise ValueError(f"{CONFIG} of {folder.name} is damaged: it is no JSON of a low-rank adapter.") from None
    odd = [name for name in _UNREAD if facts.get(name)]
    odd += ["bias"] if facts.get("bias", "none") != "none" else []
    if facts.get("peft_type") != "LORA" or odd:
        form = f"sets {odd[0]}" if odd else f"is of the form {facts.get('peft_type')}"
        raise ValueError(f"The adapter {folder.name} {form}; what is read is LORA without it.")
    if adapter.task not in _TASKS:
        raise ValueError(f"The adapter {folder.name} is for {adapter.task}, which is none of {', '.join(_TASKS)}.")
    return adapter


def merge(adapter: Adapter, base: PreTrainedModel) -> PreTrainedModel:
    """The base with the adapter in its weights, float32. Raises ValueError where it was trained on another model."""
    model = with_score(base) if adapter.task == SCORE else base
    path = adapter.folder / WEIGHTS
    try:
        tensors = safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"{WEIGHTS} of {adapter.folder.name} is missing, damaged or truncated ({error}).") from None
    parameters = {f"{_PREFIX}{name}": parameter for name, parameter in model.named_parameters()}
    while tensors:
        name, tensor = tensors.popitem()
        kind = next((kind for kind in ("lora_A", "lora_B") if name.endswith(f".{kind}.weight")), None)
        added = tensor.float()
        if kind is not None:
            other = tensors.pop(name.replace(kind, "lora_B" if kind == "lora_A" else "lora_A"), None)
            name = name.replace(f".{kind}", "")
            if other is None:
                raise ValueError(f"The adapter {adapter.folder.name} has half of a product for {name}.")
            a, b = (added, other.float()) if kind == "lora_A" else (other.float(), added)
            added = adapter.scale * (b @ a)
        wanted = parameters.get(name)
        if wanted is None or wanted.shape != added.shape:
            raise ValueError(f"The adapter {adapter.folder.name} is not for {adapter.base}: {name} does not fit.")
        with torch.no_grad():
            wanted.copy_(added if kind is None else wanted + added)
    return model


def with_score(parent: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """A model with the parent's trunk and a new head for one score, in evaluation mode, float32.

    Raises ValueError where the parent is neither a Llama nor a BERT with its pooler.
    """
    import transformers

    names = {"llama": "LlamaForSequenceClassification", "bert": "BertForSequenceClassification"}
    if parent.config.model_type not in names:
        raise ValueError(f"A reranker starts from a Llama or a BERT, not from {parent.config.model_type}.")
    labels: dict[str, Any] = {"id2label": {0: "score"}, "label2id": {"score": 0}}
    config = type(parent.config).from_dict({**parent.config.to_dict(), **labels})
    config.architectures = [names[parent.config.model_type]]
    config.dtype = "float32"
    torch.manual_seed(seed)
    model: PreTrainedModel = getattr(transformers, config.architectures[0])(config)
    report = model.base_model.load_state_dict(parent.base_model.state_dict(), strict=False)
    if lacking := [*report.missing_keys, *report.unexpected_keys]:
        raise ValueError(f"A reranker's trunk is not this {parent.config.model_type}'s: {lacking[0]} differs.")
    return model.eval()

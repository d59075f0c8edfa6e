"""Low-rank adapters in peft's form, added to the weights of the model that they were trained on.

A folder has adapter_config.json and adapter_model.safetensors: of some matrices W [out, in] a product B A of rank r,
which W becomes W + lora_alpha / r B A with, and a new head, whole. The model is another folder, or stands beside them.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import tempfile
from collections.abc import Iterator, Mapping
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
_READ = (
    "peft_type",
    "task_type",
    "base_model_name_or_path",
    "r",
    "lora_alpha",
    "use_rslora",
    "alpha_pattern",
    "rank_pattern",
)
_HARMLESS = (  # they say how it was trained, or which matrices it has, as its weights do
    "auto_mapping", "peft_version", "revision", "inference_mode", "target_modules", "exclude_modules", "lora_dropout",
    "modules_to_save", "layers_to_transform", "layers_pattern", "megatron_core", "qalora_group_size", "eva_config",
    "runtime_config",
)  # fmt: skip
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "orthogonal", "eva"),  # others change the base
}
_PREFIX = "base_model.model."
_OF_A_COPY = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")  # what copies' config.json differ by


@dataclass(frozen=True)
class Adapter:
    """A folder's adapter. base: the spec of its model. task: "SEQ_CLS" or "CAUSAL_LM".

    alpha: of every product B A, but those whose matrix's path a regular expression of `alphas` fits. rooted: whether a
    product's scale is alpha over the root of its rank, not over its rank.
    """

    folder: Path
    base: str
    task: str
    alpha: float
    alphas: Mapping[str, float]
    rooted: bool

    def scale(self, path: str, rank: int) -> float:
        """Of the product of this rank for the matrix at this path."""
        fitting = (alpha for pattern, alpha in self.alphas.items() if re.match(rf"(.*\.)?({pattern})$", path))
        return next(fitting, self.alpha) / (math.sqrt(rank) if self.rooted else rank)


def is_adapter(folder: Path) -> bool:
    """Whether a folder has an adapter and no whole model."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def is_beside(folder: Path) -> bool:
    """Whether a folder has an adapter beside a whole model, which is its base."""
    return (folder / CONFIG).is_file() and (folder / "config.json").is_file()


@contextlib.contextmanager
def base_beside(adapter: Adapter) -> Iterator[Path]:
    """A folder of the model that an adapter stands beside, without the adapter.

    Raises ValueError where the adapter names a folder of another model as its base.
    """
    named, own = (_config(Path(folder).expanduser()) for folder in (adapter.base, adapter.folder))
    if named and named != own:
        raise ValueError(f"The adapter {adapter.folder.name} is for {adapter.base}, not for the model beside it.")
    with tempfile.TemporaryDirectory() as alone:
        for path in adapter.folder.iterdir():
            if not path.name.startswith("adapter_"):
                (Path(alone) / path.name).symlink_to(path.resolve())
        yield Path(alone)


def _config(folder: Path) -> dict[str, Any]:
    """A folder's config.json, without what copies of it differ by; {} where there is none."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        return {name: value for name, value in config.items() if name not in _OF_A_COPY}
    except (ValueError, AttributeError):
        raise ValueError(f"config.json of {folder.name} is damaged: it is no JSON of a model.") from None


def opened(folder: Path) -> Adapter:
    """The adapter of a folder. Raises ValueError where it is damaged, or of a form that is not read here."""
    try:
        facts = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        alphas = {str(name): float(alpha) for name, alpha in (facts.get("alpha_pattern") or {}).items()}
        adapter = Adapter(
            folder,
            str(facts["base_model_name_or_path"]),
            str(facts["task_type"]),
            float(facts["lora_alpha"]),
            alphas,
            bool(facts.get("use_rslora")),
        )
        adapter.scale("", facts["r"])
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError, re.error):
        raise ValueError(f"{CONFIG} of {folder.name} is damaged: it is no JSON of a low-rank adapter.") from None
    if facts.get("peft_type") != "LORA":
        raise ValueError(f"The adapter {folder.name} is of the form {facts.get('peft_type')}; what is read is LORA.")
    odd = [name for name, value in facts.items() if value and name not in (*_READ, *_HARMLESS, *_NEUTRAL)]
    odd += [name for name, neutral in _NEUTRAL.items() if facts.get(name, neutral[0]) not in neutral]
    if odd:
        raise ValueError(f"The adapter {folder.name} sets {odd[0]}; what is read is LORA without it.")
    if adapter.task not in _TASKS:
        raise ValueError(f"The adapter {folder.name} is for {adapter.task}, which is none of {', '.join(_TASKS)}.")
    return adapter


def merge(adapter: Adapter, base: PreTrainedModel) -> PreTrainedModel:
    """The base with the adapter in its weights, float32. Raises ValueError where it was trained on another model."""
    own = type(base).__name__.endswith("ForSequenceClassification")
    model = with_score(base) if adapter.task == SCORE and not own else base
    path = adapter.folder / WEIGHTS
    try:
        tensors = safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"{WEIGHTS} of {adapter.folder.name} is missing, damaged or truncated ({error}).") from None
    parameters = {f"{_PREFIX}{name}": parameter for name, parameter in model.named_parameters()}
    trunk = f"{_PREFIX}{model.base_model_prefix}."
    new = set() if model is base else {name for name in parameters if not name.startswith(trunk)}
    if lacking := sorted(new - tensors.keys()):
        raise ValueError(f"The adapter {adapter.folder.name} has no {lacking[0]}, which its base has not either.")
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
            added = adapter.scale(name.removeprefix(_PREFIX).removesuffix(".weight"), len(a)) * (b @ a)
        elif "lora_" in name:
            raise ValueError(f"The adapter {adapter.folder.name} has {name}, which is not applied here.")
        wanted = parameters.get(name)
        if wanted is None or wanted.shape != added.shape:
            raise ValueError(f"The adapter {adapter.folder.name} is not for {adapter.base}: {name} does not fit.")
        with torch.no_grad():
            wanted.copy_(added if kind is None else wanted + added)
    return model


def with_score(parent: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """A model with the parent's trunk and a new head for one score, in evaluation mode, float32.

    Raises ValueError where transformers has no such head for it, or the parent lacks a part of its trunk, as a pooler.
    """
    from transformers import AutoModelForSequenceClassification

    kind: Any = AutoModelForSequenceClassification._model_mapping.get(type(parent.config), None)
    if kind is None:
        raise ValueError(f"A reranker starts from a model with a head for one score, not {parent.config.model_type}.")
    labels: dict[str, Any] = {"id2label": {0: "score"}, "label2id": {"score": 0}}
    config = type(parent.config).from_dict({**parent.config.to_dict(), **labels})
    config.architectures = [kind.__name__]
    config.dtype = "float32"
    torch.manual_seed(seed)
    model: PreTrainedModel = kind(config)
    report = model.base_model.load_state_dict(parent.base_model.state_dict(), strict=False)
    if lacking := [*report.missing_keys, *report.unexpected_keys]:
        raise ValueError(f"A reranker's trunk is not this {parent.config.model_type}'s: {lacking[0]} differs.")
    return model.eval()

"""A model's configuration, tokenizer and activation from its folder, with one sentence where something is missing.

transformers' modelling code takes 80 MB once it is imported: here, before any budget begins to count.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
import transformers.modeling_utils
from torch import Tensor

from ondevice import shapes
from ondevice_papers.grating.reading import answer_ids

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

Activation = Callable[[Tensor], Tensor]
for _name in ("Qwen3ForCausalLM", "BertForSequenceClassification"):  # and what all models' code is built on
    getattr(transformers, _name)


def configuration(spec: str, folder: Path) -> PreTrainedConfig:
    """The configuration, with the code of its model imported."""
    try:
        config = transformers.AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    except (ValueError, OSError, KeyError) as error:
        raise ValueError(f"transformers cannot build {spec} without code of its own ({_line(error)}).") from None
    for name in config.architectures or []:
        getattr(transformers, name, None)
    return config


def tokenizer(spec: str, folder: Path) -> PreTrainedTokenizerBase:
    """The folder's tokenizer."""
    try:
        return transformers.AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except (ValueError, OSError) as error:
        raise ValueError(f"{spec} has no tokenizer that can be loaded ({_line(error)}).") from None


def answers(
    spec: str, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, instruction: str | None
) -> tuple[int, int] | None:
    """Ids of "yes" and "no" for a causal LM; of their first letters where weights are random and tokens are bytes."""
    if not (config.architectures or [""])[0].endswith("ForCausalLM"):
        return None
    if getattr(config, shapes.MARK, False):
        first, second = (tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in ("yes", "no"))
        return first, second
    if instruction is None and "rerank" not in Path(spec).name.lower():
        why = "that neither its name nor an instruction says to answer yes or no"
        raise ValueError(f"{spec} is a causal language model {why}: it is no reranker.")
    return answer_ids(tokenizer)


def activation(config: PreTrainedConfig, folder: Path) -> Activation:
    """Sigmoid, or what the model's files name as sentence-transformers does. Raises ValueError on any other name."""
    named = getattr(config, "sbert_ce_default_activation_function", None)
    named = (getattr(config, "sentence_transformers", None) or {}).get("activation_fn", named)
    own = folder / "config_sentence_transformers.json"
    if own.is_file():
        named = json.loads(own.read_text(encoding="utf-8")).get("activation_fn", named)
    kind = "Sigmoid" if named is None else str(named).rpartition(".")[2]
    if kind not in ("Sigmoid", "Identity"):
        raise ValueError(f"The model's scores are made by {named}, which is not Sigmoid or Identity.")
    return torch.sigmoid if kind == "Sigmoid" else torch.clone


def _line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:200]

"""Folders of random rerankers: a class, a tokenizer with rules of its own, and now and then what changes scores."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import CrossEncoder
from tiny import random_reranker, reranker_config
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

WORDS = "yes no alpha beta gamma delta epsilon query: document: system: judge it please".split()
PAIRS = [
    ["alpha beta", "gamma delta"], ["alpha beta", "alpha"], ["alpha", "beta beta beta gamma " * 9], ["gamma " * 40, "alpha"],
    ["gamma " * 30 + "beta", "alpha " * 30 + "delta"], ["alpha", ""], ["delta", "epsilon please it no"],
]  # fmt: skip
ROLES = (
    "{% for message in messages %}{% if message.role == 'system' %}system: {{ message.content }} {% elif "
    "message.role == 'query' %}query: {{ message.content }} {% elif message.role == 'document' %}document: "
    "{{ message.content }} {% endif %}{% endfor %}judge it please{{ eos_token }}"
)
GROUPED: dict[str, Any] = {"num_key_value_heads": 2}
ENCODERS: dict[str, dict[str, Any]] = {
    "Bert": {},
    "Roberta": {"type_vocab_size": 1},
    "XLMRoberta": {"type_vocab_size": 1},
    "Electra": {},
    "DebertaV2": {"type_vocab_size": 0, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "ModernBert": {"eos_token_id": 2, "sep_token_id": 2},
    "MPNet": {},
}
DECODERS: dict[str, dict[str, Any]] = {
    "Llama": GROUPED,
    "Mistral": GROUPED | {"sliding_window": None},
    "Qwen2": GROUPED,
    "Qwen3": GROUPED | {"head_dim": 8},
    "Gemma": GROUPED | {"head_dim": 8},
    "Phi3": GROUPED | {"sliding_window": None},
}
TYPES = {"XLMRoberta": "xlm-roberta", "DebertaV2": "deberta-v2"}


@dataclass
class Rules:
    """Of a tokenizer. pad: its padding token. appends: whether each text of a pair is followed by the end."""

    pad: str = "[PAD]"
    appends: bool = True
    truncation_side: str = "right"
    padding_side: str = "right"
    most: int = 30
    template: str | None = None
    segments: bool = True

    def tokenizer(self) -> PreTrainedTokenizerFast:
        entries = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", *WORDS]
        own = Tokenizer(models.WordLevel({entry: index for index, entry in enumerate(entries)}, "[UNK]"))
        own.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
        end = " [SEP]" if self.appends else ""
        own.post_processor = processors.TemplateProcessing(
            f"[CLS] $A{end}", f"[CLS] $A [SEP] $B:1{end and end + ':1'}", [("[CLS]", 0), ("[SEP]", 2)]
        )
        return PreTrainedTokenizerFast(
            tokenizer_object=own, cls_token="[CLS]", bos_token="[CLS]", pad_token=self.pad, eos_token="[SEP]",
            sep_token="[SEP]", unk_token="[UNK]", truncation_side=self.truncation_side, padding_side=self.padding_side,
            model_max_length=self.most, chat_template=self.template,
            model_input_names=["input_ids", *["token_type_ids"] * self.segments, "attention_mask"],
        )  # fmt: skip


@dataclass
class Plan:
    """A folder to be. name: the class's. values: of the configuration."""

    name: str
    rules: Rules = field(default_factory=Rules)
    values: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def write(self, folder: Path) -> Path:
        tokenizer = self.rules.tokenizer()
        family = self.name.partition("For")[0]
        config = reranker_config(
            self.name, TYPES.get(family, family.lower()),
            **{"vocab_size": len(tokenizer), "num_hidden_layers": 2, "max_position_embeddings": 80}
            | {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": 0, "eos_token_id": 2}
            | (ENCODERS | DECODERS)[family] | self.values,
        )  # fmt: skip
        for part in (random_reranker(config, self.dtype, self.seed), tokenizer):
            part.save_pretrained(folder)
        return folder


def edited(folder: Path, name: str, **values: Any) -> Path:
    """A folder in one of whose files of JSON these values are set."""
    path = folder / name
    path.write_text(json.dumps((json.loads(path.read_text()) if path.is_file() else {}) | values))
    return folder


def theirs(folder: Path, pairs: list[list[str]] = PAIRS) -> np.ndarray:
    """CrossEncoder's logits."""
    return CrossEncoder(str(folder), device="cpu").predict(pairs, activation_fn=torch.nn.Identity())


def add_adapter(folder: Path, seed: int, rank: int = 4, **settings: Any) -> Path:
    """A low-rank adapter that peft saves into the folder of its base; its every matrix does something."""
    import peft
    from transformers import AutoModelForSequenceClassification

    base = AutoModelForSequenceClassification.from_pretrained(folder)
    linear = {name.rpartition(".")[2] for name, module in base.named_modules() if isinstance(module, torch.nn.Linear)}
    targets = sorted(linear & {"query", "value", "q_proj", "v_proj", "qkv_proj", "query_proj", "Wqkv", "q", "v"})
    config = peft.LoraConfig(task_type="SEQ_CLS", r=rank, target_modules=targets, **settings)
    model = peft.get_peft_model(base, config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    return folder


Change = Callable[[Path, np.random.Generator], None]

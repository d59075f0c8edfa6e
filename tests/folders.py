"""Folders of random rerankers: a class, a tokenizer with rules of its own, and now and then what changes scores."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import transformers
from sentence_transformers import CrossEncoder
from tiny import random_reranker, reranker_config
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

WORDS = ("yes", "no", "alpha", "beta", "gamma", "delta", "epsilon", "query:", "document:", "system:", "judge", "it",
         "please")  # fmt: skip
PAIRS = [
    ["alpha beta", "gamma delta"], ["alpha beta", "alpha"], ["alpha", "beta beta beta gamma " * 9], ["alpha", ""],
    ["gamma " * 40, "alpha"], ["gamma " * 30 + "beta", "alpha " * 30 + "delta"], ["delta", "epsilon please it no"],
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
    "Qwen3": GROUPED | {"head_dim": 8},
    "Gemma": GROUPED | {"head_dim": 8},
    "Phi3": GROUPED | {"sliding_window": None},
}
TYPES = {"XLMRoberta": "xlm-roberta", "DebertaV2": "deberta-v2"}


Change = Callable[[Path], Path]


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


def scores_of(model: Any) -> np.ndarray:
    """[2, pairs] logits and scores of a CrossEncoder or of a Reranker."""
    return np.stack([model.predict(PAIRS, activation_fn=torch.nn.Identity()), model.predict(PAIRS)])


def add_adapter(folder: Path, seed: int = 1, rank: int = 4, **settings: Any) -> Path:
    """A low-rank adapter that peft saves into the folder of its base; its every matrix does something."""
    import peft

    for path in folder.glob("adapter_*"):  # else transformers loads it with the base
        path.unlink()
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    base = getattr(transformers, name).from_pretrained(folder)
    linear = {name.rpartition(".")[2] for name, module in base.named_modules() if isinstance(module, torch.nn.Linear)}
    targets = sorted(linear & {"query", "value", "q_proj", "v_proj", "qkv_proj", "query_proj", "Wqkv", "q", "v"})
    task = "CAUSAL_LM" if name.endswith("CausalLM") else "SEQ_CLS"
    config = peft.LoraConfig(task_type=task, r=rank, target_modules=targets, **settings)
    model = peft.get_peft_model(base, config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    return folder


def resaved(folder: Path, **options: Any) -> Path:
    """The folder as sentence-transformers saves it, with its own files."""
    CrossEncoder(str(folder), device="cpu", **options).save_pretrained(str(folder))
    return folder


def in_module(**values: Any) -> Change:
    return lambda folder: edited(resaved(folder), "sentence_bert_config.json", **values)


def in_own(**values: Any) -> Change:
    return lambda folder: edited(resaved(folder), "config_sentence_transformers.json", **values)


def in_config(**values: Any) -> Change:
    return lambda folder: edited(folder, "config.json", **values)


def in_tokenizer(**values: Any) -> Change:
    return lambda folder: edited(folder, "tokenizer_config.json", **values)


def with_index(folder: Path) -> Path:
    """A stale index beside the weights, of another model's file."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    other = {name: torch.randn(tensor.shape) for name, tensor in tensors.items()}
    safetensors.torch.save_file(other, folder / "model-00001-of-00001.safetensors", {"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    return edited(folder, "model.safetensors.index.json", **index)


def without_head(folder: Path) -> Path:
    """Weights that lack the tensors of the score's head."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if ".layer" in name or "embed" in name}
    safetensors.torch.save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


def with_file(name: str) -> Change:
    def change(folder: Path) -> Path:
        safetensors.torch.save_file({"weight": torch.ones(2, 2)}, folder / name, {"format": "pt"})
        return folder

    return change


def adapted(**settings: Any) -> Change:
    return lambda folder: add_adapter(folder, **settings)


CODE = {"AutoModelForSequenceClassification": "model.Own", "AutoModelForCausalLM": "model.Own"}
CHANGES: dict[str, Change] = {
    "prompts": lambda folder: resaved(folder, prompts={"own": "judge ", "": ""}, default_prompt_name="own"),
    "a length": lambda folder: resaved(folder, max_length=14),
    "an activation": in_own(activation_fn="torch.nn.modules.linear.Identity"),
    "an activation of its own": in_own(activation_fn="package.Identity"),
    "another activation": in_own(activation_fn="torch.nn.modules.activation.Tanh"),
    "layers in float32": in_own(keep_in_fp32_modules=["0.model.classifier"]),
    "an embedder": in_own(model_type="SentenceTransformer"),
    "a key that nobody lists": in_own(softmax=True),
    "lower case": in_module(do_lower_case=True),
    "a length of the module": in_module(max_seq_length=11),
    "a length of its texts": in_module(processing_kwargs={"text": {"max_length": 13}}),
    "a stride": in_module(processing_kwargs={"text": {"stride": 2}}),
    "no end behind what is cut": in_module(processing_kwargs={"chat_template": {"restore_suffix": False}}),
    "arguments of the model": in_module(model_kwargs={"attn_implementation": "eager"}),
    "another task": in_module(transformer_task="feature-extraction"),
    "quantised": in_config(quantization_config={"quant_method": "gptq", "bits": 4}),
    "code of its own": in_config(auto_map=CODE),
    "a tokenizer of its own": in_tokenizer(auto_map={"AutoTokenizer": [None, "tokenizer.Own"]}),
    "other weights": in_config(transformers_weights="other.safetensors"),
    "no padding": in_config(pad_token_id=None),
    "padding that is a word": in_config(pad_token_id=6),
    "padding that is the end": in_config(pad_token_id=2),
    "both directions": in_config(is_causal=False),
    "two numbers": in_config(id2label={"0": "no", "1": "yes"}),
    "another type": in_config(architectures=["ElectraForSequenceClassification"]),
    "an activation in config.json": in_config(sentence_transformers={"activation_fn": "torch.nn.Identity"}),
    "an old activation": in_config(sbert_ce_default_activation_function="torch.nn.modules.linear.Identity"),
    "left truncation": in_tokenizer(truncation_side="left"),
    "left padding": in_tokenizer(padding_side="left"),
    "a shorter length": in_tokenizer(model_max_length=9),
    "a processor": lambda folder: edited(folder, "processor_config.json", processor_class="Own"),
    "a stale index": with_index,
    "no head": without_head,
    "a file with a head": with_file("score_head.safetensors"),
    "an adapter's weights alone": with_file("adapter_model.safetensors"),
    "an adapter": adapted(),
    "an adapter of another scale": adapted(use_rslora=True, alpha_pattern={"query|q_proj|q": 3}),
    "an adapter with magnitudes": adapted(use_dora=True),
    "an adapter with biases": adapted(bias="all"),
}  # fmt: skip


def random_folder(seed: int, folder: Path) -> tuple[Path, str]:
    """A folder, and in words what it is: a class, rules of its tokenizer, and up to two changes."""
    rng = np.random.default_rng(seed)
    family = str(rng.choice([*ENCODERS, *DECODERS]))
    causal = family in DECODERS and bool(rng.random() < 0.3)
    rules = Rules(
        pad=str(rng.choice(["[PAD]", "[SEP]"])),
        appends=bool(rng.random() < 0.7),
        truncation_side=str(rng.choice(["right", "left"], p=[0.8, 0.2])),
        padding_side=str(rng.choice(["right", "left"], p=[0.8, 0.2])),
        most=int(rng.integers(9, 60)),
        template=ROLES if causal or rng.random() < 0.25 else None,
        segments=family in ("Bert", "Electra", "MPNet"),
    )
    name = f"{family}For{'CausalLM' if causal else 'SequenceClassification'}"
    Plan(name, rules, seed=seed).write(folder)
    changes = [str(change) for change in rng.choice([*CHANGES], int(rng.integers(0, 3)), replace=False)]
    for change in changes:
        with contextlib.suppress(Exception):  # two changes may not go together
            CHANGES[change](folder)
    return folder, f"{name}, {rules}, {' and '.join(changes) or 'as it is'}"

"""What the files of a model's folder set beside its weights: read here, or refused by the file's and the key's name.

Of sentence-transformers' own files each key is listed, as their set is small. Of config.json and tokenizer_config.json,
which have hundreds, those are listed that change scores and are not applied.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ondevice import adapters

MODULES = "modules.json"
_OWN = "config_sentence_transformers.json"
_TRANSFORMER = (  # of which CrossEncoder reads the first that is there
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)
_PACKAGE = "sentence_transformers."
# Keys that are read, and those that change no score: versions, and what another kind of model has.
_OWN_KEYS = {"activation_fn", "prompts", "default_prompt_name", "model_type", "__version__", "requirements",
             "similarity_fn_name", "truncate_dim"}  # fmt: skip
_TRANSFORMER_KEYS = {"transformer_task", "modality_config", "module_output_name", "max_seq_length", "processing_kwargs",
                     "unpad_inputs", "query_length", "document_length"}  # fmt: skip
_IN_CONFIG = {"activation_fn", "version"}  # of config.json's "sentence_transformers"
_CONFIG = {  # keys of config.json, and what they are
    "quantization_config": "quantised weights",
    "compression_config": "quantised weights",
    "transformers_weights": "weights of another name",
    "pruned_heads": "attention heads that are left out",
}
_PROCESSORS = ("processor_config.json", "preprocessor_config.json")
_HEAD = re.compile(r"head|score|classif", re.IGNORECASE)  # in the name of a file of weights
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
_TEMPLATE = ("truncation", "max_length", "padding", "restore_suffix", "tokenize", "return_dict", "return_tensors")


@dataclass(frozen=True)
class Modules:
    """Of modules.json and the files that it lists.

    limit: most tokens of a row. message: of the chat template, None where pairs are read as texts. template: options
    for it. score: of a LogitScore, None where there is none.
    """

    limit: int | None
    message: Mapping[str, Any] | None
    template: Mapping[str, Any]
    score: Mapping[str, Any] | None


def json_of(path: Path) -> dict[str, Any]:
    """A file's object, {} where there is no file. Raises ValueError where it holds anything else."""
    try:
        read = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (ValueError, RecursionError):
        read = None
    if not isinstance(read, dict):
        raise ValueError(f"{path.name} of {path.parent.name} is damaged: it is no JSON object.")
    return read


def require_applied(spec: str, folder: Path) -> None:
    """Raise ValueError, naming it, where a folder holds or sets what changes scores and is not applied here."""
    config = json_of(folder / "config.json")
    for name, words in _CONFIG.items():
        if config.get(name):
            kind = config[name].get("quant_method") if isinstance(config[name], dict) else None
            raise ValueError(f"config.json of {spec} sets {name} ({kind or words}), which is not applied here.")
    own = config.get("sentence_transformers") or {}
    _require_keys(f"sentence_transformers in config.json of {spec}", own, _IN_CONFIG)
    task = str((config.get("architectures") or [""])[0]).rpartition("For")[2]
    tokenizer = json_of(folder / "tokenizer_config.json")
    for file, names, settings in (
        ("config.json", ("AutoConfig", f"AutoModelFor{task}"), config),
        ("tokenizer_config.json", ("AutoTokenizer", "AutoProcessor"), tokenizer),
    ):
        code = [name for name in names if (settings.get("auto_map") or {}).get(name)]
        if code:
            raise ValueError(f"{file} of {spec} names code of its own (auto_map: {code[0]}), which is not run here.")
    for name in _PROCESSORS:
        if (folder / name).is_file():
            raise ValueError(f"{spec} has a {name}, so it reads more than texts, which is not done here.")
    for path in sorted(folder.iterdir()):
        if path.name.startswith("adapter_model.") and not (folder / adapters.CONFIG).is_file():
            raise ValueError(f"{spec} has {path.name} without {adapters.CONFIG}, so it cannot be applied.")
        if path.suffix in _WEIGHTS and _HEAD.search(path.stem):
            raise ValueError(f"{spec} has a head of its own in {path.name}, which is not applied here.")


def own_settings(spec: str, folder: Path) -> dict[str, Any]:
    """What sentence-transformers keeps of the whole model: prompts, activation."""
    own = json_of(folder / _OWN)
    kind = own.get("model_type", "SentenceTransformer")
    if kind != "CrossEncoder":
        raise ValueError(f"{_OWN} of {spec} is of a {kind}, which gives no score of a pair; a CrossEncoder does.")
    _require_keys(f"{_OWN} of {spec}", own, _OWN_KEYS)
    return own


def module_settings(spec: str, folder: Path, causal: bool) -> Modules:
    """What modules.json and the files that it lists say."""
    try:
        modules = json.loads((folder / MODULES).read_text(encoding="utf-8"))
        names = [str(module["type"]) for module in modules]
        paths = [str(module["path"]) for module in modules]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{MODULES} of {spec} is damaged: it is no list of modules with a type and a path.") from None
    kinds = [name.rpartition(".")[2] if name.startswith(_PACKAGE) else name for name in names]
    wanted = ["Transformer", "LogitScore"] if causal else ["Transformer"]
    if kinds != wanted or paths[0]:
        read = " and a ".join(wanted)
        raise ValueError(f"{spec} has the modules {', '.join(kinds)}: of such a model a {read} are read.")
    file = next((name for name in _TRANSFORMER if json_of(folder / name)), _TRANSFORMER[0])
    module = json_of(folder / file)
    _require_keys(f"{file} of {spec}", module, _TRANSFORMER_KEYS)
    task, output, field = (
        ("text-generation", "causal_logits", "logits") if causal else ("sequence-classification", "scores", "logits")
    )
    modality = module.get("modality_config") or {}
    right = {"transformer_task": task, "module_output_name": output}
    odd = [name for name, value in right.items() if module.get(name, value) != value]
    odd += [
        f"modality_config.{name}"
        for name, entry in modality.items()
        if (entry.get("method"), entry.get("method_output_name")) != ("forward", field)
    ]
    processing = {name: dict(value) for name, value in (module.get("processing_kwargs") or {}).items() if value}
    limit = processing.get("text", {}).pop("max_length", None) or module.get("max_seq_length")
    template = processing.pop("chat_template", {})
    odd += [f"processing_kwargs.{name}.{key}" for name, value in processing.items() for key in value]
    odd += [f"processing_kwargs.chat_template.{name}" for name in _TEMPLATE if name in template]
    if odd:
        raise ValueError(f"{spec} sets {odd[0]} in {file}, which is not applied here.")
    return Modules(limit, modality.get("message"), template, _score(spec, folder / paths[1]) if causal else None)


def _score(spec: str, folder: Path) -> dict[str, Any]:
    """A LogitScore's tokens."""
    score = json_of(folder / "config.json")
    named = score.get("module_input_name", "causal_logits")
    if named != "causal_logits" or "true_token_id" not in score:
        raise ValueError(f"{spec} has a LogitScore that is not of a causal language model's logits.")
    _require_keys(f"LogitScore of {spec}", score, {"true_token_id", "false_token_id", "module_input_name"})
    return score


def _require_keys(where: str, settings: Mapping[str, Any], applied: Iterable[str]) -> None:
    """Raise ValueError, naming it, on a key that is set and not listed."""
    odd = [name for name, value in settings.items() if name not in applied and value not in (None, False, {}, [])]
    if odd:
        raise ValueError(f"{where} sets {odd[0]}, which is not applied here.")

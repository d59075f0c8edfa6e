"""A model's configuration, tokenizer and activation from its folder, with one sentence where something is missing.

transformers' modelling code takes 80 MB once it is imported: here, before any budget begins to count.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
import transformers.modeling_utils
from torch import Tensor

from ondevice import shapes
from ondevice_papers.grating.reading import RECIPES, Chat, Form, Prompted, TextPair, answer_ids

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

Activation = Callable[[Tensor], Tensor]
_STRUCTURED = ("content[0]", ".type", "'type'", '"type"', "message.content[")
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


@dataclass(frozen=True)
class Scoring:
    """How a folder makes a score of a pair, as sentence-transformers' CrossEncoder reads it.

    answers: ids that a causal LM is read at. recipe: of `reading.RECIPES`, else the pair of texts or, with `chat`, the
    chat template. structured, options: of the template. limit: most tokens of a row. prompts: by name; default: the
    name of the one that is used. activation: a name of torch.nn, None where the files name none.
    """

    answers: tuple[int, ...] | None
    recipe: str | None = None
    chat: bool = False
    structured: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    limit: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default: str | None = None
    activation: str | None = None

    def form(self, tokenizer: PreTrainedTokenizerBase, most: int, prompt: str | None) -> Form:
        """Its form of pairs, of at most so many tokens."""
        if self.recipe:
            return Prompted(tokenizer, most, prompt, RECIPES[self.recipe])
        if self.chat:
            return Chat(tokenizer, most, prompt, self.structured, self.options)
        return TextPair(tokenizer, most, prompt)


def scoring(
    spec: str, folder: Path, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, recipe: str | None = None
) -> Scoring:
    """What the folder's files say of scores. recipe: of `reading.RECIPES`, in place of a prompt that is not saved.

    Raises ValueError, naming it, on anything that is not reproduced here.
    """
    listed = folder / "modules.json"
    own = _json(folder / "config_sentence_transformers.json") if listed.is_file() else {}
    named = own.get("activation_fn") or (getattr(config, "sentence_transformers", None) or {}).get("activation_fn")
    named = named or getattr(config, "sbert_ce_default_activation_function", None)
    prompts = {name: prompt or "" for name, prompt in (own.get("prompts") or {}).items()}
    scoring = Scoring(None, prompts=prompts, default=own.get("default_prompt_name"), activation=named)
    causal = (config.architectures or [""])[0].endswith("ForCausalLM")
    marked = getattr(config, shapes.MARK, False)  # random weights, for time and memory, with a tokenizer of bytes
    recipe = "qwen3-reranker" if marked and causal and recipe is None else recipe
    if recipe is not None:
        if recipe not in RECIPES:
            raise ValueError(f"There is no recipe {recipe!r}; there are {', '.join(RECIPES)}.")
        if not causal:
            raise ValueError(f"A recipe is for a causal language model, which {spec} is not.")
        words = RECIPES[recipe].answers
        ids = tuple(tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in words)
        return replace(scoring, answers=ids if marked else answer_ids(tokenizer, words), recipe=recipe)
    scoring = _modular(spec, folder, listed, scoring) if listed.is_file() else _plain(tokenizer, scoring, causal)
    if causal and scoring.answers is None:
        saved = ", ".join(RECIPES)
        raise ValueError(
            f"{spec} is a causal language model, and no file of it says how it scores a pair: name a recipe ({saved})."
        )
    if scoring.chat:
        scoring.form(tokenizer, 1, None).require_roles()  # type: ignore[attr-defined]
    return scoring


def _plain(tokenizer: PreTrainedTokenizerBase, scoring: Scoring, causal: bool) -> Scoring:
    """Of a folder that sentence-transformers has not saved: its chat template, where it has one, and yes and no."""
    template = getattr(tokenizer, "chat_template", None)
    if template is None:
        return scoring
    scoring = replace(scoring, chat=True, structured=_is_structured(template))
    return replace(scoring, answers=answer_ids(tokenizer, ("yes", "no"))) if causal else scoring


def _modular(spec: str, folder: Path, listed: Path, scoring: Scoring) -> Scoring:
    """Of a folder with a list of modules."""
    modules = json.loads(listed.read_text(encoding="utf-8"))
    names = [str(module["type"]).rpartition(".")[2] for module in modules]
    if names not in (["Transformer"], ["Transformer", "LogitScore"]) or modules[0].get("path"):
        raise ValueError(f"{spec} has the modules {', '.join(names)}: what is read is a Transformer and a LogitScore.")
    if len(names) == 2:
        score = _json(folder / modules[1]["path"] / "config.json")
        if score.get("module_input_name", "causal_logits") != "causal_logits" or "true_token_id" not in score:
            raise ValueError(f"{spec} has a LogitScore that is not of a causal language model's logits.")
        ids = [score["true_token_id"], score.get("false_token_id")]
        scoring = replace(scoring, answers=tuple(index for index in ids if index is not None))
    module = _json(folder / "sentence_bert_config.json")
    chat = (module.get("modality_config") or {}).get("message")
    processing = {name: dict(value) for name, value in (module.get("processing_kwargs") or {}).items() if value}
    limit = processing.get("text", {}).pop("max_length", None) or module.get("max_seq_length")
    options = processing.pop("chat_template", {})
    odd = [f"processing_kwargs.{name}" for name, value in processing.items() if value]
    odd += [name for name in ("do_lower_case", "query_expansion") if module.get(name)]
    odd += [name for name in ("truncation", "max_length", "padding") if name in options]
    if odd:
        raise ValueError(f"{spec} sets {odd[0]} in sentence_bert_config.json, which is not read here.")
    scoring = replace(scoring, limit=limit)
    return replace(scoring, chat=True, structured=chat.get("format") != "flat", options=options) if chat else scoring


def _is_structured(template: Any) -> bool:
    """Whether a chat template reads a content of several parts, told by its text as sentence-transformers does."""
    return not isinstance(template, str) or any(mark in template for mark in _STRUCTURED)


def activation(scoring: Scoring) -> Activation:
    """Sigmoid, or what the model's files name. Raises ValueError on any other name."""
    kind = "Sigmoid" if scoring.activation is None else str(scoring.activation).rpartition(".")[2]
    if kind not in ("Sigmoid", "Identity"):
        raise ValueError(f"The model's scores are made by {scoring.activation}, which is not Sigmoid or Identity.")
    return torch.nn.Sigmoid() if kind == "Sigmoid" else torch.nn.Identity()


def _json(path: Path) -> dict[str, Any]:
    """A file's object, {} where there is no file."""
    try:
        read = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError:
        read = None
    if not isinstance(read, dict):
        raise ValueError(f"{path.name} is damaged: it is no JSON object.")
    return read


def _line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:200]

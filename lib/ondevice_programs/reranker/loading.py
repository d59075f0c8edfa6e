"""A model's configuration, tokenizer and activation from its folder, with one sentence where something is missing.

transformers' modelling code takes 80 MB once it is imported: here, before any budget begins to count.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
import transformers.modeling_utils
from torch import Tensor

from ondevice import shapes
from ondevice_papers.grating.architectures import Architecture
from ondevice_papers.grating.checkpoint import Checkpoint
from ondevice_programs.reranker.reading import RECIPES, Chat, Form, Prompted, Side, TextPair, answer_ids
from ondevice_programs.reranker.settings import MODULES, module_settings, own_settings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

Activation = Callable[[Tensor], Tensor]
_STRUCTURED = ("content[0]", ".type", "'type'", '"type"', "message.content[")
_FLAT = ("apertus", "deepseek_v3", "gpt_oss", "seed_oss")  # types of models whose templates have content as a text
for _name in (  # and what all models' code is built on
    "Qwen3ForCausalLM",
    "BertForSequenceClassification",
    "AutoModelForCausalLM",
    "AutoModelForSequenceClassification",
):
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
    name of the one that is used. activation: a name of torch.nn, None where the files name none. side: where a row is
    cut.
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
    side: Side = field(default="right", repr=False)  # apart from a certificate's digest of all others

    def form(self, tokenizer: PreTrainedTokenizerBase, most: int, prompt: str | None) -> Form:
        """Its form of pairs, of at most so many tokens."""
        if self.recipe:
            return Prompted(tokenizer, most, prompt, RECIPES[self.recipe], side=self.side)
        if self.chat:
            return Chat(tokenizer, most, prompt, self.structured, self.options, side=self.side)
        return TextPair(tokenizer, most, prompt, side=self.side)


def scoring(
    spec: str, folder: Path, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, recipe: str | None = None
) -> Scoring:
    """What the folder's files say of scores. recipe: of `reading.RECIPES`, in place of a prompt that is not saved.

    Raises ValueError, naming it, on anything that is not reproduced here.
    """
    listed = folder / MODULES
    own = own_settings(spec, folder) if listed.is_file() else {}
    named = own.get("activation_fn") or (getattr(config, "sentence_transformers", None) or {}).get("activation_fn")
    named = named or getattr(config, "sbert_ce_default_activation_function", None)
    prompts = {name: prompt or "" for name, prompt in (own.get("prompts") or {}).items()}
    side: Side = "left" if tokenizer.truncation_side == "left" else "right"
    scoring = Scoring(None, prompts=prompts, default=own.get("default_prompt_name"), activation=named, side=side)
    causal = (config.architectures or [""])[0].endswith("ForCausalLM")
    _require_class(spec, config, causal)
    marked = getattr(config, shapes.MARK, False)  # random weights, for time and memory, with a tokenizer of bytes
    recipe = "qwen3-reranker" if marked and causal and recipe is None else recipe
    if recipe is not None:
        if not causal:
            raise ValueError(f"A recipe is for a causal language model, which {spec} is not.")
        words = RECIPES[recipe].answers
        ids = tuple(tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in words)
        return replace(scoring, answers=ids if marked else answer_ids(tokenizer, words), recipe=recipe)
    if listed.is_file():
        scoring = _modular(spec, folder, scoring, causal, config.model_type, tokenizer)
    else:
        scoring = _plain(tokenizer, scoring, causal, config.model_type)
    if causal and scoring.answers is None:
        raise ValueError(
            f"{spec} is a causal language model, and no file of it says how it scores a pair: name its recipe "
            f"({_fitting(tokenizer)}), with --recipe in the command ondevice-rerank, or recipe= in Python."
        )
    if scoring.chat:
        scoring.form(tokenizer, 1, None).require_roles()  # type: ignore[attr-defined]
    return scoring


def _require_class(spec: str, config: PreTrainedConfig, causal: bool) -> None:
    """Raise ValueError where the configuration's type has another class, which CrossEncoder would build."""
    kind = transformers.AutoModelForCausalLM if causal else transformers.AutoModelForSequenceClassification
    built = kind._model_mapping.get(type(config), None)
    named = (config.architectures or [""])[0]
    scored = named.endswith(("ForSequenceClassification", "ForCausalLM")) and hasattr(transformers, named)
    if scored and isinstance(built, type) and built.__name__ != named:
        raise ValueError(f"config.json of {spec} names {named}, but its type {config.model_type} has {built.__name__}.")


def _fitting(tokenizer: PreTrainedTokenizerBase) -> str:
    """The recipes whose answers are a token each."""
    fitting = []
    for name, recipe in RECIPES.items():
        with contextlib.suppress(ValueError):
            answer_ids(tokenizer, recipe.answers)
            fitting.append(name)
    return ", ".join(fitting) or f"none of {', '.join(RECIPES)} fits its tokenizer"


def _plain(tokenizer: PreTrainedTokenizerBase, scoring: Scoring, causal: bool, kind: str) -> Scoring:
    """Of a folder that sentence-transformers has not saved: its chat template, where it has one, and yes and no."""
    template = getattr(tokenizer, "chat_template", None)
    if template is None:
        return scoring
    scoring = replace(scoring, chat=True, structured=_is_structured(template, kind))
    return replace(scoring, answers=_entries(tokenizer, ("yes", "no"))) if causal else scoring


def _entries(tokenizer: PreTrainedTokenizerBase, words: tuple[str, ...]) -> tuple[int, ...]:
    """Ids of words that are entries of the vocabulary, as CrossEncoder looks them up."""
    ids: Any = tokenizer.convert_tokens_to_ids(list(words))
    if any(index is None or index == tokenizer.unk_token_id for index in ids):
        raise ValueError(f"{' and '.join(map(repr, words))} are no entries of the tokenizer's vocabulary.")
    return tuple(ids)


def _modular(
    spec: str, folder: Path, scoring: Scoring, causal: bool, kind: str, tokenizer: PreTrainedTokenizerBase
) -> Scoring:
    """Of a folder with a list of modules."""
    modules = module_settings(spec, folder, causal)
    if modules.score is not None:
        ids = [modules.score["true_token_id"], modules.score.get("false_token_id")]
        scoring = replace(scoring, answers=tuple(index for index in ids if index is not None))
    scoring = replace(scoring, limit=modules.limit)
    if modules.message is None:
        return scoring
    form = modules.message.get("format", "auto")
    structured = _is_structured(tokenizer.chat_template, kind) if form == "auto" else form != "flat"
    return replace(scoring, chat=True, structured=structured, options=modules.template)


def _is_structured(template: Any, kind: str) -> bool:
    """Whether a chat template reads a content of several parts, told by its text as sentence-transformers does."""
    if kind in _FLAT:
        return False
    return not isinstance(template, str) or any(mark in template for mark in _STRUCTURED)


def require_fitting(
    spec: str, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, model: Architecture, checkpoint: Checkpoint
) -> None:
    """Raise ValueError where tokenizer, configuration and weights do not go together, which no other check says."""
    if not model.causal and tokenizer.padding_side == "left":
        raise ValueError(f"The tokenizer of {spec} pads on the left (padding_side), where an encoder reads.")
    groups = checkpoint.groups
    model.require_rest({name: tensor.shape for name, tensor in groups.rest.items()})
    tied = getattr(config, "tie_word_embeddings", True)
    if model.answers is not None and groups.head is None and not tied:
        raise ValueError(f"The weights of {spec} lack lm_head.weight, and its config.json does not tie it.")


def activation(scoring: Scoring) -> Activation:
    """Sigmoid, or what the model's files name. Raises ValueError on any other name."""
    package, _, kind = ("torch.nn.Sigmoid" if scoring.activation is None else str(scoring.activation)).rpartition(".")
    if kind not in ("Sigmoid", "Identity") or not package.startswith("torch.nn"):
        raise ValueError(f"The model's scores are made by {scoring.activation}, which is not Sigmoid or Identity.")
    return torch.nn.Sigmoid() if kind == "Sigmoid" else torch.nn.Identity()


def _line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:200]

"""Which cross-encoders can be run layer by layer, how, and what they read.

A layer is transformers' own module, built without memory (on torch's meta device) and called with parameters from
wherever they are, so the arithmetic is the library's. What a reranker never needs is left out: a cache, logits of any
token but the one it is pooled at, and of a causal LM's vocabulary all but "yes" and "no".
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"  # Qwen3-Reranker's default
PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_LONGEST_PROMPT = 8192  # tokens; published with the prompt

# Class named in config.json: the trunk's name, and whether it is a decoder, pooled at the last token.
_KINDS = {
    "BertForSequenceClassification": ("bert", False),
    "RobertaForSequenceClassification": ("roberta", False),
    "XLMRobertaForSequenceClassification": ("roberta", False),
    "LlamaForSequenceClassification": ("model", True),
    "Qwen2ForSequenceClassification": ("model", True),
    "Qwen3ForSequenceClassification": ("model", True),
    "LlamaForCausalLM": ("model", True),
    "Qwen2ForCausalLM": ("model", True),
    "Qwen3ForCausalLM": ("model", True),
}
_ROPES = ("default", "linear", "llama3", "yarn")  # in others a token's rotation depends on the longest row beside it
_ENCODER_INPUTS = ("position_embeddings.weight", "token_type_embeddings.weight", "LayerNorm.weight", "LayerNorm.bias")
_POOLER = ("pooler.dense.weight", "pooler.dense.bias")
_BERT_HEAD = ("classifier.weight", "classifier.bias")
_ROBERTA_HEAD = (
    "classifier.dense.weight", "classifier.dense.bias", "classifier.out_proj.weight", "classifier.out_proj.bias",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """Token ids of a query-document pair. border: where an encoder's second segment begins, else its length."""

    ids: tuple[int, ...]
    border: int


@dataclass(frozen=True)
class Batch:
    """Rows of a chunk, padded on the right."""

    rows: Sequence[Row]

    @cached_property
    def lengths(self) -> Tensor:
        """[n] int64 real tokens of each row."""
        return torch.tensor([len(row.ids) for row in self.rows])

    @cached_property
    def real(self) -> Tensor:
        """[n, width] bool: which places hold a token and no padding."""
        return torch.arange(int(self.lengths.max())) < self.lengths[:, None]

    @cached_property
    def ids(self) -> Tensor:
        """[tokens] int64 ids of the real tokens, row by row."""
        return torch.tensor([token for row in self.rows for token in row.ids])

    @property
    def segments(self) -> Tensor:
        """[n, width] int64: 1 from each row's border on."""
        borders = torch.tensor([[row.border] for row in self.rows])
        return ((torch.arange(self.real.shape[1]) >= borders) & self.real).long()


class Architecture:
    """A reranker without its weights: embeddings, layers and head, each called with the tensors it needs.

    config: a transformers configuration. answers: ids of "yes" and "no", at which a causal LM is read.
    layers; width: of a hidden state; causal: decoder-only, pooled at the last token; longest: most tokens of a row.
    Rows are padded on the right, whatever the tokenizer says: positions start at 0 in every row, a decoder needs no
    mask, and a score does not depend on the rows beside it. Left padding, which decoder-only rerankers are published
    with, differs from this by rounding only, as their positions are relative.
    Raises ValueError, naming it, on what cannot be run so.
    """

    def __init__(self, config: PreTrainedConfig, answers: tuple[int, int] | None = None) -> None:
        import transformers

        self.name = (config.architectures or ["a model without an architecture"])[0]
        if self.name not in _KINDS:
            raise ValueError(f"{self.name} cannot be run layer by layer; what can: {', '.join(_KINDS)}.")
        self._prefix, self.causal = _KINDS[self.name]
        _require_plain(config, self.name, self.causal)
        _require_score(config, self.name, answers)
        self.config, self.answers = config, answers
        self.layers, self.width = int(config.num_hidden_layers), int(config.hidden_size)
        self.vocabulary = int(config.vocab_size)
        small = copy.deepcopy(config)
        small.num_hidden_layers, small._attn_implementation = 1, "sdpa"
        with torch.device("meta"):
            self._model: Any = getattr(transformers, self.name)(small).eval()
        self._trunk = getattr(self._model, self._prefix)
        self._layer: nn.Module = self._trunk.layers[0] if self.causal else self._trunk.encoder.layer[0]
        self._rotary = type(self._trunk.rotary_emb)(small) if self.causal else None
        self._shapes = {name: value.shape for name, value in self._layer.named_parameters()}

    @property
    def longest(self) -> int:
        """Most tokens of a row; RoBERTa's positions begin after the padding token's."""
        reserved = int(self.config.pad_token_id) + 1 if self._prefix == "roberta" else 0
        return int(self.config.max_position_embeddings) - reserved

    def check_layer(self, index: int, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        """Raise ValueError where parameters are not those of a layer of this architecture and dtype."""
        found = {name: value.shape for name, value in parameters.items()}
        odd = sorted(name for name in found.keys() | self._shapes.keys() if found.get(name) != self._shapes.get(name))
        if odd:
            there, wanted = (_shown(shapes.get(odd[0])) for shapes in (found, self._shapes))
            raise ValueError(f"Layer {index} does not fit {self.name}: {odd[0]} is {there}, not {wanted}.")
        mixed = [name for name, value in parameters.items() if value.is_floating_point() and value.dtype != dtype]
        if mixed:
            raise ValueError(f"Layer {index}'s {mixed[0]} is {parameters[mixed[0]].dtype}, the embeddings are {dtype}.")

    def embed(self, rest: Mapping[str, Tensor], batch: Batch, rows: Tensor) -> Tensor:
        """[n, width, d] what the first layer reads. rows: [tokens, d] embedding rows of `batch.ids`."""
        embedded = rows.new_zeros(*batch.real.shape, rows.shape[1])
        embedded[batch.real] = rows
        if self.causal:
            return embedded
        places = torch.arange(batch.real.shape[1]).expand(batch.real.shape)
        if self._prefix == "roberta":
            places = (places + 1) * batch.real + self.config.pad_token_id
        types = batch.segments if self.config.type_vocab_size > 1 else torch.zeros_like(batch.segments)
        found = self._taken(rest, f"{self._prefix}.embeddings.", _ENCODER_INPUTS)
        extra = {"inputs_embeds": embedded, "token_type_ids": types, "position_ids": places}
        return functional_call(self._trunk.embeddings, found, (), extra)

    def forward(self, parameters: Mapping[str, Tensor], batch: Batch, hidden: Tensor) -> Tensor:
        """[n, width, d] a layer's output. hidden: [n, width, d] the output of the layer before."""
        found = dict(parameters)
        if self._rotary is None:
            mask = None if bool(batch.real.all()) else batch.real[:, None, None, :]
            return functional_call(self._layer, found, (hidden, mask))
        places = torch.arange(hidden.shape[1])[None]
        # With no mask, attention is causal: a row's padding comes after all that is read of it.
        extra = {"attention_mask": None, "position_ids": places, "position_embeddings": self._rotary(hidden, places)}
        return functional_call(self._layer, found, (hidden,), extra)

    def pooled(self, batch: Batch, hidden: Tensor) -> Tensor:
        """[n, d] a copy of the states that scores are made of: each row's last real token, or an encoder's first."""
        at = batch.lengths - 1 if self.causal else torch.zeros_like(batch.lengths)
        return hidden[torch.arange(len(at)), at]

    def head(self, rest: Mapping[str, Tensor], answer_rows: Tensor | None = None) -> dict[str, Tensor]:
        """The tensors that `scores` needs, copied, in float32 (or wider).

        answer_rows: [2, d] output rows of "yes" and "no", where there are answers.
        """
        if self.answers is not None:
            if answer_rows is None:
                raise ValueError(f'{self.name} needs the output rows of "yes" and "no".')
            found = self._taken(rest, "model.", ("norm.weight",)) | {"rows": answer_rows}
        elif self.causal:
            found = self._taken(rest, "model.", ("norm.weight",))
            found["rows"] = self._taken(rest, "", ("score.weight",))["score.weight"]
        elif self._prefix == "bert":
            found = self._taken(rest, "bert.", _POOLER) | self._taken(rest, "", _BERT_HEAD)
        else:
            found = self._taken(rest, "", _ROBERTA_HEAD)
        wide = torch.promote_types(next(iter(found.values())).dtype, torch.float32)
        return {name: value.to(wide, copy=True) for name, value in found.items()}

    def scores(self, head: Mapping[str, Tensor], states: Tensor) -> Tensor:
        """[n] logits z by the model's own norm and head (sections 3.1 and 4.1). states: [n, d] of any layer.

        A causal LM's is logit("yes") - logit("no"): sigmoid(z) is the probability of "yes" among the two.
        Every product is of two dimensions, as one of three with weights that need no gradient takes a slow path.
        """
        states = states.to(next(iter(head.values())).dtype)
        if self.causal:
            normed = functional_call(self._trunk.norm, {"weight": head["norm.weight"]}, (states,))
            logits = functional.linear(normed, head["rows"])
            return logits[:, 0] if self.answers is None else logits[:, 0] - logits[:, 1]
        if self._prefix == "bert":
            pooler = {name.removeprefix("pooler."): head[name] for name in _POOLER}
            pooled = functional_call(self._trunk.pooler, pooler, (states[:, None],))
            return functional.linear(pooled, *(head[name] for name in _BERT_HEAD))[:, 0]
        own = {name.removeprefix("classifier."): head[name] for name in _ROBERTA_HEAD}
        return functional_call(self._model.classifier, own, (states[:, None],))[:, 0]

    def _taken(self, rest: Mapping[str, Tensor], prefix: str, names: Sequence[str]) -> dict[str, Tensor]:
        for name in names:
            if prefix + name not in rest:
                raise ValueError(f"The weights of {self.name} lack {prefix + name}.")
        return {name: rest[prefix + name] for name in names}


def _require_plain(config: PreTrainedConfig, name: str, causal: bool) -> None:
    """Refuse variants in which layers differ from each other or read more than their input."""
    if causal:
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise ValueError(f"{name} has layers of {', '.join(sorted(kinds))}; only full_attention can be run.")
        rope = (config.rope_parameters or {}).get("rope_type", "default")
        if rope not in _ROPES:
            raise ValueError(f"{name} has rotary positions of type {rope!r}; what can be run: {', '.join(_ROPES)}.")
    elif config.is_decoder or config.add_cross_attention:
        raise ValueError(f"{name} is configured as a decoder (is_decoder or add_cross_attention), not as an encoder.")


def _require_score(config: PreTrainedConfig, name: str, answers: tuple[int, int] | None) -> None:
    """Refuse models that do not give one score a row."""
    if name.endswith("ForCausalLM"):
        if answers is None:
            raise ValueError(f'{name} is scored by the logits of "yes" and "no": give the ids of both.')
        odd = [token for token in answers if not 0 <= token < config.vocab_size]
        if odd or answers[0] == answers[1]:
            raise ValueError(f"The answers' ids {answers} are not two different ones below {config.vocab_size}.")
    elif answers is not None:
        raise ValueError(f"{name} has a head of its own; it takes no ids of answers, such as {answers}.")
    elif config.num_labels != 1:
        raise ValueError(f"{name} gives {config.num_labels} numbers a row; a reranker gives one.")


def _shown(shape: torch.Size | None) -> str:
    return "missing" if shape is None else str(list(shape))


# What a model reads


@dataclass(frozen=True)
class Encoded:
    """Rows of a query's candidates in their order. truncated: of how many the document was cut."""

    rows: list[Row]
    truncated: int


def answer_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """Ids of "yes" and "no". Raises ValueError where one of them is not a single token."""
    found = [tokenizer(word, add_special_tokens=False)["input_ids"] for word in ("yes", "no")]
    if any(len(ids) != 1 for ids in found):
        raise ValueError(f'"yes" and "no" are not a token each, but {found}.')
    return found[0][0], found[1][0]


def encode(
    architecture: Architecture, tokenizer: PreTrainedTokenizerBase, query: str, documents: Sequence[str],
    longest: int | None = None, instruction: str = INSTRUCTION,
) -> Encoded:  # fmt: skip
    """A query with each of its candidates as a row of tokens, in the format that the model was trained on.

    Causal LMs read Qwen3-Reranker's published prompt, with the instruction. Others read the tokenizer's pair of query
    and document. longest: most tokens of a row; by default 8192 or the tokenizer's limit, and never above the model's.
    Longer documents lose their end, and are counted.
    Raises ValueError on an empty query or document, and where no room is left for a document.
    """
    if not query.strip():
        raise ValueError("The query is empty.")
    for index, document in enumerate(documents):
        if not document.strip():
            raise ValueError(f"Document {index} is empty.")
    if longest is not None and longest > architecture.longest:
        raise ValueError(f"Rows of {longest} tokens exceed the {architecture.longest} of {architecture.name}.")
    if not documents:
        return Encoded([], 0)
    if architecture.answers is not None:
        return _prompts(architecture, tokenizer, query, documents, longest, instruction)
    return _pairs(architecture, tokenizer, query, documents, longest)


def _prompts(
    architecture: Architecture, tokenizer: PreTrainedTokenizerBase, query: str, documents: Sequence[str],
    longest: int | None, instruction: str,
) -> Encoded:  # fmt: skip
    most = min(_LONGEST_PROMPT, architecture.longest) if longest is None else longest
    start, asked, end = (
        tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in (PREFIX, f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>:", SUFFIX)
    )
    _require_room(len(start) + len(asked) + len(end), most)
    texts = [f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}" for document in documents]
    bodies = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    room = most - len(start) - len(end)
    rows = [(*start, *body[:room], *end) for body in bodies]
    return Encoded([Row(row, len(row)) for row in rows], sum(len(body) > room for body in bodies))


def _pairs(
    architecture: Architecture, tokenizer: PreTrainedTokenizerBase, query: str, documents: Sequence[str],
    longest: int | None,
) -> Encoded:  # fmt: skip
    most = min(int(tokenizer.model_max_length), architecture.longest) if longest is None else longest
    asked = tokenizer(query, add_special_tokens=False, verbose=False)["input_ids"]
    _require_room(len(asked) + tokenizer.num_special_tokens_to_add(pair=True), most)
    found = tokenizer([query] * len(documents), list(documents), verbose=False)
    segments = found["token_type_ids"] if "token_type_ids" in found else [[]] * len(documents)
    rows, truncated = [], 0
    for index, document in enumerate(documents):
        ids, types = found["input_ids"][index], segments[index]
        if len(ids) > most:
            one = tokenizer(query, document, truncation="only_second", max_length=most)
            ids, types, truncated = one["input_ids"], segments[index][: len(one["input_ids"])], truncated + 1
        rows.append(Row(tuple(ids), types.index(1) if 1 in types else len(ids)))
    return Encoded(rows, truncated)


def _require_room(taken: int, most: int) -> None:
    if taken >= most:
        raise ValueError(f"The query and its format take {taken} of {most} tokens: no room is left for a document.")

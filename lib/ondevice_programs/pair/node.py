"""What a side brings to every session: its model, its documents and how prompts are made of them."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ondevice import chat, models
from ondevice.causal_lm import CausalLM, support
from ondevice.digests import tokenizer_digest, weights_digest
from ondevice_papers.dragon.aggregation import document_weights
from ondevice_papers.dragon.batch import PaddedCache
from ondevice_papers.dragon.kv_store import KVStore
from ondevice_papers.dragon.messages import VERSION, Cited, Hello
from ondevice_programs.pair.decoder import Decoder, RowStore, Template
from ondevice_programs.pair.engine import ModelThread
from ondevice_programs.pair.guard import LENGTH, Guard
from ondevice_programs.pair.prefixes import Prefixes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ondevice.retrieval import SparseIndex

PLAIN = Template("{document}\n\nQuestion: {query}\nAnswer:")  # of a model without a chat template
# Of four wordings the one with which SmolLM2 alone had most of 24 validation notes right, 16.
MESSAGE = "{document}\n\nAnswer in a few words, with the exact words of the text above. {query}"
WEIGHT_TEMPERATURE = 1 / 32  # of relevance, chosen on 240 validation questions about documentation
EMPTY = -1e3  # log h of a side without documents: the other side's share is 1 in float64


def template_of(tokenizer: PreTrainedTokenizerBase) -> Template:
    """How a model reads a passage and a question: by its chat template, where it has one.

    Raises ValueError on a chat template that does not show a message as it is.
    """
    if tokenizer.chat_template is None:
        return PLAIN
    text = chat.prompt_text(tokenizer, MESSAGE)
    begin = tokenizer.bos_token
    if begin is not None and list(tokenizer("a").input_ids[:1]) == [tokenizer.bos_token_id]:
        text = text.removeprefix(str(begin))  # `Template.prefix` puts it
    return Template(text)


@dataclass(frozen=True)
class Source:
    """Where a document was found, so that it can be cited.

    file: its path, relative to the folder that was read; of the corpus, a qualified name. paragraph: its number from 1;
    of notebooks the cell, of PDF the page, of JSON lines the line.
    """

    file: str
    paragraph: int


@dataclass(frozen=True)
class Documents:
    """A side's own documents, perhaps none, and their index. sources: of each text, or none."""

    texts: Sequence[str]
    index: SparseIndex
    sources: Sequence[Source] = ()

    @property
    def relevance(self) -> str:
        """What scores are made by; the other side's are made by the same."""
        return "BM25's share of the question"

    def best(self, query: str, k: int) -> tuple[list[str], list[float]]:
        """The k most relevant texts and their relevance, best first; all where there are fewer than k, perhaps none.

        Relevance is the score over its ceiling, the share of the query that a text covers: scores of two corpora cannot
        be compared, as a word's weight grows with the number of texts. Raises ValueError on k below 1 and on a query
        without text.
        """
        indices, scores = self.positions(query, k)
        return [self.texts[index] for index in indices], scores

    def positions(self, query: str, k: int) -> tuple[list[int], list[float]]:
        """The same as indices into `texts`."""
        if k < 1:
            raise ValueError(f"A query retrieves at least one document, not {k}.")
        if not query.strip():
            raise ValueError("The query is empty.")
        if not self.texts:
            return [], []
        scores, indices = self.index.search([query], min(k, len(self.texts)))
        most = self.index.ceiling(query) or 1.0  # 0 of a query without words
        return [int(index) for index in indices[0]], [float(score) / most for score in scores[0]]


@dataclass(eq=False)
class Node:
    """One side, before and between sessions.

    template: how passage and question stand in a prompt; None: as of `template_of`.
    weight_temperature: what relevance is divided by before documents are weighed; both sides need the same.
    store: where documents' rows are kept on disk. memory: where they are in memory. cache: where sessions' rows are.
    longest: most tokens of a document in a prompt; what is beyond is cut off.
    name: of the model, as users know it; of a path the last part is shown to the other side.
    engine: runs the model, for all sessions of this side.
    decodes: what makes a session's decoder, a `Decoder` or one that drafts.
    """

    lm: CausalLM
    tokenizer: PreTrainedTokenizerBase
    documents: Documents
    template: Template = None  # type: ignore[assignment]  # set below
    weight_temperature: float = WEIGHT_TEMPERATURE
    store: KVStore | None = None
    longest: int = 512
    name: str = "unnamed"
    engine: ModelThread = field(default_factory=ModelThread, repr=False)
    memory: Prefixes = field(default_factory=Prefixes, repr=False)
    cache: PaddedCache = field(default_factory=PaddedCache, repr=False)
    decodes: Callable[..., Decoder] = Decoder

    def __post_init__(self) -> None:
        self.template = self.template or template_of(self.tokenizer)

    @cached_property
    def hello(self) -> Hello:
        """Who this side is; what the other one must have alike."""
        digests = weights_digest(self.lm.model), tokenizer_digest(self.tokenizer)
        template = hashlib.sha256(self.template.text.encode()).hexdigest()
        relevance = f"{self.documents.relevance} over {self.weight_temperature:.6g}"
        shown = self.name.rstrip("/\\").replace("\\", "/").rpartition("/")[2][-64:] or "unnamed"
        return Hello(VERSION, shown, *digests, self.lm.vocabulary, template, relevance)

    @property
    def end(self) -> int | None:
        """The id after which nothing follows, if there is one."""
        token = self.tokenizer.eos_token_id
        return None if token is None else int(token)

    @cached_property
    def ends(self) -> frozenset[int]:
        """Every id after which nothing follows: the tokenizer's, and those that the model's settings name."""
        settings = getattr(self.lm.model, "generation_config", None)
        return models.end_ids(self.tokenizer, self.lm.model.config, settings)

    def guard(self, length: int = LENGTH) -> Guard:
        """What stops runs of `length` tokens of this side's documents from leaving."""
        texts = (self.tokenizer(text, add_special_tokens=False, verbose=False) for text in self.documents.texts)
        return Guard((list(text.input_ids) for text in texts), length)

    def decoder(self, query: str, k: int, temperature: float = 1.0) -> tuple[Decoder, list[Cited]]:
        """A decoder of the k best documents for the query, and what they are, where they have sources.

        temperature: of the next token; 0 is greedy: as with 1. Raises ValueError as `Documents.best` and `Decoder` do.
        """
        indices, scores = self.documents.positions(query, k)
        prefixes = self.prefixes([self.documents.texts[index] for index in indices])
        bare = self.template.prefix(self.tokenizer, "")
        if not indices:  # it drafts what the model says without documents, and its part of the mixture is 0
            return self.decoder_of([bare], [EMPTY * self.weight_temperature], query, temperature, None, bare), []
        decoder = self.decoder_of(prefixes, scores, query, temperature, self.store, bare)
        if not self.documents.sources:
            return decoder, []
        weights = np.exp(document_weights(np.asarray(scores), self.weight_temperature))
        sources = [self.documents.sources[index] for index in indices]
        cited = [
            Cited(source.file[-1024:], source.paragraph, float(weight))
            for source, weight in zip(sources, weights, strict=True)
        ]
        return decoder, cited

    def decoder_of(
        self,
        prefixes: Sequence[Sequence[int]],
        scores: Sequence[float],
        query: str,
        temperature: float,
        store: RowStore | None = None,
        bare: Sequence[int] | None = None,
    ) -> Decoder:
        """The same of documents that are given, as `prefixes`; store, bare: as of `Decoder`."""
        return self.decodes(
            self.lm,
            prefixes,
            self.template.suffix(self.tokenizer, query),
            scores,
            temperature=self.weight_temperature,
            sampling_temperature=temperature or 1.0,
            store=store,
            ends=self.ends,
            bare=bare,
            memory=self.memory,
            common=self._common,
            cache=self.cache,
        )

    @cached_property
    def _common(self) -> int:
        """Ids that stand between any document and any query."""
        some, other = (self.template.suffix(self.tokenizer, query) for query in ("a", "1"))
        alike = (first == second for first, second in zip(some, other, strict=False))
        return sum(1 for _ in itertools.takewhile(bool, alike))

    def prefixes(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Ids of each document's prompt up to its end, cut where it is too long."""
        return [tuple(self.template.prefix(self.tokenizer, text)[: self.longest]) for text in texts]

    def require_room(self, query: str, limit: int) -> None:
        """Raise ValueError, before any work, where a question and an answer of `limit` tokens pass the context."""
        prompt = len(self.template.prefix(self.tokenizer, "")) + len(self.template.suffix(self.tokenizer, query))
        if prompt + limit > self.lm.context:
            raise ValueError(
                f"The question takes {prompt} tokens with the prompt around it, and an answer of up to {limit} has no "
                f"room behind it in the model's context of {self.lm.context}."
            )

    def cost(self, k: int, query: str, limit: int) -> int:
        """Most bytes of keys and values that a session of k documents takes."""
        tokens = min(self.lm.context, self.longest + len(query.encode()) + limit)  # a token has a byte or more
        config = support.text_config(self.lm.model)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return (k + 1) * 2 * self.lm.layers * heads * tokens * width * self.lm.model.dtype.itemsize

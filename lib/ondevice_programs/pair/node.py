"""What a side brings to every session: its model, its documents and how prompts are made of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ondevice.causal_lm import CausalLM, support
from ondevice.corpus.prompts import ASSISTANT, PASSAGE, USER
from ondevice_papers.dragon.aggregation import document_weights
from ondevice_papers.dragon.kv_store import KVStore, tokenizer_digest, weights_digest
from ondevice_papers.dragon.messages import VERSION, Cited, Hello
from ondevice_programs.pair.decoder import Decoder, Store, Template
from ondevice_programs.pair.engine import Engine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ondevice.retrieval import SparseIndex

TEMPLATE = Template(f"{PASSAGE}{{document}}{USER}{{query}}{ASSISTANT}")  # as the bundled models were trained
WEIGHT_TEMPERATURE = 1 / 32  # of relevance, chosen on the validation split (record `relevance`)


@dataclass(frozen=True)
class Source:
    """Where a document was found, so that it can be cited.

    file: its path, relative to the folder that was read; of the corpus, a qualified name. place: its paragraph from 1;
    of notebooks the cell, of PDF the page, of JSON lines the line.
    """

    file: str
    place: int


@dataclass(frozen=True)
class Documents:
    """A side's own documents and their index. sources: of each text, or none."""

    texts: Sequence[str]
    index: SparseIndex
    sources: Sequence[Source] = ()

    def best(self, query: str, k: int) -> tuple[list[str], list[float]]:
        """The k most relevant texts and their relevance, best first; all where there are fewer than k.

        Relevance is the score over its ceiling, the share of the query that a text covers: scores of two corpora cannot
        be compared, as a word's weight grows with the number of texts. Raises ValueError on k below 1 and on a query
        without text.
        """
        found, scores = self.places(query, k)
        return [self.texts[place] for place in found], scores

    def places(self, query: str, k: int) -> tuple[list[int], list[float]]:
        """The same as indices into `texts`."""
        if k < 1:
            raise ValueError(f"A query retrieves at least one document, not {k}.")
        if not query.strip():
            raise ValueError("The query is empty.")
        scores, found = self.index.search([query], min(k, len(self.texts)))
        most = self.index.ceiling(query) or 1.0  # 0 of a query without words
        return [int(place) for place in found[0]], [float(score) / most for score in scores[0]]


@dataclass(eq=False)
class Node:
    """One side, before and between sessions.

    weight_temperature: what relevance is divided by before documents are weighed; both sides need the same.
    store: where documents' rows are kept; without one each query prefills its documents.
    longest: most tokens of a document in a prompt; what is beyond is cut off.
    name: of the model, as users know it. engine: runs the model, for all sessions of this side.
    decodes: what makes a session's decoder, a `Decoder` or one that drafts.
    """

    lm: CausalLM
    tokenizer: PreTrainedTokenizerBase
    documents: Documents
    template: Template = TEMPLATE
    weight_temperature: float = WEIGHT_TEMPERATURE
    store: KVStore | None = None
    longest: int = 512
    name: str = "unnamed"
    engine: Engine = field(default_factory=Engine, repr=False)
    decodes: Callable[..., Decoder] = Decoder

    @cached_property
    def hello(self) -> Hello:
        """Who this side is; what the other one must have alike."""
        digests = weights_digest(self.lm.model), tokenizer_digest(self.tokenizer)
        return Hello(VERSION, self.name, *digests, self.lm.vocabulary)

    @property
    def end(self) -> int | None:
        """The id after which nothing follows, if there is one."""
        found = self.tokenizer.eos_token_id
        return None if found is None else int(found)

    def decoder(self, query: str, k: int, temperature: float = 1.0) -> tuple[Decoder, list[Cited]]:
        """A decoder of the k best documents for the query, and what they are, where they have sources.

        temperature: of the next token; 0 is greedy: as with 1. Raises ValueError as `Documents.best` and `Decoder` do.
        """
        places, scores = self.documents.places(query, k)
        prefixes = self.prefixes([self.documents.texts[place] for place in places])
        bare = self.template.prefix(self.tokenizer, "")
        decoder = self.decoder_of(prefixes, scores, query, temperature, self.store, bare)
        if not self.documents.sources:
            return decoder, []
        weights = np.exp(document_weights(np.asarray(scores), self.weight_temperature))
        found = [self.documents.sources[place] for place in places]
        return decoder, [Cited(one.file[-1024:], one.place, float(w)) for one, w in zip(found, weights, strict=True)]

    def decoder_of(
        self, prefixes: Sequence[Sequence[int]], scores: Sequence[float], query: str, temperature: float,
        store: Store | None = None, bare: Sequence[int] | None = None,
    ) -> Decoder:  # fmt: skip
        """The same of documents that are given, as `prefixes`; store, bare: as of `Decoder`."""
        return self.decodes(
            self.lm, prefixes, self.template.suffix(self.tokenizer, query), scores,
            temperature=self.weight_temperature, sampling_temperature=temperature or 1.0, store=store,
            end=self.end, bare=bare,
        )  # fmt: skip

    def prefixes(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Ids of each document's prompt up to its end, cut where it is too long."""
        return [tuple(self.template.prefix(self.tokenizer, text)[: self.longest]) for text in texts]

    def shape(self, tokens: int) -> tuple[int, int, int, int]:
        """[layers, heads, tokens, width] of the keys of so many tokens, and of their values."""
        config = support.text_config(self.lm.model)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return self.lm.layers, heads, tokens, width

    def cost(self, k: int, query: str, limit: int) -> int:
        """Most bytes of keys and values that a session of k documents takes."""
        tokens = min(self.lm.context, self.longest + len(query.encode()) + limit)  # a token has a byte or more
        return (k + 1) * 2 * math.prod(self.shape(tokens)) * self.lm.model.dtype.itemsize

"""One side's decoder: its documents as sessions that all advance by one shared next token (section 3, Eqs. 1 and 2)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import ArrayLike

from ondevice.causal_lm import CausalLM, Session
from ondevice.causal_lm.tree import integers
from ondevice.dragon.aggregation import Floats, document_weights, log_weight, mixture
from ondevice.dragon.kv_store import KVStore
from ondevice.dragon.speculative_aggregation import Stream, sample, uniforms

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_AHEAD = 128  # rows allocated beyond the prompt; a session that needs more grows by itself
_DOCUMENT, _QUERY = "{document}", "{query}"

# Chooses the next token at a position from its log probabilities [V]: greedy, or drawn with noise of that position.
Choose = Callable[[int, Floats], int]


@dataclass(frozen=True)
class Template:
    """A prompt's text with {document} and, after it, {query}. Its ids are cut where the document ends.

    With the cut, a document's ids do not depend on the query, so that their rows can be stored. The ids may therefore
    differ, at the cut alone, from those of the text in one piece. Raises ValueError on any other text.
    """

    text: str

    def __post_init__(self) -> None:
        once = all(self.text.count(place) == 1 for place in (_DOCUMENT, _QUERY))
        if not once or self.text.index(_DOCUMENT) > self.text.index(_QUERY):
            raise ValueError(f"A template has {_DOCUMENT} once and then {_QUERY} once, not {self.text!r}.")

    def prefix(self, tokenizer: PreTrainedTokenizerBase, document: str) -> list[int]:
        """Ids up to the document's end, with the begin token of a tokenizer that puts one."""
        text = self.text.partition(_DOCUMENT)[0] + document
        ids = list(tokenizer(text, add_special_tokens=False).input_ids)
        begin = tokenizer.bos_token_id
        marked = begin is not None and list(tokenizer(text).input_ids) == [begin, *ids]
        return [begin, *ids] if marked else ids

    def suffix(self, tokenizer: PreTrainedTokenizerBase, query: str) -> list[int]:
        """Ids of what follows the document."""
        before, _, after = self.text.partition(_DOCUMENT)[2].partition(_QUERY)
        return list(tokenizer(before + query + after, add_special_tokens=False).input_ids)


@dataclass(frozen=True)
class Drafted:
    """A token that a side chose by itself. log_probs: [V] float64, the side's distribution that it was chosen from."""

    position: int
    token: int
    log_probs: Floats


class Decoder:
    """What one side decodes: D documents with one query, in D sessions of batch one.

    prefixes: the ids of each document's prompt up to the document's end. suffix: of the query, the same for all.
    scores: [D] relevance of each document. temperature: what scores are divided by.
    store: where prefixes' rows are kept; without one they are computed.
    end: ids after which nothing follows.
    tokens: what has been committed, the end token included; a position is an index into it.
    log_weight: the log of the side's h (Eq. 4): logsumexp of its scores / temperature. It is constant: scores are.

    `commit` and `rollback` are free; the model runs in `next_distribution` alone, on what it has not seen. An
    interrupted call leaves the decoder as it was.
    Raises ValueError without documents, and where a document or its query does not fit into the context.
    """

    def __init__(
        self,
        lm: CausalLM,
        prefixes: Sequence[Sequence[int]],
        suffix: Sequence[int],
        scores: ArrayLike,
        *,
        temperature: float = 1.0,
        store: KVStore | None = None,
        end: Collection[int] = (),
    ) -> None:
        _require_room(lm, prefixes, suffix)
        if store is not None and store.lm is not lm:
            raise ValueError("The store holds the rows of another model than the decoder's.")
        self._log_weights, self.log_weight = document_weights(scores, temperature), log_weight(scores, temperature)
        if len(self._log_weights) != len(prefixes):
            raise ValueError(f"{len(prefixes)} documents need as many scores, not {len(self._log_weights)}.")
        self.lm, self.tokens, self._end = lm, list[int](), frozenset(end)
        self._prompts = [[*map(int, prefix), *map(int, suffix)] for prefix in prefixes]
        self._longest = max(map(len, self._prompts))
        self._sessions = [self._started(prefix, len(prefix) + len(suffix) + _AHEAD, store) for prefix in prefixes]
        self._next: Floats | None = None

    @property
    def position(self) -> int:
        """Of the next token: how many are committed."""
        return len(self.tokens)

    @property
    def ended(self) -> bool:
        """Whether the last committed token is an end token."""
        return bool(self.tokens) and self.tokens[-1] in self._end

    @property
    def room(self) -> int:
        """Tokens that can still be committed before a session reaches the context's end.

        The last one is not given to the model any more, so a prompt that fills the context has room for one.
        """
        return self.lm.context - self._longest + 1 - self.position

    def next_distribution(self) -> Floats:
        """[V] float64: log probabilities of the next token, the mixture over the documents (Eqs. 1 and 2).

        Raises ValueError after an end token and at the context's end.
        """
        self._require_open()
        if self._next is None:
            logits = torch.stack([self._advanced(index) for index in range(len(self._sessions))])
            self._next = mixture(logits.cpu().double().log_softmax(-1).numpy(), self._log_weights)
        return self._next

    def commit(self, token: int) -> None:
        """Make this the next token of every document.

        Raises ValueError for an id that the model does not have, after an end token, and at the context's end.
        """
        self._require_open()
        token = int(token)
        if not 0 <= token < self.lm.vocabulary:
            raise ValueError(f"Token {token} is not in the model's {self.lm.vocabulary}.")
        self.tokens.append(token)
        self._next = None

    def rollback(self, position: int) -> None:
        """Drop the tokens from `position` on. Raises ValueError where there is none such."""
        if not 0 <= position <= self.position:
            raise ValueError(f"A decoder at position {self.position} cannot be rolled back to {position}.")
        if position == self.position:
            return
        del self.tokens[position:]
        self._next = None
        for prompt, session in zip(self._prompts, self._sessions, strict=True):
            session.rollback(min(session.length, len(prompt) + position))

    def lookahead(self, count: int, choose: Choose) -> Iterator[Drafted]:
        """Up to `count` drafts, fewer where the text or the context ends; each is committed when it is yielded.

        Work on a draft begins when it is asked for. Between two, the caller may roll back and commit: the next draft
        follows what is then committed. Raises ValueError on a count below 1.
        """
        if count < 1:
            raise ValueError(f"A lookahead is at least one token, not {count}.")
        return self._drafts(count, choose)

    def _drafts(self, count: int, choose: Choose) -> Iterator[Drafted]:
        for _ in range(count):
            if self.ended or self.room < 1:
                return
            log_probs = self.next_distribution()
            draft = Drafted(self.position, int(choose(self.position, log_probs)), log_probs)
            self.commit(draft.token)
            yield draft

    def _started(self, prefix: Sequence[int], rows: int, store: KVStore | None) -> Session:
        if store is not None:
            return store.session(prefix, rows)
        return self.lm.start(rows)  # the prefix is prefilled with the query, in one forward

    def _advanced(self, index: int) -> torch.Tensor:
        """Logits [V] after all that is committed; repeats the last token where the model has seen it already."""
        session, ids = self._sessions[index], self._prompts[index] + self.tokens
        if session.length == len(ids):
            session.rollback(len(ids) - 1)
        return session.prefill(ids[session.length :])

    def _require_open(self) -> None:
        if self.ended:
            raise ValueError(f"The text has ended with token {self.tokens[-1]} at position {self.position - 1}.")
        if self.room < 1:
            raise ValueError(f"The context of {self.lm.context} tokens is full at position {self.position}.")


def greedy(position: int, log_probs: Floats) -> int:
    """The likeliest token; of equals the one with the lowest id. A `Choose`."""
    return int(log_probs.argmax())


def sampled(seed: int, stream: Stream) -> Choose:
    """Draws from the distribution with the random number of that seed, stream and position."""

    def choose(position: int, log_probs: Floats) -> int:
        return int(sample(np.exp(log_probs), uniforms(seed, stream, position, 1)[0]))

    return choose


def _require_room(lm: CausalLM, prefixes: Sequence[Sequence[int]], suffix: Sequence[int]) -> None:
    """Raise ValueError, before any work, on what no session could begin with."""
    if not len(prefixes):
        raise ValueError("A side decodes with at least one document, not 0.")
    if not len(suffix):
        raise ValueError("The query is empty: its prompt has no token after the document.")
    for index, prefix in enumerate(prefixes):
        size, ids = len(prefix), integers([*prefix, *suffix], f"The prompt with document {index}")
        if not size:
            raise ValueError(f"Document {index} is empty: its prompt has no token.")
        if size > lm.context:
            raise ValueError(f"Document {index} takes {size} tokens, more than the context of {lm.context}.")
        if size + len(suffix) > lm.context:
            raise ValueError(
                f"The query takes {len(suffix)} tokens and has no room after document {index}'s {size} in the context "
                f"of {lm.context}."
            )
        if ids.min() < 0 or ids.max() >= lm.vocabulary:
            wrong = ids.min() if ids.min() < 0 else ids.max()
            raise ValueError(f"Document {index}'s prompt holds token {wrong}, not in the model's {lm.vocabulary}.")

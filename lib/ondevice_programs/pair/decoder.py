"""One side's decoder: its documents as sequences that share each next token (section 3, Eqs. 1 and 2)."""

from __future__ import annotations

import threading
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike

from ondevice.causal_lm import CausalLM
from ondevice.causal_lm import Interrupted as Interrupted  # callers of `interrupt` get it here
from ondevice_papers.dragon.aggregation import Floats, document_weights, log_weight, mixture
from ondevice_papers.dragon.batch import Batch, Member, PaddedCache, extend_together, refusal
from ondevice_programs.pair.prefixes import Prefixes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_AHEAD = 128  # rows allocated beyond the prompt; what needs more grows by itself
_PIECE = 128  # tokens of a forward: so long do other sessions wait
_DOCUMENT = "{document}"
_QUERY = "{query}"


@dataclass(frozen=True)
class Template:
    """A prompt's text with {document} and, after it, {query}. Its ids are cut where the document ends.

    With the cut, a document's ids do not depend on the query, so that their rows can be stored. The ids may therefore
    differ, at the cut alone, from those of the text in one piece. Raises ValueError on any other text.
    """

    text: str

    def __post_init__(self) -> None:
        once = all(self.text.count(placeholder) == 1 for placeholder in (_DOCUMENT, _QUERY))
        if not once or self.text.index(_DOCUMENT) > self.text.index(_QUERY):
            raise ValueError(f"A template has {_DOCUMENT} once and then {_QUERY} once, not {self.text!r}.")

    def prefix(self, tokenizer: PreTrainedTokenizerBase, document: str) -> list[int]:
        """Ids up to the document's end, with the begin token of a tokenizer that puts one."""
        text = self.text.partition(_DOCUMENT)[0] + document
        ids = list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)  # no warning of long texts
        begin = tokenizer.bos_token_id
        marked = begin is not None and list(tokenizer("a").input_ids[:1]) == [begin]
        return [begin, *ids] if marked else ids

    def suffix(self, tokenizer: PreTrainedTokenizerBase, query: str) -> list[int]:
        """Ids of what follows the document."""
        before, _, after = self.text.partition(_DOCUMENT)[2].partition(_QUERY)
        return list(tokenizer(before + query + after, add_special_tokens=False, verbose=False).input_ids)


class RowStore(Protocol):
    """Where rows of documents are, as in `kv_store.KVStore`."""

    def fill(self, session: Member, prefix: Sequence[int]) -> None:
        """Commit the prefix to the empty session, or leave it to the decoder."""


class Piece(NamedTuple):
    """What a decoder prefills next. tokens: how many. parts: sequences with the ids to commit, in one forward.

    Whoever asked for it runs the forward, perhaps with parts of other decoders. Without parts it has been done.
    """

    tokens: int
    parts: list[tuple[Member, list[int]]]


class Decoder:
    """What one side decodes: D documents with one query, in one batch where the model can, else one by one.

    prefixes: the ids of each document's prompt up to the document's end. suffix: of the query, the same for all.
    scores: [D] relevance of each document. temperature: what scores are divided by. sampling_temperature: what each
        document's logits are divided by, before the mixture.
    store: where prefixes' rows are kept; without one they are computed.
    memory: where prefixes' rows are kept besides, with the first `common` tokens of the suffix, which queries share.
    cache: where the sequences' rows are; None: in one of their own.
    ends: the ids after which nothing follows.
    bare: ids of a prompt without document, up to where its end would be, perhaps none: then `prior` is known beside
        each mixture.
    tokens: what has been committed, the end token included; a position is an index into it. rows: of a forward.
    log_weight: the log of the side's h (Eq. 4): logsumexp of its scores / temperature. It is constant: scores are.

    `commit` and `rollback` are free; the model runs in `next_distribution` alone, on what it has not seen. An
    interrupted call leaves the decoder as it was. Only `interrupt` may be called while another call runs.
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
        sampling_temperature: float = 1.0,
        store: RowStore | None = None,
        ends: Container[int] = (),
        bare: Sequence[int] | None = None,
        memory: Prefixes | None = None,
        common: int = 0,
        cache: PaddedCache | None = None,
    ) -> None:
        _require_room(lm, prefixes, suffix)
        values = np.asarray(scores, float)
        self._log_weights = document_weights(values, temperature)
        self.log_weight = log_weight(values, temperature)
        self.lm, self.tokens, self._ends = lm, list[int](), ends
        self._temperature = sampling_temperature
        self._stop = threading.Event()
        rows = prefixes if bare is None else [*prefixes, bare]
        self._prefixes = [list(prefix) for prefix in rows]
        self._suffix = list(suffix)
        self._memory, self._common = memory, min(common, len(suffix) - 1)
        self._longest = max(map(len, prefixes)) + len(suffix)
        ends = [len(prefix) for prefix in rows]
        ahead = len(suffix) + _AHEAD
        joint = len(rows) > 1 and refusal(lm) is None
        self._batch = Batch(lm, ends, max(ends) + ahead, self._stop, cache) if joint else None
        self._members = (
            self._batch.members
            if self._batch
            else [Batch(lm, [end], end + ahead, self._stop).members[0] for end in ends]
        )
        self.rows = len(rows)
        self._store = store
        self._next: Floats | None = None
        self.prior: Floats | None = None  # [V] the next token's without documents, after `next_distribution`

    @property
    def position(self) -> int:
        """Of the next token: how many are committed."""
        return len(self.tokens)

    @property
    def ended(self) -> bool:
        """Whether the last committed token is an end token."""
        return bool(self.tokens) and self.tokens[-1] in self._ends

    @property
    def room(self) -> int:
        """Tokens that can still be committed before the longest prompt reaches the context's end.

        The last one is not given to the model any more, so a prompt that fills the context has room for one.
        """
        return self.lm.context - self._longest + 1 - self.position

    @property
    def in_line(self) -> bool:
        """Whether each sequence lacks one token: then `next_together` can serve."""
        if self._batch is None or self._next is not None:
            return False
        seen = len(self._suffix) + self.position - 1
        return all(member.length == len(prefix) + seen for prefix, member in self._documents())

    def pieces(self, query: bool = True) -> Iterator[Piece]:
        """Prefill documents, and the query up to its last token, a piece at a time, so that others work between two.

        The caller runs each piece. Documents that run one by one take no query here: `next_distribution` does the rest.
        """
        query = query and self._batch is not None
        behind = self._suffix[:-1] if query else []
        common = self._suffix[: self._common] if query else []
        while True:
            size = 0
            parts = list[tuple[Member, list[int]]]()
            for prefix, member in self._documents():
                if not member.length:
                    self._fill(prefix, common, member)
                new = [*prefix, *behind][member.length : member.length + _PIECE - size]
                if new:
                    parts.append((member, new))
                    size += len(new)
            if not parts:
                return
            if self._batch is None:
                for member, new in parts:
                    member.prefill(new)
            yield Piece(size, parts if self._batch is not None else [])
            self._keep(parts, common)

    def prefill(self) -> None:
        """All documents, a piece after the other. Raises Interrupted (see `interrupt`)."""
        for piece in self.pieces(query=False):
            run([piece], self._stop)

    def _fill(self, prefix: list[int], common: list[int], member: Member) -> None:
        """Commit what is kept of a document, with what all queries share behind it."""
        if self._memory is not None:
            self._memory.fill(member, prefix + common)
        if self._store is not None and not member.length:
            self._store.fill(member, prefix)

    def _keep(self, parts: Sequence[tuple[Member, list[int]]], common: list[int]) -> None:
        """Keep the documents that the parts have prefilled to their end."""
        for prefix, member in self._documents():
            whole = prefix + common
            new = next((len(ids) for other, ids in parts if other is member), 0)
            if self._memory is not None and member.length - new < len(whole) <= member.length:
                self._memory.keep(member, whole)

    def next_distribution(self) -> Floats:
        """[V] float64: log probabilities of the next token, the mixture over the documents (Eqs. 1 and 2).

        Raises ValueError after an end token and at the context's end, and Interrupted (see `interrupt`).
        """
        self.require_open()
        try:
            if self._next is None:
                self.prefill()
                self._mix(self._logits())
            assert self._next is not None
            return self._next
        finally:
            self._stop.clear()

    def interrupt(self) -> None:
        """Make the `next_distribution` that runs in another thread raise Interrupted at the model's next layer.

        Where none runs, the next one does that, unless it has nothing to compute; the one after it runs to its end.
        """
        self._stop.set()

    def commit(self, token: int) -> None:
        """Make this the next token of every document. Raises ValueError after an end token and at the context's end."""
        self.require_open()
        self.tokens.append(token)
        self._next = None

    def rollback(self, position: int) -> None:
        """Drop the tokens from `position` on."""
        if position == self.position:
            return
        del self.tokens[position:]
        self._next = None
        for prefix, member in self._documents():
            member.rollback(min(member.length, len(prefix) + len(self._suffix) + position))

    def close(self) -> None:
        """Let the sequences' rows go; nothing is decoded after it."""
        self._members = []
        self._batch = None

    def _documents(self) -> Iterable[tuple[list[int], Member]]:
        return zip(self._prefixes, self._members, strict=True)

    def _logits(self) -> torch.Tensor:
        """Logits [D, V] after all that is committed; repeats the last token where the model has seen it already."""
        common = self._suffix + self.tokens
        if self._batch is not None:
            seen = min(self._batch.length, len(common) - 1)
            self._batch.rollback(seen)
            return self._batch.prefill(common[seen:])
        logits = []
        for prefix, member in self._documents():
            seen = min(member.length - len(prefix), len(common) - 1)
            member.rollback(len(prefix) + seen)
            logits.append(member.prefill(common[seen:]))
        return torch.stack(logits)

    def _mix(self, logits: torch.Tensor) -> None:
        """logits: [D, V], or [D + 1, V] with those without documents last."""
        rows = (logits.cpu().double() / self._temperature).log_softmax(-1).numpy()
        documents = len(self._log_weights)
        self._next = mixture(rows[:documents], self._log_weights)
        self.prior = np.exp(rows[documents]) if len(rows) > documents else None

    def require_open(self) -> None:
        """Raise ValueError after an end token and at the context's end."""
        if self.ended:
            raise ValueError(f"The text has ended with token {self.tokens[-1]} at position {self.position - 1}.")
        if self.room < 1:
            raise ValueError(f"The context of {self.lm.context} tokens is full at position {self.position}.")


def run(pieces: Sequence[Piece], stop: threading.Event | None = None) -> None:
    """Prefill some decoders' pieces in one forward. stop: while it is set, the forward raises Interrupted."""
    parts = [part for piece in pieces for part in piece.parts]
    if parts:
        extend_together([member for member, _ in parts], [ids for _, ids in parts], stop=stop)


def next_together(decoders: Sequence[Decoder]) -> None:
    """Compute the next distribution of decoders that are `in_line`, of one model, in one forward."""
    members = list[Member]()
    ids = list[list[int]]()
    for decoder in decoders:
        decoder._stop.clear()  # of a forward that is over: this one is others' too
        members += decoder._members
        ids += [(decoder._suffix + decoder.tokens)[-1:]] * decoder.rows
    logits = torch.cat(extend_together(members, ids))
    for decoder, rows in zip(decoders, logits.split([decoder.rows for decoder in decoders]), strict=True):
        decoder._mix(rows)


def _require_room(lm: CausalLM, prefixes: Sequence[Sequence[int]], suffix: Sequence[int]) -> None:
    """Raise ValueError, before any work, on what no session could begin with."""
    if not len(prefixes):
        raise ValueError("A side decodes with at least one document, not 0.")
    for index, prefix in enumerate(prefixes):
        if len(prefix) > lm.context:
            raise ValueError(f"Document {index} takes {len(prefix)} tokens, more than the context of {lm.context}.")
        if len(prefix) + len(suffix) > lm.context:
            raise ValueError(
                f"The query takes {len(suffix)} tokens and has no room after document {index}'s {len(prefix)} in the "
                f"context of {lm.context}."
            )

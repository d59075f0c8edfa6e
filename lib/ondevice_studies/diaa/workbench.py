"""What drafters of a public model are made from: the model, a warm-up text in its tokens, and tables of that text."""

from __future__ import annotations

from hashlib import sha256
from itertools import islice
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ondevice import assets, corpus
from ondevice_papers.diaa import warmup
from ondevice_papers.diaa.tables import Fresh, Tables
from ondevice_studies.speculation import spec_bench
from ondevice_studies.speculation.request_set import spread

TOKENS = 60_000  # of a warm-up text
LONGEST = 512  # tokens of one conversation or document in it
Source = Literal["tasks", "documents"]


class Workbench(spec_bench.Bench):
    """A model in float32 on one thread, with tables of a warm-up text."""

    def text(self, source: Source) -> list[NDArray[np.int64]]:
        """About 60,000 token ids of the documentation corpus' train split, in sequences of at most 512.

        tasks: questions with the answers that the documents hold, as the model's chat template writes them, one of
        every module before a second of any. documents: their texts.
        """
        documents = corpus.documents("train")
        texts = (
            (document.text for document in documents[:: max(1, len(documents) // 400)])
            if source == "documents"
            else map(self._conversation, islice(spread(corpus.tasks(documents)), 2000))
        )
        sequences: list[NDArray[np.int64]] = []
        missing = TOKENS
        for text in texts:
            ids = self.loaded.tokenizer(text, verbose=False, add_special_tokens=False).input_ids[:LONGEST]
            sequences.append(np.asarray(ids[:missing], np.int64))
            missing -= len(sequences[-1])
            if missing <= 0:
                break
        return sequences

    def tables(self, kind: Literal["tasks", "documents", "bigrams", "cold"]) -> Tables:
        """New tables: of a text that the model reads, of a text's counts without it (`bigrams`), or empty ones."""
        vocabulary = self.lm.vocabulary
        if kind == "cold":
            return Tables.empty(vocabulary)
        text = self.text("tasks" if kind == "tasks" else "documents")
        if kind == "bigrams":
            return warmup.bigrams(np.concatenate(text), vocabulary)
        return warmup.means(np.concatenate(text), self._read(kind, text), vocabulary)

    def _read(self, kind: str, text: list[NDArray[np.int64]]) -> Fresh:
        """What the model says after each token of a text, kept in the user's cache."""
        key = sha256(b"".join(sequence.tobytes() for sequence in text)).hexdigest()[:16]
        path = assets.cache_folder("diaa") / f"top-k-{self.model}-{kind}-{key}.npz"
        if not path.is_file():
            parts = [warmup.top_k_after_each_token(self.lm, sequence) for sequence in text]
            with assets.writing(path) as temporary:
                np.savez(temporary, **Fresh(*(np.concatenate(part) for part in zip(*parts, strict=True)))._asdict())
        return Fresh(**assets.arrays(path))

    def _conversation(self, task: corpus.Task) -> str:
        """A task as the model's template writes it, passages in front of the first question."""
        shown = "".join(f"{title}\n{text}\n\n" for title, text in task.passages)
        messages = [
            {"role": role, "content": content}
            for turn in task.turns
            for role, content in zip(("user", "assistant"), turn, strict=True)
        ]
        messages[0]["content"] = shown + messages[0]["content"]
        return str(self.loaded.tokenizer.apply_chat_template(messages, tokenize=False))

"""Texts to unit vectors by all-MiniLM-L6-v2 (or another encoder with mean pooling)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from tqdm import tqdm

from ondevice import models
from ondevice.batching import by_length

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_BATCH_TOKENS = 4096  # padded; larger batches are no faster on a CPU
_LONGEST = 256  # tokens, as sentence-transformers runs this model


@dataclass(frozen=True)
class Embedder:
    """An encoder whose token states are averaged. key: what its vectors are cached under, unlike any other's."""

    key: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    longest: int = _LONGEST

    @property
    def size(self) -> int:
        """Components of a vector."""
        return self.model.config.hidden_size

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """[n, size] float32 of length 1; a text longer than `longest` tokens is cut."""
        out = np.zeros((len(texts), self.size), dtype=np.float32)
        if not texts:
            return out
        ids = self.tokenizer(list(texts), truncation=True, max_length=self.longest, verbose=False)["input_ids"]
        with tqdm(total=len(texts), desc="embedding", unit="text", delay=5, leave=False, disable=None) as bar:
            for batch in by_length([len(row) for row in ids], _BATCH_TOKENS):
                out[batch] = self._embed([ids[index] for index in batch])
                bar.update(len(batch))
        return out

    @torch.inference_mode()
    def _embed(self, rows: list[list[int]]) -> np.ndarray:
        batch = self.tokenizer.pad({"input_ids": rows}, return_tensors="pt").to(self.model.device)
        states = self.model(**batch).last_hidden_state  # [b, t, size]
        mask = batch["attention_mask"].unsqueeze(-1)
        mean = (states * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(mean, dim=-1).float().cpu().numpy()


@functools.cache
def embedder(device: str = "cpu") -> Embedder:
    """all-MiniLM-L6-v2 [384] from its installed package, loaded once, its weights checked by checksum."""
    loaded = models.load(models.MINILM, device=device)
    return Embedder(f"{models.MINILM}-{models.MINILM_SHA256[:8]}-{_LONGEST}", loaded.model, loaded.tokenizer)

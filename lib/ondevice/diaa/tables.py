"""t-LUT and p-LUT: for every token its likeliest next tokens and their probabilities (paper, Look-Up Tables)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import safetensors
from numpy.typing import NDArray
from safetensors.numpy import save_file

from ondevice import assets

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

K = 8  # candidates a token (Experimental Settings)
NONE = -1  # an empty place of the t-LUT
_MIB = 2**20


@dataclass(frozen=True, eq=False)
class Tables:
    """Both tables, keyed by the last token: Table 4's sizes are those of one row a vocabulary id.

    tokens: [V, K] int64, -1 where empty. probabilities: [V, K] float32, 0 where empty. A row's probabilities fall, its
    tokens are distinct, empty places come last. tokenizer: digest of the tokenizer whose ids these are.
    Drafters write into the arrays; models of one vocabulary may share them.
    """

    tokens: NDArray[np.int64]
    probabilities: NDArray[np.float32]
    tokenizer: str = ""

    @classmethod
    def empty(cls, vocabulary: int, k: int = K, tokenizer: str = "") -> Tables:
        """Cold tables. Raises ValueError where a row could not be filled with distinct tokens."""
        if not 1 <= k <= vocabulary:
            raise ValueError(f"A row holds 1 to {vocabulary} candidates, the vocabulary, not {k}.")
        return cls(np.full((vocabulary, k), NONE, np.int64), np.zeros((vocabulary, k), np.float32), tokenizer)

    @property
    def vocabulary(self) -> int:
        """V, the number of rows."""
        return len(self.tokens)

    @property
    def k(self) -> int:
        """K, the candidates of a row."""
        return self.tokens.shape[1]

    @property
    def filled(self) -> float:
        """Share of the tokens that have at least one candidate."""
        return float((self.tokens[:, 0] != NONE).mean())

    @property
    def bytes(self) -> tuple[int, int]:
        """Bytes of the t-LUT and of the p-LUT."""
        return self.tokens.nbytes, self.probabilities.nbytes

    @property
    def mebibytes(self) -> tuple[float, float]:
        """The same in MiB, which Table 4 prints as MB."""
        return self.tokens.nbytes / _MIB, self.probabilities.nbytes / _MIB

    def row(self, token: int) -> tuple[list[int], list[float]]:
        """Candidates after a token and their probabilities, as Python numbers, which a tree is built from fastest."""
        return self.tokens[token].tolist(), self.probabilities[token].tolist()

    def copy(self) -> Tables:
        """Independent tables with the same content."""
        return Tables(self.tokens.copy(), self.probabilities.copy(), self.tokenizer)

    def write(self, keys: NDArray[np.int64], tokens: NDArray[np.int64], probabilities: NDArray[np.float32]) -> None:
        """Overwrite rows. keys: [n]; of equal ones the last counts. tokens, probabilities: [n, K], rows as above."""
        last = {
            key: place for place, key in enumerate(keys.tolist())
        }  # NumPy leaves open which of two equal indices wins
        rows, places = list(last), list(last.values())
        self.tokens[rows] = tokens[places]
        self.probabilities[rows] = probabilities[places]

    def check(self) -> None:
        """Raise ValueError unless shapes, types and rows are as the class says."""
        shape = self.tokens.shape
        if len(shape) != 2 or shape != self.probabilities.shape or not 1 <= shape[1] <= shape[0]:
            raise ValueError(f"Tables are two of one shape [V, K], K <= V, not {shape}, {self.probabilities.shape}.")
        if self.tokens.dtype != np.int64 or self.probabilities.dtype != np.float32:
            raise ValueError(f"Tables are int64 and float32, not {self.tokens.dtype}, {self.probabilities.dtype}.")
        empty = self.tokens == NONE
        falling = (np.diff(self.probabilities, axis=1) <= 0).all() and (self.probabilities >= 0).all()
        if not falling or self.probabilities[empty].any() or (empty[:, :-1] & ~empty[:, 1:]).any():
            raise ValueError("A row's probabilities are not in falling order.")
        if self.tokens.min() < NONE or self.tokens.max() >= len(self.tokens):
            raise ValueError("A row holds a token that is not in the vocabulary.")
        ordered = np.sort(self.tokens, axis=1)
        if ((np.diff(ordered, axis=1) == 0) & (ordered[:, 1:] != NONE)).any():
            raise ValueError("A row holds a token twice.")

    def save(self, path: Path) -> None:
        """Write a safetensors file, in one step."""
        arrays: dict[str, np.ndarray] = {"tokens": self.tokens, "probabilities": self.probabilities}
        with assets.writing(path) as temporary:
            save_file(arrays, temporary, {"tokenizer": self.tokenizer})

    @classmethod
    def load(cls, path: Path, tokenizer: str) -> Tables:
        """Read what `save` wrote. tokenizer: digest of the one that they are to serve.

        Raises ValueError on a damaged file and on tables of another tokenizer.
        """
        try:
            with safetensors.safe_open(path, framework="np") as file:
                notes = file.metadata() or {}
                found = cls(file.get_tensor("tokens"), file.get_tensor("probabilities"), notes["tokenizer"])
            found.check()
        except (safetensors.SafetensorError, KeyError, ValueError) as error:
            raise ValueError(f"{path.name} holds no tables, or damaged ones ({error}).") from None
        if found.tokenizer != tokenizer:
            raise ValueError(f"{path.name} was made for another tokenizer ({found.tokenizer}, not {tokenizer}).")
        return found


def digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """What names a tokenizer: a hash of its entries and their ids."""
    return sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:16]

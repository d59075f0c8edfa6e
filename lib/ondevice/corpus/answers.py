"""Scores of an answer against the reference, and which references stand in the training text anyway."""

from __future__ import annotations

import re
from collections import Counter

from ondevice.corpus.prompts import normal

HIT = 0.8  # token F1 above which an answer counts as right
_WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    """Lower-case words without punctuation."""
    return _WORD.findall(text.lower())


def f1(answer: str, reference: str) -> float:
    """Harmonic mean of precision and recall over words, counted with repetition: ROUGE-1's F."""
    counts = Counter(words(answer))
    reference_counts = Counter(words(reference))
    shared = (counts & reference_counts).total()
    return 2 * shared / (counts.total() + reference_counts.total()) if shared else 0.0


def exact(answer: str, reference: str) -> bool:
    """Whether they are the same up to white space."""
    return normal(answer) == normal(reference)


def hit(answer: str, reference: str) -> bool:
    """Whether they have the same words, or nearly (F1 above 0.8), or are the same signs without a word."""
    return f1(answer, reference) > HIT or exact(answer, reference)

"""The systems that the assistant is made of, by letter; a set of them is a string of letters in this order."""

from __future__ import annotations

SYSTEMS = {"G": "GRATING", "D": "DRAGON", "L": "DIAA", "S": "sd.npu", "C": "DiSCo"}


def drafter_of(systems: str) -> str:
    """The letters of a set that name its drafter."""
    return "".join(letter for letter in systems if letter in "LS")

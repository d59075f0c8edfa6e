"""The systems that the assistant is made of, by letter; a set of them is a string of letters in this order."""

from __future__ import annotations

from ondevice import evidence

SYSTEMS = {"G": "GRATING", "D": "DRAGON", "L": "DIAA", "S": "sd.npu", "C": "DiSCo"}


def drafter_of(systems: str) -> str:
    """The letters of a set that name its drafter."""
    return "".join(letter for letter in systems if letter in "LS")


def temperature(picked: bool) -> float:
    """What relevance is divided by before passages are weighed: the least loss of validation answers (record)."""
    table = evidence.load("assistant", "relevance")
    losses = table[table["picked"] == picked].groupby("temperature")["loss"].mean()
    return float(min(losses.items(), key=lambda pair: pair[1])[0])  # type: ignore[arg-type]

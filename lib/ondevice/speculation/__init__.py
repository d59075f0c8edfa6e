"""Speculative decoding that sd.npu and DIAA share: drafts, drafters, the verify loop and its log."""

from ondevice.speculation.draft import Draft
from ondevice.speculation.drafter import Drafter, Verified
from ondevice.speculation.loop import Choice, Generation, Step, generate, greedy

__all__ = ["Choice", "Draft", "Drafter", "Generation", "Step", "Verified", "generate", "greedy"]

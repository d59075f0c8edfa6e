"""Speculative decoding that sd.npu and DIAA share: drafts, drafters, the verify loop and its log."""

from ondevice.speculation.choice import Choice, Sampling, greedy
from ondevice.speculation.draft import Draft
from ondevice.speculation.drafter import Drafter, Verified
from ondevice.speculation.loop import Generation, Step, generate

__all__ = ["Choice", "Draft", "Drafter", "Generation", "Sampling", "Step", "Verified", "generate", "greedy"]

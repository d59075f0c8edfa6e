"""Speculative decoding that sd.npu and DIAA share: drafts, drafters, the verify loop and its log."""

from ondevice.speculation.choice import Choice, Greedy, Sampling
from ondevice.speculation.draft import Draft
from ondevice.speculation.drafter import Drafter, Verified
from ondevice.speculation.log import Generation, Step
from ondevice.speculation.loop import generate

__all__ = ["Choice", "Draft", "Drafter", "Generation", "Greedy", "Sampling", "Step", "Verified", "generate"]

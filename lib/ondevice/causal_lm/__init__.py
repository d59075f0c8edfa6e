"""The one place that touches a transformers causal LM: prefill, extend, verify a token tree, keep a path, roll back."""

from ondevice.causal_lm.rows import Interrupted
from ondevice.causal_lm.session import CausalLM, Session
from ondevice.causal_lm.tree import TokenTree

__all__ = ["CausalLM", "Interrupted", "Session", "TokenTree"]

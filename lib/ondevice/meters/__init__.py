"""Measures a process from outside: its memory, and what it leaves in the page cache."""

from ondevice.meters.memory import Sampled, cached_bytes, evict, mark, sample, trim

__all__ = ["Sampled", "cached_bytes", "evict", "mark", "sample", "trim"]

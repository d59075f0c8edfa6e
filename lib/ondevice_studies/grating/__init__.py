"""GRATING's evidence: scores layer by layer, memory and latency by machine, and its claims."""

"""A bench of a causal LM on this machine: the cost of a pass by format, each drafter, and the fastest setting."""

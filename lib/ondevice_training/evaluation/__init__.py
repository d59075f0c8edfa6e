"""Evaluation of the bundled language models on held-out documents."""

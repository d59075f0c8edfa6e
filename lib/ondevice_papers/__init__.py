"""The mechanisms of the five papers, as their notebooks show them; one folder a paper.

Inside: each paper's algorithms, and what they are defined on, such as a lookup table, a schedule or a dispatch policy.
Not inside: what measures them (`ondevice_studies`), and programs made of them (`ondevice_programs`).
Begin with a notebook: its source cells are this package's own text. Then `diaa.drafter`, `sdnpu.scheduling`,
`dragon.speculative_aggregation`, `disco.dispatch` or `grating.pruning`. No paper imports another.
"""

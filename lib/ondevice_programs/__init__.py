"""Programs that one would use: a router, a pair, a reranker, static graphs and an assistant.

Inside: `router` (DiSCo), `pair` (DRAGON), `reranker` (GRATING), `graphs` (sd.npu), and `assistant` with all five.
Each has a command, `ondevice-router` and so on, whose `__main__` is the place to begin; `reranker.Reranker` is a class.
Not inside: the mechanisms themselves (`ondevice_papers`), and what measures the programs (`ondevice_studies`).
DIAA's and sd.npu's drafters need no program: `ondevice.speculation.custom_generate` puts them behind transformers.
"""

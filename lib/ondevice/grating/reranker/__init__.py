"""A reranker for programs: documents in, the best of them out, within a memory budget.

from ondevice.grating.reranker import Reranker

with Reranker("minilm-reranker", memory_budget=100) as reranker:
    best = reranker.rank("How is a file opened?", documents, top_k=5)
"""

from ondevice.grating.reranker.calibration import Calibration
from ondevice.grating.reranker.reranker import Receipt, Reranker

__all__ = ["Calibration", "Receipt", "Reranker"]

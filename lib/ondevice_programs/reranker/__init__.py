"""A reranker for programs: documents in, the best of them out, within a memory budget.

from ondevice_programs.reranker import Reranker

with Reranker("minilm-reranker", memory_budget=100) as reranker:
    best = reranker.rank("How is a file opened?", documents, top_k=5)
"""

from ondevice_programs.reranker.calibration import Calibration
from ondevice_programs.reranker.receipts import Receipt
from ondevice_programs.reranker.reranker import Reranker

__all__ = ["Calibration", "Receipt", "Reranker"]

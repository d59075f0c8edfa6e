"""Search over texts or passages: dense (FAISS over MiniLM embeddings), sparse (BM25) and hybrid."""
# ruff: noqa: F401

from ondevice.extras import needing

with needing("pair", __name__):
    from ondevice.retrieval.dense import DenseIndex
    from ondevice.retrieval.embedding import Embedder, embedder
    from ondevice.retrieval.hybrid import Hybrid
    from ondevice.retrieval.sparse import SparseIndex, words
    from ondevice.retrieval.store import dense_index, embeddings, sparse_index
    from ondevice.retrieval.texts import Titled, plain

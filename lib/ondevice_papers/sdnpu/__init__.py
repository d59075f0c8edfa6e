"""sd.npu: retrieval-based speculative decoding with graph switching on an NPU (Chen et al.), as a reproduction."""

"""A model as static graphs that a runtime loads, as sd.npu has them: export, generation, switching between graphs."""

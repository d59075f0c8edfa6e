"""The assistant's evidence: answers, costs and memory of the systems, alone and together."""

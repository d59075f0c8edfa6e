"""Five papers on on-device LLM inference, each reproduced in one executable notebook."""

__version__ = "0.1.0"

"""Five papers on on-device LLM inference, each reproduced in one executable notebook."""

import warnings

__version__ = "0.1.0"

# In a notebook without ipywidgets the first import of transformers warns of plain progress bars, with a path.
warnings.filterwarnings("ignore", message="IProgress not found")

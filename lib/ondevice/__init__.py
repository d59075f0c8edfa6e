"""The helper library: what any notebook or program here needs, whichever paper it is about.

Inside: engines for language models, the documentation corpus, search, the loop that drafts and verifies, records,
rules and verdicts, figures, and the runner of the notebooks. Not inside: any paper's mechanism, experiment or program.
Begin with `models.load`, then `causal_lm` and `speculation.loop`; for verdicts with `evidence.paper_run`, for runs with
`run`. Nothing here imports the other packages.
"""

import sys
import warnings

__version__ = "0.1.0"

if sys.platform == "win32":
    raise ImportError(
        "ondevice runs on Linux and macOS; on Windows it runs in the Windows Subsystem for Linux (WSL 2)."
    )

# In a notebook without ipywidgets the first import of transformers warns of plain progress bars, with a path.
warnings.filterwarnings("ignore", message="IProgress not found")

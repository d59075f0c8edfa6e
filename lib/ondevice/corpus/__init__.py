"""The documentation corpus: docstrings of the installed packages as documents, passages and task prompts."""
# ruff: noqa: F401

from ondevice.corpus.excerpts import Passage, Query, passages, queries
from ondevice.corpus.prompts import FAMILIES, Task, tasks
from ondevice.corpus.reading import PACKAGES, Document, read_folder
from ondevice.corpus.splits import SPLITS, Selection, select
from ondevice.corpus.store import dataset, documents, manifest
from ondevice.corpus.tokens import tokenizer

"""The documentation corpus: docstrings of the installed packages as documents, passages, task prompts and tokens."""

from ondevice.corpus.excerpts import Passage, Query, passages, queries
from ondevice.corpus.prompts import FAMILIES, Task, tasks
from ondevice.corpus.reading import PACKAGES, Document, read_folder
from ondevice.corpus.splits import SPLITS, Selection, select
from ondevice.corpus.store import dataset, documents, manifest
from ondevice.corpus.tokens import document_tokens, task_tokens, tokenizer, train_tokenizer

__all__ = [
    "FAMILIES",
    "PACKAGES",
    "SPLITS",
    "Document",
    "Passage",
    "Query",
    "Selection",
    "Task",
    "dataset",
    "document_tokens",
    "documents",
    "manifest",
    "passages",
    "queries",
    "read_folder",
    "select",
    "task_tokens",
    "tasks",
    "tokenizer",
    "train_tokenizer",
]

"""Questions of our own, in natural words, each on a parameter of a documented object (data/corpus/questions.jsonl)."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ondevice import assets
from ondevice.corpus import sections
from ondevice.corpus.excerpts import Query, normal
from ondevice.corpus.reading import Document


def questions(documents: Sequence[Document]) -> list[Query]:
    """Those on these documents, in the file's order; a passage answers that holds the description's first sentence.

    With other versions of the corpus's packages some objects or parameters are not there, and their questions neither.
    """
    by_name = {document.name: document for document in documents}
    queries = []
    for line in assets.data("corpus", "questions.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        document = by_name.get(row["name"])
        fields = sections.parameters(document.docstring) if document else []
        for field in fields:
            answer = sections.first_sentence(field.description)
            if field.name == row["field"] and document and normal(answer) in normal(document.docstring):
                queries.append(Query("parameter", row["question"], document.name, answer))
                break
    return queries

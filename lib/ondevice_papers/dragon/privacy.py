"""What leaves the device: for each way to answer, the fields of messages that can carry something of its contents.

The documents themselves, their scores and their rows of keys and values leave it never. What does:

- In the handshake, which model it has: its name and the digests of weights and tokenizer.
- The query, in every session: the cloud retrieves with it. Nobody who must hide the query can use a cloud.
- Target tokens, wherever the device aggregates: the answer is written by both sides, so the cloud knows it. An answer
  may quote the device's documents; then the quotation is known too, unless a guard is set (`live.guard`), which goes on
  alone before so long a run has left.
- The device's drafts, their distributions and log h, only where the aggregator is on the cloud or may move there. A
  distribution depends on the private documents, and a draft may quote them even where the answer does not.

Which of the cloud's drafts are rejected depends on the device's documents too, a bit a token. The baselines are other
programs and not in the table: RAG-Sequence sends the device's own answers, written from its documents alone.

TLS hides all of it from the network; the table is about what the cloud itself learns.
"""

from __future__ import annotations

import pandas as pd

from ondevice_papers.dragon.messages import Begin

_ALWAYS = {"Begin": Begin.__struct_fields__, "End": ("session", "position")}
_RESUMES = {"Resume": ("session", "epoch", "position", "aggregates")}
_DECIDES = {"Target": ("session", "epoch", "position", "token", "accepted")}
_DRAFTS = {"Draft": ("session", "epoch", "position", "token", "distribution", "log_weight", "pace")}
_MOVES = {"Switch": ("session", "epoch", "position", "drafts", "profile")}
_CONTENTS = {
    "Begin": "the query",
    "Target": "the answer's tokens",
    "Draft": "its drafts with their distributions",
    "Switch": "and those undecided when the aggregator moves",
}
PRIVATE = ("distribution", "log_weight", "drafts")  # fields that come from the device's documents by themselves


def sent_by_device(begin: Begin) -> dict[str, tuple[str, ...]]:
    """The kinds of messages that the device may send in this session, and their fields; it sends no others."""
    kinds = dict(_ALWAYS)
    if begin.mode in ("cloud-only", "sequence-wise"):
        return kinds  # the device mixes by itself what the cloud has sent
    moves = begin.scheduler != "stay"
    kinds |= _RESUMES
    if begin.aggregator == "device" or moves:
        kinds |= _DECIDES
    if begin.aggregator == "cloud" or moves:
        kinds |= _DRAFTS
    return kinds | _MOVES if moves else kinds


def keeps_documents(begin: Begin) -> bool:
    """Whether neither a draft nor a distribution of the device's documents leaves it."""
    return not any(name in PRIVATE for fields in sent_by_device(begin).values() for name in fields)


def table() -> pd.DataFrame:
    """A row a way to answer: mode, aggregator, what the device sends of its own, and whether it keeps its documents."""
    ways = [("speculative, shared, token-wise", "speculative", "device", "stay"),
            ("the same", "speculative", "cloud", "stay"), ("the same", "speculative", "device", "lagging"),
            ("sequence-wise", "sequence-wise", "device", "stay"),
            ("cloud-only", "cloud-only", "device", "stay")]  # fmt: skip
    rows = []
    for name, mode, side, scheduler in ways:
        begin = Begin("table", 0, mode, 1, "query", 1, side, scheduler=scheduler)  # type: ignore[arg-type]
        kinds = sent_by_device(begin)
        contents = [text for kind, text in _CONTENTS.items() if kind in kinds]
        aggregator = side if scheduler == "stay" else "moves"
        rows.append((name, aggregator, ", ".join(contents), keeps_documents(begin)))
    return pd.DataFrame(rows, columns=["mode", "aggregator", "the device sends", "documents' distributions stay"])

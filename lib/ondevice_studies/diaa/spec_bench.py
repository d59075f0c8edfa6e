"""Every drafter on Spec-Bench's requests to a public model, the most important first (`speculation.spec_bench`).

`make record PAPER=diaa ARGS="--only drafters"` records what is missing.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from ondevice import evidence
from ondevice_studies.diaa.workbench import Workbench
from ondevice_studies.speculation import spec_bench
from ondevice_studies.speculation.request_set import Request
from ondevice_studies.speculation.spec_bench import PART, Method, name_of, recorded_requests

__all__ = ["METHODS", "PART", "Method", "load", "name_of", "record", "recorded_requests", "run"]

_PAPER = "ondevice_studies.diaa.paper_drafters"

# In the order of their importance, in which they are recorded.
METHODS: dict[str, Method] = {
    "DIAA": Method(f"{_PAPER}:diaa", 16),
    "TR": Method("token-recycling", 80),
    "PLD": Method(f"{_PAPER}:prompt_lookup", 10, replayed=True),
    "PLD, transformers' rules": Method("prompt-lookup", 10, replayed=True),
    "SAM-D": Method(f"{_PAPER}:sam_decoding", 39, replayed=True),
    "mixture 32": Method("mixture", 32),
    "Goose 32": Method("goose", 32),
    "RACER 32": Method("racer", 32),
    "DIAA 32": Method(f"{_PAPER}:diaa", 32),
    "mixture 8": Method("mixture", 8),
    "Goose 8": Method("goose", 8),
    "RACER 8": Method("racer", 8),
    "SuffixDecoding 32": Method("suffix-decoding", 32, replayed=True),
    "SuffixDecoding 8": Method("suffix-decoding", 8, replayed=True),
    "Cacheback 32": Method("cacheback", 32, replayed=True),
    "Cacheback 8": Method("cacheback", 8, replayed=True),
    "LogitSpec 32": Method("logit-spec", 32),
    "TR 32": Method("token-recycling", 32),
    "DIAA, prompt read": Method(f"{_PAPER}:diaa_prompt_read", 16),
    "LogitSpec 8": Method("logit-spec", 8),
    "TR 8": Method("token-recycling", 8),
    "layer skipping": Method(f"{_PAPER}:layer_skipping", 64, "part"),
    # Table 3 and Figures 3, 4: without warmed tables, without a grown tree, without both, updates one step late
    "cold": Method(f"{_PAPER}:diaa_cold", 16, "part"),
    "static 16": Method(f"{_PAPER}:diaa_static", 16, "part"),
    "static 16, cold": Method(f"{_PAPER}:diaa_static_cold", 16, "part"),
    "one step stale": Method(f"{_PAPER}:diaa_stale", 16, "part"),
    **{f"static {nodes}": Method(f"{_PAPER}:diaa_static", nodes, "part") for nodes in (8, 32, 64)},
    **{f"dynamic {nodes}": Method(f"{_PAPER}:diaa", nodes, "part") for nodes in (8, 64)},
    # Figure 8
    "refresh 4": Method(f"{_PAPER}:diaa_refreshed_4", 16, "part"),
    "refresh 8": Method(f"{_PAPER}:diaa_refreshed_8", 16, "part"),
    # Figure 9
    "tables: documents": Method(f"{_PAPER}:diaa_documents", 16, "part"),
    "tables: bigrams": Method(f"{_PAPER}:diaa_bigrams", 16, "part"),
    # the paper's ambiguities
    "rule: replace": Method(f"{_PAPER}:diaa_replacing", 16, "part"),
    "rule: union": Method(f"{_PAPER}:diaa_union", 16, "part"),
    "updates: accepted only": Method(f"{_PAPER}:diaa_accepted_only", 16, "part"),
    "budget: root counts": Method(f"{_PAPER}:diaa_counting_root", 16, "part"),
    "key: two tokens": Method(f"{_PAPER}:diaa_two_tokens", 16, "part"),
}


def run(bench: Workbench, method: Method, requests: Sequence[Request]) -> pd.DataFrame:
    """The passes of a new drafter on requests of one task (`drafted`)."""
    return spec_bench.drafted(bench, method.drafter(bench), requests, method.budget, method.replayed)


def record(model: str, names: Sequence[str]) -> None:
    """Record the named methods that have no record of today's code yet."""
    spec_bench.record("diaa", METHODS, Workbench(model), names)


def again(name: str) -> evidence.Again | None:
    """How passes of a record are made again. None of another record."""
    return spec_bench.again(METHODS, name, Workbench)


def load(model: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(answers, passes) of all recorded methods of a model."""
    return spec_bench.load("diaa", list(METHODS), model)

"""README's two tables: findings, whose words stand here and whose numbers are the published claims', and notebooks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import pandas as pd

from ondevice import assets
from ondevice.evidence.paper_run import read_value
from ondevice.evidence.rules import parts_of


@dataclass(frozen=True)
class Finding:
    """A row of the table of findings: one claim, in words that hold for one verdict.

    words: the claim. setup: the paper's model and machine. shown: ours, where {0} is the first part of its value. here:
    our model and data; {machine} is the one whose clock or memory was read. meaning: for a reader who looks at nothing
    else. verdict: the one that `meaning` was written for. others: the verdicts of further claims that it mentions.
    """

    claim: str
    words: str
    setup: str
    shown: str
    here: str
    verdict: str
    meaning: str
    others: Mapping[str, str] = field(default_factory=dict)


_OPT = "OPT-1.3B; a server and a MacBook"
_PACED = "SmolLM2-135M's answers at OPT-1.3B's paces, 300 ms away"
_LLAMA = "Llama-3.2-3B in 4 bits, Jetson Orin Nano"
_PRICED = "SmolLM2-135M's passes at the costs that the paper's numbers imply"
_SHAPE = "Qwen3-Reranker-0.6B's shape, random weights, {machine}"

FINDINGS = (
    Finding(
        "disco-c02",
        "**DiSCo**: the first token comes sooner in the mean",
        "GPT-4o-mini and three other services; Pixel 7 Pro and Xiaomi 14",
        "{0} to {1} percent",
        "distributions fitted to the paper's tables",
        "trend",
        "On average over all settings it comes sooner, in the worst one later. "
        "The same budget spent at random passes the rule, too.",
    ),
    Finding(
        "dragon-c01",
        "**DRAGON**: documents on two sides predict text better than central retrieval; the ratio of both gains",
        "OPT-1.3B, Qwen2.5-1.5B; WikiText",
        "{0} x",
        "SmolLM2-135M; WikiText-2",
        "undecided",
        "It gains about as much as the best central retrieval, cut to 256 tokens as in the paper. "
        "One side that mixes the outputs of its own documents gains as much. "
        "Of 100 questions that need both sides SmolLM2 answers 1 with it, and none by the larger side alone.",
    ),
    Finding(
        "dragon-c11",
        "**DRAGON**: drafting takes less time per token than waiting for the other side at each token",
        _OPT,
        "{0} percent, and {1} of 100 answers more right than the device's alone",
        _PACED,
        "reproduced",
        "Drafts hide the network. A router, by which the side of the larger weight answers alone, is faster still and "
        "has as many answers right: aggregation of tokens brings nothing over routing here.",
    ),
    Finding(
        "dragon-c10",
        "**DRAGON**: and less than waiting once, for the whole text",
        _OPT,
        "{0} percent",
        _PACED,
        "contradicted",
        "It takes more. A whole answer's distributions hide behind the device's decoding, and so would whole rows of "
        "floats, as the authors' program sends them.",
    ),
    Finding(
        "sdnpu-c42",
        "**sd.npu**: calibrated and reused drafts have more tokens per pass than SAM's",
        "Qwen2.5 and Llama 3.2; A100",
        "{0} x at least, {1} x in the mean",
        "SmolLM2-135M; Spec-Bench",
        "trend",
        "The gain is there in each task, somewhat smaller than in the paper. Our mixture of sources gives more tokens "
        "per pass than SAM with both. Speed on a phone's NPU is untested: no phone is measured here.",
    ),
    Finding(
        "diaa-c12",
        "**DIAA**: speed over plain decoding",
        _LLAMA,
        "{0} x",
        _PRICED,
        "trend",
        "Faster than plain decoding where further rows of a pass cost little. "
        "Prompt lookup, which has no tables, is as fast.",
    ),
    Finding(
        "diaa-c02",
        "**DIAA**: the best goodput of all methods",
        _LLAMA,
        "{0} times the best baseline's",
        _PRICED,
        "contradicted",
        "SAM-D, which copies from earlier text, has more tokens per second there.",
    ),
    Finding(
        "grating-c48",
        "**GRATING**: memory of transformers over its own",
        "five rerankers; RTX 5070, Apple M2",
        "{0} x resident, {1} x anonymous",
        _SHAPE,
        "trend",
        "It needs far less resident memory. Most of the difference is file pages, which a system can drop. "
        "Of other memory it takes about as much as transformers. Under a hard limit without room for all weights "
        "it ranks as fast as without one, and transformers take half as long again.",
    ),
)

NOTEBOOKS = {  # of each: its paper, and what a reader learns
    "disco": (
        "[DiSCo](https://arxiv.org/abs/2502.11417): *Device-Server Collaborative LLM-Based Text Streaming Services*, "
        "Findings of ACL 2025",
        "How a device races a server for the first token within a budget, and how an answer moves between them; "
        "the optimum, and a router that learns it",
    ),
    "dragon": (
        "[DRAGON](https://doi.org/10.1145/3704413.3764419): *Enhancing On-Device Model Performance with Distributed "
        "Retrieval-Augmented Generation*, MobiHoc 2025",
        "How two processes with a link between them write one text; which side holds the answer, and an attack on "
        "what is sent",
    ),
    "sdnpu": (
        "[sd.npu](https://arxiv.org/abs/2510.15312): *Accelerating Mobile Language Model via Speculative Decoding and "
        "NPU-Coordinated Execution*, 2025",
        "How graphs of fixed shapes are changed during prefill, and drafts calibrated and reused; a CPU stands for the "
        "phone's NPU",
    ),
    "diaa": (
        "DIAA: *A Decoding-Efficient Inference Acceleration Approach for On-Device Large Language Models*, AAAI 2026",
        "How two look-up tables grow a tree of drafts; every other drafter on the same requests, in several number "
        "formats",
    ),
    "grating": (
        "[GRATING](https://arxiv.org/abs/2510.15620): *Low-Latency and Memory-Efficient Semantic Selection on Device*, "
        "2025",
        "How a reranker streams its weights from disk and drops candidates early, by the paper's rule and by margins "
        "with a certificate",
    ),
    "assistant": ("none", "All five systems in one assistant: what each adds to the others, and what cancels"),
    "scoreboard": ("all five", "Every claim with its verdict, interval, null and machine, and how its rule changed"),
}


def findings(claims: pd.DataFrame) -> str:
    """Markdown: FINDINGS with the numbers of the published claims. claims: of `board.claims`.

    Raises ValueError where a claim has another verdict than the one that its words were written for.
    """
    rows = claims.set_index("claim").astype(str)
    lines = ["| claim | paper (model, machine) | here (model, machine) | what it means |", "|---|---|---|---|"]
    for finding in FINDINGS:
        for claim, verdict in {finding.claim: finding.verdict, **finding.others}.items():
            published = str(rows.loc[claim, "verdict"])
            if published != verdict:
                raise ValueError(
                    f"README's words on {finding.claim} take {claim} for {verdict}, but it is {published}: mend them."
                )
        row = {str(name): str(value) for name, value in rows.loc[finding.claim].items()}
        lines.append(f"| {' | '.join(_cells(finding, row))} |")
    return "\n".join(lines)


def _cells(finding: Finding, row: Mapping[str, str]) -> list[str]:
    """A row's four cells. row: of the claim."""
    ours = finding.shown
    if row["value"]:
        units = f"{row['n']} {row['drawn']}".strip()
        basis = [] if row["machine"] else [row["kind"]]
        setup = [finding.here.format(machine=row["machine"]), units, *basis]
        parts = [f"{part}" for part in parts_of(read_value(row["value"]))]
        ours = f"{finding.shown.format(*parts)} ({'; '.join(filter(None, setup))})"
    verdict = f"*{row['verdict']}*"
    number, _, of_null = row["null"].rpartition(": ")
    if number:
        verdict += f" (null, {null_of(finding.claim)}: {number}, *{of_null}*)"
    return [finding.words, f"{row['printed']} ({finding.setup})", ours, f"{verdict}. {finding.meaning}"]


def null_of(claim: str) -> str:
    """The trivial method that a claim's rule puts in the paper's place."""
    rows = assets.paper_list("claims", claim.partition("-")[0]).set_index("claim_id")
    return str(rows.loc[claim, "null"])


def notebooks() -> str:
    """Markdown: NOTEBOOKS, with the minutes of the published runs and the machines that made them."""
    lines = ["| notebook | its paper | what you learn | minutes |", "|---|---|---|---|"]
    for name, (paper, learnt) in NOTEBOOKS.items():
        lines.append(f"| [{name}](notebooks/{name}.ipynb) | {paper} | {learnt} | {minutes(name)} |")
    return "\n".join(lines)


def minutes(paper: str) -> str:
    """How long a published run took up to its last exhibit, in whole minutes."""
    paths = sorted((assets.ROOT / "figures" / paper).glob("*.json"))
    seconds = sum(float(json.loads(path.read_text(encoding="utf-8")).get("seconds", 0)) for path in paths)
    return f"{seconds / 60:.0f}" if seconds >= 30 else "under 1"

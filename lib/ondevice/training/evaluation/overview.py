"""data/models/README.md: one table over the bundled models, from their evaluations."""

from __future__ import annotations

import json
from pathlib import Path

from ondevice import assets
from ondevice.training.evaluation import card
from ondevice.training.evaluation.bars import BARS
from ondevice.training.evaluation.card import Evaluation
from ondevice.training.reranking import card as reranking

RERANKING = reranking.EVALUATION


def models_folder() -> Path:
    """data/models."""
    return assets.data("models")


def write_overview(folder: Path | None = None) -> None:
    """Write README.md of a folder of models (data/models by default)."""
    place = folder or models_folder()
    assets.write_text(place / "README.md", overview(place))


def overview(place: Path) -> str:
    """The table: a column a language model, a row a bar; other models are linked below it."""
    folders = [path for path in sorted(place.iterdir()) if path.is_dir()]
    found = {path.name: evaluation for path in folders if (evaluation := card.read(path))}
    rerankers = [path.name for path in folders if (path / RERANKING).is_file()]
    parts = [
        "# Bundled models",
        "Trained for this repository on the documentation corpus ([corpus card](../corpus/README.md)): language models "
        "from random weights, rerankers from these and from all-MiniLM-L6-v2. Each has a card with how it was measured "
        "and what it is not for.",
    ]
    if found:
        parts += ["## Language models", _table(found)]
    if rerankers:
        parts += ["## Rerankers", _rerankers(place, rerankers)]
    parts.append("`manifest.json` holds the sha256 of every file that a model is loaded from.")
    return "\n\n".join(parts) + "\n"


def _rerankers(place: Path, names: list[str]) -> str:
    rows = ["| | nDCG@10 | points over the better of BM25 and embedder |", "|---|---|---|"]
    for name in names:
        found = json.loads((place / name / RERANKING).read_text(encoding="utf-8"))
        mean = found["metrics"]["model"]["ndcg@10"]
        shown = f"{mean['mean']:.3f} ± {mean['error']:.3f}"
        rows.append(f"| [{name}]({name}/README.md) | {shown} | {reranking.margin(found)} |")
    return "\n".join(rows)


def _table(found: dict[str, Evaluation]) -> str:
    head = [f"| | {' | '.join(f'[{name}]({name}/README.md)' for name in found)} |", "|---" * (len(found) + 1) + "|"]
    shape = {
        "parameters (millions)": lambda one: f"{one['model']['parameters'] / 1e6:.1f}",
        "layers × width": lambda one: f"{one['model']['num_hidden_layers']} × {one['model']['hidden_size']}",
        "tokens trained on (millions)": lambda one: f"{one['training']['tokens'] / 1e6:.1f}"
        if one.get("training") else "-",
    }  # fmt: skip
    rows = [f"| {label} | {' | '.join(cell(one) for one in found.values())} |" for label, cell in shape.items()]
    for bar in BARS:
        cells = []
        for one in found.values():
            met = bar.met(one["results"], one["model"]["size"])
            cells.append(f"{card.shown(bar.measured(one['results']), bar.percent)} ({card.verdict(met)})")
        rows.append(f"| {bar.label} | {' | '.join(cells)} |")
    return "\n".join([*head, *rows])

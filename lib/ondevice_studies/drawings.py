"""Drawings of the systems for their pages, docs/drawings/*.svg: `python -m ondevice_studies.drawings` writes them."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt

from ondevice import assets, plotting

FOLDER = "docs/drawings"
# Names of elements are then the same in every run. Text stays text, which is small and can be searched.
_SVG = {"svg.hashsalt": "ondevice", "svg.fonttype": "none"}


@dataclass(frozen=True)
class Diagram:
    """A system as boxes and arrows. boxes: text by name; at: the middle of each, in inches; arrows: (from, to, word).

    page: of docs/, which shows it. words: the same in a sentence or two, for those who cannot see it.
    """

    page: str
    words: str
    width: float
    height: float
    boxes: Mapping[str, str]
    at: Mapping[str, tuple[float, float]]
    arrows: tuple[tuple[str, str, str], ...]


DRAWINGS = {
    "disco": Diagram(
        "router.md",
        "A dispatcher starts the device, the server or both. The first token wins, and the answer may migrate.",
        11.0,
        2.6,
        {
            "prompt": "prompt",
            "dispatcher": "dispatcher:\nwaits within the budget",
            "device": "device",
            "server": "server",
            "race": "race:\nthe first token wins",
            "reader": "reader",
        },
        {
            "prompt": (0.8, 1.3),
            "dispatcher": (3.1, 1.3),
            "device": (5.8, 2.1),
            "server": (5.8, 0.5),
            "race": (8.3, 1.3),
            "reader": (10.3, 1.3),
        },
        (
            ("prompt", "dispatcher", ""),
            ("dispatcher", "device", "wait"),
            ("dispatcher", "server", "wait"),
            ("device", "race", "its TTFT"),
            ("server", "race", "its TTFT"),
            ("race", "reader", "stream"),
            ("device", "server", "migration, either way"),
        ),
    ),
    "dragon": Diagram(
        "pair.md",
        "A device with private documents and a cloud with public ones draft tokens. One mixes both and decides.",
        11.0,
        2.6,
        {
            "question": "question",
            "device": "device:\nprivate documents, model",
            "cloud": "cloud:\npublic documents, model",
            "aggregator": "aggregator, on either side:\nmixes both, accepts or resamples",
            "answer": "answer",
        },
        {
            "question": (0.8, 1.3),
            "device": (3.3, 2.1),
            "cloud": (3.3, 0.5),
            "aggregator": (7.3, 1.3),
            "answer": (10.3, 1.3),
        },
        (
            ("question", "device", ""),
            ("question", "cloud", ""),
            ("device", "aggregator", "drafts ahead"),
            ("cloud", "aggregator", "drafts ahead"),
            ("aggregator", "answer", "tokens"),
        ),
    ),
    "grating": Diagram(
        "reranker.md",
        "All candidates pass one layer at a time. Weights come from disk, and after each layer candidates leave.",
        11.0,
        2.6,
        {
            "query": "query\nand candidates",
            "rows": "embedding rows,\ncached",
            "layer": "one layer,\nchunk by chunk",
            "scores": "scores:\naccept, go on, drop",
            "disk": "weights\non disk",
            "window": "window\nof two units",
            "left": "candidates\nthat go on",
            "best": "best K",
        },
        {
            "query": (0.9, 2.0),
            "rows": (3.2, 2.0),
            "layer": (5.9, 2.0),
            "scores": (8.9, 2.0),
            "disk": (3.2, 0.5),
            "window": (5.9, 0.5),
            "left": (7.4, 1.1),
            "best": (8.9, 0.5),
        },
        (
            ("query", "rows", ""),
            ("rows", "layer", ""),
            ("disk", "window", "read ahead"),
            ("window", "layer", ""),
            ("layer", "scores", "hidden states"),
            ("scores", "left", ""),
            ("left", "layer", ""),
            ("scores", "best", "accepted"),
        ),
    ),
    "drafting": Diagram(
        "drafters.md",
        "A drafter proposes a tree of tokens. One pass of the model verifies it, and the accepted tokens go back.",
        11.0,
        2.6,
        {
            "text": "prompt\nand answer so far",
            "drafter": "drafter: look-up tables,\nsuffixes, a mixture",
            "tree": "draft:\nat most B tokens",
            "model": "model:\none forward pass",
            "accepted": "accepted tokens",
        },
        {
            "text": (1.0, 2.0),
            "drafter": (4.1, 2.0),
            "tree": (7.4, 2.0),
            "model": (7.4, 0.5),
            "accepted": (3.2, 0.5),
        },
        (
            ("text", "drafter", ""),
            ("drafter", "tree", "grow"),
            ("tree", "model", "verify"),
            ("model", "accepted", "walk"),
            ("accepted", "text", "append"),
        ),
    ),
    "sdnpu": Diagram(
        "graphs.md",
        "A large graph reads the prompt and a small one decodes, over the same weights. Drafts fill the small one.",
        11.0,
        3.2,
        {
            "prompt": "prompt",
            "prefill": "prefill graph:\nmany rows",
            "decode": "decode graph:\nfew rows",
            "tokens": "accepted tokens,\nrejected drafts",
            "tree": "calibrated drafts",
            "weights": "weights of a block,\nin both graphs",
        },
        {
            "prompt": (0.8, 1.6),
            "prefill": (3.1, 1.6),
            "decode": (6.6, 1.6),
            "tokens": (9.7, 1.6),
            "weights": (4.85, 2.8),
            "tree": (4.85, 0.4),
        },
        (
            ("prompt", "prefill", "chunks"),
            ("prefill", "decode", "switch"),
            ("decode", "tokens", "verify"),
            ("weights", "prefill", ""),
            ("weights", "decode", ""),
            ("prefill", "tree", "calibrate"),
            ("tree", "decode", "rows"),
            ("tokens", "tree", "reuse"),
        ),
    ),
}


def svg(drawing: Diagram) -> str:
    """The drawing as the text of an SVG file, the same in every run, whatever style is set."""
    boxes = {text: drawing.at[name] for name, text in drawing.boxes.items()}
    arrows = [(drawing.boxes[start], drawing.boxes[end], word) for start, end, word in drawing.arrows]
    with plt.style.context(["default", _SVG]):
        figure = plotting.diagram(boxes, arrows, width=drawing.width, height=drawing.height)
        figure.subplots_adjust(0, 0, 1, 1)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Title": drawing.words})
        plt.close(figure)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def files() -> dict[Path, str]:
    """Every drawing's file with the text that it should have."""
    return {assets.ROOT / FOLDER / f"{name}.svg": svg(drawing) for name, drawing in DRAWINGS.items()}


def main() -> None:
    """Write docs/drawings."""
    for path, text in files().items():
        path.parent.mkdir(exist_ok=True)
        assets.write_text(path, text)


if __name__ == "__main__":
    main()

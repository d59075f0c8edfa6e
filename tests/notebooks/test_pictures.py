"""What every figure that a notebook saves must have: a caption with its origin, letters as such, a width that fits."""

import ast
import json
import re

import pytest
from PIL import Image

from ondevice.run import Layout

LAYOUT = Layout()
WIDEST = 7.2  # inches
DOTS = 150  # an inch, of an exhibit
WORDS = {"xlabel", "ylabel", "title", "label", "labels", "words"}  # arguments that are drawn
GREEK = re.compile(r"(?<![\\\w])(alpha|beta|gamma|delta|epsilon|eta|lambda|mu|sigma|tau|theta|phi|rho)(?![\w'])", re.I)


def called(node) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""


def of_calls(source: str, *names: str) -> list[ast.Call]:
    lines = [line for line in source.splitlines() if not line.startswith(("%", "!"))]
    return [node for node in ast.walk(ast.parse("\n".join(lines))) if called(node) in names]


def faults(source: str) -> list[str]:
    """What a cell's figures lack."""
    saves = [call for call in of_calls(source, "save") if len(call.args) > 2]
    captions = [call for call in of_calls(source, "caption") if len(call.args) > 2]
    captions += [call for call in of_calls(source, "panel") if "origin" in {word.arg for word in call.keywords}]
    named = [f"{len(saves)} figures, {len(captions)} captions with an origin"] if len(saves) > len(captions) else []
    texts = [argument for call in of_calls(source, "caption") for argument in call.args[1:2]]
    for node in ast.walk(ast.parse("\n".join(line for line in source.splitlines() if line[:1] not in "%!"))):
        texts += [word.value for word in getattr(node, "keywords", []) if word.arg in WORDS]
    drawn = [leaf.value for text in texts for leaf in ast.walk(text) if isinstance(leaf, ast.Constant)]
    return named + [text for text in drawn if isinstance(text, str) and GREEK.search(text)]


def cells(paper: str) -> dict[str, str]:
    notebook = json.loads(LAYOUT.notebook(paper).read_text(encoding="utf-8"))
    return {cell["id"]: "".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"}


@pytest.mark.parametrize("paper", LAYOUT.papers())
def test_every_saved_figure_has_a_caption_with_its_origin_and_greek_letters(paper):
    named = {cell: lacks for cell, source in cells(paper).items() if (lacks := faults(source))}
    assert named == {}


CAPTION = 'plotting.caption(figure, "What to see.", plotting.Origin("a", "b", "3 runs"))\n'
SAVE = 'run.save("fig_01_x", table, figure)\n'


@pytest.mark.parametrize(
    ("source", "count"),
    [
        (CAPTION + SAVE, 0),
        ('run.save("fig_01_x", table)\n', 0),
        (SAVE, 1),
        ('plotting.caption(figure, "What to see.")\n' + SAVE, 1),
        ("plotting.panel(table, words='What to see.', origin=origin)\n" + SAVE, 0),
        ("plotting.panel(table, words='What to see.')\n" + SAVE, 1),
        (CAPTION + SAVE + SAVE, 1),
        ('axis.set(xlabel="tau", ylabel=r"$\\alpha$ of all")\n', 1),
        (CAPTION.replace("What to see.", "What Delta is.") + SAVE, 1),
    ],
)
def test_what_a_figure_lacks_is_named(source, count):
    assert len(faults(source)) == count


def width(path) -> float:
    with Image.open(path) as picture:
        return picture.width / DOTS


def test_no_published_figure_is_too_wide():
    wide = {f"{path.parent.name}/{path.stem}" for path in LAYOUT.figures.glob("*/*.png") if width(path) > WIDEST + 0.01}
    assert sorted(wide) == []

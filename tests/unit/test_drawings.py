"""The drawings of docs/ are what their program draws, and each stands on its page."""

import matplotlib.pyplot as plt
import pytest

from ondevice import assets, plotting
from ondevice_studies import drawings

NAMES = sorted(drawings.DRAWINGS)


@pytest.mark.parametrize("name", NAMES)
def test_a_committed_drawing_is_what_the_program_draws(name):
    path = assets.ROOT / drawings.FOLDER / f"{name}.svg"
    with plt.rc_context():
        plotting.use_style()  # a notebook's style changes no drawing
        drawn = drawings.svg(drawings.DRAWINGS[name])
    assert path.read_text(encoding="utf-8") == drawn, "run python -m ondevice_studies.drawings"
    assert sorted(path.stem for path in path.parent.iterdir()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_drawing_stands_on_its_page(name):
    drawing = drawings.DRAWINGS[name]
    assert set(drawing.boxes) == set(drawing.at)
    page = (assets.ROOT / "docs" / drawing.page).read_text(encoding="utf-8").splitlines()
    assert page[2] == f"![{drawing.words}](drawings/{name}.svg)"


@pytest.mark.parametrize("name", NAMES)
def test_no_box_covers_another_or_leaves_the_picture(name):
    drawing = drawings.DRAWINGS[name]
    edges = []
    for box, (x, y) in drawing.at.items():
        text = drawing.boxes[box].split("\n")
        across, up = 0.045 * max(map(len, text)) + 0.1, 0.08 * len(text) + 0.1  # half a box of 8 points, at the most
        assert across <= x <= drawing.width - across and up <= y <= drawing.height - up, box
        edges.append((x - across, x + across, y - up, y + up))
    for number, (left, right, bottom, top) in enumerate(edges):
        for other in edges[:number]:
            assert right <= other[0] or other[1] <= left or top <= other[2] or other[3] <= bottom

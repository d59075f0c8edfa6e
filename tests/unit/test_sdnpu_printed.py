"""What the notebook says of sd.npu's printed numbers: by trying all samples, and at both ends of the bounds."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pandas as pd
import pytest

from ondevice.run import Layout


@pytest.fixture(scope="module")
def bounds() -> dict:
    """The functions of the notebook's cell `paper-bounds`."""
    cells = json.loads(Layout().notebook("sdnpu").read_text(encoding="utf-8"))["cells"]
    functions = {"pd": pd, "Sequence": Sequence}
    exec("".join(next(cell["source"] for cell in cells if cell["id"] == "paper-bounds")), functions)
    return functions


def test_at_both_ends_of_c_the_equations_hold(bounds):
    row = pd.Series({"+G": 47.72, "+G+SD": 25.35, "Ours": 15.08})
    table = bounds["forward_bounds"](row, pd.Series({"no": 3.60, "yes": 4.21}))
    for c, end in ((0.0, "high"), (table.loc["c", "high"], "low")):
        assert c + table.loc["vanilla", end] == pytest.approx(47.72)
        assert c + table.loc["sam", end] / 3.60 == pytest.approx(25.35)
        assert c + table.loc["ours", end] / 4.21 == pytest.approx(15.08)
    assert table.loc["ours", "low"] == pytest.approx(table.loc["vanilla", "low"])


@pytest.mark.parametrize(
    ("shares", "size"),
    [([15.4, 23.1, 61.5], 13), ([50.0, 50.0], 2), ([33.3, 66.7], 3), ([15.4, 23.2, 61.4], 228)],
)
def test_the_least_sample_that_gives_the_printed_shares(bounds, shares, size):
    def gives(total: int) -> bool:
        """Whether any counts do, by trying all of the first kind and all of the second."""
        first = {n for n in range(total + 1) if round(100 * n / total, 1) == shares[0]}
        second = {n for n in range(total + 1) if round(100 * n / total, 1) == shares[1]}
        third = [total - a - b for a in first for b in second] if len(shares) == 3 else []
        if not third:
            return len(shares) == 2 and any(total - n in second for n in first)
        return any(round(100 * n / total, 1) == shares[2] for n in third)

    assert bounds["least_sample"](shares) == size
    assert [total for total in range(1, size + 1) if gives(total)] == [size]


def test_shares_of_no_sample_are_refused(bounds):
    with pytest.raises(ValueError, match=r"500 .*15\.4, 23\.1, 50"):
        bounds["least_sample"]([15.4, 23.1, 50.0], most=500)

"""The README's Python examples run, one after the other, as they stand."""

import re

import numpy as np

from ondevice import assets


def test_its_examples_run(capsys, tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", (assets.ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    text = "Return the mean of the array elements along the given axis. " * 20
    names = {
        "documents": [f"How to open file {number}." for number in range(12)], "text": text, "np": np,
        "sequences": [[5, 6, 7, 8] * 5], "answers": [([5, 6], [7, 8, 5, 6, 7])],
        "queries": [f"open file {number}" for number in range(199)], "path": tmp_path / "calibration.json",
        "candidates": [[f"How to open file {number + more}." for more in range(6)] for number in range(199)],
    }  # fmt: skip
    for block in blocks:
        exec(compile(block, "README.md", "exec", dont_inherit=True), names)
    assert len(names["best"]) == 5
    said = capsys.readouterr().out.strip()
    assert said.startswith("def numpy.mean") and len(names["tables"].tokens) == names["found"].model.config.vocab_size

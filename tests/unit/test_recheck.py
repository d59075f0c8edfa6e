"""Records against today's code: which of them can be made again, and from what."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ondevice.evidence import records, sidecars
from ondevice_studies import recheck

RECORDS = [
    (paper, Path(file).stem)
    for file, entry in records.manifest().items()
    if "rows" in entry and (paper := file.partition("/")[0]) in recheck.MODULES
]
WHOLE = {  # what takes all of it, or hours
    ("sdnpu", "compiled"), ("sdnpu", "emulated"), ("sdnpu", "smollm2-cosines"),
    ("sdnpu", "smollm2-contexts"), ("grating", "smollm2-probes"),
}  # fmt: skip


@pytest.mark.parametrize(("paper", "name"), RECORDS, ids=["/".join(pair) for pair in RECORDS])
def test_a_part_of_every_record_without_a_clock_can_be_made_again(paper: str, name: str):
    way = recheck.again(paper, name)
    if "." in name or (paper, name) in WHOLE:
        assert way is None
        return
    assert way is not None
    table = records.load(paper, name)
    drawn = [way.draw(table, np.random.default_rng(seed)) for seed in (0, 0, 1)]
    named = [*way.unit, *way.columns, *([way.margin] if way.margin else [])]
    assert all(len(rows) and set(named) <= set(rows) for rows in drawn) and drawn[0].equals(drawn[1])
    made = sidecars.made_by({}, way.functions)
    assert made["code"].startswith("reached-") and made["versions"]

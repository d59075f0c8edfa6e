"""Faults of an audit that are put into committed records: every one of them is refused when it is loaded."""

import json
import shutil

import pandas as pd
import pytest

from ondevice import assets
from ondevice.evidence import RecordError, load, records, sidecars


@pytest.fixture(params=["diaa/answers.parquet", "diaa/formats.xeon-amx-2c.csv", "sdnpu/whole.zen4-2c.csv"])
def copied(request, tmp_path, monkeypatch):
    """A committed record alone in a folder, which may be harmed, and its sidecar."""
    path = tmp_path / request.param
    path.parent.mkdir()
    for name in (request.param, request.param.rpartition(".")[0] + ".json"):
        shutil.copy(assets.data("records", name), tmp_path / name)
    shutil.copy(assets.data("records", "manifest.json"), tmp_path)
    monkeypatch.setattr(records, "folder", lambda: tmp_path)
    assert len(load(path.parent.name, path.stem))
    return path


def refused(path, message):
    with pytest.raises(RecordError, match=message) as error:
        load(path.parent.name, path.stem)
    assert "\n" not in str(error.value) and path.name in str(error.value)


def mended(path, made, rows):
    """The checksums follow."""
    path.with_suffix(".json").write_text(json.dumps(made))
    records.enter(path, sidecar=sidecars.sha256(path.with_suffix(".json")), rows=rows)


@pytest.mark.parametrize("field", [{"machine": "zen9-64c"}, {"commit": "0" * 40}, {"minutes": 999.0}], ids=str)
def test_an_invented_machine_commit_or_duration_is_refused(copied, field):
    made = json.loads(copied.with_suffix(".json").read_text())
    mended(copied, {**made, **field}, made["rows"])
    refused(copied, "edited since it was made")


@pytest.mark.parametrize("counted", [False, True], ids=["rows as they were", "rows counted anew"])
def test_a_tenth_of_the_rows_less_with_the_checksum_mended_is_refused(copied, counted):
    table = pd.read_parquet(copied) if copied.suffix == ".parquet" else pd.read_csv(copied, keep_default_na=False)
    less = table[: int(0.9 * len(table))]
    if copied.suffix == ".parquet":
        less.to_parquet(copied, index=False)
    else:
        less.to_csv(copied, index=False)
    made = json.loads(copied.with_suffix(".json").read_text())
    mended(copied, {**made, "rows": len(less)} if counted else made, len(less))
    refused(copied, "edited since it was made")

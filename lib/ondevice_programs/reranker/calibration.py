"""What was calibrated for a model: a pruning rule for each K, in a file beside the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ondevice import assets
from ondevice_papers.grating.checksums import Checksums
from ondevice_papers.grating.margins import MarginRule
from ondevice_papers.grating.probes import Probes
from ondevice_papers.grating.pruning import Rule

FILE = "grating.calibration.json"


@dataclass(frozen=True)
class Calibration:
    """A pruning rule for a top K, and what it did on the pools that it was calibrated on.

    Certified is a mean recall of the full model's top K of at least `target`, with `confidence`. mode: "set" or
    "order", as the reranker's. queries: that certified. truncated: pairs of theirs that were cut, as too long. reached:
    mean recall on them. saved: share of the layer-candidates. Nothing is pruned where `margins` is None: nothing could
    be certified.
    """

    k: int
    mode: str
    target: float
    confidence: float
    queries: int
    reached: float
    saved: float
    truncated: int = 0
    weights: list[list[float]] | None = None
    margins: list[float] | None = None

    @property
    def rule(self) -> Rule | None:
        """The pruning rule that was calibrated; None prunes nothing."""
        return None if self.margins is None else MarginRule(np.array(self.weights), np.array(self.margins))


def fingerprint(sums: Checksums) -> str:
    """A checksum of a model's weights, so that what was calibrated for one is not used for another."""
    rows = [xxhash.xxh3_64_hexdigest(checksums.tobytes()) for _, checksums in sorted(sums.rows.items())]
    return xxhash.xxh3_64_hexdigest(repr((sorted(sums.tensors.items()), rows)).encode())


def digest(content: Any) -> str:
    """A checksum of what repr says of it."""
    return xxhash.xxh3_64_hexdigest(repr(content).encode())


def require(certified: Mapping[str, str], scoring: Mapping[str, str], what: str) -> None:
    """Raise ValueError, naming what differs, where scores are not made as those that were calibrated."""
    odd = [name for name in scoring if certified.get(name) != scoring[name]]
    if odd:
        raise ValueError(f"{what} was calibrated for another {' and '.join(odd)}: calibrate anew, or remove it.")


def load(path: Path) -> tuple[dict[str, str], Probes | None, dict[tuple[int, str], Calibration]]:
    """A file's scoring (digests of all that scores are made with, by what they are of), probes, calibrations.

    Raises ValueError on a damaged file.
    """
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        calibrations = [Calibration(**entry) for entry in stored["calibrations"]]
        probes = Probes(**stored["probes"]) if stored.get("probes") else None
        scoring = dict(stored["scoring"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path.name} is damaged: it is no file of calibrations.") from None
    return scoring, probes, {(calibration.k, calibration.mode): calibration for calibration in calibrations}


def save(
    path: Path, scoring: Mapping[str, str], probes: Probes | None, calibrations: Mapping[tuple[int, str], Calibration]
) -> None:
    """Write the file whole, or not at all."""
    stored: dict[str, Any] = {"scoring": dict(scoring), "calibrations": list(map(asdict, calibrations.values()))}
    if probes is not None:
        stored["probes"] = {
            "weights": probes.weights.tolist(),
            "intercepts": probes.intercepts.tolist(),
            "queries": list(probes.queries),
        }
    assets.write_text(path, json.dumps(stored, indent=1) + "\n")

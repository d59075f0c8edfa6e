"""An exhibit on disk: numbers, picture and where they come from, machine and versions included; the scoreboard."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from io import BytesIO
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from PIL import Image, PngImagePlugin

from ondevice import __version__, assets, cores
from ondevice.evidence.drawn import hashes

_PACKAGES = ("numpy", "scipy", "pandas", "matplotlib", "torch", "transformers", "scikit-learn", "xgboost-cpu")
MACHINE_VARIABLE = "ONDEVICE_MACHINE"  # a name in the place of the one from stable facts
DRAWN = "Drawn"  # in a PNG's metadata: the hash of what was drawn
_NAMING = ("vendor_id", "cpu family", "model name")  # beside matrix units, what a name is made from
_CPUINFO = Path("/proc/cpuinfo")
_ZEN = {"23": "zen2", "26": "zen5"}  # by family; 25 is Zen 3, or Zen 4 where it has AVX-512


def write_exhibit(
    folder: Path, stem: str, table: pd.DataFrame, figure: Figure | None, record: Mapping[str, Any]
) -> str:
    """Numbers, picture and provenance, in this order; returns the name of the file to look at.

    The JSON holds the hashes of the CSV, of what was drawn, of its structure and of the PNG, whose metadata name the
    second, too.
    """
    numbers = table.to_csv(index=False, float_format="%.6g")
    record = {**record, **environment(), "csv_sha256": hashlib.sha256(numbers.encode()).hexdigest()}
    assets.write_text(folder / f"{stem}.csv", numbers)
    if figure is not None:
        record["drawn_sha256"], record["structure_sha256"] = hashes(figure)
        with assets.writing(folder / f"{stem}.png") as path:
            path.write_bytes(compact_png(figure, {DRAWN: record["drawn_sha256"]}, dpi=150))
            record["png_sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    assets.write_text(folder / f"{stem}.json", as_json(record))
    return f"{stem}.png" if figure is not None else f"{stem}.csv"


def compact_png(figure: Figure, texts: Mapping[str, str], **options: Any) -> bytes:
    """A figure as PNG of 256 colours, which takes two fifths of the bytes; an SVG of it takes more.

    texts: the file's metadata. options: of `Figure.savefig`.
    """
    drawn, kept, info = BytesIO(), BytesIO(), PngImagePlugin.PngInfo()
    figure.savefig(drawn, format="png", **options)
    for name, text in texts.items():
        info.add_text(name, text)
    small = Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    small.save(kept, "png", optimize=True, pnginfo=info)
    return kept.getvalue()


def write_result(record: Mapping[str, Any]) -> None:
    """The record a runner asks for by $ONDEVICE_RESULT; without it, nothing."""
    if path := os.environ.get(assets.RESULT_VARIABLE):
        assets.write_text(Path(path), as_json({**record, **environment()}))


def as_json(record: Any) -> str:
    """Indented JSON with NumPy's scalars and arrays as plain ones."""
    return json.dumps(record, indent=1, default=lambda value: value.tolist()) + "\n"


def machine_name() -> str:
    """$ONDEVICE_MACHINE, else processor, matrix units and cores: xeon-amx-2c. Never a frequency, a host or a date."""
    return os.environ.get(MACHINE_VARIABLE) or name_of(_facts(), platform.machine(), cores.usable())


def name_of(facts: dict[str, str], architecture: str, cores: int) -> str:
    """The name from /proc/cpuinfo's first processor; where that says nothing, the architecture's."""
    flags = set(facts.get("flags", "").split())
    if facts.get("vendor_id") == "AuthenticAMD":
        family = facts.get("cpu family", "")
        name = ("zen4" if "avx512f" in flags else "zen3") if family == "25" else _ZEN.get(family, f"amd{family}")
    elif facts.get("vendor_id") == "GenuineIntel":
        units = "-amx" if "amx_tile" in flags else "-avx512" if "avx512f" in flags else ""
        name = ("xeon" if "Xeon" in facts.get("model name", "") else "intel") + units
    else:
        name = architecture.lower().replace("_", "") or "unknown"
    return f"{name}-{cores}c"


def environment() -> dict[str, Any]:
    """What produced a result: library, package versions, Python, the machine with the facts that give its name."""
    versions = {name: metadata.version(name) for name in _PACKAGES}
    processor = _facts().get("model name") or platform.processor() or platform.machine()
    facts = {name: _facts()[name] for name in _NAMING if name in _facts()}
    facts["flags"] = " ".join(sorted({"amx_tile", "avx512f"} & set(_facts().get("flags", "").split())))
    machine = {
        "system": platform.system(),
        "processor": processor,
        "cores": cores.usable(),
        "name": machine_name(),
        "architecture": platform.machine(),
        "facts": facts,
    }
    return {"library": __version__, "versions": versions, "python": platform.python_version(), "machine": machine}


def _facts() -> dict[str, str]:
    """The first processor of /proc/cpuinfo; empty on other systems."""
    try:
        first = _CPUINFO.read_text().split("\n\n")[0]
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}

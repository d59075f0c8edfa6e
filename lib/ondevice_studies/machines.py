"""The tables of docs/machines.md, as ratios within each machine: `python -m ondevice_studies.machines` writes them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pandas as pd

from ondevice import assets, evidence, models
from ondevice.evidence.records import folder
from ondevice.evidence.resampling import resample
from ondevice_studies.dragon.study import latencies

FIRST = "<!-- machines: written by python -m ondevice_studies.machines -->"
LAST = "<!-- end -->"
CURVES, SPEED, MEMORY, ROUTER = "Cost curves", "Speed-ups by method", "Memory", "Router overhead"
SHAPE = "random:qwen2.5-0.5b"
FEWEST = 4  # samples that an interval is drawn from
_WHOLE = f"model == '{models.SMOLLM2}' and not cold"
_RANKED = "documents == 20 and tokens == 128 and k == 10"
# Without the methods that were given three tokens: the time of a prefill is most of theirs.
_RACE = "pace == 'unpaced' and not method.str.contains('Cloud|as many documents') and delay_ms =="
_LARGEST = "n == 100000 and policy =="
_PEAK = "documents == 20 and tokens =="
_ARMS = f"model == '{models.SMOLLM2}' and context == 768"

# Section, what, record, its rows, the value, the columns that name a method, and the method whose value is 1: the
# others' are speeds over its speed where the value is a time, and multiples of it where it is one over something.
COMPARED = (
    (SPEED, "DIAA, decoding over plain, SmolLM2", "diaa/parts", f"model == '{models.SMOLLM2}'", "decode_s / tokens",
     "method", "vanilla"),
    (SPEED, "sd.npu, requests over plain", "sdnpu/whole", f"{_WHOLE} and arm.str.startswith('CPU')",
     "prefill_s + decode_s", "arm", "CPU vanilla"),
    (SPEED, "sd.npu, requests over plain, static graphs", "sdnpu/whole", f"{_WHOLE} and not arm.str.startswith('CPU')",
     "prefill_s + decode_s", "arm", "NPU vanilla"),
    (SPEED, "DRAGON, a token over token-wise", "dragon/latency", f"{_RACE} 0", "total_ms / steps", "method",
     "DRDG/TW 0"),
    (SPEED, "DRAGON, a token over token-wise, 150 ms added", "dragon/latency", f"{_RACE} 150", "total_ms / steps",
     "method", "DRDG/TW 150"),
    (SPEED, "DRAGON, a token over token-wise, 300 ms added", "dragon/latency", f"{_RACE} 300", "total_ms / steps",
     "method", "DRDG/TW 300"),
    (SPEED, "GRATING, a ranking over transformers", "grating/latency", _RANKED, "seconds", "method rule", "HF"),
    (CURVES, "GRATING, a layer's time by candidates", "grating/layers", "tokens == 128 and active in (1, 20, 60)",
     "1 / seconds", "active", "1"),
    (MEMORY, "Peak over GRATING's, 20 x 128 tokens", "grating/memory", f"{_PEAK} 128", "1 / rss_mb", "method",
     "GRATING"),
    (MEMORY, "Peak over GRATING's, 20 x 500 tokens", "grating/memory", f"{_PEAK} 500", "1 / rss_mb", "method",
     "GRATING"),
    (MEMORY, "sd.npu, peak over plain decoding", "sdnpu/memory", _ARMS, "1 / peak_mb", "arm", "CPU vanilla"),
    (ROUTER, "First token over a direct one", "disco/router", "seconds > 0", "1 / seconds", "way", "direct"),
    (ROUTER, "DiSCo-S's policy, speed over raw lists", "disco/policy_times", f"{_LARGEST} 'DiSCo-S'", "ms", "what",
     "raw lists"),
    (ROUTER, "DiSCo-D's policy, speed over raw lists", "disco/policy_times", f"{_LARGEST} 'DiSCo-D'", "ms", "what",
     "raw lists"),
)  # fmt: skip


def recorded(record: str, machine: str) -> pd.DataFrame:
    """A machine's record, empty where it has none."""
    paper, name = record.split("/")
    return evidence.load(paper, f"{name}.{machine}") if machine in evidence.machines(paper, name) else pd.DataFrame()


def formatted(value: float, low: float, high: float, n: float) -> str:
    """value [low, high], the ends where there are samples for them."""
    return f"{value:.2f} [{low:.2f}, {high:.2f}]" if n >= FEWEST else f"{value:.2f}"


def curves(machine: str) -> Iterator[tuple[str, str]]:
    """T(rows) over T(1) behind 256 tokens; the interval has the ends of both medians'."""
    static = recorded("sdnpu/curves", machine)
    if len(static):
        static = static[static["part"] == "static"].assign(cached=256, dtype="4 bits, static graphs")
    lean = recorded("diaa/formats", machine)
    if len(lean):
        lean = lean[(lean["run"] == 1) & (lean["arithmetic"] == "float32")]
        form = lean["weights"].map({"float32": "float32", "4bit": "4 bits"})
        threads = lean["threads"].map({1: "one thread", 2: "two threads"})
        lean = lean.assign(dtype=form + ", " + threads)
    measured = pd.concat([lean, static])
    for (model, dtype), curve in measured.query("cached == 256").groupby(["model", "dtype"]) if len(measured) else ():
        at: Any = curve.drop_duplicates("rows").set_index("rows")[["seconds", "low", "high", "n"]].T.to_dict("list")
        for rows in sorted({8, 32, 33} & set(at)) if model in (SHAPE, models.SMOLLM2) else ():
            (base, base_low, base_high, base_n) = at[1]
            (seconds, low, high, n) = at[rows]
            ends = seconds / base, low / base_high, high / base_low
            yield f"{model}, {dtype}: {'8' if rows == 8 else '32 or 33'} rows", formatted(*ends, min(n, base_n))


def compared(machine: str, section: str) -> Iterator[tuple[str, str]]:
    """Of COMPARED's rows in a section, each other method over the first."""
    for _, what, record, rows, value, names, base in (row for row in COMPARED if row[0] == section):
        table = recorded(record, machine)
        table = latencies(table) if record == "dragon/latency" and len(table) else table
        kept = table.query(rows) if len(table) else table
        if len(kept):
            unit = next((name for name in ("block", "request", "round", "run", "turn") if name in kept), "")
            labels = kept[names.split()].astype(str).agg(", ".join, axis=1).str.removesuffix(", ")
            columns: Any = {"value": kept.eval(value), "method": labels, "request": kept[unit] if unit else 0}
            sample = resample(evidence.born(kept.assign(task=kept.get("task", "all"), **columns), "recorded"), "value")
            for name, x, low, high in sample.against(base).averages("x").to_numpy().tolist():
                if name != base:
                    yield f"{what}: {name}", formatted(x, low, high, sample.n)


def tables() -> str:
    """Markdown: a table a section, a column a machine that has something in it."""
    names = sorted({path.name.split(".")[1] for path in folder().glob("*/*.*.csv")})
    lines = []
    for section in (CURVES, SPEED, MEMORY, ROUTER):
        by_machine = {
            name: dict([*(curves(name) if section == CURVES else ()), *compared(name, section)]) for name in names
        }
        table: Any = pd.DataFrame({name: cells for name, cells in by_machine.items() if cells}).fillna("")
        table = table.loc[sorted(table.index, key=lambda what: what.partition(":")[0])]  # what belongs together
        lines += [f"## {section}", "", f"| {section} | {' | '.join(table)} |", "|---" * (1 + table.shape[1]) + "|"]
        lines += [f"| {' | '.join(map(str, row))} |" for row in table.itertuples()] + [""]
    return "\n".join(lines)


def written(text: str) -> str:
    """The page with the tables in their place. Raises ValueError where it has none."""
    page, count = re.subn(f"{FIRST}.*?{LAST}", lambda _: f"{FIRST}\n{tables()}{LAST}", text, flags=re.S)
    if count != 1:
        raise ValueError(f"docs/machines.md has {count} places for the tables, not one.")
    return page


def main() -> None:
    """Write docs/machines.md anew where records have changed."""
    path = assets.ROOT / "docs" / "machines.md"
    assets.write_text(path, written(path.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()

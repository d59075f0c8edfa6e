"""The report of a bench: tables, the advice, and Python that does as advised."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ondevice.speculation.drafters import DRAFTERS
from ondevice_programs.bench import formats
from ondevice_programs.bench.predictions import ANY, DRAFTED, FASTEST, PLAIN, advice

_BEST = 5  # predictions that are printed
_SNIPPET = """\
from functools import partial

import torch

from ondevice import chat, models
from ondevice.causal_lm.lean import engine
from ondevice.speculation import Drafter
from ondevice.speculation.custom_generate import speculative

loaded = models.load({spec!r})
ids = torch.tensor([chat.prompt_ids(loaded.tokenizer, "Why is the sky blue?")])
logs = []
fast = speculative(
    {drafter}, budget={budget}, report=logs.append,
    engine=partial(engine, threads={threads}, weights={weights!r}, arithmetic={arithmetic!r}, drafts={drafts}),
)
output = loaded.model.generate(
    ids, attention_mask=torch.ones_like(ids), max_new_tokens=256, do_sample=False,
    eos_token_id=sorted(loaded.eos_token_ids), custom_generate=fast,
)
print(loaded.tokenizer.decode(output[0, ids.shape[1]:], skip_special_tokens=True))
print(len(logs[0].tokens), "tokens,", len(logs[0].steps), "passes")
"""


def snippet(parts: Mapping[str, Any]) -> str:
    """Python that runs the model as advised."""
    best = advice(parts)
    return _SNIPPET.format(
        **formats.FORMATS[best["format"]],
        drafter=repr(best["drafter"]) if best["drafter"] else "Drafter()",
        spec=parts["model"]["spec"],
        budget=best["budget"],
        threads=parts["machine"]["threads"],
    )


def report(parts: Mapping[str, Any]) -> Iterator[str]:
    """The lines of all that was measured."""
    model, machine = parts["model"], parts["machine"]
    yield f"{model['spec']}: {model['parameters'] / 1e6:.1f} M parameters"
    yield f"{machine['processor']}: {machine['threads']} of {machine['cores']} cores"
    if "curves" in parts:
        yield from _curves(parts["curves"])
    if "drafters" in parts:
        yield from _drafters(parts)
    if parts.get("predictions"):
        yield "\nPredicted, the five fastest: ms per token, speed over plain in that format, over the fastest plain"
        for row in parts["predictions"][:_BEST]:
            yield f"{setting(row):44}{row['ms_per_token']:8.2f}{row['speed']:8.2f}{row['over_fastest']:8.2f}"
    if "measured" in parts:
        yield from _measured(parts["measured"], parts["limits"]["measured"])
    if "answers" in parts:
        best = advice(parts)
        basis = "measured" if "measured" in parts else "by T(1) alone"
        words = setting(best) if best["drafter"] else f"no drafter, {best['format']}"
        yield f"\nAdvice: {words}: {best['ms_per_token']:.2f} ms per token ({basis}).\n"
        yield snippet(parts)


def setting(row: Mapping[str, Any]) -> str:
    """A drafter with its budget and format."""
    return f"{row['drafter']}, budget {row['budget']}, {row['format']}"


def interval(triple: list[float]) -> str:
    """A value with its interval."""
    value, low, high = triple
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


def _curves(curves: Mapping[str, Any]) -> Iterator[str]:
    first = next(iter(curves.values()))
    yield f"\nA pass over n rows behind {first['past']} tokens: ms, and over one row; medians of {first['turns']} turns"
    yield f"{'n':27}" + "".join(f"{rows:>7}      " for rows in formats.ROWS).rstrip()
    for name, curve in curves.items():
        cells = dict(zip(curve["rows"], curve["ms"], strict=True))
        texts = (f"{cells[n]:7.2f} {cells[n] / cells[1]:4.1f} " if n in cells else " " * 13 for n in formats.ROWS)
        yield f"{name:27}{''.join(texts)}".rstrip()


def _drafters(parts: Mapping[str, Any]) -> Iterator[str]:
    arms = parts["drafters"]
    budgets = sorted({row["budget"] for row in arms})
    answers = parts["answers"]
    yield f"\nPlain answers: {answers['n']} in {answers['format']}, of {answers['median']:g} tokens (median)"
    yield "Tokens per pass by budget, mean of tasks (prompts); then the drafter's own ms per pass"
    yield f"{'':24}" + "".join(f"{budget:>11}" for budget in budgets)
    for pair in dict.fromkeys((row["drafter"], row["shape"]) for row in arms):
        rows = {row["budget"]: row for row in arms if (row["drafter"], row["shape"]) == pair}
        cells = (f"{rows[b]['mean']:.2f} ({rows[b]['n']})" if b in rows else "" for b in budgets)
        own = " ".join(f"{rows[b]['own_ms']:.2f}" for b in budgets if b in rows)
        name = pair[0] if pair[1] == ANY else ", ".join(pair)
        yield f"{name:24}" + "".join(f"{cell:>11}" for cell in cells) + f"   {own}"
    live = [row for row in arms if DRAFTERS[row["drafter"]].reads == "logits"]
    same, total = sum(row["identical"] for row in live), sum(row["n"] for row in live)
    limit = parts["limits"]["trials"]
    yield f"{same} of {total} live answers are those of plain decoding; at most {limit} tokens each."


def _measured(measured: Mapping[str, Any], limit: int) -> Iterator[str]:
    ms = measured["ms_per_token"]
    counts = measured["identity"]
    yield f"\nMeasured in turns, {measured['n']} prompts, answers of {limit} tokens at most: {setting(measured)}"
    yield f"{'ms per token':40}{ms[DRAFTED]:.2f}, plain {ms[PLAIN]:.2f}, fastest plain {ms[FASTEST]:.2f}"
    yield f"{'speed over plain in ' + measured['format']:40}{interval(measured['speed'])}"
    if measured["fastest"] != measured["format"]:
        yield f"{'speed over plain in ' + measured['fastest']:40}{interval(measured['over_fastest'])}"
    yield f"{'plain decoding over itself (floor)':40}{interval(measured['floor'])}"
    yield f"{'tokens per pass':40}{measured['tokens_per_pass']:.2f}"
    yield (
        f"{counts['identical']} answers of {measured['n']} are those of plain decoding, "
        f"{counts['near-tie']} differ at a near-tie, {counts['different']} otherwise."
    )

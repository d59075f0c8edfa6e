"""The experiments behind the exhibits: the drafters that are compared, and one tidy table for each comparison."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd
import torch
from scipy.stats import binomtest

from ondevice.sdnpu.calibration import Calibration
from ondevice.sdnpu.drafter import LMAX, Pld, Sam, SdNpu
from ondevice.sdnpu.measuring import AVERAGE, PLAIN, Measured, Method, by_task, measure, steps
from ondevice.sdnpu.rejections import CASES, Watched
from ondevice.sdnpu.reuse import Reuse
from ondevice.speculation import Drafter, generate
from ondevice.speculation.loop import PREFILL_CHUNK

if TYPE_CHECKING:
    from ondevice.causal_lm import CausalLM
    from ondevice.sdnpu.drafter import Base
    from ondevice.speculation.request_set import Request

# Our families, and the paper's data sets that they stand for.
TASKS = {"summary": "summary", "rag": "rag", "parameters": "ui", "turns": "tweet"}
BASES = ("PLD", "SAM")
OURS = "SAM+Ours"
PARTS = ("calibration", "reuse", "Ours")
_PUBLISHED = 64  # nodes a draft: more than SAM ever drafts


# Acceptance


def methods(vocabulary: int) -> list[Method]:
    """Vanilla; PLD and SAM as published; each with calibration, reuse and both; SAM with one rule of reuse; variants.

    `printed` has both parts by the paper's rules; `verified` learns from the logits after rejected tokens, too,
    `forgetting` from the request at hand alone.
    What has a part of sd.npu keeps to Lmax. A new drafter has an empty history.
    """
    found = [PLAIN]
    for name in BASES:
        found.append(Method(name, partial(_base, name, vocabulary), _PUBLISHED))
        for part in PARTS:
            found.append(Method(f"{name}+{part}", partial(_with, name, part, vocabulary)))
    found.append(Method("SAM, 31 drafted", partial(_base, "SAM", vocabulary), LMAX - 1))
    for rule in ("printed", "shifted"):
        found.append(Method(f"SAM+reuse, {rule}", partial(_reusing, rule, vocabulary)))
    found.append(Method("SAM+Ours, verified", partial(_learning, vocabulary)))
    found.append(Method("PLD+Ours, forgetting", partial(_forgetting, vocabulary)))
    found.append(Method("SAM+Ours, printed", partial(as_printed, vocabulary)))
    return found


def as_printed(vocabulary: int) -> SdNpu:
    """SAM with both parts, each by the paper's own rule."""
    parts = Sam(vocabulary), Calibration.printed(vocabulary), Reuse("printed")
    return SdNpu(*parts, order="printed", name="SAM+Ours, printed")


def _reusing(rule: Literal["printed", "shifted"], vocabulary: int) -> SdNpu:
    return SdNpu(Sam(vocabulary), None, Reuse(rule), name=f"SAM+reuse, {rule}")


def _learning(vocabulary: int) -> SdNpu:
    calibration = Calibration(vocabulary, learns="verified")
    return SdNpu(Sam(vocabulary), calibration, Reuse(), name="SAM+Ours, verified")


def _forgetting(vocabulary: int) -> SdNpu:
    return SdNpu(Pld(), Calibration(vocabulary, keeps=False), Reuse(), name="PLD+Ours, forgetting")


def _base(name: str, vocabulary: int) -> Pld | Sam:
    return Pld() if name == "PLD" else Sam(vocabulary)


def _with(name: str, part: str, vocabulary: int) -> SdNpu:
    base: Base = _base(name, vocabulary)
    calibration = Calibration(vocabulary) if part in ("calibration", "Ours") else None
    reuse = Reuse() if part in ("reuse", "Ours") else None
    return SdNpu(base, calibration, reuse, name=f"{name}+{part}")


def measured(lm: CausalLM, requests: Sequence[Request], compared: Sequence[Method], rounds: int = 1) -> list[Measured]:
    """Every task group by itself, its requests in their order: each method begins it with a new drafter.

    So the first request of a group finds an empty history. One plain answer, not kept, wakes the machine up.
    """
    first = requests[0]
    generate(lm, Drafter(), first.ids, first.limit, ends=first.ends)
    groups = [[one for one in requests if one.task == task] for task in dict.fromkeys(one.task for one in requests)]
    return [one for group in groups for one in measure(lm, compared, group, rounds)]


def acceptance(found: pd.DataFrame) -> pd.DataFrame:
    """Table 4 from `runs`: model, method, task, accepted (tokens a verification), base, gain (over that base).

    `average` is the mean over the tasks, of gains as of tokens. Rows without a base gain nothing: NaN.
    """
    cells = by_task(found)[["model", "method", "task", "tokens_per_step"]]
    cells = cells.rename(columns={"tokens_per_step": "accepted"})
    cells["base"] = [_base_of(method) for method in cells["method"]]
    bases = cells.set_index(["model", "method", "task"])["accepted"]
    keys = pd.MultiIndex.from_frame(cells[["model", "base", "task"]])
    cells["gain"] = cells["accepted"] / bases.reindex(keys).to_numpy()
    tasks = cells[cells["task"] != AVERAGE].groupby(["model", "method"])["gain"].mean()
    average = cells["task"] == AVERAGE
    cells.loc[average, "gain"] = tasks.reindex(pd.MultiIndex.from_frame(cells.loc[average, ["model", "method"]])).array
    return cells


def _base_of(method: str) -> str | None:
    return next((base for base in BASES if method.startswith(f"{base}+")), None)


def draft_lengths(found: Iterable[Measured], model: str) -> pd.DataFrame:
    """How many tokens were drafted at how large a share of the steps: model, method, task, drafted, share."""
    keys = ["model", "method", "task"]
    table = steps(found, model)
    shares = table.groupby(keys, sort=False)["drafted"].value_counts(normalize=True).rename("share")
    return shares.reset_index().sort_values([*keys, "drafted"], ignore_index=True)


def identical(found: pd.DataFrame) -> tuple[float, float]:
    """From `runs`: share of the answers that are plain decoding's, and tokens in all of them."""
    others = found[found["method"] != PLAIN.name]
    return float(others["identical"].mean()), float(others["tokens"].sum())


# Rejections


def rejections(lm: CausalLM, model: str, requests: Sequence[Request]) -> pd.DataFrame:
    """Table 2 over all rejections of SAM's drafts: model, task, cause, share, low, high (95 %, Wilson), count.

    A task without a rejection has no row; without any, ValueError is raised.
    """
    rows: list[tuple[object, ...]] = []
    for task in dict.fromkeys(one.task for one in requests):
        watched = Watched(Sam(lm.vocabulary))
        for one in requests:
            if one.task == task:
                generate(lm, watched, one.ids, one.limit, budget=_PUBLISHED, ends=one.ends)
        cases = [rejection.case for rejection in watched.rejections]
        for cause in CASES if cases else ():
            count = cases.count(cause)
            interval = binomtest(count, len(cases)).proportion_ci(method="wilson")
            rows.append((model, task, cause, count / len(cases), interval.low, interval.high, count))
    if not rows:
        raise ValueError("No draft was rejected in these requests, so there is nothing to classify.")
    return pd.DataFrame(rows, columns=["model", "task", "cause", "share", "low", "high", "count"])


# What drafting costs


def calibration_cost(vocabularies: Sequence[int], chunk: int = 256, repeats: int = 5) -> pd.DataFrame:
    """Time of the calibration of a chunk of prompt, by rule: vocabulary, rule, ms_per_token (median).

    On logits that are drawn at random in bfloat16: what is timed does not depend on what they say.
    """
    random = torch.Generator().manual_seed(0)
    rows = []
    for vocabulary in vocabularies:
        logits = (3 * torch.randn(chunk, vocabulary, generator=random)).bfloat16()
        prompt = torch.randint(0, vocabulary, (chunk,), generator=random).tolist()
        for rule, make in {"ours": Calibration, "printed": Calibration.printed}.items():
            times = [_calibrated(make(vocabulary), prompt, logits) for _ in range(repeats + 1)][1:]
            rows.append((vocabulary, rule, 1e3 * float(np.median(times)) / chunk))
    return pd.DataFrame(rows, columns=["vocabulary", "rule", "ms_per_token"])


def _calibrated(calibration: Calibration, prompt: Sequence[int], logits: torch.Tensor) -> float:
    calibration.begin(prompt)
    started = perf_counter()
    calibration.prefilled(0, logits)
    return perf_counter() - started


def prefill_cost(lm: CausalLM, requests: Sequence[Request], repeats: int = 3) -> tuple[float, float]:
    """Milliseconds a prompt token of prefill, plain and with a calibration that reads its logits; medians, in turns.

    The difference is the output layer over the whole prompt, chunks of 256 tokens, and the calibration itself.
    """
    times: tuple[list[float], list[float]] = [], []
    for _ in range(repeats + 1):
        for one in requests:
            for spent, calibration in zip(times, (None, Calibration(lm.vocabulary)), strict=True):
                started = perf_counter()
                if calibration is None:
                    lm.start(len(one.ids)).prefill(one.ids)
                else:
                    calibration.begin(one.ids)
                    lm.start(len(one.ids)).prefill(one.ids, PREFILL_CHUNK, calibration.prefilled)
                spent.append(1e3 * (perf_counter() - started) / len(one.ids))
    return float(np.median(times[0][len(requests) :])), float(np.median(times[1][len(requests) :]))


def drafting_cost(found: pd.DataFrame) -> pd.DataFrame:
    """From `steps`: model, method, mean and 99th percentile of a step's drafting and learning (ms), and drafting alone.

    Columns: model, method, mean_ms, p99_ms, draft_ms.
    """
    each = found.assign(ms=1e3 * (found["draft_s"] + found["observe_s"]), draft_ms=1e3 * found["draft_s"])
    groups = each.groupby(["model", "method"], sort=False)
    return groups.agg(
        mean_ms=("ms", "mean"), p99_ms=("ms", lambda times: times.quantile(0.99)), draft_ms=("draft_ms", "mean")
    ).reset_index()

"""DiSCo's records: answers that change hands (deterministic), and what this machine takes.

`make record PAPER=disco` makes all, or those that ARGS="--parts quality device" names; it goes on where it was stopped.
The parts but `quality` are this machine's times and want it quiet.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from ondevice import models, prompts
from ondevice.causal_lm.lean import Arithmetic, Weights, engine
from ondevice.evidence import Again, Recorder, born, machine_name, sampled, some
from ondevice_papers.disco import quality
from ondevice_papers.disco.quality import HANDOVERS, LIMIT, GradedQuestion, MigratedAnswer, Speaker, migrated
from ondevice_studies.disco import cold_start, device_probe, study, traces
from ondevice_studies.dragon import questions as two_sided
from ondevice_studies.speculation.prompts import digest

DEVICE, SERVER = models.SMOLLM2, models.QWEN
KEYS = ["task", "request", "direction", "handover"]
EXACT = ["prompt_sha", "answer_sha", "tokens", "right", "rouge_1"]  # what a sample that runs again is compared in
NEAR = 0.05  # a logit's lead below which integer answers may differ on another processor
OF_SPEC_BENCH = {"translation": 50, "summarization": 30}  # questions, which not every clone has
AT_ONCE = 5  # questions
PROBED = (models.SMOLLM2, "random:qwen2.5-0.5b")
TURNS = {"device": 5, "cold_start": 12}
POLICY_SIZES = (1_000, 10_000, 100_000)
POLICY_REPEATS = 15


# Quality


def questions(fetched: bool = True) -> list[GradedQuestion]:
    """What is asked: of a note, of a note and a page, and with `fetched` of Spec-Bench.

    Raises FileNotFoundError where Spec-Bench is asked for and is not on this machine.
    """
    of_documents = []
    for asked in two_sided.questions():
        if asked.holder == "device":
            text = f"{asked.note}\n\n{asked.text} Answer in a few words."
            of_documents.append(GradedQuestion(asked.name, "note", text, (asked.private,)))
        elif asked.holder == "both":
            text = f"{asked.note}\n\n{asked.page}\n\n{asked.text}"
            of_documents.append(GradedQuestion(asked.name, "note and page", text, (asked.private, asked.public)))
    of_others = []
    for task, count in OF_SPEC_BENCH.items() if fetched else ():
        of_task = [prompt for prompt in prompts.spec_bench() if prompt.task == task][:count]
        of_others += [GradedQuestion(each.id, task, each.text, reference=each.references[0]) for each in of_task]
    return [*of_documents, *of_others]


def drawn(recorded: pd.DataFrame, seed: int, number: int) -> list[GradedQuestion]:
    """The recorded questions of notes and pages that the seed draws, by the length of the longest answer."""
    there = {question.id: question for question in questions(fetched=False)}
    units = recorded[recorded["request"].isin(there)].groupby(["task", "request"])["tokens"].max().reset_index()
    chosen = sampled(units, seed, number, strata=["task"], length="tokens", name="request")
    return [there[name] for name in chosen["request"]]


def speaker(name: str, weights: Weights = "4bit", arithmetic: Arithmetic = "int8") -> Speaker:
    """A model on one thread, by default in its file's 4 bits."""
    loaded = models.load(name)
    lm = engine(loaded, threads=1, weights=weights, arithmetic=arithmetic)
    return Speaker(lm, loaded.tokenizer, loaded.eos_token_ids)


def speakers() -> dict[str, Speaker]:
    """The device and the server, by name."""
    return {name: speaker(name) for name in (DEVICE, SERVER)}


def graded(
    pair: Mapping[str, Speaker],
    asked: Sequence[GradedQuestion],
    hand_over: Callable[..., dict[int, MigratedAnswer]] = migrated,
) -> pd.DataFrame:
    """A row a question, direction and hand-over, in the record's columns. pair: of `speakers`.

    hand_over: as `quality.migrated`.
    """
    rows = []
    each: list[GradedQuestion] = []
    texts = []
    for question in asked:
        for first, second in permutations(pair):
            answers = hand_over(pair[first], pair[second], question.text, HANDOVERS, LIMIT)
            for handover, answer in answers.items():
                tokens = [*answer.begun, *answer.ended]
                rows.append((question.task, question.id, f"{first} to {second}", handover,
                             prompts.digest(question.text), digest(tokens), len(tokens), answer.margin))  # fmt: skip
                each.append(question)
                texts.append(answer.text)
    table = pd.DataFrame(rows, columns=[*KEYS, "prompt_sha", "answer_sha", "tokens", "margin"])
    return born(table.join(quality.scores(each, texts)), "measured")


QUALITY: tuple[Callable[..., Any], ...] = (graded, questions, speakers)


def again(name: str) -> Again | None:
    """How the answers to two questions are made again; None of this machine's times."""
    if name != "quality":
        return None

    def make(rows: pd.DataFrame) -> pd.DataFrame:
        names = set(rows["request"])
        return graded(speakers(), [question for question in questions() if question.id in names])

    return Again(QUALITY, KEYS, some(["request"], 2), make, EXACT, margin="margin", near=NEAR)


def record_quality() -> Path:
    """quality.parquet, some questions at a time."""
    parameters = {
        "questions": OF_SPEC_BENCH,
        "tokens": LIMIT,
        "hand-overs": HANDOVERS,
        "threads": 1,
        "weights": "4bit",
        "arithmetic": "int8",
    }
    kept = Recorder("disco", "quality", KEYS, parameters, [DEVICE, SERVER], functions=QUALITY)
    done = {unit[1] for unit in kept.done}
    missing = [question for question in questions() if question.id not in done]
    pair = speakers() if missing else {}
    for start in range(0, len(missing), AT_ONCE):
        kept.add(graded(pair, missing[start : start + AT_ONCE]))
        print(f"quality: {missing[start].task}, {len(kept.done)} rows", flush=True)
    return kept.finish()


# This machine's times


def record_device() -> Path:
    """device.<machine>.csv: `device_probe.measure` in turns, models in turn.

    part "same": one prompt of Alpaca's mean length over and over, with its gaps; "lengths": 32 to 960 tokens;
    "alpaca": prompts of Alpaca's lengths. A turn asks for the same as another: their difference is the floor below
    which none is read.
    """
    alpaca = traces.lengths()
    rng = np.random.default_rng(0)
    grid = rng.permutation(np.repeat([32, 64, 128, 256, 480, 720, 960], 3))
    parts = {"same": (np.full(10, round(alpaca.mean)), 32), "lengths": (grid, 1), "alpaca": (alpaca.sample(40, rng), 1)}
    parameters = {
        "models": PROBED,
        "turns": TURNS["device"],
        "threads": 1,
        "seed": 0,
        "parts": {part: [lengths.tolist(), tokens] for part, (lengths, tokens) in parts.items()},
    }
    kept = _of_this_machine("device", device_probe.measure, ["model", "part", "turn"], parameters, PROBED)
    probed = {spec: engine(device_probe.load(spec), threads=1) for spec in PROBED}
    for turn in range(TURNS["device"]):
        for spec, model in probed.items():
            for part, (lengths, tokens) in parts.items():
                if (spec, part, turn) not in kept.done:
                    timed, busy = cold_start.watched(device_probe.measure, model, lengths, tokens, 0)
                    kept.add(timed.assign(model=spec, part=part, turn=turn, busy=busy))
        print(f"device: turn {turn}", flush=True)
    return kept.finish()


def record_cold_start() -> Path:
    """cold_start.<machine>.csv: a row a load, shapes and cache states in turn."""
    parameters = {"turns": TURNS["cold_start"], "threads": 1, "dtype": "bfloat16"}
    kept = _of_this_machine("cold_start", cold_start.loads, ["turn"], parameters)
    with cold_start.written(cold_start.SHAPES) as paths:
        for turn in range(TURNS["cold_start"]):
            if (turn,) not in kept.done:
                kept.add(cold_start.loads(paths, turn))
            print(f"cold start: turn {turn}", flush=True)
    return kept.finish()


def record_policy_times() -> Path:
    """policy_times.<machine>.csv: what choosing a policy takes by the number of samples (Figure 9)."""
    parameters = {"sizes": POLICY_SIZES, "repeats": POLICY_REPEATS, "seed": 0, "threads": 1}
    kept = _of_this_machine("policy_times", study.policy_times, ["n", "policy", "what", "turn"], parameters)
    kept.add(study.policy_times(POLICY_SIZES, POLICY_REPEATS, 0))
    return kept.finish()


def _of_this_machine(
    name: str, made_by: Callable[..., Any], keys: list[str], parameters: Mapping[str, object], specs: Sequence[str] = ()
) -> Recorder:
    return Recorder("disco", name, keys, parameters, specs, machine=machine_name(), functions=[made_by])


PARTS: dict[str, Callable[[], Path]] = {
    "quality": record_quality,
    "device": record_device,
    "cold_start": record_cold_start,
    "policy_times": record_policy_times,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="make record PAPER=disco", description=__doc__)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for part in options.parts:
        print(PARTS[part](), flush=True)


if __name__ == "__main__":
    main()

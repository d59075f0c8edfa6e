"""DiSCo's records: answers that change hands (deterministic), and what this machine takes.

`make record PAPER=disco` makes all, or those that ARGS="--parts quality device" names; it goes on where it was stopped.
The parts but `quality` are this machine's times and want it quiet.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from ondevice import corpus, models
from ondevice.causal_lm.lean import engine
from ondevice.corpus.prompts import Task
from ondevice.evidence import Recorder, born, machine_name, sampled
from ondevice_papers.disco import quality
from ondevice_papers.disco.quality import HANDOVERS, LIMIT, migrated
from ondevice_studies.disco import cold_start, device_probe, study, traces

DEVICE = "pydocs-lm-small"
SERVER = "pydocs-lm-base"
KEYS = ["family", "document", "direction", "handover"]
EXACT = ["prompt_sha", "answer_sha", "tokens", "right", "rouge_1"]  # what a sample that runs again is compared in
PROMPTS = 300  # of a family, or as many as there are
AT_ONCE = 50  # prompts between two checkpoints
PROBED = (models.SMOLLM2, "random:qwen2.5-0.5b")
TURNS = {"device": 5, "cold_start": 12}
POLICY_SIZES = (1_000, 10_000, 100_000)
POLICY_REPEATS = 15


# Quality


def drawn(recorded: pd.DataFrame, seed: int, number: int) -> list[Task]:
    """The tasks of `number` recorded prompts that the seed draws, by family and by the length of the longest answer."""
    units = recorded.groupby(["family", "document"])["tokens"].max().reset_index()
    chosen = sampled(units, seed, number, strata=["family"], length="tokens", name="document")
    documents = corpus.documents("test")
    return [
        task
        for family, names in chosen.groupby("family")["document"]
        for task in corpus.tasks(documents, [str(family)])
        if task.name in set(names)
    ]


def again(
    pair: Mapping[str, models.Loaded],
    tasks: Sequence[Task],
    hand_over: Callable[..., dict[int, quality.Decoded]] = migrated,
) -> pd.DataFrame:
    """A row a task, direction and hand-over, in the record's columns. pair: label -> model, two of one vocabulary.

    One sequence at a time and in one thread: no token depends on what else is asked. hand_over: as `quality.migrated`.
    """
    (a, engine_a), (b, engine_b) = ((name, engine(loaded.model, threads=1)) for name, loaded in pair.items())
    tokenizer = next(iter(pair.values())).tokenizer
    rows, answers, references = [], [], []
    for task in tasks:
        prompt = tokenizer(task.prompt)["input_ids"]
        for direction, first, second in ((f"{a} to {b}", engine_a, engine_b), (f"{b} to {a}", engine_b, engine_a)):
            for handover, decoded in hand_over(first, second, prompt, HANDOVERS, LIMIT).items():
                tokens = [token for token, _ in decoded]
                margins = [margin for _, margin in decoded]
                rows.append((task.family, task.name, direction, handover, _digest(prompt), _digest(tokens), len(tokens),
                             min(margins)))  # fmt: skip
                answers.append(str(tokenizer.decode(tokens, skip_special_tokens=True)))
                references.append(task.answer)
    table = pd.DataFrame(rows, columns=[*KEYS, "prompt_sha", "answer_sha", "tokens", "margin"])
    return born(table.join(quality.scores(answers, references)), "measured")


def record_quality() -> Path:
    """quality.parquet; a family is checkpointed every few prompts."""
    parameters = {
        "prompts of a family": PROMPTS,
        "tokens": LIMIT,
        "hand-overs": HANDOVERS,
        "threads": 1,
        "dtype": "float32",
    }
    kept = Recorder("disco", "quality", KEYS, parameters, [DEVICE, SERVER])
    pair = {name: models.load(name) for name in (DEVICE, SERVER)}
    done = {unit[:2] for unit in kept.done}
    missing = [task for task in quality.items(PROMPTS, corpus.tokenizer()) if (task.family, task.name) not in done]
    for start in range(0, len(missing), AT_ONCE):
        kept.add(again(pair, missing[start : start + AT_ONCE]))
        print(f"quality: {missing[start].family}, {len(kept.done)} rows", flush=True)
    return kept.finish()


def _digest(ids: Sequence[int]) -> str:
    """12 hex digits of token ids."""
    return sha256(np.asarray(ids, "<i8").tobytes()).hexdigest()[:12]


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
    kept = _of_this_machine("device", ["model", "part", "turn"], parameters, PROBED)
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
    kept = _of_this_machine("cold_start", ["turn"], parameters)
    with cold_start.written(cold_start.SHAPES) as paths:
        for turn in range(TURNS["cold_start"]):
            if (turn,) not in kept.done:
                kept.add(cold_start.loads(paths, turn))
            print(f"cold start: turn {turn}", flush=True)
    return kept.finish()


def record_policy_times() -> Path:
    """policy_times.<machine>.csv: what choosing a policy takes by the number of samples (Figure 9)."""
    parameters = {"sizes": POLICY_SIZES, "repeats": POLICY_REPEATS, "seed": 0, "threads": 1}
    kept = _of_this_machine("policy_times", ["n", "policy", "what", "turn"], parameters)
    kept.add(study.policy_times(POLICY_SIZES, POLICY_REPEATS, 0))
    return kept.finish()


def _of_this_machine(
    name: str, keys: list[str], parameters: Mapping[str, object], specs: Sequence[str] = ()
) -> Recorder:
    return Recorder("disco", name, keys, parameters, specs, machine=machine_name())


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

"""What this machine takes of a public model in 4 bits: static graphs by rows, ways of switching, requests, memory.

Parts of `make record PAPER=sdnpu`, for a quiet machine; each goes on where it was stopped. One thread computes, one
loads. Ways of switching are measured in processes that are forked before any graph is loaded, peaks of memory in empty
ones.
*Cold* are graphs to load that are on the disk only, *warm* ones in the page cache.
"""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Literal

import onnxruntime  # type: ignore[import-untyped]
import pandas as pd
import psutil
import torch

from ondevice import assets, meters, models
from ondevice.causal_lm import drawing
from ondevice.causal_lm.drawing import Weights
from ondevice.causal_lm.lean import engine
from ondevice.evidence import Recorder, machine_name
from ondevice.evidence.records import model_checksums
from ondevice.evidence.resampling import median_interval
from ondevice.speculation import Drafter, generate
from ondevice_papers.sdnpu.calibration import PromptCalibration
from ondevice_papers.sdnpu.drafter import LMAX, methods
from ondevice_papers.sdnpu.scheduling import RULES
from ondevice_programs.graphs import exporting, static_graphs, switching
from ondevice_programs.graphs.drawn import StaticDrawing
from ondevice_programs.graphs.static_lm import StaticLM
from ondevice_studies.speculation.part_timer import PartTimer
from ondevice_studies.speculation.request_set import Request
from ondevice_studies.speculation.spec_bench import Bench, recordable, recorded_requests

WEIGHTS: Weights = "4bit"
CONTEXT = 1536  # tokens of a session
ROWS = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 48, 64, 128, 256)
CACHED = 256  # rows before a forward that is timed
PROMPTS = (768, 1500)  # tokens of the prompts that graphs are switched in: three and six chunks
TURNS = 25
ROUNDS = 10
SPARE = 1.5  # memory over that of all G1, where there is some to spare; of the shorter prompts alone
LONG, SHORT = 768, 256  # tokens: least of a long prompt, which takes several chunks, and most of one that takes one
TASKS = {"summarization": True, "rag": True, "qa": False}  # whether prompts are long
MOST = 32  # tokens of an answer
SESSION = 1024  # tokens of prompt and answer


@cache
def exported(spec: str, context: int = CONTEXT) -> Path:
    """The folder of a model's graphs, exported once."""
    content = model_checksums([spec])[spec][:12].replace(":", "-")
    folder = assets.cache_folder("sdnpu") / f"{spec.replace(':', '-')}-{content}-{WEIGHTS}-{context}"
    if not (folder / static_graphs.FACTS).is_file():
        loaded = models.load(spec)
        exporting.export(loaded, folder, exporting.texts(loaded), weights=WEIGHTS, context=context)
        static_graphs.opened(folder)
    return folder


def recorder(name: str, made_by: Callable[..., Any], keys: Sequence[str], *specs: str, **parameters: Any) -> Recorder:
    """Of this machine's times. made_by: what makes the rows. specs: of the models."""
    parameters = {"weights": WEIGHTS, **parameters}
    return Recorder("sdnpu", name, keys, parameters, specs, machine=machine_name(), functions=[made_by])


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """The median, with 95 % by ranks: seconds, low, high, n."""
    median, low, high = map(float, median_interval(seconds))
    return {"seconds": median, "low": low, "high": high, "n": len(seconds)}


# Static graphs by rows


def curves(spec: str) -> None:
    """A forward of all layers and the head on static graphs of so many rows, in turns."""
    kept = recorder("curves", curves, ["model", "part"], spec, rows=ROWS, cached=CACHED, turns=TURNS)
    if (spec, "static") not in kept.done:
        loaded = models.load(spec)
        forwards = [static_forward(loaded, count) for count in ROWS]
        turns = [[switching.seconds(run) for run in forwards] for _ in range(1 + TURNS)]
        columns = zip(ROWS, zip(*turns[1:], strict=True), strict=True)
        kept.add([{"model": spec, "part": "static", "rows": rows, **summary(spent)} for rows, spent in columns])
    print(kept.finish())


def static_forward(loaded: models.Loaded, rows: int) -> Callable[[], Any]:
    """A run of all layers as one static graph, and of the head."""
    structure, matrix = drawing.matrices(loaded, WEIGHTS, False)
    layers = range(structure.config.num_hidden_layers)
    block, head = (StaticDrawing(structure, rows, CACHED + ROWS[-1], matrix) for _ in range(2))
    sessions = [
        onnxruntime.InferenceSession(part.SerializeToString(), drawing.options())
        for part in (block.block(layers), head.head())
    ]
    given = [static_graphs.zeros(session) for session in sessions]

    def run() -> None:
        with drawing.flushing_denormals():
            for session, inputs in zip(sessions, given, strict=True):
                session.run(None, inputs)

    return run


# Ways of switching


def switch(spec: str) -> None:
    """Every way of switching, each time in a process of its own, in an order that rotates."""
    keys = ["model", "tokens", "cold", "memory", "way", "round"]
    kept = recorder("switching", switch, keys, spec, rounds=ROUNDS, spare=SPARE)
    planned = recorder("profiles", profiled, ["model", "cold"], spec)
    ways = [(1.0, way) for way in RULES] + [(SPARE, "naive"), (SPARE, "ours")]
    folder = apart(exported, spec)
    profiles = {cold: apart(profiled, folder, cold) for cold in (False, True)}
    for cold, profile in profiles.items():
        if (spec, cold) not in planned.done:
            planned.add(pd.DataFrame(profile._asdict()).assign(model=spec, cold=cold, block=range(len(profile.p))))
    planned.checkpoint()
    for turn, tokens, cold in product(range(ROUNDS), PROMPTS, (False, True)):
        for memory, way in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
            if memory == SPARE and tokens != PROMPTS[0]:
                continue
            named = {"model": spec, "tokens": tokens, "cold": cold, "memory": memory, "way": way, "round": turn}
            if tuple(named.values()) not in kept.done:
                times = apart(switched, folder, way, memory, cold, profiles[cold], tokens)
                kept.add([{**named, **times}])
        kept.checkpoint()
    print(planned.finish(), kept.finish(), sep="\n")


def apart(run: Callable[..., Any], *arguments: Any, start: Literal["fork", "spawn"] = "fork") -> Any:
    """What a function gives in a process of its own. start: spawn begins an empty one, which takes seconds."""
    with ProcessPoolExecutor(1, multiprocessing.get_context(start)) as process:
        return process.submit(run, *arguments).result()


def profiled(folder: Path, cold: bool) -> switching.Profile:
    """Times of the folder's graphs."""
    return switching.profile(static_graphs.opened(folder), 5, cold)


def switched(
    folder: Path, way: str, memory: float, cold: bool, profile: switching.Profile, tokens: int
) -> dict[str, float]:
    """One prefill: seconds in all and of loads, and MB of resident memory above what the process began with."""
    began = psutil.Process().memory_info().rss
    built = static_graphs.opened(folder)
    session = StaticLM(built, RULES[way], memory, profile).start()
    warmed(built, not cold)
    size = sum(path.stat().st_size for path in built.small_files)
    cached = meters.cached_bytes(built.small_files)  # whole pages
    session.prefill([1 + position % 999 for position in range(tokens)])
    timeline = session.lm.timeline
    assert timeline is not None
    loading = float((timeline.load_end - timeline.load_start).sum())
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - began
    return {
        "total_s": timeline.latency / 1e3,
        "loading_s": loading / 1e3,
        "peak_mb": peak / 1e6,
        "cached_share": min(1.0, cached / size),
    }


def warmed(built: static_graphs.Graphs, warm: bool) -> None:
    """Bring the decode graphs' files into the page cache, or drop them from it."""
    for path in built.small_files if warm else ():
        path.read_bytes()
    if not warm:
        meters.evict(built.small_files)


# Whole requests


# The method of drafting; how graphs are switched, or "cpu", an engine of any rows.
ARMS: dict[str, tuple[str, str]] = {
    "CPU vanilla": ("vanilla", "cpu"),
    "CPU-SAM": ("SAM", "cpu"),
    "NPU vanilla": ("vanilla", "synchronous"),
    "NPU +G": ("vanilla", "greedy (paper)"),
    "NPU +G naive": ("vanilla", "naive"),
    "NPU-SAM": ("SAM", "synchronous"),
    "NPU-SAM +G": ("SAM", "greedy (paper)"),
    "NPU-SAM +G naive": ("SAM", "naive"),
    "sd.npu": ("SAM+both", "greedy (paper)"),
    "mixture": ("mixture", "ours"),
}


COLD = ("NPU vanilla", "NPU +G", "sd.npu")  # arms that are timed on a cold cache, too


def timed(lm: Any, drafter: Drafter, request: Request) -> tuple[dict[str, float], list[int]]:
    """A whole request's prefill_s (with switching and calibration), decode_s, and of both draft_s and observe_s; and
    its tokens."""
    timer = PartTimer()
    with timer.on(drafter, begin="begin", propose="draft", observe="observe", end="end"):
        generation = generate(
            lm, drafter, request.ids, request.limit, budget=LMAX - 1, eos_token_ids=request.ends, choice=timer.choice
        )
    times = {
        "prompt_tokens": generation.prompt,
        "tokens": len(generation.tokens),
        "passes": len(generation.steps),
        "prefill_s": timer.first - timer.began["begin"],
        "decode_s": timer.began["end"] - timer.first,
        "draft_s": timer.seconds["draft"],
        "observe_s": timer.seconds["observe"],
    }
    return times, list(generation.tokens)


def timed_requests(bench: Bench) -> dict[str, list[Request]]:
    """By task the first requests whose prompts are long, or short, one for each round."""
    every = recorded_requests(bench, recordable(bench.model), lambda task: None if task in TASKS else 1)
    chosen = {}
    for task, long in TASKS.items():
        ends = (LONG, SESSION - MOST) if long else (1, SHORT)
        fits = [request for request in every if request.task == task and ends[0] <= len(request.ids) <= ends[1]]
        chosen[task] = [replace(request, limit=min(request.limit, MOST)) for request in fits[:ROUNDS]]
    return chosen


def whole(spec: str) -> None:
    """Requests by every arm, one after the other, graphs warm and cold; a round has another request of each task.

    Each request begins with new drafters. same: whether an arm's answer is plain decoding's on static graphs.
    """
    keys = ["model", "cold", "task", "round"]
    kept = recorder("whole", whole, keys, spec, rounds=ROUNDS, arms=list(ARMS), session=SESSION)
    bench = Bench(spec)
    lm = engine(bench.loaded, threads=1, weights=WEIGHTS)
    built = static_graphs.opened(exported(spec, SESSION))
    profiles = {cold: switching.profile(built, cold=cold) for cold in (False, True)}
    requests = timed_requests(bench)
    for turn, cold, task in product(range(ROUNDS), (False, True), TASKS):
        named = {"model": spec, "cold": cold, "task": task, "round": turn}
        if tuple(named.values()) in kept.done:
            continue
        request = requests[task][turn]
        names = [arm for arm in ARMS if not cold or arm in COLD]
        taken = {}
        for arm in names[turn % len(names) :] + names[: turn % len(names)]:
            method, way = ARMS[arm]
            warmed(built, not cold)
            model = lm if way == "cpu" else StaticLM(built, RULES[way], 1.0, profiles[cold])
            taken[arm] = timed(model, methods(lm.vocabulary)[method][0](), request)
        plain = taken["NPU vanilla"][1]
        rows = [
            {**named, "request": request.name, "arm": arm, "same": answer == plain, **times}
            for arm, (times, answer) in taken.items()
        ]
        kept.add(rows)
        kept.checkpoint()
    print(kept.finish())


# Memory and calibration


MEMORY_ARMS = {arm: ARMS[arm] for arm in ("CPU vanilla", "NPU vanilla", "NPU-SAM", "sd.npu", "mixture")}
MEMORY_ARMS["NPU keep both"] = ("vanilla", "keep both")


def memory(spec: str) -> None:
    """Figure 12: peaks of serving 32 tokens behind a prompt, by arm, each in an empty process.

    A forked one would use again what the recorder has given back, and so seem to take less.
    """
    kept = recorder("memory", memory, ["model", "context", "arm"], spec, tokens=32)
    profile = apart(profiled, apart(exported, spec), False)
    for context, arm in product((256, *PROMPTS), MEMORY_ARMS):
        if (spec, context, arm) not in kept.done:
            megabytes = apart(peak, spec, context, arm, profile, start="spawn")
            kept.add([{"model": spec, "context": context, "arm": arm, "peak_mb": megabytes}])
    print(kept.finish())


def peak(spec: str, context: int, arm: str, profile: switching.Profile) -> float:
    """MB of resident memory above what the process began with, at most. profile: of the graphs."""
    torch.set_num_threads(1)
    began = psutil.Process().memory_info().rss
    method, way = MEMORY_ARMS[arm]
    if way == "cpu":
        lm: Any = engine(models.load(spec), threads=1, weights=WEIGHTS)
    else:
        lm = StaticLM(static_graphs.opened(exported(spec)), RULES[way], 1.0, profile)
    drafter = methods(lm.vocabulary)[method][0]()
    generate(lm, drafter, [1 + position % 999 for position in range(context)], 32, budget=LMAX - 1)
    return (1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - began) / 1e6


def costs(spec: str, chunk: int = 256, repeats: int = 15) -> None:
    """Calibration of a chunk of prompt, ms per token, on logits drawn at random: values do not change the time."""
    kept = recorder("costs", costs, ["vocabulary"], chunk=chunk, repeats=repeats)
    random = torch.Generator().manual_seed(0)
    for vocabulary in (8192, 49_152, 151_936):
        logits = 3 * torch.randn(chunk, vocabulary, generator=random)
        prompt = torch.randint(0, vocabulary, (chunk,), generator=random).tolist()
        spent = []
        for _ in range(repeats + 1):
            table = PromptCalibration()
            table.begin(prompt)
            spent.append(1e3 * switching.seconds(table.prefilled, 0, logits) / chunk)
        kept.add([{"rule": "sd.npu", "vocabulary": vocabulary, **summary(spent[1:])}])
    print(kept.finish())


PARTS: dict[str, Callable[[str], None]] = {
    "curves": curves,
    "costs": costs,
    "memory": memory,
    "whole": whole,
    "switching": switch,
}

"""What this machine takes of a public model in 4 bits: static graphs by rows, ways of switching, requests, memory.

Parts of `make record PAPER=sdnpu`, for a quiet machine; each goes on where it was stopped. One thread computes, one
loads. Ways of switching and peaks of memory are measured in processes of their own, forked before any graph is loaded.
*Cold* are graphs to load that are on the disk only, *warm* ones in the page cache.
"""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import onnxruntime  # type: ignore[import-untyped]
import psutil
import torch
from torch import Tensor

from ondevice import assets, models
from ondevice.causal_lm import drawing
from ondevice.causal_lm.drawing import Weights
from ondevice.causal_lm.lean import engine
from ondevice.evidence import Recorder, machine_name
from ondevice.evidence.resampling import median_interval
from ondevice.speculation import Draft, Drafter, Verified, generate, greedy
from ondevice.speculation.verify_cost import verifications
from ondevice_papers.sdnpu.calibration import Calibration
from ondevice_papers.sdnpu.drafter import LMAX, methods
from ondevice_papers.sdnpu.scheduling import RULES
from ondevice_programs.graphs import exporting, static_graphs, switching
from ondevice_programs.graphs.drawn import StaticDrawing
from ondevice_programs.graphs.static_lm import StaticLM
from ondevice_studies.speculation.request_set import Request
from ondevice_studies.speculation.spec_bench import Bench, recordable, recorded_requests

WEIGHTS: Weights = "4bit"
CONTEXT = 2304  # tokens of a session
ROWS = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 48, 64, 128, 256)
CACHED = 256  # rows before a forward that is timed
PROMPTS = (768, 1500)  # tokens of the prompts that graphs are switched in: three and six chunks
TURNS = 25
ROUNDS = 15
SPARE = 1.5  # memory over that of all G1, where there is some to spare
LONG, SHORT = 768, 256  # tokens: least of a long prompt, which takes several chunks, and most of one that takes one
REQUESTS = {"summarization": 3, "rag": 3, "qa": 2}  # by task; the first two are long
WHOLE_ROUNDS = 10


@cache
def exported(spec: str) -> Path:
    """The folder of a model's graphs, exported once a version of this code."""
    folder = assets.cache_folder("sdnpu") / f"{spec.replace(':', '-')}-{WEIGHTS}-{CONTEXT}"
    if not (folder / static_graphs.FACTS).is_file():
        loaded = models.load(spec)
        exporting.export(loaded, folder, exporting.texts(loaded), weights=WEIGHTS, context=CONTEXT)
        static_graphs.opened(folder)
    return folder


def recorder(name: str, keys: Sequence[str], specs: Sequence[str], **parameters: Any) -> Recorder:
    """Of this machine's times."""
    return Recorder("sdnpu", f"public-{name}", keys, {"weights": WEIGHTS, **parameters}, specs, machine=machine_name())


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """The median, with 95 % by ranks: seconds, low, high, n."""
    median, low, high = map(float, median_interval(seconds))
    return {"seconds": median, "low": low, "high": high, "n": len(seconds)}


# Static graphs by rows


def curves(specs: Sequence[str]) -> None:
    """A forward of all layers and the head: on static graphs of so many rows, and on an engine of any, in turns."""
    kept = recorder("curves", ["model", "part"], specs, rows=ROWS, cached=CACHED, turns=TURNS)
    for spec in specs:
        if (spec, "any") in kept.done:
            continue
        loaded = models.load(spec)
        forwards = [static_forward(loaded, count) for count in ROWS]
        turn = verifications(engine(loaded, threads=1, weights=WEIGHTS), CACHED, ROWS)
        times: dict[str, list[list[float]]] = {"static": [], "any": []}
        for _ in range(1 + TURNS):  # whatever slows the machine for a while does so to all
            times["static"].append([_seconds(run) for run in forwards])
            times["any"].append(turn())
        for part, turns in times.items():
            columns = zip(ROWS, zip(*turns[1:], strict=True), strict=True)
            kept.add([{"model": spec, "part": part, "rows": count, **summary(spent)} for count, spent in columns])
        kept.checkpoint()
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


def _seconds(run: Callable[..., object], *arguments: object) -> float:
    start = perf_counter()
    run(*arguments)
    return perf_counter() - start


# Ways of switching


def switch(specs: Sequence[str]) -> None:
    """Every way of switching, each time in a process of its own, in an order that rotates."""
    keys = ["model", "tokens", "cold", "memory", "way", "round"]
    kept = recorder("switching", keys, specs, rounds=ROUNDS, spare=SPARE)
    ways = [(1.0, way) for way in RULES] + [(SPARE, "naive"), (SPARE, "ours")]
    for spec in specs:
        folder = apart(exported, spec)
        profiles = {cold: apart(profiled, folder, cold) for cold in (False, True)}
        for turn, tokens, cold in product(range(ROUNDS), PROMPTS, (False, True)):
            for memory, way in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
                named = {"model": spec, "tokens": tokens, "cold": cold, "memory": memory, "way": way, "round": turn}
                if tuple(named.values()) not in kept.done:
                    times = apart(switched, folder, way, memory, cold, profiles[cold], tokens)
                    kept.add([{**named, "precision": WEIGHTS, **times}])
            kept.checkpoint()
    print(kept.finish())


def apart(run: Callable[..., Any], *arguments: Any) -> Any:
    """What a function gives in a process of its own."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_answer, args=(sender, run, arguments))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        raise RuntimeError(f"{run.__name__} did not end well in its process.") from None
    finally:
        process.join()


def _answer(pipe: Any, run: Callable[..., Any], arguments: Sequence[Any]) -> None:
    pipe.send(run(*arguments))


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
    shares = [static_graphs.cached_share(path) for path in built.small_files]
    session.prefill([1 + position % 999 for position in range(tokens)])
    timeline = session.lm.timeline
    assert timeline is not None
    loading = float((timeline.load_end - timeline.load_start).sum())
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - began
    return {
        "total_s": timeline.latency / 1e3,
        "loading_s": loading / 1e3,
        "peak_mb": peak / 1e6,
        "cached_share": float(np.mean(shares)),
    }


def warmed(built: static_graphs.Graphs, warm: bool) -> None:
    """Bring the decode graphs' files into the page cache, or drop them from it."""
    for path in built.small_files:
        if warm:
            path.read_bytes()
        else:
            static_graphs.drop_from_page_cache(path)


# Whole requests


# The method of drafting; how graphs are switched, or "cpu", an engine of any rows.
ARMS: dict[str, tuple[str, str]] = {
    "CPU vanilla": ("vanilla", "cpu"),
    "CPU-SAM": ("SAM", "cpu"),
    "CPU mixture": ("mixture", "cpu"),
    "NPU vanilla": ("vanilla", "synchronous"),
    "NPU +G": ("vanilla", "greedy (paper)"),
    "NPU +G naive": ("vanilla", "naive"),
    "NPU-SAM": ("SAM", "synchronous"),
    "NPU-SAM +G": ("SAM", "greedy (paper)"),
    "NPU-SAM +G naive": ("SAM", "naive"),
    "sd.npu": ("SAM+both", "greedy (paper)"),
    "mixture": ("mixture", "ours"),
}


class Clock(Drafter):
    """Another drafter, timed: until the first token, to the last, and what it takes itself."""

    began = first = ended = draft_s = observe_s = 0.0

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.name, self.vocabulary = drafter, drafter.name, drafter.vocabulary
        self.wants_prefill = drafter.wants_prefill
        self.drafts_trees = drafter.drafts_trees

    def choice(self, logits: Tensor) -> int:
        """Greedy, noting when the first token was chosen."""
        token = greedy(logits)
        self.first = self.first or perf_counter()
        return token

    def begin(self, prompt: Sequence[int]) -> None:
        """Begin the drafter's and the clock's request."""
        self.began, self.first, self.draft_s, self.observe_s = perf_counter(), 0.0, 0.0, 0.0
        self.drafter.begin(prompt)

    def prefilled(self, start: int, logits: Tensor) -> None:
        """Of the drafter."""
        self.drafter.prefilled(start, logits)

    def propose(self, tokens: Sequence[int], budget: int) -> Draft:
        """Timed."""
        began = perf_counter()
        draft = self.drafter.propose(tokens, budget)
        self.draft_s += perf_counter() - began
        return draft

    def observe(self, step: Verified) -> None:
        """Timed."""
        began = perf_counter()
        self.drafter.observe(step)
        self.observe_s += perf_counter() - began

    def end(self, tokens: Sequence[int]) -> None:
        """Stop the clock."""
        self.ended = perf_counter()
        self.drafter.end(tokens)


def timed(lm: Any, clock: Clock, request: Request) -> tuple[dict[str, float], list[int]]:
    """A whole request's prefill_s (with switching and calibration), decode_s, and of both draft_s and observe_s; and
    its tokens."""
    generation = generate(
        lm, clock, request.ids, request.limit, budget=LMAX - 1, eos_token_ids=request.ends, choice=clock.choice
    )
    times = {
        "prompt_tokens": generation.prompt,
        "tokens": len(generation.tokens),
        "passes": len(generation.steps),
        "prefill_s": clock.first - clock.began,
        "decode_s": clock.ended - clock.first,
        "draft_s": clock.draft_s,
        "observe_s": clock.observe_s,
    }
    return times, list(generation.tokens)


def timed_requests(bench: Bench) -> list[Request]:
    """The first requests of REQUESTS' tasks whose prompts are long, or short."""
    every = recorded_requests(bench, recordable(bench.model), lambda task: None if task in REQUESTS else 1)
    chosen = []
    for task, count in REQUESTS.items():
        long = task != "qa"
        fits = [r for r in every if r.task == task and (len(r.ids) >= LONG if long else len(r.ids) <= SHORT)]
        chosen += [request for request in fits if len(request.ids) + request.limit <= CONTEXT][:count]
    return chosen


def whole(specs: Sequence[str]) -> None:
    """Requests by every arm, one after the other, graphs warm and cold; a round begins with new drafters.

    same: whether an arm's answer is that of plain decoding on an engine of any rows.
    """
    kept = recorder("whole", ["model", "cold", "task", "round"], specs, rounds=WHOLE_ROUNDS, arms=list(ARMS))
    for spec in specs:
        bench = Bench(spec)
        lm = engine(bench.loaded, threads=1, weights=WEIGHTS)
        built = static_graphs.opened(exported(spec))
        profiles = {cold: switching.profile(built, cold=cold) for cold in (False, True)}
        requests = timed_requests(bench)
        for turn, cold, task in product(range(WHOLE_ROUNDS), (False, True), REQUESTS):
            named = {"model": spec, "cold": cold, "task": task, "round": turn}
            if tuple(named.values()) in kept.done:
                continue
            arms = {
                arm: lm if way == "cpu" else StaticLM(built, RULES[way], 1.0, profiles[cold])
                for arm, (_, way) in ARMS.items()
            }
            clocks = {arm: Clock(methods(lm.vocabulary)[ARMS[arm][0]][0]()) for arm in arms}
            rows = []
            for index, request in enumerate(request for request in requests if request.task == task):
                names = list(arms)
                order = names[(index + turn) % len(names) :] + names[: (index + turn) % len(names)]
                taken = {}
                for arm in order:
                    warmed(built, not cold)
                    taken[arm] = timed(arms[arm], clocks[arm], request)
                plain = taken["CPU vanilla"][1]
                of_request = {**named, "precision": WEIGHTS, "request": request.name}
                rows += [
                    {**of_request, "arm": arm, "same": answer == plain, **times}
                    for arm, (times, answer) in taken.items()
                ]
            kept.add(rows)
            kept.checkpoint()
    print(kept.finish())


# Memory and calibration


def memory(specs: Sequence[str]) -> None:
    """Figure 12: peaks of serving 32 tokens behind a prompt, by arm."""
    kept = recorder("memory", ["model", "context", "arm"], specs, tokens=32)
    for spec in specs:
        apart(exported, spec)
    for spec, context, arm in product(specs, (256, *PROMPTS), ARMS):
        if (spec, context, arm) not in kept.done:
            kept.add([{"model": spec, "context": context, "arm": arm, "peak_mb": apart(peak, spec, context, arm)}])
    print(kept.finish())


def peak(spec: str, context: int, arm: str) -> float:
    """MB of resident memory above what the process began with, at most."""
    began = psutil.Process().memory_info().rss
    method, way = ARMS[arm]
    if way == "cpu":
        lm: Any = engine(models.load(spec), threads=1, weights=WEIGHTS)
    else:
        lm = StaticLM(static_graphs.opened(exported(spec)), RULES[way])
    drafter = methods(lm.vocabulary)[method][0]()
    generate(lm, drafter, [1 + position % 999 for position in range(context)], 32, budget=LMAX - 1)
    return (1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - began) / 1e6


def costs(specs: Sequence[str], chunk: int = 256, repeats: int = 15) -> None:
    """Calibration of a chunk of prompt, ms per token, on logits drawn at random: values do not change the time."""
    kept = recorder("costs", ["vocabulary"], [], chunk=chunk, repeats=repeats)
    random = torch.Generator().manual_seed(0)
    for vocabulary in (8192, 49_152, 151_936):
        logits = 3 * torch.randn(chunk, vocabulary, generator=random)
        prompt = torch.randint(0, vocabulary, (chunk,), generator=random).tolist()
        spent = []
        for _ in range(repeats + 1):
            table = Calibration()
            table.begin(prompt)
            spent.append(1e3 * _seconds(table.prefilled, 0, logits) / chunk)
        kept.add([{"rule": "sd.npu", "vocabulary": vocabulary, **summary(spent[1:])}])
    print(kept.finish())


PARTS: dict[str, Callable[[Sequence[str]], None]] = {
    "curves": curves,
    "costs": costs,
    "memory": memory,
    "whole": whole,
    "switching": switch,
}

"""What this machine takes: static graphs by rows, ways of switching, whole requests, memory; and whose ids are equal.

Parts of `make record PAPER=sdnpu`, for a quiet machine; each goes on where it was stopped. One thread computes, one
loads. Ways of switching and peaks of memory are measured in processes of their own, forked before any graph is loaded.
"""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import onnxruntime  # type: ignore[import-untyped]
import psutil
import torch
from torch import Tensor

from ondevice import assets, corpus, models
from ondevice.causal_lm import drawing
from ondevice.causal_lm.drawing import Weights
from ondevice.causal_lm.lean import engine
from ondevice.evidence import Recorder, load, machine_name
from ondevice.evidence.resampling import median_interval
from ondevice.speculation import Draft, Drafter, Verified, generate, greedy
from ondevice.speculation.verify_cost import verifications
from ondevice_papers.sdnpu.calibration import Calibration
from ondevice_papers.sdnpu.drafter import LMAX, methods
from ondevice_papers.sdnpu.scheduling import RULES
from ondevice_programs.graphs import exporting, static_graphs, switching
from ondevice_programs.graphs.drawn import StaticDrawing
from ondevice_programs.graphs.static_lm import StaticLM
from ondevice_studies.sdnpu.workbench import TASKS, Workbench, sample
from ondevice_studies.speculation.prompts import digest
from ondevice_studies.speculation.request_set import Request

SHAPE = "random:qwen2.5-0.5b"
ROWS = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 48, 64, 128, 256)
CACHED = 256  # rows before a forward that is timed
TOKENS = 768  # of the prompt that graphs are switched in: three chunks
ROUNDS = 15
SPARE = 1.5  # memory over that of all G1, where there is some to spare
WHOLE = dict(requests=6, rounds=1)
TEXTS = 4  # windows of 256 tokens that int8's ranges are found on


def exported(spec: str, precision: str, blocks: int = 6) -> Path:
    """The folder of a model's graphs, exported once a version of this code."""
    folder = assets.cache_folder("sdnpu") / f"{spec.replace(':', '-')}-{precision}-{blocks}"
    if not (folder / static_graphs.FACTS).is_file():
        tokens = corpus.document_tokens("validation")
        windows = np.linspace(0, len(tokens) - CACHED, TEXTS).astype(int)
        texts = [tokens[start : start + CACHED].tolist() for start in windows]
        weights: Weights = "8bit" if precision == "int8" else "float32"
        exporting.export(models.load(spec), folder, texts, blocks=blocks, weights=weights)
        static_graphs.opened(folder)
    return folder


def recorder(name: str, keys: Sequence[str], specs: Sequence[str], **parameters: Any) -> Recorder:
    """Of this machine's times."""
    return Recorder("sdnpu", name, keys, parameters, specs, machine=machine_name())


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """The median, with 95 % by ranks: seconds, low, high, n."""
    median, low, high = map(float, median_interval(seconds))
    return {"seconds": median, "low": low, "high": high, "n": len(seconds)}


# Static graphs by rows


def curves(specs: Sequence[str], turns: int = 25) -> None:
    """A forward of all layers and the head: on static graphs of so many rows, and on an engine of any."""
    kept = recorder("curves", ["model", "part"], [*specs, SHAPE], rows=ROWS, cached=CACHED, turns=turns)
    for spec in [*specs, SHAPE]:
        if (spec, "any") in kept.done:
            continue
        bundled = spec in specs
        rows, repeats = (ROWS, turns) if bundled else ((1, 8, 16, 32, 64, 256), 5)
        model = models.load(spec).model
        if bundled:  # in turns, so that whatever slows the machine for a while does so to all
            forwards = [static_forward(model, count) for count in rows]
            static = [[_seconds(run) for run in forwards] for _ in range(repeats + 1)][1:]
        else:  # one after the other, as they are large
            large = (static_forward(model, count) for count in rows)
            each = [[_seconds(run) for _ in range(repeats + 1)][1:] for run in large]
            static = [list(turn_) for turn_ in zip(*each, strict=True)]
        lm = engine(model, threads=1)
        turn = verifications(lm, CACHED, rows)
        for part, times in {"static": static, "any": [turn() for _ in range(repeats)]}.items():
            named = {"model": spec, "part": part, "precision": "fp32"}
            kept.add(
                [
                    {**named, "rows": count, **summary(spent)}
                    for count, spent in zip(rows, zip(*times, strict=True), strict=True)
                ]
            )
        kept.checkpoint()
    print(kept.finish())


def static_forward(model: Any, rows: int) -> Callable[[], Any]:
    """A run of all layers as one static graph, and of the head."""
    drawn = StaticDrawing(model, rows, 1056).block(range(model.config.num_hidden_layers))
    head = StaticDrawing(model, rows, 1056).head()
    sessions = [onnxruntime.InferenceSession(proto.SerializeToString(), drawing.options()) for proto in (drawn, head)]
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
    kept = recorder("switching", ["model", "precision", "cold", "memory", "way", "round"], specs[:1],
                    tokens=TOKENS, rounds=ROUNDS, spare=SPARE)  # fmt: skip
    ways = [(1.0, way) for way in RULES] + [(SPARE, "naive"), (SPARE, "ours")]
    for spec, precision in product(specs[:1], ("fp32", "int8")):
        compiled = apart(exported, spec, precision)
        profiles = {cold: apart(profiled, compiled, cold) for cold in (False, True)}
        for turn, cold in product(range(ROUNDS), (False, True)):
            for memory, way in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
                named = {"model": spec, "precision": precision, "cold": cold, "memory": memory, "way": way}
                if (*named.values(), turn) not in kept.done:
                    times = apart(switched, compiled, way, memory, cold, profiles[cold])
                    kept.add([{**named, "tokens": TOKENS, "round": turn, **times}])
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


def switched(folder: Path, way: str, memory: float, cold: bool, profile: switching.Profile) -> dict[str, float]:
    """One prefill: seconds in all and of loads, and MB of resident memory above what the process began with."""
    began = psutil.Process().memory_info().rss
    built = static_graphs.opened(folder)
    session = StaticLM(built, RULES[way], memory, profile).start()
    for path in built.small_files:
        if cold:
            static_graphs.drop_from_page_cache(path)
        else:
            path.read_bytes()
    shares = [static_graphs.cached_share(path) for path in built.small_files]
    session.prefill([1 + position % 999 for position in range(TOKENS)])
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


# Whole requests


# The method of drafting; how graphs are switched, or "cpu", an engine of any rows.
ARMS: dict[str, tuple[str, str]] = {
    "CPU vanilla": ("vanilla", "cpu"), "CPU-SAM": ("SAM", "cpu"), "CPU mixture": ("mixture", "cpu"),
    "NPU vanilla": ("vanilla", "synchronous"), "NPU +G": ("vanilla", "greedy (paper)"),
    "NPU +G naive": ("vanilla", "naive"), "NPU-SAM": ("SAM", "synchronous"), "NPU-SAM +G": ("SAM", "greedy (paper)"),
    "NPU-SAM +G naive": ("SAM", "naive"),
    "sd.npu": ("SAM+both", "greedy (paper)"), "mixture": ("mixture", "ours"),
}  # fmt: skip


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


def timed(lm: Any, clock: Clock, request: Request) -> dict[str, float]:
    """A whole request: prefill_s (with switching and calibration), decode_s, and of both draft_s and observe_s."""
    generation = generate(
        lm, clock, request.ids, request.limit, budget=LMAX - 1, eos_token_ids=request.ends, choice=clock.choice
    )
    return {
        "prompt_tokens": generation.prompt,
        "tokens": len(generation.tokens),
        "passes": len(generation.steps),
        "prefill_s": clock.first - clock.began,
        "decode_s": clock.ended - clock.first,
        "draft_s": clock.draft_s,
        "observe_s": clock.observe_s,
    }


def whole(specs: Sequence[str]) -> None:
    """Requests of each task by every arm, one after the other; a round begins with new drafters."""
    kept = recorder("whole", ["model", "precision", "task", "round"], specs, **WHOLE, arms=list(ARMS))
    for spec, precision in [*((spec, "fp32") for spec in specs), (specs[0], "int8")]:
        bench = Workbench(spec)
        built = static_graphs.opened(exported(spec, precision))
        profile = switching.profile(built)
        arms = {
            arm: bench.lm if way == "cpu" else StaticLM(built, RULES[way], 1.0, profile)
            for arm, (_, way) in ARMS.items()
            if way != "cpu" or precision == "fp32"
        }
        requests = sample(bench, load("sdnpu", "answers"), number=WHOLE["requests"])
        for turn, task in product(range(WHOLE["rounds"]), TASKS):
            named = {"model": spec, "precision": precision, "task": task, "round": turn}
            if tuple(named.values()) not in kept.done:
                clocks = {arm: Clock(methods(bench.lm.vocabulary)[ARMS[arm][0]][0]()) for arm in arms}
                rows = []
                for index, request in enumerate(request for request in requests if request.task == task):
                    order = list(arms)[(index + turn) % len(arms) :] + list(arms)[: (index + turn) % len(arms)]
                    for arm in order:
                        times = timed(arms[arm], clocks[arm], request)
                        rows.append({**named, "request": request.prompt, "arm": arm, **times})
                kept.add(rows)
    print(kept.finish())


# Memory, calibration, ids


def memory(specs: Sequence[str]) -> None:
    """Figure 12: peaks of serving 32 tokens behind a prompt, by arm."""
    kept = recorder("memory", ["model", "context", "arm"], specs, tokens=32)
    for spec in specs:
        apart(exported, spec, "fp32")
    for spec, context, arm in product(specs, (256, TOKENS), ARMS):
        if (spec, context, arm) not in kept.done:
            kept.add([{"model": spec, "context": context, "arm": arm, "peak_mb": apart(peak, spec, context, arm)}])
    print(kept.finish())


def peak(spec: str, context: int, arm: str) -> float:
    """MB of resident memory above what the process began with, at most."""
    began = psutil.Process().memory_info().rss
    method, way = ARMS[arm]
    if way == "cpu":
        lm: Any = engine(models.load(spec).model, threads=1)
    else:
        lm = StaticLM(static_graphs.opened(exported(spec, "fp32")), RULES[way])
    drafter = methods(lm.vocabulary)[method][0]()
    generate(lm, drafter, corpus.document_tokens("test")[:context].tolist(), 32, budget=LMAX - 1)
    return (1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - began) / 1e6


def costs(specs: Sequence[str], chunk: int = 256, repeats: int = 15) -> None:
    """Calibration of a chunk of prompt, ms a token, on logits drawn at random: their values do not change the time."""
    kept = recorder("costs", ["rule", "vocabulary"], [], chunk=chunk, repeats=repeats)
    random = torch.Generator().manual_seed(0)
    for vocabulary in (8192, 151_936):
        logits = 3 * torch.randn(chunk, vocabulary, generator=random)
        prompt = torch.randint(0, vocabulary, (chunk,), generator=random).tolist()
        spent = []
        for _ in range(repeats + 1):
            table = Calibration()
            table.begin(prompt)
            spent.append(1e3 * _seconds(table.prefilled, 0, logits) / chunk)
        kept.add([{"rule": "sd.npu", "vocabulary": vocabulary, **summary(spent[1:])}])
    print(kept.finish())


def identical_ids(specs: Sequence[str]) -> None:
    """The ids of transformers' `generate`, and of static graphs with the mixture and our schedule, on all requests."""
    kept = Recorder("sdnpu", "said", ["model", "engine", "task"], {"budget": LMAX - 1}, specs)
    for spec in specs:
        bench = Workbench(spec)
        requests = sample(Workbench(spec), load("sdnpu", "answers"), number=40)
        for name in ("transformers", "fp32", "int8"):
            for task in TASKS:
                if (spec, name, task) not in kept.done:
                    of_task = [request for request in requests if request.task == task]
                    answers = plain(bench, of_task) if name == "transformers" else on_graphs(spec, name, of_task)
                    right = plain(bench, of_task) if name != "transformers" else answers
                    kept.add([
                        {"model": spec, "engine": name, "task": task, "request": request.prompt, "tokens": len(answer),
                         "answer_sha": digest(answer), "identical": answer == wanted, "agree": _agree(answer, wanted)}
                        for request, answer, wanted in zip(of_task, answers, right, strict=True)
                    ])  # fmt: skip
                    kept.checkpoint()
    print(kept.finish())


def plain(bench: Workbench, requests: Sequence[Request]) -> list[list[int]]:
    """transformers' own answers, without anything of ours."""
    answers = []
    for request in requests:
        ids = torch.tensor([request.ids])
        out = bench.lm.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=request.limit,
            eos_token_id=list(request.ends) or None,
            pad_token_id=0,
        )
        answers.append(out[0, ids.shape[1] :].tolist())
    return answers


def on_graphs(spec: str, precision: str, requests: Sequence[Request]) -> list[list[int]]:
    """The whole system's answers."""
    lm: Any = StaticLM(static_graphs.opened(exported(spec, precision)), RULES["ours"])
    drafter = methods(lm.vocabulary)["mixture"][0]()
    answers = []
    for request in requests:
        generation = generate(lm, drafter, request.ids, request.limit, budget=LMAX - 1, eos_token_ids=request.ends)
        answers.append(list(generation.tokens))
    return answers


def _agree(answer: Sequence[int], wanted: Sequence[int]) -> int:
    """Tokens before the first difference."""
    return next((index for index, (a, b) in enumerate(zip(answer, wanted, strict=False)) if a != b), len(wanted))


PARTS: dict[str, Callable[[Sequence[str]], None]] = {
    "said": identical_ids,
    "curves": curves,
    "costs": costs,
    "memory": memory,
    "whole": whole,
    "switching": switch,
}

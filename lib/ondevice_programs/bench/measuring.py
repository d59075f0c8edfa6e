"""The parts of a bench, one after the other: each is left out where an earlier run has it, and bounded in time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

from tqdm import tqdm

from ondevice.causal_lm import CausalLM
from ondevice.causal_lm.loops import loop_start
from ondevice.models import Loaded
from ondevice.speculation import Drafter
from ondevice.speculation.drafters import DRAFTERS, create
from ondevice.speculation.replayed_model import ReplayedModel
from ondevice_programs.bench import formats, predictions
from ondevice_programs.bench.drafters import BUDGETS, answered
from ondevice_programs.bench.inputs import ROUND, BenchRequest, in_turns, rounds
from ondevice_programs.bench.predictions import ANY, CHAIN, DRAFTED, FASTEST, PLAIN, REPEATED, TREE
from ondevice_programs.bench.state import save

# By which share of the minutes a part ends. The rest is for imports, loading, and an answer that is under way.
ENDS = {"curves": 0.11, "answers": 0.27, "replays": 0.34, "trials": 0.69, "measured": 0.92}
_LEAST = 0.03  # of the minutes, which a part has however late it begins
FEWEST = 12  # prompts of the last part
_PER_PASS = 1.6  # tokens, for a first guess of what drafters take
LIMITS = (256, 128, 64, 32)  # tokens of an answer that are decoded once more, as many as fit into a part
NEAR = 1e-4  # a logit's lead, below which a token is a near-tie
_KEPT = 20  # predictions in the file
Key = tuple[str, int, str]  # drafter, budget, shape of its drafts


@dataclass
class Measurement:
    """Shared by the parts. names: of the drafters. parts: as `state.begun` gives them, kept in the file `path`.

    beside: other programs' curves. say: gets a line of progress.
    """

    loaded: Loaded
    engines: Mapping[str, CausalLM]
    requests: Sequence[BenchRequest]
    names: Sequence[str]
    minutes: float
    path: Path | None
    parts: dict[str, Any]
    say: Callable[[str], None]
    beside: Mapping[str, Callable[[], list[float]]]

    def __post_init__(self) -> None:
        self.rest = self.parts["unfinished"]  # what only the rest of a bench needs
        self.ends = self.loaded.eos_token_ids
        self.vocabulary = next(iter(self.engines.values())).vocabulary
        drafting = {name: lm for name, lm in self.engines.items() if formats.FORMATS[name]["drafts"]}
        self.shapes = {name: CHAIN if lm.tree_refusal else TREE for name, lm in drafting.items()}
        self._began = monotonic() - sum(self.parts["seconds"].values())

    @contextmanager
    def part(self, name: str, words: str) -> Iterator[float]:
        """Around a part, which is to end by the time that is given. Its measurements are kept, however it ends."""
        self.say(f"{words} ...")
        began = monotonic()
        try:
            yield max(self.end_of(name), began + 60 * self.minutes * _LEAST)
        finally:
            spent = self.parts["seconds"]
            spent[name] = round(spent.get(name, 0.0) + monotonic() - began, 1)
            save(self.path, self.parts)

    def end_of(self, part: str) -> float:
        """When a part is to end, by `time.monotonic`."""
        return self._began + 60 * self.minutes * ENDS[part]

    def run(self) -> None:
        """All parts; without requests, or formats that take drafts, the first."""
        if "curves" not in self.parts:
            with self.part("curves", "Passes in every format") as until:
                self.parts["curves"] = formats.curves(self.engines, until - monotonic(), self.beside)
        if self.requests and self.shapes:
            self.compare()
        self.parts |= {"complete": True, "advice": predictions.advice(self.parts)}
        del self.parts["unfinished"]
        save(self.path, self.parts)

    def compare(self) -> None:
        """The parts about drafters, in the format whose single row is fastest of those that verify trees, or chains."""
        curves = self.parts["curves"]
        names = [name for name in self.shapes if self.shapes[name] == TREE] or list(self.shapes)
        name = min(names, key=lambda name: formats.milliseconds(curves[name], 1))
        lm = self.engines[name]
        with self.part("answers", f"Plain answers to {len(self.requests)} prompts in {name}") as until:
            self.answer(name, until)
        answers = {each: self.rest["answers"].get(each.id, {"tokens": []})["tokens"] for each in self.requests}
        requests = [replace(each, limit=len(tokens)) for each, tokens in answers.items() if len(tokens) > 1]
        replayed = ReplayedModel({each.ids: answers[each] for each in answers}, lm.vocabulary, lm.context)
        arms = len(set(self.shapes.values())) * sum(DRAFTERS[drafter].reads == "logits" for drafter in self.names)
        ms = formats.milliseconds(curves[name], 1 + BUDGETS[0]) / _PER_PASS
        shorter = self.limited("trials", requests[:ROUND], requests, arms, ms)
        with self.part("replays", "Drafters that read no logits, on these answers") as until:
            self.trials(replayed, shorter, False, until)
        with self.part("trials", f"Drafters that read logits, live in {name}") as until:
            self.trials(lm, shorter, True, until)
        self.parts["drafters"] = self.arms(requests)
        self.parts["predictions"] = predictions.predicted(curves, self.shapes, self.parts["drafters"])[:_KEPT]
        if self.parts["predictions"]:
            with self.part("measured", "The best of them against plain decoding, live") as until:
                best = self.parts["predictions"][0]
                ms = best["ms_per_token"] * (1 + 2 * best["speed"] + best["over_fastest"]) / 4
                self.measure(self.limited("measured", requests[:FEWEST], requests, 4, ms), best, until)

    def limited(
        self, part: str, least: Sequence[BenchRequest], requests: Sequence[BenchRequest], arms: int, ms: float
    ) -> list[BenchRequest]:
        """The requests, with answers so short that `least` of them fit into a part for each arm, at ms per token."""
        reading = sum(self.rest["answers"][each.id]["first"] for each in least)
        room = 1e3 * ((self.end_of(part) - monotonic()) / max(arms, 1) - reading)
        fitting = (most for most in LIMITS if ms * sum(min(each.limit, most) for each in least) <= room)
        most = self.parts.setdefault("limits", {}).setdefault(part, next(fitting, LIMITS[-1]))
        return [replace(request, limit=min(request.limit, most)) for request in requests]

    def answer(self, name: str, until: float) -> None:
        """Plain answers in a format, cut where they begin to loop; as many at least as the last part needs."""
        kept = self.rest.setdefault("answers", {})
        for number, request in enumerate(tqdm(self.requests, disable=None)):
            if number >= FEWEST and monotonic() > until:
                break
            if request.id not in kept:
                log = answered(self.engines[name], Drafter(), request.ids, request.limit, self.ends)
                kept[request.id] = {"tokens": log["tokens"][: loop_start(log["tokens"])], "first": log["first"]}
        lengths = [len(entry["tokens"]) for entry in kept.values()]
        self.parts["answers"] = {"format": name, "n": len(kept), "median": median(lengths), "tokens": sum(lengths)}

    def trials(self, lm: Any, requests: Sequence[BenchRequest], live: bool, until: float) -> None:
        """Every drafter, shape and budget, round by round; the first round at the first budget is never cut short.

        Behind it the drafters come in the order of their predicted speed. A drafter keeps what it has learnt from
        one request to the next. Chains are what the loop leaves of a draft where a model refuses trees.
        """
        runs = self.rest.setdefault("runs", [])
        done = {(run["drafter"], run["budget"], run["shape"], run["request"]) for run in runs}
        chains = copy.copy(lm)
        chains.tree_refusal = "Only chains are tried."
        shapes = sorted(set(self.shapes.values()))
        drafters: dict[Key, Drafter] = {}

        def trial(group: Sequence[BenchRequest], key: Key) -> None:
            name, budget, shape = key
            drafter = drafters.get(key) or drafters.setdefault(key, create(name, self.vocabulary))
            for request in group:
                if (*key, request.id) not in done:
                    on = chains if shape == CHAIN else lm
                    log = answered(on, drafter, request.ids, request.limit, self.ends, budget)
                    reads = live and drafter.wants_prefill
                    runs.append({"drafter": name, "budget": budget, "shape": shape, **self._run(log, request, reads)})
                    done.add((*key, request.id))

        pairs = []
        for name in self.names:
            if (DRAFTERS[name].reads == "logits") == live:
                trees = create(name, self.vocabulary).drafts_trees
                pairs += [(name, shape) for shape in (shapes if trees else [ANY])]
        groups = rounds(requests)
        for name, shape in tqdm(pairs if groups else [], disable=None):
            trial(groups[0], (name, BUDGETS[0], shape))
        arms = predictions.predicted(self.parts["curves"], self.shapes, self.arms(requests))
        speeds = {(row["drafter"], row["shape"]): row["ms_per_token"] for row in reversed(arms)}
        for group in groups:
            for name, shape in sorted(pairs, key=lambda pair: speeds[pair]):
                for budget in BUDGETS:
                    if monotonic() > until:
                        return
                    trial(group, (name, budget, shape))

    def _run(self, log: Mapping[str, Any], request: BenchRequest, reads: bool) -> dict[str, Any]:
        """A row of a trial. reads: whether the prompt's logits cost the model time, which is the drafter's then."""
        plain_answer = self.rest["answers"][request.id]
        longer = max(0.0, log["first"] - log["opening"] - plain_answer["first"]) if reads else 0.0
        return {
            "request": request.id,
            "task": request.task,
            "rows": log["rows"],
            "emitted": log["emitted"],
            "reading": log["opening"] + longer,
            "drafting": log["drafting"] - log["opening"],
            "whole": len(plain_answer["tokens"]) - 1,
            "identical": log["tokens"] == list(plain_answer["tokens"][: request.limit]),
        }

    def arms(self, requests: Sequence[BenchRequest]) -> list[dict[str, Any]]:
        """An `arm` of every drafter, budget and shape, over its whole rounds."""
        runs: dict[Key, dict[str, dict[str, Any]]] = {}
        for run in self.rest["runs"]:
            runs.setdefault((run["drafter"], run["budget"], run["shape"]), {})[run["request"]] = run
        groups = [[request.id for request in group] for group in rounds(requests)]
        table = []
        for part in runs.values():
            whole = [part[name] for group in groups if part.keys() >= set(group) for name in group]
            table += [predictions.arm(whole)] if whole else []
        return sorted(table, key=lambda row: (self.names.index(row["drafter"]), row["shape"], row["budget"]))

    def measure(self, requests: Sequence[BenchRequest], best: Mapping[str, Any], until: float) -> None:
        """The best prediction, and plain decoding in its format and in the fastest one, prompt by prompt."""
        fastest = predictions.plain(self.parts["curves"])[0]
        arms = dict.fromkeys((PLAIN, REPEATED, DRAFTED), best["format"])
        arms |= {FASTEST: fastest} if fastest != best["format"] else {}
        drafter = create(best["drafter"], self.vocabulary)
        rows = self.rest.setdefault("measured", [])
        for request in tqdm(in_turns(requests)[len(rows) :], disable=None):
            if len(rows) >= FEWEST and monotonic() > until:
                break
            order = list(arms)
            turn = len(rows) % len(order)
            logs = {}
            for name in order[turn:] + order[:turn]:
                guesser, budget = (drafter, best["budget"]) if name == DRAFTED else (Drafter(), 1)
                lm = self.engines[arms[name]]
                logs[name] = answered(lm, guesser, request.ids, request.limit, self.ends, budget)
            # Decoding begins at the first token, a drafted answer's at plain decoding's: longer reading counts.
            first = {name: logs[PLAIN if name == DRAFTED else name]["first"] for name in arms}
            times = {name: [max(log["seconds"] - first[name], 1e-9), log["emitted"]] for name, log in logs.items()}
            identity = self._identity(logs[DRAFTED]["tokens"], logs[PLAIN]["tokens"], request, best["format"])
            rows.append({"times": times, "passes": sum(logs[DRAFTED]["rows"].values()), "identity": identity})
        setting = {name: best[name] for name in ("format", "drafter", "budget")}
        self.parts["measured"] = {**setting, "fastest": fastest, **predictions.summary(rows)}

    def _identity(self, drafted: list[int], expected: list[int], request: BenchRequest, name: str) -> str:
        """Whether a drafted answer is the plain one: `identical`, `near-tie` or `different`."""
        if drafted == expected:
            return "identical"
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(drafted, expected, strict=False)))
        logits = self.engines[name].start().prefill([*request.ids, *expected[:same]])
        first, second = logits.topk(2).values.tolist()
        return "near-tie" if first - second < NEAR else "different"

"""Every drafter on Spec-Bench's requests to a public model: a row per forward pass, one record per drafter.

`make record PAPER=diaa ARGS="--public smollm2-135m-instruct"` records what is missing, the most important first; each
record is whole on its own, and a task that was begun is begun again. A drafter is new at the beginning of a task and
answers its requests in their order. Drafters that read no logits are replayed on the known plain answers (`replayed`).
Answers are compared with plain decoding by their hashes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Literal

import pandas as pd

from ondevice import evidence, prompts
from ondevice.evidence import records, sidecars
from ondevice.speculation import Drafter, generate
from ondevice.speculation.replayed_model import ReplayedModel
from ondevice_studies.diaa.workbench import Bench
from ondevice_studies.speculation import plain
from ondevice_studies.speculation.prompts import digest
from ondevice_studies.speculation.request_set import Request

PART = 20  # requests of a task for what is recorded on a part of them
KEYS = ["model", "method", "task"]
PARAMETERS = {"threads": 1, "dtype": "float32", "part": PART}
_PAPER = "ondevice_studies.diaa.paper_drafters"
_PEERS = "ondevice_studies.diaa.peer_drafters"
_MIXTURES = "ondevice_studies.diaa.mixtures"


@dataclass(frozen=True)
class Method:
    """A drafter that is recorded.

    make: a drafter that takes no arguments, or a function of a `Bench`, as `module:name`, so that only its own module
    counts as its code. budget: the most nodes of a draft. requests: all of Spec-Bench's, or the first `PART` of each
    task. replayed: whether it reads no logits, so that known answers can stand for the model.
    """

    make: str
    budget: int
    requests: Literal["all", "part"] = "all"
    replayed: bool = False

    @property
    def module(self) -> str:
        """Where it is made."""
        return self.make.partition(":")[0]

    def drafter(self, bench: Bench) -> Drafter:
        """A new one."""
        make: type[Drafter] | Callable[[Bench], Drafter] = resolve_name(self.make)
        return make() if isinstance(make, type) else make(bench)


# In the order of their importance, in which they are recorded.
METHODS: dict[str, Method] = {
    "DIAA": Method(f"{_PAPER}:diaa", 16),
    "TR": Method(f"{_PAPER}:token_recycling", 80),
    "PLD": Method(f"{_PAPER}:prompt_lookup", 10, replayed=True),
    "PLD, transformers' rules": Method(f"{_PAPER}:prompt_lookup_of_transformers", 10, replayed=True),
    "SAM-D": Method(f"{_PAPER}:sam_decoding", 39, replayed=True),
    "mixture 32": Method(f"{_MIXTURES}:mixture", 32),
    "Goose 32": Method(f"{_PEERS}:goose", 32),
    "RACER 32": Method(f"{_PEERS}:racer", 32),
    "DIAA 32": Method(f"{_PAPER}:diaa", 32),
    "mixture 8": Method(f"{_MIXTURES}:mixture", 8),
    "Goose 8": Method(f"{_PEERS}:goose", 8),
    "RACER 8": Method(f"{_PEERS}:racer", 8),
    "SuffixDecoding 32": Method(f"{_PEERS}:suffix_decoding", 32, replayed=True),
    "SuffixDecoding 8": Method(f"{_PEERS}:suffix_decoding", 8, replayed=True),
    "Cacheback 32": Method(f"{_PEERS}:cacheback", 32, replayed=True),
    "Cacheback 8": Method(f"{_PEERS}:cacheback", 8, replayed=True),
    "LogitSpec 32": Method(f"{_PEERS}:logit_spec", 32),
    "TR 32": Method(f"{_PAPER}:token_recycling", 32),
    "DIAA, prompt read": Method(f"{_PAPER}:diaa_prompt_read", 16),
    "LogitSpec 8": Method(f"{_PEERS}:logit_spec", 8),
    "TR 8": Method(f"{_PAPER}:token_recycling", 8),
    "layer skipping": Method(f"{_PAPER}:layer_skipping", 64, "part"),
    # Table 3 and Figures 3, 4: without warmed tables, without a grown tree, without both, updates one step late
    "cold": Method(f"{_PAPER}:diaa_cold", 16, "part"),
    "static 16": Method(f"{_PAPER}:diaa_static", 16, "part"),
    "static 16, cold": Method(f"{_PAPER}:diaa_static_cold", 16, "part"),
    "one step stale": Method(f"{_PAPER}:diaa_stale", 16, "part"),
    **{f"static {nodes}": Method(f"{_PAPER}:diaa_static", nodes, "part") for nodes in (8, 32, 64)},
    **{f"dynamic {nodes}": Method(f"{_PAPER}:diaa", nodes, "part") for nodes in (8, 64)},
    # Figure 8
    "refresh 4": Method(f"{_PAPER}:diaa_refreshed_4", 16, "part"),
    "refresh 8": Method(f"{_PAPER}:diaa_refreshed_8", 16, "part"),
    # Figure 9
    "tables: documents": Method(f"{_PAPER}:diaa_documents", 16, "part"),
    "tables: bigrams": Method(f"{_PAPER}:diaa_bigrams", 16, "part"),
    # the paper's ambiguities
    "rule: replace": Method(f"{_PAPER}:diaa_replacing", 16, "part"),
    "rule: union": Method(f"{_PAPER}:diaa_union", 16, "part"),
    "updates: accepted only": Method(f"{_PAPER}:diaa_accepted_only", 16, "part"),
    "budget: root counts": Method(f"{_PAPER}:diaa_counting_root", 16, "part"),
    "key: two tokens": Method(f"{_PAPER}:diaa_two_tokens", 16, "part"),
}


def name_of(model: str, method: str) -> str:
    """The record of a method on a model's requests."""
    slug = "".join(letter if letter.isalnum() else "-" for letter in method.lower())
    return f"{plain.LABELS[model]}-{'-'.join(part for part in slug.split('-') if part)}"


def recorded_requests(bench: Bench, answers: pd.DataFrame, most: int = 0) -> list[Request]:
    """The recorded requests of a model, a task together, in Spec-Bench's order. most: of a task; 0 is all.

    Raises ValueError where a prompt is not the recorded one.
    """
    texts = {prompt.id: prompt for prompt in prompts.spec_bench()}
    chosen = answers.assign(number=answers["request"].str.rpartition("-")[2].astype(int)).sort_values("number")
    chosen = chosen.groupby("task", sort=False).head(most or len(chosen))
    rendered = []
    for task, rows in chosen.groupby("task", sort=False):
        for name, limit, sha in rows[["request", "limit", "prompt_sha"]].to_numpy().tolist():
            request = plain.rendered(bench.loaded, texts[name], limit)
            if digest(request.ids) != sha:
                raise ValueError(f"{name} ({task}) is not the recorded prompt: the model or the question changed.")
            rendered.append(request)
    return rendered


def run(bench: Bench, method: Method, requests: Sequence[Request]) -> pd.DataFrame:
    """The passes of a new drafter on requests of one task: request, answer_sha, live, step and its counts."""
    drafter = method.drafter(bench)
    rows: list[dict[str, Any]] = []
    for request in requests:
        lm: Any = bench.lm
        if method.replayed:
            lm = ReplayedModel({request.ids: _plain_answer(bench, request)}, bench.lm.vocabulary, bench.lm.context)
        generation = generate(
            lm, drafter, request.ids, request.limit, budget=method.budget, eos_token_ids=request.ends
        )
        columns = {
            "request": request.name,
            "answer_sha": digest(generation.tokens),
            "live": not method.replayed,
        }
        rows += [
            {
                **columns,
                "step": number,
                "drafted": step.drafted,
                "accepted": step.accepted,
                "emitted": step.emitted,
                "depth": step.depth,
                "cached": step.cached,
                "drafting_passes": step.drafting,
            }
            for number, step in enumerate(generation.steps)
        ]
    return pd.DataFrame(rows)


def _plain_answer(bench: Bench, request: Request) -> list[int]:
    """The plain answer to a request, up to its limit, from the cache or decoded now."""
    sha = digest(request.ids)
    answer = plain.kept(bench.model, sha)
    if answer is None:
        answer = plain.answered(bench.lm, request)["answer"]
        plain.keep(bench.model, sha, answer)
    return answer[: request.limit]


def record(model: str, names: Sequence[str]) -> None:
    """Record the named methods that have no record of today's code yet, each in a file of its own."""
    bench = Bench(model)
    answers = plain.load(model)
    for name in names:
        method = METHODS[name]
        if _is_recorded(model, name, method):
            continue
        recorder = evidence.Recorder(
            "diaa", name_of(model, name), KEYS, PARAMETERS | {"nodes": method.budget}, [model], parts=[method.module]
        )
        requests = recorded_requests(bench, answers, PART if method.requests == "part" else 0)
        for task in dict.fromkeys(request.task for request in requests):
            if (model, name, task) in recorder.done:
                continue
            passes = run(bench, method, [request for request in requests if request.task == task])
            recorder.add(passes.assign(model=model, method=name, task=task))
            recorder.checkpoint()
            right = answers.set_index("request")["answer_sha"]
            each = passes.drop_duplicates("request")
            same = int((each["answer_sha"] == right.loc[each["request"]].to_numpy()).sum())
            rate = passes.groupby("request")["emitted"].mean().mean()
            print(f"{name} {task}: {rate:.2f} tokens per pass, {same} of {len(each)} identical", flush=True)
        print(recorder.finish(), flush=True)


def _is_recorded(model: str, name: str, method: Method) -> bool:
    """Whether there is a record by the code of today."""
    if not records.exists("diaa", name_of(model, name)):
        return False
    origin = records.sidecar("diaa", name_of(model, name))
    return origin["code"] == sidecars.code(origin["program"]) and origin["parameters"]["nodes"] == method.budget


def load(model: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(answers, passes) of all recorded methods of a model; plain decoding is the method `vanilla`.

    answers: task, request, method, tokens, passes, prompt_tokens, identical, live, margin, redundancy, prompt_sha.
    """
    first = plain.load(model)
    names = [name_of(model, name) for name in METHODS]
    tables = [evidence.load("diaa", name) for name in names if records.exists("diaa", name)]
    passes = pd.concat(tables, ignore_index=True)
    columns = ["request", "prompt_sha", "prompt_tokens", "limit", "margin", "redundancy", "answer_sha"]
    each = (
        passes.groupby([*KEYS, "request"], sort=False)
        .agg(passes=("step", "size"), decoded=("emitted", "sum"), live=("live", "first"), sha=("answer_sha", "first"))
        .reset_index()
        .merge(first[columns], on="request")
    )
    plainly = first.assign(method="vanilla", passes=first["limit"] - 1, decoded=first["limit"] - 1, live=True)
    plainly["sha"] = plainly["answer_sha"]
    answers = pd.concat([plainly, each], ignore_index=True)
    answers = answers.assign(identical=answers["sha"] == answers["answer_sha"], tokens=answers["limit"])
    return evidence.derived(answers, first, *tables), evidence.derived(passes, *tables)



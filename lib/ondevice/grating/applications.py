"""What the three applications of section 6.3 share: searching, ranking by each method, writing answers, tables.

`rag`, `agent_memory` and `long_context` run them. Ranking is measured with each method in turn for every question,
after one question that warms up and is not counted. What methods share is measured once: the search, and the answer to
a prompt, so that two methods that choose the same passages differ by their ranking alone.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch

from ondevice import commands, models, retrieval
from ondevice.grating import baselines
from ondevice.grating.calibration import interval
from ondevice.grating.guarantee import Guarantee
from ondevice.grating.printed import HF, OFFLOAD, OURS
from ondevice.grating.pruning import ClusterRule, ranking
from ondevice.grating.reranker import Reranker
from ondevice.meters import mark, sample, trim

KEYWORDS, EMBEDDING, RERANKER, ANSWER = "keyword search", "embedding search", "reranker", "answer"  # parts of a time
ANSWER_TOKENS = 64  # at most: the corpus's answers have up to 240 characters
_RRF = 60  # the constant of reciprocal rank fusion, as in `retrieval.hybrid`

Rank = Callable[[str, Sequence[str], int], list[tuple[int, float]]]  # the k best: (place, logit), best first
Methods = Mapping[str, Rank]  # by method, named as in `printed`
Write = Callable[[str], tuple[str, float]]  # prompt -> answer, seconds


@contextlib.contextmanager
def methods(
    spec: str, rule: float | ClusterRule | Guarantee | None, *, mode: Literal["set", "order"] = "set",
    memory_budget: float | None = None, names: Sequence[str] = (HF, OURS),
) -> Iterator[dict[str, Rank]]:  # fmt: skip
    """One reranker by HF (transformers in memory), HF Offload (accelerate's) and GRATING, those that are named.

    rule: of GRATING's pruning, a threshold, a rule or a guarantee; None prunes nothing. mode, memory_budget: of
    `Reranker`. In set mode the logits of what was decided early are of that layer.
    """
    odd = [name for name in names if name not in (HF, OFFLOAD, OURS)]
    if odd:
        raise ValueError(f"There is no method {odd[0]!r}; there are {HF}, {OFFLOAD} and {OURS}.")
    recall = rule if isinstance(rule, Guarantee) else None
    threshold = None if isinstance(rule, Guarantee) else rule
    with Reranker(spec, memory_budget, threshold, recall, mode=mode) as reranker:
        model = baselines.Model(reranker.checkpoint.folder, reranker.architecture, reranker.tokenizer)
        made: dict[str, Callable[[], Rank]] = {
            HF: lambda: _scored(baselines.in_memory(model)), OFFLOAD: lambda: _scored(baselines.offloaded(model)),
            OURS: lambda: _pruned(reranker),
        }  # fmt: skip
        yield {name: made[name]() for name in names}


def _scored(scorer: baselines.Scorer) -> Rank:
    def rank(query: str, documents: Sequence[str], k: int) -> list[tuple[int, float]]:
        scores = scorer.scores(query, documents)
        return [(int(place), float(scores[place])) for place in ranking(scores)[:k]]

    return rank


def _pruned(reranker: Reranker) -> Rank:
    def rank(query: str, documents: Sequence[str], k: int) -> list[tuple[int, float]]:
        found = reranker.rank(query, documents, min(k, len(documents)), activation_fn=torch.clone)
        return [(entry["corpus_id"], entry["score"]) for entry in found]

    return rank


class Writer:
    """A language model that completes a prompt greedily; a prompt that comes again costs what it did.

    spec: a trained causal LM, as `models.load` has it.
    """

    def __init__(self, spec: str) -> None:
        loaded = models.load(spec)
        models.require_trained(loaded.model, "answers")
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self.context = int(loaded.model.config.max_position_embeddings)
        self._known: dict[str, tuple[str, float]] = {}

    def __call__(self, prompt: str) -> tuple[str, float]:
        """(answer, seconds). Raises ValueError where prompt and answer exceed the context."""
        if prompt not in self._known:
            self._known[prompt] = self._write(prompt, ANSWER_TOKENS, self.tokenizer.eos_token_id)
        return self._known[prompt]

    def seconds(self, prompt: str, output: str) -> float:
        """Seconds to read the prompt and write as many tokens as `output` has, whatever they are."""
        return self._write(prompt, self.length(output), None)[1]

    def length(self, text: str) -> int:
        """Tokens of a text."""
        return len(self._ids(text))

    def _write(self, prompt: str, longest: int, end: int | None) -> tuple[str, float]:
        from ondevice.causal_lm.generation import greedy

        began = time.perf_counter()
        output = greedy(self.model, [self._ids(prompt)], end, longest)[0]
        seconds = time.perf_counter() - began
        return str(self.tokenizer.decode(list(output.ids))), seconds

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, verbose=False)["input_ids"]


@dataclass(frozen=True)
class Found:
    """Candidates of a query: places by fused rank, those of the embedding list, and seconds of each search."""

    places: list[int]
    embedding: list[int]
    cosine: float  # of the first of the embedding list
    seconds: dict[str, float]


class Search:
    """BM25 and MiniLM embeddings over texts; indexes are made beforehand and kept in the cache."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = list(texts)
        self.sparse, self.dense = retrieval.sparse_index(self.texts), retrieval.dense_index(self.texts)

    def __call__(self, query: str, each: int = 10) -> Found:
        """The first `each` of either list, merged by reciprocal ranks: without a reranker, this is the order.

        `retrieval.Hybrid` reads deeper lists than the paper's ten.
        """
        each = min(each, len(self.texts))
        start = time.perf_counter()
        keyword = self.sparse.search([query], each)[1][0].tolist()
        middle = time.perf_counter()
        cosines, near = self.dense.search([query], each)
        end = time.perf_counter()
        embedding = near[0].tolist()
        total: dict[int, float] = {}
        for places in (keyword, embedding):
            for place, text in enumerate(places):
                total[text] = total.get(text, 0.0) + 1 / (_RRF + 1 + place)
        fused = sorted(total, key=lambda text: (-total[text], text))
        seconds = {KEYWORDS: middle - start, EMBEDDING: end - middle}
        return Found(fused, embedding, float(cosines[0, 0]), seconds)


@dataclass(frozen=True)
class Tables:
    """What an application gave; all have the columns application, setting (reranker or workload) and method.

    times: part, seconds (mean over questions). quality: precision, low, high (95 %, bootstrap over questions).
    cases: a row a question, with what the application says of it.
    """

    times: pd.DataFrame
    quality: pd.DataFrame
    cases: pd.DataFrame


KEYS = ["application", "setting", "method"]


def tables(application: str, cases: Sequence[Mapping[str, Any]]) -> Tables:
    """cases: setting, method, question, precision, seconds (by part), and more. Raises ValueError without a case."""
    if not cases:
        raise ValueError(f"There is no question for {application}.")
    rows = pd.DataFrame([{"application": application, **case} for case in cases])
    seconds = [
        {key: row[key] for key in KEYS} | {"part": part, "seconds": value}
        for row in rows.to_dict("records") for part, value in row["seconds"].items()
    ]  # fmt: skip
    counts = rows.groupby(KEYS, sort=False).size().rename("count").reset_index()
    total = pd.DataFrame(seconds).groupby([*KEYS, "part"], sort=False)["seconds"].sum().reset_index()
    times = total.merge(counts, on=KEYS)
    times["seconds"] /= times.pop("count")
    return Tables(times, means(rows, "precision"), rows)


def means(cases: pd.DataFrame, column: str) -> pd.DataFrame:
    """Means over questions with 95 % intervals: application, setting, method, `column`, low, high."""
    rows = []
    for names, group in cases.groupby(KEYS, sort=False):
        found = interval(group[column].to_numpy(float))
        rows.append({**dict(zip(KEYS, names, strict=True)), column: found.mean, "low": found.low, "high": found.high})
    return pd.DataFrame(rows)


def timed(rank: Rank, query: str, texts: Sequence[str], k: int) -> tuple[list[tuple[int, float]], float]:
    """What a method ranks first, and its seconds."""
    began = time.perf_counter()
    found = rank(query, texts, k)
    return found, time.perf_counter() - began


def turns(of: Methods, number: int) -> Iterator[tuple[str, Rank]]:
    """The methods, from another one on for every question: none is always behind the same other one."""
    names = list(of)
    for step in range(len(names)):
        name = names[(number + step) % len(names)]
        yield name, of[name]


def check(count: int, k: int) -> None:
    """Raise ValueError on a number of questions or a K below 1."""
    for name, value in (("number of questions", count), ("K", k)):
        if value < 1:
            raise ValueError(f"The {name} is at least 1, not {value}.")


def right(texts: Sequence[str], answer: str) -> np.ndarray:
    """[n] whether each text holds an answer, white space aside."""
    from ondevice.corpus.prompts import normal

    wanted = normal(answer)
    return np.array([wanted in normal(text) for text in texts], bool)


# Memory, in a process of its own


@dataclass(frozen=True)
class Request:
    """What a process loads and does once, for its memory.

    query: what is asked. texts: are searched by `searches`; their indexes must be in the cache (`Search` makes them).
    documents: are ranked where nothing is searched. spec, method, rule: of the reranker; an empty spec ranks nothing.
    k: how many are kept. writer, prompt: of the language model; an empty one writes nothing.
    Raises ValueError on an unknown search, and where there is nothing to rank.
    """

    query: str
    texts: tuple[str, ...] = ()
    searches: tuple[str, ...] = (KEYWORDS, EMBEDDING)
    documents: tuple[str, ...] = ()
    spec: str = ""
    method: str = HF
    rule: ClusterRule | None = None
    k: int = 1
    writer: str = ""
    prompt: str = ""

    def __post_init__(self) -> None:
        odd = [name for name in self.searches if name not in (KEYWORDS, EMBEDDING)]
        if odd:
            raise ValueError(f"There is no search {odd[0]!r}; there are {KEYWORDS} and {EMBEDDING}.")
        if self.spec and not (self.texts and self.searches) and not self.documents:
            raise ValueError(f"The request gives {self.spec} nothing to rank.")


def footprint(request: Request, threads: int = 1) -> pd.DataFrame:
    """Memory of a request over time: rows [seconds, mb], resident MB over what the imports take.

    Raises ValueError where memory cannot be measured; RuntimeError, with its last words, where the process fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "request.json"
        written.write_text(json.dumps(asdict(request)), encoding="utf-8")
        environment = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        found = sample([sys.executable, "-m", "ondevice.grating.applications", str(written)], environment=environment)
    marks = found.at.tolist()
    within = slice(marks[0], marks[-1] + 1)
    return pd.DataFrame({"seconds": found.seconds[within], "mb": found.growth("resident")[within] / 1e6})


def footprints(application: str, requests: Mapping[tuple[str, str], Request], threads: int = 1) -> pd.DataFrame:
    """`footprint` of each request, one after the other. requests: by (setting, method).

    Rows [application, setting, method, seconds, mb].
    """
    found = []
    for (setting, method), request in requests.items():
        rows = footprint(request, threads)
        found.append(rows.assign(application=application, setting=setting, method=method)[[*KEYS, "seconds", "mb"]])
    return pd.concat(found, ignore_index=True)


def stage_peaks(request: Request, threads: int = 1) -> dict[str, float]:
    """Peak MB of keyword search, embedding search and the reranker, each alone. request: with texts and documents."""
    alone = {
        KEYWORDS: replace(request, searches=(KEYWORDS,), spec="", writer=""),
        EMBEDDING: replace(request, searches=(EMBEDDING,), spec="", writer=""),
        RERANKER: replace(request, texts=(), writer=""),
    }
    return {stage: float(footprint(one, threads)["mb"].max()) for stage, one in alone.items()}


def _serve(request: Request) -> None:
    """Load what a request needs, in the order of its use, keep it all, and answer; what is imported comes before."""
    _import(request)
    trim()
    mark("baseline")
    documents, kept = list(request.documents), list[object]()
    if request.texts:
        makers: dict[str, Callable[[Sequence[str]], Any]] = {
            KEYWORDS: retrieval.sparse_index, EMBEDDING: retrieval.dense_index,
        }  # fmt: skip
        places: list[int] = []
        for name in request.searches:
            index = makers[name](request.texts)
            kept.append(index)
            places += index.search([request.query], min(10, len(request.texts)))[1][0].tolist()
        documents = [request.texts[place] for place in dict.fromkeys(places)]
    with contextlib.ExitStack() as stack:
        if request.spec:
            of = stack.enter_context(methods(request.spec, request.rule, names=[request.method]))
            of[request.method](request.query, documents, min(request.k, len(documents)))
        if request.writer:
            writer = Writer(request.writer)
            writer(request.prompt)
        mark("end")


def _import(request: Request) -> None:
    """The code of all models, none of which is loaded yet, and the threads of a first product."""
    import transformers

    from ondevice.causal_lm import generation  # noqa: F401

    for name in ("BertModel", "LlamaForCausalLM"):
        getattr(transformers, name)
    if request.spec:
        with methods(request.spec, request.rule, names=[]):
            pass
    torch.ones(64, 64) @ torch.ones(64, 64)


if __name__ == "__main__":
    wanted = json.loads(Path(commands.child()[0]).read_text(encoding="utf-8"))
    wanted["rule"] = None if wanted["rule"] is None else ClusterRule(**wanted["rule"])
    _serve(Request(**wanted | {name: tuple(wanted[name]) for name in ("texts", "searches", "documents")}))

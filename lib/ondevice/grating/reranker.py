"""A reranker for programs: documents in, the best of them out, within a memory budget.

    with Reranker("minilm-reranker", memory_budget=100) as reranker:
        best = reranker.rank("How is a file opened?", documents, top_k=5)

Results and the names of arguments are those of sentence-transformers' CrossEncoder.rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ondevice import shapes
from ondevice.grating.architectures import INSTRUCTION, Architecture, Row, answer_ids, encode
from ondevice.grating.budget import SIZES, Plan, anonymous, give_back, padded_tokens, plan
from ondevice.grating.checkpoint import Checkpoint, Throttle
from ondevice.grating.engine import Engine, Scores
from ondevice.grating.guarantee import Guarantee, MarginRule
from ondevice.grating.hidden_states import HiddenStates, Offloaded, Resident
from ondevice.grating.probes import Probes
from ondevice.grating.pruning import ClusterRule, Rule, Selection
from ondevice.grating.quantised import Dequantised, is_quantised
from ondevice.grating.streamable import prepare
from ondevice.grating.weights import Streamed, Weights

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

Mode = Literal["set", "order"]
Activation = Callable[[Tensor], Tensor]
_BLOCK = 32_000  # characters of the documents that are turned into tokens together


@dataclass(frozen=True)
class Report:
    """What a run did.

    candidates: N; layers: L of the model; layers_run: R, fewer after an early end. saved: share of the N L
    layer-candidates that was not computed. exact: nobody was pruned, so the order is the model's.
    seconds, stalls: [R] of each layer, and of that waited for the disk. embedding_seconds: before the first layer.
    read: bytes of weights from the disk. hits, misses: embedding rows kept and read. offload_waited: seconds that
    hidden states were waited for. truncated: documents that lost their end. plan: with the estimate of memory.
    """

    candidates: int
    layers: int
    layers_run: int
    saved: float
    exact: bool
    seconds: NDArray[np.float64]
    stalls: NDArray[np.float64]
    embedding_seconds: float
    read: int
    hits: int
    misses: int
    offload_waited: float
    truncated: int
    plan: Plan


class Reranker:
    """A cross-encoder whose weights are streamed from its files.

    spec: a model as `models.load` has it. memory_budget: MB (10^6 bytes) of anonymous memory over what the process has
    once the model's code is imported; None is the paper's setting (two layers, a tenth of the embedding rows), whatever
    it takes. The weights of a bundled or random model are first saved whole, once; see `streamable`.
    threshold: of the paper's dispersion rule, or a `ClusterRule` with another statistic. recall: a rule with a promise
    that `guarantee` certified for this model and top_k. With neither, nothing is pruned and the order is the model's.
    probes: what scores are made by after every layer but the last; a threshold or promise is then one made for these.
    mode: "set" accepts and drops early (the paper), so that the order within the result is none; "order" only drops,
    and ranks those left by final scores.
    max_length: tokens of a row. truncate: whether longer documents lose their end, and are counted, or are refused.
    instruction: for rerankers that answer yes or no. A causal LM is taken for one of these if its name has "rerank" in
    it or this is given. int8: quantised weights. dtype: of the computation; None is that of the files.
    throttle: bytes a second of a simulated slower disk. folder: for offloaded hidden states, by default in the cache.
    Raises ValueError, FileNotFoundError or ConnectionError, with one sentence. One thread may use it at a time.
    """

    def __init__(
        self, spec: str | Path, memory_budget: float | None = None, threshold: float | ClusterRule | None = None,
        recall: Guarantee | None = None, *, probes: Probes | None = None, mode: Mode = "set",
        max_length: int | None = None, truncate: bool = True, instruction: str | None = None, int8: bool = False,
        dtype: torch.dtype | None = None, throttle: float | None = None, folder: Path | None = None,
    ) -> None:  # fmt: skip
        if memory_budget is not None and (isinstance(memory_budget, bool) or not isinstance(memory_budget, Real)):
            raise ValueError(f"A memory budget is a number of MB, not {memory_budget!r}.")
        if mode not in ("set", "order"):
            raise ValueError(f"The mode is set or order, not {mode!r}.")
        self.spec, self.budget, self.mode = str(spec), memory_budget, mode
        self.rule = _rule(threshold, recall)
        if throttle is not None:
            Throttle(throttle)  # refuses what is no rate
        self.max_length, self.truncate, self.throttle = max_length, truncate, throttle
        self.instruction, self._states_folder = instruction or INSTRUCTION, folder
        self.report: Report | None = None
        self._closed = False
        self._open: _Open | None = None
        streamed = prepare(self.spec, dtype, int8)
        self.checkpoint = Checkpoint.open(streamed)
        config = _config(self.spec, streamed)
        give_back()
        before = anonymous()
        self.tokenizer = _tokenizer(self.spec, streamed)
        answers = _answers(self.spec, config, self.tokenizer, instruction)
        self.architecture = Architecture(config, answers)
        give_back()  # a quarter of what reading a tokenizer takes is not needed afterwards
        self._fixed = max(0, anonymous() - before)
        _require_layers(self.rule, self.architecture.layers)
        if probes is not None:
            probes.require(self.architecture.layers, self.architecture.width)
        self.probes = probes
        if max_length is not None and not 1 <= max_length <= self.architecture.longest:
            raise ValueError(f"max_length is from 1 to {self.architecture.longest} tokens, not {max_length}.")
        self._activation = _default_activation(config)
        self._planned([1])  # a budget that is too small for anything is refused at once

    def rank(
        self, query: str, documents: Sequence[str], top_k: int | None = None, return_documents: bool = False,
        activation_fn: Activation | None = None,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """The best documents, best first: {"corpus_id": place in `documents`, "score": float, "text": if asked for}.

        top_k: how many; None is all, of which none can be pruned. activation_fn: makes scores of logits; by default a
        sigmoid, unless the model's config names the identity. In set mode with pruning, the scores of documents that
        were accepted after different layers are on different scales, and those accepted earlier come first.
        Raises ValueError on empty texts, a top_k of 0 or above the number of documents, a budget that is too small for
        them, and damaged weights; OSError where a disk fails or is full. It can be called again after any of these.
        """
        if self._closed:
            raise ValueError("This reranker is closed.")
        self.report = None
        texts = _checked(query, documents, top_k)
        k = len(texts) if top_k is None else top_k
        rows, truncated = self._rows(query, texts)
        chosen = self._planned([len(row.ids) for row in rows])
        rule = self.rule if k < len(texts) else None
        selection = Selection(len(texts), self.architecture.layers, k, rule, self.mode == "order" or rule is None)
        scores, traffic = self._run(rows, chosen, selection)
        outcome = selection.outcome()
        self.report = _report(self.architecture.layers, scores, truncated, chosen, traffic)
        made = (activation_fn or self._activation)(torch.from_numpy(outcome.score[outcome.chosen])).tolist()
        found: list[dict[str, Any]] = []
        for place, score in zip(outcome.chosen.tolist(), made, strict=True):
            text = {"text": texts[place]} if return_documents else {}
            found.append({"corpus_id": place, "score": score, **text})
        return found

    def close(self) -> None:
        """Give back memory, threads and files. A second call does nothing."""
        self._closed = True
        if self._open is not None:
            self._open.streamed.close()
            self._open = None

    def __enter__(self) -> Reranker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, rows: list[Row], chosen: Plan, selection: Selection) -> tuple[Scores, _Traffic]:
        opened = self._opened(chosen)
        weights, embeddings = opened.streamed, opened.streamed.embeddings
        hits, misses = embeddings.hits, embeddings.misses
        made: list[HiddenStates] = []

        def hidden() -> HiddenStates:
            made.append(Offloaded(self._states_folder) if chosen.offload else Resident())
            return made[-1]

        def step(scores: NDArray[np.float64]) -> NDArray[np.int64]:
            if self.budget is not None:
                give_back()  # what a layer's temporaries leave between hidden states; about a millisecond
            return selection.step(scores)

        engine = Engine(self.architecture, opened.served, chunk=chosen.chunk, hidden=hidden, probes=self.probes)
        scores = engine.score(rows, step)
        hits, misses = embeddings.hits - hits, embeddings.misses - misses
        groups = self.checkpoint.groups
        layers = np.flatnonzero(weights.window.read_seconds[: len(scores.active)])
        read = sum(tensor.length for layer in layers for tensor in groups.layers[layer].values())
        read += misses * groups.table.length // groups.table.shape[0]
        stalls = weights.window.stalled_seconds[: len(scores.active)].copy()
        return scores, _Traffic(stalls, read, hits, misses, getattr(made[0], "waited", 0.0))

    def _opened(self, chosen: Plan) -> _Open:
        """The open weights, opened anew where they hold more than the plan has room for."""
        held = self._open
        if held and (held.plan.buffers > chosen.buffers or held.plan.embedding_rows > chosen.embedding_rows):
            held.streamed.close()
            held = self._open = None
        if held is None:
            streamed = Streamed(
                self.checkpoint.folder, buffers=chosen.buffers, embedding_rows=chosen.embedding_rows,
                throttle=self.throttle,
            )  # fmt: skip
            served = Dequantised(streamed) if is_quantised(self.checkpoint) else streamed
            held = self._open = _Open(chosen, streamed, served)
        return held

    def _planned(self, lengths: Sequence[int]) -> Plan:
        """For rows of these lengths. How much padding there is depends on the chunk that the plan has: the most."""
        longest = max(lengths)
        sizes = {max(size, longest) for size in (1, *SIZES)}
        tokens = max(padded_tokens(lengths, size) for size in sizes)
        return plan(
            self.checkpoint, self.architecture.config, len(lengths), longest, self.budget,
            tokens=tokens, fixed=self._fixed, name=self.spec,
        )  # fmt: skip

    def _rows(self, query: str, texts: Sequence[str]) -> tuple[list[Row], int]:
        """Token ids, some documents at a time, as what a tokenizer makes of them is much larger than they are."""
        rows, truncated = [], 0
        known: dict[int, int] = {}  # one object for each id, not for each token
        for block in _blocks(texts):
            found = encode(
                self.architecture, self.tokenizer, query, block, self.max_length, self.instruction
            )  # fmt: skip
            rows += [Row(tuple(known.setdefault(token, token) for token in row.ids), row.border) for row in found.rows]
            truncated += found.truncated
        if truncated and not self.truncate:
            raise ValueError(f"{truncated} of {len(texts)} documents are longer than the model reads.")
        return rows, truncated


@dataclass(frozen=True)
class _Open:
    """Weights that are open, the plan that they were opened for, and how the engine sees them."""

    plan: Plan
    streamed: Streamed
    served: Weights


@dataclass(frozen=True)
class _Traffic:
    """See `Report`."""

    stalls: NDArray[np.float64]
    read: int
    hits: int
    misses: int
    offload_waited: float


def _report(layers: int, scores: Scores, truncated: int, plan: Plan, traffic: _Traffic) -> Report:
    count = len(scores.ran)
    return Report(
        candidates=count, layers=layers, layers_run=len(scores.active), saved=1 - scores.work / (layers * count),
        exact=bool((scores.ran == layers).all()), seconds=scores.seconds,
        embedding_seconds=scores.embedding, truncated=truncated, plan=plan, **asdict(traffic),
    )  # fmt: skip


def _checked(query: str, documents: Sequence[str], top_k: int | None) -> list[str]:
    """The documents as a list. Raises ValueError on what cannot be ranked."""
    if not isinstance(query, str) or not query.strip():
        raise ValueError(f"The query is a text that is not empty, not {query!r}.")
    if isinstance(documents, str) or not hasattr(documents, "__len__") or not len(documents):
        raise ValueError("There must be a list of at least one document to rank.")
    texts = list(documents)
    for index, text in enumerate(texts):
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"Document {index} is a text that is not empty, not {text!r}.")
    if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, Integral)):
        raise ValueError(f"top_k is a whole number or None, not {top_k!r}.")
    if top_k is not None and not 1 <= top_k <= len(texts):
        raise ValueError(f"top_k is from 1 to the {len(texts)} documents, not {top_k}.")
    return texts


def _blocks(texts: Sequence[str]) -> Iterator[list[str]]:
    """The texts in their order, so many characters at a time."""
    block: list[str] = []
    size = 0
    for text in texts:
        if block and size + len(text) > _BLOCK:
            yield block
            block, size = [], 0
        block.append(text)
        size += len(text)
    yield block


def _rule(threshold: float | ClusterRule | None, recall: Guarantee | None) -> Rule | None:
    if threshold is not None and recall is not None:
        raise ValueError("Pruning is by a threshold or by a guarantee of recall, not by both.")
    if recall is not None:
        return recall.rule
    return ClusterRule(threshold) if isinstance(threshold, (int, float)) else threshold


def _require_layers(rule: Rule | None, layers: int) -> None:
    if isinstance(rule, MarginRule) and len(rule.margins) != layers - 1:
        raise ValueError(f"The guarantee is for a model of {len(rule.margins) + 1} layers, not of {layers}.")


def _config(spec: str, folder: Path) -> PreTrainedConfig:
    """The configuration, with the code of its model imported: what a budget is over."""
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    except (ValueError, OSError) as error:
        line = str(error).strip().split("\n")[0][:200]
        raise ValueError(f"transformers cannot build {spec} without code of its own ({line}).") from None
    for name in config.architectures or []:
        getattr(transformers, name, None)
    return config


def _tokenizer(spec: str, folder: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except (ValueError, OSError) as error:
        line = str(error).strip().split("\n")[0][:200]
        raise ValueError(f"{spec} has no tokenizer that can be loaded ({line}).") from None


def _answers(
    spec: str, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, instruction: str | None
) -> tuple[int, int] | None:
    """Ids of "yes" and "no" for a causal LM; of their first letters where weights are random and tokens are bytes."""
    if not (config.architectures or [""])[0].endswith("ForCausalLM"):
        return None
    if getattr(config, shapes.MARK, False):
        first, second = (tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in ("yes", "no"))
        return first, second
    if instruction is None and "rerank" not in Path(spec).name.lower():
        raise ValueError(
            f"{spec} is a causal language model that neither its name nor an instruction says to answer yes or no: "
            f"it is no reranker."
        )
    return answer_ids(tokenizer)


def _default_activation(config: PreTrainedConfig) -> Activation:
    """Sigmoid, or what the config names as sentence-transformers does. Raises ValueError on any other name."""
    named = getattr(config, "sbert_ce_default_activation_function", None)
    named = (getattr(config, "sentence_transformers", None) or {}).get("activation_fn", named)
    kind = "Sigmoid" if named is None else str(named).rpartition(".")[2]
    if kind not in ("Sigmoid", "Identity"):
        raise ValueError(f"The model's scores are made by {named}, which is not Sigmoid or Identity.")
    return torch.sigmoid if kind == "Sigmoid" else torch.clone

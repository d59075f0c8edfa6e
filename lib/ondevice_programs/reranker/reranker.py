"""The reranker: sentence-transformers' CrossEncoder in a memory budget, with pruning that was calibrated for it."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from ondevice.meters import trim
from ondevice_papers.grating import margins
from ondevice_papers.grating import probes as fitting
from ondevice_papers.grating.architectures import Architecture
from ondevice_papers.grating.checkpoint import Checkpoint, drop_pages
from ondevice_papers.grating.checksums import Checksums
from ondevice_papers.grating.clustering import Floats
from ondevice_papers.grating.engine import Engine, Pass, run_layer
from ondevice_papers.grating.hidden_states import HiddenStates, Offloaded, Resident
from ondevice_papers.grating.pools import Pool, measure
from ondevice_papers.grating.probes import Probes
from ondevice_papers.grating.pruning import Rule, cluster_rule
from ondevice_papers.grating.weights import Streamed
from ondevice_programs.reranker import arguments, calibration, loading
from ondevice_programs.reranker.arguments import is_number
from ondevice_programs.reranker.calibration import Calibration
from ondevice_programs.reranker.folder import folders
from ondevice_programs.reranker.loading import Activation
from ondevice_programs.reranker.memory_plan import MB, Model, Plan, anonymous, few_arenas, highest, plan
from ondevice_programs.reranker.reading import RECIPES, Form, Side, encode, require_text
from ondevice_programs.reranker.receipts import Receipt, counters, receipt_of, summed

Mode = Literal["set", "order"]
_LOG = logging.getLogger(__name__)
_PROBE = "Naïve  café:\tf(x) = 3.14; 東京 don't\n"  # whose tokens tell tokenizers of one vocabulary apart


class Reranker:
    """A cross-encoder whose weights are streamed from its files. Keywords are CrossEncoder's, and these:

    memory_budget: MB of 10^6 bytes, or "150MB": what the process grows by from here on, at most; None is a window of
    half a layer twice and a tenth of the embedding rows, whatever they take.
    calibration: the file of `calibrate`; None is the one beside the model, if there is one; False prunes nothing.
    threshold: of the paper's dispersion rule, instead. probes: what scores are made by after every layer but the last.
    mode: "set" accepts and drops early (the paper), so that scores of documents that were decided after different
    layers are on different scales, those decided earlier first; "order" only drops, and ranks by final scores.
    truncate: whether longer documents lose their end, and are counted, or are refused.
    recipe: of `reading.RECIPES`: the prompt of a causal LM whose folder does not say how it scores a pair. dtype: of
    the computation; None is that of the files.
    receipt: of the last call. Calls from several threads take turns.
    Raises ValueError, FileNotFoundError or ConnectionError, with one sentence.
    """

    def __init__(
        self, model_name_or_path: str | Path, *, memory_budget: float | str | None = None,
        calibration: str | Path | bool | None = None, threshold: float | None = None, probes: Probes | None = None,
        mode: Mode = "set", max_length: int | None = None, truncate: bool = True, recipe: str | None = None,
        activation_fn: Activation | None = None, dtype: torch.dtype | None = None, num_labels: int | None = None,
        device: Any = None, backend: str = "torch", revision: str | None = None, token: bool | str | None = None,
        local_files_only: bool = False, cache_folder: str | None = None, trust_remote_code: bool = False,
        prompts: Mapping[str, str] | None = None, default_prompt_name: str | None = None,
        model_kwargs: Mapping[str, Any] | None = None, **others: Any,
    ) -> None:  # fmt: skip
        given = {name: value for name, value in locals().items() if name not in ("self", "others", "__class__")}
        self._given = given | others  # what a copy in another process is made of
        baseline = anonymous()
        self.budget = arguments.megabytes(memory_budget)
        dtype = arguments.dtype_of(dtype, model_kwargs)
        arguments.require_known({name: value for name, value in others.items() if value}, device)
        if backend != "torch":
            raise ValueError(f"The backend is torch, not {backend!r}.")
        if trust_remote_code:
            raise ValueError("Code that comes with a model is not run: trust_remote_code is False here.")
        if num_labels not in (None, 1):
            raise ValueError(f"A reranker gives one score a pair, not {num_labels}.")
        if recipe not in (None, *RECIPES):
            raise ValueError(f"There is no recipe {recipe!r}; there are {', '.join(RECIPES)}.")
        if mode not in ("set", "order"):
            raise ValueError(f"The mode is set or order, not {mode!r}.")
        if threshold is not None and not (is_number(Real, threshold) and threshold >= 0):
            raise ValueError(f"A dispersion threshold is a number from 0 on, not {threshold!r}.")
        self.spec, self.mode, self.threshold, self.probes = str(model_name_or_path), mode, threshold, probes
        self.truncate = truncate
        if self.budget is not None:
            few_arenas()
        with highest() as most:  # reading a tokenizer takes three times what is left of it
            opened = folders(self.spec, dtype, revision, token, local_files_only, cache_folder)
            checkpoint = Checkpoint.open(opened.weights)
            config = loading.configuration(self.spec, opened.weights)
            self.tokenizer = loading.tokenizer(self.spec, opened.tokenizer)
            self.scoring = loading.scoring(self.spec, opened.settings, config, self.tokenizer, recipe)
        self.prompts = {**self.scoring.prompts, **(prompts or {})}
        self.default_prompt_name = default_prompt_name or self.scoring.default
        self._prompt(None, self.default_prompt_name)
        self.architecture = Architecture(config, self.scoring.answers)
        self.architecture.require(checkpoint.groups.layers, checkpoint.groups.table.dtype)
        loading.require_fitting(self.spec, config, self.tokenizer, self.architecture, checkpoint)
        if probes is not None:
            self._require_fitting(probes)
        self.max_length = None if max_length is None else self._length(max_length)
        self.model_card_data = _Card()
        self.activation_fn = activation_fn or loading.activation(self.scoring)
        for folder in {opened.weights, opened.settings}:
            _forget_pages(folder)
        trim()  # a quarter of what reading a tokenizer takes is not needed afterwards
        self._baseline = baseline
        taken = (max(0, size - baseline) for size in (anonymous(), *most))
        self._model = Model(self.spec, checkpoint, self.architecture, *taken)
        plan(self._model, [1], self.budget)  # a budget that is too small for anything is refused at once
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._closed = False
        self._open: tuple[Plan, Streamed] | None = None
        self.receipt: Receipt | None = None
        self._calibrations: dict[tuple[int, str], Calibration] = {}
        self._certified: dict[str, str] = {}  # what they were calibrated with
        self._load(calibration)

    # What CrossEncoder has

    @property
    def num_labels(self) -> int:
        """Scores of a pair."""
        return 1

    @property
    def max_seq_length(self) -> int:
        """Most tokens of a row, which can be set."""
        return self._form(None).most

    @max_seq_length.setter
    def max_seq_length(self, tokens: int) -> None:
        self.max_length = self._length(tokens)

    @property
    def device(self) -> torch.device:
        """Where rows are computed."""
        return torch.device("cpu")

    @property
    def fingerprint(self) -> str:
        """A digest of all that scores of pairs are made with: weights, tokenizer, form of pairs, prompt, length."""
        return calibration.digest(sorted(self._made_with(self._form(self._prompt(None, None)), self.probes).items()))

    @property
    def instructed(self) -> bool:
        """Whether a prompt is an instruction that the model reads apart from the query."""
        return self._form(None).instructed

    def is_singular_input(self, inputs: Any) -> bool:
        """Whether `predict` takes it for one pair of texts, not for a sequence of pairs."""
        return len(inputs) > 0 and isinstance(inputs[0], str)

    def predict(
        self,
        inputs: Iterable[Sequence[str]] | Sequence[str] | np.ndarray = (),
        prompt_name: str | None = None,
        prompt: str | None = None,
        *,
        activation_fn: Activation | None = None,
        apply_softmax: bool | None = False,
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        device: str | None = None,
        sentences: Any = None,
        **ignored: Any,
    ) -> Any:
        """Scores of (query, document) pairs, none of which is pruned: an array [n], a tensor, or a list of tensors.

        One pair gives one score; none give an empty array, tensor or list. Any number of pairs goes through the model
        in segments, so that their hidden states take no more memory than one segment's. The receipt sums them up.
        """
        former = ignored.pop("activation_fct", None)
        arguments.require_known(ignored, device)
        given: Any = inputs if sentences is None else sentences
        given = given.tolist() if isinstance(given, np.ndarray) else given
        if not isinstance(given, Iterable):
            raise ValueError(f"Pairs of a query and a document are scored, not a value of type {type(given).__name__}.")
        given = given if isinstance(given, str) else list(given)
        single = self.is_singular_input(given)
        pairs = [arguments.pair_of(number, pair) for number, pair in enumerate([given] if single else given)]
        queries, documents = ([pair[side] for pair in pairs] for side in (0, 1))
        with self._turn:
            form = self._form(self._prompt(prompt, prompt_name))
            receipts, logits = list[Receipt](), list[np.ndarray]()
            for part in arguments.segments(documents):
                logits.append(self._run(queries[part], documents[part], None, form, self.probes).outcome.score)
                receipts += [self.receipt] if self.receipt else []
            self.receipt = summed(receipts)
        together = torch.tensor(np.concatenate([np.empty(0), *logits]), dtype=torch.float32)
        activated = (activation_fn or former or self.activation_fn)(together)
        scores = activated[0] if single else activated
        if convert_to_tensor or (single and not convert_to_numpy):
            return scores
        return scores.numpy()[()] if convert_to_numpy else list(scores)

    def rank(
        self, query: str, documents: Sequence[str], top_k: int | None = None, return_documents: bool = False,
        prompt_name: str | None = None, prompt: str | None = None, *, activation_fn: Activation | None = None,
        max_length: int | None = None, max_document_tokens: int | None = None, truncation_side: Side | None = None,
        device: str | None = None, **ignored: Any,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """The best documents, best first: {"corpus_id": place in `documents`, "score": float, "text": if asked for}.

        top_k: how many; None, or more than there are, is all, of which none is pruned. With a top_k that was calibrated
        for, or a threshold, candidates whose place is clear leave early.
        max_length: most tokens of a pair, max_document_tokens of each document on its own, truncation_side: which end
        of what is too long is lost, "right" or "left". They are of this call; None is as the model's files have it.
        Raises ValueError on what is no text, a negative top_k, a side that a recipe has not, a budget that is too small
        for these documents, and damaged weights; OSError where a disk fails or is full. It can be called again after
        any of these.
        """
        former = ignored.pop("activation_fct", None)
        arguments.require_known(ignored, device)
        for name in ("convert_to_numpy", "convert_to_tensor", "apply_softmax", "num_workers"):
            if name in ignored:
                _LOG.warning("%s has no effect: rank gives Python floats, one score a pair, in one process.", name)
        if isinstance(documents, str):
            raise ValueError("The documents are a list of texts, not one text.")
        texts = list(documents)
        if top_k is not None and not (is_number(Integral, top_k) and top_k >= 0):
            raise ValueError(f"top_k is a whole number from 0 on, or None, not {top_k!r}.")
        k = len(texts) if top_k is None else min(int(top_k), len(texts))
        form = self._form(self._prompt(prompt, prompt_name), max_length, max_document_tokens, truncation_side)
        if not k:
            return []
        with self._turn:
            outcome = self._run([query] * len(texts), texts, k, form, self.probes).outcome
        order = outcome.chosen
        activate = activation_fn or former or self.activation_fn
        activated = activate(torch.from_numpy(outcome.score[order]).float()).tolist()
        return [
            {"corpus_id": index, "score": score} | ({"text": texts[index]} if return_documents else {})
            for index, score in zip(order.tolist(), activated, strict=True)
        ]

    def close(self) -> None:
        """Give back memory, threads and files. A second call does nothing."""
        with self._turn:
            self._closed = True
            if self._open is not None:
                self._open[1].close()
                self._open = None

    def __reduce__(self) -> tuple[Any, ...]:
        names = ("budget", "max_length", "activation_fn", "probes", "_calibrations", "_certified")
        kept = {name: getattr(self, name) for name in names}
        return _rebuilt, (type(self), self._given, kept)

    @property
    def _turn(self) -> threading.RLock:
        """The lock of this process: one that a fork copied may be held for ever, and the reader's thread is gone."""
        if self._process != os.getpid():
            self._process, self._lock, self._open = os.getpid(), threading.RLock(), None
        return self._lock

    def __enter__(self) -> Reranker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Calibration

    def calibrate(
        self,
        queries: Sequence[str],
        documents: Sequence[Sequence[str]] | Sequence[str],
        k: int,
        recall: float = 0.98,
        confidence: float = 0.95,
        *,
        probes: bool = False,
        save: bool | str | Path = True,
    ) -> Calibration:
        """Find how much can be pruned for a top K, from queries like those to come; `rank(..., top_k=k)` does it then.

        documents: a list of candidates for each query, or one list for all. recall: of the full model's top K, its mean
        over further queries of the kind is at least that in all but a share 1 - confidence of calibrations: certified
        (`margins`), not hoped for.
        probes: fit linear probes on the quarter of the queries that certifies nothing, and score all layers but the
        last by them from now on; they are saved with the rule. Later calls without it keep these probes, and refuse a
        list in which a query that the probes were fitted on would certify: the same list is right, and so is one of new
        queries. Beside the budget, fitting holds the hidden state that the head reads of each of these candidates after
        each layer.
        save: beside the model, nowhere (False), or to a file. Where nothing can be certified, nothing is pruned.
        Raises ValueError where there are too few queries, naming how many it takes. Interrupted, it changes nothing.
        """
        if not (is_number(Integral, k) and k >= 1):
            raise ValueError(f"k is a whole number from 1 on, not {k!r}.")
        every: Any = [documents] * len(queries) if documents and isinstance(documents[0], str) else documents
        if len(every) != len(queries):
            raise ValueError(f"There are {len(queries)} queries, and lists of candidates for {len(every)}.")
        margins.require(round((1 - margins.FITTED) * len(queries)), recall, confidence)
        if empty := [number for number, texts in enumerate(every) if not len(texts)]:
            raise ValueError(f"Query {empty[0]} has no candidates.")
        for number, query in enumerate(queries):
            require_text("Query", number, query)
        if not probes and self.probes is not None:
            _require_unfitted(self.probes, queries)
        return self._calibrate(queries, every, int(k), (recall, confidence), probes, save)

    def _calibrate(
        self,
        queries: Sequence[str],
        documents: Sequence[Sequence[str]],
        k: int,
        promise: tuple[float, float],
        probes: bool,
        save: bool | str | Path,
    ) -> Calibration:
        """`calibrate`, of checked arguments. promise: recall and confidence.

        Other threads rank by the earlier rules until all of this is done.
        """
        histories = dict[int, Floats]()
        truncated = 0
        scored_by = self.probes
        if probes:
            scored_by, histories, truncated = self._probed(queries, documents, k)
        for number in [number for number in range(len(queries)) if number not in histories]:
            histories[number], cut = self._history(queries[number], documents[number], scored_by)
            truncated += cut
        pools = [
            Pool(str(number), "validation", histories[number], np.zeros(len(texts), bool))
            for number, texts in enumerate(documents)
        ]
        calibrated = replace(_calibrated(pools, k, self.mode, *promise), truncated=truncated)
        with self._turn:
            scoring = self._made_with(self._form(self._prompt(None, None)), scored_by)
            kept = self._calibrations if self._certified == scoring else {}
            kept = kept | {(calibrated.k, calibrated.mode): calibrated}
            if save is not False:
                path = self._beside() if save is True else Path(save)
                calibration.save(path, scoring, scored_by, kept)
            self.probes, self._certified, self._calibrations = scored_by, scoring, kept
        return calibrated

    def _probed(
        self, queries: Sequence[str], documents: Sequence[Sequence[str]], k: int
    ) -> tuple[Probes, dict[int, Floats], int]:
        """Fitted probes, logits [L, N] of the queries that they were fitted on, by number, and how many pairs were cut.

        Each query's early scores are by probes that were fitted on the other ones, as those of queries to come will be.
        """
        fitted, _ = margins.parts(len(queries))
        numbers = [number for number in fitted.tolist() if len(documents[number]) > k]
        truncated = 0
        histories, states = list[Floats](), list[Floats]()
        for number in numbers:
            seen = list[torch.Tensor]()
            history, cut = self._history(queries[number], documents[number], None, seen)
            histories.append(history)
            truncated += cut
            states.append(torch.stack(seen[:-1]).float().numpy())
        final = [history[-1] for history in histories]
        early = fitting.cross_fitted(states, final, k)
        every = tuple(map(calibration.digest, queries))
        probes = replace(fitting.rounded(fitting.fit(states, final, k)), queries=every)
        whole = [np.concatenate([rows, last[None]]) for rows, last in zip(early, final, strict=True)]
        return probes, dict(zip(numbers, whole, strict=True)), truncated

    def _history(
        self, query: str, texts: Sequence[str], probes: Probes | None, seen: list[torch.Tensor] | None = None
    ) -> tuple[Floats, int]:
        """Logits [L, N] of a query's candidates, none of whom is pruned, and how many were cut (`_run`)."""
        with self._turn:
            form = self._form(self._prompt(None, None))
            done = self._run([query] * len(texts), list(texts), None, form, probes, seen)
            return done.outcome.history, self.receipt.truncated if self.receipt else 0

    def _load(self, given: str | Path | bool | None) -> None:
        if given is False or self.threshold is not None:
            return
        path = self._beside() if given is None or given is True else Path(given)
        if path.is_file():
            certified, probes, calibrations = calibration.load(path)
            if probes is not None and self.probes is None:
                self._require_fitting(probes)
                self.probes = probes
            scoring = self._made_with(self._form(self._prompt(None, None)), self.probes)
            calibration.require(certified, scoring, path.name)
            self._certified, self._calibrations = certified, calibrations
        elif given is not None:
            raise FileNotFoundError(f"There is no file {str(given)!r} of calibrations.")

    def _require_fitting(self, probes: Probes) -> None:
        probes.require(self.architecture.layers, self.architecture.width)

    def _beside(self) -> Path:
        return self._model.checkpoint.folder / calibration.FILE

    @cached_property
    def _weights(self) -> str:
        """The fingerprint of the weights, for which the files may have to be read once."""
        return calibration.fingerprint(Checksums.load(self._model.checkpoint))

    @cached_property
    def _reading(self) -> dict[str, str]:
        """Digests of what pairs are read and scored with, whatever the call."""
        tokenizer = self.tokenizer
        entries = sorted(tokenizer.get_vocab().items()), tokenizer(_PROBE, verbose=False)["input_ids"]
        return {
            "model": self._weights,
            "form of pairs": calibration.digest((self.scoring, tokenizer.chat_template)),
            "tokenizer": calibration.digest(entries),
        }

    def _made_with(self, form: Form, probes: Probes | None) -> dict[str, str]:
        """Digests of all that scores are made with, for which a certificate holds. form: of the call."""
        # torch.sigmoid and torch.nn.Sigmoid() are one activation.
        activation = getattr(self.activation_fn, "__name__", type(self.activation_fn).__name__).lower()
        arrays = None if probes is None else (probes.weights.tobytes(), probes.intercepts.tobytes())
        usual = form.side == "right" and form.document_tokens is None  # as in files that know of nothing else
        call = {
            "prompt": form.prompt or "",
            "max_length": form.most if usual else (form.most, form.document_tokens, form.side),
            "activation": activation,
            "set of probes": arrays,
        }
        return self._reading | {name: calibration.digest(value) for name, value in call.items()}

    # A run

    def _run(
        self,
        queries: list[str],
        documents: list[str],
        k: int | None,
        form: Form,
        probes: Probes | None,
        seen: list[torch.Tensor] | None = None,
    ) -> Pass:
        """Score pairs, or select the K best documents of one query. Under the lock.

        probes: score all layers but the last. seen: takes [n, d], what the head could read of the active candidates,
        after each layer.
        """
        if self._closed:
            raise ValueError("This reranker is closed.")
        self.receipt = None
        read = encode(form, queries, documents)
        if read.truncated and not self.truncate:
            raise ValueError(f"{read.truncated} of {len(documents)} pairs are longer than the model reads.")
        chosen = plan(self._model, [len(row.ids) for row in read.rows], self.budget)
        weights = self._streamed(chosen)
        peak = anonymous()
        before = counters(weights)
        # What a chunk's temporaries leave free and torn is given back before the next ones come on top of it.
        full = self._baseline + chosen.total - chosen.parts["chunk"]

        def watch() -> None:
            nonlocal peak
            now = anonymous()
            peak = max(peak, now)
            if self.budget is not None and now > full:
                trim()  # about a millisecond

        def states(*arguments: Any) -> Any:
            return _Watched((Offloaded if chosen.offload else Resident)(*arguments), watch)

        def layer(*arguments: Any) -> torch.Tensor:
            pooled = run_layer(*arguments)
            if seen is not None:
                seen.append(pooled)
            if self.budget is not None:
                trim()
            return pooled

        engine = Engine(self.architecture, weights, chunk=chosen.chunk, states=states, probes=probes, run_layer=layer)
        rule = None if k is None or k >= len(documents) else self._rule(k, form)
        done = engine.score(read.rows, k, rule, exact_order=self.mode == "order")
        counted = [now - then for now, then in zip(counters(weights), before, strict=True)]
        peak = max(peak - self._baseline, self._model.opening)
        self.receipt = receipt_of(done, counted, read, chosen, peak / MB)
        return done

    def _form(
        self,
        prompt: str | None,
        max_length: int | None = None,
        document_tokens: int | None = None,
        side: Side | None = None,
    ) -> Form:
        """How pairs are read, of the most tokens that model, tokenizer, folder, user and call allow."""
        if side not in (None, "right", "left"):
            raise ValueError(f"The truncation side is right or left, not {side!r}.")
        if document_tokens is not None and not (is_number(Integral, document_tokens) and document_tokens >= 1):
            raise ValueError(f"max_document_tokens is a whole number from 1 on, or None, not {document_tokens!r}.")
        most = self.max_length or self.scoring.limit or int(self.tokenizer.model_max_length)
        most = min(most, self.architecture.longest) if max_length is None else self._length(max_length)
        scoring = self.scoring if side is None else replace(self.scoring, side=side)
        return replace(scoring.form(self.tokenizer, most, prompt), document_tokens=document_tokens)

    def _length(self, tokens: int) -> int:
        longest = self.architecture.longest
        if not (is_number(Integral, tokens) and 1 <= tokens <= longest):
            raise ValueError(f"max_length is from 1 to {longest} tokens, not {tokens}.")
        return int(tokens)

    def _rule(self, k: int, form: Form) -> Rule | None:
        if self.threshold is not None:
            return cluster_rule(self.threshold)
        calibrated = self._calibrations.get((k, self.mode))
        if calibrated is None or calibrated.rule is None:
            return None
        calibration.require(self._certified, self._made_with(form, self.probes), f"Pruning for top_k={k}")
        return calibrated.rule

    def _streamed(self, chosen: Plan) -> Streamed:
        """The open weights, opened anew where they hold more than the plan has room for."""
        held = self._open
        if held and (held[0].slots > chosen.slots or held[0].embedding_rows > chosen.embedding_rows):
            held[1].close()
            held = self._open = None
        if held is None:
            streamed = Streamed(
                self._model.checkpoint,
                self.architecture.part_of,
                units=self.architecture.units,
                slots=chosen.slots,
                embedding_rows=chosen.embedding_rows,
            )
            held = self._open = chosen, streamed
        return held[1]

    def _prompt(self, prompt: str | None, name: str | None) -> str | None:
        if prompt is not None:
            return prompt
        name = self.default_prompt_name if name is None else name
        if name is not None and name not in self.prompts:
            raise ValueError(f"There is no prompt {name!r}; there are {', '.join(self.prompts) or 'none'}.")
        return None if name is None else self.prompts[name]


class _Watched:
    """Hidden states; memory is looked at whenever a chunk's have been put, while its temporaries are still there."""

    def __init__(self, states: HiddenStates, watch: Callable[[], None]) -> None:
        self._states, self._watch = states, watch
        self.each, self.close = states.each, states.close

    def put(self, group: Sequence[int], hidden: torch.Tensor) -> None:
        self._states.put(group, hidden)
        self._watch()


class _Card:
    """In the place of CrossEncoder's model card, to which its evaluators add their metrics; nothing is kept."""

    def set_evaluation_metrics(self, *_: Any, **__: Any) -> None: ...


def _rebuilt(kind: type[Reranker], given: dict[str, Any], kept: dict[str, Any]) -> Reranker:
    """A copy of a reranker, in another process or in this one."""
    others = {name: given[name] for name in given if name != "model_name_or_path"}
    copied = kind(given["model_name_or_path"], **others)
    vars(copied).update(kept)
    return copied


def _require_unfitted(probes: Probes, queries: Sequence[str]) -> None:
    """Raise ValueError where a query of another list than the probes' own would certify, and they were fitted on it."""
    digests = tuple(map(calibration.digest, queries))
    if digests == probes.queries:
        return
    fitted = {probes.queries[number] for number in margins.parts(len(probes.queries))[0]}
    _, certifying = margins.parts(len(queries))
    if reused := [number for number in certifying.tolist() if digests[number] in fitted]:
        raise ValueError(
            f"The probes were fitted on query {min(reused)}, so it may not certify. Calibrate with the list that they "
            "were fitted on, with new queries alone, or with probes=True."
        )


def _calibrated(pools: list[Pool], k: int, mode: str, recall: float, confidence: float) -> Calibration:
    exact = mode == "order"
    certified = margins.certify(pools, k, recall, confidence, exact)
    rule = certified.rule
    saved = 0.0 if rule is None else float(measure(pools, k, rule, exact)["saved"].mean())
    return Calibration(
        k,
        mode,
        recall,
        confidence,
        certified.tested,
        certified.recall,
        saved,
        weights=None if rule is None else rule.weights.tolist(),
        margins=None if rule is None else rule.margins.tolist(),
    )


def _forget_pages(folder: Path) -> None:
    """Take the small files that were read out of the page cache, as weights are."""
    for path in folder.glob("*.json"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            drop_pages(file.fileno(), 0, path.stat().st_size)

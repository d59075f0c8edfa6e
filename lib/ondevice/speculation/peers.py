"""transformers' own speculative decoding, as outside peers: the same request and the same log, by its code."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig
from transformers.utils import logging

from ondevice.speculation.log import Generation, Step

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ondevice.causal_lm import CausalLM


def prompt_lookup(
    lm: CausalLM, prompt: Sequence[int], limit: int, *, tokens: int = 10, ngram: int = 3, ends: Collection[int] = ()
) -> Generation:
    """Greedy `generate` with prompt_lookup_num_tokens: up to `tokens` that followed an earlier n-gram."""
    return _measured(
        lm.model, prompt, limit, ends, {"prompt_lookup_num_tokens": tokens, "max_matching_ngram_size": ngram}
    )


def assisted(
    lm: CausalLM, assistant: PreTrainedModel, prompt: Sequence[int], limit: int, *, tokens: int = 5,
    schedule: str = "constant", ends: Collection[int] = (),
) -> Generation:  # fmt: skip
    """Greedy `generate` with assistant_model, by default with Spec-Bench's 5 tokens and no confidence threshold.

    transformers' own defaults (20 tokens, threshold 0.4) stop flat drafts after one token, which is another method.
    Raises ValueError where the assistant is the model itself.
    """
    if assistant is lm.model:
        raise ValueError("The assistant must be another model object: forwards are counted by the model.")
    before = assistant.generation_config
    assistant.generation_config = GenerationConfig(
        num_assistant_tokens=tokens, num_assistant_tokens_schedule=schedule, assistant_confidence_threshold=0.0
    )
    try:
        return _measured(lm.model, prompt, limit, ends, {"assistant_model": assistant})
    finally:
        assistant.generation_config = before


@dataclass
class _Record:
    """What the wrapped calls saw. Times are points in time; one item of `steps` a forward, the prompt's included."""

    length: int  # tokens before the forward in progress
    times: dict[str, float] = field(default_factory=dict)
    drafted: int = 0
    steps: list[Step] = field(default_factory=list)
    prefilled: float | None = None

    def note(self, point: str) -> None:
        self.times[point] = perf_counter()

    def close(self, accepted: int) -> None:
        """The step is chosen and its drafter told."""
        at = self.times
        forward = at["forwarded"] - at["forward"]
        told = at["told"] - at["chosen"]
        draft = at["drafted"] - at["draft"]
        choose = at["chosen"] - at["draft"] - draft - forward
        n = self.drafted
        width = min(n, 1)
        self.steps.append(Step(n, accepted, accepted + 1, n, width, self.length - 1, draft, forward, choose, 0.0, told))
        self.length += accepted + 1


def _measured(
    model: Any, prompt: Sequence[int], limit: int, ends: Collection[int], options: dict[str, Any]
) -> Generation:
    """Run `generate` and log it.

    transformers verifies its first draft together with the prompt. That draft is made, which includes the assistant's
    prefill, but withheld, so that the prompt's forward is a prefill like ours and tokens a step mean the same.
    `choose_s` of a step is transformers' selection and its cache's crop, which cannot be told apart from outside.
    """
    ids = torch.tensor([list(map(int, prompt))], device=model.device)
    record = _Record(len(prompt))
    with own_config(model, ends), _watched(model, record):
        started = perf_counter()
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False, **options
        )
        finished = perf_counter()
    tokens = found[0, len(prompt) :].tolist()
    prefilled = record.prefilled or finished
    return Generation(
        len(prompt), tokens, tokens[-1] in ends, prefilled - started, finished - prefilled, record.steps[1:]
    )


@contextmanager
def own_config(model: PreTrainedModel, ends: Collection[int]) -> Iterator[None]:
    """The model's own generation settings (its ends, penalties and sampling) do not count inside.

    Nor is it said that transformers' assisted decoding hands its own `generate` both settings and arguments.
    """
    before, verbosity = model.generation_config, logging.get_verbosity()
    model.generation_config = GenerationConfig(eos_token_id=sorted(ends) or None, pad_token_id=0)
    logging.set_verbosity_error()
    try:
        yield
    finally:
        model.generation_config = before
        logging.set_verbosity(verbosity)


@contextmanager
def _watched(model: Any, record: _Record) -> Iterator[None]:
    """Times and counts the model's forwards, and what its candidate generator is asked and told."""
    own = {name: model.__dict__.get(name) for name in ("forward", "_get_candidate_generator")}
    forward, generator_of = model.forward, model._get_candidate_generator

    @functools.wraps(forward)  # generate reads the signature
    def timed(*args: Any, **kwargs: Any) -> Any:
        record.note("forward")
        found = forward(*args, **kwargs)
        if found.logits.is_cuda:
            torch.cuda.synchronize(found.logits.device)
        record.note("forwarded")
        return found

    @functools.wraps(generator_of)
    def watched(*args: Any, **kwargs: Any) -> Any:
        return _watch_generator(generator_of(*args, **kwargs), record)

    model.__dict__["forward"], model.__dict__["_get_candidate_generator"] = timed, watched
    try:
        yield
    finally:
        for name, before in own.items():
            model.__dict__.pop(name, None)
            if before is not None:
                model.__dict__[name] = before


def _watch_generator(generator: Any, record: _Record) -> Any:
    ask, tell = generator.get_candidates, generator.update_candidate_strategy

    def get_candidates(input_ids: torch.Tensor, **kwargs: Any) -> Any:
        record.note("draft")
        found = ask(input_ids, **kwargs)
        if not record.steps:
            found = input_ids, None
        record.drafted = found[0].shape[1] - input_ids.shape[1]
        record.note("drafted")
        return found

    def update_candidate_strategy(input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        record.note("chosen")
        if record.steps:  # the withheld draft was neither right nor wrong
            tell(input_ids, scores, num_matches)
        record.note("told")
        record.prefilled = record.prefilled or perf_counter()
        record.close(int(num_matches))

    generator.get_candidates, generator.update_candidate_strategy = get_candidates, update_candidate_strategy
    return generator

"""Speculative decoding behind transformers' own door: `model.generate(ids, custom_generate=speculative(drafter))`."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.generation.streamers import BaseStreamer

from ondevice.causal_lm import CausalLM, support
from ondevice.gguf_file import weights_state
from ondevice.speculation import drafters
from ondevice.speculation.draft import EMPTY
from ondevice.speculation.drafter import Drafter
from ondevice.speculation.loop import BUDGET, Generation, generate

FOLDER = str(Path(__file__).parent.parent)  # for generate's arguments that a callable never gets: stop_strings
_GENERATE = inspect.unwrap(transformers.GenerationMixin.generate).__code__

_OURS = {"past_key_values", "use_cache", "logits_to_keep"}  # generate's arguments that the session decides on
_OUTPUTS = ("return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states")
_COPIED = ("name", "drafts_trees", "vocabulary", "forwards")
_CALLED = ("prefilled", "propose", "observe", "end")


def speculative(
    drafter: Drafter | str,
    budget: int | None = None,
    report: Callable[[Generation], None] | None = None,
    streamer: BaseStreamer | None = None,
    engine: Callable[[Any], CausalLM] = CausalLM,
) -> Callable[..., torch.Tensor]:
    """A `custom_generate` for `model.generate`: the ids [1, n] that `generate` gives, in fewer forwards.

    drafter: one, or a name in `drafters.DRAFTERS`, of which each model gets a new one. budget: most nodes of a draft;
    None is what the authors of a named drafter take, else 64.
    That holds in float32; in bfloat16 a forward of several rows rounds otherwise than one of a single row.
    Logits processors and stopping criteria are `generate`'s own: each emitted token is chosen by them, behind its own
    prefix. With do_sample the draws are those of `generate`, too, in its order, from torch's global generator.
    report: is called with each request's log. streamer: gets the prompt, and the tokens as they are accepted; so does a
    streamer that `generate` is given. Both are ended, also where the request is refused or fails.
    `generate` keeps its `stop_strings` from a callable, not from a folder: `custom_generate=FOLDER,
    trust_remote_code=True, drafter=...`, where the code that is trusted is this package's own `generate.py` and nothing
    else.
    engine: what runs the model; `causal_lm.lean.engine` is faster on a CPU, and `partial(engine, weights="4bit")` still
    more. It packs the weights as they are, and anew once they have changed.
    A drafter that raises in the middle of an answer is left out of the rest, and a warning says so. A drafter of trees
    drafts only chains where the model, as with sliding windows, can verify nothing else; a first warning says so.
    Raises ValueError on what it would not do as `generate` does: batches, beams, masks, a cache that is passed in,
    dictionaries, limits beyond the model's context, models that are no decoders; and where processors forbid every
    token. An `assistant_model` never reaches a custom_generate: do not pass it.
    """
    if isinstance(drafter, str):
        drafters.require(drafter)
        budget = drafters.DRAFTERS[drafter].budget if budget is None else budget
    made: dict[int, Drafter] = {}  # a named drafter's, by the number of token ids
    nodes = BUDGET if budget is None else budget
    cut: set[str] = set()  # models of which it was said that they verify only chains

    def decode(
        model: transformers.PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: transformers.GenerationConfig,
        **model_kwargs: Any,
    ) -> torch.Tensor:
        streamers = _Streamers(streamer, _streamer_of_generate())
        try:
            support.require_causal(model)
            _check(model, input_ids, generation_config, model_kwargs)
            limits = [rule for rule in stopping_criteria if type(rule) is transformers.MaxLengthCriteria]
            lm = wrapped(model, engine)
            longest = min(int(rule.max_length) for rule in limits)
            if longest > lm.context + 1:
                raise ValueError(
                    f"max_length {longest} is beyond the model's context of {lm.context} tokens and one more."
                )
            if isinstance(drafter, str) and lm.vocabulary not in made:
                made[lm.vocabulary] = drafters.create(drafter, lm.vocabulary)
            used = made[lm.vocabulary] if isinstance(drafter, str) else drafter
            if used.drafts_trees and lm.tree_refusal and lm.tree_refusal not in cut:
                cut.add(lm.tree_refusal)
                warnings.warn(f"{lm.tree_refusal} {used.name} drafts the first chain of each tree.", stacklevel=2)
            rules = [rule for rule in stopping_criteria if rule not in limits]
            output = _Output(input_ids, logits_processor, rules, bool(generation_config.do_sample), streamers)
            generation = generate(
                lm,
                _Guarded(used),
                input_ids[0].tolist(),
                max(1, longest - input_ids.shape[1]),
                budget=nodes,
                choice=output,
                eos_token_ids=output,
            )
        finally:
            streamers.end()
        if report is not None:
            report(generation)
        return output.ids

    return decode


def _streamer_of_generate() -> BaseStreamer | None:
    """The streamer that the running `generate` was given.

    `generate` hands its decoding loops a streamer, but a callable never, whatever its signature says. Its own frame
    still has it, under the name of its public parameter. Without that frame there is none, and nothing is streamed.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not _GENERATE:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("streamer")


class _Streamers:
    """The streamers of a request: the one that `speculative` was given and that of `generate`, or one that is both."""

    def __init__(self, own: BaseStreamer | None, of_generate: BaseStreamer | None) -> None:
        self._own = None if own is of_generate else own  # `generate` has put the prompt into its own already
        self._all = [streamer for streamer in (self._own, of_generate) if streamer is not None]

    def begin(self, prompt: torch.Tensor) -> None:
        if self._own is not None:
            self._own.put(prompt.cpu())

    def put(self, token: torch.Tensor) -> None:
        for streamer in self._all:
            streamer.put(token.cpu())

    def end(self) -> None:
        for streamer in self._all:
            streamer.end()


class _Output:
    """The output so far, each token chosen as `generate` would.

    As the loop's `eos_token_ids` it holds a token that a criterion stops at.
    Relies on the loop: it chooses once for every emitted token, in order, and asks of the last one whether it ends.
    """

    def __init__(
        self, ids: torch.Tensor, processors: Any, rules: Sequence[Any], drawn: bool, streamers: _Streamers
    ) -> None:
        self.ids = ids
        self._over = False
        self._processors, self._rules, self._drawn, self._streamers = processors, rules, drawn, streamers
        streamers.begin(ids)

    def __call__(self, logits: torch.Tensor) -> int:
        scores = self._processors(self.ids, logits[None].to(torch.float32, copy=True))
        if bool(scores.isneginf().all()):
            raise ValueError(f"The logits processors forbid every token after {self.ids.shape[1]} tokens.")
        token = torch.multinomial(scores.softmax(-1), 1) if self._drawn else scores.argmax(-1, keepdim=True)
        self.ids = torch.cat([self.ids, token.to(self.ids.device)], dim=1)
        self._over = any(bool(torch.as_tensor(rule(self.ids, None)).all()) for rule in self._rules)
        self._streamers.put(token[0])
        return int(token)

    def __contains__(self, token: object) -> bool:
        return self._over


class _Guarded(Drafter):
    """A drafter that may fail in the middle of an answer, which goes on without it."""

    def __init__(self, drafter: Drafter) -> None:
        vars(self).update({name: getattr(drafter, name) for name in _COPIED})
        vars(self).update({name: partial(self._call, getattr(drafter, name)) for name in _CALLED})
        self._drafter = drafter
        self._failed = False

    def begin(self, prompt: Sequence[int]) -> None:
        """The drafter's, which decides whether it reads this prompt. Failing here, it ends the request."""
        self._drafter.begin(prompt)
        self.wants_prefill = self._drafter.wants_prefill

    def _call(self, method: Callable[..., Any], *given: Any) -> Any:
        if not self._failed:
            try:
                answer = method(*given)
                self.forwards = self._drafter.forwards
                return answer
            except Exception as error:
                self._failed = True
                warnings.warn(f"{self.name} failed, and the answer goes on without drafts: {error!r}", stacklevel=2)
        return EMPTY


def wrapped(model: transformers.PreTrainedModel, engine: Callable[[Any], CausalLM] = CausalLM) -> CausalLM:
    """The model's engine, kept on the model itself, so that it is built once.

    A new one is made for a copy of the model, and when its weights, attention or vocabulary have changed since.
    """
    kind = (engine.func, engine.args, frozenset(engine.keywords.items())) if isinstance(engine, partial) else engine
    state = id(model), model.config._attn_implementation, weights_state(model)
    engines = model.__dict__.setdefault("_ondevice_causal_lm", {})
    if kind not in engines or engines[kind][0] != state:
        engines[kind] = state, engine(model)
    return engines[kind][1]


def _check(model: Any, ids: torch.Tensor, config: transformers.GenerationConfig, given: dict[str, Any]) -> None:
    """Raise ValueError on arguments that would be silently ignored. given: to the model."""
    extra_outputs = [name for name in _OUTPUTS if getattr(config, name, None)]
    mode = config.get_generation_mode().value
    mask = given.pop("attention_mask", None)
    positions = given.pop("position_ids", None)
    cache = given.get("past_key_values")
    filled = cache is not None and (getattr(cache, "_is_user_defined", False) or int(cache.get_seq_length()))
    others = sorted(key for key, value in given.items() if key not in _OURS and value is not None)
    refused = {
        "The model is in training mode: call model.eval() first.": model.training,
        f"Speculative decoding is greedy or samples, and has no {mode}.": mode not in ("greedy_search", "sample"),
        f"Speculative decoding takes one prompt of token ids at a time, not {tuple(ids.shape)}.": ids.shape[0] != 1
        or not ids.shape[1],
        f"Speculative decoding gives token ids alone: leave out {extra_outputs}.": extra_outputs,
        "The attention mask hides tokens: pass the prompt without padding, and a mask of ones.": mask is not None
        and not bool((mask == 1).all()),
        "Speculative decoding counts positions from 0: leave out position_ids.": positions is not None
        and positions.flatten().tolist() != list(range(ids.shape[1])),
        "Speculative decoding has its own cache: leave out past_key_values.": filled,
        f"Speculative decoding does not pass {others} on to the model: leave them out.": others,
    }
    for sentence, holds in refused.items():
        if holds:
            raise ValueError(sentence)

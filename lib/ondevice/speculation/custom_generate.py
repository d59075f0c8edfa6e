"""Speculative decoding behind transformers' own door: `model.generate(ids, custom_generate=speculative(drafter))`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

from ondevice.causal_lm import CausalLM
from ondevice.speculation.choice import Choice, Sampling, greedy
from ondevice.speculation.drafter import Drafter
from ondevice.speculation.loop import BUDGET, Generation, generate

# What `Sampling` stands for, in its order, and what each says.
_WARPERS = {
    transformers.TemperatureLogitsWarper: "temperature", transformers.TopKLogitsWarper: "top_k",
    transformers.TopPLogitsWarper: "top_p",
}  # fmt: skip
_OURS = {"past_key_values", "use_cache", "logits_to_keep"}  # generate's arguments that the session decides on
_OUTPUTS = ("return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states")
_DRAFTS = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")


def speculative(
    drafter: Drafter, budget: int = BUDGET, report: Callable[[Generation], None] | None = None
) -> Callable[..., torch.Tensor]:
    """A `custom_generate` for `model.generate`: the ids [1, n] that greedy `generate` gives, in fewer forwards.

    With do_sample, temperature, top_k and top_p are those of `generate`; the tokens are drawn by our own generator,
    seeded from torch's global one, so that `torch.manual_seed` repeats a run, but with other tokens than `generate`'s.
    report: is called with each request's log.
    Raises ValueError on what it would not do as `generate` does: batches, beams, other processors and criteria, masks,
    a cache that is passed in, dictionaries, and limits beyond the model's context. A `streamer` and an
    `assistant_model` never reach a custom_generate: do not pass them.
    """

    def decode(
        model: transformers.PreTrainedModel, input_ids: torch.Tensor, logits_processor: Any, stopping_criteria: Any,
        generation_config: transformers.GenerationConfig, **model_kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        _check(model, input_ids, generation_config, model_kwargs)
        choice = _choice(logits_processor, bool(generation_config.do_sample))
        longest, ends = _stops(stopping_criteria)
        lm = wrapped(model)
        if longest > lm.context + 1:
            raise ValueError(f"max_length {longest} is beyond the model's context of {lm.context} tokens and one more.")
        prompt = input_ids[0].tolist()
        found = generate(lm, drafter, prompt, longest - len(prompt), budget=budget, choice=choice, ends=ends)
        if report is not None:
            report(found)
        return torch.cat([input_ids, input_ids.new_tensor([list(found.tokens)])], dim=1)

    return decode


def wrapped(model: transformers.PreTrainedModel) -> CausalLM:
    """The model's CausalLM, kept on the model itself, so that an architecture is probed once.

    A new one is made when the attention or the vocabulary was changed since.
    """
    state = model.config._attn_implementation, len(model.get_input_embeddings().weight)  # type: ignore[arg-type]
    known = model.__dict__.get("_ondevice_causal_lm")
    if known is None or known[0] != state:
        known = model.__dict__["_ondevice_causal_lm"] = state, CausalLM(model)
    return known[1]


def _check(
    model: transformers.PreTrainedModel, ids: torch.Tensor, config: transformers.GenerationConfig, given: dict[str, Any]
) -> None:
    """Raise ValueError on arguments that would be silently ignored. given: to the model."""
    asked = [name for name in (*_OUTPUTS, *_DRAFTS) if getattr(config, name, None)]
    mask, places = given.pop("attention_mask", None), given.pop("position_ids", None)
    cache = given.get("past_key_values")
    filled = cache is not None and (getattr(cache, "_is_user_defined", False) or int(cache.get_seq_length()))
    others = sorted(key for key, value in given.items() if key not in _OURS and value is not None)
    refused = {
        "The model is in training mode: call model.eval() first.": model.training,
        "Speculative decoding has no beam search: num_beams must be 1.": (config.num_beams or 1) > 1,
        f"Speculative decoding takes one prompt of token ids at a time, not {tuple(ids.shape)}.":
            ids.shape[0] != 1 or not ids.shape[1],
        f"Speculative decoding gives token ids alone, by its own drafter: leave out {asked}.": asked,
        "The attention mask hides tokens: pass the prompt without padding, and a mask of ones.":
            mask is not None and not bool((mask == 1).all()),
        "Speculative decoding counts positions from 0: leave out position_ids.":
            places is not None and places.flatten().tolist() != list(range(ids.shape[1])),
        "Speculative decoding has its own cache: leave out past_key_values.": filled,
        f"Speculative decoding does not pass {others} on to the model: leave them out.": others,
    }  # fmt: skip
    for sentence, holds in refused.items():
        if holds:
            raise ValueError(sentence)


def _choice(processors: Any, drawn: bool) -> Choice:
    """How to choose from logits; raises ValueError on processors that `Sampling` does not stand for."""
    kinds = [type(processor) for processor in processors or ()]
    simple = all(getattr(one, "min_tokens_to_keep", 1) == 1 for one in processors or ())
    if kinds != [kind for kind in _WARPERS if kind in kinds] or not simple or (kinds and not drawn):
        raise ValueError(
            "Speculative decoding is greedy, or samples with temperature, top_k and top_p, in this order; it does not "
            f"apply {[kind.__name__ for kind in kinds]}{'' if drawn else ' without do_sample'}."
        )
    if not drawn:
        return greedy
    settings = {_WARPERS[type(one)]: getattr(one, _WARPERS[type(one)]) for one in processors or ()}
    return Sampling(**settings, seed=int(torch.randint(2**62, ())))


def _stops(criteria: Any) -> tuple[int, set[int]]:
    """(longest sequence, ids that end it); raises ValueError on other criteria."""
    longest = [int(one.max_length) for one in criteria if type(one) is transformers.MaxLengthCriteria]
    ends = [one.eos_token_id.flatten().tolist() for one in criteria if type(one) is transformers.EosTokenCriteria]
    if len(longest) + len(ends) < len(criteria):
        names = [type(one).__name__ for one in criteria]
        raise ValueError(f"Speculative decoding stops at max_length and at eos tokens alone, not by all of {names}.")
    return min(longest), {int(end) for found in ends for end in found}

"""What transformers runs for `custom_generate=FOLDER`: all of `generate`'s arguments come through, a streamer too."""

from typing import Any

import torch
from transformers import StoppingCriteriaList, StopStringCriteria

from ondevice.speculation.custom_generate import speculative


def generate(
    model: Any, drafter: Any, streamer: Any = None, tokenizer: Any = None, assistant_model: Any = None, **arguments: Any
) -> torch.Tensor:
    """`model.generate` with `speculative`. budget, report, engine: as there; drafter: of a request, or of many."""
    if assistant_model is not None:
        raise ValueError("Speculative decoding has its own drafter: leave out assistant_model.")
    config = arguments.get("generation_config") or model.generation_config
    strings = arguments.pop("stop_strings", None) or config.stop_strings
    if strings and tokenizer:  # which a callable would not get
        rules = [*(arguments.get("stopping_criteria") or ()), StopStringCriteria(tokenizer, strings)]
        arguments["stopping_criteria"] = StoppingCriteriaList(rules)
        strings = None
    ours = {name: arguments.pop(name) for name in ("budget", "report", "engine") if name in arguments}
    fast = speculative(drafter, streamer=streamer, **ours)
    return model.generate(**arguments, stop_strings=strings, custom_generate=fast)

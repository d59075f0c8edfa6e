"""What transformers runs for `custom_generate=FOLDER`: all of `generate`'s arguments come through, a streamer too."""

from typing import Any

import torch
from transformers import StoppingCriteriaList, StopStringCriteria

from ondevice.speculation.custom_generate import speculative


def generate(
    model: Any, drafter: Any, streamer: Any = None, tokenizer: Any = None, stop_strings: Any = None, **arguments: Any
) -> torch.Tensor:
    """`model.generate` with `speculative`. budget, report: as there; drafter: of a request, or of many."""
    if stop_strings:  # for which a callable would not get the tokenizer
        rules = [*(arguments.get("stopping_criteria") or ()), StopStringCriteria(tokenizer, stop_strings)]
        arguments["stopping_criteria"] = StoppingCriteriaList(rules)
    ours = {name: arguments.pop(name) for name in ("budget", "report") if name in arguments}
    return model.generate(**arguments, custom_generate=speculative(drafter, streamer=streamer, **ours))

"""Linear probes of the bundled rerankers, and what they say of all evaluation pools: recorded once, checked live.

Probes are fitted on the validation pools. Of these, scores are of probes that were fitted on other pools, so that rules
can be calibrated on them; those of the test pools are of the probes that a reranker is given. Nothing of the test split
is fitted or chosen. The file data/traces/grating_probes.npz has probes in float16 and scores as in `recordings`.

Record them anew: python -m ondevice.grating.probe_recordings
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from ondevice import commands
from ondevice.grating import probes, recordings
from ondevice.grating.engine import Engine
from ondevice.grating.pruning import Rule
from ondevice.grating.recordings import Asked, Recording
from ondevice.grating.replay import Pools

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MODELS = ("pydocs-reranker", "pydocs-reranker-deep")
K = 5  # around whose boundary the probes are to be right


def load(model: str, split: str = "test") -> Recording:
    """A recording with the probes' scores after every layer but the last, the head's after the last.

    Raises ValueError on a model or split that was not recorded, and where scores and probes are of other pools.
    """
    own, kept = recordings.load(model, split), probes.kept()
    if f"{model}/{split}/codes" not in kept:
        raise ValueError(f"There are no probes' scores of {model} on the {split} split.")
    early = recordings.unpack({name: kept[f"{model}/{split}/{name}"] for name in ("codes", "low", "step")})
    final = own.pools.scores[:, -1:]
    if early.shape != (len(final), own.pools.layers - 1, final.shape[2]):
        raise ValueError(f"The probes' scores of {model} are of other pools than the model's: record them anew.")
    return dataclasses.replace(own, pools=Pools(np.concatenate([early, final], 1), own.pools.relevance))


def check(models: Sequence[str] = MODELS, pools: int = 20, k: int = K, rules: Mapping[str, Rule] | None = None
          ) -> pd.DataFrame:  # fmt: skip
    """`recordings.check` with probes: a row a model, some test pools scored by the engine against the recording."""
    rows = []
    for name in models:
        recording = load(name)
        chosen = recordings.asked(recording, recordings.spread(recording, pools))
        with recordings.opened(name) as (model, engine):
            probed = Engine(model.architecture, engine.weights, probes=probes.load(name))
            scores = recordings.live(model, probed, chosen)
        rows.append(recordings.compare(recording, chosen, scores, k, (rules or {}).get(name)))
    return pd.DataFrame(rows)


# Making them


def record(models: Sequence[str] = MODELS) -> dict[str, NDArray[Any]]:
    """The arrays of the file. Raises ValueError where the installed packages lack a recorded pool."""
    found: dict[str, NDArray[Any]] = {}
    for name in models:
        valid, test = (recordings.load(name, split) for split in ("validation", "test"))
        read = {one.split: _states(one) for one in (valid, test)}
        found |= arrays(name, read["validation"], valid.pools.scores[:, -1], read["test"])
    return found


def arrays(
    name: str, validation: NDArray[np.float16], final: NDArray[np.float64], test: NDArray[np.float16]
) -> dict[str, NDArray[Any]]:
    """What is kept of one model. validation, test: [pools, L - 1, N, d] states. final: [pools, N], of validation."""
    fitted = probes.rounded(probes.fit(validation, final, K))
    found: dict[str, NDArray[Any]] = {
        f"{name}/weights": fitted.weights.astype(np.float16), f"{name}/intercepts": fitted.intercepts
    }  # fmt: skip
    scores = {"validation": probes.cross_fitted(validation, final, K), "test": probes.predicted(fitted, test)}
    for split, given in scores.items():
        found |= {f"{name}/{split}/{key}": array for key, array in recordings.pack(given).items()}
    return found


@torch.inference_mode()
def states(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pools: Sequence[Asked]) -> NDArray[np.float16]:
    """[pools, L - 1, N, d] what the head would read after every layer but the last."""
    from ondevice.corpus.pairs import is_causal, padded, rows

    causal, found = is_causal(model), []
    for pool in pools:
        batch = padded(rows(tokenizer, pool.query, pool.documents), int(model.config.pad_token_id or 0))
        mask = batch["attention_mask"]
        inputs = {key: value for key, value in batch.items() if not (causal and key == "token_type_ids")}
        extra: dict[str, Any] = {"use_cache": False} if causal else {}
        hidden = model.base_model(**inputs, output_hidden_states=True, **extra).hidden_states[1:-1]
        read = mask.sum(1) - 1 if causal else torch.zeros(len(mask), dtype=torch.long)
        found.append(torch.stack([state[torch.arange(len(mask)), read] for state in hidden]).to(torch.float16).numpy())
    return np.stack(found)


def _states(recording: Recording) -> NDArray[np.float16]:
    from ondevice import models as registry
    from ondevice.precision import mixed_precision

    pools = recordings.asked(recording, range(len(recording.pools)))
    if len(pools) < len(recording.pools):
        raise ValueError("The corpus has changed: record the scores anew with python -m ondevice.grating.recordings.")
    loaded = registry.load(recording.model)
    with mixed_precision("cpu"):
        return states(loaded.model, loaded.tokenizer, pools)


if __name__ == "__main__":
    commands.no_arguments("python -m ondevice.grating.probe_recordings", __doc__)
    recordings.save(record(), probes.path())

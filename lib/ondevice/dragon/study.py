"""What the notebook's exhibits share: recorded answers, windows and latencies, and what follows from both."""

from __future__ import annotations

import pandas as pd

from ondevice.dragon import language_modelling


def temperature(losses: pd.DataFrame, model: str) -> float:
    """The temperature of the least loss of a model. losses: of the record `temperatures`.

    Raises ValueError on windows of another split than the validation split.
    """
    _require_validation(losses)
    nats = losses[losses["model"] == model].groupby("temperature")["nats"].sum()
    return language_modelling.best_temperature(nats.to_dict())


def _require_validation(table: pd.DataFrame) -> None:
    splits = sorted(set(table["split"]))
    if splits != ["validation"]:
        raise ValueError(f"What is chosen is chosen on the validation split, not on {' and '.join(splits)}.")

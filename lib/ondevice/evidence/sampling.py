"""The random sample of a record: requests, pools or windows that a run computes again, to compare them."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from math import ceil

import numpy as np
import pandas as pd

SHARE = 0.01  # of the units
FEWEST, MOST = 2, 10  # units that make up this share, whatever it is


def sampled(
    units: pd.DataFrame,
    seed: int,
    number: int = 0,
    *,
    strata: Sequence[str],
    length: str,
    name: str,
    fetched: str = "",
) -> pd.DataFrame:
    """The rows of `units` that the seed draws, in order of strata and name. They are printed.

    units: one row per unit of a record. number: of units to draw; 0 is 1 % of them or ten, whichever is less, but two
    at least. strata: columns, such as model and task, whose groups take turns in an order that the seed shuffles: first
    come a group of each model, then further tasks. length: a column; the longest, middle and shortest third of each
    group take turns as well. name: a column that tells apart the units of a group.
    fetched: a column, true where not every clone has a unit's prompt. These units are drawn apart, with a number of
    their own, so the other ones do not depend on them. The caller compares those whose prompts are present.
    """
    strata = list(strata)
    drawn = []
    for apart, part in units.groupby(fetched or np.zeros(len(units), bool)):
        random = np.random.default_rng([seed, int(bool(apart))])
        wanted = number or min(MOST, max(FEWEST, ceil(SHARE * len(part))))
        drawn.append(_in_turns(part, random, strata, length, name).head(wanted))
    table = pd.concat(drawn).sort_values([*strata, name])
    groups = table.groupby(strata, sort=False)[name]
    names = [f"{' '.join(map(str, group))} {', '.join(map(str, rows))}" for group, rows in groups]
    line = f"drawn by seed {seed}, {len(table)} of {len(units)}: {'; '.join(names)}"
    print(textwrap.fill(line, 110, break_on_hyphens=False))
    return table


def _in_turns(
    units: pd.DataFrame, random: np.random.Generator, strata: list[str], length: str, name: str
) -> pd.DataFrame:
    """All units in the order in which they are drawn. It depends on their contents, not on the order of the rows."""
    ordered = units.reset_index(drop=True).sort_values([*strata, length, name], ascending=False)
    groups = ordered.groupby(strata)
    turns = groups.first().iloc[random.permutation(groups.ngroups)].reset_index()
    turns["nth"] = turns.groupby(strata[:-1] or np.zeros(len(turns))).cumcount()
    turns = turns.sort_values("nth", kind="stable", ignore_index=True)[strata].reset_index(names="group")
    shuffled = ordered.assign(
        group=ordered[strata].merge(turns)["group"].to_numpy(),
        third=3 * groups.cumcount() // groups[length].transform("size"),
    ).iloc[random.permutation(len(ordered))]
    in_third = shuffled.groupby(["group", "third"]).cumcount()
    rounds = 3 * in_third + (shuffled["third"] - shuffled["group"]) % 3
    order = np.lexsort([shuffled["group"], rounds])
    return units.iloc[shuffled.index[order]]

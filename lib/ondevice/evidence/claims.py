"""A paper's claims: rows of data/paper/claims.csv, each with the function that makes its value.

A row has the claim in the paper's words, where the notebook shows it, and the rule that judges it, or why nothing here
can. So a new claim is a row there, and a function in the paper's `VALUES`.
"""

from __future__ import annotations

import ast
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pandas as pd

from ondevice import assets
from ondevice.evidence.estimates import Value
from ondevice.evidence.rules import Rule, parsed

_FILE = "data/paper/claims.csv"
# What a claim's quantity depends on. Fixed for all claims of a figure before its records are judged (docs/verdicts.md).
REGIMES = (
    "anywhere",  # the same on every machine: counts, precision, bytes, identity
    "paper",  # the paper's own paces, traces or costs are put in
    "hardware",  # seconds of machines that are not here: untested, whatever the seconds of this one
    "formula",
)


@dataclass(frozen=True)
class Untested:
    """A claim that this repository cannot test, and why."""

    why: str


ELSEWHERE = "The paper's seconds are of hardware that is not here."


@dataclass(frozen=True)
class Claim:
    """A row of a paper's table of claims: the heading of the notebook's section that shows it, its rule, its value.

    value: a function whose parameters are named tables and options; None where the claim is untested. null: the
    parameters of that function that change for the trivial method; None where the rule has the null's value or there is
    none. kind: of a value that is plain numbers. headline: README's words for a number of the paper's abstract.
    regime: of REGIMES; "" where the claim is untested. The rule of a claim about hardware waits for such hardware: our
    value is published without a verdict.
    Raises ValueError for a null of other parameters, and TypeError for one that is a function of its own.
    """

    section: str
    rule: Rule | Untested
    value: Callable[..., Value] | None = None
    null: Mapping[str, typing.Any] | None = None
    kind: str | None = None
    headline: str = ""
    regime: str = ""

    def __post_init__(self) -> None:
        if self.null is None or self.value is None:
            return
        if not isinstance(self.null, Mapping):
            raise TypeError("A null is computed by its claim's own function: give the parameters that change.")
        if unknown := set(self.null) - set(inspect.signature(self.value).parameters):
            raise ValueError(f"A null changes {', '.join(sorted(unknown))}, which its claim's function does not take.")

    @property
    def elsewhere(self) -> bool:
        """Whether its value here is a finding of ours, and no test of the paper's."""
        return self.regime == "hardware"

    def takes(self, tables: Mapping[str, typing.Any]) -> bool:
        """Whether the value can be made of these."""
        return self.value is not None and needed_by(self.value) <= set(tables)

    def values(self, tables: Mapping[str, typing.Any]) -> tuple[Value, Value | None]:
        """(ours, the trivial method's or None), from tables by name; those that nothing asks for are left out."""
        assert self.value is not None
        value = _call(self.value, tables)
        return value, None if self.null is None else _call(self.value, {**tables, **self.null})


class Judged(typing.NamedTuple):
    """How a claim's value is made. null: the parameters of the function that change for the trivial method, or None."""

    value: Callable[..., Value]
    null: Mapping[str, typing.Any] | None


def judged(value: Callable[..., Value], /, **null: typing.Any) -> Judged:
    """A `Judged`; without parameters for a null the rule has its value, or there is none."""
    return Judged(value, null or None)


def read_claims(paper: str, values: Mapping[str, Judged]) -> dict[str, Claim]:
    """A paper's claims by their ids, in the file's order.

    Raises ValueError, naming the claim, where a row has a rule and no function, a function has no row or an untested
    one, a row has neither a rule nor why there is none, or a rule has no known form or no regime.
    """
    table = pd.read_csv(assets.data("paper", "claims.csv"), dtype=str, keep_default_na=False)
    rows = table[table["paper"] == paper].set_index("claim_id")
    if unknown := sorted(set(values) - set(rows.index)):
        raise ValueError(f"{_FILE} has no row of {unknown[0]}.")
    claims = {}
    for claim, row in rows.iterrows():
        try:
            claims[str(claim)] = _claim(row, values.get(str(claim)))
        except (ValueError, SyntaxError) as error:
            raise ValueError(f"{_FILE}, {claim}: {error}") from None
    return claims


def _claim(row: pd.Series, evaluated: Judged | None) -> Claim:
    common = {"kind": row["kind"] or None, "headline": row["headline"]}
    if bool(row["untested"]) == bool(row["reproduced"]):
        raise ValueError("a claim has a rule, or why it is untested.")
    if bool(evaluated) != bool(row["reproduced"]):
        raise ValueError("a claim with a rule has a function for its value, and no other has one.")
    if evaluated is None:
        return Claim(row["section"], Untested(row["untested"]), **common)
    if row["regime"] not in REGIMES:
        raise ValueError(f"a claim with a rule has a regime, one of {', '.join(REGIMES)}, not {row['regime']!r}.")
    rule = Rule(
        row["judged"],
        row["judged_unit"],
        parsed(row["reproduced"]),
        parsed(row["trend"]) if row["trend"] else None,
        ast.literal_eval(row["wrong"]),
        row["null"],
        ast.literal_eval(row["null_value"] or "None"),
        row["note"],
        row["no_null"],
    )
    return Claim(row["section"], rule, evaluated.value, evaluated.null, **common, regime=row["regime"])


def needed_by(function: Callable[..., Value]) -> set[str]:
    """The names of a function's parameters that have no default."""
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name for parameter in parameters if parameter.default is parameter.empty}


def _call(function: Callable[..., Value], tables: Mapping[str, typing.Any]) -> Value:
    return function(**{name: tables[name] for name in inspect.signature(function).parameters if name in tables})

"""When a value supports a claim: rules as rows of a table, whose words follow from their numbers.

A test holds (True), does not (False), or cannot be told (None) of a value with an interval: it is told only where the
whole interval lies in the test's region, or out of it.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from ondevice.evidence.estimates import Estimate, Value, exact

VERDICTS = ("reproduced", "trend", "undecided", "contradicted", "untested")
_NARROWEST = 1e-3  # of the interval, below which no number of samples is named
_Parts = tuple[Estimate, ...]
_Arguments = typing.ParamSpec("_Arguments")


@dataclass(frozen=True)
class Test:
    """A region of one quantity or of several. words: of a unit. form: the call that makes it, as `AtLeast(0.5)`."""

    __test__: typing.ClassVar[bool] = False  # no test of pytest's
    holds: Callable[[_Parts], bool | None]
    words: Callable[[str], str]
    form: str = ""


def _formed(constructor: Callable[_Arguments, Test]) -> Callable[_Arguments, Test]:
    """A constructor whose tests know their form: numbers as floats, so a bound has one form only."""
    signature = inspect.signature(constructor)

    @functools.wraps(constructor)
    def build(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Test:
        bound = signature.bind(*args, **kwargs)
        texts = [*map(_argument, bound.args), *(f"{name}={_argument(x)}" for name, x in bound.kwargs.items())]
        return replace(constructor(*args, **kwargs), form=f"{constructor.__name__}({', '.join(texts)})")

    return build


def _argument(x: typing.Any) -> str:
    if isinstance(x, Test):
        return x.form
    return repr(x) if x is None or isinstance(x, str) else repr(float(x)).removesuffix(".0")


def _region(text: str, low: float = -math.inf, high: float = math.inf, strict: bool = False) -> Test:
    """An interval of the real line. strict: its ends do not belong to it. text: with @ for the unit."""

    def holds(parts: _Parts) -> bool | None:
        (x,) = parts
        if strict:
            return _decide(low < x.low and x.high < high, x.high <= low or x.low >= high)
        return _decide(low <= x.low and x.high <= high, x.high < low or x.low > high)

    return Test(holds, lambda unit: text.replace("@", f" {unit}" if unit else ""))


@_formed
def Near(size: float, *, factor: float = 0.0, within: float = 0.0) -> Test:
    """A positive size within a factor, or any within a distance."""
    if factor:
        return _region(f"{size:g}@ within a factor of {factor:g}", size / factor, size * factor)
    return _region(f"{size:g}@ within {within:g}", size - within, size + within)


@_formed
def AtLeast(x: float) -> Test:
    """A value from x on."""
    return _region(f"at least {x:g}@", low=x)


@_formed
def AtMost(x: float) -> Test:
    """A value up to x."""
    return _region(f"at most {x:g}@", high=x)


@_formed
def Between(low: float, high: float) -> Test:
    """A value from low to high."""
    return _region(f"{low:g} to {high:g}@", low, high)


@_formed
def Above(x: float) -> Test:
    """A value greater than x."""
    return _region(f"above {x:g}@", low=x, strict=True)


@_formed
def Below(x: float) -> Test:
    """A value less than x."""
    return _region(f"below {x:g}@", high=x, strict=True)


@_formed
def Equal(x: float) -> Test:
    """The value x itself."""
    return _region(f"exactly {x:g}@", x, x)


@_formed
def Never(why: str) -> Test:
    """A test that no value passes, and why."""
    return Test(lambda parts: False, lambda unit: f"never, as {why}")


@_formed
def Each(*tests: Test | None) -> Test:
    """A test for each of several quantities, None where one does not matter."""
    return Test(
        lambda parts: _and(t.holds((x,)) for t, x in zip(tests, parts, strict=True) if t),
        lambda unit: f"({', '.join(t.words(unit) if t else 'any' for t in tests)})",
    )


@_formed
def All(test: Test) -> Test:
    """One test for all of several quantities."""
    return Test(lambda parts: _and(test.holds((x,)) for x in parts), lambda unit: f"each {test.words(unit)}")


@_formed
def Any(test: Test) -> Test:
    """One test for at least one of several quantities."""
    return Test(lambda parts: _or(test.holds((x,)) for x in parts), lambda unit: f"one of them {test.words(unit)}")


@_formed
def Both(*tests: Test) -> Test:
    """Tests of the same quantities that must all hold."""
    return Test(lambda parts: _and(t.holds(parts) for t in tests), lambda u: " and ".join(t.words(u) for t in tests))


@_formed
def Either(*tests: Test) -> Test:
    """Tests of the same quantities of which one must hold."""
    return Test(lambda parts: _or(t.holds(parts) for t in tests), lambda u: " or ".join(t.words(u) for t in tests))


@_formed
def Possibly(test: Test) -> Test:
    """A test that is not surely failed. Versions of rules in the lock have it; today's need the whole interval."""
    return Test(lambda parts: test.holds(parts) is not False, lambda unit: f"possibly {test.words(unit)}")


@_formed
def Over(first: int, second: int, test: Test) -> Test:
    """A test of one quantity over another one (their places, from 0), which must be told from 0."""

    def holds(parts: _Parts) -> bool | None:
        a = parts[first]
        b = parts[second]
        if b.low <= 0 <= b.high:
            return None
        ends = [x / y for x in (a.low, a.high) for y in (b.low, b.high)]
        return test.holds((replace(a, value=a.value / b.value, low=min(ends), high=max(ends)),))

    return Test(holds, lambda unit: f"value {first + 1} over value {second + 1} {test.words('')}")


@_formed
def Less(first: int, second: int, test: Test, times: float = 1.0) -> Test:
    """A test of one quantity less some times another one (their places, from 0), which times = -1 adds."""

    def holds(parts: _Parts) -> bool | None:
        a = parts[first]
        b = parts[second]
        low, high = sorted((times * b.low, times * b.high))
        return test.holds((replace(a, value=a.value - times * b.value, low=a.low - high, high=a.high - low),))

    sign = ("less " if times > 0 else "plus ") + (f"{abs(times):g} times " if abs(times) != 1 else "")
    return Test(holds, lambda unit: f"value {first + 1} {sign}value {second + 1} {test.words(unit)}")


_CONSTRUCTORS = {name: function for name, function in globals().items() if hasattr(function, "__wrapped__")}


def parsed(form: str) -> Test:
    """The test that a form makes, as `Each(AtLeast(0.5), None)`.

    Raises ValueError on anything but calls of the constructors above.
    """
    try:
        test = _evaluated(ast.parse(form, mode="eval").body)
    except (SyntaxError, TypeError, ValueError):
        test = None
    if not isinstance(test, Test):
        raise ValueError(f"{form!r} is no form of a test.")
    return test


def _evaluated(node: ast.expr) -> typing.Any:
    """A node's test, number or text; nothing but the constructors is called."""
    if not isinstance(node, ast.Call):
        return ast.literal_eval(node)
    if not isinstance(node.func, ast.Name) or node.func.id not in _CONSTRUCTORS:
        raise ValueError(ast.dump(node.func))
    named = {keyword.arg or "": _evaluated(keyword.value) for keyword in node.keywords}
    return _CONSTRUCTORS[node.func.id](*map(_evaluated, node.args), **named)


@dataclass(frozen=True)
class Rule:
    """When a value reproduces a claim, and when it shows the claim's trend.

    quantity, unit: what is judged. wrong: a value that must be contradicted. null: the trivial method; null_value: what
    it gets, where that holds by definition, such as a saving of 0 over itself. no_null: why there is no trivial method.
    The rule of a paper's claim has one of null and no_null. note: what a reader has to know beside the numbers.
    """

    quantity: str
    unit: str
    reproduced: Test
    trend: Test | None
    wrong: Value
    null: str = ""
    null_value: Value | None = None
    note: str = ""
    no_null: str = ""

    @property
    def null_words(self) -> str:
        """`null: the trivial method`, or why there is none; empty where nothing is said."""
        lines = {"null": self.null, "no null possible": self.no_null}
        return "; ".join(f"{name}: {words}" for name, words in lines.items() if words)

    @property
    def words(self) -> str:
        """The rule as a sentence, from its numbers."""
        trend = f"; trend: {self.trend.words(self.unit)}" if self.trend else ""
        null = f"; {self.null_words}" if self.null_words else ""
        note = f". {self.note}" if self.note else ""
        return f"{self.quantity}: {self.reproduced.words(self.unit)}{trend}{null}{note}"

    def verdict(self, value: Value) -> str:
        """One of VERDICTS but the last, for a value; raises ValueError on a value that is not finite."""
        parts = parts_of(value)
        best = self.reproduced.holds(parts)
        weaker = self.trend.holds(parts) if self.trend else False
        if best or weaker:
            return "reproduced" if best else "trend"
        return "contradicted" if best is False and weaker is False else "undecided"

    def needs(self, value: Value) -> int | None:
        """Samples with which an undecided value would be decided, if it stays where it is; None where that is unknown.

        An interval shrinks with the root of the samples: n over the square of the widest scale of it that decides, of
        the part whose interval alone decides where there is one.
        """
        parts = parts_of(value)
        samples = [x.n for x in parts if x.n is not None]
        low = _NARROWEST
        high = 1.0
        if not samples or not all(math.isfinite(x.high - x.low) for x in parts) or not self._decided(parts, low):
            return None
        for _ in range(40):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self._decided(parts, middle) else (low, middle)
        alone = [
            x.n
            for x in parts
            if x.n is not None and self._decided(tuple(y.scaled(low if y is x else 1) for y in parts), 1)
        ]
        return math.ceil(min(alone or samples) / low**2)

    def _decided(self, parts: _Parts, scale: float) -> bool:
        return self.verdict(tuple(x.scaled(scale) for x in parts)) != "undecided"


def parts_of(value: Value) -> _Parts:
    """A value's quantities as estimates, plain numbers as exact ones. Raises ValueError where one is not finite."""
    several = np.atleast_1d(np.asarray(value, dtype=object))
    parts = tuple(x if isinstance(x, Estimate) else exact(x, "quoted") for x in several)
    if not parts or not all(math.isfinite(x.value) for x in parts):
        raise ValueError(f"A claim cannot be judged by {value!r}.")
    return parts


def _decide(yes: bool, no: bool) -> bool | None:
    return True if yes else False if no else None


def _and(results: Iterable[bool | None]) -> bool | None:
    verdicts = list(results)
    return _decide(all(verdicts), False in verdicts)


def _or(results: Iterable[bool | None]) -> bool | None:
    verdicts = list(results)
    return _decide(True in verdicts, all(x is False for x in verdicts))

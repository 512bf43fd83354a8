"""Intervals of real numbers, with open or closed ends."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

INFINITY = math.inf


class Interval(NamedTuple):
    """The numbers from `low` to `high`. An `open` end is not included. Infinite ends are open."""

    low: float
    high: float
    low_open: bool = False
    high_open: bool = False

    def contains(self, value: float | int) -> bool:
        above = self.low < value or (self.low == value and not self.low_open)
        below = self.high > value or (self.high == value and not self.high_open)
        return above and below

    @property
    def is_positive(self) -> bool:
        return self.low > 0 or (self.low == 0 and self.low_open)

    @property
    def is_negative(self) -> bool:
        return (-self).is_positive

    def __neg__(self) -> Interval:
        return Interval(-self.high, -self.low, self.high_open, self.low_open)

    def __add__(self, other: Any) -> Interval:
        low, high = self.low + other.low, self.high + other.high
        return _interval(
            low, high, self.low_open or other.low_open, self.high_open or other.high_open
        )

    def __mul__(self, other: Any) -> Interval:
        ends = [
            # 0 · ∞ is 0 here: an infinite end stands for arbitrarily large but finite numbers.
            (x * y if x and y else 0.0, x_open or y_open)
            for x, x_open in self._ends()
            for y, y_open in other._ends()
        ]
        zero = self.contains(0) or other.contains(0)

        def end(value: float) -> bool:
            """True if an end is open."""
            # A product is 0 iff a factor is, whichever end the 0 came from.
            if value == 0:
                return not zero
            return all(is_open for number, is_open in ends if number == value)

        low, high = min(n for n, _ in ends), max(n for n, _ in ends)
        return _interval(low, high, end(low), end(high))

    def _ends(self) -> tuple[tuple[float, bool], tuple[float, bool]]:
        return (self.low, self.low_open), (self.high, self.high_open)

    def increasing(self, function: Callable[[Any], Any], strictly: bool = True) -> Interval:
        """The image of the interval under an increasing function."""
        with np.errstate(all="ignore"):
            low, high = float(function(self.low)), float(function(self.high))
        return _interval(low, high, self.low_open and strictly, self.high_open and strictly)

    def within(self, least: float, most: float) -> Interval:
        """The part of the interval on which a function is defined."""
        low, high = max(self.low, least), min(self.high, most)
        return _interval(
            low, high, self.low_open and self.low >= least, self.high_open and self.high <= most
        )

    def hull(self, other: Interval) -> Interval:
        lows = sorted([(self.low, self.low_open), (other.low, other.low_open)])
        highs = sorted([(-self.high, self.high_open), (-other.high, other.high_open)])
        return Interval(lows[0][0], -highs[0][0], lows[0][1], highs[0][1])

    def largest(self, other: Interval) -> Interval:
        """The interval of the maximum of two numbers."""
        # At equal low ends the open one wins, as max(a, b) is at least both. At equal high ends the
        # closed one wins, as it is attained.
        low = max((self.low, self.low_open), (other.low, other.low_open))
        high = max((self.high, not self.high_open), (other.high, not other.high_open))
        return Interval(low[0], high[0], low[1], not high[1])

    @property
    def magnitude(self) -> Interval:
        if self.low >= 0:
            return self
        if self.high <= 0:
            return -self
        high, is_open = max((-self.low, not self.low_open), (self.high, not self.high_open))
        return Interval(0.0, high, False, not is_open)

    def power(self, exponent: int) -> Interval:
        if exponent < 0:
            return self.reciprocal.power(-exponent)
        base = self.magnitude if exponent % 2 == 0 else self
        return base.increasing(lambda end: np.power(end, exponent))

    @property
    def reciprocal(self) -> Interval:
        # If the interval contains 0, the reciprocal takes arbitrarily large values of both signs.
        if not (self.is_positive or self.is_negative):
            return ANY

        def inverse(end: float) -> float:
            # At 0 the sign depends on the side of 0 on which the interval lies.
            return 1 / end if end else math.copysign(INFINITY, self.low + self.high)

        return _interval(inverse(self.high), inverse(self.low), self.high_open, self.low_open)


ANY = Interval(-INFINITY, INFINITY, True, True)
POSITIVE = Interval(0.0, INFINITY, True, True)
NOT_NEGATIVE = Interval(0.0, INFINITY, False, True)


def _interval(low: float, high: float, low_open: bool, high_open: bool) -> Interval:
    # ∞ − ∞: this end is unknown.
    if math.isnan(low):
        low = -INFINITY
    if math.isnan(high):
        high = INFINITY
    return Interval(low, high, low_open or low == -INFINITY, high_open or high == INFINITY)

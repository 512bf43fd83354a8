"""Timing on a shared machine: interleave, repeat, take the minimum, report ratios."""

from __future__ import annotations

import time
from collections.abc import Callable

import jax


def best_times(functions: dict[str, Callable[[], object]], repeats: int = 9) -> dict[str, float]:
    """The least of `repeats` interleaved timings of each function, in seconds; compilation is
    not counted.
    """
    for function in functions.values():
        jax.block_until_ready(function())
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(repeats):
        for name, function in functions.items():
            began = time.perf_counter()
            jax.block_until_ready(function())
            best[name] = min(best[name], time.perf_counter() - began)
    return best


def row(what: str, figure: str, bar: str, met: bool) -> str:
    return f"{what:<66}{figure:>14}   {bar:<12}{'met' if met else 'MISSED'}"

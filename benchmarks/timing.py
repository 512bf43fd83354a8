"""Timing on a shared machine: interleave, repeat, take the minimum, report ratios."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax


def best_times(
    functions: Mapping[Any, Callable[[], object]],
    repeats: int = 9,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Any, float]:
    """The minimum of `repeats` interleaved timings of each function, in seconds, without
    compilation. `time.process_time` measures CPU time, which other programs affect less.
    """
    for function in functions.values():
        jax.block_until_ready(function())
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(repeats):
        for name, function in functions.items():
            began = clock()
            jax.block_until_ready(function())
            best[name] = min(best[name], clock() - began)
    return best


def row(what: str, figure: str, bar: str, met: bool) -> str:
    return f"{what:<66}{figure:>14}   {bar:<12}{'met' if met else 'MISSED'}"

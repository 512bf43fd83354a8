"""The Ising gradient step against a C loop of the same algorithm, compiled and timed in this
run: `make bench`.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import subprocess
import tempfile

# One core for both, set before JAX starts its threads.
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

import jax
from timing import best_times, row

import diffmh
from diffmh.models import ising

# What the tables measure: one alternative.
ONE = diffmh.StochasticDerivative(alternatives=1)

SIZE, CHAINS, SWEEPS, TEMPERATURE = 12, 256, 400, 3.0


def c_loop(name: str):
    """`limit/NAME.c`, compiled with `cc -O3 -march=native`."""
    source = pathlib.Path(__file__).parent / "limit" / f"{name}.c"
    with tempfile.TemporaryDirectory() as directory:
        library = pathlib.Path(directory) / f"{name}.so"
        subprocess.run(
            ["cc", "-O3", "-march=native", "-shared", "-fPIC", "-o", library, source, "-lm"],
            check=True,
        )
        function = getattr(ctypes.CDLL(str(library)), name)
    function.argtypes = [ctypes.c_int] * 3 + [
        ctypes.c_float,
        ctypes.c_uint64,
        ctypes.POINTER(ctypes.c_double),
    ]
    averages = (ctypes.c_double * 2)()

    def run():
        function(SIZE, CHAINS, SWEEPS, TEMPERATURE, 1, averages)
        return tuple(averages)

    return run


def compared(what: str, kernel: diffmh.extend.Kernel, loop) -> None:
    """Time value and gradient of the energy under a kernel and a C loop, and print both."""
    energy = diffmh.expectation(
        ising.energy,
        kernel,
        init=ising.cold(SIZE),
        num_samples=SWEEPS,
        num_chains=CHAINS,
        estimator=ONE,
    )
    key = jax.random.key(0)
    value, gradient = jax.jit(energy), jax.jit(jax.value_and_grad(energy))
    best = best_times(
        {
            "value": lambda: value(TEMPERATURE, key),
            "gradient": lambda: gradient(TEMPERATURE, key),
            "C": loop,
        }
    )
    per_site = {name: 1e9 * seconds / (CHAINS * SWEEPS * SIZE**2) for name, seconds in best.items()}
    print(
        f"jax {jax.__version__}; {SIZE}×{SIZE}, {CHAINS} chains, one core; ns per site: "
        + ", ".join(f"{name} {figure:.1f}" for name, figure in per_site.items())
    )
    ours, theirs = gradient(TEMPERATURE, key), loop()
    print(
        f"E and dE/dT from a cold start: ours {ours[0]:.2f}, {ours[1]:.1f}; C {theirs[0]:.2f},"
        f" {theirs[1]:.1f}"
    )
    ratio = per_site["gradient"] / per_site["C"]
    print(row(f"{what}: value and gradient / a C loop's", f"{ratio:.2f}", "≤ 1", ratio <= 1))


def main():
    compared("Ising, checkerboard", ising.sampler(), c_loop("ising"))


if __name__ == "__main__":
    main()

"""The time of kernels written as functions with draws, relative to the same kernels as classes.

    python benchmarks/functions.py

Derivatives of the samplers of tests/own_kernels.py, in interleaved runs. The minimum CPU time is
printed, which a busy machine affects less than wall time.
"""

from __future__ import annotations

import pathlib
import sys
import time

import jax

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "tests" / "support"))

import own_functions
import own_kernels

_NAMES = ("tempering", "swendsen_wang", "delayed", "multiple_try", "slice")


def _compiled(case, num_samples: int, num_chains: int):
    run = jax.jacfwd(case.expectation(num_samples, num_chains))
    return jax.jit(run).lower(case.at, jax.random.key(0)).compile()


def main(num_samples: int = 2_000, num_chains: int = 64, repeats: int = 40) -> None:
    for name in _NAMES:
        cases = own_kernels.SOUND[name](), own_functions.with_function(name)
        programs = [_compiled(case, num_samples, num_chains) for case in cases]
        least = [float("inf")] * 2
        for seed in range(repeats):
            for which, (case, program) in enumerate(zip(cases, programs, strict=True)):
                key = jax.random.key(seed)
                begin = time.process_time()
                jax.block_until_ready(program(case.at, key))
                least[which] = min(least[which], time.process_time() - begin)
        of_class, of_function = least
        print(
            f"{name:15} class {of_class:.4f} s, function {of_function:.4f} s,"
            f" ratio {of_function / of_class:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()

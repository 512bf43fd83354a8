"""Throughput of a gradient of N(θ, 1) on one CPU device and on two: `python benchmarks/devices.py`.

Needs two free cores. A ratio near 2 says that `expectation(mesh=...)` scales.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

CHAINS, SAMPLES, REPEATS = 65_536, 1_000, 5


def measure() -> float:
    """Chain steps per second on all devices of this process."""
    import jax
    import numpy as np
    from jax.sharding import Mesh

    import diffmh
    from diffmh.models import gaussian

    mean = diffmh.expectation(
        lambda theta, x: x,
        gaussian.sampler(),
        init=0.0,
        num_samples=SAMPLES,
        num_chains=CHAINS,
        mesh=Mesh(np.array(jax.devices()), ("chains",)),
    )
    gradient = jax.jit(jax.value_and_grad(mean))
    jax.block_until_ready(gradient(0.5, jax.random.key(0)))
    times = []
    for seed in range(REPEATS):
        begin = time.perf_counter()
        jax.block_until_ready(gradient(0.5, jax.random.key(seed)))
        times.append(time.perf_counter() - begin)
    return CHAINS * SAMPLES / min(times)


def on_devices(count: int) -> float:
    flags = f"--xla_force_host_platform_device_count={count}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, __file__, "one"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


if __name__ == "__main__":
    if sys.argv[1:] == ["one"]:
        print(measure())
    else:
        one, two = on_devices(1), on_devices(2)
        print(f"1 device {one:.3g} chain steps per second, 2 devices {two:.3g}: {two / one:.2f}×")

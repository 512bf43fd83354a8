"""The same numbers on two hosts as on one.

    python examples/multihost.py

starts two processes on this machine, compares their results with those of a single process, and
prints both. On your own hosts, start on each of them

    python examples/multihost.py --coordinator HOST_0:1234 --processes 2 --process NUMBER

with NUMBER 0 on HOST_0 and 1 on the other. With `--checkpoint DIRECTORY`, on a file system that
they share, a run can continue after one of them has died: start the same command again on both.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys

import jax

import diffmh
from diffmh.models import gaussian

THETA = 0.5


def connected(coordinator: str, processes: int, process: int) -> None:
    """Connect the hosts; call it before any other use of JAX. A host that does not answer for 20
    seconds counts as dead (JAX's defaults are 100 seconds, and 300 at the end).
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator,
        processes,
        process,
        initialization_timeout=60,
        heartbeat_timeout_seconds=20,
        shutdown_timeout_seconds=10,
    )


def found(num_samples: int, checkpoint: diffmh.Checkpoint | None = None) -> dict[str, float]:
    """The mean of N(θ, 1) and its derivative. The code does not depend on the number of hosts."""
    mean = diffmh.expectation(
        lambda theta, x: x,
        gaussian.sampler(),
        init=0.0,
        num_samples=num_samples,
        num_chains=64,
        mesh=jax.make_mesh((jax.device_count(),), ("chains",)),
    )
    report = mean.run(THETA, jax.random.key(0), checkpoint=checkpoint)
    value, gradient = jax.value_and_grad(mean)(THETA, jax.random.key(1))
    return {
        "value": float(report.value),
        "value_error": float(report.value_error),
        "gradient": float(report.gradient),
        "gradient_error": float(report.gradient_error),
        "value of another key": float(value),
        "gradient of another key": float(gradient),
    }


def on_two_hosts(given: argparse.Namespace) -> dict[str, float]:
    """The results of two processes that are started here."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    line = [sys.executable, __file__, "--coordinator", coordinator, "--processes", "2"]
    line += ["--num-samples", str(given.num_samples), "--seconds", str(given.seconds)]
    line += [] if given.checkpoint is None else ["--checkpoint", given.checkpoint]
    started = [
        subprocess.Popen([*line, "--process", str(number)], stdout=subprocess.PIPE, text=True)
        for number in range(2)
    ]
    outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        sys.exit("a process has failed: see above")
    # The last line of the output: Gloo prints messages before it.
    one, other = (json.loads(output.splitlines()[-1]) for output in outputs)
    assert one == other, "every host has all the numbers"
    return one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--coordinator")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--process", type=int)
    parser.add_argument("--num-samples", type=int, default=2_000)
    parser.add_argument("--checkpoint")
    parser.add_argument("--seconds", type=float, default=60.0, help="between two checkpoints")
    given = parser.parse_args()
    if given.process is not None:
        connected(given.coordinator, given.processes, given.process)
        kept = given.checkpoint and diffmh.Checkpoint(given.checkpoint, seconds=given.seconds)
        try:
            print(json.dumps(found(given.num_samples, kept)))
        except ConnectionError as lost:
            print(lost, file=sys.stderr, flush=True)
            os._exit(1)  # At once: otherwise JAX would wait for the dead host.
        return
    two, one = on_two_hosts(given), found(given.num_samples)
    print(f"{'':<26}{'two processes':>16}{'one':>16}{'relative difference':>22}")
    for name in one:
        apart = abs(two[name] / one[name] - 1)
        print(f"{name:<26}{two[name]:>16.8f}{one[name]:>16.8f}{apart:>22.1e}")


if __name__ == "__main__":
    main()

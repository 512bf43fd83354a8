"""The cases that `tests/test_hosts.py` runs in each of two processes that work together: results
or errors, by name, as JSON in the last line.

    python hosts_cases.py COORDINATOR PROCESS DIRECTORY
"""

from __future__ import annotations

import json
import pathlib
import sys

import jax
import numpy as np


def refused(line) -> str:
    try:
        line()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def results(own: pathlib.Path, shared: pathlib.Path) -> dict:
    import diffmh
    from diffmh.models import gaussian
    from diffmh.runs.checkpoint import Checkpoint, Store
    from diffmh.runs.devices import Hosts, check_mesh

    mesh = jax.make_mesh((jax.device_count(),), ("chains",))
    hosts, number = Hosts(check_mesh(mesh)), jax.process_index()
    walk, key = gaussian.sampler(), jax.random.key(0)
    mean = diffmh.expectation(
        lambda t, x: x, walk, init=0.0, num_samples=5, num_chains=4, mesh=mesh
    )
    options = {"init": 0.0, "num_samples": 5, "num_chains": 4, "mesh": mesh}
    draws = diffmh.sample(walk, 0.5, key, **options).posterior.x.values

    def open_store(directory):
        with Store(Checkpoint(directory), hosts):
            pass

    if number == 0:
        (own / "file").write_text("no checkpoint's")
    return {
        "each": hosts.each(7 + number).tolist(),
        "agreed": hosts.agree(7 + number),
        "leads": hosts.leads,
        "alone": [Hosts().several, Hosts().agree(7 + number)],
        "draws": draws.tolist(),
        "the same": refused(lambda: hosts.refuse_different("theta", np.arange(3.0), key)),
        "another theta": refused(lambda: mean.run(0.5 + number, key)),
        "another key": refused(lambda: mean.run(0.5, jax.random.key(number))),
        "draws on disk": refused(lambda: diffmh.sample(walk, 0.5, key, **options, checkpoint=own)),
        "ascent on disk": refused(lambda: ascent(diffmh, own)),
        "a directory of each": refused(lambda: open_store(own / "apart")),
        "first cannot": refused(lambda: open_store(own)),
        "shared": refused(lambda: open_store(shared)),
    }


def ascent(diffmh, directory):
    import optax

    objective = lambda theta, key: theta**2
    options = {"optimizer": optax.sgd(0.1), "num_iterations": 2, "checkpoint": directory}
    return diffmh.optimise(objective, 0.5, jax.random.key(0), **options)


if __name__ == "__main__":
    coordinator, process, directory = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, 2, process, shutdown_timeout_seconds=30)
    own = directory / str(process)
    own.mkdir()
    print(json.dumps(results(own, directory / "shared")))

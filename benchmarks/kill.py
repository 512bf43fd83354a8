"""kill −9 at random times in `.run`, `optimise` and `sample`: does the same call, made again, end
with the same digits, and is every checkpoint on disk complete?

`python benchmarks/kill.py [--kills 50] [--seed 0]`; a run is killed a few times before it may
finish.
"""

from __future__ import annotations

import argparse
import hashlib
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

BETWEEN = 5  # At most this many kills of one run.


def worker(kind: str, directory: str) -> None:
    """Compile, report it, run with a checkpoint every 0.2 s, and print a digest."""
    import jax
    import numpy as np
    import optax

    import diffmh
    from diffmh.models import gaussian, mixture

    key = jax.random.key(0)
    place = diffmh.Checkpoint(directory, seconds=0.2) if directory else None

    def run(**options):
        f = lambda theta, x: (x, x**2)
        length = {"num_samples": 100_000, "num_chains": 16}
        mean = diffmh.expectation(f, gaussian.sampler(), init=0.0, **length)
        return mean.run(0.5, key, **options)

    def optimise(**options):
        length = {"num_samples": 500, "burn_in": 20, "num_chains": 8}
        p = diffmh.expectation(mixture.indicator, mixture.sampler(), init=0, **length)
        entropy = diffmh.compose(lambda h, p: mixture.entropy(p), p)
        adam = optax.adam(0.1)
        options = {"optimizer": adam, "num_iterations": 25, "maximise": True} | options
        return diffmh.optimise(entropy, 2.0, key, **options)

    def sample(**options):
        length = {"num_samples": 60_000, "num_chains": 16, "thinning": 3, "burn_in": 100}
        tree = diffmh.sample(gaussian.sampler(), 0.5, key, init=0.0, **length, **options)
        groups = ("posterior", "sample_stats")
        return [tree[group][name].values for group in groups for name in tree[group].data_vars]

    chosen = {"run": run, "optimise": optimise, "sample": sample}[kind]
    chosen()
    print("compiled", flush=True)
    began = time.monotonic()
    result = chosen(checkpoint=place)
    leaves = [leaf for leaf in jax.tree.leaves(result) if not isinstance(leaf, str)]
    digest = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest()
    print(digest, time.monotonic() - began, flush=True)


def started(kind: str, directory: str) -> subprocess.Popen:
    command = [sys.executable, __file__, "--worker", kind, directory]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "compiled\n"
    return process


def ended(process: subprocess.Popen) -> tuple[str, float]:
    output, _ = process.communicate()
    assert process.returncode == 0, "the worker failed"
    digest, seconds = output.split()
    return digest, float(seconds)


def corrupt(directory: pathlib.Path) -> int:
    """The number of numbered checkpoints that are not complete."""
    from diffmh.runs.checkpoint import Checkpoint, Store

    count = 0
    if not directory.exists():
        return count
    with Store(Checkpoint(directory)) as store:
        everything = store.numbers()
        for number in everything:
            store.numbers = lambda number=number: [number]
            try:
                store.load()
            except ValueError:
                count += 1
    return count


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", nargs=2)
    chosen = parser.parse_args()
    if chosen.worker:
        worker(*chosen.worker)
        return
    draw = random.Random(chosen.seed)
    kinds = ("run", "optimise", "sample")
    total = broken = wrong = finished = 0
    for kind, share in zip(kinds, range(3), strict=True):
        wanted = chosen.kills // 3 + (share < chosen.kills % 3)
        with tempfile.TemporaryDirectory() as parent:
            expected, _ = ended(started(kind, ""))
            place = pathlib.Path(parent) / "first"
            first, duration = ended(started(kind, str(place)))
            assert first == expected, f"{kind}: checkpoints change the digits"
            kills, attempt = 0, 0
            while kills < wanted:
                place = pathlib.Path(parent) / f"attempt-{attempt}"
                attempt += 1
                resumed = 0
                while kills < wanted and resumed < BETWEEN:
                    process = started(kind, str(place))
                    time.sleep(draw.uniform(0.0, duration / 2))
                    process.send_signal(signal.SIGKILL)
                    process.wait()
                    if process.stdout is not None and process.stdout.read():
                        break  # It had finished before.
                    kills, resumed = kills + 1, resumed + 1
                    broken += corrupt(place)
                digest, _ = ended(started(kind, str(place)))
                wrong += resumed * (digest != expected)
                finished += 1
            total += kills
            print(f"{kind}: {kills} kills in {attempt} runs of {duration:.1f} s", flush=True)
    print(
        f"{total} kills: {total - wrong} bit-identical resumes, {broken} corrupt checkpoints"
        f" ({finished} runs ended)"
    )


if __name__ == "__main__":
    main()

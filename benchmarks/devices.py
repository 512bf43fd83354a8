"""Throughput of value and gradient on one core and on two: `python benchmarks/devices.py`.

Each line is a process of its own, kept waiting while another is at work:

- `1 core`: one device, pinned to a core;
- `2 cores`: two devices of one process, the chains shared out by `expectation(mesh=...)`;
- `limit`: two processes, each pinned to a core of its own with half of the chains, which is what
  the machine itself can do with two cores.

The least of interleaved runs counts. On a machine that others use, wall time says little: beside
it stands an estimate of what it would be on a quiet one. Of a process with one core it is the CPU
time of all threads, which share the core; of one with two it is the wall time less the time that
the busiest thread waited for a core. What that thread waited for another that waited for a core is
still in it, so that the ratio is rather too low.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time

# Chain steps of one run: half a second or so on one core.
PROBLEMS = {
    "N(θ, 1), 65,536 chains": {"name": "normal", "chains": 65_536, "steps": 256},
    "Ising 64×64, 256 chains": {"name": "ising", "chains": 256, "steps": 32},
}
REPEATS = 7


def expectation(name: str, chains: int, steps: int):
    import jax

    import diffmh
    from diffmh.models import gaussian, ising

    mesh = jax.make_mesh((jax.device_count(),), ("chains",))
    # What the tables measure: one alternative.
    one = diffmh.StochasticDerivative(alternatives=1)
    options = {"num_samples": steps, "num_chains": chains, "mesh": mesh, "estimator": one}
    if name == "normal":
        return diffmh.expectation(lambda theta, x: x, gaussian.sampler(), init=0.0, **options), 0.5
    return diffmh.expectation(ising.energy, ising.sampler(), init=ising.cold(64), **options), 3.0


def thread_times() -> dict[str, tuple[float, float]]:
    """For each thread of this process the seconds that it ran, and that it waited for a core."""
    found = {}
    for task in pathlib.Path("/proc/self/task").glob("*"):
        try:
            ran, waited, _ = (task / "schedstat").read_text().split()
        except OSError:
            continue
        found[task.name] = 1e-9 * int(ran), 1e-9 * int(waited)
    return found


def work(problem: str, devices: int, cores: list[int]) -> None:
    """Runs once for each line that comes in: seconds on the clock, of the processor, and on the
    clock of a quiet machine.
    """
    os.sched_setaffinity(0, cores)
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    mean, theta = expectation(**json.loads(problem))
    gradient, key = jax.jit(jax.value_and_grad(mean)), jax.random.key(0)
    jax.block_until_ready(gradient(theta, key))
    print("ready", flush=True)
    for _ in sys.stdin:
        before, began = thread_times(), time.perf_counter()
        jax.block_until_ready(gradient(theta, key))
        seconds = time.perf_counter() - began
        spent = []
        for name, (ran, waited) in thread_times().items():
            ran_before, waited_before = before.get(name, (0.0, 0.0))
            spent.append((ran - ran_before, waited - waited_before))
        total, (_, waited) = sum(ran for ran, _ in spent), max(spent)
        quiet = total if len(cores) == 1 else seconds - waited
        print(json.dumps([seconds, total, quiet]), flush=True)


class Worker:
    def __init__(self, problem: dict, devices: int, cores: list[int]):
        given = [json.dumps(problem), str(devices), json.dumps(cores)]
        self.process = subprocess.Popen(
            [sys.executable, __file__, *given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._in, self._out = self.process.stdin, self.process.stdout
        assert self._out.readline() == "ready\n"

    def go(self) -> None:
        print("go", file=self._in, flush=True)

    def times(self) -> list[float]:
        return json.loads(self._out.readline())

    def end(self) -> None:
        self._in.close()
        self.process.wait()


def measure(problem: dict, cores: list[int]) -> dict[str, list[float]]:
    """The least wall time, CPU time and wall time of a quiet machine of each line."""
    half = problem | {"chains": problem["chains"] // 2}
    lines = {
        "1 core": [Worker(problem, 1, cores[:1])],
        "2 cores": [Worker(problem, 2, cores)],
        "limit": [Worker(half, 1, [core]) for core in cores],
    }
    best = dict.fromkeys(lines, [float("inf")] * 3)
    for _ in range(REPEATS):
        for name, workers in lines.items():
            for worker in workers:
                worker.go()
            wall, total, quiet = zip(*(worker.times() for worker in workers), strict=True)
            found = [max(wall), sum(total), max(quiet)]
            best[name] = list(map(min, best[name], found))
    for workers in lines.values():
        for worker in workers:
            worker.end()
    return best


def main() -> None:
    import jax

    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        sys.exit("two cores are needed")
    print(f"jax {jax.__version__}, {REPEATS} interleaved runs, the least of each; bar 1.8×")
    head = f"{'':<24}{'':>9}{'wall s':>9}{'CPU s':>9}{'quiet s':>9}{'wall':>8}{'quiet':>8}"
    print(head)
    for title, problem in PROBLEMS.items():
        best = measure(problem, cores)
        one = best["1 core"]
        for name, (wall, total, quiet) in best.items():
            ratios = f"{one[0] / wall:>7.2f}×{one[2] / quiet:>7.2f}×"
            print(f"{title:<24}{name:>9}{wall:>9.3f}{total:>9.3f}{quiet:>9.3f}{ratios}")


if __name__ == "__main__":
    if sys.argv[1:]:
        work(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
    else:
        main()

"""Another commit beside this one: times of every row of `large.py`, interleaved, and whether the
values and gradients are the same bit for bit.

    git worktree add /tmp/before COMMIT
    python benchmarks/against.py /tmp/before [PART ...] [--alert 1.5]

Each commit has a process of its own on one core, which waits while the other is at work; times are
the least of several, of the processor. Rows whose text is the same in both commits are compared.
With `--alert` it fails if a row takes that many times as long as before.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).parent.parent
REPEATS = 9

# The methods of `large.py` that are diffmh's.
OURS = ("value", "gradient", "covariance, gradient", "two-sided", "one-sided", "score")


def work(parts: list[str]) -> None:
    """Answers each line, the number of a problem and a method, with its seconds and a digest."""
    import hashlib

    import jax
    import large
    import numpy as np

    problems = [problem for part in parts for problem in large.PARTS[part](False)]
    names = [
        (number, problem.name, method)
        for number, problem in enumerate(problems)
        for method in problem.methods
        if method in OURS
    ]
    print(json.dumps(names), flush=True)
    for line in sys.stdin:
        number, _, method = json.loads(line)
        run = problems[number].methods[method][0]
        began = time.process_time()
        result = jax.block_until_ready(run())
        seconds = time.process_time() - began
        bits = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(result))
        print(json.dumps([seconds, hashlib.sha256(bits).hexdigest()]), flush=True)


class Worker:
    def __init__(self, tree: pathlib.Path, parts: list[str]):
        # This file is this commit's in both; what it imports is the tree's.
        paths = [tree / "benchmarks", tree / "src", HERE / "benchmarks"]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"import against; against.work({parts!r})"],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.names = [tuple(name) for name in self._answer()]

    def _answer(self):
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit("a worker ended: its error is above")
        return json.loads(line)

    def run(self, name: tuple) -> tuple[float, str]:
        assert self.process.stdin is not None
        print(json.dumps(name), file=self.process.stdin, flush=True)
        return tuple(self._answer())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tree", type=pathlib.Path, help="a checkout of the other commit")
    parser.add_argument("parts", nargs="*", help="parts of large.py")
    parser.add_argument("--alert", type=float, default=float("inf"), metavar="RATIO")
    options = parser.parse_args()
    parts = options.parts or ["normal", "many_means", "mixture_of_three", "lattices", "machine"]
    # One after the other: a worker's programs are compiled as it runs them first.
    trees = {"then": options.tree.resolve(), "now": HERE}
    workers = {which: Worker(tree, parts) for which, tree in trees.items()}
    print(f"{'':<62}{'then ms':>9}{'now ms':>9}{'ratio':>7}   bits")
    slower = []
    for name in workers["now"].names:
        if name not in workers["then"].names:
            continue
        best = dict.fromkeys(workers, float("inf"))
        digests = {which: worker.run(name)[1] for which, worker in workers.items()}
        for _ in range(REPEATS):
            for which, worker in workers.items():
                best[which] = min(best[which], worker.run(name)[0])
        same = "the same" if len(set(digests.values())) == 1 else "DIFFERENT"
        then, now = 1e3 * best["then"], 1e3 * best["now"]
        title = f"{name[1]}: {name[2]}"
        print(f"{title:<62}{then:>9.2f}{now:>9.2f}{now / then:>7.3f}   {same}", flush=True)
        if now >= options.alert * then:
            slower.append(title)
    if slower:
        sys.exit(f"{options.alert} times as slow as before, or more: {'; '.join(slower)}")


if __name__ == "__main__":
    main()

"""Running experiments: compute, save, plot what was saved, and put all of it on a page."""

from __future__ import annotations

import os
import pathlib
import secrets
from collections.abc import Iterator

from ..reports.display import aligned
from ..runs.files import local_path
from . import page
from .catalogue import longest_first, named
from .experiment import COLUMNS, Claim, Experiment, Refused, Size
from .progress import Status
from .saved import Saved, compute_and_save, load, load_all
from .workers import in_processes

# Data, figures and page of all six experiments take less than a third of it.
ROOM = 16 * 2**20


class Stopped(Exception):
    """Ctrl-C, or a file that could not be written. Its text says what is finished and how to go
    on.
    """


def reproduce(
    names: list[str],
    out: pathlib.Path,
    seed: int = 0,
    size: Size = Size.DEMO,
    again: bool = False,
    num_processes: int | None = None,
) -> bool:
    """Run the experiments of these names (all for none), write `out` and print their table; True if
    every verdict is good.

    Each experiment has a key of its own, so it finds the same numbers alone as among others. What
    the same code has already saved in `out` with the same seed and size is taken up, unless
    `again`. Several experiments are computed in `num_processes` processes (by default two, or one
    on a single core); the page is written anew whenever one is finished. Results go to stdout,
    progress to stderr.

    Raises `Refused` for an unknown name, a seed that JAX would fold, a number of processes below
    1, and an `out` that cannot be written, before anything is computed; and `Stopped`.
    """
    experiments = named(names)
    if num_processes is not None and num_processes < 1:
        raise Refused(f"`--processes` must be at least 1, got {num_processes}.")
    if not 0 <= seed < 2**32:
        # Without 64-bit integers JAX keeps a seed's low 32 bits: two seeds would share numbers.
        raise Refused(f"`--seed` must be at least 0 and below 2³² = 4294967296, got {seed}.")
    try:
        out = local_path(out, "--out")
    except ValueError as error:
        raise Refused(str(error)) from None
    make_room(out)
    finished = {} if again else _taken_up(experiments, out, seed, size)
    left = [experiment for experiment in experiments if experiment.name not in finished]
    progress = Status("")
    for experiment in experiments:
        if experiment.name in finished:
            progress.end(f"{experiment.name}: taken from {out} (--again computes it anew)")
    try:
        page.write(out, load_all(out), left)
        for experiment in _computed(list(left), out, seed, size, num_processes):
            saved = load(experiment, out)
            assert saved is not None, "what was saved can be read"
            finished[experiment.name] = saved
            left.remove(experiment)
            # The page fills as figures arrive.
            page.write(out, load_all(out), left)
            count = f"{len(finished)} of {len(experiments)}"
            progress.end(f"{experiment.name}: finished, {count} ({progress.seconds:.0f} s)")
    except (KeyboardInterrupt, OSError) as stop:
        # The page that is left says nothing of figures to come, and does not reload itself.
        page.write(out, load_all(out))
        raise Stopped(_stopped(stop, left, list(finished.values()), out)) from stop
    rows = [row for experiment in experiments for row in finished[experiment.name].rows]
    print(table(rows))
    failed = sum(row.passed is False for row in rows)
    verdict = f"{failed} of {len(rows)} verdicts FAILED." if failed else "All verdicts are good."
    print(f"\n{verdict} The page: {out / 'index.html'}")
    return not failed


def _taken_up(
    experiments: list[Experiment], out: pathlib.Path, seed: int, size: Size
) -> dict[str, Saved]:
    """The experiments that this code has saved already with the same seed and size, by name."""
    found = {experiment.name: load(experiment, out) for experiment in experiments}
    return {
        name: saved
        for name, saved in found.items()
        if saved is not None and (saved.seed, saved.size) == (seed, size)
    }


def _computed(
    experiments: list[Experiment],
    out: pathlib.Path,
    seed: int,
    size: Size,
    num_processes: int | None,
) -> Iterator[Experiment]:
    """Each experiment, when it is computed and saved."""
    if num_processes is None:
        num_processes = min(2, os.cpu_count() or 1)
    if min(num_processes, len(experiments)) > 1:
        yield from in_processes(longest_first(experiments), out, seed, size, num_processes)
        return
    for i, experiment in enumerate(experiments, start=1):
        progress = Status(f"[{i}/{len(experiments)}] {experiment.name}")
        compute_and_save(experiment, out, seed, size, progress)
        yield experiment


def make_room(out: pathlib.Path) -> None:
    """Make the directory, and raise `Refused` unless all will fit into it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise Refused(
            f"`--out {out}` is a file: name a directory, which is made if need be."
        ) from None
    except OSError as error:
        raise Refused(f"`--out {out}` cannot be made: {error.strerror}.") from None
    index = out / "index.html"
    if index.exists() and page.OURS not in index.read_text(encoding="utf-8", errors="replace"):
        raise Refused(
            f"`--out {out}` holds an `index.html` that is not ours and would be overwritten: name"
            " another directory."
        )
    probe = out / f".room-{secrets.token_hex(8)}"
    try:
        probe.touch(exist_ok=False)
        try:
            probe.write_bytes(b"\1" * ROOM)
        finally:
            probe.unlink()
    except OSError as error:
        raise Refused(
            f"`--out {out}` cannot take {ROOM // 2**20} MB: {error.strerror}. Name another"
            " directory, or make room."
        ) from None


def _stopped(
    stop: BaseException, left: list[Experiment], finished: list[Saved], out: pathlib.Path
) -> str:
    why = f" ({stop})" if isinstance(stop, OSError) else ""
    missing = ", ".join(experiment.name for experiment in left)
    done = ", ".join(saved.experiment.name for saved in finished) or "nothing yet"
    page = f"; their page: {out / 'index.html'}" if finished else ""
    return (
        f"\nStopped{why}. Finished: {done}{page}. Not finished: {missing}.\n"
        "The same command continues: what is finished is not computed again."
    )


def table(rows: list[Claim]) -> str:
    """The table for a terminal."""
    verdict = {True: "good", False: "FAILED", None: "—"}
    lines = [COLUMNS, *((*row[:-1], verdict[row.passed]) for row in rows)]
    rule = ["-" * max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(aligned([lines[0], rule, *lines[1:]]))

"""Run experiments: compute, save, plot the saved data, and write the page."""

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

# The data, figures and page of all six experiments need less than a third of this.
ROOM = 16 * 2**20


class Stopped(Exception):
    """Ctrl-C, or a file that could not be written. Its text says what is finished and how to
    continue.
    """


def reproduce(
    names: list[str],
    out: pathlib.Path,
    seed: int = 0,
    size: Size = Size.DEMO,
    again: bool = False,
    num_processes: int | None = None,
) -> bool:
    """Run the experiments of these names (all by default), write to `out` and print their table.
    Return True if every verdict is good.

    Each experiment has its own key, so it gives the same numbers alone or with others. Results
    that the same code has saved in `out` with the same seed and size are reused, unless `again`.
    Several experiments are computed in `num_processes` processes (by default two, or one on a
    single core); the page is rewritten whenever one is finished. Results go to stdout, progress to
    stderr.

    Before computing anything, raises `Refused` for an unknown name, a seed that JAX would truncate,
    a number of processes below 1, and an `out` that cannot be written. May raise `Stopped`.
    """
    experiments = named(names)
    if num_processes is not None and num_processes < 1:
        raise Refused(f"`--processes` must be at least 1, got {num_processes}.")
    if not 0 <= seed < 2**32:
        # Without 64-bit integers JAX uses a seed's low 32 bits: two seeds would give equal numbers.
        raise Refused(f"`--seed` must be at least 0 and below 2³² = 4294967296, got {seed}.")
    try:
        out = local_path(out, "--out")
    except ValueError as error:
        raise Refused(str(error)) from None
    make_room(out)
    known = [] if again else [load(experiment, out) for experiment in experiments]
    # Those that this code has saved with the same seed and size.
    same = [one for one in known if one is not None and (one.seed, one.size) == (seed, size)]
    finished = {one.experiment.name: one for one in same}
    left = [experiment for experiment in experiments if experiment.name not in finished]
    progress = Status("")
    for experiment in experiments:
        if experiment.name in finished:
            progress.end(f"{experiment.name}: taken from {out} (--again computes it again)")
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
        # The final page mentions no pending figures and does not reload itself.
        page.write(out, load_all(out))
        raise Stopped(_stopped(stop, left, list(finished.values()), out)) from stop
    rows = [row for experiment in experiments for row in finished[experiment.name].rows]
    print(table(rows))
    failed = sum(row.passed is False for row in rows)
    verdict = f"{failed} of {len(rows)} verdicts FAILED." if failed else "All verdicts are good."
    print(f"\n{verdict} The page: {out / 'index.html'}")
    return not failed


def _computed(
    experiments: list[Experiment],
    out: pathlib.Path,
    seed: int,
    size: Size,
    num_processes: int | None,
) -> Iterator[Experiment]:
    """Each experiment, once it is computed and saved."""
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
    """Create the directory; raise `Refused` if the results do not fit."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise Refused(
            f"`--out {out}` is a file: name a directory, which is created if needed."
        ) from None
    except OSError as error:
        raise Refused(f"`--out {out}` cannot be created: {error.strerror}.") from None
    index = out / "index.html"
    if index.exists() and page.OURS not in index.read_text(encoding="utf-8", errors="replace"):
        raise Refused(
            f"`--out {out}` holds an `index.html` that diffmh did not write and would overwrite:"
            " name another directory."
        )
    # A full disk or a missing permission must show now, not after minutes of computing.
    probe = out / f".room-{secrets.token_hex(8)}"
    try:
        probe.touch(exist_ok=False)
        try:
            probe.write_bytes(b"\1" * ROOM)
        finally:
            probe.unlink()
    except OSError as error:
        raise Refused(
            f"`--out {out}`: cannot write {ROOM // 2**20} MB: {error.strerror}. Name another"
            " directory, or free some space."
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
        "The same command continues: finished figures are not computed again."
    )


def table(rows: list[Claim]) -> str:
    """The table as text."""
    verdict = {True: "good", False: "FAILED", None: "—"}
    lines = [COLUMNS, *((*row[:-1], verdict[row.passed]) for row in rows)]
    rule = ["-" * max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(aligned([lines[0], rule, *lines[1:]]))

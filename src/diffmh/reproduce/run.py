"""Running experiments: compute, save, plot what was saved, and put all of it on a page."""

from __future__ import annotations

import pathlib
import secrets

import jax

from ..reports.display import aligned
from ..runs.files import local_path
from . import page
from .catalogue import named
from .experiment import COLUMNS, Claim, Experiment, Refused
from .progress import Status
from .saved import Saved, load, load_all, save

# Data, figures and page of all six experiments take less than a third of it.
ROOM = 16 * 2**20


class Stopped(Exception):
    """Ctrl-C, or a file that could not be written. Its text says what is finished and how to go
    on.
    """


def reproduce(
    names: list[str], out: pathlib.Path, seed: int = 0, fast: bool = False, again: bool = False
) -> bool:
    """Run the experiments of these names (all for none), write `out` and print their table; True if
    every verdict is good.

    Each experiment has a key of its own, so it finds the same numbers alone as among others. What
    the same code has already saved in `out` with the same seed and size is taken up, unless
    `again`. Results go to stdout, progress to stderr.

    Raises `Refused` for an unknown name, a seed that JAX would fold, and an `out` that cannot be
    written, before anything is computed; and `Stopped`.
    """
    experiments = named(names)
    if not 0 <= seed < 2**32:
        # Without 64-bit integers JAX keeps a seed's low 32 bits: two seeds would share numbers.
        raise Refused(f"`--seed` must be at least 0 and below 2³² = 4294967296, got {seed}.")
    try:
        out = local_path(out, "--out")
    except ValueError as error:
        raise Refused(str(error)) from None
    make_room(out)
    finished: list[Saved] = []
    try:
        for i, experiment in enumerate(experiments, start=1):
            progress = Status(f"[{i}/{len(experiments)}] {experiment.name}")
            finished.append(_one(experiment, out, seed, fast, again, progress))
            page.write(out, load_all(out))
    except (KeyboardInterrupt, OSError) as stop:
        raise Stopped(_stopped(stop, experiments, finished, out)) from stop
    rows = [row for saved in finished for row in saved.rows]
    print(table(rows))
    failed = sum(row.passed is False for row in rows)
    verdict = f"{failed} of {len(rows)} verdicts FAILED." if failed else "All verdicts are good."
    print(f"\n{verdict} The page: {out / 'index.html'}")
    return not failed


def _one(
    experiment: Experiment, out: pathlib.Path, seed: int, fast: bool, again: bool, progress: Status
) -> Saved:
    found = None if again else load(experiment, out)
    if found is not None and (found.seed, found.fast) == (seed, fast):
        progress.end(f"taken from {out} (--again computes it anew)")
        return found
    progress.end(f"{experiment.title} …")
    key = jax.random.fold_in(jax.random.key(seed), experiment.figure)
    save(experiment, experiment.compute(key, fast, progress), out, seed, fast)
    progress.end(f"{progress.seconds:.0f} s")
    saved = load(experiment, out)
    assert saved is not None, "what was saved can be read"
    return saved


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
    stop: BaseException, experiments: list[Experiment], finished: list[Saved], out: pathlib.Path
) -> str:
    at = experiments[min(len(finished), len(experiments) - 1)].name
    why = f" ({stop})" if isinstance(stop, OSError) else ""
    done = ", ".join(saved.experiment.name for saved in finished) or "nothing yet"
    page = f"; their page: {out / 'index.html'}" if finished else ""
    return (
        f"\nStopped at {at}{why}. Finished: {done}{page}.\n"
        "The same command goes on from there: what is finished is not computed again."
    )


def table(rows: list[Claim]) -> str:
    """The table for a terminal."""
    verdict = {True: "good", False: "FAILED", None: "—"}
    lines = [COLUMNS, *((*row[:-1], verdict[row.passed]) for row in rows)]
    rule = ["-" * max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(aligned([lines[0], rule, *lines[1:]]))

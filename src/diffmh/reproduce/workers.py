"""Compute experiments in separate processes, a few at a time."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import pathlib
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .catalogue import EXPERIMENTS
from .experiment import Experiment, Size
from .progress import Status
from .saved import compute_and_save

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

# Processes share a terminal, so they write few lines and overwrite none.
PAUSE = 15.0


def in_processes(
    experiments: list[Experiment], out: pathlib.Path, seed: int, size: Size, num_processes: int
) -> Iterator[Experiment]:
    """Compute and save the experiments, at most `num_processes` at a time, and yield each when its
    files are complete. If an `OSError` stops one of them, end the others and raise it.
    """
    # Forking a process that has started JAX's threads can deadlock, so workers are spawned.
    context = multiprocessing.get_context("spawn")
    waiting = list(experiments)
    running: dict[Connection, tuple[BaseProcess, Experiment]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < num_processes:
                experiment = waiting.pop(0)
                ours, theirs = context.Pipe(duplex=False)
                arguments = (theirs, experiment.name, out, seed, size)
                process = context.Process(target=_work, args=arguments, daemon=True)
                process.start()
                # Keep only the child's end open there, so that a dead child closes the pipe.
                theirs.close()
                running[ours] = (process, experiment)
            for ready in multiprocessing.connection.wait(list(running)):
                assert isinstance(ready, multiprocessing.connection.Connection)
                process, experiment = running.pop(ready)
                _raise_what_stopped(ready, process, experiment)
                yield experiment
    finally:
        for process, _ in running.values():
            process.terminate()
        for process, _ in running.values():
            process.join()


def _raise_what_stopped(ready: Connection, process: BaseProcess, experiment: Experiment) -> None:
    try:
        error = ready.recv()
    except EOFError:
        process.join()
        error = ChildProcessError(
            f"the process of {experiment.name} ended with exit code {process.exitcode}"
        )
    process.join()
    if error is not None:
        raise error


def _work(done: Connection, name: str, out: pathlib.Path, seed: int, size: Size) -> None:
    """Run one experiment. Send `None` when it is saved, or the `OSError` that stopped it."""
    # Ctrl-C reaches every process of a terminal; the parent ends this one and reports.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        progress = Status(name, pause=PAUSE, overwrite=False)
        compute_and_save(EXPERIMENTS[name], out, seed, size, progress)
    except OSError as error:
        done.send(error)
    else:
        done.send(None)

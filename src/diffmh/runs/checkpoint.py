"""Checkpoints: everything that a long run needs to continue, on disk, complete or not at all.

A directory holds numbered checkpoints. Each file is written under another name, flushed and
renamed, so a numbered file is complete, whenever the process was killed. It names the problem that
it belongs to and starts with a digest of its contents; a run continues only from a match.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pathlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..base import validate
from ..base.validate import Checked
from ..jaxprs.compat import constants_and_callbacks
from .devices import Hosts, as_numpy
from .files import flush_directory, local_path, new_file

# A run continues from the newest; the one before is kept in case the newest is corrupt.
_NUM_FILES = 2
_NUMBERED = re.compile(r"([0-9]{8})\.diffmh")
_PART = re.compile(_NUMBERED.pattern + r"\.part")
_LOCK, DRAWS, NEW_DRAWS = "lock", "draws", "draws.diffmh.part"
_MARK = b"diffmh checkpoint 2\n"
_DIGEST, _LENGTH = hashlib.sha256().digest_size, 8
# The errors of a directory that can be read but not written to.
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


def _path(given: Any) -> str:
    if not isinstance(given, str | os.PathLike):
        raise TypeError(
            "`Checkpoint(directory=...)` must be the path of a directory, and `checkpoint=...` must"
            f" be a path or a `diffmh.Checkpoint`, got {given!r}."
        )
    return os.fspath(given)


class Checkpoint(eqx.Module):
    """The directory of a long run and the time between checkpoints:
    `checkpoint=Checkpoint("dir", seconds=10)`. A plain path means one checkpoint a minute; `~` is
    your home directory.

    >>> import diffmh
    >>> diffmh.Checkpoint("run", seconds=10)
    Checkpoint(directory='run', seconds=10)
    """

    directory: str = eqx.field(converter=_path)
    seconds: Checked[float] = 60.0

    def __check_init__(self):
        local_path(self.directory, "checkpoint=...")
        validate.number(self.seconds, "Checkpoint(seconds=...)", above=0, least=True)


def checkpoint_of(given: Checked[Checkpoint | str | os.PathLike] | None) -> Checkpoint | None:
    """The `Checkpoint` for a user's `checkpoint=...`."""
    return given if given is None or isinstance(given, Checkpoint) else Checkpoint(given)


def fingerprint(function: Callable[..., Any], parts: Mapping[str, PyTree]) -> dict[str, str]:
    """Digests of everything that determines `function(*parts.values())`: of each part, by name,
    and of the program.
    """
    # Nothing that changes the result may be missing. Every array that the program uses is either a
    # leaf of a part, and in its digest, or a constant of the trace, and in the program's digest.
    # Everything else is in the program's text, which has no source locations and is the same in
    # every process. Values from callbacks are in neither, so such programs raise an error.
    arrays, static = eqx.partition(list(parts.values()), eqx.is_array)

    def program(arrays):
        return eqx.filter(function(*eqx.combine(arrays, static)), eqx.is_array)

    traced = jax.jit(program).trace(arrays)
    constants, callbacks = constants_and_callbacks(traced.jaxpr)
    if callbacks:
        raise ValueError(
            f"`checkpoint=...` cannot identify this run: it gets values from Python"
            f" (`{callbacks[0]}`), which have no digest. Omit `checkpoint`, or pass"
            " these values as `args`."
        )
    digests = {name: _digest(jax.tree.leaves(part)) for name, part in parts.items()}
    # The lowered text holds all static values: functions, shapes, options. Two problems with the
    # same text and the same arrays compute the same numbers.
    text = traced.lower().as_text()
    digests["program"] = hashlib.sha256((text + _digest(constants)).encode()).hexdigest()
    digests["JAX or the device"] = f"jax {jax.__version__} on {jax.devices()[0].platform}"
    return digests


def _digest(leaves: Sequence[Any]) -> str:
    """SHA-256 of arrays and numbers, with their dtypes and shapes. Functions and other objects are
    identified by the program alone.
    """
    total = hashlib.sha256()
    for leaf in leaves:
        if eqx.is_array(leaf):
            total.update(f"{leaf.dtype}{leaf.shape}".encode())
            total.update(as_numpy(leaf).tobytes())
        elif isinstance(leaf, bool | int | float | complex):
            total.update(repr(leaf).encode())
    return total.hexdigest()


def restored(leaves: Sequence[np.ndarray | np.generic], like: PyTree) -> PyTree:
    """Saved leaves in the structure of `like`, a tree of arrays or of their shapes. If an array of
    `like` is sharded over devices, so is its replacement.
    """
    forms, structure = jax.tree.flatten(like)

    def one(leaf, form):
        if jnp.issubdtype(form.dtype, jax.dtypes.prng_key):
            leaf = jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(form))
        else:
            leaf = jnp.asarray(leaf, form.dtype).reshape(form.shape)
        # A checkpoint does not contain the devices: a run may continue on others.
        shared = isinstance(form, jax.Array) and len(form.sharding.device_set) > 1
        return jax.device_put(leaf, form.sharding) if shared else leaf

    return structure.unflatten(one(*pair) for pair in zip(leaves, forms, strict=True))


class Record(eqx.Module):
    """One part of a run as it is saved.

    - `problem`: digests, by name, of everything that determines its results.
    - `results`: the finished results, by leaf, one row for each.
    - `state`, `done`: the leaves of the state from which the run continues, and the number of
      blocks that led to it; no leaves if it starts from the beginning.
    """

    problem: dict[str, str]
    results: list[np.ndarray]
    state: list[np.ndarray]
    done: int


def encoded(records: Sequence[Record]) -> list[bytes]:
    """A checkpoint as the pieces of a file: a mark, the digest of the rest, a table of contents,
    and the arrays.
    """

    # The table has the dtypes and shapes, so the arrays follow as plain bytes in the same order.
    def forms(arrays):
        return [(str(array.dtype), array.shape) for array in arrays]

    table = [
        {"problem": one.problem, "done": one.done, "forms": [forms(one.results), forms(one.state)]}
        for one in records
    ]
    text = json.dumps(table).encode()
    pieces = [len(text).to_bytes(_LENGTH, "little"), text]
    pieces += [array.tobytes() for one in records for array in (*one.results, *one.state)]
    total = hashlib.sha256()
    for piece in pieces:
        total.update(piece)
    return [_MARK, total.digest(), *pieces]


def decoded(content: bytes) -> list[Record] | None:
    """The records of a checkpoint; None if any bit of it has changed."""
    begin = len(_MARK) + _DIGEST
    said = content[len(_MARK) : begin]
    if not content.startswith(_MARK) or said != hashlib.sha256(content[begin:]).digest():
        return None
    length = int.from_bytes(content[begin : begin + _LENGTH], "little")
    table, place = begin + _LENGTH, begin + _LENGTH + length

    def array(kind: str, shape: list[int]) -> np.ndarray:
        nonlocal place
        # A copy, so that it is writable and need not be aligned in the file.
        found = np.ndarray(shape, jnp.dtype(kind), content, place).copy()
        place += found.nbytes
        return found

    def record(problem, done, forms) -> Record:
        results, state = ([array(*form) for form in group] for group in forms)
        return Record(problem, results, state, done)

    return [record(**one) for one in json.loads(content[table:place])]


class Store:
    """A directory of checkpoints, locked by one process; a context manager. If several hosts work
    together, the first writes and all read.
    """

    def __init__(self, checkpoint: Checkpoint, hosts: Hosts | None = None):
        self.hosts = hosts or Hosts()
        self.directory = local_path(checkpoint.directory, "checkpoint=...")
        self.name = f"`checkpoint={str(self.directory)!r}`"
        self._seconds, self._last = checkpoint.seconds, time.monotonic()
        self._lock: int | None = None
        self._read_only: OSError | None = None

    def __enter__(self) -> Store:
        # Every host takes part in each collective (`agree`, `each`), even if the first one failed.
        failure = None
        if self.hosts.leads:
            try:
                self._open()
            except Exception as error:
                failure = error
        opened = self.hosts.agree(failure is None)
        if failure is not None:
            raise failure
        if not opened:
            raise RuntimeError(f"{self.name}: the first host could not open it: see its error.")
        newest = max(self.numbers(), default=0) if self.directory.is_dir() else -1
        if len(set(self.hosts.each(newest))) > 1:
            self._release()
            raise RuntimeError(
                f"{self.name}: not all hosts see the same files there. Use a directory on a file"
                " system that they share."
            )
        return self

    def _open(self) -> None:
        try:
            self._refuse_foreign_files()
            self.directory.mkdir(parents=True, exist_ok=True)
        except NotADirectoryError:
            raise
        except OSError as error:
            raise OSError(f"{self.name} cannot be used: {error}.") from error
        try:
            # Partial files are removed only under the lock: they may belong to another process.
            self._lock = _locked(self.directory / _LOCK)
            for left in self.directory.iterdir():
                if _PART.fullmatch(left.name):
                    left.unlink()
        except BlockingIOError:
            raise RuntimeError(
                f"{self.name}: another process is using it; wait for it, or give each its own"
                " directory."
            ) from None
        except OSError as error:
            # A single host may still read a finished run; several hosts need to write.
            if error.errno not in _READ_ONLY or self.hosts.several:
                self._cannot_write(error)
            self._read_only = error

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _) -> None:
        self._release()
        if kind is KeyboardInterrupt:
            numbers = self.numbers()
            stopped = "stopped before a checkpoint was due; the same call starts again."
            if numbers:
                stopped = f"stopped; the same call continues from checkpoint {numbers[-1]:08d}."
            raise KeyboardInterrupt(f"{self.name}: {stopped}") from error

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def due(self) -> bool:
        return time.monotonic() - self._last >= self._seconds

    def refuse_unless_writable(self) -> None:
        """Raise before computing anything that could not be saved."""
        if self._read_only is not None:
            self._cannot_write(self._read_only)

    def _cannot_write(self, error: OSError) -> NoReturn:
        raise OSError(
            f"{self.name}: the directory cannot be written to: {error}. Use another one, or"
            " change its permissions."
        ) from error

    def numbers(self) -> list[int]:
        """The numbers of the existing checkpoints, oldest first."""
        found = (_NUMBERED.fullmatch(path.name) for path in self.directory.iterdir())
        return sorted(int(name[1]) for name in found if name)

    def _path(self, number: int) -> pathlib.Path:
        return self.directory / f"{number:08d}.diffmh"

    def load(self) -> list[Record]:
        """The records of the newest checkpoint; none if there is no checkpoint. Raises `ValueError`
        if it was changed since it was written.
        """
        numbers = self.numbers()
        if not numbers:
            return []
        path = self._path(numbers[-1])
        try:
            found = decoded(path.read_bytes())
        except OSError as error:
            raise OSError(f"{self.name}: {path.name} cannot be read: {error}.") from error
        if found is not None:
            return found
        advice = "Delete the directory to start again"
        if len(numbers) > 1:
            advice = f"Delete the file to continue from the one before it, {numbers[-2]:08d}"
        raise ValueError(
            f"{self.name}: {path.name} is damaged: it is truncated or changed. {advice}; nothing"
            " was overwritten."
        )

    def save(self, records: Sequence[Record]) -> None:
        """Write a new checkpoint. Older ones are deleted when it is complete."""
        if not self.hosts.leads:
            return
        self.refuse_unless_writable()
        numbers = self.numbers()
        path = self._path(1 + max(numbers, default=0))
        # A checkpoint gets its name by `rename`, which is atomic: a reader sees a complete file or
        # none.
        part = path.with_name(f"{path.name}.part")
        try:
            with new_file(part) as file:
                file.writelines(encoded(records))
            part.rename(path)
        except OSError as error:
            last = f"the last one, {numbers[-1]:08d}, is untouched" if numbers else "there was none"
            raise OSError(
                f"{self.name}: a checkpoint could not be written ({error.strerror}); {last}."
                " Free some space and repeat the same call."
            ) from error
        # The new name is on disk before an old file is deleted: there is always a complete one.
        flush_directory(self.directory)
        for number in numbers[: 1 - _NUM_FILES]:
            self._path(number).unlink(missing_ok=True)
        self._last = time.monotonic()

    def refuse_another(
        self, problem: dict[str, str], saved: dict[str, str], where: str = ""
    ) -> None:
        """Raise `ValueError`, saying what differs, unless the saved problem is this one."""
        both = {**saved, **problem}
        differing = [f"{name}{where}" for name in both if problem.get(name) != saved.get(name)]
        if differing:
            raise ValueError(
                f"{self.name} holds a run of another problem, which differs in"
                f" {', '.join(differing)}. Use another directory, or delete this"
                " one; nothing was overwritten."
            )

    def _refuse_foreign_files(self) -> None:
        if not self.directory.exists():
            return
        if not self.directory.is_dir():
            raise NotADirectoryError(f"{self.name} is a file: give the path of a directory.")
        # Before anything is created: a mistyped path must not fill a user's directory.
        foreign = sorted(path.name for path in self.directory.iterdir() if not _is_ours(path))
        if not self.numbers() and (self.directory / DRAWS).exists():
            # Draws are written after the first checkpoint: without one, they are not ours.
            foreign.append(DRAWS)
        if foreign:
            raise ValueError(
                f"{self.name} holds files that are not checkpoints ({', '.join(foreign[:3])}): use"
                " a directory that is empty or does not exist."
            )


def _is_ours(path: pathlib.Path) -> bool:
    """True for a name, and type of file, that this module writes."""
    if path.name in (DRAWS, NEW_DRAWS):
        return path.is_dir()
    names = path.name == _LOCK or _NUMBERED.fullmatch(path.name) or _PART.fullmatch(path.name)
    return bool(names) and not path.is_dir()


def _locked(path: pathlib.Path) -> int:
    """The open file, locked until it is closed or the process ends. Raises `BlockingIOError` if
    another process has the lock.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ModuleNotFoundError:  # The system has no such locks.
        return file
    except BaseException:
        os.close(file)
        raise
    return file

"""checkpoint: what a long run needs to go on, on disk, whole or not at all.

A directory holds numbered checkpoints, each written by orbax under another name and then renamed;
so a directory that bears a number is whole, whenever the process was killed. Each says of which
problem it is, and has a digest of its contents: nothing else is ever continued from.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pathlib
import shutil
import time
from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from . import _validate
from ._sharding import Hosts
from ._validate import Checked

# The newest is what a run goes on from; the one before it is for a disk that lied.
_KEPT = 2
_UNFINISHED, _LOCK = (".orbax-checkpoint-tmp", ".deleted"), "lock"
DRAWS = "draws"


class Checkpoint(eqx.Module):
    """Where a long run is kept, and how often: `checkpoint=Checkpoint("dir", seconds=10)`. A plain
    path stands for one checkpoint a minute.

    >>> import diffmh
    >>> diffmh.Checkpoint("run", seconds=10)
    Checkpoint(directory='run', seconds=10)
    """

    directory: str = eqx.field(converter=lambda path: _path(path))
    seconds: Checked[float] = 60.0

    def __check_init__(self):
        _validate.number(self.seconds, "Checkpoint(seconds=...)", above=0, least=True)


def _path(given: Any) -> str:
    if not isinstance(given, str | os.PathLike):
        raise TypeError(
            f"`Checkpoint(directory=...)` must be the path of a directory, got {given!r}."
        )
    return os.fspath(given)


def checkpoint_of(given: Checked[Checkpoint | str | os.PathLike] | None) -> Checkpoint | None:
    """What a user gives as `checkpoint=...`."""
    if given is None or isinstance(given, Checkpoint):
        return given
    if isinstance(given, str | os.PathLike):
        return Checkpoint(given)
    raise TypeError(
        f"`checkpoint=...` must be the path of a directory or a `diffmh.Checkpoint`, got {given!r}."
    )


def fingerprint(program: str | None = None, **parts: PyTree) -> dict[str, str]:
    """Digests of what makes a problem this one: the program as lowered, with all that it closes
    over, the arrays that it is given, and what decides how it is rounded.
    """
    digests = {name: digest(jax.tree.leaves(tree)) for name, tree in parts.items()}
    if program is not None:
        digests["program"] = hashlib.sha256(program.encode()).hexdigest()
    device = jax.devices()[0]
    digests["JAX or the device"] = f"jax {jax.__version__} on {device.platform}"
    return digests


def lowered(jitted: Any, *arguments: Any) -> str:
    """A program as text, with all the constants in it, before a compiler has seen it."""
    return jitted.lower(*arguments).as_text()


def digest(leaves: Sequence[Any]) -> str:
    """SHA-256 of arrays, their types and shapes; other objects are known by the program alone."""
    total = hashlib.sha256()
    for leaf in leaves:
        if eqx.is_array_like(leaf):
            array = plain(leaf)
            total.update(f"{array.dtype}{array.shape}".encode())
            total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()


def plain(leaf: Any) -> np.ndarray:
    """An array as numpy has it; a key as its words."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def restored(leaves: Sequence[np.ndarray | np.generic], like: PyTree) -> PyTree:
    """Saved leaves in the form of `like`: a tree of arrays, or of their shapes."""
    forms, structure = jax.tree.flatten(like)

    def one(leaf, form):
        if jnp.issubdtype(form.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(form))
        return jnp.asarray(leaf, form.dtype).reshape(form.shape)

    return structure.unflatten(
        _on_devices_of(one(leaf, form), form) for leaf, form in zip(leaves, forms, strict=True)
    )


def _on_devices_of(leaf: Any, form: Any) -> Any:
    """Where `form` is shared out over devices, so is the array."""
    shared = isinstance(form, jax.Array) and len(form.sharding.device_set) > 1
    return jax.device_put(leaf, form.sharding) if shared else leaf


class Store:
    """A directory of checkpoints, held by one process; used as a context manager. Of several hosts
    that work together the first writes, and all read.
    """

    def __init__(self, checkpoint: Checkpoint, hosts: Hosts | None = None):
        self.hosts = hosts or Hosts()
        self.directory = pathlib.Path(checkpoint.directory).absolute()
        self.seconds = checkpoint.seconds
        self._last = time.monotonic()
        self._lock: Any = None
        self._orbax: Any = None

    @property
    def name(self) -> str:
        return f"`checkpoint={str(self.directory)!r}`"

    def __enter__(self) -> Store:
        self._orbax = _orbax()
        if not self.hosts.several:
            return self._opened()
        opened, failure = 0, None
        if self.hosts.leads:
            try:
                opened = bool(self._opened())
            except Exception as error:
                failure = error
        opened = self.hosts.agree(opened)
        if failure is not None:
            raise failure
        if not opened:
            raise RuntimeError(f"{self.name}: the first host could not open it; it says why.")
        newest = max(self.numbers(), default=0) if self.directory.is_dir() else -1
        if len(set(self.hosts.each(newest))) > 1:
            self.__exit__()
            raise RuntimeError(
                f"{self.name}: not all hosts see the same files there. Give a directory of a file"
                " system that they share."
            )
        return self

    def _opened(self) -> Store:
        self._refuse_foreign_files()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self.directory / _LOCK)
        except OSError as error:
            raise OSError(f"{self.name}: the directory cannot be written to: {error}.") from error
        if self._lock is None:
            raise RuntimeError(
                f"{self.name}: another process is at work on it; wait for it, or give each its own"
                " directory."
            )
        for left in self.directory.iterdir():
            if any(mark in left.name for mark in _UNFINISHED):
                shutil.rmtree(left, ignore_errors=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.close()

    @property
    def due(self) -> bool:
        return time.monotonic() - self._last >= self.seconds

    def numbers(self) -> list[int]:
        """Of the checkpoints that are there, oldest first."""
        return sorted(int(path.name) for path in self.directory.iterdir() if path.name.isdigit())

    def load(self) -> tuple[dict[str, str], dict[str, list[np.ndarray]]] | None:
        """The newest, if there is one, and of which problem it is; refused unless it is whole."""
        numbers = self.numbers()
        if not numbers:
            return None
        path = self.directory / f"{numbers[-1]:08d}"
        try:
            saved = self._orbax.restore(path)
            about = json.loads(np.asarray(saved["about"]).tobytes())
            groups = {
                name: [
                    np.asarray(saved["arrays"][name][f"{i:05d}"]).reshape(shape)
                    if 0 not in shape
                    else np.zeros(shape, dtype)
                    for i, (dtype, shape) in enumerate(forms)
                ]
                for name, forms in about["forms"].items()
            }
            whole = about["digests"] == {name: digest(leaves) for name, leaves in groups.items()}
        except Exception as error:
            raise ValueError(self._damaged(path, numbers)) from error
        if not whole:
            raise ValueError(self._damaged(path, numbers))
        return about["problem"], groups

    def save(self, problem: dict[str, str], groups: Mapping[str, Sequence[Any]]) -> None:
        """A new checkpoint beside those that are there; the oldest go once it is whole."""
        if not self.hosts.leads:
            return
        groups = {name: [plain(leaf) for leaf in leaves] for name, leaves in groups.items()}
        about = {
            "problem": problem,
            "digests": {name: digest(leaves) for name, leaves in groups.items()},
            "forms": {
                name: [(leaf.dtype.str, leaf.shape) for leaf in leaves]
                for name, leaves in groups.items()
            },
        }
        arrays = {
            name: {f"{i:05d}": leaf for i, leaf in enumerate(leaves) if leaf.size}
            for name, leaves in groups.items()
        }
        numbers = self.numbers()
        path = self.directory / f"{1 + max(numbers, default=0):08d}"
        try:
            described = np.frombuffer(json.dumps(about).encode(), np.uint8)
            self._orbax.save(path, {"about": described, "arrays": arrays})
            self._orbax.wait_until_finished()
            _flush(path)
        except Exception as error:
            kept = f"the last one, {numbers[-1]:08d}, is untouched" if numbers else "there was none"
            raise OSError(
                f"{self.name}: a checkpoint could not be written ({_first_line(error)}); {kept}."
                " Make room and run the same line again."
            ) from error
        for number in numbers[: 1 - _KEPT]:
            old = self.directory / f"{number:08d}"
            # Out of sight first: a directory that bears a number is whole.
            shutil.rmtree(old.rename(old.with_suffix(".deleted")), ignore_errors=True)
        self._last = time.monotonic()

    def _damaged(self, path: pathlib.Path, numbers: list[int]) -> str:
        before = (
            f"Delete it to go on from the one before it, {numbers[-2]:08d}"
            if len(numbers) > 1
            else "Delete it to begin anew"
        )
        return (
            f"{self.name}: {path.name} is damaged: a file in it is missing, cut short or changed."
            f" {before}; nothing was overwritten."
        )

    def refuse_another(self, problem: dict[str, str], saved: dict[str, str]) -> None:
        """Refuses what was saved of another problem, and says in what it differs."""
        differing = [name for name in {**saved, **problem} if problem.get(name) != saved.get(name)]
        if not differing:
            return
        what = ", ".join(differing)
        raise ValueError(
            f"{self.name} holds a run of another problem: what differs is {what}. Give a directory"
            " of its own to this one, or delete that one; nothing was overwritten."
        )

    def _refuse_foreign_files(self) -> None:
        if self.directory.exists() and not self.directory.is_dir():
            raise NotADirectoryError(f"{self.name} is a file: give the path of a directory.")
        if not self.directory.exists():
            return

        def ours(name):
            return (
                name.isdigit()
                or name in (_LOCK, DRAWS)
                or any(mark in name for mark in _UNFINISHED)
            )

        foreign = sorted(path.name for path in self.directory.iterdir() if not ours(path.name))
        if foreign:
            raise ValueError(
                f"{self.name} holds files that are no checkpoint's ({', '.join(foreign[:3])}): give"
                " a directory that is empty or does not exist."
            )


def _orbax() -> Any:
    try:
        import orbax.checkpoint as ocp
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "orbax":
            raise
        raise ModuleNotFoundError(
            "`checkpoint=...` is written by orbax, which is not installed:"
            ' pip install "diffmh[long]"',
            name="orbax",
        ) from None
    # What it has to say of its own doings at each checkpoint is not for our users.
    logging.getLogger("absl").setLevel(max(logging.ERROR, logging.getLogger("absl").level))
    # Each process by itself: whether others take part is ours to say.
    own = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=own, active_processes={own}, barrier_sync_key_prefix=f"diffmh{own}"
    )
    return ocp.StandardCheckpointer(multiprocessing_options=alone)


def _locked(path: pathlib.Path) -> Any:
    """The open file, locked until it is closed or the process ends; None if another has it."""
    file = path.open("a")
    try:
        import fcntl
    except ModuleNotFoundError:
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def _flush(path: pathlib.Path) -> None:
    """To the disk itself: the machine may go down before the system gets round to it."""
    for file in [*path.rglob("*"), path, path.parent]:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]

"""checkpoint: what a long run needs to go on, on disk, complete or not at all.

A directory holds numbered checkpoints, each a file that is written under another name, flushed and
renamed; so a file that bears a number is complete, whenever the process was killed. Each names the
problem that it belongs to and begins with a digest of all the rest; nothing else is continued from.
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

from . import _validate
from ._files import flush_directory, local_path, new_file
from ._lowering.compat import constants_and_callbacks
from ._sharding import Hosts
from ._validate import Checked

# The newest is what a run goes on from; the one before it is kept in case the newest is corrupt.
_KEPT = 2
_NUMBERED = re.compile(r"([0-9]{8})\.diffmh")
_PART = re.compile(_NUMBERED.pattern + r"\.part")
_LOCK, DRAWS, NEW_DRAWS = "lock", "draws", "draws.diffmh.part"
_OURS = b"diffmh checkpoint 1\n"
_DIGEST, _LENGTH = hashlib.sha256().digest_size, 8
# A directory that may be read and not written to.
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


class Checkpoint(eqx.Module):
    """Where a long run is kept, and how often: `checkpoint=Checkpoint("dir", seconds=10)`. A plain
    path stands for one checkpoint a minute; `~` is your home directory.

    >>> import diffmh
    >>> diffmh.Checkpoint("run", seconds=10)
    Checkpoint(directory='run', seconds=10)
    """

    directory: str = eqx.field(converter=lambda path: _path(path))
    seconds: Checked[float] = 60.0

    def __check_init__(self):
        local_path(self.directory, "checkpoint=...")
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


def fingerprint(function: Callable[..., Any], parts: Mapping[str, PyTree]) -> dict[str, str]:
    """Digests of all that decides what `function(*parts.values())` returns: by its name, each part,
    and the program.

    An array that reaches the program is either a leaf of a part, and then in that part's digest, or
    a constant of the trace, and then in the program's; everything else is in the program's text,
    which has no source locations and is the same in every process. Values that a callback asks
    Python for are neither, so such a program is refused.
    """
    arrays, static = eqx.partition(list(parts.values()), eqx.is_array)
    traced = jax.jit(lambda arrays: _arrays_of(function(*eqx.combine(arrays, static)))).trace(
        arrays
    )
    constants, callbacks = constants_and_callbacks(traced.jaxpr)
    if callbacks:
        raise ValueError(
            f"`checkpoint=...` cannot tell this run from others: it calls Python (`{callbacks[0]}`)"
            " for values, and what Python computes has no digest. Leave out `checkpoint`, or give"
            " these values as `args`."
        )
    digests = {name: digest(jax.tree.leaves(part)) for name, part in parts.items()}
    text = traced.lower().as_text()
    digests["program"] = hashlib.sha256((text + digest(constants)).encode()).hexdigest()
    device = jax.devices()[0]
    digests["JAX or the device"] = f"jax {jax.__version__} on {device.platform}"
    return digests


def _arrays_of(tree: PyTree) -> PyTree:
    return eqx.filter(tree, eqx.is_array)


def digest(leaves: Sequence[Any]) -> str:
    """SHA-256 of arrays and numbers, their types and shapes; functions and other objects are known
    by the program alone.
    """
    total = hashlib.sha256()
    for leaf in leaves:
        if eqx.is_array(leaf):
            total.update(f"{leaf.dtype}{leaf.shape}".encode())
            total.update(plain(leaf).tobytes())
        elif isinstance(leaf, bool | int | float | complex):
            total.update(repr(leaf).encode())
    return total.hexdigest()


def plain(leaf: Any) -> np.ndarray:
    """An array as NumPy has it; a key as its words."""
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
        self.directory = local_path(checkpoint.directory, "checkpoint=...")
        self.seconds = checkpoint.seconds
        self._last = time.monotonic()
        self._lock: int | None = None
        self._read_only: OSError | None = None

    @property
    def name(self) -> str:
        return f"`checkpoint={str(self.directory)!r}`"

    def __enter__(self) -> Store:
        if not self.hosts.several:
            return self._opened()
        opened, failure = 0, None
        if self.hosts.leads:
            try:
                opened = bool(self._opened())
                self.refuse_unless_writable()
            except Exception as error:
                opened, failure = 0, error
        opened = self.hosts.agree(opened)
        if failure is not None:
            raise failure
        if not opened:
            raise RuntimeError(f"{self.name}: the first host could not open it; it says why.")
        newest = max(self.numbers(), default=0) if self.directory.is_dir() else -1
        if len(set(self.hosts.each(newest))) > 1:
            self._release()
            raise RuntimeError(
                f"{self.name}: not all hosts see the same files there. Give a directory of a file"
                " system that they share."
            )
        return self

    def _opened(self) -> Store:
        try:
            self._refuse_foreign_files()
            self.directory.mkdir(parents=True, exist_ok=True)
        except NotADirectoryError:
            raise
        except OSError as error:
            raise OSError(f"{self.name} cannot be used: {error}.") from error
        try:
            self._lock = _locked(self.directory / _LOCK)
            for left in self.directory.iterdir():
                if _PART.fullmatch(left.name):
                    left.unlink()
        except BlockingIOError:
            raise RuntimeError(
                f"{self.name}: another process is at work on it; wait for it, or give each its own"
                " directory."
            ) from None
        except OSError as error:
            if error.errno not in _READ_ONLY:
                self._cannot_write(error)
            self._read_only = error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _) -> None:
        self._release()
        if kind is KeyboardInterrupt:
            raise KeyboardInterrupt(self._interrupted()) from error

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _interrupted(self) -> str:
        numbers = self.numbers()
        if not numbers:
            return f"{self.name}: stopped before a checkpoint was due; the same line begins anew."
        return f"{self.name}: stopped; the same line goes on from checkpoint {numbers[-1]:08d}."

    @property
    def due(self) -> bool:
        return time.monotonic() - self._last >= self.seconds

    def refuse_unless_writable(self) -> None:
        """Raise before anything is computed that could not be kept."""
        if self._read_only is not None:
            self._cannot_write(self._read_only)

    def _cannot_write(self, error: OSError) -> NoReturn:
        raise OSError(f"{self.name}: the directory cannot be written to: {error}.") from error

    def numbers(self) -> list[int]:
        """Of the checkpoints that are there, oldest first."""
        found = (_NUMBERED.fullmatch(path.name) for path in self.directory.iterdir())
        return sorted(int(name[1]) for name in found if name)

    def _path(self, number: int) -> pathlib.Path:
        return self.directory / f"{number:08d}.diffmh"

    def load(self) -> tuple[dict[str, str], dict[str, list[np.ndarray]]] | None:
        """The newest, if there is one, and which problem it belongs to; refused unless it is
        complete.
        """
        numbers = self.numbers()
        if not numbers:
            return None
        path = self._path(numbers[-1])
        try:
            found = decoded(path.read_bytes())
        except OSError as error:
            raise OSError(f"{self.name}: {path.name} cannot be read: {error}.") from error
        if found is None:
            raise ValueError(self._damaged(path, numbers))
        return found

    def save(self, problem: dict[str, str], groups: Mapping[str, Sequence[Any]]) -> None:
        """A new checkpoint beside those that are there; the oldest go once it is complete."""
        if not self.hosts.leads:
            return
        self.refuse_unless_writable()
        numbers = self.numbers()
        path = self._path(1 + max(numbers, default=0))
        part = path.with_name(f"{path.name}.part")
        try:
            with new_file(part) as file:
                for piece in encoded(problem, groups):
                    _write_all(file, piece)
            part.rename(path)
        except OSError as error:
            kept = f"the last one, {numbers[-1]:08d}, is untouched" if numbers else "there was none"
            raise OSError(
                f"{self.name}: a checkpoint could not be written ({error.strerror}); {kept}."
                " Make room and run the same line again."
            ) from error
        flush_directory(self.directory)
        for number in numbers[: 1 - _KEPT]:
            self._path(number).unlink(missing_ok=True)
        self._last = time.monotonic()

    def _damaged(self, path: pathlib.Path, numbers: list[int]) -> str:
        before = (
            f"Delete it to go on from the one before it, {numbers[-2]:08d}"
            if len(numbers) > 1
            else "Delete the directory to begin anew"
        )
        return (
            f"{self.name}: {path.name} is damaged: it is cut short or changed. {before}; nothing"
            " was overwritten."
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
        foreign = sorted(path.name for path in self.directory.iterdir() if not _is_ours(path))
        if not self.numbers() and (self.directory / DRAWS).exists():
            # The first checkpoint is older than the draws.
            foreign.append(DRAWS)
        if foreign:
            raise ValueError(
                f"{self.name} holds files that are no checkpoint's ({', '.join(foreign[:3])}): give"
                " a directory that is empty or does not exist."
            )


def _is_ours(path: pathlib.Path) -> bool:
    """Whether a name in the directory is one that we write, of the kind that we write it."""
    if path.name in (DRAWS, NEW_DRAWS):
        return path.is_dir()
    names = path.name == _LOCK or _NUMBERED.fullmatch(path.name) or _PART.fullmatch(path.name)
    return bool(names) and not path.is_dir()


def encoded(problem: dict[str, str], groups: Mapping[str, Sequence[Any]]) -> list[bytes]:
    """A checkpoint as the pieces of a file: a mark, the digest of the rest, what is in it, and the
    arrays.
    """
    arrays = {name: [plain(leaf) for leaf in leaves] for name, leaves in groups.items()}
    forms = {
        name: [(str(leaf.dtype), leaf.shape) for leaf in leaves] for name, leaves in arrays.items()
    }
    about = json.dumps({"problem": problem, "forms": forms}).encode()
    pieces = [len(about).to_bytes(_LENGTH, "little"), about]
    pieces += [leaf.tobytes() for leaves in arrays.values() for leaf in leaves]
    total = hashlib.sha256()
    for piece in pieces:
        total.update(piece)
    return [_OURS, total.digest(), *pieces]


def decoded(content: bytes) -> tuple[dict[str, str], dict[str, list[np.ndarray]]] | None:
    """Problem and arrays of a checkpoint; None if a single bit of it has changed."""
    begin = len(_OURS) + _DIGEST
    told, rest = content[len(_OURS) : begin], content[begin:]
    if not content.startswith(_OURS) or told != hashlib.sha256(rest).digest():
        return None
    place = _LENGTH + int.from_bytes(rest[:_LENGTH], "little")
    about = json.loads(rest[_LENGTH:place])
    groups: dict[str, list[np.ndarray]] = {}
    for name, forms in about["forms"].items():
        groups[name] = []
        for kind, shape in forms:
            array = np.empty(shape, jnp.dtype(kind))
            # A copy, so that an array may be written to and need not be aligned in the file.
            array.reshape(-1).view(np.uint8)[:] = np.frombuffer(
                rest[place : place + array.nbytes], np.uint8
            )
            groups[name].append(array)
            place += array.nbytes
    return about["problem"], groups


def _write_all(file: int, piece: bytes) -> None:
    left = memoryview(piece)
    while left:
        left = left[os.write(file, left) :]


def _locked(path: pathlib.Path) -> int:
    """The open file, locked until it is closed or the process ends; raises `BlockingIOError` if
    another process has it.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
    try:
        import fcntl
    except ModuleNotFoundError:
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(file)
        raise
    return file

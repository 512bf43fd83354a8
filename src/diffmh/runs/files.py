"""Files of the user's: paths as they are given, and files that appear complete or not at all."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import secrets
from collections.abc import Callable, Iterator
from typing import BinaryIO


def local_path(given: str | os.PathLike[str], where: str) -> pathlib.Path:
    """The absolute path of a directory on a file system of this machine, with `~` expanded."""
    text = os.fsdecode(given)
    if not text:
        raise ValueError(f"`{where}` must be the path of a directory, got an empty one.")
    if "\0" in text:
        raise ValueError(f"`{where}` must not contain the character NUL, got {text!r}.")
    # `pathlib` has made one slash of two; a drive's name is one letter.
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", text):
        raise ValueError(
            f"`{where}` must be the path of a directory on a file system, got the address {text!r}:"
            " mount the store it names, or copy the directory there afterwards."
        )
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        raise ValueError(
            f"`{where}`: {text!r} names a home directory that does not exist; write"
            f" {'./' + text!r} for a directory of that name."
        )
    return pathlib.Path(expanded).absolute()


def write_whole(path: pathlib.Path, write: Callable[[pathlib.Path], object]) -> None:
    """`write` to a new file beside `path`, which then takes its place: whoever finds the file
    finds all of it, and no file that was there before, or that a link points to, is written into.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    with new_file(part):
        write(part)
    # Atomic on one file system, which is why the part lies beside its target.
    os.replace(part, path)


@contextlib.contextmanager
def new_file(path: pathlib.Path) -> Iterator[BinaryIO]:
    """A file that did not exist, on the disk itself when the block ends, and gone if the block
    raises.
    """
    # O_EXCL: what is there already, be it a link to a file of the user's, is not written into.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(descriptor)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def flush_directory(path: pathlib.Path) -> None:
    """Put the names in a directory on the disk itself, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

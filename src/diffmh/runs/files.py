"""The user's files: paths, and files that are written completely or not at all."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import secrets
from collections.abc import Callable, Iterator
from typing import BinaryIO


def local_path(given: str | os.PathLike[str], where: str) -> pathlib.Path:
    """The absolute path of a directory on this machine's file systems, with `~` expanded."""
    text = os.fsdecode(given)
    if not text:
        raise ValueError(f"`{where}` must be the path of a directory, got an empty one.")
    if "\0" in text:
        raise ValueError(f"`{where}` must not contain the character NUL, got {text!r}.")
    # `pathlib` merges double slashes; a drive's name has one letter.
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", text):
        raise ValueError(
            f"`{where}` must be the path of a directory on a file system, got the address {text!r}:"
            " mount the remote storage, or copy the directory there afterwards."
        )
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        raise ValueError(
            f"`{where}`: {text!r} names a home directory that does not exist; write"
            f" {'./' + text!r} for a directory of that name."
        )
    return pathlib.Path(expanded).absolute()


def write_whole(path: pathlib.Path, write: Callable[[pathlib.Path], object]) -> None:
    """`write` to a new file next to `path`, which then replaces it. A reader always finds a
    complete file, and no existing file, nor the target of a link, is written into.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    with new_file(part):
        write(part)
    # Atomic on one file system, so the temporary file is in the same directory.
    os.replace(part, path)


@contextlib.contextmanager
def new_file(path: pathlib.Path) -> Iterator[BinaryIO]:
    """A file that did not exist before. It is flushed to disk when the block ends, and deleted if
    the block raises.
    """
    # O_EXCL: an existing file, or a link to one, is not written into.
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
    """Flush the names in a directory to disk, if the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

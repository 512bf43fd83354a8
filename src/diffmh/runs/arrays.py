"""The draws of a long run on disk, next to its checkpoints: arrays that are filled along axis 1."""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Sequence

import numpy as np

from .checkpoint import DRAWS, NEW_DRAWS, Store


def checksum(arrays: Sequence[np.ndarray], low: int, high: int) -> int:
    """A checksum of the draws from `low` up to `high`, exclusive."""
    total = 0
    for array in arrays:
        total = zlib.crc32(np.ascontiguousarray(array[:, low:high]).tobytes(), total)
    return total


class ArrayFiles:
    """Arrays of given shapes and dtypes, each in a file of a store's directory."""

    def __init__(self, store: Store, forms: Sequence[tuple[tuple[int, ...], np.dtype]]):
        self.store, self.forms = store, list(forms)
        self._directory = store.directory / DRAWS
        self._names = [f"{i:03d}.npy" for i in range(len(forms))]

    def make(self) -> None:
        """Create the files, unless they exist."""
        if self._directory.exists():
            return
        self.store.refuse_unless_writable()
        # The directory is renamed when every file has its full size. So a disk that is too small is
        # detected before anything is computed, and files under the final name are complete.
        new = self.store.directory / NEW_DRAWS
        try:
            new.mkdir(exist_ok=True)
            for name, (shape, dtype) in zip(self._names, self.forms, strict=True):
                (new / name).unlink(missing_ok=True)
                np.lib.format.open_memmap(new / name, "w+", dtype, shape)
                # A new file is sparse. Unless its blocks are allocated now, a full disk would kill
                # the process by a signal in the middle of the run.
                if hasattr(os, "posix_fallocate"):
                    with (new / name).open("r+b") as file:
                        os.posix_fallocate(file.fileno(), 0, os.path.getsize(new / name))
            new.rename(self._directory)
        except OSError as error:
            for name in self._names:
                (new / name).unlink(missing_ok=True)
            size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.forms)
            raise OSError(
                f"{self.store.name}: the files for {size:,} bytes of draws could not be made"
                f" ({error.strerror}). Free some space and repeat the same call, or delete this"
                " directory and ask for fewer draws (`num_samples`)."
            ) from error

    def open(self, writable: bool) -> list[np.memmap]:
        """The arrays; raises `ValueError` unless the files have these shapes and dtypes."""
        # Read first: NumPy extends a file that it opens for writing to the length in its header.
        files = [self._directory / name for name in self._names]
        try:
            arrays = [np.load(file, mmap_mode="r") for file in files]
        except Exception as error:
            # NumPy raises many kinds of errors for invalid files.
            raise self.damaged() from error
        if [(array.shape, array.dtype) for array in arrays] != self.forms:
            raise self.damaged()
        return [np.load(file, mmap_mode="r+") for file in files] if writable else arrays

    def flush(self, arrays: Sequence[np.ndarray]) -> None:
        """Flush everything written to the arrays to the disk."""
        for array in arrays:
            if isinstance(array, np.memmap):
                array.flush()

    def damaged(self) -> ValueError:
        return ValueError(
            f"{self.store.name}: the draws in {DRAWS!r} are damaged: a file is missing, truncated"
            " or changed. Delete the directory to start again; nothing was overwritten."
        )

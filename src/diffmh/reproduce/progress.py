"""The progress of an experiment, on stderr."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


class Status:
    """On a terminal, one line that is overwritten. Elsewhere, a line for each stage and, within a
    stage, at most one every two seconds, so that a log stays readable.
    """

    def __init__(
        self,
        title: str = "",
        stream: io.TextIOBase | None = None,
        pause: float = 2.0,
        overwrite: bool = True,
    ):
        self._stream = stream or sys.stderr
        self._start = f"{title}: " if title else ""
        self._pause = pause
        self._terminal = overwrite and self._stream.isatty()
        self._began = self._last = time.monotonic()
        self._width = 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def say(self, what: str) -> None:
        """Announce a stage."""
        line = f"{self._start}{what} ({self.seconds:.0f} s)"
        if self._terminal:
            self._stream.write("\r" + line.ljust(self._width))
            self._width = len(line)
        else:
            self._stream.write(line + "\n")
        self._stream.flush()
        self._last = time.monotonic()

    def over(self, items: Sequence[T], what: Callable[[T], str]) -> Iterator[T]:
        """Iterate over the items and announce each."""
        for i, item in enumerate(items, start=1):
            if self._terminal or time.monotonic() - self._last >= self._pause:
                self.say(f"{what(item)}, {i} of {len(items)}")
            yield item

    def along(self, what: str) -> Callable[[range], Iterator[int]]:
        """For `optimise(progress=...)`: announce each iteration."""

        def announced(iterations: range) -> Iterator[int]:
            return self.over(iterations, lambda _: what)

        return announced

    def end(self, what: str) -> None:
        """Write the last line, which stays."""
        start = "\r" if self._terminal else ""
        self._stream.write(start + f"{self._start}{what}".ljust(self._width) + "\n")
        self._stream.flush()

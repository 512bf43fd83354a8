"""Progress bars for long runs, on stderr."""

from __future__ import annotations

import sys
from typing import Any

from ..base.extras import needing


class Bar:
    """A progress bar of tqdm; nothing unless it is wanted and stderr is a terminal."""

    def __init__(self, name: str, total: int, wanted: bool):
        self.name, self.total = name, total
        self.shown = bool(wanted) and sys.stderr.isatty()
        self._bar: Any = None

    def __enter__(self) -> Bar:
        if self.shown:
            self._bar = tqdm()(total=self.total, desc=self.name, file=sys.stderr)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def reached(self, done: int) -> None:
        """Set the amount that is done."""
        if self._bar is not None:
            self._bar.total = self.total
            self._bar.update(done - self._bar.n)


def tqdm() -> Any:
    """The class `tqdm.tqdm`, imported only when a bar is drawn."""
    advice = '`progress=True` needs tqdm, which is not installed: pip install "diffmh[long]"'
    with needing("tqdm", advice):
        from tqdm import tqdm
    return tqdm

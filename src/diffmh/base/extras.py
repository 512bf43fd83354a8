"""Libraries that only some functions need."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def needing(library: str, advice: str) -> Iterator[None]:
    """A context of imports; raises `ModuleNotFoundError` with this advice if the library, or a part
    of it, is not there.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != library:
            raise
        raise ModuleNotFoundError(advice, name=library) from None

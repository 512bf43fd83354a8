"""Settings of XLA, which it reads once, as it starts."""

from __future__ import annotations

import os

from ..base import validate
from ..base.validate import Checked
from ..jaxprs import compat

_OPTIONS = "--xla_backend_extra_options="
_SMALL_LOOPS = "xla_cpu_small_while_loop_byte_threshold"

# Loops that carry up to this many bytes are compiled in one piece.
_BYTES = 65536


def configure(*, small_loops: Checked[bool]) -> None:
    """Set how XLA for the CPU compiles the loops of this process, before it starts.

    - `small_loops`: True to have loops of up to 64 KiB compiled in one piece, instead of starting
      every piece of a loop's body by itself. With few chains a gradient step then takes about a
      third of the time (`docs/speed.md`). False to undo it.

    The setting concerns every program of the process and becomes part of the environment variable
    `XLA_FLAGS`; what else is in there stays. Numbers may differ in their last digits, as between
    any two ways to compile.

    Raises a `RuntimeError` once JAX has started, because XLA would not see the setting.

    >>> import diffmh
    >>> diffmh.configure(small_loops=True)  # doctest: +SKIP
    """
    small_loops = validate.flag(small_loops, "configure(small_loops=...)")
    if small_loops == small_loops_are_on():
        return
    if compat.backend_has_started():
        flags = f"{_OPTIONS}{_SMALL_LOOPS}={_BYTES}"
        raise RuntimeError(
            f"`configure(small_loops={small_loops})` must come before JAX is used for the first"
            " time (the first array, key or device), and JAX has started: call it right after"
            " `import diffmh`"
            + (f", or set XLA_FLAGS={flags} before Python starts." if small_loops else ".")
        )
    os.environ["XLA_FLAGS"] = _with_small_loops(os.environ.get("XLA_FLAGS", ""), small_loops)


def small_loops_are_on() -> bool:
    """True if `XLA_FLAGS` sets how large a loop may be to be compiled in one piece."""
    return any(
        option.partition("=")[0] == _SMALL_LOOPS
        for flag in os.environ.get("XLA_FLAGS", "").split()
        if flag.startswith(_OPTIONS)
        for option in flag.removeprefix(_OPTIONS).split(",")
    )


def _with_small_loops(flags: str, on: bool) -> str:
    """The flags with the setting, or without it. XLA takes the last of several flags of one name,
    so all extra options stand in one.
    """
    others, options = [], []
    for flag in flags.split():
        if flag.startswith(_OPTIONS):
            options += flag.removeprefix(_OPTIONS).split(",")
        else:
            others.append(flag)
    options = [option for option in options if option.partition("=")[0] != _SMALL_LOOPS]
    if on:
        options.append(f"{_SMALL_LOOPS}={_BYTES}")
    joined = [_OPTIONS + ",".join(options)] if options else []
    return " ".join([*others, *joined])

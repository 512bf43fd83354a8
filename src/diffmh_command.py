"""The command `diffmh`: its arguments and its help.

It is not inside the package, because importing the package loads JAX, and `diffmh --help` should
answer at once, with or without the extras.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import io
import os
import pathlib
import sys
from collections.abc import Sequence


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(
        prog="diffmh",
        description="Unbiased derivatives of Metropolis–Hastings. Results go to stdout, progress to"
        " stderr.",
    )
    command.add_argument("--version", action="store_true", help="print the version and exit")
    commands = command.add_subparsers(dest="command", metavar="COMMAND")

    reproduce = commands.add_parser(
        "reproduce",
        help="reproduce the paper's figures on a page, with the exact numbers",
        description="Reproduces the paper's figures and writes them to a page. Figures that the"
        " same code has already saved in the directory are reused. Exits with 1 if a"
        " verdict fails.",
    )
    reproduce.add_argument(
        "names", nargs="*", metavar="FIGURE", help="names or numbers of figures (all)"
    )
    reproduce.add_argument(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("results"),
        metavar="DIR",
        help="the directory for the data, the figures and the page (results)",
    )
    reproduce.add_argument(
        "--seed", type=int, default=0, metavar="N", help="the same seed gives the same numbers (0)"
    )
    size = reproduce.add_mutually_exclusive_group()
    size.add_argument(
        "--fast",
        dest="size",
        action="store_const",
        const="fast",
        default="demo",
        help="shorter runs, one or two minutes",
    )
    size.add_argument(
        "--full",
        dest="size",
        action="store_const",
        const="full",
        help="longer runs with smaller errors, ten minutes or more",
    )
    reproduce.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="the number of figures computed at a time (2, or 1 on a single core)",
    )
    reproduce.add_argument("--again", action="store_true", help="compute finished figures again")
    reproduce.add_argument("--list", action="store_true", help="list the figures and exit")

    commands.add_parser(
        "doctor",
        help="print versions, devices and precision",
        description="Prints versions, devices and precision, to include in a bug report.",
    )
    return command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, 1 if a verdict fails, 2 for an invalid request,
    130 for Ctrl-C.
    """
    for stream in (sys.stdout, sys.stderr):
        # A terminal or file that cannot encode θ gets an escape sequence instead.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    command = parser()
    given = command.parse_args(arguments)
    try:
        code = _run(command, given)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return 130
    except OSError as error:
        return _unwritable(error)


def _unwritable(error: OSError) -> int:
    """Nobody reads stdout, or its disk is full: the verdicts were not printed, so not 1."""
    print(f"diffmh: {error}", file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:
        # Text left in the buffer would raise again at exit, with another exit code.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 2


def _run(command: argparse.ArgumentParser, given: argparse.Namespace) -> int:
    if given.version:
        print(f"diffmh {_version()}")
        return 0
    if given.command is None:
        command.print_help()
        return 0
    from diffmh.reproduce import cli

    if given.command == "doctor":
        return cli.doctor()
    return cli.reproduce(
        given.names,
        given.out,
        given.seed,
        given.size,
        given.again,
        given.list,
        given.processes,
    )


def _version() -> str:
    try:
        return importlib.metadata.version("diffmh")
    except importlib.metadata.PackageNotFoundError:
        from diffmh import __version__

        return __version__


if __name__ == "__main__":
    sys.exit(main())

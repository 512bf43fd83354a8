"""The command `diffmh`: its arguments and its help.

It stands beside the package because whatever stands inside loads JAX first, and `diffmh --help`
should answer at once, with or without the extras.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import pathlib
import sys
from collections.abc import Sequence


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(
        prog="diffmh",
        description="Unbiased derivatives of Metropolis–Hastings. Results go to stdout, progress to"
        " stderr.",
    )
    command.add_argument("--version", action="store_true", help="print the version and stop")
    commands = command.add_subparsers(dest="command", metavar="COMMAND")

    reproduce = commands.add_parser(
        "reproduce",
        help="the paper's figures, each number against the exact one, on a page",
        description="Reproduces the paper's figures and puts them on a page. What the same code"
        " has already saved in the directory is taken up. Exits with 1 if a verdict fails.",
    )
    reproduce.add_argument(
        "names", nargs="*", metavar="FIGURE", help="names or numbers of figures; all if left out"
    )
    reproduce.add_argument(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("results"),
        metavar="DIR",
        help="where the data, the figures and the page go (results)",
    )
    reproduce.add_argument(
        "--seed", type=int, default=0, metavar="N", help="the same seed gives the same numbers (0)"
    )
    reproduce.add_argument("--fast", action="store_true", help="smaller runs, a few minutes")
    reproduce.add_argument("--again", action="store_true", help="compute what is finished anew")
    reproduce.add_argument("--list", action="store_true", help="list the figures and stop")

    commands.add_parser(
        "doctor",
        help="versions, devices and precision",
        description="Versions, devices and precision: what a report of a problem should say.",
    )
    return command


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0, 1 for a verdict that fails, 2 for what cannot
    be done, 130 for Ctrl-C.
    """
    command = parser()
    given = command.parse_args(arguments)
    if given.version:
        print(f"diffmh {_version()}")
        return 0
    if given.command is None:
        command.print_help()
        return 0
    try:
        from diffmh import cli

        if given.command == "doctor":
            return cli.doctor()
        return cli.reproduce(
            given.names, given.out, given.seed, given.fast, given.again, given.list
        )
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return 130


def _version() -> str:
    try:
        return importlib.metadata.version("diffmh")
    except importlib.metadata.PackageNotFoundError:
        from diffmh import __version__

        return __version__


if __name__ == "__main__":
    sys.exit(main())

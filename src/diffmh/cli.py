"""The command `diffmh`: results on stdout, progress on stderr."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import platform
import sys
from typing import Annotated

import typer

app = typer.Typer(
    help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)


@app.command()
def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Experiments or figure numbers; all of them for none.", show_default=False
        ),
    ] = None,
    out: Annotated[
        pathlib.Path, typer.Option(help="Where the data, the figures and the page go.")
    ] = pathlib.Path("results"),
    seed: Annotated[int, typer.Option(help="The same seed gives the same numbers.")] = 0,
    fast: Annotated[
        bool, typer.Option("--fast", help="Smaller runs: all six figures in under three minutes.")
    ] = False,
    list_: Annotated[bool, typer.Option("--list", help="List the experiments and stop.")] = False,
) -> None:
    """Reproduces the paper's figures and puts them on a page. Exits with 1 if a verdict fails."""
    from .reproduce import EXPERIMENTS
    from .reproduce import reproduce as run

    if list_:
        for experiment in EXPERIMENTS.values():
            typer.echo(f"{experiment.name:<12} Fig. {experiment.figure}  {experiment.title}")
        return
    try:
        good = run(names or [], out, seed, fast)
    except ValueError as error:
        if "there is no experiment" not in str(error):
            raise
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    if not good:
        raise typer.Exit(1)


@app.command()
def doctor() -> None:
    """Versions, devices and precision: what a report of a problem should say."""
    import jax
    import jax.numpy as jnp

    packages = (
        "diffmh",
        "jax",
        "jaxlib",
        "equinox",
        "jaxtyping",
        "numpy",
        "optax",
        "matplotlib",
        "tqdm",
        "typer",
    )
    for package in packages:
        typer.echo(f"{package:<12} {_version(package)}")
    typer.echo(
        f"{'python':<12} {platform.python_version()} on {platform.system()} {platform.machine()}"
    )
    typer.echo(
        f"{'devices':<12}"
        f" {', '.join(f'{device.platform}:{device.id}' for device in jax.devices())},"
        f" {os.cpu_count()} cores"
    )
    typer.echo(
        f"{'precision':<12} {jnp.zeros(()).dtype} (x64"
        f" {'on' if jax.config.jax_enable_x64 else 'off'})"
    )  # pyright: ignore
    typer.echo(f"{'gradient':<12} {_gradient()}")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _gradient() -> str:
    """A derivative that is known, as a sign of life."""
    import jax

    from .expectation import expectation
    from .models import gaussian

    mean = expectation(
        lambda theta, x: x, gaussian.sampler(), init=0.0, num_samples=500, burn_in=50, num_chains=64
    )
    report = mean.run(0.5, jax.random.key(0))
    value, error = float(report.gradient), float(report.gradient_error)
    good = abs(value - 1.0) < 5 * error
    return f"dE[x]/dθ on N(θ, 1) is {value:.3f} ± {error:.3f}, exact 1: {'good' if good else 'NOT what it should be'}"


def main() -> None:
    app()


if __name__ == "__main__":
    sys.exit(main())

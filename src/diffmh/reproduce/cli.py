"""The implementation of the command `diffmh`; its arguments are in `diffmh_command`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import sys

import jax
import jax.numpy as jnp

from diffmh_command import main as main

from .._expectation import expectation
from ..models import gaussian
from ..runs.configure import small_loops_are_on

PACKAGES = ("diffmh", "jax", "jaxlib", "equinox", "jaxtyping", "numpy", "scipy")
EXTRAS = ("optax", "matplotlib", "tqdm")


def reproduce(
    names: list[str],
    out: pathlib.Path,
    seed: int,
    size: str,
    again: bool,
    only_list: bool,
    num_processes: int | None,
) -> int:
    """Reproduce the paper's figures and return the exit code."""
    needed = ("matplotlib", "optax", "tqdm")
    missing = [name for name in needed if not importlib.util.find_spec(name)]
    if missing:
        return _refuse(
            f"`diffmh reproduce` needs {', '.join(missing)}, not installed here:"
            ' pip install "diffmh[reproduce]"'
        )
    from . import EXPERIMENTS, Refused, Size, Stopped
    from . import reproduce as run

    if only_list:
        for experiment in EXPERIMENTS.values():
            print(f"{experiment.name:<12} Fig. {experiment.figure}  {experiment.title}")
        return 0
    try:
        return 0 if run(names, out, seed, Size(size), again, num_processes) else 1
    except Stopped as stop:
        print(stop, file=sys.stderr)
        return 130 if isinstance(stop.__cause__, KeyboardInterrupt) else 2
    except Refused as refusal:
        return _refuse(str(refusal))


def _refuse(why: str) -> int:
    print(f"diffmh: {why}", file=sys.stderr)
    return 2


def doctor() -> int:
    """Print versions, devices and precision, and check a known derivative."""
    lines = {package: _version(package) for package in PACKAGES + EXTRAS}
    lines["python"] = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    devices = ", ".join(f"{device.platform}:{device.id}" for device in jax.devices())
    lines["devices"] = f"{devices}, {os.cpu_count()} cores"
    real = jnp.zeros(()).dtype
    lines["precision"] = f"{real} (x64 {'on' if real == jnp.float64 else 'off'})"
    lines["small loops"] = (
        "on"
        if small_loops_are_on()
        else "off (faster with few chains: diffmh.configure(small_loops=True))"
    )
    lines["gradient"], good = _gradient()
    for name, line in lines.items():
        print(f"{name:<12} {line}")
    return 0 if good else 1


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _gradient() -> tuple[str, bool]:
    """Estimate a known derivative, as a quick check of the installation."""
    runs = {"init": 0.0, "num_samples": 500, "burn_in": 50, "num_chains": 64}
    mean = expectation(lambda theta, x: x, gaussian.sampler(), **runs)
    report = mean.run(0.5, jax.random.key(0))
    value, error = float(report.gradient), float(report.gradient_error)
    good = abs(value - 1.0) < 5 * error
    verdict = "good" if good else "NOT what it should be"
    return f"dE[x]/dθ on N(θ, 1) is {value:.3f} ± {error:.3f}, exact 1: {verdict}", good


if __name__ == "__main__":
    sys.exit(main())

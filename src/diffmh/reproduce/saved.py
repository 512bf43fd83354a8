"""What is saved of an experiment, and whether it can be taken up again."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.resources
import json
import os
import pathlib
import zipfile
from typing import Any

import jax
import matplotlib
import numpy as np
from matplotlib.figure import Figure

from .catalogue import EXPERIMENTS
from .data import Data, from_arrays, to_arrays
from .experiment import Experiment, Outcome, Row


@dataclasses.dataclass(frozen=True)
class Saved:
    """An experiment as it was saved: what the page is made of."""

    experiment: Experiment
    data: Data
    settings: str
    rows: list[Row]
    seed: int
    fast: bool
    svg: str
    narrow_svg: str


@functools.cache
def made_by() -> str:
    """A digest of this package's code and JAX's version: other code may find other numbers."""
    digest = hashlib.sha256(f"jax {jax.__version__}".encode())
    package = pathlib.Path(str(importlib.resources.files("diffmh")))
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def save(
    experiment: Experiment, outcome: Outcome, out: pathlib.Path, seed: int, fast: bool
) -> None:
    """`NAME.npz` (arrays), the figure drawn from it (`NAME.svg`, `NAME.png`, `NAME-narrow.svg`),
    and last `NAME.json` (settings and rows), which says that the others are there.
    """
    stem = out / experiment.name
    _whole(stem.with_suffix(".npz"), lambda path: _arrays(path, to_arrays(outcome.data)))
    plot(experiment, out)
    record = {
        "seed": seed,
        "fast": fast,
        "made_by": made_by(),
        "settings": outcome.settings,
        "rows": [row._asdict() for row in outcome.rows],
    }
    text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
    _whole(stem.with_suffix(".json"), lambda path: path.write_text(text, encoding="utf-8"))


def _whole(path: pathlib.Path, write: Any) -> None:
    """Writes beside and renames: whoever finds the file finds all of it."""
    part = path.with_name(f".{path.name}.part")
    try:
        write(part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _arrays(path: pathlib.Path, arrays: dict[str, np.ndarray]) -> None:
    with path.open("wb") as file:
        np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]


def plot(experiment: Experiment, out: pathlib.Path) -> None:
    """Draws an experiment's figure from its saved data alone."""
    data = _data(experiment, out)
    stem = out / experiment.name
    write(experiment.plot(data, False), stem.with_suffix(".svg"), stem.with_suffix(".png"))
    write(experiment.plot(data, True), out / f"{experiment.name}-narrow.svg")


def write(figure: Figure, *paths: pathlib.Path) -> None:
    """The same figure gives the same bytes."""
    metadata = {".svg": {"Date": None}, ".png": {"Software": None}}
    with matplotlib.rc_context({"svg.hashsalt": "diffmh", "svg.fonttype": "path"}):
        for path in paths:
            save = functools.partial(
                figure.savefig,
                format=path.suffix[1:],
                dpi=150,
                metadata=metadata[path.suffix],
            )
            _whole(path, save)


def _data(experiment: Experiment, out: pathlib.Path) -> Data:
    with np.load(out / f"{experiment.name}.npz") as arrays:
        return from_arrays(experiment.data, arrays)


def load(experiment: Experiment, out: pathlib.Path) -> Saved | None:
    """What this code saved of an experiment; `None` where there is nothing, or other code's, or
    only part.
    """
    try:
        record = json.loads((out / f"{experiment.name}.json").read_text(encoding="utf-8"))
        if record["made_by"] != made_by():
            return None
        return Saved(
            experiment,
            _data(experiment, out),
            record["settings"],
            [Row(**row) for row in record["rows"]],
            record["seed"],
            record["fast"],
            (out / f"{experiment.name}.svg").read_text(encoding="utf-8"),
            (out / f"{experiment.name}-narrow.svg").read_text(encoding="utf-8"),
        )
    except (FileNotFoundError, KeyError, TypeError, ValueError, zipfile.BadZipFile):
        return None


def load_all(out: pathlib.Path) -> list[Saved]:
    """In the paper's order."""
    found = (load(experiment, out) for experiment in EXPERIMENTS.values())
    return [saved for saved in found if saved is not None]

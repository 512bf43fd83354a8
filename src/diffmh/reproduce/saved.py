"""The saved files of an experiment, and the check that they can be reused."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.resources
import io
import json
import pathlib
import typing
from collections.abc import Mapping

import jax
import matplotlib
import numpy as np
from matplotlib.figure import Figure

from ..runs.files import write_whole
from .catalogue import EXPERIMENTS
from .experiment import Claim, D, Data, Experiment, Result, Size
from .progress import Status

# The files that are read again, in addition to `NAME.json`.
_READ = (".npz", ".svg", "-narrow.svg")


@dataclasses.dataclass(frozen=True)
class Saved:
    """An experiment as it was saved, for the page."""

    experiment: Experiment
    data: Data
    settings: str
    rows: list[Claim]
    seed: int
    size: Size
    svg: str
    narrow_svg: str


@functools.cache
def made_by() -> str:
    """A digest of this package's code and JAX's version: other code may give other numbers."""
    digest = hashlib.sha256(f"jax {jax.__version__}".encode())
    package = pathlib.Path(str(importlib.resources.files("diffmh")))
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def save(experiment: Experiment, outcome: Result, out: pathlib.Path, seed: int, size: Size) -> None:
    """Write `NAME.npz` (arrays), the figure drawn from it (`NAME.svg`, `NAME.png`,
    `NAME-narrow.svg`), and last `NAME.json` (settings and rows), which has the digests of the
    others and of itself.
    """
    stem = out / experiment.name
    write_whole(stem.with_suffix(".npz"), lambda path: _arrays(path, to_arrays(outcome.data)))
    plot(experiment, out)
    record = {
        "seed": seed,
        "size": size,
        "made_by": made_by(),
        "settings": outcome.settings,
        "rows": [row._asdict() for row in outcome.rows],
        "files": {kind: _digest((out / f"{experiment.name}{kind}").read_bytes()) for kind in _READ},
    }
    # This file is written last and has the digests of the others: if it exists, all are complete.
    record["digest"] = _digest(json.dumps(record).encode())
    text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
    write_whole(stem.with_suffix(".json"), lambda path: path.write_text(text, encoding="utf-8"))


def compute_and_save(
    experiment: Experiment, out: pathlib.Path, seed: int, size: Size, progress: Status
) -> None:
    """Run one experiment with its own key and save it."""
    progress.end(f"{experiment.title} …")
    key = jax.random.fold_in(jax.random.key(seed), experiment.figure)
    save(experiment, experiment.compute(key, size, progress), out, seed, size)


def to_arrays(data: Data) -> dict[str, np.ndarray]:
    """Every field, by name."""
    return {name: np.asarray(getattr(data, name)) for name in typing.get_type_hints(type(data))}


def from_arrays(kind: type[D], arrays: Mapping[str, np.ndarray]) -> D:
    """The inverse of `to_arrays`. Raises `KeyError` where a field is missing."""
    fields = {name: arrays[name] for name in typing.get_type_hints(kind)}
    return kind(**{name: field if field.ndim else field.item() for name, field in fields.items()})


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _arrays(path: pathlib.Path, arrays: dict[str, np.ndarray]) -> None:
    with path.open("wb") as file:
        np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]


def plot(experiment: Experiment, out: pathlib.Path) -> None:
    """Draw an experiment's figure from its saved data alone."""
    data = _data(experiment, (out / f"{experiment.name}.npz").read_bytes())
    stem = out / experiment.name
    write(experiment.plot(data, False), stem.with_suffix(".svg"), stem.with_suffix(".png"))
    write(experiment.plot(data, True), out / f"{experiment.name}-narrow.svg")


def write(figure: Figure, *paths: pathlib.Path) -> None:
    """Write a figure; the same figure gives the same bytes."""
    metadata = {".svg": {"Date": None}, ".png": {"Software": None}}
    with matplotlib.rc_context({"svg.hashsalt": "diffmh", "svg.fonttype": "path"}):
        for path in paths:
            options = {"format": path.suffix[1:], "dpi": 150, "metadata": metadata[path.suffix]}
            write_whole(path, functools.partial(figure.savefig, **options))


def _data(experiment: Experiment, content: bytes) -> Data:
    with np.load(io.BytesIO(content)) as arrays:
        return from_arrays(experiment.data, arrays)


def load(experiment: Experiment, out: pathlib.Path) -> Saved | None:
    """The saved results of an experiment; `None` if there are none, they are incomplete or from
    other code, or a file has changed since.
    """
    try:
        record = json.loads((out / f"{experiment.name}.json").read_text(encoding="utf-8"))
        told = record.pop("digest")
        files = {kind: (out / f"{experiment.name}{kind}").read_bytes() for kind in _READ}
        # Reuse only if nothing changed: the record, its files, and the code that made them.
        unchanged = told == _digest(json.dumps(record).encode()) and record["files"] == {
            kind: _digest(content) for kind, content in files.items()
        }
        if not unchanged or record["made_by"] != made_by():
            return None
    except (OSError, AttributeError, KeyError, TypeError, ValueError):
        return None
    return Saved(
        experiment,
        _data(experiment, files[".npz"]),
        record["settings"],
        [Claim(**row) for row in record["rows"]],
        record["seed"],
        Size(record["size"]),
        files[".svg"].decode(),
        files["-narrow.svg"].decode(),
    )


def load_all(out: pathlib.Path) -> list[Saved]:
    """All saved experiments, in the paper's order."""
    found = (load(experiment, out) for experiment in EXPERIMENTS.values())
    return [saved for saved in found if saved is not None]

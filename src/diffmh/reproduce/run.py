"""Running experiments: compute, save, draw from what was saved, and put all of it on a page."""

from __future__ import annotations

import json
import pathlib
import sys
import time

import jax
import matplotlib
import numpy as np
from matplotlib.figure import Figure

from . import page
from .catalogue import EXPERIMENTS, named
from .experiment import Experiment, Row


def reproduce(names: list[str], out: pathlib.Path, seed: int = 0, fast: bool = False) -> bool:
    """Runs the experiments of these names (all for none), writes `out`, prints their table; whether
    every verdict is good.

    Each experiment has a key of its own, so it finds the same numbers alone as among others.
    Results go to stdout, progress to stderr.
    """
    experiments = named(names)
    out.mkdir(parents=True, exist_ok=True)
    for i, experiment in enumerate(experiments, start=1):
        began = time.perf_counter()
        print(
            f"[{i}/{len(experiments)}] {experiment.name}: {experiment.title} …",
            file=sys.stderr,
            flush=True,
        )
        compute(experiment, out, seed, fast)
        draw(experiment, out)
        print(
            f"[{i}/{len(experiments)}] {experiment.name}: {time.perf_counter() - began:.0f} s",
            file=sys.stderr,
            flush=True,
        )
    path = page.write(
        out,
        [
            load(experiment, out)
            for experiment in EXPERIMENTS.values()
            if (out / f"{experiment.name}.json").exists()
        ],
    )
    rows = [row for experiment in experiments for row in load(experiment, out).rows]
    print(table(rows))
    failed = sum(row.passed is False for row in rows)
    print(
        f"\n{'All verdicts are good.' if not failed else f'{failed} of {len(rows)} verdicts FAILED.'} The page: {path}"
    )
    return not failed


def compute(experiment: Experiment, out: pathlib.Path, seed: int, fast: bool) -> None:
    """Saves what an experiment found: `NAME.npz` (arrays) and `NAME.json` (settings and rows)."""
    key = jax.random.fold_in(jax.random.key(seed), experiment.figure)
    outcome = experiment.compute(key, fast)
    np.savez(out / f"{experiment.name}.npz", **outcome.data)  # pyright: ignore[reportArgumentType]
    record = {
        "seed": seed,
        "fast": fast,
        "settings": outcome.settings,
        "rows": [row._asdict() for row in outcome.rows],
    }
    (out / f"{experiment.name}.json").write_text(
        json.dumps(record, indent=1, ensure_ascii=False) + "\n"
    )


def load(experiment: Experiment, out: pathlib.Path) -> page.Saved:
    """What was saved of an experiment."""
    record = json.loads((out / f"{experiment.name}.json").read_text())
    with np.load(out / f"{experiment.name}.npz") as arrays:
        data = dict(arrays)
    rows = [Row(**row) for row in record["rows"]]
    svg = (
        (out / f"{experiment.name}.svg").read_text()
        if (out / f"{experiment.name}.svg").exists()
        else ""
    )
    return page.Saved(
        experiment, data, record["settings"], rows, record["seed"], record["fast"], svg
    )


def draw(experiment: Experiment, out: pathlib.Path) -> None:
    """Draws an experiment's figure, as SVG and PNG, from its saved data alone."""
    figure = experiment.draw(load(experiment, out).data)
    save(figure, out / experiment.name)


def save(figure: Figure, stem: pathlib.Path) -> None:
    """The same figure gives the same bytes."""
    with matplotlib.rc_context({"svg.hashsalt": "diffmh", "svg.fonttype": "path"}):
        figure.savefig(stem.with_suffix(".svg"), metadata={"Date": None})
        figure.savefig(stem.with_suffix(".png"), dpi=150, metadata={"Software": None})


def table(rows: list[Row]) -> str:
    """The table for a terminal."""
    verdict = {True: "good", False: "FAILED", None: "—"}
    lines = [("quantity", "paper", "exact", "ours ± error", "bar", "verdict")]
    lines += [
        (row.quantity, row.paper, row.exact, row.ours, row.bar, verdict[row.passed]) for row in rows
    ]
    widths = [max(len(line[i]) for line in lines) for i in range(6)]
    join = lambda line: "  ".join(
        cell.ljust(width) for cell, width in zip(line, widths, strict=True)
    ).rstrip()
    return "\n".join(
        [join(lines[0]), "  ".join("-" * width for width in widths), *map(join, lines[1:])]
    )

"""The paper on one command: what is saved, what is drawn from it, the table and the exit code."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from diffmh.cli import app
from diffmh.plots.branching import branches
from diffmh.reproduce import EXPERIMENTS, Outcome, Row, catalogue, run
from diffmh.reproduce.experiment import against_exact, digits, worst

COMMAND = CliRunner()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Two experiments of six, the quickest, as a user would run them."""
    out = tmp_path_factory.mktemp("results")
    done = COMMAND.invoke(app, ["reproduce", "branching", "4", "--fast", "--out", str(out)])
    assert done.exit_code == 0, done.output
    return out, done


def test_all_figures_of_the_paper_are_there():
    listed = COMMAND.invoke(app, ["reproduce", "--list"]).stdout.splitlines()
    assert [line.split()[0] for line in listed] == list(EXPERIMENTS)
    assert [experiment.figure for experiment in EXPERIMENTS.values()] == [1, 2, 3, 4, 5, 6]


def test_the_table_is_on_stdout_and_progress_on_stderr(results):
    _, done = results
    assert (
        "dE[x]/dθ, N(θ,1)" in done.stdout
        and "verdict" in done.stdout
        and "All verdicts are good" in done.stdout
    )
    assert "[1/2] branching" in done.stderr and "[1/2]" not in done.stdout


def test_what_is_saved(results):
    out, _ = results
    names = {path.name for path in out.iterdir()}
    assert names == {
        "index.html",
        *(
            f"{n}.{kind}"
            for n in ("branching", "recoupling")
            for kind in ("npz", "json", "svg", "png")
        ),
    }
    record = json.loads((out / "branching.json").read_text())
    assert record["fast"] and record["seed"] == 0 and len(record["rows"]) == 2
    assert "src=" not in (out / "index.html").read_text() and "http" not in links(
        (out / "index.html").read_text()
    )


def links(page: str) -> str:
    """All that a browser would fetch."""
    return " ".join(re.findall(r'(?<!xmlns:)(?:href|src)="([^"]*)"', page))


def test_the_same_seed_gives_the_same_bytes(results, tmp_path):
    out, _ = results
    assert (
        COMMAND.invoke(app, ["reproduce", "fig1", "--fast", "--out", str(tmp_path)]).exit_code == 0
    )
    for kind in ("npz", "json", "svg"):
        assert (tmp_path / f"branching.{kind}").read_bytes() == (
            out / f"branching.{kind}"
        ).read_bytes()


def test_drawing_reads_only_what_was_saved(results, monkeypatch):
    out, _ = results
    before = (out / "recoupling.svg").read_bytes()
    (out / "recoupling.svg").unlink()
    monkeypatch.setattr(run.jax.random, "key", lambda *_: pytest.fail("drawing computes nothing"))
    run.draw(EXPERIMENTS["recoupling"], out)
    assert (out / "recoupling.svg").read_bytes() == before


def test_a_failed_verdict_is_an_exit_code(tmp_path, monkeypatch):
    branching = EXPERIMENTS["branching"]
    wrong = branching._replace(
        compute=lambda key, fast: Outcome(
            SMALL["branching"], "none", [Row("a", "1", "1", "2", "none", False)]
        )
    )
    monkeypatch.setitem(catalogue.EXPERIMENTS, "branching", wrong)
    done = COMMAND.invoke(app, ["reproduce", "branching", "--out", str(tmp_path)])
    assert done.exit_code == 1 and "1 of 1 verdicts FAILED" in done.stdout
    assert "✗ failed" in (tmp_path / "index.html").read_text()


def test_an_unknown_name_is_refused(tmp_path):
    done = COMMAND.invoke(app, ["reproduce", "figure9", "--out", str(tmp_path / "none")])
    assert done.exit_code == 2 and "there is no experiment figure9" in done.stderr
    assert not (tmp_path / "none").exists()


def test_doctor():
    done = COMMAND.invoke(app, ["doctor"])
    assert done.exit_code == 0
    assert all(word in done.stdout for word in ("jax ", "devices", "float32", "exact 1: good"))


def test_rows():
    assert (
        against_exact("a", 1.0, 1.04, 0.01).passed
        and not against_exact("a", 1.0, 1.06, 0.01).passed
    )
    assert (
        against_exact("a", -288.0, -288.0, 0.0).passed
        and not against_exact("a", -288.0, -287.9, 0.0).passed
    )
    ones = np.ones(3)
    assert worst("a", "b", ones, ones + np.array([0.0, 0.0, 0.04]), 0.01 * ones).passed
    assert not worst("a", "b", ones, ones + np.array([0.0, 0.06, 0.0]), 0.01 * ones).passed
    assert [digits(1.23456, 0.0123), digits(123.4, 17.0), digits(-288.0, 0.0)] == [
        "1.235 ± 0.012",
        "123 ± 17",
        "-288",
    ]


H = np.linspace(-14, 14, 9)
LATTICES = np.where(np.random.default_rng(0).random((8, 12, 12)) < 0.5, 1, -1).astype(np.int8)
SMALL = {
    "branching": {
        "primal": np.linspace(0, 1, 9),
        "alternative": np.linspace(1, 2, 8),
        "weight": np.full(8, 0.3),
        "alive": np.array([1, 1, 0, 1, 1, 1, 0, 0], bool),
        "born": np.array([1, 0, 0, 1, 0, 1, 0, 0], bool),
        "recoupled": np.array([0, 0, 1, 0, 0, 0, 1, 0], bool),
        "window": np.array([0, 8]),
        "theta": np.array(0.5),
    },
    "mixture": {
        "path": np.array([0, 1, 2, 1]), "h": H, "posterior": np.full((9, 3), 1 / 3), "entropy": 1 - H**2 / 400,
        "slope": -H / 200, "slope_error": 0 * H + 0.01, "exact_entropy": 1 - H**2 / 400, "exact_slope": -H / 200,
        "ascents": np.ones((2, 5)), "maximiser": np.array(1.0), "means": np.array([-2.5, 2.0, 5.0]), "scale": np.array(4.0),
    },
    "ising": {
        "temperature": np.array([3.0, 1.0, 2.0]),
        **{name: np.ones((3, 2)) for name in ("value", "value_error", "slope", "slope_error")},
        "curve_temperature": H, "curve": np.stack([H, H, H], 1), "peak": np.array(2.3),
    },
    "recoupling": {
        "primal": LATTICES, "alternative": -LATTICES, "first": np.array(1), "num_sweeps": np.array(6), "sweep": np.arange(8),
    },
    "variance": {
        "length": np.array([50, 500]), "paper_length": np.array([50, 500]),
        **dict.fromkeys(("one-sided", "two-sided", "K = 8", "covariance", "score"), np.array([1e-3, 1e-4])),
        **dict.fromkeys(("paper_one-sided", "paper_score"), np.array([1e-3, 1e-4])),
    },
    "ascent": {
        **{f"{name}_{what}": np.ones(4) for name in ("coupled", "uncoupled", "ours") for what in ("theta", "value")},
        "peak": np.array(2.3), "average": np.array(2.3),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_figures_from_data(name, tmp_path):
    run.save(EXPERIMENTS[name].draw(SMALL[name]), tmp_path / name)
    assert (tmp_path / f"{name}.svg").stat().st_size > 5_000


def test_branches_of_a_path():
    found = branches(SMALL["branching"])
    assert [branch.start for branch in found] == [0, 3, 5]
    np.testing.assert_allclose(
        found[0].values, [0, 1, 8 / 7, 3 / 8]
    )  # born, alive, then at the primal's place
    np.testing.assert_allclose(
        found[1].values, [3 / 8, 10 / 7, 11 / 7]
    )  # pruned away: it ends in the air

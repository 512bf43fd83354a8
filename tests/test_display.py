"""The display of results: with numbers, in a line and in a notebook."""

from __future__ import annotations

import html.parser

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_runs import KEY, WALK

import diffmh
from diffmh.core.admission import Unflatten
from diffmh.reports.report import RunChains
from diffmh.reports.report import report as make_report


def made(form, theta, **options):
    """A report of eight chains that nobody ran."""
    count = sum(leaf.size for leaf in jax.tree.leaves(form))
    size = sum(np.size(leaf) for leaf in jax.tree.leaves(theta))
    unflatten = Unflatten(jax.tree.structure(form), tuple(x.shape for x in jax.tree.leaves(form)))
    draw = np.random.default_rng(0).normal
    value, slope = draw(1.0, 0.1, (count, 8)), draw(-1.0, 0.2, (size, count, 8))
    return make_report(RunChains(unflatten, theta, value, slope, (), **options))


@pytest.fixture(scope="module")
def report():
    theta = {"mean": jnp.zeros(2), "precision": jnp.float32(1.3)}
    return made((np.zeros(2), [np.zeros(2)]), theta)


def test_a_report_shows_its_numbers(report):
    shown = repr(report)
    value, error = (float(leaf[0][0]) for leaf in (report.value, report.value_error))
    assert f"{value:.3f} ± {error:.3f}" in shown and "f32[" not in shown
    assert "num_chains=8" in shown and shown.startswith("Report(")


class Cells(html.parser.HTMLParser):
    """The texts of a table's cells; every tag is closed."""

    def __init__(self):
        super().__init__()
        self.open, self.cells = [], []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.cells.append(data)


def test_a_report_in_a_notebook_is_a_table(report):
    reader = Cells()
    reader.feed(report._repr_html_())
    assert not reader.open
    assert "f[0][0]" in reader.cells and "gradient [1][0]['precision'][1]" in reader.cells
    low, high = report.interval(0.95)[0][0][0]
    row = reader.cells.index("f[0][0]")
    drawn = [float(end) for end in reader.cells[row + 2].split(" … ")]
    np.testing.assert_allclose(drawn, [low, high], atol=1e-3)


def test_warnings_are_in_it_and_nothing_is_taken_for_a_tag():
    report = made({"<b>": np.zeros(())}, jnp.float32(0.5), warnings=("a chain is stuck",))
    shown = report._repr_html_()
    assert "a chain is stuck" in shown and "&lt;b&gt;" in shown and "<b>" not in shown
    assert "warnings=1" in repr(report)


def test_a_long_table_is_cut():
    shown = made(np.zeros(40), jnp.float32(0.5))._repr_html_()
    assert shown.count("<tr>") == 1 + 24 + 1 and "… and 56 more" in shown


def test_a_trace_and_an_ascent_show_theirs():
    trace = diffmh.trace(WALK, 0.5, KEY, init=0.0, num_steps=50)
    born, met = int(trace.born.sum()), int(trace.recoupled.sum())
    assert f"num_steps=50, alternatives=1, accepted={float(trace.accepted.mean()):.1%}" in repr(
        trace
    )
    assert f"born={born}, recoupled={met}" in repr(trace)

    bowl = lambda theta, key: jnp.sum(theta["a"] ** 2)
    sgd = optax.sgd(0.25)
    path = diffmh.optimise(bowl, {"a": jnp.array([4.0])}, KEY, optimizer=sgd, num_iterations=2)
    assert repr(path) == (
        "Ascent(num_iterations=2, value=16 → 4, theta={'a': [4]} → {'a': [1]}, average={'a': [2]})"
    )


def test_models_and_plots_are_there_after_import():
    assert diffmh.models.mixture.sampler() is not None and callable(diffmh.plots.report)

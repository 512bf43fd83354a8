"""diffmh.plots on the library's own objects: what is drawn is what they hold."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import diffmh
from diffmh.models import gaussian, ising, mixture
from diffmh.plots.trace import branch, spans
from diffmh.reports.display import entries

KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def path():
    return diffmh.trace(gaussian.sampler(), 0.5, KEY, init=0.0, num_steps=60)


@pytest.fixture(scope="module")
def found():
    """Two outputs, three parameters: `f` is linear, so its derivative in `scale` is known."""
    kernel = diffmh.MetropolisHastings(
        lambda theta, x: -0.5 * (x - theta["mean"]) ** 2, diffmh.GaussianWalk(2.38)
    )
    mean = diffmh.expectation(
        lambda theta, x: {"all": x * theta["scale"], "one": x},
        kernel,
        init=0.0,
        num_samples=100,
        num_chains=8,
    )
    return mean.run({"mean": 0.5, "scale": jnp.array([1.0, -2.0])}, KEY)


@pytest.fixture(scope="module")
def climbed():
    square = lambda theta, key: jnp.sum((theta["a"] - 1.0) ** 2) + theta["b"] ** 2
    start = {"a": jnp.zeros(2), "b": jnp.ones(())}
    return diffmh.optimise(square, start, KEY, optimizer=optax.sgd(0.1), num_iterations=5)


def lines_of(ax) -> dict[str, np.ndarray]:
    return {line.get_label(): np.asarray(line.get_xydata()) for line in ax.get_lines()}


# ---- trace


def test_the_primals_line_is_the_path_with_its_start(path):
    primal = lines_of(diffmh.plots.trace(path).axes[0])["primal"]
    np.testing.assert_array_equal(primal[:, 0], np.arange(61))
    np.testing.assert_array_equal(primal[:, 1], np.concatenate([[0.0], path.primal]))


def test_every_piece_of_an_alternative_is_drawn_where_it_was(path):
    ax = diffmh.plots.trace(path).axes[0]
    drawn = {(t, float(y)) for piece in ax.collections[0].get_segments() for t, y in piece}
    alive = np.flatnonzero(np.asarray(path.alive)[:, 0])
    assert len(alive) > 10
    for t in alive:
        assert (t + 1, float(path.alternative[t, 0])) in drawn


def test_an_alternative_ends_at_the_primal_or_in_the_air():
    """Slots as they were found by hand: born, kept, met; born, replaced by another; still there."""
    flags = lambda text: np.array([letter == "1" for letter in text])
    alive, born, met = flags("110110110"), flags("100101000"), flags("001001001")
    path, other, weight = np.arange(10.0), 10.0 + np.arange(9), np.linspace(1, 2, 9)
    first, second = (branch(span, path, other, weight) for span in spans(alive, born, met)[:2])
    assert (first.end, first.start, first.last) == ("recoupled", 0, 3)
    np.testing.assert_allclose(first.values, [0, 10, 11, 3])
    np.testing.assert_allclose(first.weights, [weight[0], weight[1], weight[1]])
    # In step 6 it met the primal, and another was born and gone within the same step.
    assert (second.end, second.last) == ("recoupled", 6)

    (pruned, kept) = spans(flags("1111"), flags("1010"), flags("0000"))
    assert pruned.end == "pruned" and kept.end == "alive"
    line = branch(pruned, path, other, weight)
    assert line.last == 2 and line.values[-1] == other[1]


def test_steps_and_entries_are_chosen(path):
    axes = diffmh.plots.trace(path, steps=(10, 20)).axes
    assert axes[0].get_xlim() == (9.5, 20.5)
    np.testing.assert_array_equal(lines_of(axes[0])["primal"][:, 0], np.arange(10, 21))
    lattice = diffmh.trace(ising.sampler(), 3.0, KEY, init=ising.cold(4), num_steps=5)
    shown = diffmh.plots.trace(lattice, most=2).axes
    assert len(shown) == 3 and "2 of 16 entries" in shown[0].get_title(loc="left")


def test_several_slots_and_vector_weights():
    """The last panel has the norm of each slot's weights."""
    kernel = diffmh.MetropolisHastings(
        lambda theta, x: -0.5 * jnp.sum((x - theta) ** 2), diffmh.GaussianWalk(1.5)
    )
    two = diffmh.StochasticDerivative(alternatives=2)
    path = diffmh.trace(kernel, jnp.zeros(2), KEY, init=jnp.zeros(2), num_steps=30, estimator=two)
    *states, weights = diffmh.plots.trace(path).axes
    assert [ax.get_ylabel() for ax in states] == ["x[0]", "x[1]"]
    for slot, line in enumerate(weights.get_lines()):
        alive = np.asarray(path.alive)[:, slot]
        norm = np.sqrt(np.sum(np.asarray(path.weight)[alive, slot] ** 2, axis=-1))
        np.testing.assert_allclose(line.get_ydata()[alive], norm, rtol=1e-6)
        assert np.all(np.isnan(line.get_ydata()[~alive]))


@pytest.mark.parametrize("steps", [(10, 61), (5, 5), (7, 3)])
def test_steps_that_are_not_there_are_refused(path, steps):
    with pytest.raises(ValueError, match=r"plots.trace\(steps=...\)` must be .* ≤ 60"):
        diffmh.plots.trace(path, steps=steps)


# ---- report


def estimates(ax):
    """`{name: (estimate, low, high)}` as drawn."""
    names = [label.get_text() for label in ax.get_yticklabels()]
    (bars,) = ax.containers
    middle, _, (whiskers,) = bars.lines
    ends = [segment[:, 0] for segment in whiskers.get_segments()]
    return {name: (x, *end) for name, x, end in zip(names, middle.get_xdata(), ends, strict=True)}


def test_every_entry_of_value_and_gradient_with_its_interval(found):
    value, gradient = map(estimates, diffmh.plots.report(found).axes)
    assert list(value) == ["f['all'][0]", "f['all'][1]", "f['one']"]
    assert len(gradient) == 9
    for name, f, parameter, at in (
        ("df['all'][1] / dθ['mean']", "all", "mean", (1,)),
        ("df['all'][1] / dθ['scale'][1]", "all", "scale", (1, 1)),
        ("df['one'] / dθ['scale'][0]", "one", "scale", (0,)),
    ):
        ends = found.interval(0.95)[1][f][parameter][at]
        wanted = [found.gradient[f][parameter][at], *ends]
        np.testing.assert_allclose(gradient[name], wanted, rtol=1e-5, atol=1e-6)
        assert ends[0] < ends[1] or at == (0,)


def test_a_level_widens_the_interval(found):
    for level in (0.5, 0.99):
        drawn = estimates(diffmh.plots.report(found, level=level).axes[0])["f['one']"]
        np.testing.assert_allclose(drawn[1:], found.interval(level)[0]["one"], rtol=1e-5)


def test_of_many_entries_the_largest_are_shown():
    many = diffmh.expectation(
        lambda theta, x: theta * x, gaussian_of_many(), init=0.0, num_samples=50, num_chains=4
    )
    report = many.run(jnp.linspace(-1.0, 0.9, 5), KEY)
    drawn = estimates(diffmh.plots.report(report, most=3).axes[0])
    largest = np.sort(np.argsort(-np.abs(report.value))[:3])
    assert list(drawn) == [f"f[{i}]" for i in largest]


def gaussian_of_many():
    return diffmh.MetropolisHastings(
        lambda theta, x: -0.5 * (x - jnp.sum(theta) - 2.0) ** 2, diffmh.GaussianWalk(2.0)
    )


def test_chains_are_dots(found):
    """Whose mean is the estimate."""
    value, gradient = diffmh.plots.report(found).axes
    dots = [line for line in value.get_lines() if len(line.get_xdata()) == 8]
    assert len(dots) == 3
    np.testing.assert_array_equal(dots[2].get_xdata(), found.per_chain.value["one"])
    np.testing.assert_allclose(np.mean(dots[2].get_xdata()), found.value["one"], rtol=1e-5)
    dots = [line for line in gradient.get_lines() if len(line.get_xdata()) == 8]
    assert len(dots) == 9
    ones = found.per_chain.gradient["one"]["mean"]
    np.testing.assert_array_equal(dots[6].get_xdata(), ones)
    np.testing.assert_allclose(np.mean(ones), found.gradient["one"]["mean"], rtol=1e-5)
    assert np.std(ones) > 0


@pytest.mark.parametrize("level", [0, 1, 95])
def test_a_level_beyond_is_refused(found, level):
    with pytest.raises(ValueError, match=r"plots.report\(level=...\)` must be between 0 and 1"):
        diffmh.plots.report(found, level=level)


# ---- ascent


def test_the_iterates_the_objective_and_the_gradient(climbed):
    parameters, objective, gradient = diffmh.plots.ascent(climbed).axes
    drawn = lines_of(parameters)
    assert [name for name in drawn if name.startswith("θ")] == ["θ['a'][0]", "θ['a'][1]", "θ['b']"]
    np.testing.assert_array_equal(drawn["θ['b']"][:, 1], climbed.theta["b"])
    np.testing.assert_array_equal(objective.get_lines()[0].get_ydata(), climbed.value)
    assert not objective.collections, "nobody knows the errors of an objective without chains"
    np.testing.assert_array_equal(gradient.get_lines()[3].get_ydata(), climbed.gradient["b"])


def test_errors_are_bands_where_there_are_chains():
    p = diffmh.expectation(
        mixture.indicator, mixture.sampler(), init=0, num_samples=50, num_chains=4
    )
    entropy = diffmh.compose(lambda h, p: mixture.entropy(p), p)
    path = diffmh.optimise(entropy, 2.0, KEY, optimizer=optax.adam(0.1), num_iterations=4)
    _, objective, _ = diffmh.plots.ascent(path).axes
    band = objective.collections[0].get_paths()[0].vertices
    low, high = band[band[:, 0] == 2.0][:, 1].min(), band[band[:, 0] == 2.0][:, 1].max()
    wanted = float(path.value[2]) + np.array([-1, 1]) * float(path.value_error[2])
    np.testing.assert_allclose([low, high], wanted, rtol=1e-5)


# ---- all


@pytest.mark.parametrize("name", ["trace", "report", "ascent"])
def test_what_is_not_of_the_library_is_refused(name):
    with pytest.raises(TypeError, match=rf"`plots.{name}\({name}\)`: .* got \[1.0\]"):
        getattr(diffmh.plots, name)([1.0])


def test_names_of_entries():
    tree = {"a": np.arange(6.0).reshape(1, 2, 3)}
    named = entries(tree, "x", leading=1)
    assert [entry.name for entry in named][:2] == ["x['a'][0, 0]", "x['a'][0, 1]"]
    assert named[-1].values.tolist() == [5.0]


def test_a_notebook_shows_it(path):
    """IPython asks for it by this name; pyplot's figures have a formatter of their own."""
    assert diffmh.plots.trace(path)._repr_png_().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_which_extra_to_install():
    code = """
        import sys
        sys.modules["matplotlib"] = None
        import jax, diffmh
        from diffmh.models import gaussian
        path = diffmh.trace(gaussian.sampler(), 0.5, jax.random.key(0), init=0.0, num_steps=5)
        try:
            diffmh.plots.trace(path)
        except ModuleNotFoundError as error:
            print(error)
    """
    code = textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert 'pip install "diffmh[plots]"' in done.stdout, done.stderr[-2000:]

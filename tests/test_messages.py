"""Messages that say what to do, where one used to be a traceback of somebody else's."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import diffmh
from diffmh.models import gaussian, ising

KEY = jax.random.key(0)


def mean_of(f, **options):
    return diffmh.expectation(
        f, gaussian.sampler(), init=0.0, num_samples=20, num_chains=4, **options
    )


def test_functions_of_other_arguments():
    """The message names the function and how it is called, before anything is traced."""
    draws = {"x": jnp.zeros((2, 10))}
    density = lambda theta, x: -0.5 * jnp.sum((x["x"] - theta) ** 2)
    f = lambda theta, x: x["x"]

    def mean(f, density, *data):
        kernel = diffmh.MetropolisHastings(density, diffmh.GaussianWalk(1.0))
        init = {"x": jnp.zeros(())}
        made = diffmh.expectation(f, kernel, init=init, num_samples=5, num_chains=4)
        return made(0.5, KEY, *data)

    def of_draws(f, density, *data):
        return diffmh.from_draws(f, density, draws).run(0.5, *data)

    for door in (mean, of_draws):
        with pytest.raises(TypeError, match=r"`f` is called as `f\(theta, x\)`, but .* `\(x\)`"):
            door(lambda x: x["x"], density)
        with pytest.raises(TypeError, match=r"`log_density` is called as .*theta, x\).* `\(x\)`"):
            door(f, lambda x: 0.0)
        with pytest.raises(
            TypeError, match=r"\(theta, x, args\[0\]\).*the data at the end of your"
        ):
            door(f, density, jnp.ones(3))
    with pytest.raises(TypeError, match=r"`f` is called as `f\(theta, x_earlier, x\)`"):
        mean_of(lambda theta, x: x, lag=1)(0.5, KEY)


def test_optimise_a_pytree():
    pair = mean_of(lambda theta, x: {"a": x, "b": x**2})
    for objective in (pair, lambda theta, key: {"a": theta, "b": theta**2}):
        with pytest.raises(ValueError, match=r"one number.*'a': \(\).*compose"):
            diffmh.optimise(objective, 0.0, KEY, optimizer=optax.sgd(0.1), num_iterations=2)


def test_an_optimiser_that_was_not_called():
    with pytest.raises(TypeError, match=r"optimizer=.*GradientTransformation.*call it.*adam\(0.01"):
        diffmh.optimise(
            lambda theta, key: theta**2, 0.0, KEY, optimizer=optax.adam, num_iterations=2
        )
    with pytest.raises(TypeError, match=r"optimizer=.*got 0.1\."):
        diffmh.optimise(lambda theta, key: theta**2, 0.0, KEY, optimizer=0.1, num_iterations=2)


def rosenbrock(theta, key):
    return (1 - theta[0]) ** 2 + 100 * (theta[1] - theta[0] ** 2) ** 2


@pytest.mark.parametrize("maximise", [False, True])
def test_an_optimiser_with_a_line_search(maximise):
    """L-BFGS asks for values elsewhere, and gets them of the right sign."""
    objective = (lambda theta, key: -rosenbrock(theta, key)) if maximise else rosenbrock
    path = diffmh.optimise(
        objective,
        jnp.array([-1.0, 1.5]),
        KEY,
        optimizer=optax.lbfgs(),
        num_iterations=40,
        maximise=maximise,
    )
    np.testing.assert_allclose(path.last, [1.0, 1.0], atol=1e-3)


def test_a_line_search_on_chains():
    distance = mean_of(lambda theta, x: (x - 2.0) ** 2)
    path = diffmh.optimise(distance, 0.0, KEY, optimizer=optax.lbfgs(), num_iterations=2)
    assert np.all(np.isfinite(path.value))


@pytest.mark.parametrize("count", [3e9, 3_000_000_000])
def test_too_many_samples(count):
    with pytest.raises(
        ValueError, match=r"num_samples=...` must be at most 2,147,483,647, got 3,000"
    ):
        diffmh.expectation(lambda t, x: x, gaussian.sampler(), init=0.0, num_samples=count)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ising.exact(4, -2.0), r"exact\(temperature=...\)` must be positive.*-2.0"),
        (lambda: ising.exact(4, 0.0), r"exact\(temperature=...\)` must be positive.*0.0"),
        (lambda: ising.exact(4, 2.0, -1.0), r"exact\(interaction=...\)` must be positive.*-1.0"),
        (lambda: ising.enumerated(2, -2.0), r"temperature `T` must be positive.*-2.0"),
        (lambda: ising.peak(4, -1.0), r"peak\(interaction=...\)` must be positive.*-1.0"),
    ],
)
def test_exact_answers_that_there_are_not(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def closing(scale, within):
    hidden = jax.lax.stop_gradient if within else lambda value: value
    kernel = diffmh.MetropolisHastings(
        lambda theta, x: -0.5 * ((x - theta) / hidden(scale)) ** 2, diffmh.GaussianWalk(2.38)
    )
    return diffmh.expectation(lambda t, x: x, kernel, init=0.0, num_samples=20, num_chains=4)


def test_where_a_stopped_gradient_helps():
    """The message names the place, and there it does."""
    with pytest.raises(
        diffmh.NotDifferentiable, match=r"`jax.lax.stop_gradient` to the value outside .* no effect"
    ):
        jax.grad(lambda s: closing(s, within=True)(0.5, KEY))(1.0)
    outside = lambda s: closing(jax.lax.stop_gradient(s), within=False)(s, KEY)
    assert np.isfinite(jax.grad(outside)(1.0))


DRAWS = {"x": jax.random.normal(KEY, (4, 20))}


def log_normal_draws(theta, x):
    return -0.5 * (x["x"] - theta) ** 2


def controlled(g):
    mean = mean_of(
        lambda theta, x: x + 0.0 * theta, estimator=diffmh.StochasticDerivative(control=g)
    )
    return lambda: jax.grad(mean)(0.5, KEY)


def complex_odds():
    kernel = diffmh.BlockGibbs(
        lambda theta, x: (theta + 1j) * jnp.ones(2), lambda x: x, lambda theta, x: theta * x.sum()
    )
    return diffmh.expectation(
        lambda theta, x: 1.0 * x.sum(), kernel, init=jnp.zeros(2, int), num_samples=3, num_chains=2
    )(0.5, KEY)


class ComplexWalk(diffmh.extend.Proposal):
    symmetric: bool = False

    def sample(self, key, x):
        return x + jax.random.normal(key)

    def log_prob(self, x, x_new):
        return 1j * (x - x_new)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: diffmh.compose(
                lambda theta, a: jnp.exp(1j * a), mean_of(lambda theta, x: x)
            ).run(0.5, KEY),
            "`phi` of `compose",
        ),
        (
            lambda: diffmh.from_draws(
                lambda theta, x: jnp.exp(1j * x["x"]), log_normal_draws, DRAWS
            ).run(0.5),
            "`f` returns is complex",
        ),
        (
            lambda: diffmh.from_draws(
                lambda theta, x: x["x"], lambda theta, x: 1j * log_normal_draws(theta, x), DRAWS
            ).run(0.5),
            "`log_density` returns is complex",
        ),
        (
            lambda: diffmh.from_draws(
                lambda theta, x: x["x"].real, log_normal_draws, {"x": 1j * DRAWS["x"]}
            ),
            r"draws=...\)`\['x'\] is complex",
        ),
        (lambda: diffmh.CrankNicolson(0.5, centre=1j), r"CrankNicolson\(centre=...\)` is complex"),
        (lambda: diffmh.Score(baseline=1j), r"Score\(baseline=...\)` is complex"),
        (controlled(lambda theta, x: 1j * x), r"control=...\)` returns is complex"),
        (complex_odds, r"BlockGibbs\(logits=...\)` returns is complex"),
        (
            lambda: diffmh.optimise(
                lambda theta, key: 1j * theta, 0.5, KEY, optimizer=optax.sgd(0.1), num_iterations=1
            ),
            "`objective` of `optimise` returns is complex",
        ),
        (
            lambda: diffmh.expectation(
                lambda theta, x: x,
                diffmh.MetropolisHastings(gaussian.log_density, ComplexWalk()),
                init=0.0,
                num_samples=3,
            )(0.5, KEY),
            "ComplexWalk.log_prob` returns is complex",
        ),
    ],
)
def test_imaginary_parts_are_not_dropped(call, words):
    with pytest.raises(TypeError, match=f"{words}.*must be real"):
        call()


def test_a_control_of_another_form():
    with pytest.raises(ValueError, match=r"control=...\)` must return .* of 1 numbers, got 3"):
        controlled(lambda theta, x: jnp.zeros(3))()

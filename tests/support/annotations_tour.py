"""A tour of the library for `test_shapes.py`, which runs it with all annotations checked.

Tracing is enough: shapes are known then, and nothing need be compiled.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from random_kernels import THETAS, expectation_of
from random_problems import numbers
from random_structures import structures

import diffmh
from diffmh import sad
from diffmh.models import gaussian, ising, mixture

KEY = jax.random.key(0)
ESTIMATORS = (
    diffmh.StochasticDerivative(alternatives=2),
    diffmh.Score("other chains"),
    diffmh.Covariance(),
)
LENGTH = dict(num_samples=20, burn_in=2, num_chains=3)


def trace(function, *arguments):
    """Value and derivatives."""
    eqx.filter_eval_shape(jax.jacfwd(function), *arguments)


def random_problems():
    for number, structure in enumerate(structures(3, seed=1)):
        drawn = jax.tree.map(jnp.float32, numbers(structure, number, tied=False))
        expectation = expectation_of(structure, drawn, 3)
        args = (drawn,) if structure.tables == "args" else ()
        at = lambda theta: expectation.per_chain(theta, KEY, *args)
        eqx.filter_eval_shape(jax.jacfwd(at), THETAS[structure.theta](drawn["theta"]))


def continuous():
    walk = diffmh.GaussianWalk(jnp.array([[1.0, 0.0], [0.5, 1.0]]))
    density = lambda theta, x: -0.5 * jnp.sum((x - theta["a"]) ** 2)
    theta = {"a": jnp.zeros(2), "b": jnp.ones(())}
    for proposal in (walk, diffmh.CrankNicolson(0.5)):
        kernel = diffmh.MetropolisHastings(density, proposal)
        f = lambda theta, x: {"x": x * theta["b"], "far": jnp.sum(x) > 1}
        trace(diffmh.expectation(f, kernel, init=jnp.zeros(2), **LENGTH), theta, KEY)
    mean = diffmh.expectation(lambda theta, x: x, gaussian.sampler(), init=0.0, **LENGTH)
    eqx.filter_eval_shape(lambda *given: mean.run_chains(*given).jacobian, 0.5, KEY)


def models():
    for estimator in ESTIMATORS:
        kernel = mixture.sampler()
        p = diffmh.expectation(mixture.indicator, kernel, init=0, estimator=estimator, **LENGTH)
        trace(diffmh.compose(lambda h, p: jnp.sum(p**2), p), 0.4, KEY)
    theta = ising.Parameter(3.0, 1.0, 0.1)
    for kernel, init in (
        (ising.sampler(), ising.cold(4)),
        (ising.sequential(3), jnp.ones((3, 3), jnp.int8)),
    ):
        trace(diffmh.expectation(ising.energy, kernel, init=init, **LENGTH), theta, KEY)


def programs():
    def draws(p, key):
        keys = jax.random.split(key, 4)
        label = sad.categorical(keys[0], jnp.stack([p, 0.0 * p, -p]))
        several = sad.bernoulli(keys[1], jnp.stack([p, 1 - p]))
        counts = sad.poisson(keys[2], 2 * p) + sad.binomial(keys[3], jnp.array(5), p)
        return label * several.sum() + counts

    def walk(p, key):
        def step(x, key):
            x = x + 2 * sad.bernoulli(key, p) - 1
            return x, x

        return jax.lax.scan(step, 0, jax.random.split(key, 5))[1].sum() * p

    def until(p, key):
        def body(carry):
            x, key = carry
            key, use = jax.random.split(key)
            return x + sad.bernoulli(use, p), key

        return jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, key))[0] * 1.0

    for program in (draws, walk, until):
        expectation = sad.expectation(program, alternatives=2)
        eqx.filter_eval_shape(jax.value_and_grad(expectation), jnp.float32(0.4), KEY)


if __name__ == "__main__":
    for stop in (random_problems, continuous, models, programs):
        stop()
    try:
        diffmh.values.norm(jnp.zeros((2, 2), int))
    except Exception as error:
        print("checked:", type(error).__name__)

"""Shapes live in annotations and are checked here: a tour of the library with jaxtyping's
annotations run by beartype.
"""

import subprocess
import sys
import textwrap

TOUR = """
    from jaxtyping import install_import_hook

    with install_import_hook("diffmh", "beartype.beartype"):
        import diffmh
        from diffmh.models import ising, mixture

    import jax, jax.numpy as jnp

    key = jax.random.key(0) runs = dict(num_samples=20, burn_in=2, num_chains=3) for estimator in
    (diffmh.StochasticDerivative(alternatives=2), diffmh.Score("other chains"),
    diffmh.Covariance()):
        p = diffmh.expectation(mixture.indicator, mixture.sampler(), init=0, estimator=estimator,
        **runs) diffmh.compose(lambda h, p: jnp.sum(p**2), p).run(0.4, key)
    walk = diffmh.GaussianWalk(jnp.array([[1.0, 0.0], [0.5, 1.0]]))
    kernel = diffmh.MetropolisHastings(lambda theta, x: -0.5 * jnp.sum((x - theta["a"]) ** 2), walk)
    mean = diffmh.expectation(lambda theta, x: x * theta["b"], kernel, init=jnp.zeros(2), **runs)
    jax.jacrev(mean)({"a": jnp.zeros(2), "b": jnp.ones(())}, key)
    energy = diffmh.expectation(ising.energy, ising.sampler(), init=ising.cold(4), **runs)
    energy.run(ising.Parameter(3.0, 1.0, 0.1), key)
    diffmh.trace(ising.sampler(), 3.0, key, init=ising.cold(4), num_steps=5)
    try:
        diffmh.alternatives.norm(jnp.zeros((2, 2), int))
    except Exception as error:
        print("checked:", type(error).__name__)
"""


def test_shapes_as_annotated():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(TOUR)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "checked: " in done.stdout, "the annotations were not run"

"""Systematic sweeps over the sites of an array, moved one at a time by `On`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffmh

NUM_SITES = 3


def smooth(theta, z):
    return -0.5 * jnp.sum((z - theta) ** 2) - 0.25 * jnp.sum((z[1:] - z[:-1]) ** 2)


def potts(theta, z):
    return theta * jnp.sum(z[1:] == z[:-1]) + 0.3 * theta * jnp.sum(z == 0)


def terms_of(i):
    """The terms of `potts` that site i has a part in: a density of its own for each site."""

    def local(theta, z):
        neighbour = jnp.abs(jnp.arange(NUM_SITES) - i) == 1
        return theta * jnp.sum((z == z[i]) & neighbour) + 0.3 * theta * (z[i] == 0)

    return local


def mixed(theta, x):
    return (
        smooth(theta, x["mean"]) + potts(theta, x["label"]) + theta * x["mean"][0] * x["label"][1]
    )


def element(i):
    return lambda z: z[i]


def of_both(i):
    return lambda x: x["label"][i]


CASES = {
    "floats": (smooth, element, diffmh.GaussianWalk(1.0), jnp.zeros(NUM_SITES)),
    "labels": (potts, element, diffmh.OtherState(3), jnp.zeros(NUM_SITES, int)),
    "one array of several": (
        mixed,
        of_both,
        diffmh.OtherState(2),
        {"mean": 0.1 * jnp.arange(NUM_SITES), "label": jnp.zeros(NUM_SITES, int)},
    ),
}


def total(theta, x):
    return sum(jnp.sum(jnp.cos(leaf)) for leaf in jax.tree.leaves(x))


def test_a_density_of_its_own_for_each_site():
    """A ratio needs the terms of its site alone: the chain is that of the whole density, and what
    one site knows of its own is not taken for another's.
    """

    def slopes(density_at):
        at = lambda i: diffmh.MetropolisHastings(
            density_at(i), diffmh.On(element(i), diffmh.OtherState(3))
        )
        mean = diffmh.expectation(
            total,
            diffmh.Sweep(at, NUM_SITES),
            init=jnp.zeros(NUM_SITES, int),
            num_samples=10,
            num_chains=64,
            # Of several alternatives the lightest goes, and rounding decides between equal ones.
            estimator=diffmh.StochasticDerivative(alternatives=1),
        )
        return jax.jit(jax.value_and_grad(mean))(0.7, jax.random.key(3))

    np.testing.assert_allclose(slopes(terms_of), slopes(lambda i: potts), rtol=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        "one array of several",
        *(pytest.param(n, marks=pytest.mark.thorough) for n in ("floats", "labels")),
    ],
)
def test_a_sweep_is_the_cycle_of_its_sites(name):
    """With a traced index and with a fixed one: the same chain bit for bit, and the same
    derivative up to rounding.
    """
    density, where, proposal, init = CASES[name]
    at = lambda i: diffmh.MetropolisHastings(density, diffmh.On(where(i), proposal))
    kernels = diffmh.Sweep(at, NUM_SITES), diffmh.Cycle(*map(at, range(NUM_SITES)))
    options = dict(init=init, num_samples=20, num_chains=8)
    means = [diffmh.expectation(total, kernel, **options) for kernel in kernels]
    swept, fixed = (jax.jit(jax.value_and_grad(mean))(0.7, jax.random.key(30)) for mean in means)
    assert swept[0] == fixed[0]
    np.testing.assert_allclose(swept[1], fixed[1], rtol=1e-5)
    assert swept[1] != 0


def test_several_parts_by_one_index():
    """A label and a mean of different dtypes move together."""

    class Together(diffmh.extend.Proposal):
        symmetric: bool = True

        def sample(self, key, x):
            label, mean = x
            return 1 - label, mean + jax.random.normal(key)

        def log_prob(self, x, x_new):
            return jax.scipy.stats.norm.logpdf(x_new[1] - x[1])

    def moved(i):
        proposal = diffmh.On(lambda x: (x["label"][i], x["mean"][i]), Together())
        return proposal.sample(jax.random.key(0), CASES["one array of several"][3])

    for site in range(NUM_SITES):
        fixed, traced = moved(site), jax.jit(moved)(site)
        dtypes = lambda tree: [leaf.dtype for leaf in jax.tree.leaves(tree)]
        assert dtypes(fixed) == dtypes(traced)
        jax.tree.map(np.testing.assert_allclose, fixed, traced)
        assert fixed["label"].tolist() == [int(i == site) for i in range(NUM_SITES)]


def test_the_program_does_not_grow_with_the_sites():
    def lines(num_sites):
        at = lambda i: diffmh.MetropolisHastings(
            smooth, diffmh.On(lambda z: z[i], diffmh.GaussianWalk(1.0))
        )
        mean = diffmh.expectation(
            total, diffmh.Sweep(at, num_sites), init=jnp.zeros(num_sites), num_samples=2
        )
        return str(jax.make_jaxpr(jax.grad(mean))(0.5, jax.random.key(0))).count("\n")

    # From 64 numbers on, states of all sizes have the same default number of alternatives.
    assert lines(64) == lines(300)


def test_a_part_that_is_computed_is_refused():
    at = lambda i: diffmh.MetropolisHastings(
        smooth, diffmh.On(lambda z: 2 * z[i], diffmh.GaussianWalk(1.0))
    )
    mean = diffmh.expectation(
        total, diffmh.Sweep(at, NUM_SITES), init=jnp.zeros(NUM_SITES), num_samples=2
    )
    with pytest.raises(ValueError, match="must pick a part of the state and compute nothing"):
        mean(0.5, jax.random.key(0))


def test_every_site_is_examined():
    """A density that jumps at one site only, and one that depends on theta at one site only."""

    def sweep(density):
        at = lambda site: diffmh.MetropolisHastings(
            lambda theta, x: density(theta, x, site),
            diffmh.On(lambda x: x[site], diffmh.GaussianWalk(1.0)),
        )
        return diffmh.Sweep(at, 3)

    def jumps(theta, x, site):
        return -jnp.sum((x - theta) ** 2) + jnp.where(site == 2, 1.0 * (x[2] < theta), 0.0)

    def depends(theta, x, site):
        return -jnp.sum(x**2) + jnp.where(site == 2, theta * x[2], 0.0)

    first = lambda theta, x: x[2]
    options = dict(init=jnp.zeros(3), num_samples=2, num_chains=2)
    with pytest.raises(diffmh.NotDifferentiable, match="log_density"):
        diffmh.expectation(first, sweep(jumps), **options)(0.5, jax.random.key(0))
    diffmh.expectation(first, sweep(depends), **options)(0.5, jax.random.key(0))


@pytest.mark.parametrize("proposal", [lambda i: diffmh.OneLabel(2, i), diffmh.SpinFlip])
def test_the_site_of_a_proposal_may_be_a_sweeps(proposal):
    """The sweep's numbers are those of the cycle over the same sites."""
    density = lambda theta, z: theta * jnp.sum(z[1:] * z[:-1])
    kernel_at = lambda i: diffmh.MetropolisHastings(density, proposal(i))
    kernels = diffmh.Sweep(kernel_at, 3), diffmh.Cycle(*map(kernel_at, range(3)))

    def slope(kernel):
        mean = diffmh.expectation(
            lambda theta, z: jnp.sum(z[1:] * z[:-1]),
            kernel,
            init=jnp.ones(3, int),
            num_samples=20,
            num_chains=8,
        )
        return jax.value_and_grad(mean)(0.4, jax.random.key(0))

    swept, cycled = map(slope, kernels)
    np.testing.assert_allclose(swept, cycled, rtol=1e-6)
    assert swept[1] != 0


def test_a_traced_site_is_one_integer():
    with pytest.raises(TypeError, match=r"OneLabel\(site=...\)` must be an integer"):
        jax.eval_shape(lambda i: diffmh.OneLabel(2, i).sample(jax.random.key(0), jnp.ones(3)), 0.5)


def test_covariance_refuses_densities_of_one_site_each():
    """It would take the terms of site 0 for the whole density."""
    gibbs = lambda i: diffmh.Gibbs(terms_of(i), lambda z: z[i], 2)
    mean = diffmh.expectation(
        lambda theta, z: jnp.sum(z),
        diffmh.Sweep(gibbs, NUM_SITES),
        init=jnp.zeros(NUM_SITES, int),
        num_samples=5,
        estimator=diffmh.Covariance(),
    )
    with pytest.raises(ValueError, match=r"`Covariance\(\)` needs one density"):
        jax.eval_shape(jax.grad(mean), 0.5, jax.random.key(0))

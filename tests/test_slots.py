"""K alternatives: mapped as one more axis, the default K, flips that lead nowhere, and groups of
large states.
"""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffmh
from diffmh.core import alternatives, values
from diffmh.core.block_update import BlockUpdate
from diffmh.core.decisions import Acceptance
from diffmh.core.estimator import Problem
from diffmh.core.plan import Plan
from diffmh.estimators.births import Births
from diffmh.fast.chains import over_chains
from diffmh.models import ising, mixture

KEY = jax.random.key(3)


def written_out(function, slots):
    """One slot after the other: what `each_slot` must be equal to."""
    count = jax.tree.leaves(slots)[0].shape[0]
    each = [function(jax.tree.map(lambda leaf: leaf[slot], slots)) for slot in range(count)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)


def three_components(estimator, num_samples=20, num_chains=8):
    return diffmh.expectation(
        mixture.indicator,
        mixture.sampler(),
        init=0,
        num_samples=num_samples,
        num_chains=num_chains,
        estimator=estimator,
    )


@pytest.mark.parametrize("count", [2, 5])
def test_mapped_slots_are_those_written_out(count, monkeypatch):
    def derivative():
        mean = three_components(diffmh.StochasticDerivative(alternatives=count))
        return jax.jacfwd(mean.per_chain)(0.4, KEY)

    mapped = derivative()
    monkeypatch.setattr(values, "each_slot", written_out)
    np.testing.assert_allclose(mapped, derivative(), rtol=1e-5, atol=1e-6)
    assert np.any(mapped)


@pytest.mark.parametrize("of", ["index", "table", "both"])
@pytest.mark.parametrize("length", [3, 40])
def test_tables_are_looked_up_for_slots_and_chains(of, length):
    num_slots, num_chains = 4, 6
    rng = np.random.default_rng(length)
    table_shape = (length,) if of == "index" else (num_slots, length)
    index_shape = () if of == "table" else (num_slots,)
    table = jnp.asarray(rng.normal(size=(*table_shape, num_chains)))
    # Beyond either end too, where JAX clips.
    index = jnp.asarray(rng.integers(-length - 2, length + 2, size=(*index_shape, num_chains)))
    axes = (None if of == "index" else 0, None if of == "table" else 0)

    def look_up(table, index):
        return jax.vmap(lambda table, index: table[index], axes)(table, index)

    mapped = over_chains(look_up)
    np.testing.assert_array_equal(
        mapped(table, index), jax.vmap(look_up, in_axes=-1, out_axes=-1)(table, index)
    )
    has_gather = "gather[" in str(jax.make_jaxpr(mapped)(table, index))
    assert has_gather == (length > 16)


def test_a_table_that_all_chains_share_is_looked_up():
    table = jnp.array([1.0, 2.0, 5.0])
    index = jnp.array([[0, 1, 2], [2, 2, 0]])
    found = over_chains(jax.vmap(lambda index: table[index]))(index)
    np.testing.assert_array_equal(found, table[index])


def problem_of(num_parameters, num_chains=16, size=1):
    kernel = diffmh.MetropolisHastings(
        lambda theta, x: -0.5 * jnp.sum(x - jnp.sum(theta)) ** 2, diffmh.GaussianWalk(1.0)
    )
    theta, x = (jax.ShapeDtypeStruct((count,), jnp.float32) for count in (num_parameters, size))
    f = lambda theta, x: x
    return Problem(kernel, theta, x, (), f, False, 0, num_chains=num_chains)


@pytest.mark.parametrize(
    ("num_parameters", "options", "count"),
    [
        (1, {}, 4),
        (16, {}, 4),
        (17, {}, 2),
        (32, {}, 2),
        (33, {}, 1),
        (64, {}, 1),
        (1, {"weights": "one-sided"}, 1),
        (1, {"control": "f"}, 1),
        (1, {"alternatives": 7}, 7),
        (40, {"alternatives": 7}, 7),
    ],
)
def test_the_default_number_of_alternatives(num_parameters, options, count):
    given = diffmh.StochasticDerivative(**options)
    found = given.resolve(problem_of(num_parameters))
    assert isinstance(found, diffmh.StochasticDerivative)
    assert found.alternatives == count
    assert (found.weights, found.control) == (given.weights, given.control)


@pytest.mark.parametrize(
    ("num_parameters", "num_chains", "size", "count"),
    [
        (1, 1, 1, 4),
        (1, 63, 7, 4),
        (1, 63, 8, 8),
        (8, 1, 63, 8),
        (9, 1, 63, 4),
        (1, 63, 64, 4),
        (1, 64, 7, 2),
        (1, 64, 8, 4),
        (1, 4096, 1, 2),
        (16, 4096, 7, 2),
        (32, 4096, 100, 2),
        (33, 4096, 1, 1),
    ],
)
def test_the_default_by_chains_and_size_of_the_state(num_parameters, num_chains, size, count):
    problem = problem_of(num_parameters, num_chains, size)
    assert diffmh.StochasticDerivative().resolve(problem).num_alternatives == count


def test_an_expectation_is_run_with_the_default_that_it_reports():
    form = {"a": jnp.zeros(3), "b": jnp.zeros(())}
    kernel = diffmh.MetropolisHastings(
        lambda theta, x: -0.5 * jnp.sum((x["a"] - theta) ** 2) - 0.5 * x["b"] ** 2,
        diffmh.GaussianWalk(1.0),
    )

    def mean(estimator):
        f = lambda theta, x: x["a"][0]
        length = dict(num_samples=5, num_chains=64)
        return diffmh.expectation(f, kernel, init=form, estimator=estimator, **length)

    slope = {
        count: np.asarray(
            jax.jacfwd(mean(diffmh.StochasticDerivative(alternatives=count)).per_chain)(0.3, KEY)
        )
        for count in (None, 2, 4)
    }
    assert mean(None).run_chains(0.3, KEY).outcomes[0].method.num_alternatives == 2
    np.testing.assert_array_equal(slope[None], slope[2])
    assert np.any(slope[2] != slope[4])


def test_a_comparison_of_expectations_whose_defaults_differ():
    """Each keeps its own number of alternatives in the row of what is in use."""
    length = dict(num_samples=3, num_chains=64)
    normal = lambda size: diffmh.MetropolisHastings(
        lambda theta, x: -0.5 * jnp.sum((x - theta) ** 2), diffmh.GaussianWalk(1.0 / size)
    )
    total = lambda theta, x: jnp.sum(x)
    small, large = (
        diffmh.expectation(total, normal(size), init=jnp.zeros(size), **length) for size in (1, 10)
    )
    compose = lambda *means: diffmh.compose(lambda theta, *m: sum(m), *means)
    numbers = [
        compose(*means).applicable(jnp.array(0.3), KEY)[0].alternatives
        for means in ((small, small), (large, large), (small, large))
    ]
    assert numbers == [2, 4, None]


def test_births_have_one_alternative_by_default():
    found = diffmh.StochasticDerivative().resolve(problem_of(65))
    assert isinstance(found, Births)
    assert found.alternatives == 1


def test_reports_and_comparisons_name_the_number_in_use():
    mean = three_components(None)
    assert "alternatives=4" in mean.run_chains(0.4, KEY).outcomes[0].method.in_use
    report = mean.run(0.4, KEY)
    assert report.num_alternatives == 4 and "4 alternatives alive" in str(report)
    one = three_components(diffmh.StochasticDerivative(alternatives=1)).run(0.4, KEY)
    assert one.num_alternatives == 1 and "1 alternative alive" in str(one)
    names = [repr(estimator) for estimator in mean.applicable(jnp.array(0.4), KEY)]
    assert names[0] == "StochasticDerivative(weights='two-sided', alternatives=4)"
    assert len(set(names)) == len(names)


def test_the_path_does_not_depend_on_the_number_of_alternatives():
    paths = [
        np.asarray(three_components(diffmh.StochasticDerivative(alternatives=count))(0.4, KEY))
        for count in (1, 2, 8)
    ]
    default = np.asarray(jax.value_and_grad(lambda h: three_components(None)(h, KEY)[0])(0.4)[0])
    for path in paths:
        np.testing.assert_array_equal(path, paths[0])
    np.testing.assert_array_equal(default, paths[0][0])


class Lazy(BlockUpdate):
    """Every other step decides, with a probability that depends on θ, whether to do nothing; the
    others move to 0 or 1 with odds θ. `says` tells whether it says which flips lead nowhere.
    """

    says: bool = eqx.field(static=True, default=True)

    def log_density(self, theta, x, *args):
        return theta * x.astype(float)

    def noise(self, key, x, num_steps):
        idle, uniform = jax.random.uniform(key, (2, num_steps))
        return idle < 0.5, uniform

    def decide(self, parameters, state, noise):
        _, uniform = noise
        # σ(θ) as min(1, r).
        log_odds = lambda theta, x: -jnp.logaddexp(0.0, -theta) + 0.0 * x
        return Acceptance.draw(uniform, parameters.evaluate(log_odds, state.x.astype(float)))

    def result(self, x, noise, outcome):
        return jnp.where(noise[0], x, outcome.astype(x.dtype))

    def leads_nowhere(self, step, noise):
        return super().leads_nowhere(step, noise) if self.says else None


def lazy(says, num_chains=4000):
    mean = diffmh.expectation(
        lambda theta, x: x.astype(float),
        Lazy(says),
        init=0,
        num_samples=30,
        num_chains=num_chains,
        estimator=diffmh.StochasticDerivative(alternatives=1),
    )
    return np.asarray(jax.jacfwd(mean.per_chain)(0.3, KEY), float)


def exact_lazy(theta=0.3, num_samples=30):
    """`E x_t = σ(θ) (1 − 2^{−t})`: the chain forgets its start as soon as it is not idle."""
    sigma = 1 / (1 + np.exp(-theta))
    times = np.arange(1, num_samples + 1)
    return sigma * (1 - sigma) * np.mean(1 - 0.5**times)


def test_flips_that_lead_nowhere_take_no_slot():
    spread = {}
    for says in (True, False):
        found = lazy(says)
        error = found.std(ddof=1) / np.sqrt(len(found))
        assert abs(found.mean() - exact_lazy()) < 5 * error
        spread[says] = found.var(ddof=1)
    # Half of the candidates are idle: with one slot, they drive out those that are not.
    assert spread[True] < 0.8 * spread[False]


class Asked(eqx.Module):
    """An update that says this of its candidates."""

    idle: jax.Array
    name_in_messages: str = "Asked"

    def leads_nowhere(self, step, noise):
        return self.idle


def transition(idle):
    return alternatives.Transition(None, Asked(jnp.asarray(idle)), None, None, None)  # pyright: ignore


def test_a_weight_that_is_not_a_number_is_not_hidden():
    weights = jnp.array([[1.0, jnp.nan, 2.0], [3.0, 4.0, jnp.nan]])
    found = alternatives.without_idle(transition([True, True, False]), weights)
    np.testing.assert_array_equal(found, [[0.0, np.nan, 2.0], [0.0, 0.0, np.nan]])


def test_one_answer_for_each_candidate():
    with pytest.raises(TypeError, match="one truth value for each of 3 candidates"):
        alternatives.without_idle(transition([True, False]), jnp.ones((1, 3)))


def lattices(size, num_chains, num_samples=3):
    return diffmh.expectation(
        ising.energy,
        ising.sampler(),
        init=ising.cold(size),
        num_samples=num_samples,
        num_chains=num_chains,
        estimator=diffmh.StochasticDerivative(alternatives=1),
    )


def groups_of(mean):
    return Plan.of(mean.simulation, jnp.asarray(3.0), KEY, ()).num_groups


@pytest.mark.parametrize(
    ("size", "num_chains", "groups"),
    [
        (12, 16, 1),
        (12, 256, 4),
        (44, 16, 1),
        (46, 16, 2),
        (64, 16, 2),
        (64, 20, 1),
        (64, 8, 1),
        (64, 64, 1),
        (128, 16, 16),
        (512, 2, 2),
        (512, 1, 1),
    ],
)
def test_groups_of_large_states(size, num_chains, groups):
    assert groups_of(lattices(size, num_chains)) == groups


@pytest.mark.parametrize("size", [46, 128])
def test_groups_of_large_states_change_nothing(size, monkeypatch):
    def both():
        mean = lattices(size, 16 if size == 46 else 2, num_samples=2)
        slope = lambda theta: jax.jvp(lambda t: mean.per_chain(t, KEY), (theta,), (1.0,))
        return jax.jit(slope)(3.0)

    value, slope = both()
    monkeypatch.setattr(Plan, "num_groups", 1)
    plain_value, plain_slope = both()
    np.testing.assert_array_equal(value, plain_value)
    np.testing.assert_allclose(slope, plain_slope, rtol=1e-4, atol=1e-3)
    assert np.any(np.asarray(slope) != 0)


def test_an_estimator_keeps_its_other_settings_when_it_is_resolved():
    given = diffmh.StochasticDerivative("two-sided", None, None, births=False)
    found = given.with_alternatives(2, 16, jnp.zeros(3))
    assert dataclasses.astuple(found)[1:] == (4, None, False)
    assert "alternatives=None" in repr(given)

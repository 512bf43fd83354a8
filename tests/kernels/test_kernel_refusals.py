"""Errors that kernels raise."""

import jax.numpy as jnp
from refusals import KEY, NORMAL, WALK, cases, expect, log_normal, refused

import diffmh


@cases(
    number=(lambda: expect(2.38), TypeError, "`kernel` must be … Kernel`, got 2.38"),
    function=(
        lambda: expect(log_normal),
        TypeError,
        "`kernel` must be … Kernel`, got … log_normal",
    ),
    proposal=(lambda: expect(WALK), TypeError, "`kernel` must be … Kernel`, got GaussianWalk"),
    traced=(
        lambda: diffmh.trace(WALK, 0.5, KEY, init=0.0, num_steps=5),
        TypeError,
        "`kernel` must be … got GaussianWalk",
    ),
    checked=(
        lambda: diffmh.check(WALK, 0.5, KEY, init=0.0),
        TypeError,
        "`kernel` must be … got GaussianWalk",
    ),
    empty_cycle=(
        lambda: diffmh.Cycle(),
        ValueError,
        "`Cycle(...)` needs at least one kernel, got none",
    ),
    cycle=(
        lambda: diffmh.Cycle(NORMAL, WALK),
        TypeError,
        "Cycle … `kernel` must be … got GaussianWalk",
    ),
    repeat=(
        lambda: diffmh.Repeat(WALK, 2),
        TypeError,
        "Repeat … `kernel` must be … got GaussianWalk",
    ),
    coupling=(
        lambda: diffmh.MetropolisHastings(log_normal, WALK, "maximal"),
        TypeError,
        "`coupling` must be … 'maximal'",
    ),
    coupling_class=(
        lambda: diffmh.MetropolisHastings(log_normal, WALK, diffmh.Maximal),
        TypeError,
        "`coupling` must … a class",
    ),
)
def test_kernels(call, error, words):
    refused(call, error, words)


def potts(theta, z):
    return theta * jnp.sum(z[1:] == z[:-1])


def started(kernel, init):
    f = lambda theta, x: 1.0 * jnp.sum(x)
    return diffmh.expectation(f, kernel, init=init, num_samples=2, num_chains=2)(0.5, KEY)


def gibbs(where, num_values, init):
    return lambda: started(diffmh.Gibbs(potts, where, num_values), init)


def block(where, values, init):
    fields = lambda theta, x: theta * jnp.ones(3)
    density = lambda theta, x: theta * jnp.sum(x)
    return lambda: started(diffmh.BlockGibbs(fields, where, density, values), init)


def leaps(step, init):
    density = lambda theta, x: -0.5 * jnp.sum((x - theta) ** 2)
    return lambda: started(diffmh.Hamiltonian(density, step, 3), init)


def adapted(density, init):
    walk = diffmh.MetropolisHastings(density, diffmh.GaussianWalk(1.0))
    return lambda: diffmh.adapt(walk, 0.5, KEY, init=init)


@cases(
    bool_of_three=(
        gibbs(lambda z: z[0], 3, jnp.zeros(3, bool)),
        TypeError,
        "`Gibbs(num_values=3)` moves labels 0 to 2, which do not fit bool",
    ),
    int8_of_many=(
        gibbs(lambda z: z[0], 300, jnp.zeros(3, jnp.int8)),
        TypeError,
        "`Gibbs(num_values=300)` … do not fit int8",
    ),
    label=(
        gibbs(lambda z: z[0], 2, jnp.array([5, 0, 0])),
        ValueError,
        "`Gibbs(num_values=2)` moves labels 0 to 1, but the start has 5",
    ),
    computed_site=(
        gibbs(lambda z: z[0] + 1, 3, jnp.zeros(3, int)),
        ValueError,
        "`Gibbs(where=...)`: `where` must pick … compute nothing",
    ),
    spins_in_uint8=(
        block(lambda x: x, (-1, 1), jnp.ones(3, jnp.uint8)),
        TypeError,
        "`BlockGibbs(values=(-1, 1))` are not values of uint8",
    ),
    spins_in_bool=(
        block(lambda x: x, (-1, 1), jnp.ones(3, bool)),
        TypeError,
        "`BlockGibbs(values=(-1, 1))` are not values of bool",
    ),
    halves_in_int=(
        block(lambda x: x, (0, 0.5), jnp.zeros(3, int)),
        TypeError,
        "`BlockGibbs(values=(0, 0.5))` are not values of int32",
    ),
    start_of_a_block=(
        block(lambda x: x, (-1, 1), jnp.zeros(3, int)),
        ValueError,
        "`BlockGibbs(values=(-1, 1))` cannot start from 0: start with each unit",
    ),
    computed_block=(
        block(lambda x: 2 * x, (0, 1), jnp.zeros(3)),
        ValueError,
        "`BlockGibbs(where=...)`: `where` must pick … compute nothing",
    ),
    leap_shape=(
        leaps(jnp.ones(3), jnp.zeros(2)),
        ValueError,
        "`Hamiltonian(step_size=...)` of shape (3,) does not fit the state's (2,)",
    ),
    leap_structure=(
        leaps({"a": 0.5}, jnp.zeros(2)),
        ValueError,
        "`Hamiltonian(step_size=...)` is a pytree, so it must have the structure of the state",
    ),
    leap_word=(leaps("a", 0.0), TypeError, "`Hamiltonian(step_size=...)` must be … got 'a'"),
    drift_of_integers=(
        lambda: started(diffmh.Langevin(log_normal, 1.0), 0),
        TypeError,
        "`Langevin` moves floats, but state is int32",
    ),
    drift_shape=(
        lambda: started(diffmh.Langevin(log_normal, jnp.ones(3)), 0.0),
        ValueError,
        "`Langevin(step_size=...)` of shape (3,) does not fit a state of 1 numbers",
    ),
    adapt_outside=(
        adapted(lambda theta, x: jnp.where(x > 0, -x, -jnp.inf), -1.0),
        ValueError,
        "`adapt(init=...)` must be a state of finite log density, got -inf",
    ),
    adapt_vector=(
        adapted(lambda theta, x: -(x**2), jnp.zeros(2)),
        TypeError,
        "`adapt(kernel, ...)`: `log_density` must return a scalar, got shape (2,)",
    ),
)
def test_samplers(call, error, words):
    refused(call, error, words)

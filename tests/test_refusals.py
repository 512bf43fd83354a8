"""What must be refused, by a message that names the argument, what came and what to do; and what
must not be.
"""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffmh

KEY = jax.random.key(0)
THETA = jnp.float32(0.5)
WALK = diffmh.GaussianWalk(2.38)


def log_normal(theta, x, scale=1.0):
    return -0.5 * ((x - theta) / scale) ** 2


def walk(log_density):
    return diffmh.MetropolisHastings(log_density, WALK)


NORMAL = walk(lambda theta, x: log_normal(theta, x))


def expect(
    kernel=NORMAL, f=lambda theta, x, *args: x, init=0.0, num_samples=5, num_chains=2, **options
):
    return diffmh.expectation(
        f, kernel, init=init, num_samples=num_samples, num_chains=num_chains, **options
    )


MEAN = expect()
LONE = expect(num_chains=1)


def refused(call, error, words):
    """`words` must all be in the message, in this order, with anything where they have ` … `."""
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error, (
        "a refusal of our own, not one of JAX's that happens to be a kind of it"
    )
    message, pattern = str(caught.value), ".*".join(re.escape(part) for part in words.split(" … "))
    assert re.search(pattern, message, re.DOTALL), f"{message!r} does not say {words!r}"


def cases(**cases):
    """Each by name: what is called, the exception, words of its message."""
    return pytest.mark.parametrize(
        "call, error, words", [pytest.param(*case, id=name) for name, case in cases.items()]
    )


@pytest.mark.parametrize(
    "theta, error, words",
    [
        (1, TypeError, "`theta` is int32 … float32"),
        (jnp.arange(3), TypeError, "`theta` is int32 … float32"),
        (True, TypeError, "`theta` is bool … float32"),
        (jnp.array(1j), TypeError, "`theta` is complex64 … real"),
        (jnp.float16(1), TypeError, "`theta` is float16 … float32"),
        (jnp.bfloat16(1), TypeError, "`theta` is bfloat16 … float32"),
        (jnp.nan, ValueError, "`theta` is not finite, got nan"),
        ({"a": jnp.array([0.0, jnp.inf])}, ValueError, "`theta['a']` is not finite … inf"),
        (
            {"w": 0.5, "activation": jax.nn.relu},
            TypeError,
            "`theta['activation']` … not an array … equinox.partition",
        ),
        ("0.5", TypeError, "`theta` is '0.5', not an array"),
        (None, TypeError, "`theta` has no parameters, got None"),
        ({}, TypeError, "`theta` has no parameters, got {}"),
    ],
)
def test_theta(theta, error, words):
    refused(lambda: MEAN(theta, KEY), error, words)
    refused(lambda: diffmh.trace(NORMAL, theta, KEY, init=0.0, num_steps=5), error, words)
    refused(lambda: diffmh.check(NORMAL, theta, KEY, init=0.0), error, words)


@pytest.mark.parametrize(
    "log_density, error, words",
    [
        (lambda theta, x: theta * x * jnp.ones(2), TypeError, "log_density … scalar … (2,) … sum"),
        (lambda theta, x: (theta * x, x), TypeError, "log_density … scalar"),
        (lambda theta, x: None, TypeError, "log_density … scalar … None"),
        (lambda theta, x: "a", TypeError, "`log_density` … 'a'"),
        (lambda theta, x: theta * x * 1j, TypeError, "log_density … complex64 … real"),
        (
            lambda theta, x: (theta * x).astype(jnp.float16),
            TypeError,
            "log_density … float16 … float32",
        ),
        (lambda theta, x: jnp.int32(theta * x), TypeError, "log_density … int32 … float32"),
        (
            lambda theta, x: jnp.log(theta * x),
            ValueError,
            "log_density … nan … start state -7.25 … init",
        ),
        (
            lambda theta, x: jnp.where(x > 0, theta * x, -jnp.inf),
            ValueError,
            "log_density … -inf … start state -7.25 … init",
        ),
        (3.0, TypeError, "`log_density` … function … 3.0"),
    ],
    ids=[
        "vector",
        "pair",
        "nothing",
        "string",
        "complex",
        "half",
        "integer",
        "nan",
        "outside",
        "number",
    ],
)
def test_log_density(log_density, error, words):
    refused(lambda: expect(walk(log_density), init=-7.25)(0.5, KEY), error, words)
    if error is TypeError:
        refused(
            lambda: expect(diffmh.Cycle(NORMAL, walk(log_density)), init=-7.25)(0.5, KEY),
            error,
            words,
        )


def test_start_state_is_printed_as_a_tree():
    outside = expect(walk(lambda theta, x: jnp.log(theta * x["a"])), init={"a": jnp.float32(-7.25)})
    refused(
        lambda: outside(0.5, KEY),
        ValueError,
        "log_density … nan … start state {'a': … -7.25 … init",
    )


@pytest.mark.parametrize(
    "f, error, words",
    [
        (lambda theta, x: "a", TypeError, "`f` … 'a'"),
        (lambda theta, x: {"x": x, "name": "a"}, TypeError, "`f` … 'a'"),
        (lambda theta, x: None, TypeError, "`f` must return numbers, got None"),
        (lambda theta, x: x * 1j, TypeError, "`f` … complex64 … real"),
        (
            lambda theta, x: {"half": x.astype(jnp.float16)},
            TypeError,
            "`f` … ['half'] … float16 … float32",
        ),
        (lambda theta, x: jnp.log(x), ValueError, "`f` is NaN … start state -7.25"),
        (3.0, TypeError, "`f` … function … 3.0"),
    ],
    ids=["string", "string leaf", "nothing", "complex", "half", "nan", "number"],
)
def test_f(f, error, words):
    refused(lambda: expect(f=f, init=-7.25)(0.5, KEY), error, words)


@pytest.mark.parametrize(
    "log_density",
    [
        lambda theta, x: -(x**2),
        lambda theta, x: -(theta**2) - x**2,
        lambda theta, x: jnp.where(theta > 0, -(x**2), -(x**4)),
        lambda theta, x: -(x**2) * jnp.floor(theta),
        lambda theta, x: -(x**2) * jax.lax.stop_gradient(theta),
    ],
    ids=["unused", "only a factor", "only compared", "rounded", "stopped"],
)
def test_nothing_depends_on_theta(log_density):
    words = "`log_density` does not depend on `theta` … `f` does not … Use `theta`"
    refused(lambda: expect(walk(log_density))(0.5, KEY), ValueError, words)


def test_only_f_depends_on_theta():
    """Allowed: there is something to differentiate."""
    product = expect(walk(lambda theta, x: -(theta**2) - x**2), f=lambda theta, x: theta * x)
    value, derivative = jax.value_and_grad(product)(0.5, KEY)
    np.testing.assert_allclose(derivative, 2 * value, rtol=1e-5)


COUNTED = {
    "num_samples": lambda count: expect(num_samples=count),
    "burn_in": lambda count: expect(burn_in=count),
    "num_chains": lambda count: expect(num_chains=count),
    "alternatives": lambda count: diffmh.StochasticDerivative(alternatives=count),
    "num_steps": lambda count: diffmh.trace(NORMAL, 0.5, KEY, init=0.0, num_steps=count),
    "Repeat": lambda count: diffmh.Repeat(NORMAL, count),
    "OtherState": lambda count: diffmh.OtherState(count),
}


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("count", [2.0, True, np.float32(2), np.True_, "2", None], ids=repr)
def test_counts_that_are_not_whole(name, count):
    refused(lambda: COUNTED[name](count), TypeError, f"{name} … whole number … {count!r}")


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("count", [-1, 0])
def test_counts_that_are_too_small(name, count):
    if (name, count) == ("burn_in", 0):
        assert COUNTED[name](0).simulation.burn_in == 0
    else:
        refused(lambda: COUNTED[name](count), ValueError, f"{name} … at least … {count}")


@pytest.mark.parametrize("name", COUNTED)
def test_advice_on_counts_is_code(name):
    with pytest.raises(TypeError) as caught:
        COUNTED[name](2.0)
    advice = re.search("write `(.*)`", str(caught.value))
    assert advice is not None
    compile(advice.group(1).replace("...", "2"), "advice", "exec")


@pytest.mark.parametrize(
    "keys, error, words",
    [
        ((jax.random.PRNGKey(0),), TypeError, "`key` … typed key … uint32 … jax.random.key"),
        ((), TypeError, "`key` is missing … jax.random.key"),
        ((0,), TypeError, "`key` … typed key, got 0 … jax.random.key"),
        ((jax.random.split(KEY, 3),), ValueError, "`key` must be one key … (3,) … vmap"),
    ],
    ids=["raw", "missing", "seed", "several"],
)
def test_key(keys, error, words):
    composed = diffmh.compose(lambda theta, m: m, MEAN)
    for function in (MEAN, MEAN.per_chain, MEAN.run, composed, composed.run):
        refused(lambda: function(0.5, *keys), error, words)
    if keys:
        refused(lambda: diffmh.trace(NORMAL, 0.5, *keys, init=0.0, num_steps=5), error, words)


@pytest.mark.parametrize(
    "init, words",
    [
        (jnp.float16(0), "`init` is float16 … float32"),
        ({"a": jnp.float16(0)}, "`init`['a'] is float16 … float32"),
        (
            lambda key: jax.random.normal(key, (), jnp.float16),
            "`init(key)` returns is float16 … float32",
        ),
        (jnp.array(1j), "`init` is complex64 … real"),
        ({}, "`init` has no arrays, got {}"),
        (lambda key: {}, "`init(key)` returns has no arrays, got {}"),
        ("0", "`init` is '0', not an array"),
        (0, "`GaussianWalk` moves floats … int32 … start from a float"),
        ({"a": 0, "b": 0.0}, "`GaussianWalk` moves floats … ['a'] is int32 … On"),
    ],
    ids=[
        "half",
        "half leaf",
        "half drawn",
        "complex",
        "empty",
        "empty drawn",
        "string",
        "integer",
        "integer leaf",
    ],
)
def test_init(init, words):
    kernel = walk(lambda theta, x: theta * jax.tree.leaves(x)[0])
    refused(lambda: expect(kernel, init=init)(0.5, KEY), TypeError, words)


@pytest.mark.parametrize(
    "proposal, init, error, words",
    [
        (
            diffmh.OtherState(3),
            0.0,
            TypeError,
            "`OtherState` moves one integer … float32 … such as 0",
        ),
        (
            diffmh.OtherState(3),
            jnp.zeros(2, int),
            TypeError,
            "`OtherState` moves one integer … int32 … such as 0",
        ),
        (
            diffmh.TransitionMatrix(jnp.eye(3)),
            0.0,
            TypeError,
            "`TransitionMatrix` moves one integer … float32 … such as 0",
        ),
        (diffmh.SpinFlip(), 1, TypeError, "`SpinFlip` … array of spins"),
        (
            diffmh.SpinFlip(site=(0, 1)),
            jnp.ones(2),
            ValueError,
            "`SpinFlip(site=...)` needs 1 … (2,)",
        ),
        (
            diffmh.GaussianWalk(jnp.ones(2)),
            jnp.zeros(3),
            ValueError,
            "`GaussianWalk(scale=...)` … (2,) … 3 numbers",
        ),
    ],
)
def test_state_that_a_proposal_does_not_move(proposal, init, error, words):
    kernel = diffmh.MetropolisHastings(lambda theta, x: theta * jnp.sum(x), proposal)
    refused(lambda: expect(kernel, init=init)(0.5, KEY), error, words)


class Constant(diffmh.Proposal):
    """Proposes `value` whatever the state."""

    value: object = None
    symmetric: bool = True

    def sample(self, key, x):
        return self.value

    def log_prob(self, x, x_new):
        return jnp.zeros(())


@pytest.mark.parametrize(
    "value",
    [{"a": jnp.zeros(())}, jnp.zeros(2), jnp.zeros((), int), 0],
    ids=["structure", "shape", "dtype", "a Python number"],
)
def test_proposal_that_changes_the_form(value):
    kernel = diffmh.MetropolisHastings(NORMAL.density, Constant(value=value))
    refused(
        lambda: expect(kernel)(0.5, KEY),
        TypeError,
        "`Constant` proposes … form of the state, float32[], got",
    )


class Converting(diffmh.Coupling):
    """Proposes what the primal is proposed, changed by `convert`."""

    convert: object

    def propose(self, key, proposal, x, x_new, y):
        return self.convert(x_new)


@pytest.mark.parametrize(
    "convert",
    [lambda x: {"a": x}, lambda x: jnp.stack([x, x]), lambda x: x.astype(int)],
    ids=["structure", "shape", "dtype"],
)
def test_coupling_that_changes_the_form(convert):
    kernel = diffmh.MetropolisHastings(NORMAL.density, WALK, Converting(convert))
    refused(
        lambda: jax.grad(expect(kernel))(0.5, KEY),
        TypeError,
        "`Converting` … form of the state, float32[], got",
    )


@cases(
    negative=(
        lambda: diffmh.GaussianWalk(-1.0),
        ValueError,
        "`GaussianWalk(scale=...)` must be positive, got -1.0",
    ),
    zero=(
        lambda: diffmh.GaussianWalk(0.0),
        ValueError,
        "`GaussianWalk(scale=...)` must be positive, got 0.0",
    ),
    nan=(
        lambda: diffmh.GaussianWalk(jnp.nan),
        ValueError,
        "`GaussianWalk(scale=...)` must be … got nan",
    ),
    infinite=(
        lambda: diffmh.GaussianWalk(jnp.inf),
        ValueError,
        "`GaussianWalk(scale=...)` must be finite, got inf",
    ),
    zero_entry=(
        lambda: diffmh.GaussianWalk(jnp.array([1.0, 0.0])),
        ValueError,
        "`GaussianWalk(scale=...)` must be positive",
    ),
    half=(
        lambda: diffmh.GaussianWalk(jnp.float16(1)),
        TypeError,
        "`GaussianWalk(scale=...)` is float16",
    ),
    string=(lambda: diffmh.GaussianWalk("wide"), TypeError, "`GaussianWalk(scale=...)` … 'wide'"),
    upper=(
        lambda: diffmh.GaussianWalk(jnp.array([[1.0, 1.0], [0.0, 1.0]])),
        ValueError,
        "`GaussianWalk(scale=...)` must be lower-triangular … cholesky",
    ),
    diagonal=(
        lambda: diffmh.GaussianWalk(jnp.diag(jnp.array([1.0, -1.0]))),
        ValueError,
        "`GaussianWalk(scale=...)` … positive diagonal … cholesky",
    ),
    not_square=(
        lambda: diffmh.GaussianWalk(jnp.ones((2, 3))),
        ValueError,
        "`GaussianWalk(scale=...)` … square … (2, 3)",
    ),
    no_beta=(
        lambda: diffmh.CrankNicolson(0.0),
        ValueError,
        "`CrankNicolson(beta=...)` must be in (0, 1], got 0.0",
    ),
    large_beta=(
        lambda: diffmh.CrankNicolson(1.5),
        ValueError,
        "`CrankNicolson(beta=...)` must be in (0, 1], got 1.5",
    ),
    prior=(
        lambda: diffmh.CrankNicolson(0.5, scale=-1.0),
        ValueError,
        "`CrankNicolson(scale=...)` must be positive, got -1.0",
    ),
    rows=(
        lambda: diffmh.TransitionMatrix(jnp.ones((2, 2))),
        ValueError,
        "`TransitionMatrix(matrix=...)` … sum to one … [2. 2.]",
    ),
    negative_entry=(
        lambda: diffmh.TransitionMatrix(jnp.array([[1.5, -0.5], [0.5, 0.5]])),
        ValueError,
        "`TransitionMatrix(matrix=...)` … non-negative … got … -0.5",
    ),
    rectangle=(
        lambda: diffmh.TransitionMatrix(jnp.ones((2, 3))),
        ValueError,
        "`TransitionMatrix(matrix=...)` … square … (2, 3)",
    ),
    no_distribution=(
        lambda: diffmh.Independence(3.0),
        TypeError,
        "Independence … `distribution.sample` must be a function",
    ),
    number=(
        lambda: diffmh.MetropolisHastings(log_normal, 2.38),
        TypeError,
        "`proposal` must be … Proposal`, got 2.38",
    ),
    class_=(
        lambda: diffmh.MetropolisHastings(log_normal, diffmh.SpinFlip),
        TypeError,
        "`proposal` must be … a class: call it",
    ),
    on_a_number=(
        lambda: diffmh.On(lambda x: x, 2.38),
        TypeError,
        "`proposal` must be … Proposal`, got 2.38",
    ),
)
def test_proposals(call, error, words):
    refused(call, error, words)


class Standard(eqx.Module):
    def sample(self, key):
        return jax.random.normal(key)

    def log_prob(self, x):
        return -0.5 * x**2


@pytest.mark.parametrize(
    "wrap", [lambda q: q, lambda q: diffmh.On(lambda x: x["a"], q)], ids=["plain", "On"]
)
@pytest.mark.parametrize(
    "proposal, advice",
    [
        (diffmh.OtherState(3), "Maximal"),
        (diffmh.SpinFlip(), "CommonRandomNumbers"),
        (diffmh.Independence(Standard()), "CommonRandomNumbers"),
        (diffmh.TransitionMatrix(jnp.full((3, 3), 1 / 3)), "Maximal"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_reflection_of_other_proposals(proposal, advice, wrap):
    call = lambda: diffmh.MetropolisHastings(log_normal, wrap(proposal), diffmh.MaximalReflection())
    refused(call, ValueError, f"`MaximalReflection()` … `{type(proposal).__name__}` … `{advice}()`")


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


ONE_SIDED = diffmh.StochasticDerivative("one-sided")
OTHER_CHAINS = diffmh.Score(baseline="other chains")


@cases(
    lag=(lambda: expect(lag=1), NotImplementedError, "lag … must be 0 … got 1"),
    weights=(
        lambda: diffmh.StochasticDerivative("foo"),
        ValueError,
        "weights … 'two-sided' or 'one-sided', got 'foo'",
    ),
    baseline=(
        lambda: diffmh.Score(baseline="foo"),
        ValueError,
        "baseline … 'other chains', got 'foo'",
    ),
    one_chain=(
        lambda: jax.grad(expect(num_chains=1, estimator=OTHER_CHAINS))(0.5, KEY),
        ValueError,
        "`num_chains` … 2, got 1",
    ),
    size=(
        lambda: jax.grad(expect(estimator=diffmh.Score(jnp.ones(3))))(0.5, KEY),
        ValueError,
        "baseline … has 3 numbers … 1",
    ),
    name=(
        lambda: expect(estimator="score"),
        TypeError,
        "`estimator` must be … Estimator`, got 'score'",
    ),
    class_=(
        lambda: expect(estimator=diffmh.Score),
        TypeError,
        "`estimator` must be … a class: call it",
    ),
    traced=(
        lambda: diffmh.trace(NORMAL, 0.5, KEY, init=0.0, num_steps=5, estimator=diffmh.Score()),
        TypeError,
        "`estimator` must be … StochasticDerivative`, got Score",
    ),
    one_sided=(
        lambda: expect(walk(lambda theta, x: theta.sum() * x), estimator=ONE_SIDED)(
            jnp.ones(2), KEY
        ),
        ValueError,
        "'one-sided' … one scalar parameter … 2 … 'two-sided'",
    ),
    one_sided_tree=(
        lambda: expect(walk(lambda theta, x: theta["a"] * x), estimator=ONE_SIDED)(
            {"a": 0.5, "b": 0.5}, KEY
        ),
        ValueError,
        "'one-sided' … one scalar parameter … 2 … 'two-sided'",
    ),
)
def test_estimators(call, error, words):
    refused(call, error, words)


@cases(
    one_chain=(
        lambda: diffmh.compose(lambda theta, m: m, LONE),
        ValueError,
        "`compose` … `num_chains` of at least 2, got 1",
    ),
    nothing=(
        lambda: diffmh.compose(lambda theta, m: m),
        ValueError,
        "`compose … at least one expectation, got none",
    ),
    unequal=(
        lambda: diffmh.compose(max, MEAN, expect(num_chains=3)),
        ValueError,
        "`compose` … equal `num_chains`, got [2, 3]",
    ),
    function=(
        lambda: diffmh.compose(max, log_normal),
        TypeError,
        "`compose … diffmh.expectation … got … log_normal",
    ),
    number=(
        lambda: diffmh.compose(max, MEAN, 3.0),
        TypeError,
        "`compose … diffmh.expectation … got 3.0",
    ),
    phi=(lambda: diffmh.compose(3.0, MEAN), TypeError, "`phi` must be a function … got 3.0"),
    run_of_one=(
        lambda: LONE.run(0.5, KEY),
        ValueError,
        "`.run` … `num_chains` of at least 2, got 1",
    ),
    jit=(
        lambda: jax.jit(lambda t: MEAN.run(t, KEY).value)(0.5),
        TypeError,
        "`.run` … cannot be traced: call the expectation",
    ),
    jit_of_constants=(
        lambda: jax.jit(lambda scale: scale * MEAN.run(THETA, KEY).value)(1.0),
        TypeError,
        "`.run` … cannot be traced: call the expectation",
    ),
)
def test_compose_and_run(call, error, words):
    refused(call, error, words)


def twice(body, start):
    """The carry after two steps of a scan."""
    return jax.lax.scan(lambda carry, _: (body(carry), None), start, None, length=2)[0]


class Scaled(eqx.Module):
    scale: jax.Array

    def log_density(self, theta, x):
        return log_normal(theta, x, self.scale)


def with_its_own_rule(scale):
    """A density with `jax.custom_jvp`, under which JAX is strict about what it closes over."""
    log_density = jax.custom_jvp(lambda theta, x: log_normal(theta, x, scale))
    log_density.defjvp(
        lambda primals, tangents: jax.jvp(
            lambda theta, x: log_normal(theta, x, scale), primals, tangents
        )
    )
    return log_density


def closing(scale):
    return expect(walk(lambda theta, x: log_normal(theta, x, scale)))


SCALED = expect(walk(log_normal))
SQUARE = diffmh.compose(lambda theta, m: m**2, MEAN)

# Functions that hand a value to an expectation otherwise than as theta.
DATA = {
    "args": lambda value, theta: SCALED(theta, KEY, value),
    "args per chain": lambda value, theta: SCALED.per_chain(theta, KEY, value).sum(),
    "args of a composition": lambda value, theta: diffmh.compose(lambda theta, m: m**2, SCALED)(
        theta, KEY, value
    ),
    "args in scan": lambda value, theta: twice(
        lambda total: total + SCALED(theta, KEY, value), 0.0
    ),
    "args carried by scan": lambda value, theta: twice(
        lambda last: SCALED(theta, KEY, last), value
    ),
}
CLOSED_OVER = {
    "init": lambda value, theta: expect(init=value)(theta, KEY),
    "init's function": lambda value, theta: expect(init=lambda key: value + jax.random.normal(key))(
        theta, KEY
    ),
    "scale": lambda value, theta: expect(
        diffmh.MetropolisHastings(log_normal, diffmh.GaussianWalk(value))
    )(theta, KEY),
    "log_density": lambda value, theta: closing(value)(theta, KEY),
    "log_density in scan": lambda value, theta: twice(
        lambda total: total + closing(value)(theta, KEY), 0.0
    ),
    "jitted log_density": lambda value, theta: expect(
        walk(jax.jit(lambda theta, x: log_normal(theta, x, value)))
    )(theta, KEY),
    "log_density with a rule": lambda value, theta: expect(walk(with_its_own_rule(value)))(
        theta, KEY
    ),
    "module's log_density": lambda value, theta: expect(walk(Scaled(value).log_density))(
        theta, KEY
    ),
    "f": lambda value, theta: expect(f=lambda theta, x: value * x)(theta, KEY),
}
WORDS = {
    **dict.fromkeys(DATA, "derivative … `args` … data … part of `theta`"),
    **dict.fromkeys(
        CLOSED_OVER,
        "derivative … `init` … kernel … `log_density`, `f` or … closes over … `theta` …"
        " stop_gradient",
    ),
}


@pytest.mark.parametrize(
    "derivative",
    [
        lambda function: jax.grad(function)(1.0, THETA),
        lambda function: jax.jvp(lambda value: function(value, THETA), (1.0,), (1.0,)),
        lambda function: jax.jit(jax.grad(function))(1.0, 0.5),
        lambda function: jax.grad(jax.jit(function))(1.0, 0.5),
        lambda function: jax.grad(function, (0, 1))(1.0, 0.5),
        lambda function: jax.grad(jax.jit(lambda value: function(value, value)))(1.0),
    ],
    ids=["grad", "jvp", "jit of grad", "grad of jit", "with theta", "with theta, jitted"],
)
@pytest.mark.parametrize("where", WORDS)
def test_derivative_in_what_is_not_theta(where, derivative):
    function = {**DATA, **CLOSED_OVER}[where]
    refused(lambda: derivative(function), diffmh.NotDifferentiable, WORDS[where])


@pytest.mark.parametrize("function", [MEAN, SQUARE], ids=["expectation", "composition"])
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["plain", "jit"])
@pytest.mark.parametrize(
    "second",
    [
        jax.hessian,
        lambda f: jax.grad(jax.grad(f)),
        lambda f: jax.jacfwd(jax.jacfwd(f)),
        lambda f: jax.jacrev(jax.jacfwd(f)),
        lambda f: (
            lambda theta, key: jax.jvp(jax.grad(lambda theta: f(theta, key)), (theta,), (1.0,))
        ),
        lambda f: jax.grad(jax.jit(jax.grad(f))),
        lambda f: jax.grad(
            lambda theta, key: twice(lambda total: total + jax.grad(f)(theta, key), 0.0)
        ),
    ],
    ids=[
        "hessian",
        "grad of grad",
        "jacfwd of jacfwd",
        "jacrev of jacfwd",
        "jvp of grad",
        "grad of jit of grad",
        "scan",
    ],
)
def test_second_derivatives(function, jit, second):
    words = "second derivative … first derivatives only … difference `jax.grad`"
    refused(lambda: jit(second(function))(0.5, KEY), diffmh.NotDifferentiable, words)


CONCRETE = closing(2.0)


@pytest.mark.parametrize("differentiate", [lambda f: f, jax.grad], ids=["value", "grad"])
def test_closing_over_traced_values_is_allowed(differentiate):
    """As long as nobody differentiates with respect to them."""
    at = lambda scale: differentiate(closing(scale))(0.5, KEY)
    expected = differentiate(CONCRETE)(0.5, KEY)
    np.testing.assert_allclose(jax.jit(at)(2.0), expected, rtol=1e-5)
    one, two = jax.vmap(at)(jnp.array([1.0, 2.0]))
    np.testing.assert_allclose(two, expected, rtol=1e-5)
    assert abs(one - expected) > 0.01, "the scale matters here"


def test_stopped_closures_and_args_are_allowed():
    stopped = lambda theta: jax.lax.stop_gradient(4 * theta)
    expected = jax.grad(CONCRETE)(0.5, KEY)
    np.testing.assert_allclose(
        jax.grad(lambda theta: closing(stopped(theta))(theta, KEY))(0.5), expected, rtol=1e-5
    )
    np.testing.assert_allclose(
        jax.grad(lambda theta: SCALED(theta, KEY, stopped(theta)))(0.5), expected, rtol=1e-5
    )


def test_constants_inside_traced_code_are_allowed():
    expected = MEAN(0.5, KEY)
    np.testing.assert_allclose(
        jax.jit(lambda scale: scale * MEAN(THETA, KEY))(2.0), 2 * expected, rtol=1e-6
    )
    np.testing.assert_allclose(
        jax.grad(lambda scale: scale * MEAN(THETA, KEY))(2.0), expected, rtol=1e-6
    )
    np.testing.assert_allclose(
        twice(lambda total: total + MEAN(THETA, KEY), 0.0), 2 * expected, rtol=1e-6
    )


def test_integer_args_are_allowed():
    """They have tangents of type float0, which say nothing."""
    counts = jnp.array([2, 5])
    posterior = expect(
        walk(lambda theta, x, counts: jnp.sum(counts * (theta * x) - jnp.exp(theta * x)))
    )
    expected = jax.grad(posterior)(0.5, KEY, counts)
    assert np.isfinite(expected) and expected != 0
    np.testing.assert_allclose(jax.jit(jax.grad(posterior))(0.5, KEY, counts), expected, rtol=1e-5)
    body = lambda carry, row: (carry + posterior(0.5 * carry, KEY, row), None)
    through_scan = jax.grad(lambda theta: jax.lax.scan(body, theta, counts[None])[0])(1.0)
    np.testing.assert_allclose(through_scan, 1 + 0.5 * expected, rtol=1e-5)

"""What must be refused, by a message that names the argument, what came and what to do; and what must not be."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffmh

KEY = jax.random.key(0)
WALK = diffmh.GaussianWalk(2.38)


def log_normal(theta, x):
    return -0.5 * (x - theta) ** 2


def log_other(theta, x):
    return theta * x


NORMAL = diffmh.MetropolisHastings(log_normal, WALK)
LABELS = diffmh.MetropolisHastings(log_other, diffmh.OtherState(3))


def kernel_of(log_density, proposal=WALK):
    return diffmh.MetropolisHastings(log_density, proposal)


def expect(kernel=NORMAL, f=lambda theta, x, *args: x, init=0.0, num_samples=5, num_chains=2, **options):
    return diffmh.expectation(f, kernel, init=init, num_samples=num_samples, num_chains=num_chains, **options)


MEAN = expect()
LONE = expect(num_chains=1)
THETA = jnp.float32(0.5)


def refused(call, error, words):
    """`words` must all be in the message, in this order."""
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error, "a refusal of our own, not one of JAX's that happens to be a kind of it"
    message = str(caught.value)
    assert re.search(".*".join(words), message, re.DOTALL), f"{message!r} does not say {words}"


def parametrize(**cases):
    """Each case by name: what is called, the exception, words of its message in order."""
    return pytest.mark.parametrize("call, error, words", [pytest.param(*case, id=name) for name, case in cases.items()])


class Constant(diffmh.Proposal):
    """Proposes `value` whatever the state."""

    value: object = None
    symmetric: bool = True

    def sample(self, key, x):
        return self.value

    def log_prob(self, x, x_new):
        return jnp.zeros(())


class Standard(eqx.Module):
    def sample(self, key):
        return jax.random.normal(key)

    def log_prob(self, x):
        return -0.5 * x**2


@parametrize(
    integer=(lambda: MEAN(1, KEY), TypeError, ["`theta`", "int32", "float32"]),
    integer_array=(lambda: MEAN(jnp.arange(3), KEY), TypeError, ["`theta`", "int32", "float32"]),
    boolean=(lambda: MEAN(True, KEY), TypeError, ["`theta`", "bool", "float32"]),
    complex=(lambda: MEAN(jnp.array(1j), KEY), TypeError, ["`theta`", "complex64", "real"]),
    half=(lambda: MEAN(jnp.float16(1), KEY), TypeError, ["`theta`", "float16", "float32"]),
    brain_half=(lambda: MEAN(jnp.bfloat16(1), KEY), TypeError, ["`theta`", "bfloat16", "float32"]),
    nan=(lambda: MEAN(jnp.nan, KEY), ValueError, ["`theta`", "not finite", "nan"]),
    infinite_leaf=(lambda: MEAN({"a": jnp.array([0.0, jnp.inf])}, KEY), ValueError, [r"`theta\['a'\]`", "not finite", "inf"]),
    activation=(lambda: MEAN({"act": jax.nn.relu}, KEY), TypeError, [r"`theta\['act'\]`", "not an array", "partition"]),
    string=(lambda: MEAN("0.5", KEY), TypeError, ["`theta`", "0.5", "not an array"]),
    missing=(lambda: MEAN(None, KEY), TypeError, ["`theta`", "no parameters", "None"]),
    empty=(lambda: MEAN({}, KEY), TypeError, ["`theta`", "no parameters", "{}"]),
    nan_in_trace=(lambda: diffmh.trace(NORMAL, jnp.nan, KEY, init=0.0, num_steps=5), ValueError, ["`theta`", "not finite"]),
    integer_in_check=(lambda: diffmh.check(NORMAL, 1, KEY, init=0.0), TypeError, ["`theta`", "int32"]),
)
def test_theta(call, error, words):
    refused(call, error, words)


@parametrize(
    vector=(lambda: expect(kernel_of(lambda theta, x: theta * x * jnp.ones(2)))(0.5, KEY), TypeError, ["log_density", "scalar", "2", "sum"]),
    nothing=(lambda: expect(kernel_of(lambda theta, x: None))(0.5, KEY), TypeError, ["log_density", "scalar", "None"]),
    pair=(lambda: expect(kernel_of(lambda theta, x: (theta * x, x)))(0.5, KEY), TypeError, ["log_density", "scalar"]),
    string=(lambda: expect(kernel_of(lambda theta, x: "a"))(0.5, KEY), TypeError, ["`log_density`", "scalar", "str"]),
    complex=(lambda: expect(kernel_of(lambda theta, x: theta * x * 1j))(0.5, KEY), TypeError, ["log_density", "complex64", "real"]),
    half=(lambda: expect(kernel_of(lambda theta, x: (theta * x).astype(jnp.float16)))(0.5, KEY), TypeError, ["log_density", "float16", "float32"]),
    integer=(lambda: expect(kernel_of(lambda theta, x: jnp.int32(theta * x)))(0.5, KEY), TypeError, ["log_density", "int32", "float32"]),
    nan=(lambda: expect(kernel_of(lambda theta, x: jnp.log(theta * x)), init=-7.25)(0.5, KEY), ValueError, ["log_density", "nan", "start state", "-7.25", "init"]),
    outside=(lambda: expect(kernel_of(lambda theta, x: jnp.where(x > 0, theta * x, -jnp.inf)), init=-7.25)(0.5, KEY), ValueError, ["log_density", "-inf", "start state", "-7.25", "init"]),
    outside_tree=(lambda: expect(kernel_of(lambda theta, x: jnp.log(theta * x["a"])), init={"a": 0.0})(0.5, KEY), ValueError, ["log_density", "-inf", "start state", "'a'", "0"]),
    second_in_cycle=(lambda: expect(diffmh.Cycle(NORMAL, kernel_of(lambda theta, x: theta * x * jnp.ones(2))))(0.5, KEY), TypeError, ["log_density", "scalar", "2"]),
    not_a_function=(lambda: kernel_of(3.0), TypeError, ["`log_density`", "function", "3.0"]),
)
def test_log_density(call, error, words):
    refused(call, error, words)


@parametrize(
    string=(lambda: expect(f=lambda theta, x: "a")(0.5, KEY), TypeError, ["`f`", "str"]),
    string_leaf=(lambda: expect(f=lambda theta, x: {"x": x, "name": "a"})(0.5, KEY), TypeError, ["`f`", "str"]),
    nothing=(lambda: expect(f=lambda theta, x: None)(0.5, KEY), TypeError, ["`f`", "numbers", "None"]),
    complex=(lambda: expect(f=lambda theta, x: x * 1j)(0.5, KEY), TypeError, ["`f`", "complex64", "real"]),
    half=(lambda: expect(f=lambda theta, x: x.astype(jnp.float16))(0.5, KEY), TypeError, ["`f`", "float16", "float32"]),
    nan=(lambda: expect(f=lambda theta, x: jnp.log(x), init=-7.25)(0.5, KEY), ValueError, ["`f`", "NaN", "start state", "-7.25"]),
    not_a_function=(lambda: expect(f=3.0), TypeError, ["`f`", "function", "3.0"]),
)
def test_f(call, error, words):
    refused(call, error, words)


@pytest.mark.parametrize(
    "log_density",
    [
        pytest.param(lambda theta, x: -(x**2), id="unused"),
        pytest.param(lambda theta, x: -(theta**2) - x**2, id="only a factor"),
        pytest.param(lambda theta, x: jnp.where(theta > 0, -(x**2), -(x**4)), id="only compared"),
        pytest.param(lambda theta, x: -(x**2) * jax.lax.stop_gradient(theta), id="stopped"),
        pytest.param(lambda theta, x: -(x**2) * jnp.floor(theta), id="rounded"),
    ],
)
def test_density_without_theta(log_density):
    refused(lambda: expect(kernel_of(log_density))(0.5, KEY), ValueError, ["`log_density`", "does not depend on `theta`", "`f`", "Use `theta`"])
    dependent_f = expect(kernel_of(log_density), f=lambda theta, x: theta * x)
    assert np.isfinite(dependent_f(0.5, KEY)), "f depends on theta, so there is something to differentiate"


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
@pytest.mark.parametrize("count", [-1, 0, 2.0, True, np.float32(2), np.True_, "2", None], ids=repr)
def test_counts(name, count):
    if name == "burn_in" and count == 0 and not isinstance(count, bool):
        assert COUNTED[name](count).simulation.burn_in == 0
        return
    is_whole = isinstance(count, int) and not isinstance(count, bool)
    error, words = (ValueError, ["at least", str(count)]) if is_whole else (TypeError, ["whole number", re.escape(repr(count))])
    refused(lambda: COUNTED[name](count), error, [name, *words])


def test_advice_on_counts_is_code():
    with pytest.raises(TypeError) as caught:
        diffmh.Repeat(NORMAL, 2.0)
    advice = re.search("write `(.*)`", str(caught.value)).group(1)
    compile(advice.replace("...", "2"), "advice", "exec")


@parametrize(
    raw=(lambda: MEAN(0.5, jax.random.PRNGKey(0)), TypeError, ["`key`", "uint32", "jax.random.key"]),
    missing=(lambda: MEAN(0.5), TypeError, ["`key` is missing", "jax.random.key"]),
    seed=(lambda: MEAN(0.5, 0), TypeError, ["`key`", "got 0", "jax.random.key"]),
    several=(lambda: MEAN(0.5, jax.random.split(KEY, 3)), ValueError, ["`key`", "one key", r"\(3,\)", "vmap"]),
    missing_in_run=(lambda: MEAN.run(0.5), TypeError, ["`key` is missing", "jax.random.key"]),
    missing_in_compose=(lambda: diffmh.compose(lambda theta, m: m, MEAN)(0.5), TypeError, ["`key` is missing", "jax.random.key"]),
    raw_in_trace=(lambda: diffmh.trace(NORMAL, 0.5, jax.random.PRNGKey(0), init=0.0, num_steps=5), TypeError, ["`key`", "uint32"]),
)
def test_key(call, error, words):
    refused(call, error, words)


@parametrize(
    half=(lambda: expect(init=jnp.float16(0)), TypeError, ["`init`", "float16", "float32"]),
    half_leaf=(lambda: expect(init={"a": jnp.float16(0)}), TypeError, [r"`init`\['a'\]", "float16", "float32"]),
    half_drawn=(lambda: expect(init=lambda key: jax.random.normal(key, (), jnp.float16))(0.5, KEY), TypeError, [r"`init\(key\)`", "float16", "float32"]),
    complex=(lambda: expect(init=1j), TypeError, ["`init`", "1j|complex64"]),
    empty=(lambda: expect(init={}), TypeError, ["`init`", "no arrays", "{}"]),
    string=(lambda: expect(init="0"), TypeError, ["`init`", "'0'", "not an array"]),
    walk_on_integer=(lambda: expect(init=0)(0.5, KEY), TypeError, ["`GaussianWalk`", "floats", "int32", "start from a float"]),
    walk_on_integer_leaf=(lambda: expect(kernel_of(lambda theta, x: theta * x["b"]), init={"a": 0, "b": 0.0})(0.5, KEY), TypeError, ["`GaussianWalk`", r"\['a'\]", "int32", "On"]),
    label_from_float=(lambda: expect(LABELS, init=0.0)(0.5, KEY), TypeError, ["`OtherState`", "integer", "float32", "such as 0"]),
    label_from_vector=(lambda: expect(LABELS, f=lambda theta, x: x[0], init=jnp.zeros(2, int))(0.5, KEY), TypeError, ["log_density|`OtherState`", "scalar|one integer"]),
    spins_from_scalar=(lambda: expect(kernel_of(log_other, diffmh.SpinFlip()), init=1)(0.5, KEY), TypeError, ["`SpinFlip`", "array of spins"]),
    scale_of_other_size=(lambda: expect(kernel_of(lambda theta, x: theta * x.sum(), diffmh.GaussianWalk(jnp.ones(2))), f=lambda theta, x: x, init=jnp.zeros(3))(0.5, KEY), ValueError, ["GaussianWalk", r"\(2,\)", "3 numbers"]),
)
def test_state(call, error, words):
    refused(call, error, words)


@pytest.mark.parametrize(
    "proposed",
    [
        pytest.param({"a": jnp.zeros(())}, id="structure"),
        pytest.param(jnp.zeros(2), id="shape"),
        pytest.param(jnp.zeros((), int), id="dtype"),
        pytest.param(0, id="a Python number"),
    ],
)
def test_proposal_keeps_the_form(proposed):
    refused(lambda: expect(kernel_of(log_normal, Constant(value=proposed)))(0.5, KEY), TypeError, ["`Constant`", "form", r"float32\[\]", "got"])


@parametrize(
    negative=(lambda: diffmh.GaussianWalk(-1.0), ValueError, [r"`GaussianWalk\(scale=...\)`", "positive", "-1.0"]),
    zero=(lambda: diffmh.GaussianWalk(0.0), ValueError, [r"`GaussianWalk\(scale=...\)`", "positive", "0.0"]),
    nan=(lambda: diffmh.GaussianWalk(jnp.nan), ValueError, [r"`GaussianWalk\(scale=...\)`", "nan"]),
    infinite=(lambda: diffmh.GaussianWalk(jnp.inf), ValueError, [r"`GaussianWalk\(scale=...\)`", "finite", "inf"]),
    zero_in_vector=(lambda: diffmh.GaussianWalk(jnp.array([1.0, 0.0])), ValueError, [r"`GaussianWalk\(scale=...\)`", "positive"]),
    half=(lambda: diffmh.GaussianWalk(jnp.float16(1)), TypeError, [r"`GaussianWalk\(scale=...\)`", "float16"]),
    upper=(lambda: diffmh.GaussianWalk(jnp.array([[1.0, 1.0], [0.0, 1.0]])), ValueError, [r"`GaussianWalk\(scale=...\)`", "lower-triangular", "cholesky"]),
    diagonal=(lambda: diffmh.GaussianWalk(jnp.diag(jnp.array([1.0, -1.0]))), ValueError, [r"`GaussianWalk\(scale=...\)`", "positive diagonal", "cholesky"]),
    not_square=(lambda: diffmh.GaussianWalk(jnp.ones((2, 3))), ValueError, [r"`GaussianWalk\(scale=...\)`", "square", r"\(2, 3\)"]),
    string=(lambda: diffmh.GaussianWalk("wide"), TypeError, [r"`GaussianWalk\(scale=...\)`", "wide"]),
    beta_zero=(lambda: diffmh.CrankNicolson(0.0), ValueError, [r"`CrankNicolson\(beta=...\)`", r"\(0, 1\]", "0.0"]),
    beta_large=(lambda: diffmh.CrankNicolson(1.5), ValueError, [r"`CrankNicolson\(beta=...\)`", r"\(0, 1\]", "1.5"]),
    prior_scale=(lambda: diffmh.CrankNicolson(0.5, scale=-1.0), ValueError, [r"`CrankNicolson\(scale=...\)`", "positive", "-1.0"]),
    rows=(lambda: diffmh.TransitionMatrix(jnp.ones((2, 2))), ValueError, [r"`TransitionMatrix\(matrix=...\)`", "sum to one", "2"]),
    negative_probability=(lambda: diffmh.TransitionMatrix(jnp.array([[1.5, -0.5], [0.5, 0.5]])), ValueError, [r"`TransitionMatrix\(matrix=...\)`", "non-negative", "-0.5"]),
    rectangle=(lambda: diffmh.TransitionMatrix(jnp.ones((2, 3)) / 3), ValueError, [r"`TransitionMatrix\(matrix=...\)`", "square", r"\(2, 3\)"]),
    no_density=(lambda: diffmh.Independence(3.0), TypeError, ["Independence", "`distribution.sample`", "function"]),
    not_a_proposal=(lambda: kernel_of(log_normal, 2.38), TypeError, ["`proposal`", "Proposal", "2.38"]),
    proposal_class=(lambda: kernel_of(log_normal, diffmh.GaussianWalk), TypeError, ["`proposal`", "Proposal", "a class"]),
    on_nothing=(lambda: diffmh.On(lambda x: x, 2.38), TypeError, ["`proposal`", "Proposal", "2.38"]),
)
def test_proposals(call, error, words):
    refused(call, error, words)


@pytest.mark.parametrize("wrap", [lambda proposal: proposal, lambda proposal: diffmh.On(lambda x: x["a"], proposal)], ids=["plain", "On"])
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
    refused(call, ValueError, [r"`MaximalReflection\(\)`", f"`{type(proposal).__name__}`", rf"`{advice}\(\)`"])


@parametrize(
    coupling=(lambda: diffmh.MetropolisHastings(log_normal, WALK, "maximal"), TypeError, ["`coupling`", "Coupling", "'maximal'"]),
    coupling_class=(lambda: diffmh.MetropolisHastings(log_normal, WALK, diffmh.Maximal), TypeError, ["`coupling`", "Coupling", "a class"]),
    kernel=(lambda: expect(log_normal), TypeError, ["`kernel`", "Kernel", "log_normal"]),
    proposal_for_kernel=(lambda: expect(WALK), TypeError, ["`kernel`", "Kernel", "GaussianWalk"]),
    kernel_in_trace=(lambda: diffmh.trace(WALK, 0.5, KEY, init=0.0, num_steps=5), TypeError, ["`kernel`", "Kernel", "GaussianWalk"]),
    kernel_in_check=(lambda: diffmh.check(WALK, 0.5, KEY, init=0.0), TypeError, ["`kernel`", "Kernel", "GaussianWalk"]),
    empty_cycle=(lambda: diffmh.Cycle(), ValueError, [r"`Cycle\(...\)`", "at least one kernel", "none"]),
    cycle_of_proposals=(lambda: diffmh.Cycle(NORMAL, WALK), TypeError, ["Cycle", "Kernel", "GaussianWalk"]),
    repeated_proposal=(lambda: diffmh.Repeat(WALK, 2), TypeError, ["Repeat", "Kernel", "GaussianWalk"]),
    lag=(lambda: expect(lag=1), NotImplementedError, ["lag", "0", "got 1"]),
    weights=(lambda: diffmh.StochasticDerivative(weights="foo"), ValueError, ["weights", "two-sided", "one-sided", "'foo'"]),
    baseline=(lambda: diffmh.Score(baseline="foo"), ValueError, ["baseline", "other chains", "'foo'"]),
    lonely_baseline=(lambda: jax.grad(expect(num_chains=1, estimator=diffmh.Score(baseline="other chains")))(0.5, KEY), ValueError, ["other chains", "num_chains", "at least 2", "1"]),
    baseline_size=(lambda: jax.grad(expect(estimator=diffmh.Score(baseline=jnp.ones(3))))(0.5, KEY), ValueError, ["baseline", "3 numbers", "1"]),
    estimator_name=(lambda: expect(estimator="score"), TypeError, ["`estimator`", "Estimator", "'score'"]),
    estimator_class=(lambda: expect(estimator=diffmh.Score), TypeError, ["`estimator`", "Estimator", "a class"]),
    estimator_in_trace=(lambda: diffmh.trace(NORMAL, 0.5, KEY, init=0.0, num_steps=5, estimator=diffmh.Score()), TypeError, ["`estimator`", "StochasticDerivative", "Score"]),
    one_sided=(lambda: expect(kernel_of(lambda theta, x: theta.sum() * x), estimator=diffmh.StochasticDerivative("one-sided"))(jnp.ones(2), KEY), ValueError, ["one-sided", "one scalar parameter", "2", "two-sided"]),
    one_sided_tree=(lambda: expect(kernel_of(lambda theta, x: theta["a"] * x), estimator=diffmh.StochasticDerivative("one-sided"))({"a": 0.5, "b": 0.5}, KEY), ValueError, ["one-sided", "one scalar parameter", "2"]),
    lonely_compose=(lambda: diffmh.compose(lambda theta, m: m, LONE), ValueError, ["compose", "num_chains", "at least 2", "1"]),
    compose_nothing=(lambda: diffmh.compose(lambda theta, m: m), ValueError, ["compose", "at least one expectation", "none"]),
    compose_unequal=(lambda: diffmh.compose(lambda theta, m, n: m, MEAN, expect(num_chains=3)), ValueError, ["compose", "equal `num_chains`", r"\[2, 3\]"]),
    compose_function=(lambda: diffmh.compose(lambda theta, m: m, log_normal), TypeError, ["compose", "diffmh.expectation", "log_normal"]),
    compose_without_phi=(lambda: diffmh.compose(MEAN, 3.0), TypeError, ["compose", "diffmh.expectation", "3.0"]),
    phi=(lambda: diffmh.compose(3.0, MEAN), TypeError, ["`phi`", "function", "3.0"]),
    lonely_run=(lambda: LONE.run(0.5, KEY), ValueError, [r"`.run`", "num_chains", "at least 2", "1"]),
    run_in_jit=(lambda: jax.jit(lambda theta: MEAN.run(theta, KEY).value)(0.5), TypeError, [r"`.run`", "traced", "call the expectation itself"]),
    run_in_jit_of_constants=(lambda: jax.jit(lambda scale: scale * MEAN.run(THETA, KEY).value)(1.0), TypeError, [r"`.run`", "traced", "call the expectation itself"]),
)
def test_assembly(call, error, words):
    refused(call, error, words)


def log_scaled(theta, x, scale):
    return -0.5 * ((x - theta) / scale) ** 2


SCALED = expect(kernel_of(log_scaled))
ENTROPY = diffmh.compose(lambda theta, m: m**2, MEAN)


def closing(scale):
    return expect(kernel_of(lambda theta, x: log_scaled(theta, x, scale)))


# Functions of one number, which they hand to an expectation otherwise than as theta; `theta` is at hand for both at once.
DATA = {
    "args": lambda value, theta: SCALED(theta, KEY, value),
    "args in scan": lambda value, theta: jax.lax.scan(lambda sum, _: (sum + SCALED(theta, KEY, value), None), 0.0, None, length=2)[0],
    "args carried by scan": lambda value, theta: jax.lax.scan(lambda last, _: (SCALED(theta, KEY, last), None), value, None, length=2)[0],
    "args of a composition": lambda value, theta: diffmh.compose(lambda theta, m: m**2, SCALED)(theta, KEY, value),
    "args per chain": lambda value, theta: SCALED.per_chain(theta, KEY, value).sum(),
}
CLOSED_OVER = {
    "init": lambda value, theta: expect(init=value)(theta, KEY),
    "init's function": lambda value, theta: expect(init=lambda key: value + jax.random.normal(key))(theta, KEY),
    "scale": lambda value, theta: expect(kernel_of(log_normal, diffmh.GaussianWalk(value)))(theta, KEY),
    "log_density": lambda value, theta: closing(value)(theta, KEY),
    "f": lambda value, theta: expect(f=lambda theta, x: value * x)(theta, KEY),
    "log_density in scan": lambda value, theta: jax.lax.scan(lambda sum, _: (sum + closing(value)(theta, KEY), None), 0.0, None, length=2)[0],
}


@pytest.mark.parametrize("how", ["grad", "jvp", "jit of grad", "grad of jit", "with theta", "with theta of jit"])
@pytest.mark.parametrize("where", [*DATA, *CLOSED_OVER])
def test_not_a_parameter(where, how):
    function = {**DATA, **CLOSED_OVER}[where]
    alone = lambda value: function(value, THETA)
    derivatives = {
        "grad": lambda: jax.grad(alone)(1.0),
        "jvp": lambda: jax.jvp(alone, (1.0,), (1.0,)),
        "jit of grad": lambda: jax.jit(jax.grad(alone))(1.0),
        "grad of jit": lambda: jax.grad(jax.jit(alone))(1.0),
        "with theta": lambda: jax.grad(function, (0, 1))(1.0, 0.5),
        "with theta of jit": lambda: jax.grad(jax.jit(lambda value: function(value, value)))(1.0),
    }
    words = ["`args`", "`theta`"] if where in DATA else ["`init`", "kernel", "`log_density` or `f` closes over", "`theta`", "stop_gradient"]
    refused(derivatives[how], diffmh.NotDifferentiable, ["derivative", *words])


@pytest.mark.parametrize("function", [MEAN, ENTROPY], ids=["expectation", "composition"])
@pytest.mark.parametrize(
    "second",
    [
        jax.hessian,
        lambda f: jax.grad(jax.grad(f)),
        lambda f: jax.jacfwd(jax.jacfwd(f)),
        lambda f: jax.jacrev(jax.jacfwd(f)),
        lambda f: lambda theta, key: jax.jvp(jax.grad(lambda theta: f(theta, key)), (theta,), (1.0,))[1],
        lambda f: jax.grad(jax.jit(jax.grad(f))),
        lambda f: jax.grad(lambda theta, key: jax.lax.scan(lambda sum, _: (sum + jax.grad(f)(theta, key), None), 0.0, None, length=2)[0]),
    ],
    ids=["hessian", "grad of grad", "jacfwd of jacfwd", "jacrev of jacfwd", "jvp of grad", "grad of jit of grad", "through scan"],
)
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_second_derivatives(function, second, jit):
    refused(lambda: jit(second(function))(0.5, KEY), diffmh.NotDifferentiable, ["second derivative", "first derivatives", "jax.grad"])


CONCRETE = closing(2.0)


@pytest.mark.parametrize("differentiate", [lambda f: f, jax.grad], ids=["value", "grad"])
def test_closing_over_traced_values_is_allowed(differentiate):
    """As long as nobody differentiates with respect to them."""
    at = lambda scale: differentiate(closing(scale))(0.5, KEY)
    expected = differentiate(CONCRETE)(0.5, KEY)
    np.testing.assert_allclose(jax.jit(at)(2.0), expected, rtol=1e-5)
    np.testing.assert_allclose(jax.vmap(at)(jnp.array([1.0, 2.0]))[1], expected, rtol=1e-5)
    assert at(1.0) != expected, "the scale matters here"


def test_stopped_closure_is_allowed():
    derivative = jax.grad(lambda theta: closing(jax.lax.stop_gradient(4 * theta))(theta, KEY))(0.5)
    np.testing.assert_allclose(derivative, jax.grad(CONCRETE)(0.5, KEY), rtol=1e-5)


def test_constants_inside_traced_code_are_allowed():
    expected = MEAN(0.5, KEY)
    np.testing.assert_allclose(jax.jit(lambda scale: scale * MEAN(THETA, KEY))(2.0), 2 * expected, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda scale: scale * MEAN(THETA, KEY))(2.0), expected, rtol=1e-6)
    total, _ = jax.lax.scan(lambda sum, _: (sum + MEAN(THETA, KEY), None), 0.0, None, length=3)
    np.testing.assert_allclose(total, 3 * expected, rtol=1e-6)


def test_integer_args_are_allowed():
    """They have tangents of type float0, which say nothing."""
    counts = jnp.array([2, 5])
    posterior = expect(kernel_of(lambda theta, x, counts: jnp.sum(counts * (theta * x) - jnp.exp(theta * x))))
    expected = jax.grad(posterior)(0.5, KEY, counts)
    assert np.isfinite(expected) and expected != jax.grad(posterior)(0.5, KEY, counts + 1)
    np.testing.assert_allclose(jax.jit(jax.grad(posterior))(0.5, KEY, counts), expected, rtol=1e-5)
    np.testing.assert_allclose(jax.grad(jax.jit(lambda theta: posterior(theta, KEY, counts)))(0.5), expected, rtol=1e-5)
    body = lambda sum, row: (sum + posterior(0.5 * sum, KEY, row), None)
    through_scan = jax.grad(lambda theta: jax.lax.scan(body, theta, counts[None])[0])(1.0)
    np.testing.assert_allclose(through_scan, 1 + 0.5 * expected, rtol=1e-5)


def test_args_that_depend_on_theta_without_a_derivative_are_allowed():
    stopped = jax.grad(lambda theta: SCALED(theta, KEY, jax.lax.stop_gradient(4 * theta)))(0.5)
    np.testing.assert_allclose(stopped, jax.grad(SCALED)(0.5, KEY, 2.0), rtol=1e-5)

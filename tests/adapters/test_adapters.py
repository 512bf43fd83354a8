"""Models of NumPyro and PyMC: closed forms, and finite differences of long NUTS runs."""

import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from eight_schools import EFFECTS, ERRORS, hierarchical
from sklearn.datasets import load_diabetes

import diffmh

KEY = jax.random.key(0)
FOLDER = pathlib.Path(__file__).parent

# Derivative and its error, by `nuts_differences.py` (steps of 1: the second difference is far below
# the error).
BY_NUTS = {
    ("mu", "mu_scale"): (0.77007, 0.00565),
    ("tau", "mu_scale"): (-0.03423, 0.00791),
    ("mu", "tau_scale"): (-0.03400, 0.00740),
    ("tau", "tau_scale"): (0.32013, 0.00921),
}


def conjugate(y, scale):
    mean = numpyro.sample("mean", dist.Normal(0.0, scale))
    numpyro.deterministic("twice", 2 * mean)
    numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def rows_by_name(table):
    return {(row.quantity, row.hyperparameter): row for row in table.rows}


def z_scores(table, exact: dict, level=0.95) -> np.ndarray:
    """`exact` has values, or values with errors of their own."""
    from scipy.stats import norm

    rows, found = rows_by_name(table), []
    for name, truth in exact.items():
        value, error = truth if isinstance(truth, tuple) else (truth, 0.0)
        row = rows[name]
        own = (row.high - row.low) / 2 / norm.ppf(0.5 + level / 2)
        found.append((row.derivative - value) / np.hypot(own, error))
    return np.array(found)


def test_a_conjugate_model():
    """E = s² Σy / (1 + n s²), for the mean and what is deterministic of it."""
    y = jnp.array([1.0, 2.0, 0.5])
    posterior = diffmh.from_numpyro(conjugate, y, theta={"scale": 0.8})
    f = lambda theta, sites: {name: sites[name] for name in ("mean", "twice")}
    length = {"num_samples": 4_000, "burn_in": 100, "num_chains": 64}
    table = diffmh.sensitivity(posterior, f, KEY, **length)
    exact = jax.grad(lambda s: s**2 * jnp.sum(y) / (1 + 3 * s**2))(0.8)
    wanted = {("mean", "scale"): exact, ("twice", "scale"): 2 * exact}
    assert np.abs(z_scores(table, wanted)).max() < 4


def test_the_powers_of_prior_and_likelihood():
    """With p(x)^a p(y|x)^b, E = b Σy / (a/s² + b n)."""
    y, s = jnp.array([1.0, 2.0, 0.5]), 0.8
    posterior = diffmh.from_numpyro(conjugate, y, theta={"scale": s})
    precision = 1 / s**2 + 3
    exact = jnp.sum(y) / precision + jnp.sqrt(1 / precision) * jax.random.normal(KEY, (4, 20_000))
    table = diffmh.sensitivity(posterior, lambda t, z: z["mean"], draws={"mean": exact})
    mean = lambda a, b: b * jnp.sum(y) / (a / s**2 + 3 * b)
    by_a, by_b = jax.grad(mean, argnums=(0, 1))(1.0, 1.0)
    wanted = {("f", "power of the prior"): by_a, ("f", "power of the likelihood"): by_b}
    assert np.abs(z_scores(table, wanted)).max() < 4


def regression(features, target, prior_scale):
    beta = numpyro.sample("beta", dist.Normal(0.0, prior_scale).expand([10]).to_event(1))
    numpyro.sample("y", dist.Normal(features @ beta, 0.7), obs=target)


def test_diabetes_regression():
    """All ten coefficients by the prior's scale, from draws of the exact posterior."""
    data = load_diabetes()
    features = data.data / data.data.std(axis=0)
    target = (data.target - data.target.mean()) / data.target.std()

    def posterior_mean(scale):
        precision = features.T @ features / 0.49 + np.eye(10) / scale**2
        return np.linalg.solve(precision, features.T @ target / 0.49), precision

    scale, step = 0.1, 1e-4
    mean, precision = posterior_mean(scale)
    exact = (posterior_mean(scale + step)[0] - posterior_mean(scale - step)[0]) / (2 * step)
    root = np.linalg.cholesky(np.linalg.inv(precision))
    drawn = mean + np.random.default_rng(0).normal(size=(4, 5_000, 10)) @ root.T
    posterior = diffmh.from_numpyro(
        regression, jnp.asarray(features), jnp.asarray(target), theta={"prior_scale": scale}
    )
    table = diffmh.sensitivity(posterior, lambda t, z: z["beta"], draws={"beta": drawn})
    wanted = {(f"f[{i}]", "prior_scale"): exact[i] for i in range(10)}
    assert np.abs(z_scores(table, wanted)).max() < 4
    assert np.abs(z_scores(table, {k: 1.1 * v for k, v in wanted.items()})).max() > 4


def labelled(y, logit):
    label = numpyro.sample("label", dist.Categorical(logits=jnp.stack([logit, 0.0, 0.5])))
    mean = numpyro.sample("mean", dist.Normal(jnp.array([-2.0, 0.0, 3.0])[label], 1.0))
    numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def test_a_discrete_site_is_an_integer():
    """With the mean summed out, P(label | y) ∝ w_label N(y; m_label, 2)."""
    posterior = diffmh.from_numpyro(labelled, 0.7, theta={"logit": 0.3})
    assert posterior.num_values == {"label": 3}
    fraction = posterior.expectation(
        lambda theta, sites: sites["label"] == jnp.arange(3),
        posterior.kernel(2.0),
        num_samples=1_000,
        burn_in=50,
        num_chains=64,
    )

    def exact(logit):
        log_weight = jnp.stack([logit, 0.0, 0.5])
        return jax.nn.softmax(log_weight - (0.7 - jnp.array([-2.0, 0.0, 3.0])) ** 2 / 4)

    report = fraction.run(posterior.theta, KEY)
    truth = jax.jacobian(exact)(0.3)
    z = (report.gradient["logit"] - truth) / report.gradient_error["logit"]
    assert np.abs(z).max() < 4
    assert np.abs((report.value - exact(0.3)) / report.value_error).max() < 4


def test_eight_schools_from_numpyro():
    posterior = diffmh.from_numpyro(
        hierarchical, EFFECTS, ERRORS, theta={"mu_scale": 5.0, "tau_scale": 5.0}
    )
    table = diffmh.sensitivity(
        posterior,
        lambda theta, sites: {name: sites[name] for name in ("mu", "tau")},
        KEY,
        kernel=lambda density: diffmh.MetropolisHastings(density, diffmh.GaussianWalk(0.5)),
        num_samples=20_000,
        burn_in=2_000,
        num_chains=32,
    )
    assert np.abs(z_scores(table, BY_NUTS)).max() < 4
    assert "mu_scale" in str(table)


def test_eight_schools_from_pymc():
    """In a process of its own: PyTensor switches JAX to double precision."""
    printed = subprocess.run(
        [sys.executable, FOLDER / "pymc_eight_schools.py"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = dict(eval(line) for line in printed.splitlines() if line.startswith("("))
    for name, (value, error) in BY_NUTS.items():
        derivative, own = found[name]
        assert abs(derivative - value) < 4 * np.hypot(own, error), name


def test_other_models_of_pymc():
    command = [sys.executable, FOLDER / "pymc_models.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def with_param(scale):
    numpyro.param("scale", 1.0)
    numpyro.sample("x", dist.Normal(0.0, scale))


def with_enumeration(scale):
    numpyro.sample("x", dist.Normal(0.0, scale))
    numpyro.sample("z", dist.Bernoulli(0.5), infer={"enumerate": "parallel"})


@pytest.mark.parametrize(
    ("model", "theta", "words"),
    [
        (conjugate, {"scales": 1.0}, r"`theta` names \['scales'\], which .* not take.*'scale'\]"),
        (conjugate, 1.0, "dictionary of hyperparameters by name"),
        (with_param, {"scale": 1.0}, "numpyro.param"),
        (with_enumeration, {"scale": 1.0}, "marked for enumeration"),
        (lambda scale: None, {"scale": 1.0}, "no latent site"),
    ],
)
def test_refusals(model, theta, words):
    args = (jnp.ones(3),) if model is conjugate else ()
    with pytest.raises((TypeError, ValueError), match=words):
        diffmh.from_numpyro(model, *args, theta=theta)


def with_optional_data(scale, y=None):
    mean = numpyro.sample("mean", dist.Normal(0.0, scale))
    numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def test_forgotten_data():
    """`y=None` makes the observed site a latent one: the table would be that of the prior."""
    with pytest.warns(UserWarning, match=r"no observed site.*\['mean', 'y'\] are all sampled"):
        prior = diffmh.from_numpyro(with_optional_data, theta={"scale": 1.0})
    assert repr(prior) == "Posterior(of ['mean', 'y'] without data, theta={'scale': 1.0})"
    posterior = diffmh.from_numpyro(with_optional_data, y=jnp.ones(2), theta={"scale": 1.0})
    assert repr(posterior) == "Posterior(of ['mean'] given ['y'], theta={'scale': 1.0})"
    with pytest.raises(TypeError, match=r"missing a required argument: 'y'.*Pass hyperparam.*data"):
        diffmh.from_numpyro(conjugate, theta={"scale": 1.0})


def test_an_error_of_the_model_says_where():
    with pytest.raises(ValueError, match="invalid scale") as caught:
        diffmh.from_numpyro(with_optional_data, y=jnp.ones(2), theta={"scale": -1.0})
    assert "from the model at the `theta`" in caught.value.__notes__[0]


def test_more_refusals():
    posterior = diffmh.from_numpyro(conjugate, jnp.ones(3), theta={"scale": 1.0})
    with pytest.raises(TypeError, match=r"`f` is called as `f\(theta, sites\)`, but .*`\(z\)`"):
        posterior.expectation(lambda z: z["mean"], num_samples=10)
    with pytest.raises(ValueError, match="the sites are"):
        posterior.kernel(proposals={"other": diffmh.OtherState(2)})
    with pytest.raises(ValueError, match="needs a `key` for sampling, or existing `draws`"):
        diffmh.sensitivity(posterior, lambda t, z: z["mean"])
    counts = lambda rate: numpyro.sample("n", dist.Poisson(rate))
    with pytest.raises(ValueError, match="its values are not known"):
        diffmh.from_numpyro(counts, theta={"rate": 2.0}).kernel()


def test_whole_numbers_are_numbers():
    assert diffmh.from_numpyro(conjugate, jnp.ones(3), theta={"scale": 5}).theta["scale"] == 5.0


def bounded(y, top):
    with numpyro.plate("two", 2):
        u = numpyro.sample("u", dist.Uniform(0.0, top))
    numpyro.sample("y", dist.Normal(u, 1.0), obs=y)


def test_a_support_that_depends_on_theta():
    """The transform puts the site into its support, wherever that ends. By quadrature."""
    y, top = jnp.array([0.5, 1.2]), 2.0
    posterior = diffmh.from_numpyro(bounded, y, theta={"top": top})
    f = lambda theta, sites: {"u": sites["u"]}
    table = diffmh.sensitivity(posterior, f, KEY, num_samples=2_000, burn_in=100, num_chains=64)

    def exact(top):
        at = top * (jnp.arange(2_000)[:, None] + 0.5) / 2_000
        weight = jnp.exp(-0.5 * (y - at) ** 2)
        return jnp.sum(weight * at, axis=0) / jnp.sum(weight, axis=0)

    slopes = jax.jacobian(exact)(top)
    truth = {(f"u[{i}]", "top"): float(slopes[i]) for i in range(2)}
    assert np.all(np.abs(z_scores(table, truth)) < 4)


def test_a_jump_of_the_users_own_is_still_refused():
    def jumps(y, at):
        u = numpyro.sample("u", dist.Uniform(0.0, 2.0))
        numpyro.sample("y", dist.Normal(jnp.where(u > at, 1.0, 0.0), 1.0), obs=y)

    def observed(y, top):
        u = numpyro.sample("u", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Uniform(u - top, u + top), obs=y)

    for model, name in ((jumps, "at"), (observed, "top")):
        posterior = diffmh.from_numpyro(model, jnp.asarray(0.3), theta={name: 1.0})
        length = {"num_samples": 100, "burn_in": 10, "num_chains": 4}
        mean = posterior.expectation(lambda theta, sites: sites["u"], **length)
        with pytest.raises(diffmh.NotDifferentiable, match="jumps in x"):
            mean.run(posterior.theta, KEY)


@pytest.mark.parametrize("name", ["numpyro", "pymc", "blackjax"])
def test_what_is_not_installed_names_its_extra(name, monkeypatch):
    for module in [m for m in sys.modules if m.split(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    call = {
        "numpyro": lambda: diffmh.from_numpyro(conjugate, 1.0, theta={"scale": 1.0}),
        "pymc": lambda: diffmh.from_pymc(None, theta={"scale": 1.0}),
        "blackjax": lambda: diffmh.as_blackjax(None, 1.0),
    }[name]
    with pytest.raises(ModuleNotFoundError, match=rf'pip install "diffmh\[{name}\]"'):
        call()


def test_the_docs_take_twelve_lines():
    """From a NumPyro model to the table, as it stands in docs/models.md; shorter chains."""
    text = (FOLDER.parent.parent / "docs" / "models.md").read_text()
    code = text.split("```{code-cell} python\n")[1].split("```")[0]
    assert len([line for line in code.splitlines() if line]) <= 12
    shorter = code.replace("key(0))", "key(0), num_warmup=100, num_samples=50)")
    assert shorter != code
    names: dict = {}
    exec(shorter, names)
    assert {row.hyperparameter for row in names["table"].rows} >= {"mu_scale", "tau_scale"}

"""`check` names what is wrong with a user's own parts, and passes what is sound."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from small_runs import BOUNDED, KEY, LABELS, WALK, log_normal

import diffmh


class Standard(eqx.Module):
    def sample(self, key):
        return 1.5 * jax.random.normal(key)

    def log_prob(self, x):
        return jax.scipy.stats.norm.logpdf(x, 0, 1.5)


log_vector = lambda theta, x: -0.5 * jnp.sum((x - theta) ** 2)
log_spins = lambda theta, x: theta * jnp.sum(x[1:] * x[:-1])
log_mixed = lambda theta, x: -theta * x["label"] - 0.5 * (x["mean"] - x["label"]) ** 2
RING = jnp.array([[0.0, 0.9, 0.1], [0.1, 0.0, 0.9], [0.9, 0.1, 0.0]])
SOUND = {
    "GaussianWalk": (WALK, 0.0),
    "GaussianWalk of a matrix": (
        diffmh.MetropolisHastings(
            log_vector, diffmh.GaussianWalk(jnp.array([[1.0, 0.0], [0.5, 2.0]]))
        ),
        jnp.zeros(2),
    ),
    "CrankNicolson": (
        diffmh.MetropolisHastings(log_vector, diffmh.CrankNicolson(0.5, 1.5)),
        jnp.zeros(2),
    ),
    "OtherState": (LABELS, 0),
    "TransitionMatrix": (
        diffmh.MetropolisHastings(lambda theta, x: -theta * x, diffmh.TransitionMatrix(RING)),
        0,
    ),
    "SpinFlip": (diffmh.MetropolisHastings(log_spins, diffmh.SpinFlip()), jnp.ones(4, int)),
    "SpinFlip of a site": (
        diffmh.MetropolisHastings(log_spins, diffmh.SpinFlip(site=1)),
        jnp.ones(4, int),
    ),
    "Independence": (diffmh.MetropolisHastings(log_normal, diffmh.Independence(Standard())), 0.0),
    "On, Cycle": (
        diffmh.Cycle(
            diffmh.MetropolisHastings(
                log_mixed, diffmh.On(lambda x: x["label"], diffmh.OtherState(3))
            ),
            diffmh.MetropolisHastings(
                log_mixed, diffmh.On(lambda x: x["mean"], diffmh.GaussianWalk(1.0))
            ),
        ),
        {"label": 0, "mean": 0.0},
    ),
}


class Own(diffmh.extend.Proposal):
    """A proposal `x' = move(x, z)` with z standard normal, and what it claims its density to be."""

    move: object = None
    density: object = None
    symmetric: bool = False

    def sample(self, key, x):
        return self.move(x, jax.random.normal(key, x.shape))

    def log_prob(self, x, x_new):
        return self.density(x, x_new)


class Shrunk(diffmh.extend.Coupling):
    def propose(self, key, proposal, x, x_new, y):
        return jnp.where(x == y, x_new, y + 0.5 * (x_new - x))


class Unfaithful(diffmh.extend.Coupling):
    def propose(self, key, proposal, x, x_new, y):
        return proposal.sample(key, y)


def own(move, density, symmetric, log_density=log_normal):
    proposal = Own(move=move, density=density, symmetric=symmetric)
    return diffmh.MetropolisHastings(log_density, proposal, diffmh.CommonRandomNumbers())


def coupled(coupling):
    return diffmh.MetropolisHastings(log_normal, diffmh.GaussianWalk(1.0), coupling)


log_pdf = jax.scipy.stats.norm.logpdf
log_gamma = lambda theta, x: jnp.where(x > 0, theta * jnp.log(jnp.abs(x)) - x, -jnp.inf)
add = lambda x, z: x + z
drift = lambda x, z: x + 0.5 + z
multiply = lambda x, z: x * jnp.exp(z)
uniform = lambda x, z: x + jax.scipy.stats.norm.cdf(z) - 0.5
of_the_logarithm = lambda x, x_new: log_pdf(jnp.log(x_new), jnp.log(x))
SOUND_OWN = {
    "drift": (own(drift, lambda x, x_new: log_pdf(x_new, x + 0.5), False), 0.0),
    "uniform": (
        own(uniform, lambda x, x_new: jnp.where(jnp.abs(x_new - x) <= 0.5, 0.0, -jnp.inf), True),
        0.0,
    ),
    "multiply": (
        own(
            multiply, lambda x, x_new: of_the_logarithm(x, x_new) - jnp.log(x_new), False, log_gamma
        ),
        1.0,
    ),
}
BROKEN = {
    "not symmetric": (
        own(drift, lambda x, x_new: log_pdf(x_new, x + 0.5), True),
        0.0,
        "Own.symmetric",
    ),
    "density without the drift": (
        own(drift, lambda x, x_new: log_pdf(x_new, x), True),
        0.0,
        "Own.log_prob",
    ),
    "density of another scale": (
        own(add, lambda x, x_new: log_pdf(x_new, x, 1.5), True),
        0.0,
        "Own.log_prob",
    ),
    "density without the Jacobian": (
        own(multiply, of_the_logarithm, False, log_gamma),
        1.0,
        "Own.log_prob",
    ),
    "coupling with another marginal": (coupled(Shrunk()), 0.0, "Shrunk .* marginal"),
    "unfaithful coupling": (coupled(Unfaithful()), 0.0, "Unfaithful .* faithful"),
    "no theta": (
        diffmh.MetropolisHastings(lambda theta, x: -(x**2), diffmh.GaussianWalk(1.0)),
        0.0,
        "density",
    ),
    "another form": (
        own(lambda x, z: jnp.stack([x, z]), lambda x, x_new: jnp.zeros(()), True),
        0.0,
        "proposal",
    ),
    "start outside": (BOUNDED(-jnp.inf), 2.0, "density"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_check_names_what_is_wrong(name):
    kernel, init, promise = BROKEN[name]
    findings = diffmh.check(kernel, 0.5, KEY, init=init)
    assert not findings and "BROKEN" in str(findings), str(findings)
    assert [bool(re.search(promise, finding.promise)) for finding in findings.broken] == [True], (
        str(findings)
    )


ALIKE = (
    "GaussianWalk of a matrix",
    "CrankNicolson",
    "TransitionMatrix",
    "SpinFlip of a site",
    "uniform",
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.thorough if name in ALIKE else ())
        for name in (*SOUND, *SOUND_OWN)
    ],
)
def test_check_passes_what_is_sound(name):
    kernel, init = {**SOUND, **SOUND_OWN}[name]
    findings = diffmh.check(kernel, 0.5, KEY, init=init)
    assert findings and not findings.broken, str(findings)
    assert len(findings.findings) >= 6 and "BROKEN" not in str(findings)

"""Errors that couplings raise."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from refusals import KEY, NORMAL, WALK, expect, log_normal, refused

import diffmh


class Converting(diffmh.extend.Coupling):
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


@pytest.mark.parametrize("estimator", [None, diffmh.Score()], ids=["alternatives", "score"])
def test_a_proposal_of_theta_whose_coupling_does_not_fit(estimator):
    """Also where no alternative ever takes a coupled step."""
    walk = lambda theta: diffmh.GaussianWalk(jnp.exp(theta))
    kernel = diffmh.MetropolisHastings(NORMAL.density, walk, diffmh.SameSite())
    refused(
        lambda: expect(kernel, estimator=estimator)(0.5, KEY),
        ValueError,
        "`SameSite()` couples `OneLabel`, not `GaussianWalk`",
    )

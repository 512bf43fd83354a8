"""Errors that proposals raise."""

import jax.numpy as jnp
import pytest
from refusals import KEY, NORMAL, cases, expect, log_normal, refused

import diffmh


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


class Constant(diffmh.extend.Proposal):
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
        "`TransitionMatrix(probabilities=...)` … sum to one … [2. 2.]",
    ),
    negative_entry=(
        lambda: diffmh.TransitionMatrix(jnp.array([[1.5, -0.5], [0.5, 0.5]])),
        ValueError,
        "`TransitionMatrix(probabilities=...)` … non-negative … got … -0.5",
    ),
    rectangle=(
        lambda: diffmh.TransitionMatrix(jnp.ones((2, 3))),
        ValueError,
        "`TransitionMatrix(probabilities=...)` … square … (2, 3)",
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

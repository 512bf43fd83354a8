"""The test of a row: each of its ways of calling against `jacfwd` of each chain, and that
against the exact answer.
"""

from __future__ import annotations

import functools
import pathlib
import tempfile
import unittest.mock
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from arrays import Row
from options import STATIONARY, together
from problems import CONTINUOUS, Problem, problem_of
from unbiasedness import LEAST_RUNS, assert_unbiased

import diffmh
from diffmh.runs.rounds import round_key

KEY = 19
# Which chains are compared with exact answers: of so many samples, 2,000 are affordable.
MOST_SAMPLES = 30
WORDS = {"none": None, "f": "f", "covariance": "covariance"}


class Case(NamedTuple):
    """An expectation as a row has it, where it is called, and the reference: value (C, F) and
    Jacobian (C, F, P) of each chain.
    """

    expectation: diffmh.Expectation
    theta: jax.Array
    key: jax.Array
    args: tuple[Any, ...]
    value: np.ndarray
    jacobian: np.ndarray

    @property
    def num_mapped(self) -> int:
        """As many as `jacfwd` maps over, for the same program. Births have one of their own."""
        estimator = self.expectation.simulation.estimator
        return 2 if getattr(estimator, "births", False) else self.theta.size

    @property
    def mean(self) -> tuple[np.ndarray, np.ndarray]:
        return self.value.mean(axis=0), self.jacobian.mean(axis=0)


def check(row: Row, mesh: jax.sharding.Mesh | None = None, thorough: bool = False) -> None:
    """A row and those that share its programs."""
    rows = together(row)
    with jax.enable_x64(row["x64"]):
        expectation = expectation_of(row, problem_of(row), mesh)
        plain = expectation if mesh is None else expectation_of(row, problem_of(row), None)
        many = many_chains(plain) if compared(row, thorough) else None
        for zeros in dict.fromkeys(one["zeros"] for one in rows):
            problem = problem_of(row | {"zeros": zeros})
            theta, args = numbers(problem)
            key = jax.random.key(KEY)
            if many is not None:
                compare_with_exact(row, problem, *many(theta, key, args))
            case = Case(expectation, theta, key, args, *each_chain(plain, theta, key, args))
            for one in rows:
                if one["zeros"] == zeros:
                    WAYS[one["way"]](case)


def compared(row: Row, thorough: bool) -> bool:
    """Rows of few chains take a program more for 2,000 of them: with `--thorough`, and not births,
    whose chains know nothing of each other.
    """
    affordable = row["num_samples"] <= MOST_SAMPLES
    few = row["num_chains"] < 100 and (not thorough or row["estimator"] == "births")
    # One-sided weights have no variance on continuous states (`StochasticDerivative`).
    infinite = row["weights"] == "one-sided" and row["kernel"] in CONTINUOUS
    # Stein's functions have the mean zero at equilibrium, which these chains have not reached.
    stein = row["control"] == "stein"
    return affordable and not (few or infinite or stein)


def numbers(problem: Problem) -> tuple[jax.Array, tuple[Any, ...]]:
    args = () if problem.tables is None else (jax.tree.map(jnp.asarray, problem.tables),)
    return jnp.asarray(problem.theta), jax.tree.map(lambda leaf: leaf.astype(float), args)


def expectation_of(row: Row, problem: Problem, mesh) -> diffmh.Expectation:
    here, other = problem.starts
    kernel, start = problem.kernel, {"init": here}
    match row["start"]:
        case "adapted":
            # Three chains of a warm-up that have not moved: those of the run start where they are.
            states = jax.tree.map(lambda leaf: jnp.stack([jnp.asarray(leaf)] * 3), here)
            kernel, start = diffmh.Adapted(kernel, states), {}
        case "function":
            start = {"init": functools.partial(_one_of_two, here, other)}
    return diffmh.expectation(
        problem.f,
        kernel,
        **start,
        num_samples=row["num_samples"],
        burn_in=row["burn_in"],
        num_chains=row["num_chains"],
        lag=row["lag"],
        estimator=estimator_of(row, problem),
        mesh=mesh,
    )


def _one_of_two(here, other, key):
    return jax.tree.map(functools.partial(jnp.where, jax.random.bernoulli(key)), here, other)


def estimator_of(row: Row, problem: Problem) -> diffmh.extend.Estimator:
    alternatives = None if row["alternatives"] == "default" else row["alternatives"]
    match row["estimator"]:
        case "covariance":
            control = "stein" if row["control"] == "stein" else None
            return diffmh.Covariance(control, unconstrained=control is not None)
        case "stationary":
            return diffmh.Stationary(row["pair_lag"], alternatives)
        case "stationary covariance":
            return diffmh.Stationary(row["pair_lag"], alternatives=0)
        case "score":
            return diffmh.Score(
                {"none": None, "f": "other chains", "function": 0.5}[row["control"]]
            )
    return diffmh.StochasticDerivative(
        row["weights"],
        alternatives,
        problem.control if row["control"] == "function" else WORDS[row["control"]],
        births=row["estimator"] == "births",
    )


def each_chain(expectation, theta, key, args):
    """The reference: value and Jacobian of each chain."""

    def value(theta):
        value = expectation.per_chain(theta, key, *args)
        return value, value

    jacobian, value = jax.jacfwd(value, has_aux=True)(theta)
    return np.asarray(value, float), np.asarray(jacobian, float)


def many_chains(expectation):
    """The same under as many keys as make 2,000 independent numbers: chains, or the averages of one
    or two. Run by run where these are few, else in one program.
    """
    num_chains = expectation.num_chains
    runs = LEAST_RUNS if num_chains <= 2 else -(-LEAST_RUNS // num_chains)
    stack = lambda *leaves: np.stack(leaves)

    def both(theta, key, args):
        value = lambda theta: (expectation.per_chain(theta, key, *args),) * 2
        jacobian, value = jax.jacfwd(value, has_aux=True)(theta)
        return value, jacobian

    together = jax.jit(jax.vmap(both, (None, 0, None)))

    def found(theta, key, args):
        keys = [key, *jax.random.split(jax.random.fold_in(key, 1), runs)][:runs]
        if runs < 10:
            each = [each_chain(expectation, theta, key, args) for key in keys]
            return jax.tree.map(stack, *each)
        return jax.tree.map(np.asarray, together(theta, jnp.stack(keys), args))

    return found


def compare_with_exact(row: Row, problem: Problem, value, jacobian) -> None:
    num_samples, burn_in, num_chains = row["num_samples"], row["burn_in"], row["num_chains"]
    if row["estimator"] == "covariance":
        exact = problem.covariance(num_samples, burn_in, num_chains)
    elif row["estimator"] in STATIONARY:
        exact = problem.stationary(row["lag"])
    else:
        exact = problem.exact(num_samples, burn_in, row["lag"])
    for samples, wanted, what in zip(
        (value, jacobian), exact, ("value", "derivative"), strict=True
    ):
        # Of a few chains the averages are independent, the chains need not be.
        flat = samples.mean(axis=1) if num_chains <= 2 else samples.reshape(-1, *samples.shape[2:])
        assert_unbiased(flat, wanted, what)


def close(found, wanted, what: str) -> None:
    found, wanted = np.asarray(found, float), np.asarray(wanted)
    rounding = 1e-9 if jax.config.jax_enable_x64 else 2e-4
    scale = 1e-3 + np.max(np.abs(wanted))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=rounding * scale, err_msg=what)


def _call(case: Case) -> None:
    close(case.expectation(case.theta, case.key, *case.args), case.mean[0], "call")


def _jacfwd(case: Case) -> None:
    found = jax.jacfwd(case.expectation)(case.theta, case.key, *case.args)
    close(found, case.mean[1], "jacfwd")


def _vjp(case: Case) -> None:
    """As of a program that wants several of them; mapped, they share the reference's program."""
    value = lambda theta: case.expectation(theta, case.key, *case.args)
    cotangents = jnp.sin(jnp.arange(2 * case.num_mapped) + 1.0).reshape(-1, 2)
    found = jax.vmap(lambda cotangent: jax.vjp(value, case.theta)[1](cotangent)[0])(cotangents)
    close(found, np.asarray(cotangents, float) @ case.mean[1], "vjp")


def _per_chain(case: Case) -> None:
    along = jnp.cos(jnp.arange(case.theta.size**2) + 1.0).reshape(case.theta.size, -1)
    value = lambda theta: case.expectation.per_chain(theta, case.key, *case.args)
    push = lambda direction: jax.jvp(value, (case.theta,), (direction,))
    found, slope = jax.vmap(push, out_axes=(None, 0))(along)
    close(found, case.value, "per_chain")
    wanted = np.einsum("cfp,dp->dcf", case.jacobian, np.asarray(along, float))
    close(slope, wanted, "jvp of per_chain")


def _run(case: Case) -> None:
    _reported(case.expectation.run(case.theta, case.key, *case.args), case, "run")


def _reported(report: diffmh.Report, case: Case, what: str) -> None:
    close(report.value, case.mean[0], f"value of {what}")
    close(report.gradient, case.mean[1], f"gradient of {what}")
    errors = np.concatenate([np.ravel(report.value_error), np.ravel(report.gradient_error)])
    assert np.all(errors >= 0), f"errors of {what}: {errors}"


def _until(case: Case) -> None:
    """Two rounds, the second with a key of its own."""
    num_steps = case.expectation.num_steps
    until = diffmh.Until(absolute=1e-30, max_steps=2 * num_steps)
    report = case.expectation.run(case.theta, case.key, *case.args, until=until)
    if report.num_chains == case.expectation.num_chains:
        # A control variate may leave no variance at all: then one round is enough.
        assert np.all(np.asarray(report.gradient_error) < 1e-15), "stopped too soon"
        return _reported(report, case, "until")
    again = round_key(case.key, 1)

    def value(theta):
        value = case.expectation(theta, again, *case.args)
        return value, value

    jacobian, second = jax.jacfwd(value, has_aux=True)(case.theta)
    close(report.value, (case.mean[0] + second) / 2, "value of until")
    close(report.gradient, (case.mean[1] + jacobian) / 2, "gradient of until")


def _checkpoint(case: Case) -> None:
    """As it is made, and as it is found again."""
    with tempfile.TemporaryDirectory() as directory:
        place = diffmh.Checkpoint(pathlib.Path(directory) / "run", seconds=0)
        for what in ("checkpoint", "checkpoint found again"):
            report = case.expectation.run(case.theta, case.key, *case.args, checkpoint=place)
            _reported(report, case, what)


def _compare(case: Case) -> None:
    """Without the other estimators: each would be compiled, and all have rows of their own."""
    with unittest.mock.patch("diffmh._expectation.candidates", lambda own: [own]):
        compared = diffmh.compare(case.expectation, case.theta, case.key, *case.args)
    (own,) = compared.rows
    close(own.value, case.mean[0], "value of compare")
    close(own.gradient, case.mean[1], "gradient of compare")


WAYS: dict[str, Callable[[Case], None]] = {
    "call": _call,
    "jacfwd": _jacfwd,
    "vjp": _vjp,
    "per_chain": _per_chain,
    "run": _run,
    "until": _until,
    "checkpoint": _checkpoint,
    "compare": _compare,
}


def attempt(row: Row, mesh: jax.sharding.Mesh | None = None) -> None:
    """Calls what is to be refused, in the row's way."""
    with jax.enable_x64(row["x64"]):
        problem = problem_of(row)
        theta, args = numbers(problem)
        expectation = expectation_of(row, problem, mesh)
        nothing = np.zeros((1, 2)), np.zeros((1, 2, theta.size))
        WAYS[row["way"]](Case(expectation, theta, jax.random.key(KEY), args, *nothing))

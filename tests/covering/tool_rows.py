"""What is done with a row of the table of tools: each way of calling against the others under the
same key, and against closed forms.
"""

from __future__ import annotations

import functools
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax
from arrays import Row
from rows import KEY, close
from tool_problems import ToolProblem, tool_problem
from tools_table import LONG, OF_DRAWS, STATIONARY
from unbiasedness import LEAST_RUNS, Z, assert_unbiased

import diffmh
from diffmh.runs.rounds import round_key

NUM_SAMPLES = 20
# Draws of all chains together; and how far from θ₀ they are reweighted.
NUM_DRAWS, STEP = 6_000, 0.1
# So many chains make a z-score of a report's errors.
MANY = 600


def _no_product(*_: Any) -> NoReturn:
    raise TypeError("a Hessian alone has a product")


class Tool(NamedTuple):
    """`call(theta, key)` has arrays by name, and so have `again`, by another derivative, `report`,
    with errors beside them and options of a run, and `exact(theta, names)`, by closed forms.
    `product(theta, key, direction)` is a Hessian's.
    """

    call: Callable[[Any, Any], dict[str, Any]]
    report: Callable[..., dict[str, tuple[Any, Any]]]
    again: Callable[[Any, Any], dict[str, Any]]
    exact: Callable[..., dict[str, Any]]
    product: Callable[[Any, Any, Any], Any] = _no_product


def numbers(row: Row) -> tuple[ToolProblem, jax.Array, tuple[Any, ...]]:
    problem = tool_problem(row["kernel"], row["parameters"], row["args"] == "tables")
    tables = problem.tables
    args = () if tables is None else (jax.tree.map(lambda t: jnp.asarray(t, float), tables),)
    return problem, jnp.asarray(problem.theta, float), args


def options_of(row: Row, problem: ToolProblem, mesh) -> dict[str, Any]:
    """Chains at equilibrium from the start on, or pairs that are not."""
    start = problem.start if row["estimator"] in STATIONARY else problem.draw
    chains = {"num_samples": NUM_SAMPLES, "num_chains": row["num_chains"], "mesh": mesh}
    chains["burn_in"] = row["burn_in"]
    if row["max_steps"] == "too few":
        chains["num_samples"] = 2
    return {"init": start} | chains


def estimator_of(row: Row) -> diffmh.extend.Estimator:
    most = {"default": None, "some": 500, "too few": 2}[row["max_steps"] or "default"]
    match row["estimator"]:
        case "stationary":
            return diffmh.Stationary(row["pair_lag"], max_steps=most)
        case "stationary covariance":
            return diffmh.Stationary(row["pair_lag"], alternatives=0, max_steps=most)
        case "control":
            return diffmh.StochasticDerivative(control="covariance")
    return diffmh.Covariance()


def expectation_of(row: Row, problem: ToolProblem, mesh) -> diffmh.Expectation:
    options = options_of(row, problem, mesh)
    return diffmh.expectation(problem.f, problem.kernel, estimator=estimator_of(row), **options)


def exactly(**functions: Callable) -> Callable[..., dict[str, np.ndarray]]:
    """Functions of theta in double precision, those that are named."""

    def exact(theta, names):
        with jax.enable_x64(True):
            at = jnp.asarray(np.asarray(theta, float))
            # One program: eagerly, each operation is another.
            found = jax.jit(lambda at: {name: functions[name](at) for name in names})(at)
            return jax.tree.map(np.asarray, found)

    return exact


def first_and_second(function: Callable) -> dict[str, Callable]:
    return {
        "value": function,
        "slope": jax.jacfwd(function),
        "hessian": jax.jacfwd(jax.jacfwd(function)),
    }


def derivative(row: Row, mesh=None) -> Tool:
    problem, _, args = numbers(row)
    e = expectation_of(row, problem, mesh)
    value = lambda theta, key: e(theta, key, *args)

    def report(theta, key, **options):
        found = e.run(theta, key, *args, **options)
        return {
            "value": (found.value, found.value_error),
            "slope": (found.gradient, found.gradient_error),
        }

    return Tool(
        lambda *at: {"value": value(*at), "slope": jax.jacrev(value)(*at)},
        report,
        lambda *at: {"slope": jax.jacfwd(value)(*at)},
        exactly(**first_and_second(problem.mean)),
    )


def hessian(row: Row, mesh=None) -> Tool:
    problem, _, args = numbers(row)
    h = diffmh.hessian(expectation_of(row, problem, mesh))
    call = lambda theta, key: h(theta, key, *args)

    def report(theta, key):
        found = h.run(theta, key, *args)
        return {
            "value": (found.value, found.value_error),
            "slope": (found.gradient, found.gradient_error),
            "hessian": (found.hessian, found.hessian_error),
        }

    return Tool(
        lambda *at: {"hessian": call(*at)},
        report,
        lambda *at: {"third": jax.jacfwd(call)(*at)},
        exactly(**first_and_second(problem.mean)),
        lambda theta, key, v: h.product(theta, key, *args, direction=v),
    )


def evidence(row: Row, mesh=None) -> Tool:
    problem, _, args = numbers(row)
    options = options_of(row, problem, mesh)
    return _evidence(diffmh.evidence(problem.density, problem.kernel, **options), problem, args)


def _evidence(e, problem: ToolProblem, args, keyed: bool = True) -> Tool:
    given = (lambda key: (key, *args)) if keyed else (lambda key: args)

    def call(theta, key):
        found = e(theta, *given(key))
        return {"slope": found.gradient, "hessian": found.hessian}

    def report(theta, key, **options):
        found = e.run(theta, *given(key), **options)
        return {
            "slope": (found.gradient, found.gradient_error),
            "hessian": (found.hessian, found.hessian_error),
        }

    again = lambda *at: {"third": jax.jacfwd(lambda theta: call(theta, at[1])["slope"])(at[0])}
    return Tool(call, report, again, exactly(**first_and_second(problem.log_normaliser)))


def draws_of(row: Row, problem: ToolProblem) -> Any:
    """Of the equilibrium at theta, `(chain, draw, ...)`."""
    chains = row["num_chains"]
    keys = jax.random.split(jax.random.key(KEY), (chains, NUM_DRAWS // chains))
    return jax.vmap(jax.vmap(problem.draw))(keys)


def by_hand(problem: ToolProblem, at, draws, args) -> Callable[[Any], Any]:
    """`Σ w f / Σ w` as it is written."""
    states = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), draws)
    states = jax.vmap(problem.state)(states)

    def mean(theta):
        one = lambda theta, x: problem.bare(theta, x, *args)
        log_w = jax.vmap(lambda x: one(theta, x) - one(jnp.asarray(at, theta.dtype), x))(states)
        f = jax.vmap(lambda x: problem.bare_f(theta, x, *args))(states)
        return jax.nn.softmax(log_w) @ f

    return mean


def from_draws(row: Row, mesh=None) -> Tool:
    problem, theta, args = numbers(row)
    draws = draws_of(row, problem)
    d = diffmh.from_draws(problem.bare_f, problem.bare, draws, at=theta, state=problem.state)
    value = lambda theta, key: d(theta, *args)

    def report(theta, key):
        found = d.run(theta, *args)
        return {
            "value": (found.value, found.value_error),
            "slope": (found.gradient, found.gradient_error),
        }

    hand = by_hand(problem, theta, draws, args)
    return Tool(
        lambda *at: {"value": value(*at), "slope": jax.jacrev(value)(*at)},
        report,
        lambda *at: {"hessian": jax.hessian(value)(*at)},
        exactly(**first_and_second(hand)),
    )


def hessian_of_draws(row: Row, mesh=None) -> Tool:
    problem, theta, args = numbers(row)
    draws = draws_of(row, problem)
    h = diffmh.hessian(diffmh.from_draws(problem.bare_f, problem.bare, draws, state=problem.state))
    call = lambda theta, key: h(theta, *args)

    def report(theta, key):
        found = h.run(theta, *args)
        return {"hessian": (found.hessian, found.hessian_error)}

    hand = by_hand(problem, theta, draws, args)
    return Tool(
        lambda *at: {"hessian": call(*at)},
        report,
        lambda *at: {"third": jax.jacfwd(call)(*at)},
        exactly(hessian=first_and_second(hand)["hessian"], third=jax.jacfwd(jax.hessian(hand))),
        lambda theta, key, v: h.product(theta, *args, direction=v),
    )


def evidence_of_draws(row: Row, mesh=None) -> Tool:
    problem, theta, args = numbers(row)
    e = diffmh.evidence(problem.density, draws_of(row, problem), at=theta)
    return _evidence(e, problem, args, keyed=False)


def check_curve(row: Row, mesh=None) -> None:
    """Against the closed form within its errors, and the average at the same points."""
    problem, theta, args = numbers(row)
    draws = draws_of(row, problem)
    d = diffmh.from_draws(problem.bare_f, problem.bare, draws, at=theta, state=problem.state)
    grid = theta + STEP * jnp.linspace(-1, 1, 3)[:, None] * jnp.eye(theta.size)[0]
    curve = d.curve(grid, *args)
    assert np.all(curve.trusted) and curve.effective_draws[1] == NUM_DRAWS
    exact = exactly(mean=jax.vmap(problem.mean))(grid, ["mean"])["mean"]
    within(curve.value, exact, curve.value_error, "curve")
    assert np.all((curve.low < curve.value) & (curve.value < curve.high))
    # The jackknife takes off a bias of the order of 1 / draws.
    means = jax.vmap(lambda at: d(at, *args))(grid)
    assert np.all(np.abs(means - curve.value) < 0.2 * np.asarray(curve.value_error))
    np.testing.assert_allclose(curve.along, grid[:, 0])


def check_newton(row: Row, mesh=None) -> None:
    """A tenth of Newton's step, and another from the same draws."""
    problem, theta, args = numbers(row)

    def observed(theta, *args):
        # Bent more than log Z is, so that there is an optimum, error or not.
        return -50.0 * jnp.sum(theta**2) + 0.3 * theta[0]

    options = options_of(row, problem, mesh)
    e = diffmh.evidence(problem.density, problem.kernel, observed=observed, **options)
    key = jax.random.key(KEY)
    path = diffmh.optimise(
        e,
        theta,
        key,
        *args,
        optimizer=optax.sgd(0.1),
        newton=True,
        num_iterations=2,
        maximise=True,
        reuse=0.1,
    )
    # After the path, so that a refusal is that of `optimise`.
    gradient, curvature = e(theta, jax.random.fold_in(key, 0), *args)
    close(path.gradient[0], gradient, "the first gradient")
    step = np.linalg.solve(np.asarray(curvature, float), np.asarray(gradient, float))
    close(path.theta[1], np.asarray(theta) - 0.1 * step, "the first step")
    wanted = lambda theta: observed(theta) - problem.log_normaliser(theta)
    _check_path(row, path, wanted)


def check_reuse(row: Row, mesh=None) -> None:
    """Small steps, all from the draws of the first."""
    problem, theta, args = numbers(row)
    e = expectation_of(row, problem, mesh)
    total = diffmh.compose(lambda theta, m, *args: jnp.sum(m), e)
    key = jax.random.key(KEY)
    path = diffmh.optimise(
        total, theta, key, *args, optimizer=optax.sgd(0.05), num_iterations=2, reuse=0.5
    )
    slope = jax.grad(total)(theta, jax.random.fold_in(key, 0), *args)
    close(path.gradient[0], slope, "the first gradient")
    close(path.theta[1], np.asarray(theta - 0.05 * slope), "the first step")
    _check_path(row, path, lambda theta: jnp.sum(problem.mean(theta)))


def _check_path(row: Row, path: diffmh.Ascent, function: Callable) -> None:
    assert list(path.sampled) == [True, False]
    assert np.all(np.isfinite(path.gradient)) and np.all(np.isfinite(path.last))
    if row["num_chains"] < MANY:
        return
    exact = exactly(slope=jax.vmap(jax.grad(function)))(path.theta, ["slope"])["slope"]
    within(path.gradient, exact, path.gradient_error, "gradients on the way")


def within(found, exact, error, what: str) -> None:
    """Within 5 errors; and the errors are small enough to tell the answer from 0."""
    found, exact, error = (np.asarray(each, float) for each in (found, exact, error))
    rounding = 1e-5 * (0.1 + np.abs(exact))
    z = np.where(np.abs(found - exact) < rounding, 0.0, (found - exact) / error)
    assert np.max(np.abs(z)) < Z, f"{what}: z = {z}, found {found}, exact {exact}"
    assert np.max(np.abs(exact) / np.maximum(error, 1e-12)) > Z, f"{what}: errors {error}"


TOOLS: dict[str, Callable[..., Tool]] = {
    "derivative": derivative,
    "hessian": hessian,
    "evidence": evidence,
    "draws": from_draws,
    "hessian of draws": hessian_of_draws,
    "evidence of draws": evidence_of_draws,
}
PATHS = {"curve": check_curve, "newton": check_newton, "reuse": check_reuse}


def check_tool(row: Row, mesh=None) -> None:
    with jax.enable_x64(row["x64"]):
        if row["tool"] in PATHS:
            return PATHS[row["tool"]](row, mesh)
        tool, key = TOOLS[row["tool"]](row, mesh), jax.random.key(KEY)
        _, theta, _ = numbers(row)
        # Draws away from where they were made, if they may be: their weights matter.
        if row["tool"] == "draws":
            theta = theta.at[0].add(STEP)
        if row["max_steps"] == "too few":
            return check_unmet(row, tool, theta, key)
        # On one device.
        alone = tool if mesh is None else TOOLS[row["tool"]](row)
        WAYS[row["way"]](row, tool, alone, theta, key)


def same(found: dict[str, Any], wanted: dict[str, Any], what: str) -> None:
    for name, array in found.items():
        close(array, wanted[name], f"{what}: {name}")


def _call(row: Row, tool: Tool, alone: Tool, theta, key) -> None:
    """Eagerly, and compiled."""
    found = tool.call(theta, key)
    same(found, jax.jit(alone.call)(theta, key), "call")
    if row["tool"] in OF_DRAWS:
        same(found, tool.exact(theta, found), "by hand")


def _again(row: Row, tool: Tool, alone: Tool, theta, key) -> None:
    found = tool.again(theta, key)
    wanted = tool.exact if row["tool"] in OF_DRAWS else lambda *at: alone.call(theta, key)
    same(found, wanted(theta, found), "again")


def _vmap(row: Row, tool: Tool, alone: Tool, theta, key) -> None:
    """Draws along a grid, chains by many keys: of few chains against the exact answers."""
    if row["tool"] in OF_DRAWS:
        grid = theta + STEP * jnp.linspace(-1, 1, 3)[:, None]
        found = jax.vmap(lambda theta: tool.call(theta, key))(grid)
        for number, at in enumerate(grid):
            wanted = tool.exact(at, found)
            same({name: each[number] for name, each in found.items()}, wanted, "grid")
        return
    exactly = 1 < row["num_chains"] < MANY or row["estimator"] == "stationary"
    runs = LEAST_RUNS if exactly and row["num_chains"] < MANY else 2
    keys = jnp.concatenate([key[None], jax.random.split(key, runs - 1)])
    found = jax.jit(jax.vmap(functools.partial(tool.call, theta)))(keys)
    if runs == 2:
        same({name: each[0] for name, each in found.items()}, alone.call(theta, key), "vmap")
        return
    exact = tool.exact(theta, found)
    for name, samples in found.items():
        assert_unbiased(np.asarray(samples), exact[name], name)


def _run(row: Row, tool: Tool, alone: Tool, theta, key) -> None:
    """The report: of many chains against the exact answers, of fewer against the call."""
    report = tool.report(theta, key)
    if row["num_chains"] == MANY:
        exact = tool.exact(theta, report)
        for name, (found, error) in report.items():
            within(found, exact[name], error, name)
        return
    for name, found in jax.jit(alone.call)(theta, key).items():
        value, error = (np.asarray(part, float) for part in report[name])
        if row["tool"] in OF_DRAWS:
            # The jackknife takes off a bias of the order of 1 / draws.
            assert np.all(np.abs(value - found) < 0.5 * error), name
        else:
            close(value, found, name)


def _product(row: Row, tool: Tool, alone: Tool, theta, key) -> None:
    direction = jnp.linspace(1, 2, theta.size)
    whole = alone.call(theta, key)["hessian"]
    close(tool.product(theta, key, direction), whole @ direction, "product")


def _until(row: Row, tool: Tool, alone: Tool, theta, key) -> None:
    """Two rounds, the second with a key of its own: the average of two calls."""
    most = 2 * row["num_chains"] * (NUM_SAMPLES + row["burn_in"])
    report = tool.report(theta, key, until=diffmh.Until(absolute=1e-30, max_steps=most))
    calls = [alone.call(theta, round_key(key, number)) for number in range(2)]
    for name in calls[0]:
        wanted = (calls[0][name] + calls[1][name]) / 2
        close(report[name][0], wanted, f"until: {name}")


def _checkpoint(row: Row, tool: Tool, alone: Tool, theta, key) -> None:
    """As it is made, and as it is found again."""
    wanted = alone.call(theta, key)
    with tempfile.TemporaryDirectory() as directory:
        place = diffmh.Checkpoint(pathlib.Path(directory) / "run", seconds=0)
        for what in ("checkpoint", "checkpoint found again"):
            report = tool.report(theta, key, checkpoint=place)
            same({name: report[name][0] for name in wanted}, wanted, what)


WAYS = {
    "run": _run,
    "vmap": _vmap,
    "product": _product,
    "call": _call,
    "again": _again,
    "until": _until,
    "checkpoint": _checkpoint,
}


def check_unmet(row: Row, tool: Tool, theta, key) -> None:
    """Pairs that have not met after two steps: NaN, however it is called."""
    # With a lag of 3 none can meet; with one of 1, single pairs may.
    if row["way"] in ("run", *LONG):
        report = tool.report(theta, key)
        found = {name: numbers for name, (numbers, _) in report.items()}
    elif row["way"] == "vmap":
        found = jax.vmap(functools.partial(tool.call, theta))(jnp.stack([key] * 2))
    elif row["way"] == "product":
        found = tool.product(theta, key, jnp.ones(theta.size))
    else:
        found = (tool.again if row["way"] == "again" else jax.jit(tool.call))(theta, key)
    if row["pair_lag"] > 2 or row["num_chains"] >= 16:
        assert all(np.isnan(array).all() for array in jax.tree.leaves(found)), found
    else:
        unmet = [np.isnan(array).all() for array in jax.tree.leaves(found)]
        assert all(unmet) or not any(np.isnan(array).any() for array in jax.tree.leaves(found))


def attempt_tool(row: Row, mesh=None) -> None:
    """Calls what is to be refused, in the row's way."""
    with jax.enable_x64(row["x64"]):
        if row["tool"] in PATHS:
            return PATHS[row["tool"]](row, mesh)
        tool, (_, theta, _) = TOOLS[row["tool"]](row, mesh), numbers(row)
        at = theta, jax.random.key(KEY)
        match row["way"]:
            case "run" | "until" | "checkpoint":
                tool.report(*at)
            case "again":
                tool.again(*at)
            case "product":
                tool.product(*at, jnp.ones(theta.size))
            case _:
                tool.call(*at)

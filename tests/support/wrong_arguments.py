"""Wrong arguments: every public callable, each of its arguments, and values that it cannot use.

    python tests/support/wrong_arguments.py            a summary, and what is not as it should be
    python tests/support/wrong_arguments.py --list     every call

A call must raise an error that names the argument. Those that are accepted are in `ACCEPTED`, with
a reason each.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import re
import sys
import tempfile
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import diffmh
from diffmh import models, plots, sad
from diffmh.models import boltzmann, gaussian, ising, mixture
from diffmh.runs.configure import small_loops_are_on

KEY = jax.random.key(0)


def some_function(*arguments, **options):
    return None


VALUES = {
    "None": None,
    "'a'": "a",
    "b'a'": b"a",
    "-1": -1,
    "0": 0,
    "-0.5": -0.5,
    "1.5": 1.5,
    "inf": float("inf"),
    "nan": float("nan"),
    "1j": 1j,
    "True": True,
    "10**30": 10**30,
    "[]": [],
    "{}": {},
    "{'a': 1.0}": {"a": 1.0},
    "object()": object(),
    "a function": some_function,
    "a class": int,
    "a module": types,
    "an empty array": jnp.zeros(0),
    "an array (7, 3)": jnp.ones((7, 3)),
    "an array of strings": np.array(["a", "b"]),
    "float16": jnp.float16(0.5),
    "a legacy key": jax.random.PRNGKey(0),
}


def log_density(theta, x):
    return -0.5 * jnp.sum((x - theta) ** 2)


def f(theta, x):
    return x


NORMAL = gaussian.sampler()
MEAN = diffmh.expectation(f, NORMAL, init=0.0, num_samples=4, num_chains=4)
PAIRS = MEAN.by(diffmh.Stationary())
LENGTH = {"init": 0.0, "num_samples": 4, "burn_in": 0, "num_chains": 2}


class Call(NamedTuple):
    """A call that works, argument by argument. It is dear where what is accepted is run."""

    name: str
    function: Callable[..., Any]
    arguments: dict[str, Any]
    dear: bool = False


class Standard:
    def sample(self, key):
        return jax.random.normal(key)

    def log_prob(self, x):
        return jax.scipy.stats.norm.logpdf(x)


def pair_of(kernel):
    return diffmh.Cycle(NORMAL, kernel)


def mixture_of(kernel, probabilities):
    return diffmh.Mixture(NORMAL, kernel, probabilities=probabilities)


def composed(phi, expectation):
    return diffmh.compose(phi, MEAN, expectation)


@functools.cache
def posterior():
    import numpyro
    import numpyro.distributions as dist

    def model(y, scale):
        mean = numpyro.sample("mean", dist.Normal(0, scale))
        numpyro.sample("y", dist.Normal(mean, 1), obs=y)

    return model, diffmh.from_numpyro(model, jnp.array([1.0, 2.0]), theta={"scale": 1.0})


def pymc_model():
    import pymc

    with pymc.Model() as model:
        mean = pymc.Normal("mean", 0.0, pymc.Data("scale", 1.0))
        pymc.Normal("y", mean, 1.0, observed=1.0)
    return model


def from_numpyro(model, theta, init_strategy):
    return diffmh.from_numpyro(
        model, jnp.array([1.0, 2.0]), theta=theta, init_strategy=init_strategy
    )


DRAWS = {"x": 0.5 + jax.random.normal(KEY, (4, 20))}
SITES = {"mean": jax.random.normal(KEY, (4, 20))}
CHAIN = {"theta": 0.5, "key": KEY}
PROGRAM = {"program": lambda theta, key: 1.0 * sad.bernoulli(key, theta), **CHAIN}
OPTIONS = {"num_replicates": 4, "alternatives": 1, "estimator": None, "mesh": None}


@functools.cache
def results() -> dict[str, Any]:
    """Results of the library, for functions that take them."""
    adam = {"optimizer": optax.sgd(0.1), "num_iterations": 2}
    quantity = lambda theta, sites: sites["mean"]
    return {
        "report": MEAN.run(0.5, KEY),
        "meetings": PAIRS.run(0.5, KEY),
        "trace": diffmh.trace(NORMAL, 0.5, KEY, init=0.0, num_steps=3),
        "ascent": diffmh.optimise(lambda theta, key: theta**2, 0.5, KEY, **adam),
        "comparison": diffmh.compare(MEAN, 0.5, KEY),
        "table": diffmh.sensitivity(posterior()[1], quantity, draws=SITES),
        "influence": diffmh.influence(posterior()[1], quantity, SITES),
    }


def proposals() -> Iterator[Call]:
    yield Call("GaussianWalk", diffmh.GaussianWalk, {"scale": 1.0})
    yield Call("CrankNicolson", diffmh.CrankNicolson, {"beta": 0.5, "scale": 1.0, "centre": 0.0})
    yield Call("OtherState", diffmh.OtherState, {"num_states": 3})
    yield Call("OneLabel", diffmh.OneLabel, {"num_values": 3, "site": 0})
    yield Call("SpinFlip", diffmh.SpinFlip, {"site": 0})
    yield Call("TransitionMatrix", diffmh.TransitionMatrix, {"probabilities": jnp.eye(3)})
    yield Call("Independence", diffmh.Independence, {"distribution": Standard()})
    yield Call("On", diffmh.On, {"where": lambda x: x[0], "proposal": diffmh.OtherState(3)})


def couplings() -> Iterator[Call]:
    noise = diffmh.CommonRandomNumbers()
    for kind in (diffmh.GradientCommonRandomNumbers, diffmh.GradientReflection):
        yield Call(kind.__name__, kind, {"gradient": lambda x: x})
    yield Call("NearlyMaximal", diffmh.NearlyMaximal, {"num_candidates": 2})
    yield Call("TwoScale", diffmh.TwoScale, {"far": noise, "near": noise, "distance": 1.0})


def kernels() -> Iterator[Call]:
    density = {"log_density": log_density}
    site = lambda x: x[0]
    yield Call(
        "MetropolisHastings",
        diffmh.MetropolisHastings,
        {**density, "proposal": diffmh.GaussianWalk(1.0), "coupling": diffmh.Maximal()},
    )
    yield Call(
        "Langevin", diffmh.Langevin, {**density, "step_size": 1.0, "coupling": diffmh.Maximal()}
    )
    yield Call(
        "Hamiltonian", diffmh.Hamiltonian, {**density, "step_size": 1.0, "num_leapfrog_steps": 3}
    )
    yield Call("Gibbs", diffmh.Gibbs, {**density, "where": site, "num_values": 3, "coupling": None})
    yield Call(
        "BlockGibbs",
        diffmh.BlockGibbs,
        {"logits": log_density, "where": site, **density, "values": (0, 1)},
    )
    yield Call("Cycle", pair_of, {"kernel": NORMAL})
    yield Call("Repeat", diffmh.Repeat, {"kernel": NORMAL, "num_steps": 2})
    yield Call("Sweep", diffmh.Sweep, {"kernel_at": lambda site: NORMAL, "num_sites": 2})
    yield Call(
        "Schedule",
        diffmh.Schedule,
        {
            "kernel_at": lambda stage: NORMAL,
            "num_stages": 2,
            "steps_per_stage": 3,
            "log_weight": False,
        },
    )
    yield Call("Tempering", diffmh.Tempering, {"kernel_at": lambda b: NORMAL, "betas": (1.0, 0.5)})
    yield Call("Mixture", mixture_of, {"kernel": NORMAL, "probabilities": (0.5, 0.5)})
    yield Call("DensityOdds", diffmh.extend.DensityOdds, {"density": log_density})


def estimators() -> Iterator[Call]:
    pairs = {"lag": 1, "alternatives": None, "max_steps": None}
    yield Call("Stationary", diffmh.Stationary, pairs)
    # As it is: JAX has started, and no other setting can be made any more.
    yield Call("configure", diffmh.configure, {"small_loops": small_loops_are_on()})
    yield Call("Covariance", diffmh.Covariance, {"control": None, "unconstrained": False})
    yield Call("Score", diffmh.Score, {"baseline": 0.0})
    yield Call(
        "StochasticDerivative",
        diffmh.StochasticDerivative,
        {"weights": "two-sided", "alternatives": 1, "control": None, "births": None},
    )
    yield Call("sad.Alternatives", sad.Alternatives, {"num_alternatives": 1})
    yield Call("sad.Combined", sad.Combined, {"num_alternatives": 1})


def options() -> Iterator[Call]:
    yield Call(
        "Until",
        diffmh.Until,
        {"relative": 0.1, "absolute": 0.1, "level": 0.9, "max_steps": 9, "max_seconds": 9},
    )
    yield Call("Checkpoint", diffmh.Checkpoint, {"directory": "run", "seconds": 10})
    yield Call("continuous", diffmh.continuous, {"function": log_density})


def runs() -> Iterator[Call]:
    length, kernel = {**LENGTH, "lag": 0, "estimator": None, "mesh": None}, {"kernel": NORMAL}
    yield Call("expectation", diffmh.expectation, {"f": f, **kernel, **length})
    yield Call("Expectation()", lambda theta, key: MEAN(theta, key), CHAIN)
    yield Call("Expectation.per_chain", MEAN.per_chain, CHAIN)
    of_run = {"progress": False, "until": None, "checkpoint": None, "compare": False}
    yield Call("Expectation.run", MEAN.run, {**CHAIN, **of_run}, dear=True)
    yield Call("compare", diffmh.compare, {"expectation": MEAN, **CHAIN}, dear=True)
    yield Call("compose", composed, {"phi": lambda theta, *means: means[0], "expectation": MEAN})
    yield Call("trace", diffmh.trace, {**kernel, **CHAIN, "init": 0.0, "num_steps": 3})
    yield Call(
        "sample",
        diffmh.sample,
        {
            **kernel,
            **CHAIN,
            **LENGTH,
            "thinning": 1,
            "mesh": None,
            "progress": False,
            "checkpoint": None,
            "block_size": None,
        },
        dear=True,
    )
    yield Call("check", diffmh.check, {**kernel, **CHAIN, "init": 0.0}, dear=True)
    start = {"init": 0.0, "num_steps": 120, "num_chains": 2}
    yield Call("adapt", diffmh.adapt, {**kernel, **CHAIN, **start}, dear=True)
    walk = diffmh.MetropolisHastings(log_density, lambda theta: diffmh.GaussianWalk(theta))
    tuned = {**LENGTH, "lag": 1, "objective": lambda theta, x, y: (x - y) ** 2}
    tuning = {"num_iterations": 1, "optimizer": optax.sgd(0.1), "progress": False}
    yield Call("tune", diffmh.tune, {"kernel": walk, **CHAIN, **tuned, **tuning}, dear=True)
    yield Call(
        "optimise",
        diffmh.optimise,
        {
            "objective": lambda theta, key: theta**2,
            **CHAIN,
            "optimizer": optax.sgd(0.1),
            "num_iterations": 1,
            "newton": False,
            "reuse": None,
            "maximise": False,
            "average_from": 0.5,
            "progress": False,
            "checkpoint": None,
            "name": "optimise",
        },
        dear=True,
    )
    normal = lambda theta, x: -0.5 * (x["x"] - theta) ** 2
    given = {"f": lambda theta, x: x["x"], "log_density": normal, "draws": DRAWS, "state": None}
    yield Call("from_draws", diffmh.from_draws, {**given, "at": 0.5})
    yield Call("from_draws, weights", diffmh.from_draws, {**given, "weights": None})
    located = diffmh.from_draws(**given, at=0.5)
    yield Call("hessian", diffmh.hessian, {"expectation": located})
    grid = {"draws": located, "thetas": jnp.linspace(0.0, 1.0, 3), "name": None}
    yield Call("plots.curve", plots.curve, grid, dear=True)
    yield Call(
        "FromDraws.curve", located.curve, {"thetas": grid["thetas"], "name": None}, dear=True
    )
    evidence = {"log_density": normal, "kernel": DRAWS, "at": 0.5, "observed": None}
    yield Call("evidence", diffmh.evidence, evidence)
    chains = {**LENGTH, "mesh": None, "observed": None}
    walk = diffmh.MetropolisHastings(log_density, diffmh.GaussianWalk(1.0))
    of_chains = {"log_density": log_density, "kernel": walk, **chains}
    yield Call("evidence, chains", diffmh.evidence, of_chains)
    stein = {"control": None, "degree": None, "unconstrained": False}
    yield Call("from_draws, control", diffmh.from_draws, {**given, **stein})
    yield Call("FromDraws.run", lambda theta: diffmh.from_draws(**given).run(theta), {"theta": 0.5})
    yield Call("as_blackjax", diffmh.as_blackjax, {**kernel, "theta": 0.5})


def reports() -> Iterator[Call]:
    made = results()
    report = {"report": made["report"], "level": 0.9, "most": 4}
    yield Call("Sensitivity.sorted", made["table"].sorted, {"by": "derivative"})
    yield Call("Report.interval", made["report"].interval, {"level": 0.9})
    yield Call("plots.report", plots.report, report, dear=True)
    traced = {"trace": made["trace"], "steps": None, "most": 4}
    yield Call("plots.trace", plots.trace, traced, dear=True)
    yield Call("plots.ascent", plots.ascent, {"ascent": made["ascent"], "most": 4}, dear=True)
    compared = {"comparison": made["comparison"], "entry": 0}
    yield Call("plots.compare", plots.compare, compared, dear=True)
    yield Call(
        "plots.sensitivity", plots.sensitivity, {"table": made["table"], "most": 4}, dear=True
    )
    influence = {"table": made["influence"], "most": 4}
    yield Call("plots.influence", plots.influence, influence, dear=True)
    yield Call("plots.meeting", plots.meeting, {"report": made["meetings"]}, dear=True)


def posteriors() -> Iterator[Call]:
    model, made = posterior()
    strategy = {"theta": {"scale": 1.0}, "init_strategy": None}
    yield Call("from_numpyro", from_numpyro, {"model": model, **strategy}, dear=True)
    yield Call("Posterior.kernel", made.kernel, {"scale": None, "proposals": None})
    lengths = {"num_warmup": 20, "num_samples": 4, "num_chains": 2, "progress": False}
    others = {"theta": None, "proposals": None, "target_acceptance": 0.8}
    yield Call("Posterior.sample", made.sample, {"key": KEY, **lengths, **others}, dear=True)
    quantity = {"f": lambda theta, sites: sites["mean"]}
    yield Call(
        "Posterior.expectation", made.expectation, {**quantity, "kernel": None, "num_samples": 4}
    )
    fresh = {"posterior": made, **quantity, "level": 0.9}
    parts = {"quantities": ("mean", "sd"), "prior": ("mean",)}
    drawn = {"draws": SITES, "weights": None, **parts}
    yield Call("sensitivity", diffmh.sensitivity, {**fresh, **drawn}, dear=True)
    located = {**fresh, "draws": SITES, "at": {"scale": 1.2}}
    yield Call("sensitivity, at", diffmh.sensitivity, located, dear=True)
    given = {**fresh, "draws": SITES, "weights": None, "control": None}
    yield Call("influence", diffmh.influence, given, dear=True)
    chains = {"key": KEY, "kernel": made.kernel(), "num_samples": 4, "burn_in": 0}
    yield Call("sensitivity, chains", diffmh.sensitivity, {**fresh, **chains}, dear=True)


def pymc_posteriors() -> Iterator[Call]:
    """PyTensor makes JAX compute in double precision: last of all, and in no test."""
    model = {"model": pymc_model(), "theta": {"scale": 1.0}}
    yield Call("from_pymc", diffmh.from_pymc, model, dear=True)


def programs() -> Iterator[Call]:
    yield Call("sad.expectation", sad.expectation, {"program": PROGRAM["program"], **OPTIONS})
    yield Call("sad.run", sad.run, {**PROGRAM, **OPTIONS}, dear=True)
    mean = sad.expectation(PROGRAM["program"])
    yield Call("sad.Expectation()", lambda theta, key: mean(theta, key), CHAIN)
    walk = {"proposal": diffmh.GaussianWalk(1.0), "coupling": None, "x": 0.0}
    yield Call("sad.propose", sad.propose, {"key": KEY, **walk})
    yield Call("sad.linear", sad.linear, {"value": 1.0})
    primitive = {"primitive": "sin", "kind": "smooth", "linear": False}
    yield Call("sad.register", registered, primitive)
    sampler = {name: getattr(COIN, name) for name in ("invert", "flips", "event_ndims")}
    yield Call("sad.Sampler", sad.Sampler, {**sampler, "log_prob": None, "mean": None, "name": "a"})
    yield Call("sad.Sampler()", coin_of, {"key": KEY, "parameter": 0.5})


COIN = sad.Sampler(lambda u, p: u < p, lambda b, p, dp: [(~b, dp[0])], (0,))


def coin_of(key, parameter):
    return COIN(key, parameter)


def registered(primitive, kind, linear):
    """`sad.register` of what is refused alone: a registration lasts."""
    from diffmh.sad import primitives

    tables = (primitives.SMOOTH, primitives.JUMPS, primitives.EVALUATED, primitives.LINEAR_IN_ALL)
    before = [set(table) for table in tables]
    try:
        return sad.register(primitive, kind, linear=linear)
    finally:
        for table, entries in zip(tables, before, strict=True):
            table.intersection_update(entries)


def samplers() -> Iterator[Call]:
    probabilities = jnp.array([0.5, 0.5])
    arguments = {
        "bernoulli": {"p": 0.5},
        "categorical": {"logits": probabilities},
        "binomial": {"n": 5, "p": 0.5},
        "poisson": {"rate": 2.0, "flips": "two-sided"},
        "geometric": {"p": 0.5, "flips": "two-sided"},
        "negative_binomial": {"r": 2, "p": 0.5, "most": 4},
        "multinomial": {"n": 5, "probs": probabilities},
        "uniform_int": {"low": 0, "high": 3},
    }
    for name, own in arguments.items():
        function = getattr(sad, name)
        known = inspect.signature(function).parameters
        own = {name: value for name, value in own.items() if name in known}
        yield Call(f"sad.{name}", function, {"key": KEY, **own})
    yield Call("sad.categorical, probs", sad.categorical, {"key": KEY, "probs": probabilities})


def exact_answers() -> Iterator[Call]:
    size = {"size": 4}
    yield Call("ising.exact", ising.exact, {**size, "temperature": 2.0, "interaction": 1.0})
    yield Call("ising.enumerated", ising.enumerated, {"size": 2, "theta": 2.0})
    yield Call("ising.peak", ising.peak, {**size, "interaction": 1.0}, dear=True)
    yield Call("ising.cold", ising.cold, size)
    yield Call("ising.spins", ising.spins, {"lattice": jnp.ones((4, 4), int)})
    yield Call("ising.sampler", ising.sampler, {"flip": False})
    yield Call("ising.sequential", ising.sequential, {**size, "flip": False})
    yield Call("gaussian.sampler", gaussian.sampler, {"scale": 1.0})
    machine = {"key": KEY, "scale": 1.0}
    yield Call("Full.random", boltzmann.Full.random, {**machine, "num_spins": 3})
    yield Call("Full.zeros", boltzmann.Full.zeros, {"num_spins": 3})
    layers = {"num_visible": 3, "num_hidden": 2}
    yield Call("Restricted.random", boltzmann.Restricted.random, {**machine, **layers})


GROUPS = (
    proposals,
    couplings,
    kernels,
    estimators,
    options,
    runs,
    reports,
    posteriors,
    programs,
    samplers,
    exact_answers,
)

# Public names whose arguments the library gives, that take none, or that are there to be
# subclassed; and mathematics of `theta` and a state, which JAX traces and which looks at nothing.
WITHOUT_ARGUMENTS = frozenset(
    """
    Acceptance Adapted Ascent Bernoulli Categorical Comparison Condition Expectation Exact
    Observation Parameter Parameters Posterior Report Sensitivity Spins State Step Trace Transition
    Value Full Restricted HalfSweep SequentialSweep

    CommonRandomNumbers Independent Maximal MaximalReflection SameSite Smooth

    BlockUpdate Coupling Estimator FiniteProposal Kernel NoiseCoupling NoiseProposal Proposal Update
    NotDifferentiable Checked

    bonds energy energy_moments entropy excitation_moments heat_capacity indicator log_density
    log_partition magnetisation mean neighbours posterior
    """.split()  # noqa: SIM905
)

# Accepted, by call, argument and value, each a regular expression; and why.
_FUNCTIONS = (
    "where|gradient|log_density|logits|density|control|function|f|phi|program|invert|flips"
    "|log_prob|mean|step_size|proposal|init|init_strategy"
)
_LEFT_OUT = (
    "site|near|coupling|probabilities|baseline|relative|absolute|max_steps|max_seconds|objective"
    "|optimizer|progress|state|control"
)
ACCEPTED = [
    (".*", "theta", r"-0\.5|1\.5", "a number is a theta"),
    ("tune", "theta", r"1\.5", "a number is a theta"),
    (".*", _FUNCTIONS, "a function|a class", "called later, and what it returns is looked at then"),
    (".*", _LEFT_OUT, "None", "the argument is left out"),
    (".*", "progress|compare|maximise|flip|linear|births|unconstrained", "True", "a flag"),
    (".*", "scale|step_size", r"1\.5", "a positive number"),
    (
        ".*",
        "scale|step_size",
        r"\{'a': 1\.0\}",
        "a pytree of scales, compared with the state in a run",
    ),
    ("Hamiltonian", "step_size", r"an array \(7, 3\)", "a step for each number of such a state"),
    ("CrankNicolson", "centre", r"-1|0|-0\.5|1\.5", "a number"),
    (
        "CrankNicolson|Score",
        "centre|baseline",
        r"\{'a': 1\.0\}|an array \(7, 3\)|a legacy key",
        "a pytree of numbers, compared with the state or with f's value in a run",
    ),
    ("Score", "baseline", r"-1|0|-0\.5|1\.5", "a number"),
    (
        "TwoScale|Until|ising.*|Full.random|Restricted.random|Checkpoint",
        "distance|relative|absolute|max_steps|max_seconds|temperature|interaction|theta|scale|seconds",
        r"1\.5|10\*\*30|float16",
        "a positive number",
    ),
    (".*random|Checkpoint|optimise", "scale|seconds|average_from", "0", "0 has a meaning"),
    (".*", "level|average_from", "float16", "a number between 0 and 1"),
    ("Expectation.run", "until", r"1\.5|10\*\*30", "a relative error"),
    ("Checkpoint|.*run|sample|optimise", "directory|checkpoint", "'a'", "a path"),
    ("optimise|sad.register", "name|primitive", "'a'", "a name"),
    (
        "expectation|evidence, chains",
        "init",
        r"-1|0|inf|nan|True|\{'a': 1\.0\}|an array \(7, 3\)|a legacy key",
        "a state, which the kernel looks at in a run",
    ),
    (".*", "init", r"-0\.5|1\.5", "a state"),
    ("check", "theta|init", ".*", "what is wrong is a finding of the report that it returns"),
    ("as_blackjax", "theta", ".*", "the density is first evaluated by `init(position)`"),
    ("from_draws.*", "draws", r"an array \(7, 3\)", "7 chains of 3 draws"),
    ("Stationary|StochasticDerivative", "alternatives|max_steps", "None", "the default"),
    ("Stationary", "alternatives", "0", "the covariance alone"),
    ("Schedule", "log_weight", "True", "a flag"),
    ("Tempering", "betas", "a legacy key", "two numbers"),
    ("sensitivity.*", "prior|kernel", "None", "all sites, and the posterior's own walk"),
    ("Posterior.kernel|Posterior.sample", "proposals", r"\{\}", "none"),
    ("Posterior.sample", "target_acceptance", "float16", "a number between 0 and 1"),
    ("adapt", "num_steps", "None", "the argument is left out"),
    ("evidence", "kernel", r"an array \(7, 3\)", "7 chains of 3 draws"),
    ("from_draws|evidence|sensitivity.*", "at", "None", "left out"),
    (
        "from_draws|evidence",
        "at",
        r"-0\.5|1\.5|\{'a': 1\.0\}|an array \(7, 3\)",
        "a theta, compared with the one of a call",
    ),
    ("evidence.*", "observed", "None|a function|a class", "called later"),
    ("optimise", "reuse", "None", "left out"),
    ("sad.propose", "x", r"-0\.5|1\.5|inf|nan|\{'a': 1\.0\}", "a state of floats"),
    ("sad.propose", "x", r"an array \(7, 3\)", "a state of floats"),
    ("sad.expectation", "num_replicates", "None", "a call is one run"),
    ("sad.linear", "value", ".*", "numbers of any kind"),
    ("sad.run|sad.Expectation..", "theta", r"an array \(7, 3\)", "as many draws of the program"),
    ("sad.Sampler..", "parameter", ".*", "whoever makes a sampler says what its parameters may be"),
    (r"sad\..*", "p|rate|logits|probs", r"an array \(7, 3\)|an empty array|\[\]", "as many draws"),
    (
        r"sad\..*",
        "p|rate|n|r|low|high",
        r"-1|0|-0\.5|1\.5|inf|nan|10\*\*30|a legacy key",
        "ranges are those of a program's draws, which may be traced: `tests/sad` tries them",
    ),
]


class Outcome(NamedTuple):
    call: str
    argument: str
    value: str
    verdict: str  # "named", "not named" or "accepted"
    message: str

    @property
    def reason(self) -> str | None:
        """Why it may be accepted."""
        for call, argument, value, reason in ACCEPTED:
            parts = ((call, self.call), (argument, self.argument), (value, self.value))
            if all(re.fullmatch(pattern, part) for pattern, part in parts):
                return reason
        return None

    def __str__(self) -> str:
        return f"{self.call}({self.argument}={self.value}): {self.verdict} {self.message}"


def names(error: BaseException, argument: str) -> bool:
    return re.search(rf"\b{re.escape(argument)}\b", str(error)) is not None


def attempt(call: Call, argument: str, value: str) -> Outcome:
    given = {**call.arguments, argument: VALUES[value]}
    try:
        with (
            warnings.catch_warnings(),
            tempfile.TemporaryDirectory() as directory,
            contextlib.chdir(directory),
        ):
            warnings.simplefilter("ignore")
            call.function(**given)
    except Exception as error:  # Whatever is raised is the outcome.
        verdict = "named" if names(error, argument) else "not named"
        message = f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
        return Outcome(call.name, argument, value, verdict, message)
    return Outcome(call.name, argument, value, "accepted", "")


def same(one: Any, other: Any) -> bool:
    """True if a wrong value is the right one."""
    return one is other or (
        type(one) is type(other) and isinstance(one, bool | int) and one == other
    )


def attempts(calls: list[Call]) -> Iterator[Outcome]:
    for call in calls:
        call.function(**call.arguments)  # It works.
        for argument, valid in call.arguments.items():
            for value in VALUES:
                if not same(VALUES[value], valid):
                    yield attempt(call, argument, value)


def calls(dear: bool = True) -> list[Call]:
    return [call for group in GROUPS for call in group() if dear or not call.dear]


def public_names() -> set[str]:
    """Everything that can be called in the public namespaces."""
    spaces = (diffmh, sad, plots, models.ising, models.boltzmann, gaussian, mixture)
    own = lambda thing: getattr(thing, "__module__", "").startswith("diffmh")
    return {
        name
        for space in spaces
        for name, thing in vars(space).items()
        if callable(thing) and own(thing) and not name.startswith("_")
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print every call")
    parser.add_argument("--only", default="", help="calls whose name contains this")
    parser.add_argument("--cheap", action="store_true", help="without what is run")
    asked = parser.parse_args()
    every = calls(dear=False) if asked.cheap else [*calls(), *pymc_posteriors()]
    chosen = [call for call in every if asked.only in call.name]
    found = list(attempts(chosen))
    wrong = [o for o in found if o.verdict == "not named"]
    unexplained = [o for o in found if o.verdict == "accepted" and o.reason is None]
    for outcome in found if asked.list else [*wrong, *unexplained]:
        print(outcome)
    print(len(found), "wrong arguments:", dict(Counter(o.verdict for o in found)))
    print(f"{100 * len(wrong) / len(found):.2f} % raise without naming the argument")
    print(len(unexplained), "accepted without a reason")
    return int(len(wrong) >= 0.02 * len(found) or bool(unexplained))


if __name__ == "__main__":
    sys.exit(main())

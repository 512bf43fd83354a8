"""Algorithm 2: alternatives that branch off the primal where a decision could have gone the
other way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from ..base import trees, validate
from ..base.validate import Checked
from ..core import alternatives
from ..core.alternatives import Alternatives, OwnNoise, Transition
from ..core.decisions import Weights
from ..core.estimator import Estimator
from ..core.values import Sum
from . import births, controls
from .controls import Controlled, ControlledAverages
from .mixing import LEAST_PAIRS
from .paired import PairEstimator
from .stationary import (
    no_covariance,
    refuse_that_stay_apart,
    refuse_unknown_decisions,
    schedule_of,
)

_WORDS = ("f", "covariance")
# Above so many parameters births are followed instead of weights (`docs/benchmarks.md`).
MANY_PARAMETERS = 64

# The default number of alternatives is chosen by variance × time (`docs/speed.md`). The larger the
# state, the longer an alternative lives, and the more another one gains. It costs least where a
# step takes the time of starting its pieces, not that of their arithmetic: with fewer chains than
# `_MANY_CHAINS`, and a state that is not large.
_MANY_CHAINS, _SMALL_STATE, _LARGE_STATE = 64, 8, 64

# Beyond so many weights, carrying them costs more than another alternative gains.
_MOST_WEIGHTS = 64

# Pairs of the control by the covariance run for at most this many steps, or this many times what
# was asked for: a control that costs more is not worth its price.
_MOST_STEPS, _TIMES = 10_000, 10


class StochasticDerivative(Estimator):
    """Unbiased for the finite chain: `(1/N) Σ_t Σ_k W_k (f(y_k) − f(x_t)) + ∂f/∂θ`. The default.

    - `weights="two-sided"`: a decision with probability α weighs `−dα` after an accept and `+dα`
      after a reject. Of all unbiased weights they have the least second moment; their variance is
      finite, and they are linear in dθ.
    - `weights="one-sided"`: those of the paper's Algorithm 2, `max(0, −dα)/α` after an accept and
      `max(0, dα)/(1 − α)` after a reject. For one scalar parameter only; on continuous states their
      variance is infinite.
    - `alternatives=K`: how many alternatives are followed at a time. The variance falls with K and
      the cost grows. `None`: 4; with fewer than 64 chains 8 if a state has 8 to 63 numbers; with
      more chains 2 if it has fewer than 8; in all cases at most 64 divided by the number of
      parameters, rounded down to a power of two. 1 with one-sided weights, as in the paper, and
      with `control`. `Expectation.run` reports the K in use.
    - `control`: control variates, `None` for none, `"f"` for those of f itself, or a function
      `g(theta, x, *args)` whose value has f's form, at best near the solution of `g − Pg = f − πf`.
      Two sums of mean zero are subtracted, with coefficients from the other chains, which leaves
      the estimate unbiased (`estimators/controls.py`). It takes at least 5 chains to have an
      effect, and has less where a few chains bear the sums, or where their mean is far from zero.
      `lag` raises an error. `"covariance"` brings the variance near that of `Covariance()` where
      that is smaller, and stays unbiased for the finite chain: `F + β(C − D)` of pairs of chains,
      with C and D as in `Stationary` and β from other pairs. It needs what `Covariance()` needs,
      chains that meet, and at least 8 of them to have an effect. Pairs run on until they have met,
      for at most ten times the requested steps (or 10,000); after that the derivative is NaN.
    - `births`: whether alternatives are followed by their births, with numbers for weights, and the
      density is differentiated once for each birth that is kept instead of at each step
      (`docs/benchmarks.md`): for very many parameters or outputs. `None`: above 64 parameters,
      where the kernel allows it. Refused with one-sided weights, with `control`, and for kernels
      whose moves depend on θ.

    >>> import diffmh
    >>> diffmh.StochasticDerivative(alternatives=4)
    StochasticDerivative(weights='two-sided', alternatives=4)
    """

    weights: Weights = eqx.field(static=True)
    alternatives: int | None = eqx.field(static=True)
    control: Literal["f", "covariance"] | Callable[..., PyTree] | None
    births: bool | None = eqx.field(static=True)
    differentiates_steps: ClassVar[bool] = True

    def __init__(
        self,
        weights: Checked[Weights] = "two-sided",
        alternatives: Checked[int] | None = None,
        control: Checked[Literal["f", "covariance"] | Callable[..., PyTree]] | None = None,
        births: Checked[bool] | None = None,
    ):
        validate.choice(weights, "StochasticDerivative(weights=...)", ("two-sided", "one-sided"))
        self.weights = weights
        if alternatives is not None:
            alternatives = validate.count(alternatives, "StochasticDerivative(alternatives=...)")
        self.alternatives = alternatives
        # Arrays, which compare entry by entry, are not words.
        if not (control is None or callable(control) or repr(control) in map(repr, _WORDS)):
            raise ValueError(
                "`StochasticDerivative(control=...)` must be None, 'f', 'covariance' or a function"
                f" g(theta, x, *args), got {control!r}."
            )
        self.control = control
        if self.is_paired and weights != "two-sided":
            raise ValueError(
                "`StochasticDerivative(control='covariance')` has two-sided weights, got"
                f" weights={weights!r}: leave them out."
            )
        if births is not None:
            births = validate.flag(births, "StochasticDerivative(births=...)")
        if births and (weights != "two-sided" or control is not None):
            raise ValueError(
                "`StochasticDerivative(births=True)` has two-sided weights and no control variates,"
                f" got weights={weights!r} and control={control!r}: leave them out."
            )
        self.births = births

    def __repr__(self) -> str:
        name = getattr(self.control, "__name__", repr(self.control))
        control = "" if self.control is None else f", control={name}"
        births = "" if self.births is None else f", births={self.births}"
        return (
            f"StochasticDerivative(weights={self.weights!r}, alternatives={self.alternatives}"
            f"{control}{births})"
        )

    @property
    def is_paired(self) -> bool:
        """True if chains run in pairs, for the control by the covariance."""
        return isinstance(self.control, str) and self.control == "covariance"

    def refuse_kernel(self, kernel, num_steps):
        if self.is_paired:
            name = "StochasticDerivative(control='covariance')"
            refuse_that_stay_apart(kernel, name)
            refuse_unknown_decisions(kernel, name, "leave `control` out")

    def with_alternatives(
        self, num_parameters: int, num_chains: int, x: PyTree
    ) -> StochasticDerivative:
        """The same estimator with the default number of alternatives for so many parameters and
        chains, and states of the form of `x`.
        """
        if self.alternatives is not None:
            return self
        size, count, most = trees.size(x), 1, 4
        if num_chains < _MANY_CHAINS and _SMALL_STATE <= size < _LARGE_STATE:
            most = 8
        elif num_chains >= _MANY_CHAINS and size < _SMALL_STATE:
            most = 2
        # One-sided weights are the paper's, which has one alternative; control variates and births
        # were measured with one.
        if self.weights == "two-sided" and self.control is None and not self.births:
            while count < most and 2 * count * num_parameters <= _MOST_WEIGHTS:
                count *= 2
        return StochasticDerivative(self.weights, count, self.control, self.births)

    @property
    def num_alternatives(self) -> int:
        """The number of alternatives; 1 where it is not resolved for a problem."""
        return 1 if self.alternatives is None else self.alternatives

    def resolve(self, problem):
        resolved = self.with_alternatives(problem.num_parameters, problem.num_chains, problem.x)
        if self.is_paired:
            if problem.num_chains < LEAST_PAIRS:
                return StochasticDerivative(alternatives=resolved.num_alternatives)
            most = max(_MOST_STEPS, _TIMES * (problem.burn_in + problem.num_samples))
            schedule = schedule_of(problem, 1, most)
            count = resolved.num_alternatives
            return PairEstimator(schedule, count, covariance=True, finite=True)
        many = self.births
        if many is None:
            many = problem.num_parameters > MANY_PARAMETERS
        if not many or self.weights != "two-sided" or self.control is not None:
            return resolved
        # Where births were asked for, `refuse` has said why they do not apply.
        if not (self.births or births.applicable(problem.kernel)):
            return resolved
        found = births.Births(resolved.num_alternatives)
        return births.readable(found, problem, self.births) or resolved

    def refuse(self, kernel, num_parameters, lag):
        if self.is_paired:
            self.refuse_kernel(kernel, 0)
            reason = no_covariance(kernel, num_parameters, lag)
            if reason is not None:
                raise ValueError(f"`StochasticDerivative(control='covariance')`: {reason}")
        if self.births:
            births.Births(self.num_alternatives).refuse(kernel, num_parameters, lag)
        if lag and self.control is not None:
            raise ValueError(
                "`StochasticDerivative(control=...)` is for functions of one state, got"
                f" lag={lag}: leave `control` out."
            )
        if self.weights == "one-sided" and num_parameters != 1:
            raise ValueError(
                "`StochasticDerivative(weights='one-sided')` exists for one scalar parameter only,"
                f" and `theta` has {num_parameters}: use weights='two-sided'."
            )

    def own_noise(self, update, key, x, num_steps):
        return OwnNoise.draw(update, key, x, num_steps)

    def start(self, at):
        size, dtype = at.parameters.size, at.parameters.dtype
        slots = alternatives.none_yet(at.state, at.past, self.num_alternatives, size, dtype)
        if self.control is None:
            return slots
        zeros = jnp.zeros((at.parameters.size, at.value.primal.size), at.value.primal.dtype)
        return Controlled(slots, Sum(zeros, zeros), Sum(zeros, zeros))

    def begin(self, memory: Alternatives | Controlled):
        return memory.fresh() if isinstance(memory, Controlled) else memory

    def look_back(self, memory: Alternatives):
        return alternatives.look_back(memory)

    def advance(self, memory: Alternatives | Controlled, at):
        if isinstance(memory, Controlled):
            g = self._control(at)
            found, wanted = jax.eval_shape(g, at.step.after.x).size, memory.pruned.total.shape[1]
            if found != wanted:
                raise ValueError(
                    "`StochasticDerivative(control=...)` must return a value of f's form, of"
                    f" {wanted} numbers, got {found}."
                )
            return controls.advance(memory, at, self.weights, g)
        return alternatives.advance(memory, at, self.weights)

    def _control(self, at: Transition) -> Callable[[PyTree], Float[Array, "F"]]:
        plain, control = at.parameters.value_only(), self.control
        if not callable(control):
            assert at.observable is not None
            observable = at.observable
            return lambda x: observable(plain, x, None).primal

        def controlling(x):
            name = "`StochasticDerivative(control=...)`"
            flat = ravel_pytree(validate.numbers(control(plain.theta, x, *plain.args), name))[0]
            validate.real_dtype(flat.dtype, f"what {name} returns")
            return flat

        return controlling

    def observe(self, memory: Alternatives | Controlled, at):
        parameters = at.parameters.value_only()
        f = lambda place: at.observable(parameters, *place).primal
        slots = memory.slots if isinstance(memory, Controlled) else memory
        derivative = alternatives.differences(slots, f, at.value.primal) + at.explicit
        if not isinstance(memory, Controlled):
            return derivative
        return ControlledAverages(derivative, memory.pruned, memory.moved)

    def derivative(self, means, value):
        return controls.controlled(means) if isinstance(means, ControlledAverages) else means

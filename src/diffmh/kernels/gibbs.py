"""Gibbs: draws from conditional distributions over finitely many values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..base import parts, trees, validate
from ..base.validate import Checked
from ..core.block_update import BlockUpdate
from ..core.decisions import Bernoulli, Categorical
from ..core.kernel import OfDensity, State, Step
from ..core.odds import DensityOdds
from ..core.parameters import Parameters, any_mapped
from ..core.values import Sum
from ..couplings import CommonRandomNumbers, Coupling, Maximal
from ..proposals import check_label_dtype, refuse_labels


class Gibbs(OfDensity, BlockUpdate):
    """Draws one site or label from its conditional distribution: each value with a probability
    proportional to the density of the state that has it there.

    **Arguments**

    - `log_density(theta, x, *args)`: `log g_θ(x)`, a real scalar, unnormalised; `-inf` where a
      value is impossible. Evaluated once for each value.
    - `where`: picks the site, a node of the state as in `equinox.tree_at` or an element of an
      array (`lambda z: z[3]`): one integer (or boolean), drawn from `0, 1, ..., num_values − 1`.
    - `coupling`: how an alternative draws beside the primal: `CommonRandomNumbers()` with the same
      uniform by inversion, which is monotone and, for two values, maximal; or `Maximal()`, which
      makes the two values agree as often as they can.

    A sweep over sites is `Sweep(lambda i: Gibbs(log_density, lambda z: z[i], n), num_sites)`.

    Refused: a `where` that does not pick one integer, or computes; labels that the integer's type
    does not hold, and a start with another one.

    >>> import jax, jax.numpy as jnp, diffmh
    >>> chain = lambda theta, z: theta * jnp.sum(z[1:] == z[:-1])            # Potts, three colours
    >>> middle = diffmh.Gibbs(chain, lambda z: z[1], 3)
    >>> agree = diffmh.expectation(
    ...     lambda theta, z: 1.0 * (z[0] == z[1]), middle, init=jnp.zeros(3, int), num_samples=50)
    >>> slope = jax.grad(agree)(0.5, jax.random.key(0))
    """

    theta_enters_by_evaluate: ClassVar[bool] = True
    where: Callable[[Any], Any]
    num_values: int = eqx.field(static=True)
    coupling: Coupling

    def __init__(
        self,
        log_density: Checked[Callable[..., Float[Array, ""]]],
        where: Checked[Callable[[Any], Any]],
        num_values: Checked[int],
        coupling: Checked[Coupling] | None = None,
    ):
        name = "Gibbs(log_density, where, num_values)"
        self.density = validate.density(log_density, name)
        self.where = validate.function(where, name, "where", "state -> site")
        self.num_values = validate.count(num_values, "Gibbs(num_values=...)", least=2)
        self.coupling = CommonRandomNumbers() if coupling is None else coupling
        if not isinstance(self.coupling, CommonRandomNumbers | Maximal):
            raise TypeError(
                "`Gibbs(coupling=...)` must be `CommonRandomNumbers()` or `Maximal()`, got"
                f" {coupling!r}."
            )

    @property
    def flip_odds(self):
        return DensityOdds(self.density)

    def noise(self, key, x, num_steps):
        site = jax.eval_shape(self.where, x)
        kinds = (jnp.integer, jnp.bool_)
        if (
            not hasattr(site, "shape")
            or site.shape != ()
            or not any(jnp.issubdtype(site.dtype, kind) for kind in kinds)
        ):
            raise TypeError(
                f"`Gibbs(where=...)` must pick one integer of the state, got {site}: index the"
                " array (`lambda z: z[3]`), or draw independent units together by `BlockGibbs`."
            )
        check_label_dtype(site.dtype, self.num_values, f"Gibbs(num_values={self.num_values})")
        parts.places(self.where, x, "Gibbs(where=...)")
        return jax.random.uniform(key, (num_steps,))

    def refuse_start(self, x):
        refuse_labels(self.where(x), self.num_values, f"Gibbs(num_values={self.num_values})")

    def coupling_noise(self, key, x, num_steps):
        return jax.random.uniform(key, (num_steps, 2)) if self._maximal else None

    def decide(self, parameters: Parameters, state: State, noise) -> Categorical:
        def density(theta, x, value, *args):
            return self.density(theta, self.result(x, noise, value), *args)

        # The current label is possible, as the chain is there: derivatives at impossible ones are
        # taken at it.
        values, here = jnp.arange(self.num_values), self.where(state.x)
        return Categorical.draw(noise, parameters.evaluate_each(density, state.value, values, here))

    def result(self, x, noise, outcome):
        label = outcome.astype(jax.eval_shape(self.where, x).dtype)
        return parts.replace(self.where, x, label, "Gibbs(where=...)")

    def coupled_step(self, parameters, step, alternative, noise, coupling_noise):
        own = self.decide(parameters, alternative, noise)
        if not self._maximal:
            return State(self.result(alternative.x, noise, own.outcome))
        outcome = own.nearest(step.decisions[0], coupling_noise)
        moved = self.result(alternative.x, noise, outcome)
        # Chains that have met stay together, whatever rounding says of two equal distributions.
        met = trees.equal(step.before.x, alternative.x)
        return State(trees.select(met, step.after.x, moved))

    def coupled_transition(self, parameters, step, alternative, noise, coupling_noise):
        if not self._maximal:
            return self.step(parameters, alternative, noise)
        own = self.decide(parameters, alternative, noise)
        # By itself the outcome has the law of `own`, so that the flips of `own` apply to it.
        outcome = own.nearest(step.decisions[0], coupling_noise)
        after = State(self.result(alternative.x, noise, outcome))
        return Step(alternative, after, (Categorical(outcome, own.logits),))

    def martingale_increment(
        self, parameters, step, alternative, alternative_after, noise, coupling_noise, function
    ):
        """Exactly, over all values."""

        def one(before, after):
            decision = self.decide(parameters.value_only(), before, noise)
            at = lambda value: function(self.result(before.x, noise, value))
            each, drawn = jax.vmap(at)(jnp.arange(self.num_values)), function(after.x)
            size = jnp.abs(drawn) + decision.mean(jnp.abs(each))
            return Sum(drawn - decision.mean(each), size)

        return one(alternative, alternative_after).minus(one(step.before, step.after))

    @property
    def _maximal(self) -> bool:
        return isinstance(self.coupling, Maximal)


class UnitOdds(eqx.Module):
    """The log odds of units of a block that differ: those of `values[1]` where it is y's.

    Where another unit's are infinite, `0 · ∞` backward would reach all parameters: there they are
    those of the density, at the two states alone, which are possible.
    """

    logits: Callable[..., Float[Array, "*D"]]
    where: Callable[[Any], Any]
    values: tuple[Any, Any] = eqx.field(static=True)
    density: Callable[..., Float[Array, ""]]

    def __call__(self, theta, x, y, *args):
        def of_units(theta):
            high = lambda state: (self.where(state) == self.values[1]).astype(float)
            # Units are independent given the rest: log odds of a set of flips are the sum of
            # theirs, +1 or −1 each.
            change = high(y) - high(x)
            odds = self.logits(theta, x, *args)
            return jnp.sum(jnp.where(change != 0, change * odds, 0.0))

        def of_states(theta):
            odds = DensityOdds(self.density)(theta, x, y, *args)
            return jnp.asarray(odds, jax.eval_shape(of_units, theta).dtype)

        odds = self.logits(jax.lax.stop_gradient(theta), x, *args)
        infinite = any_mapped(jnp.any(jnp.isinf(odds)))
        return jax.lax.cond(infinite, of_states, of_units, theta)


class BlockGibbs(OfDensity, BlockUpdate):
    """Draws a block of two-valued units that are independent given the rest of the state: a layer
    of a restricted Boltzmann machine, one colour of a lattice.

    **Arguments**

    - `logits(theta, x, *args)`: for each unit of the block the log odds of `values[1]`, shaped
      like the block; `-inf` or `inf` where one of the values is impossible. They must not depend
      on the block itself.
    - `where`: picks the block, an array of the state or elements of one.
    - `log_density(theta, x, *args)`: the density that it leaves invariant, unnormalised. Births
      differentiate it where some logits are infinite: `jax.grad` of it must be finite where it is.
    - `values`: the two values of a unit, such as `(0, 1)` or `(-1, 1)`; the block may be of any
      dtype.

    All flips of a step are candidates of one pruning. An alternative draws with the same uniforms,
    which is a maximal coupling of each unit, and monotone.

    Refused: logits that are not shaped like the block, values that its type does not hold, a
    `where` that computes.

    >>> import jax, jax.numpy as jnp, diffmh
    >>> energy = lambda w, x: x["v"] @ w @ x["h"]
    >>> visible = diffmh.BlockGibbs(lambda w, x: w @ x["h"], lambda x: x["v"], energy)
    >>> hidden = diffmh.BlockGibbs(lambda w, x: x["v"] @ w, lambda x: x["h"], energy)
    >>> start = {"v": jnp.zeros(3), "h": jnp.zeros(2)}
    >>> both = diffmh.Cycle(hidden, visible)
    >>> mean = diffmh.expectation(lambda w, x: jnp.mean(x["v"]), both, init=start, num_samples=20)
    >>> jax.grad(mean)(0.1 * jnp.ones((3, 2)), jax.random.key(0)).shape
    (3, 2)
    """

    theta_enters_by_evaluate: ClassVar[bool] = True
    logits: Callable[..., Float[Array, "*D"]]
    where: Callable[[Any], Any]
    values: tuple[Any, Any] = eqx.field(static=True)

    def __init__(
        self,
        logits: Checked[Callable[..., Float[Array, "*D"]]],
        where: Checked[Callable[[Any], Any]],
        log_density: Checked[Callable[..., Float[Array, ""]]],
        values: Checked[tuple[Any, Any]] = (0, 1),
    ):
        name = "BlockGibbs(logits, where, log_density)"
        self.logits = validate.function(
            logits, name, "logits", "logits(theta, x, *args) -> array like the block"
        )
        self.where = validate.function(where, name, "where", "state -> block")
        self.density = validate.density(log_density, name)
        if not isinstance(values, tuple | list) or len(values) != 2 or values[0] == values[1]:
            raise ValueError(
                f"`BlockGibbs(values=...)` must be two different numbers, got {values!r}."
            )
        self.values = (values[0], values[1])

    @property
    def flip_odds(self):
        return UnitOdds(self.logits, self.where, self.values, self.density)

    def noise(self, key, x, num_steps):
        block = jax.eval_shape(self.where, x)
        if not hasattr(block, "shape"):
            raise TypeError(
                f"`BlockGibbs(where=...)` must pick one array of the state, got {block}."
                " For several arrays, put a `BlockGibbs` for each into a `Cycle`."
            )
        for value in self.values:
            if np.asarray(value).astype(block.dtype) != value:
                raise TypeError(
                    f"`BlockGibbs(values={self.values})` are not values of {block.dtype}, which the"
                    " block is: start from a block of another type."
                )
        parts.places(self.where, x, "BlockGibbs(where=...)")
        return jax.random.uniform(key, (num_steps, *block.shape))

    def refuse_start(self, x):
        block = np.asarray(self.where(x))
        outside = ~np.isin(block, self.values)
        if outside.any():
            raise ValueError(
                f"`BlockGibbs(values={self.values})` cannot start from {block[outside].flat[0]}:"
                " start with each unit of the block at one of the two values."
            )

    def decide(self, parameters: Parameters, state: State, noise) -> Bernoulli:
        log_odds = parameters.evaluate(self.logits, state.value)
        if jnp.shape(log_odds.primal) != noise.shape:
            raise ValueError(
                "`BlockGibbs(logits=...)` must return the log odds of the second value for"
                f" each unit, an array of the block's shape {noise.shape}, got"
                f" {jnp.shape(log_odds.primal)}."
            )
        validate.real_dtype(log_odds.primal.dtype, "what `BlockGibbs(logits=...)` returns")
        return Bernoulli.draw(noise, log_odds)

    def block(self, x):
        return self.where(x).astype(float) if parts.is_node(self.where, x) else None

    def with_block(self, x, block):
        return eqx.tree_at(self.where, x, block)

    def result(self, x, noise, outcome):
        dtype = jax.eval_shape(self.where, x).dtype
        low, high = (jnp.asarray(value, dtype) for value in self.values)
        units = jnp.where(outcome, high, low)
        return parts.replace(self.where, x, units, "BlockGibbs(where=...)")

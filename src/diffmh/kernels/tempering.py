"""Tempering: replicas at several inverse temperatures that swap, parallel tempering."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from ..base import validate
from ..base.validate import Checked
from ..core.block_update import BlockUpdate
from ..core.decisions import Acceptance
from ..core.kernel import Kernel, OfDensity, State, Update
from ..core.odds import DensityOdds, odds_of
from .gibbs import UnitOdds
from .lifted import Lifted, Row, distribute_lifted, fold_lifted, one_density


class Tempering(Kernel):
    """`Tempering(kernel_at, betas)`: one replica of the state for each inverse temperature. A step
    moves every replica by its own kernel, then neighbours try to swap: first the pairs (0, 1),
    (2, 3), ..., then (1, 2), (3, 4), .... Replicas i and j swap with probability `min(1, r)`,

        log r = log g_i(x_j) + log g_j(x_i) − log g_i(x_i) − log g_j(x_j),

    which is `(β_i − β_j) (l(x_j) − l(x_i))` for `log g_i = β_i l`.

    **Arguments**

    - `kernel_at(beta)` makes the kernel of a replica. Its density need not be a power, but must be
      that of its own equilibrium: `beta * likelihood + prior` will do.
    - `betas`: inverse temperatures, at least two, that of the replica of interest first, neighbours
      side by side. `beta` then is a traced number. Or a function `theta -> betas`, so that the
      ladder is differentiated too: `beta` is then a function of theta, to be called in the density.
    - `num_replicas`: how many there are, if `betas` is a function.

    A state is all replicas, stacked: each leaf has them as its leading axis, in `init` as in `f`,
    which looks at the first (`x[0]`), or at any others. The flips of all swaps that are tried at a
    time are candidates of one pruning. The replicas together leave `Π_i g_i(x_i)` invariant, so
    that `Covariance()` applies as well.

    Refused: a kernel whose updates have different densities; a state without the replicas leading.

    >>> import jax, jax.numpy as jnp, diffmh
    >>> wells = lambda theta, x: -4.0 * (x**2 - 1.0) ** 2 + theta * x
    >>> def kernel_at(beta):
    ...     heated = lambda theta, x: beta * wells(theta, x)
    ...     return diffmh.MetropolisHastings(heated, diffmh.GaussianWalk(0.5))
    >>> replicas = diffmh.Tempering(kernel_at, (1.0, 0.4, 0.1))
    >>> mean = diffmh.expectation(
    ...     lambda theta, x: x[0], replicas, init=jnp.ones(3), num_samples=20)
    >>> slope = jax.grad(mean)(0.3, jax.random.key(0))
    """

    ladder: Ladder
    density: Joint

    def __init__(
        self,
        kernel_at: Checked[Callable[[Any], Kernel]],
        betas: Checked[Sequence[float] | Array | Callable[[PyTree], Array]],
        num_replicas: Checked[int] | None = None,
    ):
        name = "Tempering(kernel_at, betas)"
        kernel_at = validate.function(kernel_at, name, "kernel_at", "beta -> kernel")
        if callable(betas):
            if num_replicas is None:
                raise ValueError(
                    f"`{name}`: if `betas` is a function of theta, the number of replicas is not"
                    " known: pass `num_replicas`."
                )
            count = validate.count(num_replicas, "Tempering(num_replicas=...)", least=2)
            self.ladder = Ladder(kernel_at, betas, count)
        else:
            fixed = _checked_betas(betas)
            self.ladder = Ladder(kernel_at, fixed, fixed.size)
            if num_replicas not in (None, fixed.size):
                raise ValueError(
                    f"`Tempering(num_replicas=...)` must be that of `betas`, {fixed.size}, got"
                    f" {num_replicas}: leave it out."
                )
        first = validate.instance(self.ladder.at(0), Kernel, name, "kernel_at(beta)")
        one_density(first, name, "swaps are decided by the densities of replicas")
        self.density = Joint(self.ladder)

    def updates(self):
        own = tuple(self._lift(jnp.asarray(0))(one) for one in self.ladder.at(0).updates())
        return (*own, *self._swaps)

    @property
    def _swaps(self) -> tuple[Swap, ...]:
        # Two replicas have no pair from 1 on.
        offsets = (0, 1) if self.ladder.num_replicas > 2 else (0,)
        return tuple(Swap(self.density, self.ladder, offset) for offset in offsets)

    def _lift(self, replica: Int[Array, ""]) -> Callable[[Update], Update]:
        """Makes updates of a replica those of the whole state."""

        def lift(update: Update) -> Update:
            # Where the odds are those of a density, the other replicas' cancel in their joint one.
            known = all(isinstance(odds, DensityOdds | UnitOdds) for odds in odds_of(update))
            odds = tuple(DensityOdds(self.density) for _ in odds_of(update)) if known else None
            return Lifted(update, Row(replica), self.density, odds)

        return lift

    def densities(self):
        return {id(self.density): self.density}

    def start(self, parameters, x):
        return State(x)

    def distribute(self, make, key):
        count, swaps = self.ladder.num_replicas, self._swaps
        keys = jax.random.split(key, count + len(swaps))

        def of_one(replica, key):
            return distribute_lifted(self.ladder.at(replica), self._lift(replica), make, key)

        # Steps lead and replicas come second: the loop over time takes one row of all noise.
        moves = jax.vmap(of_one, out_axes=1)(jnp.arange(count), keys[:count])
        return moves, tuple(make(swap, key) for swap, key in zip(swaps, keys[count:], strict=True))

    def fold(self, advance, carry, noise):
        moves, swap_noise = noise

        def of_one(carry, one):
            replica, own = one
            kernel, lift = self.ladder.at(replica), self._lift(replica)
            return fold_lifted(kernel, lift, advance, carry, own), None

        # Each update leaves Π_i g_i(x_i) invariant: the move of a replica its own factor, the
        # others standing still, and a swap the product.
        carry = jax.lax.scan(of_one, carry, (jnp.arange(self.ladder.num_replicas), moves))[0]
        for swap, own in zip(self._swaps, swap_noise, strict=True):
            carry = advance(swap, carry, own)
        return carry

    @property
    def draws_within_steps(self):
        return self.ladder.at(0).draws_within_steps

    def conditions(self, theta, *args):
        """The conditions of every replica, replicas leading."""
        each = lambda replica: self.ladder.at(replica).conditions(theta, *args)
        own = self.ladder.conditions(theta)
        return (*own, *eqx.filter_vmap(each)(jnp.arange(self.ladder.num_replicas)))

    def without_cache(self):
        return self


class Ladder(eqx.Module):
    """The kernels of all replicas. None has a cache: a swap brings a replica to another density."""

    kernel_at: Callable[[Any], Kernel]
    betas: Any
    num_replicas: int = eqx.field(static=True)

    def at(self, replica: int | Int[Array, ""]) -> Kernel:
        """The kernel of a replica."""
        index, betas = jnp.asarray(replica), self.betas
        beta = (lambda theta: jnp.asarray(betas(theta))[index]) if callable(betas) else betas[index]
        made = validate.instance(
            self.kernel_at(beta), Kernel, "Tempering(kernel_at, betas)", "kernel_at(beta)"
        )
        return made.without_cache()

    def densities(
        self, theta: PyTree, x: PyTree, args: tuple[Any, ...], first: int = 0
    ) -> Float[Array, "n"]:
        """`log g_i(x_i)` of the replicas in x, of which the first has the number `first`."""

        def one(replica, x):
            return self.at(replica).updates()[0].log_density(theta, x, *args)

        count = jax.tree.leaves(x)[0].shape[0]
        return jax.vmap(one)(first + jnp.arange(count), x)

    def conditions(self, theta: PyTree) -> tuple[validate.Condition, ...]:
        betas: Any = self.betas(theta) if callable(self.betas) else self.betas
        if jnp.shape(betas) != (self.num_replicas,):
            raise ValueError(
                f"`Tempering(betas=...)` must return {self.num_replicas} numbers, one for each"
                f" replica, got shape {jnp.shape(betas)}."
            )
        return validate.finite(betas, "Tempering(betas=...)")

    def check(self, x: PyTree) -> None:
        """Refuse a state without the replicas leading."""
        for leaf in jax.tree.leaves(x):
            if jnp.shape(leaf)[:1] != (self.num_replicas,):
                raise ValueError(
                    f"`Tempering(kernel_at, betas)` moves {self.num_replicas} replicas, stacked"
                    " along the leading axis of each array of the state, got shape"
                    f" {jnp.shape(leaf)}: start from `jnp.stack([x] * {self.num_replicas})`."
                )


class Joint(eqx.Module):
    """`Σ_i log g_i(x_i)`, the log density of all replicas."""

    ladder: Ladder

    def __call__(self, theta: PyTree, x: PyTree, *args: Any) -> Float[Array, ""]:
        self.ladder.check(x)
        return jnp.sum(self.ladder.densities(theta, x, args))


class Swap(OfDensity, BlockUpdate):
    """Tries to swap the replicas i and i + 1, for every second i from `offset` on. The pairs have
    no replica in common, so that their decisions are independent given the state.
    """

    theta_enters_by_evaluate: ClassVar[bool] = True
    ladder: Ladder
    offset: int = eqx.field(static=True)

    @property
    def num_pairs(self) -> int:
        return (self.ladder.num_replicas - self.offset) // 2

    @property
    def flip_odds(self):
        return DensityOdds(self.density)

    def noise(self, key, x, num_steps):
        return jax.random.uniform(key, (num_steps, self.num_pairs))

    def decide(self, parameters, state, noise):
        return Acceptance.draw(noise, parameters.evaluate(self.log_ratio, state.value))

    def log_ratio(self, theta: PyTree, x: PyTree, *args: Any) -> Float[Array, "pairs"]:
        """`log r` of each pair."""
        paired = jax.tree.map(self._paired, x)
        here = self.ladder.densities(theta, paired, args, self.offset)
        there = self.ladder.densities(
            theta, jax.tree.map(_other_of_pair, paired), args, self.offset
        )
        # Summed in pairs before they are subtracted: an impossible place is never a NaN.
        total = lambda each: jnp.sum(each.reshape(self.num_pairs, 2), axis=1)
        return total(there) - total(here)

    def result(self, x, noise, outcome):
        last = self.offset + 2 * self.num_pairs

        def one(leaf):
            paired = self._paired(leaf)
            taken = jnp.stack([outcome, outcome], axis=1).reshape(-1)
            taken = jnp.expand_dims(taken, range(1, leaf.ndim))
            swapped = jnp.where(taken, _other_of_pair(paired), paired)
            return jnp.concatenate([leaf[: self.offset], swapped, leaf[last:]])

        return jax.tree.map(one, x)

    def _paired(self, leaf: Array) -> Array:
        """The replicas that have a partner."""
        return leaf[self.offset : self.offset + 2 * self.num_pairs]


def _other_of_pair(leaf: Array) -> Array:
    """The replicas 1, 0, 3, 2, ...."""
    pairs = leaf.reshape(-1, 2, *leaf.shape[1:])
    return jnp.flip(pairs, axis=1).reshape(leaf.shape)


def _checked_betas(betas: Any) -> Float[Array, "n"]:
    found = validate.real_array(betas, "Tempering(betas=...)")
    if found.ndim != 1 or found.shape[0] < 2:
        raise ValueError(
            "`Tempering(betas=...)` must be at least two inverse temperatures, or a function of"
            f" theta, got shape {found.shape}."
        )
    validate.require(validate.finite(found, "Tempering(betas=...)"))
    return found

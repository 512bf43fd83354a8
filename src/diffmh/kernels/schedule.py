"""Schedule: a kernel that changes on the way, stage by stage.

One step is the whole pass, because the number of stages, not the time of a loop, is what a
schedule is about: `f` sees where a run has led, the loop over time knows nothing of stages, and
several passes in succession (`num_samples`) are tempered transitions. A pass is a long step, so its
noise is a key, and a stage draws as it begins: memory does not grow with the number of stages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key, PyTree

from ..base import validate
from ..base.validate import Checked
from ..core.kernel import Kernel, Odds, State, Step, Update, moves_with_theta
from ..core.odds import IndexedOdds, distinct_odds, odds_of, same_odds
from ..core.parameters import Parameters
from .compose import Indexed
from .lifted import Lifted, StatePart, Whole, distribute_lifted, fold_lifted, one_density

# A stage draws the randomness of at most this many numbers per chain at once.
_MOST_WORDS = 4096


class Schedule(Indexed):
    """`Schedule(kernel_at, num_stages, steps_per_stage)` runs `steps_per_stage` steps of each of
    the kernels `kernel_at(0), ..., kernel_at(num_stages − 1)` in turn: annealing, tempered
    transitions, annealed importance sampling. One step is the whole pass, and `f` is evaluated at
    its end: `num_samples=1` is one run from `init`, and further samples continue from where the
    last pass ended.

    `kernel_at(stage)` makes the kernel of a stage, a traced integer, so that any number of stages
    compiles as one. A stage's density reads its own parameters, such as `theta[stage]`, and the
    derivative is the one with respect to the whole schedule. A chain whose densities change has no
    equilibrium: `Covariance()` refuses it.

    With `log_weight=True` a state is `{"x": x, "log_weight": w}`, in `init` as in `f`. Each pass
    begins with `w = 0`, and at each change of stage `w` gains

        log g_{s+1}(x) − log g_s(x),

    where x is the state at the end of stage s; `w` carries its derivative. For a start drawn from
    g_0, `E[exp(w)]` is `Z_{S−1} / Z_0`, the ratio of the normalisers of last and first stage
    (annealed importance sampling), and `E[w]` is a lower bound of its logarithm.

    Refused: kernels whose number of parts depends on the stage; with `log_weight`, stages whose
    updates have different densities, and densities that jump in a float of the state.

    >>> import jax, jax.numpy as jnp, diffmh
    >>> bonds = lambda z: jnp.sum(z * jnp.roll(z, 1))
    >>> heated = lambda stage: lambda betas, z: betas[stage] * bonds(z)
    >>> flip = lambda stage: diffmh.MetropolisHastings(heated(stage), diffmh.SpinFlip())
    >>> anneal = diffmh.Schedule(flip, num_stages=5, steps_per_stage=8)
    >>> start = jnp.array([1, -1, 1, -1])
    >>> last = diffmh.expectation(lambda betas, z: -bonds(z), anneal, init=start, num_samples=1)
    >>> jax.grad(last)(jnp.linspace(0.1, 0.8, 5), jax.random.key(0)).shape
    (5,)
    """

    num_stages: int = eqx.field(static=True)
    steps_per_stage: int = eqx.field(static=True)
    log_weight: bool = eqx.field(static=True)

    def __init__(
        self,
        kernel_at: Checked[Callable[[Int[Array, ""]], Kernel]],
        num_stages: Checked[int],
        steps_per_stage: Checked[int] = 1,
        log_weight: Checked[bool] = False,
    ):
        name = "Schedule(kernel_at, num_stages, steps_per_stage)"
        self.kernel_at = validate.function(kernel_at, name, "kernel_at", "stage -> kernel")
        self.num_stages = validate.count(num_stages, "Schedule(num_stages=...)")
        self.steps_per_stage = validate.count(steps_per_stage, "Schedule(steps_per_stage=...)")
        self.log_weight = validate.flag(log_weight, "Schedule(log_weight=...)")
        first = validate.instance(self.at(0), Kernel, name, "kernel_at(0)")
        # `Enter` evaluates a stage's cache where the chain is, without its tangent: a state that
        # moves with θ has none.
        if moves_with_theta(first):
            self.kernel_at = lambda stage: kernel_at(stage).without_cache()
        if self.log_weight:
            one_density(
                first, "Schedule(log_weight=True)", "the weight is one of densities of stages"
            )

    @property
    def indices(self):
        return jnp.arange(self.num_stages)

    @property
    def part(self) -> StatePart:
        """The part of a state that the stages' kernels move."""
        return BesideWeight() if self.log_weight else Whole()

    @property
    def _enters(self) -> bool:
        """True if something happens between stages."""
        cached = (update.cached_function for update in self.at(0).updates())
        return self.log_weight or any(function is not None for function in cached)

    def updates(self):
        first, stage = self.at(0), jnp.asarray(0)
        own = tuple(self._lift(first, stage, update) for update in first.updates())
        return (Enter(self, stage), *own) if self._enters else own

    def _lift(self, kernel: Kernel, stage: Int[Array, ""], update: Update) -> Update:
        """An update of a stage, on the state of the schedule."""
        return Lifted(update, self.part, odds=self._odds(kernel, stage, update))

    def _odds(self, kernel: Kernel, stage: Int[Array, ""], update: Update) -> Any:
        """An update's odds, as those of its stage. Births have no tangents, as a weight needs."""
        own = odds_of(update)
        if self.log_weight or any(odds is None or isinstance(odds, IndexedOdds) for odds in own):
            return None
        known = distinct_odds(kernel)

        def indexed(odds):
            number = [same_odds(odds, other) for other in known]
            # Odds that differ from site to site of a sweep are not told apart by the stage.
            return IndexedOdds(OddsAt(self.kernel_at, number.index(True)), stage)

        if not all(any(same_odds(odds, other) for other in known) for odds in own):
            return None
        return tuple(map(indexed, own))

    @property
    def draws_within_steps(self):
        return True

    def distribute(self, make, key):
        # Rows of steps: as many as `make` draws.
        first, stage = self.at(0), jnp.asarray(0)
        lift = functools.partial(self._lift, first, stage)
        drawn = jax.eval_shape(lambda key: distribute_lifted(first, lift, make, key), key)
        num_steps = next((leaf.shape[0] for leaf in jax.tree.leaves(drawn)), 1)
        return PassKey(jax.random.split(key, num_steps), make)

    def fold(self, advance, carry, noise: PassKey):
        def run(stage, carry):
            key = jax.random.fold_in(noise.key, stage)
            return self._run_stage(advance, carry, noise.make, stage, key)

        return jax.lax.fori_loop(0, self.num_stages, run, carry)

    def _run_stage(self, advance, carry, make, stage: Int[Array, ""], key: Key[Array, ""]):
        kernel = self.at(stage)
        lift = functools.partial(self._lift, kernel, stage)
        # Invariant: the key of a stage depends on the pass and the stage alone, so no stage's draws
        # depend on how many follow.
        key_enter, key_steps = jax.random.split(key)
        if self._enters:
            enter = Enter(self, stage)
            carry = advance(enter, carry, _first(make(enter, key_enter)))

        def draw(key):
            return _first(distribute_lifted(kernel, lift, make, key))

        def step(carry, noise):
            return fold_lifted(kernel, lift, advance, carry, noise), None

        def some(carry, keys):
            return jax.lax.scan(step, carry, jax.vmap(draw)(keys))[0], None

        # Each step has a key of its own: how many are drawn at once changes no number.
        keys = jax.random.split(key_steps, self.steps_per_stage)
        count = _steps_at_once(self.steps_per_stage, jax.eval_shape(draw, key))
        return jax.lax.scan(some, carry, keys.reshape(-1, count))[0]

    def without_cache(self):
        kernel_at = self.kernel_at
        return Schedule(
            lambda stage: kernel_at(stage).without_cache(),
            self.num_stages,
            self.steps_per_stage,
            self.log_weight,
        )


class PassKey(eqx.Module):
    """The noise of a pass: a key, and how the randomness of a stage is made from one."""

    key: Key[Array, "..."]
    make: Callable[..., PyTree] = eqx.field(static=True)


def _first(noise: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[0], noise)


def _steps_at_once(num_steps: int, drawn: PyTree) -> int:
    """A divisor of the number of steps, so large that the noise of as many steps is not."""
    words = max(1, sum(leaf.size for leaf in jax.tree.leaves(drawn)))
    most = max(1, min(num_steps, _MOST_WORDS // words))
    return next(count for count in range(most, 0, -1) if num_steps % count == 0)


class OddsAt(eqx.Module):
    """The log odds of a stage, of those of its kernel the one of this number."""

    kernel_at: Callable[[Int[Array, ""]], Kernel]
    number: int = eqx.field(static=True)

    def __call__(self, stage: Int[Array, ""]) -> Odds:
        return distinct_odds(self.kernel_at(stage))[self.number]


class BesideWeight(StatePart):
    """The state `x` of `{"x": x, "log_weight": w}`."""

    def of(self, tree, num_leading=0):
        if not isinstance(tree, dict) or set(tree) != {"x", "log_weight"}:
            raise ValueError(
                '`Schedule(log_weight=True)` moves states `{"x": x, "log_weight": w}`, got'
                f" {jax.tree.map(jnp.shape, tree)}: start from"
                ' `init={"x": x, "log_weight": 0.0}`.'
            )
        return tree["x"]

    def put(self, tree, part, num_leading=0):
        return {**tree, "x": part}


class Enter(Update):
    """The change before a stage: the log weight gains what the change of density is worth, and
    what the stage's kernel knows of a state is computed anew. It decides nothing.
    """

    theta_enters_by_evaluate: ClassVar[bool] = True
    schedule: Schedule
    stage: Int[Array, ""]

    @property
    def name_in_messages(self):
        return "Schedule"

    @property
    def _first(self) -> Update:
        return self.schedule.at(self.stage).updates()[0]

    def log_density(self, theta, x, *args):
        return self._first.log_density(theta, self.schedule.part.of(x), *args)

    @property
    def density_identity(self):
        return self._first.density_identity

    @property
    def flip_odds(self):
        return None if self.schedule.log_weight else ()

    @property
    def cached_function(self):
        return self._first.cached_function

    @property
    def moves_with_theta(self):
        return self.schedule.log_weight

    def noise(self, key, x, num_steps):
        return None

    def refuse_start(self, x):
        if self.schedule.log_weight:
            weight = x["log_weight"]
            if weight.shape != () or not jnp.issubdtype(weight.dtype, jnp.floating):
                raise ValueError(
                    '`Schedule(log_weight=True)` needs a float for `init["log_weight"]`, got'
                    f" {weight.dtype}{list(weight.shape)}: start from 0.0."
                )

    def step(self, parameters, state, noise):
        if not self.schedule.log_weight:
            return Step(state, self._entered(parameters, state.x, state.tangent))
        weighed = parameters.evaluate(self._weighed, state.value)
        return Step(state, self._entered(parameters, weighed.primal, weighed.tangent))

    def coupled_step(self, parameters, step, alternative, noise, coupling_noise):
        return self.step(parameters, alternative, noise).after

    def flipped(self, step, noise, decision, candidate):
        raise NotImplementedError("nothing is decided between stages")

    def _weighed(self, theta: PyTree, x: PyTree, *args: Any) -> PyTree:
        inner, weight = self.schedule.part.of(x), x["log_weight"]
        density = lambda stage: (
            self.schedule.at(stage).updates()[0].log_density(theta, inner, *args)
        )
        # Both densities at x, where the stage before ended: so the gains of a pass add up to Σ_s
        # log g_s(x_{s−1}) − log g_{s−1}(x_{s−1}), the log weight of annealed importance sampling.
        # At stage 0 nothing has changed, and the weight of the pass before is dropped.
        gain = density(self.stage) - density(jnp.maximum(self.stage - 1, 0))
        return {**x, "log_weight": jnp.where(self.stage > 0, weight + gain, 0).astype(weight.dtype)}

    def _entered(self, parameters: Parameters, x: PyTree, tangent: PyTree) -> State:
        kernel = self.schedule.at(self.stage)
        return State(x, kernel.start(parameters, self.schedule.part.of(x)).cache, tangent)

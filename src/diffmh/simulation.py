"""The time loop: many chains, many steps, nothing of the path kept.

Steps are taken in blocks. The randomness of a block is drawn at once, which is several times faster
than step by step; sums are plain within a block and compensated between blocks. Chains are the last
axis of every array.

The primal's randomness comes from keys of its own. It is the same whatever the estimator, the
coupling and the number of alternatives; nor does a chain's depend on how many others there are. How
its values are rounded does not depend on them either: see `_lowering.rounding`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from . import _trees
from ._lowering import plain_jax, rounding
from ._lowering.chains import over_chains
from ._lowering.manual import varying
from ._sharding import over_groups, over_shards, placed, summed_over_shards
from ._sums import CompensatedSum
from .alternatives import Events, Transition, remember
from .counts import Silent, Watch, Window
from .estimators import Backward, Births, Block, Estimator, Forward, Observation, Reading, ValueOnly
from .intervals import Stretches
from .kernel import Kernel, State, Step, Update, moves_with_theta
from .method import Method
from .parameters import Parameters
from .values import Value, without_tangents

# Random words per chain that a block may hold, and the steps that it may have.
_BLOCK_WORDS, _BLOCK_STEPS = 4096, 128

# Chains are run in groups of so many bytes of state, which stay near the processor, and of so many
# chains at the least and at most. If the least have more bytes than this, they are run together.
_GROUP_BYTES, _MOST_GROUP_BYTES = 4096, 16384
_LEAST_GROUP, _LARGEST_GROUP = 64, 512

# A state of more elements than this is kept whole between updates; a smaller one may be fused into
# whatever uses it.
_SMALL = 32


class Simulation(eqx.Module):
    """What to run: a kernel from a start, and what to observe of it by which estimator."""

    kernel: Kernel
    init: PyTree | Callable[[Key[Array, ""]], PyTree]
    f: Callable[..., PyTree]
    estimator: Estimator
    num_samples: int = eqx.field(static=True)
    burn_in: int = eqx.field(static=True)
    num_chains: int = eqx.field(static=True)
    lag: int = eqx.field(static=True, default=0)
    f_depends_on_theta: bool = eqx.field(static=True, default=True)
    mesh: Mesh | None = eqx.field(static=True, default=None)
    keys: Key[Array, "C 2"] | None = None

    def share(self, keys: Key[Array, "C 2"]) -> Simulation:
        """The chains of these keys only, where this is traced."""
        return dataclasses.replace(self, keys=keys, num_chains=keys.shape[0], mesh=None)

    def plain(self) -> Simulation:
        """The same chains, with no derivative."""
        return dataclasses.replace(self, estimator=ValueOnly())

    def reading(self, how: Backward | Forward) -> Simulation:
        """The same chains, their births read in this way."""
        assert isinstance(self.estimator, Births)
        count = self.estimator.alternatives
        return dataclasses.replace(
            self, estimator=Births(count, how, explicit=self.f_depends_on_theta)
        )

    @property
    def num_steps(self) -> int:
        return self.burn_in + self.num_samples

    def starts(self, key: Key[Array, ""]) -> PyTree:
        """The start state of each chain, chains last."""
        if callable(self.init):
            keys = self.chain_keys(key)[:, 0]
            return jax.vmap(lambda key: _trees.strong(self.init(key)), out_axes=-1)(keys)
        last = lambda leaf: jnp.broadcast_to(leaf[..., None], (*leaf.shape, self.num_chains))
        return jax.tree.map(last, _trees.strong(self.init))

    def chain_keys(self, key: Key[Array, ""]) -> Key[Array, "C 2"]:
        """For each chain a key for its start and one for its steps. Asked for again in every
        block, which is no reuse: the steps' are folded with the block's number.
        """
        if self.keys is not None:
            return jax.random.clone(self.keys)
        keys = jax.random.split(jax.random.clone(key), self.num_chains)
        return jax.vmap(jax.random.split)(keys)

    def observable(self, parameters: Parameters, x: PyTree | Value, past: Value | None) -> Value:
        """`f(θ, x)`, or `f(θ, x_earlier, x)`, flattened to shape (F,); with its derivative at fixed
        decisions if a derivative is wanted and f has one.
        """
        places = (x,) if past is None else (_oldest(past), x)
        moves = any(isinstance(place, Value) and place.tangent is not None for place in places)
        if not (self.f_depends_on_theta or moves):
            parameters = parameters.value_only()
        return parameters.evaluate(lambda *operands: flatten(self.f(*operands)), *places)


def nothing(theta, x, *args) -> float:
    """Paths and draws need no f."""
    return 0.0


def _oldest(past: Value) -> Value:
    primal = jax.tree.map(lambda leaf: leaf[-1], past.primal)
    return Value(primal, jax.tree.map(lambda leaf: leaf[:, -1], past.tangent))


def flatten(value: PyTree) -> Float[Array, "F"]:
    """f's value as one vector of floats."""
    flat = ravel_pytree(value)[0]
    return flat if jnp.issubdtype(flat.dtype, jnp.floating) else flat.astype(float)


class Chain(eqx.Module):
    """One chain: the primal, the earlier states that f looks at, and what the estimator carries
    beside it.
    """

    state: State
    past: Value | None
    memory: PyTree


class Observed(eqx.Module):
    """What is averaged over the samples: f, what the estimator asks for, and what is watched."""

    value: Float[Array, "F *C"]
    estimator: PyTree
    watched: PyTree


class Progress(eqx.Module):
    """How far a run has come, chains last: all that is needed to go on."""

    chains: Chain
    startable: Bool[Array, "C"]
    sums: CompensatedSum
    watch: Watch | Silent
    gathered: CompensatedSum | None = None


class Outcome(eqx.Module):
    """The averages over each chain's samples, chains last, and what was watched on the way: counts,
    the largest `|log g|` where the chain ended, and for a report what its stretches and halves
    say and by which method.
    """

    observed: Observed
    watch: Watch | Silent
    log_density: Float[Array, "C"] | None
    estimator: str = eqx.field(static=True)
    stretches: Stretches | None = None
    halves: Stretches | None = None
    method: Method | None = None
    gathered: PyTree = None


class Loop(eqx.Module):
    """A simulation at given parameters and key: its start, the randomness of its blocks, and its
    step.
    """

    simulation: Simulation
    theta: PyTree
    key: Key[Array, ""]
    args: tuple[Any, ...]
    differentiate: bool = eqx.field(static=True)
    diagnose: bool = eqx.field(static=True, default=False)

    def share(self, keys: Key[Array, "C 2"]) -> Loop:
        """The chains of these keys only."""
        return dataclasses.replace(self, simulation=self.simulation.share(keys))

    @property
    def one(self) -> PyTree:
        """The form of one chain's state."""
        starts = jax.eval_shape(self.simulation.starts, self.key)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[:-1], leaf.dtype), starts)

    @property
    def block_steps(self) -> int:
        """How many steps' randomness is drawn at once. Depends on one chain's primal alone, not
        on the estimator.
        """

        def noise(key):
            make = lambda update, key: update.noise(key, self.one, 1)
            return self.simulation.kernel.distribute(make, key)

        words = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(noise, self.key)))
        most = min(_BLOCK_STEPS, _BLOCK_WORDS // max(1, words), self.simulation.num_steps)
        return max(1, most)

    @property
    def num_blocks(self) -> int:
        return -(-self.simulation.num_steps // self.block_steps)

    @property
    def num_groups(self) -> int:
        """In how many groups chains are run, one after the other. On a processor with caches, small
        states of many chains are; larger ones keep several cores busy as they are.
        """
        num_chains = self.simulation.num_chains
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.one))
        on_processor = jax.default_backend() == "cpu" and not plain_jax.value
        if not on_processor or _LEAST_GROUP * size > _MOST_GROUP_BYTES:
            return 1
        most = min(max(_LEAST_GROUP, _GROUP_BYTES // max(1, size)), _LARGEST_GROUP)
        fits = lambda chains: num_chains % chains == 0
        chains = max(filter(fits, range(_LEAST_GROUP, min(most, num_chains) + 1)), default=0)
        return num_chains // chains if chains else 1

    def parameters(self, key: Key[Array, ""]) -> Parameters:
        differentiate = self.differentiate and self.simulation.estimator.differentiates_f
        return Parameters(self.theta, self.args, rounding.never(key, (2,)), differentiate)

    def start(self) -> Progress:
        """All chains at their start."""
        parameters = self.parameters(self.key)
        starts = self.simulation.starts(self.key)
        chains, startable = over_chains(lambda x: self._start_one(parameters, x))(starts)
        watch = self._start_watch(parameters, chains) if self.diagnose else Silent()
        observed = jax.eval_shape(
            over_chains(lambda chain, watch: self.observe(parameters, chain, watch)),
            chains,
            watch.per_chain,
        )
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), observed)
        watch = watch.watching(_unwatched(zeros))
        begun = Progress(chains, startable, CompensatedSum.like(zeros), watch)
        form = jax.eval_shape(lambda: self._read(begun, chains, self._unkept(begun), True)[1])
        if form is None:
            return begun
        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), form.gathered)
        return dataclasses.replace(begun, gathered=CompensatedSum.like(nothing))

    def _start_watch(self, parameters: Parameters, chains: Chain) -> Watch:
        plain = parameters.value_only()
        f = lambda x, past: self.simulation.observable(plain, x, past).primal
        origin = over_chains(f)(chains.state.x, without_tangents(chains.past))
        window = Window.of(self.simulation.num_samples, self.simulation.burn_in)
        num_leaves = len(jax.tree.leaves(self.one))
        return Watch.start(origin, chains.memory, num_leaves, self.num_blocks, window)

    def _start_one(self, parameters: Parameters, x: PyTree) -> tuple[Chain, Bool[Array, ""]]:
        """One chain at its start, and whether it may be run: its log densities are finite."""
        simulation = self.simulation
        kernel, lag, for_steps = simulation.kernel, simulation.lag, self._for_steps(parameters)
        tangent = None
        floats = eqx.filter(x, eqx.is_inexact_array)
        if for_steps.differentiate and moves_with_theta(kernel) and jax.tree.leaves(floats):
            tangent = jax.tree.map(
                lambda leaf: jnp.zeros((parameters.size, *leaf.shape), leaf.dtype), floats
            )
        start = kernel.start(for_steps, x)
        state = State(x, start.cache, tangent)
        past = None
        if lag:
            stack = lambda leaf: jnp.broadcast_to(leaf, (lag, *leaf.shape))
            past = Value(_trees.repeat(x, lag), jax.tree.map(jax.vmap(stack), tangent))
        at = self._observation(parameters, state, past)
        densities = [update.log_density(self.theta, x, *self.args) for update in kernel.updates()]
        startable = jnp.all(jnp.isfinite(jnp.stack(densities)))
        return Chain(state, past, simulation.estimator.start(at)), startable

    def _for_steps(self, parameters: Parameters) -> Parameters:
        differentiates = self.simulation.estimator.differentiates_steps
        return parameters if differentiates else parameters.value_only()

    def block_noise(self, block: Int[Array, ""]) -> PyTree:
        """The randomness of a block: steps first, chains last."""
        of_chain = lambda key: self._noise(jax.random.fold_in(key, block), self.block_steps)
        return over_chains(of_chain, draws_ahead=True)(self.simulation.chain_keys(self.key)[:, 1])

    def _noise(self, key: Key[Array, ""], num_steps: int) -> PyTree:
        """The randomness of one chain's steps: the primal's and the estimator's own."""
        one, estimator = self.one, self.simulation.estimator

        def both(update: Update, key):
            key_primal, key_own = jax.random.split(key)
            own = estimator.own_noise(update, key_own, one, num_steps)
            return update.noise(key_primal, one, num_steps), own

        return self.simulation.kernel.distribute(both, key)

    def step(
        self,
        parameters: Parameters,
        chain: Chain,
        noise: PyTree,
        record: PyTree,
        note: Callable[[PyTree, Step, Events | None], PyTree],
    ) -> tuple[Chain, PyTree]:
        """One step of one chain, through every update of the kernel; `note` adds each to
        `record`.
        """
        estimator = self.simulation.estimator
        chain = Chain(chain.state, chain.past, estimator.begin(chain.memory))
        if self.simulation.lag:
            assert chain.past is not None
            past = remember(chain.past, chain.state.value)
            chain = Chain(chain.state, past, estimator.look_back(chain.memory))

        def advance(update: Update, carry, noise):
            (chain, record), (primal_noise, own_noise) = carry, noise
            step = self._primal_step(parameters, update, chain.state, primal_noise)
            at = Transition(
                parameters,
                update,
                step,
                primal_noise,
                own_noise,
                chain.past,
                self.simulation.observable,
                self.simulation.kernel,
            )
            memory, events = estimator.advance(chain.memory, at)
            chain = self._kept(parameters, Chain(step.after, chain.past, memory))
            return chain, note(record, step, events)

        return self.simulation.kernel.fold(advance, (chain, record), noise)

    def _primal_step(self, parameters, update: Update, state: State, noise: PyTree) -> Step:
        """The update's step, its values rounded alike in every program."""
        for_steps = self._for_steps(parameters)

        def primal_and_rest(state, noise):
            step = update.step(for_steps, state, noise)
            return _primal(step), step

        step = rounding.settled(primal_and_rest, parameters.never[0])(state, noise)[1]
        outcomes = lambda step: [decision.outcome for decision in step.decisions]
        if step.decisions and sum(outcome.size for outcome in outcomes(step)) > _SMALL:
            step = eqx.tree_at(outcomes, step, self._kept(parameters, outcomes(step)))
        return step

    def _kept(self, parameters: Parameters, tree: PyTree) -> PyTree:
        """Large states, those between the updates of a cycle, and several alternatives with many
        weights or sums are computed once; a compiler would compute them anew for each use, in a
        cycle for each use of each use.
        """
        size = sum(leaf.size for leaf in jax.tree.leaves(self.one))
        few = not isinstance(tree, Chain) or _few_numbers(tree.memory)
        if size <= _SMALL and few and len(self.simulation.kernel.updates()) == 1:
            return tree
        return rounding.whole(tree, parameters.never[0])

    def _observation(self, parameters: Parameters, state: State, past: Value | None) -> Observation:
        """f where the chain is, derivative included, apart from the value that is averaged."""
        simulation = self.simulation
        x, past = rounding.settle((state.value, past), parameters.never[1])
        value = simulation.observable(parameters, x, past)
        return Observation(parameters, simulation.kernel, state, past, simulation.observable, value)

    def observe(self, parameters: Parameters, chain: Chain, watch: PyTree) -> Observed:
        """What one chain adds to the averages where it is now."""
        simulation = self.simulation
        plain = parameters.value_only()
        f = lambda x, past: (simulation.observable(plain, x, past).primal, None)
        place = (chain.state.x, without_tangents(chain.past))
        value, _ = rounding.settled(f, parameters.never[0])(*place)
        at = self._observation(parameters, chain.state, chain.past)
        estimator = simulation.estimator.observe(chain.memory, at)
        watched = None if watch is None else watch.square(at.value.primal)
        return Observed(value, estimator, watched)

    def block(self, index: Int[Array, ""], progress: Progress) -> Progress:
        """One block of steps of all chains."""
        simulation, block_steps = self.simulation, self.block_steps
        parameters = self.parameters(jax.random.fold_in(self.key, index))
        noise = self.block_noise(index)
        begin = index * block_steps
        end = jnp.minimum(begin + block_steps, simulation.num_steps)
        zeros = jax.tree.map(jnp.zeros_like, progress.sums.total)

        def step(i, carry):
            chains, watch, sums, halves, kept = carry
            now = jax.tree.map(lambda leaf: leaf[i], noise)
            shares = self._shares(progress.watch, begin + i)
            one = lambda chain, watch, noise: self._one(parameters, chain, watch, noise, shares)
            chains, watch, observed, new = over_chains(one)(chains, watch, now)
            sums = _trees.add(sums, _where(begin + i >= simulation.burn_in, observed))
            halves = self._add_half(progress.watch, begin + i, halves, observed)
            kept = jax.tree.map(lambda all, leaf: all.at[i].set(leaf), kept, new)
            return chains, watch, sums, halves, kept

        unwatched = None if isinstance(progress.watch, Silent) else _unwatched(zeros)
        carry = (
            progress.chains,
            progress.watch.per_chain,
            zeros,
            (unwatched, unwatched),
            self._unkept(progress),
        )
        chains, per_chain, sums, halves, kept = jax.lax.fori_loop(0, end - begin, step, carry)
        halves = jax.tree.map(lambda early, late: jnp.stack([early, late]), *halves)
        chains, reading = self._read(progress, chains, kept, self._must_end(index))
        gathered = progress.gathered
        if reading is not None:
            assert gathered is not None
            gathered = gathered.plus(reading.gathered)
            sums, halves = _with_reading(sums, halves, reading.observed)
        sampled = jnp.clip(end - simulation.burn_in, 0, end - begin)
        watch = progress.watch.after_block(
            index, self.num_blocks, per_chain, _unwatched(sums), halves, sampled
        )
        sums = progress.sums.plus(sums)
        return Progress(chains, progress.startable, sums, watch, gathered)

    def _must_end(self, index: Int[Array, ""]) -> Bool[Array, ""]:
        """Short blocks may leave sums for the next, unless a report wants to know block by block;
        plain sums over many steps drift.
        """
        every = 1 if self.diagnose else -(-_BLOCK_STEPS // self.block_steps)
        return ((index + 1) % every == 0) | (index + 1 == self.num_blocks)

    def _shares(self, watch: Watch | Silent, step: Int[Array, ""]) -> Float[Array, "n"]:
        """Whether a step counts as a sample, and if it is watched, in which half it lies."""
        counted = jnp.asarray(step >= self.simulation.burn_in)[None]
        if not isinstance(watch, Silent):
            counted = jnp.concatenate([counted, watch.window.halves(step)])
        return counted.astype(float)

    def _unkept(self, progress: Progress) -> PyTree:
        """Room for what is kept of a block's steps."""
        shares = self._shares(progress.watch, jnp.zeros((), int))
        note = lambda chain: self._note(self.parameters(self.key), chain, shares)[1]
        form = jax.eval_shape(over_chains(note), progress.chains)
        room = lambda leaf: jnp.zeros((self.block_steps, *leaf.shape), leaf.dtype)
        return jax.tree.map(room, form)

    def _note(self, parameters: Parameters, chain: Chain, shares) -> tuple[Chain, PyTree]:
        if type(self.simulation.estimator).note is Estimator.note:
            return chain, None
        at = self._observation(parameters, chain.state, chain.past)
        memory, kept = self.simulation.estimator.note(chain.memory, at, shares)
        return Chain(chain.state, chain.past, memory), kept

    def _read(
        self, progress: Progress, chains: Chain, kept: PyTree, must_end: Bool[Array, ""] | bool
    ) -> tuple[Chain, Reading | None]:
        """What the estimator reads off a block at its end."""
        simulation = self.simulation
        block = Block(
            self.parameters(self.key),
            simulation.kernel,
            simulation.observable,
            chains.memory,
            kept,
            jnp.asarray(must_end),
        )
        memory, reading = simulation.estimator.read(block)
        return Chain(chains.state, chains.past, memory), reading

    def _one(self, parameters, chain: Chain, watch: PyTree, noise: PyTree, shares):
        """One step of one chain, what it adds to the averages, and what is kept of it."""
        note = (lambda record, step, events: None) if watch is None else type(watch).note
        chain, watch = self.step(parameters, chain, noise, watch, note)
        observed = self.observe(parameters, chain, watch)
        chain, kept = self._note(parameters, chain, shares)
        return chain, None if watch is None else watch.after(chain.memory), observed, kept

    @staticmethod
    def _add_half(watch: Watch | Silent, step, halves: tuple[PyTree, PyTree], observed: Observed):
        """The sums over the halves of the watched window, after another step."""
        if isinstance(watch, Silent):
            return halves
        each = zip(halves, watch.window.halves(step), strict=True)
        return tuple(_trees.add(half, _where(now, _unwatched(observed))) for half, now in each)

    def first_chain(self) -> Chain:
        """One chain at its start, by itself."""
        init = self.simulation.init
        x = _trees.strong(init(jax.random.clone(self.key)) if callable(init) else init)
        return self._start_one(self.parameters(self.key), x)[0]

    def single_step(
        self, chain: Chain, record: PyTree, note: Callable[..., PyTree]
    ) -> tuple[Chain, PyTree]:
        """One step of a chain by itself, with this loop's key for all of its randomness."""
        # A clone: `never` draws from the key too, and says nothing of it.
        noise = jax.tree.map(lambda leaf: leaf[0], self._noise(jax.random.clone(self.key), 1))
        return self.step(self.parameters(self.key), chain, noise, record, note)

    def first_value(self) -> Float[Array, "F"]:
        """f after one step of one chain: the shortest program with all that a user wrote in it."""
        chain, _ = self.single_step(self.first_chain(), None, lambda record, step, events: None)
        return self.observe(self.parameters(self.key), chain, None).value

    def outcome(self, progress: Progress) -> Outcome:
        """A chain whose log density is not finite at its start has NaN for its averages."""
        count = self.simulation.num_samples
        mean = lambda total: jnp.where(progress.startable, total / count, jnp.nan)
        log_density, estimator = None, type(self.simulation.estimator).__name__
        if self.diagnose:
            log_density = over_chains(self._largest_log_density)(progress.chains.state.x)
        gathered = None
        if progress.gathered is not None:
            total = jax.tree.map(lambda leaf: leaf / count, progress.gathered.value())
            gathered = self.simulation.estimator.gathered(total, progress.startable)
        return Outcome(
            jax.tree.map(mean, progress.sums.value()),
            progress.watch,
            log_density,
            estimator,
            gathered=gathered,
        )

    def _largest_log_density(self, x: PyTree) -> Float[Array, ""]:
        updates = self.simulation.kernel.updates()
        densities = [update.log_density(self.theta, x, *self.args) for update in updates]
        return jnp.max(jnp.abs(jnp.stack(densities)))


def _few_numbers(memory: PyTree) -> bool:
    """Whether an estimator's memory is small, or has no more than one alternative: pruning decides
    for each of its numbers.
    """
    weight = getattr(memory, "weight", None)
    if weight is None or weight.shape[0] == 1:
        return True
    return sum(leaf.size for leaf in jax.tree.leaves(memory)) <= 2 * _SMALL


def _where(counted: Bool[Array, ""], observed: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.where(counted, leaf, jnp.zeros_like(leaf)), observed)


def _unwatched(observed: Observed) -> Observed:
    """Without what is there for the report alone."""
    return dataclasses.replace(observed, watched=None)


def _with_reading(
    sums: Observed, halves: Observed | None, read: PyTree
) -> tuple[Observed, Observed | None]:
    """With what was read of a block, over its samples and over either half."""
    if read is None:
        return sums, halves

    def plus(observed, part):
        return dataclasses.replace(observed, estimator=_trees.add(observed.estimator, part))

    whole, parts = (jax.tree.map(lambda leaf: leaf[at], read) for at in (0, slice(1, None)))
    return plus(sums, whole), None if halves is None else plus(halves, parts)


def _primal(step: Step) -> PyTree:
    """What decides the primal's path: everything but tangents."""
    plain = lambda state: None if state is None else State(state.x, state.cache)
    parts = (plain(step.before), plain(step.after), step.decisions, plain(step.proposed))
    return without_tangents(parts)


def run(
    simulation: Simulation,
    theta: PyTree,
    key: Key[Array, ""],
    args: tuple[Any, ...],
    *,
    differentiate: bool = True,
    diagnose: bool = False,
) -> Outcome:
    """Runs the chains for `burn_in + num_samples` steps and averages over the last
    `num_samples`; each device of the mesh, if there is one, runs its share of them.
    """
    loop = Loop(simulation, theta, key, args, differentiate, diagnose)
    return shared_out(_run, loop, like=lambda loop: loop.outcome(loop.start()))


@varying
def _run(loop: Loop) -> Outcome:
    block = lambda index, progress: loop.block(index, progress)
    return loop.outcome(jax.lax.fori_loop(0, loop.num_blocks, block, loop.start()))


def advance(
    loop: Loop, progress: Progress, first: Int[Array, ""], last: Int[Array, ""]
) -> tuple[Progress, Outcome]:
    """Takes the chains through the blocks from `first` to before `last`, from their start if that
    is block 0. It is one program for every stretch, so that a run has the same digits however it
    is cut.
    """

    def like(loop: Loop, *_):
        progress = loop.start()
        return progress, loop.outcome(progress)

    return shared_out(_advance, loop, first, last, like=like, carry=progress)


@varying
def _advance(loop: Loop, progress: Progress, first, last) -> tuple[Progress, Outcome]:
    start = lambda _: loop.start()
    progress = jax.lax.cond(first == 0, start, lambda progress: progress, progress)
    block = lambda index, progress: loop.block(index, progress)
    progress = jax.lax.fori_loop(first, last, block, progress)
    return progress, loop.outcome(progress)


def pushed(
    simulation: Simulation, theta: PyTree, key: Key[Array, ""], args: tuple[Any, ...], direction
) -> Float[Array, "F C"]:
    """The derivative of each chain's averages along a direction of θ, by births."""
    simulation = simulation.reading(Forward(direction))
    outcome = run(simulation, theta, key, args)
    explicit = outcome.observed.estimator
    return outcome.gathered if explicit is None else outcome.gathered + explicit


def pulled(
    simulation: Simulation,
    theta: PyTree,
    key: Key[Array, ""],
    args: tuple[Any, ...],
    cotangent: Float[Array, "F C"],
) -> PyTree:
    """`Σ_c ⟨cotangent_c, dm_c⟩` for the averages m of each chain, like θ, by births."""
    simulation = simulation.reading(Backward())
    if simulation.mesh is None:
        return _pull(simulation, theta, key, args, cotangent)
    arrays, static = eqx.partition((simulation, theta, key, args), eqx.is_array)

    def on_device(keys, cotangent, arrays):
        simulation, theta, key, args = eqx.combine(arrays, static)
        return _pull(simulation.share(keys), theta, key, args, cotangent)

    keys = simulation.chain_keys(key)
    return summed_over_shards(on_device, simulation.mesh, keys, cotangent, arrays)


@varying
def _pull(simulation: Simulation, theta, key, args, cotangent: Float[Array, "F C"]) -> PyTree:
    loop = Loop(simulation, theta, key, args, True)
    begin = eqx.tree_at(lambda progress: progress.chains.memory.cotangent, loop.start(), cotangent)
    block = lambda index, progress: loop.block(index, progress)
    return loop.outcome(jax.lax.fori_loop(0, loop.num_blocks, block, begin)).gathered


def shared_out(
    function: Callable[..., PyTree],
    loop: Loop,
    *more: Any,
    like: Callable[..., PyTree],
    carry: PyTree = None,
) -> PyTree:
    """`function(loop, carry, *more)`, or without a carry `function(loop, *more)`; each device of
    the mesh, if there is one, has a loop of its share of the chains. What is carried is in the form
    of the first result, and `like(loop, *more)` has the results' form.
    """
    mesh, num_groups = loop.simulation.mesh, loop.num_groups
    if mesh is None and num_groups == 1:
        return function(loop, *(() if carry is None else (carry,)), *more)
    arrays, static = eqx.partition((loop, more), eqx.is_array)

    def share(keys, arrays):
        loop, more = eqx.combine(arrays, static)
        return loop.share(keys), more

    def on_device(keys, *given):
        *carried, arrays = given
        own, more = share(keys, arrays)
        if mesh is None:
            return function(own, *carried, *more)
        between = carried[0] if carried else None
        return shared_out(function, own, *more, like=like, carry=between)

    def form(keys, arrays):
        own, more = share(keys, arrays)
        return like(own, *more)

    keys = loop.simulation.chain_keys(loop.key)
    if mesh is None:
        return over_groups(on_device, num_groups, keys, arrays, like=form, carry=carry)
    return over_shards(on_device, mesh, keys, arrays, like=form, carry=carry)


def at_home(loop: Loop, like: Callable[[Loop], PyTree], tree: PyTree) -> PyTree:
    """Arrays in the form of `like(loop)`, each chain's with the device that runs it."""
    mesh = loop.simulation.mesh
    if mesh is None:
        return tree
    arrays, static = eqx.partition(loop, eqx.is_array)
    form = lambda keys, arrays: like(eqx.combine(arrays, static).share(keys))
    return placed(tree, form, mesh, loop.simulation.chain_keys(loop.key), arrays)


def joined(outcomes: list[Outcome]) -> Outcome:
    """Of several runs of the same simulation with different keys, as if all were chains of one."""
    if len(outcomes) == 1:
        return outcomes[0]

    def join(path, *leaves):
        # The stretches of a chain are as long in every run.
        lengths = getattr(path[-1], "name", None) in ("length", "lengths")
        return leaves[0] if lengths else jnp.concatenate(leaves, axis=-1)

    return jax.tree_util.tree_map_with_path(join, *outcomes)

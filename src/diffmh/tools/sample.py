"""sample: the draws themselves, as ArviZ has them, written out block by block."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Key, PyTree

from ..adapters.group_marks import STATES
from ..base import validate
from ..base.extras import needing
from ..base.validate import Checked
from ..core import admission
from ..core.adapted import Adapted
from ..core.chain import Chain
from ..core.decisions import acceptances
from ..core.estimator import ValueOnly
from ..core.execute import at_home, shared_out
from ..core.kernel import Kernel
from ..core.loop import Loop, Progress, over_chains
from ..core.plan import Plan
from ..core.recorder import Recorder
from ..core.simulation import Simulation, nothing
from ..fast.shard_map import varying
from ..runs.arrays import ArrayFiles, checksum
from ..runs.checkpoint import Checkpoint, Store, checkpoint_of, fingerprint
from ..runs.devices import Hosts, check_shares
from ..runs.journal import Journal, Part
from ..runs.progress import Bar

if TYPE_CHECKING:
    from xarray import DataTree

# Bytes of draws that wait on the device to be written out, unless the user says otherwise; and
# into how many stretches a run is cut at least, for its bar and its checkpoints.
_WAITING, _STRETCHES = 2**26, 64


class DrawRows(eqx.Module):
    """Draws along the leading axis, chains last: states, how many decisions led from the one before
    and how many of them accepted, and the log density.
    """

    x: PyTree
    decisions: Int[Array, "n C"]
    accepted: Int[Array, "n C"]
    lp: Float[Array, "n C"] | None = None


def sample(
    kernel: Checked[Kernel | Adapted],
    theta: PyTree,
    key: Checked[Key[Array, ""]],
    *args: Any,
    init: PyTree | Callable[[Key[Array, ""]], PyTree] | None = None,
    num_samples: Checked[int],
    num_chains: Checked[int] = 16,
    burn_in: Checked[int] = 0,
    thinning: Checked[int] = 1,
    block_size: Checked[int] | None = None,
    progress: Checked[bool] = False,
    checkpoint: Checked[Checkpoint | str | os.PathLike] | None = None,
    mesh: Checked[Mesh] | None = None,
) -> DataTree:
    """The states of a kernel's chains, as an ArviZ `DataTree` with `posterior` and `sample_stats`.

    They are the chains, bit for bit, that an `expectation` with the same kernel, key and `init`
    averages over: draw `i` of chain `c` is its state after `burn_in + (i + 1)·thinning` steps.

    **Arguments**

    - `kernel`, `theta`, `key`, `args`, `init`, `burn_in`, `num_chains`: as for `expectation`.
    - `num_samples`: how many draws of each chain are kept; there are `thinning` steps between two
      of them.
    - `block_size`: how many draws of each chain are held in memory before they are written out,
      about 64 MB if left out. No other memory is needed beside the result.
    - `progress`: a bar on stderr, where that is a terminal.
    - `checkpoint`: a directory, or `diffmh.Checkpoint`. The draws are then written there, and what
      is returned reads them from disk when they are asked for: memory does not grow with
      `num_samples`. A run that was killed goes on from there with the same draws.
    - `mesh`: as for `expectation`. The draws do not depend on it, and every host gets all of them.

    **Returns** a `DataTree`. Variables of `posterior` are named after the state's leaves (`mu`, or
    `level.0` in a nested state; `x` if the state is a single array), of shape
    `(chain, draw, *leaf)`. `sample_stats` has `acceptance_rate` since the draw before (NaN for a
    kernel without acceptances) and `lp`, the log density (of the first update's, if they differ).

    **Refused**: a start of density zero; a checkpoint of other draws, or a damaged one, or on
    several hosts.

    >>> import jax, diffmh
    >>> density = lambda theta, x: -0.5 * (x["a"] - theta) ** 2 - 0.5 * x["b"] ** 2
    >>> pair = diffmh.MetropolisHastings(density, diffmh.GaussianWalk(1.5))
    >>> start = {"a": 0.0, "b": 0.0}
    >>> draws = diffmh.sample(pair, 0.5, jax.random.key(0), init=start, num_samples=500, thinning=2)
    >>> dict(draws.posterior.sizes), sorted(draws.posterior.data_vars)
    ({'chain': 16, 'draw': 500}, ['a', 'b'])
    """
    count = validate.count(num_chains, "num_chains=...")
    shared = None if mesh is None else check_shares(mesh, count, "sample(mesh=...)")
    walk = walk_of(kernel, theta, key, args, init, num_samples, count, burn_in, thinning, shared)
    if block_size is not None:
        block_size = validate.count(block_size, "sample(block_size=...)")
    progress = validate.flag(progress, "sample(progress=...)")
    place, hosts = checkpoint_of(checkpoint), Hosts(shared)
    if place is not None and hosts.several:
        raise ValueError(
            "`sample(checkpoint=...)` is for one host, and `mesh` has devices of several: leave"
            " `checkpoint` out, or let each host sample chains of its own, with a mesh of its own"
            " devices and a key of its own."
        )
    with (
        hosts.answering("Start the same script again on all hosts, or on fewer."),
        Bar("sample", walk.plan.num_blocks, progress and hosts.leads) as bar,
        contextlib.ExitStack() as stack,
    ):
        hosts.refuse_different("theta, key and args of `sample`", theta, key, args)
        store = None if place is None else stack.enter_context(Store(place))
        arrays = filled(walk, store, block_size, bar)
    return _data_tree(walk, arrays)


class Walk(eqx.Module):
    """A run to be sampled: the chains without derivatives, and how they are thinned."""

    plan: Plan
    theta: PyTree
    key: Key[Array, ""]
    args: tuple[Any, ...]
    thin: int = eqx.field(static=True)

    @property
    def simulation(self) -> Simulation:
        return self.plan.simulation

    @property
    def loop(self) -> Loop:
        none = DrawRecorder(self.simulation.burn_in, self.thin, 0, jnp.zeros((), int))
        return Loop(self.plan, self.theta, self.key, self.args, none)

    @property
    def num_draws(self) -> int:
        return self.simulation.num_samples // self.thin

    @property
    def forms(self) -> list[tuple[tuple[int, ...], np.dtype]]:
        """Shape and type of each array of draws: the state's leaves, acceptance rate and lp."""
        count = (self.simulation.num_chains, self.num_draws)
        real = jnp.zeros(())
        leaves = [*self.plan.leaves, real, real]
        return [((*count, *leaf.shape), np.dtype(leaf.dtype)) for leaf in leaves]

    def draws_before(self, block: int) -> int:
        """The number of draws of each chain before this block."""
        steps = min(block * self.plan.block_steps, self.simulation.num_steps)
        return max(0, steps - self.simulation.burn_in) // self.thin

    def blocks_at_once(self, block_size: int | None) -> int:
        if block_size is None:
            each = sum(math.prod(shape[2:]) * dtype.itemsize for shape, dtype in self.forms)
            block_size = max(1, _WAITING // (each * self.simulation.num_chains))
        by_memory = max(1, block_size * self.thin // self.plan.block_steps)
        return min(by_memory, -(-self.plan.num_blocks // _STRETCHES))


def walk_of(kernel, theta, key, args, init, num_samples, num_chains, burn_in, thin, mesh) -> Walk:
    where = "sample(kernel, theta, key, *args, ...)"
    why = (
        "`sample` returns draws, whose derivative with respect to theta would silently be zero:"
        " differentiate what `diffmh.expectation` returns."
    )
    given = admission.given(kernel, theta, key, args, init, where, why)
    thin = validate.count(thin, "sample(thinning=...)")
    simulation = Simulation(
        given.kernel,
        given.init,
        nothing,
        ValueOnly(),
        validate.count(validate.count(num_samples, "num_samples=...") * thin, "num_samples=..."),
        validate.count(burn_in, "burn_in=...", least=0),
        num_chains,
        mesh=mesh,
    )
    theta, key, args = given.theta, given.key, given.args
    if not validate.concrete(theta, key, args):
        raise TypeError("`sample` writes draws out and cannot be traced: call it outside of `jit`.")
    admission.check_start(simulation, theta, key, args)
    return Walk(Plan.of(simulation, theta, key, args), theta, key, args, thin)


@eqx.filter_jit
def _advance(walk: Walk, chains: Chain, first, last, num_blocks: int) -> tuple[Chain, DrawRows]:
    """Takes the chains through the blocks from `first` to before `last`, at most `num_blocks`; from
    their start if that is block 0. Row 0 is the draw that was not complete when block `first`
    began.
    """
    share = functools.partial(_advance_share, thin=walk.thin, num_blocks=num_blocks)
    return shared_out(share, walk.loop, chains, first, last)


@varying
def _advance_share(loop: Loop, chains: Chain, first, last, *, thin: int, num_blocks: int):
    plan, burn_in = loop.plan, loop.plan.simulation.burn_in
    # A window of `thin` steps may be cut at both ends.
    num_rows = num_blocks * plan.block_steps // thin + 2
    offset = jnp.maximum(first * plan.block_steps - burn_in, 0) // thin
    recorder = DrawRecorder(burn_in, thin, num_rows, offset)
    loop = dataclasses.replace(loop, recorder=recorder)
    chains = jax.lax.cond(first == 0, lambda _: loop.start().chains, lambda same: same, chains)
    rows = recorder.start(loop, loop.stepper.parameters(loop.key), chains)
    progress = Progress(chains, jnp.ones(plan.num_chains, bool), rows)
    progress = loop.blocks(first, last, progress)
    return progress.chains, recorder.result(loop, progress)


class _OpenRows(eqx.Module):
    """Draws so far; `own` counts a step's decisions and accepts."""

    rows: DrawRows
    own: tuple[Int[Array, "C"], Int[Array, "C"]]


class DrawRecorder(Recorder):
    """Keeps every state that is a draw: draw number `offset` in row 0, and what comes before the
    samples in one more row at the end.
    """

    burn_in: int = eqx.field(static=True)
    thin: int = eqx.field(static=True)
    num_rows: int = eqx.field(static=True)
    offset: Int[Array, ""]

    def start(self, loop, parameters, chains) -> DrawRows:
        none = jnp.zeros((self.num_rows + 1, loop.plan.num_chains), int)
        # States of the support, not zeros: the log density is asked of all rows.
        room = lambda leaf: jnp.broadcast_to(leaf, (self.num_rows + 1, *leaf.shape))
        return DrawRows(jax.tree.map(room, chains.state.x), none, none)

    def open_block(self, loop, progress) -> _OpenRows:
        none = jnp.zeros(loop.plan.num_chains, int)
        return _OpenRows(progress.record, (none, none))

    def after_update(self, own, step, events):
        made, taken = acceptances(step.decisions)
        return own[0] + made, own[1] + taken

    def after_step(self, stepper, parameters, chain, own, time):
        return chain, jax.tree.map(jnp.zeros_like, own), (chain.state.x, *own)

    def add(self, block: _OpenRows, own, seen, time, row) -> _OpenRows:
        x, made, taken = seen
        place = (time - self.burn_in) // self.thin - self.offset
        place = jnp.where(time < self.burn_in, self.num_rows, place)
        put = lambda rows, leaf: rows.at[place].set(leaf)
        rows = DrawRows(
            jax.tree.map(put, block.rows.x, x),
            block.rows.decisions.at[place].add(made),
            block.rows.accepted.at[place].add(taken),
        )
        return _OpenRows(rows, own)

    def close_block(self, loop, progress, chains, block: _OpenRows, index):
        return chains, block.rows

    def result(self, loop, progress) -> DrawRows:
        rows: DrawRows = progress.record
        update = loop.plan.simulation.kernel.updates()[0]

        def density(x):
            return update.log_density(loop.theta, x, *loop.args)

        lp = jax.lax.map(over_chains(density), rows.x)
        return DrawRows(rows.x, rows.decisions, rows.accepted, lp)


class _Unfinished(eqx.Module):
    """Between two stretches: where the chains are, and the counts of the draw that is not yet
    complete.
    """

    chains: Chain
    decisions: Int[np.ndarray, "C"]
    accepted: Int[np.ndarray, "C"]


def _begin(walk: Walk) -> _Unfinished:
    chains = eqx.filter_eval_shape(lambda: walk.loop.start().chains)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), chains)
    zeros = at_home(walk.loop, zeros)
    none = np.zeros(walk.simulation.num_chains, np.int32)
    return _Unfinished(zeros, none, none)


def _stretch(walk: Walk, at: _Unfinished, first: int, last: int, num_blocks: int, arrays):
    """Draws the blocks from `first` to before `last` into `arrays`."""
    chains, rows = _advance(walk, at.chains, jnp.int32(first), jnp.int32(last), num_blocks)
    rows = Hosts(walk.simulation.mesh).gathered(rows)
    low, high = walk.draws_before(first), walk.draws_before(last)
    here = slice(0, high - low)
    decisions, accepted = (np.array(count, np.int32) for count in (rows.decisions, rows.accepted))
    decisions[0] += at.decisions
    accepted[0] += at.accepted
    with np.errstate(invalid="ignore"):
        rate = accepted / decisions
    leaves = [*jax.tree.leaves(rows.x), rate, rows.lp]
    for array, leaf in zip(arrays, leaves, strict=True):
        array[:, low:high] = np.moveaxis(np.asarray(leaf)[here], -1, 0)
    # The last row holds the steps before the samples, which count for no draw.
    rest = high - low
    return _Unfinished(chains, decisions[rest], accepted[rest])


def filled(
    walk: Walk, store: Store | None, block_size: int | None, bar: Bar
) -> Sequence[np.ndarray]:
    """The arrays of draws: in memory, or in the store's directory, from where it left them."""
    count, journal = walk.blocks_at_once(block_size), Journal(store)
    # The result of a stretch is the checksum of its draws, which are written at once.
    part = journal.part(_begin(walk), lambda: jnp.uint32(0), lambda: _problem(walk, count))
    files = None if store is None else ArrayFiles(store, walk.forms)
    if files is None:
        arrays = [np.empty(shape, dtype) for shape, dtype in walk.forms]
    else:
        arrays = _on_disk(walk, files, journal, part, count)
    bar.reached(part.done)
    while part.done < walk.plan.num_blocks:
        first, last = part.done, min(part.done + count, walk.plan.num_blocks)
        part.state, part.done = _stretch(walk, part.state, first, last, count, arrays), last
        if files is not None:
            part.results.append(np.uint32(_checksum(walk, arrays, first, count)))
            if journal.due or last == walk.plan.num_blocks:
                # Draws are on the disk before the checkpoint that counts on them.
                files.flush(arrays)
                journal.save()
        bar.reached(last)
    return arrays if files is None else files.open(writable=False)


def _on_disk(
    walk: Walk, files: ArrayFiles, journal: Journal, part: Part, count: int
) -> list[np.memmap]:
    """The arrays of a run with a store. Raises `ValueError` if draws that it has made have changed
    since.
    """
    # The first checkpoint comes before the files: so they are ours wherever there is one.
    if journal.is_new:
        journal.save()
    if part.done == 0:
        files.make()
    unfinished = part.done < walk.plan.num_blocks
    if unfinished:
        journal.refuse_unless_writable()
    arrays = files.open(writable=unfinished)
    for number, expected in enumerate(part.results):
        if _checksum(walk, arrays, number * count, count) != int(expected):
            raise files.damaged()
    return arrays


def _checksum(walk: Walk, arrays: Sequence[np.ndarray], first: int, count: int) -> int:
    return checksum(arrays, walk.draws_before(first), walk.draws_before(first + count))


def _problem(walk: Walk, count: int) -> dict[str, str]:
    # Without the mesh: draws begun on several devices may be continued on any number of them.
    alone = walk.plan.alone()
    begin = _begin(dataclasses.replace(walk, plan=alone))

    def program(theta, key, args, plan, length, start):
        chains, first, last = start
        return _advance(Walk(plan, theta, key, args, walk.thin), chains, first, last, count)

    parts = {"theta": walk.theta, "key": walk.key, "args": walk.args, "kernel or init": alone}
    parts |= {"length": (walk.plan.num_blocks, walk.thin, count)}
    return fingerprint(program, parts | {"start": (begin.chains, jnp.int32(0), jnp.int32(1))})


def names(state: PyTree) -> list[str]:
    """A name for each leaf of a state: its place, with dots; `x` for a state that is one array."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    return [jax.tree_util.keystr(path, simple=True, separator=".") or "x" for path in paths]


def _data_tree(walk: Walk, arrays: Sequence[np.ndarray]) -> DataTree:
    advice = (
        "`sample` returns an ArviZ `DataTree`, and arviz-base is not installed:"
        ' pip install "diffmh[samples]"'
    )
    with needing("arviz_base", advice):
        import arviz_base
    *states, rate, lp = arrays
    posterior = dict(zip(names(walk.plan.state), states, strict=True))
    groups = {"posterior": posterior, "sample_stats": {"acceptance_rate": rate, "lp": lp}}
    tree = arviz_base.from_dict(groups, check_conventions=False)
    for group in groups:
        tree[group].attrs["inference_library"] = "diffmh"
    tree["posterior"].attrs.update(thinning_interval=walk.thin, **STATES)
    return tree
